// The id of the largest logit of every row, the lowest among equals; a NaN never wins, nor does a masked id.
//
// A logit and its id make a key, whose maximum is the answer whatever the order in which it is found. First blocks take
// parts of a row, then a warp takes a row's parts.
#include "block_reduce.cuh"
#include "logit_keys.cuh"

constexpr u32 BLOCK_WARPS = 8;
constexpr u32 PART_LEN = 4096;  // ids of a block
constexpr u32 MASK_WORDS = PART_LEN / 32;

struct GreedyArgmaxParams {
    const float* logits;       // [num_rows][vocab_size]
    const u32* mask_starts;    // [num_rows + 1]
    const u32* masked;         // ids that may not be chosen, row by row
    u64* keys;                 // [num_rows][num_parts]
    u32* token_ids;            // [num_rows]
    float* best_logits;        // [num_rows]
    u32 num_rows;
    u32 vocab_size;
    u32 num_parts;
};

extern "C" __global__ void __launch_bounds__(BLOCK_WARPS* WARP_LANES) greedy_argmax_parts(const __grid_constant__ GreedyArgmaxParams p) {
    __shared__ u32 mask[MASK_WORDS];
    launch_dependents();
    wait_for_predecessors();
    const u32 row = blockIdx.x / p.num_parts, part = blockIdx.x % p.num_parts;
    const u32 first = part * PART_LEN, end = min(first + PART_LEN, p.vocab_size);
    const u32 mask_start = p.mask_starts[row], mask_end = p.mask_starts[row + 1];
    for (u32 i = threadIdx.x; i < MASK_WORDS; i += BLOCK_WARPS * WARP_LANES) mask[i] = 0;
    __syncthreads();
    for (u32 i = mask_start + threadIdx.x; i < mask_end; i += BLOCK_WARPS * WARP_LANES) {
        const u32 id = p.masked[i];
        if (id >= first && id < end) atomicOr(mask + (id - first) / 32, 1u << (id - first) % 32);
    }
    __syncthreads();
    const float* logits = p.logits + static_cast<u64>(row) * p.vocab_size;
    u64 best = 0;
    for (u32 id = first + threadIdx.x; id < end; id += BLOCK_WARPS * WARP_LANES) {
        const u64 key = logit_key(logits[id], id);
        if (!(mask[(id - first) / 32] >> (id - first) % 32 & 1)) best = max(best, key);
    }
    best = block_max<BLOCK_WARPS>(best);
    if (threadIdx.x == 0) p.keys[blockIdx.x] = best;
}

extern "C" __global__ void __launch_bounds__(WARP_LANES) greedy_argmax_rows(const __grid_constant__ GreedyArgmaxParams p) {
    launch_dependents();
    wait_for_predecessors();
    u64 best = 0;
    for (u32 part = threadIdx.x; part < p.num_parts; part += WARP_LANES) best = max(best, p.keys[blockIdx.x * p.num_parts + part]);
    best = warp_max(best);
    const u32 id = id_of_key(best);
    if (threadIdx.x == 0) {
        p.token_ids[blockIdx.x] = id;
        p.best_logits[blockIdx.x] = p.logits[static_cast<u64>(blockIdx.x) * p.vocab_size + id];
    }
}
