// BF16 weights times 1..32 rows, in the order of skinny_matmul.cuh.
#include "skinny_matmul.cuh"

struct Bf16Weights {
    static constexpr u32 SLOT_BYTES = TILE_CHANNELS * TILE_COLUMNS * 2;

    static __device__ __forceinline__ void copy(const MatmulParams& p, u64 tile, u32 slot, u32 barrier, u64 policy, u32 lane) {
        copy_async<SLOT_BYTES>(slot, p.plane8 + tile * SLOT_BYTES, barrier, policy, lane);
    }

    template <u32 BLOCK_OCTETS>
    struct Context {
        __device__ __forceinline__ Context(const MatmulParams&, UnitCursor, SliceSpan, u32, u32, u32, u32, u32) {}
        __device__ __forceinline__ void begin_slice(const MatmulParams&, u32, u32, u32, u32) {}
        __device__ __forceinline__ void load(const MatmulParams&, u32 slot, u32, u32 lane, u32 (&a)[4][4]) {
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                const uint4 r = load_shared_16(slot + fragment * 512 + lane * 16);
                a[fragment][0] = r.x, a[fragment][1] = r.y, a[fragment][2] = r.z, a[fragment][3] = r.w;
            }
        }
    };
};

SKINNY_MATMUL_KERNELS(bf16_matmul, Bf16Weights)
