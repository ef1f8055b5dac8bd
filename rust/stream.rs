//! What readers of an engine are told after each step.

use crate::request::{FinishReason, RequestId};

/// News of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StepEvent {
    /// The request.
    pub request_id: RequestId,
    /// Tokens committed by this step, in order.
    pub new_token_ids: Vec<u32>,
    /// Prompt tokens committed so far.
    pub num_prompt_tokens_done: usize,
    /// Set when the request ended with these tokens.
    pub finish_reason: Option<FinishReason>,
}
