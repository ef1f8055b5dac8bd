//! The two flags of an EAGLE-3 file, where they must matter and where they cannot.

use std::path::Path;

use serde_json::json;

use crate::device::Buffer;
use crate::drafter::proposal::Proposal;
use crate::drafter::tests::{
    NUM_DRAFT_TOKENS, anchor, demo, extend, open_in, propose, sizes, taps, wanted,
};
use crate::options::speculation::DraftScores;
use crate::weights::raw_safetensors::{RawTensor, copy, edit_json, edit_tensors};

/// Context of the drafts.
const LEN: usize = 20;

/// Makes a tensor's values those of `value(row, column)`, which must be exact in BF16.
fn set(all: &mut [RawTensor], name: &str, value: impl Fn(usize, usize) -> f32) {
    let tensor = all.iter_mut().find(|tensor| tensor.name == name).unwrap();
    let columns = *tensor.shape.last().unwrap();
    for (i, bytes) in tensor.bytes.chunks_exact_mut(2).enumerate() {
        let bits = (value(i / columns, i % columns).to_bits() >> 16) as u16;
        bytes.copy_from_slice(&bits.to_le_bytes());
    }
}

/// What the demo drafter proposes with these flags, position by position, and with `edit` made to its tensors.
fn drafted(
    norm_before_residual: bool,
    norm_output: bool,
    taps: &[Buffer<f32>],
    edit: impl FnOnce(&mut Vec<RawTensor>),
) -> Vec<(Vec<u32>, Vec<f32>)> {
    let dir = copy(&demo("eagle3"));
    edit_json(dir.path(), "config.json", |config| {
        config["norm_before_residual"] = json!(norm_before_residual);
        config["norm_output"] = json!(norm_output);
    });
    edit_tensors(dir.path(), "model.safetensors", edit);
    chain_of(dir.path(), taps)
}

fn chain_of(dir: &Path, taps: &[Buffer<f32>]) -> Vec<(Vec<u32>, Vec<f32>)> {
    let mut drafter = open_in(Some(dir), sizes(2, NUM_DRAFT_TOKENS)).unwrap();
    let rows: Vec<u32> = (0..LEN as u32).collect();
    extend(&mut *drafter, 0, 0, 1, (taps, &rows));
    let wanted = wanted(5, DraftScores::Greedy);
    let proposals = propose(&mut *drafter, &[anchor(0, 21, LEN)], wanted).unwrap();
    levels(&proposals[0])
}

/// Of a proposal with one candidate a position.
fn levels(proposal: &Proposal) -> Vec<(Vec<u32>, Vec<f32>)> {
    let children = (0..5).map(|list| proposal.children(list));
    children
        .map(|c| (c.token_ids.to_vec(), c.log_probs.to_vec()))
        .collect()
}

#[track_caller]
fn assert_close(a: &[(Vec<u32>, Vec<f32>)], b: &[(Vec<u32>, Vec<f32>)]) {
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a.0, b.0);
        let apart = a.1.iter().zip(&b.1).map(|(a, b)| (a - b).abs());
        assert!(apart.fold(0.0, f32::max) < 1e-3, "{a:?} {b:?}");
    }
}

/// The residual stream starts from the feature or from what its norm makes of it: the same where that changes nothing.
#[test]
fn the_residual_stream_starts_where_the_file_says() {
    let usual = taps(1, LEN);
    let [feature, normed] = [false, true].map(|flag| drafted(flag, false, &usual, |_| ()));
    assert_ne!(feature[0], normed[0]);

    let signs = |tap: &Buffer<f32>| {
        let signs: Vec<f32> = tap.host().iter().map(|x| x.signum()).collect();
        Buffer::from_slice(&signs)
    };
    let of_norm_1: Vec<_> = usual.iter().map(signs).collect();
    let handed_on = |all: &mut Vec<RawTensor>| {
        set(all, "fc.weight", |row, column| f32::from(row == column));
        set(all, "midlayer.hidden_norm.weight", |_, _| 1.0);
    };
    let [feature, normed] = [false, true].map(|flag| drafted(flag, false, &of_norm_1, handed_on));
    assert_close(&feature[..1], &normed[..1]);
}

/// The feature of the next depth is the final norm's input or output: the same where another norm follows in any case.
#[test]
fn the_next_feature_is_the_one_that_the_file_says() {
    let usual = taps(1, LEN);
    let [input, output] = [false, true].map(|flag| drafted(false, flag, &usual, |_| ()));
    assert_eq!(input[0], output[0]);
    assert_ne!(input[1], output[1]);

    let plain_norm = |all: &mut Vec<RawTensor>| set(all, "norm.weight", |_, _| 1.0);
    let [input, output] = [false, true].map(|flag| drafted(true, flag, &usual, plain_norm));
    assert_close(&input, &output);
}
