//! Weights: the tensors of a checkpoint directory, or planted ones, and the matrices made of them. Knows files and
//! formats, no model.

pub mod checkpoint;
mod edit_distance;
pub mod gated_mlp;
pub mod inspect;
pub mod linear;
pub mod loader;
pub mod planted;
pub mod w12;
pub mod w12_file;

#[cfg(test)]
pub(crate) mod raw_safetensors;

pub use checkpoint::Checkpoint;
pub use gated_mlp::GatedMlp;
pub use linear::Linear;
pub use loader::{WeightLoader, WeightSource};
pub use planted::PlantedWeights;
