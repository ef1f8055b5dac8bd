//! What a checkpoint's files say of their tensors: format, size, escapes. From headers alone, so a look at a model of any
//! size takes no time; only escape counts are read, and must agree with the escapes there are.

use std::path::Path;

use super::checkpoint::Checkpoint;
use crate::error::CheckpointError;

/// One tensor of a checkpoint, as it is stored.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorReport {
    /// Its name.
    pub name: String,
    /// `w12`, `fp8`, or its dtype in small letters: `bf16`, `f32`.
    pub format: String,
    /// Bits that an element takes, padding and escapes included.
    pub bits_per_weight: f64,
    /// Weights stored apart from the planes.
    pub num_escapes: usize,
    /// Bytes stored.
    pub num_bytes: u64,
    /// Bytes of the tensor in the checkpoint that was converted.
    pub source_bytes: u64,
}

/// Reports on every tensor of `path`, a model directory or one safetensors file, by name.
///
/// # Errors
/// [`CheckpointError`] when there are no weights, or files, index and metadata do not fit together.
pub fn inspect(path: &Path) -> Result<Vec<TensorReport>, CheckpointError> {
    let checkpoint = match path.is_dir() {
        true => Checkpoint::open(path)?,
        false => Checkpoint::open_file(path)?,
    };
    let names: Vec<&str> = checkpoint.names().collect();
    names.iter().map(|name| report(&checkpoint, name)).collect()
}

fn report(checkpoint: &Checkpoint, name: &str) -> Result<TensorReport, CheckpointError> {
    let (dtype, shape, num_bytes) = checkpoint.describe(name);
    let num_elements = shape.iter().map(|&len| len as f64).product::<f64>();
    let is_w12 = dtype == "W12";
    let bits = num_bytes as f64 * 8.0;
    Ok(TensorReport {
        name: name.to_owned(),
        format: match dtype.starts_with("F8") {
            true => "fp8".to_owned(),
            false => dtype.to_lowercase(),
        },
        // An empty tensor has no bits to share out.
        bits_per_weight: if num_elements > 0.0 {
            bits / num_elements
        } else {
            0.0
        },
        num_escapes: checkpoint.num_escapes(name)?,
        num_bytes,
        source_bytes: match is_w12 {
            true => num_elements as u64 * 2,
            false => num_bytes,
        },
    })
}
