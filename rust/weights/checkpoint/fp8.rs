//! FP8 tensors of a checkpoint and the scales beside them.
//!
//! Whether a matrix is FP8 is said by its own dtype and by a sidecar, not by lists in a config: `W.weight_scale_inv` (as
//! Qwen and DeepSeek store it; multiplied, whatever its name) or `W.weight_scale` (compressed-tensors). Its shape says
//! what shares a scale: everything, an output channel, or a block of 128 x 128. Both must be there, for a weight read
//! without its scale is a model silently changed.

use super::{Checkpoint, Entry, Result};
use crate::error::CheckpointError;
use crate::kernels::fp8_matmul::{Fp8Scales, dequantise};
use half::bf16;

/// The dtype that is served.
pub(in crate::weights) const FP8_DTYPE: &str = "F8_E4M3";
/// Rows and columns of a block with a scale of its own.
const BLOCK: usize = 128;
/// What sidecars are called behind the weight's name.
const SCALE_SUFFIXES: [&str; 2] = ["_scale_inv", "_scale"];
/// Scales of activations, for engines that round those by constants. Here none are.
const ACTIVATION_SUFFIXES: [&str; 2] = ["input_scale", "activation_scale"];

/// An FP8 matrix as a checkpoint stores it.
#[derive(Clone, Debug)]
pub struct Fp8Matrix {
    /// Row-major codes.
    pub codes: Vec<u8>,
    /// Their scales.
    pub scales: Fp8Scales,
    /// Columns of a row.
    pub in_features: usize,
}

/// The scales of an FP8 matrix before they are read.
pub(super) struct Fp8Scale<'a> {
    name: String,
    shape: &'a [usize],
    /// Rows and columns that share one.
    block: [usize; 2],
}

impl Fp8Matrix {
    /// The BF16 weights that it stands for.
    pub fn dequantise(&self) -> Vec<bf16> {
        dequantise(&self.codes, self.in_features, &self.scales)
    }
}

impl Checkpoint {
    /// Whether tensor `name` is stored as FP8.
    pub fn is_fp8(&self, name: &str) -> bool {
        self.dtype(name) == Some(FP8_DTYPE)
    }

    /// Columns that share a scale of tensor `name`, by the headers; `None` unless it is FP8 with a scale that fits.
    pub fn fp8_block_columns(&self, name: &str) -> Option<usize> {
        let entry = self.tensors.get(name).filter(|_| self.is_fp8(name))?;
        let [rows, columns] = entry.tensor.shape[..] else {
            return None;
        };
        let (_, scale) = self.scale_of(name).ok()?;
        blocks(&scale.tensor.shape, [rows, columns]).map(|[_, block_columns]| block_columns)
    }

    /// Reads tensor `name`, which is FP8, with its scales.
    ///
    /// # Errors
    /// [`CheckpointError::Fp8Scale`] when there is no scale, or none that fits.
    pub(super) fn fp8_matrix(
        &self,
        name: &str,
        entry: &Entry,
        shape: [usize; 2],
    ) -> Result<Fp8Matrix> {
        let Fp8Scale {
            name: scale_name,
            shape: stored,
            block: [block_rows, block_columns],
        } = self.fp8_scale(name, entry, shape)?;
        let values = self.tensor_f32(&scale_name, stored)?;
        if let Some(value) = values.iter().find(|value| !value.is_finite()) {
            let expected = format!("finite scales in `{scale_name}`");
            return Err(self.fp8_error(entry, name, expected, value.to_string()));
        }
        self.skip_scales(name);
        Ok(Fp8Matrix {
            codes: self.bytes(name, entry)?.to_vec(),
            scales: Fp8Scales {
                values,
                block_rows,
                block_columns,
            },
            in_features: shape[1],
        })
    }

    /// Which scales tensor `name` of `shape` has, which is FP8, by the headers.
    ///
    /// # Errors
    /// [`CheckpointError::Fp8Scale`] when there is no scale, or none that fits, [`CheckpointError::Dtype`] when it is of
    /// another dtype.
    pub(super) fn fp8_scale(
        &self,
        name: &str,
        entry: &Entry,
        shape: [usize; 2],
    ) -> Result<Fp8Scale<'_>> {
        let (scale_name, scale) = self.scale_of(name)?;
        let stored = &scale.tensor.shape;
        let Some(block) = blocks(stored, shape) else {
            let [rows, columns] = shape;
            let grid = [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)];
            return Err(self.fp8_error(
                entry,
                name,
                format!("a scale `{scale_name}` of shape [], [1], [{rows}, 1] or {grid:?}"),
                format!("{stored:?}"),
            ));
        };
        if !["BF16", "F32"].contains(&&scale.tensor.dtype[..]) {
            return Err(self.wrong_dtype(&scale_name, scale, "BF16 or F32"));
        }
        Ok(Fp8Scale {
            name: scale_name,
            shape: stored,
            block,
        })
    }

    /// Counts what lies beside FP8 tensor `name` as used: its scale, and those of activations.
    pub(super) fn skip_scales(&self, name: &str) {
        for suffix in SCALE_SUFFIXES {
            self.skip(&format!("{name}{suffix}"));
        }
        if let Some(stem) = name.strip_suffix("weight") {
            for suffix in ACTIVATION_SUFFIXES {
                self.skip(&format!("{stem}{suffix}"));
            }
        }
    }

    /// The sidecar of tensor `name`.
    fn scale_of(&self, name: &str) -> Result<(String, &Entry)> {
        let names = SCALE_SUFFIXES.map(|suffix| format!("{name}{suffix}"));
        let found: Vec<_> = names
            .iter()
            .filter_map(|scale| Some((scale, self.tensors.get(scale)?)))
            .collect();
        match found[..] {
            [(scale, entry)] => Ok((scale.clone(), entry)),
            _ => Err(self.fp8_error(
                &self.tensors[name],
                name,
                format!("a scale, `{}` or `{}`", names[0], names[1]),
                ["neither", "both"][found.len() / 2].to_owned(),
            )),
        }
    }

    /// The tensor that `name` is the scale of, when that is not FP8.
    pub(super) fn without_use(&self, name: &str) -> Option<(&str, &Entry)> {
        SCALE_SUFFIXES.iter().find_map(|suffix| {
            let weight = name.strip_suffix(suffix)?;
            let (weight, entry) = self.tensors.get_key_value(weight)?;
            (entry.tensor.dtype != FP8_DTYPE).then_some((weight.as_str(), entry))
        })
    }

    fn fp8_error(
        &self,
        entry: &Entry,
        tensor: &str,
        expected: String,
        got: String,
    ) -> CheckpointError {
        CheckpointError::Fp8Scale {
            file: self.shards[entry.shard].file.clone(),
            tensor: tensor.to_owned(),
            expected,
            got,
        }
    }
}

/// Rows and columns that share a scale, by the shape of the scales of a matrix.
fn blocks(scales: &[usize], [rows, columns]: [usize; 2]) -> Option<[usize; 2]> {
    let grid = [rows.div_ceil(BLOCK), columns.div_ceil(BLOCK)];
    match *scales {
        [] | [1] | [1, 1] => Some([rows, columns]),
        [n] | [n, 1] if n == rows => Some([1, columns]),
        [n, m] if [n, m] == grid => Some([BLOCK, BLOCK]),
        _ => None,
    }
}
