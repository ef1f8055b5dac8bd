//! Whether a drafter fits a target: every size that both sides state must agree.

use std::path::Path;

use super::config::DrafterConfig;
use crate::error::DrafterError;
use crate::model::ModelConfig;

/// Checks `drafter` against `target` and returns the target layers to tap.
///
/// # Errors
/// [`DrafterError::Pairing`] or [`DrafterError::Tap`], naming both directories and both values.
pub fn check(
    drafter_dir: &Path,
    drafter: &DrafterConfig,
    target_dir: &Path,
    target: &ModelConfig,
) -> Result<Vec<usize>, DrafterError> {
    let differs = |what, expected, got| DrafterError::Pairing {
        drafter: drafter_dir.to_owned(),
        target: target_dir.to_owned(),
        what,
        expected,
        got,
    };
    let num_layers = target.layers.len();
    // `fc` and all projections follow from hidden size and number of taps, which the tensors were checked against.
    let sizes = [
        ("hidden_size", target.hidden_size, Some(drafter.hidden_size)),
        ("vocab_size", target.vocab_size, drafter.vocab_size),
        (
            "number of target layers",
            num_layers,
            drafter.num_target_layers,
        ),
    ];
    for (what, expected, got) in sizes {
        match got {
            Some(got) if got != expected => return Err(differs(what, expected, got)),
            _ => {}
        }
    }
    if drafter.mask_token_id >= target.vocab_size {
        let what = "mask_token_id, which must lie below the number of embedding rows,";
        return Err(differs(what, target.vocab_size, drafter.mask_token_id));
    }
    drafter
        .target_layer_ids
        .iter()
        .map(|&id| {
            // Of the last layer published code taps the output after the final norm, other engines before it.
            match usize::try_from(id) {
                Ok(layer) if layer + 1 < num_layers => Ok(layer),
                _ => Err(DrafterError::Tap {
                    drafter: drafter_dir.to_owned(),
                    target: target_dir.to_owned(),
                    got: id,
                    num_layers,
                }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests;
