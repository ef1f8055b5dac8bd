//! W12 checkpoints on disk: what shards are called, what they hold, and what their metadata promises.
//!
//! A W12 directory is an ordinary Hugging Face one: `model-0000i-of-0000n.w12.safetensors` and
//! `model.safetensors.index.json`. A converted matrix `NAME` is stored as five tensors, `NAME.w12_plane8` and so on; all
//! other tensors keep name, dtype and bytes. The metadata of every shard holds the format version and, for each tensor
//! of the source, dtype, shape and SHA-256 of its bytes, so that a reader can prove that what it decoded is what was
//! converted. `convert` writes such directories, [`stored`] finds the tensors in a shard, `checkpoint` reads them.

pub mod convert;
mod output_dir;
mod shard_writer;
pub(super) mod stored;

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use half::bf16;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::error::CheckpointError;

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// Version of the format that this crate writes, and the newest that it reads.
pub const FORMAT_VERSION: u32 = 1;
/// Ends the name of every shard.
pub const SHARD_EXTENSION: &str = ".w12.safetensors";
/// Ends the name of a tensor's 8-bit planes, `[n_tiles, k_tiles, 1024]`.
pub const PLANE8: &str = ".w12_plane8";
/// Ends the name of a tensor's 4-bit plane, `[n_tiles, k_tiles, 512]`.
pub const PLANE4: &str = ".w12_plane4";
/// Ends the name of a tensor's exponent bases, one per channel.
pub const BASE: &str = ".w12_base";
/// Ends the name of a tensor's escape counts `[n_tiles, k_tiles]`.
pub const COUNTS: &str = ".w12_counts";
/// Ends the name of a tensor's escapes, `[num_escapes, 2]`.
pub const ESCAPES: &str = ".w12_escapes";
/// All endings of a converted matrix.
pub const PARTS: [&str; 5] = [PLANE8, PLANE4, BASE, COUNTS, ESCAPES];

const VERSION_KEY: &str = "w12_format_version";
const RECORDS_KEY: &str = "w12_source_tensors";

/// The matrix that tensor `name` is a part of, if it is named like one.
pub(super) fn matrix_of_part(name: &str) -> Option<&str> {
    PARTS.iter().find_map(|part| name.strip_suffix(part))
}

/// A SHA-256 digest, written as hexadecimal digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Sha256Digest([u8; 32]);

impl Sha256Digest {
    /// The digest of `bytes`.
    pub fn of(bytes: &[u8]) -> Self {
        Self(Sha256::digest(bytes).into())
    }
}

/// A [`Sha256Digest`] in the making, of weights as a file stores them.
#[derive(Default)]
pub(super) struct WeightHasher(Sha256);

impl WeightHasher {
    /// Appends weights.
    pub(super) fn update(&mut self, weights: &[bf16]) {
        // A block that stays in the nearest cache: reinterpreting the slice would need unsafe code and gain little.
        const BLOCK: usize = 4096;
        let mut bytes = [0; 2 * BLOCK];
        for block in weights.chunks(BLOCK) {
            for (pair, weight) in bytes.chunks_exact_mut(2).zip(block) {
                pair.copy_from_slice(&weight.to_le_bytes());
            }
            self.0.update(&bytes[..2 * block.len()]);
        }
    }

    /// The digest of all of them.
    pub(super) fn finish(self) -> Sha256Digest {
        Sha256Digest(self.0.finalize().into())
    }
}

impl fmt::Display for Sha256Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl From<Sha256Digest> for String {
    fn from(digest: Sha256Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Sha256Digest {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        let digits = text.as_bytes();
        let is_lower_hex = |d: &u8| matches!(d, b'0'..=b'9' | b'a'..=b'f');
        if digits.len() != 64 || !digits.iter().all(is_lower_hex) {
            return Err(format!("expected 64 hexadecimal digits, got `{text}`"));
        }
        let value = |d: u8| if d <= b'9' { d - b'0' } else { d - b'a' + 10 };
        let mut digest = [0; 32];
        for (byte, pair) in digest.iter_mut().zip(digits.chunks_exact(2)) {
            *byte = value(pair[0]) << 4 | value(pair[1]);
        }
        Ok(Self(digest))
    }
}

/// What a tensor was in the checkpoint that was converted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SourceTensor {
    /// Its dtype in safetensors' spelling.
    pub dtype: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Digest of its bytes.
    pub sha256: Sha256Digest,
}

/// The source tensors of a shard by name.
pub type SourceTensors = BTreeMap<String, SourceTensor>;

/// A shard's metadata: version and source tensors, as safetensors wants them, text by text.
pub(super) fn to_metadata(sources: &SourceTensors) -> BTreeMap<&'static str, String> {
    let records = serde_json::to_string(sources).expect("strings and numbers are JSON");
    BTreeMap::from([
        // What transformers writes and asks for.
        ("format", "pt".to_owned()),
        (VERSION_KEY, FORMAT_VERSION.to_string()),
        (RECORDS_KEY, records),
    ])
}

/// The source tensors that the metadata of `file` lists; `None` when the file is no W12 shard.
///
/// # Errors
/// [`CheckpointError::FormatVersion`] for a version that this crate does not read, [`CheckpointError::W12Metadata`]
/// when the metadata cannot be read.
pub(super) fn from_metadata(
    file: &Path,
    metadata: &BTreeMap<String, String>,
) -> Result<Option<SourceTensors>> {
    let damaged = |reason: String| CheckpointError::W12Metadata {
        file: file.to_owned(),
        reason,
    };
    let (version, records) = match (metadata.get(VERSION_KEY), metadata.get(RECORDS_KEY)) {
        (None, None) => return Ok(None),
        (None, Some(_)) => return Err(damaged(format!("`{VERSION_KEY}` is missing"))),
        (Some(version), records) => (version, records),
    };
    // The version comes first: what else a later format holds is not for this crate to judge.
    if version != &FORMAT_VERSION.to_string() {
        return Err(CheckpointError::FormatVersion {
            file: file.to_owned(),
            expected: FORMAT_VERSION,
            got: version.clone(),
        });
    }
    let records = records.ok_or_else(|| damaged(format!("`{RECORDS_KEY}` is missing")))?;
    serde_json::from_str(records)
        .map(Some)
        .map_err(|error| damaged(format!("`{RECORDS_KEY}`: {error}")))
}

#[cfg(test)]
mod reader_fuzz;
#[cfg(test)]
mod tests;
