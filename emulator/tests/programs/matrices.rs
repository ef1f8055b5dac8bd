//! Matrix instructions in programs, with operands by way of shared memory.

use super::{check, noise, one_block};

/// Small integers as BF16, two to a word, and as numbers.
fn small_numbers(count: usize) -> (Vec<u32>, Vec<i32>) {
    let numbers: Vec<i32> = noise(count)
        .into_iter()
        .map(|x| (x % 17) as i32 - 8)
        .collect();
    let words = numbers.chunks(2).map(|pair| {
        let [low, high] = [pair[0], pair[1]].map(|x| (x as f32).to_bits() >> 16);
        low | high << 16
    });
    (words.collect(), numbers)
}

#[test]
fn loaded_matrices_multiply() {
    // A of 16 x 16 by rows, B of 16 x 8 by rows of K, so that it is loaded transposed; rows of 16 bytes in shared memory.
    let body = "
        .shared .align 16 .b8 tile[768];
        mov.u32 %r20, tile;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        ld.param.u64 %d2, [p2];
        mul.wide.u32 %d3, %r1, 16;
        add.s64 %d1, %d1, %d3;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d1];
        shl.b32 %r2, %r1, 4;
        add.s32 %r3, %r2, %r20;
        st.shared.v4.u32 [%r3], {%r10, %r11, %r12, %r13};
        and.b32 %r4, %r1, 15;
        mul.wide.u32 %d3, %r4, 16;
        add.s64 %d2, %d2, %d3;
        ld.global.v4.u32 {%r10, %r11, %r12, %r13}, [%d2];
        shl.b32 %r5, %r4, 4;
        add.s32 %r5, %r5, %r20;
        st.shared.v4.u32 [%r5+512], {%r10, %r11, %r12, %r13};
        bar.sync 0;
        and.b32 %r6, %r1, 15;
        shl.b32 %r6, %r6, 5;
        and.b32 %r7, %r1, 16;
        add.s32 %r6, %r6, %r7;
        add.s32 %r6, %r6, %r20;
        ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r30, %r31, %r32, %r33}, [%r6];
        add.s32 %r8, %r5, 512;
        ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%r34, %r35, %r36, %r37}, [%r8];
        mov.b32 %f0, 0f40400000;
        mov.f32 %f1, %f0;
        mov.f32 %f2, %f0;
        mov.f32 %f3, %f0;
        mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%f0,%f1,%f2,%f3}, {%r30,%r31,%r32,%r33}, {%r34,%r35}, {%f0,%f1,%f2,%f3};
        shr.u32 %r40, %r1, 2;
        shl.b32 %r40, %r40, 3;
        and.b32 %r41, %r1, 3;
        shl.b32 %r41, %r41, 1;
        add.s32 %r40, %r40, %r41;
        mul.wide.u32 %d4, %r40, 4;
        add.s64 %d0, %d0, %d4;
        st.global.v2.f32 [%d0], {%f0, %f1};
        st.global.v2.f32 [%d0+256], {%f2, %f3};";
    let (a_words, a) = small_numbers(256);
    let (b_words, b) = small_numbers(128);
    let mut expected = Vec::new();
    for row in 0..16 {
        for column in 0..8 {
            let sum: i32 = (0..16).map(|k| a[row * 16 + k] * b[k * 8 + column]).sum();
            expected.push((3.0 + sum as f32).to_bits());
        }
    }
    check(body, one_block(32), &[&a_words, &b_words], &expected);
}

/// The start of programs of a warpgroup: `num_words` words of the input go to shared memory, to `tile` at `%r20`; `%d0` is
/// the thread's first sum in an output of 64 rows of 16 columns.
fn group_start(num_words: u32) -> String {
    format!(
        "
        .shared .align 128 .b8 tile[{}];
        mov.u32 %r20, tile;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mov.u32 %r2, %r1;
    fill:
        mul.wide.u32 %d3, %r2, 4;
        add.s64 %d3, %d3, %d1;
        ld.global.u32 %r3, [%d3];
        shl.b32 %r4, %r2, 2;
        add.s32 %r4, %r4, %r20;
        st.shared.u32 [%r4], %r3;
        add.s32 %r2, %r2, 128;
        setp.lt.u32 %p0, %r2, {num_words};
        @%p0 bra fill;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        shr.u32 %r5, %r1, 5;
        shl.b32 %r5, %r5, 4;
        and.b32 %r6, %r1, 31;
        shr.u32 %r6, %r6, 2;
        add.s32 %r5, %r5, %r6;
        shl.b32 %r5, %r5, 4;
        and.b32 %r7, %r1, 3;
        shl.b32 %r7, %r7, 1;
        add.s32 %r5, %r5, %r7;
        mul.wide.u32 %d4, %r5, 4;
        add.s64 %d0, %d0, %d4;",
        4 * num_words
    )
}

const GROUP_END: &str = "
        wgmma.commit_group.sync.aligned;
        wgmma.wait_group.sync.aligned 0;
        st.global.v2.u32 [%d0], {%r30, %r31};
        st.global.v2.u32 [%d0+512], {%r32, %r33};
        st.global.v2.u32 [%d0+32], {%r34, %r35};
        st.global.v2.u32 [%d0+544], {%r36, %r37};";

#[test]
fn a_warpgroup_multiplies_bytes_from_shared_memory() {
    // 64 x 32 bytes, then 16 x 32, as core matrices of 8 rows of 16 bytes: all rows of one half of K, then of the other.
    // Two steps, of which the first does not add.
    let body = format!(
        "{}
        mov.u32 %r30, 1000;
        mov.u32 %r31, 1000;
        mov.u32 %r32, 1000;
        mov.u32 %r33, 1000;
        mov.u32 %r34, 1000;
        mov.u32 %r35, 1000;
        mov.u32 %r36, 1000;
        mov.u32 %r37, 1000;
        shr.u32 %r8, %r20, 4;
        cvt.u64.u32 %d5, %r8;
        or.b64 %d5, %d5, 0x0000000800400000;
        add.s32 %r9, %r20, 2048;
        shr.u32 %r9, %r9, 4;
        cvt.u64.u32 %d6, %r9;
        or.b64 %d6, %d6, 0x0000000800100000;
        setp.ne.u32 %p1, %r20, 0;
        not.pred %p2, %p1;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {{%r30,%r31,%r32,%r33,%r34,%r35,%r36,%r37}}, %d5, %d6, %p2;
        wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {{%r30,%r31,%r32,%r33,%r34,%r35,%r36,%r37}}, %d5, %d6, %p1;
        {GROUP_END}",
        group_start(640)
    );
    let words = noise(640);
    let bytes: Vec<i32> = words
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .map(|byte| i32::from(byte as i8))
        .collect();
    let number = |start: usize, rows: usize, row: usize, k: usize| {
        bytes[start + k / 16 * rows * 16 + row * 16 + k % 16]
    };
    let mut expected = Vec::new();
    for row in 0..64 {
        for column in 0..16 {
            let products = (0..32).map(|k| number(0, 64, row, k) * number(2048, 16, column, k));
            expected.push(2 * products.sum::<i32>() as u32);
        }
    }
    check(&body, one_block(128), &[&words], &expected);
}

#[test]
fn a_warpgroup_multiplies_bf16_from_registers() {
    // Left operand from registers: row g + 8 h of the warp holds its number in all columns. Right one as above.
    let body = format!(
        "{}
        mov.b32 %r30, 0f3F800000;
        mov.b32 %r31, %r30;
        mov.b32 %r32, %r30;
        mov.b32 %r33, %r30;
        mov.b32 %r34, %r30;
        mov.b32 %r35, %r30;
        mov.b32 %r36, %r30;
        mov.b32 %r37, %r30;
        shr.u32 %r8, %r5, 4;
        cvt.rn.f32.u32 %f0, %r8;
        cvt.rn.bf16x2.f32 %r40, %f0, %f0;
        add.s32 %r8, %r8, 8;
        cvt.rn.f32.u32 %f0, %r8;
        cvt.rn.bf16x2.f32 %r41, %f0, %f0;
        shr.u32 %r9, %r20, 4;
        cvt.u64.u32 %d6, %r9;
        or.b64 %d6, %d6, 0x0000000800100000;
        wgmma.fence.sync.aligned;
        {{ .reg .pred adds; setp.ne.u32 adds, %r20, 0;
        wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {{%r30,%r31,%r32,%r33,%r34,%r35,%r36,%r37}}, {{%r40,%r41,%r40,%r41}}, %d6, adds, 1, 1, 0; }}
        {GROUP_END}",
        group_start(128)
    );
    let (words, numbers) = small_numbers(256);
    let mut expected = Vec::new();
    for row in 0..64 {
        for column in 0..16 {
            let sum: i32 = (0..16)
                .map(|k| row * numbers[k / 8 * 128 + column * 8 + k % 8])
                .sum();
            expected.push((1.0 + sum as f32).to_bits());
        }
    }
    check(&body, one_block(128), &[&words], &expected);
}
