//! `wgmma.mma_async`: a warpgroup multiplies 64 rows by up to 256 columns that lie in shared memory.
//!
//! Each of the four warps holds 16 of the rows, so a warp's part needs no other warp. Operands in shared memory consist
//! of core matrices, 8 rows of 16 bytes along K, which are just what a register of `mma.sync` holds: the sums are
//! those of [`super::mma`], bit for bit.

use super::mma::{Format, multiply_add_groups};
use super::{Lanes, WARP_LANES};

/// A 64-bit descriptor of an operand in shared memory whose rows run along K.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    start: u32,
    along_k: u32,
    across: u32,
    swizzle: Swizzle,
}

/// How 16-byte chunks are permuted within spans of 256, 512 or 1024 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Swizzle {
    None,
    Bytes32,
    Bytes64,
    Bytes128,
}

impl Swizzle {
    /// Where what belongs at `address` lies: chunk bits from bit 4 up are flipped by the bits from bit 7 up.
    fn apply(self, address: u32) -> u32 {
        let chunk_bits = match self {
            Swizzle::None => 0,
            Swizzle::Bytes32 => 0b001,
            Swizzle::Bytes64 => 0b011,
            Swizzle::Bytes128 => 0b111,
        };
        address ^ (address >> 7 & chunk_bits) << 4
    }

    /// Bytes from a row to the next of a group of eight.
    fn row_bytes(self) -> u32 {
        match self {
            Swizzle::None => 16,
            Swizzle::Bytes32 => 32,
            Swizzle::Bytes64 => 64,
            Swizzle::Bytes128 => 128,
        }
    }
}

impl Descriptor {
    /// Reads the fields; the error says which of them no instruction takes.
    pub fn new(bits: u64) -> Result<Self, String> {
        let field = |at: u32| ((bits >> at & 0x3fff) as u32) << 4;
        let base_offset = bits >> 49 & 7;
        if base_offset != 0 {
            return Err(format!(
                "matrix descriptor {bits:#018x} has base offset {base_offset}"
            ));
        }
        Ok(Descriptor {
            start: field(0),
            along_k: field(16),
            across: field(32),
            swizzle: match bits >> 62 {
                0 => Swizzle::None,
                1 => Swizzle::Bytes128,
                2 => Swizzle::Bytes64,
                _ => Swizzle::Bytes32,
            },
        })
    }

    /// The address of row `row` of a core matrix, by its place across K and its `half` along K.
    fn row_address(&self, group: u32, half: u32, row: u32) -> u32 {
        let chunk = match self.swizzle {
            Swizzle::None => half * self.along_k,
            _ => half * 16,
        };
        let linear = self.start + group * self.across + row * self.swizzle.row_bytes() + chunk;
        self.swizzle.apply(linear)
    }

    /// Addresses of all rows of these core matrices across K, 16 bytes each.
    pub fn rows(&self, groups: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
        let places = groups.flat_map(|group| (0..16).map(move |place| (group, place)));
        places.map(|(group, place)| self.row_address(group, place / 8, place % 8))
    }

    /// The 32 words of a core matrix.
    fn core_matrix<E>(
        &self,
        group: u32,
        half: u32,
        read: &mut impl FnMut(u32) -> Result<[u8; 16], E>,
    ) -> Result<Lanes, E> {
        let mut words = [0; WARP_LANES];
        for (row, words) in words.chunks_exact_mut(4).enumerate() {
            let bytes = read(self.row_address(group, half, row as u32))?;
            for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
                *word = u32::from_le_bytes(bytes.try_into().expect("four bytes"));
            }
        }
        Ok(words)
    }
}

/// Where the left operand lies.
#[derive(Debug, Clone, Copy)]
pub enum LeftOperand<'a> {
    /// In the warp's registers, as for `mma.sync`.
    Registers(&'a [Lanes; 4]),
    /// In shared memory, 64 rows.
    Shared(Descriptor),
}

/// A warp's part of the instruction: adds to its sums, four registers for every eight columns.
///
/// `warp` is the warp's place in its group. `adds` is the scale-d operand: without it, what `sums` holds does not count.
/// `read` gives the 16 bytes at an address of the block's own shared memory.
pub fn multiply_add<E>(
    format: Format,
    warp: u32,
    left: LeftOperand<'_>,
    right: &Descriptor,
    adds: bool,
    sums: &mut [[Lanes; 4]],
    mut read: impl FnMut(u32) -> Result<[u8; 16], E>,
) -> Result<(), E> {
    let mut loaded = [[0; WARP_LANES]; 4];
    let left = match left {
        LeftOperand::Registers(registers) => registers,
        LeftOperand::Shared(descriptor) => {
            for (register, words) in loaded.iter_mut().enumerate() {
                let (group, half) = (2 * warp + register as u32 % 2, register as u32 / 2);
                *words = descriptor.core_matrix(group, half, &mut read)?;
            }
            &loaded
        }
    };
    let mut rights = Vec::with_capacity(sums.len());
    for group in 0..sums.len() as u32 {
        rights.push([
            right.core_matrix(group, 0, &mut read)?,
            right.core_matrix(group, 1, &mut read)?,
        ]);
    }
    if !adds {
        sums.fill([[0; WARP_LANES]; 4]);
    }
    multiply_add_groups(format, left, &rights, sums);
    Ok(())
}

#[cfg(test)]
#[path = "wgmma_tests.rs"]
mod tests;
