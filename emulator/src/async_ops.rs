//! What is in flight: copies and stores that land after the instruction that asked for them.
//!
//! The interpreter issues and asks for landings; when they happen is up to the [`Order`]: at once, as late as possible
//! with the newest first, or at random, bulk copies in pieces. Nothing here knows warps' programs. Memory is reached
//! through [`Landing`]; what fails there is the fault of the instruction that issued the operation.

use std::collections::VecDeque;

use crate::fault::{Fault, Place};
use crate::mbarrier::Mbarrier;
use crate::order::{Order, Policy};

/// An address in the shared memory of one of the grid's blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SharedPlace {
    /// Index of the block in the grid.
    pub block: u32,
    /// Offset from the start of the block's shared memory.
    pub offset: u32,
}

impl SharedPlace {
    /// The place `num_bytes` further on.
    fn after(self, num_bytes: u32) -> Self {
        Self {
            offset: self.offset + num_bytes,
            ..self
        }
    }
}

/// The instruction that issued an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Line of the PTX text, from one.
    pub line: u32,
    /// Index of the block in the grid.
    pub block: u32,
    /// Index of the warp in the block.
    pub warp: u32,
    /// The lane.
    pub lane: u32,
}

/// Memory as what lands sees it.
pub trait Landing {
    /// The kernel that runs, for faults.
    fn kernel(&self) -> &str;
    /// Copies from global memory.
    fn copy(&mut self, to: SharedPlace, from: u64, num_bytes: u32) -> Result<(), Fault>;
    /// Writes bytes.
    fn write(&mut self, to: SharedPlace, bytes: &[u8]) -> Result<(), Fault>;
    /// Reads a barrier's word.
    fn barrier(&mut self, at: SharedPlace) -> Result<u64, Fault>;
    /// Writes a barrier's word.
    fn set_barrier(&mut self, at: SharedPlace, word: u64) -> Result<(), Fault>;
}

/// Changes the barrier at `at`.
pub fn update_barrier(
    memory: &mut impl Landing,
    at: SharedPlace,
    change: impl FnOnce(&mut Mbarrier) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let mut barrier = Mbarrier::from_word(memory.barrier(at)?)?;
    change(&mut barrier)?;
    memory.set_barrier(at, barrier.to_word())
}

/// The result of an operation that `origin` issued.
fn blame(result: Result<(), Fault>, origin: Origin, memory: &impl Landing) -> Result<(), Fault> {
    result.map_err(|fault| {
        fault.at(|| Place {
            kernel: memory.kernel().to_owned(),
            line: origin.line,
            block: origin.block,
            warp: origin.warp,
            lane: Some(origin.lane),
        })
    })
}

/// An operation whose bytes are counted on a barrier, in the block that they go to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flight {
    /// First byte to write.
    pub to: SharedPlace,
    /// What to write.
    pub cargo: Cargo,
    /// How much, in bytes.
    pub num_bytes: u32,
    /// Where the bytes are counted.
    pub barrier: SharedPlace,
    /// Who asked for it.
    pub origin: Origin,
}

/// What an operation brings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cargo {
    /// `cp.async.bulk`, for a multicast one for each block: bytes from this address of global memory on, a multiple of 16.
    Global(u64),
    /// `st.async`: the first bytes of these.
    Bytes([u8; 16]),
}

/// Everything of a grid that is in flight towards barriers.
#[derive(Debug, Default)]
pub struct Flights {
    flights: Vec<Flight>,
}

/// The smallest piece in which a bulk copy lands.
const PIECE_BYTES: u32 = 16;

impl Flights {
    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.flights.is_empty()
    }

    /// Takes an operation; in the friendly order it lands at once.
    pub fn issue(
        &mut self,
        flight: Flight,
        order: &Order,
        memory: &mut impl Landing,
    ) -> Result<(), Fault> {
        match order.policy() {
            Policy::First => land(&flight, memory),
            Policy::Late | Policy::Random => {
                self.flights.push(flight);
                Ok(())
            }
        }
    }

    /// Lands the newest, or a piece of any; false if nothing is in flight.
    pub fn land_one(
        &mut self,
        order: &mut Order,
        memory: &mut impl Landing,
    ) -> Result<bool, Fault> {
        let Some(newest) = self.flights.len().checked_sub(1) else {
            return Ok(false);
        };
        let picked = match order.policy() {
            Policy::Random => order.below(self.flights.len() as u32) as usize,
            Policy::First | Policy::Late => newest,
        };
        if order.policy() == Policy::Random
            && let flight = &mut self.flights[picked]
            && let Cargo::Global(from) = flight.cargo
            && flight.num_bytes > PIECE_BYTES
            && order.below(4) == 0
        {
            let num_bytes = (1 + order.below(flight.num_bytes / PIECE_BYTES - 1)) * PIECE_BYTES;
            let piece = Flight {
                num_bytes,
                ..*flight
            };
            flight.cargo = Cargo::Global(from + u64::from(num_bytes));
            flight.to = flight.to.after(num_bytes);
            flight.num_bytes -= num_bytes;
            land(&piece, memory)?;
            return Ok(true);
        }
        land(&self.flights.swap_remove(picked), memory)?;
        Ok(true)
    }

    /// Something that is on its way into a block.
    pub fn towards(&self, block: u32) -> Option<&Flight> {
        self.flights.iter().find(|flight| flight.to.block == block)
    }
}

fn land(flight: &Flight, memory: &mut impl Landing) -> Result<(), Fault> {
    let landed = match flight.cargo {
        Cargo::Global(from) => memory.copy(flight.to, from, flight.num_bytes),
        Cargo::Bytes(bytes) => memory.write(flight.to, &bytes[..flight.num_bytes as usize]),
    };
    let counted = landed.and_then(|()| {
        update_barrier(memory, flight.barrier, |barrier| {
            barrier.land(flight.num_bytes)
        })
    });
    blame(counted, flight.origin, memory)
}

/// A `cp.async` of one thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadCopy {
    /// First byte to write, in the thread's own block.
    pub to: SharedPlace,
    /// First byte to read, in global memory.
    pub from: u64,
    /// Bytes to write.
    pub num_bytes: u32,
    /// Bytes to read; the rest is written as zeros.
    pub num_source_bytes: u32,
    /// Who asked for it.
    pub origin: Origin,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ThreadStep {
    Copy(ThreadCopy),
    /// The end of a group.
    Commit,
    /// An arrival once everything before it has landed.
    Arrive(SharedPlace, Origin),
}

/// What the lanes of a warp copy with `cp.async`, in the order of each lane's program.
#[derive(Debug, Default)]
pub struct ThreadCopies {
    lanes: [VecDeque<ThreadStep>; 32],
    /// Copies in all lanes' steps.
    num_copies: usize,
}

impl ThreadCopies {
    /// Whether nothing is in flight.
    pub fn is_empty(&self) -> bool {
        self.num_copies == 0
    }

    /// `cp.async`; in the friendly order it lands at once.
    pub fn copy(
        &mut self,
        lane: usize,
        copy: ThreadCopy,
        order: &Order,
        memory: &mut impl Landing,
    ) -> Result<(), Fault> {
        match order.policy() {
            Policy::First => land_copy(copy, memory),
            Policy::Late | Policy::Random => {
                self.lanes[lane].push_back(ThreadStep::Copy(copy));
                self.num_copies += 1;
                Ok(())
            }
        }
    }

    /// `cp.async.mbarrier.arrive.noinc`.
    pub fn arrive(
        &mut self,
        lane: usize,
        barrier: SharedPlace,
        origin: Origin,
        memory: &mut impl Landing,
    ) -> Result<(), Fault> {
        self.lanes[lane].push_back(ThreadStep::Arrive(barrier, origin));
        self.settle(lane, memory)
    }

    /// `cp.async.commit_group`.
    pub fn commit(&mut self, lane: usize) {
        let steps = &mut self.lanes[lane];
        // Groups that have landed at the front need not be told apart.
        if !steps.is_empty() {
            steps.push_back(ThreadStep::Commit);
        }
    }

    /// `cp.async.wait_group`: lands all groups of the lane but the last `num_left`.
    pub fn wait(
        &mut self,
        lane: usize,
        num_left: usize,
        memory: &mut impl Landing,
    ) -> Result<(), Fault> {
        let is_commit = |step: &ThreadStep| *step == ThreadStep::Commit;
        let steps = &mut self.lanes[lane];
        let num_groups = steps.iter().filter(|step| is_commit(step)).count();
        for _ in num_left..num_groups {
            while let Some(step) = steps.pop_front() {
                match step {
                    ThreadStep::Copy(copy) => {
                        self.num_copies -= 1;
                        land_copy(copy, memory)?;
                    }
                    ThreadStep::Arrive(barrier, origin) => arrive(barrier, origin, memory)?,
                    ThreadStep::Commit => break,
                }
            }
        }
        self.settle(lane, memory)
    }

    /// Lands one copy of some lane: the newest, or any; false if none is in flight.
    pub fn land_one(
        &mut self,
        order: &mut Order,
        memory: &mut impl Landing,
    ) -> Result<bool, Fault> {
        if self.is_empty() {
            return Ok(false);
        }
        let start = match order.policy() {
            Policy::Random => order.below(32) as usize,
            Policy::First | Policy::Late => 0,
        };
        for lane in (0..32).map(|i| (start + i) % 32) {
            let is_copy = |step: &ThreadStep| matches!(step, ThreadStep::Copy(_));
            let steps = &mut self.lanes[lane];
            let Some(newest) = steps.iter().rposition(is_copy) else {
                continue;
            };
            let picked = match order.policy() {
                Policy::Random => {
                    let num_copies = steps.iter().filter(|step| is_copy(step)).count() as u32;
                    let chosen = order.below(num_copies) as usize;
                    let mut places = (0..=newest).filter(|&at| is_copy(&steps[at]));
                    places.nth(chosen).unwrap_or(newest)
                }
                Policy::First | Policy::Late => newest,
            };
            if let Some(ThreadStep::Copy(copy)) = steps.remove(picked) {
                self.num_copies -= 1;
                land_copy(copy, memory)?;
            }
            self.settle(lane, memory)?;
            return Ok(true);
        }
        Ok(false)
    }

    /// Lets arrivals happen that no copy stands before, and forgets groups that are through.
    fn settle(&mut self, lane: usize, memory: &mut impl Landing) -> Result<(), Fault> {
        let steps = &mut self.lanes[lane];
        let mut at = 0;
        while let Some(step) = steps.get(at) {
            match *step {
                ThreadStep::Copy(_) => break,
                ThreadStep::Arrive(barrier, origin) => {
                    steps.remove(at);
                    arrive(barrier, origin, memory)?;
                }
                ThreadStep::Commit => at += 1,
            }
        }
        if at == steps.len() {
            steps.clear();
        }
        Ok(())
    }
}

fn arrive(barrier: SharedPlace, origin: Origin, memory: &mut impl Landing) -> Result<(), Fault> {
    let arrived = update_barrier(memory, barrier, Mbarrier::arrive);
    blame(arrived, origin, memory)
}

fn land_copy(copy: ThreadCopy, memory: &mut impl Landing) -> Result<(), Fault> {
    let ThreadCopy {
        to,
        from,
        num_bytes,
        num_source_bytes,
        origin,
    } = copy;
    let copied = match num_source_bytes {
        0 => Ok(()),
        some => memory.copy(to, from, some),
    };
    let zeros = [0; 16];
    let written = copied.and_then(|()| match (num_bytes - num_source_bytes) as usize {
        0 => Ok(()),
        rest => memory.write(to.after(num_source_bytes), &zeros[..rest]),
    });
    blame(written, origin, memory)
}

#[cfg(test)]
#[path = "async_ops_tests.rs"]
mod tests;
