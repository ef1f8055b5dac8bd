//! Variables of a module in global memory: tables that the compiler makes, and what a source declares.

use std::cell::UnsafeCell;

use crate::memory::Extent;

/// The memory of a module's variables, which all its kernels share.
#[derive(Debug, Default)]
pub struct Globals {
    variables: Vec<(Box<[UnsafeCell<u64>]>, u64)>,
}

// SAFETY: kernels run one at a time, and only they touch the contents, by address.
unsafe impl Send for Globals {}
// SAFETY: as above.
unsafe impl Sync for Globals {}

impl Globals {
    /// Adds a variable that holds `bytes` and returns its address, a multiple of 8 or of more by chance.
    pub fn add(&mut self, bytes: &[u8]) -> u64 {
        let words = bytes.chunks(8).map(|chunk| {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            UnsafeCell::new(u64::from_ne_bytes(word))
        });
        let block: Box<[UnsafeCell<u64>]> = words.collect();
        let address = block.as_ptr() as u64;
        self.variables.push((block, bytes.len() as u64));
        address
    }

    /// The variable that `address` lies in.
    pub fn extent(&self, address: u64) -> Option<Extent> {
        self.variables
            .iter()
            .map(|(block, num_bytes)| Extent {
                start: block.as_ptr() as u64,
                end: block.as_ptr() as u64 + num_bytes,
            })
            .find(|extent| (extent.start..extent.end).contains(&address))
    }
}
