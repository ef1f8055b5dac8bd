//! The directory that a conversion fills: it has its name only once it is complete.
//!
//! Work happens in `OUT.partial`, whose files appear one by one, each whole. A run that ends early, for whatever
//! reason, leaves that directory and nothing else; the next run for the same checkpoint goes on in it. A lock keeps two
//! runs apart, and a fingerprint of the source keeps one checkpoint's shards from ending in another's directory.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use super::shard_writer::io_error;
use super::{Sha256Digest, VERSION_KEY};
use crate::error::CheckpointError;
use crate::weights::checkpoint::INDEX_FILE;

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

/// In a partial directory: locked while a run works, holds the fingerprint of what is converted.
const LOCK_FILE: &str = ".conversion";
const TEMPORARY_SUFFIX: &str = ".tmp";

/// The name beside `path` under which it is written.
pub(super) fn temporary_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!(".{name}{TEMPORARY_SUFFIX}"))
}

/// A directory in the making.
pub(super) struct OutputDir {
    out: PathBuf,
    partial: PathBuf,
    /// Held, not read: closing it gives the lock up.
    _lock: File,
}

impl OutputDir {
    /// Takes possession of `out`, which must be absent or empty, and of what an earlier run left for it.
    pub(super) fn open(out: &Path, fingerprint: Sha256Digest) -> Result<Self> {
        refuse_taken(out)?;
        let name = out
            .file_name()
            .ok_or_else(|| CheckpointError::OutputTaken {
                dir: out.to_owned(),
                holds: "no name of its own".to_owned(),
            })?;
        let partial = out.with_file_name(format!("{}.partial", name.to_string_lossy()));
        let is_new = !partial.exists();
        fs::create_dir_all(&partial).map_err(io_error(&partial))?;
        let lock_path = partial.join(LOCK_FILE);
        if !is_new && !lock_path.exists() && first_entry(&partial)?.is_some() {
            return Err(CheckpointError::OutputTaken {
                dir: partial,
                holds: "files that no conversion left".to_owned(),
            });
        }
        let lock = take_lock(&lock_path, &partial, &fingerprint.to_string())?;
        let dir = Self {
            out: out.to_owned(),
            partial,
            _lock: lock,
        };
        dir.remove_temporary_files()?;
        Ok(dir)
    }

    /// Where file `name` is to be written.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.partial.join(name)
    }

    /// Writes a small file.
    pub(super) fn write(&self, name: &str, bytes: &[u8]) -> Result<()> {
        let path = self.path(name);
        let temporary = temporary_name(&path);
        let write = || {
            let mut file = File::create(&temporary)?;
            file.write_all(bytes)?;
            file.sync_all()?;
            fs::rename(&temporary, &path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&temporary);
            io_error(&path)(error)
        })
    }

    /// Gives the directory its name. Everything in it must be complete.
    pub(super) fn publish(self) -> Result<()> {
        let publish = || {
            File::open(&self.partial)?.sync_all()?;
            fs::rename(&self.partial, &self.out)?;
            // Last, so that a rename that fails leaves a directory that the next run knows as ours.
            fs::remove_file(self.out.join(LOCK_FILE))?;
            // The rename itself is on the disk only with the directory that holds the name.
            let parent = self.out.parent().filter(|p| !p.as_os_str().is_empty());
            File::open(parent.unwrap_or(Path::new(".")))?.sync_all()
        };
        publish().map_err(io_error(&self.out))
    }

    fn remove_temporary_files(&self) -> Result<()> {
        let remove = || {
            for entry in fs::read_dir(&self.partial)? {
                let entry = entry?;
                let name = entry.file_name();
                let name = name.to_string_lossy();
                if name.starts_with('.') && name.ends_with(TEMPORARY_SUFFIX) {
                    fs::remove_file(entry.path())?;
                }
            }
            Ok(())
        };
        remove().map_err(io_error(&self.partial))
    }
}

/// Refuses a path that holds anything.
fn refuse_taken(out: &Path) -> Result<()> {
    let holds = match fs::metadata(out) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(io_error(out)(error)),
        Ok(metadata) if !metadata.is_dir() => "a file".to_owned(),
        Ok(_) if is_converted(out) => "a W12 checkpoint already".to_owned(),
        Ok(_) => match first_entry(out)? {
            None => return Ok(()),
            Some(name) => format!("other files, first `{name}`"),
        },
    };
    Err(CheckpointError::OutputTaken {
        dir: out.to_owned(),
        holds,
    })
}

fn is_converted(dir: &Path) -> bool {
    fs::read(dir.join(INDEX_FILE))
        .ok()
        .and_then(|text| serde_json::from_slice::<serde_json::Value>(&text).ok())
        .is_some_and(|index| !index["metadata"][VERSION_KEY].is_null())
}

/// The first name in `dir`, by alphabet.
fn first_entry(dir: &Path) -> Result<Option<String>> {
    let names: io::Result<Vec<String>> = fs::read_dir(dir).and_then(|entries| {
        entries
            .map(|e| Ok(e?.file_name().to_string_lossy().into_owned()))
            .collect()
    });
    Ok(names.map_err(io_error(dir))?.into_iter().min())
}

/// Locks `path`, writing `fingerprint` to it if it is new.
fn take_lock(path: &Path, partial: &Path, fingerprint: &str) -> Result<File> {
    let mut lock = File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)
        .map_err(io_error(path))?;
    lock.try_lock().map_err(|error| match error {
        TryLockError::WouldBlock => CheckpointError::OutputTaken {
            dir: partial.to_owned(),
            holds: "a conversion that is still running".to_owned(),
        },
        TryLockError::Error(source) => io_error(path)(source),
    })?;
    let mut found = String::new();
    lock.read_to_string(&mut found).map_err(io_error(path))?;
    // A run that was stopped while it wrote these few bytes had converted nothing.
    let is_unfinished = found.len() < fingerprint.len();
    if !is_unfinished && found != fingerprint {
        return Err(CheckpointError::OutputTaken {
            dir: partial.to_owned(),
            holds: "the unfinished conversion of another checkpoint".to_owned(),
        });
    }
    let mut write = || {
        lock.seek(SeekFrom::Start(0))?;
        lock.write_all(fingerprint.as_bytes())?;
        lock.sync_all()
    };
    if is_unfinished {
        write().map_err(io_error(path))?;
    }
    Ok(lock)
}
