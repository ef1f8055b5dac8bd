//! Q pass: a forward through the 8-bit view of the weights marks a path in every tree; a second draft continues it.
//!
//! In: trees. Out: stems, each the anchor token, the nodes that the view's own choices follow, and the token that
//! it says comes next. Nothing is committed and no cache changes: keys, values and log entries of these rows are
//! forgotten, and the drafter's context takes their taps as scratch rows that a rollback drops. So a wrong mark costs
//! rows of the exact pass, never a token.

use crate::drafter::{ContextRows, Standing};
use crate::error::Result;
use crate::kernels::lm_head_screen::HeadScores;
use crate::kernels::w12_matmul::WeightView;
use crate::options::speculation::HeadPrecision;
use crate::request::Request;

use super::choose::{ChosenRows, HeadRow, HeadRows};
use super::decode_step::ModelPair;
use super::stage_times::Stage;
use super::tree::TokenTree;
use super::types::{BatchEntry, Choice, Stems, TokenTrees, Work};
use super::verify;

/// Marks the path of every tree that has branches; others stay as they are. `head` gives the greedy choices.
///
/// # Errors
/// Whatever a kernel or the drafter refuses.
pub fn mark(
    pair: &mut ModelPair,
    requests: &[Request],
    head: HeadPrecision,
    trees: TokenTrees,
) -> Result<Stems> {
    let TokenTrees {
        mut batch,
        mut trees,
    } = trees;
    let mut is_open = vec![false; trees.len()];
    let looked_at: Vec<usize> = (0..trees.len())
        .filter(|&i| {
            trees[i].num_rows() > 1 && matches!(batch.entries[i].work, Work::Decode { .. })
        })
        .collect();
    if looked_at.is_empty() {
        return Ok(Stems {
            batch,
            stems: trees,
            is_open,
        });
    }
    let scores = match head {
        HeadPrecision::Exact => HeadScores::Logits,
        HeadPrecision::Int8 => HeadScores::Estimates,
    };
    let rows = looked_at.iter().map(|&i| (&batch.entries[i], &trees[i]));
    verify::forward(pair, WeightView::Q, rows, None)?;
    let ModelPair {
        device,
        target,
        drafter,
        paths,
        clock,
        ..
    } = pair;
    clock.lap(device, Stage::QForward)?;
    let mut wanted = HeadRows::default();
    for (segment, &i) in paths.segments().iter().zip(&looked_at) {
        let request = &requests[batch.entries[i].index];
        for row in segment.rows.clone() {
            wanted.push(HeadRow {
                row,
                position: paths.position(row),
                request,
                entry: i,
                decides: true,
                is_recorded: false,
            });
        }
    }
    let num_entries = batch.entries.len();
    let ChosenRows { choices, .. } =
        wanted.choose(device, target, paths.num_rows(), num_entries, scores)?;
    clock.lap(device, Stage::QHead)?;
    for (segment, &i) in paths.segments().iter().zip(&looked_at) {
        let entry = &mut batch.entries[i];
        let (tree, request) = (&mut trees[i], &requests[entry.index]);
        let choices = &choices[segment.rows.clone()];
        let Marked {
            rows,
            token_ids,
            is_open: open,
        } = walk(entry, tree, choices, request);
        entry.num_q_passes += 1;
        entry.num_marked = token_ids.len() - 1;
        tree.set_chain(&token_ids);
        is_open[i] = open;
        if let (Some(drafter), true) = (&mut *drafter, open) {
            drafter.rollback(entry.slot);
            let rows: Vec<u32> = rows
                .iter()
                .map(|row| (segment.rows.start + row) as u32)
                .collect();
            let context = ContextRows {
                slot: entry.slot,
                first_position: entry.committed_len,
                taps: target.taps(),
                rows: &rows,
                token_ids: &token_ids[..rows.len()],
                standing: Standing::Scratch,
            };
            drafter.extend(device, target.lent(), context)?;
        }
    }
    clock.lap(device, Stage::Mark)?;
    Ok(Stems {
        batch,
        stems: trees,
        is_open,
    })
}

/// A path through a tree.
#[derive(Debug, PartialEq, Eq)]
struct Marked {
    /// Its rows in the tree, root first.
    rows: Vec<usize>,
    /// Their tokens, and the one that follows the last if there is one.
    token_ids: Vec<u32>,
    /// Whether a draft after that may gain anything.
    is_open: bool,
}

/// Follows the choice after each row of `tree` as far as there is one, and as rows, request and stop tokens allow.
fn walk(
    entry: &BatchEntry,
    tree: &TokenTree,
    choices: &[Option<Choice>],
    request: &Request,
) -> Marked {
    let Work::Decode {
        max_rows,
        max_draft_tokens,
        ..
    } = entry.work
    else {
        unreachable!("prompts have no branches")
    };
    let most_tokens = max_rows.min(max_draft_tokens + 1);
    let (mut rows, mut token_ids) = (vec![0], vec![tree.token_ids[0]]);
    let mut node = 0;
    loop {
        let Some(Choice::Token(token)) = choices[node] else {
            // The exact pass will say whether the request can go on here.
            return Marked {
                rows,
                token_ids,
                is_open: false,
            };
        };
        token_ids.push(token);
        let has_room = token_ids.len() < most_tokens && !request.stop_ids.contains(&token);
        match tree.child(node, token) {
            Some(child) if has_room => {
                node = child;
                rows.push(child);
            }
            _ => {
                return Marked {
                    rows,
                    token_ids,
                    is_open: has_room,
                };
            }
        }
    }
}
