//! Sequences of launches that a GPU repeats: said launch by launch the first times, then captured and replayed as one.
//!
//! A key names everything that the launches follow from besides what lies in buffers: sizes that shape grids, addresses
//! of lists that may move. So equal keys mean equal launches, and a replay does what saying them again would do. The host
//! has nothing to capture and runs the sequence every time.

use std::collections::HashMap;
use std::hash::Hash;

use super::Device;
use super::cuda::{CapturedLaunches, CudaDevice};
use crate::error::DeviceError;

/// Captures kept at a time; some hundred kernels each, beyond what the shapes of one deployment come to.
const MAX_CAPTURES: usize = 512;

/// Captured sequences by key.
pub struct Graphs<K> {
    sequences: HashMap<K, Sequence>,
}

enum Sequence {
    /// Ran once: its kernels are loaded, its scratch is there.
    Seen,
    Captured(CapturedLaunches),
    /// The driver would not capture it.
    Refused,
}

impl<K> Default for Graphs<K> {
    fn default() -> Self {
        Self {
            sequences: HashMap::new(),
        }
    }
}

impl<K: Eq + Hash> Graphs<K> {
    /// Runs the launches that `key` stands for; `say` says them one by one. They may not copy to or from the host, nor
    /// wait.
    ///
    /// # Errors
    /// Those of `say`; [`DeviceError::Driver`] when a replay fails.
    pub fn run<E: From<DeviceError>>(
        &mut self,
        device: &Device,
        key: K,
        mut say: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        match device {
            Device::Host(_) => say(),
            Device::Cuda(cuda) => self.run_on_cuda(cuda, key, say),
        }
    }

    fn run_on_cuda<E: From<DeviceError>>(
        &mut self,
        device: &CudaDevice,
        key: K,
        mut say: impl FnMut() -> Result<(), E>,
    ) -> Result<(), E> {
        match self.sequences.get(&key) {
            None => {
                say()?;
                if self.sequences.len() == MAX_CAPTURES {
                    self.sequences.clear();
                }
                self.sequences.insert(key, Sequence::Seen);
                Ok(())
            }
            Some(Sequence::Seen) => {
                let captured = CapturedLaunches::capture(device, &mut say)?;
                let sequence = match captured {
                    Some(launches) => {
                        launches.replay(device)?;
                        Sequence::Captured(launches)
                    }
                    None => {
                        say()?;
                        Sequence::Refused
                    }
                };
                self.sequences.insert(key, sequence);
                Ok(())
            }
            Some(Sequence::Captured(launches)) => Ok(launches.replay(device)?),
            Some(Sequence::Refused) => say(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_says_every_launch_every_time() {
        let device = Device::host(Some(1)).unwrap();
        let mut graphs = Graphs::default();
        let mut num_runs = 0;
        for key in [1, 1, 2, 1] {
            let outcome: Result<(), DeviceError> = graphs.run(&device, key, || {
                num_runs += 1;
                Ok(())
            });
            outcome.unwrap();
        }
        assert_eq!(num_runs, 4);
    }
}
