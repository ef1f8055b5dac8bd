//! What kernels refuse: sizes, places and numbers that their contracts exclude.

use super::DeviceError;

/// Errors of kernels: of their checks, or of the device they run on.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// The device failed.
    #[error("{kernel}: {source}")]
    Device {
        /// Kernel stem.
        kernel: &'static str,
        /// What happened.
        source: DeviceError,
    },
    /// A kernel does not run on CUDA.
    #[error("{kernel}: has no CUDA implementation; use device \"cpu\"")]
    NoCuda {
        /// Kernel stem.
        kernel: &'static str,
    },
    /// An argument lies on another device than the kernel runs on.
    #[error("{kernel}: `{argument}` must be on {expected}")]
    WrongDevice {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Where it must be.
        expected: &'static str,
    },
    /// A size asks for more shared memory than a block of the GPU may take.
    #[error("{kernel}: `{argument}` needs {got} bytes of shared memory, the GPU has {expected}")]
    SharedMemory {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Bytes there.
        expected: usize,
        /// Bytes needed.
        got: usize,
    },
    /// A buffer holds fewer elements than its shape needs.
    #[error("{kernel}: `{argument}` needs at least {expected} elements, got {got}")]
    BufferTooShort {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Elements needed.
        expected: usize,
        /// Elements there.
        got: usize,
    },
    /// A size differs from the one required, or is zero.
    #[error("{kernel}: `{argument}` must be {expected}, got {got}")]
    Size {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Size needed.
        expected: usize,
        /// Size there.
        got: usize,
    },
    /// An index lies outside its table.
    #[error("{kernel}: `{argument}` must be below {bound}, got {got}")]
    OutOfRange {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// Exclusive bound.
        bound: usize,
        /// Index there.
        got: usize,
    },
    /// A number lies outside its range.
    #[error("{kernel}: `{argument}` must be {expected}, got {got}")]
    Number {
        /// Kernel stem.
        kernel: &'static str,
        /// Argument name.
        argument: &'static str,
        /// What is allowed.
        expected: &'static str,
        /// Number there.
        got: f64,
    },
    /// An exact product with weights of which only the Q view is held.
    #[error("{kernel}: the weights should hold every bit, got their Q view alone")]
    QViewOnly {
        /// Kernel name.
        kernel: &'static str,
    },
    /// A row's parent does not come before it.
    #[error("row {row} of a segment has parent {parent}: parents must come first")]
    ParentOrder {
        /// The child.
        row: usize,
        /// Its parent.
        parent: usize,
    },
    /// Rows branch where a kernel serves chains alone.
    #[error("{kernel}: each row must follow the one before it in its segment, row {row} does not")]
    NotAChain {
        /// Kernel stem.
        kernel: &'static str,
        /// The first row that branches off.
        row: usize,
    },
    /// A path of uncommitted rows is longer than the engine's constant.
    #[error("a path of uncommitted rows may hold {expected} rows, got {got}")]
    PathTooLong {
        /// Largest length.
        expected: usize,
        /// Length there.
        got: usize,
    },
}
