//! The matmuls of one layer of a 27B, one after the other as a pass runs them: in a graph every launch begins while the one
//! before it ends. Beside them cuBLASLt's best candidate for each, chained likewise, and what the launches of each matrix
//! take when only their like stand beside them.

use serde_json::{Value, json};
use specpilot_rs::device::cuda::{CudaDevice, LtOperands, LtProduct, LtShape, LtValues};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::bf16_matmul::Epilogue;
use specpilot_rs::kernels::rounded_matmul::{RoundedRows, multiply_rounded};

use super::planted::{Planted, activations, address};
use super::{Variant, timing};

/// Name, channels, columns; in the order of a layer with Gated DeltaNet.
const MATRICES: [(&str, usize, usize); 4] = [
    ("qkv+z", 16384, 5120),
    ("o", 5120, 6144),
    ("gate+up", 34816, 5120),
    ("down", 5120, 17408),
];
const ROWS: [usize; 6] = [1, 8, 16, 32, 40, 64];
const MOST_ROWS: usize = 64;
const NUM_LAYERS: usize = 6;

/// One matrix of every layer, and what it is multiplied with.
struct Place {
    layers: Vec<Planted>,
    x: RoundedRows,
    y: Buffer<f32>,
}

impl Place {
    /// For cuBLASLt, whose results take two bytes a value: half of the room for fp32.
    fn operands(&self, layer: usize) -> LtOperands {
        LtOperands {
            weights: address(&self.layers[layer].rows),
            x: self.x.cuda_address().expect("rows on the GPU"),
            y: address(&self.y),
        }
    }
}

/// A line per row count.
pub fn bench(device: &Device, cuda: &CudaDevice) -> Vec<Value> {
    let mut places: Vec<Place> = MATRICES
        .iter()
        .enumerate()
        .map(|(i, &(_, n, k))| Place {
            layers: (0..NUM_LAYERS)
                .map(|layer| {
                    let seed = (layer * MATRICES.len() + i + 1) as u32;
                    Planted::new(device, n, k, seed).expect("room for a matrix")
                })
                .collect(),
            x: activations(device, MOST_ROWS, k).expect("room for activations"),
            y: device.try_alloc(MOST_ROWS * n).expect("room for results"),
        })
        .collect();
    let mut results = Vec::new();
    for num_rows in ROWS {
        let mut line = format!("a layer's matmuls, {num_rows:2} rows:");
        let baseline = lt_us(cuda, &places, num_rows);
        if let Some(us) = baseline {
            line += &format!("  cublaslt {us:6.1} us");
        }
        for (variant, label) in Variant::ALL {
            let multiply = |place: &mut Place, layer: usize| {
                let weights = variant.weights(&place.layers[layer]);
                multiply_rounded(
                    cuda,
                    &place.x,
                    num_rows,
                    weights,
                    &mut place.y,
                    Epilogue::Store,
                )
                .expect("a multiplication");
            };
            let us = timing::graph_us(cuda, NUM_LAYERS, |layer| {
                for place in &mut places {
                    multiply(place, layer);
                }
            });
            let apart: f64 = places
                .iter_mut()
                .map(|place| timing::graph_us(cuda, NUM_LAYERS, |layer| multiply(place, layer)))
                .sum();
            let num_bytes: usize = (MATRICES.iter().zip(&places))
                .map(|(&(_, n, k), place)| variant.num_bytes(n, k, place.layers[0].num_escapes))
                .sum();
            let tb_per_s = num_bytes as f64 / us / 1e6;
            line += &format!("  {label} {us:6.1} us (each alone {apart:6.1}) {tb_per_s:.2} TB/s");
            let ratio = baseline.map(|baseline| baseline / us);
            if let Some(ratio) = ratio {
                line += &format!(" {ratio:.2}x");
            }
            results.push(json!({
                "kernel": format!("layer {label}"), "rows": num_rows, "us": us, "alone_us": apart, "bytes": num_bytes,
                "tb_per_s": tb_per_s, "cublaslt_us": baseline, "layer_ratio": ratio,
            }));
        }
        println!("{line}");
    }
    results
}

/// Microseconds of a layer through cuBLASLt; `None` where there is none.
fn lt_us(cuda: &CudaDevice, places: &[Place], num_rows: usize) -> Option<f64> {
    let lt = cuda.cublaslt().ok()?;
    let mut chosen = Vec::new();
    for (&(_, n, k), place) in MATRICES.iter().zip(places) {
        let shape = LtShape {
            out_features: n,
            in_features: k,
            num_rows,
            values: LtValues::Bf16,
            rounds: true,
            adds_to_output: false,
        };
        let product = LtProduct::new(lt, shape).ok()?;
        let run = |candidate: usize, layer: usize| {
            // SAFETY: weights, activations and result lie on the GPU and have the sizes of the shape.
            unsafe { product.run(lt, cuda, candidate, place.operands(layer)) }.is_ok()
        };
        let times = (0..product.num_candidates())
            .filter(|&candidate| run(candidate, 0))
            .map(|candidate| {
                let us = timing::graph_us(cuda, NUM_LAYERS, |layer| {
                    run(candidate, layer);
                });
                (us, candidate)
            });
        let (_, best) = times.min_by(|a, b| a.0.total_cmp(&b.0))?;
        chosen.push((product, best));
    }
    Some(timing::graph_us(cuda, NUM_LAYERS, |layer| {
        for ((product, candidate), place) in chosen.iter().zip(places) {
            // SAFETY: as above.
            unsafe { product.run(lt, cuda, *candidate, place.operands(layer)) }
                .expect("a multiplication");
        }
    }))
}
