//! `mbarrier` objects: 64-bit words in shared memory that count arrivals and bytes of a phase.
//!
//! A phase is complete when as many arrivals have come as the barrier was initialised with and the bytes that arrivals
//! announced have landed; the next one then begins with the same number of arrivals. The word's layout is ours, as the
//! PTX ISA leaves it open. It carries a mark, so that a word that nobody initialised, or that data was written over, is
//! found.

use crate::fault::Fault;

/// The most arrivals of a phase, and the most bytes that a phase may wait for.
pub const MAX_COUNT: u32 = (1 << 20) - 1;

/// Fields from the lowest bit up: arrivals of each phase, arrivals still missing, bytes still missing, parity, mark.
const COUNT_BITS: u32 = 20;
const BYTES_BITS: u32 = 21;
const MARK: u64 = 0b10;

/// The state of a barrier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mbarrier {
    arrivals: u32,
    missing_arrivals: u32,
    /// Negative when more has landed than was announced so far.
    missing_bytes: i32,
    parity: u32,
}

fn misuse(what: String) -> Fault {
    Fault::BarrierMisuse { what, place: None }
}

impl Mbarrier {
    /// `mbarrier.init`: the first phase, of parity zero.
    pub fn new(arrivals: u32) -> Result<Self, Fault> {
        if arrivals == 0 || arrivals > MAX_COUNT {
            return Err(misuse(format!(
                "an mbarrier is initialised with {arrivals} arrivals, not 1 to {MAX_COUNT}"
            )));
        }
        Ok(Self {
            arrivals,
            missing_arrivals: arrivals,
            missing_bytes: 0,
            parity: 0,
        })
    }

    /// Reads the word that lies in shared memory.
    pub fn from_word(word: u64) -> Result<Self, Fault> {
        let count = |at: u32| (word >> at) as u32 & MAX_COUNT;
        let signed_bytes = (word >> (2 * COUNT_BITS)) as u32;
        let barrier = Self {
            arrivals: count(0),
            missing_arrivals: count(COUNT_BITS),
            missing_bytes: (signed_bytes << (32 - BYTES_BITS)) as i32 >> (32 - BYTES_BITS),
            parity: (word >> (2 * COUNT_BITS + BYTES_BITS)) as u32 & 1,
        };
        if word >> (2 * COUNT_BITS + BYTES_BITS + 1) != MARK || barrier.arrivals == 0 {
            return Err(misuse(format!("there is no mbarrier but {word:#018x}")));
        }
        Ok(barrier)
    }

    /// The word for shared memory.
    pub fn to_word(self) -> u64 {
        let bytes = u64::from(self.missing_bytes as u32 & ((1 << BYTES_BITS) - 1));
        u64::from(self.arrivals)
            | u64::from(self.missing_arrivals) << COUNT_BITS
            | bytes << (2 * COUNT_BITS)
            | u64::from(self.parity) << (2 * COUNT_BITS + BYTES_BITS)
            | MARK << (2 * COUNT_BITS + BYTES_BITS + 1)
    }

    /// `mbarrier.arrive`; also what `cp.async.mbarrier.arrive.noinc` comes to when the thread's copies have landed.
    pub fn arrive(&mut self) -> Result<(), Fault> {
        if self.missing_arrivals == 0 {
            return Err(misuse(format!(
                "more than {} arrivals in a phase of an mbarrier, which still waits for {} bytes",
                self.arrivals, self.missing_bytes
            )));
        }
        self.missing_arrivals -= 1;
        self.turn();
        Ok(())
    }

    /// `mbarrier.arrive.expect_tx`: the phase waits for `num_bytes` besides.
    pub fn arrive_expecting(&mut self, num_bytes: u32) -> Result<(), Fault> {
        self.add_bytes(i64::from(num_bytes))?;
        self.arrive()
    }

    /// Bytes of a copy have landed.
    pub fn land(&mut self, num_bytes: u32) -> Result<(), Fault> {
        self.add_bytes(-i64::from(num_bytes))?;
        self.turn();
        Ok(())
    }

    /// `mbarrier.test_wait.parity`: whether the phase of that parity, this one or the one before, is complete.
    pub fn is_complete(&self, parity: u32) -> bool {
        parity & 1 != self.parity
    }

    /// What the current phase still waits for, in words.
    pub fn describe(&self) -> String {
        format!(
            "phase of parity {} lacks {} of {} arrivals and {} bytes",
            self.parity, self.missing_arrivals, self.arrivals, self.missing_bytes
        )
    }

    fn add_bytes(&mut self, num_bytes: i64) -> Result<(), Fault> {
        let bytes = i64::from(self.missing_bytes) + num_bytes;
        if bytes.unsigned_abs() > u64::from(MAX_COUNT) {
            return Err(misuse(format!(
                "a phase of an mbarrier waits for {bytes} bytes, beyond {MAX_COUNT}"
            )));
        }
        self.missing_bytes = bytes as i32;
        Ok(())
    }

    fn turn(&mut self) {
        if self.missing_arrivals == 0 && self.missing_bytes == 0 {
            self.missing_arrivals = self.arrivals;
            self.parity ^= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn barrier(arrivals: u32) -> Mbarrier {
        Mbarrier::new(arrivals).expect("valid")
    }

    #[test]
    fn a_phase_ends_with_its_last_arrival_and_the_next_begins() {
        let mut barrier = barrier(3);
        for phase in 0..5 {
            for _ in 0..3 {
                assert!(!barrier.is_complete(phase) && barrier.is_complete(phase + 1));
                assert_eq!(barrier.arrive(), Ok(()));
            }
            assert!(barrier.is_complete(phase) && !barrier.is_complete(phase + 1));
        }
    }

    #[test]
    fn bytes_hold_a_phase_open_in_either_order() {
        let mut early = barrier(1);
        assert_eq!(early.land(512), Ok(()));
        assert!(!early.is_complete(0));
        assert_eq!(early.arrive_expecting(1024), Ok(()));
        assert!(!early.is_complete(0));
        assert_eq!(early.land(512), Ok(()));
        assert!(early.is_complete(0));

        let mut late = barrier(2);
        assert_eq!(late.arrive_expecting(16), Ok(()));
        assert_eq!(late.land(16), Ok(()));
        assert!(!late.is_complete(0));
        assert_eq!(late.arrive(), Ok(()));
        assert!(late.is_complete(0));
        assert_eq!(
            late.describe(),
            "phase of parity 1 lacks 2 of 2 arrivals and 0 bytes"
        );
    }

    #[test]
    fn words_hold_the_whole_state() {
        let mut barrier = barrier(MAX_COUNT);
        let mut seen = std::collections::HashSet::new();
        for step in 0..200u32 {
            match step % 3 {
                0 => barrier.arrive(),
                1 => barrier.arrive_expecting(9999),
                _ => barrier.land(if step > 100 { 10_000 } else { 7 }),
            }
            .expect("in range");
            assert_eq!(Mbarrier::from_word(barrier.to_word()), Ok(barrier));
            assert!(seen.insert(barrier.to_word()));
        }
        let mut negative = Mbarrier::new(1).expect("valid");
        negative.land(MAX_COUNT).expect("in range");
        assert_eq!(Mbarrier::from_word(negative.to_word()), Ok(negative));
    }

    #[test]
    fn misuse_is_named() {
        for count in [0, MAX_COUNT + 1] {
            assert!(matches!(
                Mbarrier::new(count),
                Err(Fault::BarrierMisuse { .. })
            ));
        }
        for word in [0, u64::MAX, 0x3f80_0000_3f80_0000] {
            assert!(matches!(
                Mbarrier::from_word(word),
                Err(Fault::BarrierMisuse { .. })
            ));
        }
        let mut full = barrier(1);
        assert_eq!(full.arrive_expecting(16), Ok(()));
        assert!(full.arrive().is_err());
        assert!(full.arrive_expecting(MAX_COUNT).is_err());
    }
}
