//! Rows of a pass that go into caches, and where each belongs: slot, position, page.
//!
//! Written by the host when it is known what is committed, and read by the appending kernels of all layers on either
//! side. Like [`RowPaths`](super::paths::RowPaths), one value serves pass after pass.

use super::check_len;
use super::tree_attention::KV_BLOCK;
use crate::device::{Device, Staged};
use crate::error::{DeviceError, KernelError};

/// One row and its place: `PlacedRow` of `cuda/include/placed_rows.cuh`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlacedRow {
    /// Row of the pass's tail.
    pub row: u32,
    /// The request's cache slot.
    pub slot: u32,
    /// Position of the token.
    pub position: u32,
    /// Page of the position, [`NO_PAGE`] if there is none.
    pub page: u32,
}

/// The page of rows that were pushed without pages.
pub const NO_PAGE: u32 = u32::MAX;

/// Words of a [`PlacedRow`].
const ROW_WORDS: usize = 4;

/// Rows of one or more slots; those of a slot stand together, in the order of positions.
#[derive(Debug, Default)]
pub struct PlacedRows {
    words: Staged<u32>,
    ends: Vec<(usize, usize)>,
    is_finished: bool,
}

impl PlacedRows {
    /// An empty list that holds `num_rows` rows without growing.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn with_capacity(device: &Device, num_rows: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            words: Staged::with_capacity(device, num_rows * ROW_WORDS)?,
            ..Self::default()
        })
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.words.values_mut().clear();
        self.ends.clear();
        self.is_finished = false;
    }

    /// Appends `rows` of the tail, which take the positions of `slot` from `first_position` on. `pages` are those of
    /// the slot, one per 64 positions; none for a slot without.
    ///
    /// # Errors
    /// [`KernelError::BufferTooShort`] when there are pages, but not up to the last position.
    pub fn push(
        &mut self,
        slot: usize,
        first_position: usize,
        pages: &[u32],
        rows: impl IntoIterator<Item = u32>,
    ) -> Result<(), KernelError> {
        let first_word = self.words.len();
        let mut end = first_position;
        for row in rows {
            let page = pages.get(end / KV_BLOCK).copied().unwrap_or(NO_PAGE);
            self.words
                .values_mut()
                .extend([row, slot as u32, end as u32, page]);
            end += 1;
        }
        let needed = match pages {
            [] => 0,
            _ => end.div_ceil(KV_BLOCK),
        };
        if let Err(error) = check_len("placed_rows", "pages", pages.len(), needed) {
            self.words.values_mut().truncate(first_word);
            return Err(error);
        }
        self.ends.push((slot, end));
        Ok(())
    }

    /// Repeats the last row until there are `num_rows`, for appending keys and values: the same values go to the same
    /// place again.
    pub fn repeat_last(&mut self, num_rows: usize) {
        let words = self.words.values_mut();
        let last = words.len().saturating_sub(ROW_WORDS)..words.len();
        for _ in words.len() / ROW_WORDS..num_rows {
            words.extend_from_within(last.clone());
        }
    }

    /// Gives the rows to `device`; pushes are over. Kernels on a GPU refuse rows that did not come this way.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the list has to grow, [`DeviceError::Driver`].
    pub fn finish(&mut self, device: &Device) -> Result<(), DeviceError> {
        self.words.send(device)?;
        self.is_finished = true;
        Ok(())
    }

    /// Everything that launches over the rows follow from besides what lies in the list.
    pub fn launch_key(&self) -> (Option<u64>, usize) {
        (self.words.cuda_address(), self.len())
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.words.len() / ROW_WORDS
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.words.is_empty()
    }

    /// All rows.
    pub fn iter(&self) -> impl Iterator<Item = PlacedRow> + '_ {
        self.words
            .values()
            .chunks_exact(ROW_WORDS)
            .map(|words| PlacedRow {
                row: words[0],
                slot: words[1],
                position: words[2],
                page: words[3],
            })
    }

    /// Each slot with the number of tokens it holds once the rows are there, in the order of the pushes.
    pub fn ends(&self) -> &[(usize, usize)] {
        &self.ends
    }

    /// Elements that a tail of rows of `row_len` must have.
    pub(super) fn tail_len(&self, row_len: usize) -> usize {
        self.iter()
            .map(|placed| (placed.row as usize + 1) * row_len)
            .max()
            .unwrap_or(0)
    }

    /// The list on the GPU, for a launcher of `kernel`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when it is not there.
    pub(super) fn on_cuda(&self, kernel: &'static str) -> Result<u64, KernelError> {
        let address = self.is_finished.then(|| self.words.cuda_address());
        address.flatten().ok_or(KernelError::WrongDevice {
            kernel,
            argument: "rows",
            expected: "cuda",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_take_positions_and_pages_in_order() {
        let mut rows = PlacedRows::default();
        rows.push(2, 63, &[9, 4], [5, 7]).unwrap();
        rows.push(0, 3, &[], [6]).unwrap();
        let place = |row, slot, position, page| PlacedRow {
            row,
            slot,
            position,
            page,
        };
        let expected = [
            place(5, 2, 63, 9),
            place(7, 2, 64, 4),
            place(6, 0, 3, NO_PAGE),
        ];
        assert_eq!(rows.iter().collect::<Vec<_>>(), expected);
        assert_eq!(rows.ends(), [(2, 65), (0, 4)]);
        assert_eq!((rows.len(), rows.tail_len(10)), (3, 80));
        rows.repeat_last(5);
        assert_eq!((rows.len(), rows.iter().nth(4)), (5, rows.iter().nth(2)));
        assert_eq!(rows.ends().len(), 2);
        rows.clear();
        rows.repeat_last(2);
        assert!(rows.is_empty() && rows.ends().is_empty());
    }

    #[test]
    fn rows_beyond_their_pages_leave_nothing() {
        let mut rows = PlacedRows::default();
        let refused = rows.push(1, 63, &[9], [0, 1]);
        assert!(matches!(
            refused,
            Err(KernelError::BufferTooShort {
                expected: 2,
                got: 1,
                ..
            })
        ));
        assert!(rows.is_empty() && rows.ends().is_empty());
    }
}
