//! Instructions of whole warps: shuffles, votes and reductions.

use super::{OWN_WORDS, check, noise, one_block};

/// The ISA's definition of a shuffle: the source lane and whether it is in range.
fn source(mode: &str, lane: u32, offset: u32, clamp: u32) -> (u32, bool) {
    let (segment_mask, clamp) = (clamp >> 8 & 31, clamp & 31);
    let highest = (lane & segment_mask) | (clamp & !segment_mask);
    let lowest = lane & segment_mask;
    let offset = offset & 31;
    let (picked, is_there) = match mode {
        "up" => (
            lane.wrapping_sub(offset) as i32,
            lane as i32 - offset as i32 >= highest as i32,
        ),
        "down" => ((lane + offset) as i32, lane + offset <= highest),
        "bfly" => ((lane ^ offset) as i32, lane ^ offset <= highest),
        _ => {
            let picked = lowest | (offset & !segment_mask);
            (picked as i32, picked <= highest)
        }
    };
    if is_there {
        (picked as u32, true)
    } else {
        (lane, false)
    }
}

#[test]
fn shuffles_read_the_lane_that_the_isa_says() {
    let numbers = noise(32);
    for mode in ["up", "down", "bfly", "idx"] {
        for width in [32u32, 16, 8, 4] {
            for offset in [0, 1, 3, 7, 20] {
                let clamp = (32 - width) << 8 | if mode == "up" { 0 } else { 31 };
                let body = format!(
                    "{OWN_WORDS}
                    ld.global.u32 %r10, [%d1];
                    shfl.sync.{mode}.b32 %r11|%p0, %r10, {offset}, {clamp}, -1;
                    selp.u32 %r12, 1, 0, %p0;
                    xor.b32 %r11, %r11, %r12;
                    st.global.u32 [%d0], %r11;"
                );
                let expected: Vec<u32> = (0..32)
                    .map(|lane| {
                        let (lane, is_there) = source(mode, lane, offset, clamp);
                        numbers[lane as usize] ^ u32::from(is_there)
                    })
                    .collect();
                check(&body, one_block(32), &[&numbers], &expected);
            }
        }
    }
}

#[test]
fn shuffles_take_the_lane_from_registers() {
    // Reverses the warp; no predicate asked for.
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        mov.u32 %r12, 31;
        sub.s32 %r12, %r12, %r1;
        shfl.sync.idx.b32 %r11, %r10, %r12, 31, -1;
        st.global.u32 [%d0], %r11;"
    );
    let numbers = noise(32);
    let expected: Vec<u32> = numbers.iter().rev().copied().collect();
    check(&body, one_block(32), &[&numbers], &expected);
}

#[test]
fn halves_of_a_warp_vote_and_reduce_on_their_own() {
    // The lower half reduces in one branch, the upper in another; members name the half.
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        setp.lt.u32 %p1, %r10, 0xf0000000;
        setp.lt.u32 %p0, %r1, 16;
        @%p0 bra lower;
        vote.sync.all.pred %p2, %p1, 0xffff0000;
        redux.sync.max.u32 %r11, %r10, 0xffff0000;
        bra.uni join;
    lower:
        vote.sync.all.pred %p2, %p1, 0x0000ffff;
        redux.sync.min.u32 %r11, %r10, 0x0000ffff;
    join:
        selp.u32 %r12, 1, 0, %p2;
        xor.b32 %r11, %r11, %r12;
        st.global.u32 [%d0], %r11;"
    );
    let mut numbers = noise(32);
    numbers.iter_mut().for_each(|number| *number %= 0xf000_0000);
    numbers[20] = 0xff00_0000;
    let min = numbers[..16].iter().min().expect("not empty") ^ 1;
    let expected: Vec<u32> = (0..32)
        .map(|lane| if lane < 16 { min } else { 0xff00_0000 })
        .collect();
    check(&body, one_block(32), &[&numbers], &expected);
}
