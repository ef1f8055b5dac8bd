//! Gives virtual registers planes and finishes a kernel.
//!
//! Unrolled kernels name thousands of registers, few of which live at once; sharing planes keeps a warp's registers in
//! the cache. A register's interval reaches from its first to its last instruction and over every block of
//! instructions that it is live through; registers whose intervals do not meet share planes. Lanes that run apart do no
//! harm, since writes touch their own lanes only and the intervals hold on every lane's own path.

use std::sync::Arc;

use super::draft::Draft;
use super::inst::{ALWAYS, Args, CONSTANT, Inst, Op, Slot, Width, fixed};
use super::names::Names;
use super::{Kernel, PtxError};

/// Builds the kernel of a body; the module's variables are still to be added.
pub fn finish(
    name: &str,
    names: Names<'_>,
    mut body: Vec<Draft<'_>>,
    max_block_threads: u32,
) -> Result<Kernel, PtxError> {
    let last_line = body.last().map_or(1, |draft| draft.line);
    let guard = ALWAYS << 1;
    body.push(Draft {
        line: last_line,
        guard,
        op: Op::Exit,
        label: None,
        uses: Vec::new(),
    });
    for draft in &mut body {
        if let Some(label) = draft.label {
            let unknown = || PtxError::new(draft.line, format!("unknown label `{label}`"));
            draft.op = Op::Branch(names.label(label).ok_or_else(unknown)?);
        }
    }
    let intervals = intervals(&body, names.num_registers);
    let (planes, num_planes) = assign(&body, &intervals);
    let plane = |slot: Slot, width: Width| match width {
        Width::Predicate => slot,
        _ if slot & CONSTANT != 0 => slot,
        _ => planes[slot as usize],
    };
    let mut operands = Vec::new();
    let mut code = Vec::with_capacity(body.len());
    for draft in &body {
        let slots: Vec<Slot> = draft
            .uses
            .iter()
            .map(|used| plane(used.slot, used.width))
            .collect();
        let args = match draft.op {
            Op::Alu(_) => {
                let at = |index: usize| slots.get(index).copied().unwrap_or_default();
                Args {
                    d: at(0),
                    a: at(1),
                    b: at(2),
                    c: at(3),
                }
            }
            _ => Args {
                d: operands.len() as Slot,
                a: slots.len() as Slot,
                b: 0,
                c: 0,
            },
        };
        if !matches!(draft.op, Op::Alu(_)) {
            operands.extend(slots);
        }
        code.push(Inst {
            op: draft.op,
            guard: draft.guard,
            args,
        });
    }
    Ok(Kernel {
        name: name.to_owned(),
        num_param_bytes: names
            .params
            .last()
            .map_or(0, |(offset, bytes)| offset + bytes),
        params: names.params,
        static_shared_bytes: names.shared_bytes,
        local_bytes: names.local_bytes.next_multiple_of(16),
        max_block_threads,
        code,
        lines: body.iter().map(|draft| draft.line).collect(),
        operands,
        globals: Arc::default(),
        constants: names.planes,
        num_planes,
        num_predicates: names.num_predicates,
    })
}

/// First and last instruction of every virtual register; registers that nothing names have `first > last`.
type Intervals = Vec<(u32, u32)>;

/// A run of instructions that is entered at its first and left behind its last.
struct Block {
    start: usize,
    end: usize,
    next: [Option<usize>; 2],
}

fn blocks(body: &[Draft<'_>]) -> Vec<Block> {
    let mut is_start = vec![false; body.len() + 1];
    is_start[0] = true;
    for (at, draft) in body.iter().enumerate() {
        match draft.op {
            Op::Branch(target) => {
                is_start[target as usize] = true;
                is_start[at + 1] = true;
            }
            Op::Exit => is_start[at + 1] = true,
            _ => {}
        }
    }
    let starts: Vec<usize> = (0..body.len()).filter(|&at| is_start[at]).collect();
    let mut block_at = vec![0; body.len() + 1];
    for (block, &start) in starts.iter().enumerate() {
        block_at[start] = block;
    }
    let ends = starts.iter().skip(1).copied().chain([body.len()]);
    starts
        .iter()
        .zip(ends)
        .map(|(&start, end)| {
            let last = &body[end - 1];
            let behind = (end < body.len()).then(|| block_at[end]);
            let is_certain = last.guard == ALWAYS << 1;
            let next = match last.op {
                Op::Branch(target) => [
                    Some(block_at[target as usize]),
                    behind.filter(|_| !is_certain),
                ],
                Op::Exit => [None, behind.filter(|_| !is_certain)],
                _ => [None, behind],
            };
            Block { start, end, next }
        })
        .collect()
}

/// Registers that an instruction reads, then those that it writes. A write under a guard keeps the other lanes' values,
/// so it counts as a read too.
fn for_each_register(draft: &Draft<'_>, mut visit: impl FnMut(usize, bool, bool)) {
    let is_partial = draft.guard != ALWAYS << 1;
    for used in &draft.uses {
        if used.width != Width::Predicate && used.slot & CONSTANT == 0 {
            visit(
                used.slot as usize,
                used.reads || (is_partial && used.writes),
                used.writes,
            );
        }
    }
}

fn intervals(body: &[Draft<'_>], num_registers: Slot) -> Intervals {
    let num_words = (num_registers as usize).div_ceil(64);
    let blocks = blocks(body);
    let mut reads = vec![0u64; blocks.len() * num_words];
    let mut writes = vec![0u64; blocks.len() * num_words];
    let mut intervals: Intervals = vec![(u32::MAX, 0); num_registers as usize];
    for (number, block) in blocks.iter().enumerate() {
        let range = number * num_words..(number + 1) * num_words;
        let (reads, writes) = (&mut reads[range.clone()], &mut writes[range]);
        for (at, draft) in body.iter().enumerate().take(block.end).skip(block.start) {
            for_each_register(draft, |register, is_read, _| {
                let bit = 1 << (register % 64);
                if is_read && writes[register / 64] & bit == 0 {
                    reads[register / 64] |= bit;
                }
                extend(&mut intervals[register], at as u32);
            });
            for_each_register(draft, |register, _, is_written| {
                writes[register / 64] |= u64::from(is_written) << (register % 64);
            });
        }
    }
    // `reads` grows to what is live at each block's start.
    let mut has_changed = true;
    while has_changed {
        has_changed = false;
        for number in (0..blocks.len()).rev() {
            for next in blocks[number].next.into_iter().flatten() {
                for word in 0..num_words {
                    let at = number * num_words + word;
                    let live = reads[at] | (reads[next * num_words + word] & !writes[at]);
                    has_changed |= live != reads[at];
                    reads[at] = live;
                }
            }
        }
    }
    let mut extend_all = |live: &[u64], at: usize| {
        for (word, &bits) in live.iter().enumerate() {
            let mut bits = bits;
            while bits != 0 {
                extend(
                    &mut intervals[word * 64 + bits.trailing_zeros() as usize],
                    at as u32,
                );
                bits &= bits - 1;
            }
        }
    };
    for (number, block) in blocks.iter().enumerate() {
        extend_all(
            &reads[number * num_words..(number + 1) * num_words],
            block.start,
        );
        for next in block.next.into_iter().flatten() {
            extend_all(
                &reads[next * num_words..(next + 1) * num_words],
                block.end - 1,
            );
        }
    }
    intervals
}

fn extend(interval: &mut (u32, u32), at: u32) {
    *interval = (interval.0.min(at), interval.1.max(at));
}

/// The first plane of every register, and how many planes there are.
fn assign(body: &[Draft<'_>], intervals: &Intervals) -> (Vec<Slot>, Slot) {
    let num_registers = intervals.len();
    let mut is_wide = vec![false; num_registers];
    for draft in body {
        for used in draft.uses.iter().filter(|used| used.slot & CONSTANT == 0) {
            if used.width == Width::W64 {
                is_wide[used.slot as usize] = true;
            }
        }
    }
    let is_assigned = |register: usize| register >= fixed::NUM_PLANES as usize;
    let mut starts = vec![Vec::new(); body.len()];
    let mut ends = vec![Vec::new(); body.len()];
    for (register, &(first, last)) in intervals.iter().enumerate() {
        if is_assigned(register) && first <= last {
            starts[first as usize].push(register);
            ends[last as usize].push(register);
        }
    }
    let mut planes: Vec<Slot> = (0..num_registers as Slot).collect();
    let mut num_planes = fixed::NUM_PLANES;
    let mut free: [Vec<Slot>; 2] = Default::default();
    for at in 0..body.len() {
        // What ends here is read before what starts here is written.
        let (late, early): (Vec<usize>, Vec<usize>) = ends[at]
            .iter()
            .partition(|&&register| intervals[register].0 as usize == at);
        for register in early {
            free[usize::from(is_wide[register])].push(planes[register]);
        }
        for &register in &starts[at] {
            let wide = usize::from(is_wide[register]);
            planes[register] = free[wide].pop().unwrap_or_else(|| {
                let plane = num_planes;
                num_planes += 1 + wide as Slot;
                plane
            });
        }
        for register in late {
            free[usize::from(is_wide[register])].push(planes[register]);
        }
    }
    (planes, num_planes)
}
