//! Planted pairs: published sizes, drafters that fit, tokens in one cycle.

use std::collections::BTreeSet;

use super::*;
use crate::drafter::{PairFiles, pairing};
use crate::plan::weight_bytes::num_parameters;

#[test]
fn every_name_is_a_pair_that_fits() {
    for name in names() {
        let pair = PlantedPair::named(name).unwrap();
        let files = PairFiles {
            drafter: Path::new("drafter"),
            target: Path::new("target"),
        };
        let taps = pairing::check(files, &pair.drafter, &pair.target).unwrap();
        assert_eq!(taps.len(), pair.drafter.num_taps());
        let cycle = (0..pair.target.vocab_size as u32)
            .scan(0, |token, _| {
                *token = (*token + STRIDES[0]) % pair.target.vocab_size as u32;
                Some(*token)
            })
            .collect::<BTreeSet<_>>();
        assert_eq!(cycle.len(), pair.target.vocab_size, "{name}");
    }
}

#[test]
fn sizes_are_the_published_ones() {
    // Billions of parameters, to two decimals where published so; a head of its own is 0.636 of Qwen3.5-4B's, 1.007 of
    // Gemma's.
    for (name, target, drafter) in [
        ("qwen3.8-27b", 26.896, 1.86),
        ("qwen3.5-4b", 4.206 + 0.636, 0.64),
        ("llama-3.1-8b", 8.030, 1.05),
        ("gemma-4-12b", 11.907 + 1.007, 0.42),
        ("muse-glimmer-30b", 27.85, 2.56),
    ] {
        let pair = PlantedPair::named(name).unwrap();
        let got = num_parameters(&pair.target) as f64 / 1e9;
        assert!((got - target).abs() < 5e-3, "{name}: {got}");
        let got = pair.drafter.num_parameters() as f64 / 1e9;
        assert!((got - drafter).abs() < 0.1 * drafter, "{name}: {got}");
    }
}

#[test]
fn unknown_names_list_the_known() {
    let error = PlantedPair::named("qwen").unwrap_err().to_string();
    for part in [
        "planted",
        "qwen3.8-27b, qwen3.5-4b, llama-3.1-8b, gemma-4-12b, muse-glimmer-30b, tiny, tiny-gemma, tiny-muse",
        "\"qwen\"",
    ] {
        assert!(error.contains(part), "{error}");
    }
}
