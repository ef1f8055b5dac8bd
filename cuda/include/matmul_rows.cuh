// Where a kernel leaves rows: fp32 as they are, or BF16 for a matmul, each row padded with zeros to whole super-tiles.
//
// On Hopper rows for a matmul may be left *arranged* besides, as wgmma takes them: super-tiles of 64 columns, in these groups of
// eight rows, in these a core matrix of 8 x 16 bytes for every eight columns. Column 16 t + 4 f + 2 h + e of a super-tile is
// number 2 t + e of core matrix 2 f + h: fragment f's operand B. Places of rows behind the last one hold anything: a row
// of operand B is in sums of its own alone.
#pragma once

#include "mma.cuh"

// Arranged rows are elements of 16 bits.
struct ArrangedRows {
    u16* values;  // [super-tiles of columns][row_groups][8 core matrices][8 rows][8 columns], or null
    u32 row_groups;

    __device__ __forceinline__ bool are_wanted() const {
#if __CUDA_ARCH_FEAT_SM90_ALL
        return values;
#else
        return false;
#endif
    }

    // Of a pair that begins at an even column.
    __device__ __forceinline__ u16* place(u32 row, u32 column) const {
        const u32 group = column / 64 * row_groups + row / 8, core = column % 16 / 2;
        return values + static_cast<u64>(group) * 512 + core * 64 + row % 8 * 8 + column % 64 / 16 * 2;
    }

    __device__ __forceinline__ void store(u32 row, u32 column, u16 value) const {
        if (are_wanted()) place(row, column)[column % 2] = value;
    }

    __device__ __forceinline__ void store_pair(u32 row, u32 column, u32 pair) const {
        if (are_wanted()) *reinterpret_cast<u32*>(place(row, column)) = pair;
    }

    // A quad's second pair is in the next core matrix.
    __device__ __forceinline__ void store_quad(u32 row, u32 column, uint2 quad) const {
        if (!are_wanted()) return;
        u16* to = place(row, column);
        *reinterpret_cast<u32*>(to) = quad.x;
        *reinterpret_cast<u32*>(to + 64) = quad.y;
    }
};

// Mirrored by `CudaRows` of the launchers.
struct RowsOutput {
    float* values;  // [rows][width], or null
    u16* rounded;   // [rows][padded_width], or null
    ArrangedRows arranged;
    u32 width;
    u32 padded_width;

    __device__ __forceinline__ void store(u32 row, u32 column, float value) const {
        if (rounded) {
            store_rounded(row, column, static_cast<u16>(pack_bf16(value, 0.0f)));
        } else {
            values[static_cast<u64>(row) * width + column] = value;
        }
    }

    // Columns `column` and the next; `column` and `width` are even.
    __device__ __forceinline__ void store_pair(u32 row, u32 column, float2 pair) const {
        if (rounded) {
            const u32 packed = pack_bf16(pair.x, pair.y);
            *reinterpret_cast<u32*>(rounded + static_cast<u64>(row) * padded_width + column) = packed;
            arranged.store_pair(row, column, packed);
        } else {
            *reinterpret_cast<float2*>(values + static_cast<u64>(row) * width + column) = pair;
        }
    }

    // Columns `column` .. `column + 3`; `column` and `width` are multiples of four.
    __device__ __forceinline__ void store_quad(u32 row, u32 column, float4 quad) const {
        if (rounded) {
            const uint2 packed = {pack_bf16(quad.x, quad.y), pack_bf16(quad.z, quad.w)};
            *reinterpret_cast<uint2*>(rounded + static_cast<u64>(row) * padded_width + column) = packed;
            arranged.store_quad(row, column, packed);
        } else {
            *reinterpret_cast<float4*>(values + static_cast<u64>(row) * width + column) = quad;
        }
    }

    // The zeros behind the last column, every `threads`-th of them.
    __device__ __forceinline__ void pad(u32 row, u32 thread, u32 threads) const {
        if (!rounded) return;
        for (u32 column = width + thread; column < padded_width; column += threads) store_rounded(row, column, 0);
    }

    __device__ __forceinline__ void store_rounded(u32 row, u32 column, u16 value) const {
        rounded[static_cast<u64>(row) * padded_width + column] = value;
        arranged.store(row, column, value);
    }
};
