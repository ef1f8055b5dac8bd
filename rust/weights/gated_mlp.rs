//! The gated MLP of every decoder here, target or drafter: `down(f(gate(x)) * up(x))`, with `f` mostly SiLU.

use super::linear::{Linear, multiply_together};
use crate::device::{Buffer, Device};
use crate::error::KernelError;
use crate::kernels::Kernel;
use crate::kernels::bf16_matmul::{Epilogue, Product};
use crate::kernels::gate::{Gate, GateArgs, GateKind};
use crate::kernels::matmul_rows::MatmulRows;
use crate::kernels::w12_matmul::WeightView;

/// The matrices of one MLP.
#[derive(Debug)]
pub struct GatedMlp {
    /// `[intermediate_size, hidden_size]`.
    pub gate_proj: Linear,
    /// `[intermediate_size, hidden_size]`.
    pub up_proj: Linear,
    /// `[hidden_size, intermediate_size]`.
    pub down_proj: Linear,
    /// What `up` is multiplied by.
    pub activation: GateKind,
}

impl GatedMlp {
    /// All of them.
    pub fn matrices(&self) -> [&Linear; 3] {
        [&self.gate_proj, &self.up_proj, &self.down_proj]
    }

    /// Turns the first `num_rows` rows `x` of `rows` into what `down_proj` takes: `f(gate(x)) * up(x)`, through `view` of
    /// both matrices. `gate` and `up` `[_, intermediate_size]` are scratch.
    ///
    /// # Errors
    /// [`KernelError`] when a buffer is too short or on another device.
    pub fn activate(
        &self,
        view: WeightView,
        device: &Device,
        rows: &mut MatmulRows,
        num_rows: usize,
        gate: &mut Buffer<f32>,
        up: &mut Buffer<f32>,
    ) -> Result<(), KernelError> {
        let products = [
            Product {
                weight: &self.gate_proj,
                y: &mut *gate,
            },
            Product {
                weight: &self.up_proj,
                y: &mut *up,
            },
        ];
        multiply_together(view, device, &*rows, num_rows, products, Epilogue::Store)?;
        let width = self.gate_proj.out_features();
        Gate::run(
            device,
            GateArgs {
                kind: self.activation,
                x: gate,
                x_offset: 0,
                x_stride: width,
                num_vectors: num_rows,
                width,
                values: up,
                per_row: 1,
                y: rows.into(),
            },
        )
    }
}
