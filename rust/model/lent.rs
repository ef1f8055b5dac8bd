//! What a target lends to its drafter: its embedding, and its LM head as drafts read it.

use super::weights::DecoderWeights;
use crate::device::{Buffer, Device};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::lm_head_screen::{LogitEstimates, LogitEstimatesArgs, ScreenedHead};
use crate::options::speculation::HeadPrecision;

/// See the module's head.
#[derive(Clone, Copy)]
pub struct Lent<'a> {
    weights: &'a DecoderWeights,
    screened: Option<&'a ScreenedHead>,
}

impl<'a> Lent<'a> {
    /// Of `weights`, and of the INT8 copy of their head where one is in use.
    pub fn new(weights: &'a DecoderWeights, screened: Option<&'a ScreenedHead>) -> Self {
        Self { weights, screened }
    }

    /// The embedding `[vocab_size, hidden_size]`.
    pub fn embed(self) -> &'a PackedBf16 {
        &self.weights.embed
    }

    /// What [`Self::logits`] goes by.
    pub fn head(self) -> HeadPrecision {
        match self.screened {
            Some(_) => HeadPrecision::Int8,
            None => HeadPrecision::Exact,
        }
    }

    /// Logits `[num_rows, vocab_size]` of final-norm outputs `hidden` `[num_rows, hidden_size]`, to draft by: estimates where
    /// there is an INT8 copy, for a draft decides nothing.
    ///
    /// # Errors
    /// [`KernelError`] when a buffer is too short.
    pub fn logits(
        self,
        device: &Device,
        hidden: &Buffer<f32>,
        num_rows: usize,
        logits: &mut Buffer<f32>,
    ) -> Result<(), KernelError> {
        let Some(head) = self.screened else {
            return self.weights.logits(device, hidden, num_rows, logits);
        };
        LogitEstimates::run(
            device,
            LogitEstimatesArgs {
                x: hidden,
                num_rows,
                head,
                logits,
            },
        )
    }
}
