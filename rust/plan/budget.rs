//! How much of a memory an engine may take, and the pages that fit beside its footprint.

use super::footprint::Footprint;
use crate::error::OptionError;
use crate::kernels::kv_span::PerSpan;
use crate::kernels::tree_attention::KV_BLOCK;

/// Pages that there are numbers for.
const MAX_PAGES: usize = u32::MAX as usize;

/// Bytes that pages are taken from.
struct Left(u64);

impl Left {
    /// As many times `num_bytes` as there are, up to `most`; how many.
    fn take(&mut self, num_bytes: u64, most: usize) -> usize {
        let fitting = self.0.checked_div(num_bytes);
        let count = fitting.map_or(most, |fitting| (most as u64).min(fitting) as usize);
        self.0 -= count as u64 * num_bytes;
        count
    }
}

/// How many pages of windows to make of `all_bytes`, of which the first `most` leave context enough.
///
/// A window for every slot may leave little context beside it, long contexts leave slots without a window, and nobody
/// knows how long requests will be. So two lengths count alike: that of a window, and the geometric mean of it and the
/// longest. Windows are given up while the share of them that is left, of all there could be, is no less than the share
/// of requests of that mean length whose contexts fit.
fn balanced_windows(footprint: &Footprint, all_bytes: u64, most: usize) -> usize {
    let page = footprint.page_bytes();
    let window = footprint.ring_pages.min(footprint.pages_per_sequence);
    let context = window.saturating_mul(footprint.pages_per_sequence).isqrt();
    let context_bytes = page.whole.saturating_mul(context as u64);
    let window_bytes = page.window.saturating_mul(window as u64);
    if context_bytes == 0 || window_bytes == 0 {
        return most;
    }
    let possible = all_bytes / context_bytes.saturating_add(window_bytes);
    let possible = possible.min(footprint.num_slots as u64) as usize;
    if possible == 0 {
        return most;
    }
    let windows_beside = |num_contexts: usize| {
        let window_bytes = all_bytes - num_contexts as u64 * context_bytes;
        (window_bytes / page.window).min(most as u64) as usize
    };
    // The largest number of contexts whose share is not above that of windows; with one, all windows fit.
    let (mut low, mut high) = (1, possible);
    while low < high {
        let middle = low + (high - low).div_ceil(2);
        match middle * most <= windows_beside(middle) * possible {
            true => low = middle,
            false => high = middle - 1,
        }
    }
    let beside_next = match low < possible {
        true => windows_beside(low + 1),
        false => 0,
    };
    match beside_next * possible > low * most {
        true => beside_next,
        false => windows_beside(low),
    }
}

/// Most pages of context that requests come to which share `num_windows` pages of windows.
fn usable_pages(footprint: &Footprint, num_windows: usize) -> usize {
    let longest = footprint.pages_per_sequence;
    let window = footprint.ring_pages.min(longest);
    let num_pages = match window {
        0 => longest.saturating_mul(footprint.num_slots),
        // Whoever has no whole window has no context beyond it.
        _ => (num_windows / window).saturating_mul(longest) + num_windows % window,
    };
    num_pages.min(MAX_PAGES)
}

/// A memory and the share of it that an engine may take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Budget {
    /// The memory's size.
    pub memory_bytes: u64,
    /// The engine's share, above 0 and at most 1.
    pub utilization: f64,
}

impl Budget {
    /// Bytes that the engine may take.
    pub fn bytes(&self) -> u64 {
        (self.memory_bytes as f64 * self.utilization) as u64
    }

    /// Bytes left beside `footprint`, to take pages from; `None` when not even that fits.
    fn left(&self, footprint: &Footprint) -> Option<Left> {
        self.bytes().checked_sub(footprint.fixed_bytes()).map(Left)
    }

    /// Pages that fit beside `footprint`: first those of one request of `max_model_len` tokens, then windows and contexts,
    /// neither so many that the other is lacking (see [`balanced_windows`]). Pages of layers that keep everything are,
    /// where there are no such layers, as many as requests can use.
    pub fn pool(&self, footprint: &Footprint) -> PerSpan<usize> {
        let page = footprint.page_bytes();
        let both = page.whole.saturating_add(page.window);
        let window = footprint.ring_pages.min(footprint.pages_per_sequence);
        let Some(mut left) = self.left(footprint) else {
            return PerSpan::default();
        };
        let Left(all_bytes) = left;
        let first = left.take(both, window);
        if first < window {
            return PerSpan {
                whole: first,
                window: first,
            };
        }
        left.take(page.whole, footprint.pages_per_sequence - window);
        // A window page is of no use without context beside it.
        let most = window + left.take(both, window.saturating_mul(footprint.num_slots - 1));
        let num_windows = balanced_windows(footprint, all_bytes, most);
        let mut left = Left(all_bytes - num_windows as u64 * page.window);
        let usable = match page.whole {
            0 => usable_pages(footprint, num_windows),
            _ => MAX_PAGES,
        };
        PerSpan {
            whole: left.take(page.whole, usable),
            window: num_windows,
        }
    }

    /// Pages, in layers that keep everything, of the longest request that fits beside `footprint`.
    pub fn longest_request(&self, footprint: &Footprint) -> usize {
        let page = footprint.page_bytes();
        let Some(mut left) = self.left(footprint) else {
            return 0;
        };
        let first = left.take(page.whole.saturating_add(page.window), footprint.ring_pages);
        match first == footprint.ring_pages {
            true => first + left.take(page.whole, MAX_PAGES - first),
            false => first,
        }
    }

    /// Requests of `max_model_len` tokens that `pool` serves at once; where it serves every slot, as many as fit if there
    /// were slots enough, unless their pages take nothing.
    pub fn full_requests(&self, footprint: &Footprint, pool: PerSpan<usize>) -> usize {
        let longest = footprint.pages_of(footprint.pages_per_sequence * KV_BLOCK);
        let by_windows = pool.window.checked_div(longest.window);
        let served = (pool.whole / longest.whole).min(by_windows.unwrap_or(usize::MAX));
        match (served < footprint.num_slots, footprint.pool_bytes(longest)) {
            (true, _) | (_, 0) => served,
            (false, request_bytes) => self
                .left(footprint)
                .map_or(0, |mut left| left.take(request_bytes, MAX_PAGES)),
        }
    }

    /// Bytes short of holding `footprint` with a request of `num_tokens`; 0 when it fits.
    pub fn missing_bytes(&self, footprint: &Footprint, num_tokens: usize) -> u64 {
        footprint
            .bytes_with(num_tokens)
            .saturating_sub(self.bytes())
    }

    /// Checks that a request of `num_tokens` fits beside `footprint`.
    ///
    /// # Errors
    /// [`OptionError::Memory`] with what is missing and what to change.
    pub fn require(&self, footprint: &Footprint, num_tokens: usize) -> Result<(), OptionError> {
        match self.missing_bytes(footprint, num_tokens) {
            0 => Ok(()),
            missing_bytes => Err(OptionError::Memory {
                num_tokens,
                needed_bytes: footprint.bytes_with(num_tokens),
                budget_bytes: self.bytes(),
                advice: self.advice(footprint, num_tokens, missing_bytes),
            }),
        }
    }

    /// Changes each of which suffices alone; failing that, all of them together; failing that, none.
    fn advice(&self, footprint: &Footprint, num_tokens: usize, missing_bytes: u64) -> String {
        let mut changes = Vec::new();
        let num_fitting = self.longest_request(footprint) * KV_BLOCK;
        if num_fitting > 0 {
            changes.push(format!("lower max_model_len to {num_fitting} or less"));
        }
        let slot_bytes = footprint.slot_bytes();
        let num_too_many = match slot_bytes {
            0 => u64::MAX,
            _ => missing_bytes.div_ceil(slot_bytes),
        };
        if num_too_many < footprint.num_slots as u64 {
            let num_slots = footprint.num_slots as u64 - num_too_many;
            changes.push(format!("lower max_num_seqs to {num_slots} or less"));
        }
        let needed_share = footprint.bytes_with(num_tokens) as f64 / self.memory_bytes as f64;
        let utilization = (needed_share * 1e3).ceil() / 1e3;
        if utilization <= 1.0 {
            changes.push(format!("raise gpu_memory_utilization to {utilization}"));
        }
        if !changes.is_empty() {
            return changes.join(", or ");
        }
        let other_slots = (footprint.num_slots as u64 - 1).saturating_mul(slot_bytes);
        let least = footprint.bytes_with(1).saturating_sub(other_slots);
        match least <= self.memory_bytes {
            true => "lower max_model_len and max_num_seqs and raise gpu_memory_utilization",
            false => "a larger memory or a smaller model is needed",
        }
        .to_owned()
    }
}

#[cfg(test)]
mod tests;
