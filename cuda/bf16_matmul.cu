// BF16 weights times 1..32 rows, in the order of slice_sums.cuh.
#include "skinny_matmul.cuh"

struct Bf16Weights {
    static constexpr u32 TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS * 2;
    static constexpr u32 NOTE_BYTES = 0;
    static constexpr u32 STORED_TILE_BYTES = TILE_BYTES;

    struct Raw {
        uint4 fragments[4];
    };

    // A slice that has arrived.
    struct Slice {
        const u32 slot, lane;

        __device__ __forceinline__ Slice(const MatmulParams&, u32 at, u32, u32 lane_index) : slot(at), lane(lane_index) {}

        __device__ __forceinline__ Raw load(u32 j) const {
            Raw raw;
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                raw.fragments[fragment] = load_shared_16(slot + j * TILE_BYTES + fragment * 512 + lane * 16);
            }
            return raw;
        }

        __device__ __forceinline__ void decode(const Raw& raw, u32, u32 (&a)[4][4]) const {
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                const uint4 r = raw.fragments[fragment];
                a[fragment][0] = r.x, a[fragment][1] = r.y, a[fragment][2] = r.z, a[fragment][3] = r.w;
            }
        }
    };
};

SKINNY_MATMUL_KERNELS(bf16_matmul, Bf16Weights)
