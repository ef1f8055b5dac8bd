//! How many positions a drafter's context holds, and the rules by which it grows.
//!
//! Verified rows append and stay; scratch rows, at most one path of them, append behind and are dropped together.

use super::{ContextRows, DraftAnchor, Standing};
use crate::error::{DrafterError, KernelError, Result};
use crate::kernels::paths::MAX_PATH_ROWS;

/// Length of one slot's context.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ContextLength {
    verified: usize,
    len: usize,
}

impl ContextLength {
    pub(super) fn len(self) -> usize {
        self.len
    }

    pub(super) fn verified(self) -> usize {
        self.verified
    }

    pub(super) fn rollback(&mut self) {
        self.len = self.verified;
    }

    pub(super) fn grow(&mut self, num_rows: usize, standing: Standing) {
        self.len += num_rows;
        if standing == Standing::Verified {
            self.verified = self.len;
        }
    }

    /// Refuses rows that do not start where the context ends, and verified ones behind scratch.
    pub(super) fn check_extends(self, rows: &ContextRows<'_>) -> Result<()> {
        let expected = match rows.standing {
            Standing::Verified => self.verified,
            Standing::Scratch => self.len,
        };
        if rows.first_position != expected || expected != self.len {
            return Err(gap(rows.slot, expected, rows.first_position));
        }
        let got = self.len - self.verified + rows.rows.len();
        match rows.standing {
            Standing::Scratch if got > MAX_PATH_ROWS => Err(KernelError::PathTooLong {
                expected: MAX_PATH_ROWS,
                got,
            }
            .into()),
            _ => Ok(()),
        }
    }

    /// Refuses an anchor that the context does not end right before.
    pub(super) fn check_ends_before(self, anchor: &DraftAnchor) -> Result<()> {
        match self.len == anchor.position {
            true => Ok(()),
            false => Err(gap(anchor.slot, self.len, anchor.position)),
        }
    }
}

fn gap(slot: usize, expected: usize, got: usize) -> crate::error::Error {
    DrafterError::ContextGap {
        slot,
        expected,
        got,
    }
    .into()
}
