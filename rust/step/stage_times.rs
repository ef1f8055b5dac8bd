//! Where the time of decode steps goes, stage by stage.
//!
//! A clock is always on: each stage ends with a lap, which takes all time since the lap before, so the stages of a step
//! and the gap before it add up to the whole. Work on a GPU runs on while the host goes to the next stage, so a stage that
//! reads nothing back seems short there and the next long; a *settled* clock waits for the device at every lap, and then
//! stages are what they take on their own (and steps a little longer). Steps with prompt rows are left out.

use std::time::{Duration, Instant};

use crate::device::{ActivityCounts, Device};
use crate::error::DeviceError;

/// A part of a decode step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    /// From the end of a step to the start of the next: callers, scheduling.
    Between,
    /// The drafter's forward, its head and the copy of its proposals.
    Draft,
    /// Growing trees on the host.
    Tree,
    /// Q passes: the forward through the 8-bit view.
    QForward,
    /// Their LM head, and the copy of what it chose.
    QHead,
    /// Marking paths, and their rows to the drafter's context.
    Mark,
    /// The exact forward.
    Forward,
    /// Its LM head, and the copy of what it chose.
    Head,
    /// Walking accepted paths, and their rows to the target's caches.
    Commit,
    /// Accepted rows to the drafter's context, and tokens to requests.
    Context,
}

impl Stage {
    /// All stages, in the order of a step.
    pub const ALL: [Self; 10] = [
        Self::Between,
        Self::Draft,
        Self::Tree,
        Self::QForward,
        Self::QHead,
        Self::Mark,
        Self::Forward,
        Self::Head,
        Self::Commit,
        Self::Context,
    ];

    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Between => "between",
            Self::Draft => "draft",
            Self::Tree => "tree",
            Self::QForward => "q_forward",
            Self::QHead => "q_head",
            Self::Mark => "mark",
            Self::Forward => "forward",
            Self::Head => "head",
            Self::Commit => "commit",
            Self::Context => "context",
        }
    }
}

/// Sums over steps.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StageTimes {
    /// Steps that were summed.
    pub num_steps: u64,
    /// What the device was asked for in them.
    pub activity: ActivityCounts,
    stages: [Duration; Stage::ALL.len()],
}

impl StageTimes {
    /// Time of `stage` in all steps.
    pub fn of(&self, stage: Stage) -> Duration {
        self.stages[stage as usize]
    }

    fn add(&mut self, other: &Self) {
        self.num_steps += other.num_steps;
        self.activity += other.activity;
        for (sum, time) in self.stages.iter_mut().zip(other.stages) {
            *sum += time;
        }
    }
}

/// Times the stages of steps.
#[derive(Debug, Default)]
pub struct StageClock {
    is_settled: bool,
    /// Of all steps.
    total: StageTimes,
    /// Of the step under way.
    step: StageTimes,
    /// `None` while no step's end lies behind that the next follows on.
    last_lap: Option<Instant>,
    activity_before: ActivityCounts,
}

impl StageClock {
    /// A clock at zero; `is_settled`: it waits for the device at every lap.
    pub fn new(is_settled: bool) -> Self {
        Self {
            is_settled,
            ..Self::default()
        }
    }

    /// Sums so far.
    pub fn times(&self) -> &StageTimes {
        &self.total
    }

    /// Starts a step; time since the last one is the gap between them unless [`pause`](Self::pause) came in between.
    pub fn start_step(&mut self, device: &Device) {
        self.step = StageTimes::default();
        let now = Instant::now();
        if let Some(last) = self.last_lap.replace(now) {
            self.step.stages[Stage::Between as usize] = now - last;
        }
        self.activity_before = device.activity();
    }

    /// Ends a stage of the step.
    ///
    /// # Errors
    /// [`DeviceError::Driver`] from a settled clock, with the first error of the work waited for.
    pub fn lap(&mut self, device: &Device, stage: Stage) -> Result<(), DeviceError> {
        if self.is_settled {
            device.synchronize()?;
        }
        let now = Instant::now();
        if let Some(last) = self.last_lap.replace(now) {
            self.step.stages[stage as usize] += now - last;
        }
        Ok(())
    }

    /// Ends the step and adds it to the sums.
    pub fn end_step(&mut self, device: &Device) {
        self.step.num_steps = 1;
        self.step.activity = device.activity() - self.activity_before;
        self.total.add(&self.step);
    }

    /// No step follows at once.
    pub fn pause(&mut self) {
        self.last_lap = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn laps_add_up_to_the_whole_and_pauses_are_no_gaps() {
        let device = Device::host(Some(1)).unwrap();
        let mut clock = StageClock::new(true);
        let rest = || std::thread::sleep(Duration::from_millis(2));
        for pauses in [false, true, false] {
            clock.start_step(&device);
            rest();
            clock.lap(&device, Stage::Draft).unwrap();
            rest();
            clock.lap(&device, Stage::Forward).unwrap();
            clock.end_step(&device);
            if pauses {
                clock.pause();
            }
            rest();
        }
        let times = clock.times();
        let least = |num_rests: u64| Duration::from_millis(2 * num_rests);
        assert_eq!(times.num_steps, 3);
        assert!(times.of(Stage::Draft) >= least(3) && times.of(Stage::Forward) >= least(3));
        // Before the second step only: before the first there is nothing, before the third a pause.
        assert!(times.of(Stage::Between) >= least(1));
        assert_eq!(times.of(Stage::Head), Duration::ZERO);
        assert_eq!(times.activity, ActivityCounts::default());
    }

    #[test]
    fn a_step_that_does_not_end_is_not_counted() {
        let device = Device::host(Some(1)).unwrap();
        let mut clock = StageClock::default();
        clock.start_step(&device);
        clock.lap(&device, Stage::Draft).unwrap();
        clock.start_step(&device);
        clock.end_step(&device);
        assert_eq!(clock.times().num_steps, 1);
        assert_eq!(clock.times().of(Stage::Draft), Duration::ZERO);
    }
}
