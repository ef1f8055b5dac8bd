//! Candidate selection: time and logits read per block over real vocabularies, marginal and with the selector.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use half::bf16;
use specpilot_rs::device::{Buffer, Device, Staged};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::PackedBf16;
use specpilot_rs::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape, Selector};

/// Name, drafted positions, vocabulary, rank of the selector.
const SHAPES: [(&str, usize, usize, usize); 2] =
    [("demo", 15, 8192, 64), ("27b_dflash2", 7, 248_320, 256)];
const TOP_K: usize = 16;

/// Logits between -8 and 8 in no order.
fn logits(len: usize) -> Buffer<f32> {
    let values: Vec<f32> = (0..len as u32)
        .map(|i| i.wrapping_mul(0x9E37_79B9) as i32 as f32 / 268_435_456.0)
        .collect();
    Buffer::from_slice(&values)
}

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("draft_select");
    for (name, num_levels, vocab_size, rank) in SHAPES {
        let mut case = None;
        for with_selector in [false, true] {
            group.throughput(Throughput::Bytes(
                (num_levels * vocab_size * size_of::<f32>()) as u64,
            ));
            let scores = if with_selector {
                "selector"
            } else {
                "marginal"
            };
            group.bench_function(BenchmarkId::new(name, scores), |b| {
                let (logits, codebook, gate) = case.get_or_insert_with(|| {
                    let codebook = vec![bf16::from_f32(0.1); vocab_size * rank];
                    (
                        logits(num_levels * vocab_size),
                        PackedBf16::pack(&codebook, vocab_size, rank),
                        Buffer::from_slice(&vec![0.1_f32; num_levels * rank]),
                    )
                });
                let anchor_tokens = Staged::on_host(vec![7]);
                let mut token_ids = device.try_alloc::<u32>(num_levels * TOP_K).unwrap();
                let mut log_probs = device.try_alloc::<f32>(num_levels * TOP_K * TOP_K).unwrap();
                b.iter(|| {
                    let args = DraftSelectArgs {
                        logits,
                        vocab_size,
                        num_levels,
                        num_blocks: 1,
                        top_k: TOP_K,
                        shape: LogitShape {
                            multiplier: 1.0,
                            softcap: None,
                        },
                        selector: with_selector.then_some(Selector {
                            gate,
                            predecessor: codebook,
                            successor: codebook,
                            anchor_tokens: &anchor_tokens,
                        }),
                        token_ids: &mut token_ids,
                        log_probs: &mut log_probs,
                    };
                    DraftSelect::run(&device, args).expect("buffers fit the shape");
                    black_box(&log_probs);
                });
            });
        }
    }
    group.finish();
}
