//! Kernel benches: one file per stem, each with a table of real shapes. Run with `cargo bench --bench kernels`;
//! a filter such as `cargo bench --bench kernels -- bf16_matmul/demo` picks cases.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

mod append_kv;
mod append_ring;
mod bf16_matmul;
mod block_conv;
mod draft_block;
mod draft_select;
mod embed_rows;
mod fp8_matmul;
mod gate;
mod gather_taps;
mod gdn_fold;
mod gdn_recurrent;
mod gdn_wy;
mod greedy_argmax;
mod lm_head_screen;
mod plant_matrix;
mod rms_norm;
mod rope;
mod round_rows;
mod sample_rows;
mod shape_logits;
mod tree_attention;
mod w12_matmul;

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .without_plots();
    targets =
        append_kv::bench, append_ring::bench, bf16_matmul::bench, block_conv::bench, draft_block::bench,
        draft_select::bench, embed_rows::bench, fp8_matmul::bench, gate::bench, gather_taps::bench,
        gdn_fold::bench, gdn_recurrent::bench, gdn_wy::bench, greedy_argmax::bench, lm_head_screen::bench,
        plant_matrix::bench, rms_norm::bench, rope::bench, round_rows::bench, sample_rows::bench,
        shape_logits::bench,
        tree_attention::bench, w12_matmul::bench
}
criterion_main!(kernels);
