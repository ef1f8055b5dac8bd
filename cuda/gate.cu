// y = silu(x) * y and y = sigmoid(x) * y, vector by vector and in place.
#include "async_copy.cuh"

struct GateParams {
    const float* x;  // vector i starts at x_offset + i * x_stride
    float* y;        // [num_vectors][width]
    u64 x_offset;
    u64 x_stride;
    u32 num_vectors;
    u32 width;
};

template <bool IS_SILU>
__device__ __forceinline__ void gate(const GateParams& p) {
    launch_dependents();
    wait_for_predecessors();
    const u64 num_values = static_cast<u64>(p.num_vectors) * p.width;
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_values; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const float x = p.x[p.x_offset + i / p.width * p.x_stride + i % p.width];
        // Where the exponential overflows the quotient is the limit, 0.
        const float gate = (IS_SILU ? x : 1.0f) / (1.0f + expf(-x));
        p.y[i] = gate * p.y[i];
    }
}

extern "C" __global__ void gate_silu(const __grid_constant__ GateParams p) { gate<true>(p); }
extern "C" __global__ void gate_sigmoid(const __grid_constant__ GateParams p) { gate<false>(p); }
