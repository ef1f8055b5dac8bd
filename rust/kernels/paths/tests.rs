//! Paths, padding and waves of small batches, worked out by hand.

use super::*;
use crate::kernels::kv_span::KvSpan::{Whole, Window};

#[test]
fn paths_follow_parents_and_positions_follow_depth() {
    let mut paths = RowPaths::default();
    paths
        .push_segment(3, 10, &[7, 5], &[None, Some(0), Some(0), Some(2)])
        .unwrap();
    paths.push_segment(1, 0, &[], &[None, Some(0)]).unwrap();
    assert_eq!(paths.positions().values(), &[10, 11, 11, 12, 0, 1]);
    assert_eq!(paths.path(3), &[0, 2, 3]);
    assert_eq!(paths.path(5), &[4, 5]);
    assert_eq!(paths.segments()[1].rows, 4..6);
    assert_eq!(paths.pages(&paths.segments()[0], Whole), &[7, 5]);
    assert!(paths.pages(&paths.segments()[1], Whole).is_empty());
}

#[test]
fn cleared_paths_serve_the_next_pass() {
    let device = Device::host(Some(1)).unwrap();
    let mut paths = RowPaths::with_capacity(&device, 4, PerSpan::whole_only(2)).unwrap();
    let mut refilled = RowPaths::default();
    paths
        .push_segment(3, 10, &[7, 5], &[None, Some(0)])
        .unwrap();
    paths.finish(&device).unwrap();
    for paths in [&mut paths, &mut refilled] {
        paths.clear();
        paths.push_segment(1, 5, &[2], &[None, Some(0)]).unwrap();
        paths.push_segment(0, 0, &[], &[None]).unwrap();
        paths.finish(&device).unwrap();
    }
    assert_eq!(paths.segments(), refilled.segments());
    for lists in [
        |paths: &RowPaths| paths.positions.values().to_vec(),
        |paths: &RowPaths| paths.row_facts.values().to_vec(),
        |paths: &RowPaths| paths.segment_facts.values().to_vec(),
        |paths: &RowPaths| paths.path_rows.values().to_vec(),
        |paths: &RowPaths| paths.pages.whole.values().to_vec(),
    ] {
        assert_eq!(lists(&paths), lists(&refilled));
    }
    assert_eq!((paths.path(1), paths.path(2)), (&[0, 1][..], &[2][..]));
}

#[test]
fn queries_continue_paths_of_earlier_forwards() {
    let mut paths = RowPaths::default();
    let before: [&[u32]; 2] = [&[4, 6], &[]];
    let queries = before.into_iter().zip([9, 3]);
    paths.push_queries(2, 10, &[], queries).unwrap();
    assert_eq!(paths.positions().values(), &[12, 10]);
    assert_eq!((paths.path(0), paths.path(1)), (&[4, 6, 9][..], &[3][..]));
    assert_eq!(paths.segments()[0].rows, 0..2);
    let long = [0; MAX_PATH_ROWS];
    let refused = paths.push_queries(0, 0, &[], [(&long[..], 1)].into_iter());
    assert!(matches!(
        refused,
        Err(KernelError::PathTooLong { got: 65, .. })
    ));
}

#[test]
fn padding_follows_the_last_root_and_belongs_to_nobody() {
    let mut paths = RowPaths::default();
    paths.push_segment(3, 10, &[7], &[None]).unwrap();
    let tree = [None, Some(0), Some(1), Some(1)];
    paths.push_segment(1, 5, &[4], &tree).unwrap();
    assert_eq!(paths.pad_to(row_bucket(5)), 3);
    assert_eq!((paths.num_rows(), paths.longest_segment()), (8, 8));
    assert_eq!(paths.segments()[1].rows, 1..5);
    assert_eq!(paths.segment_facts.values()[8..12], [1, 5, 1, 7]);
    for row in 5..8 {
        assert_eq!(
            (paths.position(row), paths.path(row)),
            (5, &[row as u32][..])
        );
        assert_eq!(paths.row_facts.values()[2 * row + 1], 1);
    }
    paths.clear();
    paths.push_segment(0, 0, &[], &tree[..1]).unwrap();
    assert_eq!((paths.pad_to(1), paths.longest_segment()), (0, 1));
    let chain: Vec<_> = (0..62).map(|i: usize| i.checked_sub(1)).collect();
    paths.push_segment(1, 0, &[], &chain).unwrap();
    // Rows that name a segment lie within it: a kernel that counts a segment's rows from one of them never ends else.
    assert_eq!((paths.pad_to(72), paths.longest_segment()), (2, 64));
    assert_eq!(paths.num_rows(), 65);
    for row in 0..paths.num_rows() {
        let segment = paths.row_facts.values()[2 * row + 1] as usize;
        let facts = &paths.segment_facts.values()[SEGMENT_FACTS * segment..][..SEGMENT_FACTS];
        let first = paths.segments()[segment].rows.start;
        assert!((first..first + facts[NUM_ROWS_FACT] as usize).contains(&row));
    }
}

#[test]
fn long_prompts_are_segments_that_settle_wave_by_wave() {
    let device = Device::host(Some(1)).unwrap();
    let mut paths = RowPaths::with_capacity(&device, 300, PerSpan::whole_only(8)).unwrap();
    paths.push_segment(7, 9, &[3], &[None]).unwrap();
    for _ in 0..2 {
        paths.clear();
        paths.push_segment(2, 9, &[3], &[None]).unwrap();
        paths.push_prompt(5, 10, &[1, 8, 4, 6], 150).unwrap();
        paths.push_prompt(0, 0, &[2, 0], 65).unwrap();
        paths.push_segment(1, 5, &[7], &[None, Some(0)]).unwrap();
    }
    paths.finish(&device).unwrap();
    let waves: Vec<_> = paths.waves().map(|wave| wave.segments).collect();
    assert_eq!(waves, [0..2, 2..3, 3..5, 5..7]);
    let settled = paths.waves().filter_map(|wave| wave.settled);
    let settled: Vec<_> = settled
        .map(|s| (s.slot, s.end, s.last_position, s.rows.len()))
        .collect();
    let expected = [(5, 74, 137, 64), (5, 138, 159, 64), (0, 64, 64, 64)];
    assert_eq!(settled, expected);
    let rows: Vec<_> = paths.segments().iter().map(|s| s.rows.clone()).collect();
    assert_eq!(
        rows,
        [0..1, 1..65, 65..129, 129..151, 151..215, 215..216, 216..218]
    );
    assert!([2, 3, 5].into_iter().all(|i| paths.continues(i)));
    assert!([0, 1, 4, 6].into_iter().all(|i| !paths.continues(i)));
    for segment in &paths.segments()[1..4] {
        assert_eq!(paths.pages(segment, Whole), [1, 8, 4, 6]);
    }
    assert_eq!((paths.position(66), paths.path(66)), (75, &[65, 66][..]));
    let placed = paths.waves().next().unwrap().settled.unwrap().rows;
    let last = placed.iter().last().unwrap();
    assert_eq!((last.row, last.position, last.page), (64, 73, 8));
    assert_eq!(
        [1, 64, 65, 128, 129].map(num_settled_rows),
        [0, 0, 64, 64, 128]
    );
    assert_eq!((paths.longest_of(3..5), paths.longest_of(5..7)), (64, 2));
}

#[test]
fn buckets_are_few_and_never_too_small() {
    let buckets: Vec<_> = (1..=64).map(row_bucket).collect();
    assert!((1..=64).zip(&buckets).all(|(rows, &bucket)| bucket >= rows));
    let distinct = std::collections::BTreeSet::from_iter(buckets);
    assert_eq!(distinct.len(), 11);
    assert_eq!([0, 1, 3, 4, 5].map(split_bucket), [0, 1, 4, 4, 8]);
}

#[test]
fn both_tables_of_a_segment_stand_at_the_same_place() {
    let tables = |whole, window| PageTables { whole, window };
    let mut paths = RowPaths::default();
    let first = tables(&[4, 2, 7][..], &[0, 1, 0][..]);
    paths.push_segment(0, 130, first, &[None]).unwrap();
    let second = tables(&[9, 3], &[5, 6]);
    paths.push_prompt(1, 10, second, 70).unwrap();
    let segments = paths.segments();
    assert_eq!(paths.pages(&segments[0], Window), [0, 1, 0]);
    for segment in &segments[1..] {
        assert_eq!(paths.pages(segment, Whole), [9, 3]);
        assert_eq!(paths.pages(segment, Window), [5, 6]);
    }
    let settled = paths.waves().next().unwrap().settled.unwrap().rows;
    let pages_at_64 = [Whole, Window].map(|span| settled.iter_in(span).nth(54).unwrap().page);
    assert_eq!(pages_at_64, [3, 6]);
    // Elsewhere kernels would look in another segment's pages.
    for odd in [tables(&[1], &[]), tables(&[1, 2], &[3])] {
        let refused = paths.push_segment(2, 0, odd, &[None]);
        assert!(matches!(refused, Err(KernelError::Size { .. })));
        paths.clear();
        paths.push_segment(0, 130, first, &[None]).unwrap();
    }
}

#[test]
fn bad_parents_and_long_paths_are_refused() {
    let mut paths = RowPaths::default();
    assert!(matches!(
        paths.push_segment(0, 0, &[], &[None, Some(1)]),
        Err(KernelError::ParentOrder { row: 1, parent: 1 })
    ));
    let chain: Vec<_> = (0..65).map(|i: usize| i.checked_sub(1)).collect();
    let mut paths = RowPaths::default();
    assert!(matches!(
        paths.push_segment(0, 0, &[], &chain),
        Err(KernelError::PathTooLong {
            expected: 64,
            got: 65
        })
    ));
}
