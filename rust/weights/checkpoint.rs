//! A model directory's safetensors files as one set of named tensors.
//!
//! In: `model.safetensors`, or the shards that `model.safetensors.index.json` names, mapped into memory. Out: matrices
//! and vectors in the formats the kernels read. Files are judged when they are opened (header, offsets, length, index
//! against shards), tensors when they are read (presence, shape, dtype), and [`Checkpoint::finish`] refuses tensors
//! that nobody read: a tensor silently left out is a model silently changed. Nothing borrows from the maps once read,
//! so a checkpoint lives only as long as loading takes.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use candle_core::safetensors::MmapedSafetensors;
use half::bf16;
use rayon::prelude::*;

use super::edit_distance::nearest;
use crate::device::Buffer;
use crate::error::CheckpointError;
use crate::kernels::bf16_matmul::PackedBf16;

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

const SINGLE_FILE: &str = "model.safetensors";
const INDEX_FILE: &str = "model.safetensors.index.json";

/// How far loading has come. Skipped tensors count as done once [`Checkpoint::finish`] has run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadProgress {
    /// Tensors read or skipped so far.
    pub tensors_done: usize,
    /// Tensors of the checkpoint.
    pub tensors_total: usize,
    /// Bytes read or skipped so far.
    pub bytes_done: u64,
    /// Bytes of all tensors.
    pub bytes_total: u64,
}

type OnProgress = Box<dyn Fn(LoadProgress) + Send + Sync>;

/// The opened files of a model directory.
pub struct Checkpoint {
    dir: PathBuf,
    shards: Vec<Shard>,
    tensors: BTreeMap<String, Entry>,
    bytes_total: u64,
    tensors_done: AtomicUsize,
    bytes_done: AtomicU64,
    on_progress: Option<OnProgress>,
}

struct Shard {
    file: PathBuf,
    map: MmapedSafetensors,
}

struct Entry {
    shard: usize,
    dtype: String,
    shape: Vec<usize>,
    num_bytes: u64,
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
        let mut checkpoint = Self {
            dir: dir.to_owned(),
            shards: Vec::new(),
            tensors: BTreeMap::new(),
            bytes_total: 0,
            tensors_done: AtomicUsize::new(0),
            bytes_done: AtomicU64::new(0),
            on_progress: None,
        };
        if single.exists() {
            checkpoint.tensors = checkpoint.add_shard(single)?;
        } else if index.exists() {
            checkpoint.add_indexed_shards(index)?;
        } else {
            return Err(CheckpointError::NoWeights {
                dir: dir.to_owned(),
            });
        }
        checkpoint.bytes_total = checkpoint.tensors.values().map(|t| t.num_bytes).sum();
        Ok(checkpoint)
    }

    /// Whether all weight files of `dir` are there: one file, or an index with every shard it names. Damage is for
    /// [`open`](Self::open) to find.
    pub fn is_in(dir: &Path) -> bool {
        if dir.join(SINGLE_FILE).exists() {
            return true;
        }
        let Ok(text) = std::fs::read(dir.join(INDEX_FILE)) else {
            return false;
        };
        // An index that does not parse is damage.
        serde_json::from_slice(&text).map_or(true, |Index { weight_map }| {
            weight_map.values().all(|shard| dir.join(shard).exists())
        })
    }

    /// Calls `on_progress` after every tensor read.
    pub fn with_progress(
        mut self,
        on_progress: impl Fn(LoadProgress) + Send + Sync + 'static,
    ) -> Self {
        self.on_progress = Some(Box::new(on_progress));
        self
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
            if Path::new(name).file_name() != Some(name.as_ref()) || !file.is_file() {
                return Err(CheckpointError::MissingShard {
                    index,
                    shard: name.clone(),
                });
            }
            let file_index = self.shards.len();
            held.insert(name, (file_index, self.add_shard(file)?));
        }
        for (tensor, name) in &weight_map {
            let (shard, entries) = held.get_mut(name).expect("every named file was opened");
            let Some(entry) = entries.remove(tensor) else {
                return Err(CheckpointError::NotInShard {
                    file: self.shards[*shard].file.clone(),
                    tensor: tensor.clone(),
                });
            };
            self.tensors.insert(tensor.clone(), entry);
        }
        // What the shards hold beyond the index counts too, so that `finish` sees it.
        for (name, entry) in held.into_values().flat_map(|(_, entries)| entries) {
            self.tensors.entry(name).or_insert(entry);
        }
        Ok(())
    }

    /// Maps `file` and returns what it holds.
    fn add_shard(&mut self, file: PathBuf) -> Result<BTreeMap<String, Entry>> {
        let map = map_file(&file)?;
        let shard = self.shards.len();
        let entries = map
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let entry = Entry {
                    shard,
                    dtype: view.dtype().to_string(),
                    shape: view.shape().to_vec(),
                    num_bytes: view.data().len() as u64,
                    used: AtomicBool::new(false),
                };
                (name, entry)
            })
            .collect();
        self.shards.push(Shard { file, map });
        Ok(entries)
    }

    /// The directory that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
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
        self.tensors.get(name).map(|t| &t.shape[..])
    }

    /// Dtype of tensor `name` in safetensors' spelling (`BF16`, `F32`, `F8_E4M3`), if there.
    pub fn dtype(&self, name: &str) -> Option<&str> {
        self.tensors.get(name).map(|t| &t.dtype[..])
    }

    /// Bytes of tensor `name` in its file, if there.
    pub fn num_bytes(&self, name: &str) -> Option<u64> {
        self.tensors.get(name).map(|t| t.num_bytes)
    }

    /// The file that holds tensor `name`, if there.
    pub fn file(&self, name: &str) -> Option<&Path> {
        self.tensors
            .get(name)
            .map(|t| self.shards[t.shard].file.as_path())
    }

    /// Reads tensor `name` as a packed matrix of `out_features` rows. BF16 only.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn matrix_bf16(
        &self,
        name: &str,
        [out_features, in_features]: [usize; 2],
    ) -> Result<PackedBf16> {
        let entry = self.entry(name, &[out_features, in_features])?;
        let weights = self.bf16_values(name, entry)?;
        let packed = PackedBf16::pack(&weights, out_features, in_features);
        self.mark_used(entry);
        self.report();
        Ok(packed)
    }

    /// Reads tensor `name`, a matrix of `out_features` rows, cut into packed matrices of `widths` columns. BF16 only.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn columns_bf16<const N: usize>(
        &self,
        name: &str,
        out_features: usize,
        widths: [usize; N],
    ) -> Result<[PackedBf16; N]> {
        let in_features = widths.iter().sum();
        let entry = self.entry(name, &[out_features, in_features])?;
        let weights = self.bf16_values(name, entry)?;
        let mut first = 0;
        let parts = widths.map(|width| {
            let columns = first..first + width;
            first += width;
            let part: Vec<bf16> = weights
                .chunks_exact(in_features)
                .flat_map(|row| &row[columns.clone()])
                .copied()
                .collect();
            PackedBf16::pack(&part, out_features, width)
        });
        self.mark_used(entry);
        self.report();
        Ok(parts)
    }

    /// The values of a BF16 tensor. Bytes in a file need not be aligned for u16; one matrix at a time is copied to where
    /// they are.
    fn bf16_values(&self, name: &str, entry: &Entry) -> Result<Vec<bf16>> {
        if entry.dtype != "BF16" {
            return Err(self.wrong_dtype(name, entry, "BF16"));
        }
        Ok(self
            .bytes(name, entry)?
            .par_chunks_exact(2)
            .map(|b| bf16::from_le_bytes([b[0], b[1]]))
            .collect())
    }

    /// Reads tensor `name`, one axis of `len` integers. I64 only.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn vector_i64(&self, name: &str, len: usize) -> Result<Vec<i64>> {
        let entry = self.entry(name, &[len])?;
        if entry.dtype != "I64" {
            return Err(self.wrong_dtype(name, entry, "I64"));
        }
        let values = self
            .bytes(name, entry)?
            .as_chunks::<8>()
            .0
            .iter()
            .map(|bytes| i64::from_le_bytes(*bytes))
            .collect();
        self.mark_used(entry);
        self.report();
        Ok(values)
    }

    /// Reads tensor `name`, one axis of `len` elements, widened to fp32. BF16 or F32.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn vector_f32(&self, name: &str, len: usize) -> Result<Buffer<f32>> {
        self.tensor_f32(name, &[len])
    }

    /// Reads tensor `name` of any rank, row-major, widened to fp32. BF16 or F32: FP16 would need a scale to be kept.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or has another shape or dtype.
    pub fn tensor_f32(&self, name: &str, shape: &[usize]) -> Result<Buffer<f32>> {
        let entry = self.entry(name, shape)?;
        let bytes = self.bytes(name, entry)?;
        let values: Vec<f32> = match &entry.dtype[..] {
            "BF16" => bytes
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
        self.report();
        Ok(Buffer::from_slice(&values))
    }

    /// Counts tensor `name`, if there, as used without reading it: its values can be had elsewhere.
    pub fn skip(&self, name: &str) {
        if let Some(entry) = self.tensors.get(name) {
            self.mark_used(entry);
        }
    }

    /// Whether two tensors are equal in dtype, shape and every bit; `false` when one is missing.
    pub fn same_bits(&self, a: &str, b: &str) -> bool {
        let (Some(x), Some(y)) = (self.tensors.get(a), self.tensors.get(b)) else {
            return false;
        };
        x.dtype == y.dtype
            && x.shape == y.shape
            && matches!((self.bytes(a, x), self.bytes(b, y)), (Ok(x), Ok(y)) if x == y)
    }

    /// Checks presence and shape of all `expected` tensors before any is read, so that a checkpoint of many gigabytes
    /// is refused at once.
    ///
    /// # Errors
    /// [`CheckpointError::MissingTensor`], naming the most similar tensor that is not expected itself, or
    /// [`CheckpointError::Shape`].
    pub fn check(&self, expected: &[(String, Vec<usize>)]) -> Result<()> {
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

    /// Ends loading: everything must have been read, or start with one of `ignored_prefixes` (parts of the checkpoint
    /// that belong to another model, such as a vision tower).
    ///
    /// # Errors
    /// [`CheckpointError::UnusedTensors`] listing the rest.
    pub fn finish(&self, ignored_prefixes: &[&str]) -> Result<()> {
        let mut unused = Vec::new();
        for (name, entry) in &self.tensors {
            if ignored_prefixes.iter().any(|p| name.starts_with(p)) {
                self.mark_used(entry);
            } else if !entry.used.load(Ordering::Relaxed) {
                unused.push(name.clone());
            }
        }
        if let Some(first) = unused.first() {
            let file = self.shards[self.tensors[first].shard].file.clone();
            return Err(CheckpointError::UnusedTensors {
                file,
                tensors: unused,
            });
        }
        self.report();
        Ok(())
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
        if entry.shape != expected {
            return Err(CheckpointError::Shape {
                file: self.shards[entry.shard].file.clone(),
                tensor: name.to_owned(),
                expected: expected.to_vec(),
                got: entry.shape.clone(),
            });
        }
        Ok(entry)
    }

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
            got: entry.dtype.clone(),
        }
    }

    fn mark_used(&self, entry: &Entry) {
        if !entry.used.swap(true, Ordering::Relaxed) {
            self.tensors_done.fetch_add(1, Ordering::Relaxed);
            self.bytes_done
                .fetch_add(entry.num_bytes, Ordering::Relaxed);
        }
    }

    fn report(&self) {
        if let Some(on_progress) = &self.on_progress {
            on_progress(LoadProgress {
                tensors_done: self.tensors_done.load(Ordering::Relaxed),
                tensors_total: self.tensors.len(),
                bytes_done: self.bytes_done.load(Ordering::Relaxed),
                bytes_total: self.bytes_total,
            });
        }
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
