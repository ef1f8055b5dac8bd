//! Many kernels made ready at once: the compiler takes a thread for each, and most of a cold start is its work.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use super::cache::CodeCache;
use super::compiler::{Arch, Compiled};
use super::source::KernelSource;
use crate::error::DeviceError;

/// How long a caller waits to be asked whether to go on.
const PATIENCE: Duration = Duration::from_millis(100);

/// The code of every kernel of `jobs` in their order, from `cache` or compiled, on as many threads as the machine has
/// cores. `go_on` is called on this thread: with a job's place when its code is there, and with nothing now and then.
/// The first error, its own or a job's, ends the work; what is being compiled by then is compiled to its end.
///
/// # Errors
/// What `go_on` says, or [`CodeCache::get_or_compile`].
pub fn compile_many<E: From<DeviceError>>(
    cache: &CodeCache,
    jobs: &[(&KernelSource, Arch)],
    mut go_on: impl FnMut(Option<usize>) -> Result<(), E>,
) -> Result<Vec<Compiled>, E> {
    let next = AtomicUsize::new(0);
    let num_threads = thread::available_parallelism().map_or(1, usize::from);
    let (sender, ready) = mpsc::channel();
    thread::scope(|scope| {
        for _ in 0..num_threads.min(jobs.len()) {
            let (sender, next) = (sender.clone(), &next);
            scope.spawn(move || {
                loop {
                    let index = next.fetch_add(1, Ordering::Relaxed);
                    let Some(&(source, arch)) = jobs.get(index) else {
                        return;
                    };
                    let result = cache.get_or_compile(source, arch);
                    if sender.send((index, result)).is_err() {
                        return;
                    }
                }
            });
        }
        drop(sender);
        let mut compiled: Vec<Option<Compiled>> = jobs.iter().map(|_| None).collect();
        let mut gather = || loop {
            match ready.recv_timeout(PATIENCE) {
                Ok((index, result)) => {
                    compiled[index] = Some(result?);
                    go_on(Some(index))?;
                }
                Err(RecvTimeoutError::Timeout) => go_on(None)?,
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        };
        let outcome = gather();
        if outcome.is_err() {
            next.store(jobs.len(), Ordering::Relaxed);
        }
        outcome.map(|()| compiled.into_iter().flatten().collect())
    })
}
