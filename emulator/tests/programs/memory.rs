//! Loads, stores and atomics of all memories, and barriers between those who use them.

use super::{Bench, OWN_WORDS, check, noise, one_block, orders};
use ptx_emulator::grid::GridLaunch;

#[test]
fn vectors_and_narrow_types_keep_their_bytes() {
    // Each thread takes 16 bytes apart and stores them in other sizes, the signed ones extended.
    let body = "
        mov.u32 %r1, %tid.x;
        mul.wide.u32 %d2, %r1, 16;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        add.s64 %d1, %d1, %d2;
        mul.wide.u32 %d3, %r1, 32;
        add.s64 %d0, %d0, %d3;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d1];
        st.global.v2.u32 [%d0], {%r11, %r10};
        ld.global.nc.u32 %r14, [%d1+8];
        st.global.u32 [%d0+8], %r14;
        ld.global.u8 %r15, [%d1+13];
        st.global.u32 [%d0+12], %r15;
        ld.global.u16 %h1, [%d1+14];
        st.global.u16 [%d0+16], %h1;
        st.global.u8 [%d0+18], %r13;
        ld.global.u64 %d5, [%d1+8];
        shr.u64 %d5, %d5, 8;
        st.global.u64 [%d0+24], %d5;";
    let words = noise(4 * 32);
    let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    let mut expected = Vec::new();
    for own in bytes.chunks(16) {
        let mut out = [0u8; 32];
        out[0..4].copy_from_slice(&own[4..8]);
        out[4..8].copy_from_slice(&own[0..4]);
        out[8..12].copy_from_slice(&own[8..12]);
        out[12] = own[13];
        out[16..18].copy_from_slice(&own[14..16]);
        out[18] = own[12];
        out[24..31].copy_from_slice(&own[9..16]);
        expected.extend(
            out.chunks(4)
                .map(|word| u32::from_le_bytes(word.try_into().expect("four"))),
        );
    }
    check(body, one_block(32), &[&words], &expected);
}

#[test]
fn warps_transpose_through_shared_memory() {
    // A block of 16 warps writes rows of a 16 x 32 matrix and reads columns, through generic addresses as well.
    let body = format!(
        "{OWN_WORDS}
        .shared .align 16 .b8 tile[2048];
        mov.u32 %r20, tile;
        ld.global.u32 %r10, [%d1];
        shl.b32 %r11, %r1, 2;
        add.s32 %r11, %r11, %r20;
        st.shared.u32 [%r11], %r10;
        bar.sync 0;
        shr.u32 %r12, %r1, 4;
        and.b32 %r13, %r1, 15;
        shl.b32 %r13, %r13, 5;
        add.s32 %r12, %r12, %r13;
        shl.b32 %r12, %r12, 2;
        add.s32 %r12, %r12, %r20;
        cvt.u64.u32 %d5, %r12;
        cvta.shared.u64 %d6, %d5;
        ld.u32 %r14, [%d6];
        st.global.u32 [%d0], %r14;"
    );
    let numbers = noise(512);
    let expected: Vec<u32> = (0..512).map(|i| numbers[i / 16 + i % 16 * 32]).collect();
    check(&body, one_block(512), &[&numbers], &expected);
}

#[test]
fn named_barriers_hold_their_own_warps_only() {
    // Warps 0 and 1 hand over by barrier 1 while warps 2 and 3 never come to it, and those by barrier 2.
    let body = format!(
        "{OWN_WORDS}
        .shared .align 16 .b8 mail[512];
        mov.u32 %r20, mail;
        shl.b32 %r11, %r1, 2;
        add.s32 %r11, %r11, %r20;
        xor.b32 %r12, %r1, 32;
        shl.b32 %r12, %r12, 2;
        add.s32 %r12, %r12, %r20;
        ld.global.u32 %r10, [%d1];
        shr.u32 %r13, %r1, 6;
        add.s32 %r13, %r13, 1;
        st.shared.u32 [%r11], %r10;
        bar.sync %r13, 64;
        ld.shared.u32 %r10, [%r12];
        bar.sync %r13, 64;
        add.s32 %r10, %r10, 1;
        st.shared.u32 [%r11], %r10;
        bar.sync %r13, 64;
        ld.shared.u32 %r10, [%r12];
        st.global.u32 [%d0], %r10;"
    );
    let numbers = noise(128);
    let expected: Vec<u32> = numbers
        .iter()
        .map(|number| number.wrapping_add(1))
        .collect();
    check(&body, one_block(128), &[&numbers], &expected);
}

#[test]
fn local_memory_is_each_threads_own() {
    let body = format!(
        "{OWN_WORDS}
        .local .align 8 .b8 depot[32];
        mov.u64 %d10, depot;
        ld.global.u32 %r10, [%d1];
        mov.u32 %r11, 0;
    fill:
        mul.wide.u32 %d11, %r11, 4;
        add.s64 %d12, %d10, %d11;
        add.s32 %r12, %r10, %r11;
        st.local.u32 [%d12], %r12;
        add.s32 %r11, %r11, 1;
        setp.lt.u32 %p0, %r11, 8;
        @%p0 bra fill;
        and.b32 %r13, %r10, 7;
        mul.wide.u32 %d11, %r13, 4;
        add.s64 %d12, %d10, %d11;
        ld.local.u32 %r14, [%d12];
        st.global.u32 [%d0], %r14;"
    );
    let numbers = noise(64);
    let expected: Vec<u32> = numbers
        .iter()
        .map(|&number| number.wrapping_add(number % 8))
        .collect();
    check(&body, one_block(64), &[&numbers], &expected);
}

#[test]
fn atomics_of_many_blocks_lose_nothing() {
    // A histogram of 16 bins in shared memory, added up in global memory; the greatest number and all bits beside it.
    let body = "
        .shared .align 4 .b8 bins[64];
        mov.u32 %r20, bins;
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %ntid.x;
        mad.lo.s32 %r0, %r2, %r3, %r1;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mul.wide.u32 %d2, %r0, 4;
        add.s64 %d1, %d1, %d2;
        ld.global.u32 %r10, [%d1];
        shl.b32 %r21, %r1, 2;
        add.s32 %r21, %r21, %r20;
        setp.lt.u32 %p0, %r1, 16;
        mov.u32 %r22, 0;
        @%p0 st.shared.u32 [%r21], %r22;
        bar.sync 0;
        and.b32 %r11, %r10, 15;
        shl.b32 %r11, %r11, 2;
        add.s32 %r11, %r11, %r20;
        atom.shared.add.u32 %r12, [%r11], 1;
        bar.sync 0;
        mul.wide.u32 %d3, %r1, 4;
        add.s64 %d3, %d3, %d0;
        @%p0 ld.shared.u32 %r13, [%r21];
        @%p0 atom.global.add.u32 %r14, [%d3], %r13;
        atom.global.max.u32 %r15, [%d0+64], %r10;
        atom.global.or.b32 %r16, [%d0+68], %r10;
        mov.b64 %d8, {%r0, %r10};
        atom.global.max.u64 %d9, [%d0+72], %d8;";
    let mut numbers = noise(40 * 64);
    numbers.iter_mut().for_each(|number| *number >>= 3);
    let mut expected = vec![0; 20];
    numbers
        .iter()
        .for_each(|number| expected[*number as usize % 16] += 1);
    let (place, most) = numbers
        .iter()
        .enumerate()
        .max_by_key(|&(place, &number)| (number, place))
        .expect("not empty");
    expected[16] = *most;
    expected[17] = numbers.iter().fold(0, |bits, number| bits | number);
    expected[18..].copy_from_slice(&[place as u32, *most]);
    let launch = GridLaunch {
        num_blocks: 40,
        ..one_block(64)
    };
    check(body, launch, &[&numbers], &expected);
}

#[test]
fn former_values_of_an_atomic_are_all_different() {
    let body = format!(
        "{OWN_WORDS}
        atom.global.add.u32 %r10, [%d1], 1;
        st.global.u32 [%d0], %r10;"
    )
    .replace("add.s64 %d1, %d1, %d2;", "");
    for mut order in orders() {
        let bench = Bench::new();
        let (out, counter) = (bench.zeros(96), bench.words(&[5]));
        bench
            .run(&body, one_block(96), &[out, counter], &mut order)
            .expect("runs");
        let mut found = bench.read(out, 96);
        found.sort_unstable();
        assert!(found.into_iter().eq(5..101), "{order:?}");
        assert_eq!(bench.read(counter, 1), [101]);
    }
}

#[test]
fn grid_barriers_let_every_block_see_what_all_wrote() {
    // Blocks leave a word, wait for a counter, and sum all words; more of them than run at first.
    let body = "
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        mov.u32 %r3, %nctaid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        ld.param.u64 %d2, [p2];
        mul.wide.u32 %d3, %r2, 4;
        add.s64 %d4, %d1, %d3;
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra arrived;
        add.s32 %r10, %r2, 100;
        st.global.u32 [%d4], %r10;
        membar.gl;
        atom.global.add.u32 %r11, [%d2], 1;
    look:
        ld.volatile.global.u32 %r12, [%d2];
        setp.lt.u32 %p1, %r12, %r3;
        @%p1 bra look;
        membar.gl;
    arrived:
        bar.sync 0;
        mov.u32 %r13, 0;
        mov.u32 %r14, 0;
    sum:
        mul.wide.u32 %d5, %r14, 4;
        add.s64 %d6, %d1, %d5;
        ld.global.cg.u32 %r15, [%d6];
        add.s32 %r13, %r13, %r15;
        add.s32 %r14, %r14, 1;
        setp.lt.u32 %p2, %r14, %r3;
        @%p2 bra sum;
        add.s64 %d7, %d0, %d3;
        st.global.u32 [%d7], %r13;";
    let num_blocks = 45;
    let launch = GridLaunch {
        num_blocks,
        ..one_block(64)
    };
    let sum = (0..num_blocks).map(|block| block + 100).sum();
    check(
        body,
        launch,
        &[&vec![0; num_blocks as usize], &[0]],
        &vec![sum; num_blocks as usize],
    );
}

#[test]
fn a_lock_lets_one_thread_in_at_a_time() {
    // Six blocks take turns under a lock: each reads a counter, waits a little and writes it back, ten times.
    let body = "
        ld.param.u64 %d0, [p0];
        mov.u32 %r1, %tid.x;
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra done;
        mov.u32 %r2, 0;
    next:
        atom.global.cas.b32 %r3, [%d0], 0, 1;
        setp.ne.s32 %p1, %r3, 0;
        @%p1 bra next;
        ld.volatile.global.u32 %r4, [%d0+4];
        mov.u32 %r5, 0;
    little:
        add.s32 %r5, %r5, 1;
        setp.lt.u32 %p2, %r5, 50;
        @%p2 bra little;
        add.s32 %r4, %r4, 1;
        st.volatile.global.u32 [%d0+4], %r4;
        atom.global.exch.b32 %r6, [%d0], 0;
        add.s32 %r2, %r2, %r6;
        setp.lt.u32 %p3, %r2, 10;
        @%p3 bra next;
    done:";
    let launch = GridLaunch {
        num_blocks: 6,
        ..one_block(64)
    };
    check(body, launch, &[], &[0, 60]);
}

#[test]
fn ordered_accesses_pass_data_and_a_flag() {
    // Of three blocks each adds what the one before left to its number, a flag behind it, and counts itself.
    let body = "
        ld.param.u64 %d0, [p0];
        mov.u32 %r1, %ctaid.x;
        mov.u32 %r9, %tid.x;
        setp.ne.s32 %p0, %r9, 0;
        @%p0 bra done;
        mul.wide.u32 %d1, %r1, 8;
        add.s64 %d2, %d0, %d1;
        setp.eq.s32 %p2, %r1, 0;
        @%p2 bra taken;
    waiting:
        ld.acquire.gpu.global.u32 %r2, [%d2];
        setp.eq.s32 %p1, %r2, 0;
        @%p1 bra waiting;
    taken:
        ld.global.u32 %r3, [%d2+4];
        add.s32 %r3, %r3, %r1;
        add.s32 %r3, %r3, 5;
        st.global.u32 [%d2+12], %r3;
        st.release.gpu.global.u32 [%d2+8], 1;
        st.relaxed.gpu.global.u32 [%d2], 0;
        atom.acq_rel.gpu.global.add.u32 %r4, [%d0+32], 1;
    done:";
    let launch = GridLaunch {
        num_blocks: 3,
        ..one_block(64)
    };
    check(body, launch, &[], &[0, 0, 0, 5, 0, 11, 1, 18, 3]);
}
