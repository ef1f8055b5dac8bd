//! First come, first served: waiting requests take slots in order, running ones share each step's rows.

use std::collections::VecDeque;

use crate::request::{DraftOffer, FinishReason, Request, RequestId, State};
use crate::step::types::{Batch, BatchEntry, Work};

use super::rows::{RowBudget, share_rows};

/// Requests that wait and requests that run.
#[derive(Default)]
pub struct Scheduler {
    waiting: VecDeque<Request>,
    running: Vec<Request>,
    /// Index of the running request that goes first in the next step.
    first: usize,
}

impl Scheduler {
    /// Queues a request.
    pub fn submit(&mut self, request: Request) {
        self.waiting.push_back(request);
    }

    /// The running requests; batch entries index this list.
    pub fn running_mut(&mut self) -> &mut [Request] {
        &mut self.running
    }

    /// Whether nothing waits and nothing runs.
    pub fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Admits waiting requests in order while `take_slot` finds room for their cache positions, then gives every
    /// running request its share of `budget`.
    pub fn next_batch(
        &mut self,
        budget: RowBudget,
        mut take_slot: impl FnMut(usize) -> Option<usize>,
    ) -> Batch {
        while let Some(request) = self.waiting.front() {
            let Some(slot) = take_slot(request.num_cache_positions()) else {
                break;
            };
            if let Some(mut request) = self.waiting.pop_front() {
                request.state = State::Running { slot };
                self.running.push(request);
            }
        }
        let (shares, next_first) = share_rows(&self.running, self.first, budget);
        self.first = next_first;
        let entries = shares
            .into_iter()
            .filter_map(|(index, rows)| batch_entry(index, &self.running[index], rows))
            .collect();
        Batch { entries }
    }

    /// Takes ended requests out of the running list, in order.
    pub fn take_finished(&mut self) -> Vec<Request> {
        let mut finished = Vec::new();
        let mut index = 0;
        while index < self.running.len() {
            match self.running[index].state {
                State::Finished(_) => finished.push(self.remove_running(index)),
                State::Waiting | State::Running { .. } => index += 1,
            }
        }
        finished
    }

    /// Takes a running request out without taking the turn of the one that goes first next.
    fn remove_running(&mut self, index: usize) -> Request {
        let request = self.running.remove(index);
        if index < self.first {
            self.first -= 1;
        }
        if self.first == self.running.len() {
            self.first = 0;
        }
        request
    }

    /// Takes a request out, wherever it is, as aborted. Gives its slot when it held one.
    pub fn abort(&mut self, id: RequestId) -> Option<(Request, Option<usize>)> {
        let mut request = if let Some(i) = self.waiting.iter().position(|r| r.id == id) {
            self.waiting.remove(i)?
        } else {
            let i = self.running.iter().position(|r| r.id == id)?;
            self.remove_running(i)
        };
        let slot = match request.state {
            State::Running { slot } => Some(slot),
            _ => None,
        };
        request.state = State::Finished(FinishReason::Abort);
        Some((request, slot))
    }

    /// Ids of all requests that wait or run.
    pub fn ids(&self) -> Vec<RequestId> {
        self.running
            .iter()
            .chain(&self.waiting)
            .map(|r| r.id)
            .collect()
    }
}

fn batch_entry(index: usize, request: &Request, rows: usize) -> Option<BatchEntry> {
    let State::Running { slot } = request.state else {
        return None;
    };
    let committed_len = request.committed_len;
    let work = if request.in_prompt() {
        let end = committed_len + rows;
        Work::Prompt {
            token_ids: request.token_ids[committed_len..end].to_vec(),
            completes: end == request.num_prompt_tokens,
        }
    } else {
        Work::Decode {
            anchor_token: request.token_ids[committed_len],
            max_rows: rows,
            // The last token of a request is always the target's own: a draft for it would be wasted.
            max_draft_tokens: request.num_tokens_left() - 1,
        }
    };
    Some(BatchEntry {
        index,
        slot,
        committed_len,
        work,
        num_q_passes: 0,
        num_marked: 0,
        offer: request.record_rounds.then(DraftOffer::default),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::{RequestDefaults, SamplingParams};

    fn submit(scheduler: &mut Scheduler, id: RequestId) {
        let params = SamplingParams {
            max_tokens: Some(4),
            min_tokens: 0,
            ignore_eos: true,
            stop_token_ids: vec![],
            sampling: None,
        };
        let defaults = RequestDefaults {
            max_model_len: 64,
            ..RequestDefaults::default()
        };
        scheduler.submit(Request::new(id, vec![1, 2, 3], &params, &defaults));
    }

    fn budget(pass_rows: usize, decode_rows: usize) -> RowBudget {
        RowBudget {
            pass_rows,
            chunk_rows: pass_rows,
            decode_rows,
        }
    }

    #[test]
    fn requests_are_admitted_in_order_as_slots_come_free() {
        let mut scheduler = Scheduler::default();
        for id in 0..4 {
            submit(&mut scheduler, id);
        }
        let mut free = vec![1, 0];
        let batch = scheduler.next_batch(budget(64, 8), |_| free.pop());
        assert_eq!(batch.entries.len(), 2);
        assert_eq!(scheduler.ids(), [0, 1, 2, 3]);

        scheduler.running_mut()[0].state = State::Finished(FinishReason::Stop);
        assert_eq!(scheduler.take_finished()[0].id, 0);
        let mut free = vec![0];
        scheduler.next_batch(budget(64, 8), |_| free.pop());
        let running: Vec<_> = scheduler.running_mut().iter().map(|r| r.id).collect();
        assert_eq!(running, [1, 2]);
    }

    #[test]
    fn whoever_was_left_out_goes_first() {
        let mut scheduler = Scheduler::default();
        for id in 0..3 {
            submit(&mut scheduler, id);
        }
        let mut slot = 0..3;
        let indices = |batch: Batch| batch.entries.iter().map(|e| e.index).collect::<Vec<_>>();
        assert_eq!(
            indices(scheduler.next_batch(budget(6, 8), |_| slot.next())),
            [0, 1]
        );
        assert_eq!(
            indices(scheduler.next_batch(budget(6, 8), |_| None)),
            [2, 0]
        );
    }

    /// Four running requests of which the first two had their rows: number 2 goes first.
    fn third_goes_first() -> Scheduler {
        let mut scheduler = Scheduler::default();
        for id in 0..4 {
            submit(&mut scheduler, id);
        }
        let mut slot = 0..4;
        let batch = scheduler.next_batch(budget(6, 8), |_| slot.next());
        assert_eq!(batch.entries.len(), 2);
        scheduler
    }

    fn served_ids(scheduler: &mut Scheduler) -> Vec<RequestId> {
        let batch = scheduler.next_batch(budget(6, 8), |_| None);
        let running = scheduler.running_mut();
        batch.entries.iter().map(|e| running[e.index].id).collect()
    }

    #[test]
    fn a_request_that_leaves_takes_nobodys_turn() {
        let cases: [(&[RequestId], [RequestId; 2]); 7] = [
            (&[], [2, 3]),
            (&[0], [2, 3]),
            (&[1], [2, 3]),
            (&[0, 1], [2, 3]),
            (&[2], [3, 0]),
            (&[3], [2, 0]),
            (&[2, 3], [0, 1]),
        ];
        for (leaving, expected) in cases {
            let mut aborting = third_goes_first();
            for &id in leaving {
                aborting.abort(id).unwrap();
            }
            assert_eq!(served_ids(&mut aborting), expected, "{leaving:?} aborted");

            let mut ending = third_goes_first();
            for request in ending.running_mut() {
                if leaving.contains(&request.id) {
                    request.state = State::Finished(FinishReason::Stop);
                }
            }
            let ended = ending.take_finished().into_iter().map(|r| r.id);
            assert_eq!(ended.collect::<Vec<_>>(), leaving);
            assert_eq!(served_ids(&mut ending), expected, "{leaving:?} ended");
        }
    }

    #[test]
    fn an_aborted_request_leaves_and_names_its_slot() {
        let mut scheduler = Scheduler::default();
        submit(&mut scheduler, 7);
        submit(&mut scheduler, 8);
        let mut free = vec![3];
        scheduler.next_batch(budget(64, 8), |_| free.pop());
        let (request, slot) = scheduler.abort(7).unwrap();
        assert_eq!((request.id, slot), (7, Some(3)));
        assert_eq!(scheduler.abort(8).unwrap().1, None);
        assert!(scheduler.abort(9).is_none() && scheduler.is_idle());
    }
}
