//! In-block convolution: time and bytes moved per call over real widths; two calls a sublayer, four a layer.

use std::hint::black_box;

use criterion::{BenchmarkId, Criterion, Throughput};
use specpilot_rs::device::{Buffer, Device};
use specpilot_rs::kernels::Kernel;
use specpilot_rs::kernels::block_conv::{BlockConv, BlockConvArgs, ConvSide};

/// Name, block size, channels.
const SHAPES: [(&str, usize, usize); 3] = [
    ("demo", 16, 256),
    ("27b_dflash2", 8, 5120),
    ("30b_dflash2", 16, 6656),
];
const NUM_BLOCKS: [usize; 2] = [1, 8];
const KERNEL_SIZE: usize = 2;
const GROUP_SIZE: usize = 16;

/// The kernel's benches.
pub fn bench(c: &mut Criterion) {
    let device = Device::host(None).expect("worker threads");
    let mut group = c.benchmark_group("block_conv");
    for (name, block_size, width) in SHAPES {
        for num_blocks in NUM_BLOCKS {
            let num_rows = block_size * num_blocks;
            let x = Buffer::from_slice(&vec![0.1_f32; num_rows * width]);
            let delta_len = num_rows * 2 * KERNEL_SIZE * width / GROUP_SIZE;
            let delta = Buffer::from_slice(&vec![0.1_f32; delta_len]);
            let base = Buffer::from_slice(&vec![0.1_f32; 2 * KERNEL_SIZE * width]);
            let mut y = device.try_alloc::<f32>(x.len()).unwrap();
            let num_bytes = (x.len() + y.len() + delta_len / 2) * size_of::<f32>();
            group.throughput(Throughput::Bytes(num_bytes as u64));
            group.bench_function(BenchmarkId::new(name, num_blocks), |b| {
                b.iter(|| {
                    let args = BlockConvArgs {
                        x: &x,
                        delta: &delta,
                        base: &base,
                        side: ConvSide::Input,
                        num_rows,
                        num_blocks,
                        width,
                        kernel_size: KERNEL_SIZE,
                        group_size: GROUP_SIZE,
                        y: (&mut y).into(),
                    };
                    BlockConv::run(&device, args).expect("buffers fit the shape");
                    black_box(&y);
                });
            });
        }
    }
    group.finish();
}
