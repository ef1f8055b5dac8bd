//! `wgmma`: matrix products that four warps start together and that run on while they go on; a warp has its own rows.

use crate::alu::RegisterFile;
use crate::exchange::{lanes, misuse};
use crate::fault::Fault;
use crate::in_flight::wide_lanes;
use crate::machine::Machine;
use crate::matrix::Lanes;
use crate::matrix::mma::Format;
use crate::matrix::wgmma::{Descriptor, LeftOperand, multiply_add};
use crate::order::Policy;
use crate::ptx::inst::Slot;
use crate::warp::{State, Step, Warp};

/// Warps that run an asynchronous matrix product together.
pub const GROUP_WARPS: u32 = 4;

/// An asynchronous matrix product: a warp's own rows of it.
#[derive(Debug, Clone)]
pub struct Product {
    format: Format,
    left: Left,
    right: u64,
    adds: bool,
    sums: Vec<Slot>,
    /// Whether the group that it belongs to has been ended.
    is_committed: bool,
    /// Whether it is the last one of its group.
    is_last: bool,
}

#[derive(Debug, Clone)]
enum Left {
    Registers(Box<[Lanes; 4]>),
    Shared(u64),
}

/// Every method's operands must be in `file`, as the decoder makes them.
impl Warp {
    /// `sums..., left, right, adds`.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn group_matrix(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        (format, num_sums, left_in_registers): (Format, u32, bool),
        operands: &[Slot],
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        if !self.gather_all(mask, group)? {
            return Ok(Step::Stay(State::Lanes));
        }
        let (sums, rest) = operands.split_at(num_sums as usize);
        // SAFETY: passed on.
        let uniform = |slot: Slot| unsafe {
            let named = wide_lanes(file, slot);
            let agree = named.iter().all(|descriptor| *descriptor == named[0]);
            agree
                .then_some(named[0])
                .ok_or_else(|| misuse("the lanes of a warp name different matrices"))
        };
        // SAFETY: passed on.
        let (left, rest) = unsafe {
            match left_in_registers {
                true => (
                    Left::Registers(Box::new(std::array::from_fn(|at| lanes(file, rest[at])))),
                    &rest[4..],
                ),
                false => (Left::Shared(uniform(rest[0])?), &rest[1..]),
            }
        };
        let right = uniform(rest[0])?;
        // SAFETY: passed on.
        let adds = unsafe { file.predicate(rest[1]) };
        if adds != 0 && adds != u32::MAX {
            return Err(misuse("some lanes add to the former sums, others do not"));
        }
        let product = Product {
            format,
            left,
            right,
            adds: adds != 0,
            sums: sums.to_vec(),
            is_committed: false,
            is_last: false,
        };
        match machine.order.policy() {
            Policy::First => self.finish_product(machine, file, &product)?,
            Policy::Late | Policy::Random => self.products.push(product),
        }
        Ok(Step::Next)
    }

    /// Ends a group of products.
    pub fn group_matrix_commit(&mut self) -> Step {
        if let Some(last) = self.products.last_mut().filter(|last| !last.is_committed) {
            last.is_last = true;
        }
        self.products
            .iter_mut()
            .for_each(|product| product.is_committed = true);
        Step::Next
    }

    /// Finishes all but the last `num_left` groups of products.
    ///
    /// # Safety
    /// See above.
    pub unsafe fn group_matrix_wait(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        num_left: u32,
    ) -> Result<Step, Fault> {
        let num_groups = self
            .products
            .iter()
            .filter(|product| product.is_last)
            .count();
        let mut to_finish = num_groups.saturating_sub(num_left as usize);
        while to_finish > 0 {
            let product = self.products.remove(0);
            to_finish -= usize::from(product.is_last);
            self.finish_product(machine, file, &product)?;
        }
        Ok(Step::Next)
    }

    fn finish_product(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        product: &Product,
    ) -> Result<(), Fault> {
        let descriptor = |bits: u64| Descriptor::new(bits).map_err(misuse);
        let left = match &product.left {
            Left::Registers(registers) => LeftOperand::Registers(registers),
            Left::Shared(bits) => LeftOperand::Shared(descriptor(*bits)?),
        };
        let right = descriptor(product.right)?;
        // SAFETY: the slots are those of the instruction that started the product.
        let read = |slots: &[Slot]| std::array::from_fn(|at| unsafe { lanes(file, slots[at]) });
        let mut sums: Vec<[Lanes; 4]> = product.sums.chunks_exact(4).map(read).collect();
        let warp = self.index % GROUP_WARPS;
        multiply_add(
            product.format,
            warp,
            left,
            &right,
            product.adds,
            &mut sums,
            |address| self.matrix_row(machine, address),
        )?;
        for (&slot, sum) in product.sums.iter().zip(sums.iter().flatten()) {
            // SAFETY: as above.
            unsafe { file.write(slot, sum, u32::MAX) };
        }
        Ok(())
    }
}
