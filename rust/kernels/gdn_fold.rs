//! Folds one interval of logged updates into a Gated-DeltaNet state.

use super::Kernel;
use super::gdn_wy::{GdnLayerCache, GdnShape};
use crate::device::HostDevice;
use crate::error::KernelError;

/// Arguments of [`GdnFold`].
pub struct GdnFoldArgs<'a> {
    /// Head counts and sizes.
    pub shape: &'a GdnShape,
    /// The layer.
    pub cache: &'a mut GdnLayerCache,
    /// The request's slot.
    pub slot: usize,
    /// Anchor whose state is read; the state of `anchor + F` is written.
    pub anchor: usize,
}

/// The kernel; see the module's head for its contract.
pub struct GdnFold;

impl Kernel for GdnFold {
    const NAME: &'static str = "gdn_fold";
    type Args<'a> = GdnFoldArgs<'a>;

    fn check(_args: &GdnFoldArgs<'_>) -> Result<(), KernelError> {
        Ok(())
    }

    fn host(_device: &HostDevice, _args: GdnFoldArgs<'_>) {
        unimplemented!("lands with the next commit")
    }
}
