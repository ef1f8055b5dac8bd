//! What calls return, by the numbers of the real driver.

use std::ffi::{CStr, c_char};

use super::{Outcome, answer};

/// A `CUresult`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(transparent)]
pub(super) struct Status(u32);

macro_rules! statuses {
    ($($name:ident = $code:literal, $text:literal;)*) => {
        impl Status {
            $(#[doc = $text] pub(super) const $name: Self = Self($code);)*
        }

        fn text(code: u32) -> Option<&'static CStr> {
            const TEXTS: &[(u32, &str)] = &[$(($code, concat!($text, "\0"))),*];
            let (_, text) = TEXTS.iter().find(|(of, _)| *of == code)?;
            CStr::from_bytes_with_nul(text.as_bytes()).ok()
        }
    };
}

statuses! {
    SUCCESS = 0, "no error";
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "the driver is not initialised";
    NO_DEVICE = 100, "no GPU is visible";
    INVALID_DEVICE = 101, "no such device";
    INVALID_CONTEXT = 201, "no such context";
    INVALID_PTX = 218, "the PTX emulator does not run this text, see standard error";
    INVALID_HANDLE = 400, "no such object";
    NOT_FOUND = 500, "no such name";
    ILLEGAL_ADDRESS = 700, "an access out of bounds, see standard error";
    LAUNCH_OUT_OF_RESOURCES = 701, "too many threads or too much shared memory for a block";
    LAUNCH_TIMEOUT = 702, "a kernel does not end, see standard error";
    MISALIGNED_ADDRESS = 716, "a misaligned access, see standard error";
    LAUNCH_FAILED = 719, "a kernel failed, see standard error";
    NOT_SUPPORTED = 801, "not emulated, see standard error";
    STREAM_CAPTURE_UNSUPPORTED = 900, "this cannot be captured";
    STREAM_CAPTURE_INVALIDATED = 901, "the capture was spoilt by an earlier call";
    STREAM_CAPTURE_UNMATCHED = 903, "no capture was begun";
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuGetErrorString(code: u32, place: *mut *const c_char) -> Status {
    let outcome: Outcome = match text(code) {
        // SAFETY: the caller's promise.
        Some(text) => unsafe { answer(place, text.as_ptr()) },
        None => Err(Status::INVALID_VALUE),
    };
    outcome.err().unwrap_or(Status::SUCCESS)
}
