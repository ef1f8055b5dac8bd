//! What a GPU was asked to do, counted: kernels, replays, captures, copies, and how long the host waited for it.

use std::ops::{AddAssign, Sub};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Counts since a device was opened, or between two moments. All zero on the host, which is asked nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ActivityCounts {
    /// Kernels launched one by one, those said into a capture among them.
    pub num_launches: u64,
    /// Captured sequences replayed.
    pub num_replays: u64,
    /// Sequences captured.
    pub num_captures: u64,
    /// Copies to the device.
    pub num_uploads: u64,
    /// Copies from the device, each of which waits for all work before it.
    pub num_read_backs: u64,
    /// Time in which the host only waited.
    pub waited: Duration,
}

impl AddAssign for ActivityCounts {
    fn add_assign(&mut self, other: Self) {
        self.num_launches += other.num_launches;
        self.num_replays += other.num_replays;
        self.num_captures += other.num_captures;
        self.num_uploads += other.num_uploads;
        self.num_read_backs += other.num_read_backs;
        self.waited += other.waited;
    }
}

impl Sub for ActivityCounts {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        Self {
            num_launches: self.num_launches - earlier.num_launches,
            num_replays: self.num_replays - earlier.num_replays,
            num_captures: self.num_captures - earlier.num_captures,
            num_uploads: self.num_uploads - earlier.num_uploads,
            num_read_backs: self.num_read_backs - earlier.num_read_backs,
            waited: self.waited - earlier.waited,
        }
    }
}

/// A device's counts, kept by whatever asks it for something.
#[derive(Debug, Default)]
pub(super) struct Activity(Mutex<ActivityCounts>);

impl Activity {
    /// The counts now.
    pub(super) fn counts(&self) -> ActivityCounts {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts something.
    pub(super) fn note(&self, count: impl FnOnce(&mut ActivityCounts)) {
        count(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// Runs `wait`, which only waits for the device.
    pub(super) fn waiting<R>(&self, wait: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let outcome = wait();
        self.note(|counts| counts.waited += start.elapsed());
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_between_two_moments_add_up() {
        let activity = Activity::default();
        activity.note(|counts| counts.num_uploads += 3);
        let before = activity.counts();
        activity.note(|counts| counts.num_uploads += 2);
        let answer = activity.waiting(|| {
            std::thread::sleep(Duration::from_millis(2));
            42
        });
        assert_eq!(answer, 42);
        let between = activity.counts() - before;
        assert_eq!(between.num_uploads, 2);
        assert!(between.waited >= Duration::from_millis(2));
        let mut all = before;
        all += between;
        assert_eq!(all, activity.counts());
    }
}
