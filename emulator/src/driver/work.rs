//! What the device was given to do, and its doing it.
//!
//! With order `first` work is done when it is given; with `late` only when somebody waits or needs its result, as late as
//! the programming model allows; a random order draws. So whoever reads page-locked memory without waiting, or counts on
//! a launch having run, is found out.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use super::{Outcome, Status, refuse};
use crate::fault::Fault;
use crate::grid::{self, Checks, GridLaunch};
use crate::memory::GlobalMemory;
use crate::order::{Order, Policy};
use crate::ptx::Kernel;

/// The environment variable that has every launch told on standard error, where it is `1`.
const LOG_VARIABLE: &str = "PTX_EMULATOR_LOG";
/// Bytes of uploads that may wait.
const MAX_STAGED_BYTES: usize = 64 << 20;
/// A random order does all work after one in this many operations.
const MEAN_WAIT: u32 = 4;
/// Bytes that are looked at together before they are cleared.
const PAGE_BYTES: usize = 4096;

/// One thing to do.
#[derive(Clone)]
pub(super) enum Operation {
    /// Runs a kernel.
    Launch {
        kernel: Arc<Kernel>,
        grid: GridLaunch,
        params: Arc<[u8]>,
    },
    /// Writes bytes that were copied when the operation was given.
    Upload { bytes: Arc<[u8]>, to: u64 },
    /// Copies to page-locked host memory at this address.
    ReadBack {
        from: u64,
        to: usize,
        num_bytes: usize,
    },
    /// Copies from one place of device memory to another.
    CopyWithin {
        from: u64,
        to: u64,
        num_bytes: usize,
    },
    /// Sets bytes.
    Fill {
        to: u64,
        num_bytes: usize,
        value: u8,
    },
    /// Gives an allocation back.
    Free { address: u64 },
}

/// The device's memory and its queue.
pub(super) struct Work {
    memory: GlobalMemory,
    order: Order,
    queue: VecDeque<Operation>,
    num_staged_bytes: usize,
    failure: Option<Status>,
    is_logging: bool,
}

impl Work {
    /// An idle device with `memory_bytes` of memory, its schedule from the environment.
    pub(super) fn from_env(memory_bytes: u64) -> Result<Self, String> {
        Ok(Self {
            memory: GlobalMemory::new(memory_bytes),
            order: Order::from_env()?,
            queue: VecDeque::new(),
            num_staged_bytes: 0,
            failure: None,
            is_logging: std::env::var_os(LOG_VARIABLE).is_some_and(|value| value == "1"),
        })
    }

    /// Bytes that allocations hold.
    pub(super) fn used_bytes(&self) -> u64 {
        self.memory.used_bytes()
    }

    /// Memory for `num_bytes`; waits for what is to be given back if there is not enough.
    pub(super) fn allocate(&mut self, num_bytes: usize) -> Outcome<u64> {
        if num_bytes == 0 {
            return Err(Status::INVALID_VALUE);
        }
        if let Some(address) = self.memory.allocate(num_bytes as u64) {
            return Ok(address);
        }
        self.finish()?;
        let address = self.memory.allocate(num_bytes as u64);
        address.ok_or(Status::OUT_OF_MEMORY)
    }

    /// The failure that all later work is refused with.
    pub(super) fn refuse_after_failure(&self) -> Outcome {
        self.failure.map_or(Ok(()), Err)
    }

    /// Ends the context's work for good.
    pub(super) fn fail(&mut self, status: Status) -> Status {
        self.queue.clear();
        self.failure = Some(status);
        status
    }

    /// Queues work.
    pub(super) fn give(&mut self, operation: Operation) -> Outcome {
        if let Operation::Upload { bytes, .. } = &operation {
            self.num_staged_bytes += bytes.len();
        }
        self.queue.push_back(operation);
        let is_due = match self.order.policy() {
            Policy::First => true,
            Policy::Late => false,
            Policy::Random => self.order.below(MEAN_WAIT) == 0,
        };
        match is_due || self.num_staged_bytes > MAX_STAGED_BYTES {
            true => self.finish(),
            false => Ok(()),
        }
    }

    /// Does all that is queued.
    pub(super) fn finish(&mut self) -> Outcome {
        self.num_staged_bytes = 0;
        while let Some(operation) = self.queue.pop_front() {
            self.perform(operation)
                .map_err(|status| self.fail(status))?;
        }
        Ok(())
    }

    fn perform(&mut self, operation: Operation) -> Outcome {
        match operation {
            Operation::Launch {
                kernel,
                grid,
                params,
            } => self.launch(&kernel, &grid, &params),
            Operation::Upload { bytes, to } => {
                let to = self.device_bytes(to, bytes.len())?;
                // SAFETY: the place was just checked; the bytes are on the host, apart from it.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) };
                Ok(())
            }
            Operation::ReadBack {
                from,
                to,
                num_bytes,
            } => {
                let from = self.device_bytes(from, num_bytes)?;
                let to = std::ptr::with_exposed_provenance_mut::<u8>(to);
                // SAFETY: the source was just checked; the destination is a living page-locked block, which is only
                // given back after all work.
                unsafe { std::ptr::copy_nonoverlapping(from, to, num_bytes) };
                Ok(())
            }
            Operation::CopyWithin {
                from,
                to,
                num_bytes,
            } => {
                let from = self.device_bytes(from, num_bytes)?;
                let to = self.device_bytes(to, num_bytes)?;
                // SAFETY: both places were just checked.
                unsafe { std::ptr::copy(from, to, num_bytes) };
                Ok(())
            }
            Operation::Fill {
                to,
                num_bytes,
                value,
            } => {
                let to = self.device_bytes(to, num_bytes)?;
                // SAFETY: the place was just checked, and nobody else looks at it while the driver's lock is held.
                fill(
                    unsafe { std::slice::from_raw_parts_mut(to, num_bytes) },
                    value,
                );
                Ok(())
            }
            Operation::Free { address } => match self.memory.free(address) {
                true => Ok(()),
                false => {
                    let why = format!("{address:#x} is given back and is no allocation");
                    Err(refuse(Status::INVALID_VALUE, why))
                }
            },
        }
    }

    fn launch(&mut self, kernel: &Kernel, launch: &GridLaunch, params: &[u8]) -> Outcome {
        let start = Instant::now();
        let (memory, order) = (&self.memory, &mut self.order);
        let outcome = Checks::from_env()
            .and_then(|checks| grid::run(kernel, launch, params, memory, order, checks));
        if self.is_logging {
            eprintln!(
                "PTX emulator: {} {}x{} clusters of {} shared {} took {:.1} ms",
                kernel.name,
                launch.num_blocks,
                launch.block_threads,
                launch.cluster_blocks,
                launch.dynamic_shared_bytes,
                start.elapsed().as_secs_f64() * 1e3,
            );
        }
        outcome.map_err(|fault| refuse(status_of(&fault), fault))
    }

    /// Where `num_bytes` of device memory lie on the host, if they lie in one allocation.
    fn device_bytes(&self, address: u64, num_bytes: usize) -> Outcome<*mut u8> {
        self.memory
            .check(address, num_bytes as u64)
            .map_err(|fault| refuse(status_of(&fault), format!("a copy: {fault}")))?;
        Ok(std::ptr::with_exposed_provenance_mut(address as usize))
    }
}

/// What the real driver would say.
fn status_of(fault: &Fault) -> Status {
    match fault {
        Fault::OutOfBounds { .. } => Status::ILLEGAL_ADDRESS,
        Fault::Misaligned { .. } => Status::MISALIGNED_ADDRESS,
        Fault::Deadlock { .. } | Fault::Runaway { .. } => Status::LAUNCH_TIMEOUT,
        Fault::Unsupported { .. } => Status::NOT_SUPPORTED,
        Fault::BarrierMisuse { .. } | Fault::Race { .. } => Status::LAUNCH_FAILED,
    }
}

/// Sets all bytes. Pages that are zero already are left alone: most were never touched, and would become resident.
fn fill(bytes: &mut [u8], value: u8) {
    if value != 0 {
        return bytes.fill(value);
    }
    for page in bytes.chunks_mut(PAGE_BYTES) {
        if page.iter().fold(0, |all, byte| all | byte) != 0 {
            page.fill(0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn work(policy: Policy) -> Work {
        Work {
            memory: GlobalMemory::new(1 << 20),
            order: Order::new(policy, 1),
            queue: VecDeque::new(),
            num_staged_bytes: 0,
            failure: None,
            is_logging: false,
        }
    }

    fn bytes_of(work: &Work, address: u64, num_bytes: usize) -> Vec<u8> {
        let from = work.device_bytes(address, num_bytes).unwrap();
        // SAFETY: just checked.
        unsafe { std::slice::from_raw_parts(from, num_bytes) }.to_vec()
    }

    #[test]
    fn late_work_is_done_in_order_when_it_is_waited_for() {
        let mut work = work(Policy::Late);
        let at = work.allocate(8).unwrap();
        for bytes in [[1_u8; 8], [2; 8]] {
            let bytes = Arc::from(&bytes[..]);
            work.give(Operation::Upload { bytes, to: at }).unwrap();
        }
        let (from, to) = (at, at + 6);
        work.give(Operation::Fill {
            to,
            num_bytes: 2,
            value: 7,
        })
        .unwrap();
        work.give(Operation::CopyWithin {
            from: at + 4,
            to: from,
            num_bytes: 4,
        })
        .unwrap();
        assert_eq!(bytes_of(&work, at, 8), [0; 8]);
        work.finish().unwrap();
        assert_eq!(bytes_of(&work, at, 8), [2, 2, 7, 7, 2, 2, 7, 7]);
        work.give(Operation::Fill {
            to: at,
            num_bytes: 8,
            value: 0,
        })
        .unwrap();
        work.finish().unwrap();
        assert_eq!(bytes_of(&work, at, 8), [0; 8]);
    }

    #[test]
    fn a_copy_past_an_end_fails_and_stays_failed() {
        let mut work = work(Policy::First);
        let at = work.allocate(8).unwrap();
        let past = Operation::Fill {
            to: at + 4,
            num_bytes: 5,
            value: 1,
        };
        assert_eq!(work.give(past), Err(Status::ILLEGAL_ADDRESS));
        assert_eq!(work.refuse_after_failure(), Err(Status::ILLEGAL_ADDRESS));
    }

    #[test]
    fn memory_that_waits_to_be_given_back_serves_who_needs_it() {
        let mut work = work(Policy::Late);
        let address = work.allocate(1 << 20).unwrap();
        assert_eq!(work.allocate(1), Err(Status::OUT_OF_MEMORY));
        work.give(Operation::Free { address }).unwrap();
        assert!(work.allocate(1).is_ok());
        work.give(Operation::Free { address }).unwrap();
        assert_eq!(
            work.finish(),
            Err(Status::INVALID_VALUE),
            "given back twice"
        );
    }
}
