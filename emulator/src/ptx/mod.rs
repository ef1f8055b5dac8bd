//! PTX text to decoded kernels.
//!
//! [`Module::parse`] refuses every opcode, modifier or type that the emulator does not run, so that a module that
//! loads has no instruction left to guess about.

mod allocate;
mod decode;
mod decode_memory;
mod draft;
mod globals;
pub mod inst;
mod lexer;
mod names;
mod parser;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use globals::Globals;
use inst::{Inst, Plane, Slot};

/// Why a text is no module that the emulator runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PtxError {
    /// Line of the text, from one.
    pub line: u32,
    /// What is wrong there.
    pub what: String,
}

impl PtxError {
    fn new(line: u32, what: impl Into<String>) -> Self {
        PtxError {
            line,
            what: what.into(),
        }
    }
}

impl fmt::Display for PtxError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PTX line {}: {}", self.line, self.what)
    }
}

impl std::error::Error for PtxError {}

/// One parsed PTX text.
#[derive(Debug)]
pub struct Module {
    kernels: BTreeMap<String, Arc<Kernel>>,
}

/// One entry of a module.
#[derive(Debug)]
pub struct Kernel {
    /// The entry's name.
    pub name: String,
    /// Bytes of all parameters, laid out one after another at their own alignments.
    pub num_param_bytes: u32,
    /// `(offset, bytes)` of each parameter.
    pub params: Vec<(u32, u32)>,
    /// Bytes of shared memory that the kernel declares with a size.
    pub static_shared_bytes: u32,
    /// Bytes of local memory of a thread.
    pub local_bytes: u32,
    /// The most threads of a block (`.maxntid`), 1024 where the text is silent.
    pub max_block_threads: u32,
    /// The instructions.
    pub(crate) code: Vec<Inst>,
    /// Line of each instruction.
    pub(crate) lines: Vec<u32>,
    /// Operands of all instructions that are no arithmetic.
    pub(crate) operands: Vec<Slot>,
    /// Variables of the module.
    pub(crate) globals: Arc<Globals>,
    /// The constant bank.
    pub(crate) constants: Vec<Plane>,
    /// Planes of a warp.
    pub(crate) num_planes: Slot,
    /// Predicates of a warp.
    pub(crate) num_predicates: Slot,
}

impl Kernel {
    /// Where dynamic shared memory starts, in bytes from the start of shared memory.
    pub fn dynamic_shared_offset(&self) -> u32 {
        names::dynamic_shared_offset(self.static_shared_bytes)
    }

    /// Operands of an instruction that is no arithmetic.
    pub(crate) fn operands_of(&self, inst: &Inst) -> &[Slot] {
        &self.operands[inst.args.d as usize..][..inst.args.a as usize]
    }
}

impl Module {
    /// Reads a whole text.
    pub fn parse(text: &str) -> Result<Module, PtxError> {
        parser::parse(text)
    }

    /// The entry of that name.
    pub fn kernel(&self, name: &str) -> Option<&Arc<Kernel>> {
        self.kernels.get(name)
    }

    /// Names of all entries.
    pub fn kernel_names(&self) -> impl Iterator<Item = &str> {
        self.kernels.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests;
