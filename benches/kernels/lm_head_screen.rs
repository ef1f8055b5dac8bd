//! The screened LM head against the dense one in one run: ratio of the best times, and how many channels survive.
//!
//! Rows of `clear` lie along one channel, whose logit is eight standard deviations above the rest, as when a model is
//! sure; rows of `unclear` are noise, which no trained model's hidden states are: the worst case in kind.

use std::cell::Cell;
use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion};
use half::bf16;
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::bf16_matmul::{
    Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product,
};
use specpilot_rs::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use specpilot_rs::kernels::lm_head_screen::{
    HeadScores, LmHeadScreen, LmHeadScreenArgs, ScreenedHead,
};
use specpilot_rs::kernels::masked_ids::MaskedIds;

/// Name, vocabulary, hidden size. The last is a quarter of a 27B model's head.
const SHAPES: [(&str, usize, usize); 5] = [
    ("1k_256", 1024, 256),
    ("4k_256", 4096, 256),
    ("demo_8k_256", 8192, 256),
    ("32k_2048", 32_768, 2048),
    ("quarter_27b_64k_5120", 65_536, 5120),
];
const NUM_ROWS: [usize; 3] = [1, 8, 32];
/// How far a clear winner's logit lies above the others, in their standard deviations.
const CLEAR: f32 = 8.0;

/// Roughly normal values.
fn normals(seed: u64) -> impl Iterator<Item = f32> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        let uniforms = (0..4).map(|_| {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (state >> 40) as f32 / (1 << 24) as f32 - 0.5
        });
        uniforms.sum::<f32>() * 1.73
    })
}

struct Case {
    device: Device,
    exact: PackedBf16,
    head: ScreenedHead,
    x: Buffer<f32>,
    logits: Buffer<f32>,
    dense_ids: Vec<u32>,
    screened_ids: Vec<u32>,
    best_logits: Vec<f32>,
    survivors: Vec<u32>,
    fell_back: Vec<bool>,
}

impl Case {
    fn new(vocab_size: usize, hidden_size: usize) -> Self {
        let num_rows = NUM_ROWS[NUM_ROWS.len() - 1];
        let weights: Vec<bf16> = normals(1)
            .take(vocab_size * hidden_size)
            .map(bf16::from_f32)
            .collect();
        let exact = PackedBf16::pack(&weights, vocab_size, hidden_size);
        let device = Device::host(None).expect("worker threads");
        Self {
            head: ScreenedHead::new(&exact),
            logits: device.try_alloc(num_rows * vocab_size).unwrap(),
            x: device.try_alloc(num_rows * hidden_size).unwrap(),
            device,
            exact,
            dense_ids: vec![0; num_rows],
            screened_ids: vec![0; num_rows],
            best_logits: vec![0.0; num_rows],
            survivors: vec![0; num_rows],
            fell_back: vec![false; num_rows],
        }
    }

    fn draw_rows(&mut self, is_clear: bool) {
        let (n, k) = (self.exact.out_features(), self.exact.in_features());
        let mut channel = vec![0.0; k];
        let mut noise = normals(2);
        for (row, x) in self.x.host_mut().chunks_exact_mut(k).enumerate() {
            x.fill_with(|| noise.next().unwrap_or_default());
            if is_clear {
                self.exact.unpack_row(row * 7919 % n, &mut channel);
                let share = CLEAR / (k as f32).sqrt();
                for (x, w) in x.iter_mut().zip(&channel) {
                    *x += share * w;
                }
            }
        }
    }

    fn dense(&mut self, num_rows: usize) {
        let args = Bf16MatmulArgs {
            x: (&self.x).into(),
            num_rows,
            products: vec![Product {
                weight: &self.exact,
                y: &mut self.logits,
            }],
            epilogue: Epilogue::Store,
        };
        Bf16Matmul::run(&self.device, args).expect("buffers fit the shape");
        let args = GreedyArgmaxArgs {
            logits: &self.logits,
            num_rows,
            vocab_size: self.exact.out_features(),
            masked: &MaskedIds::on_host(&vec![&[][..]; num_rows]),
            token_ids: &mut self.dense_ids,
            best_logits: &mut self.best_logits,
        };
        GreedyArgmax::run(&self.device, args).expect("buffers fit the shape");
    }

    fn screened(&mut self, scores: HeadScores, num_rows: usize) {
        let args = LmHeadScreenArgs {
            x: &self.x,
            num_rows,
            head: &self.head,
            exact: &self.exact,
            scores,
            masked: &MaskedIds::on_host(&vec![&[][..]; num_rows]),
            dense_logits: &mut self.logits,
            token_ids: &mut self.screened_ids,
            best_logits: &mut self.best_logits,
            survivors: &mut self.survivors,
            fell_back: &mut self.fell_back,
            top2_gap: None,
        };
        LmHeadScreen::run(&self.device, args).expect("buffers fit the shape");
    }
}

/// Time of `work`, repeated; the shortest goes to `best`.
fn timed(best: &Cell<Duration>, num_times: u64, mut work: impl FnMut()) -> Duration {
    (0..num_times)
        .map(|_| {
            let start = Instant::now();
            work();
            let time = start.elapsed();
            best.set(best.get().min(time));
            time
        })
        .sum()
}

/// Both heads over all shapes and row counts; a line per pair compares them.
pub fn bench(c: &mut Criterion) {
    let mut group = c.benchmark_group("lm_head_screen");
    for (shape, vocab_size, hidden_size) in SHAPES {
        let mut case = None;
        for (kind, is_clear) in [("clear", true), ("unclear", false)] {
            for num_rows in NUM_ROWS {
                let best = [const { Cell::new(Duration::MAX) }; 3];
                let name = format!("{shape}/{kind}/{num_rows}");
                for (path, best) in ["estimated", "dense", "screened"].into_iter().zip(&best) {
                    group.bench_function(BenchmarkId::new(path, &name), |b| {
                        let case = case.get_or_insert_with(|| Case::new(vocab_size, hidden_size));
                        case.draw_rows(is_clear);
                        b.iter_custom(|num_times| {
                            timed(best, num_times, || {
                                match path {
                                    "dense" => case.dense(num_rows),
                                    "screened" => case.screened(HeadScores::Logits, num_rows),
                                    _ => case.screened(HeadScores::Estimates, num_rows),
                                }
                                black_box(&*case);
                            })
                        });
                    });
                }
                if let (Some(case), [estimated, dense, screened]) =
                    (&case, best.map(|best| best.get()))
                    && dense.max(screened) < Duration::MAX
                {
                    assert_eq!(case.dense_ids[..num_rows], case.screened_ids[..num_rows]);
                    let survivors: u32 = case.survivors[..num_rows].iter().sum();
                    let fallbacks = case.fell_back[..num_rows].iter().filter(|&&f| f).count();
                    println!(
                        "{name}: dense {dense:.1?}, screened {screened:.1?}, {:.2}x; estimates alone {estimated:.1?}; {:.1} survivors a row, {fallbacks} fallbacks",
                        dense.as_secs_f64() / screened.as_secs_f64(),
                        f64::from(survivors) / num_rows as f64,
                    );
                }
            }
        }
    }
    group.finish();
}
