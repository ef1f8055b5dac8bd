//! One value per stage: `Batch > Stems > Proposals > TokenTrees > Verified > Accepted > Committed`, where a Q pass leads
//! from `TokenTrees` back to `Stems`. Each stage consumes the value before it, so that a wrong order does not compile.

use std::ops::Range;

use crate::model::decoder::ResidualProbe;
use crate::request::{DraftOffer, FinishReason, NonFiniteLogit, ScreenCounts};

use super::tree::TokenTree;

/// What the requests of one step bring to it.
pub struct Batch {
    /// One entry per request that gets rows.
    pub entries: Vec<BatchEntry>,
}

impl Batch {
    /// Whether any of its rows are of prompts.
    pub fn has_prompts(&self) -> bool {
        let is_prompt = |entry: &BatchEntry| matches!(entry.work, Work::Prompt { .. });
        self.entries.iter().any(is_prompt)
    }
}

/// One request's share of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchEntry {
    /// Index in the scheduler's running list.
    pub index: usize,
    /// Cache slot.
    pub slot: usize,
    /// Tokens in the caches; position of the entry's first row.
    pub committed_len: usize,
    /// Prompt rows or a decode tree.
    pub work: Work,
    /// Q passes that looked at the entry in this step.
    pub num_q_passes: usize,
    /// Tokens of the path that the last of them marked.
    pub num_marked: usize,
    /// What the last draft held, for callers who asked to see drafts; `None` = nobody did.
    pub offer: Option<DraftOffer>,
}

/// What an entry's rows are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Work {
    /// The next prompt tokens: a chain whose every node is accepted.
    Prompt {
        /// The tokens.
        token_ids: Vec<u32>,
        /// Whether they end the prompt.
        completes: bool,
    },
    /// A tree under the anchor token.
    Decode {
        /// The last committed token.
        anchor_token: u32,
        /// Most rows, root included.
        max_rows: usize,
        /// Longest useful path below the root.
        max_draft_tokens: usize,
    },
}

/// The batch with the rows that every entry verifies in any case, as a chain: a prompt chunk, or the anchor token and
/// what a Q pass marked. A draft follows the last row.
pub struct Stems {
    pub(super) batch: Batch,
    pub(super) stems: Vec<TokenTree>,
    /// Whether anything can be gained by a draft.
    pub(super) is_open: Vec<bool>,
}

/// The stems with the place of each entry's proposal in the workspace; `None` = nothing to speculate on.
pub struct Proposals {
    pub(super) batch: Batch,
    pub(super) stems: Vec<TokenTree>,
    pub(super) places: Vec<Option<usize>>,
}

/// The batch with one tree per entry; a prompt chunk is a chain.
pub struct TokenTrees {
    pub(super) batch: Batch,
    pub(super) trees: Vec<TokenTree>,
}

/// The target's word on every row.
pub struct Verified {
    pub(super) batch: Batch,
    pub(super) trees: Vec<TokenTree>,
    /// Rows of each entry in the pass.
    pub(super) rows: Vec<Range<usize>>,
    /// Choice after each row, where it was needed.
    pub(super) choices: Vec<Option<Choice>>,
    /// How the choices of each entry's rows were found.
    pub(super) screening: Vec<ScreenCounts>,
    pub(super) records: Option<RowRecords>,
}

/// The target's word on what follows a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The token with the best logit, or the one drawn.
    Token(u32),
    /// The best logit is no finite number. It matters only if the row is committed.
    NotFinite(f32),
}

/// Values of recorded rows, until it is known which of them are committed.
pub struct RowRecords {
    pub(super) probe: ResidualProbe,
    /// Logits `[rows, V]` of those rows that have a place in `logit_rows`.
    pub(super) logits: Vec<f32>,
    /// Index of each row among the rows whose logits were computed.
    pub(super) logit_rows: Vec<Option<usize>>,
}

/// The path that each entry commits.
pub struct Accepted {
    pub(super) batch: Batch,
    pub(super) trees: Vec<TokenTree>,
    pub(super) accepted: Vec<AcceptedPath>,
    pub(super) screening: Vec<ScreenCounts>,
    pub(super) records: Option<RowRecords>,
}

/// What one entry commits: rows to the caches, tokens to its reader.
#[derive(Clone, Debug, PartialEq)]
pub struct AcceptedPath {
    /// Packed rows from the root down, cut where the request ends.
    pub rows: Vec<u32>,
    /// Tokens to emit.
    pub new_token_ids: Vec<u32>,
    /// Drafted tokens among them.
    pub num_accepted: usize,
    /// Set when the request ends here.
    pub finish: Option<FinishReason>,
    /// Set when it ends because it cannot go on.
    pub failure: Option<NonFiniteLogit>,
}

/// What a step did, in batch order.
pub struct Committed {
    /// One per batch entry.
    pub entries: Vec<CommittedEntry>,
}

/// What a step did for one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommittedEntry {
    /// Index in the scheduler's running list.
    pub index: usize,
    /// Tokens emitted.
    pub new_token_ids: Vec<u32>,
    /// Set when the request ended.
    pub finish: Option<FinishReason>,
}
