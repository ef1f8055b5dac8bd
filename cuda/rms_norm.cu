// y = x * rsqrt(mean(x^2) + eps) * weight, vector by vector, in fp32 or rounded for a matmul; or y = (y + that) * factor.
//
// A warp takes a short vector, a block a long one: which of the two follows from the width alone, and so does the order
// of the sum: quads of columns in turn over the threads, a chain per thread, then the tree of block_reduce.cuh. What a
// thread has of the vector and of the weight stays in registers; weights are read while the predecessor still runs.
#include "block_reduce.cuh"
#include "matmul_rows.cuh"

constexpr u32 LONG_WARPS = 20;    // of a long vector: 5120 columns are two quads a thread
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

__device__ __forceinline__ float4 load_quad(const RmsNormParams& p, const float* vector, u32 first) {
    float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
    if (p.has_quads) {
        if (first < p.width) quad = *reinterpret_cast<const float4*>(vector + first);
        return quad;
    }
    if (first < p.width) quad.x = vector[first];
    if (first + 1 < p.width) quad.y = vector[first + 1];
    if (first + 2 < p.width) quad.z = vector[first + 2];
    if (first + 3 < p.width) quad.w = vector[first + 3];
    return quad;
}

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

__device__ __forceinline__ float add_squares(float4 quad, float sum) {
    return fmaf(quad.w, quad.w, fmaf(quad.z, quad.z, fmaf(quad.y, quad.y, fmaf(quad.x, quad.x, sum))));
}

__device__ __forceinline__ float4 scaled(float4 quad, float scale) {
    return {quad.x * scale, quad.y * scale, quad.z * scale, quad.w * scale};
}

// A thread's part of a vector: quads `thread`, `thread + THREADS` and so on, QUADS of them in registers, the rest read twice.
template <u32 THREADS, u32 QUADS>
struct VectorPart {
    const RmsNormParams& p;
    const u32 thread;
    float4 weights[QUADS], values[QUADS];

    __device__ __forceinline__ VectorPart(const RmsNormParams& params, u32 index) : p(params), thread(index) {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) weights[i] = p.weight ? load_quad(p, p.weight, place(i)) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }

    __device__ __forceinline__ u32 place(u32 i) const { return (i * THREADS + thread) * 4; }

    __device__ __forceinline__ float sum_of_squares(const float* x) {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) values[i] = load_quad(p, x, place(i));
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) sum = add_squares(values[i], sum);
        for (u32 i = QUADS; place(i) < p.width; i++) sum = add_squares(load_quad(p, x, place(i)), sum);
        return sum;
    }

    __device__ __forceinline__ static float4 product(float4 value, float scale, float4 weight) {
        const float4 y = scaled(value, scale);
        return {y.x * weight.x, y.y * weight.y, y.z * weight.z, y.w * weight.w};
    }

    __device__ __forceinline__ void finish(u32 vector, u32 first, float4 normed) const {
        if (p.adds) {
            const float4 sum = load_quad(p, p.y.values + static_cast<u64>(vector) * p.width, first);
            normed = {__fmul_rn(__fadd_rn(sum.x, normed.x), p.factor), __fmul_rn(__fadd_rn(sum.y, normed.y), p.factor),
                      __fmul_rn(__fadd_rn(sum.z, normed.z), p.factor), __fmul_rn(__fadd_rn(sum.w, normed.w), p.factor)};
        }
        store_quad(p, vector, first, normed);
    }

    __device__ __forceinline__ void normalise(const float* x, u32 vector, float sum) const {
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) finish(vector, place(i), product(values[i], scale, weights[i]));
        for (u32 i = QUADS; place(i) < p.width; i++) {
            const float4 weight = p.weight ? load_quad(p, p.weight, place(i)) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
            finish(vector, place(i), product(load_quad(p, x, place(i)), scale, weight));
        }
        p.y.pad(vector, thread, THREADS);
    }
};

extern "C" __global__ void __launch_bounds__(SHORT_VECTORS* WARP_LANES) rms_norm_short(const __grid_constant__ RmsNormParams p) {
    const u32 i = blockIdx.x * SHORT_VECTORS + threadIdx.x / WARP_LANES;
    VectorPart<WARP_LANES, 4> part(p, threadIdx.x % WARP_LANES);
    launch_dependents();
    wait_for_predecessors();
    if (i >= p.num_vectors) return;
    const float* x = p.x + p.x_offset + i * p.x_stride;
    const float sum = warp_sum(part.sum_of_squares(x));
    part.normalise(x, i, sum);
}

extern "C" __global__ void __launch_bounds__(LONG_WARPS* WARP_LANES) rms_norm_long(const __grid_constant__ RmsNormParams p) {
    VectorPart<LONG_WARPS * WARP_LANES, 4> part(p, threadIdx.x);
    launch_dependents();
    wait_for_predecessors();
    const float* x = p.x + p.x_offset + blockIdx.x * p.x_stride;
    const float sum = block_sum<LONG_WARPS>(part.sum_of_squares(x));
    part.normalise(x, blockIdx.x, sum);
}
