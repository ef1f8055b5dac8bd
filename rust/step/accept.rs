//! Accept stage: from the root, follow the child that is the target's own choice; cut exactly where plain decoding
//! would have stopped.

use crate::request::{FinishReason, Request};

use super::tree::TokenTree;
use super::types::{Accepted, AcceptedPath, Verified, Work};

/// Decides what every entry commits.
pub fn accept(requests: &[Request], verified: Verified) -> Accepted {
    let Verified {
        batch,
        trees,
        paths,
        predicted,
        screening,
        records,
    } = verified;
    let accepted = batch
        .entries
        .iter()
        .zip(paths.segments())
        .zip(&trees)
        .map(|((entry, segment), tree)| {
            let request = &requests[entry.index];
            let predicted = &predicted[segment.rows.clone()];
            let first_row = segment.rows.start as u32;
            match &entry.work {
                Work::Prompt { completes, .. } => {
                    accept_prompt(request, predicted, first_row, *completes)
                }
                Work::Decode { .. } => accept_tree(request, tree, predicted, first_row),
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
    predicted: &[Option<u32>],
    first_row: u32,
    completes: bool,
) -> AcceptedPath {
    let rows = (first_row..first_row + predicted.len() as u32).collect();
    let new_token_ids: Vec<u32> = predicted.last().copied().flatten().into_iter().collect();
    let finish = match new_token_ids.first() {
        Some(&token) => finish_after(request, token, 1),
        // A score-only request ends with its prompt.
        None => (completes && request.is_score()).then_some(FinishReason::Length),
    };
    AcceptedPath {
        rows,
        new_token_ids,
        num_accepted: 0,
        finish,
    }
}

fn accept_tree(
    request: &Request,
    tree: &TokenTree,
    predicted: &[Option<u32>],
    first_row: u32,
) -> AcceptedPath {
    let mut node = 0;
    let mut path = AcceptedPath {
        rows: Vec::new(),
        new_token_ids: Vec::new(),
        num_accepted: 0,
        finish: None,
    };
    loop {
        let token = predicted[node].expect("every decode row has a choice");
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
