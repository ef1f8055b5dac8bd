//! cuBLASLt, whose sums depend on the number of rows: the matmuls of `kernels="stock"` and the baseline of benches.
//!
//! A product of a shape is described once and runs the fastest of what the library's heuristic proposes, measured the
//! first time with weights that are not in the L2 cache. Products never allocate after that, and their workspace is
//! given, so they may be captured.

use std::collections::HashMap;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex, PoisonError};

use cudarc::cublaslt::result::{self, CublasError};
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t, cudaDataType_t,
};
use cudarc::driver::sys::CUevent_flags;
use cudarc::driver::{CudaSlice, DevicePtr};

use super::{CudaDevice, driver};
use crate::error::DeviceError;

/// More than any L2 cache of the GPUs served with tensor cores of this kind: clearing it empties the cache.
const WORKSPACE_BYTES: usize = 128 << 20;
const NUM_CANDIDATES: usize = 8;
/// Timings of a candidate, of which the least counts.
const NUM_TIMINGS: usize = 4;

/// What a product multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LtValues {
    /// BF16 numbers.
    Bf16,
    /// E4M3 numbers, without scales; from compute capability 8.9 on.
    E4m3,
}

/// `y = x wᵀ`: `w` `[out_features, in_features]` and `x` `[num_rows, in_features]`, sums in fp32, all row-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LtShape {
    /// Channels of the result.
    pub out_features: usize,
    /// Length of a row of activations.
    pub in_features: usize,
    /// Rows of activations.
    pub num_rows: usize,
    /// What weights and activations are.
    pub values: LtValues,
    /// Whether the result is BF16 and not fp32.
    pub rounds: bool,
    /// Whether sums are added to what is there.
    pub adds_to_output: bool,
}

/// Addresses of a product's matrices on the GPU.
#[derive(Clone, Copy, Debug)]
pub struct LtOperands {
    /// Weights.
    pub weights: u64,
    /// Activations.
    pub x: u64,
    /// Result.
    pub y: u64,
}

/// The library's handle, its workspace, and the products described so far.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: CudaSlice<u8>,
    products: Mutex<HashMap<LtShape, Arc<TunedProduct>>>,
}

// SAFETY: a handle may be used by any thread, one at a time or not, as the library says of its handles; what hangs on
// it is reached through the lock.
unsafe impl Send for CublasLt {}
// SAFETY: as above; the workspace is used by the device's one stream in order.
unsafe impl Sync for CublasLt {}

impl CublasLt {
    /// A handle on the device's GPU.
    ///
    /// # Errors
    /// [`DeviceError::NoCublasLt`] where the library is missing, [`DeviceError::CublasLt`],
    /// [`DeviceError::OutOfMemory`].
    pub(super) fn new(device: &CudaDevice) -> Result<Self, DeviceError> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return Err(DeviceError::NoCublasLt);
        }
        device.bind()?;
        Ok(Self {
            handle: result::create_handle().map_err(cublaslt("creating a handle"))?,
            workspace: device.alloc::<u8>(WORKSPACE_BYTES)?,
            products: Mutex::default(),
        })
    }

    /// Multiplies by the fastest candidate.
    ///
    /// # Safety
    /// The operands must lie on `device` and be as long as `shape` says.
    ///
    /// # Errors
    /// [`DeviceError::CublasLt`] when no candidate serves the shape; [`DeviceError::Driver`].
    pub unsafe fn multiply(
        &self,
        device: &CudaDevice,
        shape: LtShape,
        operands: LtOperands,
    ) -> Result<(), DeviceError> {
        let known = self.products().get(&shape).cloned();
        let product = match known {
            Some(product) => product,
            None => {
                // SAFETY: the caller's promise.
                let tuned = Arc::new(unsafe { self.tune(device, shape, operands) }?);
                self.products().entry(shape).or_insert(tuned).clone()
            }
        };
        // SAFETY: the caller's promise.
        unsafe { product.product.run(self, device, product.fastest, operands) }
    }

    fn products(&self) -> std::sync::MutexGuard<'_, HashMap<LtShape, Arc<TunedProduct>>> {
        self.products.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Describes a product and times its candidates on the operands; what they add up goes to a result of its own.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    unsafe fn tune(
        &self,
        device: &CudaDevice,
        shape: LtShape,
        operands: LtOperands,
    ) -> Result<TunedProduct, DeviceError> {
        let product = LtProduct::new(self, shape)?;
        let y_bytes = if shape.rounds { 2 } else { 4 } * shape.num_rows * shape.out_features;
        let y = device.alloc::<u8>(y_bytes)?;
        let operands = LtOperands {
            y: y.device_ptr(device.stream()).0,
            ..operands
        };
        let mut best: Option<(f32, usize)> = None;
        for candidate in 0..product.num_candidates() {
            // SAFETY: the caller's promise, and a result that was just made.
            let time = unsafe { self.time_ms(device, &product, candidate, operands) }?;
            if let Some(ms) = time
                && best.is_none_or(|(least, _)| ms < least)
            {
                best = Some((ms, candidate));
            }
        }
        let (_, fastest) = best.ok_or_else(|| DeviceError::CublasLt {
            call: "looking for a matmul",
            message: format!("it has none for {shape:?}"),
        })?;
        Ok(TunedProduct { product, fastest })
    }

    /// Milliseconds of a candidate with nothing in the L2 cache; `None` if it refuses.
    ///
    /// # Safety
    /// As for [`multiply`](Self::multiply).
    unsafe fn time_ms(
        &self,
        device: &CudaDevice,
        product: &LtProduct,
        candidate: usize,
        operands: LtOperands,
    ) -> Result<Option<f32>, DeviceError> {
        let stream = device.stream();
        let failed = driver("timing a matmul");
        let event = || {
            let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
            stream.context().new_event(flags).map_err(&failed)
        };
        let (start, end) = (event()?, event()?);
        let mut least = f32::INFINITY;
        for _ in 0..=NUM_TIMINGS {
            // SAFETY: the workspace is this handle's, and nothing of it is needed from one product to the next.
            unsafe {
                cudarc::driver::result::memset_d8_async(
                    self.workspace.device_ptr(stream).0,
                    0,
                    WORKSPACE_BYTES,
                    stream.cu_stream(),
                )
            }
            .map_err(&failed)?;
            start.record(stream).map_err(&failed)?;
            // SAFETY: the caller's promise.
            if unsafe { product.run(self, device, candidate, operands) }.is_err() {
                return Ok(None);
            }
            end.record(stream).map_err(&failed)?;
            least = least.min(start.elapsed_ms(&end).map_err(&failed)?);
        }
        Ok(Some(least))
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here. Nothing is to be done about a failure.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}

struct TunedProduct {
    product: LtProduct,
    fastest: usize,
}

/// A described product with the heuristic's candidates.
pub struct LtProduct {
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    candidates: Vec<cublasLtMatmulHeuristicResult_t>,
    adds_to_output: bool,
}

// SAFETY: descriptions are written once, in `new`, and only read after it.
unsafe impl Send for LtProduct {}
// SAFETY: as above.
unsafe impl Sync for LtProduct {}

impl LtProduct {
    /// Describes a product of `shape`.
    ///
    /// # Errors
    /// [`DeviceError::CublasLt`].
    pub fn new(lt: &CublasLt, shape: LtShape) -> Result<Self, DeviceError> {
        let failed = cublaslt("describing a matmul");
        let (bf16, fp32) = (cudaDataType_t::CUDA_R_16BF, cudaDataType_t::CUDA_R_32F);
        let (n, k) = (shape.out_features, shape.in_features);
        let operation = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, fp32)
            .map_err(&failed)?;
        let mut product = Self {
            operation,
            layouts: [std::ptr::null_mut(); 3],
            candidates: Vec::new(),
            adds_to_output: shape.adds_to_output,
        };
        // Column-major to the library: the row-major weights are their own transpose.
        let y_type = if shape.rounds { bf16 } else { fp32 };
        let factors = match shape.values {
            LtValues::Bf16 => bf16,
            LtValues::E4m3 => cudaDataType_t::CUDA_R_8F_E4M3,
        };
        for (layout, (values, rows, columns)) in product.layouts.iter_mut().zip([
            (factors, k, n),
            (factors, k, shape.num_rows),
            (y_type, n, shape.num_rows),
        ]) {
            *layout =
                result::create_matrix_layout(values, rows as u64, columns as u64, rows as i64)
                    .map_err(&failed)?;
        }
        let transposed: i32 = 1;
        // SAFETY: the description was just made; the attribute points to a value of the size given.
        unsafe {
            result::set_matmul_desc_attribute(
                operation,
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&transposed).cast::<c_void>(),
                size_of_val(&transposed),
            )
        }
        .map_err(&failed)?;
        product.candidates = product.find_candidates(lt).map_err(&failed)?;
        Ok(product)
    }

    fn find_candidates(
        &self,
        lt: &CublasLt,
    ) -> Result<Vec<cublasLtMatmulHeuristicResult_t>, CublasError> {
        let preference = result::create_matmul_pref()?;
        let [w, x, y] = self.layouts;
        let mut found =
            [const { MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit() }; NUM_CANDIDATES];
        let mut num_found = 0;
        // SAFETY: descriptions and preference are alive; the attribute points to a value of the size given; there is room
        // for as many candidates as asked for.
        let outcome = unsafe {
            result::set_matmul_pref_attribute(
                preference,
                cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&WORKSPACE_BYTES).cast::<c_void>(),
                size_of_val(&WORKSPACE_BYTES),
            )
            .and_then(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    lt.handle,
                    self.operation,
                    w,
                    x,
                    y,
                    y,
                    preference,
                    NUM_CANDIDATES as i32,
                    found[0].as_mut_ptr(),
                    &mut num_found,
                )
                .result()
            })
        };
        // SAFETY: made above, destroyed only here.
        unsafe { result::destroy_matmul_pref(preference) }?;
        outcome?;
        let num_found = usize::try_from(num_found).unwrap_or(0);
        // SAFETY: the library filled the first `num_found`.
        let filled = |candidate: &MaybeUninit<_>| unsafe { candidate.assume_init() };
        Ok(found[..num_found].iter().map(filled).collect())
    }

    /// Number of candidates.
    pub fn num_candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Runs a candidate.
    ///
    /// # Safety
    /// As for [`CublasLt::multiply`].
    ///
    /// # Errors
    /// [`DeviceError::CublasLt`] if it refuses.
    pub unsafe fn run(
        &self,
        lt: &CublasLt,
        device: &CudaDevice,
        candidate: usize,
        operands: LtOperands,
    ) -> Result<(), DeviceError> {
        let (alpha, beta) = (1.0_f32, if self.adds_to_output { 1.0_f32 } else { 0.0 });
        let [w, x, y] = self.layouts;
        device.bind()?;
        // SAFETY: matrices have the sizes of the layouts, as the caller promises; the workspace is as large as the
        // candidates were told.
        unsafe {
            result::matmul(
                lt.handle,
                self.operation,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                operands.weights as *const c_void,
                w,
                operands.x as *const c_void,
                x,
                operands.y as *const c_void,
                y,
                operands.y as *mut c_void,
                y,
                &self.candidates[candidate].algo,
                lt.workspace.device_ptr(device.stream()).0 as *mut c_void,
                WORKSPACE_BYTES,
                device.stream().cu_stream().cast(),
            )
        }
        .map_err(cublaslt("multiplying"))
    }
}

impl Drop for LtProduct {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here. Nothing is to be done about a failure.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

/// Names the call that failed.
fn cublaslt(call: &'static str) -> impl Fn(CublasError) -> DeviceError {
    move |error| DeviceError::CublasLt {
        call,
        message: format!("{:?}", error.0),
    }
}
