// Vectors to BF16, after a norm, a gate or both: what cuBLASLt takes as activations.
//
// Threads take quads of columns. A norm gives a short vector to a warp and a long one to a block.
#include "block_reduce.cuh"
#include "mma.cuh"

constexpr u32 SHORT_VECTORS = 8;
constexpr u32 LONG_WARPS = 20;

// `per_row` vectors in a row, `stride` apart; rows `row_stride` apart.
struct Vectors {
    const float* values;
    u64 offset;
    u64 row_stride;
    u32 stride;
    u32 per_row;

    __device__ __forceinline__ const float* vector(u32 i) const {
        return values + offset + i / per_row * row_stride + static_cast<u64>(i % per_row) * stride;
    }
};

struct RoundRowsParams {
    Vectors x;
    Vectors gates;
    const float* weight;
    u16* y;  // [num_vectors][width]
    u32 num_vectors;
    u32 width;
    float eps;
    u32 gate_kind;  // 0: none, 1: silu, 2: sigmoid, 3: gelu with its tanh
    u32 has_quads;  // everything starts on 16 bytes and is as long as whole quads
};

__device__ __forceinline__ float4 load_quad(const RoundRowsParams& p, const float* vector, u32 first) {
    if (p.has_quads) return *reinterpret_cast<const float4*>(vector + first);
    float4 quad = {0.0f, 0.0f, 0.0f, 0.0f};
    quad.x = vector[first];
    if (first + 1 < p.width) quad.y = vector[first + 1];
    if (first + 2 < p.width) quad.z = vector[first + 2];
    if (first + 3 < p.width) quad.w = vector[first + 3];
    return quad;
}

__device__ __forceinline__ float gated(u32 kind, float gate, float x) {
    // Where the exponential overflows the quotient is the limit, 0.
    const float exponent = kind == 3 ? 1.5957692f * (gate * fmaf(0.044715f, gate * gate, 1.0f)) : gate;
    return (kind == 2 ? 1.0f : gate) / (1.0f + expf(-exponent)) * x;
}

// Gates and rounds four columns of a vector.
__device__ __forceinline__ void finish_quad(const RoundRowsParams& p, u32 i, u32 first, float4 value) {
    if (p.gate_kind != 0) {
        const float4 gate = load_quad(p, p.gates.vector(i), first);
        value = {gated(p.gate_kind, gate.x, value.x), gated(p.gate_kind, gate.y, value.y), gated(p.gate_kind, gate.z, value.z),
                 gated(p.gate_kind, gate.w, value.w)};
    }
    u16* to = p.y + static_cast<u64>(i) * p.width + first;
    const uint2 rounded = {pack_bf16(value.x, value.y), pack_bf16(value.z, value.w)};
    if (p.has_quads) {
        *reinterpret_cast<uint2*>(to) = rounded;
        return;
    }
    to[0] = static_cast<u16>(rounded.x);
    if (first + 1 < p.width) to[1] = static_cast<u16>(rounded.x >> 16);
    if (first + 2 < p.width) to[2] = static_cast<u16>(rounded.y);
    if (first + 3 < p.width) to[3] = static_cast<u16>(rounded.y >> 16);
}

extern "C" __global__ void round_rows(const __grid_constant__ RoundRowsParams p) {
    wait_for_predecessors();
    launch_dependents();
    const u32 quads = (p.width + 3) / 4;
    const u64 num_quads = static_cast<u64>(p.num_vectors) * quads;
    for (u64 at = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; at < num_quads; at += static_cast<u64>(gridDim.x) * blockDim.x) {
        const u32 i = static_cast<u32>(at / quads), first = static_cast<u32>(at % quads) * 4;
        finish_quad(p, i, first, load_quad(p, p.x.vector(i), first));
    }
}

// The part of thread `thread` of THREADS: quads in turn, QUADS of them in registers, the rest read twice.
template <u32 THREADS, u32 QUADS>
struct NormedPart {
    const RoundRowsParams& p;
    const u32 i, thread;
    const float* x;
    float4 values[QUADS];

    __device__ __forceinline__ NormedPart(const RoundRowsParams& params, u32 vector, u32 index)
        : p(params), i(vector), thread(index), x(params.x.vector(vector)) {}

    __device__ __forceinline__ u32 place(u32 n) const { return (n * THREADS + thread) * 4; }

    __device__ __forceinline__ static float add_squares(float4 quad, float sum) {
        return fmaf(quad.w, quad.w, fmaf(quad.z, quad.z, fmaf(quad.y, quad.y, fmaf(quad.x, quad.x, sum))));
    }

    __device__ __forceinline__ float sum_of_squares() {
        float sum = 0.0f;
#pragma unroll
        for (u32 n = 0; n < QUADS; n++) {
            values[n] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (place(n) < p.width) values[n] = load_quad(p, x, place(n));
        }
#pragma unroll
        for (u32 n = 0; n < QUADS; n++) sum = add_squares(values[n], sum);
        for (u32 n = QUADS; place(n) < p.width; n++) sum = add_squares(load_quad(p, x, place(n)), sum);
        return sum;
    }

    __device__ __forceinline__ void finish(u32 n, float4 value, float scale) const {
        const float4 weight = load_quad(p, p.weight, place(n));
        finish_quad(p, i, place(n), {value.x * scale * weight.x, value.y * scale * weight.y, value.z * scale * weight.z,
                                     value.w * scale * weight.w});
    }

    __device__ __forceinline__ void finish_all(float sum) const {
        const float scale = 1.0f / sqrtf(sum / static_cast<float>(p.width) + p.eps);
#pragma unroll
        for (u32 n = 0; n < QUADS; n++) {
            if (place(n) < p.width) finish(n, values[n], scale);
        }
        for (u32 n = QUADS; place(n) < p.width; n++) finish(n, load_quad(p, x, place(n)), scale);
    }
};

extern "C" __global__ void __launch_bounds__(SHORT_VECTORS* WARP_LANES) round_normed_short(const __grid_constant__ RoundRowsParams p) {
    const u32 i = blockIdx.x * SHORT_VECTORS + threadIdx.x / WARP_LANES;
    wait_for_predecessors();
    launch_dependents();
    if (i >= p.num_vectors) return;
    NormedPart<WARP_LANES, 4> part(p, i, threadIdx.x % WARP_LANES);
    part.finish_all(warp_sum(part.sum_of_squares()));
}

extern "C" __global__ void __launch_bounds__(LONG_WARPS* WARP_LANES) round_normed_long(const __grid_constant__ RoundRowsParams p) {
    wait_for_predecessors();
    launch_dependents();
    NormedPart<LONG_WARPS * WARP_LANES, 4> part(p, blockIdx.x, threadIdx.x);
    part.finish_all(block_sum<LONG_WARPS>(part.sum_of_squares()));
}
