//! Where a conversion may go: what is taken is left alone, links are followed, nothing of others is published.

use super::*;

#[test]
fn a_place_that_is_taken_is_left_alone() {
    let refused = |source: &Source, holds: &str| {
        let error = source.convert().unwrap_err();
        assert!(
            matches!(error, CheckpointError::OutputTaken { .. }),
            "{error}"
        );
        assert_names(&error, &["out", holds]);
    };
    let source = Source::converted();
    let before = files(&source.out());
    refused(&source, "a W12 checkpoint already");
    assert!(files(&source.out()) == before);

    let source = Source::new();
    fs::create_dir(source.out()).unwrap();
    fs::write(source.out().join("thesis.tex"), "years").unwrap();
    refused(&source, "thesis.tex");
    assert!(!source.partial().exists());

    let source = Source::new();
    fs::write(source.out(), "a file").unwrap();
    refused(&source, "a file");

    let source = Source::new();
    fs::create_dir(source.partial()).unwrap();
    fs::write(source.partial().join("mine"), "").unwrap();
    refused(&source, "no conversion left");

    let source = Source::new();
    source.convert_until(7).unwrap_err();
    fs::write(source.model().join("config.json"), "{\"any\": 2}").unwrap();
    refused(&source, "another checkpoint; remove it, or");

    let source = Source::new();
    let checkpoint = Checkpoint::open(&source.model()).unwrap();
    convert(&checkpoint, &source.matrices, &source.out(), &mut |_| {
        if !source.out().exists() {
            refused(&source, "still running");
        }
        ControlFlow::Continue(())
    })
    .unwrap();

    let source = Source::new();
    fs::create_dir(source.out()).unwrap();
    source.convert().unwrap();
}

#[cfg(unix)]
#[test]
fn links_are_followed_or_refused_before_any_work() {
    use std::os::unix::fs::symlink;
    let expected = files(&Source::converted().out());

    let source = Source::new();
    let behind = source.dir.path().join("behind");
    fs::create_dir(&behind).unwrap();
    symlink(&behind, source.out()).unwrap();
    source.convert().unwrap();
    assert!(source.out().is_symlink() && files(&behind) == expected);

    let refused = |source: &Source, holds: &str| {
        // Stopped at the first tensor if it were to begin at all.
        let error = source.convert_until(0).unwrap_err();
        assert!(
            matches!(error, CheckpointError::OutputTaken { .. }),
            "{error}"
        );
        assert_names(&error, &["out", holds]);
    };
    let source = Source::new();
    symlink(source.dir.path().join("nowhere"), source.out()).unwrap();
    refused(&source, "a link that leads nowhere");

    let source = Source::new();
    let elsewhere = source.dir.path().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    symlink(&elsewhere, source.partial()).unwrap();
    refused(&source, "a link to another place");
    assert!(fs::read_dir(elsewhere).unwrap().next().is_none());
}

#[test]
fn what_others_put_into_a_conversion_is_not_published() {
    let source = Source::new();
    source.convert_until(7).unwrap_err();
    let stray = source.partial().join("notes.txt");
    fs::write(&stray, "mine").unwrap();
    // Before any work, and after it.
    let error = source.convert_until(0).unwrap_err();
    assert!(
        matches!(error, CheckpointError::OutputTaken { .. }),
        "{error}"
    );
    assert_names(&error, &["out.partial", "notes.txt", "move it away"]);
    fs::remove_file(&stray).unwrap();
    let checkpoint = Checkpoint::open(&source.model()).unwrap();
    let error = convert(&checkpoint, &source.matrices, &source.out(), &mut |_| {
        fs::write(&stray, "mine").unwrap();
        ControlFlow::Continue(())
    });
    assert_names(&error.unwrap_err(), &["notes.txt"]);
    assert!(!source.out().exists());
    fs::remove_file(&stray).unwrap();
    assert_eq!(source.convert().unwrap().num_shards_found, 2);
}
