//! Cuts PTX text into tokens with their lines; comments are dropped.

use super::PtxError;

/// A piece of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Piece<'a> {
    /// A name, opcode, directive, register, label or number.
    Word(&'a str),
    /// One punctuation character.
    Mark(u8),
    /// A quoted string, without its quotes.
    Quoted(&'a str),
}

/// A piece and the line it stands on, from one.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    /// What it is.
    pub piece: Piece<'a>,
    /// Where it is.
    pub line: u32,
}

/// All tokens of `text`.
pub fn tokens(text: &str) -> Result<Vec<Token<'_>>, PtxError> {
    let bytes = text.as_bytes();
    let mut tokens = Vec::with_capacity(text.len() / 4);
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            byte if byte.is_ascii_whitespace() || byte == 0 => at += 1,
            b'/' if bytes[at..].starts_with(b"//") => {
                at = find(bytes, at, b"\n").unwrap_or(bytes.len())
            }
            b'/' if bytes[at..].starts_with(b"/*") => {
                let end = find(bytes, at, b"*/")
                    .ok_or_else(|| PtxError::new(line, "comment without end"))?;
                line += bytes[at..end].iter().filter(|&&byte| byte == b'\n').count() as u32;
                at = end + 2;
            }
            b'"' => {
                let end = find(bytes, at + 1, b"\"")
                    .ok_or_else(|| PtxError::new(line, "string without end"))?;
                tokens.push(Token {
                    piece: Piece::Quoted(&text[at + 1..end]),
                    line,
                });
                at = end + 1;
            }
            byte if is_word(byte) => {
                while at < bytes.len() && (is_word(bytes[at]) || bytes[at..].starts_with(b"::")) {
                    at += if bytes[at] == b':' { 2 } else { 1 };
                }
                tokens.push(Token {
                    piece: Piece::Word(&text[start..at]),
                    line,
                });
            }
            byte if byte.is_ascii_punctuation() => {
                tokens.push(Token {
                    piece: Piece::Mark(byte),
                    line,
                });
                at += 1;
            }
            byte => return Err(PtxError::new(line, format!("unexpected byte {byte:#04x}"))),
        }
    }
    Ok(tokens)
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}

fn find(bytes: &[u8], from: usize, wanted: &[u8]) -> Option<usize> {
    bytes[from..]
        .windows(wanted.len())
        .position(|window| window == wanted)
        .map(|offset| from + offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_marks_and_lines_are_told_apart() {
        let text = "/* two\nlines */ @!%p1 st.shared::cta.b32 [%rd1+-4], 0f3F800000; // end\n$L_1:";
        let tokens = tokens(text).expect("lexes");
        let words: Vec<String> = tokens
            .iter()
            .map(|token| match token.piece {
                Piece::Word(word) => word.to_owned(),
                Piece::Mark(mark) => char::from(mark).to_string(),
                Piece::Quoted(text) => format!("\"{text}\""),
            })
            .collect();
        let expected = "@ ! %p1 st.shared::cta.b32 [ %rd1 + - 4 ] , 0f3F800000 ; $L_1 :";
        assert_eq!(words.join(" "), expected);
        assert_eq!((tokens[0].line, tokens[tokens.len() - 1].line), (2, 3));
    }
}
