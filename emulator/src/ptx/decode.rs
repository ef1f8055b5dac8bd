//! Statements to drafts of decoded instructions. What is not listed here or in [`crate::alu`] is refused.

use super::PtxError;
use super::decode_memory::decode_memory;
use super::draft::{Draft, Operand, Statement, Use};
use super::inst::{ALWAYS, AtomicOp, Op, ShuffleMode, Width};
use super::names::Names;
use crate::alu::{Alu, insert_bits, lookup, pair_moves};
use crate::matrix::bits::Reduction;
use crate::matrix::mma::Format;

/// Decodes one statement, to more than one instruction where it writes a pair.
pub fn decode<'a>(
    statement: &Statement<'a>,
    names: &mut Names<'a>,
) -> Result<Vec<Draft<'a>>, PtxError> {
    let mut reader = Reader {
        names,
        statement,
        uses: Vec::new(),
    };
    if let Some(drafts) = reader.moves()? {
        return Ok(drafts);
    }
    if let Some(alu) = lookup(statement.opcode) {
        return Ok(vec![reader.arithmetic(alu)?]);
    }
    let (op, label) = match reader.control()? {
        Some(found) => found,
        None => match decode_memory(&mut reader)? {
            Some(op) => (op, None),
            None => {
                let what = format!("the emulator has no `{}`", statement.opcode);
                return Err(PtxError::new(statement.line, what));
            }
        },
    };
    Ok(vec![reader.draft(op, label)?])
}

/// Resolves the operands of a statement.
pub struct Reader<'r, 'a> {
    /// Names in scope.
    pub names: &'r mut Names<'a>,
    /// What is read.
    pub statement: &'r Statement<'a>,
    /// What has been resolved, in the order of the decoded form.
    pub uses: Vec<Use>,
}

impl<'a> Reader<'_, 'a> {
    /// An error at this statement.
    pub fn error(&self, what: impl Into<String>) -> PtxError {
        PtxError::new(
            self.statement.line,
            format!("`{}`: {}", self.statement.opcode, what.into()),
        )
    }

    /// Operand number `at`.
    pub fn operand(&self, at: usize) -> Result<Operand<'a>, PtxError> {
        let operand = self.statement.operands.get(at).cloned();
        operand.ok_or_else(|| self.error(format!("operand {at} is missing")))
    }

    /// Holds the number of operands.
    pub fn expect_operands(&self, expected: usize) -> Result<(), PtxError> {
        let got = self.statement.operands.len();
        (got == expected)
            .then_some(())
            .ok_or_else(|| self.error(format!("expected {expected} operands, got {got}")))
    }

    /// Adds a source.
    pub fn source(&mut self, at: usize, width: Width) -> Result<(), PtxError> {
        let operand = self.operand(at)?;
        let source = self.names.source(&operand, width, self.statement.line)?;
        self.uses.push(source);
        Ok(())
    }

    /// Adds a destination; `_` stands for none that anybody reads.
    pub fn destination(&mut self, at: usize, width: Width) -> Result<(), PtxError> {
        let operand = self.operand(at)?;
        let destination = self
            .names
            .destination(&operand, width, self.statement.line)?;
        self.uses.push(destination);
        Ok(())
    }

    /// The elements of operand `at`, a tuple or a single one.
    pub fn elements(&self, at: usize) -> Result<Vec<Operand<'a>>, PtxError> {
        Ok(match self.operand(at)? {
            Operand::Tuple(elements) => elements,
            operand => vec![operand],
        })
    }

    /// Adds the registers of a tuple, read, written or both.
    pub fn tuple(
        &mut self,
        at: usize,
        count: usize,
        reads: bool,
        writes: bool,
    ) -> Result<(), PtxError> {
        let elements = self.elements(at)?;
        if elements.len() != count {
            return Err(self.error(format!(
                "expected {count} registers, got {}",
                elements.len()
            )));
        }
        for element in elements {
            let line = self.statement.line;
            let mut register = match writes {
                true => self.names.destination(&element, Width::W32, line)?,
                false => self.names.source(&element, Width::W32, line)?,
            };
            register.reads = reads;
            self.uses.push(register);
        }
        Ok(())
    }

    /// A number known now.
    pub fn number(&self, at: usize) -> Result<u32, PtxError> {
        let number = self.names.number(&self.operand(at)?, self.statement.line)?;
        u32::try_from(number).map_err(|_| self.error(format!("{number} is out of range")))
    }

    /// Adds a constant that the text does not name.
    pub fn constant(&mut self, number: u32) {
        let slot = self.names.constant(u64::from(number), Width::W32);
        self.uses.push(Use::source(slot, Width::W32));
    }

    fn draft(&mut self, op: Op, label: Option<&'a str>) -> Result<Draft<'a>, PtxError> {
        let line = self.statement.line;
        let guard = match self.statement.guard {
            None => ALWAYS << 1,
            Some((name, negated)) => match self.names.register(name) {
                Some((slot, Width::Predicate)) => slot << 1 | u32::from(negated),
                _ => return Err(self.error(format!("`{name}` is no predicate"))),
            },
        };
        Ok(Draft {
            line,
            guard,
            op,
            label,
            uses: std::mem::take(&mut self.uses),
        })
    }

    fn arithmetic(&mut self, alu: Alu) -> Result<Draft<'a>, PtxError> {
        self.expect_operands(1 + alu.sources.len())?;
        self.destination(0, alu.destination)?;
        for (at, &width) in alu.sources.iter().enumerate() {
            self.source(1 + at, width)?;
        }
        self.draft(Op::Alu(alu.run), None)
    }

    /// Moves of pairs, and what has more operands in the text than in the decoded form.
    fn moves(&mut self) -> Result<Option<Vec<Draft<'a>>>, PtxError> {
        let line = self.statement.line;
        let (name, num_bits) = match self.statement.opcode {
            "mov.b32" => ("mov", 32),
            "mov.b64" => ("mov", 64),
            "bfi.b32" => ("bfi", 32),
            "bfi.b64" => ("bfi", 64),
            "lop3.b32" => ("lop3", 32),
            _ => return Ok(None),
        };
        if name == "bfi" {
            self.expect_operands(5)?;
            let alu = insert_bits(num_bits).expect("both widths exist");
            self.destination(0, alu.destination)?;
            self.source(1, alu.sources[0])?;
            self.source(2, alu.sources[1])?;
            self.constant(self.number(3)? & 0xff | (self.number(4)? & 0xff) << 8);
            return Ok(Some(vec![self.draft(Op::Alu(alu.run), None)?]));
        }
        if name == "lop3" {
            // Of all functions of three bits the one that kernels use.
            const SELECT: u32 = 0xE2;
            self.expect_operands(5)?;
            if self.number(4)? != SELECT {
                return Err(self.error("of all functions only 0xE2 is known"));
            }
            let alu = crate::alu::lookup("select.b32").expect("a function of three words");
            self.destination(0, alu.destination)?;
            for at in 0..3 {
                self.source(1 + at, alu.sources[at])?;
            }
            return Ok(Some(vec![self.draft(Op::Alu(alu.run), None)?]));
        }
        self.expect_operands(2)?;
        let moves = pair_moves(num_bits).expect("both widths exist");
        match (self.operand(0)?, self.operand(1)?) {
            (Operand::Tuple(parts), _) if parts.len() == 2 => {
                let mut drafts = Vec::new();
                for (part, alu) in parts.iter().zip([moves.low, moves.high]) {
                    let destination = self.names.destination(part, alu.destination, line)?;
                    self.uses.push(destination);
                    self.source(1, alu.sources[0])?;
                    drafts.push(self.draft(Op::Alu(alu.run), None)?);
                }
                Ok(Some(drafts))
            }
            (_, Operand::Tuple(parts)) if parts.len() == 2 => {
                self.destination(0, moves.join.destination)?;
                for part in &parts {
                    let source = self.names.source(part, moves.join.sources[0], line)?;
                    self.uses.push(source);
                }
                Ok(Some(vec![self.draft(Op::Alu(moves.join.run), None)?]))
            }
            _ => Ok(None),
        }
    }

    /// Branches, barriers, exchanges between lanes and matrix products.
    fn control(&mut self) -> Result<Option<(Op, Option<&'a str>)>, PtxError> {
        let op = match self.statement.opcode {
            "bra" | "bra.uni" => {
                self.expect_operands(1)?;
                let Operand::Word {
                    word,
                    negative: false,
                } = self.operand(0)?
                else {
                    return Err(self.error("expected a label"));
                };
                return Ok(Some((Op::Branch(0), Some(word))));
            }
            "ret" | "exit" => Op::Exit,
            "griddepcontrol.launch_dependents"
            | "griddepcontrol.wait"
            | "membar.gl"
            | "membar.cta"
            | "membar.sys"
            | "fence.proxy.async.shared::cta"
            | "fence.mbarrier_init.release.cluster"
            | "wgmma.fence.sync.aligned" => {
                self.expect_operands(0)?;
                Op::Nothing
            }
            "setmaxnreg.inc.sync.aligned.u32" | "setmaxnreg.dec.sync.aligned.u32" => Op::Nothing,
            "bar.sync" | "barrier.sync" => {
                self.source(0, Width::W32)?;
                match self.statement.operands.len() {
                    1 => self.constant(0),
                    _ => self.source(1, Width::W32)?,
                }
                Op::BlockBarrier
            }
            "bar.warp.sync" => {
                self.expect_operands(1)?;
                self.source(0, Width::W32)?;
                Op::WarpBarrier
            }
            "barrier.cluster.arrive.release.aligned"
            | "barrier.cluster.arrive.relaxed.aligned"
            | "barrier.cluster.arrive.aligned" => Op::ClusterArrive,
            "barrier.cluster.wait.acquire.aligned" | "barrier.cluster.wait.aligned" => {
                Op::ClusterWait
            }
            "shfl.sync.idx.b32" => self.shuffle(ShuffleMode::Index)?,
            "shfl.sync.up.b32" => self.shuffle(ShuffleMode::Up)?,
            "shfl.sync.down.b32" => self.shuffle(ShuffleMode::Down)?,
            "shfl.sync.bfly.b32" => self.shuffle(ShuffleMode::Butterfly)?,
            "vote.sync.all.pred" => {
                self.expect_operands(3)?;
                self.destination(0, Width::Predicate)?;
                self.source(1, Width::Predicate)?;
                self.source(2, Width::W32)?;
                Op::VoteAll
            }
            "redux.sync.add.u32" | "redux.sync.add.s32" => self.reduce(Reduction::Add)?,
            "redux.sync.min.u32" => self.reduce(Reduction::MinUnsigned)?,
            "redux.sync.max.u32" => self.reduce(Reduction::MaxUnsigned)?,
            "redux.sync.min.s32" => self.reduce(Reduction::MinSigned)?,
            "redux.sync.max.s32" => self.reduce(Reduction::MaxSigned)?,
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32" => self.matrix(Format::Bf16)?,
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32" => self.matrix(Format::Tf32)?,
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32" => self.matrix(Format::E4m3)?,
            "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32" => self.matrix(Format::S8)?,
            opcode if opcode.starts_with("wgmma.mma_async.") => self.group_matrix()?,
            "wgmma.commit_group.sync.aligned" => Op::GroupMatrixCommit,
            "wgmma.wait_group.sync.aligned" => Op::GroupMatrixWait(self.number(0)?),
            _ => return Ok(None),
        };
        Ok(Some((op, None)))
    }

    fn shuffle(&mut self, mode: ShuffleMode) -> Result<Op, PtxError> {
        let has_predicate = self.statement.operands.len() == 6;
        let first_source = 1 + usize::from(has_predicate);
        self.expect_operands(first_source + 4)?;
        self.destination(0, Width::W32)?;
        if has_predicate {
            self.destination(1, Width::Predicate)?;
        } else {
            // A predicate of its own, which nobody reads.
            let slot = self.names.num_predicates;
            self.names.num_predicates += 1;
            self.uses.push(Use::destination(slot, Width::Predicate));
        }
        for at in 0..4 {
            self.source(first_source + at, Width::W32)?;
        }
        Ok(Op::Shuffle(mode))
    }

    fn reduce(&mut self, reduction: Reduction) -> Result<Op, PtxError> {
        self.expect_operands(3)?;
        self.destination(0, Width::W32)?;
        self.source(1, Width::W32)?;
        self.source(2, Width::W32)?;
        Ok(Op::Reduce(reduction))
    }

    fn matrix(&mut self, format: Format) -> Result<Op, PtxError> {
        self.expect_operands(4)?;
        self.tuple(0, 4, false, true)?;
        self.tuple(1, 4, true, false)?;
        self.tuple(2, 2, true, false)?;
        self.tuple(3, 4, true, false)?;
        Ok(Op::Matrix(format))
    }

    /// `wgmma.mma_async.sync.aligned.m64nNkK.d.a.b sums, left, right, adds[, signs..., transposed]`.
    fn group_matrix(&mut self) -> Result<Op, PtxError> {
        let (shape, types) = self
            .statement
            .opcode
            .strip_prefix("wgmma.mma_async.sync.aligned.m64n")
            .and_then(|rest| rest.split_once('.'))
            .ok_or_else(|| self.error("unknown form"))?;
        let (columns, depth) = shape
            .split_once('k')
            .ok_or_else(|| self.error("unknown shape"))?;
        let format = match (depth, types) {
            ("32", "s32.s8.s8") => Format::S8,
            ("16", "f32.bf16.bf16") => Format::Bf16,
            ("8", "f32.tf32.tf32") => Format::Tf32,
            _ => return Err(self.error("unknown shape or types")),
        };
        let columns: usize = columns.parse().map_err(|_| self.error("unknown shape"))?;
        if !columns.is_multiple_of(8) || columns == 0 || columns > 256 {
            return Err(self.error("unknown number of columns"));
        }
        self.tuple(0, columns / 2, true, true)?;
        let left_in_registers = matches!(self.operand(1)?, Operand::Tuple(_));
        match left_in_registers {
            true => self.tuple(1, 4, true, false)?,
            false => self.source(1, Width::W64)?,
        }
        self.source(2, Width::W64)?;
        self.source(3, Width::Predicate)?;
        // Signs are 1 for plain operands; 0 says that an operand is not transposed.
        let plain: &[u32] = match (format, left_in_registers) {
            (Format::S8, _) => &[],
            (Format::Bf16, true) => &[1, 1, 0],
            (Format::Bf16, false) => &[1, 1, 0, 0],
            _ => &[1, 1],
        };
        self.expect_operands(4 + plain.len())?;
        for (at, &expected) in plain.iter().enumerate() {
            if self.number(4 + at)? != expected {
                return Err(self.error("negated or transposed operands are unknown"));
            }
        }
        Ok(Op::GroupMatrix {
            format,
            num_sums: columns as u32 / 2,
            left_in_registers,
        })
    }
}

/// The atomics that `decode_memory` looks up.
pub fn atomic_op(name: &str) -> Option<AtomicOp> {
    Some(match name {
        "add.u32" | "add.u64" | "add.s32" => AtomicOp::Add,
        "max.u32" | "max.u64" => AtomicOp::Max,
        "min.u32" | "min.u64" => AtomicOp::Min,
        "or.b32" | "or.b64" => AtomicOp::Or,
        "and.b32" | "and.b64" => AtomicOp::And,
        "exch.b32" | "exch.b64" => AtomicOp::Exchange,
        "cas.b32" | "cas.b64" => AtomicOp::CompareExchange,
        _ => return None,
    })
}
