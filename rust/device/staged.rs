//! Short lists that the host writes before a pass and its kernels read: token ids, positions, paths.

use super::buffer::as_bytes;
use super::cuda::ListPlace;
use super::{Device, Element};
use crate::error::DeviceError;

/// Values on the host and, where kernels run on a GPU, a copy there that is as new for the next of them: all lists that
/// changed travel together. Filling it again reuses both memories: the copy keeps its address as long as the values
/// fit, so that a graph may be captured with it.
#[derive(Debug, Default)]
pub struct Staged<T: Element> {
    values: Vec<T>,
    on_gpu: Option<ListPlace>,
}

impl<T: Element> Staged<T> {
    /// An empty list with room for `capacity` values on `device`.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`].
    pub fn with_capacity(device: &Device, capacity: usize) -> Result<Self, DeviceError> {
        Ok(Self {
            values: Vec::with_capacity(capacity),
            on_gpu: match device {
                Device::Host(_) => None,
                Device::Cuda(cuda) => Some(cuda.place_list(capacity * size_of::<T>())?),
            },
        })
    }

    /// A list of `values`.
    ///
    /// # Errors
    /// As for [`fill`](Self::fill).
    pub fn of(device: &Device, values: &[T]) -> Result<Self, DeviceError> {
        let mut list = Self::with_capacity(device, values.len())?;
        list.fill(device, values.iter().copied())?;
        Ok(list)
    }

    /// A list of `values` for host kernels.
    pub fn on_host(values: Vec<T>) -> Self {
        Self {
            values,
            on_gpu: None,
        }
    }

    /// Replaces the values. Kernels launched before still see the old ones.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the list has to grow.
    pub fn fill(
        &mut self,
        device: &Device,
        values: impl IntoIterator<Item = T>,
    ) -> Result<(), DeviceError> {
        self.values.clear();
        self.values.extend(values);
        self.send(device)
    }

    /// The values for changing; kernels on a GPU see the change after [`send`](Self::send).
    pub fn values_mut(&mut self) -> &mut Vec<T> {
        &mut self.values
    }

    /// Makes the copy on `device` as new as the values. Kernels launched before still see the old ones.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] when the copy has to grow.
    pub fn send(&mut self, device: &Device) -> Result<(), DeviceError> {
        let Device::Cuda(cuda) = device else {
            return Ok(());
        };
        let bytes = as_bytes(&self.values);
        let fits = |place: &ListPlace| place.num_bytes() >= bytes.len();
        let mut place = match self.on_gpu.take().filter(fits) {
            Some(place) => place,
            None => cuda.place_list(bytes.len().next_power_of_two())?,
        };
        place.write(bytes);
        self.on_gpu = Some(place);
        Ok(())
    }

    /// The values, on the host.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// Number of values.
    pub fn len(&self) -> usize {
        self.values.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// Where the copy lies on its GPU, for a launcher; `None` when the list was filled for the host.
    pub fn cuda_address(&self) -> Option<u64> {
        self.on_gpu.as_ref().map(ListPlace::address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_on_the_host_holds_its_last_values_only() {
        let device = Device::host(Some(1)).unwrap();
        let mut list = Staged::of(&device, &[3_u32, 1, 4]).unwrap();
        assert_eq!(list.values(), [3, 1, 4]);
        list.fill(&device, [1, 5]).unwrap();
        list.values_mut()[0] = 2;
        list.send(&device).unwrap();
        assert_eq!((list.values(), list.len()), (&[2, 5][..], 2));
        assert!(list.cuda_address().is_none() && !list.is_empty());
    }
}
