//! Tree growth: time of 64 drafted nodes from 16 positions of 16 candidates, on one core, by policy; the goal is 20 us.
//! Run with `cargo bench --bench trees`. It stops when growing allocates once its memory has been used.

use std::alloc::{GlobalAlloc, Layout, System};
use std::hint::black_box;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use specpilot_rs::drafter::proposal::Proposal;
use specpilot_rs::options::speculation::{DraftScores, TreePlan, TreePolicy, VerifyCosts};
use specpilot_rs::step::grow::{GrowthLimits, TreeGrower};
use specpilot_rs::step::tree::TokenTree;

const NUM_LEVELS: usize = 16;
const NUM_CANDIDATES: usize = 16;
const LIMITS: GrowthLimits = GrowthLimits {
    num_rows_above: 0,
    max_rows: 65,
    max_depth: NUM_LEVELS,
};

/// The system's allocator, counting.
struct Counting;

static NUM_ALLOCATIONS: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        NUM_ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller's promises are the system allocator's conditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Fills `proposal` with a draft's candidates: like a drafter's, most of the weight on few of them.
fn draft(proposal: &mut Proposal, seed: u32, scores: &mut Vec<f32>) {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    proposal.clear();
    for level in 0..NUM_LEVELS {
        let num_parents = if level == 0 { 1 } else { NUM_CANDIDATES };
        scores.clear();
        for _ in 0..num_parents {
            let first = scores.len();
            scores.extend((0..NUM_CANDIDATES).map(|_| 8.0 * next()));
            let sum: f32 = scores[first..].iter().map(|score| score.exp()).sum();
            scores[first..]
                .iter_mut()
                .for_each(|score| *score -= sum.ln());
        }
        let tokens: [u32; NUM_CANDIDATES] = std::array::from_fn(|slot| slot as u32);
        proposal.push_level(&tokens, scores, num_parents);
    }
}

fn plan(policy: TreePolicy, verify_costs: Option<VerifyCosts>) -> TreePlan {
    TreePlan {
        policy,
        tree_nodes: LIMITS.max_rows,
        num_draft_tokens: NUM_LEVELS,
        scores: DraftScores::Conditional,
        width: 4,
        min_confidence: 0.0,
        verify_costs,
    }
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("grow_tree/64_nodes_from_16x16");
    let costs = VerifyCosts::new((0..65).map(|row| 1.0 + 0.01 * f64::from(row)).collect());
    let costs = costs.expect("positive costs");
    let mut cases: Vec<(String, TreePlan)> = TreePolicy::ALL
        .map(|policy| (policy.name().to_owned(), plan(policy, None)))
        .into();
    cases.push((
        "conditional_by_cost".to_owned(),
        plan(TreePolicy::Conditional, Some(costs)),
    ));
    let (mut proposals, mut scores) = (vec![Proposal::default(); 64], Vec::new());
    for (seed, proposal) in proposals.iter_mut().enumerate() {
        draft(proposal, seed as u32, &mut scores);
    }
    let (mut grower, mut tree) = (TreeGrower::default(), TokenTree::default());
    for (name, plan) in cases {
        let mut grow = |proposal: &Proposal| {
            grower.grow(&plan, 7, proposal, LIMITS, &mut tree);
            black_box(tree.num_rows());
        };
        proposals.iter().for_each(&mut grow);
        let before = NUM_ALLOCATIONS.load(Ordering::Relaxed);
        proposals.iter().for_each(&mut grow);
        let num_allocations = NUM_ALLOCATIONS.load(Ordering::Relaxed) - before;
        assert_eq!(num_allocations, 0, "{name}: growing again needs no memory");
        let mut next = proposals.iter().cycle();
        group.bench_function(&name, |bencher| {
            bencher.iter(|| next.next().map(&mut grow));
        });
    }
    let mut proposal = proposals[0].clone();
    let before = NUM_ALLOCATIONS.load(Ordering::Relaxed);
    draft(&mut proposal, 1, &mut scores);
    let num_allocations = NUM_ALLOCATIONS.load(Ordering::Relaxed) - before;
    assert_eq!(
        num_allocations, 0,
        "filling a proposal again needs no memory"
    );
    group.finish();
}

criterion_group! {
    name = trees;
    config = Criterion::default()
        .sample_size(20)
        .warm_up_time(Duration::from_millis(200))
        .measurement_time(Duration::from_millis(800))
        .without_plots();
    targets = bench
}
criterion_main!(trees);
