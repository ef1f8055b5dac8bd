//! What all warps of a launch share: memories, what is in flight between blocks, the schedule and the budget.

use crate::address::split_shared;
use crate::async_ops::{Flights, Landing, SharedPlace};
use crate::cluster_barrier::ClusterBarrier;
use crate::fault::{Fault, Space};
use crate::grid::GridLaunch;
use crate::mbarrier::Mbarrier;
use crate::memory::{Extent, GlobalMemory};
use crate::order::Order;
use crate::ptx::Kernel;
use crate::races::Races;
use crate::warp::WARP_LANES;

/// What shared memory holds before anybody writes to it: a NaN, so that reading too early shows.
const FRESH_BYTE: u8 = 0xff;

/// How many extents are remembered, by instruction.
const NUM_REMEMBERED: usize = 256;

/// The state of a launch outside its warps.
pub struct Machine<'l> {
    /// What runs.
    pub kernel: &'l Kernel,
    /// Its shape.
    pub launch: &'l GridLaunch,
    /// Its parameters.
    pub params: &'l [u8],
    /// The schedule.
    pub order: &'l mut Order,
    /// Memory of the device and of the blocks.
    pub memories: Memories<'l>,
    /// Copies and stores on their way to barriers.
    pub flights: Flights,
    /// The barrier of each cluster that runs, by its number.
    pub clusters: Vec<Option<ClusterBarrier>>,
    /// Counts what other warps could see: writes, arrivals, ends.
    pub effects: u64,
    /// Warp instructions that may still run.
    pub instructions_left: u64,
    /// The device allocation that each instruction touched last, by the instruction's number.
    remembered: Box<[Extent; NUM_REMEMBERED]>,
}

impl<'l> Machine<'l> {
    /// A launch that has not started.
    pub fn new(
        kernel: &'l Kernel,
        launch: &'l GridLaunch,
        params: &'l [u8],
        memory: &'l GlobalMemory,
        order: &'l mut Order,
        instructions_left: u64,
    ) -> Self {
        let shared = (0..launch.num_blocks).map(|_| None).collect();
        let cluster_blocks = launch.cluster_blocks;
        Machine {
            kernel,
            launch,
            params,
            order,
            memories: Memories {
                kernel,
                global: memory,
                shared,
                cluster_blocks,
                races: None,
            },
            flights: Flights::default(),
            clusters: vec![None; launch.num_blocks.div_ceil(cluster_blocks) as usize],
            effects: 0,
            instructions_left,
            remembered: Box::new([Extent { start: 0, end: 0 }; NUM_REMEMBERED]),
        }
    }

    /// Warps of a block.
    pub fn block_warps(&self) -> u32 {
        self.launch.block_threads.div_ceil(WARP_LANES)
    }

    /// The barrier of the cluster that a warp belongs to, and the warp's number there.
    pub fn cluster(&mut self, block: u32, warp: u32) -> Option<(&mut ClusterBarrier, usize)> {
        let (cluster, rank) = (
            block / self.launch.cluster_blocks,
            block % self.launch.cluster_blocks,
        );
        let number = rank * self.block_warps() + warp;
        Some((self.clusters[cluster as usize].as_mut()?, number as usize))
    }

    /// The allocation that instruction `pc` touched last.
    #[inline(always)]
    pub fn remembered(&self, pc: u32) -> Extent {
        self.remembered[pc as usize % NUM_REMEMBERED]
    }

    /// Finds the allocation that holds `num_bytes` bytes at `address`, and remembers it for instruction `pc`.
    pub fn find(&mut self, pc: u32, address: u64, num_bytes: u64) -> Result<Extent, Fault> {
        let extent = self.memories.find(address, num_bytes)?;
        self.remembered[pc as usize % NUM_REMEMBERED] = extent;
        Ok(extent)
    }
}

/// Memory of the device and of all blocks that run.
pub struct Memories<'l> {
    kernel: &'l Kernel,
    global: &'l GlobalMemory,
    shared: Vec<Option<Box<[u8]>>>,
    cluster_blocks: u32,
    /// The check for races, where the launch is checked.
    pub races: Option<Box<Races>>,
}

impl Memories<'_> {
    /// Gives a block its shared memory.
    pub fn start_block(&mut self, block: u32, num_bytes: u32) {
        self.shared[block as usize] = Some(vec![FRESH_BYTE; num_bytes as usize].into_boxed_slice());
    }

    /// Takes a block's shared memory away.
    pub fn end_block(&mut self, block: u32) {
        self.shared[block as usize] = None;
    }

    fn find(&self, address: u64, num_bytes: u64) -> Result<Extent, Fault> {
        let found = self
            .global
            .extent(address)
            .or_else(|| self.kernel.globals.extent(address));
        match found {
            Some(extent) if num_bytes <= extent.end - address => Ok(extent),
            _ => self.global.check(address, num_bytes).map(|()| Extent {
                start: address,
                end: address + num_bytes,
            }),
        }
    }

    /// Where `num_bytes` bytes at `address`, as block `block` writes it, lie.
    #[inline(always)]
    pub fn place(&self, block: u32, address: u32, num_bytes: u32) -> Result<SharedPlace, Fault> {
        let (rank, offset) = split_shared(address);
        let owner = match rank {
            None => block,
            Some(rank) if rank < self.cluster_blocks => block - block % self.cluster_blocks + rank,
            Some(rank) => {
                let near = format!(
                    "the cluster has {} blocks, not {rank} and one",
                    self.cluster_blocks
                );
                return Err(out_of_shared(address, num_bytes, near));
            }
        };
        let Some(shared) = self.shared.get(owner as usize).and_then(Option::as_ref) else {
            return Err(out_of_shared(
                address,
                num_bytes,
                format!("block {owner} has ended"),
            ));
        };
        if u64::from(offset) + u64::from(num_bytes) > shared.len() as u64 {
            let near = format!("offset {offset} of {} bytes of block {owner}", shared.len());
            return Err(out_of_shared(address, num_bytes, near));
        }
        Ok(SharedPlace {
            block: owner,
            offset,
        })
    }

    /// The host address of a place that [`Self::place`] found.
    #[inline(always)]
    pub fn host_address(&mut self, place: SharedPlace) -> Result<*mut u8, Fault> {
        match self.shared[place.block as usize].as_mut() {
            // SAFETY: places are made within bounds only.
            Some(shared) => Ok(unsafe { shared.as_mut_ptr().add(place.offset as usize) }),
            None => {
                let near = format!("block {} has ended", place.block);
                Err(out_of_shared(place.offset, 0, near))
            }
        }
    }

    /// The bytes of a block's shared memory.
    #[inline(always)]
    pub fn shared(&mut self, block: u32) -> &mut [u8] {
        self.shared[block as usize]
            .as_deref_mut()
            .unwrap_or_default()
    }
}

fn out_of_shared(address: u32, num_bytes: u32, near: String) -> Fault {
    Fault::OutOfBounds {
        space: Space::Shared,
        address: address.into(),
        num_bytes: num_bytes.into(),
        near,
        place: None,
    }
}

impl Landing for Memories<'_> {
    fn kernel(&self) -> &str {
        &self.kernel.name
    }

    fn copy(&mut self, to: SharedPlace, from: u64, num_bytes: u32) -> Result<(), Fault> {
        let to = self.host_address(to)?;
        self.find(from, num_bytes.into())?;
        // SAFETY: both ranges were checked, the destination when the copy was issued; shared memory belongs to no
        // allocation of the device.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, to, num_bytes as usize) };
        Ok(())
    }

    fn write(&mut self, to: SharedPlace, bytes: &[u8]) -> Result<(), Fault> {
        let to = self.host_address(to)?;
        // SAFETY: the range was checked when the store was issued.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
        Ok(())
    }

    fn barrier(&mut self, at: SharedPlace) -> Result<u64, Fault> {
        let at = self.host_address(at)?.cast::<u64>();
        // SAFETY: the eight bytes were checked when the operation was issued.
        Ok(unsafe { at.read_unaligned() })
    }

    fn set_barrier(&mut self, at: SharedPlace, word: u64) -> Result<(), Fault> {
        let former = self.barrier(at)?;
        let pointer = self.host_address(at)?.cast::<u64>();
        // SAFETY: as above.
        unsafe { pointer.write_unaligned(word) };
        let parity = |word| {
            Mbarrier::from_word(word)
                .ok()
                .map(|barrier| barrier.is_complete(0))
        };
        if let Some(races) = &mut self.races
            && parity(former) != parity(word)
        {
            races.end_phase(at);
        }
        Ok(())
    }
}
