//! Deployments without files, for measuring: the shapes of published models, weights that are functions of a seed.
//!
//! In: a name. Out: the configs of a target and its drafter, read as those of files are, and recipes for their tensors.
//! Costs on them are those of the real shapes; what such models say is made up, and so is whatever a drafter guesses
//! right, which [`crate::drafter::planted`] states.
//!
//! How a planted target is made: rows of the embedding are independent, the LM head's row of a token follows the row of
//! the token before it in a fixed cycle over the whole vocabulary, and every layer adds a little: all of them together a
//! fifth of the embedding's energy. So the next token's logit stands out as on a trained model that is sure (about
//! eight standard deviations of the others), a rival stands at a third to three quarters of it, and an error in any
//! layer changes all logits. A head tied to the embedding would predict the token it is at, so all have their own.
//! What a family does to its streams is taken into account: a factor on embeddings or logits, norms behind sublayers,
//! which then decide how much a layer adds, and a factor on scores that is not one over the root of a head's width.

use std::path::Path;

use crate::drafter::config::DrafterConfig;
use crate::error::{OptionError, Result};
use crate::kernels::plant_matrix::{Recipe, RecipeKind};
use crate::model::config::{LayerConfig, ModelConfig};
use crate::model::config_file::ConfigFile;
use crate::model::families;
use crate::model::tensor_role::TensorRole as Role;
use crate::weights::planted::{PlantedTensor, PlantedValues, PlantedWeights};

/// Names, and the texts of their configs: an object with a `target` and a `drafter`. Where drafters were published the
/// shapes are theirs; Qwen3.8-27B's has blocks of 16 instead of 8, Qwen3.5-4B's the selector of the larger one, of
/// Llama's, whose file is not public, heads and MLP are those of Qwen3-8B's, and Gemma 4 12B's EAGLE-3 is made as the one
/// of the 31B is, with heads and MLP of the 12B's own layers. The tiny ones have the layers of their families.
const CONFIGS: [(&str, &str); 8] = [
    ("qwen3.8-27b", include_str!("planted/qwen3.8-27b.json")),
    ("qwen3.5-4b", include_str!("planted/qwen3.5-4b.json")),
    ("llama-3.1-8b", include_str!("planted/llama-3.1-8b.json")),
    ("gemma-4-12b", include_str!("planted/gemma-4-12b.json")),
    (
        "muse-glimmer-30b",
        include_str!("planted/muse-glimmer-30b.json"),
    ),
    ("tiny", include_str!("planted/tiny.json")),
    ("tiny-gemma", include_str!("planted/tiny-gemma.json")),
    ("tiny-muse", include_str!("planted/tiny-muse.json")),
];

/// Distances from a token to the one that follows it and to its rival: primes that divide no vocabulary here, so that
/// each is a cycle over all tokens.
const STRIDES: [u32; 2] = [1009, 1601];
/// Standard deviations of a row's own logits, and how many of them the next token's logit is.
const LOGIT_DEVIATION: f64 = 2.5;
const LOGIT_PEAK: f64 = 8.0;
/// Energy that all layers together add to that of the embedding.
const LAYERS_ENERGY: f64 = 0.2;
/// What the last matrices of sublayers get: about half of the size of a normalized vector.
const SUBLAYER_SIZE: f64 = 0.5;

/// A target and its drafter.
#[derive(Clone, Debug)]
pub struct PlantedPair {
    /// The name that it goes by.
    pub name: &'static str,
    /// The target.
    pub target: ModelConfig,
    /// Its drafter.
    pub drafter: DrafterConfig,
}

/// All names.
pub fn names() -> impl Iterator<Item = &'static str> {
    CONFIGS.iter().map(|(name, _)| *name)
}

impl PlantedPair {
    /// The pair of this name.
    ///
    /// # Errors
    /// [`OptionError::Value`] listing all names.
    pub fn named(name: &str) -> Result<Self> {
        let Some((name, text)) = CONFIGS.iter().find(|(known, _)| *known == name) else {
            return Err(OptionError::Value {
                option: "planted",
                expected: format!("one of {}", names().collect::<Vec<_>>().join(", ")),
                got: format!("\"{name}\""),
            }
            .into());
        };
        let file = ConfigFile::parse(Path::new(&format!("planted/{name}.json")), text.as_bytes())?;
        Ok(Self {
            name,
            target: families::config_of(&file.part("target")?, None)?,
            drafter: DrafterConfig::of_file(&file.part("drafter")?)?,
        })
    }

    /// What the target's weights are.
    pub fn target_weights(&self) -> PlantedWeights {
        let config = &self.target;
        let num_sublayers = 2 * config.layers.len();
        let tensors = Role::all(config).into_iter().enumerate();
        tensors
            .map(|(i, (role, layer))| {
                let seed = TARGET_SEED + i as u32;
                let tensor = target_tensor(config, (role, layer), seed, num_sublayers);
                (config.weight_names.name(role, layer), tensor)
            })
            .collect()
    }

    /// What the drafter's weights are.
    pub fn drafter_weights(&self) -> PlantedWeights {
        let tensors = self.drafter.tensors().into_iter().enumerate();
        tensors
            .map(|(i, (name, shape))| {
                let tensor = drafter_tensor(&name, &shape, DRAFTER_SEED + i as u32);
                (name, tensor)
            })
            .collect()
    }
}

/// Seeds of the first tensors; others follow in the order in which configs list them, the embedding first.
const TARGET_SEED: u32 = 1 << 16;
const DRAFTER_SEED: u32 = 1 << 24;

fn near(seed: u32, mean: f64, deviation: f64) -> PlantedTensor {
    let values = PlantedValues::Near { mean, deviation };
    PlantedTensor::Vector { seed, values }
}

fn matrix(seed: u32, deviation: f64, kind: RecipeKind) -> PlantedTensor {
    PlantedTensor::Matrix(Recipe {
        seed,
        deviation,
        kind,
    })
}

/// A layer's matrix that turns vectors of size one into vectors of `size`.
fn layer_matrix(seed: u32, in_features: usize, size: f64) -> PlantedTensor {
    matrix(seed, size / (in_features as f64).sqrt(), RecipeKind::Layer)
}

/// A norm's weight that leaves vectors of `size`, as it is stored.
fn norm_weight(seed: u32, adds_one: bool, size: f64) -> PlantedTensor {
    near(seed, size - f64::from(u8::from(adds_one)), 0.1 * size)
}

/// Size of normalized queries and keys: their products times the layer's factor are then of size one.
fn head_norm_size(layer: &LayerConfig) -> f64 {
    match layer {
        LayerConfig::Attention(attention) => {
            (f64::from(attention.scale) * (attention.head_dim as f64).sqrt()).powf(-0.5)
        }
        LayerConfig::GatedDelta => 1.0,
    }
}

fn target_tensor(
    config: &ModelConfig,
    (role, layer): (Role, usize),
    seed: u32,
    num_sublayers: usize,
) -> PlantedTensor {
    let shape = role.shape(config, layer);
    let hidden_size = config.hidden_size as f64;
    let added = (LAYERS_ENERGY / num_sublayers as f64).sqrt();
    let layer_norm = |size| norm_weight(seed, config.layer_norms_add_one, size);
    match role {
        Role::Embed => matrix(
            seed,
            1.0 / f64::from(config.embedding_scale),
            RecipeKind::Table,
        ),
        Role::LmHead => matrix(
            seed,
            LOGIT_DEVIATION / f64::from(config.logit_shape.multiplier) / hidden_size.sqrt(),
            RecipeKind::Successors {
                table_seed: TARGET_SEED,
                strides: STRIDES,
                correlation: (LOGIT_PEAK / hidden_size.sqrt()).min(0.75),
            },
        ),
        // A norm behind them takes their size away.
        Role::OProj | Role::DownProj | Role::GdnOutProj => match config.post_norms {
            Some(_) => layer_matrix(seed, shape[1], 1.0),
            None => layer_matrix(seed, shape[1], added / SUBLAYER_SIZE),
        },
        _ if role.is_linear_layer() => layer_matrix(seed, shape[1], 1.0),
        // Ranges in which such layers are initialized.
        Role::GdnALog => PlantedTensor::Vector {
            seed,
            values: PlantedValues::Logarithms {
                low: 1.0,
                high: 16.0,
            },
        },
        Role::GdnDtBias => PlantedTensor::Vector {
            seed,
            values: PlantedValues::SoftplusInverses {
                low: 0.001,
                high: 0.1,
            },
        },
        Role::GdnConv => near(seed, 0.0, 0.5),
        Role::GdnNorm => near(seed, 1.0, 0.1),
        Role::FinalNorm => norm_weight(seed, config.final_norm_adds_one, 1.0),
        Role::PostMixerNorm | Role::PostMlpNorm => layer_norm(added),
        // One a layer, all of them on the whole stream.
        Role::LayerScalar => near(seed, 1.0, 0.01),
        Role::QNorm | Role::KNorm => layer_norm(head_norm_size(&config.layers[layer])),
        _ => layer_norm(1.0),
    }
}

fn drafter_tensor(name: &str, shape: &[usize], seed: u32) -> PlantedTensor {
    let is = |end: &str| name.ends_with(end);
    match shape {
        [_, rank] if is("_codebook") => matrix(seed, (*rank as f64).powf(-0.25), RecipeKind::Table),
        [_, width] if is("o_proj.weight") || is("down_proj.weight") => {
            layer_matrix(seed, *width, 0.5)
        }
        [_, width] if is("kernel_projection.weight") => layer_matrix(seed, *width, 0.1),
        [_, width] => layer_matrix(seed, *width, 1.0),
        _ if is("base_kernel") => near(seed, 0.5, 0.1),
        _ => near(seed, 1.0, 0.1),
    }
}

#[cfg(test)]
mod tests;
