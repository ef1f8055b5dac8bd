//! Bits against the written-out order, across row counts, instruction sets and threads; size against exact sums.

use proptest::prelude::*;

use super::*;
use crate::device::Device;
use crate::device::HostDevice;

/// Row-major weights and activations; the activations are no BF16 values.
#[derive(Clone, Debug)]
struct Problem {
    num_rows: usize,
    out_features: usize,
    in_features: usize,
    x: Vec<f32>,
    weights: Vec<bf16>,
}

impl Problem {
    fn new(num_rows: usize, out_features: usize, in_features: usize, seed: u32) -> Self {
        let value = |i: usize| {
            let bits = (i as u32 ^ seed)
                .wrapping_mul(0x9E37_79B9)
                .rotate_left(15)
                .wrapping_mul(0x85EB_CA6B);
            // Magnitudes over six powers of two, both signs: order of summation shows in the last bits.
            (bits as i32 as f32 / 2_147_483_648.0) * f32::from(1_u8 << (bits % 7))
        };
        Self {
            num_rows,
            out_features,
            in_features,
            x: (0..num_rows * in_features).map(value).collect(),
            weights: (0..out_features * in_features)
                .map(|i| bf16::from_f32(value(i + 7919)))
                .collect(),
        }
    }

    fn multiply(&self, isa: Isa, num_threads: usize, rows: Range<usize>) -> Vec<f32> {
        let host = HostDevice::new(Some(num_threads)).expect("threads");
        let len = rows.len() * self.out_features;
        let mut y = Buffer::from_slice(&vec![f32::NAN; len]);
        let weight = PackedBf16::pack(&self.weights, self.out_features, self.in_features);
        let x = &self.x[rows.start * self.in_features..rows.end * self.in_features];
        let args = Bf16MatmulArgs {
            x: MatmulInput::Values(&Buffer::from_slice(x)),
            num_rows: rows.len(),
            products: vec![Product {
                weight: &weight,
                y: &mut y,
            }],
            epilogue: Epilogue::Store,
        };
        Bf16Matmul::check(&args).expect("buffers fit");
        multiply(&host, isa, args);
        y.host().to_vec()
    }

    /// The canonical order, written out: blocks of fused chains, block sums in order.
    fn canonical(&self) -> Vec<f32> {
        let chain = |x: &[f32], w: &[bf16]| {
            x.iter()
                .zip(w)
                .fold(0.0_f32, |acc, (x, w)| w.to_f32().mul_add(*x, acc))
        };
        let mut y = Vec::new();
        for x in self.x.chunks_exact(self.in_features) {
            for w in self.weights.chunks_exact(self.in_features) {
                let blocks = x.chunks(K_BLOCK).zip(w.chunks(K_BLOCK));
                y.push(blocks.fold(0.0, |total, (x, w)| total + chain(x, w)));
            }
        }
        y
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

fn problems() -> impl Strategy<Value = Problem> {
    // Beyond a panel of rows, a group of tiles and two blocks of K, with every kind of remainder.
    (1..150_usize, 1..300_usize, 1..700_usize, any::<u32>())
        .prop_map(|(rows, n, k, seed)| Problem::new(rows, n, k, seed))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn every_row_alone_equals_itself_among_others(problem in problems(), cut in 0.0..1.0) {
        let n = problem.out_features;
        let all = problem.multiply(simd::isa(), 2, 0..problem.num_rows);
        let row = (cut * problem.num_rows as f64) as usize;
        let alone = problem.multiply(simd::isa(), 1, row..row + 1);
        prop_assert_eq!(bits(&alone), bits(&all[row * n..(row + 1) * n]));
        let tail = problem.multiply(simd::isa(), 3, row..problem.num_rows);
        prop_assert_eq!(bits(&tail), bits(&all[row * n..]));
    }

    #[test]
    fn instruction_sets_follow_the_canonical_order(problem in problems()) {
        let small = Problem::new(
            problem.num_rows.min(70),
            problem.out_features.min(60),
            problem.in_features,
            problem.num_rows as u32,
        );
        let want = bits(&small.canonical());
        for isa in [Isa::Avx512, Isa::Avx2, Isa::Portable] {
            let got = small.multiply(isa, 1, 0..small.num_rows);
            prop_assert_eq!(&bits(&got), &want, "{:?}", isa);
        }
    }

    #[test]
    fn pairs_of_rows_and_tiles_give_the_bits_of_the_whole(
        problem in problems(),
        picks in prop::collection::vec((0.0..1.0, 0.0..1.0), 1..40),
    ) {
        let (n, k) = (problem.out_features, problem.in_features);
        let whole = problem.multiply(simd::isa(), 2, 0..problem.num_rows);
        let weight = PackedBf16::pack(&problem.weights, n, k);
        let pick = |share: f64, len: usize| (share * len as f64) as u32;
        let pairs: Vec<TilePair> = picks
            .iter()
            .map(|&(tile, row)| TilePair {
                tile: pick(tile, n.div_ceil(LANES)),
                row: pick(row, problem.num_rows),
            })
            .collect();
        for (isa, num_threads) in [(Isa::Avx512, 2), (Isa::Avx2, 1), (Isa::Portable, 1)] {
            let host = HostDevice::new(Some(num_threads)).expect("threads");
            let sums = multiply_tile_pairs(&host, isa, &problem.x, &weight, &pairs);
            for (pair, sums) in pairs.iter().zip(&sums) {
                let first = pair.tile as usize * LANES;
                let len = LANES.min(n - first);
                let want = &whole[pair.row as usize * n + first..][..len];
                prop_assert_eq!(bits(&sums[..len]), bits(want), "{:?} {:?}", isa, pair);
            }
        }
    }

    #[test]
    fn sums_are_close_to_exact_ones(problem in problems()) {
        let y = problem.multiply(simd::isa(), 2, 0..problem.num_rows);
        let k = problem.in_features;
        for (i, &got) in y.iter().enumerate().step_by(7) {
            let (r, n) = (i / problem.out_features, i % problem.out_features);
            let products = problem.x[r * k..(r + 1) * k]
                .iter()
                .zip(&problem.weights[n * k..])
                .map(|(x, w)| f64::from(*x) * f64::from(w.to_f32()));
            let (want, size) = products.fold((0.0, 0.0), |(s, a), p| (s + p, a + p.abs()));
            // K_BLOCK roundings of half an ulp bound a block; block sums add a few more.
            let bound = size * 1.3 * K_BLOCK as f64 * f64::from(f32::EPSILON) / 2.0;
            prop_assert!((f64::from(got) - want).abs() <= bound, "{got} {want} {bound}");
        }
    }
}

#[test]
fn every_row_count_up_to_two_panels_gives_the_same_rows() {
    let problem = Problem::new(2 * PANEL_ROWS + 1, 40, 300, 5);
    let want = bits(&problem.canonical());
    for num_rows in 1..=problem.num_rows {
        let got = problem.multiply(simd::isa(), 1, 0..num_rows);
        assert_eq!(bits(&got), want[..got.len()], "{num_rows} rows");
    }
}

#[test]
fn adding_to_the_output_rounds_once_more() {
    let problem = Problem::new(3, 35, 20, 1);
    let sums = problem.canonical();
    let weight = PackedBf16::pack(&problem.weights, 35, 20);
    let mut y = Buffer::from_slice(&[0.3; 3 * 35]);
    let device = Device::host(Some(1)).expect("threads");
    let args = Bf16MatmulArgs {
        x: MatmulInput::Values(&Buffer::from_slice(&problem.x)),
        num_rows: 3,
        products: vec![Product {
            weight: &weight,
            y: &mut y,
        }],
        epilogue: Epilogue::AddToOutput,
    };
    Bf16Matmul::run(&device, args).expect("buffers fit");
    let want: Vec<f32> = sums.iter().map(|sum| 0.3 + sum).collect();
    assert_eq!(bits(y.host()), bits(&want));
}

#[test]
fn rows_come_back_from_packing() {
    let problem = Problem::new(1, 37, 19, 3);
    let weight = PackedBf16::pack(&problem.weights, 37, 19);
    assert_eq!(weight.num_bytes(), 48 * 19 * 2);
    let mut row = vec![f32::NAN; 19];
    for n in 0..37 {
        weight.unpack_row(n, &mut row);
        let want = problem.weights[n * 19..(n + 1) * 19].iter();
        assert!(
            row.iter()
                .zip(want)
                .all(|(got, want)| *got == want.to_f32()),
            "row {n}"
        );
    }
}
