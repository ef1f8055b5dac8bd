//! What a decoder's tensors are for: by role, each has one name in a checkpoint and one shape in a config.
//!
//! The one list from which both the check of a checkpoint (before gigabytes are read) and the loading itself are made,
//! so that they cannot disagree.

use super::config::{
    AttentionConfig, GdnConfig, LayerConfig, ModelConfig, OutputGate, QkNorm, ValueSource,
};

/// Names that a family's checkpoints give to roles.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightNames {
    /// What the decoder's tensors start with; the LM head stands outside.
    pub prefix: &'static str,
    /// The norm before the MLP, within a layer.
    pub mlp_norm: &'static str,
    /// Tensors of other models in the same checkpoint.
    pub ignored_prefixes: &'static [&'static str],
}

/// The place of a tensor in a decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs, reason = "each is named after its tensor")]
pub enum TensorRole {
    Embed,
    FinalNorm,
    LmHead,
    InputNorm,
    PostMixerNorm,
    MlpNorm,
    PostMlpNorm,
    LayerScalar,
    GateProj,
    UpProj,
    DownProj,
    QProj,
    KProj,
    VProj,
    OProj,
    OutputGateProj,
    QNorm,
    KNorm,
    GdnInProjQkv,
    GdnInProjZ,
    GdnInProjA,
    GdnInProjB,
    GdnConv,
    GdnALog,
    GdnDtBias,
    GdnNorm,
    GdnOutProj,
}

use TensorRole as Role;

const EVERY_LAYER: [Role; 5] = [
    Role::InputNorm,
    Role::MlpNorm,
    Role::GateProj,
    Role::UpProj,
    Role::DownProj,
];
const GATED_DELTA: [Role; 9] = [
    Role::GdnInProjQkv,
    Role::GdnInProjZ,
    Role::GdnInProjA,
    Role::GdnInProjB,
    Role::GdnConv,
    Role::GdnALog,
    Role::GdnDtBias,
    Role::GdnNorm,
    Role::GdnOutProj,
];

impl WeightNames {
    /// Name of the tensor of `role`, in layer `layer` where the role belongs to a layer.
    pub fn name(&self, role: TensorRole, layer: usize) -> String {
        let prefix = self.prefix;
        match role {
            Role::LmHead => "lm_head.weight".to_owned(),
            Role::Embed => format!("{prefix}embed_tokens.weight"),
            Role::FinalNorm => format!("{prefix}norm.weight"),
            Role::MlpNorm => format!("{prefix}layers.{layer}.{}", self.mlp_norm),
            _ => format!("{prefix}layers.{layer}.{}", role.name_in_layer()),
        }
    }

    /// Name under which old checkpoints store a layer's rotary frequencies.
    pub fn rotary_frequencies(&self, layer: usize) -> String {
        format!(
            "{}layers.{layer}.self_attn.rotary_emb.inv_freq",
            self.prefix
        )
    }

    /// Name and shape of every tensor that a decoder of `config` reads.
    pub fn tensors(&self, config: &ModelConfig) -> Vec<(String, Vec<usize>)> {
        TensorRole::all(config)
            .into_iter()
            .map(|(role, layer)| (self.name(role, layer), role.shape(config, layer)))
            .collect()
    }

    /// Name of every linear layer of a decoder of `config`: what a compressed checkpoint compresses.
    pub fn linear_layers(&self, config: &ModelConfig) -> Vec<String> {
        TensorRole::all(config)
            .into_iter()
            .filter(|(role, _)| role.is_linear_layer())
            .map(|(role, layer)| self.name(role, layer))
            .collect()
    }
}

impl TensorRole {
    /// Every tensor that a decoder of `config` reads, with its layer (0 for those outside).
    pub fn all(config: &ModelConfig) -> Vec<(TensorRole, usize)> {
        let mut tensors = vec![(Role::Embed, 0), (Role::FinalNorm, 0)];
        if !config.tie_word_embeddings {
            tensors.push((Role::LmHead, 0));
        }
        for (i, layer) in config.layers.iter().enumerate() {
            let mut roles = EVERY_LAYER.to_vec();
            if let Some(post_norms) = config.post_norms {
                roles.extend([Role::PostMixerNorm, Role::PostMlpNorm]);
                roles.extend(post_norms.layer_scalar.then_some(Role::LayerScalar));
            }
            match layer {
                LayerConfig::Attention(attention) => roles.extend(Self::of_attention(attention)),
                LayerConfig::GatedDelta => roles.extend(GATED_DELTA),
            }
            tensors.extend(roles.into_iter().map(|role| (role, i)));
        }
        tensors
    }

    fn of_attention(attention: &AttentionConfig) -> Vec<TensorRole> {
        let mut roles = vec![Role::QProj, Role::KProj, Role::OProj];
        if attention.values != ValueSource::NormedKeys {
            roles.push(Role::VProj);
        }
        if attention.output_gate == OutputGate::OwnProjection {
            roles.push(Role::OutputGateProj);
        }
        if attention.qk_norm == QkNorm::Weighted {
            roles.extend([Role::QNorm, Role::KNorm]);
        }
        roles
    }

    /// Whether the tensor is a matrix that a layer multiplies by. Embedding and LM head belong to no layer.
    pub fn is_linear_layer(self) -> bool {
        match self {
            Self::GateProj
            | Self::UpProj
            | Self::DownProj
            | Self::QProj
            | Self::KProj
            | Self::VProj
            | Self::OProj
            | Self::OutputGateProj
            | Self::GdnInProjQkv
            | Self::GdnInProjZ
            | Self::GdnInProjA
            | Self::GdnInProjB
            | Self::GdnOutProj => true,
            Self::Embed
            | Self::FinalNorm
            | Self::LmHead
            | Self::InputNorm
            | Self::PostMixerNorm
            | Self::MlpNorm
            | Self::PostMlpNorm
            | Self::LayerScalar
            | Self::QNorm
            | Self::KNorm
            | Self::GdnConv
            | Self::GdnALog
            | Self::GdnDtBias
            | Self::GdnNorm => false,
        }
    }

    fn name_in_layer(self) -> &'static str {
        match self {
            Self::Embed | Self::FinalNorm | Self::LmHead | Self::MlpNorm => "",
            Self::InputNorm => "input_layernorm.weight",
            Self::PostMixerNorm => "post_attention_layernorm.weight",
            Self::PostMlpNorm => "post_feedforward_layernorm.weight",
            Self::LayerScalar => "layer_scalar",
            Self::GateProj => "mlp.gate_proj.weight",
            Self::UpProj => "mlp.up_proj.weight",
            Self::DownProj => "mlp.down_proj.weight",
            Self::QProj => "self_attn.q_proj.weight",
            Self::KProj => "self_attn.k_proj.weight",
            Self::VProj => "self_attn.v_proj.weight",
            Self::OProj => "self_attn.o_proj.weight",
            Self::OutputGateProj => "self_attn.gate_proj.weight",
            Self::QNorm => "self_attn.q_norm.weight",
            Self::KNorm => "self_attn.k_norm.weight",
            Self::GdnInProjQkv => "linear_attn.in_proj_qkv.weight",
            Self::GdnInProjZ => "linear_attn.in_proj_z.weight",
            Self::GdnInProjA => "linear_attn.in_proj_a.weight",
            Self::GdnInProjB => "linear_attn.in_proj_b.weight",
            Self::GdnConv => "linear_attn.conv1d.weight",
            Self::GdnALog => "linear_attn.A_log",
            Self::GdnDtBias => "linear_attn.dt_bias",
            Self::GdnNorm => "linear_attn.norm.weight",
            Self::GdnOutProj => "linear_attn.out_proj.weight",
        }
    }

    /// Shape of the tensor in a checkpoint of `config`, in layer `layer` where the role belongs to a layer.
    ///
    /// # Panics
    /// For a role that the layer does not have.
    pub fn shape(self, config: &ModelConfig, layer: usize) -> Vec<usize> {
        let (hidden, mlp) = (config.hidden_size, config.intermediate_size);
        match self {
            Self::Embed | Self::LmHead => vec![config.vocab_size, hidden],
            Self::FinalNorm
            | Self::InputNorm
            | Self::PostMixerNorm
            | Self::MlpNorm
            | Self::PostMlpNorm => vec![hidden],
            Self::LayerScalar => vec![1],
            Self::GateProj | Self::UpProj => vec![mlp, hidden],
            Self::DownProj => vec![hidden, mlp],
            _ => match (&config.layers[layer], &config.gdn) {
                (LayerConfig::Attention(attention), _) => self.attention_shape(attention, hidden),
                (LayerConfig::GatedDelta, gdn) => {
                    let gdn = gdn.as_ref();
                    let gdn = gdn.expect("a config with Gated-DeltaNet layers has their sizes");
                    self.gdn_shape(gdn, hidden)
                }
            },
        }
    }

    fn attention_shape(self, attention: &AttentionConfig, hidden: usize) -> Vec<usize> {
        match self {
            Self::QProj => vec![attention.q_proj_rows(), hidden],
            Self::OutputGateProj => vec![attention.q_dim(), hidden],
            Self::KProj | Self::VProj => vec![attention.kv_dim(), hidden],
            Self::OProj => vec![hidden, attention.q_dim()],
            Self::QNorm | Self::KNorm => vec![attention.head_dim],
            _ => panic!("{self:?} is no tensor of an attention layer"),
        }
    }

    fn gdn_shape(self, gdn: &GdnConfig, hidden: usize) -> Vec<usize> {
        match self {
            Self::GdnInProjQkv => vec![gdn.conv_channels(), hidden],
            Self::GdnInProjZ => vec![gdn.value_width(), hidden],
            Self::GdnInProjA | Self::GdnInProjB => vec![gdn.num_value_heads, hidden],
            Self::GdnConv => vec![gdn.conv_channels(), 1, gdn.conv_kernel],
            Self::GdnNorm => vec![gdn.value_dim],
            Self::GdnOutProj => vec![hidden, gdn.value_width()],
            Self::GdnALog | Self::GdnDtBias => vec![gdn.num_value_heads],
            _ => panic!("{self:?} is no tensor of a Gated-DeltaNet layer"),
        }
    }
}
