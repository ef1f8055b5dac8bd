//! Who touched each byte of a block's shared memory last, as far as a later access could still race with it.

use std::collections::HashMap;

/// What a warp or what it started knows of all others: for each the last step that is ordered before now.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Clock(Vec<u32>);

impl Clock {
    /// The last step of `actor` that is ordered before; zero for none.
    #[inline(always)]
    pub fn get(&self, actor: u32) -> u32 {
        self.0.get(actor as usize).copied().unwrap_or(0)
    }

    /// Orders steps of `actor` up to `step` before.
    pub fn raise(&mut self, actor: u32, step: u32) {
        let at = actor as usize;
        if self.0.len() <= at {
            self.0.resize(at + 1, 0);
        }
        self.0[at] = self.0[at].max(step);
    }

    /// Orders all before that is ordered before in `other`.
    pub fn join(&mut self, other: &Clock) {
        if self.0.len() < other.0.len() {
            self.0.resize(other.0.len(), 0);
        }
        for (own, &step) in self.0.iter_mut().zip(&other.0) {
            *own = (*own).max(step);
        }
    }

    #[inline(always)]
    fn covers(&self, stamp: &Stamp) -> bool {
        self.get(stamp.actor) >= stamp.step
    }
}

/// How memory is touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    /// Plain reading.
    Read,
    /// Plain writing.
    Write,
    /// Atomics, volatile accesses and operations of barriers, which do not race with each other.
    Atomic,
}

/// One access: who, in which step of its own, at which line of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stamp {
    /// Who did it.
    pub actor: u32,
    /// When, in its own count.
    pub step: u32,
    /// Line of the PTX text, from one.
    pub line: u32,
}

/// An earlier access that a later one is not ordered after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Conflict {
    /// The earlier access.
    pub earlier: Stamp,
    /// What it did.
    pub touch: Touch,
}

/// Accesses of one kind of which none is ordered before another; mostly one.
#[derive(Debug, Clone, Default)]
struct Accesses {
    first: Option<Stamp>,
    others: Vec<Stamp>,
}

impl Accesses {
    #[inline(always)]
    fn unordered(&self, clock: &Clock) -> Option<Stamp> {
        let is_open = |stamp: &&Stamp| !clock.covers(stamp);
        (self.first.iter().chain(&self.others).find(is_open)).copied()
    }

    /// Adds an access, in whose stead none that is ordered before it need be kept.
    #[inline(always)]
    fn add(&mut self, stamp: Stamp, clock: &Clock) {
        let is_superseded = |old: &Stamp| old.actor == stamp.actor || clock.covers(old);
        match &self.first {
            Some(old) if !is_superseded(old) => {
                self.others.retain(|old| !is_superseded(old));
                self.others.push(stamp);
            }
            _ => {
                self.first = Some(stamp);
                if !self.others.is_empty() {
                    self.others.retain(|old| !is_superseded(old));
                }
            }
        }
    }

    fn clear(&mut self) {
        self.first = None;
        self.others.clear();
    }
}

/// The history of a word or a byte.
#[derive(Debug, Clone, Default)]
struct Cell {
    write: Option<Stamp>,
    reads: Accesses,
    atomics: Accesses,
}

impl Cell {
    #[inline(always)]
    fn touch(&mut self, touch: Touch, stamp: Stamp, clock: &Clock) -> Result<(), Conflict> {
        let conflict = |earlier, touch| Conflict { earlier, touch };
        if let Some(write) = self.write.filter(|write| !clock.covers(write)) {
            return Err(conflict(write, Touch::Write));
        }
        if touch != Touch::Atomic
            && let Some(atomic) = self.atomics.unordered(clock)
        {
            return Err(conflict(atomic, Touch::Atomic));
        }
        if touch != Touch::Read
            && let Some(read) = self.reads.unordered(clock)
        {
            return Err(conflict(read, Touch::Read));
        }
        match touch {
            Touch::Read => self.reads.add(stamp, clock),
            Touch::Atomic => self.atomics.add(stamp, clock),
            Touch::Write => {
                // Whatever comes after this write in order comes after all that is forgotten here.
                self.write = Some(stamp);
                self.reads.clear();
                self.atomics.clear();
            }
        }
        Ok(())
    }
}

/// Bytes of a word.
const WORD_BYTES: u32 = 4;

/// The history of a block's shared memory, by words, or by bytes where some access touched part of a word.
#[derive(Debug, Default)]
pub struct Cells {
    words: Vec<Cell>,
    bytes: HashMap<u32, [Cell; WORD_BYTES as usize]>,
}

impl Cells {
    /// Notes an access to `num_bytes` bytes from `offset` on, by one who knows `clock`; the error is an earlier one that
    /// it races with.
    pub fn touch(
        &mut self,
        (offset, num_bytes): (u32, u32),
        touch: Touch,
        stamp: Stamp,
        clock: &Clock,
    ) -> Result<(), Conflict> {
        let end = offset + num_bytes;
        let num_words = end.div_ceil(WORD_BYTES) as usize;
        if self.words.len() < num_words {
            self.words.resize(num_words, Cell::default());
        }
        for word in offset / WORD_BYTES..end.div_ceil(WORD_BYTES) {
            let (first, last) = (word * WORD_BYTES, (word + 1) * WORD_BYTES);
            let is_whole = offset <= first && last <= end;
            let whole = &mut self.words[word as usize];
            if is_whole && (self.bytes.is_empty() || !self.bytes.contains_key(&word)) {
                whole.touch(touch, stamp, clock)?;
                continue;
            }
            let bytes = self
                .bytes
                .entry(word)
                .or_insert_with(|| std::array::from_fn(|_| whole.clone()));
            for (cell, at) in bytes.iter_mut().zip(first..last) {
                if offset <= at && at < end {
                    cell.touch(touch, stamp, clock)?;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stamp(actor: u32, step: u32) -> Stamp {
        Stamp {
            actor,
            step,
            line: 10 * actor + step,
        }
    }

    fn clock(steps: &[u32]) -> Clock {
        Clock(steps.to_vec())
    }

    #[test]
    fn clocks_keep_the_later_step_of_each() {
        let mut own = clock(&[3, 0, 7]);
        own.join(&clock(&[1, 5]));
        assert_eq!(own, clock(&[3, 5, 7]));
        own.raise(4, 2);
        own.raise(0, 1);
        assert_eq!(
            [0, 1, 2, 3, 4, 9].map(|actor| own.get(actor)),
            [3, 5, 7, 0, 2, 0]
        );
    }

    #[test]
    fn what_is_not_ordered_after_a_write_races_with_it() {
        for touch in [Touch::Read, Touch::Write, Touch::Atomic] {
            let mut cells = Cells::default();
            assert_eq!(
                cells.touch((8, 8), Touch::Write, stamp(0, 1), &clock(&[1])),
                Ok(())
            );
            let expected = Conflict {
                earlier: stamp(0, 1),
                touch: Touch::Write,
            };
            assert_eq!(
                cells.touch((12, 4), touch, stamp(1, 1), &clock(&[0, 1])),
                Err(expected)
            );
            assert_eq!(
                cells.touch((12, 4), touch, stamp(1, 1), &clock(&[1, 1])),
                Ok(())
            );
            assert_eq!(
                cells.touch((16, 4), touch, stamp(2, 1), &clock(&[0, 0, 1])),
                Ok(())
            );
        }
    }

    #[test]
    fn a_write_must_come_after_every_read() {
        let mut cells = Cells::default();
        for reader in 0..3 {
            let mut own = Clock::default();
            own.raise(reader, 1);
            assert_eq!(
                cells.touch((0, 4), Touch::Read, stamp(reader, 1), &own),
                Ok(())
            );
        }
        let expected = Conflict {
            earlier: stamp(1, 1),
            touch: Touch::Read,
        };
        assert_eq!(
            cells.touch((0, 4), Touch::Write, stamp(3, 1), &clock(&[1, 0, 1, 1])),
            Err(expected)
        );
        assert_eq!(
            cells.touch((0, 4), Touch::Write, stamp(3, 1), &clock(&[1, 1, 1, 1])),
            Ok(())
        );
    }

    #[test]
    fn atomics_race_with_plain_accesses_only() {
        let mut cells = Cells::default();
        assert_eq!(
            cells.touch((0, 4), Touch::Atomic, stamp(0, 1), &clock(&[1])),
            Ok(())
        );
        assert_eq!(
            cells.touch((0, 4), Touch::Atomic, stamp(1, 1), &clock(&[0, 1])),
            Ok(())
        );
        for touch in [Touch::Read, Touch::Write] {
            let found = cells.touch((0, 4), touch, stamp(2, 1), &clock(&[1, 0, 1]));
            assert_eq!(
                found,
                Err(Conflict {
                    earlier: stamp(1, 1),
                    touch: Touch::Atomic
                })
            );
        }
        assert_eq!(
            cells.touch((0, 4), Touch::Read, stamp(2, 1), &clock(&[1, 1, 1])),
            Ok(())
        );
        let found = cells.touch((0, 4), Touch::Atomic, stamp(0, 2), &clock(&[2]));
        assert_eq!(
            found,
            Err(Conflict {
                earlier: stamp(2, 1),
                touch: Touch::Read
            })
        );
    }

    #[test]
    fn bytes_of_a_word_are_told_apart() {
        let mut cells = Cells::default();
        for actor in 0..4 {
            let mut own = Clock::default();
            own.raise(actor, 1);
            assert_eq!(
                cells.touch((4 + actor, 1), Touch::Write, stamp(actor, 1), &own),
                Ok(())
            );
        }
        let found = cells.touch((4, 4), Touch::Read, stamp(4, 1), &clock(&[1, 1, 0, 1, 1]));
        assert_eq!(
            found,
            Err(Conflict {
                earlier: stamp(2, 1),
                touch: Touch::Write
            })
        );
        let found = cells.touch((7, 3), Touch::Read, stamp(4, 1), &clock(&[0, 0, 0, 1, 1]));
        assert_eq!(found, Ok(()));
    }
}
