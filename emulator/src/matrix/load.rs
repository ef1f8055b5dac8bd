//! `ldmatrix`: rows of 16 bytes that lanes point at, dealt out as matrices of 8 x 8 numbers of 16 bits.

use super::{Lanes, WARP_LANES};

/// Four matrices; `rows[l]` are the bytes at the address of lane `l`, row `l % 8` of matrix `l / 8`.
///
/// Lane `l` of register `m` gets the numbers `2 (l % 4)` and the next of row `l / 4` of matrix `m`, or with
/// `is_transposed` of column `l / 4`.
pub fn load_matrices(rows: &[[u8; 16]; WARP_LANES], is_transposed: bool) -> [Lanes; 4] {
    let number = |matrix: usize, row: usize, column: usize| {
        let bytes = &rows[matrix * 8 + row];
        u32::from(u16::from_le_bytes([
            bytes[2 * column],
            bytes[2 * column + 1],
        ]))
    };
    std::array::from_fn(|matrix| {
        std::array::from_fn(|lane| {
            let (line, first) = (lane / 4, lane % 4 * 2);
            let pair = [first, first + 1].map(|at| match is_transposed {
                false => number(matrix, line, at),
                true => number(matrix, at, line),
            });
            pair[0] | pair[1] << 16
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Element (row, column) of matrix `m` is m * 64 + row * 8 + column, so a register names what it was loaded from.
    fn numbered_rows() -> [[u8; 16]; WARP_LANES] {
        let mut rows = [[0; 16]; WARP_LANES];
        for (place, bytes) in rows
            .iter_mut()
            .flat_map(|row| row.chunks_exact_mut(2))
            .enumerate()
        {
            bytes.copy_from_slice(&(place as u16).to_le_bytes());
        }
        rows
    }

    #[test]
    fn rows_go_to_groups_of_four_lanes() {
        let registers = load_matrices(&numbered_rows(), false);
        for (place, pair) in registers.iter().flatten().enumerate() {
            assert_eq!(*pair, (2 * place as u32) | (2 * place as u32 + 1) << 16);
        }
    }

    #[test]
    fn transposing_swaps_row_and_column() {
        let registers = load_matrices(&numbered_rows(), true);
        assert_eq!(registers[0][0], 8 << 16);
        assert_eq!(registers[0][1], 16 | 24 << 16);
        assert_eq!(registers[0][4], 1 | 9 << 16);
        assert_eq!(registers[3][31], (192 + 55) | (192 + 63) << 16);
        // Every number arrives once.
        let mut seen: Vec<u32> = (registers.iter().flatten())
            .flat_map(|pair| [pair & 0xffff, pair >> 16])
            .collect();
        seen.sort_unstable();
        assert!(seen.iter().copied().eq(0..256));
    }
}
