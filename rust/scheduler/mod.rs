//! Which requests run, and how many rows each gets in the next step.

pub mod queue;
pub mod rows;
