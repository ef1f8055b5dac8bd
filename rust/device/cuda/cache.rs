//! Compiled kernels on disk.
//!
//! A file's name holds a key of everything its content follows from: source, headers, options, architecture, form,
//! compiler.
//! Files are written beside and renamed, and begin with a checksum, so that a torn or altered one is rebuilt. What a
//! folder does not take is kept by the process: that costs a compilation in each, and nothing else.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};

use sha2::{Digest, Sha256};

use super::compiler::{self, Arch, CodeForm, Compiled, OPTIONS};
use super::source::{HEADERS, KernelSource};
use crate::error::DeviceError;

const CHECKSUM_BYTES: usize = 32;

/// A folder of compiled kernels, or none.
#[derive(Clone, Debug)]
pub struct CodeCache {
    folder: Option<PathBuf>,
    form: CodeForm,
}

impl CodeCache {
    /// The user's cache: `$SPECPILOT_CACHE_DIR`, else `specpilot_rs` in `$XDG_CACHE_HOME` or `~/.cache`.
    pub fn in_user_folder(form: CodeForm) -> Self {
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let own = variable("SPECPILOT_CACHE_DIR").map(PathBuf::from);
        let shared = || {
            let home = || variable("HOME").map(|home| PathBuf::from(home).join(".cache"));
            let cache = variable("XDG_CACHE_HOME").map(PathBuf::from).or_else(home);
            cache.map(|cache| cache.join("specpilot_rs"))
        };
        Self {
            folder: own.or_else(shared).map(|folder| folder.join("cubin")),
            form,
        }
    }

    /// A cache in `folder`.
    pub fn in_folder(folder: &Path, form: CodeForm) -> Self {
        Self {
            folder: Some(folder.to_owned()),
            form,
        }
    }

    /// The code of `source`, from disk if it is there and whole.
    ///
    /// # Errors
    /// What [`compiler::compile`] says.
    pub fn get_or_compile(
        &self,
        source: &KernelSource,
        arch: Arch,
    ) -> Result<Compiled, DeviceError> {
        let file = self.file(source, arch)?;
        let kept = file.as_deref().and_then(|file| {
            let unwritten = unwritten().lock().unwrap_or_else(PoisonError::into_inner);
            unwritten.get(file).cloned()
        });
        match kept.or_else(|| file.as_deref().and_then(read_checked)) {
            Some(code) => Ok(Compiled {
                code,
                log: String::new(),
                was_cached: true,
            }),
            None => self.recompile(source, arch),
        }
    }

    /// Compiles `source` whatever is on disk, and keeps the result there if the disk lets it.
    ///
    /// # Errors
    /// What [`compiler::compile`] says.
    pub fn recompile(&self, source: &KernelSource, arch: Arch) -> Result<Compiled, DeviceError> {
        let compiled = compiler::compile(source, arch, self.form)?;
        if let Some(file) = self.file(source, arch)? {
            let mut unwritten = unwritten().lock().unwrap_or_else(PoisonError::into_inner);
            match write_checked(&file, &compiled.code) {
                Ok(()) => unwritten.remove(&file),
                Err(_) => unwritten.insert(file, compiled.code.clone()),
            };
        }
        Ok(compiled)
    }

    /// Where `source` lies for `arch` and this compiler.
    fn file(&self, source: &KernelSource, arch: Arch) -> Result<Option<PathBuf>, DeviceError> {
        let Some(folder) = &self.folder else {
            return Ok(None);
        };
        let (major, minor) = compiler::compiler_version()?;
        let mut hash = Sha256::new();
        let mut add = |part: &str| {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        };
        add(source.text);
        for (name, text) in HEADERS {
            add(name);
            add(text);
        }
        for option in OPTIONS {
            add(option);
        }
        add(arch.name());
        add(self.form.name());
        add(&format!("{major}.{minor}"));
        add(env!("CARGO_PKG_VERSION"));
        let mut key = String::new();
        for byte in &hash.finalize()[..12] {
            let _ = write!(key, "{byte:02x}");
        }
        let (stem, arch, form) = (source.stem, arch.name(), self.form.name());
        let name = format!("{stem}-{arch}-{key}.{form}");
        Ok(Some(folder.join(name)))
    }
}

/// Code by the file that could not be written.
fn unwritten() -> &'static Mutex<HashMap<PathBuf, Vec<u8>>> {
    static UNWRITTEN: OnceLock<Mutex<HashMap<PathBuf, Vec<u8>>>> = OnceLock::new();
    UNWRITTEN.get_or_init(Mutex::default)
}

/// The code in `file`, or nothing if it is missing, cannot be read or fails its checksum.
fn read_checked(file: &Path) -> Option<Vec<u8>> {
    let bytes = fs::read(file).ok()?;
    let (checksum, code) = bytes.split_at_checked(CHECKSUM_BYTES)?;
    (Sha256::digest(code).as_slice() == checksum).then(|| code.to_vec())
}

/// Writes `code` so that `file` holds all of it or is left as it was.
fn write_checked(file: &Path, code: &[u8]) -> io::Result<()> {
    let folder = file.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    let draft = file.with_extension(format!("{}.tmp", std::process::id()));
    let written = (|| {
        let mut draft = File::create(&draft)?;
        draft.write_all(&Sha256::digest(code))?;
        draft.write_all(code)?;
        draft.sync_all()
    })();
    let outcome = written.and_then(|()| fs::rename(&draft, file));
    if outcome.is_err() {
        let _ = fs::remove_file(&draft);
    }
    outcome
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_back_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("deep").join("kernel.cubin");
        assert_eq!(read_checked(&file), None);
        write_checked(&file, b"machine code").unwrap();
        assert_eq!(read_checked(&file).as_deref(), Some(&b"machine code"[..]));
        let names: Vec<_> = fs::read_dir(file.parent().unwrap()).unwrap().collect();
        assert_eq!(names.len(), 1, "the draft is gone");
        let mut bytes = fs::read(&file).unwrap();
        bytes.truncate(bytes.len() - 1);
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read_checked(&file), None, "truncated");
        bytes.push(b'x');
        fs::write(&file, &bytes).unwrap();
        assert_eq!(read_checked(&file), None, "altered");
        fs::write(&file, b"short").unwrap();
        assert_eq!(read_checked(&file), None, "no checksum");
    }

    #[test]
    fn a_folder_that_cannot_be_written_is_an_error_that_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let blocked = folder.path().join("file");
        fs::write(&blocked, b"").unwrap();
        assert!(write_checked(&blocked.join("kernel.cubin"), b"code").is_err());
        assert_eq!(fs::read(&blocked).unwrap(), b"");
    }
}
