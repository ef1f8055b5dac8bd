//! Arithmetic instructions: each is one function of a lane's values, run over the lanes of a warp.
//!
//! [`lookup`] finds the entry of an opcode. The types of the lane function's arguments say which registers the
//! instruction takes; [`alu`] wraps it in loops that the compiler turns into vector instructions, once for any CPU and
//! once for CPUs with AVX2 and FMA. Both give equal bits: nothing is fused or reordered.

mod convert;
mod float;
mod int;

pub use int::{insert_bits, pair_moves};

use crate::ptx::inst::{Args, CONSTANT, Plane, Slot, Width};

/// Runs an arithmetic instruction in the lanes of a mask.
///
/// # Safety
/// The operands must name planes and predicates of the instruction's widths that the register file has, and the CPU
/// must be the one that [`lookup`] chose the function on.
pub type AluFn = unsafe fn(&RegisterFile, &Args, u32);

/// What an opcode needs and does.
#[derive(Debug, Clone, Copy)]
pub struct Alu {
    /// Runs it.
    pub run: AluFn,
    /// Width of the destination.
    pub destination: Width,
    /// Widths of the sources.
    pub sources: &'static [Width],
}

/// The entry of `opcode`, if it is arithmetic that the emulator knows.
pub fn lookup(opcode: &str) -> Option<Alu> {
    int::lookup(opcode)
        .or_else(|| float::lookup(opcode))
        .or_else(|| convert::lookup(opcode))
}

/// Where the registers of a warp and the constants of its kernel lie.
#[derive(Debug, Clone, Copy)]
pub struct RegisterFile {
    /// Planes of the warp.
    pub registers: *mut Plane,
    /// Planes of the kernel's constant bank.
    pub constants: *const Plane,
    /// Predicates of the warp, one bit a lane.
    pub predicates: *mut u32,
}

impl RegisterFile {
    /// The first plane of a source.
    ///
    /// # Safety
    /// `slot` must name a plane of this file.
    #[inline(always)]
    pub unsafe fn source(&self, slot: Slot) -> *const Plane {
        let index = (slot & !CONSTANT) as usize;
        let bank = if slot & CONSTANT == 0 {
            self.registers.cast_const()
        } else {
            self.constants
        };
        // SAFETY: the caller says that the plane exists.
        unsafe { bank.add(index) }
    }

    /// A predicate's bits.
    ///
    /// # Safety
    /// `slot` must name a predicate of this file.
    #[inline(always)]
    pub unsafe fn predicate(&self, slot: Slot) -> u32 {
        // SAFETY: the caller says that the predicate exists.
        unsafe { *self.predicates.add(slot as usize) }
    }

    /// Sets a predicate in the lanes of `mask`.
    ///
    /// # Safety
    /// As for [`Self::predicate`].
    #[inline(always)]
    pub unsafe fn set_predicate(&self, slot: Slot, bits: u32, mask: u32) {
        // SAFETY: the caller says that the predicate exists; no reference to it is alive.
        unsafe {
            let predicate = self.predicates.add(slot as usize);
            *predicate = (*predicate & !mask) | (bits & mask);
        }
    }

    /// Writes a destination in the lanes of `mask`.
    ///
    /// # Safety
    /// `slot` must name a register of this file, with as many planes as `T` needs.
    #[inline(always)]
    pub unsafe fn write<T: Copy>(&self, slot: Slot, values: &[T; 32], mask: u32) {
        // SAFETY: the caller says that the planes exist; no reference to them is alive.
        let plane = unsafe { &mut *self.registers.add(slot as usize).cast::<[T; 32]>() };
        if mask == u32::MAX {
            *plane = *values;
        } else {
            for lane in 0..32 {
                plane[lane] = if mask >> lane & 1 == 1 {
                    values[lane]
                } else {
                    plane[lane]
                };
            }
        }
    }
}

/// A value for every lane. A loop over a finished array becomes vector instructions, `array::from_fn` does not.
#[inline(always)]
pub(crate) fn each_lane<T: Copy + Default>(mut value: impl FnMut(usize) -> T) -> [T; 32] {
    let mut values = [T::default(); 32];
    for (lane, slot) in values.iter_mut().enumerate() {
        *slot = value(lane);
    }
    values
}

/// A type of a lane's value, which says what register it lies in.
pub(crate) trait Cell: Copy {
    /// Width of the register.
    const WIDTH: Width;
    /// How a source is held while lanes are read.
    type Source: Copy;

    /// Finds a source.
    ///
    /// # Safety
    /// `slot` must name a register or constant of [`Self::WIDTH`] in `file`.
    unsafe fn source(file: &RegisterFile, slot: Slot) -> Self::Source;

    /// The value of a lane.
    ///
    /// # Safety
    /// `source` must come from a file that is still there; `lane` must be below 32.
    unsafe fn lane(source: Self::Source, lane: usize) -> Self;

    /// Writes a destination in the lanes of `mask`.
    ///
    /// # Safety
    /// `slot` must name a register of [`Self::WIDTH`] in `file`.
    unsafe fn write(file: &RegisterFile, slot: Slot, values: &[Self; 32], mask: u32);
}

macro_rules! plane_cell {
    ($($cell:ty: $width:ident),*) => {$(
        impl Cell for $cell {
            const WIDTH: Width = Width::$width;
            type Source = *const [$cell; 32];

            #[inline(always)]
            unsafe fn source(file: &RegisterFile, slot: Slot) -> Self::Source {
                // SAFETY: passed on.
                unsafe { file.source(slot).cast() }
            }

            #[inline(always)]
            unsafe fn lane(source: Self::Source, lane: usize) -> Self {
                // SAFETY: the caller says that the plane is there.
                unsafe { (&(*source))[lane] }
            }

            #[inline(always)]
            unsafe fn write(file: &RegisterFile, slot: Slot, values: &[Self; 32], mask: u32) {
                // SAFETY: passed on.
                unsafe { file.write(slot, values, mask) }
            }
        }
    )*};
}

plane_cell!(u32: W32, i32: W32, f32: W32, u64: W64, i64: W64, f64: W64);

impl Cell for u16 {
    const WIDTH: Width = Width::W16;
    type Source = *const [u32; 32];

    #[inline(always)]
    unsafe fn source(file: &RegisterFile, slot: Slot) -> Self::Source {
        // SAFETY: passed on.
        unsafe { file.source(slot).cast() }
    }

    #[inline(always)]
    unsafe fn lane(source: Self::Source, lane: usize) -> Self {
        // SAFETY: the caller says that the plane is there.
        unsafe { (&(*source))[lane] as u16 }
    }

    #[inline(always)]
    unsafe fn write(file: &RegisterFile, slot: Slot, values: &[Self; 32], mask: u32) {
        // SAFETY: passed on.
        unsafe { file.write(slot, &each_lane(|lane| u32::from(values[lane])), mask) }
    }
}

impl Cell for bool {
    const WIDTH: Width = Width::Predicate;
    type Source = u32;

    #[inline(always)]
    unsafe fn source(file: &RegisterFile, slot: Slot) -> Self::Source {
        // SAFETY: passed on.
        unsafe { file.predicate(slot) }
    }

    #[inline(always)]
    unsafe fn lane(source: Self::Source, lane: usize) -> Self {
        source >> lane & 1 == 1
    }

    #[inline(always)]
    unsafe fn write(file: &RegisterFile, slot: Slot, values: &[Self; 32], mask: u32) {
        // SAFETY: passed on.
        unsafe { file.set_predicate(slot, bits(values), mask) }
    }
}

/// One bit a lane.
#[inline(always)]
fn bits(lanes: &[bool; 32]) -> u32 {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_movemask_epi8, _mm_slli_epi16};
        let half = |at: usize| {
            // SAFETY: SSE2 is part of x86-64, and 16 bytes from `at` on, 0 or 16, lie in the array. A bool is 0 or 1,
            // so that shifting by seven brings each to the top of its byte.
            let mask = unsafe {
                let bytes = _mm_loadu_si128(lanes.as_ptr().add(at).cast::<__m128i>());
                _mm_movemask_epi8(_mm_slli_epi16(bytes, 7))
            };
            mask as u32
        };
        half(0) | half(16) << 16
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        lanes
            .iter()
            .rev()
            .fold(0, |bits, &lane| bits << 1 | u32::from(lane))
    }
}

/// Whether to use the functions compiled for AVX2 and FMA.
#[cfg(target_arch = "x86_64")]
pub(crate) fn has_wide_vectors() -> bool {
    is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
}

/// Makes an [`Alu`] from a function of one lane's values: `alu!(|a: u32, b: u32| -> u32 { a & b })`.
macro_rules! alu {
    (|$($source:ident: $type:ty),*| -> $result:ty $lane:block) => {{
        #[inline(always)]
        unsafe fn all_lanes(
            file: &$crate::alu::RegisterFile,
            args: &$crate::ptx::inst::Args,
            mask: u32,
        ) {
            #[inline(always)]
            fn one_lane($($source: $type),*) -> $result $lane
            let mut slots = [args.a, args.b, args.c].into_iter();
            // SAFETY: the caller says that the operands exist with the widths of these types.
            unsafe {
                $(let $source = <$type as $crate::alu::Cell>::source(file, slots.next().unwrap_or_default());)*
                let values: [$result; 32] = $crate::alu::each_lane(|lane| {
                    one_lane($(<$type as $crate::alu::Cell>::lane($source, lane)),*)
                });
                <$result as $crate::alu::Cell>::write(file, args.d, &values, mask);
            }
        }
        $crate::alu::alu_of!(
            all_lanes,
            <$result as $crate::alu::Cell>::WIDTH,
            &[$(<$type as $crate::alu::Cell>::WIDTH),*]
        )
    }};
}

/// Makes an [`Alu`] from a function of an instruction's lanes, its destination's and its sources' widths.
macro_rules! alu_of {
    ($all_lanes:ident, $destination:expr, $sources:expr) => {{
        unsafe fn plain(
            file: &$crate::alu::RegisterFile,
            args: &$crate::ptx::inst::Args,
            mask: u32,
        ) {
            // SAFETY: passed on.
            unsafe { $all_lanes(file, args, mask) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma")]
        unsafe fn wide(
            file: &$crate::alu::RegisterFile,
            args: &$crate::ptx::inst::Args,
            mask: u32,
        ) {
            // SAFETY: passed on.
            unsafe { $all_lanes(file, args, mask) }
        }
        #[cfg(target_arch = "x86_64")]
        let run: $crate::alu::AluFn = if $crate::alu::has_wide_vectors() {
            wide
        } else {
            plain
        };
        #[cfg(not(target_arch = "x86_64"))]
        let run: $crate::alu::AluFn = plain;
        $crate::alu::Alu {
            run,
            destination: $destination,
            sources: $sources,
        }
    }};
}

pub(crate) use {alu, alu_of};
