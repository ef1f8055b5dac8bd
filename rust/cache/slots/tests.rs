//! What other tests do to the caches of slots.

use super::*;

impl SequenceCaches {
    /// As [`KvCache::poison_unseen`], for slots and the numbers of their committed tokens.
    pub(crate) fn poison_unseen(&mut self, windows: &[Option<usize>], slots: &[(usize, usize)]) {
        let tables = self.page_tables.clone();
        let held = slots.iter().map(|&(slot, committed_len)| {
            let tables = tables[slot].as_ref().expect("the slot is taken");
            (tables.tables(), committed_len)
        });
        self.kv.poison_unseen(windows, &held.collect::<Vec<_>>());
    }
}
