//! What can go wrong while a kernel runs, with everything known about where.
//!
//! A fault ends the launch, as on a GPU; the driver keeps it and refuses further work of the context.

use std::fmt;

/// Where an instruction stood when it failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The kernel's entry name.
    pub kernel: String,
    /// Line of the PTX text, from one.
    pub line: u32,
    /// Index of the block in the grid.
    pub block: u32,
    /// Index of the warp in the block.
    pub warp: u32,
    /// The lane, where one lane is to blame.
    pub lane: Option<u32>,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, PTX line {}, block {}, warp {}",
            self.kernel, self.line, self.block, self.warp
        )?;
        self.lane.map_or(Ok(()), |lane| write!(f, ", lane {lane}"))
    }
}

/// A kind of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Space {
    /// Device memory.
    Global,
    /// A block's shared memory.
    Shared,
    /// A thread's own memory.
    Local,
    /// The kernel's parameters.
    Param,
}

impl fmt::Display for Space {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Space::Global => "global",
            Space::Shared => "shared",
            Space::Local => "local",
            Space::Param => "parameter",
        })
    }
}

/// A lane group of a warp that cannot go on, as a deadlock reports it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wait {
    /// Index of the block in the grid.
    pub block: u32,
    /// Index of the warp in the block.
    pub warp: u32,
    /// The waiting lanes, one bit each.
    pub lanes: u32,
    /// Line of the PTX text, from one.
    pub line: u32,
    /// What it waits for.
    pub reason: String,
}

/// Why a launch ended early.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// An access outside every allocation, or across the end of one.
    OutOfBounds {
        /// Which memory.
        space: Space,
        /// First byte of the access.
        address: u64,
        /// Length of the access.
        num_bytes: u64,
        /// What lies there or nearby.
        near: String,
        /// Who did it; none for a copy of the driver.
        place: Option<Place>,
    },
    /// An address that is no multiple of what the access needs.
    Misaligned {
        /// Which memory.
        space: Space,
        /// First byte of the access.
        address: u64,
        /// The required alignment in bytes.
        alignment: u64,
        /// Who did it.
        place: Option<Place>,
    },
    /// No warp can go on and no copy is in flight.
    Deadlock {
        /// The kernel's entry name.
        kernel: String,
        /// Every lane group that waits.
        waits: Vec<Wait>,
    },
    /// The launch ran more warp instructions than it may.
    Runaway {
        /// The kernel's entry name.
        kernel: String,
        /// The budget in warp instructions.
        max_instructions: u64,
        /// Where every unfinished lane group stands.
        waits: Vec<Wait>,
    },
    /// The launch or an operand asks for something that the emulator does not do.
    Unsupported {
        /// What is asked for.
        what: String,
        /// Who asked; none if it was the launch itself.
        place: Option<Place>,
    },
    /// An access to shared memory that nothing orders after an earlier one.
    Race {
        /// Both accesses.
        what: String,
        /// Who did the later one.
        place: Option<Place>,
    },
    /// A barrier, or an instruction of a whole warp, used against its rules.
    BarrierMisuse {
        /// Which rule is broken.
        what: String,
        /// Who broke it.
        place: Option<Place>,
    },
}

impl Fault {
    /// The same fault with a place, where it had none.
    pub fn at(mut self, at: impl FnOnce() -> Place) -> Self {
        match &mut self {
            Fault::OutOfBounds { place, .. }
            | Fault::Misaligned { place, .. }
            | Fault::Unsupported { place, .. }
            | Fault::Race { place, .. }
            | Fault::BarrierMisuse { place, .. } => {
                if place.is_none() {
                    *place = Some(at());
                }
            }
            Fault::Deadlock { .. } | Fault::Runaway { .. } => {}
        }
        self
    }
}

fn write_place(f: &mut fmt::Formatter<'_>, place: &Option<Place>) -> fmt::Result {
    place
        .as_ref()
        .map_or(Ok(()), |place| write!(f, " ({place})"))
}

fn write_waits(f: &mut fmt::Formatter<'_>, waits: &[Wait]) -> fmt::Result {
    waits.iter().try_for_each(|wait| {
        let Wait {
            block,
            warp,
            lanes,
            line,
            reason,
        } = wait;
        write!(
            f,
            "\n  block {block}, warp {warp}, lanes {lanes:#010x}, PTX line {line}: {reason}"
        )
    })
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::OutOfBounds {
                space,
                address,
                num_bytes,
                near,
                place,
            } => {
                write!(
                    f,
                    "{space} access out of bounds: {num_bytes} bytes at {address:#x}; {near}"
                )?;
                write_place(f, place)
            }
            Fault::Misaligned {
                space,
                address,
                alignment,
                place,
            } => {
                write!(
                    f,
                    "{space} access misaligned: {address:#x} is no multiple of {alignment}"
                )?;
                write_place(f, place)
            }
            Fault::Deadlock { kernel, waits } => {
                write!(f, "deadlock in {kernel}: nothing can go on")?;
                write_waits(f, waits)
            }
            Fault::Runaway {
                kernel,
                max_instructions,
                waits,
            } => {
                write!(
                    f,
                    "{kernel} ran more than {max_instructions} warp instructions"
                )?;
                write_waits(f, waits)
            }
            Fault::Unsupported { what, place } => {
                write!(f, "unsupported: {what}")?;
                write_place(f, place)
            }
            Fault::Race { what, place } => {
                write!(f, "race: {what}")?;
                write_place(f, place)
            }
            Fault::BarrierMisuse { what, place } => {
                write!(f, "misuse of a barrier: {what}")?;
                write_place(f, place)
            }
        }
    }
}

impl std::error::Error for Fault {}
