// The greedy token of every row from INT8 codes of the head: the ids and logits of bf16_matmul and greedy_argmax.
//
// `code_head` once; then per call `code_rows` (activations to codes and bounds), a scan of the head's codes (screen_scan*.cuh:
// bounds of all logits, the largest lower one), `select_survivors` and `rescore_survivors`, which multiplies what is left
// in the order of bf16_matmul. What the bounds are and why they hold is said in lm_head_screen.rs and lm_head_screen/cuda.rs.
// For drafts `code_rows` and a scan that writes down what the codes say of every logit.
#include "packed_rows.cuh"
#include "screen_scan.cuh"
#include "slice_sums.cuh"
#if __CUDA_ARCH_FEAT_SM90_ALL
#include "screen_scan_wgmma.cuh"
#endif

constexpr double MAX_CODE = 127.0, TERM_BASE = 255.0, MAX_SUM = TERM_BASE * MAX_CODE + MAX_CODE;
// Scales and steps beyond these are not worked with: nothing below then overflows or loses bits to underflow.
constexpr double LEAST = 0x1p-60, MOST_SCALE = 0x1p60, MOST_STEP = 0x1p30;
constexpr double UP = 1.0 + 0x1p-30;        // above the roundings of f64 sums of 2^16 squares
constexpr double FLOAT_UP = 1.0 + 0x1p-20;  // above those of a few fp32 operations
// Threads that code a row.
constexpr u32 ROW_THREADS = 1024;

struct CodeHeadParams {
    const u8* exact;  // fragment order
    u8* codes;        // zero
    float4* bounds;   // zero
    u32 vocab_size;
    u32 in_features;
    u32 num_chunks;
};

__device__ __forceinline__ double sum_over_16(double value) {
#pragma unroll
    for (u32 distance = 8; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    return value;
}

// An fp32 above the root of a sum of squares.
__device__ __forceinline__ float norm_above(double squares) { return squares == 0.0 ? 0.0f : __double2float_ru(sqrt(squares) * UP); }

// Half a warp codes a channel.
extern "C" __global__ void __launch_bounds__(256) code_head(const __grid_constant__ CodeHeadParams p) {
    const u32 channel = (blockIdx.x * 256 + threadIdx.x) / 16, lane = threadIdx.x % 16;
    const u32 num_quads = (p.in_features + 3) / 4;
    const bool is_there = channel < p.vocab_size;
    u32 largest = 0;
    for (u32 quad = lane; quad < num_quads && is_there; quad += 16) {
        const float4 w = packed_quad(p.exact, p.in_features, channel, quad);
        // Magnitudes order like their bits; NaN and infinity lie above all others.
        largest = max(largest, max(max(__float_as_uint(w.x) << 1, __float_as_uint(w.y) << 1), max(__float_as_uint(w.z) << 1, __float_as_uint(w.w) << 1)));
    }
#pragma unroll
    for (u32 distance = 8; distance > 0; distance /= 2) largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    const float magnitude = __uint_as_float(largest >> 1);
    const float scale = static_cast<float>(static_cast<double>(magnitude) / MAX_CODE);
    const bool is_zero = magnitude == 0.0f;
    const bool is_coded = magnitude < __uint_as_float(0x7F800000) && scale >= LEAST && scale <= MOST_SCALE;
    const double inverse = is_coded ? 1.0 / static_cast<double>(scale) : 0.0;
    double residual = 0.0, coded = 0.0;
    const u64 tile = static_cast<u64>(channel / SCREEN_CHANNELS) * p.num_chunks;
    for (u32 quad = lane; quad < num_quads && is_there && is_coded; quad += 16) {
        const float4 quad_weights = packed_quad(p.exact, p.in_features, channel, quad);
        const float weights[4] = {quad_weights.x, quad_weights.y, quad_weights.z, quad_weights.w};
        u32 packed = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const double w = weights[i], code = fmin(fmax(rint(w * inverse), -MAX_CODE), MAX_CODE);
            const double product = static_cast<double>(scale) * code;
            residual += (w - product) * (w - product);
            coded += product * product;
            packed |= (static_cast<u32>(static_cast<int>(code)) & 0xFF) << 8 * i;
        }
        const u64 chunk = (tile + quad / 4) * CHUNK_BYTES;
        *reinterpret_cast<u32*>(p.codes + chunk + channel % SCREEN_CHANNELS * 16 + quad % 4 * 4) = packed;
    }
    residual = sum_over_16(residual);
    coded = sum_over_16(coded);
    if (!is_there || lane > 0) return;
    float4 bounds = {is_coded ? scale : 0.0f, norm_above(residual), norm_above(coded), 0.0f};
    // Nothing is known of such a channel: it always survives.
    if (!is_coded && !is_zero) bounds.y = __uint_as_float(0x7F800000);
    p.bounds[channel] = bounds;
}

__device__ __forceinline__ double block_sum_f64(double value) {
    __shared__ double sums[ROW_THREADS / WARP_LANES];
#pragma unroll
    for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
    __syncthreads();
    if (threadIdx.x % WARP_LANES == 0) sums[threadIdx.x / WARP_LANES] = value;
    __syncthreads();
    double total = 0.0;
#pragma unroll
    for (u32 warp = 0; warp < ROW_THREADS / WARP_LANES; warp++) total += sums[warp];
    return total;
}

// Marks the ids that a row may not choose.
__device__ __forceinline__ void mark_masked(const ScreenParams& p, u32 row) {
    const u32 num_words = p.num_channels() / 32;
    u32* words = p.mask_bits + row * num_words;
    for (u32 i = threadIdx.x; i < num_words; i += blockDim.x) words[i] = 0;
    __syncthreads();
    for (u32 i = p.mask_starts[row] + threadIdx.x; i < p.mask_starts[row + 1]; i += blockDim.x) {
        const u32 id = p.masked[i];
        if (id < p.vocab_size) atomicOr(words + id / 32, 1u << id % 32);
    }
}

// Four columns of a row as BF16 takes them, zeros past the last; their bits, two to a word.
struct RoundedQuad {
    u32 low, high;

    __device__ __forceinline__ RoundedQuad(const float* x, u32 first, u32 in_features) {
        float values[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) values[i] = first + i < in_features ? x[first + i] : 0.0f;
        low = pack_bf16(values[0], values[1]), high = pack_bf16(values[2], values[3]);
    }

    __device__ __forceinline__ float value(u32 i) const {
        const u32 word = i < 2 ? low : high;
        return __uint_as_float(i % 2 ? word & 0xFFFF0000 : word << 16);
    }
};

// A block takes a row: BF16 values, two terms of each, and the row's bounds. Which integers stand for a value is free, as what
// they leave out is measured: they are found in fp32. Only norms are sums of float64.
template <u32 ROWS>
__device__ __forceinline__ void code_rows(const ScreenParams& p) {
    launch_dependents();
    wait_for_predecessors();
    const u32 row = blockIdx.x, padded = (p.in_features + 63) / 64 * 64;
    const float* x = p.x + static_cast<u64>(row) * p.in_features;
    u64 largest_bits = 0;
    double squares = 0.0;
    for (u32 k = threadIdx.x * 4; k < padded; k += blockDim.x * 4) {
        const RoundedQuad quad(x, k, p.in_features);
        *reinterpret_cast<uint2*>(p.rounded + static_cast<u64>(row) * padded + k) = {quad.low, quad.high};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const double value = quad.value(i);
            largest_bits = max(largest_bits, static_cast<u64>(__float_as_uint(quad.value(i)) & 0x7FFFFFFF));
            squares += value * value;
        }
    }
    squares = block_sum_f64(squares);
    const double largest = __uint_as_float(static_cast<u32>(block_max<ROW_THREADS / WARP_LANES>(largest_bits)));
    const double norm = sqrt(squares) * UP;
    const float step = static_cast<float>(largest / MAX_SUM);
    // A NaN passes no comparison.
    const bool is_screened = step >= LEAST && step <= MOST_STEP && p.largest_norm * norm < 0x1p126;
    const float inverse = is_screened ? 1.0f / step : 0.0f;
    double rest = 0.0;
    constexpr u32 COLUMNS = 2 * ROWS;
    constexpr float TERM = TERM_BASE, MOST = MAX_SUM;
    for (u32 k = threadIdx.x * 4; k < p.num_chunks * CHUNK_COLUMNS; k += blockDim.x * 4) {
        const RoundedQuad quad(x, k, p.in_features);
        u32 high_codes = 0, low_codes = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const float value = is_screened ? quad.value(i) : 0.0f;
            const float sum = fminf(fmaxf(rintf(value * inverse), -MOST), MOST);
            // No integer over 255 is near half of one: rounding to the nearest leaves -127..=127.
            const float high = rintf(sum * (1.0f / TERM)), low = sum - TERM * high;
            // Rounded once.
            const double left = fmaf(-step, sum, value);
            rest += left * left;
            high_codes |= (static_cast<u32>(static_cast<int>(high)) & 0xFF) << 8 * i;
            low_codes |= (static_cast<u32>(static_cast<int>(low)) & 0xFF) << 8 * i;
        }
        u8* chunk = p.row_codes + static_cast<u64>(k / CHUNK_COLUMNS) * COLUMNS * CHUNK_COLUMNS + k % CHUNK_COLUMNS;
        *reinterpret_cast<u32*>(chunk + row * 16) = high_codes;
        *reinterpret_cast<u32*>(chunk + (ROWS + row) * 16) = low_codes;
    }
    // Above the rounding of each term, and of terms that underflow.
    rest = sqrt(block_sum_f64(rest)) * (UP + 0x1p-22) + 0x1p-120;
    if (threadIdx.x == 0) {
        const double root = sqrt(static_cast<double>(p.in_features));
        const double of_residual = norm * (1.0 + p.order), of_coded = rest + norm * p.order + 0x1p-19 * (norm + rest);
        // What matrix units may do to numbers too small for them; see lm_head_screen/cuda.rs.
        const double underflow = 0x1p-125 * (p.in_features + root * (norm + MOST_SCALE * MAX_CODE * root));
        p.row_bounds[row] = {__double2float_ru(of_residual * FLOAT_UP), __double2float_ru(of_coded * FLOAT_UP),
                             __double2float_ru(underflow * FLOAT_UP), is_screened ? step : 0.0f};
        p.thresholds[row] = LOWEST_ORDER;
        p.counts[row] = is_screened ? 0 : NOT_SCREENED;
        p.best[row] = 0;
    }
    if (p.mask_bits) mark_masked(p, row);
}

// Groups of 16 channels that a block looks at.
constexpr u32 PART_GROUPS = 512;

extern "C" __global__ void __launch_bounds__(256) select_survivors(const __grid_constant__ ScreenParams p) {
    __shared__ u32 groups[PART_GROUPS], num_found;
    launch_dependents();
    wait_for_predecessors();
    const u32 num_groups = p.num_channels() / 16, num_parts = (num_groups + PART_GROUPS - 1) / PART_GROUPS;
    const u32 row = blockIdx.x / num_parts, first = blockIdx.x % num_parts * PART_GROUPS;
    if (p.counts[row] == NOT_SCREENED) return;
    const float threshold = float_of_order(p.thresholds[row]);
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
    for (u32 group = first + threadIdx.x; group < min(first + PART_GROUPS, num_groups); group += blockDim.x) {
        const float upper = p.group_upper[static_cast<u64>(row) * num_groups + group];
        if (upper >= threshold && upper > lowest()) groups[atomicAdd(&num_found, 1)] = group;
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < num_found * 16; i += blockDim.x) {
        const u32 id = groups[i / 16] * 16 + i % 16;
        const float upper = p.upper[static_cast<u64>(row) * p.num_channels() + id];
        // Masked ids and those past the vocabulary lie at -inf.
        if (upper >= threshold && upper > lowest()) {
            const u32 place = atomicAdd(p.counts + row, 1);
            if (place < p.max_survivors) p.survivors[static_cast<u64>(row) * p.max_survivors + place] = id;
        }
    }
}

// Rows of a scan, at most.
constexpr u32 MOST_ROWS = 48;

// Sixteen survivors of a row, or as many as there are left.
struct SurvivorGroup {
    u32 row, first, len;

    // The `index`-th of all rows that are decided by survivors, `counts` of them; `len` is 0 past the last.
    __device__ __forceinline__ SurvivorGroup(const ScreenParams& p, const u32* counts, u32 index) : row(0), first(0), len(0) {
        for (; row < p.num_rows; row++) {
            const u32 count = counts[row];
            if (count > p.max_survivors) continue;
            const u32 num_groups = (count + 15) / 16;
            if (index < num_groups) {
                first = index * 16;
                len = min(count - first, 16);
                return;
            }
            index -= num_groups;
        }
    }
};

// The slice of the exact product for a warp's operand A of channels `low` (rows g) and `high` (rows g + 8); all columns of
// operand B are the one row, and the sums of column 0 are left with the lanes of quad 0.
__device__ __forceinline__ void multiply_survivors(const ScreenParams& p, u32 row, u32 low, u32 high, u32 slice, u32 lane, float (&sums)[4]) {
    const u32 k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS, quad = lane % 4;
    const u32 first = slice * k_tiles >> p.log2_slices, end = (slice + 1) * k_tiles >> p.log2_slices;
    constexpr u32 TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS * 2;
    // A channel's words in a fragment: two of the four of the lane with its place in the tile.
    const auto words_of = [&](u32 channel) {
        return p.exact + static_cast<u64>(channel / TILE_CHANNELS) * k_tiles * TILE_BYTES + (channel % 8 * 4 + quad) * 16 + channel % 16 / 8 * 4;
    };
    const u8 *low_words = words_of(low), *high_words = words_of(high);
    const uint4* x_words = reinterpret_cast<const uint4*>(p.rounded + static_cast<u64>(row) * k_tiles * TILE_COLUMNS + quad * 16);
    // Loads of several tiles are under way at a time; the chain of products is one.
    constexpr u32 AHEAD = 3;
    for (u32 k_tile = first; k_tile < end; k_tile += AHEAD) {
        u32 a[AHEAD][4][4];
        uint4 x[AHEAD][2];
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            // Past the end the last one again.
            const u64 tile = min(k_tile + i, end - 1);
            x[i][0] = __ldcg(x_words + tile * (TILE_COLUMNS / 8)), x[i][1] = __ldcg(x_words + tile * (TILE_COLUMNS / 8) + 1);
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                const u32* of_low = reinterpret_cast<const u32*>(low_words + tile * TILE_BYTES + fragment * 512);
                const u32* of_high = reinterpret_cast<const u32*>(high_words + tile * TILE_BYTES + fragment * 512);
                a[i][fragment][0] = __ldg(of_low), a[i][fragment][2] = __ldg(of_low + 2);
                a[i][fragment][1] = __ldg(of_high), a[i][fragment][3] = __ldg(of_high + 2);
            }
        }
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            if (k_tile + i >= end) break;
            const u32 b[8] = {x[i][0].x, x[i][0].y, x[i][0].z, x[i][0].w, x[i][1].x, x[i][1].y, x[i][1].z, x[i][1].w};
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) mma_m16n8k16(sums, a[i][fragment], b[2 * fragment], b[2 * fragment + 1]);
        }
    }
}

// A block takes groups of survivors in turn. Slices and their sums are those of slice_sums.cuh: eight warps a chain each, added in
// ascending order to an octet's sum, octets in ascending order to the logit.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 2) rescore_survivors(const __grid_constant__ ScreenParams p) {
    __shared__ float slice_sums[SLICES][TILE_CHANNELS];
    __shared__ u32 counts[MOST_ROWS];
    launch_dependents();
    wait_for_predecessors();
    const u32 warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    if (threadIdx.x < p.num_rows) counts[threadIdx.x] = p.counts[threadIdx.x];
    __syncthreads();
    for (u32 index = blockIdx.x;; index += gridDim.x) {
        const SurvivorGroup group(p, counts, index);
        if (group.len == 0) return;
        const u32* ids = p.survivors + static_cast<u64>(group.row) * p.max_survivors + group.first;
        const u32 low = ids[min(lane / 4, group.len - 1)], high = ids[min(lane / 4 + 8, group.len - 1)];
        float logit = 0.0f;
        for (u32 octet = 0; octet < p.num_octets; octet++) {
            float sums[4] = {};
            multiply_survivors(p, group.row, low, high, octet * SLICES + warp, lane, sums);
            __syncthreads();
            if (lane % 4 == 0) slice_sums[warp][lane / 4] = sums[0], slice_sums[warp][lane / 4 + 8] = sums[2];
            __syncthreads();
            if (threadIdx.x < TILE_CHANNELS) {
                float octet_sum = slice_sums[0][threadIdx.x];
#pragma unroll
                for (u32 slice = 1; slice < SLICES; slice++) octet_sum += slice_sums[slice][threadIdx.x];
                logit = octet == 0 ? octet_sum : logit + octet_sum;
            }
        }
        if (warp > 0) continue;
        const u64 key = warp_max(lane < group.len ? logit_key(logit, ids[lane]) : 0);
        if (lane == 0) atomicMax(p.best + group.row, key);
    }
}

#define CODE_ROWS_KERNEL(ROWS) \
    extern "C" __global__ void __launch_bounds__(ROW_THREADS) code_rows_##ROWS(const __grid_constant__ ScreenParams p) { code_rows<ROWS>(p); }
CODE_ROWS_KERNEL(8)
CODE_ROWS_KERNEL(16)
CODE_ROWS_KERNEL(32)
CODE_ROWS_KERNEL(48)

#define SCREEN_KERNELS(ROWS)                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 2) screen_scan_##ROWS(const __grid_constant__ ScreenParams p) {            \
        screen_scan<ROWS, ScanGoal::BOUNDS>(p);                                                                                  \
    }                                                                                                                            \
    extern "C" __global__ void __launch_bounds__(256, 2) estimate_scan_##ROWS(const __grid_constant__ ScreenParams p) {          \
        screen_scan<ROWS, ScanGoal::ESTIMATES>(p);                                                                               \
    }
SCREEN_KERNELS(8)
SCREEN_KERNELS(16)
SCREEN_KERNELS(32)

#if __CUDA_ARCH_FEAT_SM90_ALL
#define SCREEN_WGMMA_KERNELS(ROWS)                                                                                                         \
    extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 1) screen_scan_wgmma_##ROWS(const __grid_constant__ ScreenParams p) {   \
        screen_scan_wgmma<ROWS, ScanGoal::BOUNDS>(p);                                                                                      \
    }                                                                                                                                      \
    extern "C" __global__ void __launch_bounds__(WGMMA_THREADS, 1) estimate_scan_wgmma_##ROWS(const __grid_constant__ ScreenParams p) { \
        screen_scan_wgmma<ROWS, ScanGoal::ESTIMATES>(p);                                                                                   \
    }
SCREEN_WGMMA_KERNELS(8)
SCREEN_WGMMA_KERNELS(16)
SCREEN_WGMMA_KERNELS(32)
SCREEN_WGMMA_KERNELS(48)
#endif
