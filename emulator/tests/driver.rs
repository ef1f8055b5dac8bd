//! The driver as a C program sees it: launches, captures, faults and refusals through the exported functions.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ptx_emulator as _;

type Handle = *mut c_void;

/// As `cuda.h` lays it out.
#[repr(C)]
struct LaunchConfig {
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_mem_bytes: c_uint,
    stream: Handle,
    attributes: *const LaunchAttribute,
    num_attributes: c_uint,
}

/// As `cuda.h` lays it out.
#[repr(C)]
struct LaunchAttribute {
    id: c_uint,
    padding: [c_char; 4],
    value: AttributeValue,
}

#[repr(C, align(8))]
struct AttributeValue([u32; 16]);

unsafe extern "C" {
    fn cuInit(flags: c_uint) -> c_int;
    fn cuDevicePrimaryCtxRetain(context: *mut Handle, device: c_int) -> c_int;
    fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
    fn cuCtxSetCurrent(context: Handle) -> c_int;
    fn cuDeviceGetAttribute(value: *mut c_int, id: c_uint, device: c_int) -> c_int;
    fn cuGetErrorString(code: c_int, text: *mut *const c_char) -> c_int;
    fn cuStreamCreate(stream: *mut Handle, flags: c_uint) -> c_int;
    fn cuStreamSynchronize(stream: Handle) -> c_int;
    fn cuStreamDestroy_v2(stream: Handle) -> c_int;
    fn cuStreamBeginCapture_v2(stream: Handle, mode: c_int) -> c_int;
    fn cuStreamEndCapture(stream: Handle, graph: *mut Handle) -> c_int;
    fn cuGraphInstantiateWithFlags(made: *mut Handle, graph: Handle, flags: c_ulonglong) -> c_int;
    fn cuGraphLaunch(executable: Handle, stream: Handle) -> c_int;
    fn cuMemAllocAsync(address: *mut u64, num_bytes: usize, stream: Handle) -> c_int;
    fn cuMemFreeAsync(address: u64, stream: Handle) -> c_int;
    fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: Handle) -> c_int;
    fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: Handle) -> c_int;
    fn cuMemsetD8Async(to: u64, value: u8, len: usize, stream: Handle) -> c_int;
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int;
    fn cuModuleLoadData(module: *mut Handle, image: *const c_void) -> c_int;
    fn cuModuleUnload(module: Handle) -> c_int;
    fn cuModuleGetFunction(function: *mut Handle, module: Handle, name: *const c_char) -> c_int;
    fn cuFuncSetAttribute(function: Handle, id: c_uint, value: c_int) -> c_int;
    fn cuOccupancyMaxActiveClusters(
        num_clusters: *mut c_int,
        function: Handle,
        config: *const LaunchConfig,
    ) -> c_int;
    fn cuLaunchKernelEx(
        config: *const LaunchConfig,
        function: Handle,
        params: *mut *mut c_void,
        extra: *mut *mut c_void,
    ) -> c_int;
}

/// `to[i] = 3 from[i] + addend` for the `len` values of a grid.
const SCALE: &str = r"
.version 8.4
.target sm_80
.address_size 64

.visible .entry scale(
    .param .u64 scale_to,
    .param .u64 scale_from,
    .param .u32 scale_len,
    .param .u32 scale_addend
)
{
    .reg .pred %p<2>;
    .reg .b32 %r<9>;
    .reg .b64 %rd<8>;

    ld.param.u64 %rd1, [scale_to];
    ld.param.u64 %rd2, [scale_from];
    ld.param.u32 %r1, [scale_len];
    ld.param.u32 %r2, [scale_addend];
    mov.u32 %r3, %ctaid.x;
    mov.u32 %r4, %ntid.x;
    mov.u32 %r5, %tid.x;
    mad.lo.s32 %r6, %r3, %r4, %r5;
    setp.ge.s32 %p1, %r6, %r1;
    @%p1 bra $DONE;
    cvta.to.global.u64 %rd3, %rd1;
    cvta.to.global.u64 %rd4, %rd2;
    mul.wide.s32 %rd5, %r6, 4;
    add.s64 %rd6, %rd4, %rd5;
    ld.global.u32 %r7, [%rd6];
    mad.lo.s32 %r8, %r7, 3, %r2;
    add.s64 %rd7, %rd3, %rd5;
    st.global.u32 [%rd7], %r8;
$DONE:
    ret;
}
";

const BLOCK_THREADS: u32 = 64;
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const INVALID_PTX: c_int = 218;
const INVALID_HANDLE: c_int = 400;
const NOT_FOUND: c_int = 500;
const ILLEGAL_ADDRESS: c_int = 700;
const LAUNCH_OUT_OF_RESOURCES: c_int = 701;
const NOT_SUPPORTED: c_int = 801;
const STREAM_CAPTURE_UNSUPPORTED: c_int = 900;
const STREAM_CAPTURE_INVALIDATED: c_int = 901;

/// The opened GPU with a stream and the function of [`SCALE`]. One at a time, as a process has one driver.
struct Gpu {
    stream: Handle,
    module: Handle,
    scale: Handle,
    _turn: MutexGuard<'static, ()>,
}

/// Calls a function with a place for its answer, and returns the answer.
fn ask<T: Copy>(empty: T, call: impl FnOnce(*mut T) -> c_int) -> T {
    let mut place = empty;
    assert_eq!(call(&mut place), SUCCESS);
    place
}

const NONE: Handle = std::ptr::null_mut();

impl Gpu {
    fn open() -> Self {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        let text = CString::new(SCALE).unwrap();
        // SAFETY: all places are valid, the text ends in a zero byte.
        unsafe {
            assert_eq!(cuInit(0), SUCCESS);
            let context = ask(NONE, |place| cuDevicePrimaryCtxRetain(place, 0));
            assert_eq!(cuCtxSetCurrent(context), SUCCESS);
            let stream = ask(NONE, |place| cuStreamCreate(place, 1));
            let module = ask(NONE, |place| cuModuleLoadData(place, text.as_ptr().cast()));
            let scale = ask(NONE, |place| {
                cuModuleGetFunction(place, module, c"scale".as_ptr())
            });
            Self {
                stream,
                module,
                scale,
                _turn: turn,
            }
        }
    }

    fn allocate(&self, num_values: usize) -> u64 {
        // SAFETY: the place is valid.
        ask(0, |place| unsafe {
            cuMemAllocAsync(place, 4 * num_values, self.stream)
        })
    }

    fn upload(&self, to: u64, values: &[u32]) -> c_int {
        // SAFETY: the values are that long.
        unsafe { cuMemcpyHtoDAsync_v2(to, values.as_ptr().cast(), 4 * values.len(), self.stream) }
    }

    fn read(&self, from: u64, num_values: usize) -> Vec<u32> {
        let mut values = vec![0; num_values];
        let place = values.as_mut_ptr().cast();
        // SAFETY: the values are that long.
        let status = unsafe { cuMemcpyDtoHAsync_v2(place, from, 4 * num_values, self.stream) };
        assert_eq!(status, SUCCESS);
        values
    }

    fn config(&self, num_blocks: u32) -> LaunchConfig {
        LaunchConfig {
            grid_x: num_blocks,
            grid_y: 1,
            grid_z: 1,
            block_x: BLOCK_THREADS,
            block_y: 1,
            block_z: 1,
            shared_mem_bytes: 0,
            stream: self.stream,
            attributes: std::ptr::null(),
            num_attributes: 0,
        }
    }

    fn launch(&self, config: &LaunchConfig, to: u64, from: u64, len: u32, addend: u32) -> c_int {
        let mut params: [*mut c_void; 4] = [
            (&raw const to).cast_mut().cast(),
            (&raw const from).cast_mut().cast(),
            (&raw const len).cast_mut().cast(),
            (&raw const addend).cast_mut().cast(),
        ];
        // SAFETY: four parameters of the kernel's types; the call copies them.
        unsafe {
            cuLaunchKernelEx(
                config,
                self.scale,
                params.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        }
    }

    fn scale(&self, to: u64, from: u64, len: usize, addend: u32) -> c_int {
        let config = self.config((len as u32).div_ceil(BLOCK_THREADS));
        self.launch(&config, to, from, len as u32, addend)
    }

    fn synchronize(&self) -> c_int {
        // SAFETY: takes no pointer.
        unsafe { cuStreamSynchronize(self.stream) }
    }

    fn begin_capture(&self) {
        // SAFETY: takes no pointer.
        assert_eq!(unsafe { cuStreamBeginCapture_v2(self.stream, 1) }, SUCCESS);
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: takes no pointer.
        unsafe { cuDevicePrimaryCtxRelease_v2(0) };
    }
}

fn scaled(values: &[u32], addend: u32) -> Vec<u32> {
    values
        .iter()
        .map(|value| value.wrapping_mul(3).wrapping_add(addend))
        .collect()
}

#[test]
fn a_graph_replays_launches_with_the_parameters_of_its_capture() {
    let gpu = Gpu::open();
    let values: Vec<u32> = (0..300).map(|i| i * i).collect();
    let (from, between, to) = (gpu.allocate(300), gpu.allocate(300), gpu.allocate(300));
    assert_eq!(gpu.upload(from, &values), SUCCESS);
    assert_eq!(gpu.scale(to, from, 299, 5), SUCCESS);
    let mut expected = scaled(&values[..299], 5);
    expected.push(0);
    assert_eq!(gpu.read(to, 300), expected);

    gpu.begin_capture();
    assert_eq!(gpu.scale(between, from, 300, 7), SUCCESS);
    assert_eq!(gpu.scale(to, between, 300, 11), SUCCESS);
    // SAFETY: memory of the GPU; all places are valid.
    let executable = unsafe {
        assert_eq!(cuMemsetD8Async(between, 0xff, 4, gpu.stream), SUCCESS);
        let graph = ask(NONE, |place| cuStreamEndCapture(gpu.stream, place));
        ask(NONE, |place| cuGraphInstantiateWithFlags(place, graph, 0))
    };
    assert_eq!(gpu.read(to, 300), expected, "captured, not run");
    for shift in [1, 2] {
        let values: Vec<u32> = values.iter().map(|value| value + shift).collect();
        assert_eq!(gpu.upload(from, &values), SUCCESS);
        // SAFETY: takes no pointer.
        assert_eq!(unsafe { cuGraphLaunch(executable, gpu.stream) }, SUCCESS);
        assert_eq!(gpu.read(to, 300), scaled(&scaled(&values, 7), 11));
        assert_eq!(gpu.read(between, 2), [u32::MAX, scaled(&values, 7)[1]]);
    }
}

#[test]
fn a_fault_stays_until_the_gpu_is_opened_anew() {
    let gpu = Gpu::open();
    let (from, to) = (gpu.allocate(64), gpu.allocate(64));
    let launched = gpu.scale(to, from, 65, 0);
    assert!([SUCCESS, ILLEGAL_ADDRESS].contains(&launched));
    assert_eq!(gpu.synchronize(), ILLEGAL_ADDRESS);
    assert_eq!(gpu.upload(from, &[1]), ILLEGAL_ADDRESS);
    assert_eq!(gpu.synchronize(), ILLEGAL_ADDRESS);
    drop(gpu);

    let gpu = Gpu::open();
    // SAFETY: all places are valid.
    let (free, total) = unsafe {
        let mut total = 0;
        let free = ask(0, |free| cuMemGetInfo_v2(free, &mut total));
        (free, total)
    };
    assert_eq!(free, total, "nothing is left of what was allocated");
    let (from, to) = (gpu.allocate(64), gpu.allocate(64));
    assert_eq!(gpu.upload(from, &[9; 64]), SUCCESS);
    assert_eq!(gpu.scale(to, from, 64, 1), SUCCESS);
    assert_eq!(gpu.read(to, 64), [28; 64]);
}

#[test]
fn memory_that_was_given_back_is_nobodys() {
    let gpu = Gpu::open();
    let (from, to) = (gpu.allocate(64), gpu.allocate(64));
    // SAFETY: takes no pointer.
    assert_eq!(unsafe { cuMemFreeAsync(from, gpu.stream) }, SUCCESS);
    gpu.scale(to, from, 64, 0);
    assert_eq!(gpu.synchronize(), ILLEGAL_ADDRESS);
}

#[test]
fn what_cannot_be_captured_spoils_the_capture() {
    let gpu = Gpu::open();
    let at = gpu.allocate(1);
    let spoiling: [&dyn Fn() -> c_int; 3] = [
        &|| gpu.upload(at, &[1]),
        &|| gpu.synchronize(),
        // SAFETY: the place is valid.
        &|| unsafe { cuMemAllocAsync(&mut 0, 4, gpu.stream) },
    ];
    for spoil in spoiling {
        gpu.begin_capture();
        assert_eq!(spoil(), STREAM_CAPTURE_UNSUPPORTED);
        let mut graph = NONE;
        // SAFETY: the place is valid.
        let ended = unsafe { cuStreamEndCapture(gpu.stream, &mut graph) };
        assert_eq!((ended, graph), (STREAM_CAPTURE_INVALIDATED, NONE));
        assert_eq!(spoil(), SUCCESS, "out of the capture");
    }
}

#[test]
fn launches_beyond_the_gpus_limits_are_refused() {
    let gpu = Gpu::open();
    let at = gpu.allocate(64);
    let launch = |config: &LaunchConfig| gpu.launch(config, at, at, 0, 0);
    assert_eq!(launch(&gpu.config(0)), INVALID_VALUE);
    let flat = LaunchConfig {
        grid_y: 2,
        ..gpu.config(1)
    };
    assert_eq!(launch(&flat), NOT_SUPPORTED);
    let wide = LaunchConfig {
        block_x: 1025,
        ..gpu.config(1)
    };
    assert_eq!(launch(&wide), LAUNCH_OUT_OF_RESOURCES);

    let with_shared = |num_bytes| LaunchConfig {
        shared_mem_bytes: num_bytes,
        ..gpu.config(1)
    };
    // SAFETY: takes no pointer.
    let allow = |num_bytes| unsafe { cuFuncSetAttribute(gpu.scale, 8, num_bytes) };
    // SAFETY: the place is valid.
    let limit = ask(0, |place| unsafe { cuDeviceGetAttribute(place, 97, 0) });
    assert_eq!(launch(&with_shared(48 << 10)), SUCCESS);
    assert_eq!(launch(&with_shared((48 << 10) + 1)), INVALID_VALUE);
    assert_eq!(allow(limit + 1), INVALID_VALUE);
    assert_eq!(allow(limit), SUCCESS);
    assert_eq!(launch(&with_shared(limit as u32)), SUCCESS);

    let in_clusters = |num_blocks, cluster: [u32; 3], body: &dyn Fn(&LaunchConfig) -> c_int| {
        let mut value = AttributeValue([0; 16]);
        value.0[..3].copy_from_slice(&cluster);
        let attribute = LaunchAttribute {
            id: 4,
            padding: [0; 4],
            value,
        };
        body(&LaunchConfig {
            attributes: &attribute,
            num_attributes: 1,
            ..gpu.config(num_blocks)
        })
    };
    assert_eq!(in_clusters(4, [2, 1, 1], &launch), SUCCESS);
    assert_eq!(in_clusters(3, [2, 1, 1], &launch), INVALID_VALUE);
    assert_eq!(in_clusters(16, [16, 1, 1], &launch), INVALID_VALUE);
    assert_eq!(in_clusters(4, [2, 2, 1], &launch), NOT_SUPPORTED);
    let count = |config: &LaunchConfig| {
        // SAFETY: place and configuration are valid.
        ask(0, |place| unsafe {
            cuOccupancyMaxActiveClusters(place, gpu.scale, config)
        })
    };
    let alone = count(&gpu.config(2));
    assert_eq!(in_clusters(2, [2, 1, 1], &count), alone / 2);
}

#[test]
fn texts_names_and_handles_that_are_nothing_are_refused() {
    let gpu = Gpu::open();
    let load = |text: &str| {
        let text = CString::new(text).unwrap();
        // SAFETY: the place is valid, the text ends in a zero byte.
        unsafe { cuModuleLoadData(&mut NONE.clone(), text.as_ptr().cast()) }
    };
    assert_eq!(load(&SCALE.replace("sm_80", "sm_121")), INVALID_PTX);
    assert_eq!(
        load(&SCALE.replace("mad.lo.s32", "mad.lo.s31")),
        INVALID_PTX
    );
    assert_eq!(load("\x7fELF and more"), INVALID_PTX);
    // SAFETY: all places are valid; handles are never followed.
    unsafe {
        let missing = cuModuleGetFunction(&mut NONE.clone(), gpu.module, c"shrink".as_ptr());
        assert_eq!(missing, NOT_FOUND);
        assert_eq!(
            cuStreamSynchronize(gpu.scale),
            INVALID_HANDLE,
            "a function is no stream"
        );
        assert_eq!(cuModuleUnload(gpu.module), SUCCESS);
        assert_eq!(
            gpu.scale(0, 0, 1, 0),
            INVALID_HANDLE,
            "gone with its module"
        );
        assert_eq!(cuStreamDestroy_v2(gpu.stream), SUCCESS);
        assert_eq!(cuStreamDestroy_v2(gpu.stream), INVALID_HANDLE);
        let text = ask(std::ptr::null(), |place| {
            cuGetErrorString(INVALID_HANDLE, place)
        });
        assert_eq!(CStr::from_ptr(text), c"no such object");
        assert_eq!(
            cuGetErrorString(12_345, &mut std::ptr::null()),
            INVALID_VALUE
        );
    }
}
