// Attention of the rows of a pass over committed pages and their own paths: one launch for blocks, one to merge them.
//
// Blocks of 64 positions that are wholly committed are read once for a tile of rows, by splits of 256 positions. From the
// first block that is not, each row gathers its own path: at most two blocks, each an item of its row and head alone.
#include "attention_parts.cuh"
#include "row_paths.cuh"

constexpr u32 GATHERED_BLOCKS = 2;

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
};

extern __shared__ float4 dynamic_memory[];

__device__ __forceinline__ u32 shared_blocks(const SegmentFacts& segment) { return segment.committed_len / KV_BLOCK; }

// The first position that a row sees.
__device__ __forceinline__ u32 first_seen_from(u32 position, u32 window) {
    return window == 0 || position < window ? 0 : position + 1 - window;
}

__device__ __forceinline__ u64 partial_place(const TreeAttentionParams& p, u32 row, u32 place, u32 q_head) {
    return (static_cast<u64>(row - p.first_row) * (GATHERED_BLOCKS + p.num_splits) + place) * p.q_heads + q_head;
}

// The keys or values of one block on their way into shared memory: loads start early, and are rounded when they arrive.
template <u32 HEAD_DIM, u32 TILES, typename Memory>
struct Arrivals {
    static constexpr u32 PIECES = KV_BLOCK * HEAD_DIM / 4 / BLOCK_THREADS;  // quads of a thread
    static constexpr u32 AHEAD = HEAD_DIM * TILES >= 512 ? 8 : PIECES;  // of them loaded ahead: registers are few
    static constexpr u32 ROW_PIECES = HEAD_DIM / 4;
    static constexpr u32 ROWS_APART = BLOCK_THREADS / ROW_PIECES;           // between a thread's quads
    float4 pieces[AHEAD];

    // Starts the loads of quads `first` and on of the positions behind `sources`.
    __device__ void load(const float* const* sources, u32 head_dim, u32 first) {
        const u32 column = threadIdx.x % ROW_PIECES * 4;
        const float* const* rows = sources + threadIdx.x / ROW_PIECES + first * ROWS_APART;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const float* from = rows[i * ROWS_APART];
            pieces[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (from != nullptr && column < head_dim) pieces[i] = __ldcg(reinterpret_cast<const float4*>(from + column));
        }
    }

    __device__ void store(Memory& memory, u32 first) const {
        u16* to = memory.positions + (threadIdx.x / ROW_PIECES + first * ROWS_APART) * Memory::ROW + threadIdx.x % ROW_PIECES * 4;
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            *reinterpret_cast<uint2*>(to + i * ROWS_APART * Memory::ROW) = {pack_bf16(pieces[i].x, pieces[i].y), pack_bf16(pieces[i].z, pieces[i].w)};
        }
    }

    // All of a block: what was loaded ahead, and what did not fit.
    __device__ void take(Memory& memory, const float* const* sources, u32 head_dim) {
        store(memory, 0);
#pragma unroll
        for (u32 first = AHEAD; first < PIECES; first += AHEAD) {
            load(sources, head_dim, first);
            store(memory, first);
        }
    }
};

// Some rows of a segment, one kv head and up to four blocks in a row.
template <u32 HEAD_DIM, u32 TILES>
struct Item {
    typedef AttentionWarp<HEAD_DIM, TILES> Warp;
    typedef typename Warp::Memory Memory;

    const TreeAttentionParams& p;
    Memory& memory;
    SegmentFacts segment;
    u32 group;          // query heads of a kv head
    u32 group_inverse;  // 2^16 / group, rounded up: exact for what a tile divides
    u32 kv_head, first_row, num_rows, first_block, num_blocks;
    u32 first_seen;     // no row sees a position before it

    __device__ Item(const TreeAttentionParams& params)
        : p(params), memory(*reinterpret_cast<Memory*>(dynamic_memory)), group(params.q_heads / params.kv_heads) {
        group_inverse = 65536 / group + 1;
    }

    // Rows and heads of queries.
    __device__ u32 row_of(u32 query) const { return first_row + (query * group_inverse >> 16); }
    __device__ u32 head_of(u32 query) const { return kv_head * group + query - (query * group_inverse >> 16) * group; }

    // Looks up where the item's positions lie: those not committed on its row's path. What no row sees lies nowhere: where
    // pages make a ring its lane may hold a newer position, and a weight of zero makes NaN of one that is no number.
    __device__ void find_sources() const {
        if (threadIdx.x >= num_blocks * KV_BLOCK) return;
        const u32 position = first_block * KV_BLOCK + threadIdx.x;
        const float *k = nullptr, *v = nullptr;
        if (position >= first_seen && position < segment.committed_len) {
            const u64 page = p.paths.pages[segment.first_page + position / KV_BLOCK];
            const u64 at = ((page * p.kv_heads + kv_head) * KV_BLOCK + position % KV_BLOCK) * p.head_dim;
            k = p.k_pages + at, v = p.v_pages + at;
        } else if (position >= first_seen && position <= p.paths.positions[first_row]) {
            const u64 row = p.paths.path_rows[p.paths.rows[first_row].path_start + position - segment.committed_len];
            const u64 at = (row * p.kv_heads + kv_head) * p.head_dim;
            k = p.k_tail + at, v = p.v_tail + at;
        }
        memory.sources[0][threadIdx.x] = k, memory.sources[1][threadIdx.x] = v;
    }

    // Quads of queries on their way into shared memory, a few of each thread at a time.
    struct Queries {
        static constexpr u32 QUADS = HEAD_DIM / 4, ROUND = 4, PIECES = Warp::QUERIES * QUADS / BLOCK_THREADS;
        float4 pieces[ROUND];

        __device__ void load(const Item& item, u32 num_queries, u32 first) {
            const u32 column = threadIdx.x % QUADS * 4;
#pragma unroll
            for (u32 i = 0; i < ROUND; i++) {
                const u32 query = (threadIdx.x + (first + i) * BLOCK_THREADS) / QUADS;
                pieces[i] = {0.0f, 0.0f, 0.0f, 0.0f};
                if (query >= num_queries || column >= item.p.head_dim) continue;
                const u64 head = static_cast<u64>(item.row_of(query)) * item.p.q_heads + item.head_of(query);
                pieces[i] = __ldcg(reinterpret_cast<const float4*>(item.p.q + head * item.p.head_dim + column));
            }
        }

        __device__ void store(Memory& memory, u32 first) const {
#pragma unroll
            for (u32 i = 0; i < ROUND; i++) {
                const u32 piece = threadIdx.x + (first + i) * BLOCK_THREADS;
                if (piece >= Warp::QUERIES * QUADS) continue;
                u16* to = memory.queries + piece / QUADS * Memory::ROW + piece % QUADS * 4;
                *reinterpret_cast<uint2*>(to) = {pack_bf16(pieces[i].x, pieces[i].y), pack_bf16(pieces[i].z, pieces[i].w)};
            }
        }
    };

    __device__ void begin_queries(u32 num_queries) const {
        for (u32 i = threadIdx.x; i < Warp::QUERIES; i += BLOCK_THREADS) {
            memory.softmax[i] = {NO_SCORE, 0.0f};
            memory.own_positions[i] = i < num_queries ? p.paths.positions[row_of(i)] : 0;
        }
    }

    // Attends to the item's blocks and leaves the result as partial `place` of its rows; where `is_apart`, every block's
    // alone as a partial of its own.
    __device__ void run(u32 place, bool is_apart) {
        // Registers hold two blocks on their way beside few outputs, one beside many.
        constexpr bool LOADS_BOTH = TILES == 1;
        __syncthreads();
        const u32 num_queries = num_rows * group;
        find_sources();
        begin_queries(num_queries);
        wait_for_predecessors();
        // Ahead of the keys: what is asked for first comes first.
        Queries queries;
        queries.load(*this, num_queries, 0);
        __syncthreads();
        Arrivals<HEAD_DIM, TILES, Memory> arrivals[LOADS_BOTH ? 2 : 1];
        Arrivals<HEAD_DIM, TILES, Memory>&keys = arrivals[0], &values = arrivals[LOADS_BOTH ? 1 : 0];
        keys.load(memory.sources[0], p.head_dim, 0);
        if (LOADS_BOTH) values.load(memory.sources[1], p.head_dim, 0);
        queries.store(memory, 0);
#pragma unroll 1
        for (u32 first = Queries::ROUND; first < Queries::PIECES; first += Queries::ROUND) {
            queries.load(*this, num_queries, first);
            queries.store(memory, first);
        }
        Warp warp(memory);
        warp.clear();
        const bool works = warp.first_query < num_queries;
#pragma unroll 1
        for (u32 block = 0; block < num_blocks; block++) {
            const float* const* own_keys = memory.sources[0] + block * KV_BLOCK;
            const float* const* own_values = memory.sources[1] + block * KV_BLOCK;
            const bool is_last = block + 1 == num_blocks;
            keys.take(memory, own_keys, p.head_dim);
            if (!LOADS_BOTH) {
                values.load(own_values, p.head_dim, 0);
            } else if (!is_last) {
                keys.load(own_keys + KV_BLOCK, p.head_dim, 0);
            }
            __syncthreads();
            if (works) warp.score();
            __syncthreads();
            weigh(memory, num_queries, p.scale, {(first_block + block) * KV_BLOCK, p.window, !is_apart && p.window == 0});
            values.take(memory, own_values, p.head_dim);
            if (!is_last && LOADS_BOTH) values.load(own_values + KV_BLOCK, p.head_dim, 0);
            if (!is_last && !LOADS_BOTH) keys.load(own_keys + KV_BLOCK, p.head_dim, 0);
            __syncthreads();
            if (works) warp.add_values();
            if (is_apart || is_last) keep(warp, place + (is_apart ? block : 0), num_queries);
            __syncthreads();
            if (is_apart) {
                warp.clear();
                for (u32 i = threadIdx.x; i < Warp::QUERIES; i += BLOCK_THREADS) memory.softmax[i] = {NO_SCORE, 0.0f};
            }
        }
    }

    __device__ void keep(const Warp& warp, u32 place, u32 num_queries) const {
        for (u32 query = threadIdx.x; query < num_queries; query += BLOCK_THREADS) {
            p.softmaxes[partial_place(p, row_of(query), place, head_of(query))] = memory.softmax[query];
        }
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 query = warp.first_query + half * 8 + warp.lane / 4;
            if (query >= num_queries) continue;
            const u32 first_column = warp.share * Warp::OWN_COLUMNS + warp.lane % 4 * 2;
            float* to = p.partials + partial_place(p, row_of(query), place, head_of(query)) * p.head_dim + first_column;
#pragma unroll
            for (u32 i = 0; i < Warp::NUM_GROUPS; i++) {
                if (first_column + i * 8 < p.head_dim) *reinterpret_cast<float2*>(to + i * 8) = {warp.outputs[i][2 * half], warp.outputs[i][2 * half + 1]};
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
    item.first_seen = first_seen_from(p.paths.positions[item.first_row], p.window);
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
    for (item.first_row = p.first_row + tile * p.tile_rows; item.first_row < end; item.first_row += item.num_rows) {
        item.segment = p.paths.segments[p.paths.rows[item.first_row].segment];
        item.num_rows = min(item.segment.first_row + item.segment.num_rows, end) - item.first_row;
        const u32 last = shared_blocks(item.segment);
        // Of the segment's rows the first sees furthest back.
        item.first_seen = first_seen_from(item.segment.committed_len, p.window);
        if (last <= item.first_block || (split + 1) * KV_SPLIT <= item.first_seen) continue;
        item.num_blocks = min(last - item.first_block, SPLIT_BLOCKS);
        item.run(GATHERED_BLOCKS + split, false);
    }
    // Of a block that found nothing to do, too.
    wait_for_predecessors();
}

template <u32 HEAD_DIM, u32 TILES>
__device__ __forceinline__ void run_items(const TreeAttentionParams& p) {
    launch_dependents();
    Item<HEAD_DIM, TILES> item(p);
    // Splits take longest, so they begin first.
    const u32 num_shared = (p.num_rows + p.tile_rows - 1) / p.tile_rows * p.kv_heads * p.num_splits;
    if (blockIdx.x < num_shared) {
        run_shared(item, blockIdx.x);
    } else {
        run_gathered(item, blockIdx.x - num_shared);
    }
}

constexpr u32 MERGE_SPLITS = 64;  // whose factors are found at a time

// Puts the partials of one row and query head together: a block of threads each, a quad of columns per thread. A split is
// what its tile computed, then the blocks that the row gathered.
extern "C" __global__ void tree_attention_merge(const __grid_constant__ TreeAttentionParams p) {
    __shared__ MergeFactors factors[MERGE_SPLITS];
    launch_dependents();
    const u32 row = p.first_row + blockIdx.x / p.q_heads, q_head = blockIdx.x % p.q_heads, column = threadIdx.x * 4;
    const u32 position = p.paths.positions[row];
    const u32 num_shared = shared_blocks(p.paths.segments[p.paths.rows[row].segment]);
    const u32 first = first_seen_from(position, p.window) / KV_SPLIT;
    const u32 last = position / KV_SPLIT, num_whole = min(num_shared / SPLIT_BLOCKS, last);  // splits of one partial each
    const bool works = column < p.head_dim;
    const u64 split_len = static_cast<u64>(p.q_heads) * p.head_dim;
    const float* partials = p.partials + partial_place(p, row, GATHERED_BLOCKS, q_head) * p.head_dim + column;
    const auto softmax_of = [&](u32 place) {
        const float2 values = __ldcg(reinterpret_cast<const float2*>(p.softmaxes + partial_place(p, row, place, q_head)));
        return Softmax{values.x, values.y};
    };
    const auto add = [&](float4& total, float4 part, MergeFactors by) {
        total.x = merge(total.x, part.x, by), total.y = merge(total.y, part.y, by);
        total.z = merge(total.z, part.z, by), total.w = merge(total.w, part.w, by);
    };
    Softmax total = {NO_SCORE, 0.0f};
    float4 out = {0.0f, 0.0f, 0.0f, 0.0f};
    wait_for_predecessors();
    for (u32 start = first; start < num_whole; start += MERGE_SPLITS) {
        const u32 count = min(num_whole - start, MERGE_SPLITS);
        __syncthreads();
        // Every warp finds the running maximum and sum, for all threads need them; one writes the factors down.
        for (u32 base = 0; base < count; base += WARP_LANES) {
            const u32 lane = threadIdx.x % WARP_LANES, here = min(count - base, WARP_LANES);
            const Softmax own = lane < here ? softmax_of(GATHERED_BLOCKS + start + base + lane) : Softmax{NO_SCORE, 0.0f};
            // Maxima up to and with each lane's split.
            float max = fmaxf(own.max, total.max);
#pragma unroll
            for (u32 distance = 1; distance < WARP_LANES; distance *= 2) {
                const float before = __shfl_up_sync(0xFFFFFFFF, max, distance);
                if (lane >= distance) max = fmaxf(max, before);
            }
            const float before = __shfl_up_sync(0xFFFFFFFF, max, 1);
            Softmax upto = {lane == 0 ? total.max : before, 0.0f};
            const MergeFactors by = merge(upto, own);
            if (threadIdx.x < here) factors[base + lane] = by;
            for (u32 i = 0; i < here; i++) {
                const MergeFactors of_split = {__shfl_sync(0xFFFFFFFF, by.old_part, i), __shfl_sync(0xFFFFFFFF, by.new_part, i)};
                total.sum = merge(total.sum, __shfl_sync(0xFFFFFFFF, own.sum, i), of_split);
            }
            total.max = __shfl_sync(0xFFFFFFFF, max, here - 1);
        }
        __syncthreads();
        if (!works) continue;
#pragma unroll 16
        for (u32 i = 0; i < count; i++) add(out, __ldcg(reinterpret_cast<const float4*>(partials + (start + i) * split_len)), factors[i]);
    }
    // The rest: at most three splits, with gathered blocks.
    for (u32 split = max(first, num_whole); split <= last; split++) {
        Softmax softmax = {NO_SCORE, 0.0f};
        float4 values = {0.0f, 0.0f, 0.0f, 0.0f};
        const u32 end = min((split + 1) * SPLIT_BLOCKS, position / KV_BLOCK + 1), begin = max(split * SPLIT_BLOCKS, num_shared);
        for (u32 i = 0; i <= end - begin; i++) {
            const bool is_shared = i == 0;
            if (is_shared && split * SPLIT_BLOCKS >= num_shared) continue;
            const u32 place = is_shared ? GATHERED_BLOCKS + split : begin + i - 1 - num_shared;
            const MergeFactors by = merge(softmax, softmax_of(place));
            const float* from = p.partials + partial_place(p, row, place, q_head) * p.head_dim + column;
            if (works) add(values, __ldcg(reinterpret_cast<const float4*>(from)), by);
        }
        const MergeFactors by = merge(total, softmax);
        add(out, values, by);
    }
    if (!works) return;
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
TREE_ATTENTION_ENTRY(512, 1)
// From 12.0 on blocks have no room for these, and threads no registers.
#if __CUDA_ARCH__ < 1200
TREE_ATTENTION_ENTRY(256, 4)
TREE_ATTENTION_ENTRY(512, 2)
#endif
