//! Entries of weights outside their channel's window.

use super::planes::{FRAGMENT_SLOTS, TILE_COLUMNS, position};
use super::window::{exponent, is_inside};

/// Lanes of a warp.
const LANES: u32 = 32;
/// Slots of a lane in one super-tile.
const SLOTS: u32 = 32;

/// One escape of a super-tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Escape {
    /// Lane, 0..32.
    lane: u32,
    /// Slot of the lane, 0..32.
    slot: u32,
    /// The weight's own bits.
    pub(super) bits: u16,
}

impl Escape {
    /// Reads an entry; the spare bits are not looked at.
    pub(super) fn from_entry(entry: u32) -> Self {
        Self {
            lane: (entry >> 21) % LANES,
            slot: (entry >> 16) % SLOTS,
            bits: entry as u16,
        }
    }

    /// The entry as it lies in a file.
    pub(super) fn to_entry(self) -> u32 {
        self.lane << 21 | self.slot << 16 | u32::from(self.bits)
    }

    /// Channel inside the super-tile.
    pub(super) fn channel(self) -> usize {
        position(self.lane as usize, self.slot as usize).0
    }

    /// Column inside the super-tile.
    pub(super) fn column(self) -> usize {
        position(self.lane as usize, self.slot as usize).1
    }
}

/// Appends the escapes of the super-tile that starts at column `first` of up to 16 rows, in order of lane and slot.
pub(super) fn collect(
    rows: &[u16],
    in_features: usize,
    first: usize,
    bases: &[u8],
    entries: &mut Vec<u32>,
) {
    let before = entries.len();
    for (channel, (row, &base)) in rows.chunks_exact(in_features).zip(bases).enumerate() {
        let columns = row[first..].iter().take(TILE_COLUMNS).enumerate();
        for (column, &bits) in columns {
            if !is_inside(exponent(bits), base) {
                entries.push(escape_at(channel, column, bits).to_entry());
            }
        }
    }
    // Lane and slot are the entry's high bits, and each pair occurs once.
    entries[before..].sort_unstable();
}

/// The inverse of [`position`].
fn escape_at(channel: usize, column: usize, bits: u16) -> Escape {
    let (g, t) = (channel % 8, column / 16);
    let (fragment, within) = (column % 16 / 4, column % 4);
    let slot = FRAGMENT_SLOTS * fragment + 4 * (within / 2) + 2 * (channel / 8) + within % 2;
    Escape {
        lane: (4 * g + t) as u32,
        slot: slot as u32,
        bits,
    }
}
