//! Accept stage: from the root, follow the child that is the target's own choice; cut exactly where plain decoding
//! would have stopped.

use crate::request::{FinishReason, NonFiniteLogit, Request};

use super::tree::TokenTree;
use super::types::{Accepted, AcceptedPath, Choice, Verified, Work};

/// Decides what every entry commits.
pub fn accept(requests: &[Request], verified: Verified) -> Accepted {
    let Verified {
        batch,
        trees,
        rows,
        choices,
        screening,
        records,
    } = verified;
    let accepted = batch
        .entries
        .iter()
        .zip(rows)
        .zip(&trees)
        .map(|((entry, rows), tree)| {
            let request = &requests[entry.index];
            let first_row = rows.start as u32;
            let choices = &choices[rows];
            match &entry.work {
                Work::Prompt { completes, .. } => {
                    accept_prompt(request, choices, first_row, *completes)
                }
                Work::Decode { .. } => accept_tree(request, tree, choices, first_row),
            }
        })
        .collect();
    Accepted {
        batch,
        trees,
        accepted,
        screening,
        records,
    }
}

fn accept_prompt(
    request: &Request,
    choices: &[Option<Choice>],
    first_row: u32,
    completes: bool,
) -> AcceptedPath {
    let mut path = AcceptedPath {
        rows: (first_row..first_row + choices.len() as u32).collect(),
        new_token_ids: Vec::new(),
        num_accepted: 0,
        // A score-only request ends with its prompt.
        finish: (completes && request.is_score()).then_some(FinishReason::Length),
        failure: None,
    };
    match choices.last().copied().flatten() {
        Some(Choice::Token(token)) => {
            path.finish = finish_after(request, token, 1);
            path.new_token_ids.push(token);
        }
        Some(Choice::NotFinite(got)) => path.fail(request.num_prompt_tokens - 1, got),
        None => {}
    }
    path
}

fn accept_tree(
    request: &Request,
    tree: &TokenTree,
    choices: &[Option<Choice>],
    first_row: u32,
) -> AcceptedPath {
    let mut node = 0;
    let mut path = AcceptedPath {
        rows: Vec::new(),
        new_token_ids: Vec::new(),
        num_accepted: 0,
        finish: None,
        failure: None,
    };
    loop {
        let token = match choices[node].expect("every decode row has a choice") {
            Choice::Token(token) => token,
            Choice::NotFinite(got) => {
                path.fail(request.committed_len + path.rows.len(), got);
                return path;
            }
        };
        path.rows.push(first_row + node as u32);
        path.new_token_ids.push(token);
        let child = tree.child(node, token);
        path.num_accepted += usize::from(child.is_some());
        path.finish = finish_after(request, token, path.new_token_ids.len());
        match child {
            Some(child) if path.finish.is_none() => node = child,
            _ => return path,
        }
    }
}

impl AcceptedPath {
    /// Ends the request, and it alone, at a row whose logits decide nothing.
    fn fail(&mut self, position: usize, got: f32) {
        self.finish = Some(FinishReason::Abort);
        self.failure = Some(NonFiniteLogit { position, got });
    }
}

/// Whether the request ends with `token` as its `num_new`-th token of this step.
fn finish_after(request: &Request, token: u32, num_new: usize) -> Option<FinishReason> {
    if request.stop_ids.contains(&token) {
        Some(FinishReason::Stop)
    } else if request.output().len() + num_new >= request.max_new_tokens {
        Some(FinishReason::Length)
    } else {
        None
    }
}
