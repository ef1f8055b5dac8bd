//! One softmax-attention sublayer: projections, per-head norms, RoPE, tree attention, output gate, residual add.

use crate::device::Buffer;
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::gate::{Gate, GateArgs, GateKind};
use crate::kernels::matmul_rows::MatmulInput;
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::rope::{HeadNorm, Rope, RopeArgs, RopeHeads, Rotation};
use crate::kernels::tree_attention::{TreeAttention, TreeAttentionArgs};

use super::config::{AttentionConfig, OutputGate, QkNorm, ValueSource};
use super::decoder::{LayerContext, PostNorm};
use super::tail::AttentionTail;
use super::weights::AttentionWeights;
use super::workspace::Workspace;

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

/// Adds the sublayer's output for `workspace.rows` to `workspace.residual`; keys and values stay in `tail`.
pub(super) fn forward(
    context: &mut LayerContext<'_>,
    layer: AttentionLayer<'_>,
    workspace: &mut Workspace,
    tail: &mut AttentionTail,
) -> Result<(), KernelError> {
    project(context, layer, workspace, tail)?;
    let (device, config) = (context.device, layer.config);
    let norms = [&layer.weights.q_norm, &layer.weights.k_norm].map(Option::as_ref);
    turn_heads(
        context,
        config,
        norms,
        layer.inverse_frequencies,
        workspace,
        &mut tail.k,
    )?;
    context.settle_kv(layer.index, tail)?;
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
            span: context.caches.kv().span(kv_layer),
            q_heads: config.num_heads,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            scale: config.scale,
            window: config.window,
            out: &mut workspace.mixed,
        },
    )?;
    finish(context, layer, workspace)
}

/// Queries and keys to where [`turn_heads`] finds them, values, normalised as the layer wants, to `tail`; gates of their
/// own projection to `workspace.gates`. All projections read the same rows and go together.
fn project(
    context: &LayerContext<'_>,
    layer: AttentionLayer<'_>,
    workspace: &mut Workspace,
    tail: &mut AttentionTail,
) -> Result<(), KernelError> {
    let (config, weights) = (layer.config, layer.weights);
    let Workspace {
        rows,
        q,
        q_projected,
        k_projected,
        v_projected,
        gates,
        ..
    } = workspace;
    let is_normed = config.qk_norm != QkNorm::None;
    let mut products = match is_normed {
        true => vec![
            (&weights.q_proj, &mut *q_projected),
            (&weights.k_proj, &mut *k_projected),
        ],
        false => vec![(&weights.q_proj, &mut *q), (&weights.k_proj, &mut tail.k)],
    };
    if let Some(v_proj) = &weights.v_proj {
        let v = match config.values {
            ValueSource::NormedProjection => &mut *v_projected,
            ValueSource::Projection | ValueSource::NormedKeys => &mut tail.v,
        };
        products.push((v_proj, v));
    }
    if let Some(gate_proj) = &weights.output_gate_proj {
        products.push((gate_proj, gates));
    }
    context.multiply_together(&*rows, products)?;

    let (head_dim, num_kv_heads) = (config.head_dim, config.num_kv_heads);
    let values_norm = |x: &Buffer<f32>, y: &mut Buffer<f32>| {
        RmsNorm::run(
            context.device,
            RmsNormArgs {
                x,
                x_offset: 0,
                x_stride: head_dim,
                num_vectors: context.num_rows * num_kv_heads,
                width: head_dim,
                weight: None,
                eps: context.config.rms_norm_eps,
                y: y.into(),
            },
        )
    };
    match config.values {
        ValueSource::Projection => Ok(()),
        ValueSource::NormedProjection => values_norm(v_projected, &mut tail.v),
        ValueSource::NormedKeys => {
            let keys = if is_normed { &*k_projected } else { &tail.k };
            values_norm(keys, &mut tail.v)
        }
    }
}

/// Queries in `workspace.q` and keys in `k` as attention takes them: the norms of their projections, with the weights of
/// both, where the layer has any, else what is there; turned where it rotates.
pub(super) fn turn_heads(
    context: &LayerContext<'_>,
    config: &AttentionConfig,
    norms: [Option<&Buffer<f32>>; 2],
    inverse_frequencies: Option<&Buffer<f32>>,
    workspace: &mut Workspace,
    k: &mut Buffer<f32>,
) -> Result<(), KernelError> {
    let is_normed = config.qk_norm != QkNorm::None;
    let rotation = config.rope.as_ref().zip(inverse_frequencies);
    let rotation = rotation.map(|(rope, inverse_frequencies)| Rotation {
        inverse_frequencies,
        pair_offset: rope.pair_offset(),
    });
    if !is_normed && rotation.is_none() {
        return Ok(());
    }
    let norm_of = |x, parts, weight| HeadNorm {
        x,
        x_stride: parts * config.head_dim,
        weight,
        eps: context.config.rms_norm_eps,
    };
    let q_norm = norm_of(&workspace.q_projected, config.q_proj_parts(), norms[0]);
    let k_norm = norm_of(&workspace.k_projected, 1, norms[1]);
    let heads = vec![
        RopeHeads {
            norm: is_normed.then_some(q_norm),
            num_heads: config.num_heads,
            y: &mut workspace.q,
        },
        RopeHeads {
            norm: is_normed.then_some(k_norm),
            num_heads: config.num_kv_heads,
            y: k,
        },
    ];
    Rope::run(
        context.device,
        RopeArgs {
            heads,
            head_dim: config.head_dim,
            positions: context.paths.positions(),
            rotation,
        },
    )
}

/// Multiplies the heads' outputs by their gates, where there are any, and adds their projection to the residual stream.
fn finish(
    context: &LayerContext<'_>,
    layer: AttentionLayer<'_>,
    workspace: &mut Workspace,
) -> Result<(), KernelError> {
    let config = layer.config;
    let Workspace {
        mixed,
        gates,
        q_projected,
        rows,
        sublayer,
        residual,
        ..
    } = workspace;
    let gates = match config.output_gate {
        OutputGate::None => None,
        OutputGate::InQueryProjection => Some((&*q_projected, 2)),
        OutputGate::OwnProjection => Some((&*gates, 1)),
    };
    let outputs = match gates {
        None => MatmulInput::from(&*mixed),
        Some((x, parts)) => {
            let args = GateArgs {
                kind: GateKind::SigmoidMultiply,
                x,
                x_offset: (parts - 1) * config.head_dim,
                x_stride: parts * config.head_dim,
                num_vectors: context.num_rows * config.num_heads,
                width: config.head_dim,
                values: mixed,
                per_row: config.num_heads,
                y: (&mut *rows).into(),
            };
            Gate::run(context.device, args)?;
            MatmulInput::from(&*rows)
        }
    };
    let o_proj = &layer.weights.o_proj;
    context.add_to_residual(o_proj, outputs, layer.post_norm, sublayer, residual)
}
