//! What the names of a kernel stand for: registers, variables, parameters, labels; and its constants.

use std::collections::HashMap;

use super::PtxError;
use super::draft::{Operand, Use};
use super::inst::{ALWAYS, CONSTANT, NEVER, Plane, Slot, Width, fixed};
use crate::address::SHARED_BASE;

/// Names and constants of one kernel.
#[derive(Debug, Clone)]
pub struct Names<'a> {
    scopes: Vec<Scope<'a>>,
    variables: HashMap<&'a str, Variable>,
    labels: HashMap<&'a str, u32>,
    constants: HashMap<(u64, bool), Slot>,
    /// The constant bank.
    pub planes: Vec<Plane>,
    /// Number of virtual registers, the fixed ones included.
    pub num_registers: Slot,
    /// Number of predicates, the two constant ones included.
    pub num_predicates: Slot,
    /// Bytes of shared variables with a size.
    pub shared_bytes: u32,
    /// Bytes of local variables.
    pub local_bytes: u32,
    /// `(offset, bytes)` of each parameter.
    pub params: Vec<(u32, u32)>,
}

/// Registers by name or, for `%r<55>`, by prefix.
#[derive(Debug, Clone, Default)]
struct Scope<'a> {
    single: HashMap<&'a str, (Slot, Width)>,
    ranges: Vec<(&'a str, Slot, u32, Width)>,
}

#[derive(Debug, Clone, Copy)]
enum Variable {
    /// At a known address of its memory.
    At(u64),
    /// Behind all shared variables with a size.
    DynamicShared,
}

impl Default for Names<'_> {
    fn default() -> Self {
        Names {
            scopes: Vec::new(),
            variables: HashMap::new(),
            labels: HashMap::new(),
            constants: HashMap::new(),
            planes: Vec::new(),
            num_registers: fixed::NUM_PLANES,
            num_predicates: ALWAYS + 1,
            shared_bytes: 0,
            local_bytes: 0,
            params: Vec::new(),
        }
    }
}

/// Where dynamic shared memory starts: static variables of our kernels come first, at an alignment that fits all.
pub fn dynamic_shared_offset(static_bytes: u32) -> u32 {
    static_bytes.next_multiple_of(128)
}

impl<'a> Names<'a> {
    /// Starts a block of declarations.
    pub fn open_scope(&mut self) {
        self.scopes.push(Scope::default());
    }

    /// Ends a block of declarations.
    pub fn close_scope(&mut self) {
        self.scopes.pop();
    }

    /// Declares `count` registers `prefix0`, `prefix1` and so on.
    pub fn add_registers(&mut self, prefix: &'a str, width: Width, count: u32) {
        let first = self.take_numbers(width, count);
        let scope = self.scopes.last_mut().expect("a body is a scope");
        scope.ranges.push((prefix, first, count, width));
    }

    /// Declares one register.
    pub fn add_register(&mut self, name: &'a str, width: Width) {
        let number = self.take_numbers(width, 1);
        self.scopes
            .last_mut()
            .expect("a body is a scope")
            .single
            .insert(name, (number, width));
    }

    fn take_numbers(&mut self, width: Width, count: u32) -> Slot {
        let next = match width {
            Width::Predicate => &mut self.num_predicates,
            _ => &mut self.num_registers,
        };
        let first = *next;
        *next += count;
        first
    }

    /// Declares a shared variable.
    pub fn add_shared(&mut self, name: &'a str, alignment: u32, num_bytes: u32) {
        let offset = self.shared_bytes.next_multiple_of(alignment);
        self.shared_bytes = offset + num_bytes;
        self.variables
            .insert(name, Variable::At(u64::from(SHARED_BASE + offset)));
    }

    /// Declares the shared memory whose size the launch says.
    pub fn add_dynamic_shared(&mut self, name: &'a str) {
        self.variables.insert(name, Variable::DynamicShared);
    }

    /// Declares a variable of the module at an address of global memory.
    pub fn add_global(&mut self, name: &'a str, address: u64) {
        self.variables.insert(name, Variable::At(address));
    }

    /// Declares a local variable.
    pub fn add_local(&mut self, name: &'a str, alignment: u32, num_bytes: u32) {
        let offset = self.local_bytes.next_multiple_of(alignment);
        self.local_bytes = offset + num_bytes;
        self.variables.insert(name, Variable::At(u64::from(offset)));
    }

    /// Declares a parameter.
    pub fn add_param(&mut self, name: &'a str, alignment: u32, num_bytes: u32) {
        let end = self
            .params
            .last()
            .map_or(0, |(offset, bytes)| offset + bytes);
        let offset = end.next_multiple_of(alignment);
        self.params.push((offset, num_bytes));
        self.variables.insert(name, Variable::At(u64::from(offset)));
    }

    /// Says that `label` stands before the instruction of that number.
    pub fn add_label(&mut self, label: &'a str, number: u32) {
        self.labels.insert(label, number);
    }

    /// The instruction behind `label`.
    pub fn label(&self, label: &str) -> Option<u32> {
        self.labels.get(label).copied()
    }

    /// The register of that name.
    pub fn register(&self, name: &str) -> Option<(Slot, Width)> {
        self.scopes
            .iter()
            .rev()
            .find_map(|scope| scope.register(name))
            .or_else(|| special(name))
    }

    /// The constant with these bits in every lane.
    pub fn constant(&mut self, bits: u64, width: Width) -> Slot {
        let wide = width == Width::W64;
        *self.constants.entry((bits, wide)).or_insert_with(|| {
            // Wide constants start at even planes, as `[u64; 32]` asks for no more than a plane's alignment.
            let slot = self.planes.len() as Slot | CONSTANT;
            if wide {
                let halves: [u32; 64] = std::array::from_fn(|at| (bits >> (32 * (at % 2))) as u32);
                let (low, high) = halves.split_at(32);
                self.planes.push(Plane(low.try_into().expect("32 of 64")));
                self.planes.push(Plane(high.try_into().expect("32 of 64")));
            } else {
                self.planes.push(Plane([bits as u32; 32]));
            }
            slot
        })
    }

    /// A register or constant of `width` that an instruction reads.
    pub fn source(
        &mut self,
        operand: &Operand<'a>,
        width: Width,
        line: u32,
    ) -> Result<Use, PtxError> {
        let (slot, found) = self.any_source(operand, width, line)?;
        check_width(operand, found, width, line)?;
        Ok(Use::source(slot, width))
    }

    /// A register of any width, or a constant of `width`, that an instruction reads.
    pub fn any_source(
        &mut self,
        operand: &Operand<'a>,
        width: Width,
        line: u32,
    ) -> Result<(Slot, Width), PtxError> {
        let &Operand::Word { word, negative } = operand else {
            return Err(PtxError::new(
                line,
                format!("expected a register or number, got {operand:?}"),
            ));
        };
        if let Some(found) = self.register(word).filter(|_| !negative) {
            return Ok(found);
        }
        let bits = match self.variables.get(word) {
            Some(Variable::At(address)) => Some(*address),
            Some(Variable::DynamicShared) => Some(u64::from(
                SHARED_BASE + dynamic_shared_offset(self.shared_bytes),
            )),
            None => immediate(word, negative),
        };
        let bits = bits.ok_or_else(|| PtxError::new(line, format!("unknown name `{word}`")))?;
        let slot = match (width, bits) {
            (Width::Predicate, 0) => NEVER,
            (Width::Predicate, _) => ALWAYS,
            (Width::W16, _) => self.constant(bits & 0xffff, width),
            (Width::W32, _) => self.constant(bits & 0xffff_ffff, width),
            (Width::W64, _) => self.constant(bits, width),
        };
        Ok((slot, width))
    }

    /// A register of `width` that an instruction writes.
    pub fn destination(
        &self,
        operand: &Operand<'a>,
        width: Width,
        line: u32,
    ) -> Result<Use, PtxError> {
        let (slot, found) = self.any_destination(operand, line)?;
        check_width(operand, found, width, line)?;
        Ok(Use::destination(slot, width))
    }

    /// A register of any width that an instruction writes.
    pub fn any_destination(
        &self,
        operand: &Operand<'a>,
        line: u32,
    ) -> Result<(Slot, Width), PtxError> {
        match operand {
            Operand::Word {
                word,
                negative: false,
            } => self.register(word),
            _ => None,
        }
        .filter(|(slot, width)| *width == Width::Predicate || *slot >= fixed::NUM_PLANES)
        .ok_or_else(|| {
            PtxError::new(
                line,
                format!("expected a register to write, got {operand:?}"),
            )
        })
    }

    /// A number that must be known when the module is loaded.
    pub fn number(&self, operand: &Operand<'a>, line: u32) -> Result<u64, PtxError> {
        match operand {
            Operand::Word { word, negative } => immediate(word, *negative),
            _ => None,
        }
        .ok_or_else(|| PtxError::new(line, format!("expected a number, got {operand:?}")))
    }
}

impl Scope<'_> {
    fn register(&self, name: &str) -> Option<(Slot, Width)> {
        self.single.get(name).copied().or_else(|| {
            let prefix = name.trim_end_matches(|character: char| character.is_ascii_digit());
            let number: u32 = name[prefix.len()..].parse().ok()?;
            let &(_, first, _, width) = self
                .ranges
                .iter()
                .find(|(own, _, count, _)| *own == prefix && number < *count)?;
            Some((first + number, width))
        })
    }
}

fn check_width(
    operand: &Operand<'_>,
    found: Width,
    wanted: Width,
    line: u32,
) -> Result<(), PtxError> {
    if found == wanted {
        return Ok(());
    }
    Err(PtxError::new(
        line,
        format!("{operand:?} is {found:?}, the instruction needs {wanted:?}"),
    ))
}

/// The registers that a kernel need not declare.
fn special(name: &str) -> Option<(Slot, Width)> {
    let slot = match name {
        "%tid.x" => fixed::THREAD,
        "%ntid.x" => fixed::BLOCK_THREADS,
        "%ctaid.x" => fixed::BLOCK,
        "%nctaid.x" => fixed::NUM_BLOCKS,
        "%laneid" => fixed::LANE,
        "%cluster_ctarank" => fixed::CLUSTER_RANK,
        "%tid.y" | "%tid.z" | "%ctaid.y" | "%ctaid.z" => fixed::ZERO,
        "%ntid.y" | "%ntid.z" | "%nctaid.y" | "%nctaid.z" => fixed::ONE,
        _ => return None,
    };
    Some((slot, Width::W32))
}

/// Bits of a number: decimal, hexadecimal, octal, or a float as `0f3F800000` or `0d3FF0000000000000`.
fn immediate(word: &str, negative: bool) -> Option<u64> {
    let lower = |prefix: &str| word.strip_prefix(prefix);
    if let Some(digits) = lower("0f")
        .or(lower("0F"))
        .filter(|digits| digits.len() == 8)
    {
        return u64::from_str_radix(digits, 16).ok();
    }
    if let Some(digits) = lower("0d")
        .or(lower("0D"))
        .filter(|digits| digits.len() == 16)
    {
        return u64::from_str_radix(digits, 16).ok();
    }
    let word = word.trim_end_matches('U');
    let magnitude = match word.strip_prefix("0x").or(word.strip_prefix("0X")) {
        Some(digits) => u64::from_str_radix(digits, 16).ok()?,
        None => word.parse::<u64>().ok()?,
    };
    Some(if negative {
        magnitude.wrapping_neg()
    } else {
        magnitude
    })
}
