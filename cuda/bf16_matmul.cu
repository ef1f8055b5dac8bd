// BF16 weights times 1..32 rows, in the order of skinny_matmul.cuh.
#include "skinny_matmul.cuh"

struct Bf16Weights {
    static constexpr u32 TILE_BYTES = TILE_CHANNELS * TILE_COLUMNS * 2;

    static __device__ __forceinline__ void copy(const MatmulParams& p, u64 tile, u32 num_tiles, u32 slot, u32 barrier,
                                                u64 policy, u32 lane) {
        copy_async(slot, p.plane8 + tile * TILE_BYTES, num_tiles * TILE_BYTES, barrier, policy, lane);
    }

    template <u32 BLOCK_OCTETS>
    struct Context {
        struct Raw {
            uint4 fragments[4];
        };

        __device__ __forceinline__ Context(const MatmulParams&, UnitCursor, SliceSpan, u32, u32, u32, u32, u32) {}
        __device__ __forceinline__ void begin(const MatmulParams&, u32) {}
        __device__ __forceinline__ void begin_slice(const MatmulParams&, u32, u32, u32, u32) {}

        __device__ __forceinline__ Raw load(const MatmulParams&, u32 slot, u32 j, u32 lane) const {
            Raw raw;
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                raw.fragments[fragment] = load_shared_16(slot + j * TILE_BYTES + fragment * 512 + lane * 16);
            }
            return raw;
        }

        __device__ __forceinline__ void decode(const MatmulParams&, const Raw& raw, u32, u32, u32 (&a)[4][4]) const {
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                const uint4 r = raw.fragments[fragment];
                a[fragment][0] = r.x, a[fragment][1] = r.y, a[fragment][2] = r.z, a[fragment][3] = r.w;
            }
        }
    };
};

SKINNY_MATMUL_KERNELS(bf16_matmul, Bf16Weights)
