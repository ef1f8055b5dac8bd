// W12 weights times 1..32 rows, in the order of slice_sums.cuh: the bits of bf16_matmul on the decoded weights.
//
// `w12_matmul_*` read both planes. `w12_matmul_q_*` read the 8-bit plane alone, the low mantissa bits at their midpoint;
// escapes above the window are exact there, those below stay the window's smallest code.
#include "skinny_matmul.cuh"
#include "w12_decode.cuh"
#include "wgmma_matmul.cuh"

// The head of a slice in memory, before its 8-bit planes and its 4-bit planes; made when the weights are loaded.
struct SliceNote {
    static constexpr u32 BYTES = 64, NUM_ENTRIES = 10;
    static constexpr u32 ENDS = 0;      // u32: 6 bits a super-tile, escapes up to its end; or CROWDED
    static constexpr u32 FIRST = 4;     // u32: index of the slice's first super-tile in escape_starts
    static constexpr u32 BASES = 8;     // u8 of each channel: exponent base
    static constexpr u32 ENTRIES = 24;  // u32 each: `lane << 21 | slot << 16 | bits`
    static constexpr u32 CROWDED = 0xFFFFFFFF;  // more escapes than entries: they are found through escape_starts
};

template <bool IS_EXACT>
struct W12Weights {
    static constexpr u32 PLANE8_BYTES = TILE_CHANNELS * TILE_COLUMNS;
    static constexpr u32 PLANE4_BYTES = PLANE8_BYTES / 2;
    static constexpr u32 NOTE_BYTES = SliceNote::BYTES;
    // In memory, and of that what is read.
    static constexpr u32 STORED_TILE_BYTES = PLANE8_BYTES + PLANE4_BYTES;
    static constexpr u32 TILE_BYTES = IS_EXACT ? STORED_TILE_BYTES : PLANE8_BYTES;

    template <u32 GROUPS>
    using Rows = SliceRows<GROUPS>;

    // A slice that has arrived.
    struct Slice {
        const MatmulParams& p;
        const u32 tile, slot, lane_place, lane;
        u32 plane4;
        LaneBases bases;
        u32 ends, has_escapes;

        __device__ __forceinline__ Slice(const MatmulParams& params, u32 tile_of_all, u32 at, u32 len, u32 lane_index)
            : p(params), tile(tile_of_all), slot(at), lane_place(at + NOTE_BYTES + lane_index * 16), lane(lane_index) {
            plane4 = lane_place + len * PLANE8_BYTES;
            bases.low = load_shared_u8(slot + SliceNote::BASES + lane / 4) * 0x00800080u;
            bases.high = load_shared_u8(slot + SliceNote::BASES + 8 + lane / 4) * 0x00800080u;
            ends = load_shared_u32(slot + SliceNote::ENDS);
            // A field differs from the one before exactly if its super-tile has escapes.
            has_escapes = ends == SliceNote::CROWDED ? ends : ends ^ ends << 6;
        }

        __device__ __forceinline__ void decode(u32 j, u32 (&a)[4][4]) const {
            const uint4 u = load_shared_16(lane_place + j * PLANE8_BYTES), v = load_shared_16(lane_place + j * PLANE8_BYTES + 512);
            const uint4 x = IS_EXACT ? load_shared_16(plane4 + j * PLANE4_BYTES)
                                     : make_uint4(0x88888888, 0x88888888, 0x88888888, 0x88888888);
            decode_w12(u.x, v.x, x.x, bases, a[0]);
            decode_w12(u.y, v.y, x.y, bases, a[1]);
            decode_w12(u.z, v.z, x.z, bases, a[2]);
            decode_w12(u.w, v.w, x.w, bases, a[3]);
        }

        // Puts escapes over their junk codes.
        __device__ __forceinline__ void patch(u32 j, u32 (&a)[4][4]) const {
            if (has_escapes & 63u << 6 * j) patch_tile(j, a);
        }

        __device__ __forceinline__ void patch_tile(u32 j, u32 (&a)[4][4]) const {
            const bool is_crowded = ends == SliceNote::CROWDED;
            u32 i = j == 0 ? 0 : ends >> (6 * j - 6) & 63, end = ends >> 6 * j & 63;
            const u32* escapes = nullptr;
            if (is_crowded) {
                const MatmulPart& part = p.parts[PartTile(p, tile).part];
                escapes = part.escapes;
                const u32* starts = part.escape_starts + load_shared_u32(slot + SliceNote::FIRST) + j;
                i = __ldg(starts);
                end = __ldg(starts + 1);
            }
#pragma unroll 1
            for (; i < end; i++) {
                const u32 entry = is_crowded ? __ldg(escapes + i) : load_shared_u32(slot + SliceNote::ENTRIES + i * 4);
                // Only the lane that holds the weight patches it, and that lane knows the channel's base.
                const u32 base = (entry & 1u << 17 ? bases.high : bases.low) >> 23;
                if (IS_EXACT || (entry >> 7 & 0xFF) >= base) patch_escape(a, entry, lane);
            }
        }
    };
};

SKINNY_MATMUL_KERNELS(w12_matmul, W12Weights<true>)
SKINNY_MATMUL_KERNELS(w12_matmul_q, W12Weights<false>)
WGMMA_MATMUL_KERNELS(w12_matmul, W12Weights<true>)
WGMMA_MATMUL_KERNELS(w12_matmul_q, W12Weights<false>)
