//! Tokens to a module: directives, declarations and statements; [`super::decode`] reads the instructions.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::allocate::finish;
use super::decode::decode;
use super::draft::{Draft, Operand, Statement};
use super::globals::Globals;
use super::inst::Width;
use super::lexer::{Piece, Token, tokens};
use super::names::Names;
use super::{Kernel, Module, PtxError};

/// The most threads of a block where the text is silent.
const MAX_BLOCK_THREADS: u32 = 1024;

/// Reads a whole text.
pub fn parse(text: &str) -> Result<Module, PtxError> {
    let tokens = tokens(text)?;
    let mut parser = Parser {
        tokens: &tokens,
        at: 0,
    };
    let mut names = Names::default();
    let mut globals = Globals::default();
    let mut kernels = BTreeMap::new();
    while let Some(token) = parser.peek() {
        match token.piece {
            Piece::Word(".version" | ".target" | ".address_size") => parser.skip_line(),
            Piece::Word(".visible" | ".extern" | ".weak") => parser.at += 1,
            Piece::Word(".global") => parser.global(&mut names, &mut globals)?,
            Piece::Word(".shared") => parser.variable(&mut names)?,
            Piece::Word(".entry") => {
                let kernel = parser.entry(names.clone())?;
                kernels.insert(kernel.name.clone(), kernel);
            }
            Piece::Mark(b';') => parser.at += 1,
            piece => {
                return Err(PtxError::new(
                    token.line,
                    format!("unknown declaration {piece:?}"),
                ));
            }
        }
    }
    let globals = Arc::new(globals);
    let share = |(name, kernel)| {
        (
            name,
            Arc::new(Kernel {
                globals: globals.clone(),
                ..kernel
            }),
        )
    };
    Ok(Module {
        kernels: kernels.into_iter().map(share).collect(),
    })
}

struct Parser<'t, 'a> {
    tokens: &'t [Token<'a>],
    at: usize,
}

impl<'a> Parser<'_, 'a> {
    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).copied()
    }

    fn line(&self) -> u32 {
        let at = self.at.min(self.tokens.len().saturating_sub(1));
        self.tokens.get(at).map_or(1, |token| token.line)
    }

    fn next(&mut self) -> Result<Token<'a>, PtxError> {
        let token = self
            .peek()
            .ok_or_else(|| PtxError::new(self.line(), "text ends inside a statement"))?;
        self.at += 1;
        Ok(token)
    }

    fn word(&mut self) -> Result<&'a str, PtxError> {
        let token = self.next()?;
        match token.piece {
            Piece::Word(word) => Ok(word),
            piece => Err(PtxError::new(
                token.line,
                format!("expected a word, got {piece:?}"),
            )),
        }
    }

    fn number(&mut self) -> Result<u32, PtxError> {
        let line = self.line();
        let word = self.word()?;
        word.parse()
            .map_err(|_| PtxError::new(line, format!("expected a number, got `{word}`")))
    }

    fn takes(&mut self, mark: u8) -> bool {
        let takes =
            matches!(self.peek(), Some(Token { piece: Piece::Mark(found), .. }) if found == mark);
        self.at += usize::from(takes);
        takes
    }

    fn expect(&mut self, mark: u8) -> Result<(), PtxError> {
        let found = self.peek().map(|token| token.piece);
        let wanted = char::from(mark);
        let fault = PtxError::new(self.line(), format!("expected `{wanted}`, got {found:?}"));
        self.takes(mark).then_some(()).ok_or(fault)
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.peek().is_some_and(|token| token.line == line) {
            self.at += 1;
        }
    }

    fn skip_statement(&mut self) -> Result<(), PtxError> {
        while !self.takes(b';') {
            self.next()?;
        }
        Ok(())
    }

    /// `.shared .align 16 .b8 name[64];` and the like, of shared and local memory.
    fn variable(&mut self, names: &mut Names<'a>) -> Result<(), PtxError> {
        let line = self.line();
        let space = self.word()?;
        let (name, alignment, _, num_bytes) = self.sized_name()?;
        self.expect(b';')?;
        match (space, num_bytes) {
            (".shared", Some(num_bytes)) => names.add_shared(name, alignment, num_bytes),
            (".shared", None) => names.add_dynamic_shared(name),
            (".local", Some(num_bytes)) => names.add_local(name, alignment, num_bytes),
            _ => {
                return Err(PtxError::new(
                    line,
                    format!("unknown variable `{space} {name}`"),
                ));
            }
        }
        Ok(())
    }

    /// `.global .align 4 .u32 name[2] = {1, -1};`, with or without numbers.
    fn global(&mut self, names: &mut Names<'a>, globals: &mut Globals) -> Result<(), PtxError> {
        self.at += 1;
        let line = self.line();
        let (name, alignment, element_bytes, num_bytes) = self.sized_name()?;
        let num_bytes = num_bytes.ok_or_else(|| PtxError::new(line, "variable without a size"))?;
        if alignment > 8 {
            return Err(PtxError::new(
                line,
                format!("`{name}` needs alignment {alignment}, at most 8 is known"),
            ));
        }
        let mut bytes = Vec::new();
        if self.takes(b'=') {
            self.takes(b'{');
            while !self.takes(b';') {
                let operand = self.operand()?;
                let number = names.number(&operand, line)?.to_le_bytes();
                bytes.extend_from_slice(&number[..element_bytes as usize]);
                self.takes(b',');
                self.takes(b'}');
            }
        } else {
            self.expect(b';')?;
        }
        if bytes.len() > num_bytes as usize {
            return Err(PtxError::new(
                line,
                format!("`{name}` has more numbers than room"),
            ));
        }
        bytes.resize(num_bytes as usize, 0);
        names.add_global(name, globals.add(&bytes));
        Ok(())
    }

    /// `.align 16 .b8 name[64]`: name, alignment, bytes of an element and of all, the last unknown for `name[]`.
    fn sized_name(&mut self) -> Result<(&'a str, u32, u32, Option<u32>), PtxError> {
        let mut alignment = 1;
        let mut element_bytes = 1;
        let name = loop {
            let line = self.line();
            match self.word()? {
                ".align" => alignment = self.number()?,
                word if word.starts_with('.') => {
                    element_bytes = type_bytes(word)
                        .ok_or_else(|| PtxError::new(line, format!("unknown type `{word}`")))?;
                    alignment = alignment.max(element_bytes);
                }
                name => break name,
            }
        };
        if !self.takes(b'[') {
            return Ok((name, alignment, element_bytes, Some(element_bytes)));
        }
        if self.takes(b']') {
            return Ok((name, alignment, element_bytes, None));
        }
        let count = self.number()?;
        self.expect(b']')?;
        Ok((name, alignment, element_bytes, Some(count * element_bytes)))
    }

    fn entry(&mut self, mut names: Names<'a>) -> Result<Kernel, PtxError> {
        self.at += 1;
        let name = self.word()?;
        if self.takes(b'(') {
            while !self.takes(b')') {
                let line = self.line();
                match self.word()? {
                    ".param" => {}
                    word => {
                        return Err(PtxError::new(
                            line,
                            format!("expected .param, got `{word}`"),
                        ));
                    }
                }
                let (param, alignment, _, num_bytes) = self.sized_name()?;
                let num_bytes =
                    num_bytes.ok_or_else(|| PtxError::new(line, "parameter without a size"))?;
                names.add_param(param, alignment, num_bytes);
                self.takes(b',');
            }
        }
        let mut max_block_threads = MAX_BLOCK_THREADS;
        while !self.takes(b'{') {
            let line = self.line();
            let directive = self.word()?;
            let mut sizes = vec![self.number()?];
            while self.takes(b',') {
                sizes.push(self.number()?);
            }
            match directive {
                ".maxntid" | ".reqntid" => max_block_threads = sizes.iter().product(),
                ".minnctapersm" | ".maxnreg" => {}
                _ => {
                    return Err(PtxError::new(
                        line,
                        format!("unknown directive `{directive}` of an entry"),
                    ));
                }
            }
        }
        let body = self.body(&mut names)?;
        finish(name, names, body, max_block_threads)
    }

    fn body(&mut self, names: &mut Names<'a>) -> Result<Vec<Draft<'a>>, PtxError> {
        let mut body = Vec::new();
        let mut depth = 1;
        names.open_scope();
        while depth > 0 {
            let token = self
                .peek()
                .ok_or_else(|| PtxError::new(self.line(), "body without end"))?;
            match token.piece {
                Piece::Mark(b'{') => {
                    self.at += 1;
                    depth += 1;
                    names.open_scope();
                }
                Piece::Mark(b'}') => {
                    self.at += 1;
                    depth -= 1;
                    names.close_scope();
                }
                Piece::Word(".reg") => self.registers(names)?,
                Piece::Word(".shared" | ".local") => self.variable(names)?,
                Piece::Word(".pragma") => self.skip_statement()?,
                Piece::Word(label) if self.is_label() => {
                    self.at += 2;
                    names.add_label(label, body.len() as u32);
                }
                _ => {
                    let statement = self.statement()?;
                    body.extend(decode(&statement, names)?);
                }
            }
        }
        Ok(body)
    }

    fn is_label(&self) -> bool {
        matches!(
            self.tokens.get(self.at + 1),
            Some(Token {
                piece: Piece::Mark(b':'),
                ..
            })
        )
    }

    /// `.reg .b32 %r<55>;` or `.reg .b16 a, b;`.
    fn registers(&mut self, names: &mut Names<'a>) -> Result<(), PtxError> {
        self.at += 1;
        let line = self.line();
        let kind = self.word()?;
        let width = match (kind, type_bytes(kind)) {
            (".pred", _) => Width::Predicate,
            (_, Some(2)) => Width::W16,
            (_, Some(4)) => Width::W32,
            (_, Some(8)) => Width::W64,
            _ => {
                return Err(PtxError::new(
                    line,
                    format!("unknown register type `{kind}`"),
                ));
            }
        };
        loop {
            let name = self.word()?;
            if self.takes(b'<') {
                let count = self.number()?;
                self.expect(b'>')?;
                names.add_registers(name, width, count);
            } else {
                names.add_register(name, width);
            }
            if !self.takes(b',') {
                return self.expect(b';');
            }
        }
    }

    fn statement(&mut self) -> Result<Statement<'a>, PtxError> {
        let line = self.line();
        let mut guard = None;
        if self.takes(b'@') {
            let negated = self.takes(b'!');
            guard = Some((self.word()?, negated));
        }
        let opcode = self.word()?;
        let mut operands = Vec::new();
        while !self.takes(b';') {
            operands.push(self.operand()?);
            if self.takes(b'|') {
                operands.push(self.operand()?);
            }
            self.takes(b',');
        }
        Ok(Statement {
            line,
            guard,
            opcode,
            operands,
        })
    }

    fn operand(&mut self) -> Result<Operand<'a>, PtxError> {
        if self.takes(b'{') {
            let mut parts = Vec::new();
            while !self.takes(b'}') {
                parts.push(self.operand()?);
                self.takes(b',');
            }
            return Ok(Operand::Tuple(parts));
        }
        if self.takes(b'[') {
            let base = self.word()?;
            let mut offset = 0;
            if self.takes(b'+') {
                let negative = self.takes(b'-');
                let distance = i64::from(self.number()?);
                offset = if negative { -distance } else { distance };
            }
            self.expect(b']')?;
            return Ok(Operand::Address { base, offset });
        }
        let negative = self.takes(b'-');
        Ok(Operand::Word {
            word: self.word()?,
            negative,
        })
    }
}

/// Bytes of a type such as `.b32`; predicates have none.
fn type_bytes(kind: &str) -> Option<u32> {
    match kind.get(2..)? {
        "8" => Some(1),
        "16" => Some(2),
        "32" => Some(4),
        "64" => Some(8),
        _ => None,
    }
    .filter(|_| matches!(kind.as_bytes()[1], b'b' | b'u' | b's' | b'f'))
}
