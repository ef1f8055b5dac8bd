//! Writes a W12 directory: one shard for each of the source's, one tensor in memory at a time.
//!
//! In: an opened checkpoint and the names of the matrices to encode. Out: a directory that appears under its name once
//! it is complete. Each matrix is decoded again and compared with the source before it is written. A shard that an
//! earlier run left is taken over only if everything it holds decodes to the source's bytes. The shard's tensors are
//! laid out so that each is aligned for its dtype: parts of 4-byte elements first, then 2, then 1.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::ControlFlow;
use std::path::Path;

use serde_json::json;

use super::output_dir::OutputDir;
use super::shard_writer::{Header, HeaderTensor, ShardWriter, io_error};
use super::stored::part_format;
use super::{
    BASE, COUNTS, ESCAPES, FORMAT_VERSION, PARTS, PLANE4, PLANE8, Result, SHARD_EXTENSION,
    Sha256Digest, SourceTensor, SourceTensors, VERSION_KEY, to_metadata,
};
use crate::error::CheckpointError;
use crate::weights::checkpoint::{Checkpoint, INDEX_FILE, decodes_to, to_weights};
use crate::weights::w12::{Encoding, TILE_CHANNELS, W12Matrix, encode};

/// Endings of files that hold weights, of whatever framework: all other files of a model are copied.
const WEIGHT_ENDINGS: [&str; 12] = [
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".ggml",
    ".h5",
    ".msgpack",
    ".onnx",
];

/// How far a conversion has come, told before each tensor and once at the end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConvertProgress<'a> {
    /// The tensor that comes next; empty at the end.
    pub tensor: &'a str,
    /// Tensors written or found written.
    pub tensors_done: usize,
    /// Tensors of the checkpoint.
    pub tensors_total: usize,
    /// Their bytes in the source.
    pub bytes_done: u64,
    /// Bytes of the source.
    pub bytes_total: u64,
}

/// Hears of progress and may stop the conversion.
pub type OnProgress<'a> = dyn FnMut(&ConvertProgress<'_>) -> ControlFlow<()> + 'a;

/// What a conversion made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConvertSummary {
    /// Tensors of the checkpoint.
    pub num_tensors: usize,
    /// Matrices that are W12 now.
    pub num_w12: usize,
    /// Linear layers that W12 does not pay for, sorted.
    pub kept_bf16: Vec<String>,
    /// Shards written.
    pub num_shards_written: usize,
    /// Shards that an earlier run had written.
    pub num_shards_found: usize,
    /// Bytes of the source's tensors.
    pub source_bytes: u64,
    /// Bytes of the stored tensors.
    pub num_bytes: u64,
}

/// Converts `source` into directory `out`, encoding the tensors named in `matrices`.
///
/// # Errors
/// [`CheckpointError`] when a matrix is not a BF16 matrix, the source is W12 already, `out` is taken, a file cannot be
/// read or written, or `on_progress` breaks. `out` does not exist then; what is done waits in `out.partial`.
pub fn convert(
    source: &Checkpoint,
    matrices: &BTreeSet<String>,
    out: &Path,
    on_progress: &mut OnProgress<'_>,
) -> Result<ConvertSummary> {
    check_source(source, matrices)?;
    let dir = OutputDir::open(out, fingerprint(source, matrices)?)?;
    let mut conversion = Conversion {
        source,
        matrices,
        out,
        on_progress,
        summary: ConvertSummary {
            num_tensors: source.names().count(),
            ..ConvertSummary::default()
        },
        tensors_done: 0,
        bytes_total: source.bytes_total(),
    };
    let mut weight_map = BTreeMap::new();
    for shard in 0..source.num_shards() {
        let name = format!(
            "model-{:05}-of-{:05}{SHARD_EXTENSION}",
            shard + 1,
            source.num_shards()
        );
        let path = dir.path(&name);
        let held = conversion.shard(shard, &path)?;
        weight_map.extend(held.into_iter().map(|tensor| (tensor, name.clone())));
    }
    copy_other_files(source.dir(), &dir)?;
    let summary = conversion.end()?;
    let index = json!({
        "metadata": {"total_size": summary.num_bytes, VERSION_KEY: FORMAT_VERSION},
        "weight_map": weight_map,
    });
    let index = serde_json::to_vec_pretty(&index).expect("strings and numbers are JSON");
    dir.write(INDEX_FILE, &index)?;
    dir.publish()?;
    Ok(summary)
}

/// Refuses what cannot be converted, before anything is written.
fn check_source(source: &Checkpoint, matrices: &BTreeSet<String>) -> Result<()> {
    for name in source.names() {
        let file = || source.file(name).unwrap_or(source.dir()).to_owned();
        match (source.dtype(name), source.shape(name)) {
            (Some("W12"), _) => {
                return Err(CheckpointError::AlreadyConverted {
                    file: file(),
                    tensor: name.to_owned(),
                });
            }
            (Some("BF16"), Some([_, _])) => {}
            (dtype, shape) if matrices.contains(name) => {
                return Err(CheckpointError::Dtype {
                    file: file(),
                    tensor: name.to_owned(),
                    expected: "BF16 and two dimensions, to be encoded as W12",
                    got: format!(
                        "{} with shape {:?}",
                        dtype.unwrap_or_default(),
                        shape.unwrap_or_default()
                    ),
                });
            }
            _ => {}
        }
    }
    Ok(())
}

/// Tells sources apart: their config, and every tensor's place, dtype and shape.
fn fingerprint(source: &Checkpoint, matrices: &BTreeSet<String>) -> Result<Sha256Digest> {
    let config = source.dir().join("config.json");
    let mut text = std::fs::read(&config).map_err(io_error(&config))?;
    for shard in 0..source.num_shards() {
        for name in source.names_in_shard(shard) {
            let (dtype, shape) = (source.dtype(name), source.shape(name));
            let encoded = matrices.contains(name);
            text.extend_from_slice(
                format!("\n{FORMAT_VERSION} {shard} {name} {dtype:?} {shape:?} {encoded}")
                    .as_bytes(),
            );
        }
    }
    Ok(Sha256Digest::of(&text))
}

/// Copies config, tokenizer, templates, licences: every plain file that holds no weights.
fn copy_other_files(from: &Path, dir: &OutputDir) -> Result<()> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(from).map_err(io_error(from))? {
        let entry = entry.map_err(io_error(from))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let is_weights = WEIGHT_ENDINGS.iter().any(|ending| name.ends_with(ending));
        // Through links, which is what hub caches are made of.
        if entry.path().is_file() && !is_weights && !name.starts_with('.') {
            files.push((name, entry.path()));
        }
    }
    files.sort();
    for (name, path) in files {
        let bytes = std::fs::read(&path).map_err(io_error(&path))?;
        dir.write(&name, &bytes)?;
    }
    Ok(())
}

struct Conversion<'a, 'b> {
    source: &'a Checkpoint,
    matrices: &'a BTreeSet<String>,
    out: &'a Path,
    on_progress: &'a mut OnProgress<'b>,
    summary: ConvertSummary,
    tensors_done: usize,
    bytes_total: u64,
}

impl Conversion<'_, '_> {
    /// Writes shard number `shard` to `path`, unless it is there, and returns the names of the tensors it stores.
    fn shard(&mut self, shard: usize, path: &Path) -> Result<Vec<String>> {
        let names = self.source.names_in_shard(shard);
        let found = match path.exists() {
            true => self.take_over(&names, path)?,
            false => false,
        };
        if !found {
            self.write(&names, path)?;
        }
        let written = Checkpoint::open_file(path)?;
        self.summary.num_bytes += written.bytes_total();
        let mut stored = Vec::new();
        for name in names {
            let is_w12 = written.dtype(name) == Some("W12");
            if is_w12 {
                self.summary.num_w12 += 1;
                stored.extend(PARTS.map(|part| format!("{name}{part}")));
            } else {
                if self.matrices.contains(name) {
                    self.summary.kept_bf16.push(name.to_owned());
                }
                stored.push(name.to_owned());
            }
        }
        match found {
            true => self.summary.num_shards_found += 1,
            false => self.summary.num_shards_written += 1,
        }
        Ok(stored)
    }

    /// Whether the file at `path` holds exactly tensors `names`, each with the source's bits. Progress is taken back if not.
    fn take_over(&mut self, names: &[&str], path: &Path) -> Result<bool> {
        let before = (self.tensors_done, self.summary.source_bytes);
        // Whatever is wrong with a file that is there, the answer is to write it again.
        let Ok(held) = Checkpoint::open_file(path) else {
            return Ok(false);
        };
        if !held.names().eq(names.iter().copied()) {
            return Ok(false);
        }
        for name in names {
            self.announce(name)?;
            let expected = self.source.source_bytes(name)?;
            let is_whole = held.source_bytes(name).is_ok_and(|bytes| bytes == expected);
            if !is_whole || held_dtype_differs(&held, self.source, name) {
                (self.tensors_done, self.summary.source_bytes) = before;
                return Ok(false);
            }
            self.advance(expected.len());
        }
        Ok(true)
    }

    fn write(&mut self, names: &[&str], path: &Path) -> Result<()> {
        let widest = self.widest_header(names);
        let mut shard = ShardInProgress {
            writer: ShardWriter::create(path, &widest)?,
            sources: SourceTensors::new(),
        };
        let (encoded, kept): (Vec<&str>, Vec<&str>) = names
            .iter()
            .partition(|name| self.matrices.contains(**name));
        let (wide, narrow): (Vec<&str>, Vec<&str>) = kept
            .into_iter()
            .partition(|name| alignment(self.source.dtype(name)) >= 4);
        for name in by_alignment(self.source, wide) {
            self.copy(name, &mut shard)?;
        }
        // Counts are two bytes each and would leave the next matrix's escapes astray; they are small and can wait, and so
        // can matrices that stay BF16.
        let (mut counts, mut stay) = (Vec::new(), Vec::new());
        for name in encoded {
            match self.encode(name, &mut shard)? {
                Some(matrix_counts) => counts.push((name, matrix_counts)),
                None => stay.push(name),
            }
        }
        for (name, (tiles, bytes)) in counts {
            shard.write_part(name, COUNTS, tiles, 0, &bytes)?;
        }
        for name in stay {
            self.copy(name, &mut shard)?;
        }
        for name in by_alignment(self.source, narrow) {
            self.copy(name, &mut shard)?;
        }
        shard.writer.finish(to_metadata(&shard.sources))
    }

    /// Copies a tensor as it is.
    fn copy(&mut self, name: &str, shard: &mut ShardInProgress) -> Result<()> {
        self.announce(name)?;
        let bytes = self.source.source_bytes(name)?;
        let record = self.record(name, &bytes);
        let writer = &mut shard.writer;
        writer.write(name.to_owned(), &record.dtype, &record.shape, &bytes)?;
        shard.sources.insert(name.to_owned(), record);
        self.advance(bytes.len());
        Ok(())
    }

    /// Encodes a matrix and writes all parts but the counts, which are returned with the numbers of super-tiles; `None`,
    /// and nothing is written, when it should stay BF16.
    fn encode(&mut self, name: &str, shard: &mut ShardInProgress) -> Result<Option<Counts>> {
        self.announce(name)?;
        let bytes = self.source.source_bytes(name)?;
        let record = self.record(name, &bytes);
        let weights = to_weights(&bytes);
        let Encoding::W12(matrix) = encode(&weights, record.shape[0], record.shape[1]) else {
            return Ok(None);
        };
        if !decodes_to(&matrix, &weights) {
            return Err(CheckpointError::RoundTrip {
                file: self.source.file(name).unwrap_or(self.out).to_owned(),
                tensor: name.to_owned(),
            });
        }
        let counts = shard.write_matrix(name, &matrix)?;
        shard.sources.insert(name.to_owned(), record);
        self.advance(bytes.len());
        Ok(Some(counts))
    }

    fn record(&self, name: &str, bytes: &[u8]) -> SourceTensor {
        SourceTensor {
            dtype: self.source.dtype(name).unwrap_or_default().to_owned(),
            shape: self.source.shape(name).unwrap_or_default().to_vec(),
            sha256: Sha256Digest::of(bytes),
        }
    }

    /// A header at least as long as the one that `names` will have, however they are stored.
    fn widest_header(&self, names: &[&str]) -> Header {
        let mut header = Header::default();
        let mut sources = SourceTensors::new();
        for &name in names {
            let record = self.record(name, &[]);
            let entry = HeaderTensor::widest(&record.dtype, record.shape.len());
            header.tensors.insert(name.to_owned(), entry);
            if self.matrices.contains(name) {
                for part in PARTS {
                    let (dtype, shape) = part_format(part, [1, 1], &[1]);
                    let entry = HeaderTensor::widest(dtype, shape.len());
                    header.tensors.insert(format!("{name}{part}"), entry);
                }
            }
            sources.insert(name.to_owned(), record);
        }
        header.metadata = to_metadata(&sources);
        header
    }

    /// Tells that `tensor` is next; an error if the caller has had enough.
    fn announce(&mut self, tensor: &str) -> Result<()> {
        let progress = ConvertProgress {
            tensor,
            tensors_done: self.tensors_done,
            tensors_total: self.summary.num_tensors,
            bytes_done: self.summary.source_bytes,
            bytes_total: self.bytes_total,
        };
        match (self.on_progress)(&progress) {
            ControlFlow::Continue(()) => Ok(()),
            ControlFlow::Break(()) => Err(CheckpointError::Stopped {
                dir: self.out.to_owned(),
                done: self.tensors_done,
                total: self.summary.num_tensors,
            }),
        }
    }

    fn advance(&mut self, num_bytes: usize) {
        self.tensors_done += 1;
        self.summary.source_bytes += num_bytes as u64;
    }

    fn end(mut self) -> Result<ConvertSummary> {
        self.announce("")?;
        self.summary.kept_bf16.sort();
        Ok(self.summary)
    }
}

/// Numbers of super-tiles along both axes, and the counts as bytes.
type Counts = ([usize; 2], Vec<u8>);

struct ShardInProgress {
    writer: ShardWriter,
    sources: SourceTensors,
}

impl ShardInProgress {
    fn write_matrix(&mut self, name: &str, matrix: &W12Matrix) -> Result<Counts> {
        let parts = matrix.planes();
        let n_tiles = parts.base.len() / TILE_CHANNELS;
        let tiles = [n_tiles, parts.counts.len() / n_tiles];
        let escapes: Vec<u8> = parts.escapes.iter().flat_map(|e| e.to_le_bytes()).collect();
        let num_escapes = parts.escapes.len();
        self.write_part(name, PLANE8, tiles, num_escapes, parts.plane8)?;
        self.write_part(name, PLANE4, tiles, num_escapes, parts.plane4)?;
        self.write_part(name, BASE, tiles, num_escapes, parts.base)?;
        self.write_part(name, ESCAPES, tiles, num_escapes, &escapes)?;
        let counts = parts.counts.iter().flat_map(|c| c.to_le_bytes());
        Ok((tiles, counts.collect()))
    }

    fn write_part(
        &mut self,
        name: &str,
        part: &str,
        tiles: [usize; 2],
        num_escapes: usize,
        bytes: &[u8],
    ) -> Result<()> {
        let (dtype, shape) = part_format(part, tiles, &[num_escapes]);
        self.writer
            .write(format!("{name}{part}"), dtype, &shape, bytes)
    }
}

/// Whether a kept tensor has another dtype or shape than in the source; an encoded one has the shape by its metadata.
fn held_dtype_differs(held: &Checkpoint, source: &Checkpoint, name: &str) -> bool {
    held.shape(name) != source.shape(name)
        || (held.dtype(name) != Some("W12") && held.dtype(name) != source.dtype(name))
}

/// `names` in descending order of their dtypes' alignment, else as they were.
fn by_alignment<'n>(source: &Checkpoint, mut names: Vec<&'n str>) -> Vec<&'n str> {
    names.sort_by_key(|name| std::cmp::Reverse(alignment(source.dtype(name))));
    names
}

/// Bytes of an element of `dtype`, a power of two: 1 for what this crate does not know.
fn alignment(dtype: Option<&str>) -> usize {
    match dtype.unwrap_or_default() {
        "C64" | "F64" | "I64" | "U64" => 8,
        "F32" | "I32" | "U32" => 4,
        "BF16" | "F16" | "I16" | "U16" => 2,
        _ => 1,
    }
}
