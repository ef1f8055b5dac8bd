//! One Gated-DeltaNet sublayer: projections, the anchored recurrence with its convolution and gated norm, residual add.

use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::gdn_wy::{GdnWeights, GdnWy, GdnWyArgs};
use crate::kernels::paths::Wave;

use super::decoder::{LayerContext, PostNorm};
use super::tail::GatedDeltaTail;
use super::weights::GatedDeltaWeights;
use super::workspace::Workspace;

/// Adds the sublayer's output for `workspace.rows` to `workspace.residual`; log entries and convolution inputs stay
/// in `tail`.
pub(super) fn forward(
    context: &mut LayerContext<'_>,
    layer: usize,
    weights: &GatedDeltaWeights,
    post_norm: Option<PostNorm<'_>>,
    workspace: &mut Workspace,
    tail: &mut GatedDeltaTail,
) -> Result<(), KernelError> {
    let (device, paths) = (context.device, context.paths);
    let products = [
        (&weights.in_proj_qkv, &mut tail.qkv),
        (&weights.in_proj_z, &mut workspace.z),
        (&weights.in_proj_a, &mut workspace.a),
        (&weights.in_proj_b, &mut workspace.b),
    ];
    context.multiply_together(&workspace.rows, products)?;
    for Wave { segments, settled } in paths.waves() {
        let gdn = context.caches.gdn();
        GdnWy::run(
            device,
            GdnWyArgs {
                shape: gdn.shape(),
                weights: GdnWeights {
                    conv: &weights.conv,
                    a_log: &weights.a_log,
                    dt_bias: &weights.dt_bias,
                    norm: &weights.norm,
                    norm_eps: context.config.rms_norm_eps,
                },
                qkv: &tail.qkv,
                z: &workspace.z,
                a: &workspace.a,
                b: &workspace.b,
                paths,
                segments,
                cache: gdn.layer(context.caches.gdn_index(layer)),
                tail: &mut tail.log,
                y: (&mut workspace.rows).into(),
            },
        )?;
        if let Some(settled) = settled {
            let kept = (&tail.qkv, &tail.log);
            context.caches.settle_gdn(device, layer, settled, kept)?;
        }
    }
    context.add_to_residual(
        &weights.out_proj,
        &workspace.rows,
        post_norm,
        &mut workspace.sublayer,
        &mut workspace.residual,
    )
}
