//! Instructions of several lanes: shuffles, votes, reductions, matrix products, barriers of a warp or block.

use crate::alu::RegisterFile;
use crate::fault::Fault;
use crate::machine::Machine;
use crate::matrix::bits::reduce;
use crate::matrix::load::load_matrices;
use crate::matrix::mma::{Format, multiply_add};
use crate::matrix::{Lanes, bits::Reduction};
use crate::ptx::inst::{ShuffleMode, Slot};
use crate::warp::{State, Step, Warp};

/// What a shuffle gives from a lane that takes no part: PTX leaves it open, so it is nothing one would expect.
const NOBODYS_VALUE: u32 = 0x7fc0_dead;

/// The lanes of a 32-bit register or constant.
///
/// # Safety
/// `slot` must name one in `file`.
#[inline(always)]
pub unsafe fn lanes(file: &RegisterFile, slot: Slot) -> Lanes {
    // SAFETY: passed on.
    unsafe { (*file.source(slot)).0 }
}

/// A broken rule.
pub fn misuse(what: impl Into<String>) -> Fault {
    Fault::BarrierMisuse {
        what: what.into(),
        place: None,
    }
}

impl Warp {
    /// Holds that the whole group runs a collective instruction; whether all live lanes of `members` are in the group.
    pub fn gather(&self, members: u32, mask: u32, group: u32) -> Result<bool, Fault> {
        if mask != group {
            return Err(misuse(
                "a guard lets only some lanes take part in an instruction of several lanes",
            ));
        }
        if group & !members != 0 {
            let lanes = group & !members;
            return Err(misuse(format!(
                "lanes {lanes:#010x} take part but are no members of {members:#010x}"
            )));
        }
        Ok(members & self.live & !group == 0)
    }

    /// As [`Self::gather`] for instructions that all 32 lanes must run together.
    pub fn gather_all(&self, mask: u32, group: u32) -> Result<bool, Fault> {
        if self.live != u32::MAX {
            let ended = !self.live;
            return Err(misuse(format!(
                "an instruction of the whole warp, but lanes {ended:#010x} have ended"
            )));
        }
        self.gather(u32::MAX, mask, group)
    }

    /// The members that an instruction names, the same in all its lanes.
    ///
    /// # Safety
    /// `slot` must name a 32-bit register or constant.
    pub unsafe fn members(&self, file: &RegisterFile, slot: Slot, mask: u32) -> Result<u32, Fault> {
        // SAFETY: passed on.
        let named = unsafe { lanes(file, slot) };
        let members = named[mask.trailing_zeros() as usize % 32];
        let agree = (0..32).all(|lane| mask >> lane & 1 == 0 || named[lane] == members);
        agree
            .then_some(members)
            .ok_or_else(|| misuse("the lanes of one instruction name different members"))
    }

    /// `d, predicate, value, lane, bounds, members`.
    ///
    /// # Safety
    /// The operands must be in `file`, as the decoder makes them.
    pub unsafe fn shuffle(
        &self,
        file: &RegisterFile,
        mode: ShuffleMode,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        let &[destination, predicate, value, lane, bounds, members] = operands else {
            unreachable!("the decoder gives six operands");
        };
        // SAFETY: passed on.
        unsafe {
            if !self.gather(self.members(file, members, mask)?, mask, group)? {
                return Ok(Step::Stay(State::Lanes));
            }
            let [values, lanes, bounds] = [value, lane, bounds].map(|slot| lanes(file, slot));
            let mut received = [0; 32];
            let mut valid = 0;
            for own in 0..32u32 {
                let (wanted, bounds) = (lanes[own as usize] & 31, bounds[own as usize]);
                let segment = bounds >> 8 & 31;
                let lowest = own & segment;
                let limit = lowest | (bounds & 31 & !segment);
                let (source, is_valid) = match mode {
                    ShuffleMode::Up => (own.wrapping_sub(wanted), own >= wanted + limit),
                    ShuffleMode::Down => (own + wanted, own + wanted <= limit),
                    ShuffleMode::Butterfly => (own ^ wanted, (own ^ wanted) <= limit),
                    ShuffleMode::Index => {
                        let source = lowest | (wanted & !segment);
                        (source, source <= limit)
                    }
                };
                let source = if is_valid { source } else { own };
                valid |= u32::from(is_valid) << own;
                let takes_part = mask >> source & 1 == 1;
                received[own as usize] = if takes_part {
                    values[source as usize]
                } else {
                    NOBODYS_VALUE
                };
            }
            file.write(destination, &received, mask);
            file.set_predicate(predicate, valid, mask);
        }
        Ok(Step::Next)
    }

    /// `d, predicate, members`.
    ///
    /// # Safety
    /// As for [`Self::shuffle`].
    pub unsafe fn vote_all(
        &self,
        file: &RegisterFile,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        let &[destination, predicate, members] = operands else {
            unreachable!("the decoder gives three operands");
        };
        // SAFETY: passed on.
        unsafe {
            if !self.gather(self.members(file, members, mask)?, mask, group)? {
                return Ok(Step::Stay(State::Lanes));
            }
            let agree = file.predicate(predicate) & mask == mask;
            file.set_predicate(destination, if agree { u32::MAX } else { 0 }, mask);
        }
        Ok(Step::Next)
    }

    /// `d, value, members`.
    ///
    /// # Safety
    /// As for [`Self::shuffle`].
    pub unsafe fn reduce(
        &self,
        file: &RegisterFile,
        reduction: Reduction,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        let &[destination, value, members] = operands else {
            unreachable!("the decoder gives three operands");
        };
        // SAFETY: passed on.
        unsafe {
            if !self.gather(self.members(file, members, mask)?, mask, group)? {
                return Ok(Step::Stay(State::Lanes));
            }
            let result = reduce(reduction, &lanes(file, value), mask);
            file.write(destination, &[result; 32], mask);
        }
        Ok(Step::Next)
    }

    /// `members`.
    ///
    /// # Safety
    /// As for [`Self::shuffle`].
    pub unsafe fn warp_barrier(
        &self,
        file: &RegisterFile,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        // SAFETY: passed on.
        let members = unsafe { self.members(file, operands[0], mask)? };
        Ok(if self.gather(members, mask, group)? {
            Step::Next
        } else {
            Step::Stay(State::Lanes)
        })
    }

    /// `d0..d3, a0..a3, b0, b1, c0..c3`.
    ///
    /// # Safety
    /// As for [`Self::shuffle`].
    pub unsafe fn matrix(
        &self,
        file: &RegisterFile,
        format: Format,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        if !self.gather_all(mask, group)? {
            return Ok(Step::Stay(State::Lanes));
        }
        // SAFETY: passed on.
        unsafe {
            let register = |at: usize| lanes(file, operands[at]);
            let left = std::array::from_fn(|at| register(4 + at));
            let right = std::array::from_fn(|at| register(8 + at));
            let sums = std::array::from_fn(|at| register(10 + at));
            for (sum, &slot) in multiply_add(format, &left, &right, &sums)
                .iter()
                .zip(operands)
            {
                file.write(slot, sum, mask);
            }
        }
        Ok(Step::Next)
    }

    /// `d0..d3, address`.
    ///
    /// # Safety
    /// As for [`Self::shuffle`].
    pub unsafe fn load_matrices(
        &self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        transposed: bool,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        if !self.gather_all(mask, group)? {
            return Ok(Step::Stay(State::Lanes));
        }
        // SAFETY: passed on.
        unsafe {
            let addresses = lanes(file, operands[4]);
            let mut rows = [[0; 16]; 32];
            for (row, address) in rows.iter_mut().zip(addresses) {
                *row = self.matrix_row(machine, address)?;
            }
            for (register, &slot) in load_matrices(&rows, transposed).iter().zip(operands) {
                file.write(slot, register, mask);
            }
        }
        Ok(Step::Next)
    }

    /// The 16 bytes of shared memory at `address`, which is a multiple of 16.
    pub fn matrix_row(&self, machine: &mut Machine<'_>, address: u32) -> Result<[u8; 16], Fault> {
        if !address.is_multiple_of(16) {
            let space = crate::fault::Space::Shared;
            return Err(Fault::Misaligned {
                space,
                address: address.into(),
                alignment: 16,
                place: None,
            });
        }
        let place = machine.memories.place(self.block, address, 16)?;
        let pointer = machine.memories.host_address(place)?.cast::<[u8; 16]>();
        // SAFETY: `place` holds that the 16 bytes are there.
        Ok(unsafe { *pointer })
    }

    /// `identity, threads`: the group waits behind it until the block lets it go.
    ///
    /// # Safety
    /// As for [`Self::shuffle`].
    pub unsafe fn block_barrier(
        &mut self,
        file: &RegisterFile,
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        if mask != group {
            return Err(misuse(
                "a guard lets only some lanes arrive at a barrier of the block",
            ));
        }
        let first = mask.trailing_zeros() as usize % 32;
        // SAFETY: passed on.
        let [identity, threads] =
            unsafe { [operands[0], operands[1]].map(|slot| lanes(file, slot)[first]) };
        self.has_news = true;
        Ok(Step::Wait(State::BlockBarrier { identity, threads }))
    }
}
