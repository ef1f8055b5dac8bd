//! The rows of one pass, packed: which request each belongs to, where it stands, which rows lead to it and which pages
//! hold the tokens before.
//!
//! Written by the host before a pass ([`clear`](RowPaths::clear), one push per request, [`finish`](RowPaths::finish))
//! and read by its kernels on either side. The same value serves pass after pass: its copies on a GPU keep their
//! addresses as long as the capacity suffices.

use std::ops::Range;

use super::tree_attention::{KV_BLOCK, KV_SPLIT};
use crate::device::{Device, Staged};
use crate::error::{DeviceError, KernelError};

/// Most uncommitted rows on one path of a pass (root included), and so the largest prompt chunk. Not above
/// [`ANCHOR_DELAY`](super::gdn_wy::ANCHOR_DELAY): the recurrent state of every row must lie in committed ground.
pub const MAX_PATH_ROWS: usize = 64;

/// The rows of one request in a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The request's cache slot.
    pub slot: usize,
    /// Its rows in the packed batch, parents before children.
    pub rows: Range<usize>,
    /// Tokens already committed; position of the first row.
    pub committed_len: usize,
    /// Its part of the list of pages.
    pages: Range<usize>,
}

/// Rows of several requests packed one after another. Every row carries its path: the uncommitted rows from its
/// segment's root down to itself, in position order.
#[derive(Debug, Default)]
pub struct RowPaths {
    segments: Vec<Segment>,
    path_starts: Vec<usize>,
    positions: Staged<u32>,
    row_facts: Staged<u32>,
    segment_facts: Staged<u32>,
    path_rows: Staged<u32>,
    pages: Staged<u32>,
    max_rows: usize,
    /// Rows of padding that count to the last segment.
    num_padding: usize,
    is_finished: bool,
}

/// Where kernels find the lists: `RowPaths` of `cuda/include/row_paths.cuh`, which says what they hold.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct CudaPaths {
    positions: u64,
    row_facts: u64,
    segment_facts: u64,
    path_rows: u64,
    pages: u64,
    num_rows: u32,
    num_segments: u32,
}

/// Everything that launches over some rows follow from besides what lies in the lists: equal keys, equal launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LaunchKey {
    lists: [Option<u64>; 5],
    num_rows: usize,
    num_segments: usize,
    longest_segment: usize,
    num_splits: usize,
}

/// The number of rows that a GPU computes for `num_rows`: few numbers, each the cheapest for its matmuls, so that few
/// sequences of launches serve all passes.
pub fn row_bucket(num_rows: usize) -> usize {
    match num_rows {
        0..=8 => num_rows.next_power_of_two(),
        _ => num_rows.next_multiple_of(8),
    }
}

/// The number of splits that launches of attention are sized for: few numbers serve all lengths.
pub(super) fn split_bucket(num_splits: usize) -> usize {
    match num_splits {
        0 => 0,
        _ => num_splits.next_power_of_two(),
    }
}

/// `RowFacts` of `row_paths.cuh` in words.
const ROW_FACTS: usize = 2;
/// `SegmentFacts` of `row_paths.cuh` in words, and the place of the number of rows among them.
const SEGMENT_FACTS: usize = 8;
const NUM_ROWS_FACT: usize = 3;

impl RowPaths {
    /// An empty batch whose lists hold `num_rows` rows, in as many segments, over `num_pages` pages without growing.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn with_capacity(
        device: &Device,
        num_rows: usize,
        num_pages: usize,
    ) -> Result<Self, DeviceError> {
        let list = |len| Staged::with_capacity(device, len);
        Ok(Self {
            segments: Vec::with_capacity(num_rows),
            path_starts: Vec::with_capacity(num_rows),
            positions: list(num_rows)?,
            row_facts: list(num_rows * ROW_FACTS)?,
            segment_facts: list(num_rows * SEGMENT_FACTS)?,
            path_rows: list(num_rows * MAX_PATH_ROWS)?,
            pages: list(num_pages)?,
            max_rows: num_rows,
            num_padding: 0,
            is_finished: false,
        })
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.path_starts.clear();
        for list in [
            &mut self.positions,
            &mut self.row_facts,
            &mut self.segment_facts,
            &mut self.path_rows,
            &mut self.pages,
        ] {
            list.values_mut().clear();
        }
        self.num_padding = 0;
        self.is_finished = false;
    }

    /// Appends the rows of one request whose `pages` hold its committed tokens, one per
    /// [`KV_BLOCK`](super::tree_attention::KV_BLOCK) (none where no kernel looks for keys there). `parents[i]` is the
    /// index within this segment of the row before row `i`, or `None` when row `i` follows the committed tokens directly.
    ///
    /// # Errors
    /// [`KernelError::ParentOrder`] when a parent does not come before its child, [`KernelError::PathTooLong`] when a
    /// path exceeds [`MAX_PATH_ROWS`].
    pub fn push_segment(
        &mut self,
        slot: usize,
        committed_len: usize,
        pages: &[u32],
        parents: &[Option<usize>],
    ) -> Result<(), KernelError> {
        let first = self.num_rows();
        for (i, parent) in parents.iter().enumerate() {
            let row = first + i;
            let before = match *parent {
                Some(p) if p >= i => return Err(KernelError::ParentOrder { row: i, parent: p }),
                Some(p) => self.path_range(first + p),
                None => 0..0,
            };
            self.check_path_len(before.len() + 1)?;
            let start = self.path_rows.len();
            self.path_rows.values_mut().extend_from_within(before);
            self.push_row(start, row as u32, committed_len);
        }
        self.end_segment(slot, first, committed_len, pages);
        Ok(())
    }

    /// Appends queries of one request whose paths lead through rows of earlier forwards over the same tail: each comes
    /// as the path before it and its own row of the tail. [`Segment::rows`] then counts queries.
    ///
    /// # Errors
    /// [`KernelError::PathTooLong`] when a path exceeds [`MAX_PATH_ROWS`].
    pub fn push_queries<'a>(
        &mut self,
        slot: usize,
        committed_len: usize,
        pages: &[u32],
        queries: impl Iterator<Item = (&'a [u32], u32)>,
    ) -> Result<(), KernelError> {
        let first = self.num_rows();
        for (before, row) in queries {
            self.check_path_len(before.len() + 1)?;
            let start = self.path_rows.len();
            self.path_rows.values_mut().extend_from_slice(before);
            self.push_row(start, row, committed_len);
        }
        self.end_segment(slot, first, committed_len, pages);
        Ok(())
    }

    /// Appends rows that a GPU computes and nobody reads, up to the next [`row_bucket`] and no further than the
    /// capacity; returns how many. Each follows the committed tokens of the last segment directly, as if its request had
    /// another root; [`Segment::rows`] leaves them out. Kernels that go by segment compute as many of them as leave the
    /// segment [`MAX_PATH_ROWS`], and nothing for the others. Pushes are over.
    pub fn pad(&mut self, device: &Device) -> usize {
        match device {
            Device::Host(_) => 0,
            Device::Cuda(_) => self.pad_to(row_bucket(self.num_rows()).min(self.max_rows)),
        }
    }

    fn pad_to(&mut self, num_rows: usize) -> usize {
        let num_padding = num_rows.saturating_sub(self.num_rows());
        // A segment's number counts those before it.
        let Some(last) = self.segments.pop() else {
            return 0;
        };
        for _ in 0..num_padding {
            let (start, row) = (self.path_rows.len(), self.num_rows());
            self.push_row(start, row as u32, last.committed_len);
        }
        self.num_padding = num_padding.min(MAX_PATH_ROWS.saturating_sub(last.rows.len()));
        self.segments.push(last);
        let in_segment = self.segment_facts.len() - SEGMENT_FACTS + NUM_ROWS_FACT;
        self.segment_facts.values_mut()[in_segment] += self.num_padding as u32;
        num_padding
    }

    /// Gives the rows to `device`; pushes are over. Kernels on a GPU refuse rows that did not come this way.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when a list has to grow, [`DeviceError::Driver`].
    pub fn finish(&mut self, device: &Device) -> Result<(), DeviceError> {
        for list in [
            &mut self.positions,
            &mut self.row_facts,
            &mut self.segment_facts,
            &mut self.path_rows,
            &mut self.pages,
        ] {
            list.send(device)?;
        }
        self.is_finished = true;
        Ok(())
    }

    fn check_path_len(&self, len: usize) -> Result<(), KernelError> {
        if len > MAX_PATH_ROWS {
            return Err(KernelError::PathTooLong {
                expected: MAX_PATH_ROWS,
                got: len,
            });
        }
        Ok(())
    }

    /// Ends the path that begins at `start` of the list with `tail_row`.
    fn push_row(&mut self, start: usize, tail_row: u32, committed_len: usize) {
        self.path_rows.values_mut().push(tail_row);
        let len = self.path_rows.len() - start;
        self.path_starts.push(start);
        let segment = self.segments.len();
        self.positions
            .values_mut()
            .push((committed_len + len - 1) as u32);
        self.row_facts
            .values_mut()
            .extend([start as u32, segment as u32]);
    }

    fn end_segment(&mut self, slot: usize, first_row: usize, committed_len: usize, pages: &[u32]) {
        let first_page = self.pages.len();
        self.pages.values_mut().extend_from_slice(pages);
        let rows = first_row..self.num_rows();
        let facts = [
            slot,
            committed_len,
            first_row,
            rows.len(),
            first_page,
            0,
            0,
            0,
        ];
        self.segment_facts
            .values_mut()
            .extend(facts.map(|fact| fact as u32));
        self.segments.push(Segment {
            slot,
            rows,
            committed_len,
            pages: first_page..self.pages.len(),
        });
    }

    /// Number of rows of all segments.
    pub fn num_rows(&self) -> usize {
        self.positions.len()
    }

    /// The requests of the pass, in row order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// Absolute token position of each row.
    pub fn positions(&self) -> &Staged<u32> {
        &self.positions
    }

    /// Absolute token position of one row.
    pub fn position(&self, row: usize) -> usize {
        self.positions.values()[row] as usize
    }

    /// The rows from the segment's root to `row`, itself included; the first stands at position `committed_len`.
    pub fn path(&self, row: usize) -> &[u32] {
        &self.path_rows.values()[self.path_range(row)]
    }

    fn path_range(&self, row: usize) -> Range<usize> {
        let end = self.path_starts.get(row + 1).copied();
        self.path_starts[row]..end.unwrap_or(self.path_rows.len())
    }

    /// The pages of a segment, one per 64 committed tokens, if it has any.
    pub fn pages(&self, segment: &Segment) -> &[u32] {
        &self.pages.values()[segment.pages.clone()]
    }

    /// At least the rows of the largest segment, padding included: a [`row_bucket`], as launches follow from it.
    pub(super) fn longest_segment(&self) -> usize {
        let rows = self.segments.iter().map(|segment| segment.rows.len());
        let last = self.segments.last();
        let with_padding = last.map_or(0, |segment| segment.rows.len() + self.num_padding);
        row_bucket(rows.max().unwrap_or(0).max(with_padding))
    }

    /// At least the splits of attention that the whole blocks before any segment take: 0 or a power of two, as launches
    /// follow from it.
    pub(super) fn num_splits(&self) -> usize {
        let splits = self.segments.iter().map(|segment| {
            let in_blocks = segment.committed_len / KV_BLOCK * KV_BLOCK;
            split_bucket(in_blocks.div_ceil(KV_SPLIT))
        });
        splits.max().unwrap_or(0)
    }

    /// The key of launches over these rows.
    pub fn launch_key(&self) -> LaunchKey {
        let lists = [
            &self.positions,
            &self.row_facts,
            &self.segment_facts,
            &self.path_rows,
            &self.pages,
        ];
        LaunchKey {
            lists: lists.map(Staged::cuda_address),
            num_rows: self.num_rows(),
            num_segments: self.segments.len(),
            longest_segment: self.longest_segment(),
            num_splits: self.num_splits(),
        }
    }

    /// The lists on the GPU, for a launcher of `kernel`.
    ///
    /// # Errors
    /// [`KernelError::WrongDevice`] when they are not there.
    pub(super) fn on_cuda(&self, kernel: &'static str) -> Result<CudaPaths, KernelError> {
        let addresses = || {
            let address = |list: &Staged<u32>| list.cuda_address();
            Some(CudaPaths {
                positions: address(&self.positions)?,
                row_facts: address(&self.row_facts)?,
                segment_facts: address(&self.segment_facts)?,
                path_rows: address(&self.path_rows)?,
                pages: address(&self.pages)?,
                num_rows: self.num_rows() as u32,
                num_segments: self.segments.len() as u32,
            })
        };
        let addresses = self.is_finished.then(addresses).flatten();
        addresses.ok_or(KernelError::WrongDevice {
            kernel,
            argument: "paths",
            expected: "cuda",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_parents_and_positions_follow_depth() {
        let mut paths = RowPaths::default();
        paths
            .push_segment(3, 10, &[7, 5], &[None, Some(0), Some(0), Some(2)])
            .unwrap();
        paths.push_segment(1, 0, &[], &[None, Some(0)]).unwrap();
        assert_eq!(paths.positions().values(), &[10, 11, 11, 12, 0, 1]);
        assert_eq!(paths.path(3), &[0, 2, 3]);
        assert_eq!(paths.path(5), &[4, 5]);
        assert_eq!(paths.segments()[1].rows, 4..6);
        assert_eq!(paths.pages(&paths.segments()[0]), &[7, 5]);
        assert!(paths.pages(&paths.segments()[1]).is_empty());
    }

    #[test]
    fn cleared_paths_serve_the_next_pass() {
        let device = Device::host(Some(1)).unwrap();
        let mut paths = RowPaths::with_capacity(&device, 4, 2).unwrap();
        let mut refilled = RowPaths::default();
        paths
            .push_segment(3, 10, &[7, 5], &[None, Some(0)])
            .unwrap();
        paths.finish(&device).unwrap();
        for paths in [&mut paths, &mut refilled] {
            paths.clear();
            paths.push_segment(1, 5, &[2], &[None, Some(0)]).unwrap();
            paths.push_segment(0, 0, &[], &[None]).unwrap();
            paths.finish(&device).unwrap();
        }
        assert_eq!(paths.segments(), refilled.segments());
        for lists in [
            |paths: &RowPaths| paths.positions.values().to_vec(),
            |paths: &RowPaths| paths.row_facts.values().to_vec(),
            |paths: &RowPaths| paths.segment_facts.values().to_vec(),
            |paths: &RowPaths| paths.path_rows.values().to_vec(),
            |paths: &RowPaths| paths.pages.values().to_vec(),
        ] {
            assert_eq!(lists(&paths), lists(&refilled));
        }
        assert_eq!((paths.path(1), paths.path(2)), (&[0, 1][..], &[2][..]));
    }

    #[test]
    fn queries_continue_paths_of_earlier_forwards() {
        let mut paths = RowPaths::default();
        let before: [&[u32]; 2] = [&[4, 6], &[]];
        let queries = before.into_iter().zip([9, 3]);
        paths.push_queries(2, 10, &[], queries).unwrap();
        assert_eq!(paths.positions().values(), &[12, 10]);
        assert_eq!((paths.path(0), paths.path(1)), (&[4, 6, 9][..], &[3][..]));
        assert_eq!(paths.segments()[0].rows, 0..2);
        let long = [0; MAX_PATH_ROWS];
        let refused = paths.push_queries(0, 0, &[], [(&long[..], 1)].into_iter());
        assert!(matches!(
            refused,
            Err(KernelError::PathTooLong { got: 65, .. })
        ));
    }

    #[test]
    fn padding_follows_the_last_root_and_belongs_to_nobody() {
        let mut paths = RowPaths::default();
        paths.push_segment(3, 10, &[7], &[None]).unwrap();
        let tree = [None, Some(0), Some(1), Some(1)];
        paths.push_segment(1, 5, &[4], &tree).unwrap();
        assert_eq!(paths.pad_to(row_bucket(5)), 3);
        assert_eq!((paths.num_rows(), paths.longest_segment()), (8, 8));
        assert_eq!(paths.segments()[1].rows, 1..5);
        assert_eq!(paths.segment_facts.values()[8..12], [1, 5, 1, 7]);
        for row in 5..8 {
            assert_eq!(
                (paths.position(row), paths.path(row)),
                (5, &[row as u32][..])
            );
            assert_eq!(paths.row_facts.values()[2 * row + 1], 1);
        }
        paths.clear();
        paths.push_segment(0, 0, &[], &tree[..1]).unwrap();
        assert_eq!((paths.pad_to(1), paths.longest_segment()), (0, 1));
        let chain: Vec<_> = (0..62).map(|i: usize| i.checked_sub(1)).collect();
        paths.push_segment(1, 0, &[], &chain).unwrap();
        assert_eq!((paths.pad_to(72), paths.longest_segment()), (9, 64));
        assert_eq!(
            paths.segment_facts.values()[8 + NUM_ROWS_FACT..12][..1],
            [64]
        );
    }

    #[test]
    fn buckets_are_few_and_never_too_small() {
        let buckets: Vec<_> = (1..=64).map(row_bucket).collect();
        assert!((1..=64).zip(&buckets).all(|(rows, &bucket)| bucket >= rows));
        let distinct = std::collections::BTreeSet::from_iter(buckets);
        assert_eq!(distinct.len(), 11);
        assert_eq!([0, 1, 3, 4, 5].map(split_bucket), [0, 1, 4, 4, 8]);
    }

    #[test]
    fn bad_parents_and_long_paths_are_refused() {
        let mut paths = RowPaths::default();
        assert!(matches!(
            paths.push_segment(0, 0, &[], &[None, Some(1)]),
            Err(KernelError::ParentOrder { row: 1, parent: 1 })
        ));
        let chain: Vec<_> = (0..65).map(|i: usize| i.checked_sub(1)).collect();
        let mut paths = RowPaths::default();
        assert!(matches!(
            paths.push_segment(0, 0, &[], &chain),
            Err(KernelError::PathTooLong {
                expected: 64,
                got: 65
            })
        ));
    }
}
