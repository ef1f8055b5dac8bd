// y = silu(x) * values, y = sigmoid(x) * values and y = gelu(x) * values, in fp32 or rounded for a matmul: a thread takes
// four columns of a row at a time.
#include "matmul_rows.cuh"

struct GateParams {
    const float* x;       // gates; vector i starts at x_offset + i * x_stride
    const float* values;  // [num_vectors][width]
    RowsOutput y;         // rows of `per_row` vectors
    u64 x_offset;
    u64 x_stride;
    u32 num_rows;
    u32 per_row;
    u32 width;
    u32 has_quads;        // everything starts on 16 bytes and is as long as whole quads
};

enum class Kind { SILU, SIGMOID, GELU_TANH };

// Of e^-exponent in the denominator.
template <Kind KIND>
__device__ __forceinline__ float exponent(float x) {
    // x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)
    return KIND == Kind::GELU_TANH ? 1.5957692f * (x * fmaf(0.044715f, x * x, 1.0f)) : x;
}

template <Kind KIND>
__device__ __forceinline__ float gated(float x, float value) {
    // Where the exponential overflows the quotient is the limit, 0.
    const float gate = (KIND == Kind::SIGMOID ? 1.0f : x) / (1.0f + expf(-exponent<KIND>(x)));
    return gate * value;
}

template <Kind KIND>
__device__ __forceinline__ void gate(const GateParams& p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 row_len = p.y.width, row_quads = (row_len + 3) / 4, num_quads = p.num_rows * row_quads;
    for (u32 at = blockIdx.x * blockDim.x + threadIdx.x; at < num_quads; at += gridDim.x * blockDim.x) {
        const u32 row = at / row_quads, first = at % row_quads * 4;
        const float* values = p.values + static_cast<u64>(row) * row_len;
        const auto gate_of = [&](u32 column) {
            return p.x + p.x_offset + (static_cast<u64>(row) * p.per_row + column / p.width) * p.x_stride + column % p.width;
        };
        if (p.has_quads) {
            const float4 x = *reinterpret_cast<const float4*>(gate_of(first)), value = *reinterpret_cast<const float4*>(values + first);
            p.y.store_quad(row, first, {gated<KIND>(x.x, value.x), gated<KIND>(x.y, value.y), gated<KIND>(x.z, value.z), gated<KIND>(x.w, value.w)});
        } else {
            for (u32 column = first; column < min(first + 4, row_len); column++) {
                p.y.store(row, column, gated<KIND>(*gate_of(column), values[column]));
            }
        }
        if (first + 4 >= row_len) p.y.pad(row, 0, 1);
    }
}

extern "C" __global__ void gate_silu(const __grid_constant__ GateParams p) { gate<Kind::SILU>(p); }
extern "C" __global__ void gate_sigmoid(const __grid_constant__ GateParams p) { gate<Kind::SIGMOID>(p); }
extern "C" __global__ void gate_gelu_tanh(const __grid_constant__ GateParams p) { gate<Kind::GELU_TANH>(p); }
