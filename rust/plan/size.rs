//! Memory sizes as people write them.

use crate::error::OptionError;

/// Suffixes and what they multiply by; longer ones first, as `B` ends them all.
const UNITS: [(&str, u64); 17] = [
    ("KiB", 1 << 10),
    ("MiB", 1 << 20),
    ("GiB", 1 << 30),
    ("TiB", 1 << 40),
    ("kB", 1_000),
    ("MB", 1_000_000),
    ("GB", 1_000_000_000),
    ("TB", 1_000_000_000_000),
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("B", 1),
];

/// A number without a unit below this is one whose unit was forgotten.
const LEAST_WITHOUT_UNIT: u64 = 1 << 20;

/// No machine has more; sums of sizes below it cannot overflow.
const MAX_SIZE: f64 = (1_u64 << 60) as f64;

/// Reads a size such as `80GB` or `80G` (10^9), `74.5GiB` or `74.5Gi` (2^30), or plain bytes; letters may be of either
/// case.
///
/// # Errors
/// [`OptionError::Value`] for anything else, for what is no positive number of bytes below 2^60, and for a number without
/// a unit that is no memory's size in bytes.
pub fn parse_size(option: &'static str, text: &str) -> Result<u64, OptionError> {
    let trimmed = text.trim();
    let unit = UNITS.iter().find_map(|(suffix, factor)| {
        let start = trimmed.len().checked_sub(suffix.len())?;
        let tail = trimmed.get(start..)?;
        tail.eq_ignore_ascii_case(suffix)
            .then(|| (&trimmed[..start], *factor))
    });
    if let (None, Ok(number)) = (unit, trimmed.parse::<u64>())
        && (1..LEAST_WITHOUT_UNIT).contains(&number)
    {
        return Err(OptionError::Value {
            option,
            expected: format!("a size with its unit, such as {number}GB or {number}GiB"),
            got: format!("\"{text}\""),
        });
    }
    let (number, factor) = unit.unwrap_or((trimmed, 1));
    let number = number.trim_end();
    let is_plain = number.bytes().all(|b| b.is_ascii_digit() || b == b'.');
    match number.parse::<f64>() {
        Ok(value) if is_plain && value * factor as f64 >= 1.0 && value * (factor as f64) < MAX_SIZE => {
            Ok((value * factor as f64) as u64)
        }
        _ => Err(OptionError::Value {
            option,
            expected: "a positive size such as 80GB, 74.5GiB or a number of bytes (B, kB, MB, GB, TB, KiB, MiB, GiB, TiB; the B may be left out)".to_owned(),
            got: format!("\"{text}\""),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_written() {
        for (text, expected) in [
            ("80GB", 80_000_000_000),
            ("80 gb", 80_000_000_000),
            ("80GiB", 80 << 30),
            ("1.5kB", 1_500),
            (" 2TiB ", 2 << 40),
            ("640KB", 640_000),
            ("512B", 512),
            ("123456789", 123_456_789),
            ("80G", 80_000_000_000),
            ("80Gi", 80 << 30),
            ("1.5t", 1_500_000_000_000),
            ("4m", 4_000_000),
        ] {
            assert_eq!(parse_size("memory", text).unwrap(), expected, "{text}");
        }
    }

    #[test]
    fn a_forgotten_unit_is_asked_for() {
        for text in ["80", " 1048575 "] {
            let error = parse_size("memory", text).unwrap_err().to_string();
            let number = text.trim();
            assert!(
                error.contains(&format!("such as {number}GB or {number}GiB")),
                "{error}"
            );
        }
        assert_eq!(parse_size("memory", "1048576").unwrap(), 1 << 20);
    }

    #[test]
    fn anything_else_is_refused_with_what_is_allowed() {
        for text in [
            "",
            "GB",
            "80XB",
            "-1GB",
            "-5",
            "0",
            "0.1B",
            "1e9",
            "inf",
            "nan",
            "80GB free",
            "9999999TB",
            "8\u{212a}B",
        ] {
            let error = parse_size("memory", text).expect_err(text).to_string();
            assert!(
                error.starts_with("option `memory` should be a positive size"),
                "{error}"
            );
            assert!(error.contains(&format!("got \"{text}\"")), "{error}");
        }
    }
}
