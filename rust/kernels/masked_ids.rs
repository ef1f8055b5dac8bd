//! Ids that the rows of a call may not choose.

use crate::device::{Device, Staged};
use crate::error::DeviceError;

/// A list of ids per row, in any order; ids beyond the vocabulary mask nothing.
#[derive(Debug, Default)]
pub struct MaskedIds {
    /// Where each row's ids begin, and the end.
    starts: Staged<u32>,
    ids: Staged<u32>,
}

impl MaskedIds {
    /// The lists of `rows`.
    ///
    /// # Errors
    /// [`DeviceError`] when a GPU has no room for them.
    pub fn of(device: &Device, rows: &[&[u32]]) -> Result<Self, DeviceError> {
        let mut masked = Self::default();
        masked.fill(device, rows)?;
        Ok(masked)
    }

    /// The lists of `rows` for host kernels.
    pub fn on_host(rows: &[&[u32]]) -> Self {
        Self {
            starts: Staged::on_host(starts(rows).collect()),
            ids: Staged::on_host(rows.concat()),
        }
    }

    /// Replaces the lists.
    ///
    /// # Errors
    /// As for [`of`](Self::of).
    pub fn fill(&mut self, device: &Device, rows: &[&[u32]]) -> Result<(), DeviceError> {
        self.starts.fill(device, starts(rows))?;
        self.ids
            .fill(device, rows.iter().copied().flatten().copied())
    }

    /// Number of lists.
    pub fn num_rows(&self) -> usize {
        self.starts.len().saturating_sub(1)
    }

    /// The ids of row `row`.
    pub fn row(&self, row: usize) -> &[u32] {
        let [start, end] = [row, row + 1].map(|i| self.starts.values()[i] as usize);
        &self.ids.values()[start..end]
    }

    /// Where each row's ids begin, and the end: `[num_rows + 1]`.
    pub(super) fn starts(&self) -> &Staged<u32> {
        &self.starts
    }

    /// All ids, row by row.
    pub(super) fn ids(&self) -> &Staged<u32> {
        &self.ids
    }
}

fn starts(rows: &[&[u32]]) -> impl Iterator<Item = u32> {
    let ends = rows.iter().scan(0, |end, ids| {
        *end += ids.len() as u32;
        Some(*end)
    });
    std::iter::once(0).chain(ends)
}
