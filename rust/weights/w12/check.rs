//! Reading the parts of a matrix that came from a file: nothing is believed.

use super::escapes::Escape;
use super::planes::{TILE_CHANNELS, TILE_COLUMNS, clamped_code};
use super::window::{MAX_BASE, MIN_BASE, can_escape, exponent, is_inside};
use super::{Grid, PADDING_BASE, PLANE4_TILE_BYTES, PLANE8_TILE_BYTES, W12Matrix, W12Planes};
use crate::error::W12Error;

impl W12Matrix {
    /// Takes the parts of a matrix `[out_features, in_features]` as a file holds them. What passes decodes without a panic
    /// to *some* weights; whether they are the checkpoint's, only a checksum of the decoded bits can tell.
    ///
    /// # Errors
    /// [`W12Error`] naming the part when lengths, counts, bases, escapes or padding are not what [`super::encode`] makes.
    pub fn from_planes(
        out_features: usize,
        in_features: usize,
        parts: W12Planes<'_>,
    ) -> Result<Self, W12Error> {
        let grid = check_lengths(out_features, in_features, &parts)?;
        check_bases(out_features, parts.base)?;
        let matrix = Self {
            out_features,
            in_features,
            plane8: parts.plane8.to_vec(),
            plane4: parts.plane4.to_vec(),
            base: parts.base.to_vec(),
            counts: parts.counts.to_vec(),
            escapes: parts.escapes.to_vec(),
        };
        matrix.check_tiles(grid)?;
        Ok(matrix)
    }

    /// Checks escapes and padding, super-tile by super-tile.
    fn check_tiles(&self, grid: Grid) -> Result<(), W12Error> {
        let mut rest = &self.escapes[..];
        let mut codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
        for (tile, &count) in self.counts.iter().enumerate() {
            let (n_tile, k_tile) = (tile / grid.k_tiles, tile % grid.k_tiles);
            let channels = TILE_CHANNELS.min(self.out_features - n_tile * TILE_CHANNELS);
            let columns = TILE_COLUMNS.min(self.in_features - k_tile * TILE_COLUMNS);
            let is_padded = channels < TILE_CHANNELS || columns < TILE_COLUMNS;
            if count == 0 && !is_padded {
                continue;
            }
            self.unpack_tile(tile, &mut codes);
            let is_blank = codes.iter().enumerate().all(|(channel, codes)| {
                let used = if channel < channels { columns } else { 0 };
                codes[used..].iter().all(|&code| code == 0)
            });
            if !is_blank {
                return Err(W12Error::Padding { tile });
            }
            let (own, later) = rest.split_at(usize::from(count));
            rest = later;
            let mut last = None;
            for &entry in own {
                let escape = Escape::from_entry(entry);
                let (channel, column) = (escape.channel(), escape.column());
                let refused = |reason| W12Error::Escape {
                    tile,
                    entry,
                    reason,
                };
                if entry >> 26 != 0 {
                    return Err(refused("spare bits are set"));
                }
                if last.is_some_and(|last| last >= entry >> 16) {
                    return Err(refused("entries are not in ascending order"));
                }
                last = Some(entry >> 16);
                if channel >= channels || column >= columns {
                    return Err(refused("it lies in the padding"));
                }
                let base = self.base[n_tile * TILE_CHANNELS + channel];
                if is_inside(exponent(escape.bits), base) {
                    return Err(refused("the weight has a code in its window"));
                }
                if !can_escape(escape.bits, base) {
                    return Err(refused("the weight cannot be rescaled"));
                }
                if codes[channel][column] != clamped_code(escape.bits, base) {
                    return Err(refused("the planes hold another code than the nearest"));
                }
            }
        }
        Ok(())
    }
}

/// Refuses parts whose lengths do not follow from the shape and from each other.
fn check_lengths(
    out_features: usize,
    in_features: usize,
    parts: &W12Planes<'_>,
) -> Result<Grid, W12Error> {
    let grid = Grid::new(out_features, in_features);
    let fits = grid
        .n_tiles
        .checked_mul(grid.k_tiles)
        .and_then(|tiles| tiles.checked_mul(TILE_CHANNELS * TILE_COLUMNS * size_of::<u16>()))
        .is_some_and(|bytes| bytes > 0 && isize::try_from(bytes).is_ok());
    if !fits {
        return Err(W12Error::Shape {
            out_features,
            in_features,
        });
    }
    let num_tiles = grid.num_tiles();
    for (part, got, expected) in [
        ("plane8", parts.plane8.len(), num_tiles * PLANE8_TILE_BYTES),
        ("plane4", parts.plane4.len(), num_tiles * PLANE4_TILE_BYTES),
        ("base", parts.base.len(), grid.n_tiles * TILE_CHANNELS),
        ("counts", parts.counts.len(), num_tiles),
    ] {
        if got != expected {
            return Err(W12Error::Length {
                part,
                expected,
                got,
            });
        }
    }
    const TILE_WEIGHTS: u16 = (TILE_CHANNELS * TILE_COLUMNS) as u16;
    if let Some(tile) = parts.counts.iter().position(|&c| c > TILE_WEIGHTS) {
        return Err(W12Error::Count {
            tile,
            expected: TILE_WEIGHTS,
            got: parts.counts[tile],
        });
    }
    let expected = parts.counts.iter().map(|&count| usize::from(count)).sum();
    if parts.escapes.len() != expected {
        return Err(W12Error::Length {
            part: "escapes",
            expected,
            got: parts.escapes.len(),
        });
    }
    Ok(grid)
}

/// Refuses bases out of range, and padding channels with another than theirs.
fn check_bases(out_features: usize, bases: &[u8]) -> Result<(), W12Error> {
    for (channel, &got) in bases.iter().enumerate() {
        let range = if channel < out_features {
            MIN_BASE..=MAX_BASE
        } else {
            PADDING_BASE..=PADDING_BASE
        };
        if !range.contains(&got) {
            return Err(W12Error::Base {
                channel,
                expected: range,
                got,
            });
        }
    }
    Ok(())
}
