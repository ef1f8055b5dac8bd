//! Runs the state machines on a small memory, and holds that no order changes what a correct program sees.

use std::collections::HashMap;

use super::*;

/// Shared memory of two blocks and a global memory whose byte at `a` is `a % 251`.
#[derive(Default)]
struct Bench {
    bytes: HashMap<(u32, u32), u8>,
    barriers: HashMap<(u32, u32), u64>,
    landed: Vec<u64>,
}

impl Landing for Bench {
    fn kernel(&self) -> &str {
        "bench"
    }

    fn copy(&mut self, to: SharedPlace, from: u64, num_bytes: u32) -> Result<(), Fault> {
        self.landed.push(from);
        let bytes: Vec<u8> = (from..from + u64::from(num_bytes))
            .map(|a| (a % 251) as u8)
            .collect();
        self.write(to, &bytes)
    }

    fn write(&mut self, to: SharedPlace, bytes: &[u8]) -> Result<(), Fault> {
        for (at, byte) in bytes.iter().enumerate() {
            self.bytes.insert((to.block, to.offset + at as u32), *byte);
        }
        Ok(())
    }

    fn barrier(&mut self, at: SharedPlace) -> Result<u64, Fault> {
        Ok(self
            .barriers
            .get(&(at.block, at.offset))
            .copied()
            .unwrap_or(0))
    }

    fn set_barrier(&mut self, at: SharedPlace, word: u64) -> Result<(), Fault> {
        self.barriers.insert((at.block, at.offset), word);
        Ok(())
    }
}

const ORIGIN: Origin = Origin {
    line: 17,
    block: 0,
    warp: 2,
    lane: 5,
};
const BARRIER: SharedPlace = SharedPlace {
    block: 1,
    offset: 0,
};

fn place(offset: u32) -> SharedPlace {
    SharedPlace { block: 1, offset }
}

fn flight(offset: u32, cargo: Cargo, num_bytes: u32) -> Flight {
    Flight {
        to: place(offset),
        cargo,
        num_bytes,
        barrier: BARRIER,
        origin: ORIGIN,
    }
}

fn thread_copy(offset: u32, from: u64, num_source_bytes: u32) -> ThreadCopy {
    ThreadCopy {
        to: place(offset),
        from,
        num_bytes: 16,
        num_source_bytes,
        origin: ORIGIN,
    }
}

fn bench(arrivals: u32) -> Bench {
    let word = Mbarrier::new(arrivals).expect("valid").to_word();
    Bench {
        barriers: HashMap::from([((1, 0), word)]),
        ..Bench::default()
    }
}

impl Bench {
    fn is_complete(&self, parity: u32) -> bool {
        Mbarrier::from_word(self.barriers[&(1, 0)])
            .expect("valid")
            .is_complete(parity)
    }

    fn read(&self, offset: u32, num_bytes: u32) -> Vec<Option<u8>> {
        (offset..offset + num_bytes)
            .map(|at| self.bytes.get(&(1, at)).copied())
            .collect()
    }
}

fn global(from: u64, num_bytes: u64) -> Vec<Option<u8>> {
    (from..from + num_bytes)
        .map(|a| Some((a % 251) as u8))
        .collect()
}

fn orders() -> impl Iterator<Item = Order> {
    let random = (0..50).map(|seed| Order::new(Policy::Random, seed));
    [Order::new(Policy::First, 0), Order::new(Policy::Late, 0)]
        .into_iter()
        .chain(random)
}

#[test]
fn a_phase_is_complete_when_and_only_when_all_bytes_are_there() {
    for mut order in orders() {
        let mut memory = bench(1);
        let mut flights = Flights::default();
        update_barrier(&mut memory, BARRIER, |barrier| {
            barrier.arrive_expecting(1024 + 256 + 8)
        })
        .expect("valid");
        let wanted = [
            flight(64, Cargo::Global(4096), 1024),
            flight(2048, Cargo::Global(9000), 256),
            flight(4000, Cargo::Bytes([7; 16]), 8),
        ];
        for flight in wanted {
            flights.issue(flight, &order, &mut memory).expect("valid");
        }
        assert_eq!(
            flights.towards(1).is_some(),
            order.policy() != Policy::First
        );
        assert_eq!(flights.towards(0), None);
        let mut num_landings = 0;
        while !memory.is_complete(0) {
            assert_eq!(flights.land_one(&mut order, &mut memory), Ok(true));
            num_landings += 1;
        }
        assert!(flights.is_empty());
        assert_eq!(flights.land_one(&mut order, &mut memory), Ok(false));
        match order.policy() {
            Policy::First => assert_eq!(num_landings, 0),
            Policy::Late => assert_eq!((num_landings, &memory.landed), (3, &vec![9000, 4096])),
            Policy::Random => assert!(num_landings >= 3),
        }
        assert_eq!(memory.read(64, 1024), global(4096, 1024));
        assert_eq!(memory.read(2048, 256), global(9000, 256));
        assert_eq!(
            memory.read(4000, 9),
            [[Some(7); 8].as_slice(), &[None]].concat()
        );
    }
}

#[test]
fn random_orders_break_bulk_copies() {
    let num_landings = |seed| {
        let mut order = Order::new(Policy::Random, seed);
        let mut memory = bench(1);
        let mut flights = Flights::default();
        let copy = flight(64, Cargo::Global(0), 512);
        flights.issue(copy, &order, &mut memory).expect("valid");
        std::iter::from_fn(|| {
            flights
                .land_one(&mut order, &mut memory)
                .expect("valid")
                .then_some(())
        })
        .count()
    };
    let counts: Vec<usize> = (0..40).map(num_landings).collect();
    assert!(
        counts.contains(&1) && counts.iter().any(|&count| count > 2),
        "{counts:?}"
    );
}

#[test]
fn waiting_for_groups_lands_all_but_the_last_ones() {
    for mut order in orders() {
        let mut memory = bench(1);
        let mut copies = ThreadCopies::default();
        for group in 0..3u32 {
            for i in 0..2 {
                let copy = thread_copy(group * 32 + i * 16, u64::from(group * 100 + i * 16), 16);
                copies.copy(3, copy, &order, &mut memory).expect("valid");
            }
            copies.commit(3);
        }
        // An empty group counts as one.
        copies.commit(3);
        if order.policy() == Policy::Random {
            copies.land_one(&mut order, &mut memory).expect("valid");
        }
        copies.wait(3, 2, &mut memory).expect("valid");
        assert_eq!(memory.read(0, 32), global(0, 32));
        assert_eq!(memory.read(32, 32), global(100, 32));
        if order.policy() == Policy::Late {
            assert_eq!(memory.read(64, 32), vec![None; 32]);
            assert!(!copies.is_empty());
        }
        copies.wait(3, 0, &mut memory).expect("valid");
        assert_eq!(memory.read(64, 32), global(200, 32));
        assert!(copies.is_empty());
    }
}

#[test]
fn groups_of_other_lanes_and_open_ones_stay() {
    let order = Order::new(Policy::Late, 0);
    let mut memory = bench(1);
    let mut copies = ThreadCopies::default();
    copies
        .copy(0, thread_copy(0, 0, 16), &order, &mut memory)
        .expect("valid");
    copies.commit(0);
    copies
        .copy(0, thread_copy(16, 16, 16), &order, &mut memory)
        .expect("valid");
    copies
        .copy(1, thread_copy(32, 32, 16), &order, &mut memory)
        .expect("valid");
    copies.commit(1);
    copies.wait(0, 0, &mut memory).expect("valid");
    assert_eq!(memory.landed, [0]);
}

#[test]
fn bytes_without_a_source_become_zeros() {
    for num_source_bytes in [0, 4, 16] {
        let order = Order::new(Policy::First, 0);
        let mut memory = bench(1);
        let copy = thread_copy(0, 77, num_source_bytes);
        ThreadCopies::default()
            .copy(0, copy, &order, &mut memory)
            .expect("valid");
        let mut expected = global(77, u64::from(num_source_bytes));
        expected.resize(16, Some(0));
        assert_eq!(memory.read(0, 16), expected);
    }
}

#[test]
fn an_arrival_waits_for_the_copies_before_it_only() {
    for mut order in orders() {
        let mut memory = bench(2);
        let mut copies = ThreadCopies::default();
        for lane in 0..2 {
            for i in 0..3u32 {
                let offset = 64 + lane as u32 * 48 + i * 16;
                copies
                    .copy(
                        lane,
                        thread_copy(offset, u64::from(offset), 16),
                        &order,
                        &mut memory,
                    )
                    .expect("valid");
            }
            copies
                .arrive(lane, BARRIER, ORIGIN, &mut memory)
                .expect("valid");
        }
        copies
            .copy(0, thread_copy(512, 0, 16), &order, &mut memory)
            .expect("valid");
        while !memory.is_complete(0) {
            assert_eq!(copies.land_one(&mut order, &mut memory), Ok(true));
        }
        assert_eq!(memory.read(64, 96), global(64, 96));
    }
}

#[test]
fn a_landing_that_fails_names_its_instruction() {
    let mut order = Order::new(Policy::Late, 0);
    let mut memory = Bench::default();
    let mut flights = Flights::default();
    flights
        .issue(flight(64, Cargo::Global(0), 16), &order, &mut memory)
        .expect("only queued");
    let fault = flights
        .land_one(&mut order, &mut memory)
        .expect_err("nobody initialised the barrier");
    let Fault::BarrierMisuse {
        place: Some(place), ..
    } = fault
    else {
        panic!("{fault}")
    };
    assert_eq!(
        (place.kernel.as_str(), place.line, place.warp, place.lane),
        ("bench", 17, 2, Some(5))
    );
}
