//! Whether a drafter fits a target: every size that both sides state must agree.

use super::PairFiles;
use super::config::DrafterConfig;
use crate::error::DrafterError;
use crate::model::ModelConfig;

/// Sizes that drafter and target share, `None` where the drafter does not state one, and the layers it taps.
struct Shared {
    hidden_size: usize,
    vocab_size: Option<usize>,
    num_target_layers: Option<usize>,
    mask_token_id: Option<usize>,
    target_layer_ids: Vec<i64>,
}

/// Checks `drafter` against `target` and returns the target layers to tap.
///
/// # Errors
/// [`DrafterError::Pairing`] or [`DrafterError::Tap`], naming both directories and both values.
pub fn check(
    files: PairFiles<'_>,
    drafter: &DrafterConfig,
    target: &ModelConfig,
) -> Result<Vec<usize>, DrafterError> {
    let num_layers = target.layers.len();
    let shared = match drafter {
        DrafterConfig::Block(config) => Shared {
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            num_target_layers: config.num_target_layers,
            mask_token_id: Some(config.mask_token_id),
            target_layer_ids: config.target_layer_ids.clone(),
        },
        DrafterConfig::Eagle3(config) => Shared {
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            num_target_layers: config.num_target_layers,
            mask_token_id: None,
            target_layer_ids: config.layer_ids_of(num_layers),
        },
        DrafterConfig::Ngram(_) => return Ok(Vec::new()),
    };
    let differs = |what, expected, got| DrafterError::Pairing {
        drafter: files.drafter.to_owned(),
        target: files.target.to_owned(),
        what,
        expected,
        got,
    };
    // `fc` and all projections follow from hidden size and number of taps, which the tensors were checked against.
    let sizes = [
        ("hidden_size", target.hidden_size, Some(shared.hidden_size)),
        ("vocab_size", target.vocab_size, shared.vocab_size),
        (
            "number of target layers",
            num_layers,
            shared.num_target_layers,
        ),
    ];
    for (what, expected, got) in sizes {
        match got {
            Some(got) if got != expected => return Err(differs(what, expected, got)),
            _ => {}
        }
    }
    if let Some(mask_token_id) = shared.mask_token_id.filter(|&id| id >= target.vocab_size) {
        let what = "mask_token_id, which must lie below the number of embedding rows,";
        return Err(differs(what, target.vocab_size, mask_token_id));
    }
    shared
        .target_layer_ids
        .iter()
        .map(|&id| {
            // Of the last layer published code taps the output after the final norm, other engines before it.
            match usize::try_from(id) {
                Ok(layer) if layer + 1 < num_layers => Ok(layer),
                _ => Err(DrafterError::Tap {
                    drafter: files.drafter.to_owned(),
                    target: files.target.to_owned(),
                    got: id,
                    num_layers,
                }),
            }
        })
        .collect()
}

#[cfg(test)]
mod tests;
