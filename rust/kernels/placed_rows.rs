//! Rows of a pass that go into caches, and where each belongs: slot, position, page. Where layers with a window have
//! pages of their own, the rows are listed once more with those.
//!
//! Written by the host when it is known what is committed, and read by the appending kernels of all layers on either
//! side. Like [`RowPaths`](super::paths::RowPaths), one value serves pass after pass.

use super::check_len;
use super::kv_span::{KvSpan, PageTables, PerSpan};
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
    words: PerSpan<Staged<u32>>,
    ends: Vec<(usize, usize)>,
    is_finished: bool,
}

impl PlacedRows {
    /// An empty list that holds `num_rows` rows without growing.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn with_capacity(device: &Device, num_rows: usize) -> Result<Self, DeviceError> {
        let words = || Staged::with_capacity(device, num_rows * ROW_WORDS);
        Ok(Self {
            words: PerSpan {
                whole: words()?,
                window: words()?,
            },
            ..Self::default()
        })
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        for words in self.words.both_mut() {
            words.values_mut().clear();
        }
        self.ends.clear();
        self.is_finished = false;
    }

    /// Appends `rows` of the tail, which take the positions of `slot` from `first_position` on. `pages` are those of
    /// the slot, one per 64 positions; none for a slot without, and none of windows where no layer has one.
    ///
    /// # Errors
    /// [`KernelError::BufferTooShort`] when there are pages, but not up to the last position.
    pub fn push<'a>(
        &mut self,
        slot: usize,
        first_position: usize,
        pages: impl Into<PageTables<'a>>,
        rows: impl IntoIterator<Item = u32>,
    ) -> Result<(), KernelError> {
        let pages = pages.into();
        let page_of = |table: &[u32], position| table.get(position / KV_BLOCK).copied();
        let [words, window_words] = self.words.both_mut().map(Staged::values_mut);
        let first_word = words.len();
        let mut end = first_position;
        for row in rows {
            let page = page_of(pages.whole, end).unwrap_or(NO_PAGE);
            words.extend([row, slot as u32, end as u32, page]);
            end += 1;
        }
        for table in [pages.whole, pages.window] {
            let needed = match table {
                [] => 0,
                _ => end.div_ceil(KV_BLOCK),
            };
            if let Err(error) = check_len("placed_rows", "pages", table.len(), needed) {
                words.truncate(first_word);
                return Err(error);
            }
        }
        if !pages.window.is_empty() {
            for (i, placed) in words[first_word..].chunks_exact(ROW_WORDS).enumerate() {
                let page = page_of(pages.window, first_position + i).unwrap_or(NO_PAGE);
                window_words.extend([placed[0], placed[1], placed[2], page]);
            }
        }
        self.ends.push((slot, end));
        Ok(())
    }

    /// Repeats the last row until there are `num_rows`, for appending keys and values: the same values go to the same
    /// place again.
    pub fn repeat_last(&mut self, num_rows: usize) {
        for words in self.words.both_mut().map(Staged::values_mut) {
            let last = words.len().saturating_sub(ROW_WORDS)..words.len();
            for _ in words.len() / ROW_WORDS..num_rows {
                words.extend_from_within(last.clone());
            }
        }
    }

    /// Gives the rows to `device`; pushes are over. Kernels on a GPU refuse rows that did not come this way.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the list has to grow, [`DeviceError::Driver`].
    pub fn finish(&mut self, device: &Device) -> Result<(), DeviceError> {
        for words in self.words.both_mut() {
            words.send(device)?;
        }
        self.is_finished = true;
        Ok(())
    }

    /// Everything that launches over the rows follow from besides what lies in the list.
    pub fn launch_key(&self) -> ([Option<u64>; 2], usize) {
        let lists = KvSpan::ALL.map(|span| self.words.of(span).cuda_address());
        (lists, self.len())
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.words.whole.len() / ROW_WORDS
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.words.whole.is_empty()
    }

    /// All rows, with the pages of layers that keep everything.
    pub fn iter(&self) -> impl Iterator<Item = PlacedRow> + '_ {
        self.iter_in(KvSpan::Whole)
    }

    /// All rows with their pages in layers of `span`; none where there are no such pages.
    pub fn iter_in(&self, span: KvSpan) -> impl Iterator<Item = PlacedRow> + '_ {
        let words = self.words.of(span);
        words
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

    /// The list with the pages of `span` on the GPU, for a launcher of `kernel`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when it is not there.
    pub(super) fn on_cuda(&self, kernel: &'static str, span: KvSpan) -> Result<u64, KernelError> {
        let words = self.words.of(span);
        let address = self.is_finished.then(|| words.cuda_address());
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
        assert_eq!(rows.iter_in(KvSpan::Window).count(), 0);
        rows.clear();
        rows.repeat_last(2);
        assert!(rows.is_empty() && rows.ends().is_empty());
    }

    #[test]
    fn rows_are_listed_with_their_pages_in_windows_too() {
        let mut rows = PlacedRows::default();
        let (whole, window) = (&[9, 4][..], &[1, 0][..]);
        rows.push(2, 63, PageTables { whole, window }, [5, 7])
            .unwrap();
        rows.repeat_last(3);
        let pages = |span| rows.iter_in(span).map(|placed| placed.page);
        assert_eq!(pages(KvSpan::Whole).collect::<Vec<_>>(), [9, 4, 4]);
        assert_eq!(pages(KvSpan::Window).collect::<Vec<_>>(), [1, 0, 0]);
        let places = |span| {
            rows.iter_in(span)
                .map(|placed| (placed.row, placed.position))
        };
        assert!(places(KvSpan::Whole).eq(places(KvSpan::Window)));
    }

    #[test]
    fn rows_beyond_their_pages_leave_nothing() {
        let (whole, window) = (&[9, 4][..], &[1][..]);
        for tables in [PageTables::from(&[9]), PageTables { whole, window }] {
            let mut rows = PlacedRows::default();
            let refused = rows.push(1, 63, tables, [0, 1]);
            assert!(matches!(
                refused,
                Err(KernelError::BufferTooShort {
                    expected: 2,
                    got: 1,
                    ..
                })
            ));
            assert!(rows.is_empty() && rows.ends().is_empty());
            assert_eq!(rows.iter_in(KvSpan::Window).count(), 0);
        }
    }
}
