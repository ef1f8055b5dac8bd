//! What the engine remembers of committed tokens: pages of keys and values, recurrent states with their logs.

pub mod gdn_state;
pub mod pages;
pub mod slots;
