//! Round trips over every kind of channel, the reasons to keep BF16, and parts that no encoder wrote.

use proptest::prelude::*;

use super::*;

fn matrix_of(encoding: Encoding) -> W12Matrix {
    match encoding {
        Encoding::W12(matrix) => matrix,
        Encoding::KeepBf16(reason) => panic!("kept as BF16: {reason}"),
    }
}

fn from_bits(bits: &[u16]) -> Vec<bf16> {
    bits.iter().copied().map(bf16::from_bits).collect()
}

/// Deterministic noise.
fn noise(i: usize, seed: u32) -> u32 {
    (i as u32 ^ seed)
        .wrapping_mul(0x9E37_79B9)
        .rotate_left(15)
        .wrapping_mul(0x85EB_CA6B)
        .rotate_left(13)
        .wrapping_mul(0xC2B2_AE35)
}

/// Channels whose windows start at `base`, all codes in use, with escapes of exponents around it at `escape_rate`.
fn weights(n: usize, k: usize, base: u8, escape_rate: f64, seed: u32) -> Vec<bf16> {
    let bits = (0..n * k).map(|i| {
        let r = noise(i, seed);
        let mut exponent = u32::from(base) + (r >> 8) % 16;
        let escapes = f64::from(noise(i, seed ^ 0x5555)) < escape_rate * f64::from(u32::MAX);
        if escapes {
            exponent = match r >> 12 & 3 {
                0 => return (r & 0x8000) as u16,
                1 => (u32::from(base) + 16 + (r >> 14) % 20).min(254),
                _ => u32::from(base).saturating_sub(1 + (r >> 14) % 20).max(1),
            };
        }
        ((r & 0x8000) | exponent << 7 | (r & 0x7F)) as u16
    });
    from_bits(&bits.collect::<Vec<_>>())
}

fn shapes() -> impl Strategy<Value = (usize, usize)> {
    // Padding of every kind; wide enough to pay.
    (1..70_usize, 1..400_usize)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn decoding_gives_the_bits_back(
        (n, k) in shapes(),
        base in 1..=239_u8,
        escape_rate in prop_oneof![Just(0.0), 0.0..0.009],
        seed in any::<u32>(),
    ) {
        let source = weights(n, k, base, escape_rate, seed);
        match encode(&source, n, k) {
            Encoding::W12(matrix) => {
                let mut in_order = Vec::new();
                matrix.decode_in_order(|rows| in_order.extend_from_slice(rows));
                prop_assert!(in_order == source);
                prop_assert_eq!(matrix.decode(), source);
                let parts = matrix.planes();
                prop_assert_eq!(W12Matrix::from_planes(n, k, parts), Ok(matrix.clone()));
                let stats = matrix.stats();
                let bytes = parts.plane8.len()
                    + parts.plane4.len()
                    + parts.base.len()
                    + 2 * parts.counts.len()
                    + 4 * parts.escapes.len();
                prop_assert_eq!(stats.num_bytes, bytes);
                prop_assert!((stats.num_bytes as f64) < 0.9 * stats.source_bytes as f64);
            }
            Encoding::KeepBf16(KeepReason::DoesNotPay { num_bytes, source_bytes }) => {
                prop_assert!(num_bytes as f64 >= 0.9 * source_bytes as f64);
            }
            Encoding::KeepBf16(KeepReason::TooManyEscapes { num_escapes, num_weights }) => {
                prop_assert_eq!(num_weights, n * k);
                prop_assert!(num_escapes * 100 > num_weights);
            }
            Encoding::KeepBf16(reason) => prop_assert!(false, "{}", reason),
        }
    }

    #[test]
    fn any_bits_at_all_are_encoded_or_refused_for_a_reason(
        (n, k) in (1..40_usize, 1..200_usize),
        seed in any::<u32>(),
        mask in any::<u16>(),
    ) {
        let bits: Vec<u16> = (0..n * k).map(|i| noise(i, seed) as u16 & mask).collect();
        let source = from_bits(&bits);
        if let Encoding::W12(matrix) = encode(&source, n, k) {
            prop_assert!(matrix.decode() == source);
        }
    }

    #[test]
    fn the_number_of_threads_changes_nothing(seed in any::<u32>()) {
        let source = weights(160, 384, 100, 0.005, seed);
        let on = |num_threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads).build();
            pool.expect("threads").install(|| encode(&source, 160, 384))
        };
        prop_assert_eq!(on(1), on(3));
    }
}

#[test]
fn window_is_the_highest_of_the_fullest() {
    let row = |exponents: &[u16]| -> Vec<u16> { exponents.iter().map(|e| e << 7).collect() };
    let base = |exponents: &[u16]| window::choose(&row(exponents)).map(|window| window.base);
    // All equal: the highest window that holds the exponent starts at it, within the clamps.
    assert_eq!(base(&[120; 9]), Ok(120));
    assert_eq!(base(&[1, 1]), Ok(1));
    assert_eq!(base(&[254, 254]), Ok(239));
    assert_eq!(base(&[240]), Ok(239));
    // 100..=115 to 105..=120 hold two each: the highest.
    assert_eq!(base(&[100, 105, 116]), Ok(105));
    assert_eq!(base(&[100, 100, 116]), Ok(100));
    // Two equal masses too far apart for one window.
    assert_eq!(base(&[100, 130]), Ok(130));
    // Nothing normal.
    assert_eq!(base(&[0; 5]), Ok(1));
    assert_eq!(base(&[]), Ok(1));
}

#[test]
fn windows_at_both_ends_hold_their_extremes() {
    for (base, extreme) in [(1, 0x0080_u16), (239, 0x7F7F)] {
        let mut source = weights(16, 64, base, 0.0, 3);
        source[5] = bf16::from_bits(extreme);
        source[6] = bf16::from_bits(extreme | 0x8000);
        source[7] = bf16::from_bits(0x8000);
        let matrix = matrix_of(encode(&source, 16, 64));
        assert_eq!(matrix.decode(), source);
        assert_eq!(matrix.planes().escapes.len(), 1);
    }
}

/// A matrix of 16 rows wide enough that `tile` may be escapes through and through.
fn with_tile_of_escapes(num_escapes: usize) -> (Vec<bf16>, W12Matrix) {
    let k = 128 * 1024;
    let mut source = weights(16, k, 100, 0.0, 11);
    for i in 0..num_escapes {
        source[(i % 16) * k + 64 + i / 16] = bf16::from_bits(90 << 7 | (i % 128) as u16);
    }
    let matrix = matrix_of(encode(&source, 16, k));
    (source, matrix)
}

#[test]
fn a_tile_may_be_all_escapes() {
    for num_escapes in [0, 1, 1023, 1024] {
        let (source, matrix) = with_tile_of_escapes(num_escapes);
        assert_eq!(matrix.decode(), source);
        assert_eq!(usize::from(matrix.planes().counts[1]), num_escapes);
        assert_eq!(matrix.stats().num_escapes, num_escapes);
    }
}

#[test]
fn every_slot_has_its_own_place() {
    let mut seen = [[false; TILE_COLUMNS]; TILE_CHANNELS];
    let mut codes = [[0; TILE_COLUMNS]; TILE_CHANNELS];
    for lane in 0..32 {
        for slot in 0..32 {
            let (channel, column) = planes::position(lane, slot);
            assert!(!std::mem::replace(&mut seen[channel][column], true));
            codes[channel][column] = 0x87FF;
            let (mut plane8, mut plane4) = ([0; PLANE8_TILE_BYTES], [0; PLANE4_TILE_BYTES]);
            planes::pack_tile(&codes, &mut plane8, &mut plane4);
            let bits = plane8.iter().chain(&plane4).map(|byte| byte.count_ones());
            assert_eq!(bits.sum::<u32>(), 12);
            codes[channel][column] = 0;
        }
    }
}

#[test]
fn matrices_that_cannot_be_rescaled_stay_bf16() {
    let with = |bits: u16| {
        let mut source = weights(16, 640, 130, 0.0, 1);
        source[640 + 3] = bf16::from_bits(bits);
        encode(&source, 16, 640)
    };
    for bits in [0x7F80, 0xFF80, 0x7FC0, 0x7F81] {
        let reason = KeepReason::NotFinite { channel: 1 };
        assert_eq!(with(bits), Encoding::KeepBf16(reason));
    }
    for (bits, exponent) in [(0x0001, 0), (0x807F, 0), (18 << 7, 18), (1 << 7, 1)] {
        let reason = KeepReason::EscapeOutOfRange {
            channel: 1,
            base: 130,
            exponent,
        };
        assert_eq!(with(bits), Encoding::KeepBf16(reason));
    }
    // Zeros always, 19 + 112 - 130 = 1 and the largest finite numbers just so.
    for bits in [0x0000, 0x8000, 19 << 7, 0x7F7F] {
        assert_eq!(matrix_of(with(bits)).stats().num_escapes, 1);
    }
    let mut low = weights(16, 640, 20, 0.0, 1);
    low[0] = bf16::from_bits(163 << 7);
    let reason = KeepReason::EscapeOutOfRange {
        channel: 0,
        base: 20,
        exponent: 163,
    };
    assert_eq!(encode(&low, 16, 640), Encoding::KeepBf16(reason));
}

#[test]
fn small_and_pruned_matrices_stay_bf16() {
    let reason = KeepReason::DoesNotPay {
        num_bytes: 2 * (1536 + 2) + 16,
        source_bytes: 16 * 65 * 2,
    };
    let narrow = weights(16, 65, 100, 0.0, 1);
    assert_eq!(encode(&narrow, 16, 65), Encoding::KeepBf16(reason));
    let zeros = vec![bf16::ZERO; 64 * 64];
    let reason = KeepReason::TooManyEscapes {
        num_escapes: 4096,
        num_weights: 4096,
    };
    assert_eq!(encode(&zeros, 64, 64), Encoding::KeepBf16(reason));
}

/// The parts of a padded matrix with escapes, to be damaged.
#[derive(Clone)]
struct Parts {
    plane8: Vec<u8>,
    plane4: Vec<u8>,
    base: Vec<u8>,
    counts: Vec<u16>,
    escapes: Vec<u32>,
}

const SHAPE: (usize, usize) = (44, 250);

impl Parts {
    fn new() -> Self {
        let matrix = matrix_of(encode(
            &weights(SHAPE.0, SHAPE.1, 100, 0.005, 9),
            SHAPE.0,
            SHAPE.1,
        ));
        let parts = matrix.planes();
        assert!(parts.escapes.len() > 10);
        Self {
            plane8: parts.plane8.to_vec(),
            plane4: parts.plane4.to_vec(),
            base: parts.base.to_vec(),
            counts: parts.counts.to_vec(),
            escapes: parts.escapes.to_vec(),
        }
    }

    fn read(&self, (n, k): (usize, usize)) -> Result<W12Matrix, crate::error::W12Error> {
        let parts = W12Planes {
            plane8: &self.plane8,
            plane4: &self.plane4,
            base: &self.base,
            counts: &self.counts,
            escapes: &self.escapes,
        };
        W12Matrix::from_planes(n, k, parts)
    }

    fn damaged(damage: impl Fn(&mut Self)) -> String {
        let mut parts = Self::new();
        damage(&mut parts);
        parts.read(SHAPE).expect_err("damaged").to_string()
    }
}

#[test]
fn damaged_parts_are_refused_by_name() {
    assert!(Parts::new().read(SHAPE).is_ok());
    type Damage = fn(&mut Parts);
    let cases: [(&str, Damage); 16] = [
        ("`plane8` should hold 12288 elements, got 12287", |p| {
            p.plane8.pop();
        }),
        ("`plane4` should hold 6144 elements, got 6145", |p| {
            p.plane4.push(0);
        }),
        ("`base` should hold 48 elements, got 44", |p| {
            p.base.truncate(44);
        }),
        ("`counts` should hold 12 elements, got 0", |p| {
            p.counts.clear();
        }),
        ("`escapes` should hold", |p| p.counts[0] += 1),
        ("`escapes` should hold", |p| {
            p.escapes.pop();
        }),
        ("count at most 1024 escapes, got 1025", |p| {
            p.counts[0] = 1025;
        }),
        ("base of channel 3 should be in 1..=239, got 0", |p| {
            p.base[3] = 0;
        }),
        ("base of channel 3 should be in 1..=239, got 240", |p| {
            p.base[3] = 240;
        }),
        ("base of channel 47 should be in 112..=112, got 113", |p| {
            p.base[47] = 113;
        }),
        ("super-tile 11 should be padded with code 0", |p| {
            p.plane4[11 * 512 + 511] = 1;
        }),
        ("super-tile 3 should be padded with code 0", |p| {
            p.plane8[3 * 1024 + 63] = 1;
        }),
        ("spare bits are set", |p| p.escapes[0] |= 1 << 26),
        ("has a code in its window", |p| {
            p.escapes[0] = p.escapes[0] & !0xFFFF | 105 << 7;
        }),
        ("cannot be rescaled", |p| {
            p.escapes[0] = p.escapes[0] & !0xFFFF | 0x7F80;
        }),
        ("another code than the nearest", |p| p.escapes[0] ^= 0x8000),
    ];
    for (words, damage) in cases {
        let message = Parts::damaged(damage);
        assert!(message.contains(words), "{words}: {message}");
    }
}

#[test]
fn escapes_out_of_order_or_in_the_padding_are_refused() {
    let crowded = |parts: &Parts| {
        parts
            .counts
            .iter()
            .position(|&c| c > 1)
            .expect("two escapes")
    };
    let message = Parts::damaged(|parts| {
        let tile = crowded(parts);
        let first: usize = parts.counts[..tile].iter().map(|&c| usize::from(c)).sum();
        parts.escapes.swap(first, first + 1);
    });
    assert!(message.contains("not in ascending order"), "{message}");
    let message = Parts::damaged(|parts| {
        let tile = crowded(parts);
        let first: usize = parts.counts[..tile].iter().map(|&c| usize::from(c)).sum();
        parts.escapes[first + 1] = parts.escapes[first];
    });
    assert!(message.contains("not in ascending order"), "{message}");
    // Lane 31, slot 31 of the last super-tile: channel 47, column 255.
    let message = Parts::damaged(|parts| {
        *parts.counts.last_mut().expect("tiles") += 1;
        parts.escapes.push(0x3FF << 16);
    });
    assert!(message.contains("lies in the padding"), "{message}");
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    let parts = Parts::new();
    for shape in [
        (0, 250),
        (44, 0),
        (usize::MAX, usize::MAX),
        (1 << 40, 1 << 30),
    ] {
        assert_eq!(
            parts.read(shape),
            Err(crate::error::W12Error::Shape {
                out_features: shape.0,
                in_features: shape.1,
            })
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn no_damage_makes_the_reader_panic(
        part in 0..5,
        at in any::<prop::sample::Index>(),
        flip in 1..=u32::MAX,
        cut in any::<bool>(),
        shape in prop_oneof![Just(SHAPE), (0..70_usize, 0..300_usize)],
    ) {
        let mut parts = Parts::new();
        macro_rules! damage {
            ($part:expr, $t:ty) => {
                if cut {
                    let len = at.index($part.len());
                    $part.truncate(len);
                } else {
                    let at = at.index($part.len());
                    $part[at] ^= flip as $t;
                }
            };
        }
        match part {
            0 => damage!(parts.plane8, u8),
            1 => damage!(parts.plane4, u8),
            2 => damage!(parts.base, u8),
            3 => damage!(parts.counts, u16),
            _ => damage!(parts.escapes, u32),
        }
        if let Ok(matrix) = parts.read(shape) {
            prop_assert_eq!(shape, SHAPE);
            prop_assert_eq!(matrix.decode().len(), SHAPE.0 * SHAPE.1);
            prop_assert_eq!(matrix.pack().out_features(), SHAPE.0);
        }
    }
}
