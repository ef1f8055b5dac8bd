//! For tests: safetensors files as plain bytes, read and written by the format's definition alone (8 bytes of header
//! length, a JSON header, the data), so that nothing checks itself; and copies of the fixtures to damage.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;

/// One tensor, as stored.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct RawTensor {
    pub(crate) name: String,
    pub(crate) dtype: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl RawTensor {
    /// The values of a BF16 or F32 tensor.
    pub(crate) fn values(&self) -> Vec<f32> {
        match &self.dtype[..] {
            "BF16" => self
                .bytes
                .chunks(2)
                .map(|b| f32::from_bits(u32::from(b[1]) << 24 | u32::from(b[0]) << 16))
                .collect(),
            "F32" => self
                .bytes
                .chunks(4)
                .map(|b| f32::from_bits(u32::from_le_bytes(b.try_into().unwrap())))
                .collect(),
            other => panic!("no values of dtype {other}"),
        }
    }
}

/// All tensors of a file, in the order of their data.
pub(crate) fn read(path: &Path) -> Vec<RawTensor> {
    let bytes = std::fs::read(path).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Map<String, Value> = serde_json::from_slice(&bytes[8..8 + header_len]).unwrap();
    let data = &bytes[8 + header_len..];
    let size = |v: &Value| v.as_u64().unwrap() as usize;
    let mut tensors: Vec<(usize, RawTensor)> = header
        .iter()
        .filter(|(name, _)| *name != "__metadata__")
        .map(|(name, entry)| {
            let [begin, end] = [0, 1].map(|i| size(&entry["data_offsets"][i]));
            let tensor = RawTensor {
                name: name.clone(),
                dtype: entry["dtype"].as_str().unwrap().to_owned(),
                shape: entry["shape"]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(size)
                    .collect(),
                bytes: data[begin..end].to_vec(),
            };
            (begin, tensor)
        })
        .collect();
    tensors.sort_by_key(|&(begin, _)| begin);
    tensors.into_iter().map(|(_, tensor)| tensor).collect()
}

/// Writes `tensors` as one file.
pub(crate) fn write(path: &Path, tensors: &[RawTensor]) {
    let mut header = Map::new();
    let mut data = Vec::new();
    for tensor in tensors {
        let begin = data.len();
        data.extend_from_slice(&tensor.bytes);
        let entry = json!({"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, data.len()]});
        header.insert(tensor.name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend_from_slice(header.as_bytes());
    bytes.extend_from_slice(&data);
    std::fs::write(path, bytes).unwrap();
}

/// All tensors of all shards of a model directory.
pub(crate) fn read_dir(dir: &Path) -> Vec<RawTensor> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .collect();
    files.sort();
    files.iter().flat_map(|file| read(file)).collect()
}

/// Directory of family fixture `case`.
pub(crate) fn family(case: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/fixtures/families")
        .join(case)
}

/// Directory of the demo target.
pub(crate) fn demo_target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("python/specpilot_rs/demo/target")
}

/// A copy of model directory `dir` that a test may damage.
pub(crate) fn copy(dir: &Path) -> TempDir {
    let copied = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(dir).unwrap() {
        let entry = entry.unwrap();
        std::fs::copy(entry.path(), copied.path().join(entry.file_name())).unwrap();
    }
    copied
}

/// Rewrites a JSON file of `dir`.
pub(crate) fn edit_json(dir: &Path, name: &str, edit: impl FnOnce(&mut Value)) {
    let path = dir.join(name);
    let mut value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut value);
    std::fs::write(path, value.to_string()).unwrap();
}

/// Rewrites the tensors of a file of `dir`.
pub(crate) fn edit_tensors(dir: &Path, name: &str, edit: impl FnOnce(&mut Vec<RawTensor>)) {
    let path = dir.join(name);
    let mut tensors = read(&path);
    edit(&mut tensors);
    write(&path, &tensors);
}
