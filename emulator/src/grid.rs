//! Runs a grid: all blocks live together, warps take turns as the order says, faults end the launch.

use crate::fault::Fault;
use crate::memory::GlobalMemory;
use crate::order::Order;
use crate::ptx::Kernel;

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

/// Runs `kernel` to its end.
pub fn run(
    kernel: &Kernel,
    launch: &GridLaunch,
    params: &[u8],
    memory: &GlobalMemory,
    order: &mut Order,
) -> Result<(), Fault> {
    let _ = (launch, params, memory, order);
    Err(Fault::Unsupported {
        what: format!("running {}", kernel.name),
        place: None,
    })
}
