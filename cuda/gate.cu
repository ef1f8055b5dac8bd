// y = silu(x) * y, y = sigmoid(x) * y and y = gelu(x) * y, vector by vector and in place.
#include "async_copy.cuh"

struct GateParams {
    const float* x;  // vector i starts at x_offset + i * x_stride
    float* y;        // [num_vectors][width]
    u64 x_offset;
    u64 x_stride;
    u32 num_vectors;
    u32 width;
};

enum class Kind { SILU, SIGMOID, GELU_TANH };

// Of e^-exponent in the denominator.
template <Kind KIND>
__device__ __forceinline__ float exponent(float x) {
    // x / 2 * (1 + tanh(u)) = x / (1 + e^-2u) with u = sqrt(2 / pi) * (x + 0.044715 x^3)
    return KIND == Kind::GELU_TANH ? 1.5957692f * (x * fmaf(0.044715f, x * x, 1.0f)) : x;
}

template <Kind KIND>
__device__ __forceinline__ void gate(const GateParams& p) {
    launch_dependents();
    wait_for_predecessors();
    const u64 num_values = static_cast<u64>(p.num_vectors) * p.width;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_values; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const float x = p.x[p.x_offset + i / p.width * p.x_stride + i % p.width];
        // Where the exponential overflows the quotient is the limit, 0.
        const float gate = (KIND == Kind::SIGMOID ? 1.0f : x) / (1.0f + expf(-exponent<KIND>(x)));
        p.y[i] = gate * p.y[i];
    }
}

extern "C" __global__ void gate_silu(const __grid_constant__ GateParams p) { gate<Kind::SILU>(p); }
extern "C" __global__ void gate_sigmoid(const __grid_constant__ GateParams p) { gate<Kind::SIGMOID>(p); }
extern "C" __global__ void gate_gelu_tanh(const __grid_constant__ GateParams p) { gate<Kind::GELU_TANH>(p); }
