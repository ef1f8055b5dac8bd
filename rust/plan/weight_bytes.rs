//! Bytes of a target's weights by group, as BF16, W12 and FP8, from config and headers alone.
//!
//! BF16 sizes follow from shapes. Those of W12 depend on the values, which only a converted checkpoint's headers tell:
//! without them a layer takes what its padded planes, bases and counts take, exactly, and an assumed share of escapes.
//! FP8 sizes follow from headers; without FP8 in them, they are those of block scales in the layers that published FP8
//! checkpoints convert. Embedding and LM head stay BF16 in all formats.

use half::bf16;

use crate::device::Backend;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::kernels::fp8_matmul::PackedFp8;
use crate::kernels::w12_matmul::PackedW12;
use crate::model::config::ModelConfig;
use crate::model::tensor_role::TensorRole;
use crate::options::WeightFormat;
use crate::weights::Checkpoint;
use crate::weights::w12::W12Matrix;

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
    /// What only Q passes read: the 8-bit view of layers held as BF16.
    pub q_views: u64,
    /// Weights of the linear layers.
    pub num_linear_weights: u64,
    /// Matrices held as W12.
    pub num_w12_matrices: usize,
    /// Matrices held as FP8.
    pub num_fp8_matrices: usize,
    /// Where `linear` comes from.
    pub basis: SizeBasis,
}

impl WeightBytes {
    /// Weights of `config` in `format` on `backend`, for Q passes too when `with_q_views`; `headers` are those of its
    /// checkpoint, where there is one.
    pub fn of(
        config: &ModelConfig,
        format: WeightFormat,
        with_q_views: bool,
        headers: Option<&Checkpoint>,
        backend: Backend,
    ) -> Self {
        let mut bytes = Self {
            linear: 0,
            embedding: 0,
            lm_head: 0,
            vectors: 0,
            q_views: 0,
            num_linear_weights: 0,
            num_w12_matrices: 0,
            num_fp8_matrices: 0,
            basis: SizeBasis::Exact,
        };
        // A directory with one W12 matrix was converted: what is BF16 in it stays so.
        let stored_escapes =
            |name: &str| headers.and_then(|headers| headers.num_stored_escapes(name));
        let is_converted = headers
            .is_some_and(|headers| headers.names().any(|name| stored_escapes(name).is_some()));
        let is_fp8 = headers.is_some_and(|headers| headers.names().any(|n| headers.is_fp8(n)));
        for (role, layer) in TensorRole::all(config) {
            let shape = role.shape(config, layer);
            let [rows, columns] = shape[..] else {
                bytes.vectors += (shape.iter().product::<usize>() * size_of::<f32>()) as u64;
                continue;
            };
            let bf16 = PackedBf16::num_bytes_of(backend, rows, columns) as u64;
            match role {
                TensorRole::Embed => bytes.embedding += bf16,
                TensorRole::LmHead => bytes.lm_head += bf16,
                _ => {
                    bytes.num_linear_weights += (rows * columns) as u64;
                    let name = config.weight_names.name(role, layer);
                    let fp8 = match format {
                        WeightFormat::Bf16 | WeightFormat::W12 => None,
                        _ => headers.and_then(|headers| headers.fp8_block_columns(&name)),
                    };
                    let wants_fp8 = matches!(format, WeightFormat::Fp8 | WeightFormat::Fp8W8A8);
                    let fp8 = match fp8 {
                        None if wants_fp8 && !is_fp8 && is_converted_to_fp8(role) => {
                            bytes.basis = SizeBasis::Estimate;
                            Some(FP8_BLOCK)
                        }
                        stored => stored,
                    };
                    if let Some(block_columns) = fp8 {
                        bytes.num_fp8_matrices += 1;
                        bytes.linear +=
                            PackedFp8::num_bytes_of(backend, rows, columns, block_columns) as u64;
                        continue;
                    }
                    let num_escapes = match format {
                        WeightFormat::Bf16 => None,
                        WeightFormat::W12 if !is_converted => {
                            bytes.basis = SizeBasis::Estimate;
                            assumed_escapes(rows, columns)
                        }
                        _ => stored_escapes(&name),
                    };
                    let w12 = num_escapes.map(|escapes| {
                        PackedW12::num_bytes_of(backend, rows, columns, escapes) as u64
                    });
                    if let (true, None, Some(num_escapes)) =
                        (with_q_views, w12, assumed_escapes(rows, columns))
                    {
                        bytes.basis = SizeBasis::Estimate;
                        let view = PackedW12::q_view_bytes_of(backend, rows, columns, num_escapes);
                        bytes.q_views += view as u64;
                    }
                    bytes.num_w12_matrices += usize::from(w12.is_some());
                    bytes.linear += w12.unwrap_or(bf16);
                }
            }
        }
        bytes
    }

    /// Weights of `config` for `kernels="stock"`: layers and LM head row-major, the embedding beside the head even where
    /// they are tied.
    pub fn of_stock(config: &ModelConfig) -> Self {
        let mut bytes = Self::of(config, WeightFormat::Bf16, false, None, Backend::Cuda);
        let row_major = |num_weights: u64| num_weights * size_of::<bf16>() as u64;
        bytes.linear = row_major(bytes.num_linear_weights);
        bytes.lm_head = row_major((config.vocab_size * config.hidden_size) as u64);
        bytes
    }

    /// Replaces an estimate by what the weights took: `total` bytes without `q_views`.
    pub fn settle(&mut self, total: u64, q_views: u64) {
        self.q_views = q_views;
        self.linear = total - (self.embedding + self.lm_head + self.vectors);
        self.basis = SizeBasis::Exact;
    }

    /// All of it.
    pub fn total(&self) -> u64 {
        self.linear + self.embedding + self.lm_head + self.vectors + self.q_views
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
        .map(|&(role, layer)| {
            role.shape(config, layer)
                .iter()
                .map(|&n| n as u64)
                .product::<u64>()
        })
        .sum()
}

/// Columns of a block with one scale in published FP8 checkpoints.
const FP8_BLOCK: usize = 128;

/// Whether published FP8 checkpoints convert a linear layer: all but the small inputs of the recurrence.
fn is_converted_to_fp8(role: TensorRole) -> bool {
    !matches!(role, TensorRole::GdnInProjA | TensorRole::GdnInProjB)
}

/// Escapes of a matrix at [`ASSUMED_ESCAPE_RATE`]; `None` if W12 does not pay for it.
fn assumed_escapes(rows: usize, columns: usize) -> Option<usize> {
    let num_escapes = ((rows * columns) as f64 * ASSUMED_ESCAPE_RATE).ceil() as usize;
    W12Matrix::pays(rows, columns, num_escapes).then_some(num_escapes)
}

/// Bytes that a linear layer `name` takes on `backend` when it is held as its file, with `headers`, stores it; without them
/// as an estimate in W12 where `format` is that, else as BF16.
pub fn stored_bytes(
    headers: Option<&Checkpoint>,
    format: WeightFormat,
    name: &str,
    [rows, columns]: [usize; 2],
    backend: Backend,
) -> usize {
    let num_escapes = match (headers, format) {
        (Some(headers), _) => headers.num_stored_escapes(name),
        (None, WeightFormat::W12) => assumed_escapes(rows, columns),
        (None, _) => None,
    };
    match num_escapes {
        Some(num_escapes) => PackedW12::num_bytes_of(backend, rows, columns, num_escapes),
        None => PackedBf16::num_bytes_of(backend, rows, columns),
    }
}
