//! Reading weights for `kernels="stock"`: row-major BF16, matrices that read the same rows merged into one.
//!
//! In: a source of weights. Out: a [`DecoderWeights`] whose layers and LM head are [`StockWeights`]; embedding and final
//! norm are held as ever.

use super::super::stock::{StockAttention, StockGatedDelta, StockLayer, StockMixer, StockWeights};
use super::{AttentionConfig, DecoderWeights, LayerConfig, Loader, ModelConfig, Role};
use crate::device::Device;
use crate::error::Result;
use crate::kernels::stock_matmul::StockMatrix;
use crate::options::WeightFormat;
use crate::weights::{WeightLoader, WeightSource};

impl DecoderWeights {
    /// Reads all weights for `kernels="stock"`: layers and LM head row-major, as BF16.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    pub fn load_stock<'a>(
        device: &Device,
        source: impl Into<WeightSource<'a>>,
        config: &ModelConfig,
    ) -> Result<Self> {
        let source = source.into();
        super::headers::check_source(source, config)?;
        let loader = Loader {
            tensors: WeightLoader { source, device },
            config,
            format: WeightFormat::Bf16,
            with_q_views: false,
        };
        let head = match config.tie_word_embeddings {
            true => Role::Embed,
            false => Role::LmHead,
        };
        let head = loader.stock_matrix(&[head], 0)?;
        let weights = Self {
            embed: loader.matrix(Role::Embed, 0)?,
            lm_head: None,
            final_norm: loader.norm(Role::FinalNorm, 0)?,
            layers: Vec::new(),
            stock: Some(StockWeights {
                layers: loader.each_layer(|i| loader.stock_layer(i))?,
                head,
                head_is_copy: config.tie_word_embeddings,
            }),
        };
        source.finish(config.weight_names.ignored_prefixes)?;
        Ok(weights)
    }
}

impl Loader<'_> {
    fn stock_layer(&self, i: usize) -> Result<StockLayer> {
        Ok(StockLayer {
            input_norm: self.norm(Role::InputNorm, i)?,
            post_attention_norm: self.norm(Role::MlpNorm, i)?,
            mixer: match &self.config.layers[i] {
                LayerConfig::Attention(attention) => {
                    StockMixer::Attention(self.stock_attention(attention, i)?)
                }
                LayerConfig::GatedDelta => StockMixer::GatedDelta(self.stock_gated_delta(i)?),
            },
            gate_up: self.stock_matrix(&[Role::GateProj, Role::UpProj], i)?,
            down: self.stock_matrix(&[Role::DownProj], i)?,
        })
    }

    fn stock_attention(&self, config: &AttentionConfig, i: usize) -> Result<StockAttention> {
        self.skip_rotary_frequencies(i);
        Ok(StockAttention {
            q_proj: self.stock_matrix(&[Role::QProj], i)?,
            k_proj: self.stock_matrix(&[Role::KProj], i)?,
            v_proj: self.stock_matrix(&[Role::VProj], i)?,
            o_proj: self.stock_matrix(&[Role::OProj], i)?,
            q_norm: self.head_norm(config, Role::QNorm, i)?,
            k_norm: self.head_norm(config, Role::KNorm, i)?,
        })
    }

    fn stock_gated_delta(&self, i: usize) -> Result<StockGatedDelta> {
        let inputs = [
            Role::GdnInProjQkv,
            Role::GdnInProjZ,
            Role::GdnInProjA,
            Role::GdnInProjB,
        ];
        Ok(StockGatedDelta {
            in_proj: self.stock_matrix(&inputs, i)?,
            out_proj: self.stock_matrix(&[Role::GdnOutProj], i)?,
            conv: self.vector(Role::GdnConv, i)?,
            a_log: self.vector(Role::GdnALog, i)?,
            dt_bias: self.vector(Role::GdnDtBias, i)?,
            norm: self.vector(Role::GdnNorm, i)?,
        })
    }

    /// Matrices of one layer that read the same rows, one after another.
    fn stock_matrix(&self, roles: &[Role], layer: usize) -> Result<StockMatrix> {
        let parts: Vec<(String, usize)> = roles
            .iter()
            .map(|&role| (self.name(role, layer), role.shape(self.config, layer)[0]))
            .collect();
        let in_features = roles[0].shape(self.config, layer)[1];
        let rows = self.tensors.rows_together(&parts, in_features)?;
        Ok(StockMatrix::from_rows(rows, in_features))
    }
}
