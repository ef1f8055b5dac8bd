//! The GPU that is emulated: its limits, by architecture, and what the environment says of it.

/// The environment variable that names the architecture.
const ARCH_VARIABLE: &str = "PTX_EMULATOR_ARCH";
/// The environment variable that holds the number of multiprocessors.
const MULTIPROCESSORS_VARIABLE: &str = "PTX_EMULATOR_MULTIPROCESSORS";
/// The environment variable that holds the bytes of device memory.
const MEMORY_VARIABLE: &str = "PTX_EMULATOR_MEMORY_BYTES";

const DEFAULT_MULTIPROCESSORS: u64 = 4;
const DEFAULT_MEMORY_BYTES: u64 = 4 << 30;

/// Shared memory of a block that it need not ask for.
pub(super) const DEFAULT_SHARED_BYTES: u32 = 48 << 10;
/// What the system keeps of shared memory for each block.
const RESERVED_SHARED_BYTES: u32 = 1 << 10;
/// Blocks of a cluster at most, where a kernel asks for nothing special.
pub(super) const MAX_CLUSTER_BLOCKS: u32 = 8;
/// Blocks that a multiprocessor holds at most.
const MULTIPROCESSOR_BLOCKS: u32 = 32;

/// An architecture that kernels are compiled for, with the limits of its best-known GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Arch {
    /// As `.target` in a text spells it.
    pub name: &'static str,
    pub compute_capability: (i32, i32),
    /// Shared memory that a block may ask for.
    pub block_shared_bytes: u32,
    multiprocessor_shared_bytes: u32,
    multiprocessor_threads: u32,
    pub has_clusters: bool,
}

const ARCHES: [Arch; 3] = [
    Arch {
        name: "sm_80",
        compute_capability: (8, 0),
        block_shared_bytes: 163 << 10,
        multiprocessor_shared_bytes: 164 << 10,
        multiprocessor_threads: 2048,
        has_clusters: false,
    },
    Arch {
        name: "sm_90a",
        compute_capability: (9, 0),
        block_shared_bytes: 227 << 10,
        multiprocessor_shared_bytes: 228 << 10,
        multiprocessor_threads: 2048,
        has_clusters: true,
    },
    Arch {
        name: "sm_120",
        compute_capability: (12, 0),
        block_shared_bytes: 99 << 10,
        multiprocessor_shared_bytes: 100 << 10,
        multiprocessor_threads: 1536,
        has_clusters: true,
    },
];

/// The emulated GPU.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gpu {
    pub arch: Arch,
    pub num_multiprocessors: u32,
    pub memory_bytes: u64,
}

impl Gpu {
    /// What the environment describes.
    pub(super) fn from_env() -> Result<Self, String> {
        let name = std::env::var(ARCH_VARIABLE).unwrap_or_else(|_| "sm_90a".to_owned());
        let arch = ARCHES.into_iter().find(|arch| arch.name == name);
        let arch = arch.ok_or_else(|| {
            let names = ARCHES.map(|arch| arch.name).join(", ");
            format!("{ARCH_VARIABLE} is `{name}`, expected one of {names}")
        })?;
        let num_multiprocessors =
            positive_from_env(MULTIPROCESSORS_VARIABLE, DEFAULT_MULTIPROCESSORS)?;
        Ok(Self {
            arch,
            num_multiprocessors: u32::try_from(num_multiprocessors)
                .map_err(|_| format!("{MULTIPROCESSORS_VARIABLE} is too large"))?,
            memory_bytes: positive_from_env(MEMORY_VARIABLE, DEFAULT_MEMORY_BYTES)?,
        })
    }

    /// Clusters of `cluster_blocks` blocks that fit at a time. Every GPU holds one cluster of any size that kernels may
    /// ask for, so this one does too: all blocks of a grid live here anyway.
    pub(super) fn max_clusters(
        &self,
        cluster_blocks: u32,
        block_threads: u32,
        block_shared_bytes: u32,
    ) -> u32 {
        let by_shared =
            self.arch.multiprocessor_shared_bytes / (block_shared_bytes + RESERVED_SHARED_BYTES);
        let by_threads = self.arch.multiprocessor_threads / block_threads.max(1);
        let num_blocks = by_shared.min(by_threads).min(MULTIPROCESSOR_BLOCKS);
        match num_blocks {
            0 => 0,
            _ => (num_blocks * self.num_multiprocessors / cluster_blocks).max(1),
        }
    }

    /// Whether texts for `.target` run here: those for the very architecture, or for an older one without a letter.
    pub(super) fn runs_target(&self, target: &str) -> bool {
        let number = |name: &str| -> Option<i32> { name.strip_prefix("sm_")?.parse().ok() };
        let (major, minor) = self.arch.compute_capability;
        target == self.arch.name || number(target).is_some_and(|of| of <= 10 * major + minor)
    }
}

/// Whether `CUDA_VISIBLE_DEVICES` of this value leaves the one GPU visible: what it lists up to the first unknown entry.
fn lists_gpu(value: Option<&str>) -> bool {
    value.is_none_or(|list| {
        list.split(',')
            .next()
            .is_some_and(|first| first.trim() == "0")
    })
}

/// Whether callers may see the GPU.
pub(super) fn is_visible() -> bool {
    lists_gpu(std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

/// A whole number above zero.
fn positive_from_env(variable: &str, default: u64) -> Result<u64, String> {
    let Ok(text) = std::env::var(variable) else {
        return Ok(default);
    };
    match text.parse() {
        Ok(value) if value > 0 => Ok(value),
        _ => Err(format!(
            "{variable} is `{text}`, expected a whole number above 0"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(arch: Arch) -> Gpu {
        Gpu {
            arch,
            num_multiprocessors: 16,
            memory_bytes: 1,
        }
    }

    #[test]
    fn clusters_fit_by_shared_memory_threads_and_blocks() {
        let gpu = gpu(ARCHES[1]);
        assert_eq!(gpu.max_clusters(1, 1024, 0), 32);
        assert_eq!(gpu.max_clusters(2, 32, 0), 256);
        assert_eq!(gpu.max_clusters(4, 128, 227 << 10), 4);
        assert_eq!(gpu.max_clusters(8, 128, 113 << 10), 4);
        assert_eq!(gpu.max_clusters(1, 128, 228 << 10), 0);
    }

    #[test]
    fn a_gpu_is_hidden_by_every_list_without_it() {
        assert!(lists_gpu(None) && lists_gpu(Some("0")) && lists_gpu(Some("0,1")));
        assert!(!lists_gpu(Some("")) && !lists_gpu(Some("-1")) && !lists_gpu(Some("1,0")));
    }

    #[test]
    fn texts_run_where_the_real_driver_runs_them() {
        let [ampere, hopper, blackwell] = ARCHES.map(gpu);
        assert!(hopper.runs_target("sm_90a") && hopper.runs_target("sm_80"));
        assert!(!ampere.runs_target("sm_90a") && !ampere.runs_target("sm_90"));
        assert!(!blackwell.runs_target("sm_90a") && blackwell.runs_target("sm_90"));
    }
}
