//! The stock configuration at 27B shapes: cuBLASLt's matmuls as its layers call them, the kernels between them, the
//! recurrence, and their sum over a pass.

use std::slice;

use half::bf16;
use serde_json::{Value, json};
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::Epilogue;
use specpilot_rs::kernels::gate::GateKind;
use specpilot_rs::kernels::gdn_recurrent::{
    AdvanceArgs, ChainArgs, GdnRecurrent, GdnRecurrentArgs, GdnRecurrentWeights, projected_len,
};
use specpilot_rs::kernels::gdn_wy::{GdnLayerCache, GdnShape, GdnTail};
use specpilot_rs::kernels::paths::RowPaths;
use specpilot_rs::kernels::round_rows::{
    GatedBy, Norm, RoundRows, RoundRowsArgs, RowSource, Vectors,
};
use specpilot_rs::kernels::stock_matmul::{self, StockMatrix};

use super::numbers::{filled, tree};
use super::planted::rows_bf16;
use super::timing;

const HIDDEN: usize = 5120;
const INTERMEDIATE: usize = 17408;
const GDN_LAYERS: usize = 48;
const ATTENTION_LAYERS: usize = 16;
const ALL_LAYERS: usize = GDN_LAYERS + ATTENTION_LAYERS;
const SHAPE: GdnShape = GdnShape {
    num_key_heads: 16,
    num_value_heads: 48,
    key_dim: 128,
    value_dim: 128,
    conv_kernel: 4,
};
const COMMITTED_LEN: usize = 328;
/// Plain decoding, chains of a drafter's block and more.
const ROWS: [usize; 5] = [1, 8, 17, 32, 64];
/// Bytes that copies of one matrix take together, several times an L2 cache.
const ROTATED_BYTES: usize = 400_000_000;

/// Name, channels, columns, how often in a pass, whether sums are added to the residual stream.
const MATRICES: [(&str, usize, usize, usize, bool); 7] = [
    ("gate+up", 2 * INTERMEDIATE, HIDDEN, ALL_LAYERS, false),
    ("down", HIDDEN, INTERMEDIATE, ALL_LAYERS, true),
    ("qkv+z+a+b", 16480, HIDDEN, GDN_LAYERS, false),
    ("o", HIDDEN, 6144, ALL_LAYERS, true),
    ("q+gate", 12288, HIDDEN, ATTENTION_LAYERS, false),
    ("k or v", 1024, HIDDEN, 2 * ATTENTION_LAYERS, false),
    ("head", 248_320, HIDDEN, 1, false),
];

/// A line per matrix and row count, then the rest of a pass and the sums.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    if let Err(error) = cuda.cublaslt() {
        println!("stock skipped: {error}");
        return Vec::new();
    }
    let mut results = Vec::new();
    let mut sums = [0.0; ROWS.len()];
    for (name, n, k, num_calls, adds) in MATRICES {
        let times = matrix_us(device, cuda, n, k, adds);
        let mut line = format!("stock {name:9} x {num_calls:2}:");
        for ((us, rows), sum) in times.into_iter().zip(ROWS).zip(&mut sums) {
            *sum += us * num_calls as f64;
            line += &format!("  {rows:2} rows {us:6.1} us");
            results.push(json!({"kernel": "cublaslt_fp32", "matrix": name, "rows": rows, "us": us, "calls": num_calls}));
        }
        println!("{line}");
    }
    let mut recurrence = Recurrence::new(device);
    for (rows, matmuls) in ROWS.into_iter().zip(sums) {
        let rounding = rounding_us(device, cuda, rows);
        let gdn = recurrence.pass_us(device, cuda, rows);
        let total = matmuls + rounding + gdn;
        println!(
            "stock {rows:2} rows: matmuls {matmuls:7.0} us, norms and gates {rounding:5.0}, recurrence {gdn:5.0}, \
             sum without attention {total:7.0}"
        );
        results.push(json!({"kernel": "stock_pass", "rows": rows, "matmuls_us": matmuls, "rounding_us": rounding, "gdn_us": gdn}));
    }
    let us = recurrence.advance_us(device, cuda);
    println!("stock states of {GDN_LAYERS} layers over 5 tokens: {us:5.1} us");
    results.push(json!({"kernel": "gdn_recurrent_advance", "us": us, "layers": GDN_LAYERS}));
    results
}

fn matrix_us(
    device: &Device,
    cuda: &CudaDevice,
    n: usize,
    k: usize,
    adds: bool,
) -> [f64; ROWS.len()] {
    let num_copies = (ROTATED_BYTES / (2 * n * k)).clamp(1, 24) + 1;
    let matrix = |seed| StockMatrix::from_rows(rows_bf16(device, n, k, seed + 1), k);
    let copies: Vec<StockMatrix> = (0..num_copies as u32).map(matrix).collect();
    let x = rows_bf16(device, 64, k, 99);
    let mut y = device.try_alloc::<f32>(64 * n).expect("room for results");
    let epilogue = if adds {
        Epilogue::AddToOutput
    } else {
        Epilogue::Store
    };
    let num_calls = if n > 100_000 { 4 } else { 24 };
    ROWS.map(|rows| {
        timing::graph_us(cuda, num_calls, |call| {
            let weight = &copies[call % num_copies];
            stock_matmul::multiply(device, &x, rows, weight, &mut y, epilogue)
                .expect("a multiplication");
        })
    })
}

/// Norms, gates and gated norms of a pass, each with its rounding.
fn rounding_us(device: &Device, cuda: &CudaDevice, rows: usize) -> f64 {
    let x = filled(device, rows * 2 * INTERMEDIATE, 1.0);
    let weight = filled(device, HIDDEN, 1.0);
    let mut y: Buffer<bf16> = device.try_alloc(rows * INTERMEDIATE).expect("room");
    let norm = Norm {
        weight: &weight,
        eps: 1e-6,
    };
    let gated = |gates| GatedBy {
        kind: GateKind::SiluMultiply,
        gates,
    };
    let (heads, width, longer) = (
        SHAPE.num_value_heads,
        SHAPE.value_dim,
        projected_len(&SHAPE),
    );
    let heads_of = |offset, row_stride| Vectors {
        values: &x,
        offset,
        per_row: heads,
        stride: width,
        row_stride,
    };
    let halves = Vectors::columns(&x, 0, 2 * INTERMEDIATE);
    let mut us = |source, x, num_vectors, width| {
        timing::graph_us(cuda, 24, |_| {
            let y = &mut y;
            let args = RoundRowsArgs {
                source,
                x,
                num_vectors,
                width,
                y,
            };
            RoundRows::run(device, args).expect("a rounding");
        })
    };
    let normed = us(
        RowSource::Normed(norm),
        Vectors::rows(&x, HIDDEN),
        rows,
        HIDDEN,
    );
    let up = Vectors::columns(&x, INTERMEDIATE, 2 * INTERMEDIATE);
    let mlp = us(RowSource::Gated(gated(halves)), up, rows, INTERMEDIATE);
    let gates = heads_of(SHAPE.conv_channels(), longer);
    let source = RowSource::NormedAndGated(norm, gated(gates));
    let outputs = us(source, heads_of(0, heads * width), rows * heads, width);
    let (all, gdn) = (ALL_LAYERS as f64, GDN_LAYERS as f64);
    2.0 * all * normed + all * mlp + gdn * outputs
}

struct Recurrence {
    conv: Buffer<f32>,
    a_log: Buffer<f32>,
    dt_bias: Buffer<f32>,
    layers: Vec<GdnLayerCache>,
}

impl Recurrence {
    fn new(device: &Device) -> Self {
        let layer = |_| {
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
        Self {
            conv: filled(device, SHAPE.conv_channels() * SHAPE.conv_kernel, 0.5),
            a_log: filled(device, SHAPE.num_value_heads, 1.0),
            dt_bias: filled(device, SHAPE.num_value_heads, 1.0),
            layers: (0..GDN_LAYERS).map(layer).collect(),
        }
    }

    fn pass_us(&self, device: &Device, cuda: &CudaDevice, rows: usize) -> f64 {
        let mut paths = RowPaths::default();
        paths
            .push_segment(0, COMMITTED_LEN, &[], &tree(rows, rows))
            .expect("short paths");
        paths.finish(device).expect("room for the rows");
        let values = |row_len: usize| filled(device, rows * row_len, 1.0);
        let projected = values(projected_len(&SHAPE));
        let mut tail = GdnTail::new(device, &SHAPE, rows).expect("room for a tail");
        let (mut qkv, mut y) = (values(SHAPE.conv_channels()), values(SHAPE.values_len()));
        GDN_LAYERS as f64
            * timing::graph_us(cuda, GDN_LAYERS, |call| {
                let args = ChainArgs {
                    shape: &SHAPE,
                    weights: GdnRecurrentWeights {
                        conv: &self.conv,
                        a_log: &self.a_log,
                        dt_bias: &self.dt_bias,
                    },
                    projected: &projected,
                    paths: &paths,
                    segments: 0..1,
                    cache: &self.layers[call],
                    tail_qkv: &mut qkv,
                    tail: &mut tail,
                    y: &mut y,
                };
                GdnRecurrent::run(device, GdnRecurrentArgs::Chain(args)).expect("a pass");
            })
    }

    /// Microseconds of all layers' states over as many tokens as a chain usually brings.
    fn advance_us(&mut self, device: &Device, cuda: &CudaDevice) -> f64 {
        let layers = slice::from_mut(&mut self.layers);
        timing::graph_us(cuda, 4, |_| {
            let args = AdvanceArgs {
                shape: &SHAPE,
                layers: &mut layers[0],
                slot: 0,
                positions: COMMITTED_LEN..COMMITTED_LEN + 5,
            };
            GdnRecurrent::run(device, GdnRecurrentArgs::Advance(args)).expect("an advance");
        })
    }
}
