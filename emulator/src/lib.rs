//! A CUDA driver without a GPU: runs the PTX that this repository's kernels compile to on one CPU core.
//!
//! # What it is for
//! Tests. Every access is checked against the allocations, every asynchronous copy may land as late as the program
//! allows ([`order`]), a grid that cannot go on is a fault that names each waiting warp ([`fault`]). It is no backend:
//! it covers the instructions that our kernels use, refuses all others when a module is loaded, and is slow.
//!
//! # Map
//! [`driver`] (the C functions of `libcuda.so.1`) > [`grid`] (blocks, clusters, who runs next) > `block` > `warp`
//! (one instruction stream over 32 lanes) > [`matrix`], [`mbarrier`], [`async_ops`] (what single instructions mean) and
//! [`memory`]. [`ptx`] turns text into the decoded instructions that `warp` runs. `races` is told of every access to
//! shared memory where a launch is checked for them.

mod access;
mod address;
mod alu;
pub mod async_ops;
mod block;
pub mod cluster_barrier;
pub mod driver;
mod exchange;
mod execute;
pub mod fault;
pub mod grid;
mod group_matrix;
mod in_flight;
mod machine;
pub mod matrix;
pub mod mbarrier;
pub mod memory;
pub mod order;
mod pointers;
pub mod ptx;
mod race_cells;
mod races;
mod warp;
mod watch;
