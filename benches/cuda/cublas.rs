//! The baseline: cuBLASLt's BF16 matmul, the fastest of what its heuristic proposes.

use std::ffi::c_void;
use std::mem::MaybeUninit;

use cudarc::cublaslt::result;
use cudarc::cublaslt::sys::{
    self, cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulHeuristicResult_t,
    cublasLtMatmulPreferenceAttributes_t, cudaDataType_t,
};
use half::bf16;
use specpilot_rs::device::cuda::CudaDevice;
use specpilot_rs::device::{Buffer, Device};

const WORKSPACE_BYTES: usize = 64 << 20;
const NUM_CANDIDATES: usize = 8;

/// A handle with its workspace.
pub struct CublasLt {
    handle: sys::cublasLtHandle_t,
    workspace: Buffer<u8>,
}

/// `y = x wᵀ` of one shape: `w` `[n, k]`, `x` `[rows, k]`, `y` `[rows, n]`, all BF16 and row-major.
pub struct Matmul<'a> {
    lt: &'a CublasLt,
    operation: sys::cublasLtMatmulDesc_t,
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    candidates: Vec<cublasLtMatmulHeuristicResult_t>,
}

impl CublasLt {
    /// `None` where the library is missing.
    pub fn new(device: &Device) -> Option<Self> {
        // SAFETY: only looks for the library.
        if !unsafe { sys::is_culib_present() } {
            return None;
        }
        Some(Self {
            handle: result::create_handle().ok()?,
            workspace: device.try_alloc(WORKSPACE_BYTES).ok()?,
        })
    }

    /// The matmul of a shape with the heuristic's candidates.
    pub fn matmul(&self, n: usize, k: usize, num_rows: usize) -> Matmul<'_> {
        let bf16 = cudaDataType_t::CUDA_R_16BF;
        let float = cudaDataType_t::CUDA_R_32F;
        // Column-major to the library: the row-major weights are their own transpose.
        let layout = |rows: usize, columns: usize| {
            result::create_matrix_layout(bf16, rows as u64, columns as u64, rows as i64)
                .expect("a layout")
        };
        let layouts = [layout(k, n), layout(k, num_rows), layout(n, num_rows)];
        let operation = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, float)
            .expect("a description");
        let transposed: i32 = 1;
        let preference = result::create_matmul_pref().expect("a preference");
        let mut found =
            [const { MaybeUninit::<cublasLtMatmulHeuristicResult_t>::uninit() }; NUM_CANDIDATES];
        let mut num_found = 0;
        // SAFETY: descriptors were just made; attributes point to values of the size given; there is room for as many
        // candidates as asked for.
        unsafe {
            result::set_matmul_desc_attribute(
                operation,
                cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                std::ptr::from_ref(&transposed).cast::<c_void>(),
                size_of_val(&transposed),
            )
            .expect("an attribute");
            result::set_matmul_pref_attribute(
                preference,
                cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                std::ptr::from_ref(&WORKSPACE_BYTES).cast::<c_void>(),
                size_of_val(&WORKSPACE_BYTES),
            )
            .expect("an attribute");
            sys::cublasLtMatmulAlgoGetHeuristic(
                self.handle,
                operation,
                layouts[0],
                layouts[1],
                layouts[2],
                layouts[2],
                preference,
                NUM_CANDIDATES as i32,
                found[0].as_mut_ptr(),
                &mut num_found,
            )
            .result()
            .expect("candidates");
            result::destroy_matmul_pref(preference).expect("the end of a preference");
        }
        let candidates = found[..num_found as usize]
            .iter()
            // SAFETY: the library filled the first `num_found`.
            .map(|candidate| unsafe { candidate.assume_init() })
            .collect();
        Matmul {
            lt: self,
            operation,
            layouts,
            candidates,
        }
    }
}

impl Matmul<'_> {
    /// Number of candidates.
    pub fn num_candidates(&self) -> usize {
        self.candidates.len()
    }

    /// Runs a candidate; false if it refuses.
    pub fn run(
        &self,
        device: &CudaDevice,
        candidate: usize,
        weights: &Buffer<bf16>,
        x: u64,
        y: &Buffer<u16>,
    ) -> bool {
        let (alpha, beta) = (1.0_f32, 0.0_f32);
        let at = |address: Option<u64>| address.expect("a buffer on the GPU");
        let y = at(y.cuda_address());
        // SAFETY: buffers have the sizes of the layouts; the workspace is as large as the candidates were told.
        unsafe {
            sys::cublasLtMatmul(
                self.lt.handle,
                self.operation,
                std::ptr::from_ref(&alpha).cast(),
                at(weights.cuda_address()) as *const c_void,
                self.layouts[0],
                x as *const c_void,
                self.layouts[1],
                std::ptr::from_ref(&beta).cast(),
                y as *const c_void,
                self.layouts[2],
                y as *mut c_void,
                self.layouts[2],
                &self.candidates[candidate].algo,
                at(self.lt.workspace.cuda_address()) as *mut c_void,
                WORKSPACE_BYTES,
                device.stream().cu_stream().cast(),
            )
        }
        .result()
        .is_ok()
    }
}

impl Drop for Matmul<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `matmul`, destroyed only here. Nothing is to be done about a failure.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in self.layouts {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}

impl Drop for CublasLt {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed only here.
        let _ = unsafe { result::destroy_handle(self.handle) };
    }
}
