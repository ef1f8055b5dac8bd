//! Lossless speculative decoding: a runtime that emits the target model's greedy tokens, several per forward.
#![deny(unsafe_code)]

pub mod cache;
#[allow(unsafe_code, reason = "raw buffers")]
pub mod device;
pub mod drafter;
pub mod error;
#[allow(unsafe_code, reason = "vector intrinsics in `simd`")]
pub mod kernels;
pub mod model;
#[cfg(feature = "python")]
mod python;
pub mod step;
pub mod weights;
