//! Holds `wgmma` against `mma` with operands laid out in shared memory from the ISA's pictures of core matrices.

use super::*;
use crate::matrix::mma;
use crate::order::{Order, Policy};

const COLUMNS: u32 = 24;
const NO_MEMORY: &str = "read outside of shared memory";

/// An operand of `rows` rows of 32 bytes, and its bytes in shared memory.
struct Operand {
    rows: Vec<[u8; 32]>,
    memory: Vec<u8>,
    descriptor: u64,
}

fn descriptor(start: u32, along_k: u32, across: u32, swizzle: u64) -> u64 {
    u64::from(start >> 4)
        | u64::from(along_k >> 4) << 16
        | u64::from(across >> 4) << 32
        | swizzle << 62
}

fn draw_rows(count: u32, seed: u64, format: Format) -> Vec<[u8; 32]> {
    let mut order = Order::new(Policy::Random, seed);
    let mut row = || {
        let mut bytes: [u8; 32] = std::array::from_fn(|_| order.below(256) as u8);
        if format != Format::S8 {
            // Exponents near one, so that sums are of many terms.
            bytes
                .chunks_exact_mut(2)
                .for_each(|pair| pair[1] = pair[1] & 0x81 | 0x3e);
        }
        bytes
    };
    (0..count).map(|_| row()).collect()
}

/// Core matrices of 8 rows of 16 bytes: those of the first half of K, then those of the other.
fn plain(rows: Vec<[u8; 32]>, start: u32) -> Operand {
    let half_bytes = rows.len() as u32 * 16;
    let mut memory = vec![0; (start + 2 * half_bytes) as usize];
    for (row, bytes) in rows.iter().enumerate() {
        for half in 0..2 {
            let at = start as usize + half * half_bytes as usize + row * 16;
            memory[at..at + 16].copy_from_slice(&bytes[16 * half..16 * half + 16]);
        }
    }
    Operand {
        rows,
        memory,
        descriptor: descriptor(start, half_bytes, 128, 0),
    }
}

/// Rows of 128, 64 or 32 bytes of which the operand is the pair of chunks `pair`, permuted within groups of eight rows.
fn swizzled(rows: Vec<[u8; 32]>, row_chunks: usize, pair: usize) -> Operand {
    let start = 1024;
    let mut memory = vec![0xee; start + rows.len() * row_chunks * 16];
    for (row, bytes) in rows.iter().enumerate() {
        for half in 0..2 {
            let flips = match row_chunks {
                8 => row % 8,
                4 => row / 2 % 4,
                _ => row / 4 % 2,
            };
            let chunk = (2 * pair + half) ^ flips;
            let at = start + (row * row_chunks + chunk) * 16;
            memory[at..at + 16].copy_from_slice(&bytes[16 * half..16 * half + 16]);
        }
    }
    let swizzle = match row_chunks {
        8 => 1,
        4 => 2,
        _ => 3,
    };
    let across = 8 * row_chunks as u32 * 16;
    Operand {
        rows,
        memory,
        descriptor: descriptor((start + 32 * pair) as u32, 16, across, swizzle),
    }
}

/// A register of eight rows' words in one half of their 32 bytes.
fn register(rows: &[[u8; 32]], half: usize) -> Lanes {
    std::array::from_fn(|lane| {
        let at = 16 * half + lane % 4 * 4;
        u32::from_le_bytes(rows[lane / 4][at..at + 4].try_into().expect("four bytes"))
    })
}

/// Runs all four warps; `left` and `right` are read through one address space, `right` behind `left`.
fn run(
    format: Format,
    left: &Operand,
    right: &Operand,
    in_registers: bool,
    adds: bool,
) -> Vec<Vec<[Lanes; 4]>> {
    let offset = left.memory.len().next_multiple_of(1024);
    let mut memory = left.memory.clone();
    memory.resize(offset, 0);
    memory.extend(&right.memory);
    let read = |address: u32| {
        let bytes = memory
            .get(address as usize..address as usize + 16)
            .ok_or(NO_MEMORY)?;
        Ok::<[u8; 16], &str>(bytes.try_into().expect("16 bytes"))
    };
    let right_descriptor = Descriptor::new(right.descriptor + (offset as u64 >> 4)).expect("valid");
    (0..4u32)
        .map(|warp| {
            let mut sums = vec![
                [[if format == Format::S8 {
                    7
                } else {
                    1f32.to_bits()
                }; 32]; 4];
                3
            ];
            let rows = &left.rows[16 * warp as usize..];
            let registers = [(0, 0), (8, 0), (0, 1), (8, 1)]
                .map(|(first, half)| register(&rows[first..], half));
            let operand = match in_registers {
                true => LeftOperand::Registers(&registers),
                false => LeftOperand::Shared(Descriptor::new(left.descriptor).expect("valid")),
            };
            multiply_add(
                format,
                warp,
                operand,
                &right_descriptor,
                adds,
                &mut sums,
                read,
            )
            .expect("in bounds");
            sums
        })
        .collect()
}

fn expected(format: Format, left: &Operand, right: &Operand, adds: bool) -> Vec<Vec<[Lanes; 4]>> {
    let start = match (adds, format) {
        (false, _) => 0,
        (true, Format::S8) => 7,
        (true, _) => 1f32.to_bits(),
    };
    let block = |rows: &[[u8; 32]], columns: &[[u8; 32]]| {
        let a =
            [(0, 0), (8, 0), (0, 1), (8, 1)].map(|(first, half)| register(&rows[first..], half));
        let b = [0, 1].map(|half| register(columns, half));
        mma::multiply_add(format, &a, &b, &[[start; 32]; 4])
    };
    let warp = |rows: &[[u8; 32]]| {
        right
            .rows
            .chunks_exact(8)
            .map(|columns| block(rows, columns))
            .collect()
    };
    left.rows.chunks_exact(16).map(warp).collect()
}

#[test]
fn operands_without_swizzle_are_core_matrices_in_two_strides() {
    for format in [Format::Bf16, Format::Tf32, Format::S8] {
        let left = plain(draw_rows(64, 1, format), 48);
        let right = plain(draw_rows(COLUMNS, 2, format), 128);
        for adds in [true, false] {
            for in_registers in [true, false] {
                let found = run(format, &left, &right, in_registers, adds);
                assert_eq!(
                    found,
                    expected(format, &left, &right, adds),
                    "{format:?} {adds} {in_registers}"
                );
            }
        }
    }
}

#[test]
fn swizzled_rows_are_found_wherever_k_starts() {
    for row_chunks in [2, 4, 8] {
        for pair in 0..row_chunks / 2 {
            let left = swizzled(draw_rows(64, 3, Format::Bf16), row_chunks, pair);
            let right = swizzled(draw_rows(COLUMNS, 4, Format::Bf16), row_chunks, pair);
            let found = run(Format::Bf16, &left, &right, false, true);
            assert_eq!(
                found,
                expected(Format::Bf16, &left, &right, true),
                "{row_chunks} {pair}"
            );
        }
    }
}

#[test]
fn a_failed_read_ends_the_instruction() {
    let left = plain(draw_rows(64, 1, Format::S8), 0);
    let far = Descriptor::new(descriptor(0x3_fff0, 128, 128, 0)).expect("valid");
    let registers = [0, 1, 0, 1].map(|half| register(&left.rows, half));
    let found = multiply_add(
        Format::S8,
        0,
        LeftOperand::Registers(&registers),
        &far,
        true,
        &mut [[[0; 32]; 4]],
        |address| {
            if address < 0x3_fff0 {
                Ok([0; 16])
            } else {
                Err(address)
            }
        },
    );
    assert_eq!(found, Err(0x3_fff0));
}

#[test]
fn base_offsets_are_refused() {
    assert!(Descriptor::new(1 << 49).is_err());
}

#[test]
fn rows_are_those_that_a_product_reads() {
    for operand in [
        plain(draw_rows(COLUMNS, 2, Format::S8), 128),
        swizzled(draw_rows(COLUMNS, 2, Format::S8), 8, 1),
    ] {
        let descriptor = Descriptor::new(operand.descriptor).expect("valid");
        let mut read = Vec::new();
        let registers = [[0; 32]; 4];
        let mut sums = vec![[[0; 32]; 4]; 3];
        let left = LeftOperand::Registers(&registers);
        let result = multiply_add(
            Format::S8,
            0,
            left,
            &descriptor,
            true,
            &mut sums,
            |address| {
                read.push(address);
                Ok::<_, ()>([0; 16])
            },
        );
        assert_eq!(result, Ok(()));
        assert!(descriptor.rows(0..COLUMNS / 8).eq(read));
    }
}
