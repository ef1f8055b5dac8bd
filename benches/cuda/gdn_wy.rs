//! Gated DeltaNet over 48 layers of the 27B shape: microseconds for all of them, at a log of D + F/2.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::gdn_fold::{GdnFold, GdnFoldArgs};
use specpilot_rs::kernels::gdn_wy::{
    ANCHOR_DELAY, FOLD_INTERVAL, GdnLayerCache, GdnShape, GdnTail, GdnWeights, GdnWy, GdnWyArgs,
    anchor_of,
};
use specpilot_rs::kernels::paths::RowPaths;

use super::numbers::{filled, tree};
use super::timing;

const NUM_LAYERS: usize = 48;
const SHAPE: GdnShape = GdnShape {
    num_key_heads: 16,
    num_value_heads: 48,
    key_dim: 128,
    value_dim: 128,
    conv_kernel: 4,
};
/// Half an interval behind an anchor, so that trees of up to 16 levels read one state.
const COMMITTED_LEN: usize = ANCHOR_DELAY + 8 * FOLD_INTERVAL + FOLD_INTERVAL / 2;
/// Rows, and levels of their tree.
const CASES: [(usize, usize); 7] = [
    (1, 1),
    (8, 8),
    (16, 12),
    (32, 16),
    (32, 32),
    (64, 16),
    (64, 64),
];

struct Weights {
    conv: Buffer<f32>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    norm: Buffer<f32>,
}

/// A line per case, and the fold.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    let weights = Weights {
        conv: filled(device, SHAPE.conv_channels() * SHAPE.conv_kernel, 0.5),
        a_log: filled(device, SHAPE.num_value_heads, 1.0),
        dt_bias: filled(device, SHAPE.num_value_heads, 1.0),
        norm: filled(device, SHAPE.value_dim, 1.0),
    };
    let layer = || {
        let mut cache = GdnLayerCache::new(device, &SHAPE, 1).expect("room");
        for buffer in [
            &mut cache.states,
            &mut cache.log_k,
            &mut cache.log_d,
            &mut cache.conv,
        ] {
            *buffer = filled(device, buffer.len(), 0.1);
        }
        cache
    };
    let mut layers: Vec<_> = (0..NUM_LAYERS).map(|_| layer()).collect();
    let mut results: Vec<Value> = CASES
        .into_iter()
        .map(|(num_rows, num_levels)| {
            let us = pass_us(device, cuda, &weights, &layers, num_rows, num_levels);
            println!("gdn_wy {num_rows:2} rows, {num_levels:2} levels: {us:6.1} us for {NUM_LAYERS} layers");
            json!({"kernel": "gdn_wy", "rows": num_rows, "levels": num_levels, "us": us, "layers": NUM_LAYERS})
        })
        .collect();
    let us = NUM_LAYERS as f64
        * timing::graph_us(cuda, NUM_LAYERS, |call| {
            let args = GdnFoldArgs {
                shape: &SHAPE,
                cache: &mut layers[call],
                slot: 0,
                anchor: anchor_of(COMMITTED_LEN),
            };
            GdnFold::run(device, args).expect("a fold");
        });
    println!("gdn_fold: {us:6.1} us for {NUM_LAYERS} layers");
    results.push(json!({"kernel": "gdn_fold", "us": us, "layers": NUM_LAYERS}));
    results
}

fn pass_us(
    device: &Device,
    cuda: &CudaDevice,
    weights: &Weights,
    layers: &[GdnLayerCache],
    num_rows: usize,
    num_levels: usize,
) -> f64 {
    let mut paths = RowPaths::default();
    paths
        .push_segment(0, COMMITTED_LEN, &[], &tree(num_rows, num_levels))
        .expect("short paths");
    paths.finish(device).expect("room for the rows");
    let rows = |row_len: usize| filled(device, num_rows * row_len, 1.0);
    let (qkv, z) = (rows(SHAPE.conv_channels()), rows(SHAPE.values_len()));
    let (a, b) = (rows(SHAPE.num_value_heads), rows(SHAPE.num_value_heads));
    let mut tail = GdnTail::new(device, &SHAPE, num_rows).expect("room for a tail");
    let mut y = rows(SHAPE.values_len());
    NUM_LAYERS as f64
        * timing::graph_us(cuda, NUM_LAYERS, |call| {
            let args = GdnWyArgs {
                shape: &SHAPE,
                weights: GdnWeights {
                    conv: &weights.conv,
                    a_log: &weights.a_log,
                    dt_bias: &weights.dt_bias,
                    norm: &weights.norm,
                    norm_eps: 1e-6,
                },
                qkv: &qkv,
                z: &z,
                a: &a,
                b: &b,
                paths: &paths,
                segments: 0..1,
                cache: &layers[call],
                tail: &mut tail,
                y: (&mut y).into(),
            };
            GdnWy::run(device, args).expect("a pass");
        })
}
