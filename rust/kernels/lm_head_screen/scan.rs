//! One pass over the INT8 head: sums of every row's codes with every channel's, and from them which channels could hold a
//! row's largest logit.

use rayon::prelude::*;

use super::super::simd::bytes::{self, ByteLanes, ByteTask};
use super::super::simd::{Isa, LANES};
use super::head::{ScreenedHead, TileBounds};
#[cfg(any(test, feature = "python"))]
use super::rows::Interval;
use super::rows::{CodedRow, RowBound};
use crate::device::HostDevice;

/// Below this many byte products (reading the codes counts as three rows) a scan stays on its own thread.
const MIN_PARALLEL_WORK: usize = 1 << 22;
/// Tasks per thread, as in the BF16 matmul.
const TASKS_PER_THREAD: usize = 4;
/// Most tiles of a register block; a task holds a multiple of it.
const MAX_BLOCK_TILES: usize = 8;

/// What becomes of the sums of a tile's channels and a row.
pub(super) trait TileSums {
    /// Takes those of row and tile, each with its index: the sums of its high terms and of its low ones.
    fn take(
        &mut self,
        row: (usize, &CodedRow),
        tile: (usize, &TileBounds),
        high: &[i32; LANES],
        low: &[i32; LANES],
    );
}

/// What is known of a row after some channels.
#[derive(Clone)]
pub(super) struct Candidates {
    threshold: Threshold,
    /// Upper bound and id of every channel that reached the threshold of its time, ids ascending.
    found: Vec<(f64, u32)>,
}

/// The largest lower bounds seen.
#[derive(Clone)]
struct Threshold {
    largest: f64,
    second: f64,
    keeps_runner_up: bool,
}

impl Threshold {
    /// A channel whose upper bound lies below this can be neither the largest nor, where asked for, the second.
    #[inline(always)]
    fn value(&self) -> f64 {
        match self.keeps_runner_up {
            true => self.second,
            false => self.largest,
        }
    }

    /// Takes note of a channel's lower bound.
    fn add(&mut self, lower: f64) {
        if lower > self.largest {
            self.second = self.largest;
            self.largest = lower;
        } else if lower > self.second {
            self.second = lower;
        }
    }
}

impl Candidates {
    fn new(keeps_runner_up: bool) -> Self {
        Self {
            threshold: Threshold {
                largest: f64::NEG_INFINITY,
                second: f64::NEG_INFINITY,
                keeps_runner_up,
            },
            found: Vec::new(),
        }
    }

    /// Adds what is known of later channels.
    fn append(&mut self, later: Self) {
        self.threshold.add(later.threshold.largest);
        self.threshold.add(later.threshold.second);
        self.found.extend(later.found);
    }

    /// Ids that the final threshold leaves, ascending.
    pub(super) fn survivors(self) -> impl Iterator<Item = u32> {
        let threshold = self.threshold.value();
        let kept = self.found.into_iter();
        kept.filter_map(move |(upper, id)| (upper >= threshold).then_some(id))
    }

    /// The largest upper bound and the first id that has it.
    pub(super) fn best(self) -> Option<(f64, u32)> {
        let largest = self.threshold.largest;
        let mut found = self.found.into_iter();
        found.find(|&(upper, _)| upper == largest)
    }

    /// Takes in one tile's sums; `masked` channels are none.
    #[inline(always)]
    fn visit(
        &mut self,
        bound: RowBound,
        masked: u16,
        (tile, bounds): (usize, &TileBounds),
        high: &[i32; LANES],
        low: &[i32; LANES],
    ) {
        // Most tiles hold no candidate, so upper bounds alone are looked at first. One comparison for all lanes and a
        // copied threshold, so that it becomes a vector comparison.
        let threshold = self.threshold.value();
        let mut reaches = false;
        for lane in 0..LANES {
            let upper = bound
                .interval(bounds, lane, (high[lane], low[lane]))
                .upper();
            reaches |= upper >= threshold;
        }
        if reaches {
            let (mut lower, mut upper) = ([0.0; LANES], [0.0; LANES]);
            for lane in 0..LANES {
                let interval = bound.interval(bounds, lane, (high[lane], low[lane]));
                (lower[lane], upper[lane]) = (interval.lower(), interval.upper());
            }
            self.note(tile, masked, &lower, &upper);
        }
    }

    /// Raises the threshold by the tile's unmasked channels, then keeps those that still reach it.
    fn note(&mut self, tile: usize, masked: u16, lower: &[f64; LANES], upper: &[f64; LANES]) {
        let unmasked = |lane: &usize| masked >> lane & 1 == 0;
        for lane in (0..LANES).filter(unmasked) {
            self.threshold.add(lower[lane]);
        }
        let threshold = self.threshold.value();
        for lane in (0..LANES).filter(unmasked) {
            if upper[lane] >= threshold {
                self.found.push((upper[lane], (tile * LANES + lane) as u32));
            }
        }
    }
}

/// Candidates of rows, as tiles come by.
struct Candidacies<'a> {
    /// Of each row, a bit per channel of every tile: masked, or beyond the vocabulary.
    masked: &'a [Vec<u16>],
    candidates: Vec<Candidates>,
}

impl TileSums for Candidacies<'_> {
    #[inline(always)]
    fn take(
        &mut self,
        (row, coded): (usize, &CodedRow),
        tile: (usize, &TileBounds),
        high: &[i32; LANES],
        low: &[i32; LANES],
    ) {
        let masked = self.masked[row][tile.0];
        self.candidates[row].visit(coded.bound(), masked, tile, high, low);
    }
}

/// Tiles that a task takes when `num_rows` rows pass `head` on `device`.
pub(super) fn tiles_per_task(device: &HostDevice, head: &ScreenedHead, num_rows: usize) -> usize {
    let work = (2 * num_rows + 3) * head.out_features() * head.in_features();
    let num_threads = device.num_threads();
    let num_tasks = match num_threads > 1 && work >= MIN_PARALLEL_WORK {
        true => TASKS_PER_THREAD * num_threads,
        false => 1,
    };
    let num_tiles = head.channels().len();
    num_tiles
        .div_ceil(num_tasks)
        .next_multiple_of(MAX_BLOCK_TILES)
}

/// Candidates of every row among all channels but those that are `masked`: of each row, a bit per channel of every tile.
pub(super) fn scan(
    device: &HostDevice,
    isa: Isa,
    head: &ScreenedHead,
    rows: &[CodedRow],
    masked: &[Vec<u16>],
    keeps_runner_up: bool,
) -> Vec<Candidates> {
    let num_tiles = head.channels().len();
    let tiles_per_task = tiles_per_task(device, head, rows.len());
    let run = |first_tile: usize| {
        let task = ScanTask {
            head,
            rows,
            tiles: first_tile..num_tiles.min(first_tile + tiles_per_task),
            sums: Candidacies {
                masked,
                candidates: vec![Candidates::new(keeps_runner_up); rows.len()],
            },
        };
        bytes::dispatch_on(isa, task).candidates
    };
    let firsts = (0..num_tiles).step_by(tiles_per_task).collect::<Vec<_>>();
    let parts: Vec<_> = match firsts.len() {
        1 => firsts.into_iter().map(run).collect(),
        _ => device.install(|| firsts.into_par_iter().with_max_len(1).map(run).collect()),
    };
    let mut whole = vec![Candidates::new(keeps_runner_up); rows.len()];
    for part in parts {
        for (whole, part) in whole.iter_mut().zip(part) {
            whole.append(part);
        }
    }
    whole
}

/// All rows over a run of tiles.
pub(super) struct ScanTask<'a, S> {
    pub(super) head: &'a ScreenedHead,
    pub(super) rows: &'a [CodedRow],
    pub(super) tiles: std::ops::Range<usize>,
    /// Takes the sums, and is what the task gives back.
    pub(super) sums: S,
}

impl<S: TileSums> ByteTask for ScanTask<'_, S> {
    type Output = S;

    #[inline(always)]
    fn run<B: ByteLanes>(mut self) -> S {
        // Register blocks of tiles and rows (each row is two terms) as large as the registers hold.
        match (B::NUM_REGISTERS >= 32, self.rows.len()) {
            (true, 1) => self.blocks::<B, 8, 1, 1>(),
            (true, 2) => self.blocks::<B, 4, 2, 2>(),
            (true, 3..=4) => self.blocks::<B, 2, 4, 4>(),
            (true, _) => self.blocks::<B, 2, 6, 2>(),
            (false, 1) => self.blocks::<B, 1, 1, 1>(),
            (false, _) => self.blocks::<B, 1, 2, 2>(),
        }
        self.sums
    }
}

impl<S: TileSums> ScanTask<'_, S> {
    /// `T` tiles at a time, `R` rows at a time while more than `LAST` are left.
    #[inline(always)]
    fn blocks<B: ByteLanes, const T: usize, const R: usize, const LAST: usize>(&mut self) {
        for first_tile in self.tiles.clone().step_by(T) {
            let mut first_row = 0;
            while first_row < self.rows.len() {
                first_row += match self.rows.len() - first_row > LAST {
                    true => self.block::<B, T, R>(first_tile, first_row),
                    false => self.block::<B, T, LAST>(first_tile, first_row),
                };
            }
        }
    }

    /// A block of tiles and rows; where fewer are left the last one is multiplied again and left unused. Returns `R`.
    #[inline(always)]
    fn block<B: ByteLanes, const T: usize, const R: usize>(
        &mut self,
        first_tile: usize,
        first_row: usize,
    ) -> usize {
        let num_quads = self.head.in_features().div_ceil(4);
        let (last_tile, last_row) = (self.tiles.end - 1, self.rows.len() - 1);
        let mut weights = [&self.head.tile(first_tile)[..0]; T];
        for (t, weights) in weights.iter_mut().enumerate() {
            *weights = &self.head.tile((first_tile + t).min(last_tile))[..num_quads];
        }
        let (mut high, mut low) = ([&[][..]; R], [&[][..]; R]);
        let mut sums = [[(B::start(0), B::start(0)); T]; R];
        for r in 0..R {
            let coded = &self.rows[(first_row + r).min(last_row)];
            (high[r], low[r]) = (&coded.high[..num_quads], &coded.low[..num_quads]);
            sums[r] = [(B::start(coded.high_sum), B::start(coded.low_sum)); T];
        }
        for k in 0..num_quads {
            let mut tiles = [B::load(&weights[0][k]); T];
            for t in 1..T {
                tiles[t] = B::load(&weights[t][k]);
            }
            for r in 0..R {
                for t in 0..T {
                    sums[r][t].0 = sums[r][t].0.add_products(tiles[t], high[r][k]);
                    sums[r][t].1 = sums[r][t].1.add_products(tiles[t], low[r][k]);
                }
            }
        }
        for (row, sums) in (first_row..=last_row).zip(&sums) {
            for (tile, (high, low)) in (first_tile..=last_tile).zip(sums) {
                let bounds = &self.head.channels()[tile];
                let coded = &self.rows[row];
                let (high, low) = (high.sums(), low.sums());
                self.sums.take((row, coded), (tile, bounds), &high, &low);
            }
        }
        R
    }
}

/// The bounds of every channel for one row, as the scan computes them.
#[cfg(any(test, feature = "python"))]
pub(super) struct IntervalsTask<'a> {
    pub(super) head: &'a ScreenedHead,
    pub(super) row: &'a CodedRow,
}

#[cfg(any(test, feature = "python"))]
impl ByteTask for IntervalsTask<'_> {
    type Output = Vec<Interval>;

    #[inline(always)]
    fn run<B: ByteLanes>(self) -> Self::Output {
        let mut intervals = Vec::new();
        for (tile, bounds) in self.head.channels().iter().enumerate() {
            let mut sums = (B::start(self.row.high_sum), B::start(self.row.low_sum));
            for (k, weights) in self.head.tile(tile).iter().enumerate() {
                let weights = B::load(weights);
                sums.0 = sums.0.add_products(weights, self.row.high[k]);
                sums.1 = sums.1.add_products(weights, self.row.low[k]);
            }
            let (high, low) = (sums.0.sums(), sums.1.sums());
            intervals.extend((0..LANES).map(|lane| {
                let sums = (high[lane], low[lane]);
                self.row.bound().interval(bounds, lane, sums)
            }));
        }
        intervals.truncate(self.head.out_features());
        intervals
    }
}
