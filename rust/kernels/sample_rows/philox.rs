//! Philox 4x32-10 of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011): a counter and a key in,
//! four random words out, no state. All randomness of the engine is a call of it.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Golden ratio and sqrt(3) - 1, what is added to the key between rounds.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const NUM_ROUNDS: usize = 10;

/// What a counter is used for, its last word: no two uses see the same words.
#[derive(Clone, Copy)]
enum Use {
    TokenNoise,
    RequestSeed,
    PlantedDraft,
}

/// The four words of `counter` under `key`.
pub fn philox4x32(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..NUM_ROUNDS {
        let [(high0, low0), (high1, low1)] = [
            product(MULTIPLIERS[0], counter[0]),
            product(MULTIPLIERS[1], counter[2]),
        ];
        counter = [
            high1 ^ counter[1] ^ key[0],
            low1,
            high0 ^ counter[3] ^ key[1],
            low0,
        ];
        key = [
            key[0].wrapping_add(KEY_STEPS[0]),
            key[1].wrapping_add(KEY_STEPS[1]),
        ];
    }
    counter
}

/// High and low word of a product.
fn product(a: u32, b: u32) -> (u32, u32) {
    let product = u64::from(a) * u64::from(b);
    ((product >> 32) as u32, product as u32)
}

/// 64 random bits under a 64-bit key.
fn bits(counter: [u32; 4], seed: u64) -> u64 {
    let [low, high, ..] = philox4x32(counter, [seed as u32, (seed >> 32) as u32]);
    u64::from(high) << 32 | u64::from(low)
}

/// The random bits of `token_id` after the row at `position` of a request with this seed.
pub fn token_bits(seed: u64, position: u32, token_id: u32) -> u64 {
    bits([token_id, position, 0, Use::TokenNoise as u32], seed)
}

/// The seed of a request that brings none: the `index`-th of its call, in an engine with `engine_seed`.
pub fn request_seed(engine_seed: u64, index: u64) -> u64 {
    let index = [index as u32, (index >> 32) as u32];
    bits(
        [index[0], index[1], 0, Use::RequestSeed as u32],
        engine_seed,
    )
}

/// A number from 0 up to 1 for a draft of the token at `position` after the anchor token at `anchor`.
pub fn draft_uniform(seed: u64, position: u32, anchor: u32) -> f64 {
    let bits = bits([position, anchor, 0, Use::PlantedDraft as u32], seed);
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that Random123, the authors' library, is tested by.
    #[test]
    fn gives_the_published_words() {
        for (counter, key, want) in [
            (
                [0; 4],
                [0; 2],
                [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8],
            ),
            (
                [u32::MAX; 4],
                [u32::MAX; 2],
                [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd],
            ),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ] {
            assert_eq!(philox4x32(counter, key), want);
        }
    }

    #[test]
    fn every_part_of_a_key_counts() {
        let words = [
            token_bits(1, 2, 3),
            token_bits(1, 3, 2),
            token_bits(1 << 32, 2, 3),
            token_bits(1, 2, 4),
            request_seed(1, 2 << 32 | 3),
            request_seed(1, 3),
            request_seed(3, 1),
        ];
        for (i, word) in words.iter().enumerate() {
            assert!(!words[..i].contains(word));
        }
    }
}
