//! Runs a grid: who runs next, when what is in flight lands, and when nothing can go on any more.
//!
//! Some blocks run at once, more when those cannot go on without. In a round each warp of each gets a turn. A round in
//! which no warp did anything that another could see lets something land; many such rounds with nothing left to land
//! are a deadlock.

use std::ops::Range;

use crate::async_ops::Flight;
use crate::block::Block;
use crate::cluster_barrier::ClusterBarrier;
use crate::exchange::misuse;
use crate::fault::{Fault, Place, Wait};
use crate::machine::Machine;
use crate::memory::GlobalMemory;
use crate::order::{Order, Policy};
use crate::ptx::Kernel;
use crate::races::{self, Races};

/// The environment variable that says how many warp instructions a launch may run.
pub const BUDGET_VARIABLE: &str = "PTX_EMULATOR_MAX_INSTRUCTIONS";

/// The budget where the variable is not set.
const DEFAULT_BUDGET: u64 = 2_000_000_000;

/// Blocks that run at once, where there are as many.
const RESIDENT_BLOCKS: u32 = 16;

/// Instructions of a turn, where it is not drawn.
const TURN_INSTRUCTIONS: u32 = 2000;

/// The longest turn in a random order.
const MAX_RANDOM_INSTRUCTIONS: u32 = 300;

/// Rounds in which nothing happens that make a deadlock: loops that look for something may count before they look.
const IDLE_ROUNDS: u32 = 1000;

/// The most that lands at a time.
const MAX_LANDINGS: u32 = 1 << 16;

/// The shape of a launch; grids, blocks and clusters have one dimension here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GridLaunch {
    /// Blocks of the grid.
    pub num_blocks: u32,
    /// Threads of a block.
    pub block_threads: u32,
    /// Blocks of a cluster; one without clusters.
    pub cluster_blocks: u32,
    /// Bytes of shared memory beyond what the kernel declares.
    pub dynamic_shared_bytes: u32,
}

impl GridLaunch {
    fn check(&self, kernel: &Kernel, params: &[u8]) -> Result<(), Fault> {
        let refuse = |what: String| Err(Fault::Unsupported { what, place: None });
        let name = &kernel.name;
        if self.block_threads == 0 || self.block_threads > kernel.max_block_threads {
            let max = kernel.max_block_threads;
            return refuse(format!(
                "{} threads a block, {name} takes 1 to {max}",
                self.block_threads
            ));
        }
        if self.cluster_blocks == 0 || !self.num_blocks.is_multiple_of(self.cluster_blocks) {
            return refuse(format!(
                "{} blocks in clusters of {}",
                self.num_blocks, self.cluster_blocks
            ));
        }
        if params.len() != kernel.num_param_bytes as usize {
            let expected = kernel.num_param_bytes;
            return refuse(format!(
                "{} bytes of parameters, {name} takes {expected}",
                params.len()
            ));
        }
        Ok(())
    }
}

/// What is watched beside every access's bounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checks {
    /// The most warp instructions that a launch may run.
    pub max_instructions: u64,
    /// Whether accesses to shared memory that nothing orders are faults.
    pub finds_races: bool,
}

impl Default for Checks {
    fn default() -> Self {
        Checks {
            max_instructions: DEFAULT_BUDGET,
            finds_races: false,
        }
    }
}

impl Checks {
    /// What the environment asks for.
    pub fn from_env() -> Result<Self, Fault> {
        Ok(Checks {
            max_instructions: budget()?,
            finds_races: races::is_wanted()?,
        })
    }
}

/// Runs `kernel` to its end.
pub fn run(
    kernel: &Kernel,
    launch: &GridLaunch,
    params: &[u8],
    memory: &GlobalMemory,
    order: &mut Order,
    checks: Checks,
) -> Result<(), Fault> {
    launch.check(kernel, params)?;
    let max_instructions = checks.max_instructions;
    // Parameters are read at their own alignment.
    let mut aligned = vec![0u128; params.len().div_ceil(size_of::<u128>())];
    // SAFETY: the words have at least as many bytes as `params`, and any bytes make words.
    let params = unsafe {
        let start = aligned.as_mut_ptr().cast::<u8>();
        start.copy_from_nonoverlapping(params.as_ptr(), params.len());
        std::slice::from_raw_parts(start, params.len())
    };
    let mut machine = Machine::new(kernel, launch, params, memory, order, max_instructions);
    if checks.finds_races {
        let block_warps = machine.block_warps();
        let unwatched = std::env::var(races::UNWATCHED_VARIABLE).unwrap_or_default();
        let races = Races::new(&kernel.name, launch.cluster_blocks, block_warps)
            .without_reads_of(&unwatched);
        machine.memories.races = Some(Box::new(races));
    }
    Grid {
        blocks: Vec::new(),
        next_cluster: 0,
    }
    .run(&mut machine, max_instructions)
}

fn budget() -> Result<u64, Fault> {
    let Ok(text) = std::env::var(BUDGET_VARIABLE) else {
        return Ok(DEFAULT_BUDGET);
    };
    text.parse().map_err(|_| {
        let what = format!("{BUDGET_VARIABLE} is `{text}`, expected a number of instructions");
        Fault::Unsupported { what, place: None }
    })
}

/// The blocks that run, and which comes next.
struct Grid {
    blocks: Vec<Block>,
    next_cluster: u32,
}

impl Grid {
    fn run(&mut self, machine: &mut Machine<'_>, max_instructions: u64) -> Result<(), Fault> {
        let mut idle_rounds = 0;
        // What lands when nobody can go on: one, and twice as many for each time that this helped nobody.
        let mut num_to_land = 1;
        loop {
            while (self.blocks.len() as u32) < RESIDENT_BLOCKS && self.start_cluster(machine) {}
            if self.blocks.is_empty() {
                return Ok(());
            }
            let is_busy = self.round(machine)?;
            self.end_blocks(machine)?;
            if machine.instructions_left == 0 {
                let kernel = machine.kernel.name.clone();
                return Err(Fault::Runaway {
                    kernel,
                    max_instructions,
                    waits: self.waits(machine),
                });
            }
            if is_busy {
                (idle_rounds, num_to_land) = (0, 1);
                continue;
            }
            let mut num_landed = 0;
            while num_landed < num_to_land && self.land_one(machine)? {
                num_landed += 1;
            }
            num_to_land = (2 * num_to_land).min(MAX_LANDINGS);
            if num_landed > 0 || self.start_cluster(machine) {
                idle_rounds = 0;
            } else {
                idle_rounds += 1;
                if idle_rounds == IDLE_ROUNDS {
                    let kernel = machine.kernel.name.clone();
                    return Err(Fault::Deadlock {
                        kernel,
                        waits: self.waits(machine),
                    });
                }
            }
        }
    }

    /// Gives every warp a turn; whether any did something.
    fn round(&mut self, machine: &mut Machine<'_>) -> Result<bool, Fault> {
        let mut is_busy = false;
        let is_random = machine.order.policy() == Policy::Random;
        let num_blocks = self.blocks.len();
        let first = if is_random {
            machine.order.below(num_blocks as u32) as usize
        } else {
            0
        };
        for block in (0..num_blocks).map(|at| (first + at) % num_blocks) {
            let block = &mut self.blocks[block];
            let num_warps = block.warps.len();
            let first = if is_random {
                machine.order.below(num_warps as u32) as usize
            } else {
                0
            };
            for warp in (0..num_warps).map(|at| (first + at) % num_warps) {
                let quantum = match is_random {
                    true => 1 + machine.order.below(MAX_RANDOM_INSTRUCTIONS),
                    false => TURN_INSTRUCTIONS,
                };
                is_busy |= block.turn(machine, warp, quantum)?;
                if machine.instructions_left == 0 {
                    return Ok(true);
                }
            }
        }
        if is_random && machine.order.below(2) == 0 {
            // This alone makes no round a busy one: where nobody can go on, more lands than one.
            self.land_one(machine)?;
        }
        Ok(is_busy)
    }

    /// Starts the next cluster's blocks, if there is one.
    fn start_cluster(&mut self, machine: &mut Machine<'_>) -> bool {
        let cluster_blocks = machine.launch.cluster_blocks;
        let first = self.next_cluster * cluster_blocks;
        if first >= machine.launch.num_blocks {
            return false;
        }
        let num_warps = cluster_blocks * machine.block_warps();
        if let Some(races) = &mut machine.memories.races {
            races.start_cluster(self.next_cluster);
        }
        machine.clusters[self.next_cluster as usize] =
            Some(ClusterBarrier::new(num_warps as usize));
        for block in first..first + cluster_blocks {
            let block = Block::new(machine, block);
            self.blocks.push(block);
        }
        self.next_cluster += 1;
        true
    }

    /// Takes ended blocks out.
    fn end_blocks(&mut self, machine: &mut Machine<'_>) -> Result<(), Fault> {
        for block in self.blocks.iter().filter(|block| block.has_ended()) {
            if let Some(flight) = machine.flights.towards(block.index) {
                let Flight {
                    num_bytes, origin, ..
                } = flight;
                let what = format!(
                    "block {} ends before {num_bytes} bytes that are sent to it arrive",
                    block.index
                );
                let place = Place {
                    kernel: machine.kernel.name.clone(),
                    line: origin.line,
                    block: origin.block,
                    warp: origin.warp,
                    lane: Some(origin.lane),
                };
                return Err(misuse(what).at(|| place));
            }
            machine.memories.end_block(block.index);
            if let Some(races) = &mut machine.memories.races {
                races.end_block(block.index);
            }
        }
        self.blocks.retain(|block| !block.has_ended());
        Ok(())
    }

    /// Lets something land that is in flight; whether there was anything.
    fn land_one(&mut self, machine: &mut Machine<'_>) -> Result<bool, Fault> {
        let block_warps = machine.block_warps() as usize;
        let num_warps = self.blocks.len() * block_warps;
        let first = match machine.order.policy() {
            Policy::Random => machine.order.below(num_warps as u32 + 1) as usize,
            _ => num_warps,
        };
        let mut land_copies = |mut numbers: Range<usize>, machine: &mut Machine<'_>| {
            numbers.try_fold(false, |has_landed, number| {
                let warp = &mut self.blocks[number / block_warps].warps[number % block_warps];
                let (order, memories) = (&mut *machine.order, &mut machine.memories);
                Ok(has_landed || warp.copies.land_one(order, memories)?)
            })
        };
        // Flights come first or, in a random order, behind some warps.
        Ok(land_copies(first..num_warps, machine)?
            || machine
                .flights
                .land_one(machine.order, &mut machine.memories)?
            || land_copies(0..first, machine)?)
    }

    fn waits(&self, machine: &Machine<'_>) -> Vec<Wait> {
        self.blocks
            .iter()
            .flat_map(|block| &block.warps)
            .flat_map(|warp| warp.waits(machine))
            .collect()
    }
}
