//! A safetensors file written front to back, one tensor at a time.
//!
//! The format puts the header first, but how many escapes a matrix has is known only once it is encoded. So the writer
//! leaves as much room as the header can need at most, streams the tensors behind it, and fills the header in at the
//! end, padded with the spaces that the format allows. Until [`ShardWriter::finish`] the file has a temporary name, and
//! a writer that is dropped before takes it away: what has its final name is whole and on the disk.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, BufWriter, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::output_dir::temporary_name;
use crate::error::CheckpointError;

type Result<T, E = CheckpointError> = std::result::Result<T, E>;

const LENGTH_BYTES: u64 = 8;
/// Data starts at a multiple of this, so that readers may view it as any dtype.
const ALIGNMENT: usize = 8;

/// The header of a file.
#[derive(Default, Serialize)]
pub(super) struct Header {
    #[serde(rename = "__metadata__")]
    pub(super) metadata: BTreeMap<&'static str, String>,
    #[serde(flatten)]
    pub(super) tensors: BTreeMap<String, HeaderTensor>,
}

/// What a header says of a tensor.
#[derive(Clone, Serialize)]
pub(super) struct HeaderTensor {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: [u64; 2],
}

impl HeaderTensor {
    /// An entry that takes at least the room of any entry of `dtype` with `num_dims` dimensions.
    pub(super) fn widest(dtype: &str, num_dims: usize) -> Self {
        Self {
            dtype: dtype.to_owned(),
            shape: vec![usize::MAX; num_dims],
            data_offsets: [u64::MAX; 2],
        }
    }
}

impl Header {
    fn to_json(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings and numbers are JSON")
    }
}

/// A file in the making.
pub(super) struct ShardWriter {
    path: PathBuf,
    temporary: PathBuf,
    file: BufWriter<File>,
    header_room: usize,
    tensors: BTreeMap<String, HeaderTensor>,
    num_data_bytes: u64,
    finished: bool,
}

impl ShardWriter {
    /// Starts the file that will be `path` and whose header is at most as long as `widest`.
    pub(super) fn create(path: &Path, widest: &Header) -> Result<Self> {
        let temporary = temporary_name(path);
        let header_room = widest.to_json().len().next_multiple_of(ALIGNMENT);
        let create = || {
            let mut file = File::create(&temporary)?;
            file.seek(SeekFrom::Start(LENGTH_BYTES + header_room as u64))?;
            Ok(BufWriter::with_capacity(1 << 20, file))
        };
        let file = create().map_err(io_error(&temporary))?;
        Ok(Self {
            path: path.to_owned(),
            temporary,
            file,
            header_room,
            tensors: BTreeMap::new(),
            num_data_bytes: 0,
            finished: false,
        })
    }

    /// Appends a tensor.
    pub(super) fn write(
        &mut self,
        name: String,
        dtype: &str,
        shape: &[usize],
        bytes: &[u8],
    ) -> Result<()> {
        let begin = self.num_data_bytes;
        self.num_data_bytes += bytes.len() as u64;
        let entry = HeaderTensor {
            dtype: dtype.to_owned(),
            shape: shape.to_vec(),
            data_offsets: [begin, self.num_data_bytes],
        };
        self.tensors.insert(name, entry);
        self.file
            .write_all(bytes)
            .map_err(io_error(&self.temporary))
    }

    /// Fills in the header, brings the file to the disk and gives it its name.
    pub(super) fn finish(mut self, metadata: BTreeMap<&'static str, String>) -> Result<()> {
        let header = Header {
            metadata,
            tensors: std::mem::take(&mut self.tensors),
        };
        let mut header = header.to_json();
        assert!(
            header.len() <= self.header_room,
            "a header of {} bytes in room for {}",
            header.len(),
            self.header_room
        );
        header.resize(self.header_room, b' ');
        self.complete(&header).map_err(io_error(&self.temporary))?;
        self.finished = true;
        Ok(())
    }

    fn complete(&mut self, header: &[u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&(header.len() as u64).to_le_bytes())?;
        self.file.write_all(header)?;
        self.file.flush()?;
        self.file.get_ref().sync_all()?;
        std::fs::rename(&self.temporary, &self.path)
    }
}

impl Drop for ShardWriter {
    fn drop(&mut self) {
        if !self.finished {
            // Whatever went wrong is told already; a temporary file that stays is removed by the next run.
            let _ = std::fs::remove_file(&self.temporary);
        }
    }
}

/// Turns an error of the operating system into one that names `file`.
pub(super) fn io_error(file: &Path) -> impl FnOnce(io::Error) -> CheckpointError {
    let file = file.to_owned();
    move |source| CheckpointError::Io { file, source }
}
