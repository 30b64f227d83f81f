//! Freed memory between blocks of the heap that stay is returned to the system.

#![cfg(all(target_os = "linux", target_env = "gnu"))]
#![allow(clippy::unwrap_used, reason = "a test's panic is its report")]

use octavo_backend_cpu::return_free_pages;

/// Size of a block in bytes, below the size from which the allocator maps a block on its own.
const BLOCK: usize = 64 << 10;

/// Number of blocks.
const BLOCKS: usize = 1024;

/// One block of this many stays, so that no free memory is at the end of the heap.
const STAYS: usize = 16;

/// Returns the number of bytes resident in memory.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.split_whitespace().next().unwrap().parse::<usize>().unwrap() << 10
}

/// One test, because all tests of a process share its heap.
#[test]
fn freed_blocks_between_others_are_returned() {
    let mut blocks: Vec<_> = (0..BLOCKS).map(|i| Some(vec![i as u8; BLOCK])).collect();
    let all = resident();
    blocks.iter_mut().enumerate().filter(|(i, _)| i % STAYS != STAYS - 1).for_each(|(_, block)| *block = None);
    let freed = (BLOCKS - BLOCKS / STAYS) * BLOCK;
    assert!(resident() > all - freed / 8, "the allocator returns memory by itself");
    return_free_pages();
    let returned = all.saturating_sub(resident());
    assert!(returned > freed - freed / 8, "{returned} of {freed} bytes");
    for (i, block) in blocks.iter().enumerate() {
        assert!(block.as_ref().is_none_or(|block| block.iter().all(|&byte| byte == i as u8)));
    }
}
