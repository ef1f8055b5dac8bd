//! The hardware barrier of a cluster: `barrier.cluster.arrive` and `.wait` of all its warps.
//!
//! A warp arrives and later waits until all warps of the cluster that have not ended arrived as often as it did.

use crate::fault::Fault;

/// What a warp did last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Not arrived in this round.
    Away,
    /// Arrived in the round of that number, and not yet past its wait.
    Arrived(u64),
    /// Ended: nobody waits for it.
    Ended,
}

/// The barrier of one cluster.
#[derive(Debug, Clone)]
pub struct ClusterBarrier {
    warps: Vec<State>,
    /// Warps that the round still waits for.
    num_missing: usize,
    round: u64,
}

impl ClusterBarrier {
    /// The barrier of a cluster of so many warps, in the order of its blocks.
    pub fn new(num_warps: usize) -> Self {
        Self {
            warps: vec![State::Away; num_warps],
            num_missing: num_warps,
            round: 0,
        }
    }

    /// `barrier.cluster.arrive`.
    pub fn arrive(&mut self, warp: usize) -> Result<(), Fault> {
        if self.warps[warp] != State::Away {
            return Err(misuse(
                "arrives at the cluster's barrier again without having waited",
            ));
        }
        self.warps[warp] = State::Arrived(self.round);
        self.count();
        Ok(())
    }

    /// `barrier.cluster.wait`: whether the warp may go on, which it then does.
    pub fn try_wait(&mut self, warp: usize) -> Result<bool, Fault> {
        match self.warps[warp] {
            State::Arrived(round) if round < self.round => {
                self.warps[warp] = State::Away;
                Ok(true)
            }
            State::Arrived(_) => Ok(false),
            State::Away | State::Ended => Err(misuse(
                "waits at the cluster's barrier without having arrived",
            )),
        }
    }

    /// The warp's end.
    pub fn end(&mut self, warp: usize) {
        let is_missing = !matches!(self.warps[warp], State::Arrived(round) if round == self.round);
        let before = std::mem::replace(&mut self.warps[warp], State::Ended);
        if before != State::Ended && is_missing {
            self.count();
        }
    }

    /// One missing warp less; the last one ends the round.
    fn count(&mut self) {
        self.num_missing -= 1;
        if self.num_missing == 0 {
            self.round += 1;
            let is_left = |state: &&State| **state != State::Ended;
            self.num_missing = self.warps.iter().filter(is_left).count();
        }
    }
}

fn misuse(what: &str) -> Fault {
    Fault::BarrierMisuse {
        what: format!("a warp {what}"),
        place: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_passes_before_the_last_arrival() {
        let mut barrier = ClusterBarrier::new(3);
        for _ in 0..4 {
            for warp in [2, 0] {
                assert_eq!(barrier.arrive(warp), Ok(()));
                assert_eq!(barrier.try_wait(warp), Ok(false));
            }
            assert_eq!(barrier.arrive(1), Ok(()));
            for warp in 0..3 {
                assert_eq!(barrier.try_wait(warp), Ok(true));
            }
        }
    }

    #[test]
    fn a_fast_warp_may_be_a_round_ahead() {
        let mut barrier = ClusterBarrier::new(2);
        assert_eq!([barrier.arrive(0), barrier.arrive(1)], [Ok(()), Ok(())]);
        assert_eq!(barrier.try_wait(0), Ok(true));
        assert_eq!(barrier.arrive(0), Ok(()));
        assert_eq!(barrier.try_wait(0), Ok(false));
        assert_eq!(barrier.try_wait(1), Ok(true));
        assert_eq!(barrier.arrive(1), Ok(()));
        assert_eq!(
            [barrier.try_wait(0), barrier.try_wait(1)],
            [Ok(true), Ok(true)]
        );
    }

    #[test]
    fn ended_warps_are_not_waited_for() {
        let mut barrier = ClusterBarrier::new(3);
        assert_eq!(barrier.arrive(0), Ok(()));
        barrier.end(1);
        assert_eq!(barrier.try_wait(0), Ok(false));
        assert_eq!(barrier.arrive(2), Ok(()));
        barrier.end(2);
        assert_eq!(barrier.try_wait(0), Ok(true));
        assert_eq!(barrier.arrive(0), Ok(()));
        assert_eq!(barrier.try_wait(0), Ok(true));
    }

    #[test]
    fn arriving_twice_and_waiting_for_nothing_are_faults() {
        let mut barrier = ClusterBarrier::new(2);
        assert!(barrier.try_wait(0).is_err());
        assert_eq!(barrier.arrive(0), Ok(()));
        assert!(barrier.arrive(0).is_err());
    }
}
