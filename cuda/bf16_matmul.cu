// BF16 weights times 1..32 rows, in the order of slice_sums.cuh.
#include "skinny_matmul.cuh"
#include "wgmma_matmul.cuh"

struct Bf16Weights {
    static constexpr u32 TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS * 2;
    static constexpr u32 NOTE_BYTES = 0;
    static constexpr bool IS_DECODED = false;
    static constexpr u32 STORED_TILE_BYTES = TILE_BYTES;

    template <u32 GROUPS>
    using Rows = SliceRows<GROUPS>;

    // Where a super-tile's are, of a lane: nothing is decoded, so loading them ahead would take the registers of operand A twice.
    struct Words {
        u32 at;
    };

    // A slice that has arrived.
    struct Slice {
        u32 slot, lane;

        Slice() = default;
        __device__ __forceinline__ Slice(const MatmulParams&, u32, u32 at, u32, u32 lane_index) : slot(at), lane(lane_index) {}

        __device__ __forceinline__ void load(u32 j, Words& words) const { words.at = slot + j * TILE_BYTES + lane * 16; }

        __device__ __forceinline__ void decode(const Words& words, u32 (&a)[4][4]) const {
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                const uint4 r = load_shared_16(words.at + fragment * 512);
                a[fragment][0] = r.x, a[fragment][1] = r.y, a[fragment][2] = r.z, a[fragment][3] = r.w;
            }
        }

        __device__ __forceinline__ void decode(u32 j, u32 (&a)[4][4]) const {
            Words words;
            load(j, words);
            decode(words, a);
        }

        __device__ __forceinline__ void patch(u32, u32 (&)[4][4]) const {}
    };

    // As those warps open it that sum one slice after the other.
    struct GroupSlice : Slice {
        __device__ __forceinline__ void open(u32 at, u32, u32 lane_index) { slot = at, lane = lane_index; }
        __device__ __forceinline__ void patch(const MatmulParams&, u32, u32, u32 (&)[4][4]) const {}
    };
};

SKINNY_MATMUL_KERNELS(bf16_matmul, Bf16Weights)
WGMMA_MATMUL_KERNELS(bf16_matmul, Bf16Weights)
