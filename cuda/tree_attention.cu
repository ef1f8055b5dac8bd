// Attention of the rows of a pass over committed pages and their own paths: one launch for blocks, one to merge them.
//
// Blocks of 64 positions that are wholly committed are read once for a tile of rows, by splits of 256 positions. From the
// first block that is not, each row gathers its own path: at most two blocks, each an item of its row and head alone.
#include "attention_parts.cuh"
#include "row_paths.cuh"
#include "thread_copy.cuh"

constexpr u32 GATHERED_BLOCKS = 2;
constexpr u32 CHUNK_KEYS = 16;  // positions whose keys or values are fetched at a time
constexpr u32 BLOCK_CHUNKS = KV_BLOCK / CHUNK_KEYS;
constexpr u32 MAX_RING = 6;
constexpr u64 NO_SOURCE = ~0ull;
constexpr u64 IN_TAIL = 1ull << 63;

struct TreeAttentionParams {
    RowPaths paths;
    const float* q;        // [rows][q_heads][head_dim]
    const float* k_tail;   // [rows][kv_heads][head_dim]
    const float* v_tail;
    const float* k_pages;  // [page][kv_heads][KV_BLOCK][head_dim]
    const float* v_pages;
    float* out;            // [rows][q_heads][head_dim]
    float* partials;       // scratch [num_rows][GATHERED_BLOCKS + num_splits][q_heads][head_dim]
    Softmax* softmaxes;    // scratch, likewise without the last
    u32 first_row;         // rows of this launch
    u32 num_rows;
    u32 q_heads;
    u32 kv_heads;
    u32 head_dim;
    u32 window;            // 0 for none
    float scale;           // of scores, in powers of two
    u32 tile_rows;
    u32 num_splits;
    u32 ring_slots;
};

extern __shared__ float4 dynamic_memory[];

__device__ __forceinline__ u32 shared_blocks(const SegmentFacts& segment) { return segment.committed_len / KV_BLOCK; }

__device__ __forceinline__ u64 partial_place(const TreeAttentionParams& p, u32 row, u32 place, u32 q_head) {
    return (static_cast<u64>(row - p.first_row) * (GATHERED_BLOCKS + p.num_splits) + place) * p.q_heads + q_head;
}

// Some rows of a segment, one kv head and up to four blocks in a row.
template <u32 HEAD_DIM, u32 TILES>
struct Item {
    typedef AttentionWarp<HEAD_DIM, TILES> Warp;
    typedef typename Warp::Memory Memory;
    static constexpr u32 PIECES = CHUNK_KEYS * HEAD_DIM / 4 / BLOCK_THREADS;  // 16-byte copies of a thread per chunk
    static constexpr u32 ROW_PIECES = HEAD_DIM / 4;

    const TreeAttentionParams& p;
    Memory& memory;
    float4* ring;  // [ring_slots][PIECES][BLOCK_THREADS]
    SegmentFacts segment;
    u32 kv_head, first_row, num_rows, first_block, num_blocks;

    __device__ Item(const TreeAttentionParams& params)
        : p(params), memory(*reinterpret_cast<Memory*>(dynamic_memory)),
          ring(dynamic_memory + (sizeof(Memory) + sizeof(float4) - 1) / sizeof(float4)) {}

    __device__ u32 group() const { return p.q_heads / p.kv_heads; }

    // Where position `lane` of the item's blocks lies: one of its row's path, if it is not committed.
    __device__ u64 source_of(u32 lane) const {
        const u32 position = first_block * KV_BLOCK + lane;
        if (position < segment.committed_len) {
            const u64 page = p.paths.pages[segment.first_page + position / KV_BLOCK];
            return ((page * p.kv_heads + kv_head) * KV_BLOCK + position % KV_BLOCK) * p.head_dim;
        }
        if (position > p.paths.positions[first_row]) return NO_SOURCE;
        const u64 row = p.paths.path_rows[p.paths.rows[first_row].path_start + position - segment.committed_len];
        return IN_TAIL | (row * p.kv_heads + kv_head) * p.head_dim;
    }

    // Starts fetching chunk `chunk`: of every block first keys, then values.
    __device__ void fetch(u32 chunk) {
        if (chunk < num_blocks * 2 * BLOCK_CHUNKS) {
            const u32 block = chunk / (2 * BLOCK_CHUNKS), of_block = chunk % (2 * BLOCK_CHUNKS);
            const bool is_keys = of_block < BLOCK_CHUNKS;
            float4* to = ring + chunk % p.ring_slots * PIECES * BLOCK_THREADS + threadIdx.x;
#pragma unroll
            for (u32 i = 0; i < PIECES; i++) {
                const u32 piece = threadIdx.x + i * BLOCK_THREADS, column = piece % ROW_PIECES * 4;
                const u64 source = memory.sources[block * KV_BLOCK + of_block % BLOCK_CHUNKS * CHUNK_KEYS + piece / ROW_PIECES];
                const float* tail = is_keys ? p.k_tail : p.v_tail;
                const float* pages = is_keys ? p.k_pages : p.v_pages;
                const bool is_there = source != NO_SOURCE && column < p.head_dim;
                const float* from = source & IN_TAIL ? tail + (source & ~IN_TAIL) : pages + source;
                thread_copy_16(to + i * BLOCK_THREADS, is_there ? from + column : pages, is_there);
            }
        }
        thread_copy_commit();
    }

    // Waits for the thread's own part of the oldest chunk in the ring.
    __device__ void wait() const {
        switch (p.ring_slots) {
            case 1: return thread_copy_wait<0>();
            case 2: return thread_copy_wait<1>();
            case 3: return thread_copy_wait<2>();
            case 4: return thread_copy_wait<3>();
            case 5: return thread_copy_wait<4>();
            default: return thread_copy_wait<MAX_RING - 1>();
        }
    }

    // Rounds the keys or values of one block into shared memory, and starts as many fetches.
    __device__ void take_block(u32 first_chunk) {
        for (u32 chunk = first_chunk; chunk < first_chunk + BLOCK_CHUNKS; chunk++) {
            wait();
            const float4* from = ring + chunk % p.ring_slots * PIECES * BLOCK_THREADS + threadIdx.x;
#pragma unroll
            for (u32 i = 0; i < PIECES; i++) {
                const u32 piece = threadIdx.x + i * BLOCK_THREADS;
                const float4 values = from[i * BLOCK_THREADS];
                const u32 key = chunk % BLOCK_CHUNKS * CHUNK_KEYS + piece / ROW_PIECES;
                u16* to = memory.positions + key * Memory::ROW + piece % ROW_PIECES * 4;
                *reinterpret_cast<uint2*>(to) = {pack_bf16(values.x, values.y), pack_bf16(values.z, values.w)};
            }
            fetch(chunk + p.ring_slots);
        }
    }

    __device__ void take_queries(u32 num_queries) {
        constexpr u32 PAIRS = HEAD_DIM / 2;
        for (u32 i = threadIdx.x; i < Warp::QUERIES * PAIRS; i += BLOCK_THREADS) {
            const u32 query = i / PAIRS, column = i % PAIRS * 2;
            float2 values = {0.0f, 0.0f};
            if (query < num_queries && column < p.head_dim) {
                const u64 head = static_cast<u64>(first_row + query / group()) * p.q_heads + kv_head * group() + query % group();
                values = *reinterpret_cast<const float2*>(p.q + head * p.head_dim + column);
            }
            *reinterpret_cast<u32*>(memory.queries + query * Memory::ROW + column) = pack_bf16(values.x, values.y);
        }
        for (u32 i = threadIdx.x; i < Warp::QUERIES; i += BLOCK_THREADS) memory.softmax[i] = {NO_SCORE, 0.0f};
    }

    // Attends to the item's blocks and leaves the result as partial `place` of its rows; where `is_apart`, every block's
    // alone as a partial of its own.
    __device__ void run(u32 place, bool is_apart) {
        __syncthreads();
        const u32 num_queries = num_rows * group();
        for (u32 i = threadIdx.x; i < num_blocks * KV_BLOCK; i += BLOCK_THREADS) memory.sources[i] = source_of(i);
        take_queries(num_queries);
        __syncthreads();
        for (u32 chunk = 0; chunk < p.ring_slots; chunk++) fetch(chunk);
        Warp warp(memory);
        warp.clear();
        const bool works = warp.first_query < num_queries;
        for (u32 block = 0; block < num_blocks; block++) {
            take_block(block * 2 * BLOCK_CHUNKS);
            __syncthreads();
            if (works) warp.score();
            __syncthreads();
            const u32 start = (first_block + block) * KV_BLOCK;
            weigh(memory, num_queries, p.scale, [&](u32 query, u32 lane) {
                const u32 own = p.paths.positions[first_row + query / group()], position = start + lane;
                return position <= own && (p.window == 0 || position + p.window > own);
            });
            take_block(block * 2 * BLOCK_CHUNKS + BLOCK_CHUNKS);
            __syncthreads();
            if (works) warp.add_values();
            if (is_apart || block + 1 == num_blocks) keep(warp, place + (is_apart ? block : 0), num_queries);
            __syncthreads();
            if (is_apart) {
                warp.clear();
                for (u32 i = threadIdx.x; i < Warp::QUERIES; i += BLOCK_THREADS) memory.softmax[i] = {NO_SCORE, 0.0f};
            }
        }
    }

    __device__ void keep(const Warp& warp, u32 place, u32 num_queries) const {
        for (u32 query = threadIdx.x; query < num_queries; query += BLOCK_THREADS) {
            p.softmaxes[partial_place(p, first_row + query / group(), place, kv_head * group() + query % group())] = memory.softmax[query];
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 query = warp.first_query + half * 8 + warp.lane / 4;
            if (query >= num_queries) continue;
            const u64 at = partial_place(p, first_row + query / group(), place, kv_head * group() + query % group()) * p.head_dim;
#pragma unroll
            for (u32 i = 0; i < Warp::NUM_GROUPS; i++) {
                const u32 column = warp.share * Warp::OWN_COLUMNS + i * 8 + warp.lane % 4 * 2;
                if (column < p.head_dim) *reinterpret_cast<float2*>(p.partials + at + column) = {warp.outputs[i][2 * half], warp.outputs[i][2 * half + 1]};
            }
        }
    }
};

// The blocks that only this row sees, one by one.
template <u32 HEAD_DIM, u32 TILES>
__device__ __forceinline__ void run_gathered(Item<HEAD_DIM, TILES>& item, u32 index) {
    const TreeAttentionParams& p = item.p;
    item.first_row = p.first_row + index / p.kv_heads, item.num_rows = 1, item.kv_head = index % p.kv_heads;
    item.segment = p.paths.segments[p.paths.rows[item.first_row].segment];
    item.first_block = shared_blocks(item.segment);
    item.num_blocks = p.paths.positions[item.first_row] / KV_BLOCK - item.first_block + 1;
    wait_for_predecessors();
    item.run(0, true);
}

// One split for a tile of rows, segment by segment.
template <u32 HEAD_DIM, u32 TILES>
__device__ __forceinline__ void run_shared(Item<HEAD_DIM, TILES>& item, u32 index) {
    const TreeAttentionParams& p = item.p;
    const u32 num_tiles = (p.num_rows + p.tile_rows - 1) / p.tile_rows, tile = index % num_tiles;
    const u32 split = index / num_tiles / p.kv_heads, end = min((tile + 1) * p.tile_rows, p.num_rows) + p.first_row;
    item.kv_head = index / num_tiles % p.kv_heads;
    item.first_block = split * SPLIT_BLOCKS;
    wait_for_predecessors();
    for (item.first_row = p.first_row + tile * p.tile_rows; item.first_row < end; item.first_row += item.num_rows) {
        item.segment = p.paths.segments[p.paths.rows[item.first_row].segment];
        item.num_rows = min(item.segment.first_row + item.segment.num_rows, end) - item.first_row;
        const u32 last = shared_blocks(item.segment);
        // Of the segment's rows the first sees furthest back.
        const u32 in_sight = item.segment.committed_len + 1 - min(p.window, item.segment.committed_len + 1);
        if (last <= item.first_block || (p.window > 0 && (split + 1) * KV_SPLIT <= in_sight)) continue;
        item.num_blocks = min(last - item.first_block, SPLIT_BLOCKS);
        item.run(GATHERED_BLOCKS + split, false);
    }
}

template <u32 HEAD_DIM, u32 TILES>
__device__ __forceinline__ void run_items(const TreeAttentionParams& p) {
    launch_dependents();
    Item<HEAD_DIM, TILES> item(p);
    const u32 num_gathered = p.num_rows * p.kv_heads;
    if (blockIdx.x < num_gathered) {
        run_gathered(item, blockIdx.x);
    } else {
        run_shared(item, blockIdx.x - num_gathered);
    }
}

// Puts the partials of one row and query head together: a block of threads each, a quad of columns per thread.
extern "C" __global__ void tree_attention_merge(const __grid_constant__ TreeAttentionParams p) {
    launch_dependents();
    const u32 row = p.first_row + blockIdx.x / p.q_heads, q_head = blockIdx.x % p.q_heads, column = threadIdx.x * 4;
    const u32 position = p.paths.positions[row];
    const u32 num_shared = shared_blocks(p.paths.segments[p.paths.rows[row].segment]);
    wait_for_predecessors();
    if (column >= p.head_dim) return;
    const u32 first = p.window == 0 || position < p.window ? 0 : position + 1 - p.window;
    Softmax total = {NO_SCORE, 0.0f};
    float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
    const auto add = [&](Softmax& softmax, float4& values, Softmax part, float4 part_values) {
        const MergeFactors factors = merge(softmax, part);
        values.x = merge(values.x, part_values.x, factors), values.y = merge(values.y, part_values.y, factors);
        values.z = merge(values.z, part_values.z, factors), values.w = merge(values.w, part_values.w, factors);
    };
    const auto partial = [&](u32 place) {
        return __ldcg(reinterpret_cast<const float4*>(p.partials + partial_place(p, row, place, q_head) * p.head_dim + column));
    };
    const auto softmax_of = [&](u32 place) {
        const float2 values = __ldcg(reinterpret_cast<const float2*>(p.softmaxes + partial_place(p, row, place, q_head)));
        return Softmax{values.x, values.y};
    };
#pragma unroll 4
    for (u32 split = first / KV_SPLIT; split <= position / KV_SPLIT; split++) {
        Softmax softmax = {NO_SCORE, 0.0f};
        float4 values = {0.0f, 0.0f, 0.0f, 0.0f};
        if (split * SPLIT_BLOCKS < num_shared) add(softmax, values, softmax_of(GATHERED_BLOCKS + split), partial(GATHERED_BLOCKS + split));
        const u32 end = min((split + 1) * SPLIT_BLOCKS, position / KV_BLOCK + 1);
        for (u32 block = max(split * SPLIT_BLOCKS, num_shared); block < end; block++) {
            add(softmax, values, softmax_of(block - num_shared), partial(block - num_shared));
        }
        add(total, out, softmax, values);
    }
    float* to = p.out + (static_cast<u64>(row) * p.q_heads + q_head) * p.head_dim + column;
    *reinterpret_cast<float4*>(to) = {out.x / total.sum, out.y / total.sum, out.z / total.sum, out.w / total.sum};
}

#define TREE_ATTENTION_ENTRY(HEAD_DIM, TILES)                                                                                     \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1) tree_attention_##HEAD_DIM##_##TILES(const __grid_constant__ TreeAttentionParams p) { \
        run_items<HEAD_DIM, TILES>(p);                                                                                            \
    }

TREE_ATTENTION_ENTRY(64, 1)
TREE_ATTENTION_ENTRY(64, 4)
TREE_ATTENTION_ENTRY(128, 1)
TREE_ATTENTION_ENTRY(128, 4)
TREE_ATTENTION_ENTRY(256, 1)
TREE_ATTENTION_ENTRY(256, 4)
TREE_ATTENTION_ENTRY(512, 1)
TREE_ATTENTION_ENTRY(512, 2)
