//! Activations on a GPU, between fp32 rows and a matmul: rounded to BF16, or to E4M3 with scales.
//!
//! Rows are padded with zeros to whole super-tiles. `round_rows` of `skinny_matmul.cuh` and `quantise_rows` of
//! `quantised_rows.cuh` write them.

use half::bf16;

use super::fp8_matmul::GROUP_COLUMNS;
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

    /// The kernel that makes them of fp32 rows.
    pub(super) fn entry(self) -> &'static str {
        match self {
            Self::Bf16 => "round_rows",
            Self::E4m3 => "quantise_rows",
        }
    }
}
