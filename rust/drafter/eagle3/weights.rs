//! EAGLE-3's weights, read once from its checkpoint, or planted.

use crate::device::{Buffer, Device};
use crate::drafter::config::Eagle3Config;
use crate::drafter::draft_head::OwnHead;
use crate::error::Result;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::gate::GateKind;
use crate::options::WeightFormat;
use crate::weights::checkpoint::Verification;
use crate::weights::{GatedMlp, Linear, WeightLoader, WeightSource};

/// All weights of a drafter.
pub(in crate::drafter) struct Eagle3Weights {
    /// From taps to a feature, `[hidden_size, num_taps * hidden_size]`.
    pub(super) fc: Linear,
    /// Norm of the token's embedding.
    pub(super) input_norm: Buffer<f32>,
    /// Norm of the feature.
    pub(super) hidden_norm: Buffer<f32>,
    /// `[q_dim, 2 * hidden_size]`, as are the next two in their widths: embedding and feature side by side.
    pub(super) q_proj: Linear,
    pub(super) k_proj: Linear,
    pub(super) v_proj: Linear,
    pub(super) o_proj: Linear,
    pub(super) post_attention_norm: Buffer<f32>,
    pub(super) mlp: GatedMlp,
    pub(super) final_norm: Buffer<f32>,
    pub(super) head: OwnHead,
    /// An embedding of its own, in place of the target's.
    pub(super) embed: Option<PackedBf16>,
    /// What proving them took.
    pub(super) verification: Verification,
}

impl Eagle3Weights {
    /// Reads the weights of `config` from `source` to `device`, the layer's matrices in `format`, for a target of
    /// `vocab_size`.
    ///
    /// # Errors
    /// [`CheckpointError`](crate::error::CheckpointError) when a tensor is missing, extra, or of another shape, dtype or
    /// range; [`DeviceError`](crate::error::DeviceError) when the device has no room.
    pub(super) fn load(
        device: &Device,
        source: WeightSource<'_>,
        format: WeightFormat,
        config: &Eagle3Config,
        vocab_size: usize,
    ) -> Result<Self> {
        let tensors = WeightLoader { source, device };
        let (hidden, inter) = (config.hidden_size, config.intermediate_size);
        let (q_dim, kv_dim) = (config.q_dim(), config.kv_dim());
        let prefix = config.layer_prefix();
        let linear = |part: &str, out_features, in_features| {
            let name = format!("{prefix}.{part}.weight");
            tensors.linear(&name, [out_features, in_features], format)
        };
        let norm = |part: &str| tensors.tensor_f32(&format!("{prefix}.{part}.weight"), &[hidden]);
        let mut weights = Self {
            fc: tensors.linear("fc.weight", [hidden, config.taps_dim()], format)?,
            input_norm: norm("input_layernorm")?,
            hidden_norm: norm("hidden_norm")?,
            q_proj: linear("self_attn.q_proj", q_dim, 2 * hidden)?,
            k_proj: linear("self_attn.k_proj", kv_dim, 2 * hidden)?,
            v_proj: linear("self_attn.v_proj", kv_dim, 2 * hidden)?,
            o_proj: linear("self_attn.o_proj", hidden, q_dim)?,
            post_attention_norm: norm("post_attention_layernorm")?,
            mlp: GatedMlp {
                gate_proj: linear("mlp.gate_proj", inter, hidden)?,
                up_proj: linear("mlp.up_proj", inter, hidden)?,
                down_proj: linear("mlp.down_proj", hidden, inter)?,
                activation: GateKind::SiluMultiply,
            },
            final_norm: tensors.tensor_f32("norm.weight", &[hidden])?,
            head: OwnHead::load(
                tensors,
                [config.draft_vocab_size, hidden],
                config.has_offsets.then_some(vocab_size),
            )?,
            embed: config
                .has_embedding
                .then(|| tensors.token_rows_bf16("embed_tokens.weight", [vocab_size, hidden]))
                .transpose()?,
            verification: Verification::default(),
        };
        source.finish(config.copies())?;
        weights.verification = source.verification();
        Ok(weights)
    }

    /// Bytes of all weights in memory.
    pub(super) fn num_bytes(&self) -> usize {
        let matrices = [
            &self.fc,
            &self.q_proj,
            &self.k_proj,
            &self.v_proj,
            &self.o_proj,
        ];
        let norms = [
            &self.input_norm,
            &self.hidden_norm,
            &self.post_attention_norm,
            &self.final_norm,
        ];
        let matrices = matrices.into_iter().chain(self.mlp.matrices());
        matrices.map(Linear::num_bytes).sum::<usize>()
            + norms
                .map(|norm| norm.len() * size_of::<f32>())
                .iter()
                .sum::<usize>()
            + self.head.num_bytes()
            + self.embed.as_ref().map_or(0, PackedBf16::num_bytes)
    }
}
