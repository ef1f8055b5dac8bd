//! How much of a memory an engine may take, and the pages that fit beside its footprint.

use super::footprint::Footprint;
use crate::error::OptionError;
use crate::kernels::tree_attention::KV_BLOCK;

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

    /// Pages that fit beside `footprint`. When pages take nothing, as many as there are numbers for.
    pub fn num_pages(&self, footprint: &Footprint) -> usize {
        let left = self.bytes().saturating_sub(footprint.fixed_bytes());
        match footprint.page_bytes() {
            0 => u32::MAX as usize,
            page_bytes => (left / page_bytes).min(u64::from(u32::MAX)) as usize,
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
        let num_fitting = self.num_pages(footprint) * KV_BLOCK;
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
