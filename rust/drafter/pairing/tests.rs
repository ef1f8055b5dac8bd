//! Each size that drafter and target share, made to differ.

use std::path::Path;

use super::*;
use crate::drafter::config::{BlockConfig, Eagle3Config};
use crate::drafter::tests::demo;
use crate::weights::raw_safetensors::demo_target;

fn pair(name: &str) -> (DrafterConfig, ModelConfig) {
    (
        DrafterConfig::read(&demo(name)).unwrap(),
        ModelConfig::read(&demo_target()).unwrap(),
    )
}

fn block(drafter: &mut DrafterConfig) -> &mut BlockConfig {
    match drafter {
        DrafterConfig::Block(config) => config,
        other => panic!("no block in {other:?}"),
    }
}

fn eagle3(drafter: &mut DrafterConfig) -> &mut Eagle3Config {
    match drafter {
        DrafterConfig::Eagle3(config) => config,
        other => panic!("not EAGLE-3: {other:?}"),
    }
}

fn run(drafter: &DrafterConfig, target: &ModelConfig) -> Result<Vec<usize>, DrafterError> {
    let files = PairFiles {
        drafter: Path::new("drafters/d"),
        target: Path::new("targets/t"),
    };
    check(files, drafter, target)
}

/// The fixture's EAGLE-3 lists 2, 5, 7, counted from the embedding; all mean the same layers.
#[test]
fn the_demo_pairs_fit_and_tap_the_same_layers() {
    for name in ["dflash", "dflash2", "dspark", "eagle3"] {
        let (drafter, target) = pair(name);
        assert_eq!(run(&drafter, &target).unwrap(), [1, 4, 6], "{name}");
    }
}

#[test]
fn sizes_that_differ_are_refused_naming_both_sides() {
    type Edit = fn(&mut BlockConfig, &mut ModelConfig);
    let cases: [(&str, usize, usize, Edit); 4] = [
        ("hidden_size", 512, 256, |_, target| {
            target.hidden_size = 512
        }),
        ("vocab_size", 8192, 9000, |drafter, _| {
            drafter.vocab_size = Some(9000)
        }),
        ("number of target layers", 8, 64, |drafter, _| {
            drafter.num_target_layers = Some(64);
        }),
        ("mask_token_id", 8192, 8192, |drafter, _| {
            drafter.mask_token_id = 8192
        }),
    ];
    for (size, expected, got, edit) in cases {
        let (mut drafter, mut target) = pair("dflash2");
        edit(block(&mut drafter), &mut target);
        let message = run(&drafter, &target).unwrap_err().to_string();
        for part in [
            "drafters/d",
            "targets/t",
            size,
            &format!("{got} in the drafter, {expected} in the target"),
        ] {
            assert!(message.contains(part), "`{part}` not in: {message}");
        }
    }
    let (mut drafter, target) = pair("eagle3");
    eagle3(&mut drafter).hidden_size = 128;
    assert!(matches!(
        run(&drafter, &target),
        Err(DrafterError::Pairing { got: 128, .. })
    ));
}

#[test]
fn sizes_that_the_drafter_does_not_state_are_not_compared() {
    let (mut drafter, target) = pair("dflash2");
    let config = block(&mut drafter);
    (config.vocab_size, config.num_target_layers) = (None, None);
    assert!(run(&drafter, &target).is_ok());
}

#[test]
fn only_layers_before_the_last_can_be_tapped() {
    for id in [-1, 7, 8, i64::MAX] {
        let (mut drafter, target) = pair("dflash2");
        block(&mut drafter).target_layer_ids[1] = id;
        let message = run(&drafter, &target).unwrap_err().to_string();
        for part in ["drafters/d", "targets/t", &id.to_string(), "0..8"] {
            assert!(message.contains(part), "`{part}` not in: {message}");
        }
    }
}

/// Streams that enter layers 2, L/2 and L - 3 are outputs of the layers before.
#[test]
fn eagle_taps_early_middle_and_late_when_it_lists_none() {
    let (mut drafter, mut target) = pair("eagle3");
    let config = eagle3(&mut drafter);
    (config.target_layer_ids, config.num_target_layers) = (None, None);
    target.layers = vec![target.layers[0].clone(); 36];
    assert_eq!(run(&drafter, &target).unwrap(), [1, 17, 32]);
}
