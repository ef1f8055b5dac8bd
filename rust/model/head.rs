//! The target's LM head: final hidden rows in, logits or tokens out, the likeliest or drawn ones.
//!
//! Which path serves what:
//! - **screened** ([`LmHeadScreen`]): the greedy token of rows that nothing but the token is wanted of, that is all rows
//!   of verification and the last prompt row. Reads the INT8 copy and a few exact channels.
//! - **dense**: rows whose logits a caller wants to see (`record_logits`, `score`), rows of requests that sample, whose
//!   every token has a chance ([`SampleRows`]), and all rows of an engine without an INT8 copy. The drafter's top-k and
//!   log-probabilities of tree edges need every logit too, and go through [`DecoderWeights::logits`].
//!
//! Both give the same greedy ids: screening is exact, and a row that it cannot bound takes the dense path by itself.
//! What a model does to its logits (a factor, a softcap) keeps their order: the greedy token goes by logits as the head
//! gives them, sampling and records by what becomes of them.

use super::weights::DecoderWeights;
use crate::device::{Backend, Buffer, Device, Staged};
use crate::error::Result;
use crate::kernels::Kernel;
use crate::kernels::draft_select::LogitShape;
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use crate::kernels::lm_head_screen::{HeadScores, LmHeadScreen, LmHeadScreenArgs, ScreenedHead};
use crate::kernels::masked_ids::MaskedIds;
use crate::kernels::sample_rows::{RowSampler, SampleRows, SampleRowsArgs};
use crate::kernels::simd::bytes::has_byte_products;
use crate::request::ScreenCounts;

/// Smallest head, in weights, that is screened unasked, where the machine has byte products (without them a scan costs
/// twice the multiplications it saves once there are several rows). Measured with the kernel's bench on two cores with
/// AVX-512 VNNI: from here on screening is faster at 1, 8 and 32 rows; at half of it 32 rows are a tie.
const SCREEN_FROM_WEIGHTS: usize = 1 << 21;

/// Likewise on a GPU, where screening is three launches more than a matmul that reads twice as much.
const SCREEN_FROM_WEIGHTS_ON_CUDA: usize = 1 << 26;

/// How greedy tokens are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadPath {
    /// By all logits.
    Dense,
    /// By an INT8 copy and the exact logits of its survivors.
    Screened,
}

impl HeadPath {
    /// The value of the option `head`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dense => "dense",
            Self::Screened => "screened",
        }
    }

    /// Whether rows of this length can be screened.
    pub fn can_screen(hidden_size: usize) -> bool {
        hidden_size <= ScreenedHead::MAX_IN_FEATURES
    }

    /// The faster path for a head of this shape.
    pub fn usual(backend: Backend, vocab_size: usize, hidden_size: usize) -> Self {
        let num_weights = vocab_size * hidden_size;
        let pays = match backend {
            Backend::Host => has_byte_products() && num_weights >= SCREEN_FROM_WEIGHTS,
            Backend::Cuda => num_weights >= SCREEN_FROM_WEIGHTS_ON_CUDA,
        };
        match pays && Self::can_screen(hidden_size) {
            true => Self::Screened,
            false => Self::Dense,
        }
    }
}

/// The token after each of some rows.
pub struct TokenChoices {
    /// One per row.
    pub token_ids: Vec<u32>,
    /// Their fp32 logits; not finite where no token can be chosen.
    pub logits: Vec<f32>,
    /// What screening did, one per row; zeros on the dense path.
    pub screening: Vec<ScreenCounts>,
}

/// The buffers of the head for the rows of the largest pass, and its INT8 copy where there is one.
pub(super) struct Head {
    screened: Option<ScreenedHead>,
    /// The copy while it is not to be used.
    set_aside: Option<ScreenedHead>,
    shape: LogitShape,
    /// Which rows of a pass a call is about.
    wanted: Staged<u32>,
    masked: MaskedIds,
    /// Rows that go through the head, `[rows, H]`, where they are not the first of the pass.
    rows: Buffer<f32>,
    /// `[rows, V]`.
    logits: Buffer<f32>,
}

impl Head {
    /// Makes the INT8 copy if `path` wants one, and buffers for `max_rows` rows.
    ///
    /// # Errors
    /// [`DeviceError`](crate::error::DeviceError) when there is no room for them.
    pub(super) fn new(
        device: &Device,
        weights: &DecoderWeights,
        path: HeadPath,
        shape: LogitShape,
        max_rows: usize,
    ) -> Result<Self> {
        let screened = match path {
            HeadPath::Dense => None,
            HeadPath::Screened => {
                let head = weights.head_bf16();
                head.map(|head| ScreenedHead::new_on(device, head))
                    .transpose()?
            }
        };
        let (vocab_size, width) = (weights.embed.out_features(), weights.embed.in_features());
        Ok(Self {
            screened,
            set_aside: None,
            shape,
            wanted: Staged::with_capacity(device, max_rows)?,
            masked: MaskedIds::default(),
            rows: device.try_alloc(max_rows * width)?,
            logits: device.try_alloc(max_rows * vocab_size)?,
        })
    }

    /// Takes `path` from now on, as far as there is a copy for it.
    pub(super) fn set_path(&mut self, path: HeadPath) {
        let copy = self.screened.take().or(self.set_aside.take());
        match path {
            HeadPath::Dense => self.set_aside = copy,
            HeadPath::Screened => self.screened = copy,
        }
    }

    pub(super) fn screened(&self) -> Option<&ScreenedHead> {
        self.screened.as_ref()
    }

    pub(super) fn last_logits(&self) -> &Buffer<f32> {
        &self.logits
    }

    /// Logits of `rows` of `hidden`.
    pub(super) fn logits(
        &mut self,
        device: &Device,
        weights: &DecoderWeights,
        hidden: &Buffer<f32>,
        rows: &[u32],
    ) -> Result<&Buffer<f32>> {
        let Self {
            wanted,
            rows: gathered,
            logits,
            ..
        } = self;
        let width = weights.embed.in_features();
        let x = gather(device, hidden, rows, width, wanted, gathered)?;
        weights.logits(device, x, rows.len(), logits)?;
        Ok(&self.logits)
    }

    /// Tokens after `rows` of `hidden` by all of their logits, which stay readable: each as its sampler says.
    pub(super) fn choose_densely(
        &mut self,
        device: &Device,
        weights: &DecoderWeights,
        hidden: &Buffer<f32>,
        rows: &[u32],
        masked: &[&[u32]],
        samplers: &[RowSampler],
    ) -> Result<TokenChoices> {
        let (num_rows, vocab_size) = (rows.len(), weights.embed.out_features());
        self.logits(device, weights, hidden, rows)?;
        self.masked.fill(device, masked)?;
        let (logits, masked) = (&self.logits, &self.masked);
        let mut token_ids = vec![0; num_rows];
        let mut chosen_logits = vec![0.0; num_rows];
        if samplers.iter().all(RowSampler::is_greedy) {
            let args = GreedyArgmaxArgs {
                logits,
                num_rows,
                vocab_size,
                masked,
                token_ids: &mut token_ids,
                best_logits: &mut chosen_logits,
            };
            GreedyArgmax::run(device, args)?;
        } else {
            let args = SampleRowsArgs {
                logits,
                num_rows,
                vocab_size,
                shape: self.shape,
                masked,
                samplers,
                token_ids: &mut token_ids,
                chosen_logits: &mut chosen_logits,
            };
            SampleRows::run(device, args)?;
        }
        Ok(TokenChoices {
            screening: vec![ScreenCounts::default(); num_rows],
            token_ids,
            logits: chosen_logits,
        })
    }

    /// Greedy tokens of `rows` of `hidden` by `scores`, which an INT8 copy gives where there is one; all logits
    /// serve for either.
    pub(super) fn choose(
        &mut self,
        device: &Device,
        weights: &DecoderWeights,
        hidden: &Buffer<f32>,
        rows: &[u32],
        masked: &[&[u32]],
        scores: HeadScores,
    ) -> Result<TokenChoices> {
        let num_rows = rows.len();
        let (Some(head), Some(exact)) = (&self.screened, weights.head_bf16()) else {
            let greedy = vec![RowSampler::GREEDY; num_rows];
            return self.choose_densely(device, weights, hidden, rows, masked, &greedy);
        };
        self.masked.fill(device, masked)?;
        let width = weights.embed.in_features();
        let (wanted, gathered) = (&mut self.wanted, &mut self.rows);
        let x = gather(device, hidden, rows, width, wanted, gathered)?;
        let mut token_ids = vec![0; num_rows];
        let mut best_logits = vec![0.0; num_rows];
        let (mut survivors, mut fell_back) = (vec![0; num_rows], vec![false; num_rows]);
        LmHeadScreen::run(
            device,
            LmHeadScreenArgs {
                x,
                num_rows,
                head,
                exact,
                scores,
                masked: &self.masked,
                dense_logits: &mut self.logits,
                token_ids: &mut token_ids,
                best_logits: &mut best_logits,
                survivors: &mut survivors,
                fell_back: &mut fell_back,
                top2_gap: None,
            },
        )?;
        let counts = |(survivors, fell_back): (u32, bool)| ScreenCounts {
            num_rows: 1,
            num_survivors: if fell_back { 0 } else { survivors as usize },
            num_fallbacks: usize::from(fell_back),
        };
        Ok(TokenChoices {
            token_ids,
            logits: best_logits,
            screening: survivors.into_iter().zip(fell_back).map(counts).collect(),
        })
    }
}

/// `rows` of `hidden`: copied to the front of `gathered`, or `hidden` itself where it starts with them.
fn gather<'a>(
    device: &Device,
    hidden: &'a Buffer<f32>,
    rows: &[u32],
    width: usize,
    wanted: &mut Staged<u32>,
    gathered: &'a mut Buffer<f32>,
) -> Result<&'a Buffer<f32>> {
    if rows.iter().copied().eq(0..rows.len() as u32) {
        return Ok(hidden);
    }
    wanted.fill(device, rows.iter().copied())?;
    GatherTaps::run(
        device,
        GatherTapsArgs {
            taps: std::slice::from_ref(hidden),
            rows: wanted,
            width,
            y: &mut *gathered,
        },
    )?;
    Ok(gathered)
}
