//! Activations on a GPU, between fp32 rows and a matmul: rounded to BF16, or to E4M3 with scales.
//!
//! Rows are padded with zeros to whole super-tiles. The kernel before a matmul writes BF16 rows, else `round_rows` of
//! `skinny_matmul.cuh` does; `quantise_rows` of `quantised_rows.cuh` makes E4M3 of either.

use half::bf16;

use super::fp8_matmul::GROUP_COLUMNS;
use super::matmul_rows::MatmulInput;
use super::skinny_weights::TILE_COLUMNS;

/// How a matmul takes activations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowFormat {
    /// Rounded to BF16.
    Bf16,
    /// Rounded to E4M3 by groups of 128 columns, with their scales behind them.
    E4m3,
}

impl RowFormat {
    /// Bytes of a row of so many columns.
    pub(super) fn row_bytes(self, in_features: usize) -> usize {
        let padded = in_features.next_multiple_of(TILE_COLUMNS);
        match self {
            Self::Bf16 => padded * size_of::<bf16>(),
            Self::E4m3 => {
                padded
                    + (in_features.div_ceil(GROUP_COLUMNS) * size_of::<f32>()).next_multiple_of(16)
            }
        }
    }

    /// The kernel that makes them of `x`, unless that is what they are.
    pub(super) fn entry(self, x: &MatmulInput<'_>) -> Option<&'static str> {
        match (self, x) {
            (Self::Bf16, MatmulInput::Values(_)) => Some("round_rows"),
            (Self::Bf16, MatmulInput::Rows(_)) => None,
            (Self::E4m3, MatmulInput::Values(_)) => Some("quantise_rows"),
            (Self::E4m3, MatmulInput::Rows(_)) => Some("quantise_rounded_rows"),
        }
    }
}
