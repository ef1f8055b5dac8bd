//! What goes wrong is named: kind, instruction, block, warp and lane.

use super::{Bench, module_text, noise, one_block, orders};
use ptx_emulator::fault::{Fault, Place, Space};
use ptx_emulator::grid::{GridLaunch, run};
use ptx_emulator::ptx::Module;

/// The fault of a body under every schedule, and the line of the text that holds `marked`.
fn faults(body: &str, launch: GridLaunch, num_words: usize, marked: &str) -> Vec<(Fault, u32)> {
    let text = module_text(1, body);
    let line = text
        .lines()
        .position(|line| line.contains(marked))
        .expect("the line is there") as u32
        + 1;
    let run = |mut order| {
        let bench = Bench::new();
        let out = bench.zeros(num_words);
        let found = bench.run(body, launch, &[out], &mut order);
        (found.expect_err("the program is wrong"), line)
    };
    orders().into_iter().map(run).collect()
}

fn place(line: u32, block: u32, warp: u32, lane: Option<u32>) -> Option<Place> {
    Some(Place {
        kernel: "program".to_owned(),
        line,
        block,
        warp,
        lane,
    })
}

const STORE_OWN: &str = "
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r0, %r2, %r3, %r1;
    ld.param.u64 %d0, [p0];
    mul.wide.u32 %d2, %r0, 4;
    add.s64 %d0, %d0, %d2;
    st.global.u32 [%d0], %r0;";

#[test]
fn the_first_lane_beyond_an_allocation_is_named() {
    // 2 blocks of 64 threads store 100 words: thread 100 is lane 4 of warp 1 of block 1.
    let launch = GridLaunch {
        num_blocks: 2,
        ..one_block(64)
    };
    for (fault, line) in faults(STORE_OWN, launch, 100, "st.global") {
        let Fault::OutOfBounds {
            space,
            num_bytes,
            place: found,
            ..
        } = &fault
        else {
            panic!("{fault}");
        };
        assert_eq!(
            (*space, *num_bytes, found),
            (Space::Global, 4, &place(line, 1, 1, Some(4))),
            "{fault}"
        );
        let text = fault.to_string();
        let words = [
            "program",
            &format!("PTX line {line}"),
            "block 1",
            "warp 1",
            "lane 4",
            "400 bytes",
        ];
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

#[test]
fn addresses_between_elements_are_named() {
    let body = STORE_OWN.replace("mul.wide.u32 %d2, %r0, 4;", "mul.wide.u32 %d2, %r0, 2;");
    for (fault, line) in faults(&body, one_block(32), 100, "st.global") {
        let Fault::Misaligned {
            alignment,
            place: found,
            ..
        } = &fault
        else {
            panic!("{fault}");
        };
        assert_eq!((*alignment, found), (4, &place(line, 0, 0, Some(1))));
    }
}

#[test]
fn shared_memory_ends_where_it_was_declared() {
    let body = "
        .shared .align 4 .b8 words[128];
        mov.u32 %r20, words;
        mov.u32 %r1, %tid.x;
        mul.lo.s32 %r2, %r1, 8;
        add.s32 %r2, %r2, %r20;
        ld.shared.u32 %r3, [%r2];";
    for (fault, line) in faults(body, one_block(32), 1, "ld.shared") {
        let Fault::OutOfBounds {
            space: Space::Shared,
            place: found,
            ..
        } = &fault
        else {
            panic!("{fault}");
        };
        assert_eq!(found, &place(line, 0, 0, Some(16)));
    }
}

#[test]
fn copies_are_checked_when_they_are_issued() {
    let body = "
        .shared .align 16 .b8 words[16];
        mov.u32 %r20, words;
        ld.param.u64 %d0, [p0];
        cp.async.ca.shared.global [%r20], [%d0+16], 4;"
        .replace("[%d0+16]", "[%d1]")
        .replace("cp.async", "add.s64 %d1, %d0, 16;\n cp.async");
    for (fault, line) in faults(&body, one_block(1), 4, "cp.async") {
        let Fault::OutOfBounds {
            space: Space::Global,
            place: Some(found),
            ..
        } = &fault
        else {
            panic!("{fault}");
        };
        assert_eq!((found.line, found.block, found.warp), (line, 0, 0));
    }
}

#[test]
fn a_barrier_that_nobody_completes_is_a_deadlock_with_its_waiting_warps() {
    // Two arrivals are expected, one comes.
    let body = "
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, barrier;
        mov.u32 %r1, %tid.x;
        setp.ne.s32 %p0, %r1, 0;
        @%p0 bra initialised;
        mbarrier.init.shared::cta.b64 [%r20], 2;
        mbarrier.arrive.shared::cta.b64 _, [%r20];
    initialised:
        bar.sync 0;
    wait:
        mbarrier.try_wait.parity.shared::cta.b64 %p1, [%r20], 0;
        @!%p1 bra wait;";
    for (fault, line) in faults(body, one_block(64), 1, "try_wait") {
        let Fault::Deadlock { waits, .. } = &fault else {
            panic!("{fault}");
        };
        let found: Vec<_> = waits
            .iter()
            .map(|wait| (wait.block, wait.warp, wait.lanes, wait.line))
            .collect();
        assert_eq!(found, [(0, 0, u32::MAX, line), (0, 1, u32::MAX, line)]);
    }
}

#[test]
fn warps_at_different_barriers_are_a_deadlock() {
    let body = "
        mov.u32 %r1, %tid.x;
        shr.u32 %r2, %r1, 5;
        bar.sync %r2;";
    for (fault, line) in faults(body, one_block(64), 1, "bar.sync") {
        let Fault::Deadlock { waits, .. } = &fault else {
            panic!("{fault}");
        };
        assert!(
            waits.len() == 2 && waits.iter().all(|wait| wait.line == line),
            "{fault}"
        );
    }
}

#[test]
fn a_flag_that_nobody_sets_is_a_deadlock() {
    let body = "
        ld.param.u64 %d0, [p0];
    look:
        ld.volatile.global.u32 %r1, [%d0];
        setp.eq.s32 %p0, %r1, 0;
        @%p0 bra look;";
    for (fault, _) in faults(body, one_block(32), 1, "look") {
        assert!(matches!(fault, Fault::Deadlock { .. }), "{fault}");
    }
}

#[test]
fn a_loop_without_an_end_runs_out_of_its_budget() {
    let body = "
        ld.param.u64 %d0, [p0];
    again:
        add.s32 %r1, %r1, 1;
        st.global.u32 [%d0], %r1;
        bra again;";
    for mut order in orders() {
        let mut bench = Bench::new();
        bench.checks.max_instructions = 100_000;
        let out = bench.zeros(1);
        let found = bench.run(body, one_block(32), &[out], &mut order);
        assert!(
            matches!(
                found,
                Err(Fault::Runaway {
                    max_instructions: 100_000,
                    ..
                })
            ),
            "{found:?}"
        );
    }
}

#[test]
fn lanes_that_miss_a_shuffle_are_found() {
    // Lane 0 stands at another instruction, yet the others name it as a member.
    let body = "
        mov.u32 %r1, %tid.x;
        setp.eq.s32 %p0, %r1, 0;
        @%p0 bra aside;
        shfl.sync.bfly.b32 %r2, %r1, 1, 31, -1;
        ret;
    aside:
        bar.warp.sync -1;";
    for (fault, line) in faults(body, one_block(32), 1, "shfl") {
        match &fault {
            Fault::BarrierMisuse {
                place: Some(found), ..
            } => assert_eq!(found.line, line),
            Fault::Deadlock { waits, .. } => assert!(waits.iter().any(|wait| wait.line == line)),
            _ => panic!("{fault}"),
        }
    }
}

#[test]
fn arrivals_at_what_is_no_barrier_are_misuse() {
    let body = "
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, barrier;
        mbarrier.arrive.shared::cta.b64 _, [%r20];";
    for (fault, line) in faults(body, one_block(1), 1, "mbarrier.arrive") {
        let Fault::BarrierMisuse {
            place: Some(found), ..
        } = &fault
        else {
            panic!("{fault}");
        };
        assert_eq!(found.line, line);
    }
}

#[test]
fn one_arrival_too_many_is_misuse() {
    let body = "
        .shared .align 8 .b8 barrier[8];
        mov.u32 %r20, barrier;
        mbarrier.init.shared::cta.b64 [%r20], 1;
        mbarrier.arrive.expect_tx.shared::cta.b64 _, [%r20], 16;
        mbarrier.arrive.shared::cta.b64 _, [%r20];";
    for (fault, line) in faults(body, one_block(1), 1, "mbarrier.arrive.shared") {
        let Fault::BarrierMisuse {
            place: Some(found), ..
        } = &fault
        else {
            panic!("{fault}");
        };
        assert_eq!(found.line, line);
    }
}

#[test]
fn launches_that_do_not_fit_the_kernel_are_refused() {
    let module = Module::parse(&module_text(1, STORE_OWN)).expect("valid");
    let kernel = module.kernel("program").expect("there");
    let bench = Bench::new();
    let good = one_block(32);
    let cases = [
        (
            GridLaunch {
                block_threads: 2048,
                ..good
            },
            8,
        ),
        (
            GridLaunch {
                num_blocks: 3,
                cluster_blocks: 2,
                ..good
            },
            8,
        ),
        (good, 4),
    ];
    for (launch, num_param_bytes) in cases {
        let params = vec![0; num_param_bytes];
        let found = run(
            kernel,
            &launch,
            &params,
            &bench.memory,
            &mut orders()[0],
            bench.checks,
        );
        assert!(matches!(found, Err(Fault::Unsupported { .. })), "{found:?}");
    }
}

#[test]
fn unknown_instructions_are_refused_by_line() {
    let wrong = [
        "sin.approx.f32 %f0, %f1;",
        "add.sat.s32 %r0, %r1, %r2;",
        "ld.global.b128 %r0, [%d0];",
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%f0,%f1,%f2,%f3}, {%r0,%r1,%r2,%r3}, {%r4,%r5}, {%f0,%f1,%f2,%f3};",
        "add.s32 %r0, %r1;",
        "add.s32 %r0, %r1, %unknown;",
        "add.s32 %r0, %r1, %d1;",
        "bra nowhere;",
    ];
    for instruction in wrong {
        let text = module_text(0, &format!("\n{instruction}"));
        let line = text
            .lines()
            .position(|line| line == instruction)
            .expect("there") as u32
            + 1;
        let error = Module::parse(&text).expect_err(instruction);
        assert_eq!(error.line, line, "{error}");
    }
}

#[test]
fn a_fault_leaves_what_was_done_before_it() {
    // As on a GPU, nothing is rolled back: the launch's memory is as the fault found it.
    let body = "
        ld.param.u64 %d0, [p0];
        mov.u32 %r0, 7;
        st.global.u32 [%d0], %r0;
        st.global.u32 [%d0+4096], %r0;";
    let bench = Bench::new();
    let out = bench.words(&noise(1));
    assert!(
        bench
            .run(body, one_block(1), &[out], &mut orders()[0])
            .is_err()
    );
    assert_eq!(bench.read(out, 1), [7]);
}
