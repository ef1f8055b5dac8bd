//! The decode step: draft, tree, verify, accept, commit.

pub mod accept;
pub mod commit;
pub mod decode_step;
pub mod draft;
pub mod forest;
pub mod grow;
pub mod tree;
pub mod types;
pub mod verify;
