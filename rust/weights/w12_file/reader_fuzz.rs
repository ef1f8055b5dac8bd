//! The reader against files that were changed at random: whatever is done to a converted directory, reading a tensor
//! ends in the source's bits or a typed error, never in a panic or in other bits.
//!
//! `cargo test` runs a few hundred cases from a fixed seed; `make test-slow` runs [`for_ten_minutes`], which prints the
//! seed that it starts from. A case is made from its own seed alone, so one that fails is repeated by adding that seed
//! to [`CORPUS`].

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::Value;

use super::tests::{Source, files};
use crate::options::WeightFormat;
use crate::weights::checkpoint::{Checkpoint, Matrix};
use crate::weights::inspect::inspect;

/// Seeds of cases that went wrong once.
const CORPUS: [u64; 0] = [];
const NUM_QUICK_CASES: u64 = 300;
const LONG_RUN: Duration = Duration::from_secs(600);

type Files = BTreeMap<String, Vec<u8>>;

/// SplitMix64: small, and the same everywhere.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// A number below `bound`, or 0 when there is none.
    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound.max(1) as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

/// What is read of a directory, and how it ended.
#[derive(Default)]
struct Outcomes {
    num_read: u64,
    num_refused: u64,
}

struct Fuzz {
    source: Source,
    whole: Files,
    expected: BTreeMap<String, Vec<u8>>,
    shapes: BTreeMap<String, Vec<usize>>,
    outcomes: Outcomes,
}

impl Fuzz {
    fn new() -> Self {
        let source = Source::converted();
        let model = Checkpoint::open(&source.model()).unwrap();
        let names: Vec<String> = model.names().map(str::to_owned).collect();
        let bytes = |name: &String| model.source_bytes(name).unwrap().into_owned();
        let shape = |name: &String| model.shape(name).unwrap().to_vec();
        Self {
            whole: files(&source.out()),
            expected: names.iter().map(|n| (n.clone(), bytes(n))).collect(),
            shapes: names.iter().map(|n| (n.clone(), shape(n))).collect(),
            source,
            outcomes: Outcomes::default(),
        }
    }

    /// One damaged directory, read in every way.
    fn case(&mut self, seed: u64) {
        let mut random = Random(seed);
        let mut damaged = self.whole.clone();
        for _ in 0..=random.below(3) {
            damage(&mut damaged, &mut random);
        }
        let dir = self.source.out();
        for (name, bytes) in &damaged {
            fs::write(dir.join(name), bytes).unwrap();
        }
        let read = std::panic::catch_unwind(|| self.read(&dir));
        let outcomes = read.unwrap_or_else(|_| panic!("case {seed} failed; add it to CORPUS"));
        self.outcomes.num_read += outcomes.num_read;
        self.outcomes.num_refused += outcomes.num_refused;
    }

    fn read(&self, dir: &Path) -> Outcomes {
        let mut outcomes = Outcomes::default();
        let _ = inspect(dir);
        let Ok(checkpoint) = Checkpoint::open(dir) else {
            outcomes.num_refused += 1;
            return outcomes;
        };
        for (name, expected) in &self.expected {
            match checkpoint.source_bytes(name) {
                Ok(bytes) => {
                    assert!(bytes == &expected[..], "tensor {name} has other bits");
                    outcomes.num_read += 1;
                }
                Err(_) => outcomes.num_refused += 1,
            }
            if let [rows, columns] = self.shapes[name][..] {
                let read = checkpoint.matrix(name, [rows, columns], WeightFormat::Auto);
                let weights = read.map(|matrix| match matrix {
                    Matrix::Bf16(weights) => weights,
                    Matrix::W12(matrix) => matrix.decode(),
                    Matrix::Fp8(matrix) => matrix.dequantise(),
                });
                if let Ok(weights) = weights {
                    let bytes: Vec<u8> = weights.iter().flat_map(|w| w.to_le_bytes()).collect();
                    assert!(bytes == expected[..], "matrix {name} has other bits");
                }
            }
        }
        outcomes
    }
}

/// Changes one of the files that say something of weights.
fn damage(files: &mut Files, random: &mut Random) {
    let told: Vec<String> = files
        .keys()
        .filter(|name| name.contains("safetensors"))
        .cloned()
        .collect();
    let name = &told[random.below(told.len())];
    let bytes = files.get_mut(name).expect("a name of the list");
    let is_index = name.ends_with(".json");
    match random.below(8) {
        0..=2 if is_index => edit_json(bytes, random),
        0..=2 => edit_header(bytes, random),
        3 => flip_bits(bytes, random),
        4 => overwrite_digits(bytes, random),
        5 => fill(bytes, random),
        6 => copy_within(bytes, random),
        _ => resize(bytes, random),
    }
}

fn flip_bits(bytes: &mut [u8], random: &mut Random) {
    for _ in 0..=random.below(4) {
        let at = random.below(bytes.len());
        if let Some(byte) = bytes.get_mut(at) {
            *byte ^= 1 << random.below(8);
        }
    }
}

/// Digits become other digits: JSON stays JSON, numbers and digests change.
fn overwrite_digits(bytes: &mut [u8], random: &mut Random) {
    let end = bytes.len().min(4096);
    let digits: Vec<usize> = (0..end).filter(|&i| bytes[i].is_ascii_digit()).collect();
    for _ in 0..=random.below(3) {
        if let Some(&at) = digits.get(random.below(digits.len())) {
            bytes[at] = b'0' + random.below(10) as u8;
        }
    }
}

fn fill(bytes: &mut [u8], random: &mut Random) {
    let begin = random.below(bytes.len());
    let end = (begin + random.below(64)).min(bytes.len());
    let value = [0, 0xFF, b' ', random.next() as u8][random.below(4)];
    bytes[begin..end].fill(value);
}

fn copy_within(bytes: &mut [u8], random: &mut Random) {
    let len = random.below(bytes.len().min(2048));
    let from = random.below(bytes.len() - len);
    let to = random.below(bytes.len() - len);
    bytes.copy_within(from..from + len, to);
}

fn resize(bytes: &mut Vec<u8>, random: &mut Random) {
    match random.below(3) {
        0 => bytes.truncate(random.below(bytes.len())),
        1 => bytes.resize(bytes.len() + random.below(100), random.next() as u8),
        _ => {
            let length = [0, 1 << 40, u64::MAX, random.next() % 8192][random.below(4)];
            if let Some(field) = bytes.first_chunk_mut() {
                *field = length.to_le_bytes();
            }
        }
    }
}

fn edit_json(bytes: &mut Vec<u8>, random: &mut Random) {
    if let Ok(mut value) = serde_json::from_slice(bytes) {
        edit_value(&mut value, random);
        *bytes = value.to_string().into_bytes();
    }
}

/// Changes a header, or the JSON text inside its metadata, and puts it back with its length.
fn edit_header(bytes: &mut Vec<u8>, random: &mut Random) {
    let Some(length) = bytes.first_chunk().map(|field| u64::from_le_bytes(*field)) else {
        return;
    };
    let Some(end) = usize::try_from(length).ok().and_then(|n| n.checked_add(8)) else {
        return;
    };
    let Some(Ok(mut header)) = bytes.get(8..end).map(serde_json::from_slice::<Value>) else {
        return;
    };
    let records = header.pointer_mut("/__metadata__/w12_source_tensors");
    match records.filter(|_| random.one_in(2)) {
        Some(Value::String(text)) => {
            let Ok(mut inner) = serde_json::from_str(text) else {
                return;
            };
            edit_value(&mut inner, random);
            *text = inner.to_string();
        }
        _ => edit_value(&mut header, random),
    }
    let text = header.to_string();
    let mut edited = (text.len() as u64).to_le_bytes().to_vec();
    edited.extend_from_slice(text.as_bytes());
    edited.extend_from_slice(&bytes[end..]);
    *bytes = edited;
}

/// Walks down to a random place and changes, removes, repeats or renames what is there.
fn edit_value(value: &mut Value, random: &mut Random) {
    let stops = random.one_in(6);
    match value {
        Value::Object(map) if !map.is_empty() && !stops => {
            let key = map.keys().nth(random.below(map.len())).cloned();
            let key = key.expect("a key of the map");
            let other = map.values().nth(random.below(map.len())).cloned();
            match random.below(12) {
                0 => drop(map.remove(&key)),
                1 => drop(map.insert(key, other.expect("a value of the map"))),
                2 => {
                    let moved = map.remove(&key).expect("it is there");
                    map.insert(format!("{key}.w12_base"), moved);
                }
                3 => {
                    let copied = map[&key].clone();
                    map.insert(key.replace("a.", "d."), copied);
                }
                _ => edit_value(&mut map[&key], random),
            }
        }
        Value::Array(items) if !items.is_empty() && !stops => {
            let at = random.below(items.len());
            match random.below(6) {
                0 => drop(items.remove(at)),
                1 => items.insert(at, Value::from(random.below(3))),
                _ => edit_value(&mut items[at], random),
            }
        }
        Value::Number(number) => {
            let n = number.as_u64().unwrap_or(0);
            let choices = [
                0,
                1,
                n.wrapping_add(1),
                n.wrapping_sub(1),
                n.wrapping_mul(2),
                n / 2,
                1 << 40,
                u64::MAX,
                random.next() % 4096,
            ];
            *value = Value::from(choices[random.below(choices.len())]);
        }
        Value::String(text) => {
            let choices = [
                "", "BF16", "F16", "U8", "I8", "F32", "2", "1", "\u{0}", "../x",
            ];
            *text = choices[random.below(choices.len())].to_owned();
        }
        other => *other = [Value::Null, Value::Bool(true), Value::from(7)][random.below(3)].clone(),
    }
}

#[test]
fn a_few_hundred_damaged_directories() {
    let mut fuzz = Fuzz::new();
    for seed in CORPUS.into_iter().chain(0..NUM_QUICK_CASES) {
        fuzz.case(seed);
    }
    // Damage that is never found, or files that are never read, would prove nothing.
    assert!(fuzz.outcomes.num_refused > NUM_QUICK_CASES / 2);
    assert!(fuzz.outcomes.num_read > NUM_QUICK_CASES / 2);
}

#[test]
#[ignore = "runs for ten minutes: make test-slow"]
fn for_ten_minutes() {
    let start = Instant::now();
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let first = now.as_nanos() as u64;
    println!("reader fuzz: first seed {first}");
    let mut fuzz = Fuzz::new();
    let mut num_cases = 0;
    while start.elapsed() < LONG_RUN {
        fuzz.case(first.wrapping_add(num_cases));
        num_cases += 1;
    }
    println!(
        "reader fuzz: {num_cases} damaged directories in {:.0} s, {} reads refused, {} gave the source's bits",
        start.elapsed().as_secs_f64(),
        fuzz.outcomes.num_refused,
        fuzz.outcomes.num_read,
    );
}
