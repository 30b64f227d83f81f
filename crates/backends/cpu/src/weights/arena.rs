//! Memory of weights: they follow each other in large chunks, in the order in which they are loaded, which is that of execution. So huge
//! pages apply to weights that are smaller than one, and fewer addresses have to be translated.

use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use octavo_ops::BackendError;

use crate::memory::{LINE, Lines};

/// Size of a chunk in bytes. What is not used of it is never touched.
const CHUNK: usize = 64 << 20;

/// Size from which a weight has a chunk of its own.
const LARGE: usize = CHUNK / 2;

/// Chunks of memory, of which the last has room.
#[derive(Default)]
pub(crate) struct Arena {
    chunk: Option<Chunk>,
}

/// A chunk that is divided from its start on.
struct Chunk {
    memory: Arc<Lines<u8>>,
    start: NonNull<u8>,
    used: usize,
    /// End of what is not zero.
    written: usize,
}

/// Memory of a weight, which begins at a cache line. The chunk is freed with the last weight in it.
pub(crate) struct Room {
    start: NonNull<u8>,
    len: usize,
    chunk: Arc<Lines<u8>>,
}

// SAFETY: no other room has these bytes.
unsafe impl Send for Room {}
// SAFETY: as above; shared access only reads.
unsafe impl Sync for Room {}

impl Chunk {
    fn new(len: usize, what: impl FnOnce() -> String) -> Result<Self, BackendError> {
        let mut lines = Lines::zeroed(len, what)?;
        let start = NonNull::from(&mut lines[..]).cast();
        Ok(Self { memory: Arc::new(lines), start, used: 0, written: 0 })
    }

    /// Returns the next bytes, as zeros, if there are so many.
    fn take(&mut self, len: usize) -> Option<Room> {
        let from = self.used.next_multiple_of(LINE);
        let end = from.checked_add(len).filter(|end| *end <= self.memory.len())?;
        // SAFETY: the bytes are in the chunk.
        let mut room = Room { start: unsafe { self.start.add(from) }, len, chunk: Arc::clone(&self.memory) };
        room[..self.written.saturating_sub(from).min(len)].fill(0);
        self.used = end;
        Some(room)
    }
}

impl Arena {
    /// Returns `len` zeros, or an error that names their purpose if there is not enough memory.
    pub(crate) fn zeroed(&mut self, len: usize, what: impl Fn() -> String) -> Result<Room, BackendError> {
        if let Some(room) = self.chunk.as_mut().and_then(|chunk| chunk.take(len)) {
            return Ok(room);
        }
        let mut chunk = Chunk::new(if len < LARGE { CHUNK } else { len }, &what)?;
        let Some(room) = chunk.take(len) else { unreachable!("a chunk has room for what it is made for") };
        if len < LARGE {
            self.chunk = Some(chunk);
        }
        Ok(room)
    }

    /// Takes back memory, which is used again if nothing was taken after it.
    pub(crate) fn release(&mut self, room: Room) {
        let Some(chunk) = &mut self.chunk else { return };
        let end = room.start.addr().get() + room.len;
        if Arc::ptr_eq(&chunk.memory, &room.chunk) && chunk.start.addr().get() + chunk.used == end {
            chunk.written = chunk.written.max(chunk.used);
            chunk.used -= room.len;
        }
    }
}

impl Deref for Room {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the bytes are in the chunk, which this keeps, and belong to this room alone.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Room {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; the access is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn room(arena: &mut Arena, len: usize) -> Room {
        arena.zeroed(len, || "a weight".into()).unwrap()
    }

    #[test]
    fn rooms_follow_each_other_and_do_not_overlap() {
        let mut arena = Arena::default();
        let mut rooms: Vec<Room> =
            [1000, 0, 64, 3_000_000, LARGE, 65, LARGE - 1, LARGE - 1, 7].map(|len| room(&mut arena, len)).into();
        for (index, room) in rooms.iter_mut().enumerate() {
            assert!(room.iter().all(|byte| *byte == 0) && room.as_ptr().addr().is_multiple_of(LINE));
            room.fill(index as u8 + 1);
        }
        assert!(rooms.iter().zip(1..).all(|(room, index)| room.iter().all(|byte| *byte == index)));
        assert_eq!(rooms[2].as_ptr().addr() - rooms[0].as_ptr().addr(), 1024);
        drop(arena);
        assert_eq!(rooms[3][2_999_999], 4);
    }

    #[test]
    fn released_memory_is_zeroed_before_it_is_used_again() {
        let mut arena = Arena::default();
        let kept = room(&mut arena, 128);
        let mut first = room(&mut arena, 256);
        first.fill(9);
        let start = first.as_ptr();
        arena.release(first);
        let second = room(&mut arena, 512);
        assert!(second.as_ptr() == start && second.iter().all(|byte| *byte == 0));
        // What is not the last is not used again.
        arena.release(kept);
        assert!(room(&mut arena, 64).as_ptr() > second.as_ptr());
        assert!(arena.zeroed(usize::MAX / 2, || "a weight".into()).is_err());
    }
}
