//! Bytes of a target's weights by group, as BF16 and as W12, from config and headers alone.
//!
//! BF16 sizes follow from shapes. Those of W12 depend on the values, which only a converted checkpoint's headers tell:
//! without them a layer takes what its padded planes, bases and counts take, exactly, and an assumed share of escapes.
//! Embedding and LM head stay BF16 in both formats.

use crate::kernels::bf16_matmul::PackedBf16;
use crate::model::config::ModelConfig;
use crate::model::tensor_role::TensorRole;
use crate::weights::Checkpoint;

/// How linear layers are held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WeightFormat {
    /// As the checkpoint's BF16 values.
    Bf16,
    /// As W12 where it pays, else BF16.
    W12,
}

/// Where the sizes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeBasis {
    /// Shapes or headers: to the byte.
    Exact,
    /// An assumed share of escapes.
    Estimate,
}

/// Assumed escapes per weight without headers: the upper end of what trained models show with 16 exponents a row
/// (Gaussian rows have 6e-5, heavy tails 2e-4 to 4e-4).
pub const ASSUMED_ESCAPE_RATE: f64 = 4e-4;

/// A tensor whose W12 bytes reach this share of its BF16 bytes stays BF16.
const KEEP_BF16_FROM: f64 = 0.9;

/// Names of the tensors that stand for a matrix in a W12 file, after the matrix's own.
const W12_PARTS: [&str; 5] = [
    "w12_plane8",
    "w12_plane4",
    "w12_base",
    "w12_counts",
    "w12_escapes",
];

/// Bytes of a target's weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightBytes {
    /// Linear layers, the LM head not among them.
    pub linear: u64,
    /// Token embedding.
    pub embedding: u64,
    /// LM head; 0 when it is the embedding.
    pub lm_head: u64,
    /// Norms, convolutions, decays: fp32.
    pub vectors: u64,
    /// Weights of the linear layers.
    pub num_linear_weights: u64,
    /// Matrices held as W12.
    pub num_w12_matrices: usize,
    /// Where `linear` comes from.
    pub basis: SizeBasis,
}

impl WeightBytes {
    /// Weights of `config` in `format`; `headers` are those of its checkpoint, where there is one.
    pub fn of(config: &ModelConfig, format: WeightFormat, headers: Option<&Checkpoint>) -> Self {
        let mut bytes = Self {
            linear: 0,
            embedding: 0,
            lm_head: 0,
            vectors: 0,
            num_linear_weights: 0,
            num_w12_matrices: 0,
            basis: SizeBasis::Exact,
        };
        // A directory with one W12 matrix was converted: what is BF16 in it stays so.
        let converted =
            headers.filter(|headers| headers.names().any(|n| n.ends_with(W12_PARTS[0])));
        for (role, layer) in TensorRole::all(config) {
            let shape = role.shape(config);
            let [rows, columns] = shape[..] else {
                bytes.vectors += (shape.iter().product::<usize>() * size_of::<f32>()) as u64;
                continue;
            };
            let bf16 = PackedBf16::num_bytes_of(rows, columns) as u64;
            match role {
                TensorRole::Embed => bytes.embedding += bf16,
                TensorRole::LmHead => bytes.lm_head += bf16,
                _ => {
                    bytes.num_linear_weights += (rows * columns) as u64;
                    let w12 = match (format, converted) {
                        (WeightFormat::Bf16, _) => None,
                        (WeightFormat::W12, Some(headers)) => {
                            w12_bytes_in(headers, &config.weight_names.name(role, layer))
                        }
                        (WeightFormat::W12, None) => {
                            bytes.basis = SizeBasis::Estimate;
                            w12_bytes_assumed(rows, columns)
                        }
                    };
                    bytes.num_w12_matrices += usize::from(w12.is_some());
                    bytes.linear += w12.unwrap_or(bf16);
                }
            }
        }
        bytes
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.linear + self.embedding + self.lm_head + self.vectors
    }

    /// Bits that a weight of the linear layers takes on average.
    pub fn linear_bits_per_weight(&self) -> f64 {
        8.0 * self.linear as f64 / self.num_linear_weights as f64
    }
}

/// Number of parameters; an embedding that is also the LM head counts once.
pub fn num_parameters(config: &ModelConfig) -> u64 {
    TensorRole::all(config)
        .iter()
        .map(|(role, _)| {
            role.shape(config)
                .iter()
                .map(|&n| n as u64)
                .product::<u64>()
        })
        .sum()
}

/// Bytes of matrix `name` in a converted checkpoint, if it is held as W12 there.
fn w12_bytes_in(headers: &Checkpoint, name: &str) -> Option<u64> {
    let parts = W12_PARTS.map(|part| headers.num_bytes(&format!("{name}.{part}")));
    parts[0]?;
    Some(parts.iter().flatten().sum())
}

/// Bytes of a matrix as W12 with [`ASSUMED_ESCAPE_RATE`], if that pays.
fn w12_bytes_assumed(rows: usize, columns: usize) -> Option<u64> {
    let num_weights = (rows * columns) as u64;
    let (row_tiles, column_tiles) = (rows.div_ceil(16) as u64, columns.div_ceil(64) as u64);
    // A super-tile of 16 x 64 weights is 1024 bytes of planes U and V, 512 of X, and a u16 count of its escapes.
    let tiles = row_tiles * column_tiles * (1024 + 512 + 2);
    let bases = row_tiles * 16;
    let escapes = (num_weights as f64 * ASSUMED_ESCAPE_RATE).ceil() as u64 * 4;
    let bytes = tiles + bases + escapes;
    ((bytes as f64) < KEEP_BF16_FROM * (2 * num_weights) as f64).then_some(bytes)
}
