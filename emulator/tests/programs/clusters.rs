//! Blocks of a cluster: their barrier, stores into each other's shared memory, arrivals at each other's mbarriers.

use super::{Bench, check, noise, one_block};
use ptx_emulator::fault::Fault;
use ptx_emulator::grid::GridLaunch;
use ptx_emulator::order::{Order, Policy};

const fn clusters(num_blocks: u32, cluster_blocks: u32, block_threads: u32) -> GridLaunch {
    GridLaunch {
        num_blocks,
        cluster_blocks,
        ..one_block(block_threads)
    }
}

#[test]
fn stores_arrive_in_the_next_block_of_the_ring() {
    // Each thread stores 16, 8 and 4 bytes in the next block, all counted on one barrier there.
    let body = "
        .shared .align 16 .b8 inbox[2048];
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, inbox;
        mov.u32 %r21, barrier;
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mad.lo.s32 %r3, %r2, 64, %r1;
        mul.wide.u32 %d2, %r3, 28;
        add.s64 %d0, %d0, %d2;
        add.s64 %d1, %d1, %d2;
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra initialised;
        mbarrier.init.shared::cta.b64 [%r21], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 1792;
    initialised:
        fence.mbarrier_init.release.cluster;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 %r4, %cluster_ctarank;
        add.s32 %r4, %r4, 1;
        and.b32 %r4, %r4, 3;
        shl.b32 %r5, %r1, 4;
        add.s32 %r5, %r5, %r20;
        mapa.shared::cluster.u32 %r6, %r5, %r4;
        mapa.shared::cluster.u32 %r7, %r21, %r4;
        ld.global.f32 %f0, [%d1];
        ld.global.f32 %f1, [%d1+4];
        ld.global.f32 %f2, [%d1+8];
        ld.global.f32 %f3, [%d1+12];
        ld.global.f32 %f4, [%d1+16];
        ld.global.f32 %f5, [%d1+20];
        ld.global.f32 %f6, [%d1+24];
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r6], {%f0, %f1, %f2, %f3}, [%r7];
        shl.b32 %r8, %r1, 3;
        add.s32 %r8, %r8, %r20;
        add.s32 %r8, %r8, 1024;
        mapa.shared::cluster.u32 %r9, %r8, %r4;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%r9], {%f4, %f5}, [%r7];
        shl.b32 %r10, %r1, 2;
        add.s32 %r10, %r10, %r20;
        add.s32 %r10, %r10, 1536;
        mapa.shared::cluster.u32 %r11, %r10, %r4;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r11], %f6, [%r7];
    wait:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r21], 0;
        @!%p1 bra wait;
        ld.shared.v4.f32 {%f10, %f11, %f12, %f13}, [%r5];
        ld.shared.v2.f32 {%f14, %f15}, [%r8];
        ld.shared.f32 %f16, [%r10];
        st.global.f32 [%d0], %f10;
        st.global.f32 [%d0+4], %f11;
        st.global.f32 [%d0+8], %f12;
        st.global.f32 [%d0+12], %f13;
        st.global.f32 [%d0+16], %f14;
        st.global.f32 [%d0+20], %f15;
        st.global.f32 [%d0+24], %f16;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;";
    let block_words = 64 * 7;
    let numbers = noise(8 * block_words);
    let from = |block: usize| block / 4 * 4 + (block + 3) % 4;
    let expected: Vec<u32> = (0..8)
        .flat_map(|block| numbers[from(block) * block_words..][..block_words].to_vec())
        .collect();
    check(body, clusters(8, 4, 64), &[&numbers], &expected);
}

#[test]
fn two_blocks_exchange_in_turns() {
    // A turn: wait until the other has read its inbox, send, wait for one's own, add, say that it is read.
    let body = "
        .shared .align 16 .b8 inbox[512];
        .shared .align 8 .b8 full[8];
        .shared .align 8 .b8 free[8];
        mov.u32 %r20, inbox;
        mov.u32 %r21, full;
        mov.u32 %r22, free;
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mad.lo.s32 %r3, %r2, 32, %r1;
        mul.wide.u32 %d2, %r3, 4;
        add.s64 %d0, %d0, %d2;
        add.s64 %d1, %d1, %d2;
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra initialised;
        mbarrier.init.shared::cta.b64 [%r21], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 512;
        mbarrier.init.shared::cta.b64 [%r22], 1;
    initialised:
        fence.mbarrier_init.release.cluster;
        bar.sync 0;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 %r4, %cluster_ctarank;
        xor.b32 %r4, %r4, 1;
        shl.b32 %r5, %r1, 4;
        add.s32 %r5, %r5, %r20;
        mapa.shared::cluster.u32 %r6, %r5, %r4;
        mapa.shared::cluster.u32 %r7, %r21, %r4;
        mapa.shared::cluster.u32 %r8, %r22, %r4;
        ld.global.u32 %r10, [%d1];
        mov.u32 %r11, 0;
        mov.b32 %f1, 0;
    turn:
        and.b32 %r12, %r11, 1;
        xor.b32 %r13, %r12, 1;
    wait_free:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r22], %r13;
        @!%p1 bra wait_free;
        mov.b32 %f0, %r10;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r6], {%f0, %f1, %f1, %f1}, [%r7];
    wait_full:
        mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %p1, [%r21], %r12;
        @!%p1 bra wait_full;
        ld.shared.u32 %r14, [%r5];
        mad.lo.s32 %r10, %r10, 5, %r14;
        bar.warp.sync -1;
        @!%p0 mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 512;
        bar.warp.sync -1;
        @!%p0 mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r8];
        add.s32 %r11, %r11, 1;
        setp.lt.u32 %p2, %r11, 6;
        @%p2 bra turn;
        st.global.u32 [%d0], %r10;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;";
    let numbers = noise(64);
    let mut expected = numbers.clone();
    for _ in 0..6 {
        let before = expected.clone();
        for (at, number) in expected.iter_mut().enumerate() {
            *number = before[at].wrapping_mul(5).wrapping_add(before[at ^ 32]);
        }
    }
    check(body, clusters(2, 2, 32), &[&numbers], &expected);
}

#[test]
fn a_block_that_ends_before_its_mail_comes_is_a_fault() {
    // Block 1 stores in block 0, which nobody keeps alive until then.
    let body = "
        .shared .align 16 .b8 inbox[16];
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, inbox;
        mov.u32 %r21, barrier;
        mbarrier.init.shared::cta.b64 [%r21], 1;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        mov.u32 %r4, %cluster_ctarank;
        setp.eq.s32 %p0, %r4, 0;
        @%p0 ret;
        mapa.shared::cluster.u32 %r6, %r20, 0;
        mapa.shared::cluster.u32 %r7, %r21, 0;
        mov.b32 %f0, 7;
        st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%r6], %f0, [%r7];";
    let mut late = Order::new(Policy::Late, 0);
    let found = Bench::new().run(body, clusters(2, 2, 1), &[], &mut late);
    assert!(
        matches!(found, Err(Fault::BarrierMisuse { .. })),
        "{found:?}"
    );
}

#[test]
fn a_multicast_reaches_the_blocks_of_its_mask_alone() {
    // Block 1 of four copies 512 bytes to blocks 0, 1 and 3; block 2 keeps its zeros.
    let body = "
        .shared .align 16 .b8 room[512];
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, room;
        mov.u32 %r21, barrier;
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, %ctaid.x;
        shl.b32 %r3, %r1, 4;
        add.s32 %r4, %r3, %r20;
        mov.u32 %r5, 0;
        st.shared.v4.u32 [%r4], {%r5, %r5, %r5, %r5};
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra initialised;
        mbarrier.init.shared::cta.b64 [%r21], 1;
        setp.eq.s32 %p1, %r2, 2;
        @%p1 bra initialised;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 512;
    initialised:
        fence.mbarrier_init.release.cluster;
        bar.sync 0;
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        setp.eq.s32 %p2, %r2, 1;
        setp.eq.s32 %p3, %r1, 0;
        and.pred %p2, %p2, %p3;
        @!%p2 bra copied;
        ld.param.u64 %d1, [p1];
        mov.u16 %h0, 11;
        mov.u32 %r6, 512;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r20], [%d1], %r6, [%r21], %h0;
    copied:
        setp.eq.s32 %p4, %r2, 2;
        @%p4 bra arrived;
    wait:
        mbarrier.try_wait.parity.shared::cta.b64 %p5, [%r21], 0;
        @!%p5 bra wait;
    arrived:
        ld.shared.v4.u32 {%r7, %r8, %r9, %r10}, [%r4];
        ld.param.u64 %d0, [p0];
        mad.lo.s32 %r11, %r2, 512, %r3;
        cvt.u64.u32 %d2, %r11;
        add.s64 %d0, %d0, %d2;
        st.global.v4.u32 [%d0], {%r7, %r8, %r9, %r10};
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;";
    let numbers = noise(128);
    let rows = [&numbers[..], &numbers, &[0; 128], &numbers];
    check(body, clusters(4, 4, 32), &[&numbers], &rows.concat());
}
