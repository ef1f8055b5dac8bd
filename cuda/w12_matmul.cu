// W12 weights times 1..32 rows, in the order of slice_sums.cuh: the bits of bf16_matmul on the decoded weights.
//
// `w12_matmul_*` read both planes; `q_view_*` are in q_view.cuh. `w12_matmul_q_*` read the 8-bit plane alone, the low
// mantissa bits at their midpoint; escapes above the window are exact there, those below stay the window's smallest code.
#include "skinny_matmul.cuh"
#include "slice_note.cuh"
#include "staged_matmul.cuh"
#include "w12_decode.cuh"
#if __CUDA_ARCH_FEAT_SM90_ALL
#include "q_view.cuh"
#endif

template <bool IS_EXACT>
struct W12Weights {
    static constexpr u32 PLANE8_BYTES = TILE_CHANNELS * TILE_COLUMNS;
    static constexpr u32 PLANE4_BYTES = PLANE8_BYTES / 2;
    static constexpr u32 NOTE_BYTES = SliceNote::BYTES;
    // In memory, and of that what is read.
    static constexpr u32 STORED_TILE_BYTES = PLANE8_BYTES + PLANE4_BYTES;
    static constexpr u32 FIRST_BYTES = PLANE8_BYTES;
    static constexpr u32 TILE_BYTES = IS_EXACT ? STORED_TILE_BYTES : PLANE8_BYTES;

    // A lane's part of a super-tile's planes.
    struct Codes {
        uint4 u, v, x;
    };

    // A piece of a slice that has arrived, with the slice's note.
    struct Piece {
        const MatmulParams& p;
        const u32 tile, slot, lane_place, lane;
        u32 plane4;
        LaneBases bases;
        u32 ends, has_escapes;

        __device__ __forceinline__ Piece(const MatmulParams& params, u32 tile_of_all, u32 at, u32 num, u32 lane_index)
            : p(params), tile(tile_of_all), slot(at), lane_place(at + NOTE_BYTES + lane_index * 16), lane(lane_index) {
            plane4 = lane_place + num * PLANE8_BYTES;
            bases.low = load_shared_u8(slot + SliceNote::BASES + lane / 4) * 0x00800080u;
            bases.high = load_shared_u8(slot + SliceNote::BASES + 8 + lane / 4) * 0x00800080u;
            ends = load_shared_u32(slot + SliceNote::ENDS);
            // A field differs from the one before exactly if its super-tile has escapes.
            has_escapes = ends == SliceNote::CROWDED ? ends : ends ^ ends << 6;
        }

        __device__ __forceinline__ void load(u32 j, Codes& codes) const {
            codes.u = load_shared_16(lane_place + j * PLANE8_BYTES);
            codes.v = load_shared_16(lane_place + j * PLANE8_BYTES + 512);
            codes.x = IS_EXACT ? load_shared_16(plane4 + j * PLANE4_BYTES)
                               : make_uint4(0x88888888, 0x88888888, 0x88888888, 0x88888888);
        }

        __device__ __forceinline__ void decode(const Codes& codes, u32 (&a)[4][4]) const {
            decode_w12(codes.u.x, codes.v.x, codes.x.x, bases, a[0]);
            decode_w12(codes.u.y, codes.v.y, codes.x.y, bases, a[1]);
            decode_w12(codes.u.z, codes.v.z, codes.x.z, bases, a[2]);
            decode_w12(codes.u.w, codes.v.w, codes.x.w, bases, a[3]);
        }

        // Puts escapes of the slice's super-tile `j` over their junk codes.
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
#if __CUDA_ARCH__ == 900
STAGED_MATMUL_KERNELS(w12_matmul_staged, W12Weights<true>)
STAGED_MATMUL_KERNELS(w12_matmul_q_staged, W12Weights<false>)
#endif

#if __CUDA_ARCH_FEAT_SM90_ALL
extern "C" __global__ void __launch_bounds__(512) quantise_rows(const __grid_constant__ QuantiseRowsParams p) { quantise(p); }

#define Q_VIEW_KERNEL(ROWS)                                                                                               \
    extern "C" __global__ void __launch_bounds__(Q_VIEW_THREADS, 1) q_view_##ROWS(const __grid_constant__ QViewParams p) { \
        q_view<ROWS>(p);                                                                                                  \
    }
Q_VIEW_KERNEL(8)
Q_VIEW_KERNEL(16)
Q_VIEW_KERNEL(24)
Q_VIEW_KERNEL(32)
#endif
