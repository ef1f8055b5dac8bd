//! Reading matrices in the format they are wanted in, and the proof that their bits are the checkpoint's.
//!
//! What a W12 file stores is decoded at every load and its SHA-256 compared with that of the tensor that was converted;
//! what it stores as it was is hashed likewise, so that no flipped bit gets through. Encoding in memory compares every
//! weight with the source. Both work on one tensor at a time and may run for many tensors at once.

use std::borrow::Cow;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use half::bf16;
use half::slice::HalfFloatSliceExt;
use rayon::prelude::*;

use super::fp8::{FP8_DTYPE, Fp8Matrix};
use super::{Checkpoint, Entry, Result};
use crate::error::{CheckpointError, W12Error};
use crate::options::WeightFormat;
use crate::weights::w12::{Encoding, W12Matrix, W12Planes, encode};
use crate::weights::w12_file::{BASE, COUNTS, ESCAPES, PLANE4, PLANE8, Sha256Digest, WeightHasher};

/// A matrix in the format in which it will be held.
#[derive(Debug)]
pub enum Matrix {
    /// Row-major weights.
    Bf16(Vec<bf16>),
    /// Encoded weights.
    W12(W12Matrix),
    /// Codes and scales.
    Fp8(Fp8Matrix),
}

/// What proving the weights took.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verification {
    /// Tensors whose bits were proved.
    pub num_tensors: usize,
    /// Bytes of these tensors as BF16 (or whatever else the source held).
    pub num_bytes: u64,
    /// Time for decoding, hashing and comparing, summed over threads.
    pub time: Duration,
}

impl std::ops::Add for Verification {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            num_tensors: self.num_tensors + other.num_tensors,
            num_bytes: self.num_bytes + other.num_bytes,
            time: self.time + other.time,
        }
    }
}

/// [`Verification`] as it adds up.
#[derive(Default)]
pub(super) struct VerificationTotals {
    num_tensors: AtomicUsize,
    num_bytes: AtomicU64,
    nanos: AtomicU64,
}

impl VerificationTotals {
    fn add(&self, num_bytes: usize, start: Instant) {
        self.num_tensors.fetch_add(1, Ordering::Relaxed);
        self.num_bytes
            .fetch_add(num_bytes as u64, Ordering::Relaxed);
        let nanos = start.elapsed().as_nanos() as u64;
        self.nanos.fetch_add(nanos, Ordering::Relaxed);
    }
}

impl Checkpoint {
    /// Reads tensor `name` of shape `[out_features, in_features]` in `format`: BF16, W12 or FP8 in the file. Matrices that
    /// W12 does not pay for, and those that the file does not hold as FP8, come as BF16 whatever is wanted.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing, has another shape or dtype, or its bits are not the checkpoint's.
    pub fn matrix(&self, name: &str, shape: [usize; 2], format: WeightFormat) -> Result<Matrix> {
        let entry = self.entry(name, &shape)?;
        let matrix = if entry.tensor.is_w12() {
            match format {
                WeightFormat::Bf16 => Matrix::Bf16(self.decode(name, entry)?),
                WeightFormat::Auto
                | WeightFormat::W12
                | WeightFormat::Fp8
                | WeightFormat::Fp8W8A8 => Matrix::W12(self.prove(name, entry, |_| {})?),
            }
        } else if entry.tensor.dtype == "BF16" {
            let weights = to_weights(&self.source_bytes_of(name, entry)?);
            match format {
                WeightFormat::W12 => self.encode(name, entry, weights, shape)?,
                _ => Matrix::Bf16(weights),
            }
        } else if entry.tensor.dtype == FP8_DTYPE {
            let stored = self.fp8_matrix(name, entry, shape)?;
            match format {
                WeightFormat::Bf16 => Matrix::Bf16(stored.dequantise()),
                WeightFormat::W12 => self.encode(name, entry, stored.dequantise(), shape)?,
                WeightFormat::Auto | WeightFormat::Fp8 | WeightFormat::Fp8W8A8 => {
                    Matrix::Fp8(stored)
                }
            }
        } else {
            return Err(self.wrong_dtype(name, entry, "BF16, W12 or F8_E4M3"));
        };
        self.mark_used(entry);
        Ok(matrix)
    }

    /// The bytes of tensor `name` in the checkpoint that was converted, or in this one if it was not: proved where the
    /// file lets us.
    ///
    /// # Errors
    /// [`CheckpointError`] when the tensor is missing or its bits are not the checkpoint's.
    pub fn source_bytes(&self, name: &str) -> Result<Cow<'_, [u8]>> {
        let shape = self.shape(name).unwrap_or_default();
        self.source_bytes_of(name, self.entry(name, shape)?)
    }

    /// Names of the tensors that the index takes from shard number `shard`, sorted.
    pub(in crate::weights) fn names_in_shard(&self, shard: usize) -> Vec<&str> {
        let in_shard = self.tensors.iter().filter(|(_, e)| e.shard == shard);
        in_shard.map(|(name, _)| name.as_str()).collect()
    }

    /// Number of shards.
    pub(in crate::weights) fn num_shards(&self) -> usize {
        self.shards.len()
    }

    /// Name of the file of shard `shard`.
    pub(in crate::weights) fn shard_name(&self, shard: usize) -> String {
        let name = self.shards[shard].file.file_name().unwrap_or_default();
        name.to_string_lossy().into_owned()
    }

    /// Escapes of tensor `name`, by its counts; none unless it is W12.
    ///
    /// # Errors
    /// [`CheckpointError::W12`] when the file holds another number of escapes.
    pub(in crate::weights) fn num_escapes(&self, name: &str) -> Result<usize> {
        let Some(entry) = self.tensors.get(name).filter(|e| e.tensor.is_w12()) else {
            return Ok(0);
        };
        let counts = le_values(self.part(name, COUNTS, entry)?, u16::from_le_bytes);
        let expected = counts.into_iter().map(usize::from).sum();
        let got = self.part(name, ESCAPES, entry)?.len() / size_of::<u32>();
        if got != expected {
            let part = "escapes";
            let source = W12Error::Length {
                part,
                expected,
                got,
            };
            return Err(self.w12_error(name, entry, source));
        }
        Ok(expected)
    }

    /// What has been proved so far.
    pub fn verification(&self) -> Verification {
        let totals = &self.verification;
        Verification {
            num_tensors: totals.num_tensors.load(Ordering::Relaxed),
            num_bytes: totals.num_bytes.load(Ordering::Relaxed),
            time: Duration::from_nanos(totals.nanos.load(Ordering::Relaxed)),
        }
    }

    pub(super) fn source_bytes_of(&self, name: &str, entry: &Entry) -> Result<Cow<'_, [u8]>> {
        if entry.tensor.is_w12() {
            let weights = self.decode(name, entry)?;
            let bytes = weights.iter().flat_map(|w| w.to_le_bytes());
            return Ok(Cow::Owned(bytes.collect()));
        }
        let bytes = self.bytes(name, entry)?;
        if entry.tensor.source.is_some() {
            let start = Instant::now();
            self.check_digest(name, entry, Sha256Digest::of(bytes))?;
            self.verification.add(bytes.len(), start);
        }
        Ok(Cow::Borrowed(bytes))
    }

    /// The weights of tensor `name`, which is W12.
    fn decode(&self, name: &str, entry: &Entry) -> Result<Vec<bf16>> {
        let mut weights = Vec::with_capacity(entry.tensor.shape.iter().product());
        self.prove(name, entry, |rows| weights.extend_from_slice(rows))?;
        Ok(weights)
    }

    /// Reads the W12 parts of tensor `name`, gives the decoded rows to `take` and proves them. All on this thread: many
    /// tensors are read at once, and the time is then this tensor's alone.
    fn prove(&self, name: &str, entry: &Entry, mut take: impl FnMut(&[bf16])) -> Result<W12Matrix> {
        let start = Instant::now();
        let part = |part| self.part(name, part, entry);
        let counts = le_values(part(COUNTS)?, u16::from_le_bytes);
        let escapes = le_values(part(ESCAPES)?, u32::from_le_bytes);
        let planes = W12Planes {
            plane8: part(PLANE8)?,
            plane4: part(PLANE4)?,
            base: part(BASE)?,
            counts: &counts,
            escapes: &escapes,
        };
        // Parts are of a matrix and of its size: `tensors_of_shard` has seen to it.
        let (out_features, in_features) = (entry.tensor.shape[0], entry.tensor.shape[1]);
        let matrix = W12Matrix::from_planes(out_features, in_features, planes)
            .map_err(|source| self.w12_error(name, entry, source))?;
        let mut hasher = WeightHasher::default();
        matrix.decode_in_order(|rows| {
            hasher.update(rows);
            take(rows);
        });
        self.check_digest(name, entry, hasher.finish())?;
        self.verification.add(matrix.stats().source_bytes, start);
        Ok(matrix)
    }

    /// Encodes the weights of tensor `name` and compares what decodes with them.
    fn encode(
        &self,
        name: &str,
        entry: &Entry,
        weights: Vec<bf16>,
        [out_features, in_features]: [usize; 2],
    ) -> Result<Matrix> {
        let Encoding::W12(matrix) = encode(&weights, out_features, in_features) else {
            return Ok(Matrix::Bf16(weights));
        };
        let start = Instant::now();
        if !decodes_to(&matrix, &weights) {
            return Err(CheckpointError::RoundTrip {
                file: self.shards[entry.shard].file.clone(),
                tensor: name.to_owned(),
            });
        }
        self.verification.add(size_of_val(&weights[..]), start);
        Ok(Matrix::W12(matrix))
    }

    fn part(&self, name: &str, part: &str, entry: &Entry) -> Result<&[u8]> {
        self.bytes(&format!("{name}{part}"), entry)
    }

    fn check_digest(&self, name: &str, entry: &Entry, got: Sha256Digest) -> Result<()> {
        match &entry.tensor.source {
            Some(source) if source.sha256 != got => Err(CheckpointError::Checksum {
                file: self.shards[entry.shard].file.clone(),
                tensor: name.to_owned(),
                expected: source.sha256.to_string(),
                got: got.to_string(),
            }),
            _ => Ok(()),
        }
    }

    fn w12_error(&self, name: &str, entry: &Entry, source: W12Error) -> CheckpointError {
        CheckpointError::W12 {
            file: self.shards[entry.shard].file.clone(),
            tensor: name.to_owned(),
            source,
        }
    }
}

/// Whether `matrix` holds `weights`, bit for bit.
pub(in crate::weights) fn decodes_to(matrix: &W12Matrix, weights: &[bf16]) -> bool {
    let decoded = matrix.decode();
    let (decoded, weights): (&[u16], &[u16]) =
        (decoded.reinterpret_cast(), weights.reinterpret_cast());
    decoded == weights
}

/// Weights from their bytes in a file, which need not be aligned for them.
pub(in crate::weights) fn to_weights(bytes: &[u8]) -> Vec<bf16> {
    bytes
        .par_chunks_exact(2)
        .map(|b| bf16::from_le_bytes([b[0], b[1]]))
        .collect()
}

fn le_values<T, const N: usize>(bytes: &[u8], value: impl Fn([u8; N]) -> T) -> Vec<T> {
    bytes.as_chunks().0.iter().map(|&b| value(b)).collect()
}
