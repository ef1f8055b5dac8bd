//! EAGLE-3: one decoder layer that predicts, from a feature of one position and the token after it, the token after
//! that; drafted features stand in for the target's, one forward per depth.
//!
//! A context row of position i pairs the feature that `fc` makes of the target's taps at i with the token at i + 1, so
//! the last position waits for its token: as the first row of the next extension, or as the root of a draft, where it
//! is paired with the anchor. Keys and values of a layer need no attention, hence extending computes no more than them.
//! Drafted rows live in the tail of one call and are forgotten; accepted tokens come again with their real features.

mod forward;
mod weights;

use std::convert::Infallible;

use super::beam::{Beam, Merging, RankedRows};
use super::config::Eagle3Config;
use super::context_length::ContextLength;
use super::footprint::DrafterSizes;
use super::proposal::Proposal;
use super::{ContextRows, DraftAnchor, DraftRequest, Drafter, Standing, check_length};
use crate::cache::pages::{KvCache, KvTail};
use crate::device::{Buffer, Device, Graphs, Staged};
use crate::error::{DrafterError, Error, Result};
use crate::kernels::append_kv::AppendKv;
use crate::kernels::bf16_matmul::Epilogue;
use crate::kernels::draft_select::{DraftSelect, DraftSelectArgs, LogitShape};
use crate::kernels::gather_taps::{GatherTaps, GatherTapsArgs};
use crate::kernels::kv_span::PerSpan;
use crate::kernels::paths::{LaunchKey, RowPaths, row_bucket};
use crate::kernels::placed_rows::PlacedRows;
use crate::kernels::tree_attention::{self, KV_BLOCK};
use crate::kernels::{Kernel, check_size};
use crate::model::Lent;
use crate::options::WeightFormat;
use crate::options::speculation::DraftScores;
use crate::weights::WeightSource;
use crate::weights::checkpoint::Verification;
use forward::{Entry, Layer, Pass, Tail, TreeContext};
use weights::Eagle3Weights;

/// Positions per forward when a context grows.
const CHUNK_ROWS: usize = 64;

/// Features kept per slot: of the last verified and of the last scratch position.
const FEATURES_PER_SLOT: usize = 2;

/// A loaded drafter.
pub(super) struct Eagle3 {
    config: Eagle3Config,
    sizes: DrafterSizes,
    taps: Vec<usize>,
    weights: Eagle3Weights,
    inverse_frequencies: Buffer<f32>,
    cache: KvCache,
    slots: Vec<Slot>,
    /// The feature that waits for its token, `[slots, 2, hidden_size]`.
    waiting: Buffer<f32>,
    chunk: Chunk,
    pass: Pass,
    logits: Buffer<f32>,
    tail: Tail,
    token_ids: Buffer<u32>,
    log_probs: Buffer<f32>,
    beam: Beam,
    /// Rows of a growing context.
    entered: PlacedRows,
    /// Rows of the depth being drafted.
    paths: RowPaths,
    /// Rows of the depth before.
    paths_before: RowPaths,
    graphs: Graphs<DepthKey>,
    extensions: Graphs<ExtensionKey>,
}

/// What the launches of an extension follow from.
#[derive(PartialEq, Eq, Hash)]
struct ExtensionKey {
    rows: Option<u64>,
    entry: [Option<u64>; 3],
    entered: ([Option<u64>; 2], usize),
    padded_rows: usize,
    waiting_row: Option<usize>,
}

/// What the launches of one depth follow from.
#[derive(PartialEq, Eq, Hash)]
struct DepthKey {
    paths: LaunchKey,
    lists: [Option<u64>; 4],
    first_tail_row: usize,
    has_parents: bool,
    width: usize,
}

#[derive(Clone, Default)]
struct Slot {
    tables: PerSpan<Vec<u32>>,
    length: ContextLength,
}

impl Slot {
    /// Row of `waiting` that holds the last position's feature.
    fn waiting_row(&self, slot: usize) -> usize {
        let is_scratch = self.length.len() > self.length.verified();
        FEATURES_PER_SLOT * slot + usize::from(is_scratch)
    }
}

/// Activations of a growing context. `B` is a buffer; planning memory puts a number in its place.
struct Chunk<B = Buffer<f32>> {
    taps: B,
    fused: B,
    /// The waiting feature, then the chunk's.
    features: B,
    entry: Entry<B>,
    /// Rows of the pass.
    rows: Staged<u32>,
}

impl<B> Chunk<B> {
    /// What `values` makes of each buffer's values.
    fn with<E>(
        config: &Eagle3Config,
        mut values: impl FnMut(usize) -> Result<B, E>,
    ) -> Result<Self, E> {
        Ok(Self {
            taps: values(CHUNK_ROWS * config.taps_dim())?,
            fused: values(CHUNK_ROWS * config.hidden_size)?,
            features: values((CHUNK_ROWS + 1) * config.hidden_size)?,
            entry: Entry::with(config, |width| values(CHUNK_ROWS * width))?,
            rows: Staged::default(),
        })
    }
}

/// Elements of a drafter's buffers besides pages.
pub(super) struct Lens {
    /// Activations shared by all slots.
    pub(super) scratch: usize,
    /// Activations of one slot.
    pub(super) slot_activations: usize,
    /// Fp32 values of one slot.
    pub(super) slot_values: usize,
    /// 32-bit ids of one slot.
    pub(super) slot_ids: usize,
}

/// Elements for `sizes`.
pub(super) fn lens_of(config: &Eagle3Config, sizes: &DrafterSizes) -> Lens {
    let mut scratch = 0;
    let count = |len| {
        scratch += len;
        Ok::<_, Infallible>(len)
    };
    let Ok(_) = Chunk::with(config, count);
    let mut row_len = 0;
    let count = |width| {
        row_len += width;
        Ok::<_, Infallible>(width)
    };
    let Ok(_) = Pass::with(config, count);
    Lens {
        scratch,
        slot_activations: FEATURES_PER_SLOT * config.hidden_size
            + sizes.width * row_len
            + tail_rows(sizes) * 2 * config.kv_dim(),
        slot_values: sizes.width * (config.draft_vocab_size + sizes.width),
        slot_ids: sizes.width * sizes.width,
    }
}

/// Rows that one request may expand in a draft: its root, then a beam per further depth.
fn tail_rows(sizes: &DrafterSizes) -> usize {
    1 + sizes.num_draft_tokens.saturating_sub(1) * sizes.width
}

impl Eagle3 {
    pub(super) fn load(
        source: WeightSource<'_>,
        format: WeightFormat,
        config: &Eagle3Config,
        taps: Vec<usize>,
        device: &Device,
        sizes: DrafterSizes,
    ) -> Result<Self> {
        let num_rows = sizes.num_slots * sizes.width;
        let num_children = num_rows * sizes.width;
        let num_pages = PerSpan::whole_only(sizes.num_pages);
        let paths = || RowPaths::with_capacity(device, num_rows, num_pages);
        Ok(Self {
            taps,
            weights: Eagle3Weights::load(device, source, format, config, sizes.vocab_size)?,
            inverse_frequencies: device.constants(&config.rope.inverse_frequencies())?,
            cache: KvCache::new(device, config.kv_layout(), num_pages)?,
            slots: vec![Slot::default(); sizes.num_slots],
            waiting: device.try_alloc(sizes.num_slots * FEATURES_PER_SLOT * config.hidden_size)?,
            chunk: Chunk::with(config, |len| device.try_alloc(len))?,
            pass: Pass::with(config, |width| device.try_alloc(num_rows * width))?,
            logits: device.try_alloc(num_rows * config.draft_vocab_size)?,
            tail: Tail::new(
                device,
                sizes.num_slots * tail_rows(&sizes) * config.kv_dim(),
            )?,
            token_ids: device.try_alloc(num_children)?,
            log_probs: device.try_alloc(num_children)?,
            beam: Beam::new(Merging::Never),
            entered: PlacedRows::with_capacity(device, CHUNK_ROWS)?,
            paths: paths()?,
            paths_before: paths()?,
            graphs: Graphs::default(),
            extensions: Graphs::default(),
            config: config.clone(),
            sizes,
        })
    }

    /// One chunk of rows: features of all, keys and values of all but the last and of the position before the first.
    fn extend_chunk(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        rows: &ContextRows<'_>,
        chunk: std::ops::Range<usize>,
    ) -> Result<()> {
        let hidden = self.config.hidden_size;
        let (tap_rows, token_ids) = (&rows.rows[chunk.clone()], &rows.token_ids[chunk]);
        let num_rows = tap_rows.len();
        // A GPU's chunks are padded by their last row, over and over, so that few sequences of launches serve all.
        let padded_rows = match device {
            Device::Host(_) => num_rows,
            Device::Cuda(_) => row_bucket(num_rows).min(CHUNK_ROWS),
        };
        let slot = &mut self.slots[rows.slot];
        // The first position of all has none before it, and its token pairs with nothing.
        let waiting_row = (slot.length.len() > 0).then(|| slot.waiting_row(rows.slot));
        let num_waiting = usize::from(waiting_row.is_some());
        let token_ids = &token_ids[1 - num_waiting..];
        let first_position = slot.length.len() - num_waiting;
        let num_entered = padded_rows + num_waiting - 1;
        let padded = |i: usize| i.min(token_ids.len() - 1);
        let entered_ids: Vec<u32> = (0..num_entered).map(|i| token_ids[padded(i)]).collect();
        let positions: Vec<u32> = (0..num_entered)
            .map(|i| (first_position + padded(i)) as u32)
            .collect();
        let Chunk {
            taps,
            fused,
            features,
            entry,
            rows: staged_rows,
        } = &mut self.chunk;
        let padded = |i: usize| tap_rows[i.min(num_rows - 1)];
        staged_rows.fill(device, (0..padded_rows).map(padded))?;
        entry.look_at(device, &entered_ids, &positions)?;
        self.entered.clear();
        let entered = 0..token_ids.len() as u32;
        self.entered
            .push(rows.slot, first_position, slot.tables.tables(), entered)?;
        self.entered.repeat_last(num_entered);
        self.entered.finish(device)?;
        let key = ExtensionKey {
            rows: staged_rows.cuda_address(),
            entry: entry.lists(),
            entered: self.entered.launch_key(),
            padded_rows,
            waiting_row,
        };
        let layer = Layer {
            device,
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        let embed = self.weights.embed.as_ref().unwrap_or(target.embed());
        let (waiting, cache, placed) = (&self.waiting, &mut self.cache, &self.entered);
        self.extensions.run(device, key, || {
            GatherTaps::run(
                device,
                GatherTapsArgs {
                    taps: rows.taps,
                    rows: &*staged_rows,
                    width: hidden,
                    y: &mut *taps,
                },
            )?;
            let fc = &layer.weights.fc;
            fc.forward(device, &*taps, padded_rows, fused, Epilogue::Store)?;
            if let Some(row) = waiting_row {
                features.copy_range(0, waiting, row * hidden..(row + 1) * hidden)?;
            }
            features.copy_range(num_waiting * hidden, fused, 0..padded_rows * hidden)?;
            if num_entered > 0 {
                layer.enter(embed, features, entry)?;
                let tail = KvTail {
                    layer: 0,
                    k: &entry.k,
                    v: &entry.v,
                };
                cache.append(device, placed, &[tail])?;
            }
            Ok::<_, Error>(())
        })?;
        slot.length.grow(num_rows, rows.standing);
        let row = FEATURES_PER_SLOT * rows.slot + usize::from(rows.standing == Standing::Scratch);
        let last = (num_rows - 1) * hidden..num_rows * hidden;
        self.waiting.copy_range(row * hidden, fused, last)?;
        Ok(())
    }
}

impl Drafter for Eagle3 {
    fn weight_bytes(&self) -> usize {
        self.weights.num_bytes()
    }

    fn verification(&self) -> Verification {
        self.weights.verification
    }

    fn scratch_bytes(&self) -> usize {
        let (config, sizes) = (&self.config, &self.sizes);
        let num_positions = sizes.pages_per_sequence * KV_BLOCK;
        let num_rows = sizes.num_slots * sizes.width;
        tree_attention::scratch_bytes(num_rows, num_positions, config.num_heads, config.head_dim)
    }

    fn taps(&self) -> &[usize] {
        &self.taps
    }

    fn reserve(&mut self, slot: usize, num_tokens: usize) -> bool {
        let tables = &mut self.slots[slot].tables;
        self.cache.reserve(tables, num_tokens)
    }

    fn release(&mut self, slot: usize) {
        let mut slot = std::mem::take(&mut self.slots[slot]);
        self.cache.release(&mut slot.tables);
    }

    fn extend(&mut self, device: &Device, target: Lent<'_>, rows: ContextRows<'_>) -> Result<()> {
        self.slots[rows.slot].length.check_extends(&rows)?;
        check_size(GatherTaps::NAME, "taps", rows.taps.len(), self.taps.len())?;
        check_size(
            AppendKv::NAME,
            "token_ids",
            rows.token_ids.len(),
            rows.rows.len(),
        )?;
        for first in (0..rows.rows.len()).step_by(CHUNK_ROWS) {
            let end = rows.rows.len().min(first + CHUNK_ROWS);
            self.extend_chunk(device, target, &rows, first..end)?;
        }
        Ok(())
    }

    fn rollback(&mut self, slot: usize) {
        self.slots[slot].length.rollback();
    }

    fn propose(
        &mut self,
        device: &Device,
        target: Lent<'_>,
        anchors: &[DraftAnchor],
        wanted: DraftRequest,
        proposals: &mut [Proposal],
    ) -> Result<()> {
        check_length(wanted.num_draft_tokens, &self.sizes)?;
        let width = match wanted.scores {
            DraftScores::Greedy => 1,
            DraftScores::Conditional => wanted
                .width
                .min(self.sizes.width)
                .min(self.config.draft_vocab_size),
            DraftScores::Marginal => {
                return Err(DrafterError::NoScores {
                    policy: "ddtree",
                    method: "eagle3",
                    scores: "position-wise",
                    usable: "\"eagle\" or \"chain\"",
                }
                .into());
            }
        };
        proposals.iter_mut().for_each(Proposal::clear);
        for anchor in anchors {
            self.slots[anchor.slot].length.check_ends_before(anchor)?;
        }
        // Without a position before the anchor there is no feature to draft from.
        let roots = || {
            anchors
                .iter()
                .enumerate()
                .filter(|(_, anchor)| anchor.position > 0)
        };
        self.beam
            .start(roots().map(|(request, anchor)| (request, anchor.token_id)));
        let hidden = self.config.hidden_size;
        for (i, (_, anchor)) in roots().enumerate() {
            let start = self.slots[anchor.slot].waiting_row(anchor.slot) * hidden;
            let feature = start..start + hidden;
            let features = &mut self.pass.features;
            features.copy_range(i * hidden, &self.waiting, feature)?;
        }
        let layer = Layer {
            device,
            config: &self.config,
            weights: &self.weights,
            inverse_frequencies: &self.inverse_frequencies,
        };
        let mut num_tail_rows = 0;
        for depth in 0..wanted.num_draft_tokens {
            let nodes = self.beam.nodes();
            if nodes.is_empty() {
                break;
            }
            std::mem::swap(&mut self.paths, &mut self.paths_before);
            self.paths.clear();
            let mut row = 0;
            for of_request in nodes.chunk_by(|a, b| a.request == b.request) {
                let anchor = &anchors[of_request[0].request];
                let pages = self.slots[anchor.slot].tables.tables();
                let before = &self.paths_before;
                let queries = of_request.iter().map(|node| {
                    let path = match depth {
                        0 => &[],
                        _ => before.path(node.parent_row),
                    };
                    row += 1;
                    (path, (num_tail_rows + row - 1) as u32)
                });
                let committed_len = anchor.position - 1;
                self.paths
                    .push_queries(anchor.slot, committed_len, pages, queries)?;
            }
            self.paths.finish(device)?;
            let token_ids: Vec<u32> = nodes.iter().map(|node| node.token_id).collect();
            let embed = self.weights.embed.as_ref().unwrap_or(target.embed());
            let context = TreeContext {
                paths: &self.paths,
                pages: (self.cache.k(0), self.cache.v(0)),
                first_tail_row: num_tail_rows,
            };
            let parent_rows = nodes.iter().map(|node| node.parent_row as u32);
            let parent_rows = parent_rows.filter(|_| depth > 0);
            let positions = self.paths.positions().values();
            self.pass
                .look_at(device, &token_ids, positions, parent_rows)?;
            let key = DepthKey {
                paths: self.paths.launch_key(),
                lists: self.pass.lists(),
                first_tail_row: num_tail_rows,
                has_parents: depth > 0,
                width,
            };
            let head = &self.weights.head;
            let Self {
                pass,
                tail,
                logits,
                token_ids,
                log_probs,
                graphs,
                ..
            } = self;
            graphs.run(device, key, || {
                if depth > 0 {
                    pass.follow(&layer)?;
                }
                pass.forward(&layer, embed, &context, tail)?;
                head.forward(device, &pass.hidden, nodes.len(), logits)?;
                DraftSelect::run(
                    device,
                    DraftSelectArgs {
                        logits: &*logits,
                        vocab_size: layer.config.draft_vocab_size,
                        num_levels: 1,
                        num_blocks: nodes.len(),
                        top_k: width,
                        shape: LogitShape::PLAIN,
                        selector: None,
                        token_ids: &mut *token_ids,
                        log_probs: &mut *log_probs,
                    },
                )?;
                Ok::<_, Error>(())
            })?;
            num_tail_rows += nodes.len();
            let num_children = nodes.len() * width;
            let (mut token_ids, log_probs) =
                token_ids.read_back_with(num_children, log_probs, num_children)?;
            head.to_target_ids(&mut token_ids);
            let children = RankedRows {
                top_k: width,
                token_ids: &token_ids,
                log_probs: &log_probs,
            };
            self.beam.advance(proposals, &children, width);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
