// The matmul of slice_sums.cuh for many rows: prompts. The same sums in the same order, so the same bits.
//
// A block has TILE_ROWS rows and BLOCK_TILES tiles of 16 channels, whatever parts they belong to, and walks all slices
// one after another: a slice's sum is one chain of mma.m16n8k16 over ascending k from zero, eight are added to an
// octet's, octets to the result. A stage of the ring holds one super-tile of every channel tile, behind the note of its
// slice, so that a weight format's `Slice` reads it as a slice of one super-tile; and the rows' columns beside it.
#pragma once

#include "octet_sums.cuh"

constexpr u32 BLOCK_TILES = 8;
constexpr u32 TILE_ROWS = 64;
constexpr u32 ROW_TILE_THREADS = 256;
constexpr u32 WARP_TILES = 2;                             // 16 channels each
constexpr u32 WARP_GROUPS = 4;                            // 8 rows each
constexpr u32 ROW_STRIDE_BYTES = TILE_COLUMNS * 2 + 16;   // in a stage: no two quads of a row meet in a bank

// Copies 16 bytes behind the arithmetic.
__device__ __forceinline__ void copy_quad(u32 to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void end_stage() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns once all but the PENDING latest stages of this thread's copies are there.
template <u32 PENDING>
__device__ __forceinline__ void wait_for_stage() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A run over super-tiles, slice by slice.
struct SuperTileCursor {
    u32 slice, within;
    SliceSpan span;

    __device__ __forceinline__ void begin(const MatmulParams& p, u32 k_tiles) {
        slice = 0, within = 0;
        span = slice_span(p, k_tiles, 0, 0);
        skip_empty(p, k_tiles);
    }

    __device__ __forceinline__ void advance(const MatmulParams& p, u32 k_tiles) {
        within++;
        if (within < span.len) return;
        next_slice(p, k_tiles);
        skip_empty(p, k_tiles);
    }

    __device__ __forceinline__ void next_slice(const MatmulParams& p, u32 k_tiles) {
        slice++, within = 0;
        span = slice_span(p, k_tiles, slice / SLICES, slice % SLICES);
    }

    __device__ __forceinline__ void skip_empty(const MatmulParams& p, u32 k_tiles) {
        while (span.len == 0 && slice < p.num_octets * SLICES) next_slice(p, k_tiles);
    }
};

template <class Weights, u32 STAGES>
struct RowTile {
    static constexpr u32 PIECE_BYTES = Weights::NOTE_BYTES + Weights::TILE_BYTES;
    static constexpr u32 WEIGHT_BYTES = BLOCK_TILES * PIECE_BYTES;
    static constexpr u32 STAGE_BYTES = WEIGHT_BYTES + TILE_ROWS * ROW_STRIDE_BYTES;
    static constexpr u32 ROW_QUADS = TILE_COLUMNS * 2 / 16;

    const MatmulParams& p;
    const u32 ring, k_tiles, first_tile, first_row;
    const u8* const* tiles;  // in shared memory: where each channel tile begins
    SuperTileCursor asked;

    // Asks for the next super-tile.
    __device__ __forceinline__ void ask(u32 stage) {
        if (asked.slice < p.num_octets * SLICES) {
            const u32 at = ring + stage * STAGE_BYTES;
            const u32 column_tile = asked.span.first + asked.within;
            const u64 slice_start = static_cast<u64>(asked.span.first) * Weights::STORED_TILE_BYTES + asked.slice * Weights::NOTE_BYTES;
            for (u32 i = threadIdx.x; i < WEIGHT_BYTES / 16; i += ROW_TILE_THREADS) {
                const u32 tile = i / (PIECE_BYTES / 16), offset = i % (PIECE_BYTES / 16) * 16;
                copy_quad(at + tile * PIECE_BYTES + offset,
                          tiles[tile] + slice_start + Weights::stored_offset(offset, asked.within, asked.span.len));
            }
            for (u32 i = threadIdx.x; i < TILE_ROWS * ROW_QUADS; i += ROW_TILE_THREADS) {
                const u32 row = i / ROW_QUADS, quad = i % ROW_QUADS;
                // Where there is no such row any other will do: nobody looks at what comes of it.
                const u64 from = static_cast<u64>(min(first_row + row, p.num_rows - 1)) * k_tiles + column_tile;
                copy_quad(at + WEIGHT_BYTES + row * ROW_STRIDE_BYTES + quad * 16, p.x + from * TILE_COLUMNS + quad * 8);
            }
            asked.advance(p, k_tiles);
        }
        end_stage();
    }
};

typedef float RowTileSums[WARP_TILES][WARP_GROUPS][4];

// sum += value, or sum = value for the first.
__device__ __forceinline__ void add_sums(RowTileSums& sum, const RowTileSums& value, bool is_first) {
#pragma unroll
    for (u32 i = 0; i < WARP_TILES * WARP_GROUPS * 4; i++) {
        const u32 tile = i / (WARP_GROUPS * 4), group = i / 4 % WARP_GROUPS, c = i % 4;
        sum[tile][group][c] = is_first ? value[tile][group][c] : sum[tile][group][c] + value[tile][group][c];
    }
}

__device__ __forceinline__ void store_value(const MatmulParams& p, const MatmulPart& part, u32 row, u32 channel, float sum) {
    if (row >= p.num_rows || channel >= part.out_features) return;
    float* y = part.y + static_cast<u64>(row) * part.out_features + channel;
    *y = p.adds_to_output ? *y + sum : sum;
}

template <class Weights, u32 STAGES>
__device__ __forceinline__ void row_tile_matmul(const MatmulParams& p) {
    extern __shared__ __align__(128) u8 shared_bytes[];
    __shared__ const u8* tiles[BLOCK_TILES];
    using Tile = RowTile<Weights, STAGES>;
    const u32 k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    // Blocks of the same channels follow one another, so that weights are read once.
    const u32 row_tiles = (p.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const u32 first_tile = blockIdx.x / row_tiles * BLOCK_TILES, first_row = blockIdx.x % row_tiles * TILE_ROWS;
    const u32 warp = __shfl_sync(0xFFFFFFFF, threadIdx.x / WARP_LANES, 0), lane = threadIdx.x % WARP_LANES;
    if (threadIdx.x < BLOCK_TILES) {
        // Past the last tile any other will do.
        const PartTile place(p, min(first_tile + threadIdx.x, p.num_tiles - 1));
        const u64 stride = static_cast<u64>(k_tiles) * Weights::STORED_TILE_BYTES + p.num_octets * SLICES * Weights::NOTE_BYTES;
        tiles[threadIdx.x] = p.parts[place.part].weights + place.tile * stride;
    }
    __syncthreads();
    Tile block{p, shared_address(shared_bytes), k_tiles, first_tile, first_row, tiles, {}};
    block.asked.begin(p, k_tiles);
    wait_for_predecessors();
    launch_dependents();
    for (u32 stage = 0; stage + 1 < STAGES; stage++) block.ask(stage);

    const u32 own_tile = warp / 2 * WARP_TILES, own_row = warp % 2 * WARP_GROUPS * 8;
    const u32 row_place = Tile::WEIGHT_BYTES + (own_row + lane / 4) * ROW_STRIDE_BYTES + lane % 4 * 32;
    RowTileSums total, octet;
    u32 stage = 0;
    for (u32 index = 0; index < p.num_octets * SLICES; index++) {
        RowTileSums sums = {};
        const SliceSpan span = slice_span(p, k_tiles, index / SLICES, index % SLICES);
        for (u32 j = 0; j < span.len; j++) {
            wait_for_stage<STAGES - 2>();
            // The stage is there for all, and all are through with the one before, which is filled next.
            __syncthreads();
            block.ask(stage == 0 ? STAGES - 1 : stage - 1);
            const u32 at = block.ring + stage * Tile::STAGE_BYTES;
            u32 a[WARP_TILES][4][4];
#pragma unroll
            for (u32 i = 0; i < WARP_TILES; i++) {
                const u32 tile = min(first_tile + own_tile + i, p.num_tiles - 1);
                const typename Weights::Slice piece(p, tile, at + (own_tile + i) * Tile::PIECE_BYTES, 1, lane);
                piece.decode(0, a[i]);
                piece.patch(j, a[i]);
            }
#pragma unroll
            for (u32 group = 0; group < WARP_GROUPS; group++) {
                const uint4 low = load_shared_16(at + row_place + group * 8 * ROW_STRIDE_BYTES);
                const uint4 high = load_shared_16(at + row_place + group * 8 * ROW_STRIDE_BYTES + 16);
#pragma unroll
                for (u32 i = 0; i < WARP_TILES; i++) {
                    mma_m16n8k16(sums[i][group], a[i][0], low.x, low.y);
                    mma_m16n8k16(sums[i][group], a[i][1], low.z, low.w);
                    mma_m16n8k16(sums[i][group], a[i][2], high.x, high.y);
                    mma_m16n8k16(sums[i][group], a[i][3], high.z, high.w);
                }
            }
            if (++stage == STAGES) stage = 0;
        }
        add_sums(octet, sums, index % SLICES == 0);
        if (index % SLICES == SLICES - 1) add_sums(total, octet, index < SLICES);
    }
#pragma unroll
    for (u32 i = 0; i < WARP_TILES; i++) {
        if (first_tile + own_tile + i >= p.num_tiles) continue;
        const PartTile place(p, first_tile + own_tile + i);
        const MatmulPart& part = p.parts[place.part];
#pragma unroll
        for (u32 group = 0; group < WARP_GROUPS; group++) {
#pragma unroll
            for (u32 c = 0; c < 4; c++) {
                const u32 row = first_row + own_row + group * 8 + lane % 4 * 2 + c % 2;
                store_value(p, part, row, place.tile * TILE_CHANNELS + lane / 4 + c / 2 * 8, total[i][group][c]);
            }
        }
    }
}

// Kernels of one weight format for more rows than skinny_matmul.cuh takes at once.
#define ROW_TILE_KERNEL(NAME, ...)                                                                                  \
    extern "C" __global__ void __launch_bounds__(ROW_TILE_THREADS, 1) NAME##_rows(const __grid_constant__ MatmulParams p) { \
        row_tile_matmul<__VA_ARGS__, 4>(p);                                                                         \
    }
