//! The shortcuts of the race change nothing: bounds hold, and the winner is that of all sums.

use super::philox::token_bits;
use super::*;

#[test]
fn no_noise_is_above_its_bound() {
    let edges = (0..64).flat_map(|k| {
        let ones = !(u64::MAX >> k);
        [ones, ones | (u64::MAX >> (k + 1).min(63)), ones | 1]
    });
    let random = (0..100_000).map(|id| token_bits(5, 9, id));
    for bits in edges.chain([0, u64::MAX]).chain(random) {
        let noise = gumbel(bits);
        assert!(noise.is_finite());
        assert!(noise <= noise_bound(bits), "{bits:x}");
        assert!(noise_bound(bits) <= MOST_NOISE, "{bits:x}");
    }
}

#[test]
fn noise_is_gumbels() {
    let n = 200_000_u32;
    let noise: Vec<f64> = (0..n).map(|id| gumbel(token_bits(1, 2, id))).collect();
    let mean = noise.iter().sum::<f64>() / f64::from(n);
    let variance = noise.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / f64::from(n);
    // Euler's constant and pi^2 / 6, with five standard errors of each.
    assert!((mean - 0.577_215_66).abs() < 5.0 * (1.645 / f64::from(n)).sqrt());
    assert!((variance - 1.644_934).abs() < 0.05);
}

#[test]
fn the_race_is_won_by_the_largest_sum_in_any_order() {
    let logits: Vec<f32> = (0..5000_u32)
        .map(|i| (i * 7919 % 1009) as f32 * 0.01)
        .collect();
    let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    for position in 0..50 {
        let sampler = RowSampler {
            temperature: 0.8,
            seed: 3,
            position,
            ..RowSampler::GREEDY
        };
        let scaled: Vec<f64> = logits
            .iter()
            .map(|&logit| (f64::from(logit) - f64::from(largest)) / sampler.temperature)
            .collect();
        let sums = (0..5000_u32).zip(&scaled).map(|(id, s)| {
            let sum = s + gumbel(token_bits(sampler.seed, position, id));
            (id, sum)
        });
        let (want, _) = sums.max_by(|a, b| a.1.total_cmp(&b.1)).unwrap();
        assert_eq!(draw(&logits, LogitShape::PLAIN, &[], &sampler), want);
        let mut backwards = Race::new(&sampler, row_argmax(&logits, &[]));
        for (id, &scaled) in (0..5000_u32).zip(&scaled).rev() {
            backwards.enter(id, scaled);
        }
        assert_eq!(backwards.best_id, want);
    }
}
