// A thread's part of a vector that is normalised: x * rsqrt(mean(x^2) + eps) * weight.
//
// The order of the sum follows from the number of threads alone: quads of columns in turn over the threads, a chain per
// thread, then the tree of block_reduce.cuh. What a thread has of the vector and of the weight stays in registers; weights
// may be read while the predecessor still runs.
#pragma once

#include "block_reduce.cuh"

// Columns `first` .. `first + 3` of a vector, zero behind its end; `has_quads` where it starts on 16 bytes and its length is
// a multiple of four.
__device__ __forceinline__ float4 load_quad(const float* vector, u32 first, u32 width, bool has_quads) {
    float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
    if (has_quads) {
        if (first < width) quad = *reinterpret_cast<const float4*>(vector + first);
        return quad;
    }
    if (first < width) quad.x = vector[first];
    if (first + 1 < width) quad.y = vector[first + 1];
    if (first + 2 < width) quad.z = vector[first + 2];
    if (first + 3 < width) quad.w = vector[first + 3];
    return quad;
}

// Quads `thread`, `thread + THREADS` and so on, QUADS of them in registers, the rest read twice.
template <u32 THREADS, u32 QUADS>
struct NormPart {
    const float* weight;  // or null
    u32 width, thread;
    bool has_quads;
    float4 weights[QUADS], values[QUADS];

    __device__ __forceinline__ NormPart(const float* of_weight, u32 of_width, bool of_quads, u32 index)
        : weight(of_weight), width(of_width), thread(index), has_quads(of_quads) {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) weights[i] = weight_quad(place(i));
    }

    __device__ __forceinline__ u32 place(u32 i) const { return (i * THREADS + thread) * 4; }

    __device__ __forceinline__ float4 weight_quad(u32 first) const {
        return weight ? load_quad(weight, first, width, has_quads) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    }

    __device__ __forceinline__ void load(const float* x) {
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) values[i] = load_quad(x, place(i), width, has_quads);
    }

    __device__ __forceinline__ static float add_squares(float4 quad, float sum) {
        return fmaf(quad.w, quad.w, fmaf(quad.z, quad.z, fmaf(quad.y, quad.y, fmaf(quad.x, quad.x, sum))));
    }

    // Of the thread's quads, which have been loaded from `x`.
    __device__ __forceinline__ float sum_of_squares(const float* x) const {
        float sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) sum = add_squares(values[i], sum);
        for (u32 i = QUADS; place(i) < width; i++) sum = add_squares(load_quad(x, place(i), width, has_quads), sum);
        return sum;
    }

    __device__ __forceinline__ static float4 product(float4 value, float scale, float4 by) {
        const float4 y = {value.x * scale, value.y * scale, value.z * scale, value.w * scale};
        return {y.x * by.x, y.y * by.y, y.z * by.z, y.w * by.w};
    }

    // Calls take(first column, quad) for the thread's quads, given the sum over all threads.
    template <typename Take>
    __device__ __forceinline__ void normalise(const float* x, float sum, float eps, Take take) const {
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(width) + eps);
#pragma unroll
        for (u32 i = 0; i < QUADS; i++) take(place(i), product(values[i], scale, weights[i]));
        for (u32 i = QUADS; place(i) < width; i++) {
            take(place(i), product(load_quad(x, place(i), width, has_quads), scale, weight_quad(place(i))));
        }
    }
};
