//! A decoder's weights by the headers of their files: what loading checks before it reads a tensor, and all that can be
//! said of a checkpoint without reading it.

use crate::error::{CheckpointError, OptionError};
use crate::model::config::ModelConfig;
use crate::model::tensor_role::TensorRole as Role;
use crate::options::WeightFormat;
use crate::weights::checkpoint::StoredAs;
use crate::weights::{Checkpoint, WeightSource};

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Checks everything about the weights of `config` that headers tell, tensors that nobody would read among it.
///
/// # Errors
/// [`CheckpointError`] when a tensor is missing, extra, or of another shape or dtype, or a tied head is another matrix.
pub fn check_headers(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let tensors = config.weight_names.tensors(config);
    checkpoint.check(&tensors)?;
    check_dtypes(checkpoint, config)?;
    checkpoint.skip_all(&tensors);
    if config.tie_word_embeddings {
        skip_tied_head(checkpoint, config)?;
    }
    for layer in 0..config.layers.len() {
        checkpoint.skip(&config.weight_names.rotary_frequencies(layer));
    }
    checkpoint.finish(config.weight_names.ignored_prefixes)
}

/// Checks the dtypes of the tensors of `config` that are there, and that FP8 has scales.
///
/// # Errors
/// As for [`Checkpoint::check_dtypes`].
pub fn check_dtypes(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let tensors = config.weight_names.tensors(config);
    checkpoint.check_dtypes(&tensors, |_, shape| match shape.len() {
        2 => StoredAs::MatrixOrFp8,
        _ => StoredAs::Values,
    })
}

/// Checks presence, shapes and dtypes of all tensors of `config` before any is read; planted ones are what is wanted.
pub(super) fn check_source(source: WeightSource<'_>, config: &ModelConfig) -> Result<()> {
    let Some(checkpoint) = source.checkpoint() else {
        return Ok(());
    };
    checkpoint.check(&config.weight_names.tensors(config))?;
    check_dtypes(checkpoint, config)?;
    match config.tie_word_embeddings {
        true => skip_tied_head(checkpoint, config),
        false => Ok(()),
    }
}

/// Checks that linear layers of `config` can be held in `format` for `q_passes` Q passes, by the dtypes in the files.
///
/// # Errors
/// [`OptionError::Value`] when FP8 is asked of a checkpoint without, or Q passes of one with FP8 matrices.
pub fn check_format(
    checkpoint: &Checkpoint,
    config: &ModelConfig,
    format: WeightFormat,
    q_passes: usize,
) -> Result<(), OptionError> {
    let linear_layers = config.weight_names.linear_layers(config);
    let has_fp8 = linear_layers.iter().any(|name| checkpoint.is_fp8(name));
    match (format, has_fp8) {
        (WeightFormat::Fp8 | WeightFormat::Fp8W8A8, false) => Err(no_fp8(format)),
        (WeightFormat::Auto | WeightFormat::Fp8 | WeightFormat::Fp8W8A8, true) if q_passes > 0 => {
            Err(no_q_view(q_passes))
        }
        _ => Ok(()),
    }
}

pub(super) fn no_fp8(format: WeightFormat) -> OptionError {
    OptionError::Value {
        option: "weight_format",
        expected: "auto, bf16 or w12, as the checkpoint holds no FP8 matrices".to_owned(),
        got: format!("\"{}\"", format.name()),
    }
}

/// The error of `q_passes` Q passes over FP8 matrices.
pub fn no_q_view(q_passes: usize) -> OptionError {
    OptionError::Value {
        option: "q_passes",
        expected: "0 with FP8 matrices, which have no 8-bit view (weight_format bf16 or w12 gives them one)"
            .to_owned(),
        got: q_passes.to_string(),
    }
}

/// Counts a tied head's copy in the file as used, once it is seen to be the embedding.
fn skip_tied_head(checkpoint: &Checkpoint, config: &ModelConfig) -> Result<()> {
    let [head, embed] = [Role::LmHead, Role::Embed].map(|role| config.weight_names.name(role, 0));
    let Some(file) = checkpoint.file(&head) else {
        return Ok(());
    };
    if !checkpoint.same_bits(&head, &embed)? {
        return Err(CheckpointError::TiedTensor {
            file: file.to_owned(),
            tensor: head,
            expected: embed,
        });
    }
    checkpoint.skip(&head);
    Ok(())
}
