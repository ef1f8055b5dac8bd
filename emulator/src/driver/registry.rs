//! Objects behind the opaque handles that C callers hold.

use std::collections::HashMap;

use super::{Outcome, Status, refuse};

/// What a handle is of; its upper half, so that no handle passes for another kind's.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kind {
    Module = 1,
    Function,
    Stream,
    Event,
    Graph,
    Executable,
}

/// A handle as C sees it: a pointer that nobody follows.
pub(super) type Handle = *mut std::ffi::c_void;

/// The living objects of a kind. A handle is never given out twice.
pub(super) struct Registry<T> {
    kind: Kind,
    num_made: usize,
    items: HashMap<usize, T>,
}

impl<T> Registry<T> {
    pub(super) fn new(kind: Kind) -> Self {
        Self {
            kind,
            num_made: 0,
            items: HashMap::new(),
        }
    }

    /// Keeps an object.
    pub(super) fn add(&mut self, item: T) -> Handle {
        self.num_made += 1;
        let id = (self.kind as usize) << 32 | self.num_made;
        self.items.insert(id, item);
        std::ptr::without_provenance_mut(id)
    }

    /// The object of a handle.
    pub(super) fn get(&mut self, handle: Handle) -> Outcome<&mut T> {
        let kind = self.kind;
        self.items
            .get_mut(&handle.addr())
            .ok_or_else(|| unknown(kind, handle))
    }

    /// Takes an object out.
    pub(super) fn remove(&mut self, handle: Handle) -> Outcome<T> {
        self.items
            .remove(&handle.addr())
            .ok_or_else(|| unknown(self.kind, handle))
    }

    /// Drops all objects but those to `keep`.
    pub(super) fn retain(&mut self, keep: impl Fn(&T) -> bool) {
        self.items.retain(|_, item| keep(item));
    }
}

fn unknown(kind: Kind, handle: Handle) -> Status {
    let why = format!("{handle:p} is no living handle of kind {kind:?}");
    refuse(Status::INVALID_HANDLE, why)
}
