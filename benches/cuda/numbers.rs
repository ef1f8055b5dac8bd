//! Inputs of the benches: numbers without a pattern, and trees of a given size.

use specpilot_rs::device::{Buffer, Device};

/// `len` values in -scale..scale.
pub fn filled(device: &Device, len: usize, scale: f32) -> Buffer<f32> {
    let value = |i: u32| (i.wrapping_mul(0x9E37_79B9) ^ 0x5bd1_e995).wrapping_mul(0x85EB_CA6B);
    let values: Vec<f32> = (0..len as u32)
        .map(|i| value(i) as i32 as f32 / 2_147_483_648.0 * scale)
        .collect();
    device.buffer_of(&values).expect("room for inputs")
}

/// Parents of a tree: a chain of `num_levels` rows, the others hung along it.
pub fn tree(num_rows: usize, num_levels: usize) -> Vec<Option<usize>> {
    (0..num_rows)
        .map(|row| match row < num_levels {
            true => row.checked_sub(1),
            false => Some(row * 7 % (num_levels - 1)),
        })
        .collect()
}
