//! Small PTX programs with results computed independently here, run under every kind of schedule.

mod clusters;
mod control;
mod copies;
mod exchange;
mod faults;
mod matrices;
mod memory;
mod races;
mod registers;

use ptx_emulator::fault::Fault;
use ptx_emulator::grid::{Checks, GridLaunch, run};
use ptx_emulator::memory::GlobalMemory;
use ptx_emulator::order::{Order, Policy};
use ptx_emulator::ptx::Module;

/// A launch of one block of this many threads.
const fn one_block(block_threads: u32) -> GridLaunch {
    GridLaunch {
        num_blocks: 1,
        block_threads,
        cluster_blocks: 1,
        dynamic_shared_bytes: 0,
    }
}

/// Every kind of schedule, random ones from several seeds.
fn orders() -> Vec<Order> {
    let random = (0..8).map(|seed| Order::new(Policy::Random, seed));
    [Policy::First, Policy::Late]
        .map(|policy| Order::new(policy, 0))
        .into_iter()
        .chain(random)
        .collect()
}

/// The text of a module with one kernel, `program`, whose parameters are 64-bit addresses or numbers `p0`, `p1`, ...
///
/// Registers: `%p0`..`%p31` predicates, `%h0`.. of 16 bits, `%r0`.. and `%f0`.. of 32 bits, `%d0`.. and `%g0`.. of 64 bits.
fn module_text(num_params: usize, body: &str) -> String {
    let params: Vec<String> = (0..num_params)
        .map(|i| format!(".param .u64 p{i}"))
        .collect();
    format!(
        ".version 9.0\n.target sm_90a\n.address_size 64\n\n.visible .entry program(\n{}\n)\n{{\n\
         .reg .pred %p<32>;\n.reg .b16 %h<32>;\n.reg .b32 %r<128>;\n.reg .f32 %f<64>;\n.reg .b64 %d<64>;\n\
         .reg .f64 %g<16>;\n{body}\nret;\n}}\n",
        params.join(",\n")
    )
}

/// Memory of a test, whose allocations are arrays of words.
struct Bench {
    memory: GlobalMemory,
    checks: Checks,
}

impl Bench {
    fn new() -> Self {
        Bench {
            memory: GlobalMemory::new(1 << 26),
            checks: Checks::default(),
        }
    }

    /// An allocation that holds these words.
    fn words(&self, words: &[u32]) -> u64 {
        let address = self.memory.allocate(4 * words.len() as u64).expect("fits");
        // SAFETY: the allocation has the length of `words`.
        unsafe { std::ptr::copy_nonoverlapping(words.as_ptr(), address as *mut u32, words.len()) };
        address
    }

    /// An allocation of this many zeros.
    fn zeros(&self, count: usize) -> u64 {
        self.words(&vec![0; count])
    }

    /// The words of an allocation.
    fn read(&self, address: u64, count: usize) -> Vec<u32> {
        self.memory
            .check(address, 4 * count as u64)
            .expect("allocated");
        // SAFETY: the check holds that the words are there.
        unsafe { std::slice::from_raw_parts(address as *const u32, count) }.to_vec()
    }

    /// Runs a kernel body.
    fn run(
        &self,
        body: &str,
        launch: GridLaunch,
        params: &[u64],
        order: &mut Order,
    ) -> Result<(), Fault> {
        let module = Module::parse(&module_text(params.len(), body))
            .unwrap_or_else(|error| panic!("{error}"));
        let kernel = module.kernel("program").expect("the module's kernel");
        let params: Vec<u8> = params
            .iter()
            .flat_map(|param| param.to_le_bytes())
            .collect();
        run(kernel, &launch, &params, &self.memory, order, self.checks)
    }
}

/// Runs a body that has an output of `count` words as parameter 0 and `inputs` behind it, under every schedule, and
/// holds that the output is `expected` and that nothing races.
fn check(body: &str, launch: GridLaunch, inputs: &[&[u32]], expected: &[u32]) {
    for order in orders() {
        for finds_races in [false, true] {
            let mut order = order.clone();
            let found = output(
                body,
                launch,
                inputs,
                expected.len(),
                &mut order,
                finds_races,
            );
            assert_eq!(found.as_deref(), Ok(expected), "{order:?}");
        }
    }
}

/// The output of one run.
fn output(
    body: &str,
    launch: GridLaunch,
    inputs: &[&[u32]],
    count: usize,
    order: &mut Order,
    finds_races: bool,
) -> Result<Vec<u32>, Fault> {
    let mut bench = Bench::new();
    bench.checks.finds_races = finds_races;
    let mut params = vec![bench.zeros(count)];
    params.extend(inputs.iter().map(|words| bench.words(words)));
    bench.run(body, launch, &params, order)?;
    Ok(bench.read(params[0], count))
}

/// Numbers without a pattern.
fn noise(count: usize) -> Vec<u32> {
    let mut order = Order::new(Policy::Random, 99);
    (0..count).map(|_| order.below(u32::MAX)).collect()
}

/// Sets `%r0` to the thread's index in the grid, `%d0` to its word of the output and `%d1` to its word of the first input.
const OWN_WORDS: &str = "
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mad.lo.s32 %r0, %r2, %r3, %r1;
    ld.param.u64 %d0, [p0];
    cvta.to.global.u64 %d0, %d0;
    mul.wide.u32 %d2, %r0, 4;
    add.s64 %d0, %d0, %d2;
    ld.param.u64 %d1, [p1];
    cvta.to.global.u64 %d1, %d1;
    add.s64 %d1, %d1, %d2;
";
