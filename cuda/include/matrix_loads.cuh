// Operands of the BF16 matrix instruction from rows in shared memory, which start at multiples of 16 bytes.
#pragma once

#include "mma.cuh"

// Four 8 x 8 matrices; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(u32 (&values)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3]) : "r"(shared_address(row)) : "memory");
}

// Likewise, each matrix transposed.
__device__ __forceinline__ void load_transposed(u32 (&values)[4], const u16* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(values[0]), "=r"(values[1]), "=r"(values[2]), "=r"(values[3]) : "r"(shared_address(row)) : "memory");
}
