//! One softmax-attention sublayer: projections, per-head norms, RoPE, tree attention, output gate, residual add.

use crate::device::Buffer;
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::gate::{Gate, GateArgs, GateKind};
use crate::kernels::rms_norm::{NormEpilogue, RmsNorm, RmsNormArgs};
use crate::kernels::rope::{Rope, RopeArgs};
use crate::kernels::tree_attention::{TreeAttention, TreeAttentionArgs};

use super::config::{AttentionConfig, OutputGate, QkNorm, ValueSource};
use super::decoder::{LayerContext, PostNorm, Workspace};
use super::tail::AttentionTail;
use super::weights::AttentionWeights;

/// What an attention layer is made of.
#[derive(Clone, Copy)]
pub(super) struct AttentionLayer<'a> {
    /// Its place among all layers.
    pub(super) index: usize,
    pub(super) config: &'a AttentionConfig,
    pub(super) weights: &'a AttentionWeights,
    /// Where it rotates.
    pub(super) inverse_frequencies: Option<&'a Buffer<f32>>,
    pub(super) post_norm: Option<PostNorm<'a>>,
}

/// Adds the sublayer's output for `workspace.normed` to `workspace.residual`; keys and values stay in `tail`.
pub(super) fn forward(
    context: &LayerContext<'_>,
    layer: AttentionLayer<'_>,
    workspace: &mut Workspace,
    tail: &mut AttentionTail,
) -> Result<(), KernelError> {
    project(context, layer, workspace, tail)?;
    let (device, config) = (context.device, layer.config);
    if let (Some(rope), Some(inverse_frequencies)) = (&config.rope, layer.inverse_frequencies) {
        for (x, num_heads) in [
            (&mut workspace.q, config.num_heads),
            (&mut tail.k, config.num_kv_heads),
        ] {
            Rope::run(
                device,
                RopeArgs {
                    x,
                    num_heads,
                    head_dim: config.head_dim,
                    positions: context.paths.positions(),
                    inverse_frequencies,
                    pair_offset: rope.pair_offset(),
                },
            )?;
        }
    }
    let kv_layer = context.caches.attention_index(layer.index);
    TreeAttention::run(
        device,
        TreeAttentionArgs {
            q: &workspace.q,
            k_tail: &tail.k,
            v_tail: &tail.v,
            k_pages: context.caches.kv().k(kv_layer),
            v_pages: context.caches.kv().v(kv_layer),
            paths: context.paths,
            q_heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            scale: config.scale,
            window: config.window,
            out: &mut workspace.mixed,
        },
    )?;
    gate_outputs(context, layer, workspace)?;
    context.add_to_residual(
        &layer.weights.o_proj,
        &workspace.mixed,
        layer.post_norm,
        &mut workspace.sublayer,
        &mut workspace.residual,
    )
}

/// Queries to `workspace.q`, keys and values to `tail`, all of them normalised as the layer wants, none rotated.
fn project(
    context: &LayerContext<'_>,
    layer: AttentionLayer<'_>,
    workspace: &mut Workspace,
    tail: &mut AttentionTail,
) -> Result<(), KernelError> {
    let (config, weights) = (layer.config, layer.weights);
    let (head_dim, num_kv_heads) = (config.head_dim, config.num_kv_heads);
    let Workspace {
        normed,
        q,
        q_projected,
        k_projected,
        ..
    } = workspace;
    let heads_norm = |x: &_, x_stride, num_heads, weight, y: &mut _| {
        RmsNorm::run(
            context.device,
            RmsNormArgs {
                x,
                x_offset: 0,
                x_stride,
                num_vectors: context.num_rows * num_heads,
                width: head_dim,
                weight,
                eps: context.config.rms_norm_eps,
                epilogue: NormEpilogue::Store,
                y,
            },
        )
    };
    let multiply = |weight: &_, y: &mut _| context.multiply(weight, normed, y, Epilogue::Store);
    if let Some(v_proj) = &weights.v_proj {
        match config.values {
            ValueSource::NormedProjection => {
                multiply(v_proj, k_projected)?;
                heads_norm(k_projected, head_dim, num_kv_heads, None, &mut tail.v)?;
            }
            ValueSource::Projection | ValueSource::NormedKeys => multiply(v_proj, &mut tail.v)?,
        }
    }
    if config.qk_norm == QkNorm::None {
        multiply(&weights.q_proj, q)?;
        multiply(&weights.k_proj, &mut tail.k)?;
        return match config.values {
            ValueSource::NormedKeys => {
                heads_norm(&tail.k, head_dim, num_kv_heads, None, &mut tail.v)
            }
            ValueSource::Projection | ValueSource::NormedProjection => Ok(()),
        };
    }
    multiply(&weights.q_proj, q_projected)?;
    multiply(&weights.k_proj, k_projected)?;
    if config.values == ValueSource::NormedKeys {
        heads_norm(k_projected, head_dim, num_kv_heads, None, &mut tail.v)?;
    }
    let q_stride = head_dim * config.q_proj_parts();
    let (q_norm, k_norm) = (weights.q_norm.as_ref(), weights.k_norm.as_ref());
    heads_norm(q_projected, q_stride, config.num_heads, q_norm, q)?;
    heads_norm(k_projected, head_dim, num_kv_heads, k_norm, &mut tail.k)
}

/// Multiplies the heads' outputs by their gates, where there are any.
fn gate_outputs(
    context: &LayerContext<'_>,
    layer: AttentionLayer<'_>,
    workspace: &mut Workspace,
) -> Result<(), KernelError> {
    let config = layer.config;
    let (x_offset, x_stride) = match (config.output_gate, &layer.weights.output_gate_proj) {
        (OutputGate::InQueryProjection, _) => (config.head_dim, 2 * config.head_dim),
        (OutputGate::OwnProjection, Some(gate_proj)) => {
            // Queries have left this buffer.
            let (x, y) = (&workspace.normed, &mut workspace.q_projected);
            context.multiply(gate_proj, x, y, Epilogue::Store)?;
            (0, config.head_dim)
        }
        _ => return Ok(()),
    };
    Gate::run(
        context.device,
        GateArgs {
            kind: GateKind::SigmoidMultiply,
            x: &workspace.q_projected,
            x_offset,
            x_stride,
            num_vectors: context.num_rows * config.num_heads,
            width: config.head_dim,
            y: &mut workspace.mixed,
        },
    )
}
