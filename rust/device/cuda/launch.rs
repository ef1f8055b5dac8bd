//! Launching a kernel with what the plain launch call cannot say: clusters, and overlap with the kernel before.

use std::ffi::c_void;

use cudarc::driver::sys::{
    self, CUlaunchAttribute, CUlaunchAttributeID as AttributeId, CUlaunchConfig,
};
use cudarc::driver::{CudaFunction, result};

use super::{CudaDevice, Limits, driver};
use crate::error::DeviceError;

/// Threads of a block of those that take values in turn; `BLOCK_THREADS` of `gate.cu`.
const VALUE_THREADS: usize = 256;

/// How many threads run, and in what groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Blocks.
    pub num_blocks: u32,
    /// Threads of a block.
    pub block_threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// Blocks of a cluster; 1 for none.
    pub cluster_blocks: u32,
}

impl Shape {
    /// Blocks on their own, without dynamic shared memory.
    pub fn of_blocks(num_blocks: usize, block_threads: usize) -> Self {
        Self {
            num_blocks: num_blocks as u32,
            block_threads: block_threads as u32,
            shared_bytes: 0,
            cluster_blocks: 1,
        }
    }

    /// For kernels whose threads take values in turn: enough to fill any GPU, and no more.
    pub fn of_values(num_values: usize) -> Self {
        const MAX_BLOCKS: usize = 2048;
        Self::of_blocks(
            num_values.div_ceil(VALUE_THREADS).min(MAX_BLOCKS),
            VALUE_THREADS,
        )
    }

    /// Likewise, but a block for each multiprocessor at most where a thread then has only some values. Such blocks all find
    /// room beside those of a matmul of few rows (`wgmma_matmul.cuh`), so that the matmul behind them starts as soon as the one
    /// before leaves.
    pub fn of_few_values(num_values: usize, limits: Limits) -> Self {
        // Quads that a thread of `gate.cu` has on their way at a time.
        const MAX_TURNS: usize = 5;
        let num_blocks = num_values.div_ceil(VALUE_THREADS);
        if num_blocks > MAX_TURNS * limits.num_multiprocessors {
            return Self::of_values(num_values);
        }
        Self::of_blocks(num_blocks.min(limits.num_multiprocessors), VALUE_THREADS)
    }
}

/// A kernel with its launch attributes.
pub struct Launch<'a> {
    function: &'a CudaFunction,
    shape: Shape,
    overlaps: bool,
}

impl<'a> Launch<'a> {
    /// A launch of `function`; with `overlaps` it may start while its predecessor still runs, so it must wait for
    /// predecessors itself before it reads what they write (`wait_for_predecessors` in `async_copy.cuh`).
    pub fn new(function: &'a CudaFunction, shape: Shape, overlaps: bool) -> Self {
        Self {
            function,
            shape,
            overlaps,
        }
    }

    /// The attributes, and how many of them count.
    fn attributes(&self) -> ([CUlaunchAttribute; 2], u32) {
        let attribute = |id| CUlaunchAttribute {
            id,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { pad: [0; 64] },
        };
        let ignored = AttributeId::CU_LAUNCH_ATTRIBUTE_IGNORE;
        let mut attributes = [attribute(ignored), attribute(ignored)];
        let mut num_attributes = 0;
        if self.shape.cluster_blocks > 1 {
            attributes[0] = attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION);
            attributes[0].value.clusterDim = sys::CUlaunchAttributeValue_union__bindgen_ty_1 {
                x: self.shape.cluster_blocks,
                y: 1,
                z: 1,
            };
            num_attributes = 1;
        }
        if self.overlaps {
            let overlap = &mut attributes[num_attributes as usize];
            *overlap =
                attribute(AttributeId::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION);
            overlap.value.programmaticStreamSerializationAllowed = 1;
            num_attributes += 1;
        }
        (attributes, num_attributes)
    }

    fn config(
        &self,
        (attributes, num_attributes): &mut ([CUlaunchAttribute; 2], u32),
        stream: sys::CUstream,
    ) -> CUlaunchConfig {
        CUlaunchConfig {
            gridDimX: self.shape.num_blocks,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: self.shape.block_threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: self.shape.shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: *num_attributes,
        }
    }

    /// Number of clusters that the GPU holds at a time.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub fn max_clusters(&self, device: &CudaDevice) -> Result<usize, DeviceError> {
        device
            .kernels
            .max_clusters(self.function, self.shape, || self.count_clusters(device))
    }

    fn count_clusters(&self, device: &CudaDevice) -> Result<usize, DeviceError> {
        let mut attributes = self.attributes();
        let config = self.config(&mut attributes, device.stream().cu_stream());
        let mut num_clusters = 0;
        // SAFETY: function, configuration and the place for the answer are valid during the call.
        unsafe {
            sys::cuOccupancyMaxActiveClusters(
                &mut num_clusters,
                self.function.cu_function(),
                &config,
            )
        }
        .result()
        .map_err(driver("counting clusters"))?;
        Ok(usize::try_from(num_clusters).unwrap_or(0))
    }

    /// Launches with one argument, a struct that the kernel takes by value.
    ///
    /// # Safety
    /// `argument` must be laid out as the kernel's parameter, and what it points to must be valid for what the kernel
    /// reads and writes until the stream has run it.
    ///
    /// # Errors
    /// [`DeviceError::Driver`].
    pub unsafe fn run<T: Copy>(
        &self,
        device: &CudaDevice,
        argument: &T,
    ) -> Result<(), DeviceError> {
        device.send_lists()?;
        device.activity().note(|counts| counts.num_launches += 1);
        let mut attributes = self.attributes();
        let stream = device.stream();
        let config = self.config(&mut attributes, stream.cu_stream());
        let mut pointers = [std::ptr::from_ref(argument).cast_mut().cast::<c_void>()];
        stream
            .context()
            .bind_to_thread()
            .map_err(driver("entering the GPU's context"))?;
        // SAFETY: configuration and pointers are valid during the call, which copies the argument; the rest is the
        // caller's promise.
        unsafe {
            sys::cuLaunchKernelEx(
                &config,
                self.function.cu_function(),
                pointers.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
        .result()
        .map_err(|error: result::DriverError| driver("launching a kernel")(error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_values_take_a_block_a_multiprocessor_and_many_as_many_as_ever() {
        let limits = Limits {
            num_multiprocessors: 132,
            block_shared_bytes: 232_448,
            has_clusters: true,
        };
        let turn = 132 * VALUE_THREADS;
        for (num_values, num_blocks) in [
            (0, 0),
            (1, 1),
            (VALUE_THREADS + 1, 2),
            (turn, 132),
            (turn + 1, 132),
            (5 * turn, 132),
            (5 * turn + 1, 5 * 132 + 1),
            (1 << 30, 2048),
        ] {
            let shape = Shape::of_few_values(num_values, limits);
            assert_eq!(shape.num_blocks, num_blocks, "{num_values}");
            assert_eq!(shape.block_threads, VALUE_THREADS as u32);
        }
    }
}
