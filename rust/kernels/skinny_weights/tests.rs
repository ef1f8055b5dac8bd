//! The layout against the codec's and by counting.

use super::*;

#[test]
fn slices_cover_k_in_order_and_fit_a_warp() {
    for in_features in [1, 63, 64, 65, 640, 2560, 2561, 5120, 6144, 17408, 28672] {
        for block_shared_bytes in [101_376, 166_912, 232_448] {
            let map = SliceMap::new(in_features, block_shared_bytes);
            assert!(map.num_octets.is_power_of_two());
            assert!(map.slice_tiles() <= MAX_SLICE_TILES, "{in_features}");
            let mut next = 0;
            for slice in 0..map.num_slices() {
                let span = map.span(slice);
                assert_eq!(span.start, next, "{in_features}");
                assert!(span.len() <= map.slice_tiles());
                next = span.end;
            }
            assert_eq!(next, in_features.div_ceil(TILE_COLUMNS));
        }
    }
}

#[test]
fn every_place_has_one_lane_and_slot() {
    let mut seen = [[false; TILE_COLUMNS]; TILE_CHANNELS];
    for lane in 0..WARP_LANES {
        for slot in 0..32 {
            let (channel, column) = place(lane, slot);
            assert!(!std::mem::replace(&mut seen[channel][column], true));
            let escape = EscapedWeight {
                channel,
                column,
                bits: 0x1234,
            };
            let want = (lane as u32) << 21 | (slot as u32) << 16 | 0x1234;
            assert_eq!(entry(&escape), want);
        }
    }
}

#[test]
fn planes_hold_the_bytes_of_the_codec() {
    // `weights::w12` keeps the same planes in files; its own words, from its own code.
    let (n, k) = (16, 64);
    let weights: Vec<half::bf16> = (0..n * k)
        .map(|i| half::bf16::from_f32(((i * 7919 % 1009) as f32 - 504.5) * 1e-3))
        .collect();
    let crate::weights::w12::Encoding::W12(matrix) = crate::weights::w12::encode(&weights, n, k)
    else {
        panic!("the matrix pays");
    };
    let planes = matrix.planes();
    let mut codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
    for (channel, codes) in codes.iter_mut().enumerate() {
        for (column, code) in codes.iter_mut().enumerate() {
            let bits = weights[channel * k + column].to_bits();
            let base = u16::from(planes.base[channel]) << 7;
            let magnitude = (bits & 0x7FFF).wrapping_sub(base);
            *code = (bits & 0x8000) | if magnitude < 0x800 { magnitude } else { 0 };
        }
    }
    let (mut plane8, mut plane4) = (vec![0; PLANE8_BYTES], vec![0; PLANE4_BYTES]);
    write_planes(&codes, &mut plane8, &mut plane4);
    assert_eq!((&plane8[..], &plane4[..]), (planes.plane8, planes.plane4));
}
