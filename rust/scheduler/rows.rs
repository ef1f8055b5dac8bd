//! The row budget that all running requests share: pure arithmetic.

use crate::kernels::paths::MAX_PATH_ROWS;
use crate::request::Request;

/// Rows that one pass may have.
#[derive(Clone, Copy, Debug)]
pub struct RowBudget {
    /// Of all requests.
    pub pass_rows: usize,
    /// Of the prompt of one, beyond its fair share too.
    pub chunk_rows: usize,
    /// Of a request whose prompt is done.
    pub decode_rows: usize,
}

/// Rows of `request` when all are served alike: `decode_rows` once its prompt is done.
fn fair_rows(request: &Request, decode_rows: usize) -> usize {
    match prompt_rows_left(request) {
        0 => decode_rows,
        left => left.min(MAX_PATH_ROWS),
    }
}

fn prompt_rows_left(request: &Request) -> usize {
    let prompt_len = request.num_prompt_tokens;
    prompt_len.saturating_sub(request.committed_len)
}

/// Shares a pass in the order of `requests`, starting with number `first` and wrapping around. Gives `(index,
/// rows)` per served request and the number that should go first next time. A request is served whole or, when it is
/// the first to be short, with what is left. Rows that nobody else can use go to the rest of prompts, in the same order.
/// What a request gets never changes its tokens, only how many come at once.
pub fn share_rows(
    requests: &[Request],
    first: usize,
    budget: RowBudget,
) -> (Vec<(usize, usize)>, usize) {
    let mut left = budget.pass_rows;
    let mut shares = Vec::with_capacity(requests.len());
    for offset in 0..requests.len() {
        let index = (first + offset) % requests.len();
        if left == 0 {
            return (shares, index);
        }
        let rows = fair_rows(&requests[index], budget.decode_rows).min(left);
        left -= rows;
        shares.push((index, rows));
    }
    for (index, rows) in &mut shares {
        let most = prompt_rows_left(&requests[*index]).min(budget.chunk_rows);
        let more = most.saturating_sub(*rows).min(left);
        *rows += more;
        left -= more;
    }
    (shares, first)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{SamplingParams, State};

    fn requests() -> Vec<Request> {
        [(100, 0), (100, 90), (5, 5), (5, 7)]
            .into_iter()
            .enumerate()
            .map(|(id, (num_prompt_tokens, committed_len))| {
                let params = SamplingParams {
                    max_tokens: Some(10),
                    min_tokens: 0,
                    ignore_eos: true,
                    stop_token_ids: vec![],
                    sampling: None,
                };
                let mut request = Request::new(
                    id as u64,
                    vec![0; num_prompt_tokens],
                    &params,
                    &Default::default(),
                );
                request.committed_len = committed_len;
                request.state = State::Running { slot: id };
                request
            })
            .collect()
    }

    fn budget(pass_rows: usize) -> RowBudget {
        RowBudget {
            pass_rows,
            chunk_rows: 256,
            decode_rows: 32,
        }
    }

    #[test]
    fn everyone_is_served_when_rows_suffice() {
        let (shares, next) = share_rows(&requests(), 0, budget(138));
        assert_eq!(shares, [(0, 64), (1, 10), (2, 32), (3, 32)]);
        assert_eq!(next, 0);
    }

    #[test]
    fn what_is_left_goes_to_prompts() {
        let (shares, next) = share_rows(&requests(), 1, budget(160));
        assert_eq!(shares, [(1, 10), (2, 32), (3, 32), (0, 86)]);
        assert_eq!(next, 1);
        let (shares, _) = share_rows(&requests(), 0, budget(256));
        assert_eq!(shares, [(0, 100), (1, 10), (2, 32), (3, 32)]);
        for (chunk_rows, rows) in [(64, 64), (70, 70), (1, 64)] {
            let budget = RowBudget {
                chunk_rows,
                ..budget(256)
            };
            let (shares, _) = share_rows(&requests(), 0, budget);
            assert_eq!(shares, [(0, rows), (1, 10), (2, 32), (3, 32)]);
        }
    }

    #[test]
    fn a_short_budget_goes_round() {
        let (shares, next) = share_rows(&requests(), 0, budget(80));
        assert_eq!(shares, [(0, 64), (1, 10), (2, 6)]);
        assert_eq!(next, 3);
        let (shares, _) = share_rows(&requests(), next, budget(80));
        assert_eq!(shares, [(3, 32), (0, 48)]);
    }
}
