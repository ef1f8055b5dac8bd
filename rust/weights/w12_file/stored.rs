//! Which tensors a shard holds, however they are stored.
//!
//! In: names, dtypes and shapes from a shard's header, and what its metadata says the source held. Out: the source's
//! tensors, each either stored as it was or as five W12 parts. In a W12 shard both lists must tell the same: a part or
//! a tensor too many or too few, or one of another dtype or shape, is refused here, before anything is read.

use std::collections::BTreeMap;
use std::path::Path;

use super::{
    BASE, COUNTS, ESCAPES, PARTS, PLANE4, PLANE8, Result, SourceTensor, SourceTensors,
    matrix_of_part,
};
use crate::error::CheckpointError;
use crate::weights::w12::{PLANE4_TILE_BYTES, PLANE8_TILE_BYTES, TILE_CHANNELS, TILE_COLUMNS};

/// Spelling of the format among safetensors' dtypes.
pub(in crate::weights) const W12_DTYPE: &str = "W12";
const BF16_DTYPE: &str = "BF16";

/// A tensor as a header describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::weights) struct HeaderEntry {
    pub(in crate::weights) dtype: String,
    pub(in crate::weights) shape: Vec<usize>,
    pub(in crate::weights) num_bytes: u64,
}

/// A tensor of the source in the form in which a shard stores it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in crate::weights) struct StoredTensor {
    /// Dtype in safetensors' spelling, or [`W12_DTYPE`].
    pub(in crate::weights) dtype: String,
    /// Shape of the source tensor.
    pub(in crate::weights) shape: Vec<usize>,
    /// Bytes of all its parts.
    pub(in crate::weights) num_bytes: u64,
    /// What the source held, where the shard says.
    pub(in crate::weights) source: Option<SourceTensor>,
}

impl StoredTensor {
    /// Whether it is stored as W12 parts.
    pub(in crate::weights) fn is_w12(&self) -> bool {
        self.dtype == W12_DTYPE
    }
}

/// The tensors of `file`, by name, from its header's `entries` and the `sources` of its metadata.
///
/// # Errors
/// [`CheckpointError`] naming file and tensor when entries and sources do not tell the same.
pub(in crate::weights) fn tensors_of_shard(
    file: &Path,
    mut entries: BTreeMap<String, HeaderEntry>,
    sources: Option<SourceTensors>,
) -> Result<BTreeMap<String, StoredTensor>> {
    let Some(sources) = sources else {
        // Without metadata a part cannot be told from a tensor of that name; such files are never written.
        if let Some(part) = entries.keys().find(|name| matrix_of_part(name).is_some()) {
            return Err(damaged(file, format!("there is none for `{part}`")));
        }
        let plain = |entry: HeaderEntry| StoredTensor {
            dtype: entry.dtype,
            shape: entry.shape,
            num_bytes: entry.num_bytes,
            source: None,
        };
        return Ok(entries.into_iter().map(|(n, e)| (n, plain(e))).collect());
    };
    let mut tensors = BTreeMap::new();
    for (name, source) in sources {
        let stored = match entries.remove(&name) {
            Some(entry) => as_it_was(file, &name, entry, source)?,
            None => as_parts(file, &name, &mut entries, source)?,
        };
        tensors.insert(name, stored);
    }
    match entries.into_keys().next() {
        Some(rest) => Err(damaged(file, format!("there is none for `{rest}`"))),
        None => Ok(tensors),
    }
}

fn as_it_was(
    file: &Path,
    name: &str,
    entry: HeaderEntry,
    source: SourceTensor,
) -> Result<StoredTensor> {
    check_entry(file, name, &entry, &source.dtype, &source.shape)?;
    Ok(StoredTensor {
        dtype: entry.dtype,
        shape: entry.shape,
        num_bytes: entry.num_bytes,
        source: Some(source),
    })
}

/// Takes the parts of matrix `name` out of `entries`.
fn as_parts(
    file: &Path,
    name: &str,
    entries: &mut BTreeMap<String, HeaderEntry>,
    source: SourceTensor,
) -> Result<StoredTensor> {
    let (BF16_DTYPE, &[out_features, in_features]) = (&source.dtype[..], &source.shape[..]) else {
        return Err(damaged(
            file,
            format!(
                "`{name}` is stored in W12 parts, expected it to be a BF16 matrix, got {} {:?}",
                source.dtype, source.shape
            ),
        ));
    };
    let tiles = [
        out_features.div_ceil(TILE_CHANNELS),
        in_features.div_ceil(TILE_COLUMNS),
    ];
    let mut num_bytes = 0;
    for part in PARTS {
        let part_name = format!("{name}{part}");
        let Some(entry) = entries.remove(&part_name) else {
            return Err(CheckpointError::MissingPart {
                file: file.to_owned(),
                tensor: name.to_owned(),
                missing: part_name,
            });
        };
        let (dtype, shape) = part_format(part, tiles, &entry.shape);
        check_entry(file, &part_name, &entry, dtype, &shape)?;
        num_bytes += entry.num_bytes;
    }
    Ok(StoredTensor {
        dtype: W12_DTYPE.to_owned(),
        shape: source.shape.clone(),
        num_bytes,
        source: Some(source),
    })
}

/// Dtype and shape of a part of a matrix of `[n_tiles, k_tiles]` super-tiles. Escapes may be any number: `found`.
pub(super) fn part_format(
    part: &str,
    [n_tiles, k_tiles]: [usize; 2],
    found: &[usize],
) -> (&'static str, Vec<usize>) {
    match part {
        PLANE8 => ("U8", vec![n_tiles, k_tiles, PLANE8_TILE_BYTES]),
        PLANE4 => ("U8", vec![n_tiles, k_tiles, PLANE4_TILE_BYTES]),
        BASE => ("U8", vec![n_tiles.saturating_mul(TILE_CHANNELS)]),
        COUNTS => ("U16", vec![n_tiles, k_tiles]),
        ESCAPES => ("U32", vec![found.first().copied().unwrap_or(0)]),
        _ => unreachable!("`{part}` is none of the parts"),
    }
}

fn check_entry(
    file: &Path,
    name: &str,
    entry: &HeaderEntry,
    dtype: &str,
    shape: &[usize],
) -> Result<()> {
    if entry.dtype != dtype {
        return Err(damaged(
            file,
            format!("`{name}` should have dtype {dtype}, got {}", entry.dtype),
        ));
    }
    if entry.shape != shape {
        return Err(CheckpointError::Shape {
            file: file.to_owned(),
            tensor: name.to_owned(),
            expected: shape.to_vec(),
            got: entry.shape.clone(),
        });
    }
    Ok(())
}

fn damaged(file: &Path, reason: String) -> CheckpointError {
    CheckpointError::W12Metadata {
        file: file.to_owned(),
        reason,
    }
}
