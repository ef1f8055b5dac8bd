//! Loads, stores, atomics and asynchronous copies.

use super::PtxError;
use super::decode::{Reader, atomic_op};
use super::draft::{Operand, Use};
use super::inst::{Access, AtomicOp, Op, Width};
use crate::fault::Space;

/// Decodes a statement that touches memory; none if it is another one.
pub fn decode_memory(reader: &mut Reader<'_, '_>) -> Result<Option<Op>, PtxError> {
    let opcode = reader.statement.opcode;
    let (name, rest) = opcode.split_once('.').unwrap_or((opcode, ""));
    Ok(match (name, rest) {
        ("ld", _) => Some(reader.load(rest)?),
        ("st", _) if rest.starts_with("async.") => Some(reader.store_async(rest)?),
        ("st", _) => Some(reader.store(rest)?),
        ("atom", _) => Some(reader.atomic(rest)?),
        ("prefetch", "global.L2") => Some(Op::Nothing),
        ("createpolicy", "fractional.L2::evict_first.b64" | "fractional.L2::evict_normal.b64") => {
            // The policy is only a hint for copies; its value does not matter, but it is defined.
            let alu = crate::alu::lookup("mov.b64").expect("a basic move");
            reader.destination(0, Width::W64)?;
            let zero = reader.names.constant(0, Width::W64);
            reader.uses.push(Use::source(zero, Width::W64));
            Some(Op::Alu(alu.run))
        }
        ("ldmatrix", "sync.aligned.m8n8.x4.shared.b16") => Some(reader.load_matrices(false)?),
        ("ldmatrix", "sync.aligned.m8n8.x4.trans.shared.b16") => Some(reader.load_matrices(true)?),
        ("mbarrier", _) => Some(reader.barrier(rest)?),
        ("cp", _) => Some(reader.copy(rest)?),
        _ => None,
    })
}

/// What follows `[.ordering.scope.]` in the modifiers of an atomic: all of them are ordered for all threads here.
fn without_ordering(modifiers: &str) -> &str {
    const WORDS: [&str; 8] = [
        "relaxed", "acquire", "release", "acq_rel", "cta", "cluster", "gpu", "sys",
    ];
    match modifiers.split_once('.') {
        Some((word, rest)) if WORDS.contains(&word) => without_ordering(rest),
        _ => modifiers,
    }
}

impl Reader<'_, '_> {
    /// Reads `[.volatile][.space][.cache][.vN].type`, all but the address.
    fn access(&self, modifiers: &str) -> Result<Access, PtxError> {
        let mut access = Access {
            space: None,
            element_bytes: 0,
            num_elements: 1,
            signed: false,
            wide_data: false,
            wide_address: false,
            volatile: false,
            offset: 0,
        };
        for modifier in modifiers.split('.') {
            match modifier {
                "global" => access.space = Some(Space::Global),
                "shared" | "shared::cta" | "shared::cluster" => access.space = Some(Space::Shared),
                "local" => access.space = Some(Space::Local),
                "param" => access.space = Some(Space::Param),
                // Memory is one for all, so an ordered access is one that sees others' writes at once.
                "volatile" | "acquire" | "release" | "relaxed" => access.volatile = true,
                "cta" | "cluster" | "gpu" | "sys" => {}
                "v2" => access.num_elements = 2,
                "v4" => access.num_elements = 4,
                // Where a value is cached changes nothing, nor does that it is never written.
                "cg" | "nc" => {}
                "b8" | "u8" => access.element_bytes = 1,
                "s8" => (access.element_bytes, access.signed) = (1, true),
                "b16" | "u16" => access.element_bytes = 2,
                "s16" => (access.element_bytes, access.signed) = (2, true),
                "b32" | "u32" | "f32" => access.element_bytes = 4,
                "s32" => (access.element_bytes, access.signed) = (4, true),
                "b64" | "u64" | "s64" | "f64" => access.element_bytes = 8,
                _ => return Err(self.error(format!("unknown modifier `{modifier}`"))),
            }
        }
        match access.element_bytes {
            0 => Err(self.error("no type")),
            _ => Ok(access),
        }
    }

    /// Adds an address operand; says whether it is 64 bits wide, and its offset.
    fn address(&mut self, at: usize) -> Result<(bool, i32), PtxError> {
        let Operand::Address { base, offset } = self.operand(at)? else {
            return Err(self.error(format!("operand {at} is no address")));
        };
        let base = Operand::Word {
            word: base,
            negative: false,
        };
        let line = self.statement.line;
        let (slot, width) = self.names.any_source(&base, Width::W64, line)?;
        if !matches!(width, Width::W32 | Width::W64) {
            return Err(self.error("an address has 32 or 64 bits"));
        }
        self.uses.push(Use::source(slot, width));
        let offset = i32::try_from(offset).map_err(|_| self.error("the offset is out of range"))?;
        Ok((width == Width::W64, offset))
    }

    /// Adds a 32-bit address of shared memory without an offset, as asynchronous instructions take.
    fn shared_address(&mut self, at: usize) -> Result<(), PtxError> {
        match self.address(at)? {
            (false, 0) => Ok(()),
            _ => Err(self.error(format!(
                "operand {at} must be a 32-bit register without an offset"
            ))),
        }
    }

    /// Adds data registers, all of one width that fits the element.
    fn data(&mut self, at: usize, access: &mut Access, is_written: bool) -> Result<(), PtxError> {
        let elements = self.elements(at)?;
        if elements.len() != usize::from(access.num_elements) {
            return Err(self.error(format!("got {} data registers", elements.len())));
        }
        let natural = match access.element_bytes {
            8 => Width::W64,
            _ => Width::W32,
        };
        for (number, element) in elements.iter().enumerate() {
            let line = self.statement.line;
            let (slot, width) = match is_written {
                true => self.names.any_destination(element, line)?,
                false => self.names.any_source(element, natural, line)?,
            };
            let is_wide = width == Width::W64;
            let holds = match width {
                Width::Predicate => 0,
                Width::W16 => 2,
                Width::W32 => 4,
                Width::W64 => 8,
            };
            if holds < access.element_bytes || (number > 0 && is_wide != access.wide_data) {
                return Err(self.error(format!("{element:?} does not fit the access")));
            }
            access.wide_data = is_wide;
            self.uses.push(match is_written {
                true => Use::destination(slot, width),
                false => Use::source(slot, width),
            });
        }
        Ok(())
    }

    fn load(&mut self, modifiers: &str) -> Result<Op, PtxError> {
        self.expect_operands(2)?;
        let mut access = self.access(modifiers)?;
        self.data(0, &mut access, true)?;
        (access.wide_address, access.offset) = self.address(1)?;
        Ok(Op::Load(access))
    }

    fn store(&mut self, modifiers: &str) -> Result<Op, PtxError> {
        self.expect_operands(2)?;
        let mut access = self.access(modifiers)?;
        (access.wide_address, access.offset) = self.address(0)?;
        self.data(1, &mut access, false)?;
        Ok(Op::Store(access))
    }

    fn store_async(&mut self, modifiers: &str) -> Result<Op, PtxError> {
        let prefix = "async.weak.shared::cluster.mbarrier::complete_tx::bytes.";
        let data = modifiers
            .strip_prefix(prefix)
            .ok_or_else(|| self.error("unknown form"))?;
        self.expect_operands(3)?;
        let mut access = self.access(data)?;
        self.shared_address(0)?;
        self.data(1, &mut access, false)?;
        self.shared_address(2)?;
        Ok(Op::StoreAsync(access))
    }

    /// `.space.op.type d, [address], operand`.
    fn atomic(&mut self, modifiers: &str) -> Result<Op, PtxError> {
        let unknown = || self.error("unknown atomic");
        let modifiers = without_ordering(modifiers);
        let (space, op_type) = modifiers.split_once('.').ok_or_else(unknown)?;
        let op = atomic_op(op_type).ok_or_else(unknown)?;
        let (_, kind) = op_type.split_once('.').ok_or_else(unknown)?;
        let num_values = 1 + usize::from(op == AtomicOp::CompareExchange);
        self.expect_operands(2 + num_values)?;
        let mut access = self.access(&format!("{space}.{kind}"))?;
        let width = match access.element_bytes {
            8 => Width::W64,
            _ => Width::W32,
        };
        access.wide_data = width == Width::W64;
        self.destination(0, width)?;
        (access.wide_address, access.offset) = self.address(1)?;
        for at in 0..num_values {
            self.source(2 + at, width)?;
        }
        Ok(Op::Atomic(access, op))
    }

    fn load_matrices(&mut self, transposed: bool) -> Result<Op, PtxError> {
        self.expect_operands(2)?;
        self.tuple(0, 4, false, true)?;
        self.shared_address(1)?;
        Ok(Op::LoadMatrices { transposed })
    }

    fn barrier(&mut self, form: &str) -> Result<Op, PtxError> {
        Ok(match form {
            "init.shared::cta.b64" => {
                self.expect_operands(2)?;
                self.shared_address(0)?;
                self.source(1, Width::W32)?;
                Op::BarrierInit
            }
            "arrive.shared::cta.b64"
            | "arrive.shared::cluster.b64"
            | "arrive.release.cluster.shared::cluster.b64" => {
                // The state that an arrival returns is refused where something could read it: no test takes one.
                self.expect_operands(2)?;
                self.shared_address(1)?;
                Op::BarrierArrive
            }
            "arrive.expect_tx.shared::cta.b64" => {
                self.expect_operands(3)?;
                self.shared_address(1)?;
                self.source(2, Width::W32)?;
                Op::BarrierArriveExpect
            }
            "try_wait.parity.shared::cta.b64"
            | "try_wait.parity.acquire.cluster.shared::cta.b64" => self.test(true)?,
            "test_wait.parity.shared::cta.b64" => self.test(false)?,
            _ => return Err(self.error("unknown form")),
        })
    }

    fn test(&mut self, waits: bool) -> Result<Op, PtxError> {
        self.expect_operands(3)?;
        self.destination(0, Width::Predicate)?;
        self.shared_address(1)?;
        self.source(2, Width::W32)?;
        Ok(Op::BarrierTest { waits })
    }

    fn copy(&mut self, form: &str) -> Result<Op, PtxError> {
        const BULK: &str = "async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes";
        Ok(match form {
            "async.commit_group" => Op::CopyCommit,
            "async.wait_group" => Op::CopyWait(self.number(0)?),
            "async.wait_all" => Op::CopyWait(0),
            "async.mbarrier.arrive.noinc.shared::cta.b64" => {
                self.expect_operands(1)?;
                self.shared_address(0)?;
                Op::CopyArrive
            }
            "async.ca.shared.global" | "async.cg.shared.global" => {
                let has_size = self.statement.operands.len() == 4;
                self.copy_async(has_size)?
            }
            "async.cg.shared.global.L2::cache_hint" => {
                self.expect_operands(4)?;
                self.copy_async(false)?
            }
            _ if form.starts_with(BULK) => {
                let rest = form[BULK.len()..].strip_prefix(".multicast::cluster");
                let multicast = rest.is_some();
                let has_hint = match rest.unwrap_or(&form[BULK.len()..]) {
                    "" => false,
                    ".L2::cache_hint" => true,
                    _ => return Err(self.error("unknown form")),
                };
                self.expect_operands(4 + usize::from(multicast) + usize::from(has_hint))?;
                self.shared_address(0)?;
                self.global_address(1)?;
                self.source(2, Width::W32)?;
                self.shared_address(3)?;
                if multicast {
                    self.source(4, Width::W16)?;
                }
                Op::CopyBulk { multicast }
            }
            _ => return Err(self.error("unknown form")),
        })
    }

    fn copy_async(&mut self, has_size: bool) -> Result<Op, PtxError> {
        let num_bytes = self.number(2)?;
        if !matches!(num_bytes, 4 | 8 | 16) {
            return Err(self.error(format!("cannot copy {num_bytes} bytes")));
        }
        self.shared_address(0)?;
        self.global_address(1)?;
        match has_size {
            true => self.source(3, Width::W32)?,
            false => self.constant(num_bytes),
        }
        Ok(Op::CopyAsync { num_bytes })
    }

    fn global_address(&mut self, at: usize) -> Result<(), PtxError> {
        match self.address(at)? {
            (true, 0) => Ok(()),
            _ => Err(self.error(format!(
                "operand {at} must be a 64-bit register without an offset"
            ))),
        }
    }
}
