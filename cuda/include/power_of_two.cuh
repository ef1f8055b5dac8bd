// The exponential that the hardware has.
#pragma once

// 2^x, to two units in the last place; what is too small becomes zero.
__device__ __forceinline__ float power_of_two(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
