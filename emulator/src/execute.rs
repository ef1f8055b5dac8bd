//! Instructions that are no plain arithmetic: which part of the warp runs each.

use crate::alu::RegisterFile;
use crate::fault::Fault;
use crate::machine::Machine;
use crate::ptx::inst::{Inst, Op};
use crate::warp::{State, Step, Warp};

impl Warp {
    /// Runs an instruction in the lanes of `mask`, those of `group` whose guard lets them.
    pub fn execute(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        inst: &Inst,
        pc: u32,
        mask: u32,
        group: u32,
    ) -> Result<Step, Fault> {
        if machine.memories.races.is_none() {
            return self.perform(machine, file, inst, pc, mask, group);
        }
        // SAFETY: the decoder gave each operation the operands that it documents, all of them in this file.
        unsafe { self.watch_before(machine, file, inst, (pc, mask))? };
        let step = self.perform(machine, file, inst, pc, mask, group)?;
        // SAFETY: as above.
        unsafe { self.watch_after(machine, file, inst, (pc, mask), &step)? };
        Ok(step)
    }

    fn perform(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        inst: &Inst,
        pc: u32,
        mask: u32,
        group: u32,
    ) -> Result<Step, Fault> {
        let kernel = machine.kernel;
        let operands = kernel.operands_of(inst);
        let lanes = (mask, group);
        let touched = (pc, mask);
        // SAFETY: the decoder gave each operation the operands that it documents, all of them in this file.
        unsafe {
            match inst.op {
                Op::Load(access) => self.load(machine, file, &access, operands, touched),
                Op::Store(access) => self.store(machine, file, &access, operands, touched),
                Op::Atomic(access, op) => {
                    self.atomic(machine, file, &access, op, operands, touched)
                }
                Op::Exit => Ok(if mask == 0 {
                    Step::Next
                } else {
                    Step::End(mask)
                }),
                Op::Shuffle(mode) => self.shuffle(file, mode, operands, lanes),
                Op::VoteAll => self.vote_all(file, operands, lanes),
                Op::Reduce(reduction) => self.reduce(file, reduction, operands, lanes),
                Op::WarpBarrier => self.warp_barrier(file, operands, lanes),
                Op::BlockBarrier => self.block_barrier(file, operands, lanes),
                Op::ClusterArrive => self.cluster_arrive(machine, lanes),
                Op::ClusterWait => self.cluster_wait(machine, lanes),
                Op::Matrix(format) => self.matrix(file, format, operands, lanes),
                Op::LoadMatrices { transposed } => {
                    self.load_matrices(machine, file, transposed, operands, lanes)
                }
                Op::GroupMatrix {
                    format,
                    num_sums,
                    left_in_registers,
                } => {
                    let form = (format, num_sums, left_in_registers);
                    self.group_matrix(machine, file, form, operands, lanes)
                }
                Op::GroupMatrixCommit => Ok(self.group_matrix_commit()),
                Op::GroupMatrixWait(num_left) => self.group_matrix_wait(machine, file, num_left),
                Op::BarrierInit => self.barrier_init(machine, file, operands, mask),
                Op::BarrierArrive => self.barrier_arrive(machine, file, operands, mask, false),
                Op::BarrierArriveExpect => self.barrier_arrive(machine, file, operands, mask, true),
                Op::BarrierTest { waits } => {
                    self.barrier_test(machine, file, operands, mask, waits)
                }
                Op::CopyAsync { num_bytes } => {
                    self.copy_async(machine, file, num_bytes, operands, touched)
                }
                Op::CopyCommit => Ok(self.copy_commit(mask)),
                Op::CopyWait(num_left) => self.copy_wait(machine, num_left, mask),
                Op::CopyArrive => self.copy_arrive(machine, file, operands, touched),
                Op::CopyBulk { multicast } => {
                    self.copy_bulk(machine, file, multicast, operands, touched)
                }
                Op::StoreAsync(access) => {
                    self.store_async(machine, file, &access, operands, touched)
                }
                Op::Alu(_) | Op::Branch(_) | Op::Nothing => {
                    unreachable!("the warp's loop runs these")
                }
            }
        }
    }

    fn cluster_arrive(
        &mut self,
        machine: &mut Machine<'_>,
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        if !self.gather(self.live, mask, group)? {
            return Ok(Step::Stay(State::Lanes));
        }
        if let Some((barrier, warp)) = machine.cluster(self.block, self.index) {
            barrier.arrive(warp)?;
            machine.effects += 1;
        }
        Ok(Step::Next)
    }

    fn cluster_wait(
        &mut self,
        machine: &mut Machine<'_>,
        (mask, group): (u32, u32),
    ) -> Result<Step, Fault> {
        if !self.gather(self.live, mask, group)? {
            return Ok(Step::Stay(State::Lanes));
        }
        let Some((barrier, warp)) = machine.cluster(self.block, self.index) else {
            return Ok(Step::Next);
        };
        if !barrier.try_wait(warp)? {
            return Ok(Step::Stay(State::Cluster));
        }
        machine.effects += 1;
        Ok(Step::Next)
    }
}
