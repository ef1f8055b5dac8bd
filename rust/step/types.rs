//! One value per stage: `Batch > Proposals > TokenTrees > Verified > Accepted > Committed`. Each stage consumes the
//! value before it, so that a wrong order does not compile.

use crate::drafter::proposal::Proposal;
use crate::kernels::paths::RowPaths;
use crate::model::decoder::ResidualProbe;
use crate::request::{FinishReason, NonFiniteLogit, ScreenCounts};

use super::tree::TokenTree;

/// What the requests of one step bring to it.
pub struct Batch {
    /// One entry per request that gets rows.
    pub entries: Vec<BatchEntry>,
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

/// The batch with what the drafter proposes for each entry; `None` = nothing to speculate on.
pub struct Proposals {
    pub(super) batch: Batch,
    pub(super) proposals: Vec<Option<Proposal>>,
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
    pub(super) paths: RowPaths,
    /// Greedy choice after each row, where it was needed.
    pub(super) choices: Vec<Option<Choice>>,
    /// How the choices of each entry's rows were found.
    pub(super) screening: Vec<ScreenCounts>,
    pub(super) records: Option<RowRecords>,
}

/// The target's word on what follows a row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The token with the best logit.
    Token(u32),
    /// The best logit is no finite number. It matters only if the row is committed.
    NotFinite(f32),
}

/// Values of recorded rows, until it is known which of them are committed.
pub struct RowRecords {
    pub(super) probe: ResidualProbe,
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
