//! Logic beyond one operator of Rust, bit by bit.

use super::{OWN_WORDS, check, module_text, noise, one_block};
use ptx_emulator::ptx::Module;

#[test]
fn tables_of_three_inputs_give_the_bit_that_they_name() {
    // Bit 4 a + 2 b + c of the table.
    const TABLE: u32 = 0xe2;
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        shfl.sync.down.b32 %r11, %r10, 1, 31, -1;
        shfl.sync.down.b32 %r12, %r10, 2, 31, -1;
        lop3.b32 %r13, %r10, %r11, %r12, {TABLE:#x};
        st.global.u32 [%d0], %r13;"
    );
    let numbers = noise(32);
    let down = |lane: usize, by: usize| numbers[if lane + by < 32 { lane + by } else { lane }];
    let expected: Vec<u32> = (0..32)
        .map(|lane| {
            let inputs = [numbers[lane], down(lane, 1), down(lane, 2)];
            (0..32).fold(0, |word, bit| {
                let index = inputs
                    .iter()
                    .fold(0, |index, input| 2 * index + (input >> bit & 1));
                word | (TABLE >> index & 1) << bit
            })
        })
        .collect();
    check(&body, one_block(32), &[&numbers], &expected);
    let unknown = module_text(0, "lop3.b32 %r0, %r1, %r2, %r3, 0x12;");
    assert!(Module::parse(&unknown).is_err());
}

#[test]
fn halves_of_words_are_inverted_and_selected() {
    let body = format!(
        "{OWN_WORDS}
        ld.global.u16 %h1, [%d1];
        ld.global.u16 %h2, [%d1+2];
        not.b16 %h3, %h1;
        setp.lt.u16 %p0, %h1, %h2;
        selp.u16 %h4, %h3, %h2, %p0;
        st.global.u16 [%d0], %h4;
        st.global.u16 [%d0+2], %h3;"
    );
    let numbers = noise(32);
    let expected: Vec<u32> = (numbers.iter())
        .map(|&number| {
            let [low, high] = [number as u16, (number >> 16) as u16];
            let chosen = if low < high { !low } else { high };
            u32::from(!low) << 16 | u32::from(chosen)
        })
        .collect();
    check(&body, one_block(32), &[&numbers], &expected);
}
