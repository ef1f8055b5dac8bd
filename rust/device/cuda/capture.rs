//! Launches captured in a CUDA graph.

use cudarc::driver::CudaGraph;
use cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};

use super::{CudaDevice, driver};
use crate::error::DeviceError;

/// Launches that the driver replays in one call.
pub struct CapturedLaunches(CudaGraph);

// SAFETY: a graph may be used by one thread at a time, whichever it is; it is reached through `&mut` owners only, and
// `replay` through `&self` of a value that is not `Sync`.
unsafe impl Send for CapturedLaunches {}

impl CapturedLaunches {
    /// Captures what `say` launches, without running it; `None` if the driver cannot make a graph of it.
    ///
    /// # Errors
    /// Those of `say`.
    pub fn capture<E: From<DeviceError>>(
        device: &CudaDevice,
        say: impl FnOnce() -> Result<(), E>,
    ) -> Result<Option<Self>, E> {
        device.send_lists()?;
        device.activity().note(|counts| counts.num_captures += 1);
        let stream = device.stream();
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream
            .begin_capture(mode)
            .map_err(driver("beginning a capture"))?;
        let said = say();
        // Also after an error: the stream must leave its capture.
        let captured = stream.end_capture(CUgraphInstantiate_flags(0));
        said?;
        Ok(captured.ok().flatten().map(Self))
    }

    /// Runs the launches on `device`, which captured them.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn replay(&self, device: &CudaDevice) -> Result<(), DeviceError> {
        device.send_lists()?;
        device.activity().note(|counts| counts.num_replays += 1);
        self.0
            .launch()
            .map_err(driver("replaying captured launches"))
    }
}
