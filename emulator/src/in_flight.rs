//! What a warp starts and others finish: mbarriers, asynchronous copies and stores.

use crate::address::cluster_address;
use crate::alu::RegisterFile;
use crate::async_ops::{Cargo, Flight, Origin, SharedPlace, ThreadCopy, update_barrier};
use crate::exchange::{lanes, misuse};
use crate::fault::{Fault, Space};
use crate::machine::{Machine, Memories};
use crate::mbarrier::Mbarrier;
use crate::pointers::lanes_of;
use crate::ptx::inst::{Access, Slot};
use crate::warp::{State, Step, Warp};

/// Bytes of a barrier's word.
const WORD_BYTES: u32 = 8;

/// A barrier's word at `address`.
fn barrier_place(memories: &Memories<'_>, block: u32, address: u32) -> Result<SharedPlace, Fault> {
    if !address.is_multiple_of(WORD_BYTES) {
        let alignment = WORD_BYTES.into();
        return Err(Fault::Misaligned {
            space: Space::Shared,
            address: address.into(),
            alignment,
            place: None,
        });
    }
    memories.place(block, address, WORD_BYTES)
}

/// A place whose address is a multiple of `alignment`.
fn aligned_place(
    memories: &Memories<'_>,
    block: u32,
    address: u32,
    num_bytes: u32,
    alignment: u32,
) -> Result<SharedPlace, Fault> {
    if !address.is_multiple_of(alignment) {
        let alignment = alignment.into();
        return Err(Fault::Misaligned {
            space: Space::Shared,
            address: address.into(),
            alignment,
            place: None,
        });
    }
    memories.place(block, address, num_bytes)
}

fn check_global(
    machine: &mut Machine<'_>,
    pc: u32,
    address: u64,
    num_bytes: u32,
    alignment: u32,
) -> Result<(), Fault> {
    if !address.is_multiple_of(u64::from(alignment)) {
        let alignment = alignment.into();
        return Err(Fault::Misaligned {
            space: Space::Global,
            address,
            alignment,
            place: None,
        });
    }
    if num_bytes > 0 {
        machine.find(pc, address, num_bytes.into())?;
    }
    Ok(())
}

/// The lanes of a 64-bit register or constant.
///
/// # Safety
/// `slot` must name a 64-bit register or constant in `file`.
pub unsafe fn wide_lanes(file: &RegisterFile, slot: Slot) -> [u64; 32] {
    // SAFETY: passed on.
    unsafe { *file.source(slot).cast::<[u64; 32]>() }
}

/// Every method's operands must be in `file`, as the decoder makes them.
impl Warp {
    /// `address, count`.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn barrier_init(
        &self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        operands: &[Slot],
        mask: u32,
    ) -> Result<Step, Fault> {
        use crate::async_ops::Landing;
        // SAFETY: passed on.
        let [addresses, counts] =
            unsafe { [operands[0], operands[1]].map(|slot| lanes(file, slot)) };
        for lane in lanes_of(mask) {
            let at = barrier_place(&machine.memories, self.block, addresses[lane])?;
            machine
                .memories
                .set_barrier(at, Mbarrier::new(counts[lane])?.to_word())?;
        }
        machine.effects += 1;
        Ok(Step::Next)
    }

    /// `address`, and with `expects` the bytes to wait for.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn barrier_arrive(
        &self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        operands: &[Slot],
        mask: u32,
        expects: bool,
    ) -> Result<Step, Fault> {
        // SAFETY: passed on.
        let addresses = unsafe { lanes(file, operands[0]) };
        let bytes = match expects {
            // SAFETY: passed on.
            true => unsafe { lanes(file, operands[1]) },
            false => [0; 32],
        };
        for lane in lanes_of(mask) {
            let at = barrier_place(&machine.memories, self.block, addresses[lane])?;
            update_barrier(&mut machine.memories, at, |barrier| {
                barrier.arrive_expecting(bytes[lane])
            })?;
        }
        machine.effects += u64::from(mask != 0);
        Ok(Step::Next)
    }

    /// `predicate, address, parity`: an instruction that may wait does so while no lane's phase is complete.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn barrier_test(
        &self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        operands: &[Slot],
        mask: u32,
        waits: bool,
    ) -> Result<Step, Fault> {
        use crate::async_ops::Landing;
        // SAFETY: passed on.
        let [addresses, parities] =
            unsafe { [operands[1], operands[2]].map(|slot| lanes(file, slot)) };
        let mut complete = 0;
        for lane in lanes_of(mask) {
            let at = barrier_place(&machine.memories, self.block, addresses[lane])?;
            let barrier = Mbarrier::from_word(machine.memories.barrier(at)?)?;
            complete |= u32::from(barrier.is_complete(parities[lane])) << lane;
        }
        if complete == 0 && waits && mask != 0 {
            return Ok(Step::Stay(State::Mbarrier));
        }
        // SAFETY: passed on.
        unsafe { file.set_predicate(operands[0], complete, mask) };
        Ok(if complete == mask {
            Step::Next
        } else {
            Step::NextYielding
        })
    }

    /// `destination, source, bytes to read`.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn copy_async(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        num_bytes: u32,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        // SAFETY: passed on.
        let (to, from, read) = unsafe {
            (
                lanes(file, operands[0]),
                wide_lanes(file, operands[1]),
                lanes(file, operands[2]),
            )
        };
        for lane in lanes_of(mask) {
            if read[lane] > num_bytes {
                return Err(misuse(format!(
                    "a copy of {num_bytes} bytes reads {}",
                    read[lane]
                )));
            }
            check_global(machine, pc, from[lane], read[lane], num_bytes)?;
            let copy = ThreadCopy {
                to: aligned_place(
                    &machine.memories,
                    self.block,
                    to[lane],
                    num_bytes,
                    num_bytes,
                )?,
                from: from[lane],
                num_bytes,
                num_source_bytes: read[lane],
                origin: self.origin(machine, (pc, lane)),
            };
            self.copies
                .copy(lane, copy, machine.order, &mut machine.memories)?;
        }
        machine.effects += 1;
        Ok(Step::Next)
    }

    /// Ends a group of copies in each lane.
    pub fn copy_commit(&mut self, mask: u32) -> Step {
        lanes_of(mask).for_each(|lane| self.copies.commit(lane));
        Step::Next
    }

    /// Lands all but the last `num_left` groups of each lane.
    pub fn copy_wait(
        &mut self,
        machine: &mut Machine<'_>,
        num_left: u32,
        mask: u32,
    ) -> Result<Step, Fault> {
        for lane in lanes_of(mask) {
            self.copies
                .wait(lane, num_left as usize, &mut machine.memories)?;
        }
        machine.effects += 1;
        Ok(Step::Next)
    }

    /// `address`: arrives when the lane's copies have landed.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn copy_arrive(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        // SAFETY: passed on.
        let addresses = unsafe { lanes(file, operands[0]) };
        for lane in lanes_of(mask) {
            let at = barrier_place(&machine.memories, self.block, addresses[lane])?;
            let origin = self.origin(machine, (pc, lane));
            self.copies
                .arrive(lane, at, origin, &mut machine.memories)?;
        }
        machine.effects += 1;
        Ok(Step::Next)
    }

    /// `destination, source, bytes, barrier`, and for a multicast the ranks that it goes to.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn copy_bulk(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        multicast: bool,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        let ranks = match multicast {
            // SAFETY: passed on.
            true => unsafe { lanes(file, operands[4]) },
            false => [0; 32],
        };
        // SAFETY: passed on.
        let (to, from, sizes, barriers) = unsafe {
            let [to, sizes, barriers] =
                [operands[0], operands[2], operands[3]].map(|slot| lanes(file, slot));
            (to, wide_lanes(file, operands[1]), sizes, barriers)
        };
        for lane in lanes_of(mask) {
            let num_bytes = sizes[lane];
            // Slices of nothing are asked for like others.
            if num_bytes == 0 {
                continue;
            }
            if num_bytes % 16 != 0 {
                return Err(misuse(format!(
                    "a bulk copy of {num_bytes} bytes, no multiple of 16"
                )));
            }
            check_global(machine, pc, from[lane], num_bytes, 16)?;
            let (cargo, origin) = (Cargo::Global(from[lane]), self.origin(machine, (pc, lane)));
            let mut send = |to: u32, barrier: u32| {
                let flight = Flight {
                    to: aligned_place(&machine.memories, self.block, to, num_bytes, 16)?,
                    cargo,
                    num_bytes,
                    barrier: barrier_place(&machine.memories, self.block, barrier)?,
                    origin,
                };
                self.issue(machine, flight)
            };
            if multicast {
                for rank in lanes_of(ranks[lane]) {
                    let there = |address: u32| cluster_address(address, rank as u32);
                    send(there(to[lane]), there(barriers[lane]))?;
                }
            } else {
                send(to[lane], barriers[lane])?;
            }
        }
        Ok(Step::Next)
    }

    /// `destination, s..., barrier`.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn store_async(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        let (&to, rest) = operands
            .split_first()
            .expect("the decoder gives a destination");
        let (&barrier, data) = rest.split_last().expect("the decoder gives a barrier");
        let element_bytes = usize::from(access.element_bytes);
        let num_bytes = u32::from(access.element_bytes) * u32::from(access.num_elements);
        // SAFETY: passed on.
        let [to, barriers] = unsafe { [to, barrier].map(|slot| lanes(file, slot)) };
        for lane in lanes_of(mask) {
            let mut bytes = [0; 16];
            for (&slot, bytes) in data.iter().zip(bytes.chunks_mut(element_bytes)) {
                // SAFETY: passed on.
                let value = unsafe {
                    match access.wide_data {
                        true => wide_lanes(file, slot)[lane],
                        false => u64::from(lanes(file, slot)[lane]),
                    }
                };
                bytes.copy_from_slice(&value.to_le_bytes()[..element_bytes]);
            }
            let to = aligned_place(
                &machine.memories,
                self.block,
                to[lane],
                num_bytes,
                num_bytes,
            )?;
            let barrier = barrier_place(&machine.memories, self.block, barriers[lane])?;
            let (cargo, origin) = (Cargo::Bytes(bytes), self.origin(machine, (pc, lane)));
            let flight = Flight {
                to,
                cargo,
                num_bytes,
                barrier,
                origin,
            };
            self.issue(machine, flight)?;
        }
        Ok(Step::Next)
    }

    fn origin(&self, machine: &Machine<'_>, (pc, lane): (u32, usize)) -> Origin {
        let line = machine.kernel.lines[pc as usize];
        Origin {
            line,
            block: self.block,
            warp: self.index,
            lane: lane as u32,
        }
    }

    fn issue(&self, machine: &mut Machine<'_>, flight: Flight) -> Result<(), Fault> {
        let Flight { to, barrier, .. } = &flight;
        if to.block != barrier.block {
            let what = format!(
                "bytes for block {} count at a barrier of block {}",
                to.block, barrier.block
            );
            return Err(misuse(what));
        }
        machine.effects += 1;
        machine
            .flights
            .issue(flight, machine.order, &mut machine.memories)
    }
}
