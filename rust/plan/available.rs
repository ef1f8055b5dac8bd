//! Memory that this process can still get: the least of what the machine has, its control groups allow and its limit on
//! address space leaves.
//!
//! In: the texts that Linux shows under `/proc` and `/sys/fs/cgroup`. Out: bytes, or `None` where nothing is told. Of a
//! group's use, file pages that nobody used lately do not count: the kernel gives them up before it refuses anything.
//! Groups nest, and each of them limits what is in it, so all the way up to the root is asked.

use std::fs;
use std::path::{Path, PathBuf};

/// Where Linux shows processes and control groups.
struct Places {
    proc: PathBuf,
    cgroup: PathBuf,
}

/// Bytes that this process could allocate without swapping or being stopped, where the operating system says so.
pub fn available_bytes() -> Option<u64> {
    Places {
        proc: "/proc".into(),
        cgroup: "/sys/fs/cgroup".into(),
    }
    .available_bytes()
}

impl Places {
    fn available_bytes(&self) -> Option<u64> {
        let [machine, address_space] = [self.machine(), self.address_space()];
        machine
            .into_iter()
            .chain(address_space)
            .chain(self.groups())
            .min()
    }

    fn machine(&self) -> Option<u64> {
        kib_of(&self.proc.join("meminfo"), "MemAvailable:")
    }

    /// The limit on address space less what is mapped; `None` when there is no limit.
    fn address_space(&self) -> Option<u64> {
        let limits = fs::read_to_string(self.proc.join("self/limits")).ok()?;
        let values = limits
            .lines()
            .find_map(|line| line.strip_prefix("Max address space"))?;
        let soft: u64 = values.split_whitespace().next()?.parse().ok()?;
        let mapped = kib_of(&self.proc.join("self/status"), "VmSize:")?;
        Some(soft.saturating_sub(mapped))
    }

    /// What each control group of this process leaves.
    fn groups(&self) -> Vec<u64> {
        let Ok(text) = fs::read_to_string(self.proc.join("self/cgroup")) else {
            return Vec::new();
        };
        text.lines().flat_map(|line| self.group(line)).collect()
    }

    /// What the group that a line `hierarchy:controllers:/path` names, and those around it, leave.
    fn group(&self, line: &str) -> Vec<u64> {
        let mut fields = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (fields.next(), fields.next()) else {
            return Vec::new();
        };
        let (root, names) = match controllers {
            "" => (
                self.cgroup.clone(),
                ["memory.max", "memory.current", "inactive_file"],
            ),
            _ if controllers.split(',').any(|name| name == "memory") => (
                self.cgroup.join("memory"),
                [
                    "memory.limit_in_bytes",
                    "memory.usage_in_bytes",
                    "total_inactive_file",
                ],
            ),
            _ => return Vec::new(),
        };
        // In a container the path may be the host's and lead nowhere; the root is then the container's own group.
        let group = root.join(path.trim_start_matches('/'));
        group
            .ancestors()
            .take_while(|dir| dir.starts_with(&root))
            .filter_map(|dir| left_in(dir, names))
            .collect()
    }
}

/// What the group at `dir` leaves; `None` without a limit.
fn left_in(dir: &Path, [limit, usage, reclaimable]: [&str; 3]) -> Option<u64> {
    let number = |name: &str| -> Option<u64> {
        let text = fs::read_to_string(dir.join(name)).ok()?;
        text.trim().parse().ok()
    };
    let (limit, usage) = (number(limit)?, number(usage)?);
    let stat = fs::read_to_string(dir.join("memory.stat")).unwrap_or_default();
    let reclaimable: u64 = stat
        .lines()
        .filter_map(|line| line.split_once(' '))
        .find(|(name, _)| *name == reclaimable)
        .and_then(|(_, bytes)| bytes.trim().parse().ok())
        .unwrap_or(0);
    Some(limit.saturating_sub(usage.saturating_sub(reclaimable)))
}

/// The value of a line `name   123 kB`, in bytes.
fn kib_of(file: &Path, name: &str) -> Option<u64> {
    let text = fs::read_to_string(file).ok()?;
    let value = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kib: u64 = value.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    /// Files under a fresh root, and what they leave.
    fn available(files: &[(&str, &str)]) -> Option<u64> {
        let root = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let file = root.path().join(name);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let places = Places {
            proc: root.path().join("proc"),
            cgroup: root.path().join("cgroup"),
        };
        places.available_bytes()
    }

    const MACHINE: (&str, &str) = (
        "proc/meminfo",
        "MemTotal: 9000000 kB\nMemAvailable:    4194304 kB\n",
    );

    #[test]
    fn without_limits_it_is_what_the_machine_has() {
        assert_eq!(available(&[]), None);
        let unlimited = "Limit  Soft Limit  Hard Limit  Units\nMax address space    unlimited  unlimited  bytes\n";
        let files = [
            MACHINE,
            ("proc/self/limits", unlimited),
            ("proc/self/status", "VmSize:\t  1024 kB\n"),
            ("proc/self/cgroup", "0::/user\n"),
            ("cgroup/user/memory.max", "max\n"),
            ("cgroup/user/memory.current", "1\n"),
        ];
        assert_eq!(available(&files), Some(4096 * MIB));
    }

    #[test]
    fn a_limit_on_address_space_counts_what_is_mapped() {
        let files = [
            MACHINE,
            (
                "proc/self/limits",
                "Max address space         104857600            unlimited            bytes     \n",
            ),
            ("proc/self/status", "Name: x\nVmSize:\t   40960 kB\n"),
        ];
        assert_eq!(available(&files), Some(60 * MIB));
    }

    #[test]
    fn every_group_up_to_the_root_limits() {
        let (limit, usage) = ((200 * MIB).to_string(), (150 * MIB).to_string());
        let stat = format!("anon 5\ninactive_file {}\n", 30 * MIB);
        let files = [
            MACHINE,
            ("proc/self/cgroup", "0::/outer/inner\n"),
            ("cgroup/outer/inner/memory.max", "max"),
            ("cgroup/outer/inner/memory.current", "1"),
            ("cgroup/outer/memory.max", &limit),
            ("cgroup/outer/memory.current", &usage),
            ("cgroup/outer/memory.stat", &stat),
        ];
        assert_eq!(available(&files), Some(80 * MIB));
    }

    #[test]
    fn a_group_of_the_first_version_may_be_seen_as_the_root_only() {
        let (limit, usage) = ((512 * MIB).to_string(), (12 * MIB).to_string());
        let files = [
            MACHINE,
            ("proc/self/cgroup", "5:cpu:/x\n4:memory:/docker/abc\n0::/\n"),
            ("cgroup/memory/memory.limit_in_bytes", &limit),
            ("cgroup/memory/memory.usage_in_bytes", &usage),
            ("cgroup/cpu/x/memory.limit_in_bytes", "1"),
        ];
        assert_eq!(available(&files), Some(500 * MIB));
    }
}
