// Keys and values into pages: a block copies one row of one layer.
#include "placed_rows.cuh"

constexpr u32 KV_BLOCK = 64;
constexpr u32 MAX_LAYERS = 64;

struct KvLayer {
    const float* k_tail;  // [rows][kv_heads][head_dim]
    const float* v_tail;
    float* k_pages;  // [page][kv_heads][64][head_dim]
    float* v_pages;
    u32 kv_heads;
    u32 head_dim;
};

struct AppendKvParams {
    const PlacedRow* rows;  // [num_rows]
    u32 num_rows;
    u32 num_layers;
    KvLayer layers[MAX_LAYERS];
};

extern "C" __global__ void append_kv(const __grid_constant__ AppendKvParams p) {
    launch_dependents();
    const KvLayer& layer = p.layers[blockIdx.x / p.num_rows];
    const PlacedRow placed = p.rows[blockIdx.x % p.num_rows];
    wait_for_predecessors();
    const u64 row_len = static_cast<u64>(layer.kv_heads) * layer.head_dim;
    for (u32 head = 0; head < layer.kv_heads; head++) {
        const u64 from = placed.row * row_len + static_cast<u64>(head) * layer.head_dim;
        const u64 lane = (static_cast<u64>(placed.page) * layer.kv_heads + head) * KV_BLOCK + placed.position % KV_BLOCK;
        const u64 to = lane * layer.head_dim;
        copy_floats(layer.k_pages + to, layer.k_tail + from, layer.head_dim, threadIdx.x, blockDim.x);
        copy_floats(layer.v_pages + to, layer.v_tail + from, layer.head_dim, threadIdx.x, blockDim.x);
    }
}
