//! The rows of one pass, packed: which request each belongs to, where it stands, which rows lead to it and which pages
//! hold the tokens before.
//!
//! Written by the host before a pass ([`clear`](RowPaths::clear), one push per request, [`finish`](RowPaths::finish))
//! and read by its kernels on either side. The same value serves pass after pass: its copies on a GPU keep their
//! addresses as long as the capacity suffices.
//!
//! A prompt chunk longer than a path is several segments of one slot, each of which takes those before it for committed.
//! Layer by layer their rows go to the caches before the next segment reads them: all keys and values before attention,
//! the recurrence [wave by wave](RowPaths::waves). So every row meets what it would have met in a pass of its own.

use std::ops::Range;

use super::check_size;
use super::kv_span::{KvSpan, PageTables, PerSpan};
use super::placed_rows::PlacedRows;
use super::tree_attention::{KV_BLOCK, KV_SPLIT};
use crate::device::{Device, Staged};
use crate::error::{DeviceError, KernelError};

/// Most uncommitted rows on one path of a pass (root included), and so the most that a segment's may be. Not above
/// [`ANCHOR_DELAY`](super::gdn_wy::ANCHOR_DELAY): the recurrent state of every row must lie in committed ground.
pub const MAX_PATH_ROWS: usize = 64;

/// Of `num_rows` prompt rows, those that a pass settles on its way: the caches hold them before its last segment runs.
pub fn num_settled_rows(num_rows: usize) -> usize {
    num_rows.saturating_sub(1) / MAX_PATH_ROWS * MAX_PATH_ROWS
}

/// The rows of one request in a pass, or a part of its prompt rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// The request's cache slot.
    pub slot: usize,
    /// Its rows in the packed batch, parents before children.
    pub rows: Range<usize>,
    /// Tokens already committed, or settled by the segments before; position of the first row.
    pub committed_len: usize,
    /// Its part of the lists of pages.
    pages: Range<usize>,
}

/// Segments that can run together, as no two are of one slot.
pub struct Wave<'a> {
    /// Their indices.
    pub segments: Range<usize>,
    /// What goes to the caches before the next wave.
    pub settled: Option<Settled<'a>>,
}

/// Rows of one slot that a later segment reads as committed.
#[derive(Clone, Copy)]
pub struct Settled<'a> {
    /// The rows and their places.
    pub rows: &'a PlacedRows,
    /// Their slot.
    pub slot: usize,
    /// Position after the last of them: that of the first row of the segment that reads them.
    pub end: usize,
    /// Position of that segment's last row.
    pub last_position: usize,
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
    /// Page tables of all segments; in either list a segment's stand at the same place.
    pages: PerSpan<Staged<u32>>,
    /// Rows of every segment that another one follows, and its index; lists beyond are spare.
    settled: Vec<PlacedRows>,
    settled_segments: Vec<usize>,
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
    lists: [Option<u64>; 6],
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
    /// An empty batch whose lists hold `num_rows` rows, in as many segments, with tables of `num_entries` pages in all
    /// without growing.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn with_capacity(
        device: &Device,
        num_rows: usize,
        num_entries: PerSpan<usize>,
    ) -> Result<Self, DeviceError> {
        let list = |len| Staged::with_capacity(device, len);
        Ok(Self {
            segments: Vec::with_capacity(num_rows),
            path_starts: Vec::with_capacity(num_rows),
            positions: list(num_rows)?,
            row_facts: list(num_rows * ROW_FACTS)?,
            segment_facts: list(num_rows * SEGMENT_FACTS)?,
            path_rows: list(num_rows * MAX_PATH_ROWS)?,
            pages: PerSpan {
                whole: list(num_entries.whole)?,
                window: list(num_entries.window)?,
            },
            settled: (0..num_settled_rows(num_rows) / MAX_PATH_ROWS)
                .map(|_| PlacedRows::with_capacity(device, MAX_PATH_ROWS))
                .collect::<Result<_, _>>()?,
            settled_segments: Vec::new(),
            max_rows: num_rows,
            num_padding: 0,
            is_finished: false,
        })
    }

    fn lists_mut(&mut self) -> [&mut Staged<u32>; 6] {
        let [whole_pages, window_pages] = self.pages.both_mut();
        [
            &mut self.positions,
            &mut self.row_facts,
            &mut self.segment_facts,
            &mut self.path_rows,
            whole_pages,
            window_pages,
        ]
    }

    /// Forgets all rows.
    pub fn clear(&mut self) {
        self.segments.clear();
        self.path_starts.clear();
        for list in self.lists_mut() {
            list.values_mut().clear();
        }
        self.settled_segments.clear();
        self.num_padding = 0;
        self.is_finished = false;
    }

    /// Appends the rows of one request whose `pages` hold its committed tokens, one per
    /// [`KV_BLOCK`](super::tree_attention::KV_BLOCK) (none where no kernel looks for keys there). `parents[i]` is the
    /// index within this segment of the row before row `i`, or `None` when row `i` follows the committed tokens directly.
    ///
    /// # Errors
    /// [`KernelError::ParentOrder`] when a parent does not come before its child, [`KernelError::PathTooLong`] when a
    /// path exceeds [`MAX_PATH_ROWS`], [`KernelError::Size`] for tables of windows in some segments only.
    pub fn push_segment<'a>(
        &mut self,
        slot: usize,
        committed_len: usize,
        pages: impl Into<PageTables<'a>>,
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
        let pages = self.push_pages(pages.into())?;
        self.end_segment(slot, first, committed_len, pages);
        Ok(())
    }

    /// Appends `num_rows` prompt rows of one request, of any number: a chain that is committed whatever comes. Segments
    /// take [`MAX_PATH_ROWS`] of them each. `pages` reach as far as the rows (none where no kernel looks for keys there).
    ///
    /// # Errors
    /// [`KernelError::BufferTooShort`] when there are pages, but not up to the last row that is settled,
    /// [`KernelError::Size`] for tables of windows in some segments only.
    pub fn push_prompt<'a>(
        &mut self,
        slot: usize,
        committed_len: usize,
        pages: impl Into<PageTables<'a>>,
        num_rows: usize,
    ) -> Result<(), KernelError> {
        let pages = pages.into();
        let place = self.push_pages(pages)?;
        let mut left = num_rows;
        while left > 0 {
            let first = self.num_rows();
            let position = committed_len + num_rows - left;
            let rows = first..first + left.min(MAX_PATH_ROWS);
            for row in rows.clone() {
                let start = self.path_rows.len();
                let before = (first..row).map(|row| row as u32);
                self.path_rows.values_mut().extend(before);
                self.push_row(start, row as u32, position);
            }
            self.end_segment(slot, first, position, place.clone());
            left -= rows.len();
            if left > 0 {
                self.settle_last_segment(slot, position, pages, rows)?;
            }
        }
        Ok(())
    }

    /// Notes that another segment of the slot follows the last one.
    fn settle_last_segment(
        &mut self,
        slot: usize,
        first_position: usize,
        pages: PageTables<'_>,
        rows: Range<usize>,
    ) -> Result<(), KernelError> {
        let index = self.settled_segments.len();
        if index == self.settled.len() {
            self.settled.push(PlacedRows::default());
        }
        self.settled[index].clear();
        let rows = rows.map(|row| row as u32);
        self.settled[index].push(slot, first_position, pages, rows)?;
        self.settled_segments.push(self.segments.len() - 1);
        Ok(())
    }

    /// Appends queries of one request whose paths lead through rows of earlier forwards over the same tail: each comes
    /// as the path before it and its own row of the tail. [`Segment::rows`] then counts queries.
    ///
    /// # Errors
    /// [`KernelError::PathTooLong`] when a path exceeds [`MAX_PATH_ROWS`], [`KernelError::Size`] for tables of windows
    /// in some segments only.
    pub fn push_queries<'a>(
        &mut self,
        slot: usize,
        committed_len: usize,
        pages: impl Into<PageTables<'a>>,
        queries: impl Iterator<Item = (&'a [u32], u32)>,
    ) -> Result<(), KernelError> {
        let first = self.num_rows();
        for (before, row) in queries {
            self.check_path_len(before.len() + 1)?;
            let start = self.path_rows.len();
            self.path_rows.values_mut().extend_from_slice(before);
            self.push_row(start, row, committed_len);
        }
        let pages = self.push_pages(pages.into())?;
        self.end_segment(slot, first, committed_len, pages);
        Ok(())
    }

    /// Appends rows that a GPU computes and nobody reads, up to the next [`row_bucket`], no further than the capacity, and
    /// no more than leave the last segment [`MAX_PATH_ROWS`]; returns how many. Each follows the committed tokens of that
    /// segment directly, as if its request had another root; [`Segment::rows`] leaves them out. Pushes are over.
    pub fn pad(&mut self, device: &Device) -> usize {
        match device {
            Device::Host(_) => 0,
            Device::Cuda(_) => self.pad_to(self.padded_rows(self.num_rows())),
        }
    }

    /// Rows that a GPU computes for `num_rows`: the next [`row_bucket`], no further than the capacity.
    pub fn padded_rows(&self, num_rows: usize) -> usize {
        row_bucket(num_rows).min(self.max_rows)
    }

    fn pad_to(&mut self, num_rows: usize) -> usize {
        // A segment's number counts those before it.
        let Some(last) = self.segments.pop() else {
            return 0;
        };
        // Kernels take a segment's rows for those that say that they are its own: there may be no others.
        let room = MAX_PATH_ROWS.saturating_sub(last.rows.len());
        let num_padding = num_rows.saturating_sub(self.num_rows()).min(room);
        for _ in 0..num_padding {
            let (start, row) = (self.path_rows.len(), self.num_rows());
            self.push_row(start, row as u32, last.committed_len);
        }
        self.num_padding = num_padding;
        self.segments.push(last);
        let in_segment = self.segment_facts.len() - SEGMENT_FACTS + NUM_ROWS_FACT;
        self.segment_facts.values_mut()[in_segment] += num_padding as u32;
        num_padding
    }

    /// Gives the rows to `device`; pushes are over. Kernels on a GPU refuse rows that did not come this way.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when a list has to grow, [`DeviceError::Driver`].
    pub fn finish(&mut self, device: &Device) -> Result<(), DeviceError> {
        for list in self.lists_mut() {
            list.send(device)?;
        }
        for settled in &mut self.settled[..self.settled_segments.len()] {
            settled.finish(device)?;
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

    fn push_pages(&mut self, tables: PageTables<'_>) -> Result<Range<usize>, KernelError> {
        let first = self.pages.whole.len();
        for span in KvSpan::ALL {
            let list = self.pages.of_mut(span).values_mut();
            list.extend_from_slice(tables.of(span));
        }
        let end = self.pages.whole.len();
        match self.pages.window.len() {
            0 => {}
            num_entries => check_size("row_paths", "pages of windows", num_entries, end)?,
        }
        Ok(first..end)
    }

    fn end_segment(
        &mut self,
        slot: usize,
        first_row: usize,
        committed_len: usize,
        pages: Range<usize>,
    ) {
        let rows = first_row..self.num_rows();
        let facts = [
            slot,
            committed_len,
            first_row,
            rows.len(),
            pages.start,
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
            pages,
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

    /// The segments in the order in which recurrent layers run them: a wave at a time, what it settles behind it. All of
    /// them at once unless a prompt chunk is longer than a path.
    pub fn waves(&self) -> impl Iterator<Item = Wave<'_>> {
        let settled = self.settled_segments.iter().zip(&self.settled);
        let settled = settled.map(|(&segment, rows)| (segment + 1, Some((segment, rows))));
        let mut first = 0;
        settled
            .chain([(self.segments.len(), None)])
            .map(move |(end, settled)| {
                let segments = first..end;
                first = end;
                let settled = settled.map(|(segment, rows)| {
                    let reader = &self.segments[segment + 1];
                    Settled {
                        rows,
                        slot: reader.slot,
                        end: reader.committed_len,
                        last_position: self.position(reader.rows.end - 1),
                    }
                });
                Wave { segments, settled }
            })
    }

    /// Whether all segments run in one wave.
    pub fn is_one_wave(&self) -> bool {
        self.settled_segments.is_empty()
    }

    /// Whether a segment reads what the one before it settles.
    pub fn continues(&self, segment: usize) -> bool {
        segment
            .checked_sub(1)
            .is_some_and(|before| self.settled_segments.contains(&before))
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

    /// The pages of a segment in layers of `span`, one per 64 committed tokens, if it has any.
    pub fn pages(&self, segment: &Segment, span: KvSpan) -> &[u32] {
        let list = self.pages.of(span).values();
        list.get(segment.pages.clone()).unwrap_or_default()
    }

    /// At least the rows of the largest of some segments, padding included: a [`row_bucket`], as launches follow from it.
    pub(super) fn longest_of(&self, segments: Range<usize>) -> usize {
        let last = self.segments.len().checked_sub(1);
        let rows = segments.map(|segment| match Some(segment) == last {
            true => self.segments[segment].rows.len() + self.num_padding,
            false => self.segments[segment].rows.len(),
        });
        row_bucket(rows.max().unwrap_or(0))
    }

    /// [`longest_of`](Self::longest_of) all of them.
    pub(super) fn longest_segment(&self) -> usize {
        self.longest_of(0..self.segments.len())
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
            &self.pages.whole,
            &self.pages.window,
        ];
        LaunchKey {
            lists: lists.map(Staged::cuda_address),
            num_rows: self.num_rows(),
            num_segments: self.segments.len(),
            longest_segment: self.longest_segment(),
            num_splits: self.num_splits(),
        }
    }

    /// The lists on the GPU with some of the segments, for a launcher of `kernel` that goes by segment alone.
    ///
    /// # Errors
    /// As for [`on_cuda`](Self::on_cuda).
    pub(super) fn segments_on_cuda(
        &self,
        kernel: &'static str,
        segments: &Range<usize>,
    ) -> Result<CudaPaths, KernelError> {
        let mut paths = self.on_cuda(kernel)?;
        paths.segment_facts += (segments.start * SEGMENT_FACTS * size_of::<u32>()) as u64;
        paths.num_segments = segments.len() as u32;
        Ok(paths)
    }

    /// Rows of some segments that follow each other; padding comes behind the last.
    pub(super) fn rows_of(&self, segments: &Range<usize>) -> Range<usize> {
        let start_of = |segment: usize| {
            let segment = self.segments.get(segment);
            segment.map_or(self.num_rows(), |segment| segment.rows.start)
        };
        start_of(segments.start)..start_of(segments.end)
    }

    /// The lists on the GPU with the page tables of `span`, for a launcher of `kernel`.
    ///
    /// # Errors
    /// As for [`on_cuda`](Self::on_cuda).
    pub(super) fn span_on_cuda(
        &self,
        kernel: &'static str,
        span: KvSpan,
    ) -> Result<CudaPaths, KernelError> {
        let mut paths = self.on_cuda(kernel)?;
        // Entries stand at the same places in both lists.
        if let Some(pages) = self.pages.of(span).cuda_address() {
            paths.pages = pages;
        }
        Ok(paths)
    }

    /// The lists on the GPU with the page tables of layers that keep everything, for a launcher of `kernel`.
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
                pages: address(&self.pages.whole)?,
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
mod tests;
