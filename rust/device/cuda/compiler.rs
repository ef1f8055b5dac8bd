//! NVRTC: device code to machine code or PTX for one architecture, with no GPU needed.

use std::ffi::{CStr, CString};

use cudarc::nvrtc::{result, sys};

use super::source::{HEADERS, KernelSource};
use crate::error::DeviceError;

/// A GPU architecture that kernels are compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Arch {
    /// Ampere and Ada: no bulk copies, no clusters.
    Sm80,
    /// Hopper, with its own instructions.
    Sm90a,
    /// Blackwell workstation cards.
    Sm120,
}

impl Arch {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Sm80, Self::Sm90a, Self::Sm120];

    /// As the compiler spells it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
            Self::Sm120 => "sm_120",
        }
    }

    /// The architecture spelt `name`.
    ///
    /// # Errors
    /// [`DeviceError::UnknownArch`].
    pub fn from_name(name: &str) -> Result<Self, DeviceError> {
        Self::ALL
            .into_iter()
            .find(|arch| arch.name() == name)
            .ok_or_else(|| DeviceError::UnknownArch {
                got: name.to_owned(),
            })
    }

    /// What to compile for a GPU of this compute capability.
    ///
    /// # Errors
    /// [`DeviceError::UnknownArch`] for those that run none of [`Self::ALL`].
    pub fn of_gpu(major: i32, minor: i32) -> Result<Self, DeviceError> {
        match (major, minor) {
            (8, _) => Ok(Self::Sm80),
            (9, 0) => Ok(Self::Sm90a),
            (12, _) => Ok(Self::Sm120),
            _ => Err(DeviceError::UnknownArch {
                got: format!("sm_{major}{minor}"),
            }),
        }
    }
}

/// What sources are compiled to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CodeForm {
    /// Machine code: loads at once, and the compiler says what it did with registers.
    #[default]
    Cubin,
    /// Text that the driver compiles when it loads it: for tools that stand in for a driver or look into it.
    Ptx,
}

impl CodeForm {
    /// What `SPECPILOT_KERNEL_CODE` asks for, `cubin` or `ptx`; machine code where it is not set.
    ///
    /// # Errors
    /// [`DeviceError::UnknownCodeForm`].
    pub fn from_env() -> Result<Self, DeviceError> {
        match std::env::var_os("SPECPILOT_KERNEL_CODE") {
            Some(name) => Self::from_name(&name.to_string_lossy()),
            None => Ok(Self::default()),
        }
    }

    fn from_name(name: &str) -> Result<Self, DeviceError> {
        [Self::Cubin, Self::Ptx]
            .into_iter()
            .find(|form| form.name() == name)
            .ok_or_else(|| DeviceError::UnknownCodeForm {
                got: name.to_owned(),
            })
    }

    /// Its name, also that of its files.
    pub fn name(self) -> &'static str {
        match self {
            Self::Cubin => "cubin",
            Self::Ptx => "ptx",
        }
    }
}

/// Device code of one source.
#[derive(Clone, Debug)]
pub struct Compiled {
    /// A cubin, or a text with a zero byte behind it.
    pub code: Vec<u8>,
    /// What the compiler said: of machine code the registers, shared memory and spills of every kernel. Empty if the
    /// code was cached.
    pub log: String,
    /// Whether the code came from the disk.
    pub was_cached: bool,
}

/// Options besides the architecture and the form; part of the cache's key.
pub(super) const OPTIONS: [&str; 2] = ["--std=c++17", "--ptxas-options=-v"];

/// The compiler's version.
///
/// # Errors
/// [`DeviceError::NoCompiler`] when its library is not there.
pub fn compiler_version() -> Result<(i32, i32), DeviceError> {
    // SAFETY: only looks for the library on the loader's path.
    if !unsafe { sys::is_culib_present() } {
        return Err(DeviceError::NoCompiler);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are valid places for a number.
    unsafe { sys::nvrtcVersion(&mut major, &mut minor) }
        .result()
        .map_err(|_| DeviceError::NoCompiler)?;
    Ok((major, minor))
}

/// Compiles `source` for `arch`.
///
/// # Errors
/// [`DeviceError::NoCompiler`]; [`DeviceError::Compile`] with the compiler's log.
pub fn compile(source: &KernelSource, arch: Arch, form: CodeForm) -> Result<Compiled, DeviceError> {
    compiler_version()?;
    let refused = |log: String| DeviceError::Compile {
        stem: source.stem,
        arch: arch.name(),
        log,
    };
    let program = Program::new(source).map_err(|error| refused(format!("{error:?}")))?;
    let target = match form {
        CodeForm::Cubin => arch.name().to_owned(),
        CodeForm::Ptx => arch.name().replace("sm_", "compute_"),
    };
    let mut options = vec![format!("--gpu-architecture={target}")];
    options.extend(OPTIONS.map(str::to_owned));
    // SAFETY: the program was created above and lives until the end of this function.
    let outcome = unsafe { result::compile_program(program.0, &options) };
    let log = program.log();
    outcome.map_err(|error| refused(format!("{error:?}\n{log}")))?;
    let code = match form {
        CodeForm::Cubin => program.cubin(),
        CodeForm::Ptx => program.ptx(),
    };
    Ok(Compiled {
        code: code.map_err(|error| refused(format!("{error:?}\n{log}")))?,
        log,
        was_cached: false,
    })
}

/// A program of the compiler's, destroyed with this value.
struct Program(sys::nvrtcProgram);

impl Program {
    fn new(source: &KernelSource) -> Result<Self, result::NvrtcError> {
        // Texts are compiled in and hold no zero byte.
        let text = |text: &str| CString::new(text).unwrap_or_default();
        let (code, name) = (text(source.text), text(&format!("{}.cu", source.stem)));
        let names: Vec<CString> = HEADERS.iter().map(|(name, _)| text(name)).collect();
        let texts: Vec<CString> = HEADERS.iter().map(|(_, header)| text(header)).collect();
        let pointers = |strings: &[CString]| -> Vec<*const std::ffi::c_char> {
            strings.iter().map(|string| string.as_ptr()).collect()
        };
        let mut program = std::ptr::null_mut();
        // SAFETY: all strings end in a zero byte and outlive the call, which copies them; the arrays hold as many
        // pointers as it is told.
        unsafe {
            sys::nvrtcCreateProgram(
                &mut program,
                code.as_ptr(),
                name.as_ptr(),
                HEADERS.len() as std::ffi::c_int,
                pointers(&texts).as_ptr(),
                pointers(&names).as_ptr(),
            )
        }
        .result()?;
        Ok(Self(program))
    }

    fn log(&self) -> String {
        // SAFETY: the program is alive.
        let Ok(log) = (unsafe { result::get_program_log(self.0) }) else {
            return String::new();
        };
        let bytes: Vec<u8> = log.into_iter().map(|c| c as u8).collect();
        CStr::from_bytes_until_nul(&bytes)
            .map(|log| log.to_string_lossy().into_owned())
            .unwrap_or_default()
    }

    fn cubin(&self) -> Result<Vec<u8>, result::NvrtcError> {
        let mut len = 0;
        // SAFETY: the program is alive and compiled; `len` is a valid place.
        unsafe { sys::nvrtcGetCUBINSize(self.0, &mut len) }.result()?;
        let mut cubin = vec![0_u8; len];
        // SAFETY: `cubin` has room for the bytes just counted.
        unsafe { sys::nvrtcGetCUBIN(self.0, cubin.as_mut_ptr().cast()) }.result()?;
        Ok(cubin)
    }

    fn ptx(&self) -> Result<Vec<u8>, result::NvrtcError> {
        // SAFETY: the program is alive and compiled.
        let text = unsafe { result::get_ptx(self.0) }?;
        Ok(text.into_iter().map(|c| c as u8).collect())
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // SAFETY: created in `new` and destroyed only here. Nothing is to be done about a failure.
        let _ = unsafe { result::destroy_program(self.0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_named_or_refused() {
        for form in [CodeForm::Cubin, CodeForm::Ptx] {
            assert_eq!(CodeForm::from_name(form.name()).unwrap(), form);
        }
        let error = CodeForm::from_name("sass").unwrap_err().to_string();
        assert!(
            error.contains("\"sass\"") && error.contains("cubin or ptx"),
            "{error}"
        );
    }
}
