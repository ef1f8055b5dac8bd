//! One softmax-attention sublayer: projections, per-head norms, RoPE, tree attention, output gate, residual add.

use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::gate::{Gate, GateArgs, GateKind};
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::rope::{Rope, RopeArgs};
use crate::kernels::tree_attention::{TreeAttention, TreeAttentionArgs};

use super::decoder::{LayerContext, Workspace};
use super::tail::AttentionTail;
use super::weights::AttentionWeights;

/// Adds the sublayer's output for `workspace.normed` to `workspace.residual`; keys and values stay in `tail`.
pub(super) fn forward(
    context: &LayerContext<'_>,
    layer: usize,
    weights: &AttentionWeights,
    workspace: &mut Workspace,
    tail: &mut AttentionTail,
) -> Result<(), KernelError> {
    let (device, config, n) = (context.device, context.config, context.num_rows);
    let attention = &config.attention;
    let normed = &workspace.normed;
    let head_dim = attention.head_dim;
    // With an output gate each head's row block is [query | gate] (targets.md 0.2).
    let q_stride = head_dim * if attention.output_gate { 2 } else { 1 };

    let (q, k) = match attention.qk_norm {
        true => (&mut workspace.q_projected, &mut workspace.k_projected),
        false => (&mut workspace.q, &mut tail.k),
    };
    let products = [
        (&weights.q_proj, q),
        (&weights.k_proj, k),
        (&weights.v_proj, &mut tail.v),
    ];
    context.multiply_together(normed, products)?;
    if attention.qk_norm {
        for (x, x_stride, heads, weight, y) in [
            (
                &workspace.q_projected,
                q_stride,
                attention.num_heads,
                &weights.q_norm,
                &mut workspace.q,
            ),
            (
                &workspace.k_projected,
                head_dim,
                attention.num_kv_heads,
                &weights.k_norm,
                &mut tail.k,
            ),
        ] {
            RmsNorm::run(
                device,
                RmsNormArgs {
                    x,
                    x_offset: 0,
                    x_stride,
                    num_vectors: n * heads,
                    width: head_dim,
                    weight: weight.as_ref(),
                    eps: config.rms_norm_eps,
                    y,
                },
            )?;
        }
    }
    for (x, num_heads) in [
        (&mut workspace.q, attention.num_heads),
        (&mut tail.k, attention.num_kv_heads),
    ] {
        Rope::run(
            device,
            RopeArgs {
                x,
                num_heads,
                head_dim,
                positions: context.paths.positions(),
                inverse_frequencies: context.inverse_frequencies,
                pair_offset: config.rope.rotary_dim / 2,
            },
        )?;
    }
    let kv_layer = context.caches.attention_index(layer);
    TreeAttention::run(
        device,
        TreeAttentionArgs {
            q: &workspace.q,
            k_tail: &tail.k,
            v_tail: &tail.v,
            k_pages: context.caches.kv().k(kv_layer),
            v_pages: context.caches.kv().v(kv_layer),
            paths: context.paths,
            q_heads: attention.num_heads,
            kv_heads: attention.num_kv_heads,
            head_dim,
            scale: attention.scale,
            window: None,
            out: &mut workspace.mixed,
        },
    )?;
    if attention.output_gate {
        Gate::run(
            device,
            GateArgs {
                kind: GateKind::SigmoidMultiply,
                x: &workspace.q_projected,
                x_offset: head_dim,
                x_stride: q_stride,
                num_vectors: n * attention.num_heads,
                width: head_dim,
                y: &mut workspace.mixed,
            },
        )?;
    }
    let residual = &mut workspace.residual;
    context.multiply(
        &weights.o_proj,
        &workspace.mixed,
        residual,
        Epilogue::AddToOutput,
    )
}
