// BF16 weights times 1..32 rows, in the order of slice_sums.cuh.
#include "skinny_matmul.cuh"
#include "staged_matmul.cuh"

struct Bf16Weights {
    static constexpr u32 TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS * 2;
    static constexpr u32 FIRST_BYTES = TILE_BYTES;
    static constexpr u32 NOTE_BYTES = 0;
    static constexpr u32 STORED_TILE_BYTES = TILE_BYTES;

    // A lane's part of a super-tile.
    using Codes = uint4[4];

    // A piece of a slice that has arrived.
    struct Piece {
        const u32 slot, lane;

        __device__ __forceinline__ Piece(const MatmulParams&, u32, u32 at, u32, u32 lane_index) : slot(at), lane(lane_index) {}

        __device__ __forceinline__ void load(u32 j, Codes& codes) const {
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                codes[fragment] = load_shared_16(slot + j * TILE_BYTES + fragment * 512 + lane * 16);
            }
        }

        __device__ __forceinline__ void decode(const Codes& codes, u32 (&a)[4][4]) const {
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                const uint4 r = codes[fragment];
                a[fragment][0] = r.x, a[fragment][1] = r.y, a[fragment][2] = r.z, a[fragment][3] = r.w;
            }
        }

        __device__ __forceinline__ void patch(u32, u32 (&)[4][4]) const {}
    };
};

SKINNY_MATMUL_KERNELS(bf16_matmul, Bf16Weights)
#if __CUDA_ARCH__ == 900
STAGED_MATMUL_KERNELS(bf16_matmul_staged, Bf16Weights)
#endif
