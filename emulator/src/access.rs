//! Loads, stores and atomics of a warp.

#[cfg(target_arch = "x86_64")]
use crate::alu::has_wide_vectors;
use crate::alu::{RegisterFile, each_lane};
use crate::fault::Fault;
use crate::machine::Machine;
use crate::pointers::{Pointers, lanes_of};
use crate::ptx::inst::{Access, AtomicOp, Slot};
use crate::warp::{Step, Warp};

impl Warp {
    /// `d..., address`.
    pub fn load(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        operands: &[Slot],
        touched: (u32, u32),
    ) -> Result<Step, Fault> {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn wide(
                warp: &mut Warp,
                machine: &mut Machine<'_>,
                file: &RegisterFile,
                access: &Access,
                operands: &[Slot],
                touched: (u32, u32),
            ) -> Result<Step, Fault> {
                warp.load_lanes(machine, file, access, operands, touched)
            }
            if has_wide_vectors() {
                // SAFETY: the CPU has what the function is compiled for.
                return unsafe { wide(self, machine, file, access, operands, touched) };
            }
        }
        self.load_lanes(machine, file, access, operands, touched)
    }

    #[inline(always)]
    fn load_lanes(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        let (&address, data) = operands.split_last().expect("the decoder gives an address");
        let pointers = self.resolve(machine, file, access, address, (pc, mask))?;
        // SAFETY: `resolve` checked all bytes of the access in the lanes of the mask; the decoder gave each element a
        // register that holds it.
        unsafe {
            match (access.element_bytes, access.signed, access.wide_data) {
                (1, false, false) => {
                    load_elements::<u8, u32>(file, &pointers, data, mask, u32::from)
                }
                (1, false, true) => {
                    load_elements::<u8, u64>(file, &pointers, data, mask, u64::from)
                }
                (2, false, false) => {
                    load_elements::<u16, u32>(file, &pointers, data, mask, u32::from)
                }
                (2, false, true) => {
                    load_elements::<u16, u64>(file, &pointers, data, mask, u64::from)
                }
                (4, _, false) => {
                    load_elements::<u32, u32>(file, &pointers, data, mask, |word| word)
                }
                (4, false, true) => {
                    load_elements::<u32, u64>(file, &pointers, data, mask, u64::from)
                }
                (8, _, true) => load_elements::<u64, u64>(file, &pointers, data, mask, |word| word),
                (1, true, false) => {
                    load_elements::<i8, i32>(file, &pointers, data, mask, i32::from)
                }
                (1, true, true) => load_elements::<i8, i64>(file, &pointers, data, mask, i64::from),
                (2, true, false) => {
                    load_elements::<i16, i32>(file, &pointers, data, mask, i32::from)
                }
                (2, true, true) => {
                    load_elements::<i16, i64>(file, &pointers, data, mask, i64::from)
                }
                (4, true, true) => {
                    load_elements::<i32, i64>(file, &pointers, data, mask, i64::from)
                }
                (bytes, ..) => {
                    unreachable!("the decoder refuses elements of {bytes} bytes in these registers")
                }
            }
        }
        Ok(if access.volatile {
            Step::NextYielding
        } else {
            Step::Next
        })
    }

    /// `address, s...`.
    pub fn store(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        operands: &[Slot],
        touched: (u32, u32),
    ) -> Result<Step, Fault> {
        #[cfg(target_arch = "x86_64")]
        {
            #[target_feature(enable = "avx2,fma")]
            fn wide(
                warp: &mut Warp,
                machine: &mut Machine<'_>,
                file: &RegisterFile,
                access: &Access,
                operands: &[Slot],
                touched: (u32, u32),
            ) -> Result<Step, Fault> {
                warp.store_lanes(machine, file, access, operands, touched)
            }
            if has_wide_vectors() {
                // SAFETY: the CPU has what the function is compiled for.
                return unsafe { wide(self, machine, file, access, operands, touched) };
            }
        }
        self.store_lanes(machine, file, access, operands, touched)
    }

    #[inline(always)]
    fn store_lanes(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        let (&address, data) = operands
            .split_first()
            .expect("the decoder gives an address");
        let pointers = self.resolve(machine, file, access, address, (pc, mask))?;
        // SAFETY: as for loads; shared and device memory are touched through pointers only while a kernel runs.
        unsafe {
            match (access.element_bytes, access.wide_data) {
                (1, false) => {
                    store_elements::<u8, u32>(file, &pointers, data, mask, |word| word as u8)
                }
                (1, true) => {
                    store_elements::<u8, u64>(file, &pointers, data, mask, |word| word as u8)
                }
                (2, false) => {
                    store_elements::<u16, u32>(file, &pointers, data, mask, |word| word as u16)
                }
                (2, true) => {
                    store_elements::<u16, u64>(file, &pointers, data, mask, |word| word as u16)
                }
                (4, false) => store_elements::<u32, u32>(file, &pointers, data, mask, |word| word),
                (4, true) => {
                    store_elements::<u32, u64>(file, &pointers, data, mask, |word| word as u32)
                }
                (8, true) => store_elements::<u64, u64>(file, &pointers, data, mask, |word| word),
                (bytes, _) => {
                    unreachable!("the decoder refuses elements of {bytes} bytes in these registers")
                }
            }
        }
        machine.effects += 1;
        Ok(Step::Next)
    }

    /// `d, address[, expected], operand`: the lanes' operations happen one after another. One that compares in vain, as
    /// a lock's does, lets others run.
    pub fn atomic(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        op: AtomicOp,
        operands: &[Slot],
        (pc, mask): (u32, u32),
    ) -> Result<Step, Fault> {
        let &[destination, address, expected, ..] = operands else {
            unreachable!("the decoder gives three operands or four");
        };
        let operand = *operands.last().expect("there are three at least");
        let pointers = self.resolve(machine, file, access, address, (pc, mask))?;
        let effects = machine.effects;
        let mut former = [0u64; 32];
        for lane in lanes_of(mask) {
            // SAFETY: as for loads and stores.
            unsafe {
                let value_of = |slot: Slot| match access.wide_data {
                    true => (*file.source(slot).cast::<[u64; 32]>())[lane],
                    false => u64::from((*file.source(slot)).0[lane]),
                };
                let old = match access.wide_data {
                    true => (pointers[lane] as *const u64).read_unaligned(),
                    false => u64::from((pointers[lane] as *const u32).read_unaligned()),
                };
                let value = value_of(operand);
                let new = match op {
                    AtomicOp::Add => old.wrapping_add(value),
                    AtomicOp::Max => old.max(value),
                    AtomicOp::Min => old.min(value),
                    AtomicOp::Or => old | value,
                    AtomicOp::And => old & value,
                    AtomicOp::Exchange => value,
                    AtomicOp::CompareExchange if old == value_of(expected) => value,
                    AtomicOp::CompareExchange => old,
                };
                machine.effects += u64::from(new != old);
                if access.wide_data {
                    (pointers[lane] as *mut u64).write_unaligned(new);
                } else {
                    (pointers[lane] as *mut u32).write_unaligned(new as u32);
                }
                former[lane] = old;
            }
        }
        // SAFETY: the decoder gave the destination the width of the data.
        unsafe {
            if access.wide_data {
                file.write(destination, &former, mask);
            } else {
                file.write(destination, &each_lane(|lane| former[lane] as u32), mask);
            }
        }
        Ok(match op {
            AtomicOp::CompareExchange | AtomicOp::Exchange if machine.effects == effects => {
                Step::NextYielding
            }
            _ => Step::Next,
        })
    }
}

/// # Safety
/// Each lane must point at `data.len()` elements, if `mask` has any; `data` must name registers of `R`'s width.
#[inline(always)]
unsafe fn load_elements<M: Copy, R: Copy + Default>(
    file: &RegisterFile,
    pointers: &Pointers,
    data: &[Slot],
    mask: u32,
    extend: impl Fn(M) -> R,
) {
    if mask == 0 {
        return;
    }
    if let &[slot] = data {
        // SAFETY: the caller says that register and elements exist; inactive lanes point at an active one's. A run of
        // elements of the register's size is what the register holds.
        unsafe {
            let same_size = size_of::<M>() == size_of::<R>();
            if same_size && is_run(pointers, size_of::<M>()) {
                file.write(
                    slot,
                    &(pointers[0] as *const [R; 32]).read_unaligned(),
                    mask,
                );
            } else if is_run(pointers, 0) {
                let value = extend((pointers[0] as *const M).read_unaligned());
                file.write(slot, &[value; 32], mask);
            } else {
                let read = |lane: usize| extend((pointers[lane] as *const M).read_unaligned());
                file.write(slot, &each_lane(read), mask);
            }
        }
        return;
    }
    // All elements are read before any is written: a data register may be the address.
    let mut values = [[R::default(); 32]; 4];
    for (lane, &pointer) in pointers.iter().enumerate() {
        for (element, values) in values.iter_mut().take(data.len()).enumerate() {
            // SAFETY: as above.
            values[lane] = extend(unsafe { (pointer as *const M).add(element).read_unaligned() });
        }
    }
    for (values, &slot) in values.iter().zip(data) {
        // SAFETY: the caller says that the register exists.
        unsafe { file.write(slot, values, mask) };
    }
}

/// Whether each lane points `stride` bytes behind the one before it.
#[inline(always)]
fn is_run(pointers: &Pointers, stride: usize) -> bool {
    let first = pointers[0];
    let is_next =
        |(lane, &pointer): (usize, &u64)| pointer == first.wrapping_add((lane * stride) as u64);
    pointers
        .iter()
        .enumerate()
        .fold(true, |all, one| all & is_next(one))
}

/// # Safety
/// As for [`load_elements`].
#[inline(always)]
unsafe fn store_elements<M: Copy, R: Copy>(
    file: &RegisterFile,
    pointers: &Pointers,
    data: &[Slot],
    mask: u32,
    shorten: impl Fn(R) -> M,
) {
    for (element, &slot) in data.iter().enumerate() {
        // SAFETY: the caller says that the register exists.
        let values = unsafe { &*file.source(slot).cast::<[R; 32]>() };
        let is_whole = data.len() == 1 && mask == u32::MAX && size_of::<M>() == size_of::<R>();
        if is_whole && is_run(pointers, size_of::<M>()) {
            // SAFETY: the elements are there, and a run of them is what the register holds.
            unsafe { (pointers[0] as *mut [R; 32]).write_unaligned(*values) };
            return;
        }
        for lane in lanes_of(mask) {
            // SAFETY: the caller says that the element is there.
            unsafe {
                (pointers[lane] as *mut M)
                    .add(element)
                    .write_unaligned(shorten(values[lane]))
            };
        }
    }
}
