//! Ids against the dense path over random and adversarial draws; bounds against doubled precision; a loosened bound fails.

use half::bf16;

use super::super::Kernel;
use super::super::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, Product};
use super::super::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use super::super::masked_ids::MaskedIds;
use super::*;
use crate::device::Device;
use crate::device::HostDevice;
use crate::kernels::matmul_rows::MatmulInput;

mod bounds;

/// A small generator, so that a failing draw can be named by its seed.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    /// Roughly normal: a sum of uniforms.
    fn normal(&mut self) -> f32 {
        let uniforms = (0..6).map(|_| (self.next() >> 40) as f32 / (1 << 24) as f32 - 0.5);
        uniforms.sum::<f32>() * 1.4
    }
}

/// A head with rows to decide.
struct Problem {
    vocab_size: usize,
    in_features: usize,
    weights: Vec<bf16>,
    x: Vec<f32>,
    masked: Vec<Vec<u32>>,
}

const NOT_FINITE: u32 = f32::NAN.to_bits();

/// Bits to compare winning logits by: of those that decide nothing only that is wanted.
fn finite_bits(logits: &[f32]) -> Vec<u32> {
    let bits = |logit: &f32| match logit.is_finite() {
        true => logit.to_bits(),
        false => NOT_FINITE,
    };
    logits.iter().map(bits).collect()
}

/// What a call decided.
#[derive(Debug, PartialEq)]
struct Decided {
    token_ids: Vec<u32>,
    /// Bits of the winning logits, [`NOT_FINITE`] for those that are none.
    best_logits: Vec<u32>,
    survivors: Vec<u32>,
    fell_back: Vec<bool>,
    gaps: Option<Vec<u32>>,
}

impl Problem {
    fn num_rows(&self) -> usize {
        self.masked.len()
    }

    fn row(&self, id: usize) -> &[bf16] {
        &self.weights[id * self.in_features..][..self.in_features]
    }

    fn packed(&self) -> PackedBf16 {
        PackedBf16::pack(&self.weights, self.vocab_size, self.in_features)
    }

    fn decide(
        &self,
        isa: Isa,
        num_threads: usize,
        exact: &PackedBf16,
        head: &ScreenedHead,
        with_gap: bool,
    ) -> Decided {
        let host = HostDevice::new(Some(num_threads)).expect("threads");
        self.decide_on(&host, isa, exact, head, with_gap)
    }

    fn decide_on(
        &self,
        host: &HostDevice,
        isa: Isa,
        exact: &PackedBf16,
        head: &ScreenedHead,
        with_gap: bool,
    ) -> Decided {
        let num_rows = self.num_rows();
        let masked: Vec<&[u32]> = self.masked.iter().map(Vec::as_slice).collect();
        let mut decided = Decided {
            token_ids: vec![u32::MAX; num_rows],
            best_logits: Vec::new(),
            survivors: vec![u32::MAX; num_rows],
            fell_back: vec![false; num_rows],
            gaps: None,
        };
        let mut gaps = vec![f32::NAN; num_rows];
        let mut best_logits = vec![f32::NAN; num_rows];
        let args = LmHeadScreenArgs {
            x: &Buffer::from_slice(&self.x),
            num_rows,
            head,
            exact,
            scores: HeadScores::Logits,
            masked: &MaskedIds::on_host(&masked),
            dense_logits: &mut Buffer::zeroed(num_rows * self.vocab_size),
            token_ids: &mut decided.token_ids,
            best_logits: &mut best_logits,
            survivors: &mut decided.survivors,
            fell_back: &mut decided.fell_back,
            top2_gap: with_gap.then_some(&mut gaps[..]),
        };
        LmHeadScreen::check(&args).expect("buffers fit");
        screen(host, isa, args);
        decided.best_logits = finite_bits(&best_logits);
        decided.gaps = with_gap.then(|| gaps.iter().map(|gap| gap.to_bits()).collect());
        decided
    }

    fn logits(&self, device: &HostDevice, exact: &PackedBf16) -> Buffer<f32> {
        let mut logits = Buffer::zeroed(self.num_rows() * self.vocab_size);
        let args = Bf16MatmulArgs {
            x: MatmulInput::Values(&Buffer::from_slice(&self.x)),
            num_rows: self.num_rows(),
            products: vec![Product {
                weight: exact,
                y: &mut logits,
            }],
            epilogue: Epilogue::Store,
        };
        Bf16Matmul::host(device, args);
        logits
    }

    /// Ids and [`finite_bits`] of the dense path.
    fn dense(&self, device: &HostDevice, exact: &PackedBf16) -> (Vec<u32>, Vec<u32>) {
        let logits = self.logits(device, exact);
        let masked: Vec<&[u32]> = self.masked.iter().map(Vec::as_slice).collect();
        let mut token_ids = vec![0; self.num_rows()];
        let mut best_logits = vec![0.0; self.num_rows()];
        let args = GreedyArgmaxArgs {
            logits: &logits,
            num_rows: self.num_rows(),
            vocab_size: self.vocab_size,
            masked: &MaskedIds::on_host(&masked),
            token_ids: &mut token_ids,
            best_logits: &mut best_logits,
        };
        GreedyArgmax::host(device, args);
        (token_ids, finite_bits(&best_logits))
    }
}

/// A head of one of many kinds: plain, heavy-tailed, in tiny or huge units, with rows that are equal, equal up to one
/// bit, zero, or hold NaN and infinity.
fn random_weights(random: &mut Random, vocab_size: usize, in_features: usize) -> Vec<bf16> {
    let kind = random.below(8);
    let unit = match kind {
        0 => 2.0_f32.powi(-126),
        1 => 2.0_f32.powi(-133),
        2 => 2.0_f32.powi(100),
        _ => 1.0,
    };
    let mut weights: Vec<bf16> = (0..vocab_size * in_features)
        .map(|_| {
            let outlier = if kind == 3 && random.below(50) == 0 {
                60.0
            } else {
                1.0
            };
            bf16::from_f32(random.normal() * outlier * unit)
        })
        .collect();
    let twins = match kind {
        4 => vocab_size,
        5 => 0,
        _ => vocab_size / 4,
    };
    for _ in 0..twins {
        let (from, to) = (random.below(vocab_size), random.below(vocab_size));
        weights.copy_within(
            from * in_features..(from + 1) * in_features,
            to * in_features,
        );
        if random.below(2) == 0 {
            let at = to * in_features + random.below(in_features);
            weights[at] = bf16::from_bits(weights[at].to_bits() ^ 1);
        }
    }
    if kind == 6 {
        for _ in 0..1 + vocab_size / 30 {
            let at = random.below(weights.len());
            let odd = [bf16::NAN, bf16::INFINITY, bf16::NEG_INFINITY, bf16::MAX];
            weights[at] = odd[random.below(4)];
        }
    }
    if kind == 7 {
        let row = random.below(vocab_size) * in_features;
        weights[row..row + in_features].fill(bf16::ZERO);
    }
    weights
}

/// Fills a row of activations: plain, with an outlier, along a row of the head, zero, tiny, huge, or not finite.
fn random_activations(random: &mut Random, problem: &Problem, x: &mut [f32]) {
    let kind = random.below(24);
    let unit = match kind {
        0 => 0.0,
        1 => 1e-38,
        2 => 1e-45,
        3 => 1e30,
        4 => 1e38,
        _ => 1.0,
    };
    x.fill_with(|| random.normal() * unit);
    let at = random.below(x.len());
    match kind {
        5 => x[at] = f32::NAN,
        6 => x[at] = f32::INFINITY,
        7 | 8 => x[at] *= 1e3,
        9..=12 => {
            let row = problem.row(random.below(problem.vocab_size));
            for (x, w) in x.iter_mut().zip(row) {
                *x = (w.to_f32() + 0.01 * random.normal()).clamp(-1e38, 1e38);
            }
        }
        13 => x.fill(1.0),
        _ => {}
    }
}

fn random_problem(seed: u64, num_rows: usize) -> Problem {
    let mut random = Random(seed);
    let in_features = match random.below(12) {
        0 => 200 + random.below(500),
        1 => 1,
        _ => 1 + random.below(60),
    };
    let most = [400, 90, 90, 90, 90][random.below(5)];
    let vocab_size = 1 + random.below(most);
    let mut problem = Problem {
        weights: random_weights(&mut random, vocab_size, in_features),
        vocab_size,
        in_features,
        x: Vec::new(),
        masked: vec![Vec::new(); num_rows],
    };
    let mut x = vec![0.0; num_rows * in_features];
    for x in x.chunks_exact_mut(in_features) {
        random_activations(&mut random, &problem, x);
    }
    problem.x = x;
    problem
}

/// Masks every other row's winner, and a few more ids.
fn mask_winners(problem: &mut Problem, winners: &[u32], seed: u64) {
    let mut random = Random(seed);
    let vocab_size = problem.vocab_size;
    for (row, &winner) in winners.iter().enumerate().skip(1).step_by(2) {
        let mut masked = vec![winner, u32::MAX];
        masked.extend((0..random.below(vocab_size)).map(|_| random.below(vocab_size) as u32));
        let spared = random.below(vocab_size) as u32;
        masked.retain(|&id| id != spared);
        problem.masked[row] = masked;
    }
}

#[test]
fn a_million_draws_give_the_dense_ids() {
    const ROWS: usize = 64;
    const PROBLEMS: usize = 1_000_000 / (2 * ROWS) + 1;
    let host = HostDevice::new(Some(1)).expect("threads");
    let (mut num_screened, mut num_survivors, mut num_scored) = (0_usize, 0_usize, 0_usize);
    for seed in 0..PROBLEMS as u64 {
        let mut problem = random_problem(seed, ROWS);
        let exact = problem.packed();
        let head = ScreenedHead::new(&exact);
        for pass in 0..2 {
            let (want, logits) = problem.dense(&host, &exact);
            let got = problem.decide_on(&host, simd::isa(), &exact, &head, pass == 1);
            assert_eq!(got.token_ids, want, "seed {seed}, pass {pass}");
            assert_eq!(got.best_logits, logits, "seed {seed}, pass {pass}");
            for row in 0..ROWS {
                if !got.fell_back[row] {
                    num_screened += 1;
                    num_survivors += got.survivors[row] as usize;
                    num_scored += problem.vocab_size;
                }
            }
            if pass == 0 {
                mask_winners(&mut problem, &want, seed);
            }
        }
    }
    // The draws are hard on purpose, but screening must still do something in most of them.
    assert!(num_screened > PROBLEMS * ROWS, "{num_screened}");
    assert!(
        num_survivors * 2 < num_scored,
        "{num_survivors} of {num_scored}"
    );
}

#[test]
fn instruction_sets_and_threads_agree() {
    for seed in 0..40 {
        let mut random = Random(seed);
        let (vocab_size, in_features) = (3000 + random.below(600), 150 + random.below(300));
        let mut problem = Problem {
            weights: random_weights(&mut random, vocab_size, in_features),
            vocab_size,
            in_features,
            x: Vec::new(),
            masked: vec![Vec::new(); 1 + seed as usize % 15],
        };
        let mut x = vec![0.0; problem.num_rows() * in_features];
        for x in x.chunks_exact_mut(in_features) {
            random_activations(&mut random, &problem, x);
        }
        problem.x = x;
        let exact = problem.packed();
        let head = ScreenedHead::new(&exact);
        let host = HostDevice::new(Some(1)).expect("threads");
        let want = problem.decide(Isa::Avx512, 1, &exact, &head, true);
        assert_eq!(
            want.token_ids,
            problem.dense(&host, &exact).0,
            "seed {seed}"
        );
        for (isa, num_threads) in [(Isa::Avx512, 3), (Isa::Avx2, 2), (Isa::Portable, 1)] {
            let got = problem.decide(isa, num_threads, &exact, &head, true);
            assert_eq!(got, want, "seed {seed}, {isa:?}");
        }
    }
}

#[test]
fn gaps_are_those_of_the_dense_logits() {
    let host = HostDevice::new(Some(1)).expect("threads");
    for seed in 0..300 {
        let problem = random_problem(seed, 16);
        let exact = problem.packed();
        let head = ScreenedHead::new(&exact);
        let got = problem.decide(simd::isa(), 1, &exact, &head, true);
        let logits = problem.logits(&host, &exact);
        let rows = logits.host().chunks_exact(problem.vocab_size);
        for (row, logits) in rows.enumerate() {
            let mut sorted: Vec<f32> = logits.iter().copied().filter(|l| !l.is_nan()).collect();
            sorted.sort_by(|a, b| b.total_cmp(a));
            let want = match sorted[..] {
                [a, b, ..] if b > f32::NEG_INFINITY => {
                    if a == b {
                        0.0
                    } else {
                        a - b
                    }
                }
                _ => f32::INFINITY,
            };
            let gap = f32::from_bits(got.gaps.as_ref().expect("asked for")[row]);
            assert_eq!(gap, want, "seed {seed}, row {row}");
        }
    }
}

/// Two rows whose codes order them wrongly. Codes of the first are rounded down by 3/8 in every column and those of the
/// second up, as the activations' signs say; half of the second's codes are one larger.
fn misleading_codes(seed: u64) -> Problem {
    let mut random = Random(seed);
    let in_features = 8 + 4 * random.below(60);
    let signs: Vec<f32> = (0..in_features)
        .map(|_| if random.below(2) == 0 { 1.0 } else { -1.0 })
        .collect();
    let mut weights = vec![bf16::ZERO; 64 * in_features];
    let (winner, loser) = (random.below(64), 63 - random.below(8));
    let loser = if loser == winner {
        (winner + 1) % 64
    } else {
        loser
    };
    for k in 0..in_features {
        let code = (random.below(30) as f32 - 15.0) * signs[k];
        let step = if k % 2 == 0 { 1.0 } else { 0.0 };
        let value = |v: f32| bf16::from_f32(signs[k] * v);
        weights[winner * in_features + k] = value(code + 0.375);
        weights[loser * in_features + k] = value(code + step - 0.375);
    }
    // One column sets both scales to 1.
    weights[winner * in_features] = bf16::from_f32(127.0 * signs[0]);
    weights[loser * in_features] = bf16::from_f32(127.0 * signs[0]);
    Problem {
        vocab_size: 64,
        in_features,
        weights,
        x: signs,
        masked: vec![Vec::new()],
    }
}

#[test]
fn a_loosened_bound_gives_wrong_ids() {
    let host = HostDevice::new(Some(1)).expect("threads");
    for factor in [0.2, 0.6] {
        let mut num_wrong = 0;
        for seed in 0..100 {
            let problem = misleading_codes(seed);
            let exact = problem.packed();
            let sound = ScreenedHead::new(&exact);
            let want = problem.dense(&host, &exact);
            let got = problem.decide(simd::isa(), 1, &exact, &sound, false);
            assert_eq!(got.token_ids, want.0, "seed {seed}");
            let loosened = sound.with_loosened_bounds(factor);
            let got = problem.decide(simd::isa(), 1, &exact, &loosened, false);
            num_wrong += usize::from(got.token_ids != want.0);
        }
        assert!(num_wrong >= 90, "factor {factor}: {num_wrong} of 100");
    }
}

#[test]
fn codes_are_within_half_a_step_and_norms_above_the_truth() {
    for seed in 0..200 {
        let problem = random_problem(seed, 1);
        let head = ScreenedHead::new(&problem.packed());
        for id in 0..problem.vocab_size {
            let bounds = &head.channels()[id / LANES];
            let lane = id % LANES;
            let scale = f64::from(bounds.scale[lane]);
            let row = problem.row(id);
            if row.iter().any(|w| !w.is_finite()) {
                assert_eq!(bounds.residual[lane], f32::INFINITY);
                continue;
            }
            let (mut residual, mut coded) = (0.0, 0.0);
            for (k, w) in row.iter().enumerate() {
                let byte = head.tile(id / LANES)[k / 4][4 * lane + k % 4];
                let code = f64::from(i16::from(byte) - 128);
                let left = f64::from(w.to_f32()) - scale * code;
                assert!(
                    left.abs() <= scale * 0.500_1,
                    "seed {seed}, id {id}, column {k}"
                );
                residual += left * left;
                coded += scale * code * scale * code;
            }
            assert!(
                f64::from(bounds.residual[lane]) >= residual.sqrt(),
                "seed {seed}"
            );
            assert!(f64::from(bounds.coded[lane]) >= coded.sqrt(), "seed {seed}");
        }
    }
}

#[test]
fn rows_that_cannot_be_screened_say_so() {
    let mut problem = random_problem(12, 5);
    let k = problem.in_features;
    problem.weights.fill(bf16::ONE);
    problem.x.fill(1.0);
    problem.x[0] = f32::NAN;
    problem.x[k] = f32::NEG_INFINITY;
    problem.x[2 * k..3 * k].fill(0.0);
    problem.x[3 * k..4 * k].fill(2.0_f32.powi(127));
    let exact = problem.packed();
    let head = ScreenedHead::new(&exact);
    let got = problem.decide(simd::isa(), 1, &exact, &head, false);
    assert_eq!(got.fell_back, [true, true, true, true, false]);
    assert_eq!(got.survivors[..4], [0; 4]);
    // All channels are equal, so all survive and the lowest id wins.
    assert_eq!(got.survivors[4] as usize, problem.vocab_size);
    assert_eq!(got.token_ids, [0; 5]);
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let problem = random_problem(3, 2);
    let (n, k) = (problem.vocab_size, problem.in_features);
    let exact = problem.packed();
    let other = ScreenedHead::new(&PackedBf16::pack(&vec![bf16::ONE; n * (k + 1)], n, k + 1));
    let device = Device::host(Some(1)).expect("threads");
    let args = LmHeadScreenArgs {
        x: &Buffer::from_slice(&problem.x),
        num_rows: 2,
        head: &other,
        exact: &exact,
        scores: HeadScores::Logits,
        masked: &MaskedIds::on_host(&[&[], &[]]),
        dense_logits: &mut Buffer::zeroed(2 * n),
        token_ids: &mut [0; 2],
        best_logits: &mut [0.0; 2],
        survivors: &mut [0; 2],
        fell_back: &mut [false; 2],
        top2_gap: None,
    };
    let error = LmHeadScreen::run(&device, args).expect_err("another width");
    let words = format!("lm_head_screen: `in_features` must be {k}, got {}", k + 1);
    assert_eq!(error.to_string(), words);
}
