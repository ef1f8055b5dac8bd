//! Kernel benches: one file per stem, each with a table of real shapes. Run with `cargo bench --bench kernels`;
//! a filter such as `cargo bench --bench kernels -- bf16_matmul/demo` picks cases.

use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};

mod bf16_matmul;

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .sample_size(10)
        .warm_up_time(Duration::from_millis(100))
        .measurement_time(Duration::from_millis(400))
        .without_plots();
    targets = bf16_matmul::bench
}
criterion_main!(kernels);
