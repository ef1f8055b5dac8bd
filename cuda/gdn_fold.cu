// Folding logged updates into a state: a block takes some rows of one value head's state, a thread a column of them.
//
// All that a thread reads is on its way before the first sum.
#include "thread_copy.cuh"

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
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) gdn_fold(const __grid_constant__ GdnFoldParams p) {
    launch_dependents();
    __shared__ alignas(16) float keys[FOLD_INTERVAL][BLOCK_ROWS];
    __shared__ float decays[FOLD_INTERVAL];
    __shared__ alignas(16) float updates[FOLD_INTERVAL][BLOCK_THREADS];
    const u32 num_groups = (p.key_dim + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const u32 head = blockIdx.x / num_groups, first_row = blockIdx.x % num_groups * BLOCK_ROWS;
    const u32 num_rows = min(p.key_dim - first_row, BLOCK_ROWS), key_head = head / (p.num_value_heads / p.num_key_heads);
    // An interval lies in the ring in one piece.
    const u64 log_row = p.slot * LOG_POSITIONS + p.anchor % LOG_POSITIONS;
    const float* log_k = p.log_k + (log_row * p.num_key_heads + key_head) * p.key_dim + first_row;
    const float* log_d = p.log_d + (log_row * p.num_value_heads + head) * p.value_dim;
    const u32 keys_len = p.num_key_heads * p.key_dim, values_len = p.num_value_heads * p.value_dim;
    const auto state = [&](u32 anchor) {
        const u64 ring = p.slot * STATE_RING + anchor / FOLD_INTERVAL % STATE_RING;
        return p.states + ((ring * p.num_value_heads + head) * p.key_dim + first_row) * p.value_dim;
    };
    const float* from = state(p.anchor);
    float* to = state(p.anchor + FOLD_INTERVAL);
    wait_for_predecessors();
    for (u32 i = threadIdx.x; i < FOLD_INTERVAL * BLOCK_ROWS; i += BLOCK_THREADS) {
        const u32 row = i % BLOCK_ROWS;
        keys[i / BLOCK_ROWS][row] = row < num_rows ? log_k[i / BLOCK_ROWS * keys_len + row] : 0.0f;
    }
    if (threadIdx.x < FOLD_INTERVAL) decays[threadIdx.x] = expf(p.log_g[(log_row + threadIdx.x) * p.num_value_heads + head]);
    for (u32 first = 0; first < p.value_dim; first += BLOCK_THREADS) {
        const u32 column = first + threadIdx.x, read = first + threadIdx.x % WARP_LANES * 4;
        float sums[BLOCK_ROWS];
#pragma unroll
        for (u32 i = 0; i < BLOCK_ROWS; i++) sums[i] = i < num_rows && column < p.value_dim ? from[i * p.value_dim + column] : 0.0f;
        // A warp fetches every fourth position, four columns a thread.
#pragma unroll
        for (u32 entry = threadIdx.x / WARP_LANES; entry < FOLD_INTERVAL; entry += BLOCK_THREADS / WARP_LANES) {
            const bool is_there = read < p.value_dim;
            thread_copy_16(&updates[entry][read - first], is_there ? log_d + entry * values_len + read : log_d, is_there);
        }
        thread_copy_commit();
        thread_copy_wait<0>();
        __syncthreads();
#pragma unroll 4
        for (u32 entry = 0; entry < FOLD_INTERVAL; entry++) {
            const float decay = decays[entry], d = updates[entry][threadIdx.x];
#pragma unroll
            for (u32 i = 0; i < BLOCK_ROWS; i++) sums[i] = __fmaf_rn(keys[entry][i], d, __fmul_rn(sums[i], decay));
        }
#pragma unroll
        for (u32 i = 0; i < BLOCK_ROWS; i++) {
            if (i < num_rows && column < p.value_dim) to[i * p.value_dim + column] = sums[i];
        }
        __syncthreads();
    }
}
