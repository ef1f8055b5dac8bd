//! From projections to what attention reads: queries and keys normalised per head and rotated, values as the layers want
//! them.
//!
//! In: rows of a block or of a context, projected. Out: the same rows' queries, keys and values. Both go through here,
//! so that a context's keys are those that a block's rows would have.

use super::config::BlockConfig;
use super::context::Model;
use super::weights::LayerWeights;
use crate::device::{Buffer, Device, Staged};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::rms_norm::{RmsNorm, RmsNormArgs};
use crate::kernels::rope::{HeadNorm, Rope, RopeArgs, RopeHeads, Rotation};
use crate::model::config::ValueSource;
use crate::weights::Linear;

/// Keys and values of rows, as projected and as attention reads them. `B` is a buffer; planning memory puts a number in
/// its place.
pub(super) struct KeysValues<B = Buffer<f32>> {
    k_raw: B,
    /// Normalised and rotated, `[rows, kv_heads, head_dim]`.
    pub(super) k: B,
    /// Empty where values are what is projected.
    v_raw: B,
    /// `[rows, kv_heads, head_dim]`.
    pub(super) v: B,
}

impl<B> KeysValues<B> {
    /// What `rows` makes of each buffer's values per row.
    pub(super) fn with<E>(
        config: &BlockConfig,
        rows: &mut impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        let kv_dim = config.body.kv_dim();
        Ok(Self {
            k_raw: rows(kv_dim)?,
            k: rows(kv_dim)?,
            v_raw: rows(match config.body.values {
                ValueSource::NormedProjection => kv_dim,
                ValueSource::Projection | ValueSource::NormedKeys => 0,
            })?,
            v: rows(kv_dim)?,
        })
    }
}

impl KeysValues {
    /// The matrices of `layer` that project keys and values, each with where its products go.
    pub(super) fn products<'a>(
        &'a mut self,
        layer: &'a LayerWeights,
        values: ValueSource,
    ) -> impl Iterator<Item = (&'a Linear, &'a mut Buffer<f32>)> {
        let v = match values {
            ValueSource::NormedProjection => &mut self.v_raw,
            ValueSource::Projection | ValueSource::NormedKeys => &mut self.v,
        };
        let v = layer.v_proj.as_ref().map(|v_proj| (v_proj, v));
        std::iter::once((&layer.k_proj, &mut self.k_raw)).chain(v)
    }

    /// Makes values of the products, where they are not what is projected.
    pub(super) fn finish_values(
        &mut self,
        device: &Device,
        config: &BlockConfig,
        num_rows: usize,
    ) -> Result<()> {
        let raw = match config.body.values {
            ValueSource::Projection => return Ok(()),
            ValueSource::NormedProjection => &self.v_raw,
            ValueSource::NormedKeys => &self.k_raw,
        };
        let head_dim = config.body.head_dim;
        RmsNorm::run(
            device,
            RmsNormArgs {
                x: raw,
                x_offset: 0,
                x_stride: head_dim,
                num_vectors: num_rows * config.body.num_kv_heads,
                width: head_dim,
                weight: None,
                eps: config.rms_norm_eps,
                y: (&mut self.v).into(),
            },
        )?;
        Ok(())
    }

    /// Keys to be made of the products.
    pub(super) fn key_heads<'a>(
        &'a mut self,
        config: &BlockConfig,
        layer: &'a LayerWeights,
    ) -> RopeHeads<'a> {
        let num_heads = config.body.num_kv_heads;
        heads_of(config, &self.k_raw, &layer.k_norm, num_heads, &mut self.k)
    }
}

/// Queries or keys to be made of `raw`: each head normalised and rotated.
pub(super) fn heads_of<'a>(
    config: &BlockConfig,
    raw: &'a Buffer<f32>,
    norm: &'a Buffer<f32>,
    num_heads: usize,
    y: &'a mut Buffer<f32>,
) -> RopeHeads<'a> {
    RopeHeads {
        norm: Some(HeadNorm {
            x: raw,
            x_stride: config.body.head_dim,
            weight: Some(norm),
            eps: config.rms_norm_eps,
        }),
        num_heads,
        y,
    }
}

/// Makes queries and keys for rows at `positions`.
pub(super) fn turn(
    device: &Device,
    model: Model<'_>,
    positions: &Staged<u32>,
    heads: Vec<RopeHeads<'_>>,
) -> Result<()> {
    Rope::run(
        device,
        RopeArgs {
            heads,
            head_dim: model.config.body.head_dim,
            positions,
            rotation: Some(Rotation {
                inverse_frequencies: model.inverse_frequencies,
                pair_offset: model.config.body.rope.pair_offset(),
            }),
        },
    )?;
    Ok(())
}
