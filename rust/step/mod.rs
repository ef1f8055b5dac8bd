//! The stages of a decode step.

pub mod tree;
