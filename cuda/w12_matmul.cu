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
    static constexpr u32 ENDS = 0;      // u32: 6 bits a super-tile, escapes up to its end, or CROWDED; and HAS_ABOVE
    static constexpr u32 FIRST = 4;     // u32: index of the slice's first super-tile in escape_starts
    static constexpr u32 BASES = 8;     // u8 of each channel: exponent base
    static constexpr u32 ENTRIES = 24;  // u32 each: `lane << 21 | slot << 16 | bits`
    static constexpr u32 CROWDED = 0x3FFFFFFF;    // more escapes than entries: they are found through escape_starts
    static constexpr u32 HAS_ABOVE = 0x40000000;  // some escape is above its window: the 8-bit view has no use for others
};

template <bool IS_EXACT>
struct W12Weights {
    static constexpr u32 PLANE8_BYTES = TILE_CHANNELS * TILE_COLUMNS;
    static constexpr u32 PLANE4_BYTES = PLANE8_BYTES / 2;
    static constexpr u32 NOTE_BYTES = SliceNote::BYTES;
    static constexpr bool IS_DECODED = true;
    // In memory, and of that what is read.
    static constexpr u32 STORED_TILE_BYTES = PLANE8_BYTES + PLANE4_BYTES;
    static constexpr u32 TILE_BYTES = IS_EXACT ? STORED_TILE_BYTES : PLANE8_BYTES;

    template <u32 GROUPS>
    using Rows = SliceRows<GROUPS>;

    // A super-tile's, of a lane.
    struct Words {
        uint4 u, v, x;
    };

    // A slice's codes, as a lane reads them.
    struct SliceCodes {
        u32 slot, lane_place, plane4, lane;
        LaneBases bases;
        u32 ends, has_escapes;

        __device__ __forceinline__ void open(u32 at, u32 len, u32 lane_index) {
            slot = at, lane_place = at + NOTE_BYTES + lane_index * 16, lane = lane_index;
            plane4 = lane_place + len * PLANE8_BYTES;
            bases.low = load_shared_u8(slot + SliceNote::BASES + lane / 4) * 0x00800080u;
            bases.high = load_shared_u8(slot + SliceNote::BASES + 8 + lane / 4) * 0x00800080u;
            ends = load_shared_u32(slot + SliceNote::ENDS);
            // A field differs from the one before exactly if its super-tile has escapes.
            has_escapes = is_crowded(ends) ? ends : ends ^ ends << 6;
            if (!IS_EXACT && !(ends & SliceNote::HAS_ABOVE)) has_escapes = 0;
        }

        __device__ __forceinline__ static bool is_crowded(u32 ends) { return (ends & SliceNote::CROWDED) == SliceNote::CROWDED; }

        __device__ __forceinline__ void load(u32 j, Words& words) const {
            words.u = load_shared_16(lane_place + j * PLANE8_BYTES), words.v = load_shared_16(lane_place + j * PLANE8_BYTES + 512);
            words.x = IS_EXACT ? load_shared_16(plane4 + j * PLANE4_BYTES)
                               : make_uint4(0x88888888, 0x88888888, 0x88888888, 0x88888888);
        }

        __device__ __forceinline__ void decode(const Words& words, u32 (&a)[4][4]) const {
            decode_w12(words.u.x, words.v.x, words.x.x, bases, a[0]);
            decode_w12(words.u.y, words.v.y, words.x.y, bases, a[1]);
            decode_w12(words.u.z, words.v.z, words.x.z, bases, a[2]);
            decode_w12(words.u.w, words.v.w, words.x.w, bases, a[3]);
        }

        __device__ __forceinline__ void decode(u32 j, u32 (&a)[4][4]) const {
            Words words;
            load(j, words);
            decode(words, a);
        }

        // Where a super-tile's escapes are among those of the note.
        __device__ __forceinline__ static void find_entries(u32 ends, u32 j, u32& first, u32& end) {
            first = j == 0 ? 0 : ends >> (6 * j - 6) & 63, end = ends >> 6 * j & 63;
        }

        // Where they are in the matrix's list, which it gives.
        __device__ __forceinline__ const u32* find_crowded(const MatmulParams& p, u32 tile, u32 j, u32& first, u32& end) const {
            const MatmulPart& part = p.parts[PartTile(p, tile).part];
            const u32* starts = part.escape_starts + load_shared_u32(slot + SliceNote::FIRST) + j;
            first = __ldg(starts), end = __ldg(starts + 1);
            return part.escapes;
        }

        // Of the lane that holds the weight, and knows the channel's base.
        __device__ __forceinline__ bool is_wanted(u32 entry) const {
            const u32 base = (entry & 1u << 17 ? bases.high : bases.low) >> 23;
            return IS_EXACT || (entry >> 7 & 0xFF) >= base;
        }

        __device__ __forceinline__ void patch_entry(u32 entry, u32 (&a)[4][4]) const {
            if (is_wanted(entry)) patch_escape(a, entry, lane);
        }
    };

    // A slice that has arrived.
    struct Slice : SliceCodes {
        const MatmulParams& p;
        const u32 tile;

        __device__ __forceinline__ Slice(const MatmulParams& params, u32 tile_of_all, u32 at, u32 len, u32 lane_index)
            : p(params), tile(tile_of_all) {
            this->open(at, len, lane_index);
        }

        // Puts escapes over their junk codes.
        __device__ __forceinline__ void patch(u32 j, u32 (&a)[4][4]) const {
            if (this->has_escapes & 63u << 6 * j) patch_tile(j, a);
        }

        __device__ __forceinline__ void patch_tile(u32 j, u32 (&a)[4][4]) const {
            // Read again: between super-tiles without escapes no register holds it.
            const u32 ends = load_shared_u32(this->slot + SliceNote::ENDS);
            const bool is_crowded = this->is_crowded(ends);
            u32 i, end;
            const u32* escapes = nullptr;
            if (is_crowded) escapes = this->find_crowded(p, tile, j, i, end);
            else this->find_entries(ends, j, i, end);
#pragma unroll 1
            for (; i < end; i++) {
                this->patch_entry(is_crowded ? __ldg(escapes + i) : load_shared_u32(this->slot + SliceNote::ENTRIES + i * 4), a);
            }
        }
    };

    // As those warps open it that sum one slice after the other: four of them wait for each other at every super-tile, and one
    // of the four has an escape in most of them. Its lanes hold the note's entries, which takes a load less.
    struct GroupSlice : SliceCodes {
        u32 entries;  // lane i's: number i

        __device__ __forceinline__ void open(u32 at, u32 len, u32 lane_index) {
            SliceCodes::open(at, len, lane_index);
            entries = load_shared_u32(at + SliceNote::ENTRIES + min(lane_index, SliceNote::NUM_ENTRIES - 1) * 4);
        }

        __device__ __forceinline__ void patch(const MatmulParams& p, u32 tile, u32 j, u32 (&a)[4][4]) const {
            if ((this->has_escapes >> 6 * j & 63) == 0) return;
            u32 i, end;
            if (this->is_crowded(this->ends)) {
                const u32* escapes = this->find_crowded(p, tile, j, i, end);
#pragma unroll 1
                for (; i < end; i++) this->patch_entry(__ldg(escapes + i), a);
                return;
            }
            this->find_entries(this->ends, j, i, end);
#pragma unroll 1
            do {
                const u32 entry = __shfl_sync(0xFFFFFFFF, entries, i);
                patch_escape_together(a, entry, entry >> 21 == this->lane && this->is_wanted(entry));
            } while (++i < end);
        }
    };
};

SKINNY_MATMUL_KERNELS(w12_matmul, W12Weights<true>)
SKINNY_MATMUL_KERNELS(w12_matmul_q, W12Weights<false>)
WGMMA_MATMUL_KERNELS_OF_FEW(w12_matmul, W12Weights<true>)
WGMMA_MATMUL_KERNELS_OF_FEW(w12_matmul_q, W12Weights<false>)
WGMMA_MATMUL_KERNELS(w12_matmul, W12Weights<true>)
WGMMA_MATMUL_KERNELS(w12_matmul_q, W12Weights<false>)
