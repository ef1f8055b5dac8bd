//! Lossless speculative decoding: a runtime that emits the target model's own tokens, greedy or sampled, several
//! per forward.
//!
//! # Map
//! A request's way: [`request`] > [`scheduler`] (queue, rows) > [`step`] (draft > tree > verify > accept > commit) >
//! [`stream`]. `step` stands on [`drafter`] (what to propose) and [`model`] (the one decoder), these on [`weights`]
//! (files, matrices) and [`cache`] (KV pages, recurrent states), these on [`kernels`], these on [`device`].
//! [`planted`] makes deployments without files, to measure them; [`engine`] owns everything; [`plan`] resolves
//! [`options`] against model and machine; [`convert`] rewrites a checkpoint in a smaller format; `python` is the edge.
//! Imports point down only. Nothing below `python` knows Python, nothing below `kernels` knows models.
//!
//! # The contract
//! Speculation never changes a token. Every kernel computes a row from that row's own token path alone, in one order of
//! operations for every number of rows, committed or not; so plain decoding, trees, prompts and any batch agree to the
//! last bit, and acceptance only ever keeps the target's own choices.
//!
//! # Words
//! *Anchor token*: the last committed token, whose hidden state does not exist yet; root of the tree. *Row*: one token
//! position in one forward. *Node*: a drafted token; `tree_nodes` counts rows, root included. *Tap*: the residual stream
//! after a layer, before the final norm. *Slot*: the cache memory of one running request. *Pass*: one forward.
//!
//! # Unsafe
//! Only in [`device`] (raw buffers), `kernels::simd` (vector intrinsics) and `weights::checkpoint` (the file map).
#![deny(unsafe_code)]

pub mod cache;
pub mod convert;
#[allow(unsafe_code, reason = "raw buffers")]
pub mod device;
pub mod drafter;
pub mod engine;
pub mod error;
#[allow(unsafe_code, reason = "vector intrinsics in `simd`")]
pub mod kernels;
pub mod model;
pub mod options;
pub mod plan;
pub mod planted;
#[cfg(feature = "python")]
mod python;
pub mod request;
pub mod scheduler;
pub mod step;
pub mod stream;
pub mod weights;
