//! One block: its warps and the barriers that they meet at.

use crate::exchange::misuse;
use crate::fault::Fault;
use crate::machine::Machine;
use crate::warp::{State, WARP_LANES, Warp};

/// A block that runs.
pub struct Block {
    /// Its index in the grid.
    pub index: u32,
    /// Its warps, ended ones included.
    pub warps: Vec<Warp>,
}

impl Block {
    /// Block `index` before its first instruction.
    pub fn new(machine: &mut Machine<'_>, index: u32) -> Self {
        let offset = machine.kernel.dynamic_shared_offset();
        let num_bytes = match machine.launch.dynamic_shared_bytes {
            0 => machine.kernel.static_shared_bytes,
            dynamic => offset + dynamic,
        };
        machine.memories.start_block(index, num_bytes);
        let warps = (0..machine.block_warps())
            .map(|warp| Warp::new(machine, index, warp))
            .collect();
        Block { index, warps }
    }

    /// Whether all warps have ended.
    pub fn has_ended(&self) -> bool {
        self.warps.iter().all(|warp| warp.live == 0)
    }

    /// Lets warp `at` run for a turn; whether it did something.
    pub fn turn(
        &mut self,
        machine: &mut Machine<'_>,
        at: usize,
        quantum: u32,
    ) -> Result<bool, Fault> {
        let warp = &mut self.warps[at];
        if warp.live == 0 {
            return Ok(false);
        }
        let mut is_busy = warp.turn(machine, quantum)?;
        if std::mem::take(&mut warp.has_news) {
            if warp.live == 0 {
                // What the warp has started still happens.
                while warp.copies.land_one(machine.order, &mut machine.memories)? {}
                if let Some((barrier, number)) = machine.cluster(self.index, at as u32) {
                    barrier.end(number);
                }
            }
            is_busy |= self.release(machine)?;
        }
        Ok(is_busy)
    }

    /// Lets warps go on for whom a barrier has nobody left to wait for; whether there was one.
    fn release(&mut self, machine: &mut Machine<'_>) -> Result<bool, Fault> {
        let mut has_released = false;
        let arrivals: Vec<Option<(u32, u32)>> = self
            .warps
            .iter()
            .map(|warp| arrival(warp, machine))
            .collect::<Result<_, _>>()?;
        let mut identities: Vec<u32> = arrivals
            .iter()
            .flatten()
            .map(|&(identity, _)| identity)
            .collect();
        identities.sort_unstable();
        identities.dedup();
        for identity in identities {
            let here = |arrival: &Option<(u32, u32)>| arrival.is_some_and(|(at, _)| at == identity);
            let num_here = arrivals.iter().filter(|arrival| here(arrival)).count() as u32;
            let num_live = self.warps.iter().filter(|warp| warp.live != 0).count() as u32;
            let mut needed = arrivals
                .iter()
                .flatten()
                .filter(|&&(at, _)| at == identity)
                .map(|&(_, threads)| threads);
            let threads = needed.next().unwrap_or_default();
            if needed.any(|other| other != threads) {
                return Err(misuse(format!(
                    "warps wait for different numbers of threads at barrier {identity}"
                )));
            }
            let is_full = match threads {
                0 => num_here == num_live,
                threads => num_here * WARP_LANES >= threads,
            };
            if is_full {
                if let Some(races) = &mut machine.memories.races {
                    let places = (0..).zip(&arrivals);
                    let there = places.filter(|(_, arrival)| here(arrival));
                    races.meet(self.index, there.map(|(warp, _)| warp));
                }
                for (warp, _) in self
                    .warps
                    .iter_mut()
                    .zip(&arrivals)
                    .filter(|(_, arrival)| here(arrival))
                {
                    warp.groups
                        .iter_mut()
                        .for_each(|group| group.state = State::Ready);
                    warp.merge();
                }
                has_released = true;
            }
        }
        Ok(has_released)
    }
}

/// The barrier at which all live lanes of a warp have arrived, and for how many threads it waits.
fn arrival(warp: &Warp, machine: &Machine<'_>) -> Result<Option<(u32, u32)>, Fault> {
    let mut found = None;
    for group in &warp.groups {
        let State::BlockBarrier { identity, threads } = group.state else {
            return Ok(None);
        };
        match found {
            None => found = Some((group.pc, identity, threads)),
            Some(first) if first == (group.pc, identity, threads) => {}
            Some(_) => {
                let fault = misuse("lanes of a warp arrive at different barriers of the block");
                return Err(fault.at(|| warp.place(machine.kernel, group.pc - 1)));
            }
        }
    }
    Ok(found.map(|(_, identity, threads)| (identity, threads)))
}
