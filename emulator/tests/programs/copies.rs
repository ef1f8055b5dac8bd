//! Asynchronous copies: programs that wait for them compute the same in every order, others are found out.

use super::{check, noise, one_block, output};
use ptx_emulator::order::{Order, Policy};

/// 64 threads sum eight chunks of 64 words, each thread its neighbour's word, from two buffers filled by `cp.async`.
pub fn double_buffered(wait: &str) -> String {
    format!(
        "
        .shared .align 16 .b8 buffers[512];
        mov.u32 %r20, buffers;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mul.wide.u32 %d2, %r1, 4;
        add.s64 %d0, %d0, %d2;
        add.s64 %d1, %d1, %d2;
        shl.b32 %r3, %r1, 2;
        add.s32 %r21, %r20, %r3;
        xor.b32 %r4, %r1, 63;
        shl.b32 %r4, %r4, 2;
        add.s32 %r22, %r20, %r4;
        mov.u32 %r10, 0;
        mov.u32 %r11, 0;
        cp.async.ca.shared.global [%r21], [%d1], 4;
        cp.async.commit_group;
    next:
        add.s32 %r12, %r11, 1;
        setp.ge.u32 %p0, %r12, 8;
        @%p0 bra last;
        and.b32 %r13, %r12, 1;
        shl.b32 %r13, %r13, 8;
        add.s32 %r14, %r21, %r13;
        mul.wide.u32 %d3, %r12, 256;
        add.s64 %d3, %d3, %d1;
        cp.async.ca.shared.global [%r14], [%d3], 4;
    last:
        cp.async.commit_group;
        {wait}
        bar.sync 0;
        and.b32 %r13, %r11, 1;
        shl.b32 %r13, %r13, 8;
        add.s32 %r14, %r22, %r13;
        ld.shared.u32 %r15, [%r14];
        add.s32 %r10, %r10, %r15;
        bar.sync 0;
        add.s32 %r11, %r11, 1;
        setp.lt.u32 %p1, %r11, 8;
        @%p1 bra next;
        st.global.u32 [%d0], %r10;"
    )
}

fn neighbour_sums(numbers: &[u32]) -> Vec<u32> {
    let sum = |thread: usize| {
        numbers
            .chunks(64)
            .fold(0u32, |sum, chunk| sum.wrapping_add(chunk[thread ^ 63]))
    };
    (0..64).map(sum).collect()
}

/// Whether a program that lacks something still computes `expected` in an order.
fn computes(body: &str, input: &[u32], expected: &[u32], mut order: Order) -> bool {
    let found = output(
        body,
        one_block(64),
        &[input],
        expected.len(),
        &mut order,
        false,
    );
    found.as_deref() == Ok(expected)
}

#[test]
fn groups_of_copies_are_there_once_waited_for() {
    let numbers = noise(512);
    let body = double_buffered("cp.async.wait_group 1;");
    check(&body, one_block(64), &[&numbers], &neighbour_sums(&numbers));
}

#[test]
fn a_wait_for_too_few_groups_is_found_out_when_copies_land_late() {
    let numbers = noise(512);
    let expected = neighbour_sums(&numbers);
    for wait in ["", "cp.async.wait_group 2;"] {
        let body = double_buffered(wait);
        assert!(computes(
            &body,
            &numbers,
            &expected,
            Order::new(Policy::First, 0)
        ));
        assert!(
            !computes(&body, &numbers, &expected, Order::new(Policy::Late, 0)),
            "{wait}"
        );
    }
}

#[test]
fn bytes_that_are_not_read_are_zero() {
    // Even threads copy 16 bytes, odd ones nothing, from an address that need not exist.
    let body = "
        .shared .align 16 .b8 rows[512];
        mov.u32 %r20, rows;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mul.wide.u32 %d2, %r1, 16;
        add.s64 %d0, %d0, %d2;
        and.b32 %r2, %r1, 1;
        setp.eq.s32 %p0, %r2, 0;
        selp.u32 %r3, 16, 0, %p0;
        add.s64 %d1, %d1, %d2;
        selp.b64 %d1, %d1, 0, %p0;
        shl.b32 %r4, %r1, 4;
        add.s32 %r4, %r4, %r20;
        cp.async.cg.shared.global [%r4], [%d1], 16, %r3;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r4];
        st.global.v4.u32 [%d0], {%r10, %r11, %r12, %r13};";
    let numbers = noise(128);
    let keep = |(at, &number): (usize, &u32)| if at / 4 % 2 == 0 { number } else { 0 };
    let expected: Vec<u32> = numbers.iter().enumerate().map(keep).collect();
    check(body, one_block(32), &[&numbers], &expected);
}

/// A ring of three slots of 512 bytes between a producer, lane 0 of warp 1, and warp 0, which sums 16 bytes a lane.
pub fn ring(wait: &str, free: &str) -> String {
    format!(
        "
        .shared .align 128 .b8 slots[1536];
        .shared .align 8 .b8 full[24];
        .shared .align 8 .b8 empty[24];
        mov.u32 %r20, slots;
        mov.u32 %r21, full;
        mov.u32 %r22, empty;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        setp.ge.u32 %p0, %r1, 3;
        @%p0 bra initialised;
        shl.b32 %r2, %r1, 3;
        add.s32 %r3, %r21, %r2;
        mbarrier.init.shared::cta.b64 [%r3], 1;
        add.s32 %r3, %r22, %r2;
        mbarrier.init.shared::cta.b64 [%r3], 32;
    initialised:
        fence.mbarrier_init.release.cluster;
        fence.proxy.async.shared::cta;
        bar.sync 0;
        mov.u32 %r10, 0;
        mov.u32 %r11, 0;
        mov.u32 %r12, 0;
        mov.u32 %r13, 0;
        setp.ge.u32 %p0, %r1, 32;
        @%p0 bra produce;
        shl.b32 %r4, %r1, 4;
        add.s32 %r23, %r20, %r4;
    consume:
        shl.b32 %r5, %r11, 3;
        add.s32 %r6, %r21, %r5;
    {wait}
        shl.b32 %r7, %r11, 9;
        add.s32 %r7, %r7, %r23;
        ld.shared.v4.u32 {{%r14, %r15, %r16, %r17}}, [%r7];
        add.s32 %r14, %r14, %r15;
        add.s32 %r16, %r16, %r17;
        add.s32 %r14, %r14, %r16;
        mad.lo.s32 %r10, %r10, 3, %r14;
        add.s32 %r6, %r22, %r5;
    {free}
        add.s32 %r11, %r11, 1;
        setp.eq.s32 %p3, %r11, 3;
        @%p3 xor.b32 %r12, %r12, 1;
        @%p3 mov.u32 %r11, 0;
        add.s32 %r13, %r13, 1;
        setp.lt.u32 %p4, %r13, 10;
        @%p4 bra consume;
        mul.wide.u32 %d2, %r1, 4;
        add.s64 %d0, %d0, %d2;
        st.global.u32 [%d0], %r10;
        bra.uni end;
    produce:
        setp.ne.s32 %p1, %r1, 32;
        @%p1 bra end;
        mov.u32 %r12, 1;
    send:
        shl.b32 %r5, %r11, 3;
        add.s32 %r6, %r22, %r5;
    free_slot:
        {{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%r6], %r12; selp.u32 %r30, 1, 0, p; }}
        setp.eq.s32 %p2, %r30, 0;
        @%p2 bra free_slot;
        add.s32 %r6, %r21, %r5;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r6], 512;
        shl.b32 %r7, %r11, 9;
        add.s32 %r7, %r7, %r20;
        mul.wide.u32 %d3, %r13, 512;
        add.s64 %d3, %d3, %d1;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r7], [%d3], 512, [%r6];
        add.s32 %r11, %r11, 1;
        setp.eq.s32 %p3, %r11, 3;
        @%p3 xor.b32 %r12, %r12, 1;
        @%p3 mov.u32 %r11, 0;
        add.s32 %r13, %r13, 1;
        setp.lt.u32 %p4, %r13, 10;
        @%p4 bra send;
    end:
        bar.sync 0;"
    )
}

pub const WAIT_FULL: &str = "wait_full:
    mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r6], %r12;
    @!%p1 bra wait_full;";
const TEST_FULL: &str = "wait_full:
    mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r6], %r12;
    @!%p1 bra wait_full;";
pub const FREE: &str = "{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%r6]; }";

fn ring_sums(numbers: &[u32]) -> Vec<u32> {
    let slot_sum = |slot: &[u32], lane: usize| {
        slot[4 * lane..4 * lane + 4]
            .iter()
            .fold(0u32, |sum, &x| sum.wrapping_add(x))
    };
    let sum = |lane| {
        numbers.chunks(128).fold(0u32, |sum, slot| {
            sum.wrapping_mul(3).wrapping_add(slot_sum(slot, lane))
        })
    };
    (0..32).map(sum).collect()
}

#[test]
fn a_ring_of_bulk_copies_hands_over_every_slot() {
    let numbers = noise(1280);
    for wait in [WAIT_FULL, TEST_FULL] {
        check(
            &ring(wait, FREE),
            one_block(64),
            &[&numbers],
            &ring_sums(&numbers),
        );
    }
}

#[test]
fn reading_a_slot_before_its_barrier_is_found_out() {
    let numbers = noise(1280);
    let body = ring("", FREE);
    let late = Order::new(Policy::Late, 0);
    assert!(!computes(&body, &numbers, &ring_sums(&numbers), late));
}

#[test]
fn freeing_a_slot_before_reading_it_is_found_out() {
    // Arrives at the slot's barrier first, so that the producer may overwrite what is still to be read.
    let early = format!("{WAIT_FULL}\n add.s32 %r8, %r22, %r5;\n mbarrier.arrive.shared::cta.b64 _, [%r8];\n bar.warp.sync -1;
        mov.u32 %r40, 0;
    dawdle:
        add.s32 %r40, %r40, 1;
        setp.lt.u32 %p5, %r40, 2000;
        @%p5 bra dawdle;");
    let numbers = noise(1280);
    let body = ring(&early, "");
    let is_wrong = |seed| {
        let order = Order::new(Policy::Random, seed);
        !computes(&body, &numbers, &ring_sums(&numbers), order)
    };
    assert!((0..8).any(is_wrong));
}

#[test]
fn threads_arrive_when_their_copies_have_landed() {
    // Each of 32 lanes copies 32 bytes in two parts; the barrier turns with the last arrival.
    let body = "
        .shared .align 16 .b8 rows[1024];
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, rows;
        mov.u32 %r21, barrier;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        setp.eq.s32 %p0, %r1, 0;
        @%p0 mbarrier.init.shared::cta.b64 [%r21], 32;
        bar.sync 0;
        setp.ge.u32 %p0, %r1, 32;
        @%p0 bra wait;
        mul.wide.u32 %d2, %r1, 16;
        add.s64 %d1, %d1, %d2;
        shl.b32 %r2, %r1, 4;
        add.s32 %r2, %r2, %r20;
        add.s32 %r3, %r2, 512;
        add.s64 %d3, %d1, 512;
        createpolicy.fractional.L2::evict_first.b64 %d4, 1.0;
        cp.async.cg.shared.global.L2::cache_hint [%r2], [%d1], 16, %d4;
        cp.async.cg.shared.global.L2::cache_hint [%r3], [%d3], 16, %d4;
        cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%r21];
    wait:
        mbarrier.test_wait.parity.shared::cta.b64 %p1, [%r21], 0;
        @!%p1 bra wait;
        xor.b32 %r4, %r1, 63;
        mul.wide.u32 %d5, %r4, 16;
        add.s64 %d0, %d0, %d5;
        shl.b32 %r5, %r4, 4;
        add.s32 %r5, %r5, %r20;
        ld.shared.v4.u32 {%r10, %r11, %r12, %r13}, [%r5];
        st.global.v4.u32 [%d0], {%r10, %r11, %r12, %r13};";
    let numbers = noise(256);
    check(body, one_block(64), &[&numbers], &numbers);
}
