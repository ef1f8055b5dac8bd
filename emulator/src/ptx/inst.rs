//! The decoded form of a kernel: what the warp interpreter runs.
//!
//! Registers of a warp are planes of 32 lanes, 32 or 64 bits wide; an operand names the index of its plane (64-bit
//! operands name the first of two). Immediates are planes of the kernel's constant bank, so that every source is read
//! the same way; the top bit of an operand tells the two apart. Predicates are bit masks with their own numbering.

use crate::alu::AluFn;
use crate::fault::Space;
use crate::matrix::bits::Reduction;
use crate::matrix::mma::Format;

/// Number of a register's or constant's first plane, or of a predicate.
pub type Slot = u32;

/// Set in operands that name a constant.
pub const CONSTANT: Slot = 1 << 31;

/// The predicate that is false in every lane.
pub const NEVER: Slot = 0;
/// The predicate that is true in every lane.
pub const ALWAYS: Slot = 1;

/// Thirty-two lanes of a 32-bit register.
#[repr(C, align(128))]
#[derive(Debug, Clone, Copy)]
pub struct Plane(pub [u32; 32]);

/// How wide a register is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Width {
    /// One bit a lane.
    Predicate,
    /// Sixteen bits, held zero-extended in a 32-bit plane.
    W16,
    /// Thirty-two bits.
    W32,
    /// Sixty-four bits, two planes.
    W64,
}

/// The registers that exist when a warp starts, in the first planes.
pub mod fixed {
    use super::Slot;

    /// `%tid.x`.
    pub const THREAD: Slot = 0;
    /// `%ntid.x`.
    pub const BLOCK_THREADS: Slot = 1;
    /// `%ctaid.x`.
    pub const BLOCK: Slot = 2;
    /// `%nctaid.x`.
    pub const NUM_BLOCKS: Slot = 3;
    /// `%laneid`.
    pub const LANE: Slot = 4;
    /// `%cluster_ctarank`.
    pub const CLUSTER_RANK: Slot = 5;
    /// Zero: the other dimensions' indices.
    pub const ZERO: Slot = 6;
    /// One: the other dimensions' sizes.
    pub const ONE: Slot = 7;
    /// How many planes they take.
    pub const NUM_PLANES: Slot = 8;
}

/// One decoded instruction.
#[derive(Debug, Clone)]
pub struct Inst {
    /// What it does.
    pub op: Op,
    /// The predicate that says in which lanes, times two, plus one where its opposite does.
    pub guard: u32,
    /// Operands of [`Op::Alu`]; else first and number of the operands among the kernel's.
    pub args: Args,
}

/// Operands of an arithmetic instruction.
#[derive(Debug, Clone, Copy, Default)]
pub struct Args {
    /// Destination.
    pub d: Slot,
    /// First source.
    pub a: Slot,
    /// Second source.
    pub b: Slot,
    /// Third source.
    pub c: Slot,
}

/// What an instruction does. The comments give the operands where there are any.
#[derive(Debug, Clone, Copy)]
pub enum Op {
    /// Lane by lane from registers to a register.
    Alu(AluFn),
    /// Goes on at an instruction in the guarded lanes.
    Branch(u32),
    /// Ends the guarded lanes.
    Exit,
    /// Orders or hints only; nothing to do here.
    Nothing,
    /// `d..., address`.
    Load(Access),
    /// `address, s...`.
    Store(Access),
    /// `d, address, operand`, or `d, address, expected, operand` to compare first; the former value goes to `d`.
    Atomic(Access, AtomicOp),
    /// `d, predicate, value, lane, bounds, members`.
    Shuffle(ShuffleMode),
    /// `d, predicate, members`: whether all members agree that it is true.
    VoteAll,
    /// `d, value, members`.
    Reduce(Reduction),
    /// `members`.
    WarpBarrier,
    /// `identity, threads`; zero threads mean all of the block.
    BlockBarrier,
    /// Arrives at the cluster's barrier.
    ClusterArrive,
    /// Waits for the cluster's barrier.
    ClusterWait,
    /// `d0..d3, a..., b..., c0..c3`.
    Matrix(Format),
    /// `d0..d3, address`; whether each matrix is transposed.
    LoadMatrices {
        /// `.trans`.
        transposed: bool,
    },
    /// `accumulators..., left descriptor or four registers, right descriptor, predicate adds`.
    GroupMatrix {
        /// The numbers' format.
        format: Format,
        /// Registers of the accumulator: half the columns of the product.
        num_sums: u32,
        /// Whether the left operand lies in registers.
        left_in_registers: bool,
    },
    /// Ends a group of asynchronous matrix products.
    GroupMatrixCommit,
    /// Waits until at most this many groups of asynchronous matrix products are in flight.
    GroupMatrixWait(u32),
    /// `address, count`.
    BarrierInit,
    /// `address`; one arrival.
    BarrierArrive,
    /// `address, bytes`; expects bytes, then arrives once.
    BarrierArriveExpect,
    /// `predicate, address, parity`; whether the instruction may wait.
    BarrierTest {
        /// `try_wait` rather than `test_wait`.
        waits: bool,
    },
    /// `destination, source, bytes to read`; bytes to write.
    CopyAsync {
        /// 4, 8 or 16; what is not read is zero.
        num_bytes: u32,
    },
    /// Ends a group of asynchronous copies.
    CopyCommit,
    /// Waits until at most this many groups of asynchronous copies are in flight.
    CopyWait(u32),
    /// `address`; arrives at a barrier when the lane's earlier asynchronous copies are done.
    CopyArrive,
    /// `destination, source, bytes, barrier`, and with `multicast` the ranks of the blocks that it goes to, one bit each.
    CopyBulk {
        /// `.multicast::cluster`: to the same places in several blocks of the cluster.
        multicast: bool,
    },
    /// `destination, s..., barrier`; a store to a block of the cluster that counts its bytes at a barrier.
    StoreAsync(Access),
}

/// A memory access.
#[derive(Debug, Clone, Copy)]
pub struct Access {
    /// Which memory; none for generic addresses.
    pub space: Option<Space>,
    /// Bytes of an element.
    pub element_bytes: u8,
    /// Elements of a lane: 1, 2 or 4.
    pub num_elements: u8,
    /// Whether an element is sign-extended to its register.
    pub signed: bool,
    /// Whether the data registers are 64 bits wide.
    pub wide_data: bool,
    /// Whether the address register is 64 bits wide.
    pub wide_address: bool,
    /// Whether the access sees other threads' writes at once (`.volatile`), as loops that wait for one need.
    pub volatile: bool,
    /// Bytes to add to the address.
    pub offset: i32,
}

/// What an atomic does to the former value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    /// Adds.
    Add,
    /// Takes the larger one, unsigned.
    Max,
    /// Takes the smaller one, unsigned.
    Min,
    /// Ors.
    Or,
    /// Ands.
    And,
    /// Replaces it.
    Exchange,
    /// Replaces it where it is what one expects.
    CompareExchange,
}

/// Whose value a lane receives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ShuffleMode {
    /// The named lane's.
    Index,
    /// A lower lane's.
    Up,
    /// A higher lane's.
    Down,
    /// That of the lane whose number differs by an exclusive or.
    Butterfly,
}
