// FP8 weights (E4M3 with scales) times 1..32 rows, in the slices of slice_sums.cuh.
//
// `fp8_matmul_*` multiplies by BF16(code * scale): the bits of bf16_matmul on those weights. `fp8_matmul_short_*` does
// the same where all scales are short (see fp8_decode.cuh), with fewer instructions. `fp8_w8a8_matmul_*` multiplies codes
// by codes of activations (`quantise_rows`); a super-tile's products are one chain from zero, which times both scales is
// added to the slice's sum.
#include "quantised_rows.cuh"
#include "skinny_matmul.cuh"

template <class Scale>
struct Fp8Weights : Fp8Layout {
    template <u32 GROUPS>
    using Rows = SliceRows<GROUPS>;

    struct Slice : Fp8Slice {
        __device__ __forceinline__ Slice(const MatmulParams&, u32, u32 at, u32, u32 lane) : Fp8Slice(at, lane) {}

        __device__ __forceinline__ void decode(u32 j, u32 (&a)[4][4]) const {
            decode_channel(codes(j), low_scale_at(j), 0, a);
            decode_channel(codes(j) + HALF_BYTES, high_scale_at(j), 1, a);
        }

        // One of a lane's two channels, which has registers `first` and `first + 2` of every fragment.
        __device__ __forceinline__ static void decode_channel(u32 codes_at, u32 scale_at, u32 first, u32 (&a)[4][4]) {
            const Scale scale(load_shared_u32(scale_at));
            const uint4 codes = load_shared_16(codes_at);
            const u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
            for (u32 fragment = 0; fragment < 4; fragment++) {
                u32 low, high;
                Scale::spread(words[fragment], low, high);
                a[fragment][first] = scale.scaled(low), a[fragment][first + 2] = scale.scaled(high);
            }
        }

        // One weight that is no number makes all sums of its channel so.
        __device__ __forceinline__ void patch(u32 j, u32 (&a)[4][4]) const {
            if (j > 0) return;
            if (has_low_nan()) a[0][0] = 0x7FFF7FFF;
            if (has_high_nan()) a[0][1] = 0x7FFF7FFF;
        }
    };
};

SKINNY_MATMUL_KERNELS(fp8_matmul, Fp8Weights<WholeScale>)
SKINNY_MATMUL_KERNELS(fp8_matmul_short, Fp8Weights<ShortScale>)
SKINNY_MATMUL_KERNELS(fp8_w8a8_matmul, QuantisedFp8Weights)

extern "C" __global__ void quantise_rows(const __grid_constant__ RoundRowsParams p) {
    quantise_rows(Fp32Rows{p.x, p.in_features}, p.rounded, p.num_rows, (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS);
}

extern "C" __global__ void quantise_rounded_rows(const __grid_constant__ RoundRowsParams p) {
    const u32 k_tiles = (p.in_features + TILE_COLUMNS - 1) / TILE_COLUMNS;
    quantise_rows(Bf16Rows{reinterpret_cast<const u16*>(p.x), k_tiles * TILE_COLUMNS}, p.rounded, p.num_rows, k_tiles);
}
