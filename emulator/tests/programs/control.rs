//! Lanes that part and meet: branches, loops of unequal lengths, guards, early ends.

use super::{OWN_WORDS, check, noise, one_block};

#[test]
fn lanes_loop_as_often_as_each_has_to() {
    // Steps of the Collatz sequence down to one.
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        mov.u32 %r11, 0;
    again:
        setp.eq.s32 %p0, %r10, 1;
        @%p0 bra done;
        add.s32 %r11, %r11, 1;
        and.b32 %r12, %r10, 1;
        setp.eq.s32 %p1, %r12, 0;
        @%p1 bra even;
        mad.lo.s32 %r10, %r10, 3, 1;
        bra.uni again;
    even:
        shr.u32 %r10, %r10, 1;
        bra.uni again;
    done:
        st.global.u32 [%d0], %r11;"
    );
    let numbers: Vec<u32> = (1..=96).collect();
    let steps = |&start: &u32| {
        let mut number = start;
        let mut count = 0;
        while number != 1 {
            number = if number % 2 == 0 {
                number / 2
            } else {
                3 * number + 1
            };
            count += 1;
        }
        count
    };
    let expected: Vec<u32> = numbers.iter().map(steps).collect();
    check(&body, one_block(96), &[&numbers], &expected);
}

#[test]
fn lanes_that_parted_meet_before_they_exchange() {
    // Three ways through nested branches, then a sum over the warp.
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        and.b32 %r11, %r10, 3;
        setp.eq.s32 %p0, %r11, 0;
        @%p0 bra zero;
        setp.eq.s32 %p1, %r11, 1;
        @%p1 bra one;
        add.s32 %r12, %r10, 7;
        bra.uni join;
    zero:
        mul.lo.s32 %r12, %r10, 5;
        bra.uni join;
    one:
        not.b32 %r12, %r10;
    join:
        shfl.sync.bfly.b32 %r13|%p2, %r12, 16, 31, -1;
        add.s32 %r12, %r12, %r13;
        shfl.sync.bfly.b32 %r13|%p2, %r12, 8, 31, -1;
        add.s32 %r12, %r12, %r13;
        shfl.sync.bfly.b32 %r13|%p2, %r12, 4, 31, -1;
        add.s32 %r12, %r12, %r13;
        shfl.sync.bfly.b32 %r13|%p2, %r12, 2, 31, -1;
        add.s32 %r12, %r12, %r13;
        shfl.sync.bfly.b32 %r13|%p2, %r12, 1, 31, -1;
        add.s32 %r12, %r12, %r13;
        st.global.u32 [%d0], %r12;"
    );
    let numbers = noise(64);
    let value = |&number: &u32| match number % 4 {
        0 => number.wrapping_mul(5),
        1 => !number,
        _ => number.wrapping_add(7),
    };
    let expected: Vec<u32> = (numbers.chunks(32))
        .flat_map(|warp| {
            let sum = warp.iter().map(value).fold(0u32, u32::wrapping_add);
            [sum; 32]
        })
        .collect();
    check(&body, one_block(64), &[&numbers], &expected);
}

#[test]
fn guards_pick_lanes_of_single_instructions() {
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        setp.gt.s32 %p0, %r10, 0;
        mov.u32 %r11, 1;
        @!%p0 mov.u32 %r11, 2;
        @%p0 st.global.u32 [%d0], %r11;
        @!%p0 st.global.u32 [%d0], %r10;"
    );
    let numbers = noise(32);
    let expected: Vec<u32> = (numbers.iter())
        .map(|&number| if number as i32 > 0 { 1 } else { number })
        .collect();
    check(&body, one_block(32), &[&numbers], &expected);
}

#[test]
fn lanes_that_ended_are_not_waited_for() {
    // Odd lanes end early; the others vote, meet at the block's barrier and sum what both warps left.
    let body = format!(
        "{OWN_WORDS}
        .shared .align 4 .b8 sums[8];
        mov.u32 %r20, sums;
        and.b32 %r11, %r1, 1;
        setp.eq.s32 %p0, %r11, 1;
        @%p0 ret;
        ld.global.u32 %r10, [%d1];
        redux.sync.add.u32 %r12, %r10, 0x55555555;
        shr.u32 %r13, %r1, 5;
        shl.b32 %r13, %r13, 2;
        add.s32 %r14, %r20, %r13;
        st.shared.u32 [%r14], %r12;
        bar.sync 0;
        ld.shared.u32 %r15, [%r20];
        ld.shared.u32 %r16, [%r20+4];
        add.s32 %r15, %r15, %r16;
        st.global.u32 [%d0], %r15;"
    );
    let numbers = noise(64);
    let sum = numbers
        .iter()
        .step_by(2)
        .fold(0u32, |sum, &number| sum.wrapping_add(number));
    let expected: Vec<u32> = (0..64)
        .map(|lane| if lane % 2 == 0 { sum } else { 0 })
        .collect();
    check(&body, one_block(64), &[&numbers], &expected);
}

#[test]
fn lanes_of_a_warp_may_wait_for_each_other() {
    // Lane 31 writes what all others look for in a loop, which comes first in the text.
    let body = format!(
        "{OWN_WORDS}
        .shared .align 4 .b8 flag[4];
        mov.u32 %r20, flag;
        setp.eq.s32 %p0, %r1, 0;
        mov.u32 %r21, 0;
        @%p0 st.volatile.shared.u32 [%r20], %r21;
        bar.warp.sync -1;
        setp.eq.s32 %p0, %r1, 31;
        @%p0 bra writer;
    look:
        ld.volatile.shared.u32 %r10, [%r20];
        setp.eq.s32 %p1, %r10, 0;
        @%p1 bra look;
        bra.uni join;
    writer:
        mov.u32 %r10, 5;
        st.volatile.shared.u32 [%r20], %r10;
    join:
        bar.warp.sync -1;
        ld.global.u32 %r11, [%d1];
        add.s32 %r10, %r10, %r11;
        st.global.u32 [%d0], %r10;"
    );
    let numbers = noise(32);
    let expected: Vec<u32> = numbers
        .iter()
        .map(|number| number.wrapping_add(5))
        .collect();
    check(&body, one_block(32), &[&numbers], &expected);
}
