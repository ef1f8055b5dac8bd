//! What single instructions compute: pure functions on registers, without any knowledge of PTX text or schedules.
//!
//! A register of a warp is a [`Lanes`]: one 32-bit value a lane. [`mma`] and [`wgmma`] multiply fragments, [`load`]
//! distributes matrices, [`convert`], [`float`] and [`bits`] hold the arithmetic that Rust has no operator for.
//! Results never depend on the host: the wide variants that [`dispatch`] picks compute the same bits.

pub mod bits;
pub mod convert;
mod dispatch;
pub mod float;
pub mod load;
pub mod mma;
mod products;
pub mod wgmma;

/// Lanes of a warp.
pub const WARP_LANES: usize = 32;

/// A 32-bit register of all lanes of a warp.
pub type Lanes = [u32; WARP_LANES];
