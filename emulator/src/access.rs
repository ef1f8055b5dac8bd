//! Loads, stores and atomics of a warp: every address is checked before anything is touched.

use crate::address::{LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW};
#[cfg(target_arch = "x86_64")]
use crate::alu::has_wide_vectors;
use crate::alu::{RegisterFile, each_lane};
use crate::fault::{Fault, Space};
use crate::machine::Machine;
use crate::ptx::inst::{Access, AtomicOp, Slot};
use crate::warp::{Step, Warp};

/// Host addresses of the lanes of an access; inactive lanes hold an active one's.
type Pointers = [u64; 32];

/// The lanes of a mask, lowest first.
#[inline(always)]
pub fn lanes_of(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros();
        left &= left.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

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

    /// Checks an access in the lanes of the mask and finds where its bytes lie on the host.
    #[inline(always)]
    fn resolve(
        &mut self,
        machine: &mut Machine<'_>,
        file: &RegisterFile,
        access: &Access,
        address: Slot,
        (pc, mask): (u32, u32),
    ) -> Result<Pointers, Fault> {
        let num_bytes = u64::from(access.element_bytes) * u64::from(access.num_elements);
        if mask == 0 {
            return Ok([0; 32]);
        }
        // SAFETY: the decoder checked the address's width.
        let mut addresses = unsafe { lane_addresses(file, access, address) };
        if mask != u32::MAX {
            let active = addresses[mask.trailing_zeros() as usize];
            for (lane, address) in addresses.iter_mut().enumerate() {
                *address = if mask >> lane & 1 == 1 {
                    *address
                } else {
                    active
                };
            }
        }
        let low_bits = addresses.iter().fold(0, |bits, address| bits | address);
        if low_bits & (num_bytes - 1) != 0 {
            let is_odd = |address: &u64| address & (num_bytes - 1) != 0;
            let lane = addresses.iter().position(is_odd).unwrap_or_default();
            return Err(self.misaligned(machine, access, addresses[lane], num_bytes, (pc, lane)));
        }
        let (lowest, highest) = addresses
            .iter()
            .fold((u64::MAX, 0), |(low, high), &address| {
                (low.min(address), high.max(address))
            });
        let within = |start: u64, end: u64| {
            lowest >= start
                && end
                    .checked_sub(num_bytes)
                    .is_some_and(|last| highest <= last)
        };
        match access.space {
            Some(Space::Global) => {
                let extent = machine.remembered(pc);
                if within(extent.start, extent.end) {
                    return Ok(addresses);
                }
            }
            Some(Space::Shared) => {
                // The common case: all in the own block.
                let shared = machine.memories.shared(self.block);
                let start = u64::from(SHARED_BASE);
                if within(start, start + shared.len() as u64) {
                    let base = (shared.as_mut_ptr() as u64).wrapping_sub(start);
                    return Ok(each_lane(|lane| base.wrapping_add(addresses[lane])));
                }
            }
            Some(Space::Param) if within(0, machine.params.len() as u64) => {
                let base = machine.params.as_ptr() as u64;
                return Ok(each_lane(|lane| base + addresses[lane]));
            }
            _ => {}
        }
        let mut pointers = [0; 32];
        for (lane, pointer) in pointers.iter_mut().enumerate() {
            // Inactive lanes hold an active one's address; let that lane have the fault.
            let lane = if mask >> lane & 1 == 1 {
                lane
            } else {
                mask.trailing_zeros() as usize
            };
            *pointer =
                self.resolve_lane(machine, access, addresses[lane], num_bytes, (pc, lane))?;
        }
        Ok(pointers)
    }

    /// One lane's address of any memory.
    #[cold]
    fn resolve_lane(
        &mut self,
        machine: &mut Machine<'_>,
        access: &Access,
        address: u64,
        num_bytes: u64,
        (pc, lane): (u32, usize),
    ) -> Result<u64, Fault> {
        let kernel = machine.kernel;
        let (space, address) = match access.space {
            Some(space) => (space, address),
            None if address & SHARED_WINDOW != 0 => (Space::Shared, address & !SHARED_WINDOW),
            None if address & LOCAL_WINDOW != 0 => (Space::Local, address & !LOCAL_WINDOW),
            None => (Space::Global, address),
        };
        let within = |start: *const u8, len: usize, near: &dyn Fn() -> String| {
            let end = address.checked_add(num_bytes);
            match end.is_some_and(|end| end <= len as u64) {
                true => Ok(start as u64 + address),
                false => Err(Fault::OutOfBounds {
                    space,
                    address,
                    num_bytes,
                    near: near(),
                    place: None,
                }),
            }
        };
        let found = match space {
            Space::Global => machine.find(pc, address, num_bytes).map(|_| address),
            Space::Shared => machine
                .memories
                .place(self.block, address as u32, num_bytes as u32)
                .and_then(|place| machine.memories.host_address(place))
                .map(|pointer| pointer as u64),
            Space::Local => {
                let lane_bytes = kernel.local_bytes as usize;
                let own = self.local[lane * lane_bytes..].as_ptr();
                within(own, lane_bytes, &|| {
                    format!("a thread has {lane_bytes} bytes")
                })
            }
            Space::Param => {
                let len = machine.params.len();
                within(machine.params.as_ptr(), len, &|| {
                    format!("the parameters have {len} bytes")
                })
            }
        };
        found.map_err(|fault| {
            fault.at(|| {
                let mut place = self.place(kernel, pc);
                place.lane = Some(lane as u32);
                place
            })
        })
    }

    #[cold]
    fn misaligned(
        &self,
        machine: &Machine<'_>,
        access: &Access,
        address: u64,
        alignment: u64,
        (pc, lane): (u32, usize),
    ) -> Fault {
        let mut place = self.place(machine.kernel, pc);
        place.lane = Some(lane as u32);
        let space = access.space.unwrap_or(Space::Global);
        Fault::Misaligned {
            space,
            address,
            alignment,
            place: Some(place),
        }
    }
}

/// # Safety
/// `address` must name a register or constant of the width that `access` says.
#[inline(always)]
pub unsafe fn lane_addresses(file: &RegisterFile, access: &Access, address: Slot) -> [u64; 32] {
    // SAFETY: passed on.
    unsafe {
        if access.wide_address {
            let bases = &*file.source(address).cast::<[u64; 32]>();
            let offset = i64::from(access.offset) as u64;
            each_lane(|lane| bases[lane].wrapping_add(offset))
        } else {
            let bases = &(*file.source(address)).0;
            each_lane(|lane| u64::from(bases[lane].wrapping_add(access.offset as u32)))
        }
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
