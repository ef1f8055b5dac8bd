//! Where the bytes of an access lie on the host: every lane's address is checked before anything is touched.

use crate::address::{LOCAL_WINDOW, SHARED_BASE, SHARED_WINDOW};
use crate::alu::{RegisterFile, each_lane};
use crate::fault::{Fault, Space};
use crate::machine::Machine;
use crate::ptx::inst::{Access, Slot};
use crate::warp::Warp;

/// Host addresses of the lanes of an access; inactive lanes hold an active one's.
pub type Pointers = [u64; 32];

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

/// The addresses that an access names, offset included.
///
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

impl Warp {
    /// Checks an access in the lanes of the mask and finds where its bytes lie on the host.
    #[inline(always)]
    pub fn resolve(
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
