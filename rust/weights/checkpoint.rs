//! A model directory's safetensors files as one set of named tensors.
//!
//! In: `model.safetensors`, or the shards that `model.safetensors.index.json` names, mapped into memory. Out: matrices
//! and vectors in the formats the kernels read. Files are judged when they are opened (header, offsets, length, index
//! against shards), tensors when they are read (presence, shape, dtype), and [`Checkpoint::finish`] refuses tensors
//! that nobody read: a tensor silently left out is a model silently changed. A tensor stored as W12 parts counts as one
//! tensor of dtype `W12`; what a W12 file holds is proved by its checksums as it is read (`matrices`). Nothing borrows
//! from the maps once read, so a checkpoint lives only as long as loading takes.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use candle_core::safetensors::MmapedSafetensors;
use half::bf16;

use super::edit_distance::nearest;
use super::w12::W12Matrix;
use super::w12_file::stored::{HeaderEntry, StoredTensor, W12_DTYPE, tensors_of_shard};
use super::w12_file::{from_metadata, matrix_of_part};
use crate::error::CheckpointError;

mod finite;
mod fp8;
mod headers;
mod matrices;

pub use fp8::Fp8Matrix;
pub use headers::StoredAs;
pub use matrices::{Matrix, Verification};
pub(super) use matrices::{decodes_to, to_weights};

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// The weights of a model in one file.
pub const SINGLE_FILE: &str = "model.safetensors";
/// The list of the shards of a model.
pub const INDEX_FILE: &str = "model.safetensors.index.json";

/// Parts, in place of `weight`, that quantisations store which are not read.
const SCHEMES: [(&str, &str); 4] = [
    ("qweight", "GPTQ or AWQ"),
    ("weight_packed", "packed compressed-tensors (INT4 or NVFP4)"),
    ("weight_scale_2", "NVFP4"),
    ("weight.absmax", "bitsandbytes"),
];

/// The opened files of a model directory.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    verification: matrices::VerificationTotals,
}

struct Shard {
    file: PathBuf,
    map: MmapedSafetensors,
}

struct Entry {
    shard: usize,
    tensor: StoredTensor,
    used: AtomicBool,
}

#[derive(serde::Deserialize)]
struct Index {
    weight_map: BTreeMap<String, String>,
}

impl Checkpoint {
    /// Opens the weights of `dir`: `model.safetensors` if it is there, else the shards of its index.
    ///
    /// # Errors
    /// [`CheckpointError`] naming the file that is missing, unreadable, cut short, damaged or at odds with the index.
    pub fn open(dir: &Path) -> Result<Self> {
        let single = dir.join(SINGLE_FILE);
        let index = dir.join(INDEX_FILE);
        // Opening a pipe would wait for a writer that never comes.
        if single.is_file() {
            return Self::open_file(&single);
        }
        if !index.is_file() {
            return Err(CheckpointError::NoWeights {
                dir: dir.to_owned(),
            });
        }
        let mut checkpoint = Self::empty(dir);
        checkpoint.add_indexed_shards(index)?;
        Ok(checkpoint)
    }

    /// Opens one safetensors file, whatever it is called.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub fn open_file(file: &Path) -> Result<Self> {
        let mut checkpoint = Self::empty(file.parent().unwrap_or(Path::new("")));
        checkpoint.tensors = checkpoint.add_shard(file.to_owned())?;
        Ok(checkpoint)
    }

    fn empty(dir: &Path) -> Self {
        Self {
            dir: dir.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            verification: matrices::VerificationTotals::default(),
        }
    }

    /// Whether all weight files of `dir` are there: one file, or an index with every shard it names. Damage is for
    /// [`open`](Self::open) to find.
    pub fn is_in(dir: &Path) -> bool {
        if dir.join(SINGLE_FILE).is_file() {
            return true;
        }
        let index = dir.join(INDEX_FILE);
        if !index.is_file() {
            return false;
        }
        let Ok(text) = std::fs::read(index) else {
            return false;
        };
        // An index that does not parse is damage.
        serde_json::from_slice(&text).map_or(true, |Index { weight_map }| {
            weight_map.values().all(|shard| dir.join(shard).exists())
        })
    }

    fn add_indexed_shards(&mut self, index: PathBuf) -> Result<()> {
        let text = std::fs::read(&index).map_err(|source| CheckpointError::Io {
            file: index.clone(),
            source,
        })?;
        let Index { weight_map } =
            serde_json::from_slice(&text).map_err(|source| CheckpointError::Json {
                file: index.clone(),
                source,
            })?;
        let mut held = BTreeMap::new();
        for name in weight_map.values().collect::<BTreeSet<_>>() {
            let file = self.dir.join(name);
            // A name with separators would reach outside the directory.
            if Path::new(name).file_name() != Some(name.as_ref()) {
                return Err(CheckpointError::ShardElsewhere {
                    index,
                    shard: name.clone(),
                });
            }
            if !file.is_file() {
                return Err(CheckpointError::MissingShard {
                    index,
                    shard: name.clone(),
                });
            }
            let file_index = self.shards.len();
            held.insert(name, (file_index, self.add_shard(file)?));
        }
        for (stored, name) in &weight_map {
            let (shard, entries) = held.get_mut(name).expect("every named file was opened");
            // The index names what is stored: of a W12 matrix all five parts, of which the first moves it.
            let tensor = matrix_of_part(stored).unwrap_or(stored);
            match (entries.remove(tensor), self.tensors.get(tensor)) {
                (Some(entry), _) => {
                    self.tensors.insert(tensor.to_owned(), entry);
                }
                (None, Some(entry)) if entry.shard == *shard && entry.tensor.is_w12() => {}
                (None, _) => {
                    return Err(CheckpointError::NotInShard {
                        file: self.shards[*shard].file.clone(),
                        tensor: stored.clone(),
                    });
                }
            }
        }
        // What the shards hold beyond the index counts too, so that `finish` sees it.
        for (name, entry) in held.into_values().flat_map(|(_, entries)| entries) {
            self.tensors.entry(name).or_insert(entry);
        }
        Ok(())
    }

    /// Maps `file` and returns what it holds.
    fn add_shard(&mut self, file: PathBuf) -> Result<BTreeMap<String, Entry>> {
        if file.exists() && !file.is_file() {
            return Err(CheckpointError::Io {
                file,
                source: std::io::Error::other("expected a regular file"),
            });
        }
        let map = map_file(&file)?;
        let shard = self.shards.len();
        let headers = map
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let header = HeaderEntry {
                    dtype: view.dtype().to_string(),
                    shape: view.shape().to_vec(),
                    num_bytes: view.data().len() as u64,
                };
                (name, header)
            })
            .collect();
        let sources = from_metadata(&file, &metadata_of_file(&file)?)?;
        let tensors = tensors_of_shard(&file, headers, sources)?;
        self.shards.push(Shard { file, map });
        let entry = |tensor| Entry {
            shard,
            tensor,
            used: AtomicBool::new(false),
        };
        Ok(tensors.into_iter().map(|(n, t)| (n, entry(t))).collect())
    }

    /// The directory that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Bytes of all tensors as they are stored.
    pub fn bytes_total(&self) -> u64 {
        self.tensors.values().map(|e| e.tensor.num_bytes).sum()
    }

    /// Names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether the checkpoint holds tensor `name`.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Shape of tensor `name`, if there.
    pub fn shape(&self, name: &str) -> Option<&[usize]> {
        self.tensors.get(name).map(|e| &e.tensor.shape[..])
    }

    /// Dtype of tensor `name` in safetensors' spelling (`BF16`, `F32`, `F8_E4M3`), or `W12`, if there.
    pub fn dtype(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|e| &e.tensor.dtype[..])
    }

    /// Dtype, shape and stored bytes of tensor `name`.
    ///
    /// # Panics
    /// When there is no such tensor.
    pub(super) fn describe(&self, name: &str) -> (&str, &[usize], u64) {
        let tensor = &self.tensors[name].tensor;
        (&tensor.dtype, &tensor.shape, tensor.num_bytes)
    }

    /// Escapes of tensor `name` by the lengths in its shard's header; `None` unless it is stored as W12.
    pub fn num_stored_escapes(&self, name: &str) -> Option<usize> {
        let tensor = &self.tensors.get(name).filter(|e| e.tensor.is_w12())?.tensor;
        let without = W12Matrix::num_bytes_of(tensor.shape[0], tensor.shape[1], 0) as u64;
        // Every part but the escapes has the length that the shape gives: `tensors_of_shard` has seen to it.
        Some(((tensor.num_bytes - without) / size_of::<u32>() as u64) as usize)
    }

    /// The file that holds tensor `name`, if there.
    pub fn file(&self, name: &str) -> Option<&Path> {
        self.tensors
            .get(name)
            .map(|t| self.shards[t.shard].file.as_path())
    }

    /// Reads tensor `name`, one axis of `len` integers. I64 only.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn vector_i64(&self, name: &str, len: usize) -> Result<Vec<i64>> {
        let entry = self.entry(name, &[len])?;
        if entry.tensor.dtype != "I64" {
            return Err(self.wrong_dtype(name, entry, "I64"));
        }
        let values = self
            .source_bytes_of(name, entry)?
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| i64::from_le_bytes(*bytes))
            .collect();
        self.mark_used(entry);
        Ok(values)
    }

    /// Reads tensor `name` of any rank, row-major, widened to fp32. BF16 or F32: FP16 would need a scale to be kept.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let entry = self.entry(name, shape)?;
        let bytes = self.source_bytes_of(name, entry)?;
        let values = match &entry.tensor.dtype[..] {
            "BF16" | W12_DTYPE => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            "F32" => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
            _ => return Err(self.wrong_dtype(name, entry, "BF16 or F32")),
        };
        self.mark_used(entry);
        Ok(values)
    }

    /// Counts tensor `name`, if there, as used without reading it: its values can be had elsewhere.
    pub fn skip(&self, name: &str) {
        if let Some(entry) = self.tensors.get(name) {
            self.mark_used(entry);
        }
    }

    /// Whether two tensors are equal in dtype, shape and every bit; `false` when one is missing.
    ///
    /// # Errors
    /// [`CheckpointError`] when the bits of one are not the checkpoint's.
    pub fn same_bits(&self, a: &str, b: &str) -> Result<bool> {
        let (Some(x), Some(y)) = (self.tensors.get(a), self.tensors.get(b)) else {
            return Ok(false);
        };
        Ok(x.tensor.dtype == y.tensor.dtype
            && x.tensor.shape == y.tensor.shape
            && self.source_bytes_of(a, x)? == self.source_bytes_of(b, y)?)
    }

    /// Checks presence and shape of all `expected` tensors before any is read, so that a checkpoint of many gigabytes
    /// is refused at once.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`], naming the most similar tensor that is not expected itself, or
    /// [`CheckpointError::Shape`].
    pub fn check(&self, expected: &[(String, Vec<usize>)]) -> Result<()> {
        self.check_schemes(expected)?;
        for (name, shape) in expected {
            match self.entry(name, shape) {
                Err(CheckpointError::MissingTensor {
                    dir,
                    tensor,
                    expected: shape,
                    ..
                }) => {
                    let known: BTreeSet<&str> = expected.iter().map(|(n, _)| &n[..]).collect();
                    let near = nearest(name, self.names().filter(|n| !known.contains(n)));
                    return Err(CheckpointError::MissingTensor {
                        dir,
                        tensor,
                        expected: shape,
                        near: near.map(str::to_owned),
                    });
                }
                other => other?,
            };
        }
        Ok(())
    }

    /// Ends loading: everything must have been read, or be one of `ignored`: the name of a tensor or, with a dot at its
    /// end, what names begin with (parts of the checkpoint that belong to another model, such as a vision tower).
    ///
    /// # Errors
    /// [`CheckpointError::UnusedTensors`] listing the rest.
    pub fn finish(&self, ignored: &[&str]) -> Result<()> {
        let is_ignored = |name: &str| {
            ignored.iter().any(|&item| match item.ends_with('.') {
                true => name.starts_with(item),
                false => name == item,
            })
        };
        let mut unused = Vec::new();
        for (name, entry) in &self.tensors {
            if is_ignored(name) {
                self.mark_used(entry);
            } else if !entry.used.load(Ordering::Relaxed) {
                unused.push(name.clone());
            }
        }
        if let Some(first) = unused.first() {
            let file = self.shards[self.tensors[first].shard].file.clone();
            for scale in &unused {
                if let Some((tensor, entry)) = self.without_use(scale) {
                    return Err(CheckpointError::UnusedScale {
                        file,
                        scale: scale.clone(),
                        tensor: tensor.to_owned(),
                        got: entry.tensor.dtype.clone(),
                    });
                }
            }
            return Err(CheckpointError::UnusedTensors {
                file,
                tensors: unused,
            });
        }
        Ok(())
    }

    /// Refuses weights that another quantisation stores in parts of its own.
    fn check_schemes(&self, expected: &[(String, Vec<usize>)]) -> Result<()> {
        let foreign = expected.iter().find_map(|(name, _)| {
            let stem = name.strip_suffix("weight")?;
            SCHEMES.iter().find_map(|(part, scheme)| {
                let part = format!("{stem}{part}");
                self.contains(&part).then_some((part, *scheme))
            })
        });
        match foreign {
            None => Ok(()),
            Some((tensor, scheme)) => Err(CheckpointError::Quantised {
                file: self.file(&tensor).unwrap_or(&self.dir).to_owned(),
                tensor,
                got: scheme,
            }),
        }
    }

    fn entry(&self, name: &str, expected: &[usize]) -> Result<&Entry> {
        let Some(entry) = self.tensors.get(name) else {
            let unused = self
                .tensors
                .iter()
                .filter(|(_, e)| !e.used.load(Ordering::Relaxed))
                .map(|(n, _)| &n[..]);
            return Err(CheckpointError::MissingTensor {
                dir: self.dir.clone(),
                tensor: name.to_owned(),
                expected: expected.to_vec(),
                near: nearest(name, unused).map(str::to_owned),
            });
        };
        if entry.tensor.shape != expected {
            return Err(CheckpointError::Shape {
                file: self.shards[entry.shard].file.clone(),
                tensor: name.to_owned(),
                expected: expected.to_vec(),
                got: entry.tensor.shape.clone(),
            });
        }
        Ok(entry)
    }

    /// The stored tensor `name` of the shard of `entry`.
    fn bytes(&self, name: &str, entry: &Entry) -> Result<&[u8]> {
        let shard = &self.shards[entry.shard];
        match shard.map.get(name) {
            Ok(view) => Ok(view.data()),
            Err(error) => Err(CheckpointError::Damaged {
                file: shard.file.clone(),
                reason: error.to_string(),
            }),
        }
    }

    fn wrong_dtype(&self, name: &str, entry: &Entry, expected: &'static str) -> CheckpointError {
        CheckpointError::Dtype {
            file: self.shards[entry.shard].file.clone(),
            tensor: name.to_owned(),
            expected,
            got: entry.tensor.dtype.clone(),
        }
    }

    fn mark_used(&self, entry: &Entry) {
        entry.used.store(true, Ordering::Relaxed);
    }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint")
            .field("dir", &self.dir)
            .field("tensors", &self.tensors.len())
            .finish()
    }
}

/// Maps a safetensors file and checks its header, offsets and length.
fn map_file(file: &Path) -> Result<MmapedSafetensors> {
    #[allow(unsafe_code, reason = "mapping a file")]
    // SAFETY: the map is read-only and lives no longer than loading. Like every program that maps weights we rely on
    // nobody rewriting the file meanwhile; hub caches and ours replace files by rename, which leaves the map intact.
    let mapped = unsafe { MmapedSafetensors::new(file) };
    mapped.map_err(|error| match innermost(error) {
        candle_core::Error::Io(source) => CheckpointError::Io {
            file: file.to_owned(),
            source,
        },
        other => CheckpointError::Damaged {
            file: file.to_owned(),
            reason: other.to_string(),
        },
    })
}

/// The metadata in the header of `file`, which [`map_file`] has checked: its reader keeps them to itself.
fn metadata_of_file(file: &Path) -> Result<BTreeMap<String, String>> {
    #[derive(serde::Deserialize)]
    struct Header {
        #[serde(rename = "__metadata__", default)]
        metadata: Option<BTreeMap<String, String>>,
    }
    let io_error = |source| CheckpointError::Io {
        file: file.to_owned(),
        source,
    };
    let mut reader = std::fs::File::open(file).map_err(io_error)?;
    let mut length = [0; 8];
    reader.read_exact(&mut length).map_err(io_error)?;
    let mut header = Vec::new();
    reader
        .take(u64::from_le_bytes(length))
        .read_to_end(&mut header)
        .map_err(io_error)?;
    let Header { metadata } =
        serde_json::from_slice(&header).map_err(|error| CheckpointError::Damaged {
            file: file.to_owned(),
            reason: error.to_string(),
        })?;
    Ok(metadata.unwrap_or_default())
}

/// Takes off the path and backtrace that candle wraps around an error; ours name the file themselves.
fn innermost(error: candle_core::Error) -> candle_core::Error {
    match error {
        candle_core::Error::WithPath { inner, .. }
        | candle_core::Error::WithBacktrace { inner, .. } => innermost(*inner),
        other => other,
    }
}

#[cfg(test)]
mod tests;
