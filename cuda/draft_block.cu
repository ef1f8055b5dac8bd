// Attention of a drafter's block: rows over the paged context of their request and over their own block, in fp32.
//
// A *query* is one head of one row. Queries of a block that share a kv head go through its keys together, 64 keys (a page
// of the context, or rows of the block) at a time. `draft_block_part`: a thread block takes a tile of queries and a run
// of pages, or rows of the block, and leaves per query the maximum of its scores, the sum of exponentials relative to it and
// the sum of values weighted by them. `draft_block_join` joins a query's parts in the order of their positions. Which keys
// make a part depends on the block's own context alone, so its result knows nothing of the blocks beside it.
#include "block_reduce.cuh"

constexpr u32 TILE_KEYS = 64;  // a page
constexpr u32 BLOCK_WARPS = 8;
constexpr u32 BLOCK_THREADS = BLOCK_WARPS * WARP_LANES;
constexpr u32 MAX_HEAD_DIM = 256;
constexpr float NOTHING = -3.0e38f;  // the maximum of no scores

struct DraftBlockParams {
    const float* q;             // [block_size][num_blocks][q_heads][head_dim]
    const float* k_block;       // [block_size][num_blocks][kv_heads][head_dim]
    const float* v_block;
    const float* k_pages;       // [page][kv_heads][64][head_dim]
    const float* v_pages;
    const u32* contexts;        // of each block: length, first of its pages in `pages`
    const u32* pages;
    float* values;              // of parts: [num_parts][num_blocks][kv_heads][queries][head_dim]
    float2* weights;            // likewise, without head_dim: maximum and sum
    float* out;                 // as q
    u32 block_size;
    u32 num_blocks;
    u32 q_heads;
    u32 kv_heads;
    u32 head_dim;
    u32 max_context_parts;      // of a block
    u32 num_parts;              // of the block with most
    u32 window;                 // 0 without one
    u32 is_causal;
    float scale;
};

// What the queries of a block see.
struct Sight {
    u32 context_len, first_page, end_page, part_pages, num_context_parts, num_parts;

    __device__ __forceinline__ Sight(const DraftBlockParams& p, u32 block) {
        context_len = p.contexts[2 * block];
        first_page = first_position(p, 0) / TILE_KEYS;
        end_page = (context_len + TILE_KEYS - 1) / TILE_KEYS;
        const u32 num_pages = end_page - first_page;
        part_pages = max((num_pages + p.max_context_parts - 1) / p.max_context_parts, 1);
        num_context_parts = (num_pages + part_pages - 1) / part_pages;
        num_parts = num_context_parts + (p.block_size + TILE_KEYS - 1) / TILE_KEYS;
    }

    // The first context position that a row sees.
    __device__ __forceinline__ u32 first_position(const DraftBlockParams& p, u32 in_block) const {
        const u32 end = context_len + in_block + 1;
        return p.window == 0 || end < p.window ? 0 : min(end - p.window, context_len);
    }
};

// Up to 64 keys of one kv head.
struct KeyTile {
    bool is_context;
    u32 first, len;        // context positions, or rows of the block
    u64 start, stride;     // where their vectors lie

    __device__ __forceinline__ KeyTile(const DraftBlockParams& p, const Sight& sight, u32 block, u32 head, u32 part, u32 index) {
        is_context = part < sight.num_context_parts;
        if (is_context) {
            const u32 page_index = sight.first_page + part * sight.part_pages + index;
            const u32 page = p.pages[p.contexts[2 * block + 1] + page_index];
            first = page_index * TILE_KEYS;
            len = min(TILE_KEYS, sight.context_len - first);
            start = (static_cast<u64>(page) * p.kv_heads + head) * TILE_KEYS * p.head_dim;
            stride = p.head_dim;
        } else {
            first = (part - sight.num_context_parts) * TILE_KEYS;
            len = min(TILE_KEYS, p.block_size - first);
            start = (static_cast<u64>(first * p.num_blocks + block) * p.kv_heads + head) * p.head_dim;
            stride = static_cast<u64>(p.num_blocks) * p.kv_heads * p.head_dim;
        }
    }

    __device__ __forceinline__ bool is_seen(const DraftBlockParams& p, const Sight& sight, u32 key, u32 in_block) const {
        if (key >= len) return false;
        return is_context ? first + key >= sight.first_position(p, in_block) : !p.is_causal || first + key <= in_block;
    }

    __device__ __forceinline__ const float* vector(u32 key, const float* pages, const float* rows) const {
        return key < len ? (is_context ? pages : rows) + start + key * stride : nullptr;
    }
};

// Copies ROWS vectors to rows of `row_len` floats in shared memory: a warp takes every eighth, all loads before all stores.
// `vector(i)` says where one lies, null where it is missing; what is missing, of whole quads too, becomes zero.
template <u32 ROWS, u32 LANE_QUADS, class Vector>
__device__ __forceinline__ void copy_vectors(float* to, u32 row_len, u32 head_dim, const Vector& vector) {
    const u32 warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    float4 values[ROWS / BLOCK_WARPS][LANE_QUADS];
#pragma unroll
    for (u32 i = 0; i < ROWS / BLOCK_WARPS; i++) {
        const float* from = vector(i * BLOCK_WARPS + warp);
#pragma unroll
        for (u32 j = 0; j < LANE_QUADS; j++) {
            const u32 dim = (j * WARP_LANES + lane) * 4;
            float4 value = {0.0f, 0.0f, 0.0f, 0.0f};
            if (from != nullptr && dim < head_dim) {
                if (head_dim % 4 == 0) {
                    value = *reinterpret_cast<const float4*>(from + dim);
                } else {
                    value.x = from[dim];
                    if (dim + 1 < head_dim) value.y = from[dim + 1];
                    if (dim + 2 < head_dim) value.z = from[dim + 2];
                    if (dim + 3 < head_dim) value.w = from[dim + 3];
                }
            }
            values[i][j] = value;
        }
    }
#pragma unroll
    for (u32 i = 0; i < ROWS / BLOCK_WARPS; i++) {
#pragma unroll
        for (u32 j = 0; j < LANE_QUADS; j++) {
            const u32 dim = (j * WARP_LANES + lane) * 4;
            if (dim < head_dim) *reinterpret_cast<float4*>(to + (i * BLOCK_WARPS + warp) * row_len + dim) = values[i][j];
        }
    }
}

__device__ __forceinline__ float dot_quads(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

// The queries of a warp: their scores' maximum and sum so far, and in each lane some dimensions of their values. For
// scores a lane takes keys `lane` and `lane + 32`, for values quads `lane` and on in steps of 32.
template <u32 QUERIES, u32 LANE_QUADS>
struct WarpQueries {
    float largest[QUERIES], sum[QUERIES];
    float4 values[QUERIES][LANE_QUADS];

    __device__ __forceinline__ WarpQueries() : sum{}, values{} {
#pragma unroll
        for (u32 i = 0; i < QUERIES; i++) largest[i] = NOTHING;
    }

    __device__ __forceinline__ static void score(const float* queries, const float* keys, u32 row_len, u32 lane, float (&scores)[QUERIES][2]) {
        for (u32 dim = 0; dim + 4 < row_len; dim += 4) {
            const float4 low = *reinterpret_cast<const float4*>(keys + lane * row_len + dim);
            const float4 high = *reinterpret_cast<const float4*>(keys + (lane + WARP_LANES) * row_len + dim);
#pragma unroll
            for (u32 i = 0; i < QUERIES; i++) {
                const float4 query = *reinterpret_cast<const float4*>(queries + i * row_len + dim);
                scores[i][0] = dot_quads(query, low, scores[i][0]);
                scores[i][1] = dot_quads(query, high, scores[i][1]);
            }
        }
    }

    // Makes weights of scores, relative to the new maximum, and brings what was summed so far to it. Unseen keys score NOTHING.
    __device__ __forceinline__ void weigh(u32 i, float (&scores)[2]) {
        float before = largest[i], now = fmaxf(before, fmaxf(scores[0], scores[1]));
#pragma unroll
        for (u32 distance = WARP_LANES / 2; distance > 0; distance /= 2) now = fmaxf(now, __shfl_xor_sync(ALL_LANES, now, distance));
#pragma unroll
        for (u32 half = 0; half < 2; half++) scores[half] = scores[half] == NOTHING ? 0.0f : expf(scores[half] - now);
        const float factor = expf(before - now);
        largest[i] = now;
        sum[i] = sum[i] * factor + warp_sum(scores[0] + scores[1]);
#pragma unroll
        for (u32 j = 0; j < LANE_QUADS; j++) {
            values[i][j].x *= factor, values[i][j].y *= factor, values[i][j].z *= factor, values[i][j].w *= factor;
        }
    }

    __device__ __forceinline__ void add_values(const float* weights, const float* vectors, u32 num_keys, u32 row_len, u32 lane) {
        for (u32 key = 0; key < num_keys; key++) {
#pragma unroll
            for (u32 j = 0; j < LANE_QUADS; j++) {
                // Lanes past the head read what nobody looks at.
                const u32 dim = min((j * WARP_LANES + lane) * 4, row_len - 4);
                const float4 value = *reinterpret_cast<const float4*>(vectors + key * row_len + dim);
#pragma unroll
                for (u32 i = 0; i < QUERIES; i++) {
                    const float weight = weights[i * TILE_KEYS + key];
                    values[i][j].x = fmaf(weight, value.x, values[i][j].x);
                    values[i][j].y = fmaf(weight, value.y, values[i][j].y);
                    values[i][j].z = fmaf(weight, value.z, values[i][j].z);
                    values[i][j].w = fmaf(weight, value.w, values[i][j].w);
                }
            }
        }
    }
};

template <u32 QUERIES, u32 LANE_QUADS>
__device__ __forceinline__ void draft_block_part(const DraftBlockParams& p) {
    extern __shared__ __align__(16) float shared_floats[];
    launch_dependents();
    constexpr u32 TILE_QUERIES = BLOCK_WARPS * QUERIES;
    const u32 group = p.q_heads / p.kv_heads, num_queries = p.block_size * group;
    const u32 num_tiles = (num_queries + TILE_QUERIES - 1) / TILE_QUERIES;
    u32 place = blockIdx.x;
    const u32 first_query = place % num_tiles * TILE_QUERIES;
    place /= num_tiles;
    const u32 head = place % p.kv_heads, block = place / p.kv_heads % p.num_blocks, part = place / p.kv_heads / p.num_blocks;
    const Sight sight(p, block);
    wait_for_predecessors();
    if (part >= sight.num_parts) return;
    // A quad more than the head keeps lanes that read different keys in different banks.
    const u32 row_len = (p.head_dim + 3) / 4 * 4 + 4;
    const u32 warp = threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    float* const queries = shared_floats;
    float* const vectors = queries + TILE_QUERIES * row_len;
    float* const weights = vectors + TILE_KEYS * row_len + warp * QUERIES * TILE_KEYS;
    copy_vectors<TILE_QUERIES, LANE_QUADS>(queries, row_len, p.head_dim, [&](u32 i) -> const float* {
        const u32 query = first_query + i;
        const u64 row = query / group * p.num_blocks + block;
        return query < num_queries ? p.q + (row * p.q_heads + head * group + query % group) * p.head_dim : nullptr;
    });

    const u32 first_page = part * sight.part_pages, num_pages = sight.end_page - sight.first_page;
    const u32 num_key_tiles = part < sight.num_context_parts ? min(sight.part_pages, num_pages - first_page) : 1;
    WarpQueries<QUERIES, LANE_QUADS> own;
    for (u32 index = 0; index < num_key_tiles; index++) {
        const KeyTile keys(p, sight, block, head, part, index);
        __syncthreads();
        copy_vectors<TILE_KEYS, LANE_QUADS>(vectors, row_len, p.head_dim, [&](u32 key) { return keys.vector(key, p.k_pages, p.k_block); });
        __syncthreads();
        float scores[QUERIES][2] = {};
        own.score(queries + warp * QUERIES * row_len, vectors, row_len, lane, scores);
#pragma unroll
        for (u32 i = 0; i < QUERIES; i++) {
            const u32 in_block = (first_query + warp * QUERIES + i) / group;
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const bool is_seen = keys.is_seen(p, sight, lane + half * WARP_LANES, in_block);
                scores[i][half] = is_seen ? p.scale * scores[i][half] : NOTHING;
            }
            own.weigh(i, scores[i]);
            weights[i * TILE_KEYS + lane] = scores[i][0];
            weights[i * TILE_KEYS + lane + WARP_LANES] = scores[i][1];
        }
        __syncthreads();
        copy_vectors<TILE_KEYS, LANE_QUADS>(vectors, row_len, p.head_dim, [&](u32 key) { return keys.vector(key, p.v_pages, p.v_block); });
        __syncthreads();
        own.add_values(weights, vectors, keys.len, row_len, lane);
    }

    const u64 first = ((static_cast<u64>(part) * p.num_blocks + block) * p.kv_heads + head) * num_queries;
#pragma unroll
    for (u32 i = 0; i < QUERIES; i++) {
        const u32 query = first_query + warp * QUERIES + i;
        if (query >= num_queries) break;
        if (lane == 0) p.weights[first + query] = {own.largest[i], own.sum[i]};
        float* to = p.values + (first + query) * p.head_dim;
#pragma unroll
        for (u32 j = 0; j < LANE_QUADS; j++) {
            const float4 value = own.values[i][j];
            const float dims[4] = {value.x, value.y, value.z, value.w};
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                const u32 dim = (j * WARP_LANES + lane) * 4 + c;
                if (dim < p.head_dim) to[dim] = dims[c];
            }
        }
    }
}

#define DRAFT_BLOCK_PART(NAME, QUERIES, LANE_QUADS)                                                               \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) NAME(const __grid_constant__ DraftBlockParams p) { \
        draft_block_part<QUERIES, LANE_QUADS>(p);                                                                 \
    }
// By the longest head.
DRAFT_BLOCK_PART(draft_block_part_128, 8, 1)
DRAFT_BLOCK_PART(draft_block_part_256, 2, 2)

// A warp joins the parts of one query.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) draft_block_join(const __grid_constant__ DraftBlockParams p) {
    constexpr u32 LANE_DIMS = MAX_HEAD_DIM / WARP_LANES;
    launch_dependents();
    wait_for_predecessors();
    const u32 group = p.q_heads / p.kv_heads, num_queries = p.block_size * group;
    const u32 index = blockIdx.x * BLOCK_WARPS + threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    if (index >= num_queries * p.kv_heads * p.num_blocks) return;
    const u32 query = index % num_queries, head = index / num_queries % p.kv_heads, block = index / num_queries / p.kv_heads;
    const Sight sight(p, block);
    const u64 part_stride = static_cast<u64>(p.num_blocks) * p.kv_heads * num_queries;
    float largest = NOTHING;
    for (u32 part = 0; part < sight.num_parts; part++) largest = fmaxf(largest, p.weights[index + part * part_stride].x);
    float sum = 0.0f, values[LANE_DIMS] = {};
    for (u32 part = 0; part < sight.num_parts; part++) {
        const float2 weight = p.weights[index + part * part_stride];
        if (weight.x == NOTHING) continue;
        const float factor = expf(weight.x - largest);
        sum = fmaf(weight.y, factor, sum);
        const float* from = p.values + (index + part * part_stride) * p.head_dim;
#pragma unroll
        for (u32 i = 0; i < LANE_DIMS; i++) {
            const u32 dim = i * WARP_LANES + lane;
            if (dim < p.head_dim) values[i] = fmaf(from[dim], factor, values[i]);
        }
    }
    const u64 row = query / group * p.num_blocks + block;
    float* out = p.out + (row * p.q_heads + head * group + query % group) * p.head_dim;
#pragma unroll
    for (u32 i = 0; i < LANE_DIMS; i++) {
        const u32 dim = i * WARP_LANES + lane;
        if (dim < p.head_dim) out[dim] = values[i] / sum;
    }
}
