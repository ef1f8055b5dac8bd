//! Long programs of many registers, drawn at random: what shares a place must not disturb each other.

use ptx_emulator::order::{Order, Policy};

use super::{OWN_WORDS, check, noise, one_block};

/// What an operation makes of two values.
type Operation = fn(u32, u32) -> u32;

/// Operations on 32-bit values, as PTX and as Rust.
const OPERATIONS: [(&str, Operation); 6] = [
    ("add.s32", u32::wrapping_add),
    ("sub.s32", u32::wrapping_sub),
    ("mul.lo.s32", u32::wrapping_mul),
    ("xor.b32", |a, b| a ^ b),
    ("max.u32", u32::max),
    ("min.u32", u32::min),
];

/// One step of a drawn program: register `destination` becomes an operation of two others.
struct Step {
    operation: usize,
    destination: usize,
    sources: [usize; 2],
    /// Whether only lanes whose number is odd take the step.
    is_guarded: bool,
}

/// Steps over `num_registers` registers, any of which may be overwritten.
fn draw(order: &mut Order, num_steps: usize, num_registers: u32) -> Vec<Step> {
    (0..num_steps)
        .map(|_| Step {
            operation: order.below(OPERATIONS.len() as u32) as usize,
            destination: order.below(num_registers) as usize,
            sources: [(); 2].map(|()| order.below(num_registers) as usize),
            is_guarded: order.below(4) == 0,
        })
        .collect()
}

fn text(steps: &[Step]) -> String {
    let line = |step: &Step| {
        let (opcode, _) = OPERATIONS[step.operation];
        let guard = if step.is_guarded { "@%p5 " } else { "" };
        let [a, b] = step.sources;
        format!("{guard}{opcode} %x{}, %x{a}, %x{b};\n", step.destination)
    };
    steps.iter().map(line).collect()
}

fn run(steps: &[Step], lane: usize, values: &mut [u32]) {
    for step in steps
        .iter()
        .filter(|step| !step.is_guarded || lane % 2 == 1)
    {
        let [a, b] = step.sources.map(|source| values[source]);
        values[step.destination] = OPERATIONS[step.operation].1(a, b);
    }
}

#[test]
fn drawn_programs_compute_what_their_steps_say() {
    const NUM_REGISTERS: u32 = 40;
    let inputs = noise(64);
    for seed in 0..20 {
        let mut order = Order::new(Policy::Random, seed);
        let before = draw(&mut order, 100, NUM_REGISTERS);
        let looped = draw(&mut order, 60, NUM_REGISTERS);
        let odd_loops = draw(&mut order, 20, NUM_REGISTERS);
        let after = draw(&mut order, 100, NUM_REGISTERS);
        // Registers start as the input plus their numbers; the loop runs once to seven times, by the lane.
        let start: String = (0..NUM_REGISTERS)
            .map(|at| format!("add.s32 %x{at}, %r10, {at};\n"))
            .collect();
        let sum: String = (1..NUM_REGISTERS)
            .map(|at| format!("mad.lo.s32 %x0, %x0, 31, %x{at};\n"))
            .collect();
        let body = format!(
            "{OWN_WORDS}
            .reg .b32 %x<{NUM_REGISTERS}>;
            ld.global.u32 %r10, [%d1];
            and.b32 %r11, %r1, 1;
            setp.eq.s32 %p5, %r11, 1;
            rem.u32 %r12, %r1, 7;
            mov.u32 %r13, 0;
            {start}{}
        again:
            {}
            and.b32 %r14, %r13, 1;
            setp.eq.s32 %p6, %r14, 0;
            @%p6 bra even;
            {}
        even:
            add.s32 %r13, %r13, 1;
            setp.le.u32 %p7, %r13, %r12;
            @%p7 bra again;
            {}{sum}
            st.global.u32 [%d0], %x0;",
            text(&before),
            text(&looped),
            text(&odd_loops),
            text(&after),
        );
        let expected: Vec<u32> = (inputs.iter().enumerate())
            .map(|(lane, &input)| {
                let mut values: Vec<u32> = (0..NUM_REGISTERS)
                    .map(|at| input.wrapping_add(at))
                    .collect();
                run(&before, lane, &mut values);
                for count in 0..=lane % 7 {
                    run(&looped, lane, &mut values);
                    if count % 2 == 1 {
                        run(&odd_loops, lane, &mut values);
                    }
                }
                run(&after, lane, &mut values);
                let hash = |hash: u32, &value: &u32| hash.wrapping_mul(31).wrapping_add(value);
                values[1..].iter().fold(values[0], hash)
            })
            .collect();
        check(&body, one_block(64), &[&inputs], &expected);
    }
}

#[test]
fn bits_are_selected_and_halves_inverted() {
    let body = format!(
        "{OWN_WORDS}
        ld.global.u32 %r10, [%d1];
        ld.global.u32 %r11, [%d1+4];
        lop3.b32 %r12, %r10, %r11, 0xF0F0F0F0, 0xE2;
        cvt.u16.u32 %h1, %r12;
        not.b16 %h1, %h1;
        cvt.u32.u16 %r13, %h1;
        xor.b32 %r12, %r12, %r13;
        st.global.u32 [%d0], %r12;"
    );
    let words = noise(33);
    let expected: Vec<u32> = words
        .windows(2)
        .map(|pair| pair[0] & pair[1] | 0xF0F0_F0F0 & !pair[1])
        .map(|bits| bits ^ (!bits & 0xFFFF))
        .collect();
    check(&body, one_block(32), &[&words], &expected);
}

#[test]
fn floats_are_rounded_and_cut() {
    let body = format!(
        "{OWN_WORDS}
        ld.global.f32 %f1, [%d1];
        cvt.rni.f32.f32 %f2, %f1;
        cvt.rzi.s32.f32 %r10, %f1;
        cvt.rzi.s32.f32 %r11, %f2;
        shl.b32 %r10, %r10, 16;
        xor.b32 %r10, %r10, %r11;
        st.global.u32 [%d0], %r10;"
    );
    // Halves and quarters around zero, with the nearest integer (the even one of two) and the one towards zero.
    let values: Vec<f32> = (-16..16i8)
        .map(|quarters| f32::from(quarters) / 4.0)
        .collect();
    let words: Vec<u32> = values.iter().map(|value| value.to_bits()).collect();
    let nearest = [
        -4, -4, -4, -3, -3, -3, -2, -2, -2, -2, -2, -1, -1, -1, 0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2,
        2, 3, 3, 3, 4, 4,
    ];
    let expected: Vec<u32> = (-16..16i32)
        .zip(nearest)
        .map(|(quarters, near)| ((quarters / 4) << 16 ^ near) as u32)
        .collect();
    check(&body, one_block(32), &[&words], &expected);
}
