//! Streams, what is captured of them, and events.
//!
//! All streams share the device's queue; so whoever waits for one waits for all, and an event holds nothing.

use std::ffi::{c_int, c_uint};

use super::registry::Handle;
use super::work::Operation;
use super::{Driver, Outcome, Status, answer, refuse, work_call};

/// Streams do not wait for the null stream, which does not exist here.
const NON_BLOCKING: c_uint = 1;
/// Capture modes.
const CAPTURE_MODES: std::ops::Range<c_int> = 0..3;
/// Event flags: to wait without spinning, not to take the time.
const EVENT_FLAGS: std::ops::Range<c_uint> = 0..4;

/// A stream: what is recorded of it while it is captured.
#[derive(Default)]
pub(super) struct Stream {
    capture: Option<Capture>,
}

#[derive(Default)]
struct Capture {
    operations: Vec<Operation>,
    is_spoilt: bool,
}

impl Driver {
    /// Gives work to a stream, which records it if it is captured.
    pub(super) fn give(&mut self, stream: Handle, operation: Operation) -> Outcome {
        match &mut self.streams.get(stream)?.capture {
            Some(capture) => {
                capture.operations.push(operation);
                Ok(())
            }
            None => self.work.give(operation),
        }
    }

    /// Refuses what cannot be captured, and spoils a capture that it is tried in.
    pub(super) fn check_not_captured(&mut self, stream: Handle, what: &str) -> Outcome {
        match &mut self.streams.get(stream)?.capture {
            Some(capture) => {
                capture.is_spoilt = true;
                let why = format!("{what} in a stream that is captured");
                Err(refuse(Status::STREAM_CAPTURE_UNSUPPORTED, why))
            }
            None => Ok(()),
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> Status {
    work_call(|driver| {
        if flags != NON_BLOCKING {
            let why = format!("a stream with flags {flags}");
            return Err(refuse(Status::NOT_SUPPORTED, why));
        }
        // SAFETY: the caller's promise.
        unsafe { answer(stream, driver.streams.add(Stream::default())) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamDestroy_v2(stream: Handle) -> Status {
    work_call(|driver| driver.streams.remove(stream).map(|_| ()))
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamSynchronize(stream: Handle) -> Status {
    work_call(|driver| {
        driver.check_not_captured(stream, "waiting")?;
        driver.work.finish()
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) -> Status {
    work_call(|driver| {
        driver.streams.get(stream)?;
        driver.events.get(event)?;
        match flags {
            0 => Ok(()),
            _ => Err(Status::INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) -> Status {
    work_call(|driver| {
        driver.check_not_captured(stream, "a capture")?;
        if !CAPTURE_MODES.contains(&mode) {
            return Err(Status::INVALID_VALUE);
        }
        driver.streams.get(stream)?.capture = Some(Capture::default());
        Ok(())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> Status {
    work_call(|driver| {
        let capture = driver.streams.get(stream)?.capture.take();
        let capture = capture.ok_or(Status::STREAM_CAPTURE_UNMATCHED)?;
        let (made, outcome) = match capture.is_spoilt {
            true => (
                std::ptr::null_mut(),
                Err(Status::STREAM_CAPTURE_INVALIDATED),
            ),
            false => (driver.graphs.add(capture.operations.into()), Ok(())),
        };
        // SAFETY: the caller's promise.
        unsafe { answer(graph, made) }?;
        outcome
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuEventCreate(event: *mut Handle, flags: c_uint) -> Status {
    work_call(|driver| {
        if !EVENT_FLAGS.contains(&flags) {
            return Err(Status::INVALID_VALUE);
        }
        // SAFETY: the caller's promise.
        unsafe { answer(event, driver.events.add(())) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventDestroy_v2(event: Handle) -> Status {
    work_call(|driver| driver.events.remove(event))
}

#[unsafe(no_mangle)]
extern "C" fn cuEventRecord(event: Handle, stream: Handle) -> Status {
    work_call(|driver| {
        driver.events.get(event)?;
        driver.check_not_captured(stream, "recording an event")
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuEventSynchronize(event: Handle) -> Status {
    work_call(|driver| {
        driver.events.get(event)?;
        driver.work.finish()
    })
}
