//! What a drafter takes of the memory, from its config and the lengths in its headers.
//!
//! Sizes are asked of the types that allocate, so that a plan made before loading and the loaded drafter agree to the
//! byte; the engine's tests hold one against the other.

use super::block::Block;
use super::config::{BlockConfig, DrafterConfig, Eagle3Config, OFFSETS};
use super::context::Contexts;
use super::draft_head::HeadLens;
use super::eagle3;
use super::markov;
use crate::device::Backend;
use crate::kernels::bf16_matmul::PackedBf16;

/// What a drafter must hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DrafterSizes {
    /// Requests at once.
    pub num_slots: usize,
    /// Pages of 64 context positions, shared by all.
    pub num_pages: usize,
    /// Pages of the longest request.
    pub pages_per_sequence: usize,
    /// Rows of the target's embedding.
    pub vocab_size: usize,
    /// Most positions of a draft.
    pub num_draft_tokens: usize,
    /// Most candidates per position or parent, and most parents per position.
    pub width: usize,
}

/// Bytes of a drafter, by purpose.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrafterBytes {
    /// Weights, the target's embedding and head not among them.
    pub weights: usize,
    /// Activations of one chunk of context.
    pub scratch: usize,
    /// One slot: activations, logits and candidates of its draft, and what it holds of a context whatever its length.
    pub slot: usize,
    /// One page of context: keys and values of 64 positions in all layers that keep them all.
    pub page: usize,
}

impl DrafterConfig {
    /// Bytes for `sizes` on `backend`, with activations of `activation_bytes` each and linear layers of what `matrix_bytes` says of
    /// their name, rows and columns. Logits and scores are fp32 on every device.
    pub fn bytes(
        &self,
        sizes: &DrafterSizes,
        backend: Backend,
        activation_bytes: usize,
        matrix_bytes: impl Fn(&str, usize, usize) -> usize,
    ) -> DrafterBytes {
        let linear_layers = self.linear_layers();
        let weights = self
            .tensors()
            .iter()
            .map(|(name, shape)| match shape[..] {
                // Read as a vector: one dot product per row of the draft.
                [1, columns] => columns * size_of::<f32>(),
                [rows, columns] if linear_layers.contains(name) => {
                    matrix_bytes(name, rows, columns)
                }
                [rows, columns] => PackedBf16::num_bytes_of(backend, rows, columns),
                [len] if name == OFFSETS => len * size_of::<u32>(),
                // Norms and base kernels are widened when they are read.
                _ => shape.iter().product::<usize>() * size_of::<f32>(),
            })
            .sum();
        match self {
            Self::Block(config) => block_bytes(config, sizes, activation_bytes, weights),
            Self::Eagle3(config) => eagle3_bytes(config, sizes, activation_bytes, weights),
            Self::Ngram(_) => DrafterBytes::default(),
        }
    }
}

fn block_bytes(
    config: &BlockConfig,
    sizes: &DrafterSizes,
    activation_bytes: usize,
    weights: usize,
) -> DrafterBytes {
    let head = HeadLens::of(config, sizes, 1);
    let [walk_activations, walk_values, walk_ids] = markov::lens_of(config, sizes, 1);
    let block = Block::len_of(config, config.num_rows(sizes.num_draft_tokens));
    let context = Contexts::bytes_of(config, sizes.pages_per_sequence, activation_bytes);
    DrafterBytes {
        weights,
        scratch: Contexts::scratch_len_of(config) * activation_bytes,
        slot: context.slot
            + (block + head.gate + walk_activations) * activation_bytes
            + (head.logits + head.log_probs + walk_values) * size_of::<f32>()
            + (head.token_ids + walk_ids) * size_of::<u32>(),
        page: context.page,
    }
}

fn eagle3_bytes(
    config: &Eagle3Config,
    sizes: &DrafterSizes,
    activation_bytes: usize,
    weights: usize,
) -> DrafterBytes {
    let lens = eagle3::lens_of(config, sizes);
    DrafterBytes {
        weights,
        scratch: lens.scratch * activation_bytes,
        slot: lens.slot_activations * activation_bytes
            + lens.slot_values * size_of::<f32>()
            + lens.slot_ids * size_of::<u32>(),
        page: config.kv_layout().page_bytes(activation_bytes).whole,
    }
}
