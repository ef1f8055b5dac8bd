// From a drafter's logits to the candidates of every row and their log-probabilities.
//
// Blocks find the best of parts of a row (`draft_select_parts`), then a row's best among these (`draft_select_rows`): a
// logit and its id make a key (logit_keys.cuh). With a selector, a block per row scores its candidates after each
// candidate of the level before (`draft_select_scores`).
// All sums run in one order, so a draft is the same however often it is made.
#include "logit_keys.cuh"
#include "packed_rows.cuh"
#include "top_keys.cuh"

struct DraftSelectParams {
    const float* logits;        // [levels][blocks][vocab_size]
    const float* gate;          // [levels][blocks][rank], or null without a selector
    const u8* predecessor;      // [vocab_size][rank], in fragment order
    const u8* successor;
    const u32* anchor_tokens;   // [blocks]
    u64* keys;                  // [rows][num_parts][top_k], best first
    float2* sums;               // [rows][num_parts]: largest score, sum of exponentials relative to it
    u32* token_ids;             // [rows][top_k]
    float* log_probs;           // [rows][top_k], or with a selector [rows][top_k (before)][top_k]
    u32 num_rows;
    u32 num_blocks;
    u32 vocab_size;
    u32 num_parts;
    u32 top_k;
    u32 rank;
    float multiplier;
    float softcap;              // 0 without
};

__device__ __forceinline__ float score_of(const DraftSelectParams& p, float logit) {
    const float scaled = logit * p.multiplier;
    if (p.softcap == 0.0f) return scaled;
    // c * tanh(l / c) = c - 2c / (e^(2l / c) + 1)
    return p.softcap - 2.0f * p.softcap / (expf(scaled * (2.0f / p.softcap)) + 1.0f);
}

extern "C" __global__ void __launch_bounds__(TOP_THREADS) draft_select_parts(const __grid_constant__ DraftSelectParams p) {
    __shared__ TopKeys top;
    launch_dependents();
    wait_for_predecessors();
    const u32 row = blockIdx.x / p.num_parts, part = blockIdx.x % p.num_parts;
    const float* logits = p.logits + static_cast<u64>(row) * p.vocab_size;
    u64 keys[THREAD_KEYS], best = 0;
#pragma unroll
    for (u32 i = 0; i < THREAD_KEYS; i++) {
        const u32 id = part * BLOCK_KEYS + i * TOP_THREADS + threadIdx.x;
        keys[i] = id < p.vocab_size ? logit_key(logits[id], id) : 0;
        best = max(best, keys[i]);
    }
    top.pick(keys, p.top_k, p.keys + static_cast<u64>(blockIdx.x) * p.top_k);
    if (p.gate != nullptr) return;
    const float largest = score_of(p, logit_of_key(block_max<TOP_WARPS>(best)));
    float sum = 0.0f;
#pragma unroll
    for (u32 i = 0; i < THREAD_KEYS; i++) sum += keys[i] == 0 ? 0.0f : expf(score_of(p, logit_of_key(keys[i])) - largest);
    sum = block_sum<TOP_WARPS>(sum);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = {largest, sum};
}

extern "C" __global__ void __launch_bounds__(TOP_THREADS) draft_select_rows(const __grid_constant__ DraftSelectParams p) {
    __shared__ TopKeys top;
    __shared__ u64 best[MAX_TOP_K];
    launch_dependents();
    wait_for_predecessors();
    const u32 row = blockIdx.x, num_keys = p.num_parts * p.top_k;
    const u64* of_parts = p.keys + static_cast<u64>(row) * num_keys;
    const u32 step = BLOCK_KEYS - p.top_k;
    for (u32 first = 0; first < num_keys; first += step) {
        // The best so far stand among the next.
        u64 keys[THREAD_KEYS];
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < THREAD_KEYS; i++) {
            const u32 place = i * TOP_THREADS + threadIdx.x;
            if (place < step) keys[i] = first + place < num_keys ? of_parts[first + place] : 0;
            else keys[i] = first > 0 ? best[place - step] : 0;
        }
        top.pick(keys, p.top_k, best);
    }
    __syncthreads();
    const u32 scores_per_row = p.gate == nullptr ? p.top_k : p.top_k * p.top_k;
    float* scores = p.log_probs + static_cast<u64>(row) * scores_per_row;
    float largest = 0.0f, log_sum = 0.0f;
    if (p.gate == nullptr) {
        largest = score_of(p, logit_of_key(best[0]));
        float sum = 0.0f;
        for (u32 part = threadIdx.x; part < p.num_parts; part += TOP_THREADS) {
            const float2 of_part = p.sums[row * p.num_parts + part];
            sum = fmaf(of_part.y, expf(of_part.x - largest), sum);
        }
        log_sum = logf(block_sum<TOP_WARPS>(sum));
    }
    if (threadIdx.x >= p.top_k) return;
    const u64 key = best[threadIdx.x];
    const float score = score_of(p, logit_of_key(key));
    p.token_ids[row * p.top_k + threadIdx.x] = id_of_key(key);
    // Rounding must not make a probability exceed 1.
    scores[threadIdx.x] = p.gate == nullptr ? fminf(score - largest - log_sum, 0.0f) : score;
}

// Copies rows `ids` of a codebook to shared memory, rows of `row_len` floats, times `factors` where there are any.
__device__ __forceinline__ void copy_codes(float* to, u32 row_len, const u8* codebook, u32 rank, const u32* ids, u32 num_ids,
                                           const float* factors) {
    const u32 num_quads = (rank + 3) / 4;
    for (u32 i = threadIdx.x; i < num_ids * num_quads; i += TOP_THREADS) {
        const u32 row = i / num_quads, quad = i % num_quads;
        const float4 code = packed_quad(codebook, rank, ids[row], quad);
        const float values[4] = {code.x, code.y, code.z, code.w};
#pragma unroll
        for (u32 c = 0; c < 4; c++) {
            const u32 column = quad * 4 + c;
            if (column < rank) to[row * row_len + column] = factors == nullptr ? values[c] : values[c] * factors[column];
        }
    }
}

extern "C" __global__ void __launch_bounds__(TOP_THREADS) draft_select_scores(const __grid_constant__ DraftSelectParams p) {
    extern __shared__ float shared_floats[];
    launch_dependents();
    wait_for_predecessors();
    const u32 row = blockIdx.x;
    const bool is_first = row < p.num_blocks;
    const u32 num_parents = is_first ? 1 : p.top_k;
    const u32* parents = is_first ? p.anchor_tokens + row : p.token_ids + (row - p.num_blocks) * p.top_k;
    // An odd length keeps threads that read different rows in different banks.
    const u32 row_len = p.rank | 1;
    float* const gated = shared_floats;
    float* const successors = gated + p.top_k * row_len;
    float* const own = successors + p.top_k * row_len;
    float* const scores = own + p.top_k;
    float* const log_probs = p.log_probs + static_cast<u64>(row) * p.top_k * p.top_k;
    copy_codes(gated, row_len, p.predecessor, p.rank, parents, num_parents, p.gate + static_cast<u64>(row) * p.rank);
    copy_codes(successors, row_len, p.successor, p.rank, p.token_ids + row * p.top_k, p.top_k, nullptr);
    for (u32 slot = threadIdx.x; slot < p.top_k; slot += TOP_THREADS) own[slot] = log_probs[slot];
    __syncthreads();
    for (u32 pair = threadIdx.x; pair < num_parents * p.top_k; pair += TOP_THREADS) {
        const float* a = gated + pair / p.top_k * row_len;
        const float* b = successors + pair % p.top_k * row_len;
        float sum = 0.0f;
        for (u32 i = 0; i < p.rank; i++) sum = fmaf(a[i], b[i], sum);
        scores[pair] = own[pair % p.top_k] + sum;
    }
    __syncthreads();
    const u32 lane = threadIdx.x % WARP_LANES;
    for (u32 parent = threadIdx.x / WARP_LANES; parent < num_parents; parent += TOP_WARPS) {
        const float* of_parent = scores + parent * p.top_k;
        float largest = of_parent[0];
        for (u32 slot = 1; slot < p.top_k; slot++) largest = fmaxf(largest, of_parent[slot]);
        float sum = 0.0f;
        for (u32 slot = lane; slot < p.top_k; slot += WARP_LANES) sum += expf(of_parent[slot] - largest);
        const float log_sum = logf(warp_sum(sum));
        for (u32 slot = lane; slot < p.top_k; slot += WARP_LANES) {
            log_probs[parent * p.top_k + slot] = fminf(of_parent[slot] - largest - log_sum, 0.0f);
        }
    }
}
