// Folding logged updates into a state: a block takes some rows of one value head's state, a thread a column of them.
#include "async_copy.cuh"

constexpr u32 BLOCK_THREADS = 128;
constexpr u32 BLOCK_ROWS = 16;
constexpr u32 FOLD_INTERVAL = 32;
constexpr u32 LOG_POSITIONS = 128;
constexpr u32 STATE_RING = 3;

struct GdnFoldParams {
    float* states;       // [slot][STATE_RING][value heads][key_dim][value_dim]
    const float* log_k;  // [slot][LOG_POSITIONS][key heads][key_dim]
    const float* log_d;  // [slot][LOG_POSITIONS][value heads][value_dim]
    const float* log_g;  // [slot][LOG_POSITIONS][value heads]
    u32 num_key_heads;
    u32 num_value_heads;
    u32 key_dim;
    u32 value_dim;
    u32 slot;
    u32 anchor;
};

// Each element takes its positions in order, with two roundings each.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) gdn_fold(const __grid_constant__ GdnFoldParams p) {
    __shared__ float keys[FOLD_INTERVAL][BLOCK_ROWS];
    __shared__ float decays[FOLD_INTERVAL];
    wait_for_predecessors();
    const u32 num_groups = (p.key_dim + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const u32 head = blockIdx.x / num_groups, first_row = blockIdx.x % num_groups * BLOCK_ROWS;
    const u32 key_head = head / (p.num_value_heads / p.num_key_heads);
    const auto log_row = [&](u32 i) { return static_cast<u64>(p.slot) * LOG_POSITIONS + (p.anchor + i) % LOG_POSITIONS; };
    for (u32 i = threadIdx.x; i < FOLD_INTERVAL * BLOCK_ROWS; i += BLOCK_THREADS) {
        const u32 entry = i / BLOCK_ROWS, row = first_row + i % BLOCK_ROWS;
        const float* k = p.log_k + (log_row(entry) * p.num_key_heads + key_head) * p.key_dim;
        keys[entry][i % BLOCK_ROWS] = row < p.key_dim ? k[row] : 0.0f;
    }
    if (threadIdx.x < FOLD_INTERVAL) decays[threadIdx.x] = expf(p.log_g[log_row(threadIdx.x) * p.num_value_heads + head]);
    __syncthreads();

    const auto state = [&](u32 anchor) {
        const u64 ring = static_cast<u64>(p.slot) * STATE_RING + anchor / FOLD_INTERVAL % STATE_RING;
        return p.states + (ring * p.num_value_heads + head) * p.key_dim * p.value_dim;
    };
    const float* from = state(p.anchor);
    float* to = state(p.anchor + FOLD_INTERVAL);
    for (u32 column = threadIdx.x; column < p.value_dim; column += BLOCK_THREADS) {
        float sums[BLOCK_ROWS];
#pragma unroll
        for (u32 i = 0; i < BLOCK_ROWS; i++) {
            sums[i] = first_row + i < p.key_dim ? from[(first_row + i) * p.value_dim + column] : 0.0f;
        }
#pragma unroll 4
        for (u32 entry = 0; entry < FOLD_INTERVAL; entry++) {
            const float d = p.log_d[(log_row(entry) * p.num_value_heads + head) * p.value_dim + column];
#pragma unroll
            for (u32 i = 0; i < BLOCK_ROWS; i++) sums[i] = __fmaf_rn(keys[entry][i], d, __fmul_rn(sums[i], decays[entry]));
        }
#pragma unroll
        for (u32 i = 0; i < BLOCK_ROWS; i++) {
            if (first_row + i < p.key_dim) to[(first_row + i) * p.value_dim + column] = sums[i];
        }
    }
}
