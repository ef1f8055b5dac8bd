//! How the CUDA matmul of `cuda/include/row_tiles.cuh` is spread over a GPU: many rows at once, in the sums and the order
//! of `skinny_matmul.cuh`, which reads the weights once for every 32 rows.

use super::skinny_weights::{SliceFormat, TILE_CHANNELS, TILE_COLUMNS};
use super::w12_matmul::WeightView;
use crate::device::cuda::{Limits, Shape};

/// Fewest rows that it takes: those of verification go to the skinny kernels.
const MIN_ROWS: usize = 65;
/// Tiles of 16 channels of a block.
const BLOCK_TILES: usize = 8;
/// Rows of a block.
const TILE_ROWS: usize = 64;
const BLOCK_THREADS: usize = 256;
/// Super-tiles of a block's ring.
const STAGES: usize = 4;
/// Bytes between the rows of a stage.
const ROW_STRIDE_BYTES: usize = 2 * TILE_COLUMNS + 16;
/// Addresses of a block's channel tiles.
const STATIC_SHARED_BYTES: usize = BLOCK_TILES * size_of::<u64>();

/// One launch, printable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RowTiles {
    num_blocks: usize,
    shared_bytes: usize,
}

impl RowTiles {
    /// The launch for `num_rows` rows and `num_tiles` tiles of channels; `None` where the skinny kernels serve them: few
    /// rows, or a GPU without room for the ring.
    pub(super) fn choose(
        format: SliceFormat,
        view: WeightView,
        num_tiles: usize,
        num_rows: usize,
        limits: Limits,
    ) -> Option<Self> {
        let tile_bytes = match view {
            WeightView::Exact => format.tile_bytes(),
            WeightView::Q => TILE_CHANNELS * TILE_COLUMNS,
        };
        let weight_bytes = BLOCK_TILES * (format.note_bytes() + tile_bytes);
        let shared_bytes = STAGES * (weight_bytes + TILE_ROWS * ROW_STRIDE_BYTES);
        let fits = shared_bytes + STATIC_SHARED_BYTES <= limits.block_shared_bytes;
        (fits && num_rows >= MIN_ROWS).then_some(Self {
            num_blocks: num_tiles.div_ceil(BLOCK_TILES) * num_rows.div_ceil(TILE_ROWS),
            shared_bytes,
        })
    }

    /// The kernel of this launch.
    pub(super) fn kernel_name(format: SliceFormat, view: WeightView) -> &'static str {
        match (format, view) {
            (SliceFormat::Bf16, _) => "bf16_matmul_rows",
            (SliceFormat::W12, WeightView::Exact) => "w12_matmul_rows",
            (SliceFormat::W12, WeightView::Q) => "w12_matmul_q_rows",
        }
    }

    /// Blocks and their memory.
    pub(super) fn shape(&self) -> Shape {
        Shape {
            shared_bytes: self.shared_bytes as u32,
            ..Shape::of_blocks(self.num_blocks, BLOCK_THREADS)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_rows_are_tiled_where_the_ring_fits() {
        let limits = |block_shared_bytes| Limits {
            num_multiprocessors: 132,
            block_shared_bytes,
            has_clusters: true,
        };
        let choose = |format, num_rows, bytes| {
            RowTiles::choose(format, WeightView::Exact, 17, num_rows, limits(bytes))
        };
        let tiles = choose(SliceFormat::W12, 65, 232_448).unwrap();
        assert_eq!((tiles.num_blocks, tiles.shape().num_blocks), (6, 6));
        assert_eq!(
            tiles.shared_bytes,
            4 * (8 * (64 + 1536) + 64 * 144),
            "{tiles:?}"
        );
        assert_eq!(choose(SliceFormat::W12, 64, 232_448), None);
        assert!(choose(SliceFormat::W12, 65, 101_376).is_some());
        assert_eq!(choose(SliceFormat::Bf16, 65, 101_376), None);
    }
}
