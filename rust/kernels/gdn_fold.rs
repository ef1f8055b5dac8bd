//! Folds one interval of logged updates into a Gated-DeltaNet state: `S <- e^g S + k d^T`, position by position.
//!
//! Reads the state of `anchor` and the log of positions `anchor..anchor + F`, writes the state of `anchor + F` into
//! the next ring entry and leaves the old one. Every element takes its positions in order with two roundings each (the
//! decay, then one fused multiply-add). A state depends on the committed tokens alone: not on when it was folded, nor
//! on how the tokens came to be committed.

use std::ops::Range;

use super::gdn_wy::{
    FOLD_INTERVAL, GdnLayerCache, GdnShape, STATE_RING, SlotLog, check_cache, check_shape,
};
use super::launcher::Launcher;
use super::simd::{self, LANES, Lanes, Task};
use super::{Kernel, check_size, for_each_task};
use crate::device::HostDevice;
use crate::device::cuda::{CudaDevice, Shape};
use crate::error::KernelError;

/// Arguments of [`GdnFold`].
pub struct GdnFoldArgs<'a> {
    /// Head counts and sizes.
    pub shape: &'a GdnShape,
    /// The layer.
    pub cache: &'a mut GdnLayerCache,
    /// The request's slot.
    pub slot: usize,
    /// Anchor whose state is read; the state of `anchor + F` is written.
    pub anchor: usize,
}

/// The kernel; see the module's head for its contract.
pub struct GdnFold;

impl Kernel for GdnFold {
    const NAME: &'static str = "gdn_fold";
    type Args<'a> = GdnFoldArgs<'a>;

    fn check(args: &GdnFoldArgs<'_>) -> Result<(), KernelError> {
        check_shape(Self::NAME, args.shape)?;
        check_cache(Self::NAME, args.shape, args.cache, args.slot + 1)?;
        let aligned = args.anchor.next_multiple_of(FOLD_INTERVAL);
        if args.anchor != aligned {
            return Err(KernelError::Size {
                kernel: Self::NAME,
                argument: "anchor",
                expected: aligned,
                got: args.anchor,
            });
        }
        Ok(())
    }

    fn host(device: &HostDevice, args: GdnFoldArgs<'_>) {
        let (shape, end) = (args.shape, args.anchor + FOLD_INTERVAL);
        let GdnLayerCache {
            states,
            log_k,
            log_d,
            log_g,
            ..
        } = args.cache;
        let entry = |anchor: usize| {
            let ring = args.slot * STATE_RING + anchor / FOLD_INTERVAL % STATE_RING;
            ring * shape.state_len()..(ring + 1) * shape.state_len()
        };
        let states = states.host_mut();
        states.copy_within(entry(args.anchor), entry(end).start);
        let log = SlotLog::new(shape, (log_k, log_d, log_g), args.slot);
        let tasks = fold_heads(shape, log, args.anchor..end, &mut states[entry(end)]).collect();
        let num_fma = 2 * FOLD_INTERVAL * shape.state_len();
        for_each_task(device, num_fma, tasks, simd::dispatch);
    }

    fn cuda(device: &CudaDevice, args: GdnFoldArgs<'_>) -> Result<(), KernelError> {
        let launcher = Launcher::of::<Self>(device);
        let (shape, cache) = (args.shape, args.cache);
        let value_dim = shape.value_dim;
        check_size(
            Self::NAME,
            "value_dim",
            value_dim,
            value_dim.next_multiple_of(4),
        )?;
        let params = GdnFoldParams {
            states: launcher.buffer("cache.states", &cache.states)?,
            log_k: launcher.buffer("cache.log_k", &cache.log_k)?,
            log_d: launcher.buffer("cache.log_d", &cache.log_d)?,
            log_g: launcher.buffer("cache.log_g", &cache.log_g)?,
            num_key_heads: shape.num_key_heads as u32,
            num_value_heads: shape.num_value_heads as u32,
            key_dim: shape.key_dim as u32,
            value_dim: shape.value_dim as u32,
            slot: args.slot as u32,
            anchor: args.anchor as u32,
        };
        let num_blocks = shape.num_value_heads * shape.key_dim.div_ceil(BLOCK_ROWS);
        let blocks = Shape::of_blocks(num_blocks, BLOCK_THREADS);
        // SAFETY: `params` mirrors the kernel's; `check` saw that the cache has the slot.
        unsafe { launcher.run(Self::NAME, blocks, &params) }
    }
}

const BLOCK_THREADS: usize = 128;
/// Rows of a state that one block folds.
const BLOCK_ROWS: usize = 16;

/// `GdnFoldParams` of `gdn_fold.cu`.
#[repr(C)]
#[derive(Clone, Copy)]
struct GdnFoldParams {
    states: u64,
    log_k: u64,
    log_d: u64,
    log_g: u64,
    num_key_heads: u32,
    num_value_heads: u32,
    key_dim: u32,
    value_dim: u32,
    slot: u32,
    anchor: u32,
}

/// One task per value head that folds the log of `positions` into `state`, `[Hv, Dk, Dv]`, in place.
pub(crate) fn fold_heads<'a>(
    shape: &'a GdnShape,
    log: SlotLog<'a>,
    positions: Range<usize>,
    state: &'a mut [f32],
) -> impl Iterator<Item = FoldHead<'a>> {
    state
        .chunks_exact_mut(shape.key_dim * shape.value_dim)
        .enumerate()
        .map(move |(head, state)| FoldHead {
            shape,
            log,
            positions: positions.clone(),
            head,
            state,
        })
}

/// Folds positions into the state of one value head.
pub(crate) struct FoldHead<'a> {
    shape: &'a GdnShape,
    log: SlotLog<'a>,
    positions: Range<usize>,
    head: usize,
    state: &'a mut [f32],
}

impl Task for FoldHead<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self) {
        let (shape, log, head) = (self.shape, self.log, self.head);
        let key_head = head / (shape.num_value_heads / shape.num_key_heads);
        let mut decays: Vec<f32> = self
            .positions
            .clone()
            .map(|position| log.g(shape, position, head))
            .collect();
        for decays in decays.chunks_mut(LANES) {
            L::load_partial(decays).exp().store_partial(decays);
        }
        let entries = || self.positions.clone().zip(&decays);
        // State rows outside, positions inside: a row stays in registers while all its positions pass.
        for (i, state) in self.state.chunks_exact_mut(shape.value_dim).enumerate() {
            const N: usize = 8;
            let mut wide = state.chunks_exact_mut(N * LANES);
            for (block, state) in (&mut wide).enumerate() {
                let mut sums: [L; N] = std::array::from_fn(|n| L::load(&state[n * LANES..]));
                for (position, &decay) in entries() {
                    let k = L::splat(log.k(shape, position, key_head)[i]);
                    let d = &log.d(shape, position, head)[block * N * LANES..][..N * LANES];
                    for (n, sum) in sums.iter_mut().enumerate() {
                        *sum = k.mul_add(L::load(&d[n * LANES..]), sum.mul(L::splat(decay)));
                    }
                }
                for (n, sum) in sums.into_iter().enumerate() {
                    sum.store(&mut state[n * LANES..]);
                }
            }
            let state = wide.into_remainder();
            let from = shape.value_dim - state.len();
            for (position, &decay) in entries() {
                let k = L::splat(log.k(shape, position, key_head)[i]);
                let d = &log.d(shape, position, head)[from..];
                simd::map2::<L>(d, state, |d, s| k.mul_add(d, s.mul(L::splat(decay))));
            }
        }
    }
}
