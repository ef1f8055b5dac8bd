//! What a drafter takes of the memory, from its config alone.
//!
//! Sizes are asked of the types that allocate, so that a plan made before loading and the loaded drafter agree to the
//! byte; the engine's tests hold one against the other.

use super::block::Block;
use super::config::DrafterConfig;
use super::context::Contexts;
use super::heads::HeadLens;
use crate::cache::pages::KvCache;
use crate::kernels::bf16_matmul::PackedBf16;

/// Bytes of a drafter, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrafterBytes {
    /// Weights, the target's embedding and head not among them.
    pub weights: usize,
    /// Activations of one chunk of context.
    pub scratch: usize,
    /// Activations, logits and candidates of one slot's draft.
    pub slot: usize,
    /// One page of context: keys and values of 64 positions in all layers.
    pub page: usize,
}

impl DrafterConfig {
    /// Bytes for a target of `vocab_size`, with activations of `activation_bytes` each. Logits and scores are fp32 on
    /// every device.
    pub fn bytes(&self, vocab_size: usize, activation_bytes: usize) -> DrafterBytes {
        let head = HeadLens::of(self, vocab_size, 1);
        DrafterBytes {
            weights: self
                .tensors()
                .iter()
                .map(|(_, shape)| match shape[..] {
                    [rows, columns] => PackedBf16::num_bytes_of(rows, columns),
                    // Norms and base kernels are widened when they are read.
                    _ => shape.iter().product::<usize>() * size_of::<f32>(),
                })
                .sum(),
            scratch: Contexts::scratch_len_of(self) * activation_bytes,
            slot: (Block::len_of(self, 1) + head.gate) * activation_bytes
                + (head.logits + head.log_probs) * size_of::<f32>()
                + head.token_ids * size_of::<u32>(),
            page: KvCache::page_bytes_of(&self.kv_shapes(), activation_bytes),
        }
    }

    /// Number of parameters.
    pub fn num_parameters(&self) -> usize {
        let tensors = self.tensors();
        tensors
            .iter()
            .map(|(_, shape)| shape.iter().product::<usize>())
            .sum()
    }
}
