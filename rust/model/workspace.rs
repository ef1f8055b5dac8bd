//! The activations of a decoder's passes: one buffer per purpose, allocated once for the largest pass.

use super::config::{AttentionConfig, GdnConfig, ModelConfig, OutputGate, ValueSource};
use crate::device::Buffer;
use crate::kernels::matmul_rows::MatmulRows;

/// Activations of one pass. `B` is a buffer; planning memory puts a number in its place.
pub(super) struct Workspace<B = Buffer<f32>> {
    pub(super) residual: B,
    /// Activations of the next matmul.
    pub(super) rows: MatmulRows<B>,
    pub(super) q_projected: B,
    pub(super) k_projected: B,
    pub(super) v_projected: B,
    pub(super) gates: B,
    pub(super) q: B,
    pub(super) mixed: B,
    pub(super) z: B,
    pub(super) a: B,
    pub(super) b: B,
    /// A sublayer's output before the norm behind it.
    pub(super) sublayer: B,
    pub(super) gate: B,
    pub(super) up: B,
    pub(super) hidden: B,
    pub(super) taps: Vec<B>,
}

impl<B> Workspace<B> {
    /// A workspace of what `alloc` makes of each buffer's values per row.
    pub(super) fn with<E>(
        config: &ModelConfig,
        num_taps: usize,
        mut alloc: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let q_width = config.widest_attention(AttentionConfig::q_dim);
        let gdn_width = |f: fn(&GdnConfig) -> usize| config.gdn.as_ref().map_or(0, f);
        let value_width = gdn_width(|g| g.num_value_heads * g.value_dim);
        let value_heads = gdn_width(|g| g.num_value_heads);
        let widest_row = config.hidden_size.max(config.intermediate_size);
        let widest_row = widest_row.max(q_width).max(value_width);
        Ok(Self {
            residual: alloc(config.hidden_size)?,
            rows: MatmulRows::with(widest_row, &mut alloc)?,
            q_projected: alloc(config.widest_attention(AttentionConfig::q_proj_rows))?,
            k_projected: alloc(config.widest_attention(AttentionConfig::kv_dim))?,
            v_projected: alloc(config.widest_attention(|a| match a.values {
                ValueSource::NormedProjection => a.kv_dim(),
                ValueSource::Projection | ValueSource::NormedKeys => 0,
            }))?,
            gates: alloc(config.widest_attention(|a| match a.output_gate {
                OutputGate::OwnProjection => a.q_dim(),
                OutputGate::None | OutputGate::InQueryProjection => 0,
            }))?,
            q: alloc(q_width)?,
            mixed: alloc(q_width.max(value_width))?,
            z: alloc(value_width)?,
            a: alloc(value_heads)?,
            b: alloc(value_heads)?,
            sublayer: alloc(config.post_norms.map_or(0, |_| config.hidden_size))?,
            gate: alloc(config.intermediate_size)?,
            up: alloc(config.intermediate_size)?,
            hidden: alloc(config.hidden_size)?,
            taps: (0..num_taps)
                .map(|_| alloc(config.hidden_size))
                .collect::<Result<_, E>>()?,
        })
    }
}
