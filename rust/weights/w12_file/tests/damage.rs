//! Which damage to a converted directory is refused with which error.

use super::*;

#[test]
fn a_flipped_bit_in_any_part_is_found_and_its_tensor_named() {
    let source = Source::converted();
    let file = source.shard(SHARD_1);
    let whole = fs::read(&file).unwrap();
    for part in PARTS {
        let span = spans(&file)[&format!("a.weight{part}")].clone();
        for i in 0..40 {
            let mut bytes = whole.clone();
            let at = span.start + (i * 7919) % span.len();
            bytes[at] ^= 1 << (i % 8);
            fs::write(&file, bytes).unwrap();
            let error = damage(&source.out());
            let by_codec = matches!(error, CheckpointError::W12 { .. });
            let by_checksum = matches!(error, CheckpointError::Checksum { .. });
            assert!(by_codec || by_checksum, "{part} byte {at}: {error}");
            assert_names(&error, &[SHARD_1, "`a.weight`"]);
        }
    }
    let mut bytes = whole.clone();
    bytes[spans(&file)["norm"].start] ^= 1;
    fs::write(&file, bytes).unwrap();
    let error = damage(&source.out());
    assert!(matches!(error, CheckpointError::Checksum { .. }));
    assert_names(&error, &[SHARD_1, "`norm`"]);
    fs::write(&file, whole).unwrap();
    assert!(first_error(&source.out()).is_none());
}

#[test]
fn a_flipped_bit_anywhere_in_a_header_is_found() {
    let source = Source::converted();
    let file = source.shard(SHARD_1);
    let whole = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(whole[..8].try_into().unwrap()) as usize;
    let text = whole[8..header].trim_ascii_end().len();
    let mut in_padding = 0;
    for at in 0..header {
        let mut bytes = whole.clone();
        bytes[at] ^= 1 << (at % 5);
        fs::write(&file, bytes).unwrap();
        let result = Checkpoint::open(&source.out()).and_then(|checkpoint| {
            let names: Vec<String> = checkpoint.names().map(str::to_owned).collect();
            names
                .iter()
                .try_for_each(|name| checkpoint.source_bytes(name).map(drop))?;
            Ok(names)
        });
        let named = Checkpoint::open(&source.model()).unwrap();
        match result {
            // What "format" says is for others.
            Ok(names) if whole[..at].ends_with(b"\"format\":\"pt") || at < 40 => {
                assert!(names.iter().map(String::as_str).eq(named.names()));
            }
            Ok(names) if at >= 8 + text => {
                assert!(names.iter().map(String::as_str).eq(named.names()));
                in_padding += 1;
            }
            Ok(_) => panic!(
                "a flipped bit at {at} was not found: {:?}",
                whole[at] as char
            ),
            Err(error) => assert_names(&error, &["model"]),
        }
    }
    assert!(in_padding < header - text);
}

#[test]
fn wrong_counts_are_refused_by_the_codec() {
    let source = Source::converted();
    edit_tensors(&source.out(), SHARD_1, |_| {});
    // Rewriting without metadata leaves parts that nothing vouches for.
    let error = damage(&source.out());
    assert!(
        matches!(error, CheckpointError::W12Metadata { .. }),
        "{error}"
    );

    let source = Source::converted();
    let file = source.shard(SHARD_2);
    let span = spans(&file)["c.weight.w12_counts"].clone();
    let mut bytes = fs::read(&file).unwrap();
    bytes[span.start] += 1;
    fs::write(&file, &bytes).unwrap();
    for error in [damage(&source.out()), inspect(&source.out()).unwrap_err()] {
        let CheckpointError::W12 { tensor, source, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!(tensor, "c.weight");
        assert!(
            matches!(
                source,
                W12Error::Length {
                    part: "escapes",
                    ..
                }
            ),
            "{error}"
        );
    }
    // One more here and one less there adds up, but escapes are then out of order or of another tile.
    bytes[span.start + 2] -= 1;
    fs::write(&file, &bytes).unwrap();
    assert_names(&damage(&source.out()), &[SHARD_2, "`c.weight`"]);
}

#[test]
fn a_shard_cut_anywhere_is_damaged() {
    let source = Source::converted();
    let file = source.shard(SHARD_2);
    let whole = fs::read(&file).unwrap();
    for len in (0..whole.len()).step_by(whole.len() / 50) {
        fs::write(&file, &whole[..len]).unwrap();
        let error = damage(&source.out());
        assert!(
            matches!(error, CheckpointError::Damaged { .. }),
            "{len}: {error}"
        );
        assert_names(&error, &[SHARD_2]);
    }
}

#[test]
fn another_version_is_not_read() {
    for version in ["2", "0", "1.1", ""] {
        let source = Source::converted();
        edit_header(&source.shard(SHARD_1), |header, _| {
            header["__metadata__"][VERSION_KEY] = version.into();
        });
        let error = damage(&source.out());
        let CheckpointError::FormatVersion {
            expected: 1, got, ..
        } = &error
        else {
            panic!("{error}");
        };
        assert_eq!(got, version);
        assert_names(&error, &[SHARD_1]);
    }
}

#[test]
fn parts_and_metadata_must_tell_the_same() {
    type Edit = fn(&mut Value, &mut Value);
    let cases: [(Edit, &[&str]); 11] = [
        (
            |_, records| drop(records["a.weight"].take()),
            &["w12_source_tensors"],
        ),
        (
            |_, records| drop(records.as_object_mut().unwrap().remove("a.weight")),
            &["there is none for `a.weight.w12_"],
        ),
        (
            |_, records| drop(records.as_object_mut().unwrap().remove("norm")),
            &["there is none for `norm`"],
        ),
        (
            |_, records| records["more"] = records["norm"].clone(),
            &["`more`", "BF16 matrix"],
        ),
        (
            |_, records| records["more.weight"] = records["a.weight"].clone(),
            &["`more.weight.w12_plane8` is missing"],
        ),
        (
            |_, records| records["a.weight"]["shape"] = [48, 128].into(),
            &["a.weight.w12_plane8", "[3, 2, 1024]"],
        ),
        (
            |_, records| records["a.weight"]["shape"] = [31, 128].into(),
            &["`a.weight`", "padded with code 0"],
        ),
        (
            |_, records| records["a.weight"]["dtype"] = "F16".into(),
            &["`a.weight`", "BF16 matrix"],
        ),
        (
            |_, records| records["a.weight"]["sha256"] = "00".into(),
            &["64 hexadecimal digits"],
        ),
        (
            |_, records| records["norm"]["shape"] = [1, 3].into(),
            &["`norm`", "[1, 3]"],
        ),
        (
            |header, _| {
                drop(
                    header["__metadata__"]
                        .as_object_mut()
                        .unwrap()
                        .remove(RECORDS_KEY),
                )
            },
            &["w12_source_tensors` is missing"],
        ),
    ];
    for (i, (edit, parts)) in cases.into_iter().enumerate() {
        let source = Source::converted();
        edit_header(&source.shard(SHARD_1), edit);
        let error = damage(&source.out());
        assert_names(&error, &[SHARD_1]);
        assert_names(&error, parts);
        assert!(
            inspect(&source.shard(SHARD_1)).is_err() || i == 6,
            "case {i}"
        );
    }
}

#[test]
fn a_missing_part_is_named() {
    for part in PARTS {
        let source = Source::converted();
        let missing = format!("a.weight{part}");
        let file = source.shard(SHARD_1);
        let metadata = fs::read(&file).unwrap();
        let header_len = u64::from_le_bytes(metadata[..8].try_into().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&metadata[8..8 + header_len]).unwrap();
        edit_tensors(&source.out(), SHARD_1, |tensors| {
            tensors.retain(|t| t.name != missing)
        });
        restore_metadata(&file, header["__metadata__"].clone());
        let error = damage(&source.out());
        // The index still names it.
        assert!(
            matches!(error, CheckpointError::MissingPart { .. }),
            "{error}"
        );
        assert_names(&error, &[SHARD_1, "`a.weight`", &missing]);
    }
}

fn restore_metadata(file: &Path, metadata: Value) {
    let bytes = fs::read(file).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..data]).unwrap();
    header["__metadata__"] = metadata;
    let header = header.to_string();
    let mut restored = (header.len() as u64).to_le_bytes().to_vec();
    restored.extend_from_slice(header.as_bytes());
    restored.extend_from_slice(&bytes[data..]);
    fs::write(file, restored).unwrap();
}

#[test]
fn an_index_that_points_at_nothing_is_named() {
    let source = Source::converted();
    edit_json(&source.out(), INDEX_FILE, |index| {
        index["weight_map"]["a.weight.w12_base"] = "model-00003-of-00002.w12.safetensors".into();
    });
    let error = damage(&source.out());
    assert!(
        matches!(error, CheckpointError::MissingShard { .. }),
        "{error}"
    );
    assert_names(&error, &[INDEX_FILE, "model-00003"]);

    for tensor in [
        "a.weight.w12_counts",
        "a.weight",
        "ghost.weight.w12_plane8",
        "ghost",
    ] {
        let source = Source::converted();
        edit_json(&source.out(), INDEX_FILE, |index| {
            index["weight_map"][tensor] = SHARD_2.into();
        });
        let error = damage(&source.out());
        assert!(
            matches!(error, CheckpointError::NotInShard { .. }),
            "{tensor}: {error}"
        );
        assert_names(&error, &[SHARD_2, tensor]);
    }
}
