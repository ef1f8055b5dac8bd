//! The rows of one pass, packed: which request each belongs to, where it stands and which rows lead to it.

use std::ops::Range;

use crate::error::KernelError;

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
}

/// Rows of several requests packed one after another. Every row carries its path: the uncommitted rows from its
/// segment's root down to itself, in position order.
#[derive(Clone, Debug, Default)]
pub struct RowPaths {
    segments: Vec<Segment>,
    positions: Vec<u32>,
    path_starts: Vec<usize>,
    path_rows: Vec<u32>,
}

impl RowPaths {
    /// An empty batch.
    pub fn new() -> Self {
        Self {
            path_starts: vec![0],
            ..Self::default()
        }
    }

    /// Appends the rows of one request. `parents[i]` is the index within this segment of the row before row `i`, or
    /// `None` when row `i` follows the committed tokens directly.
    ///
    /// # Errors
    /// [`KernelError::ParentOrder`] when a parent does not come before its child, [`KernelError::PathTooLong`] when a
    /// path exceeds [`MAX_PATH_ROWS`].
    pub fn push_segment(
        &mut self,
        slot: usize,
        committed_len: usize,
        parents: &[Option<usize>],
    ) -> Result<(), KernelError> {
        let first = self.num_rows();
        for (i, parent) in parents.iter().enumerate() {
            let row = first + i;
            let prefix = match *parent {
                Some(p) if p >= i => return Err(KernelError::ParentOrder { row: i, parent: p }),
                Some(p) => self.path_starts[first + p]..self.path_starts[first + p + 1],
                None => 0..0,
            };
            let len = prefix.len() + 1;
            if len > MAX_PATH_ROWS {
                return Err(KernelError::PathTooLong {
                    expected: MAX_PATH_ROWS,
                    got: len,
                });
            }
            self.path_rows.extend_from_within(prefix);
            self.path_rows.push(row as u32);
            self.path_starts.push(self.path_rows.len());
            self.positions.push((committed_len + len - 1) as u32);
        }
        self.segments.push(Segment {
            slot,
            rows: first..first + parents.len(),
            committed_len,
        });
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
        queries: impl Iterator<Item = (&'a [u32], u32)>,
    ) -> Result<(), KernelError> {
        let first = self.num_rows();
        for (before, row) in queries {
            let len = before.len() + 1;
            if len > MAX_PATH_ROWS {
                return Err(KernelError::PathTooLong {
                    expected: MAX_PATH_ROWS,
                    got: len,
                });
            }
            self.path_rows.extend_from_slice(before);
            self.path_rows.push(row);
            self.path_starts.push(self.path_rows.len());
            self.positions.push((committed_len + len - 1) as u32);
        }
        self.segments.push(Segment {
            slot,
            rows: first..self.num_rows(),
            committed_len,
        });
        Ok(())
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
    pub fn positions(&self) -> &[u32] {
        &self.positions
    }

    /// The rows from the segment's root to `row`, itself included; the first stands at position `committed_len`.
    pub fn path(&self, row: usize) -> &[u32] {
        &self.path_rows[self.path_starts[row]..self.path_starts[row + 1]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_follow_parents_and_positions_follow_depth() {
        let mut paths = RowPaths::new();
        paths
            .push_segment(3, 10, &[None, Some(0), Some(0), Some(2)])
            .unwrap();
        paths.push_segment(1, 0, &[None, Some(0)]).unwrap();
        assert_eq!(paths.positions(), &[10, 11, 11, 12, 0, 1]);
        assert_eq!(paths.path(3), &[0, 2, 3]);
        assert_eq!(paths.path(5), &[4, 5]);
        assert_eq!(paths.segments()[1].rows, 4..6);
    }

    #[test]
    fn queries_continue_paths_of_earlier_forwards() {
        let mut paths = RowPaths::new();
        let before: [&[u32]; 2] = [&[4, 6], &[]];
        let queries = before.into_iter().zip([9, 3]);
        paths.push_queries(2, 10, queries).unwrap();
        assert_eq!(paths.positions(), &[12, 10]);
        assert_eq!((paths.path(0), paths.path(1)), (&[4, 6, 9][..], &[3][..]));
        assert_eq!(paths.segments()[0].rows, 0..2);
        let long = [0; MAX_PATH_ROWS];
        let refused = paths.push_queries(0, 0, [(&long[..], 1)].into_iter());
        assert!(matches!(
            refused,
            Err(KernelError::PathTooLong { got: 65, .. })
        ));
    }

    #[test]
    fn bad_parents_and_long_paths_are_refused() {
        let mut paths = RowPaths::new();
        assert!(matches!(
            paths.push_segment(0, 0, &[None, Some(1)]),
            Err(KernelError::ParentOrder { row: 1, parent: 1 })
        ));
        let chain: Vec<_> = (0..65).map(|i: usize| i.checked_sub(1)).collect();
        let mut paths = RowPaths::new();
        assert!(matches!(
            paths.push_segment(0, 0, &chain),
            Err(KernelError::PathTooLong {
                expected: 64,
                got: 65
            })
        ));
    }
}
