//! Instructions between text and decoded form.

use super::inst::{Op, Slot, Width};

/// An operand as written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Operand<'a> {
    /// A register, name, label or number.
    Word {
        /// The word.
        word: &'a str,
        /// Whether a minus stands before it.
        negative: bool,
    },
    /// `[base+offset]`.
    Address {
        /// A register or variable.
        base: &'a str,
        /// Bytes to add.
        offset: i64,
    },
    /// `{...}`.
    Tuple(Vec<Operand<'a>>),
}

/// An instruction as written.
#[derive(Debug)]
pub struct Statement<'a> {
    /// Line of the text.
    pub line: u32,
    /// The predicate before it, and whether it is negated.
    pub guard: Option<(&'a str, bool)>,
    /// Opcode with all modifiers.
    pub opcode: &'a str,
    /// Everything behind it.
    pub operands: Vec<Operand<'a>>,
}

/// A register or constant that an instruction names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Use {
    /// Number of the virtual register, constant or predicate.
    pub slot: Slot,
    /// Its width.
    pub width: Width,
    /// Whether the instruction reads it.
    pub reads: bool,
    /// Whether the instruction writes it.
    pub writes: bool,
}

impl Use {
    /// A source.
    pub fn source(slot: Slot, width: Width) -> Self {
        Use {
            slot,
            width,
            reads: true,
            writes: false,
        }
    }

    /// A destination.
    pub fn destination(slot: Slot, width: Width) -> Self {
        Use {
            slot,
            width,
            reads: false,
            writes: true,
        }
    }
}

/// An instruction whose registers have no planes yet.
#[derive(Debug)]
pub struct Draft<'a> {
    /// Line of the text.
    pub line: u32,
    /// Predicate times two, plus one where it is negated.
    pub guard: u32,
    /// What it does; branches get their target from `label`.
    pub op: Op,
    /// The target of a branch.
    pub label: Option<&'a str>,
    /// Operands in the order that `op` says.
    pub uses: Vec<Use>,
}
