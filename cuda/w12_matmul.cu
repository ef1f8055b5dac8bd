// W12 weights times 1..32 rows, in the order of skinny_matmul.cuh: the bits of bf16_matmul on the decoded weights.
//
// `w12_matmul_*` read both planes. `w12_matmul_q_*` read the 8-bit plane alone, the low mantissa bits at their midpoint;
// escapes above the window are exact there, those below stay the window's smallest code.
#include "skinny_matmul.cuh"
#include "w12_decode.cuh"

template <bool IS_EXACT>
struct W12Weights {
    static constexpr u32 PLANE8_BYTES = TILE_CHANNELS * TILE_COLUMNS;
    static constexpr u32 PLANE4_BYTES = PLANE8_BYTES / 2;
    static constexpr u32 TILE_BYTES = IS_EXACT ? PLANE8_BYTES + PLANE4_BYTES : PLANE8_BYTES;

    // A slot holds the slice's 8-bit planes, then its 4-bit planes.
    static __device__ __forceinline__ void copy(const MatmulParams& p, u64 tile, u32 num_tiles, u32 slot, u32 barrier,
                                                u64 policy, u32 lane) {
        copy_async(slot, p.plane8 + tile * PLANE8_BYTES, num_tiles * PLANE8_BYTES, barrier, policy, lane);
        if (IS_EXACT) {
            copy_async(slot + p.slice_tiles * PLANE8_BYTES, p.plane4 + tile * PLANE4_BYTES, num_tiles * PLANE4_BYTES, barrier,
                       policy, lane);
        }
    }

    // What a warp knows of the channels and escapes of its slices, loaded one slice ahead of its use, starts two.
    template <u32 BLOCK_OCTETS>
    struct Context {
        u32 base_words, next_base_words, second_next_base_words;  // base of channel g; of channel g + 8 in the high half
        u32 starts, next_starts, second_next_starts;  // lane j: first escape of the slice's super-tile j; beyond, the end
        u32 entries, next_entries;                    // lane i: the slice's escape i
        u32 has_escapes;                              // bit j: super-tile j has some
        LaneBases bases;
        UnitCursor ahead;
        SliceSpan ahead_span;
        u32 octet_ahead, units_ahead;

        __device__ __forceinline__ Context(const MatmulParams& p, UnitCursor unit, SliceSpan span, u32 num_units, u32 k_tiles,
                                           u32 num_tiles, u32 slice, u32 lane)
            : ahead(unit), ahead_span(span), octet_ahead(0), units_ahead(num_units) {
            next_base_words = load_bases(p, lane);
            next_starts = load_starts(p, k_tiles, lane);
            step_ahead(p, k_tiles, num_tiles, slice);
            second_next_starts = load_starts(p, k_tiles, lane);
            second_next_base_words = load_bases(p, lane);
        }

        // What needs the first loads' results; called after other loads are under way.
        __device__ __forceinline__ void begin(const MatmulParams& p, u32 lane) {
            next_entries = load_entries(p, next_starts, lane);
        }

        __device__ __forceinline__ void step_ahead(const MatmulParams& p, u32 k_tiles, u32 num_tiles, u32 slice) {
            if (units_ahead == 0) return;
            if (++octet_ahead == BLOCK_OCTETS) {
                octet_ahead = 0;
                units_ahead--;
                ahead.advance(num_tiles);
            }
            ahead_span = slice_span(p, k_tiles, ahead.group * BLOCK_OCTETS + octet_ahead, slice);
        }

        __device__ __forceinline__ u32 load_bases(const MatmulParams& p, u32 lane) const {
            if (units_ahead == 0) return 0;
            const u8* bases = p.bases + ahead.tile * TILE_CHANNELS + lane / 4;
            return __ldg(bases) | static_cast<u32>(__ldg(bases + 8)) << 16;
        }

        __device__ __forceinline__ u32 load_starts(const MatmulParams& p, u32 k_tiles, u32 lane) const {
            if (units_ahead == 0) return 0;
            const u64 first = static_cast<u64>(ahead.tile) * k_tiles + ahead_span.first;
            return __ldg(p.escape_starts + first + min(lane, ahead_span.len));
        }

        static __device__ __forceinline__ u32 load_entries(const MatmulParams& p, u32 starts, u32 lane) {
            const u32 first = __shfl_sync(0xFFFFFFFF, starts, 0);
            const u32 end = __shfl_sync(0xFFFFFFFF, starts, WARP_LANES - 1);
            return first + lane < end ? __ldg(p.escapes + first + lane) : 0;
        }

        __device__ __forceinline__ void begin_slice(const MatmulParams& p, u32 k_tiles, u32 num_tiles, u32 slice,
                                                    u32 lane) {
            base_words = next_base_words;
            starts = next_starts;
            entries = next_entries;
            next_starts = second_next_starts;
            next_base_words = second_next_base_words;
            next_entries = load_entries(p, next_starts, lane);
            step_ahead(p, k_tiles, num_tiles, slice);
            second_next_starts = load_starts(p, k_tiles, lane);
            second_next_base_words = load_bases(p, lane);
            has_escapes = __ballot_sync(0xFFFFFFFF, starts != __shfl_down_sync(0xFFFFFFFF, starts, 1));
            bases.low = (base_words & 0xFF) * 0x00800080u;
            bases.high = (base_words >> 16) * 0x00800080u;
        }

        struct Raw {
            uint4 u, v, x;
        };

        __device__ __forceinline__ Raw load(const MatmulParams& p, u32 slot, u32 j, u32 lane) const {
            const u32 plane8 = slot + j * PLANE8_BYTES + lane * 16;
            const u32 plane4 = slot + p.slice_tiles * PLANE8_BYTES + j * PLANE4_BYTES + lane * 16;
            return {load_shared_16(plane8), load_shared_16(plane8 + 512),
                    IS_EXACT ? load_shared_16(plane4) : make_uint4(0x88888888, 0x88888888, 0x88888888, 0x88888888)};
        }

        __device__ __forceinline__ void decode(const MatmulParams& p, const Raw& raw, u32 j, u32 lane, u32 (&a)[4][4]) {
            decode_w12(raw.u.x, raw.v.x, raw.x.x, bases, a[0]);
            decode_w12(raw.u.y, raw.v.y, raw.x.y, bases, a[1]);
            decode_w12(raw.u.z, raw.v.z, raw.x.z, bases, a[2]);
            decode_w12(raw.u.w, raw.v.w, raw.x.w, bases, a[3]);
            if (has_escapes >> j & 1) patch(p, j, lane, a);
        }

        __device__ __forceinline__ void patch(const MatmulParams& p, u32 j, u32 lane, u32 (&a)[4][4]) {
            const u32 first = __shfl_sync(0xFFFFFFFF, starts, 0);
            const u32 end = __shfl_sync(0xFFFFFFFF, starts, j + 1);
#pragma unroll 1
            for (u32 i = __shfl_sync(0xFFFFFFFF, starts, j); i < end; i++) {
                const u32 held = i - first;
                const u32 entry = held < WARP_LANES ? __shfl_sync(0xFFFFFFFF, entries, held) : __ldg(p.escapes + i);
                // Only the lane that holds the weight patches it, and that lane knows the channel's base.
                const u32 base = (entry & 1u << 17 ? base_words >> 16 : base_words) & 0xFF;
                if (IS_EXACT || (entry >> 7 & 0xFF) >= base) patch_escape(a, entry, lane);
            }
        }
    };
};

SKINNY_MATMUL_KERNELS(w12_matmul, W12Weights<true>)
SKINNY_MATMUL_KERNELS(w12_matmul_q, W12Weights<false>)
