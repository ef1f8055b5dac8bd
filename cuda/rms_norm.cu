// y = x * rsqrt(mean(x^2) + eps) * weight, vector by vector, in fp32 or rounded for a matmul; or y = (y + that) * factor.
//
// A warp takes a short vector, a block a long one: which of the two follows from the width alone, and so does the order
// of the sum.
#include "matmul_rows.cuh"
#include "norm_part.cuh"

constexpr u32 LONG_WARPS = 20;    // of a long vector: 5120 columns are two quads a thread
constexpr u32 LONG_QUADS = 3;     // that a thread keeps in registers: with more, a multiprocessor would hold one block only
constexpr u32 SHORT_VECTORS = 8;  // of a block of short ones

struct RmsNormParams {
    const float* x;       // vector i starts at x_offset + i * x_stride
    const float* weight;  // [width], or null
    RowsOutput y;         // a row for each vector
    u64 x_offset;
    u64 x_stride;
    u32 num_vectors;
    u32 width;
    float eps;
    u32 has_quads;        // everything starts on 16 bytes and is as long as whole quads
    float factor;
    u32 adds;             // to what y.values holds
};

__device__ __forceinline__ void store_quad(const RmsNormParams& p, u32 vector, u32 first, float4 quad) {
    if (p.has_quads) {
        if (first < p.width) p.y.store_quad(vector, first, quad);
        return;
    }
    if (first < p.width) p.y.store(vector, first, quad.x);
    if (first + 1 < p.width) p.y.store(vector, first + 1, quad.y);
    if (first + 2 < p.width) p.y.store(vector, first + 2, quad.z);
    if (first + 3 < p.width) p.y.store(vector, first + 3, quad.w);
}

template <class Part>
__device__ __forceinline__ void finish(const RmsNormParams& p, const Part& part, const float* x, u32 vector, float sum, u32 threads) {
    part.normalise(x, sum, p.eps, [&](u32 first, float4 normed) {
        if (p.adds) {
            const float4 y = load_quad(p.y.values + static_cast<u64>(vector) * p.width, first, p.width, p.has_quads);
            normed = {__fmul_rn(__fadd_rn(y.x, normed.x), p.factor), __fmul_rn(__fadd_rn(y.y, normed.y), p.factor),
                      __fmul_rn(__fadd_rn(y.z, normed.z), p.factor), __fmul_rn(__fadd_rn(y.w, normed.w), p.factor)};
        }
        store_quad(p, vector, first, normed);
    });
    p.y.pad(vector, part.thread, threads);
}

extern "C" __global__ void __launch_bounds__(SHORT_VECTORS* WARP_LANES) rms_norm_short(const __grid_constant__ RmsNormParams p) {
    const u32 i = blockIdx.x * SHORT_VECTORS + threadIdx.x / WARP_LANES;
    NormPart<WARP_LANES, 4> part(p.weight, p.width, p.has_quads, threadIdx.x % WARP_LANES);
    launch_dependents();
    wait_for_predecessors();
    if (i >= p.num_vectors) return;
    const float* x = p.x + p.x_offset + i * p.x_stride;
    part.load(x);
    finish(p, part, x, i, warp_sum(part.sum_of_squares(x)), WARP_LANES);
}

extern "C" __global__ void __launch_bounds__(LONG_WARPS* WARP_LANES) rms_norm_long(const __grid_constant__ RmsNormParams p) {
    NormPart<LONG_WARPS * WARP_LANES, LONG_QUADS> part(p.weight, p.width, p.has_quads, threadIdx.x);
    launch_dependents();
    wait_for_predecessors();
    const float* x = p.x + p.x_offset + blockIdx.x * p.x_stride;
    part.load(x);
    finish(p, part, x, blockIdx.x, block_sum<LONG_WARPS>(part.sum_of_squares(x)), LONG_WARPS * WARP_LANES);
}
