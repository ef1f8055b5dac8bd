//! How much of a request a layer keeps of keys and values: all of it, or what its window still shows.
//!
//! What there is one of per span, be it a page table, a pool or a number of bytes, is a [`PerSpan`]. Both tables of a
//! request have an entry for every 64 positions, so that a kernel finds a position's page at the same place in either:
//! that of windows leads through a ring of pages over and over.

/// What layers of one kind keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSpan {
    /// Every position.
    Whole,
    /// The last ones, as many as rows in flight may see.
    Window,
}

impl KvSpan {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Whole, Self::Window];
}

/// One value for layers of either span.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PerSpan<T> {
    /// That of layers that keep everything.
    pub whole: T,
    /// That of layers with a window.
    pub window: T,
}

/// Pages of a request: one for every 64 positions. Where no layer has a window that table is empty.
pub type PageTables<'a> = PerSpan<&'a [u32]>;

impl<T> PerSpan<T> {
    /// The value of `span`.
    pub fn of(&self, span: KvSpan) -> &T {
        match span {
            KvSpan::Whole => &self.whole,
            KvSpan::Window => &self.window,
        }
    }

    /// The value of `span` for changing.
    pub fn of_mut(&mut self, span: KvSpan) -> &mut T {
        match span {
            KvSpan::Whole => &mut self.whole,
            KvSpan::Window => &mut self.window,
        }
    }

    /// Both values, that of the whole span first.
    pub fn both_mut(&mut self) -> [&mut T; 2] {
        [&mut self.whole, &mut self.window]
    }
}

impl<T: Default> PerSpan<T> {
    /// `whole` where no layer has a window.
    pub fn whole_only(whole: T) -> Self {
        Self {
            whole,
            window: T::default(),
        }
    }
}

impl PerSpan<Vec<u32>> {
    /// These pages as kernels take them.
    pub fn tables(&self) -> PageTables<'_> {
        PerSpan {
            whole: &self.whole,
            window: &self.window,
        }
    }
}

impl<'a> From<&'a [u32]> for PageTables<'a> {
    fn from(whole: &'a [u32]) -> Self {
        Self::whole_only(whole)
    }
}

impl<'a> From<&'a Vec<u32>> for PageTables<'a> {
    fn from(whole: &'a Vec<u32>) -> Self {
        Self::whole_only(whole)
    }
}

impl<'a, const N: usize> From<&'a [u32; N]> for PageTables<'a> {
    fn from(whole: &'a [u32; N]) -> Self {
        Self::whole_only(whole)
    }
}
