//! Every byte that an engine holds, by purpose: a pure function of configs, limits and formats.
//!
//! Nothing here knows how a buffer is laid out. Each size is asked of the type that allocates it, so an engine and its
//! plan agree to the byte (`engine/tests.rs` holds them against each other). Not counted is what is small or passing:
//! rotary tables, page lists, token ids, records that a caller asks for, and one matrix at a time on each thread while
//! weights are read. On a GPU a reserve stands for what nobody can say beforehand: scratch, code, captured launches.

use super::Limits;
use super::weight_bytes::{WeightBytes, stored_bytes};
use crate::cache::gdn_state::{GdnCache, GdnSlotBytes};
use crate::cache::pages::{KvShape, pages_of};
use crate::device::Backend;
use crate::drafter::config::DrafterConfig;
use crate::drafter::footprint::DrafterBytes;
use crate::kernels::gdn_wy::GdnShape;
use crate::kernels::kv_span::PerSpan;
use crate::kernels::lm_head_screen::ScreenedHead;
use crate::model::config::{AttentionConfig, ModelConfig};
use crate::model::decoder::{Decoder, PassBytes};
use crate::model::head::HeadPath;
use crate::options::{KernelSet, WeightFormat};
use crate::weights::Checkpoint;

/// Type of activations, keys and values, on every device.
pub const ACTIVATION_DTYPE: &str = "float32";

/// Bytes kept free on a GPU for kernels: their scratch (attention's is the largest and has a limit of 128 MiB), their
/// code, lists of the host, and captured launches (0.1 MiB each on an H200).
const GPU_RUNTIME_BYTES: u64 = 256 << 20;

/// Bytes of one of them.
const ACTIVATION_BYTES: usize = size_of::<f32>();

/// What a footprint is computed from.
#[derive(Clone, Copy)]
pub struct Holdings<'a> {
    /// The target.
    pub config: &'a ModelConfig,
    /// Headers of its checkpoint, where there is one.
    pub headers: Option<&'a Checkpoint>,
    /// The drafter.
    pub drafter: Option<&'a DrafterConfig>,
    /// Headers of its checkpoint, where there is one.
    pub drafter_headers: Option<&'a Checkpoint>,
    /// How its linear layers are held where there is none.
    pub drafter_format: WeightFormat,
    /// Limits that size slots and passes.
    pub limits: &'a Limits,
    /// How linear layers are held.
    pub format: WeightFormat,
    /// Where it all is.
    pub backend: Backend,
}

/// Bytes that an engine holds from opening to closing, and the sizes of pages of its pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Footprint {
    /// The target's weights.
    pub weights: WeightBytes,
    /// INT8 copy of the LM head with its bounds.
    pub head_copy: u64,
    /// Recurrent caches of one slot.
    pub gdn_slot: GdnSlotBytes,
    /// Requests that may run at once.
    pub num_slots: usize,
    /// Buffers of the target's passes.
    pub pass: PassBytes,
    /// The drafter's part.
    pub drafter: DrafterBytes,
    /// Keys and values of 64 positions in the target's layers.
    pub kv_page: PerSpan<u64>,
    /// Most pages that layers with a window keep of a request.
    pub ring_pages: usize,
    /// Pages of a request of `max_model_len` tokens in layers that keep everything.
    pub pages_per_sequence: usize,
    /// Reserve for kernels.
    pub gpu_runtime: u64,
}

impl Footprint {
    /// The footprint of `holdings`.
    pub fn of(holdings: &Holdings<'_>) -> Self {
        let Holdings {
            config,
            drafter,
            limits,
            ..
        } = *holdings;
        let num_slots = limits.max_num_seqs;
        let num_taps = drafter.map_or(0, DrafterConfig::num_taps);
        let layout = limits.kv_layout(config);
        let kv_page = layout.page_bytes(ACTIVATION_BYTES);
        Self {
            weights: match limits.kernels {
                KernelSet::Lossless => WeightBytes::of(
                    config,
                    holdings.format,
                    limits.speculation.q_passes() > 0,
                    holdings.headers,
                    holdings.backend,
                ),
                KernelSet::Stock => WeightBytes::of_stock(config),
            },
            head_copy: match limits.head {
                HeadPath::Screened => {
                    let (rows, columns) = (config.vocab_size, config.hidden_size);
                    ScreenedHead::bytes_for(holdings.backend, rows, columns) as u64
                }
                HeadPath::Dense => 0,
            },
            gdn_slot: gdn_shape(config).map_or_else(GdnSlotBytes::default, |shape| {
                GdnCache::slot_bytes_of(&shape, config.num_gdn_layers(), ACTIVATION_BYTES)
            }),
            num_slots,
            pass: Decoder::pass_bytes_of(
                config,
                limits.kernels,
                num_taps,
                limits.max_step_rows,
                ACTIVATION_BYTES,
            ),
            drafter: drafter.map_or_else(DrafterBytes::default, |drafter| {
                let sizes = limits.drafter_sizes(config, 0);
                let backend = holdings.backend;
                drafter.bytes(&sizes, backend, ACTIVATION_BYTES, |name, rows, columns| {
                    let (headers, format) = (holdings.drafter_headers, holdings.drafter_format);
                    stored_bytes(headers, format, name, [rows, columns], backend)
                })
            }),
            kv_page: PerSpan {
                whole: kv_page.whole as u64,
                window: kv_page.window as u64,
            },
            ring_pages: layout.ring_pages(),
            pages_per_sequence: limits.pages_per_sequence(),
            gpu_runtime: match holdings.backend {
                Backend::Host => 0,
                Backend::Cuda => GPU_RUNTIME_BYTES,
            },
        }
    }

    /// Everything but pages, by purpose.
    pub fn parts(&self) -> [(&'static str, u64); 15] {
        let slots = |bytes: usize| (self.num_slots as u64).saturating_mul(bytes as u64);
        [
            ("linear_layers", self.weights.linear),
            ("embedding", self.weights.embedding),
            ("lm_head", self.weights.lm_head),
            ("vectors", self.weights.vectors),
            ("q_views", self.weights.q_views),
            ("lm_head_copy", self.head_copy),
            ("drafter_weights", self.drafter.weights as u64),
            ("gdn_states", slots(self.gdn_slot.states)),
            ("gdn_log", slots(self.gdn_slot.log)),
            ("gdn_conv", slots(self.gdn_slot.conv)),
            ("activations", self.pass.activations as u64),
            ("pass_tail", self.pass.tail as u64),
            ("logits", self.pass.logits as u64),
            (
                "drafter_workspace",
                slots(self.drafter.slot).saturating_add(self.drafter.scratch as u64),
            ),
            ("gpu_runtime", self.gpu_runtime),
        ]
    }

    /// Bytes of everything but pages. Sums over slots and pages saturate: what reaches 2^64 fits no memory.
    pub fn fixed_bytes(&self) -> u64 {
        let parts = self.parts();
        parts
            .iter()
            .fold(0, |sum, (_, bytes)| u64::saturating_add(sum, *bytes))
    }

    /// Bytes that each slot adds to them.
    pub fn slot_bytes(&self) -> u64 {
        (self.gdn_slot.total() + self.drafter.slot) as u64
    }

    /// Bytes of a page of either pool: the target's and, beside one that keeps everything, one of the drafter's context.
    pub fn page_bytes(&self) -> PerSpan<u64> {
        PerSpan {
            whole: self.kv_page.whole + self.drafter.page as u64,
            window: self.kv_page.window,
        }
    }

    /// Pages of a request of `num_tokens`.
    pub fn pages_of(&self, num_tokens: usize) -> PerSpan<usize> {
        pages_of(num_tokens, self.ring_pages)
    }

    /// Bytes of some pages.
    pub fn pool_bytes(&self, num_pages: PerSpan<usize>) -> u64 {
        let page = self.page_bytes();
        let whole = page.whole.saturating_mul(num_pages.whole as u64);
        whole.saturating_add(page.window.saturating_mul(num_pages.window as u64))
    }

    /// Bytes when a request of `num_tokens` runs.
    pub fn bytes_with(&self, num_tokens: usize) -> u64 {
        let pool_bytes = self.pool_bytes(self.pages_of(num_tokens));
        self.fixed_bytes().saturating_add(pool_bytes)
    }
}

/// Keys and values of one attention layer.
pub fn kv_shape(attention: &AttentionConfig) -> KvShape {
    KvShape {
        num_kv_heads: attention.num_kv_heads,
        head_dim: attention.head_dim,
    }
}

/// Sizes of the recurrent caches; `None` for a model without such layers.
pub fn gdn_shape(config: &ModelConfig) -> Option<GdnShape> {
    config.gdn.as_ref().map(|gdn| GdnShape {
        num_key_heads: gdn.num_key_heads,
        num_value_heads: gdn.num_value_heads,
        key_dim: gdn.key_dim,
        value_dim: gdn.value_dim,
        conv_kernel: gdn.conv_kernel,
    })
}
