// Products of activations with row-major BF16 weights, and the sums of their terms' magnitudes, in float64.
#include "async_copy.cuh"

struct SumParams {
    const u16* rows;   // [out_features][in_features]
    const u16* x;      // [num_rows][x_stride] BF16
    double* reference; // [num_rows][out_features]
    double* magnitude; // sum of |x w|
    u32 num_rows;
    u32 out_features;
    u32 in_features;
    u32 x_stride;
};

// A warp a channel: exact products, float64 sums.
extern "C" __global__ void sum_in_float64(const __grid_constant__ SumParams p) {
    const u32 lane = threadIdx.x % 32, warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, num_warps = gridDim.x * blockDim.x / 32;
    for (u32 channel = warp; channel < p.out_features; channel += num_warps) {
        for (u32 row = 0; row < p.num_rows; row++) {
            double sum = 0.0, magnitude = 0.0;
            for (u32 k = lane; k < p.in_features; k += 32) {
                const float w = __uint_as_float(static_cast<u32>(p.rows[static_cast<u64>(channel) * p.in_features + k]) << 16);
                const float x = __uint_as_float(static_cast<u32>(p.x[static_cast<u64>(row) * p.x_stride + k]) << 16);
                sum += static_cast<double>(w) * x;
                magnitude += fabs(static_cast<double>(w) * x);
            }
            for (u32 step = 16; step > 0; step /= 2) {
                sum += __shfl_xor_sync(0xFFFFFFFF, sum, step);
                magnitude += __shfl_xor_sync(0xFFFFFFFF, magnitude, step);
            }
            if (lane == 0) {
                p.reference[static_cast<u64>(row) * p.out_features + channel] = sum;
                p.magnitude[static_cast<u64>(row) * p.out_features + channel] = magnitude;
            }
        }
    }
}
