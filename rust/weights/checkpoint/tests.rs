//! Whole files: what opens, and what damage is refused with which error. Tensor by tensor: `model/weights/tests.rs`.

use proptest::prelude::*;

use super::super::raw_safetensors::{copy, edit_json, edit_tensors, family, read, read_dir};
use super::*;
use crate::device::Device;
use crate::kernels::bf16_matmul::PackedBf16;
use crate::weights::WeightLoader;
use crate::weights::w12::{Encoding, encode};

const SHARD_1: &str = "model-00001-of-00002.safetensors";
const SHARD_2: &str = "model-00002-of-00002.safetensors";

/// A tensor that the two-shard fixture keeps in its second shard.
fn tensor_of_shard_2() -> String {
    read(&family("qwen3_5_text").join(SHARD_2))[0].name.clone()
}

fn token_rows_bf16(
    checkpoint: &Checkpoint,
    name: &str,
    shape: [usize; 2],
) -> crate::error::Result<PackedBf16> {
    let device = &Device::host(Some(1))?;
    WeightLoader::of(checkpoint, device).token_rows_bf16(name, shape)
}

fn message(error: CheckpointError, parts: &[&str]) -> String {
    let message = error.to_string();
    for part in parts {
        assert!(message.contains(part), "`{part}` not in: {message}");
    }
    message
}

#[test]
fn every_tensor_of_every_fixture_is_seen_with_its_shape_and_dtype() {
    for case in [
        "qwen3_5_wrapper",
        "qwen3_5_text",
        "qwen3_5_fp8",
        "llama_rope_scaling",
        "llama_rope_parameters",
        "gemma4_unified",
        "muse_glimmer",
    ] {
        let checkpoint = Checkpoint::open(&family(case)).unwrap();
        let raw = read_dir(&family(case));
        assert_eq!(checkpoint.names().count(), raw.len(), "{case}");
        for tensor in raw {
            assert_eq!(checkpoint.shape(&tensor.name), Some(&tensor.shape[..]));
            assert_eq!(checkpoint.dtype(&tensor.name), Some(&tensor.dtype[..]));
            if matches!(&tensor.dtype[..], "BF16" | "F32") {
                let read = checkpoint.tensor_f32(&tensor.name, &tensor.shape).unwrap();
                let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&read), bits(&tensor.values()), "{}", tensor.name);
            }
        }
    }
}

#[test]
fn matrices_are_packed_row_by_row() {
    let dir = family("llama_rope_parameters");
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let name = "model.layers.0.mlp.gate_proj.weight";
    let packed = token_rows_bf16(&checkpoint, name, [144, 64]).unwrap();
    let raw = read_dir(&dir).into_iter().find(|t| t.name == name).unwrap();
    let mut row = [0.0; 64];
    for (channel, expected) in raw.values().chunks(64).enumerate() {
        packed.unpack_row(channel, &mut row);
        assert_eq!(row, expected, "channel {channel}");
    }
}

#[test]
fn data_at_an_odd_offset_is_read_all_the_same() {
    let dir = copy(&family("llama_rope_parameters"));
    let file = dir.path().join("model.safetensors");
    let bytes = std::fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    // One more space of header moves all data by one byte.
    let mut moved = (header_len as u64 + 1).to_le_bytes().to_vec();
    moved.extend_from_slice(&bytes[8..8 + header_len]);
    moved.push(b' ');
    moved.extend_from_slice(&bytes[8 + header_len..]);
    std::fs::write(&file, moved).unwrap();
    let name = "model.layers.0.mlp.gate_proj.weight";
    let [packed, expected] = [dir.path(), &family("llama_rope_parameters")].map(|dir| {
        let checkpoint = Checkpoint::open(dir).unwrap();
        let packed = token_rows_bf16(&checkpoint, name, [144, 64]).unwrap();
        let mut row = vec![0.0; 64];
        packed.unpack_row(143, &mut row);
        row
    });
    assert_eq!(packed, expected);
}

#[test]
fn a_directory_without_weights_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NoWeights { .. }));
    message(error, &[dir.path().to_str().unwrap(), INDEX_FILE]);
}

#[test]
fn a_shard_cut_anywhere_is_damaged() {
    let dir = copy(&family("qwen3_5_text"));
    let file = dir.path().join(SHARD_2);
    let bytes = std::fs::read(&file).unwrap();
    let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    for len in [
        0,
        1,
        7,
        8,
        9,
        8 + header_len / 2,
        8 + header_len,
        bytes.len() - 1,
    ] {
        std::fs::write(&file, &bytes[..len]).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(
            matches!(error, CheckpointError::Damaged { .. }),
            "{len} bytes: {error}"
        );
        message(error, &[SHARD_2, "truncated or damaged"]);
    }
    std::fs::write(&file, [&bytes[..], b"more"].concat()).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::Damaged { .. }), "{error}");
}

#[test]
fn a_missing_shard_is_named_with_its_index() {
    let dir = copy(&family("qwen3_5_text"));
    std::fs::remove_file(dir.path().join(SHARD_2)).unwrap();
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::MissingShard { .. }));
    message(error, &[INDEX_FILE, SHARD_2]);
}

#[test]
fn an_index_may_not_reach_outside_its_directory() {
    let dir = copy(&family("qwen3_5_text"));
    let tensor = tensor_of_shard_2();
    let nested = dir.path().join("nested");
    std::fs::create_dir(&nested).unwrap();
    std::fs::copy(dir.path().join(SHARD_1), nested.join(SHARD_1)).unwrap();
    std::fs::copy(dir.path().join(INDEX_FILE), nested.join(INDEX_FILE)).unwrap();
    edit_json(&nested, INDEX_FILE, |index| {
        for (_, file) in index["weight_map"].as_object_mut().unwrap() {
            if file == SHARD_2 {
                *file = format!("../{SHARD_2}").into();
            }
        }
    });
    assert!(nested.join("..").join(SHARD_2).is_file());
    let error = Checkpoint::open(&nested).unwrap_err();
    assert!(
        matches!(error, CheckpointError::ShardElsewhere { .. }),
        "{tensor}: {error}"
    );
    message(error, &[INDEX_FILE, "`../", "beside the index"]);
}

#[test]
fn a_tensor_in_another_shard_than_its_index_says_is_named() {
    let dir = copy(&family("qwen3_5_text"));
    let tensor = tensor_of_shard_2();
    edit_json(dir.path(), INDEX_FILE, |index| {
        index["weight_map"][&tensor] = SHARD_1.into();
    });
    let error = Checkpoint::open(dir.path()).unwrap_err();
    assert!(matches!(error, CheckpointError::NotInShard { .. }));
    message(error, &[SHARD_1, &tensor]);
}

#[test]
fn of_two_copies_the_index_decides() {
    let dir = copy(&family("qwen3_5_text"));
    let tensor = tensor_of_shard_2();
    let mut other = read(&dir.path().join(SHARD_2))
        .into_iter()
        .find(|t| t.name == tensor)
        .unwrap();
    let expected = other.values();
    other.bytes.fill(0);
    let shape = other.shape.clone();
    edit_tensors(dir.path(), SHARD_1, |tensors| tensors.push(other));
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let got = checkpoint.tensor_f32(&tensor, &shape).unwrap();
    assert_eq!(got, expected);
}

#[test]
fn an_index_that_is_no_index_is_refused() {
    let dir = copy(&family("qwen3_5_text"));
    for text in [
        "{\"weight_map\": ",
        "[]",
        "{}",
        "{\"weight_map\": {\"a\": 1}}",
    ] {
        std::fs::write(dir.path().join(INDEX_FILE), text).unwrap();
        let error = Checkpoint::open(dir.path()).unwrap_err();
        assert!(matches!(error, CheckpointError::Json { .. }), "{error}");
        message(error, &[INDEX_FILE]);
    }
}

#[test]
fn tensors_nobody_read_are_listed_and_ignored_ones_are_not() {
    let checkpoint = Checkpoint::open(&family("qwen3_5_wrapper")).unwrap();
    let error = checkpoint
        .finish(&["model.language_model.", "model.visual.", "mtp."])
        .unwrap_err();
    let CheckpointError::UnusedTensors { tensors, .. } = &error else {
        panic!("{error}");
    };
    assert_eq!(tensors, &["lm_head.weight"]);
    message(error, &["model.safetensors", "lm_head.weight"]);
    // The name of a tensor is no beginning of others.
    let ignored = [
        "model.language_model.",
        "model.visual.",
        "mtp.",
        "lm_head.weigh",
    ];
    checkpoint.finish(&ignored).unwrap_err();
    checkpoint.skip("lm_head.weight");
    checkpoint
        .finish(&["model.language_model.", "model.visual.", "mtp."])
        .unwrap();
}

#[test]
fn a_misspelt_name_is_suggested() {
    let checkpoint = Checkpoint::open(&family("llama_rope_scaling")).unwrap();
    let error = checkpoint
        .tensor_f32("model.nrom.weight", &[96])
        .unwrap_err();
    message(
        error,
        &[
            "model.nrom.weight",
            "[96]",
            "the checkpoint has `model.norm.weight`",
        ],
    );
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// Whatever happens to a file's bytes, opening it and reading every tensor it claims ends in values or an error.
    #[test]
    fn no_damage_makes_reading_panic(
        edits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8),
        length_edit in prop::option::of(any::<u64>()),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let dir = copy(&family("llama_rope_scaling"));
        let file = dir.path().join(SINGLE_FILE);
        let mut bytes = std::fs::read(&file).unwrap();
        let header_len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (index, value) in edits {
            let at = 8 + index.index(header_len);
            // Digits stay digits half the time, so that offsets and shapes change while the JSON still parses.
            bytes[at] = match bytes[at].is_ascii_digit() && value < 128 {
                true => b'0' + value % 10,
                false => value,
            };
        }
        if let Some(length) = length_edit {
            bytes[..8].copy_from_slice(&length.to_le_bytes());
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        std::fs::write(&file, bytes).unwrap();
        if let Ok(checkpoint) = Checkpoint::open(dir.path()) {
            for name in checkpoint.names() {
                let shape = checkpoint.shape(name).unwrap().to_vec();
                let _ = checkpoint.tensor_f32(name, &shape);
                if let [rows, columns] = shape[..] {
                    let _ = token_rows_bf16(&checkpoint, name, [rows, columns]);
                }
            }
            let _ = checkpoint.finish(&[]);
        }
    }
}

/// The comparison at conversion, which no encoder that works can fail.
#[test]
fn a_matrix_that_decodes_to_other_bits_is_noticed() {
    let weights: Vec<bf16> = (0..32 * 128)
        .map(|i| bf16::from_f32(1.0 + (i % 90) as f32))
        .collect();
    let Encoding::W12(matrix) = encode(&weights, 32, 128) else {
        panic!("pays")
    };
    assert!(decodes_to(&matrix, &weights));
    for place in [0, 2049, weights.len() - 1] {
        let mut others = weights.clone();
        others[place] = bf16::from_bits(others[place].to_bits() ^ 1);
        assert!(!decodes_to(&matrix, &others), "{place}");
    }
}
