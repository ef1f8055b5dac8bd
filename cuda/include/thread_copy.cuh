// Copies from global to shared memory of which each thread waits for its own, in groups that complete in order.
#pragma once

#include "async_copy.cuh"

// Copies 16 bytes, or writes zeros where there is nothing to copy; `from` must be an address in any case.
__device__ __forceinline__ void thread_copy_16(u32 to, const void* from, bool is_there) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(is_there ? 16 : 0) : "memory");
}

__device__ __forceinline__ void thread_copy_16(void* to, const void* from, bool is_there) { thread_copy_16(shared_address(to), from, is_there); }

__device__ __forceinline__ void thread_copy_4(void* to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Ends a group, which may be empty.
__device__ __forceinline__ void thread_copy_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Returns when no more than `NUM_LEFT` of the thread's last groups are on their way.
template <u32 NUM_LEFT>
__device__ __forceinline__ void thread_copy_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NUM_LEFT) : "memory");
}
