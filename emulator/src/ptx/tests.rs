//! What a module's text says, and what is refused.

use super::Module;

/// A module with one kernel of this body, whose first line is line 9.
fn text(body: &str) -> String {
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry program()\n{{\n.reg .pred %p<4>;\n\
         .reg .b16 %h<4>; .reg .b32 %r<16>; .reg .b64 %d<8>;\n.shared .align 16 .b8 room[64];\n{body}\nret;\n}}\n"
    )
}

/// Line and words of the refusal.
fn refusal(body: &str) -> (u32, String) {
    let fault = Module::parse(&text(body)).expect_err("refused");
    (fault.line, fault.what)
}

#[test]
fn declarations_become_sizes_and_offsets() {
    let module = Module::parse(
        "//\n.version 9.0\n.target sm_90a\n.address_size 64\n\t// .globl one\n\
         .global .align 4 .u32 LIMIT = -1;\n.extern .shared .align 128 .b8 dynamic[];\n\
         .visible .entry one(\n.param .align 8 .b8 one_0[20],\n.param .u64 one_1,\n.param .u32 one_2\n)\n\
         .maxntid 256, 1, 1\n.minnctapersm 2\n{\n.local .align 4 .b8 depot[28];\n.shared .align 16 .b8 a[20];\n\
         .shared .align 8 .b8 b[8];\nret;\n}\n.visible .entry two()\n{\nret;\n}\n",
    )
    .expect("a module");
    assert_eq!(module.kernel_names().collect::<Vec<_>>(), ["one", "two"]);
    let one = module.kernel("one").expect("declared");
    assert_eq!(one.params, [(0, 20), (24, 8), (32, 4)]);
    assert_eq!(one.num_param_bytes, 36);
    assert_eq!(one.static_shared_bytes, 32);
    assert_eq!(one.dynamic_shared_offset(), 128);
    assert_eq!(one.local_bytes, 32);
    assert_eq!(one.max_block_threads, 256);
    let two = module.kernel("two").expect("declared");
    assert_eq!(
        (
            two.num_param_bytes,
            two.static_shared_bytes,
            two.max_block_threads
        ),
        (0, 0, 1024)
    );
    assert!(module.kernel("three").is_none());
}

#[test]
fn unknown_instructions_are_refused_with_their_line() {
    for body in [
        "sin.approx.f32 %r0, %r1;",
        "ld.weird.global.u32 %r0, [%d0];",
        "bar.red.popc.u32 %r0, 0, %p0;",
        "mbarrier.test_wait.shared::cta.b64 %p0, [%r0], %d0;",
        "cp.async.bulk.commit_group;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%r0,%r1,%r2,%r3}, %d0, %d1, %p0, 1, 1;",
        "atom.global.inc.u32 %r0, [%d0], %r1;",
    ] {
        let (line, what) = refusal(&format!("mov.b32 %r0, 1;\n{body}"));
        assert_eq!(line, 10, "{body}");
        let opcode = body
            .split(' ')
            .next()
            .expect("an opcode")
            .trim_end_matches(';');
        assert!(what.contains(opcode), "{what}");
    }
}

#[test]
fn operands_must_be_what_the_instruction_takes() {
    for (body, words) in [
        ("add.s32 %r0, %r1, %d2;", "W64"),
        ("add.s64 %d0, %r1, 1;", "W32"),
        ("add.s32 %r0, %r1;", "expected 3 operands, got 2"),
        ("add.s32 %r16, %r1, 1;", "%r16"),
        ("add.s32 5, %r1, 1;", "register to write"),
        ("add.s32 %tid.x, %r1, 1;", "register to write"),
        ("selp.b32 %r0, 1, 0, %r1;", "Predicate"),
        ("@%r1 add.s32 %r0, %r1, 1;", "no predicate"),
        ("bra nowhere;", "nowhere"),
        ("mov.u64 %d0, nothing;", "nothing"),
        ("ld.global.v2.u32 {%r0}, [%d0];", "got 1 data registers"),
        ("ld.global.u64 %r0, [%d0];", "does not fit"),
        ("ld.global.u32 %h0, [%d0];", "does not fit"),
        ("st.shared.u32 [%p0], %r0;", "32 or 64 bits"),
        ("cp.async.ca.shared.global [%r0], [%d0], 3;", "3 bytes"),
        ("{ .reg .b32 inner; }\nmov.b32 inner, 1;", "inner"),
    ] {
        let (line, what) = refusal(body);
        assert!(what.contains(words), "{body}: {what}");
        assert_eq!(line, if body.contains('\n') { 10 } else { 9 }, "{body}");
    }
}

#[test]
fn hints_are_taken_and_do_nothing() {
    let body = "prefetch.global.L2 [%d0];";
    Module::parse(&text(body)).expect(body);
}

#[test]
fn texts_that_end_early_are_refused() {
    let whole = text("mov.b32 %r0, 1;");
    let cut = &whole[..whole.len() - 3];
    assert!(Module::parse(cut).expect_err("no end").what.contains("end"));
    assert!(Module::parse(&whole).is_ok());
}

#[test]
fn registers_whose_lives_do_not_meet_share_planes() {
    // A chain: each value is read once, right behind its instruction.
    let chain: String = (1..500)
        .map(|at| format!("add.s32 %c{at}, %c{}, {at};\n", at - 1))
        .collect();
    let body = format!(".reg .b32 %c<500>;\nmov.b32 %c0, 1;\n{chain}st.shared.u32 [room], %c499;");
    let module = Module::parse(&text(&body)).expect("a module");
    let num_planes = module.kernel("program").expect("declared").num_planes;
    assert!(
        num_planes <= super::inst::fixed::NUM_PLANES + 2,
        "{num_planes}"
    );
    // The same values, all of them summed at the end.
    let sum: String = (1..500)
        .map(|at| format!("add.s32 %c0, %c0, %c{at};\n"))
        .collect();
    let body =
        format!(".reg .b32 %c<500>;\nmov.b32 %c0, 1;\n{chain}{sum}st.shared.u32 [room], %c0;");
    let module = Module::parse(&text(&body)).expect("a module");
    let num_planes = module.kernel("program").expect("declared").num_planes;
    assert!(
        num_planes >= super::inst::fixed::NUM_PLANES + 500,
        "{num_planes}"
    );
}
