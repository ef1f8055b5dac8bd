//! Dtypes and scales by the headers alone, before a tensor is read.

use super::fp8::FP8_DTYPE;
use super::{Checkpoint, Result, W12_DTYPE};

/// What a tensor may be stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoredAs {
    /// BF16 or W12.
    Matrix,
    /// Likewise, or FP8 with a scale.
    MatrixOrFp8,
    /// BF16 or F32.
    Values,
    /// I64.
    Integers,
}

impl StoredAs {
    /// For a message.
    fn expected(self) -> &'static str {
        match self {
            Self::Matrix => "BF16 or W12",
            Self::MatrixOrFp8 => "BF16, W12 or F8_E4M3",
            Self::Values => "BF16 or F32",
            Self::Integers => "I64",
        }
    }

    fn allows(self, dtype: &str) -> bool {
        match self {
            Self::Matrix => ["BF16", W12_DTYPE].contains(&dtype),
            Self::MatrixOrFp8 => ["BF16", W12_DTYPE, FP8_DTYPE].contains(&dtype),
            Self::Values => ["BF16", "F32"].contains(&dtype),
            Self::Integers => dtype == "I64",
        }
    }
}

impl Checkpoint {
    /// Checks the dtype of every tensor of `expected` that is there, and the scales of those in FP8, before any is read;
    /// `stored_as` says of a name and shape what is allowed.
    ///
    /// # Errors
    /// [`CheckpointError::Dtype`](crate::error::CheckpointError::Dtype), or
    /// [`CheckpointError::Fp8Scale`](crate::error::CheckpointError::Fp8Scale) for a scale that is missing or does not fit.
    pub fn check_dtypes(
        &self,
        expected: &[(String, Vec<usize>)],
        stored_as: impl Fn(&str, &[usize]) -> StoredAs,
    ) -> Result<()> {
        for (name, shape) in expected {
            let Some(entry) = self.tensors.get(name) else {
                continue;
            };
            let allowed = stored_as(name, shape);
            if !allowed.allows(&entry.tensor.dtype) {
                return Err(self.wrong_dtype(name, entry, allowed.expected()));
            }
            if let (FP8_DTYPE, &[rows, columns]) = (&entry.tensor.dtype[..], &shape[..]) {
                self.fp8_scale(name, entry, [rows, columns])?;
            }
        }
        Ok(())
    }

    /// Counts the tensors of `expected` as used, with the scales of those in FP8, without reading them.
    pub fn skip_all(&self, expected: &[(String, Vec<usize>)]) {
        for (name, _) in expected {
            self.skip(name);
            if self.is_fp8(name) {
                self.skip_scales(name);
            }
        }
    }
}
