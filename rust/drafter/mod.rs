//! Drafters.

pub mod proposal;
