// y = x * rsqrt(mean(x^2) + eps) * weight, vector by vector.
//
// A warp takes a short vector, a block a long one: which of the two follows from the width alone, and so does the order
// of the sum: quads of columns in turn over the threads, a chain per thread, then the tree of block_reduce.cuh.
#include "block_reduce.cuh"

constexpr u32 BLOCK_WARPS = 16;   // of a long vector
constexpr u32 SHORT_VECTORS = 8;  // of a block of short ones

struct RmsNormParams {
    const float* x;       // vector i starts at x_offset + i * x_stride
    const float* weight;  // [width], or null
    float* y;             // [num_vectors][width]
    u64 x_offset;
    u64 x_stride;
    u32 num_vectors;
    u32 width;
    float eps;
};

__device__ __forceinline__ float sum_of_squares(const float* x, u32 width, u32 thread, u32 num_threads) {
    float sum = 0.0f;
    for (u32 first = thread * 4; first < width; first += num_threads * 4) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (first + i < width) sum += x[first + i] * x[first + i];
        }
    }
    return sum;
}

__device__ __forceinline__ void normalise(const RmsNormParams& p, const float* x, float* y, float sum, u32 thread, u32 num_threads) {
    const float scale = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
    for (u32 i = thread; i < p.width; i += num_threads) y[i] = p.weight ? x[i] * scale * p.weight[i] : x[i] * scale;
}

extern "C" __global__ void __launch_bounds__(SHORT_VECTORS* WARP_LANES) rms_norm_short(const __grid_constant__ RmsNormParams p) {
    wait_for_predecessors();
    launch_dependents();
    const u32 i = blockIdx.x * SHORT_VECTORS + threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    if (i >= p.num_vectors) return;
    const float* x = p.x + p.x_offset + i * p.x_stride;
    const float sum = warp_sum(sum_of_squares(x, p.width, lane, WARP_LANES));
    normalise(p, x, p.y + static_cast<u64>(i) * p.width, sum, lane, WARP_LANES);
}

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS* WARP_LANES) rms_norm_long(const __grid_constant__ RmsNormParams p) {
    wait_for_predecessors();
    launch_dependents();
    const float* x = p.x + p.x_offset + blockIdx.x * p.x_stride;
    const float sum = block_sum<BLOCK_WARPS>(sum_of_squares(x, p.width, threadIdx.x, BLOCK_WARPS * WARP_LANES));
    normalise(p, x, p.y + static_cast<u64>(blockIdx.x) * p.width, sum, threadIdx.x, BLOCK_WARPS * WARP_LANES);
}
