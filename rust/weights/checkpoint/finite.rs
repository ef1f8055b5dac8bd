//! Tensors without NaN and infinity, as every forward needs them.
//!
//! In: a tensor's name. Out: its values, or the first that is no number. W12 holds none by its format, so only weights
//! that stay as they were are looked through, a tensor at a time on the thread that has just read it.

use half::slice::HalfFloatSliceExt;

use super::matrices::Matrix;
use super::{Checkpoint, Result};
use crate::error::CheckpointError;
use crate::options::WeightFormat;

/// All bits of a BF16 exponent; so are those of NaN and infinity alone.
const EXPONENT: u16 = 0x7F80;
/// NaN in E4M3, which has no infinity, without its sign.
const FP8_NAN: u8 = 0x7F;
/// Weights looked at before a search may end: a fold over a piece is done many at a time.
const PIECE_LEN: usize = 4096;

impl Checkpoint {
    /// Reads a matrix as [`matrix`](Self::matrix) does, of finite numbers.
    ///
    /// # Errors
    /// Those of `matrix`; [`CheckpointError::NotFinite`].
    pub fn finite_matrix(
        &self,
        name: &str,
        shape: [usize; 2],
        format: WeightFormat,
    ) -> Result<Matrix> {
        let matrix = self.matrix(name, shape, format)?;
        let found = match &matrix {
            Matrix::Bf16(weights) => {
                let bits: &[u16] = weights.reinterpret_cast();
                let index = position_of_most(bits, EXPONENT);
                index.map(|index| (index, weights[index].to_f32()))
            }
            Matrix::Fp8(weights) => {
                position_of_most(&weights.codes, FP8_NAN).map(|index| (index, f32::NAN))
            }
            Matrix::W12(_) => None,
        };
        self.refuse(name, found)?;
        Ok(matrix)
    }

    /// Reads a tensor as [`tensor_f32`](Self::tensor_f32) does, of finite numbers.
    ///
    /// # Errors
    /// Those of `tensor_f32`; [`CheckpointError::NotFinite`].
    pub fn finite_f32(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let values = self.tensor_f32(name, shape)?;
        let index = values.iter().position(|value| !value.is_finite());
        self.refuse(name, index.map(|index| (index, values[index])))?;
        Ok(values)
    }

    fn refuse(&self, name: &str, found: Option<(usize, f32)>) -> Result<()> {
        found.map_or(Ok(()), |(index, got)| {
            Err(CheckpointError::NotFinite {
                file: self.shards[self.tensors[name].shard].file.clone(),
                tensor: name.to_owned(),
                index,
                got,
            })
        })
    }
}

/// Where all bits of `mask` are set first.
fn position_of_most<T>(values: &[T], mask: T) -> Option<usize>
where
    T: Copy + Ord + Default + std::ops::BitAnd<Output = T>,
{
    let most = |piece: &[T]| {
        piece
            .iter()
            .fold(T::default(), |most, &v| (v & mask).max(most))
    };
    let piece = values
        .chunks(PIECE_LEN)
        .position(|piece| most(piece) == mask)?;
    let first = piece * PIECE_LEN;
    let within = values[first..].iter().position(|&v| v & mask == mask);
    within.map(|index| first + index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_is_found_in_whichever_piece_it_lies() {
        // The largest finite numbers of either sign.
        let mut bits = [0x7F7F, 0xFF7F].repeat(PIECE_LEN + 3);
        assert_eq!(position_of_most(&bits, EXPONENT), None);
        bits[PIECE_LEN + 9] = 0x7FC0;
        for (index, value) in [(PIECE_LEN + 9, 0x7F80), (PIECE_LEN, 0xFF80), (0, 0x7F81)] {
            bits[index] = value;
            assert_eq!(position_of_most(&bits, EXPONENT), Some(index));
        }
        let last = 2 * PIECE_LEN + 5;
        bits[..last].fill(0);
        bits[last] = 0xFFFF;
        assert_eq!(position_of_most(&bits, EXPONENT), Some(last));
        assert_eq!(position_of_most(&[], EXPONENT), None);
        assert_eq!(position_of_most(&[0x7E, 0xFE, 0x80], FP8_NAN), None);
        assert_eq!(position_of_most(&[0x7E, 0xFF], FP8_NAN), Some(1));
    }
}
