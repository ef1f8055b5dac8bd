//! The decode step: draft, tree, Q pass, verify, accept, commit.

pub mod accept;
mod choose;
pub mod commit;
pub mod decode_step;
pub mod draft;
pub mod forest;
pub mod grow;
pub mod q_pass;
pub mod rehearsal;
pub mod stage_times;
pub mod tree;
pub mod types;
pub mod verify;
