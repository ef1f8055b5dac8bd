//! Each size that drafter and target share, made to differ.

use super::*;
use crate::drafter::tests::demo;
use crate::weights::raw_safetensors::demo_target;

fn pair() -> (DrafterConfig, ModelConfig) {
    (
        DrafterConfig::read(&demo("dflash2")).unwrap(),
        ModelConfig::read(&demo_target()).unwrap(),
    )
}

fn run(drafter: &DrafterConfig, target: &ModelConfig) -> Result<Vec<usize>, DrafterError> {
    check(
        Path::new("drafters/d"),
        drafter,
        Path::new("targets/t"),
        target,
    )
}

#[test]
fn the_demo_pair_fits() {
    let (drafter, target) = pair();
    assert_eq!(run(&drafter, &target).unwrap(), [1, 4, 6]);
}

#[test]
fn sizes_that_differ_are_refused_naming_both_sides() {
    type Edit = fn(&mut DrafterConfig, &mut ModelConfig);
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
        let (mut drafter, mut target) = pair();
        edit(&mut drafter, &mut target);
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
}

#[test]
fn sizes_that_the_drafter_does_not_state_are_not_compared() {
    let (mut drafter, target) = pair();
    (drafter.vocab_size, drafter.num_target_layers) = (None, None);
    assert!(run(&drafter, &target).is_ok());
}

#[test]
fn only_layers_before_the_last_can_be_tapped() {
    for id in [-1, 7, 8, i64::MAX] {
        let (mut drafter, target) = pair();
        drafter.target_layer_ids[1] = id;
        let message = run(&drafter, &target).unwrap_err().to_string();
        for part in ["drafters/d", "targets/t", &id.to_string(), "0..8"] {
            assert!(message.contains(part), "`{part}` not in: {message}");
        }
    }
}
