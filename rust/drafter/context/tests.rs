//! Contexts of all drafters through the trait: how they grow, what they forget, what they refuse.

use std::path::Path;

use crate::device::Buffer;
use crate::drafter::Standing;
use crate::drafter::tests::{
    CASES, HIDDEN, NUM_DRAFT_TOKENS, anchor, append, demo, dflash_copy, extend, fill, open_demo,
    open_in, propose, propose_all, sizes, taps, wanted,
};
use crate::error::{DrafterError, Error};
use crate::options::speculation::DraftScores::{Greedy, Marginal};
use crate::weights::raw_safetensors::edit_json;

#[test]
fn contexts_do_not_depend_on_the_passes_that_brought_them() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 6);
        let len = 80;
        let whole = taps(5, len);
        fill(&mut *drafter, 0, 5, len);
        // One by one, and as the accepted rows of larger passes.
        for position in 0..len {
            extend(&mut *drafter, 1, position, 5, (&whole, &[position as u32]));
        }
        for first in (0..len).step_by(5) {
            let scattered: Vec<Buffer<f32>> = whole
                .iter()
                .map(|tap| {
                    let mut rows = Buffer::from_slice(&[f32::NAN; 16 * HIDDEN]);
                    for i in 0..5 {
                        rows.host_mut()[3 * i * HIDDEN..][..HIDDEN]
                            .copy_from_slice(&tap.host()[(first + i) * HIDDEN..][..HIDDEN]);
                    }
                    rows
                })
                .collect();
            extend(&mut *drafter, 2, first, 5, (&scattered, &[0, 3, 6, 9, 12]));
        }
        let anchors = [0, 1, 2].map(|slot| anchor(slot, 103, len));
        let proposals = propose_all(&mut *drafter, &anchors, scores);
        assert_eq!(proposals[0], proposals[1], "{name}");
        assert_eq!(proposals[0], proposals[2], "{name}");
    }
}

/// A marked path may extend a context in several parts; what is drafted from its end is what verified rows would give,
/// and once dropped it leaves no trace, whatever verified rows come instead.
#[test]
fn scratch_rows_count_until_they_are_dropped() {
    for (name, scores) in CASES {
        let mut drafter = open_demo(name, 6);
        let (len, marked) = (70, 9);
        let all = taps(4, len + marked);
        let rows: Vec<u32> = (0..(len + marked) as u32).collect();
        for slot in [0, 1] {
            extend(&mut *drafter, slot, 0, 4, (&all, &rows[..len]));
            assert!(drafter.reserve(slot, len + 2 * marked));
        }
        let before = propose_all(&mut *drafter, &[anchor(0, 81, len)], scores);
        let other = taps(6, marked);
        for (first, rows) in [(0, &rows[..4]), (4, &rows[4..marked])] {
            let scratch = (&other[..], rows);
            append(&mut *drafter, 0, len + first, 4, scratch, Standing::Scratch).unwrap();
        }
        let verified = (&other[..], &rows[..marked]);
        append(&mut *drafter, 1, len, 4, verified, Standing::Verified).unwrap();
        let ends = [0, 1].map(|slot| anchor(slot, 82, len + marked));
        let from_end = propose_all(&mut *drafter, &ends, scores);
        assert_eq!(from_end[0], from_end[1], "{name}");

        let gap = append(&mut *drafter, 0, len, 4, verified, Standing::Verified);
        assert!(
            matches!(gap, Err(Error::Drafter(DrafterError::ContextGap { .. }))),
            "{name}: verified rows do not follow scratch"
        );
        drafter.rollback(0);
        let after = propose_all(&mut *drafter, &[anchor(0, 81, len)], scores);
        assert_eq!(before, after, "{name}");
        drafter.release(1);
        extend(&mut *drafter, 0, len, 4, (&all, &rows[len..]));
        extend(&mut *drafter, 1, 0, 4, (&all, &rows));
        let regrown = propose_all(&mut *drafter, &ends, scores);
        assert_eq!(regrown[0], regrown[1], "{name}");
    }
}

#[test]
fn a_marked_path_is_no_longer_than_a_pass_allows() {
    let mut drafter = open_demo("dflash", 4);
    fill(&mut *drafter, 0, 1, 5);
    assert!(drafter.reserve(0, 100));
    let rows: Vec<u32> = (0..65).collect();
    let result = append(
        &mut *drafter,
        0,
        5,
        1,
        (&taps(1, 65), &rows),
        Standing::Scratch,
    );
    assert!(matches!(
        result,
        Err(Error::Kernel(crate::error::KernelError::PathTooLong {
            got: 65,
            ..
        }))
    ));
}

/// Layers with a window keep it and no more; what falls out of it does not matter.
#[test]
fn windows_forget_what_they_do_not_see() {
    let windowed = |window: usize| {
        let dir = dflash_copy();
        edit_json(dir.path(), "config.json", |config| {
            config["layer_types"] = serde_json::json!(["sliding_attention", "sliding_attention"]);
            config["sliding_window"] = window.into();
        });
        dir
    };
    let len = 400;
    let rows: Vec<u32> = (0..len as u32).collect();
    let draft = |dir: &Path, taps: &[Buffer<f32>]| {
        // No page of the shared pool: rings are the slots' own.
        let mut drafter = open_in(Some(dir), sizes(7, NUM_DRAFT_TOKENS)).unwrap();
        extend(&mut *drafter, 2, 0, 3, (taps, &rows));
        propose_all(&mut *drafter, &[anchor(2, 5, len)], Marginal)
    };
    let original = taps(3, len);
    let changed_before = |end: usize| {
        let mut changed = taps(3, len);
        for tap in &mut changed {
            tap.host_mut()[..end * HIDDEN].fill(0.7);
        }
        changed
    };
    for window in [1, 30, 64, 100] {
        let dir = windowed(window);
        let reference = draft(dir.path(), &original);
        // The anchor's row at position `len` sees positions above `len - window`.
        let first_seen = len + 1 - window;
        assert_eq!(
            reference,
            draft(dir.path(), &changed_before(first_seen)),
            "{window}"
        );
        if window > 1 {
            assert_ne!(
                reference,
                draft(dir.path(), &changed_before(first_seen + 1)),
                "{window}"
            );
        }
    }
    // As long as nothing falls out, a window changes nothing.
    let whole = draft(&demo("dflash"), &original);
    assert_eq!(whole, draft(windowed(500).path(), &original));
    assert_ne!(whole, draft(windowed(30).path(), &original));
}

#[test]
fn pages_are_given_out_whole_and_come_back() {
    for name in ["dflash", "eagle3"] {
        let mut drafter = open_demo(name, 3);
        assert!(drafter.reserve(0, 65));
        assert!(drafter.reserve(0, 128), "room is there already");
        assert!(!drafter.reserve(1, 65), "one page is left");
        assert!(drafter.reserve(1, 64));
        drafter.release(0);
        assert!(drafter.reserve(2, 128));
        drafter.release(1);
        drafter.release(2);
        // A slot used before drafts like a fresh one.
        fill(&mut *drafter, 2, 1, 100);
        let first = propose_all(&mut *drafter, &[anchor(2, 5, 100)], Greedy);
        drafter.release(2);
        fill(&mut *drafter, 1, 2, 64);
        fill(&mut *drafter, 0, 1, 100);
        let second = propose_all(&mut *drafter, &[anchor(0, 5, 100)], Greedy);
        assert_eq!(first, second);
    }
}

#[test]
fn contexts_with_gaps_are_refused() {
    for name in ["dflash", "eagle3", "ngram"] {
        let mut drafter = open_demo(name, 4);
        fill(&mut *drafter, 0, 1, 10);
        assert!(drafter.reserve(0, 20));
        let one = taps(1, 1);
        for first in [9, 11] {
            let error = append(&mut *drafter, 0, first, 1, (&one, &[0]), Standing::Verified);
            assert!(matches!(
                error,
                Err(Error::Drafter(DrafterError::ContextGap { slot: 0, expected: 10, got })) if got == first
            ));
        }
        let behind = propose(&mut *drafter, &[anchor(0, 1, 11)], wanted(3, Greedy));
        assert!(matches!(
            behind,
            Err(Error::Drafter(DrafterError::ContextGap {
                expected: 10,
                got: 11,
                ..
            }))
        ));
        if name == "ngram" {
            continue;
        }
        let unreserved = append(
            &mut *drafter,
            1,
            0,
            1,
            (&taps(1, 2), &[0, 1]),
            Standing::Verified,
        );
        assert!(matches!(unreserved, Err(Error::Kernel(_))), "{name}");
        let too_few = append(
            &mut *drafter,
            0,
            10,
            1,
            (&one[..2], &[0]),
            Standing::Verified,
        );
        assert!(matches!(too_few, Err(Error::Kernel(_))));
    }
}
