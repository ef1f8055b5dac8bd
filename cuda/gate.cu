// y = silu(x) * values, y = sigmoid(x) * values and y = gelu(x) * values, in fp32 or rounded for a matmul: a thread takes
// up to five quads of columns at a time.
#include "matmul_rows.cuh"

constexpr u32 BLOCK_THREADS = 256;  // as the launcher has them
// So no more than 64 registers: 16,384 of a block are what NEIGHBOUR_THREADS of wgmma_matmul.cuh leave beside a matmul.
constexpr u32 MIN_BLOCKS = 4;
constexpr u32 QUADS_AT_ONCE = 5;  // as `Shape::of_few_values` takes for granted

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

struct Gates {
    const GateParams& p;
    u32 row_len, row_quads, num_quads;

    __device__ __forceinline__ Gates(const GateParams& params) : p(params) {
        row_len = p.y.width, row_quads = (row_len + 3) / 4, num_quads = p.num_rows * row_quads;
    }

    __device__ __forceinline__ const float* gate_of(u32 row, u32 column) const {
        return p.x + p.x_offset + (static_cast<u64>(row) * p.per_row + column / p.width) * p.x_stride + column % p.width;
    }

    __device__ __forceinline__ const float* value_of(u32 row, u32 column) const {
        return p.values + static_cast<u64>(row) * row_len + column;
    }

    __device__ __forceinline__ void pad_behind(u32 row, u32 first) const {
        if (first + 4 >= row_len) p.y.pad(row, 0, 1);
    }

    // Quads `at`, `at + step` and so on: all loads before the first store.
    template <Kind KIND, u32 COUNT>
    __device__ __forceinline__ void take_quads(u32 at, u32 step) const {
        float4 x[COUNT], values[COUNT];
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const u32 quad = min(at + i * step, num_quads - 1), row = quad / row_quads, first = quad % row_quads * 4;
            x[i] = *reinterpret_cast<const float4*>(gate_of(row, first));
            values[i] = *reinterpret_cast<const float4*>(value_of(row, first));
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const u32 quad = at + i * step, row = quad / row_quads, first = quad % row_quads * 4;
            if (quad >= num_quads) return;
            p.y.store_quad(row, first, {gated<KIND>(x[i].x, values[i].x), gated<KIND>(x[i].y, values[i].y),
                                        gated<KIND>(x[i].z, values[i].z), gated<KIND>(x[i].w, values[i].w)});
            pad_behind(row, first);
        }
    }

    // A quad of columns, one by one, as many as there are.
    template <Kind KIND>
    __device__ __forceinline__ void take_columns(u32 quad) const {
        const u32 row = quad / row_quads, first = quad % row_quads * 4;
        for (u32 column = first; column < min(first + 4, row_len); column++) {
            p.y.store(row, column, gated<KIND>(*gate_of(row, column), *value_of(row, column)));
        }
        pad_behind(row, first);
    }
};

template <Kind KIND>
__device__ __forceinline__ void gate(const GateParams& p) {
    launch_dependents();
    wait_for_predecessors();
    const Gates gates(p);
    const u32 thread = blockIdx.x * BLOCK_THREADS + threadIdx.x, step = gridDim.x * BLOCK_THREADS;
    if (p.has_quads && gates.num_quads <= step) {
        if (thread < gates.num_quads) gates.take_quads<KIND, 1>(thread, step);
    } else if (p.has_quads) {
        for (u32 at = thread; at < gates.num_quads; at += QUADS_AT_ONCE * step) gates.take_quads<KIND, QUADS_AT_ONCE>(at, step);
    } else {
        for (u32 at = thread; at < gates.num_quads; at += step) gates.take_columns<KIND>(at);
    }
}

#define GATE_KERNEL(NAME, KIND) \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, MIN_BLOCKS) NAME(const __grid_constant__ GateParams p) { gate<KIND>(p); }

GATE_KERNEL(gate_silu, Kind::SILU)
GATE_KERNEL(gate_sigmoid, Kind::SIGMOID)
GATE_KERNEL(gate_gelu_tanh, Kind::GELU_TANH)
