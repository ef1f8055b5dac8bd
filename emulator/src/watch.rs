//! Tells the check for races what each instruction does, where a launch is checked.
//!
//! Accesses, arrivals and what is started are told before the instruction runs, as it may write its own address
//! registers or end a phase; waits afterwards, once they are over. What is out of bounds is left to the instruction.

use crate::address::{SHARED_WINDOW, cluster_address};
use crate::alu::RegisterFile;
use crate::async_ops::SharedPlace;
use crate::exchange::lanes;
use crate::fault::{Fault, Space};
use crate::group_matrix::GROUP_WARPS;
use crate::machine::{Machine, Memories};
use crate::matrix::wgmma::Descriptor;
use crate::pointers::{lane_addresses, lanes_of};
use crate::ptx::inst::{Access, Inst, Op, Slot};
use crate::race_cells::Touch;
use crate::races::{Engine, Races, Site};
use crate::warp::{Step, Warp};

/// Bytes of a row of a matrix that one lane or descriptor names.
const ROW_BYTES: u32 = 16;

/// Bytes of an mbarrier.
const WORD_BYTES: u32 = 8;

/// The check and the memories that it watches.
struct Watch<'m, 'l> {
    races: &'m mut Races,
    memories: &'m Memories<'l>,
    site: Site,
}

impl Watch<'_, '_> {
    fn place(&self, address: u32, num_bytes: u32) -> Option<SharedPlace> {
        self.memories
            .place(self.site.block, address, num_bytes)
            .ok()
    }

    fn touch(&mut self, address: u32, num_bytes: u32, touch: Touch) -> Result<(), Fault> {
        match self.place(address, num_bytes) {
            Some(at) => self.races.touch(self.site, at, num_bytes, touch),
            None => Ok(()),
        }
    }

    fn touch_by_engine(
        &mut self,
        engine: Engine,
        address: u32,
        num_bytes: u32,
        touch: Touch,
    ) -> Result<(), Fault> {
        match self.place(address, num_bytes) {
            Some(at) => self
                .races
                .touch_by_engine(self.site, engine, at, num_bytes, touch),
            None => Ok(()),
        }
    }

    fn flight(&mut self, to: u32, num_bytes: u32, barrier: u32) -> Result<(), Fault> {
        match (self.place(to, num_bytes), self.place(barrier, WORD_BYTES)) {
            (Some(to), Some(barrier)) => self
                .races
                .touch_by_flight(self.site, to, num_bytes, barrier),
            _ => Ok(()),
        }
    }

    fn arrive(&mut self, barrier: u32, engine: Option<Engine>) -> Result<(), Fault> {
        match self.place(barrier, WORD_BYTES) {
            Some(at) => self.races.arrive_at_mbarrier(self.site, at, engine),
            None => Ok(()),
        }
    }

    fn rows(&mut self, descriptor: u64, groups: std::ops::Range<u32>) -> Result<(), Fault> {
        let Ok(descriptor) = Descriptor::new(descriptor) else {
            return Ok(());
        };
        descriptor.rows(groups).try_for_each(|address| {
            self.touch_by_engine(Engine::Products, address, ROW_BYTES, Touch::Read)
        })
    }
}

impl Warp {
    /// Runs `act` with the check, where there is one.
    fn watch<R>(
        &self,
        machine: &mut Machine<'_>,
        pc: u32,
        act: impl FnOnce(&mut Watch<'_, '_>) -> Result<R, Fault>,
    ) -> Result<Option<R>, Fault> {
        let Some(mut races) = machine.memories.races.take() else {
            return Ok(None);
        };
        let site = Site {
            block: self.block,
            warp: self.index,
            line: machine.kernel.lines[pc as usize],
        };
        let result = act(&mut Watch {
            races: &mut races,
            memories: &machine.memories,
            site,
        });
        machine.memories.races = Some(races);
        result.map(Some)
    }

    /// Tells what the instruction is about to do in the lanes of `mask`.
    ///
    /// # Safety
    /// The operands must be in `file`, as the decoder makes them.
    pub unsafe fn watch_before(
        &self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        inst: &Inst,
        (pc, mask): (u32, u32),
    ) -> Result<(), Fault> {
        let operands = machine.kernel.operands_of(inst);
        // SAFETY: passed on.
        let words = |at: usize| unsafe { lanes(file, operands[at]) };
        // SAFETY: passed on.
        let wide = |slot: Slot| unsafe { *file.source(slot).cast::<[u64; 32]>() };
        let is_whole = mask == u32::MAX;
        self.watch(machine, pc, |watch| match inst.op {
            Op::Load(access) => {
                // SAFETY: passed on.
                let addresses =
                    unsafe { lane_addresses(file, &access, operands[operands.len() - 1]) };
                access_lanes(watch, &access, &addresses, mask, Touch::Read)
            }
            Op::Store(access) => {
                // SAFETY: passed on.
                let addresses = unsafe { lane_addresses(file, &access, operands[0]) };
                access_lanes(watch, &access, &addresses, mask, Touch::Write)
            }
            Op::Atomic(access, _) => {
                // SAFETY: passed on.
                let addresses = unsafe { lane_addresses(file, &access, operands[1]) };
                access_lanes(watch, &access, &addresses, mask, Touch::Atomic)
            }
            Op::LoadMatrices { .. } if is_whole => {
                let addresses = words(4);
                addresses
                    .iter()
                    .try_for_each(|&address| watch.touch(address, ROW_BYTES, Touch::Read))
            }
            Op::GroupMatrix {
                num_sums,
                left_in_registers,
                ..
            } if is_whole => {
                let operands = &operands[num_sums as usize..];
                let right = if left_in_registers { 4 } else { 1 };
                let first = self.index % GROUP_WARPS * 2;
                if !left_in_registers {
                    watch.rows(wide(operands[0])[0], first..first + 2)?;
                }
                watch.rows(wide(operands[right])[0], 0..num_sums / 4)
            }
            Op::BarrierInit => {
                let addresses = words(0);
                lanes_of(mask).try_for_each(|lane| match watch.place(addresses[lane], WORD_BYTES) {
                    Some(at) => watch.races.init_mbarrier(watch.site, at),
                    None => Ok(()),
                })
            }
            Op::BarrierArrive | Op::BarrierArriveExpect => {
                let addresses = words(0);
                lanes_of(mask).try_for_each(|lane| watch.arrive(addresses[lane], None))
            }
            Op::CopyAsync { num_bytes } => {
                let addresses = words(0);
                lanes_of(mask).try_for_each(|lane| {
                    watch.touch_by_engine(Engine::Copies, addresses[lane], num_bytes, Touch::Write)
                })
            }
            Op::CopyArrive => {
                let addresses = words(0);
                lanes_of(mask)
                    .try_for_each(|lane| watch.arrive(addresses[lane], Some(Engine::Copies)))
            }
            Op::CopyBulk { multicast } => {
                let (to, sizes, barriers) = (words(0), words(2), words(3));
                lanes_of(mask).try_for_each(|lane| match multicast {
                    true => lanes_of(words(4)[lane]).try_for_each(|rank| {
                        let there = |address: u32| cluster_address(address, rank as u32);
                        watch.flight(there(to[lane]), sizes[lane], there(barriers[lane]))
                    }),
                    false => watch.flight(to[lane], sizes[lane], barriers[lane]),
                })
            }
            Op::StoreAsync(access) => {
                let (to, barriers) = (words(0), words(operands.len() - 1));
                lanes_of(mask).try_for_each(|lane| {
                    watch.flight(to[lane], access_bytes(&access), barriers[lane])
                })
            }
            _ => Ok(()),
        })?;
        Ok(())
    }

    /// Tells what the instruction came to.
    ///
    /// # Safety
    /// As for [`Self::watch_before`].
    pub unsafe fn watch_after(
        &self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        inst: &Inst,
        (pc, mask): (u32, u32),
        step: &Step,
    ) -> Result<(), Fault> {
        if matches!(step, Step::Stay(_)) || mask == 0 {
            return Ok(());
        }
        let (block, warp) = (self.block, self.index);
        let operands = machine.kernel.operands_of(inst);
        self.watch(machine, pc, |watch| {
            let races = &mut *watch.races;
            match inst.op {
                Op::ClusterArrive => races.arrive_at_cluster(block, warp),
                Op::ClusterWait => races.leave_cluster(block, warp),
                Op::GroupMatrixCommit => races.commit(block, warp, Engine::Products),
                Op::GroupMatrixWait(num_left) => {
                    races.wait(block, warp, Engine::Products, num_left as usize)
                }
                Op::CopyCommit => races.commit(block, warp, Engine::Copies),
                Op::CopyWait(num_left) => {
                    races.wait(block, warp, Engine::Copies, num_left as usize)
                }
                Op::BarrierTest { .. } => {
                    // SAFETY: passed on.
                    let (complete, addresses) =
                        unsafe { (file.predicate(operands[0]), lanes(file, operands[1])) };
                    for lane in lanes_of(mask) {
                        if let Some(at) = watch.place(addresses[lane], WORD_BYTES) {
                            watch
                                .races
                                .test_mbarrier(watch.site, at, complete >> lane & 1 == 1)?;
                        }
                    }
                }
                _ => {}
            }
            Ok(())
        })?;
        Ok(())
    }
}

fn access_bytes(access: &Access) -> u32 {
    u32::from(access.element_bytes) * u32::from(access.num_elements)
}

/// Tells an access of the lanes of `mask`, as far as it is one to shared memory.
fn access_lanes(
    watch: &mut Watch<'_, '_>,
    access: &Access,
    addresses: &[u64; 32],
    mask: u32,
    touch: Touch,
) -> Result<(), Fault> {
    if access.space.is_some_and(|space| space != Space::Shared) {
        return Ok(());
    }
    let touch = if access.volatile {
        Touch::Atomic
    } else {
        touch
    };
    for lane in lanes_of(mask) {
        let address = match access.space {
            Some(Space::Shared) => addresses[lane],
            None if addresses[lane] & SHARED_WINDOW != 0 => addresses[lane] & !SHARED_WINDOW,
            _ => continue,
        };
        watch.touch(address as u32, access_bytes(access), touch)?;
    }
    Ok(())
}
