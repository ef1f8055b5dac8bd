//! What the rows of one pass leave behind for a commit: nothing of it is in the caches until a path is accepted.

use crate::cache::pages::KvTail;
use crate::cache::slots::SequenceCaches;
use crate::device::{Buffer, Device};
use crate::error::{DeviceError, KernelError};
use crate::kernels::gdn_wy::GdnTail;
use crate::kernels::placed_rows::PlacedRows;

use super::config::{LayerConfig, ModelConfig};

/// Keys (normed and rotated) and values of this pass, `[rows, kv_heads, head_dim]`.
pub(super) struct AttentionTail {
    pub(super) k: Buffer<f32>,
    pub(super) v: Buffer<f32>,
}

/// Convolution inputs `[rows, C]` and recurrent log entries of this pass.
pub(super) struct GatedDeltaTail {
    pub(super) qkv: Buffer<f32>,
    pub(super) log: GdnTail,
}

/// The tail of one layer, by its kind.
pub(super) enum LayerTail {
    Attention(AttentionTail),
    GatedDelta(GatedDeltaTail),
}

/// The tails of all layers.
pub(super) struct PassTail {
    pub(super) layers: Vec<LayerTail>,
}

impl PassTail {
    /// Room for `rows` rows.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn new(
        config: &ModelConfig,
        rows: usize,
        device: &Device,
    ) -> Result<Self, DeviceError> {
        let alloc = |width: usize| device.try_alloc(rows * width);
        let tail = |layer: &LayerConfig| {
            Ok(match (layer, &config.gdn) {
                (LayerConfig::GatedDelta, gdn) => {
                    let gdn = gdn.as_ref();
                    let gdn = gdn.expect("a config with Gated-DeltaNet layers has their sizes");
                    let (k_width, v_width) = (
                        gdn.num_key_heads * gdn.key_dim,
                        gdn.num_value_heads * gdn.value_dim,
                    );
                    LayerTail::GatedDelta(GatedDeltaTail {
                        qkv: alloc(2 * k_width + v_width)?,
                        log: GdnTail {
                            k: alloc(k_width)?,
                            d: alloc(v_width)?,
                            g: alloc(gdn.num_value_heads)?,
                        },
                    })
                }
                (LayerConfig::Attention(attention), _) => {
                    let width = attention.kv_dim();
                    LayerTail::Attention(AttentionTail {
                        k: alloc(width)?,
                        v: alloc(width)?,
                    })
                }
            })
        };
        let layers = config.layers.iter().map(tail).collect::<Result<_, _>>()?;
        Ok(Self { layers })
    }

    /// Bytes that one row takes in all layers, with activations of `activation_bytes` each; the recurrent log is fp32.
    pub(super) fn row_bytes_of(config: &ModelConfig, activation_bytes: usize) -> usize {
        let kv_dims: usize = config.attention_layers().map(|a| a.kv_dim()).sum();
        let gdn = config.gdn.as_ref().map_or(0, |gdn| {
            let log_len = gdn.num_key_heads * gdn.key_dim + gdn.value_width() + gdn.num_value_heads;
            gdn.conv_channels() * activation_bytes + log_len * size_of::<f32>()
        });
        2 * kv_dims * activation_bytes + config.num_gdn_layers() * gdn
    }

    /// Commits `rows` of the pass to `caches`.
    ///
    /// # Errors
    /// [`KernelError`] when a row lies outside the pass or has no page.
    pub(super) fn commit(
        &self,
        device: &Device,
        caches: &mut SequenceCaches,
        rows: &PlacedRows,
    ) -> Result<(), KernelError> {
        let (mut kv_tails, mut gdn_tails) = (Vec::new(), Vec::new());
        for tail in &self.layers {
            match tail {
                LayerTail::Attention(AttentionTail { k, v }) => kv_tails.push(KvTail {
                    layer: kv_tails.len(),
                    k,
                    v,
                }),
                LayerTail::GatedDelta(tail) => gdn_tails.push((&tail.qkv, &tail.log)),
            }
        }
        caches.commit(device, rows, &kv_tails, &gdn_tails)
    }
}
