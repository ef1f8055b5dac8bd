//! One warp: 32 lanes, their registers, and the groups of lanes that stand at the same instruction.
//!
//! A group runs until it ends, has to wait, meets another group, or its turn is over. Where lanes part, the group at the
//! lowest instruction goes on first, so that groups meet again behind a branch; one that loops without end or waits in a
//! loop lets the others run. Instructions of several lanes wait until all lanes that they name stand there.

use crate::alu::RegisterFile;
use crate::async_ops::ThreadCopies;
use crate::fault::{Fault, Place, Wait};
use crate::group_matrix::Product;
use crate::machine::Machine;
use crate::order::Policy;
use crate::ptx::Kernel;
use crate::ptx::inst::{ALWAYS, Inst, Op, Plane, Slot, fixed};

/// Lanes of a warp.
pub const WARP_LANES: u32 = 32;

/// Backward branches after which a group lets others of its warp run.
const PATIENCE: u32 = 256;

/// What a group does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Runs when it is its turn.
    Ready,
    /// Has just looked in vain for what another warp writes.
    Yielded,
    /// Waits at an instruction for other lanes of the warp.
    Lanes,
    /// Has arrived at a barrier of the block.
    BlockBarrier {
        /// Which one.
        identity: u32,
        /// How many threads it waits for, zero for all.
        threads: u32,
    },
    /// Waits for the cluster's barrier.
    Cluster,
    /// Waits at an mbarrier.
    Mbarrier,
}

/// Lanes that stand at the same instruction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// The instruction to run next.
    pub pc: u32,
    /// One bit a lane.
    pub lanes: u32,
    /// What it does.
    pub state: State,
    loops: u32,
}

/// What an instruction leads to.
pub enum Step {
    /// The group goes on behind it.
    Next,
    /// The group goes on behind it, after others.
    NextYielding,
    /// The group stays before it.
    Stay(State),
    /// The group is behind it, but waits.
    Wait(State),
    /// The lanes of the mask end.
    End(u32),
}

/// A warp.
pub struct Warp {
    /// Index of its block in the grid.
    pub block: u32,
    /// Its index in the block.
    pub index: u32,
    /// Lanes that have not ended.
    pub live: u32,
    /// All unfinished lanes, by where they stand.
    pub groups: Vec<Group>,
    /// Whether it arrived somewhere or ended since the block looked.
    pub has_news: bool,
    /// Copies of single threads in flight.
    pub copies: ThreadCopies,
    /// Asynchronous matrix products in flight.
    pub products: Vec<Product>,
    /// Bytes of all lanes' local memory.
    pub local: Vec<u8>,
    planes: Vec<Plane>,
    predicates: Vec<u32>,
}

impl Warp {
    /// Warp `index` of block `block` before its first instruction.
    pub fn new(machine: &Machine<'_>, block: u32, index: u32) -> Self {
        let Machine { kernel, launch, .. } = machine;
        let mut planes = vec![Plane([0; 32]); kernel.num_planes as usize];
        let mut set = |slot: Slot, value: &dyn Fn(u32) -> u32| {
            planes[slot as usize] = Plane(std::array::from_fn(|lane| value(lane as u32)));
        };
        set(fixed::THREAD, &|lane| index * WARP_LANES + lane);
        set(fixed::BLOCK_THREADS, &|_| launch.block_threads);
        set(fixed::BLOCK, &|_| block);
        set(fixed::NUM_BLOCKS, &|_| launch.num_blocks);
        set(fixed::LANE, &|lane| lane);
        set(fixed::CLUSTER_RANK, &|_| block % launch.cluster_blocks);
        set(fixed::ONE, &|_| 1);
        let mut predicates = vec![0; kernel.num_predicates as usize];
        predicates[ALWAYS as usize] = u32::MAX;
        let num_lanes = (launch.block_threads - index * WARP_LANES).min(WARP_LANES);
        let live = u32::MAX >> (WARP_LANES - num_lanes);
        Warp {
            block,
            index,
            live,
            groups: vec![Group {
                pc: 0,
                lanes: live,
                state: State::Ready,
                loops: 0,
            }],
            has_news: false,
            copies: ThreadCopies::default(),
            products: Vec::new(),
            local: vec![0; kernel.local_bytes as usize * WARP_LANES as usize],
            planes,
            predicates,
        }
    }

    /// Where the registers lie.
    pub fn file(&mut self, kernel: &Kernel) -> RegisterFile {
        RegisterFile {
            registers: self.planes.as_mut_ptr(),
            constants: kernel.constants.as_ptr(),
            predicates: self.predicates.as_mut_ptr(),
        }
    }

    /// Runs up to `quantum` instructions; whether it ran them all, or did something that others see.
    pub fn turn(&mut self, machine: &mut Machine<'_>, quantum: u32) -> Result<bool, Fault> {
        let effects = machine.effects;
        let mut left = quantum;
        for group in &mut self.groups {
            if matches!(
                group.state,
                State::Yielded | State::Mbarrier | State::Cluster
            ) {
                group.state = State::Ready;
            }
        }
        while let Some(at) = self.pick(machine) {
            left = self.run_group(machine, at, left)?;
            if left == 0 {
                break;
            }
        }
        machine.instructions_left = machine
            .instructions_left
            .saturating_sub(u64::from(quantum - left));
        Ok(left == 0 || machine.effects != effects)
    }

    /// The group to run: the ready one at the lowest instruction, or any in a random order.
    fn pick(&mut self, machine: &mut Machine<'_>) -> Option<usize> {
        if let [only] = &self.groups[..] {
            return (only.state == State::Ready).then_some(0);
        }
        self.merge();
        let ready = |group: &&Group| group.state == State::Ready;
        let num_ready = self.groups.iter().filter(ready).count() as u32;
        if num_ready > 1 && machine.order.policy() == Policy::Random && machine.order.below(4) == 0
        {
            let chosen = machine.order.below(num_ready) as usize;
            return (0..self.groups.len())
                .filter(|&at| ready(&&self.groups[at]))
                .nth(chosen);
        }
        (0..self.groups.len())
            .filter(|&at| ready(&&self.groups[at]))
            .min_by_key(|&at| self.groups[at].pc)
    }

    /// Joins groups that stand at the same instruction and are not behind a barrier.
    pub fn merge(&mut self) {
        self.groups.sort_by_key(|group| group.pc);
        self.groups.dedup_by(|later, earlier| {
            let joins = later.pc == earlier.pc && later.is_before() && earlier.is_before();
            if joins {
                earlier.lanes |= later.lanes;
                earlier.state = State::Ready;
                earlier.loops = 0;
            }
            joins
        });
    }

    /// Runs a group until it has to stop; returns what is left of `left`.
    fn run_group(
        &mut self,
        machine: &mut Machine<'_>,
        at: usize,
        mut left: u32,
    ) -> Result<u32, Fault> {
        let kernel = machine.kernel;
        let file = self.file(kernel);
        let Group { mut pc, lanes, .. } = self.groups[at];
        // The nearest instruction ahead where another group stands.
        let is_alone = self.groups.len() == 1;
        let meeting = self
            .groups
            .iter()
            .filter(|group| group.pc > pc && group.is_before());
        let meeting = meeting.map(|group| group.pc).min().unwrap_or(u32::MAX);
        loop {
            if left == 0 || pc == meeting {
                self.groups[at].pc = pc;
                return Ok(left);
            }
            left -= 1;
            let inst: &Inst = &kernel.code[pc as usize];
            // SAFETY: the decoder numbers predicates below the kernel's count.
            let guard = unsafe { file.predicate(inst.guard >> 1) };
            let mask = lanes & if inst.guard & 1 == 0 { guard } else { !guard };
            match inst.op {
                Op::Alu(run) => {
                    // SAFETY: the decoder checked the operands' widths and gave them planes of this file; functions
                    // are chosen on this CPU.
                    unsafe { run(&file, &inst.args, mask) };
                    pc += 1;
                }
                Op::Nothing => pc += 1,
                Op::Branch(target) => {
                    if mask == 0 {
                        pc += 1;
                    } else if mask == lanes {
                        let is_backward = target <= pc;
                        pc = target;
                        if !is_alone {
                            self.branch(at, target, is_backward);
                            return Ok(left);
                        }
                    } else {
                        let behind = Group {
                            pc: pc + 1,
                            lanes: lanes & !mask,
                            state: State::Ready,
                            loops: 0,
                        };
                        self.groups[at].lanes = mask;
                        self.groups.push(behind);
                        self.branch(at, target, target <= pc);
                        return Ok(left);
                    }
                }
                _ => {
                    let step = self
                        .execute(machine, &file, inst, pc, mask, lanes)
                        .map_err(|fault| fault.at(|| self.place(kernel, pc)))?;
                    match step {
                        Step::Next => pc += 1,
                        Step::NextYielding => {
                            self.groups[at].pc = pc + 1;
                            self.groups[at].state = State::Yielded;
                            return Ok(left);
                        }
                        Step::Stay(state) => {
                            self.groups[at].pc = pc;
                            self.groups[at].state = state;
                            return Ok(left);
                        }
                        Step::Wait(state) => {
                            self.groups[at].pc = pc + 1;
                            self.groups[at].state = state;
                            return Ok(left);
                        }
                        Step::End(ended) => {
                            machine.effects += 1;
                            self.end_lanes(at, pc, ended);
                            return Ok(left);
                        }
                    }
                }
            }
        }
    }

    fn branch(&mut self, at: usize, target: u32, is_backward: bool) {
        let group = &mut self.groups[at];
        group.pc = target;
        if is_backward {
            group.loops += 1;
            if group.loops == PATIENCE {
                group.loops = 0;
                group.state = State::Yielded;
            }
        }
    }

    fn end_lanes(&mut self, at: usize, pc: u32, ended: u32) {
        self.live &= !ended;
        self.groups[at].pc = pc + 1;
        self.groups[at].lanes &= !ended;
        if self.groups[at].lanes == 0 {
            self.groups.swap_remove(at);
        }
        // Who waits for these lanes waits in vain, or need wait no longer.
        for group in &mut self.groups {
            if group.state == State::Lanes {
                group.state = State::Ready;
            }
        }
        self.has_news = true;
    }

    /// Where instruction `pc` of this warp stands.
    pub fn place(&self, kernel: &Kernel, pc: u32) -> Place {
        Place {
            kernel: kernel.name.clone(),
            line: kernel.lines[pc as usize],
            block: self.block,
            warp: self.index,
            lane: None,
        }
    }

    /// Where all unfinished lanes stand, in words.
    pub fn waits(&self, machine: &Machine<'_>) -> Vec<Wait> {
        let describe = |group: &Group| {
            let reason = match group.state {
                State::Ready => "runs".to_owned(),
                State::Yielded => {
                    "looks again and again at what another warp should write".to_owned()
                }
                State::Lanes => format!(
                    "waits for other lanes than {:#010x} of its warp",
                    group.lanes
                ),
                State::BlockBarrier { identity, .. } => {
                    format!("waits at barrier {identity} of its block")
                }
                State::Cluster => "waits for its cluster".to_owned(),
                State::Mbarrier => "waits at an mbarrier".to_owned(),
            };
            // Behind a barrier already, it still waits there.
            let pc = group.pc - u32::from(!group.is_before());
            let line = machine.kernel.lines[pc as usize];
            Wait {
                block: self.block,
                warp: self.index,
                lanes: group.lanes,
                line,
                reason,
            }
        };
        self.groups.iter().map(describe).collect()
    }
}

impl Group {
    /// Whether it stands before its instruction, where another group may join it.
    fn is_before(&self) -> bool {
        !matches!(self.state, State::BlockBarrier { .. })
    }
}
