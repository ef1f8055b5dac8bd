// Gated DeltaNet token by token along a chain, from the state of all committed tokens: as stock engines run it.
//
// `gdn_recurrent_inputs` makes normalised keys and queries, values and gates of all rows. `gdn_recurrent` then walks a
// chain: a warp has eight value columns of a head's state, four threads to a column, each with every fourth quad of its
// key rows in registers. `gdn_recurrent_advance` brings states of all layers forward over logged tokens, likewise.
#include "block_reduce.cuh"
#include "row_paths.cuh"

constexpr u32 LOG_POSITIONS = 128;
constexpr u32 STATE_RING = 3;
constexpr u32 INPUT_WARPS = 8;
constexpr u32 WARP_CHANNELS = 128;      // of values or of a key, that one warp makes
constexpr u32 LANE_CHANNELS = WARP_CHANNELS / WARP_LANES;
constexpr u32 MAX_TAPS = 4;
constexpr float KEY_NORM_EPS = 1e-6f;
constexpr u32 CHAIN_WARPS = 2;
constexpr u32 WARP_COLUMNS = 8;         // of a state
constexpr u32 COLUMN_THREADS = 4;
constexpr u32 BLOCK_COLUMNS = CHAIN_WARPS * WARP_COLUMNS;
constexpr u32 MAX_QUADS = 8;            // quads of key rows of a thread: keys of 128
constexpr u32 MAX_LAYERS = 64;          // of one advance

struct GdnSizes {
    u32 num_key_heads;
    u32 num_value_heads;
    u32 key_dim;
    u32 value_dim;

    __device__ __forceinline__ u32 keys_len() const { return num_key_heads * key_dim; }
    __device__ __forceinline__ u32 values_len() const { return num_value_heads * value_dim; }
    __device__ __forceinline__ u32 num_channels() const { return 2 * keys_len() + values_len(); }
    __device__ __forceinline__ u32 num_slices() const { return (value_dim + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS; }
};

struct GdnRecurrentParams {
    RowPaths paths;
    const float* projected;     // [rows][channels, values (gates of the output), value heads (a), value heads (b)]
    const float* conv_weights;  // [channels][taps]
    const float* conv_inputs;   // [slot][taps][channels], position p at p % taps
    const float* a_log;         // [value heads]
    const float* dt_bias;       // [value heads]
    const float* states;        // [slot][STATE_RING][value heads][key_dim][value_dim]; the first of a ring counts
    float* tail_qkv;            // [rows][channels]
    float* tail_k;              // [rows][key heads][key_dim]
    float* tail_d;              // [rows][value heads][value_dim]
    float* tail_g;              // [rows][value heads]
    float* q;                   // scratch, as tail_k
    float* v;                   // scratch, as tail_d
    float* beta;                // scratch, as tail_g
    float* y;                   // [rows][value heads][value_dim]
    GdnSizes sizes;
    u32 num_taps;
    u32 row_len;                // of `projected`
    u32 first_row;              // of this launch, and its segment
    u32 first_segment;
};

// What a lane has of a warp's vector: every 32nd channel from `first` on, after the convolution and its activation. All
// loads come before the first store, so that they are under way together.
struct ConvolvedChannels {
    float values[LANE_CHANNELS];

    __device__ __forceinline__ ConvolvedChannels(const GdnRecurrentParams& p, u32 row, u32 first, u32 end) {
        const u32 lane = threadIdx.x % WARP_LANES, num_channels = p.sizes.num_channels();
        const SegmentFacts segment = p.paths.segments[p.paths.rows[row].segment];
        const u32 position = p.paths.positions[row];
        float inputs[LANE_CHANNELS][MAX_TAPS], weights[LANE_CHANNELS][MAX_TAPS];
#pragma unroll
        for (u32 back = 0; back < MAX_TAPS; back++) {
            // Tokens before the first are left out.
            const bool is_there = back < p.num_taps && back <= position;
            const u32 at = position - back;
            const float* from = at < segment.committed_len
                                    ? p.conv_inputs + (static_cast<u64>(segment.slot) * p.num_taps + at % p.num_taps) * num_channels
                                    : p.projected + static_cast<u64>(row - back) * p.row_len;
#pragma unroll
            for (u32 i = 0; i < LANE_CHANNELS; i++) {
                const u32 channel = first + i * WARP_LANES + lane;
                const bool is_inside = is_there && channel < end;
                inputs[i][back] = is_inside ? from[channel] : 0.0f;
                weights[i][back] = is_inside ? p.conv_weights[channel * p.num_taps + p.num_taps - 1 - back] : 0.0f;
            }
        }
#pragma unroll
        for (u32 i = 0; i < LANE_CHANNELS; i++) {
            const u32 channel = first + i * WARP_LANES + lane;
            float sum = 0.0f;
#pragma unroll
            for (u32 back = MAX_TAPS; back > 0; back--) sum = fmaf(weights[i][back - 1], inputs[i][back - 1], sum);
            values[i] = sum / (1.0f + expf(-sum));
            if (channel < end) p.tail_qkv[static_cast<u64>(row) * num_channels + channel] = inputs[i][0];
        }
    }
};

// A warp per vector: all queries, all keys, then values by WARP_CHANNELS; gates by the first block of a row.
extern "C" __global__ void __launch_bounds__(INPUT_WARPS* WARP_LANES, 1) gdn_recurrent_inputs(const __grid_constant__ GdnRecurrentParams p) {
    wait_for_predecessors();
    launch_dependents();
    const GdnSizes& s = p.sizes;
    const u32 num_vectors = 2 * s.num_key_heads + (s.values_len() + WARP_CHANNELS - 1) / WARP_CHANNELS;
    const u32 row_blocks = (num_vectors + INPUT_WARPS - 1) / INPUT_WARPS;
    const u32 row = p.first_row + blockIdx.x / row_blocks, block = blockIdx.x % row_blocks;
    const u32 vector = block * INPUT_WARPS + threadIdx.x / WARP_LANES, lane = threadIdx.x % WARP_LANES;
    if (block == 0) {
        const float* gates = p.projected + static_cast<u64>(row) * p.row_len + s.num_channels() + s.values_len();
        for (u32 head = threadIdx.x; head < s.num_value_heads; head += INPUT_WARPS * WARP_LANES) {
            const float x = gates[head] + p.dt_bias[head];
            const float softplus = fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x)));
            p.tail_g[row * s.num_value_heads + head] = -expf(p.a_log[head]) * softplus;
            p.beta[row * s.num_value_heads + head] = 1.0f / (1.0f + expf(-gates[s.num_value_heads + head]));
        }
    }
    if (vector >= num_vectors) return;
    if (vector >= 2 * s.num_key_heads) {
        const u32 first = (vector - 2 * s.num_key_heads) * WARP_CHANNELS, keys = 2 * s.keys_len();
        const ConvolvedChannels channels(p, row, keys + first, keys + min(first + WARP_CHANNELS, s.values_len()));
#pragma unroll
        for (u32 i = 0; i < LANE_CHANNELS; i++) {
            const u32 column = first + i * WARP_LANES + lane;
            if (column < s.values_len()) p.v[static_cast<u64>(row) * s.values_len() + column] = channels.values[i];
        }
        return;
    }
    const ConvolvedChannels channels(p, row, vector * s.key_dim, (vector + 1) * s.key_dim);
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < LANE_CHANNELS; i++) squares = fmaf(channels.values[i], channels.values[i], squares);
    const bool is_query = vector < s.num_key_heads;
    const float norm = sqrtf(warp_sum(squares) + KEY_NORM_EPS);
    const float factor = (is_query ? 1.0f / sqrtf(static_cast<float>(s.key_dim)) : 1.0f) / norm;
    float* to = (is_query ? p.q : p.tail_k) + (static_cast<u64>(row) * s.num_key_heads + vector % s.num_key_heads) * s.key_dim;
#pragma unroll
    for (u32 i = 0; i < LANE_CHANNELS; i++) {
        const u32 column = i * WARP_LANES + lane;
        if (column < s.key_dim) to[column] = channels.values[i] * factor;
    }
}

// A thread's share of a head's state: one column, every fourth quad of key rows.
struct StatePart {
    const GdnSizes& sizes;
    u32 head, key_head, column, part;
    float4 rows[MAX_QUADS];

    __device__ __forceinline__ StatePart(const GdnSizes& s, u32 index) : sizes(s) {
        const u32 slice = index % s.num_slices();
        head = index / s.num_slices() % s.num_value_heads;
        key_head = head / (s.num_value_heads / s.num_key_heads);
        column = slice * BLOCK_COLUMNS + threadIdx.x / COLUMN_THREADS;
        part = threadIdx.x % COLUMN_THREADS;
    }

    __device__ __forceinline__ bool is_inside() const { return column < sizes.value_dim; }

    // First of the key rows of a quad.
    __device__ __forceinline__ u32 first_row(u32 quad) const { return (quad * COLUMN_THREADS + part) * 4; }

    __device__ __forceinline__ u64 place(u64 slot, u32 quad) const {
        return ((slot * STATE_RING * sizes.num_value_heads + head) * sizes.key_dim + first_row(quad)) * sizes.value_dim + column;
    }

    __device__ __forceinline__ void load(const float* states, u32 slot) {
#pragma unroll
        for (u32 i = 0; i < MAX_QUADS; i++) {
            rows[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (!is_inside() || first_row(i) >= sizes.key_dim) continue;
            const float* from = states + place(slot, i);
            rows[i] = {from[0], from[sizes.value_dim], from[2 * sizes.value_dim], from[3 * sizes.value_dim]};
        }
    }

    __device__ __forceinline__ void store(float* states, u32 slot) const {
#pragma unroll
        for (u32 i = 0; i < MAX_QUADS; i++) {
            if (!is_inside() || first_row(i) >= sizes.key_dim) continue;
            float* to = states + place(slot, i);
            to[0] = rows[i].x, to[sizes.value_dim] = rows[i].y, to[2 * sizes.value_dim] = rows[i].z, to[3 * sizes.value_dim] = rows[i].w;
        }
    }

    // This thread's columns of a key or a query.
    __device__ __forceinline__ void load_key(const float* key, float4 (&values)[MAX_QUADS]) const {
#pragma unroll
        for (u32 i = 0; i < MAX_QUADS; i++) {
            values[i] = {0.0f, 0.0f, 0.0f, 0.0f};
            if (first_row(i) < sizes.key_dim) values[i] = *reinterpret_cast<const float4*>(key + first_row(i));
        }
    }

    __device__ __forceinline__ void scale(float factor) {
#pragma unroll
        for (u32 i = 0; i < MAX_QUADS; i++) rows[i].x *= factor, rows[i].y *= factor, rows[i].z *= factor, rows[i].w *= factor;
    }

    // The column's product with a key or a query, in all four threads.
    __device__ __forceinline__ float product(const float4 (&key)[MAX_QUADS]) const {
        float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (u32 i = 0; i < MAX_QUADS; i++) {
            sum.x = fmaf(rows[i].x, key[i].x, sum.x), sum.y = fmaf(rows[i].y, key[i].y, sum.y);
            sum.z = fmaf(rows[i].z, key[i].z, sum.z), sum.w = fmaf(rows[i].w, key[i].w, sum.w);
        }
        float total = (sum.x + sum.y) + (sum.z + sum.w);
        total += __shfl_xor_sync(ALL_LANES, total, 1);
        total += __shfl_xor_sync(ALL_LANES, total, 2);
        return total;
    }

    __device__ __forceinline__ void add(const float4 (&key)[MAX_QUADS], float d) {
#pragma unroll
        for (u32 i = 0; i < MAX_QUADS; i++) {
            rows[i].x = fmaf(key[i].x, d, rows[i].x), rows[i].y = fmaf(key[i].y, d, rows[i].y);
            rows[i].z = fmaf(key[i].z, d, rows[i].z), rows[i].w = fmaf(key[i].w, d, rows[i].w);
        }
    }
};

// What a token brings to a column.
struct TokenInputs {
    float4 k[MAX_QUADS], q[MAX_QUADS];
    float v, g, beta;

    __device__ __forceinline__ void load(const GdnRecurrentParams& p, const StatePart& state, u32 row) {
        const u64 key = (static_cast<u64>(row) * p.sizes.num_key_heads + state.key_head) * p.sizes.key_dim;
        const u64 head = static_cast<u64>(row) * p.sizes.num_value_heads + state.head;
        state.load_key(p.tail_k + key, k);
        state.load_key(p.q + key, q);
        v = state.is_inside() ? p.v[head * p.sizes.value_dim + state.column] : 0.0f;
        g = p.tail_g[head];
        beta = p.beta[head];
    }
};

extern "C" __global__ void __launch_bounds__(CHAIN_WARPS* WARP_LANES) gdn_recurrent(const __grid_constant__ GdnRecurrentParams p) {
    const u32 num_parts = p.sizes.num_value_heads * p.sizes.num_slices();
    StatePart state(p.sizes, blockIdx.x % num_parts);
    wait_for_predecessors();
    launch_dependents();
    const SegmentFacts segment = p.paths.segments[p.first_segment + blockIdx.x / num_parts];
    state.load(p.states, segment.slot);
    TokenInputs next;
    next.load(p, state, segment.first_row);
    for (u32 i = 0; i < segment.num_rows; i++) {
        const TokenInputs token = next;
        const u32 row = segment.first_row + i;
        if (i + 1 < segment.num_rows) next.load(p, state, row + 1);
        state.scale(expf(token.g));
        const float d = token.beta * (token.v - state.product(token.k));
        state.add(token.k, d);
        const float y = state.product(token.q);
        if (state.part == 0 && state.is_inside()) {
            const u64 at = (static_cast<u64>(row) * p.sizes.num_value_heads + state.head) * p.sizes.value_dim + state.column;
            p.tail_d[at] = d;
            p.y[at] = y;
        }
    }
}

struct LayerLog {
    float* states;
    const float* log_k;  // [slot][LOG_POSITIONS][key heads][key_dim]
    const float* log_d;  // [slot][LOG_POSITIONS][value heads][value_dim]
    const float* log_g;  // [slot][LOG_POSITIONS][value heads]
};

struct GdnAdvanceParams {
    LayerLog layers[MAX_LAYERS];
    GdnSizes sizes;
    u32 slot;
    u32 first;  // position
    u32 end;
};

extern "C" __global__ void __launch_bounds__(CHAIN_WARPS* WARP_LANES) gdn_recurrent_advance(const __grid_constant__ GdnAdvanceParams p) {
    const u32 num_parts = p.sizes.num_value_heads * p.sizes.num_slices();
    StatePart state(p.sizes, blockIdx.x % num_parts);
    const LayerLog& layer = p.layers[blockIdx.x / num_parts];
    wait_for_predecessors();
    launch_dependents();
    state.load(layer.states, p.slot);
#pragma unroll 2
    for (u32 position = p.first; position < p.end; position++) {
        const u64 row = static_cast<u64>(p.slot) * LOG_POSITIONS + position % LOG_POSITIONS;
        const u64 head = row * p.sizes.num_value_heads + state.head;
        float4 key[MAX_QUADS];
        state.load_key(layer.log_k + (row * p.sizes.num_key_heads + state.key_head) * p.sizes.key_dim, key);
        const float d = state.is_inside() ? layer.log_d[head * p.sizes.value_dim + state.column] : 0.0f;
        state.scale(expf(layer.log_g[head]));
        state.add(key, d);
    }
    state.store(layer.states, p.slot);
}
