//! Times of captured graphs.

use std::time::Instant;

use cudarc::driver::sys::{CUevent_flags, CUgraphInstantiate_flags, CUstreamCaptureMode};
use specpilot_rs::device::cuda::CudaDevice;

/// Microseconds of one call that waits for its results: the median of `NUM_CALLS`, by the clock.
pub fn call_us(mut call: impl FnMut()) -> f64 {
    const NUM_CALLS: usize = 50;
    (0..3).for_each(|_| call());
    let mut times: Vec<f64> = (0..NUM_CALLS)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed().as_secs_f64() * 1e6
        })
        .collect();
    times.sort_by(f64::total_cmp);
    times[NUM_CALLS / 2]
}

/// Microseconds of one call: `record(i)` for i in 0..`num_calls` is captured in a graph, and the median of its replays
/// divided by `num_calls`.
pub fn graph_us(device: &CudaDevice, num_calls: usize, mut record: impl FnMut(usize)) -> f64 {
    const REPLAYS: usize = 50;
    let stream = device.stream();
    // Modules load and buffers grow here, which a capture may not see.
    record(0);
    device.synchronize().expect("the first call runs");
    stream
        .begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)
        .expect("a capture");
    (0..num_calls).for_each(&mut record);
    let flags = CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
    let graph = stream
        .end_capture(flags)
        .expect("the end of a capture")
        .expect("a graph");
    let event = || {
        let flags = Some(CUevent_flags::CU_EVENT_DEFAULT);
        stream.context().new_event(flags).expect("an event")
    };
    let (start, end) = (event(), event());
    let mut times: Vec<f64> = (0..REPLAYS + 3)
        .map(|_| {
            start.record(stream).expect("a start");
            graph.launch().expect("a replay");
            end.record(stream).expect("an end");
            f64::from(start.elapsed_ms(&end).expect("a time")) * 1e3 / num_calls as f64
        })
        .skip(3)
        .collect();
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
