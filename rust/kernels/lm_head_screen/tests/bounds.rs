//! Bounds against doubled precision, how nearly they are reached, and what happens where rounding decides.

use super::*;

/// A sum with its rounding errors carried along (Neumaier): exact but for some 2^-100 of the absolute sum.
fn exact_dot(w: &[bf16], x: &[f32]) -> f64 {
    let (mut sum, mut lost) = (0.0_f64, 0.0_f64);
    for (w, &x) in w.iter().zip(x) {
        // 8 bits times 24: exact.
        let product = f64::from(w.to_f32()) * f64::from(x);
        let next = sum + product;
        let (large, small) = match sum.abs() >= product.abs() {
            true => (sum, product),
            false => (product, sum),
        };
        lost += (large - next) + small;
        sum = next;
    }
    sum + lost
}

#[test]
fn intervals_hold_the_exact_product_and_the_engines_logit() {
    let host = HostDevice::new(Some(1)).expect("threads");
    let (mut num_checked, mut tightest) = (0, [0.0_f64; 2]);
    for seed in 0..1500 {
        let problem = random_problem(seed, 8);
        let exact = problem.packed();
        let head = ScreenedHead::new(&exact);
        let logits = problem.logits(&host, &exact);
        for (row, x) in problem.x.chunks_exact(problem.in_features).enumerate() {
            let Some(intervals) = intervals(simd::isa(), x, &head) else {
                continue;
            };
            for (id, interval) in intervals.iter().enumerate() {
                let logit = f64::from(logits.host()[row * problem.vocab_size + id]);
                if !interval.screen.is_finite() {
                    continue;
                }
                let product = exact_dot(problem.row(id), x);
                let errors = [(product - interval.centre).abs(), (logit - product).abs()];
                let bounds = [interval.screen, interval.order];
                let case = format!("seed {seed}, row {row}, id {id}: {errors:?} {bounds:?}");
                for i in 0..2 {
                    assert!(errors[i] <= bounds[i], "{case}");
                    if bounds[i] > 1e-30 {
                        tightest[i] = tightest[i].max(errors[i] / bounds[i]);
                    }
                }
                assert!(
                    interval.lower() <= logit && logit <= interval.upper(),
                    "{case}"
                );
                num_checked += 1;
            }
        }
    }
    assert!(num_checked > 300_000, "{num_checked}");
    // A bound that is never nearly reached would hide a mistake; that of the order: see the next test.
    assert!(tightest[0] > 0.9, "{tightest:?}");
}

/// One row against channels that are all alike.
fn problem_of(vocab_size: usize, w: &[f32], x: &[f32]) -> Problem {
    let row = w.iter().map(|&w| bf16::from_f32(w));
    Problem {
        vocab_size,
        in_features: w.len(),
        weights: (0..vocab_size).flat_map(|_| row.clone()).collect(),
        x: x.to_vec(),
        masked: vec![Vec::new()],
    }
}

/// Every product but those at multiples of `every` is just under half a unit in the last place of the sum: all are lost.
#[test]
fn the_bound_of_the_order_is_reached() {
    let host = HostDevice::new(Some(1)).expect("threads");
    let small = 2.0_f32.powi(-12);
    for (k, every, least) in [
        (64, 64, 0.95),
        (255, 255, 0.98),
        (256, 256, 0.98),
        (5120, 256, 0.92),
    ] {
        let pick = |one: f32, other: f32| -> Vec<f32> {
            (0..k)
                .map(|i| if i % every == 0 { one } else { other })
                .collect()
        };
        let (w, x) = (
            pick(1.0, small),
            pick(1.0, small * (1.0 - 2.0_f32.powi(-20))),
        );
        let problem = problem_of(2, &w, &x);
        let exact = problem.packed();
        let head = ScreenedHead::new(&exact);
        let logit = f64::from(problem.logits(&host, &exact).host()[0]);
        let interval = intervals(simd::isa(), &problem.x, &head).expect("can be screened")[0];
        let error = (logit - exact_dot(problem.row(0), &problem.x)).abs();
        assert!(error <= interval.order, "k {k}: {error}, {interval:?}");
        assert!(
            error > least * interval.order,
            "k {k}: {error}, {interval:?}"
        );
    }
}

/// Two channels whose exact products differ one way and whose sums in the engine's order the other way.
#[test]
fn rounding_decides_as_in_the_dense_path() {
    let host = HostDevice::new(Some(1)).expect("threads");
    let k = 256;
    let mut problem = problem_of(20, &[1.0; 256], &[1.0; 256]);
    let large = 17;
    problem.x[..large].fill(32_512.0);
    for (channel, small) in [(0, -4.0), (1, 4.0)] {
        let row = &mut problem.weights[channel * k..][..k];
        row[..large].fill(bf16::from_f32(127.0));
        row[large..].fill(bf16::from_f32(small));
    }
    let exact = problem.packed();
    let (products, logits) = (
        [0, 1].map(|channel| exact_dot(problem.row(channel), &problem.x)),
        problem.logits(&host, &exact),
    );
    assert!(products[1] > products[0]);
    assert!(logits.host()[0] >= logits.host()[1]);
    let got = problem.decide(simd::isa(), 1, &exact, &ScreenedHead::new(&exact), false);
    assert_eq!((got.token_ids, got.fell_back), (vec![0], vec![false]));
}
