//! What a conversion writes, how it goes on after a stop, and which damage is refused with which error.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use half::bf16;
use serde_json::Value;
use tempfile::TempDir;

use super::convert::{ConvertSummary, convert};
use super::*;
use crate::error::W12Error;
use crate::options::WeightFormat;
use crate::weights::checkpoint::{Checkpoint, INDEX_FILE, Matrix};
use crate::weights::inspect::inspect;
use crate::weights::raw_safetensors::{RawTensor, edit_json, edit_tensors, read, write};

mod damage;
mod places;

const SHARD_1: &str = "model-00001-of-00002.w12.safetensors";
const SHARD_2: &str = "model-00002-of-00002.w12.safetensors";

/// A source of two shards, and where it goes.
pub(super) struct Source {
    dir: TempDir,
    pub(super) matrices: BTreeSet<String>,
}

fn tensor(name: &str, dtype: &str, shape: &[usize], bytes: Vec<u8>) -> RawTensor {
    RawTensor {
        name: name.to_owned(),
        dtype: dtype.to_owned(),
        shape: shape.to_vec(),
        bytes,
    }
}

/// BF16 values near a bell curve, one in two hundred of them far too small for its channel's window.
fn matrix(name: &str, shape: [usize; 2]) -> RawTensor {
    let value = |i: usize| {
        let noise = (i as u64 + name.len() as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let parts = [noise >> 16, noise >> 32, noise >> 48].map(|n| (n as u16) as f32 / 65536.0);
        let bell = parts.iter().sum::<f32>() - 1.5;
        bf16::from_f32(bell * if i % 200 == 7 { 1e-12 } else { 0.03 })
    };
    let values = (0..shape[0] * shape[1]).map(value);
    let bytes = values.flat_map(bf16::to_le_bytes).collect();
    tensor(name, "BF16", &shape, bytes)
}

impl Source {
    /// Matrices that W12 pays for and one that it does not, beside tensors whose sizes would leave what follows astray.
    pub(super) fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        let shards = [
            vec![
                matrix("a.weight", [32, 128]),
                tensor("bytes", "U8", &[5], vec![1, 2, 3, 4, 5]),
                tensor("norm", "BF16", &[3], vec![1, 2, 3, 4, 5, 6]),
                tensor("floats", "F32", &[1], vec![7; 4]),
                tensor("ids", "I64", &[2], vec![9; 16]),
            ],
            vec![
                matrix("b.weight", [20, 130]),
                matrix("c.weight", [16, 192]),
                matrix("embed.weight", [16, 64]),
                tensor("nothing", "F32", &[0], vec![]),
            ],
        ];
        let mut weight_map = BTreeMap::new();
        for (shard, tensors) in shards.iter().enumerate() {
            let file = format!("shard{shard}.safetensors");
            write(&model.join(&file), tensors);
            weight_map.extend(tensors.iter().map(|t| (t.name.clone(), file.clone())));
        }
        let index = serde_json::json!({"metadata": {}, "weight_map": weight_map});
        fs::write(model.join(INDEX_FILE), index.to_string()).unwrap();
        fs::write(model.join("config.json"), "{\"any\": 1}").unwrap();
        fs::write(model.join("chat_template.jinja"), "{{ messages }}").unwrap();
        fs::write(model.join("pytorch_model.bin"), "other weights").unwrap();
        fs::write(model.join(".hidden"), "").unwrap();
        let matrices = ["a.weight", "b.weight", "c.weight"].map(str::to_owned);
        Self {
            dir,
            matrices: matrices.into(),
        }
    }

    pub(super) fn model(&self) -> PathBuf {
        self.dir.path().join("model")
    }

    pub(super) fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    fn partial(&self) -> PathBuf {
        self.dir.path().join("out.partial")
    }

    fn convert_until(&self, last: usize) -> Result<ConvertSummary> {
        let mut told = 0;
        let source = Checkpoint::open(&self.model())?;
        convert(&source, &self.matrices, &self.out(), &mut |_| {
            told += 1;
            match told > last {
                true => ControlFlow::Break(()),
                false => ControlFlow::Continue(()),
            }
        })
    }

    pub(super) fn convert(&self) -> Result<ConvertSummary> {
        self.convert_until(usize::MAX)
    }

    /// A converted source.
    pub(super) fn converted() -> Self {
        let source = Self::new();
        source.convert().unwrap();
        source
    }

    fn shard(&self, name: &str) -> PathBuf {
        self.out().join(name)
    }
}

/// Every file of a directory.
pub(super) fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
    let file = |entry: fs::DirEntry| {
        let name = entry.file_name().into_string().unwrap();
        (name, fs::read(entry.path()).unwrap())
    };
    entries.map(file).collect()
}

/// The first error met in opening `dir` and reading everything in it.
fn first_error(dir: &Path) -> Option<CheckpointError> {
    let read_all = || -> Result<()> {
        let checkpoint = Checkpoint::open(dir)?;
        for name in ["a.weight", "b.weight", "c.weight", "embed.weight", "norm"] {
            checkpoint.source_bytes(name)?;
        }
        Ok(())
    };
    read_all().err()
}

fn damage(dir: &Path) -> CheckpointError {
    first_error(dir).expect("damage should be refused")
}

fn assert_names(error: &CheckpointError, parts: &[&str]) {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` not in: {message}");
    }
}

/// Where the data of each stored tensor lies in a file.
fn spans(file: &Path) -> BTreeMap<String, std::ops::Range<usize>> {
    let bytes = fs::read(file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: BTreeMap<String, Value> = serde_json::from_slice(&bytes[8..data]).unwrap();
    let span = |(name, entry): (String, Value)| {
        let [begin, end] =
            [0, 1].map(|i| data + entry["data_offsets"][i].as_u64().unwrap() as usize);
        (name, begin..end)
    };
    let tensors = header.into_iter().filter(|(n, _)| n != "__metadata__");
    tensors.map(span).collect()
}

/// Rewrites the header of a shard; `edit` sees header and source tensors as JSON.
fn edit_header(file: &Path, edit: impl FnOnce(&mut Value, &mut Value)) {
    let bytes = fs::read(file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    let records = header["__metadata__"][RECORDS_KEY].as_str().unwrap();
    let mut records: Value = serde_json::from_str(records).unwrap();
    edit(&mut header, &mut records);
    if header["__metadata__"].get(RECORDS_KEY).is_some() {
        header["__metadata__"][RECORDS_KEY] = records.to_string().into();
    }
    let header = header.to_string();
    let mut edited = (header.len() as u64).to_le_bytes().to_vec();
    edited.extend_from_slice(header.as_bytes());
    edited.extend_from_slice(&bytes[data..]);
    fs::write(file, edited).unwrap();
}

#[test]
fn what_is_written_decodes_to_the_source_and_the_rest_is_untouched() {
    let source = Source::new();
    let summary = source.convert().unwrap();
    let [model, out] = [source.model(), source.out()];
    let (from, to) = (
        Checkpoint::open(&model).unwrap(),
        Checkpoint::open(&out).unwrap(),
    );
    assert!(to.names().eq(from.names()));
    for name in from.names() {
        assert_eq!(to.shape(name), from.shape(name), "{name}");
        assert_eq!(
            to.source_bytes(name).unwrap(),
            from.source_bytes(name).unwrap(),
            "{name}"
        );
        let is_w12 = ["a.weight", "c.weight"].contains(&name);
        let dtype = if is_w12 {
            Some("W12")
        } else {
            from.dtype(name)
        };
        assert_eq!(to.dtype(name), dtype, "{name}");
    }
    assert_eq!(summary.kept_bf16, ["b.weight"]);
    assert_eq!((summary.num_tensors, summary.num_w12), (9, 2));
    assert_eq!(
        (summary.num_shards_written, summary.num_shards_found),
        (2, 0)
    );
    assert_eq!(summary.source_bytes, from.bytes_total());
    assert_eq!(summary.num_bytes, to.bytes_total());
    let held: Vec<String> = files(&out).into_keys().collect();
    let expected = [
        "chat_template.jinja",
        "config.json",
        SHARD_1,
        SHARD_2,
        INDEX_FILE,
    ];
    assert_eq!(held, expected);
    for name in ["config.json", "chat_template.jinja"] {
        assert_eq!(
            fs::read(out.join(name)).unwrap(),
            fs::read(model.join(name)).unwrap()
        );
    }
    assert!(!source.partial().exists());
}

#[test]
fn any_safetensors_reader_finds_aligned_tensors_where_the_index_says() {
    let source = Source::converted();
    let index: Value =
        serde_json::from_slice(&fs::read(source.shard(INDEX_FILE)).unwrap()).unwrap();
    let mut placed = BTreeMap::new();
    let mut num_bytes = 0;
    for shard in [SHARD_1, SHARD_2] {
        let file = source.shard(shard);
        let spans = spans(&file);
        for tensor in read(&file) {
            let size = match &tensor.dtype[..] {
                "I64" => 8,
                "F32" | "U32" => 4,
                "BF16" | "U16" => 2,
                _ => 1,
            };
            assert_eq!(spans[&tensor.name].start % size, 0, "{}", tensor.name);
            let elements: usize = tensor.shape.iter().product();
            assert_eq!(tensor.bytes.len(), elements * size, "{}", tensor.name);
            num_bytes += tensor.bytes.len();
            placed.insert(tensor.name, Value::from(shard));
        }
    }
    assert_eq!(index["weight_map"], serde_json::to_value(&placed).unwrap());
    assert_eq!(index["metadata"]["total_size"], num_bytes);
    let shape = |name: &str| {
        let tensors = read(&source.shard(SHARD_1));
        tensors.into_iter().find(|t| t.name == name).unwrap().shape
    };
    assert_eq!(shape("a.weight.w12_plane8"), [2, 2, 1024]);
    assert_eq!(shape("a.weight.w12_plane4"), [2, 2, 512]);
    assert_eq!(shape("a.weight.w12_base"), [32]);
    assert_eq!(shape("a.weight.w12_counts"), [2, 2]);
    assert_eq!(shape("a.weight.w12_escapes"), [21]);
}

#[test]
fn the_same_source_gives_the_same_files_on_any_number_of_threads() {
    let expected = files(&Source::converted().out());
    for num_threads in [1, 3] {
        let source = Source::new();
        let pool = rayon::ThreadPoolBuilder::new().num_threads(num_threads);
        pool.build().unwrap().install(|| source.convert().unwrap());
        assert!(files(&source.out()) == expected);
    }
}

#[test]
fn wherever_it_is_stopped_it_goes_on_to_the_same_result() {
    let expected = files(&Source::converted().out());
    for last in 0..11 {
        let source = Source::new();
        let error = source.convert_until(last).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Stopped { .. }),
            "{last}: {error}"
        );
        assert!(!source.out().exists());
        let left = files(&source.partial());
        assert!(
            left.keys().all(|name| !name.ends_with(".tmp")),
            "{last}: {left:?}"
        );
        let summary = source.convert().unwrap();
        let num_whole = left.keys().filter(|n| n.ends_with(SHARD_EXTENSION)).count();
        assert_eq!(
            num_whole,
            [0, 1, 2][usize::from(last >= 5) + usize::from(last >= 10)],
            "{last}"
        );
        assert_eq!(summary.num_shards_found, num_whole);
        assert_eq!(summary.num_shards_found + summary.num_shards_written, 2);
        assert!(files(&source.out()) == expected, "{last}");
        assert!(!source.partial().exists());
    }
}

#[test]
fn a_shard_that_is_there_is_believed_only_bit_for_bit() {
    let expected = files(&Source::converted().out());
    let broken: [fn(&Path, &mut Vec<u8>); 4] = [
        |_, bytes| bytes.truncate(bytes.len() / 2),
        |file, bytes| bytes[spans(file)["a.weight.w12_plane4"].start + 99] ^= 4,
        |file, bytes| bytes[spans(file)["bytes"].start] ^= 1,
        |_, bytes| bytes.clear(),
    ];
    for break_it in broken {
        let source = Source::new();
        source.convert_until(7).unwrap_err();
        let shard = source.partial().join(SHARD_1);
        let mut bytes = fs::read(&shard).unwrap();
        break_it(&shard, &mut bytes);
        fs::write(&shard, bytes).unwrap();
        // What a killed run leaves besides.
        fs::write(source.partial().join(format!(".{SHARD_2}.tmp")), "half").unwrap();
        let summary = source.convert().unwrap();
        assert_eq!(summary.num_shards_found, 0);
        assert_eq!(
            summary.source_bytes,
            Checkpoint::open(&source.model()).unwrap().bytes_total()
        );
        assert!(files(&source.out()) == expected);
    }
}

#[test]
fn a_shard_of_another_version_of_the_source_is_written_again() {
    let source = Source::new();
    source.convert_until(7).unwrap_err();
    edit_tensors(&source.model(), "shard0.safetensors", |tensors| {
        tensors[0].bytes[100] ^= 1;
    });
    assert_eq!(source.convert().unwrap().num_shards_found, 0);
    let [from, to] = [source.model(), source.out()].map(|dir| Checkpoint::open(&dir).unwrap());
    assert_eq!(
        from.source_bytes("a.weight").unwrap(),
        to.source_bytes("a.weight").unwrap()
    );
}

#[test]
fn a_shard_of_any_name_is_encoded_and_not_copied() {
    let source = Source::new();
    let model = source.model();
    fs::rename(model.join("shard0.safetensors"), model.join("odd.0")).unwrap();
    edit_json(&model, INDEX_FILE, |index| {
        for (_, file) in index["weight_map"].as_object_mut().unwrap() {
            if file == "shard0.safetensors" {
                *file = "odd.0".into();
            }
        }
    });
    source.convert().unwrap();
    assert_eq!(files(&source.out()), files(&Source::converted().out()));
}

#[test]
fn what_cannot_be_converted_is_refused_before_anything_is_written() {
    let mut source = Source::new();
    source.matrices.insert("ids".to_owned());
    let error = source.convert().unwrap_err();
    assert!(matches!(error, CheckpointError::Dtype { .. }));
    assert_names(&error, &["shard0.safetensors", "`ids`", "I64"]);
    assert!(!source.partial().exists() && !source.out().exists());

    let done = Source::converted();
    let checkpoint = Checkpoint::open(&done.out()).unwrap();
    let again = done.dir.path().join("again");
    let error = convert(&checkpoint, &done.matrices, &again, &mut |_| {
        ControlFlow::Continue(())
    });
    let error = error.unwrap_err();
    assert!(matches!(error, CheckpointError::AlreadyConverted { .. }));
    assert_names(&error, &[SHARD_1, "a.weight"]);
}

#[test]
fn every_format_can_be_had_from_either_directory() {
    let source = Source::converted();
    for dir in [source.model(), source.out()] {
        let checkpoint = Checkpoint::open(&dir).unwrap();
        let is_converted = dir == source.out();
        for (name, shape, pays) in [
            ("a.weight", [32, 128], true),
            ("b.weight", [20, 130], false),
        ] {
            let expected = checkpoint.source_bytes(name).unwrap();
            for (format, is_w12) in [
                (WeightFormat::Auto, is_converted && pays),
                (WeightFormat::Bf16, false),
                (WeightFormat::W12, pays),
            ] {
                let weights = match checkpoint.matrix(name, shape, format).unwrap() {
                    Matrix::Bf16(weights) => {
                        assert!(!is_w12, "{name} {format:?}");
                        weights
                    }
                    Matrix::W12(matrix) => {
                        assert!(is_w12, "{name} {format:?}");
                        matrix.decode()
                    }
                    Matrix::Fp8(_) => panic!("{name} is no FP8"),
                };
                let bytes: Vec<u8> = weights.into_iter().flat_map(bf16::to_le_bytes).collect();
                assert_eq!(bytes, *expected);
            }
        }
        let verification = checkpoint.verification();
        // A source is proved by the encoder's comparison alone; a converted file at each of these eight reads.
        let expected = if is_converted { 8 } else { 1 };
        assert_eq!(verification.num_tensors, expected);
        assert!(verification.num_bytes > 0 && !verification.time.is_zero());
    }
}

#[test]
fn inspection_reports_sizes_of_either_directory_and_of_one_file() {
    let source = Source::converted();
    let by_name = |path: &Path| -> BTreeMap<String, crate::weights::inspect::TensorReport> {
        let reports = inspect(path).unwrap();
        reports.into_iter().map(|r| (r.name.clone(), r)).collect()
    };
    let before = by_name(&source.model());
    let after = by_name(&source.out());
    assert!(before.keys().eq(after.keys()));
    let a = &after["a.weight"];
    assert_eq!(
        (&a.format[..], a.num_escapes, a.source_bytes),
        ("w12", 21, 8192)
    );
    assert_eq!(a.num_bytes, 4 * 1536 + 4 * 2 + 32 + 21 * 4);
    assert_eq!(a.bits_per_weight, a.num_bytes as f64 * 8.0 / 4096.0);
    let b = &before["a.weight"];
    assert_eq!(
        (&b.format[..], b.num_escapes, b.num_bytes, b.source_bytes),
        ("bf16", 0, 8192, 8192)
    );
    for (name, format) in [
        ("norm", "bf16"),
        ("floats", "f32"),
        ("ids", "i64"),
        ("bytes", "u8"),
    ] {
        assert_eq!(after[name].format, format);
        assert_eq!(after[name], before[name]);
    }
    assert_eq!(after["nothing"].bits_per_weight, 0.0);
    let one_file = by_name(&source.shard(SHARD_2));
    assert_eq!(one_file["c.weight"], after["c.weight"]);
    assert!(!one_file.contains_key("a.weight"));
}

#[test]
fn digests_are_those_of_the_standard() {
    let abc = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";
    assert_eq!(Sha256Digest::of(b"abc").to_string(), abc);
    assert_eq!(
        Sha256Digest::try_from(abc.to_owned()),
        Ok(Sha256Digest::of(b"abc"))
    );
    let weights: Vec<bf16> = (0..10_000).map(|i| bf16::from_bits(i * 7)).collect();
    let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
    let mut hasher = WeightHasher::default();
    weights.chunks(4999).for_each(|part| hasher.update(part));
    assert_eq!(hasher.finish(), Sha256Digest::of(&bytes));
    for text in ["", "BA", &abc.to_uppercase(), &abc[1..], &format!("{abc}0")] {
        assert!(Sha256Digest::try_from(text.to_owned()).is_err(), "{text}");
    }
}
