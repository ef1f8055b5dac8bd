//! The sixteen exponents of a channel that get codes, and the reasons for which a matrix stays BF16.
//!
//! A channel's window is the contiguous run of 16 exponents that holds most of its weights, found from the histogram;
//! of equals the highest. It starts at 1 to 239, so that no code means exponent 0 (zeros, subnormals) or 255 (NaN and
//! infinities). A channel without any normal weight takes 1, where its codes stand for next to nothing in the Q view.

use std::fmt;

/// Exponents of a window.
pub(super) const WINDOW: u8 = 16;
/// Lowest first exponent.
pub(super) const MIN_BASE: u8 = 1;
/// Highest first exponent.
pub(super) const MAX_BASE: u8 = 239;
/// Exponent that kernels decode a window's start to; escapes must survive the same rescaling.
const DECODED_BASE: i32 = 112;

/// Why a matrix stays BF16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeepReason {
    /// A NaN or an infinity.
    NotFinite {
        /// First channel that holds one.
        channel: usize,
    },
    /// A weight outside its window that is subnormal, or would be or overflow when its channel is rescaled.
    EscapeOutOfRange {
        /// First channel that holds one.
        channel: usize,
        /// First exponent of the channel's window.
        base: u8,
        /// The weight's exponent.
        exponent: u8,
    },
    /// More than 1 % of the weights are outside their windows.
    TooManyEscapes {
        /// Weights outside.
        num_escapes: usize,
        /// All weights.
        num_weights: usize,
    },
    /// With padding W12 takes 0.9 of the BF16 bytes or more.
    DoesNotPay {
        /// Bytes in W12.
        num_bytes: usize,
        /// Bytes in BF16.
        source_bytes: usize,
    },
}

impl fmt::Display for KeepReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFinite { channel } => write!(f, "channel {channel} holds NaN or infinity"),
            Self::EscapeOutOfRange {
                channel,
                base,
                exponent,
            } => write!(
                f,
                "channel {channel} holds a weight of exponent {exponent}, out of reach of its window at {base}"
            ),
            Self::TooManyEscapes {
                num_escapes,
                num_weights,
            } => write!(
                f,
                "{num_escapes} of {num_weights} weights are outside their windows, more than 1 %"
            ),
            Self::DoesNotPay {
                num_bytes,
                source_bytes,
            } => write!(
                f,
                "{num_bytes} bytes with padding, not less than 0.9 of {source_bytes}"
            ),
        }
    }
}

/// A channel's window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Window {
    /// First exponent.
    pub(super) base: u8,
    /// Weights outside.
    pub(super) num_escapes: usize,
}

/// What makes a channel impossible to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Defect {
    NotFinite,
    EscapeOutOfRange { base: u8, exponent: u8 },
}

impl Defect {
    pub(super) fn of_channel(self, channel: usize) -> KeepReason {
        match self {
            Self::NotFinite => KeepReason::NotFinite { channel },
            Self::EscapeOutOfRange { base, exponent } => KeepReason::EscapeOutOfRange {
                channel,
                base,
                exponent,
            },
        }
    }
}

/// The exponent field of BF16 bits.
pub(super) fn exponent(bits: u16) -> u8 {
    (bits >> 7) as u8
}

/// Whether exponent `exponent` has a code in the window at `base`.
pub(super) fn is_inside(exponent: u8, base: u8) -> bool {
    exponent.wrapping_sub(base) < WINDOW
}

/// Whether a weight outside the window at `base` keeps all its bits when kernels rescale it: zeros do, subnormals never,
/// others when the rescaled exponent is that of a normal number.
pub(super) fn can_escape(bits: u16, base: u8) -> bool {
    if bits & 0x7FFF == 0 {
        return true;
    }
    let exponent = exponent(bits);
    (1..=254).contains(&exponent)
        && (1..=254).contains(&(i32::from(exponent) + DECODED_BASE - i32::from(base)))
}

/// Chooses the window of one channel.
pub(super) fn choose(row: &[u16]) -> Result<Window, Defect> {
    let (histogram, num_subnormal) = histogram(row);
    if histogram[255] > 0 {
        return Err(Defect::NotFinite);
    }
    let mass_at = |base: u8| -> usize {
        histogram[usize::from(base)..][..usize::from(WINDOW)]
            .iter()
            .sum()
    };
    let mut base = MIN_BASE;
    let mut mass = mass_at(base);
    let mut best = (base, mass);
    while base < MAX_BASE {
        mass += histogram[usize::from(base + WINDOW)];
        mass -= histogram[usize::from(base)];
        base += 1;
        if mass >= best.1 && mass > 0 {
            best = (base, mass);
        }
    }
    let (base, mass) = best;
    if num_subnormal > 0 {
        return Err(Defect::EscapeOutOfRange { base, exponent: 0 });
    }
    let out_of_range = (1..255_u8).find(|&exponent| {
        histogram[usize::from(exponent)] > 0
            && !is_inside(exponent, base)
            && !can_escape(u16::from(exponent) << 7, base)
    });
    if let Some(exponent) = out_of_range {
        return Err(Defect::EscapeOutOfRange { base, exponent });
    }
    Ok(Window {
        base,
        num_escapes: row.len() - mass,
    })
}

/// Weights of each exponent, and how many of exponent 0 are not zero. Four tables, for neighbours often share an
/// exponent and would wait for each other's increment.
fn histogram(row: &[u16]) -> ([usize; 256], usize) {
    let mut tables = [[0_u32; 256]; 4];
    let (quads, rest) = row.as_chunks::<4>();
    for quad in quads {
        for (table, &bits) in tables.iter_mut().zip(quad) {
            table[usize::from(exponent(bits))] += 1;
        }
    }
    for &bits in rest {
        tables[0][usize::from(exponent(bits))] += 1;
    }
    let histogram: [usize; 256] =
        std::array::from_fn(|e| tables.iter().map(|table| table[e] as usize).sum());
    let num_subnormal = if histogram[0] > 0 {
        row.iter()
            .filter(|&&bits| exponent(bits) == 0 && bits & 0x7F != 0)
            .count()
    } else {
        0
    };
    (histogram, num_subnormal)
}
