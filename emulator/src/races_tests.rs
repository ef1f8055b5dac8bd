//! Programs as the check sees them: what is ordered passes, what is not is found, whoever comes first.

use super::*;

/// A cluster of two blocks of four warps.
fn check() -> Races {
    let mut races = Races::new("program", 2, 4);
    races.start_cluster(0);
    races
}

fn site(block: u32, warp: u32, line: u32) -> Site {
    Site { block, warp, line }
}

fn place(offset: u32) -> SharedPlace {
    SharedPlace { block: 0, offset }
}

/// What a race says, or nothing.
fn found(result: Result<(), Fault>) -> Option<String> {
    result.err().map(|fault| match fault {
        Fault::Race {
            what,
            place: Some(place),
        } => format!("{what} | line {}", place.line),
        other => panic!("{other}"),
    })
}

fn is_race(result: Result<(), Fault>) -> bool {
    found(result).is_some()
}

#[test]
fn two_warps_need_a_barrier_between_them() {
    for touch in [Touch::Read, Touch::Write] {
        let mut races = check();
        assert!(!is_race(races.touch(
            site(0, 0, 5),
            place(64),
            16,
            Touch::Write
        )));
        assert!(!is_race(races.touch(site(0, 0, 6), place(64), 16, touch)));
        let race = found(races.touch(site(0, 1, 9), place(76), 4, touch)).expect("a race");
        let line = if touch == Touch::Write { 6 } else { 5 };
        let earlier = format!("the write at PTX line {line} of block 0, warp 0");
        assert!(race.contains("76 bytes into block 0") && race.contains(&earlier));
        assert!(race.ends_with("| line 9"));
        races.meet(0, [0, 1].into_iter());
        assert!(!is_race(races.touch(site(0, 1, 10), place(76), 4, touch)));
        // Warp 2 was not there.
        assert!(is_race(races.touch(site(0, 2, 11), place(76), 4, touch)));
    }
}

#[test]
fn a_barrier_orders_what_was_before_it_only() {
    let mut races = check();
    races.meet(0, 0..4);
    assert!(!is_race(races.touch(
        site(0, 3, 1),
        place(0),
        4,
        Touch::Write
    )));
    assert!(is_race(races.touch(
        site(0, 1, 2),
        place(0),
        4,
        Touch::Read
    )));
}

#[test]
fn a_ring_is_ordered_by_its_full_and_empty_barriers() {
    let (slot, full, empty) = (place(1024), place(0), place(8));
    let start = || {
        let mut races = check();
        for barrier in [full, empty] {
            assert!(!is_race(races.init_mbarrier(site(0, 0, 1), barrier)));
        }
        races.meet(0, 0..4);
        races
    };
    // The producer is warp 0, the consumers are warps 1 and 2.
    let fill = |races: &mut Races| {
        assert!(!is_race(races.arrive_at_mbarrier(
            site(0, 0, 10),
            full,
            None
        )));
        let result = races.touch_by_flight(site(0, 0, 11), slot, 512, full);
        races.end_phase(full);
        result
    };
    let consume = |races: &mut Races, warp: u32| {
        assert!(!is_race(races.test_mbarrier(site(0, warp, 20), full, true)));
        let result = races.touch(site(0, warp, 21), slot, 16, Touch::Read);
        assert!(!is_race(races.arrive_at_mbarrier(
            site(0, warp, 22),
            empty,
            None
        )));
        result
    };
    let mut races = start();
    for _ in 0..5 {
        assert!(!is_race(fill(&mut races)));
        assert!(!is_race(consume(&mut races, 1)));
        assert!(!is_race(consume(&mut races, 2)));
        races.end_phase(empty);
        assert!(!is_race(races.test_mbarrier(site(0, 0, 12), empty, true)));
    }
    // Not waiting for the full barrier.
    let mut races = start();
    assert!(!is_race(fill(&mut races)));
    let race = found(races.touch(site(0, 1, 21), slot, 16, Touch::Read)).expect("a race");
    assert!(
        race.contains("of a copy whose bytes count at block 0's mbarrier at offset 0"),
        "{race}"
    );
    // Looking at it without success.
    assert!(!is_race(races.test_mbarrier(site(0, 1, 20), full, false)));
    assert!(is_race(races.touch(site(0, 1, 21), slot, 16, Touch::Read)));
    // Not waiting for the empty barrier, or before all have arrived there.
    let mut races = start();
    assert!(!is_race(fill(&mut races)));
    assert!(!is_race(consume(&mut races, 1)));
    races.end_phase(empty);
    assert!(!is_race(consume(&mut races, 2)));
    assert!(!is_race(races.test_mbarrier(site(0, 0, 12), empty, true)));
    let race = found(fill(&mut races)).expect("a race");
    assert!(
        race.contains("the read at PTX line 21 of block 0, warp 2"),
        "{race}"
    );
}

#[test]
fn mbarriers_are_used_after_their_initialisation_is_known() {
    let mut races = check();
    let barrier = place(16);
    assert!(!is_race(races.init_mbarrier(site(0, 0, 1), barrier)));
    assert!(!is_race(races.arrive_at_mbarrier(
        site(0, 0, 2),
        barrier,
        None
    )));
    assert!(is_race(races.arrive_at_mbarrier(
        site(0, 1, 3),
        barrier,
        None
    )));
    assert!(is_race(races.test_mbarrier(site(1, 0, 3), barrier, false)));
    for (block, warp) in [(0, 0), (0, 1), (1, 0)] {
        races.arrive_at_cluster(block, warp);
    }
    for (block, warp) in [(0, 1), (1, 0)] {
        races.leave_cluster(block, warp);
        assert!(!is_race(races.arrive_at_mbarrier(
            site(block, warp, 4),
            barrier,
            None
        )));
    }
}

#[test]
fn copies_of_threads_are_there_after_the_wait_for_their_group() {
    let mut races = check();
    let copy = |races: &mut Races, offset| {
        races.touch_by_engine(
            site(0, 0, 1),
            Engine::Copies,
            place(offset),
            16,
            Touch::Write,
        )
    };
    assert!(!is_race(copy(&mut races, 0)));
    races.commit(0, 0, Engine::Copies);
    assert!(!is_race(copy(&mut races, 16)));
    races.commit(0, 0, Engine::Copies);
    // The own warp has to wait as well.
    let race = found(races.touch(site(0, 0, 2), place(0), 4, Touch::Read)).expect("a race");
    assert!(race.contains("cp.async"), "{race}");
    races.wait(0, 0, Engine::Copies, 1);
    assert!(!is_race(races.touch(
        site(0, 0, 3),
        place(0),
        4,
        Touch::Read
    )));
    assert!(is_race(races.touch(
        site(0, 0, 4),
        place(16),
        4,
        Touch::Read
    )));
    races.meet(0, 0..2);
    assert!(!is_race(races.touch(
        site(0, 1, 5),
        place(0),
        4,
        Touch::Read
    )));
    assert!(is_race(races.touch(
        site(0, 1, 6),
        place(16),
        4,
        Touch::Read
    )));
    races.wait(0, 0, Engine::Copies, 0);
    assert!(!is_race(races.touch(
        site(0, 0, 7),
        place(16),
        4,
        Touch::Read
    )));
    // A copy into what another warp may still read.
    assert!(is_race(copy(&mut races, 0)));
}

#[test]
fn an_arrival_on_behalf_of_copies_carries_them() {
    let mut races = check();
    let barrier = place(0);
    assert!(!is_race(races.init_mbarrier(site(0, 0, 1), barrier)));
    races.meet(0, 0..2);
    let copy = |races: &mut Races, offset| {
        races.touch_by_engine(
            site(0, 0, 2),
            Engine::Copies,
            place(offset),
            16,
            Touch::Write,
        )
    };
    assert!(!is_race(copy(&mut races, 64)));
    assert!(!is_race(races.arrive_at_mbarrier(
        site(0, 0, 3),
        barrier,
        Some(Engine::Copies)
    )));
    assert!(!is_race(copy(&mut races, 80)));
    races.end_phase(barrier);
    assert!(!is_race(races.test_mbarrier(site(0, 1, 4), barrier, true)));
    assert!(!is_race(races.touch(
        site(0, 1, 5),
        place(64),
        16,
        Touch::Read
    )));
    assert!(is_race(races.touch(
        site(0, 1, 6),
        place(80),
        16,
        Touch::Read
    )));
}

#[test]
fn memory_that_a_product_reads_is_free_after_its_wait() {
    let mut races = check();
    assert!(!is_race(races.touch_by_engine(
        site(0, 0, 1),
        Engine::Products,
        place(0),
        16,
        Touch::Read
    )));
    races.commit(0, 0, Engine::Products);
    let race = found(races.touch(site(0, 0, 2), place(0), 4, Touch::Write)).expect("a race");
    assert!(race.contains("wgmma"), "{race}");
    races.wait(0, 0, Engine::Products, 0);
    assert!(!is_race(races.touch(
        site(0, 0, 3),
        place(0),
        4,
        Touch::Write
    )));
}

#[test]
fn blocks_of_a_cluster_share_what_they_reach() {
    let mut races = check();
    let there = SharedPlace {
        block: 1,
        offset: 32,
    };
    assert!(!is_race(races.touch(site(1, 3, 1), there, 4, Touch::Write)));
    let race = found(races.touch(site(0, 2, 2), there, 4, Touch::Read)).expect("a race");
    assert!(race.contains("of block 1, warp 3"), "{race}");
    races.arrive_at_cluster(1, 3);
    races.leave_cluster(0, 2);
    assert!(!is_race(races.touch(site(0, 2, 3), there, 4, Touch::Read)));
    // The same offset of the own block is other memory.
    assert!(!is_race(races.touch(
        site(0, 1, 4),
        place(32),
        4,
        Touch::Write
    )));
}

#[test]
fn the_next_block_starts_afresh() {
    let mut races = check();
    assert!(!is_race(races.touch(
        site(0, 0, 1),
        place(0),
        4,
        Touch::Write
    )));
    races.end_block(0);
    races.end_block(1);
    races.start_cluster(1);
    let next = SharedPlace {
        block: 2,
        offset: 0,
    };
    assert!(!is_race(races.touch(site(2, 1, 1), next, 4, Touch::Write)));
}

#[test]
fn reads_of_named_kernels_are_not_watched() {
    for (prefixes, is_watched) in [("", true), ("other,prog", false), ("other,", true)] {
        let mut races = Races::new("program", 1, 4).without_reads_of(prefixes);
        races.start_cluster(0);
        assert!(!is_race(races.touch(
            site(0, 0, 1),
            place(0),
            4,
            Touch::Write
        )));
        assert_eq!(
            is_race(races.touch(site(0, 1, 2), place(0), 4, Touch::Read)),
            is_watched
        );
        assert!(is_race(races.touch(
            site(0, 1, 3),
            place(0),
            4,
            Touch::Write
        )));
    }
}
