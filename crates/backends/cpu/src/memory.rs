//! Memory aligned to cache lines.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use octavo_ops::BackendError;

/// Size of a cache line, and of an AVX-512 register, in bytes.
pub(crate) const LINE: usize = 64;

/// Size of a huge page in bytes. Rows of activations and blocks of the cache are far apart, so with small pages the
/// address translation takes longer than the reads.
pub(crate) const HUGE: usize = 2 << 20;

/// Numbers for which every bit pattern is valid, including all zeros.
///
/// # Safety
/// Zeroed bytes must be a valid value, and the type must need no drop.
pub(crate) unsafe trait Plain: Copy + Send + Sync + 'static {}

// SAFETY: all implementations are for numbers.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for i16 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for [i32; 2] {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// A slice on the heap that is aligned to a cache line, or to a huge page if it is at least as large. It is zeroed, and
/// the system maps it on first use.
pub(crate) struct Lines<T: Plain> {
    start: NonNull<T>,
    len: usize,
    /// Pointer from the allocator. The elements begin within its first line.
    block: NonNull<u8>,
}

// SAFETY: the memory is owned, and its elements are plain numbers.
unsafe impl<T: Plain> Send for Lines<T> {}
// SAFETY: as above; shared access only reads.
unsafe impl<T: Plain> Sync for Lines<T> {}

impl<T: Plain> Lines<T> {
    /// Allocates `len` zeros. Returns `None` if there is not enough memory.
    fn try_zeroed(len: usize) -> Option<Self> {
        let layout = Self::layout(len)?;
        if len == 0 {
            return Some(Self::default());
        }
        // SAFETY: the layout's size is not zero.
        let block = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        let align = Self::alignment(len);
        let skip = block.as_ptr().align_offset(align);
        // SAFETY: the layout has room for the skipped bytes in addition to the elements.
        let start = unsafe { block.add(skip) }.cast();
        if align == HUGE {
            advise_huge(start.cast(), len * size_of::<T>());
        }
        Some(Self { start, len, block })
    }

    /// Allocates `len` zeros. Returns an error that names their purpose if there is not enough memory.
    pub(crate) fn zeroed(len: usize, what: impl FnOnce() -> String) -> Result<Self, BackendError> {
        let needed = (len as u64).saturating_mul(size_of::<T>() as u64);
        Self::try_zeroed(len).ok_or_else(|| BackendError::OutOfMemory { what: what(), needed })
    }

    /// Returns the alignment of the first element.
    fn alignment(len: usize) -> usize {
        if len.saturating_mul(size_of::<T>()) >= HUGE { HUGE } else { LINE }
    }

    /// Returns the layout of the elements and the room to align them. The allocation itself is not aligned: for a large
    /// alignment the system's allocator writes the zeros itself, which would touch all the memory at once.
    fn layout(len: usize) -> Option<Layout> {
        let elements = Layout::array::<T>(len).ok()?;
        Layout::from_size_align(elements.size().checked_add(Self::alignment(len))?, elements.align()).ok()
    }

    /// Ensures room for at least `len` elements. The content is lost if it has to grow.
    pub(crate) fn reserve_zeroed(&mut self, len: usize) {
        if len <= self.len {
            return;
        }
        let grown = len.max(self.len + self.len / 2);
        match Self::try_zeroed(grown).or_else(|| Self::try_zeroed(len)) {
            Some(lines) => *self = lines,
            None => handle_alloc_error(Self::layout(len).unwrap_or(Layout::new::<T>())),
        }
    }
}

impl<T: Plain> Default for Lines<T> {
    fn default() -> Self {
        Self { start: NonNull::dangling(), len: 0, block: NonNull::dangling() }
    }
}

impl<T: Plain> Deref for Lines<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        // SAFETY: `len` zeroed elements were allocated there, or the pointer dangles and `len` is 0.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> DerefMut for Lines<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `deref`; the access is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl<T: Plain> Drop for Lines<T> {
    fn drop(&mut self) {
        if let Some(layout) = Self::layout(self.len).filter(|_| self.len > 0) {
            // SAFETY: the block was allocated with this layout.
            unsafe { dealloc(self.block.as_ptr(), layout) }
        }
    }
}

/// Requests huge pages. Small ones are used if there are none.
#[cfg(target_os = "linux")]
fn advise_huge(start: NonNull<u8>, bytes: usize) {
    // SAFETY: the call gives advice about memory that belongs to this slice and does not change its content.
    unsafe { libc::madvise(start.as_ptr().cast(), bytes, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_: NonNull<u8>, _: usize) {}

/// Returns the free pages of the heap to the system. The allocator keeps the pages that loading a model has freed, some of
/// them between blocks that stay. The call walks the free blocks of the whole heap, so it belongs after a load and not into
/// a step. Without glibc it does nothing.
pub fn return_free_pages() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the call locks each part of the heap and touches only free blocks.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// A slice that the threads of a region write concurrently, each its own part.
#[derive(Clone, Copy)]
pub(crate) struct Shared<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: threads access elements only through `part`, whose callers guarantee that no two parts overlap.
unsafe impl<T: Plain> Send for Shared<T> {}
// SAFETY: as above.
unsafe impl<T: Plain> Sync for Shared<T> {}

impl<T: Plain> Shared<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len() }
    }

    /// Returns the elements `from .. from + len` for writing.
    ///
    /// # Safety
    /// The slice that this was made from must still exist. While the result is in use, no other code may write these
    /// elements or read them while the caller writes them.
    ///
    /// # Panics
    /// Panics if they are out of range.
    #[allow(clippy::mut_from_ref, reason = "disjoint parts of one slice, as the caller promises")]
    pub(crate) unsafe fn part<'a>(&self, from: usize, len: usize) -> &'a mut [T] {
        // SAFETY: the range is checked by `at`; the caller guarantees exclusive access.
        unsafe { std::slice::from_raw_parts_mut(self.at(from, len), len) }
    }

    /// Returns `N` elements from `from` on, for writing.
    ///
    /// # Safety
    /// The conditions of [`Shared::part`] apply.
    #[inline(always)]
    pub(crate) unsafe fn array<'a, const N: usize>(&self, from: usize) -> &'a mut [T; N] {
        // A message with numbers would keep these in memory, also in loops.
        assert!(from <= self.len && N <= self.len - from, "an array within the slice");
        // SAFETY: the range was checked above; the caller guarantees exclusive access.
        unsafe { &mut *self.start.add(from).cast() }
    }

    /// Returns the elements `from .. from + len` for reading.
    ///
    /// # Safety
    /// The slice that this was made from must still exist, and no thread may write these elements while the result is
    /// in use.
    ///
    /// # Panics
    /// Panics if they are out of range.
    pub(crate) unsafe fn view<'a>(&self, from: usize, len: usize) -> &'a [T] {
        // SAFETY: the range is checked by `at`; the caller guarantees that no thread writes.
        unsafe { std::slice::from_raw_parts(self.at(from, len), len) }
    }

    /// Prefetches the elements `from .. from + len`.
    pub(crate) fn prefetch(&self, level: Level, from: usize, len: usize) {
        for at in (0..len).step_by(LINE / size_of::<T>()) {
            prefetch(level, self.start.wrapping_add(from + at));
        }
    }

    /// Returns all elements for reading.
    ///
    /// # Safety
    /// The conditions of [`Shared::view`] apply.
    pub(crate) unsafe fn all<'a>(&self) -> &'a [T] {
        // SAFETY: the caller guarantees this.
        unsafe { self.view(0, self.len) }
    }

    fn at(&self, from: usize, len: usize) -> *mut T {
        assert!(from <= self.len && len <= self.len - from, "{from} + {len} of {}", self.len);
        // SAFETY: the range was checked above.
        unsafe { self.start.add(from) }
    }
}

/// A cache of one core.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    /// Its few places for misses are occupied until memory has answered, and reads then have to wait: this is for lines that come soon
    /// or are few.
    First,
    /// This is for weights, keys and values, which follow each other faster than memory answers.
    Second,
    /// The first one, for lines that are written: other cores give up their copies, for which a write would have to wait.
    Written,
}

/// Prefetches a line.
#[inline(always)]
pub(crate) fn prefetch<T>(level: Level, line: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch is a hint and may have any address.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
        match level {
            Level::First => _mm_prefetch::<_MM_HINT_T0>(line.cast()),
            Level::Second => _mm_prefetch::<_MM_HINT_T1>(line.cast()),
            // The compiler would need a target feature for it. Processors without the instruction do nothing.
            Level::Written => {
                std::arch::asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly))
            }
        }
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: as above.
    unsafe {
        use std::arch::asm;
        match level {
            Level::First => asm!("prfm pldl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly)),
            Level::Second => asm!("prfm pldl2keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly)),
            Level::Written => asm!("prfm pstl1keep, [{}]", in(reg) line, options(nostack, preserves_flags, readonly)),
        }
    }
    #[cfg(not(any(target_arch = "aarch64", target_arch = "x86_64")))]
    let _ = (level, line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_begins_with_a_line_and_is_zero() {
        for len in [0, 1, 63, 1000, HUGE] {
            let mut lines = Lines::<f32>::zeroed(len, || "a test".into()).unwrap();
            assert_eq!(lines.len(), len);
            assert!(lines.iter().all(|&x| x == 0.0));
            assert!(len == 0 || (lines.as_ptr() as usize).is_multiple_of(LINE));
            lines.iter_mut().for_each(|x| *x = 1.0);
            lines.reserve_zeroed(len + 1);
            assert!(lines.len() > len && lines.iter().all(|&x| x == 0.0));
        }
    }

    #[test]
    fn too_much_is_an_error() {
        for len in [usize::MAX, 1 << 60] {
            // The compiler removes an unused allocation, which then could not fail.
            let lines = std::hint::black_box(Lines::<u32>::zeroed(len, || "a test".into()));
            let error = lines.err().unwrap().to_string();
            assert!(error.starts_with("not enough memory for a test"), "{error}");
        }
    }

    #[test]
    #[should_panic(expected = "5 + 4 of 8")]
    fn parts_are_in_range() {
        let mut values = [0u8; 8];
        // SAFETY: no other code uses the slice.
        let _ = unsafe { Shared::new(&mut values).part(5, 4) };
    }
}
