//! The target model: what its config says and the weights it names. One decoder driven by data; no family has code of
//! its own above `families`.

mod attention;
pub mod config;
pub mod config_file;
pub mod decoder;
pub mod families;
mod gdn;
pub mod head;
pub mod lent;
pub mod stock;
mod tail;
pub mod tensor_role;
pub mod weights;
mod workspace;

pub use config::ModelConfig;
pub use lent::Lent;
pub use weights::DecoderWeights;
