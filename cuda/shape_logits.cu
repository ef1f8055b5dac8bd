// y = cap(multiplier * y), value by value and in place, with the arithmetic of draft_select.cu.
#include "async_copy.cuh"

struct ShapeLogitsParams {
    float* logits;
    u64 num_values;
    float multiplier;
    float softcap;  // 0 without
};

extern "C" __global__ void shape_logits(const __grid_constant__ ShapeLogitsParams p) {
    launch_dependents();
    wait_for_predecessors();
    for (u64 i = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x; i < p.num_values; i += static_cast<u64>(gridDim.x) * blockDim.x) {
        const float scaled = p.logits[i] * p.multiplier;
        // c * tanh(l / c) = c - 2c / (e^(2l / c) + 1)
        p.logits[i] = p.softcap == 0.0f ? scaled : p.softcap - 2.0f * p.softcap / (expf(scaled * (2.0f / p.softcap)) + 1.0f);
    }
}
