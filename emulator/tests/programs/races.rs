//! Accesses to shared memory that nothing orders are found in every order, at the instruction that comes second.

use super::copies::{FREE, WAIT_FULL, double_buffered, ring};
use super::{Bench, module_text, noise, one_block, orders};
use ptx_emulator::fault::Fault;

/// Holds that a body with an output and an input of words races, at a line with one of `marked`.
fn expect_race(body: &str, threads: u32, num_words: usize, marked: &[&str]) {
    let text = module_text(2, body);
    let lines: Vec<&str> = text.lines().collect();
    for mut order in orders() {
        let mut bench = Bench::new();
        bench.checks.finds_races = true;
        let params = [bench.zeros(num_words), bench.words(&noise(num_words))];
        let found = bench.run(body, one_block(threads), &params, &mut order);
        let Err(Fault::Race {
            what,
            place: Some(place),
        }) = &found
        else {
            panic!("{found:?} in {order:?}");
        };
        let line = lines[place.line as usize - 1];
        assert!(
            marked.iter().any(|mark| line.contains(mark)),
            "{line}: {what}"
        );
    }
}

#[test]
fn a_missing_barrier_of_the_block() {
    let body = "
        .shared .align 16 .b8 words[256];
        mov.u32 %r20, words;
        mov.u32 %r1, %tid.x;
        shl.b32 %r2, %r1, 2;
        add.s32 %r2, %r2, %r20;
        st.shared.u32 [%r2], %r1;
        xor.b32 %r3, %r1, 32;
        shl.b32 %r3, %r3, 2;
        add.s32 %r3, %r3, %r20;
        ld.shared.u32 %r4, [%r3];";
    // Whichever of the two accesses comes second in an order.
    expect_race(body, 64, 1, &["ld.shared", "st.shared"]);
}

#[test]
fn a_missing_second_barrier_of_a_loop() {
    let mut body = double_buffered("cp.async.wait_group 1;");
    let second = body.rfind("bar.sync 0;").expect("there are two");
    body.replace_range(second..second + "bar.sync 0;".len(), "");
    expect_race(&body, 64, 512, &["cp.async.ca", "ld.shared"]);
}

#[test]
fn copies_that_nobody_waited_for() {
    for wait in ["", "cp.async.wait_group 2;"] {
        expect_race(&double_buffered(wait), 64, 512, &["ld.shared"]);
    }
}

#[test]
fn a_bulk_copy_read_without_its_barrier() {
    // The block's barrier orders who asked for the copy, not the copy.
    let program = |wait: &str| {
        format!(
            "
        .shared .align 128 .b8 slot[256];
        .shared .align 8 .b8 full[8];
        mov.u32 %r20, slot;
        mov.u32 %r21, full;
        mov.u32 %r1, %tid.x;
        ld.param.u64 %d0, [p0];
        ld.param.u64 %d1, [p1];
        mul.wide.u32 %d2, %r1, 4;
        add.s64 %d0, %d0, %d2;
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra asked;
        mbarrier.init.shared::cta.b64 [%r21], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r21], 256;
        cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r20], [%d1], 256, [%r21];
    asked:
        bar.sync 0;
        {wait}
        shl.b32 %r2, %r1, 2;
        add.s32 %r2, %r2, %r20;
        ld.shared.u32 %r3, [%r2];
        st.global.u32 [%d0], %r3;"
        )
    };
    // Copies need sizes in registers.
    let program = |wait| {
        program(wait)
            .replace("256, [%r21];\n    asked", "%r5, [%r21];\n    asked")
            .replace("mov.u32 %r1,", "mov.u32 %r5, 256;\n        mov.u32 %r1,")
    };
    expect_race(&program(""), 64, 64, &["ld.shared"]);
    let wait = "wait:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r21], 0;
        @!%p1 bra wait;";
    let numbers = noise(64);
    super::check(&program(wait), one_block(64), &[&numbers], &numbers);
}

#[test]
fn a_slot_freed_before_it_is_read() {
    let early = format!(
        "{WAIT_FULL}
        add.s32 %r8, %r22, %r5;
        mbarrier.arrive.shared::cta.b64 _, [%r8];"
    );
    expect_race(
        &ring(&early, ""),
        64,
        1280,
        &["ld.shared.v4", "cp.async.bulk"],
    );
}

#[test]
fn an_mbarrier_used_before_its_initialisation_is_known() {
    let body = ring(WAIT_FULL, FREE).replacen("bar.sync 0;", "", 1);
    let text = module_text(2, &body);
    assert_eq!(text.matches("bar.sync 0;").count(), 1);
    for mut order in orders() {
        let mut bench = Bench::new();
        bench.checks.finds_races = true;
        let params = [bench.zeros(32), bench.words(&noise(1280))];
        let found = bench.run(&body, one_block(64), &params, &mut order);
        // Who comes before the initialisation finds no barrier at all.
        assert!(
            matches!(found, Err(Fault::Race { .. } | Fault::BarrierMisuse { .. })),
            "{found:?}"
        );
    }
}

#[test]
fn memory_of_a_product_overwritten_before_its_wait() {
    let program = |middle: &str| {
        format!(
            "
        .shared .align 128 .b8 tile[2560];
        mov.u32 %r20, tile;
        mov.u32 %r1, %tid.x;
        mov.u32 %r2, 0;
        shl.b32 %r3, %r1, 2;
        add.s32 %r3, %r3, %r20;
        st.shared.u32 [%r3], %r2;
        st.shared.u32 [%r3+512], %r2;
        st.shared.u32 [%r3+1024], %r2;
        st.shared.u32 [%r3+1536], %r2;
        st.shared.u32 [%r3+2048], %r2;
        bar.sync 0;
        shr.u32 %r8, %r20, 4;
        cvt.u64.u32 %d5, %r8;
        or.b64 %d5, %d5, 0x0000000800400000;
        add.s32 %r9, %r20, 2048;
        shr.u32 %r9, %r9, 4;
        cvt.u64.u32 %d6, %r9;
        or.b64 %d6, %d6, 0x0000000800100000;
        setp.ne.u32 %p1, %r20, 0;
        wgmma.fence.sync.aligned;
        wgmma.mma_async.sync.aligned.m64n16k32.s32.s8.s8 {{%r30,%r31,%r32,%r33,%r34,%r35,%r36,%r37}}, %d5, %d6, %p1;
        wgmma.commit_group.sync.aligned;
        {middle}
        st.shared.u32 [%r3+2048], %r2;
        wgmma.wait_group.sync.aligned 0;"
        )
    };
    expect_race(
        &program("bar.sync 0;"),
        128,
        1,
        &["st.shared.u32 [%r3+2048]"],
    );
    let good = program("wgmma.wait_group.sync.aligned 0;\nbar.sync 0;");
    super::check(&good, one_block(128), &[&[0]], &[0]);
}
