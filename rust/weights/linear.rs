//! One weight matrix in whichever format it is held, behind one call.
//!
//! In: packed weights. Out: `y = x Wᵀ` (or `y += x Wᵀ`) for any number of rows. Layers hold
//! `Linear`s and know no format; a new format is a variant here and a kernel, and nothing above changes. Formats that
//! hold the same weights give the same bits.

use crate::device::{Buffer, Device};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Bf16Matmul, Bf16MatmulArgs, Epilogue, PackedBf16, Product};
use crate::kernels::fp8_matmul::{Activations, Fp8Matmul, Fp8MatmulArgs, PackedFp8};
use crate::kernels::matmul_rows::MatmulInput;
use crate::kernels::w12_matmul::{PackedW12, W12Matmul, W12MatmulArgs, WeightView};

/// A weight matrix `[out_features, in_features]`.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "a few hundred beside the weights themselves"
)]
pub enum Linear {
    /// The checkpoint's BF16 values, packed for the kernel.
    Bf16(PackedBf16),
    /// The same values in 12 bits each.
    W12(PackedW12),
    /// The checkpoint's values, and beside them what a Q pass reads.
    Bf16WithQView {
        /// All bits.
        exact: PackedBf16,
        /// The Q view alone.
        q_view: PackedW12,
    },
    /// The checkpoint's FP8 codes and scales.
    Fp8 {
        /// All of them.
        weight: PackedFp8,
        /// Whether rows are rounded to FP8 too.
        activations: Activations,
    },
}

/// The weights behind a view of a matrix.
enum InView<'a> {
    Bf16(&'a PackedBf16),
    W12(&'a PackedW12),
    Fp8(&'a PackedFp8, Activations),
}

/// Multiplies the first `num_rows` rows of `x` by several matrices of one K through `view`, each into its own result:
/// one launch where they have one format, and the bits of one call for each.
///
/// # Errors
/// [`KernelError`] when a buffer is too short.
pub fn multiply_together<'a>(
    view: WeightView,
    device: &Device,
    x: impl Into<MatmulInput<'a>>,
    num_rows: usize,
    products: impl IntoIterator<Item = Product<'a, Linear>>,
    epilogue: Epilogue,
) -> Result<(), KernelError> {
    let x = x.into();
    let (mut bf16, mut w12) = (Vec::new(), Vec::new());
    let (mut fp8, mut fp8_quantised) = (Vec::new(), Vec::new());
    for Product { weight, y } in products {
        match weight.in_view(view) {
            InView::Bf16(weight) => bf16.push(Product { weight, y }),
            InView::W12(weight) => w12.push(Product { weight, y }),
            InView::Fp8(weight, Activations::Whole) => fp8.push(Product { weight, y }),
            InView::Fp8(weight, Activations::Quantised) => {
                fp8_quantised.push(Product { weight, y });
            }
        }
    }
    if !bf16.is_empty() {
        let args = Bf16MatmulArgs {
            x,
            num_rows,
            products: bf16,
            epilogue,
        };
        Bf16Matmul::run(device, args)?;
    }
    if !w12.is_empty() {
        let args = W12MatmulArgs {
            x,
            num_rows,
            products: w12,
            epilogue,
            view,
        };
        W12Matmul::run(device, args)?;
    }
    for (products, activations) in [
        (fp8, Activations::Whole),
        (fp8_quantised, Activations::Quantised),
    ] {
        if !products.is_empty() {
            let args = Fp8MatmulArgs {
                x,
                num_rows,
                products,
                activations,
                epilogue,
            };
            Fp8Matmul::run(device, args)?;
        }
    }
    Ok(())
}

impl Linear {
    /// Multiplies the first `num_rows` rows of `x` `[_, in_features]` into `y` `[_, out_features]`.
    ///
    /// # Errors
    /// [`KernelError`] when a buffer is too short.
    pub fn forward<'a>(
        &self,
        device: &Device,
        x: impl Into<MatmulInput<'a>>,
        num_rows: usize,
        y: &mut Buffer<f32>,
        epilogue: Epilogue,
    ) -> Result<(), KernelError> {
        self.forward_through(WeightView::Exact, device, x, num_rows, y, epilogue)
    }

    /// [`Self::forward`] through `view`; a matrix without a Q view is exact in both.
    ///
    /// # Errors
    /// [`KernelError`] when a buffer is too short.
    pub fn forward_through<'a>(
        &self,
        view: WeightView,
        device: &Device,
        x: impl Into<MatmulInput<'a>>,
        num_rows: usize,
        y: &mut Buffer<f32>,
        epilogue: Epilogue,
    ) -> Result<(), KernelError> {
        let product = Product { weight: self, y };
        multiply_together(view, device, x.into(), num_rows, [product], epilogue)
    }

    /// The packed BF16 weights, where that is the format.
    pub fn as_bf16(&self) -> Option<&PackedBf16> {
        match self {
            Self::Bf16(weight) | Self::Bf16WithQView { exact: weight, .. } => Some(weight),
            Self::W12(_) | Self::Fp8 { .. } => None,
        }
    }

    /// What `view` reads of it.
    fn in_view(&self, view: WeightView) -> InView<'_> {
        match (self, view) {
            (Self::Bf16(weight), _)
            | (Self::Bf16WithQView { exact: weight, .. }, WeightView::Exact) => {
                InView::Bf16(weight)
            }
            (Self::W12(weight), _)
            | (Self::Bf16WithQView { q_view: weight, .. }, WeightView::Q) => InView::W12(weight),
            (
                Self::Fp8 {
                    weight,
                    activations,
                },
                _,
            ) => InView::Fp8(weight, *activations),
        }
    }

    /// Number of output channels.
    pub fn out_features(&self) -> usize {
        match self {
            Self::Bf16(weight) | Self::Bf16WithQView { exact: weight, .. } => weight.out_features(),
            Self::W12(weight) => weight.out_features(),
            Self::Fp8 { weight, .. } => weight.out_features(),
        }
    }

    /// Length of an input row.
    pub fn in_features(&self) -> usize {
        match self {
            Self::Bf16(weight) | Self::Bf16WithQView { exact: weight, .. } => weight.in_features(),
            Self::W12(weight) => weight.in_features(),
            Self::Fp8 { weight, .. } => weight.in_features(),
        }
    }

    /// Bytes in memory, without what only Q passes read.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::Bf16(weight) | Self::Bf16WithQView { exact: weight, .. } => weight.num_bytes(),
            Self::W12(weight) => weight.num_bytes(),
            Self::Fp8 { weight, .. } => weight.num_bytes(),
        }
    }

    /// Bytes in memory that only Q passes read.
    pub fn q_view_bytes(&self) -> usize {
        match self {
            Self::Bf16WithQView { q_view, .. } => q_view.num_bytes(),
            Self::Bf16(_) | Self::W12(_) | Self::Fp8 { .. } => 0,
        }
    }
}
