//! The target's LM head: final hidden rows in, logits or greedy tokens out.
//!
//! Which path serves what:
//! - **screened** ([`LmHeadScreen`]): the greedy token of rows that nothing but the token is wanted of, that is all rows
//!   of verification and the last prompt row. Reads the INT8 copy and a few exact channels.
//! - **dense**: rows whose logits a caller wants to see (`record_logits`, `score`), and all rows of an engine without an
//!   INT8 copy. The drafter's top-k and log-probabilities of tree edges need every logit too, and go through
//!   [`DecoderWeights::logits`].
//!
//! Both give the same ids: screening is exact, and a row that it cannot bound takes the dense path by itself.

use super::weights::DecoderWeights;
use crate::device::{Buffer, Device};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::greedy_argmax::{GreedyArgmax, GreedyArgmaxArgs};
use crate::kernels::lm_head_screen::{LmHeadScreen, LmHeadScreenArgs, ScreenedHead};
use crate::kernels::simd::bytes::has_byte_products;
use crate::request::ScreenCounts;

/// Smallest head, in weights, that is screened unasked, where the machine has byte products (without them a scan costs
/// twice the multiplications it saves once there are several rows). Measured with the kernel's bench on two cores with
/// AVX-512 VNNI: from here on screening is faster at 1, 8 and 32 rows; at half of it 32 rows are a tie.
const SCREEN_FROM_WEIGHTS: usize = 1 << 21;

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
    pub fn usual(vocab_size: usize, hidden_size: usize) -> Self {
        let pays = has_byte_products() && vocab_size * hidden_size >= SCREEN_FROM_WEIGHTS;
        match pays && Self::can_screen(hidden_size) {
            true => Self::Screened,
            false => Self::Dense,
        }
    }
}

/// Greedy tokens of some rows.
pub struct GreedyChoices {
    /// One per row.
    pub token_ids: Vec<u32>,
    /// What screening did, one per row; zeros on the dense path.
    pub screening: Vec<ScreenCounts>,
}

/// The buffers of the head, and its INT8 copy where there is one.
pub(super) struct Head {
    screened: Option<ScreenedHead>,
    rows: Buffer<f32>,
    logits: Buffer<f32>,
}

impl Head {
    /// Makes the INT8 copy if `path` wants one.
    pub(super) fn new(device: &Device, weights: &DecoderWeights, path: HeadPath) -> Self {
        let screened = match path {
            HeadPath::Dense => None,
            HeadPath::Screened => weights.head_bf16().map(ScreenedHead::new),
        };
        Self {
            screened,
            rows: device.alloc(0),
            logits: device.alloc(0),
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
        rows: &[usize],
    ) -> Result<&Buffer<f32>, KernelError> {
        let vocab_size = weights.embed.out_features();
        if self.logits.len() < rows.len() * vocab_size {
            self.logits = device.alloc(rows.len() * vocab_size);
        }
        let width = weights.embed.in_features();
        gather(device, hidden, rows, width, &mut self.rows);
        weights.logits(device, &self.rows, rows.len(), &mut self.logits)?;
        Ok(&self.logits)
    }

    /// Greedy tokens of `rows` of `hidden` by all of their logits, which stay readable.
    pub(super) fn choose_densely(
        &mut self,
        device: &Device,
        weights: &DecoderWeights,
        hidden: &Buffer<f32>,
        rows: &[usize],
        masked: &[&[u32]],
    ) -> Result<GreedyChoices, KernelError> {
        let mut token_ids = vec![0; rows.len()];
        let args = GreedyArgmaxArgs {
            logits: self.logits(device, weights, hidden, rows)?,
            num_rows: rows.len(),
            vocab_size: weights.embed.out_features(),
            masked,
            token_ids: &mut token_ids,
        };
        GreedyArgmax::run(device, args)?;
        Ok(GreedyChoices {
            screening: vec![ScreenCounts::default(); rows.len()],
            token_ids,
        })
    }

    /// Greedy tokens of `rows` of `hidden`, screened where there is an INT8 copy.
    pub(super) fn choose(
        &mut self,
        device: &Device,
        weights: &DecoderWeights,
        hidden: &Buffer<f32>,
        rows: &[usize],
        masked: &[&[u32]],
    ) -> Result<GreedyChoices, KernelError> {
        let (Some(head), Some(exact)) = (&self.screened, weights.head_bf16()) else {
            return self.choose_densely(device, weights, hidden, rows, masked);
        };
        gather(device, hidden, rows, exact.in_features(), &mut self.rows);
        let num_rows = rows.len();
        let mut token_ids = vec![0; num_rows];
        let (mut survivors, mut fell_back) = (vec![0; num_rows], vec![false; num_rows]);
        LmHeadScreen::run(
            device,
            LmHeadScreenArgs {
                x: &self.rows,
                num_rows,
                head,
                exact,
                masked,
                token_ids: &mut token_ids,
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
        Ok(GreedyChoices {
            token_ids,
            screening: survivors.into_iter().zip(fell_back).map(counts).collect(),
        })
    }
}

/// Copies `rows` of `hidden` to the front of `gathered`, which grows to the most rows seen.
fn gather(
    device: &Device,
    hidden: &Buffer<f32>,
    rows: &[usize],
    width: usize,
    gathered: &mut Buffer<f32>,
) {
    if gathered.len() < rows.len() * width {
        *gathered = device.alloc(rows.len() * width);
    }
    for (to, &from) in gathered.host_mut().chunks_exact_mut(width).zip(rows) {
        to.copy_from_slice(&hidden.host()[from * width..][..width]);
    }
}
