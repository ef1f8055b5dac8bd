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
use crate::kernels::rms_norm::{NormEpilogue, RmsNorm, RmsNormArgs};
use crate::kernels::rope::{Rope, RopeArgs};
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

    /// Makes keys and values of the products.
    pub(super) fn finish(
        &mut self,
        device: &Device,
        model: Model<'_>,
        layer: &LayerWeights,
        positions: &Staged<u32>,
    ) -> Result<()> {
        let raw_values = match model.config.body.values {
            ValueSource::Projection => None,
            ValueSource::NormedProjection => Some(&self.v_raw),
            ValueSource::NormedKeys => Some(&self.k_raw),
        };
        let num_heads = model.config.body.num_kv_heads;
        if let Some(raw) = raw_values {
            let num_vectors = positions.len() * num_heads;
            normalise(device, model.config, raw, None, num_vectors, &mut self.v)?;
        }
        let heads = Heads {
            raw: &self.k_raw,
            norm: &layer.k_norm,
            num_heads,
            positions,
        };
        heads.turn(device, model, &mut self.k)
    }
}

/// Queries or keys of rows before norm and rotation.
pub(super) struct Heads<'a> {
    pub(super) raw: &'a Buffer<f32>,
    pub(super) norm: &'a Buffer<f32>,
    pub(super) num_heads: usize,
    /// One per row.
    pub(super) positions: &'a Staged<u32>,
}

impl Heads<'_> {
    /// Normalises each head and rotates it for its row's position.
    pub(super) fn turn(
        &self,
        device: &Device,
        model: Model<'_>,
        turned: &mut Buffer<f32>,
    ) -> Result<()> {
        let num_vectors = self.positions.len() * self.num_heads;
        let (config, norm) = (model.config, Some(self.norm));
        normalise(device, config, self.raw, norm, num_vectors, turned)?;
        Rope::run(
            device,
            RopeArgs {
                x: turned,
                num_heads: self.num_heads,
                head_dim: config.body.head_dim,
                positions: self.positions,
                inverse_frequencies: model.inverse_frequencies,
                pair_offset: config.body.rope.pair_offset(),
            },
        )?;
        Ok(())
    }
}

fn normalise(
    device: &Device,
    config: &BlockConfig,
    raw: &Buffer<f32>,
    weight: Option<&Buffer<f32>>,
    num_vectors: usize,
    y: &mut Buffer<f32>,
) -> Result<()> {
    let head_dim = config.body.head_dim;
    RmsNorm::run(
        device,
        RmsNormArgs {
            x: raw,
            x_offset: 0,
            x_stride: head_dim,
            num_vectors,
            width: head_dim,
            weight,
            eps: config.rms_norm_eps,
            epilogue: NormEpilogue::Store,
            y,
        },
    )?;
    Ok(())
}
