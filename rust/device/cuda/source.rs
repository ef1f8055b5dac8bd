//! The text of all device code, carried inside the library.

/// One file of `cuda/`, compiled on its own.
#[derive(Debug)]
pub struct KernelSource {
    /// The kernel's stem.
    pub stem: &'static str,
    /// Its text.
    pub text: &'static str,
    /// Whether its kernels must keep everything in registers.
    pub is_hot: bool,
}

macro_rules! sources {
    ($($stem:literal, $is_hot:literal;)*) => {
        &[$(KernelSource {
            stem: $stem,
            text: include_str!(concat!("../../../cuda/", $stem, ".cu")),
            is_hot: $is_hot,
        }),*]
    };
}

macro_rules! headers {
    ($($name:literal),*) => {
        &[$(($name, include_str!(concat!("../../../cuda/include/", $name)))),*]
    };
}

/// All kernels, those first that take longest to compile.
pub const KERNEL_SOURCES: &[KernelSource] = sources! {
    "gdn_wy", true;
    "w12_matmul", true;
    "fp8_matmul", true;
    "tree_attention", true;
    "bf16_matmul", true;
    "append_kv", true;
    "append_ring", true;
    "block_conv", true;
    "draft_block", true;
    "draft_select", true;
    "embed_rows", true;
    "gate", true;
    "gather_taps", true;
    "gdn_fold", true;
    "gdn_recurrent", true;
    "greedy_argmax", true;
    "lm_head_screen", true;
    "plant_matrix", false;
    "rms_norm", true;
    "rope", true;
    "round_rows", true;
    "shape_logits", true;
};

/// What kernels include: name and text.
pub(super) const HEADERS: &[(&str, &str)] = headers![
    "async_copy.cuh",
    "attention_parts.cuh",
    "block_reduce.cuh",
    "cluster_run.cuh",
    "fp8_decode.cuh",
    "gdn_block.cuh",
    "gdn_factors.cuh",
    "gdn_keys.cuh",
    "gdn_lanes.cuh",
    "gdn_values.cuh",
    "loads.cuh",
    "logit_keys.cuh",
    "matmul_rows.cuh",
    "matrix_loads.cuh",
    "mma.cuh",
    "norm_part.cuh",
    "octet_sums.cuh",
    "packed_rows.cuh",
    "screen.cuh",
    "screen_scan.cuh",
    "screen_scan_wgmma.cuh",
    "placed_rows.cuh",
    "power_of_two.cuh",
    "quantised_rows.cuh",
    "row_paths.cuh",
    "signals.cuh",
    "skinny_matmul.cuh",
    "slice_sums.cuh",
    "split_product.cuh",
    "tf32.cuh",
    "thread_copy.cuh",
    "top_keys.cuh",
    "unit_tile.cuh",
    "w12_decode.cuh",
    "wgmma.cuh",
    "wgmma_bf16.cuh",
    "wgmma_matmul.cuh"
];

impl KernelSource {
    /// The source of `stem`.
    ///
    /// # Panics
    /// Panics if there is none.
    pub fn of(stem: &str) -> &'static Self {
        KERNEL_SOURCES
            .iter()
            .find(|source| source.stem == stem)
            .unwrap_or_else(|| panic!("cuda/{stem}.cu is not listed"))
    }
}
