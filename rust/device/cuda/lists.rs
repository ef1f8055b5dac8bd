//! Memory of the lists that the host writes and kernels read: side by side in a few pieces, each with its image on the
//! host, so that whatever changed goes to the GPU in a copy or two before the next kernel, not list by list.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::driver;
use crate::device::activity::Activity;
use crate::error::DeviceError;

/// Bytes of a piece; longer lists get one of their own.
const PIECE_BYTES: usize = 1 << 20;
/// Lists start at multiples of this.
const LINE_BYTES: usize = 256;
/// Unchanged bytes that are rather copied along than left out by another copy.
const MAX_GAP_BYTES: usize = 16 << 10;

/// All lists of a device.
#[derive(Default)]
pub(super) struct ListMemory {
    pieces: Mutex<Vec<Piece>>,
    has_changes: AtomicBool,
}

struct Piece {
    on_gpu: CudaSlice<u8>,
    /// As the GPU will see it at the next kernel.
    image: Vec<u8>,
    ranges: Ranges,
    changed: Vec<Range<usize>>,
}

/// The free parts of a piece, ascending, none touching the next.
struct Ranges(Vec<Range<usize>>);

impl Ranges {
    /// All of `len` bytes.
    fn of(len: usize) -> Self {
        Self(std::iter::once(0..len).collect())
    }

    /// Takes the first `len` bytes that are free together.
    fn take(&mut self, len: usize) -> Option<usize> {
        let at = self.0.iter().position(|free| free.len() >= len)?;
        let start = self.0[at].start;
        self.0[at].start += len;
        if self.0[at].is_empty() {
            self.0.remove(at);
        }
        Some(start)
    }

    /// Gives bytes back.
    fn give(&mut self, range: Range<usize>) {
        let at = self.0.partition_point(|free| free.end < range.start);
        let mut merged = range;
        while let Some(next) = self.0.get(at).filter(|free| free.start <= merged.end) {
            merged = merged.start.min(next.start)..merged.end.max(next.end);
            self.0.remove(at);
        }
        self.0.insert(at, merged);
    }
}

/// The smallest ranges that cover `changed`, gaps of up to `max_gap` included.
fn covering(mut changed: Vec<Range<usize>>, max_gap: usize) -> Vec<Range<usize>> {
    changed.sort_unstable_by_key(|range| range.start);
    let mut covering: Vec<Range<usize>> = Vec::with_capacity(changed.len());
    for range in changed {
        match covering.last_mut() {
            Some(last) if range.start <= last.end + max_gap => last.end = last.end.max(range.end),
            _ => covering.push(range),
        }
    }
    covering
}

/// Room of one list, given back when dropped.
pub struct ListPlace {
    memory: Arc<ListMemory>,
    piece: usize,
    bytes: Range<usize>,
    address: u64,
}

impl ListPlace {
    /// Where the list lies on the GPU.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes that it holds.
    pub fn num_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Replaces the first bytes; kernels launched from now on see them.
    ///
    /// # Panics
    /// Panics if `bytes` are more than there is room for.
    pub fn write(&mut self, bytes: &[u8]) {
        assert!(bytes.len() <= self.bytes.len(), "a list fits its place");
        let mut pieces = self.memory.lock();
        let piece = &mut pieces[self.piece];
        let range = self.bytes.start..self.bytes.start + bytes.len();
        // Many a list is what it was: the pages of a request, masks of nothing.
        if piece.image[range.clone()] == *bytes {
            return;
        }
        piece.image[range.clone()].copy_from_slice(bytes);
        piece.changed.push(range);
        self.memory.has_changes.store(true, Ordering::Release);
    }
}

impl Drop for ListPlace {
    fn drop(&mut self) {
        let mut pieces = self.memory.lock();
        pieces[self.piece].ranges.give(self.bytes.clone());
    }
}

impl std::fmt::Debug for ListPlace {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ListPlace")
            .field("bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

impl ListMemory {
    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Piece>> {
        self.pieces.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for `num_bytes`; `alloc` makes a piece where none has it.
    ///
    /// # Errors
    /// Those of `alloc`.
    pub(super) fn place(
        self: &Arc<Self>,
        num_bytes: usize,
        stream: &Arc<CudaStream>,
        alloc: impl FnOnce(usize) -> Result<CudaSlice<u8>, DeviceError>,
    ) -> Result<ListPlace, DeviceError> {
        let len = num_bytes.max(1).next_multiple_of(LINE_BYTES);
        let mut pieces = self.lock();
        let found = pieces
            .iter_mut()
            .enumerate()
            .find_map(|(piece, held)| Some((piece, held.ranges.take(len)?)));
        let (piece, start) = match found {
            Some(found) => found,
            None => {
                let piece_len = len.max(PIECE_BYTES);
                let mut ranges = Ranges::of(piece_len);
                let start = ranges.take(len).expect("a new piece has room for its list");
                pieces.push(Piece {
                    on_gpu: alloc(piece_len)?,
                    image: vec![0; piece_len],
                    ranges,
                    changed: Vec::new(),
                });
                (pieces.len() - 1, start)
            }
        };
        Ok(ListPlace {
            address: pieces[piece].on_gpu.device_ptr(stream).0 + start as u64,
            memory: self.clone(),
            piece,
            bytes: start..start + len,
        })
    }

    /// Copies what changed. `image` may change at once afterwards: the driver stages memory that is not page-locked
    /// before its call returns (CUDA API synchronization behavior).
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub(super) fn send_changes(
        &self,
        stream: &Arc<CudaStream>,
        activity: &Activity,
    ) -> Result<(), DeviceError> {
        if !self.has_changes.swap(false, Ordering::AcqRel) {
            return Ok(());
        }
        for piece in self.lock().iter_mut() {
            piece.changed = covering(std::mem::take(&mut piece.changed), MAX_GAP_BYTES);
            while let Some(range) = piece.changed.last().cloned() {
                activity.note(|counts| counts.num_uploads += 1);
                let to = &mut piece.on_gpu.slice_mut(range.clone());
                if let Err(error) = stream.memcpy_htod(&piece.image[range], to) {
                    // What did not go stays to be sent: the image alone would pass for unchanged.
                    self.has_changes.store(true, Ordering::Release);
                    return Err(driver("copying lists to the GPU")(error));
                }
                piece.changed.pop();
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_taken_first_fit_and_merge_when_given_back() {
        let mut free = Ranges::of(100);
        assert_eq!(
            (free.take(30), free.take(30), free.take(40)),
            (Some(0), Some(30), Some(60))
        );
        assert_eq!(free.take(1), None);
        free.give(60..100);
        free.give(0..30);
        assert_eq!(free.0, [0..30, 60..100]);
        assert_eq!((free.take(35), free.take(30)), (Some(60), Some(0)));
        free.give(0..30);
        free.give(60..95);
        free.give(30..60);
        assert_eq!(free.0, Ranges::of(100).0);
    }

    #[test]
    fn changes_near_each_other_go_together() {
        let changed = vec![500..510, 0..10, 4..20, 24..30, 300..320];
        assert_eq!(covering(changed.clone(), 4), [0..30, 300..320, 500..510]);
        assert_eq!(covering(changed.clone(), 1000), Ranges::of(510).0);
        assert_eq!(covering(changed, 0), [0..20, 24..30, 300..320, 500..510]);
        assert!(covering(Vec::new(), 5).is_empty());
    }
}
