// Moving weights from global to shared memory behind the arithmetic, and the barriers that say when they are there.
//
// One interface for two mechanisms: from sm_90 on a bulk copy by one lane, which completes on an mbarrier by bytes;
// before, 16-byte cp.async by every lane, which completes on the same mbarrier by arrivals. `COPY_ARRIVALS` is the
// count a barrier is initialised with. Also programmatic launch, which is nothing before sm_90.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u32 WARP_LANES = 32;
#if __CUDA_ARCH__ >= 900
constexpr u32 COPY_ARRIVALS = 1;
#else
constexpr u32 COPY_ARRIVALS = WARP_LANES;
#endif

__device__ __forceinline__ u32 shared_address(const void* pointer) {
    return static_cast<u32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine; the block's own threads need a __syncthreads besides.
__device__ __forceinline__ void barrier_init_fence() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
    asm volatile("{ .reg .b64 state; mbarrier.arrive.shared::cta.b64 state, [%0]; }" ::"r"(barrier) : "memory");
}

// Returns once the phase of the given parity is complete.
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
    u32 done;
    do {
#if __CUDA_ARCH__ >= 900
        asm volatile(
            "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#else
        asm volatile(
            "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
            : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
#endif
    } while (!done);
}

// Whether the phase of the given parity is complete. If not, it may become so at any time.
__device__ __forceinline__ bool barrier_test(u32 barrier, u32 parity) {
    u32 done;
    asm volatile(
        "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done;
}

// An L2 policy for data that is read once.
__device__ __forceinline__ u64 read_once_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Arrives, and makes the phase wait for `num_bytes` besides.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 num_bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(num_bytes) : "memory");
#endif
}

// Says how many bytes the copies that follow will bring. Called by the whole warp.
__device__ __forceinline__ void copy_begin(u32 barrier, u32 num_bytes, u32 lane) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) barrier_expect(barrier, num_bytes);
#endif
}

// Copies a multiple of 512 bytes; both addresses are multiples of 16. Called by the whole warp.
__device__ __forceinline__ void copy_async(u32 to, const u8* from, u32 num_bytes, u32 barrier, u64 policy, u32 lane) {
#if __CUDA_ARCH__ >= 900
    if (lane == 0) {
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
            "l"(from), "r"(num_bytes), "r"(barrier), "l"(policy)
            : "memory");
    }
#else
    for (u32 i = lane * 16; i < num_bytes; i += 512) {
        asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(to + i), "l"(from + i), "l"(policy)
                     : "memory");
    }
#endif
}

// After the last copy that a barrier stands for. Called by the whole warp.
__device__ __forceinline__ void copy_end(u32 barrier) {
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// Blocks of a cluster reach into each other's shared memory. Before sm_90 there are no clusters and none of this is called.
//
// What orders what: data goes to other blocks by copies and `st.async` alone, which count their bytes on a barrier of the
// block they write to. That count is a release at cluster scope of just these bytes, so whoever sees the phase complete
// sees them, whatever the sender's threads do; and shared memory is in no cache. A wait therefore needs no acquire beyond
// the block: at cluster scope it would empty the multiprocessor's L1 cache (CCTL.IVALL). An arrival in another block
// only says that something has been read and may be written again. A read is over once its value has been used, or
// wgmma.wait_group has returned, and the release at block scope keeps the arrival behind it. At cluster scope it would
// first make all earlier writes of the warp visible to the whole GPU (MEMBAR.ALL.GPU, over a thousand cycles), which is
// nothing that the other block waits for.

// Says that the block's barriers are initialised: barrier_init_fence makes that visible to the cluster. Orders nothing else.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

// Returns once all blocks of the cluster have said so. No block may leave before all that others send it has arrived.
__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}

// The address in block `rank` of the cluster of what lies at `address` here.
__device__ __forceinline__ u32 address_in_block(u32 address, u32 rank) {
    u32 remote = address;
#if __CUDA_ARCH__ >= 900
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
#endif
    return remote;
}

// Stores 16 bytes in another block, counted there on a barrier of that block.
__device__ __forceinline__ void store_in_block(u32 remote, float4 value, u32 remote_barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(remote),
        "f"(value.x), "f"(value.y), "f"(value.z), "f"(value.w), "r"(remote_barrier)
        : "memory");
#endif
}

// As store_in_block, 8 or 4 bytes, if asked to.
__device__ __forceinline__ void store_in_block(u32 remote, float2 value, u32 remote_barrier, bool is_wanted) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %4, 0;"
        " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3]; }" ::"r"(remote),
        "f"(value.x), "f"(value.y), "r"(remote_barrier), "r"(static_cast<u32>(is_wanted))
        : "memory");
#endif
}

__device__ __forceinline__ void store_in_block(u32 remote, float value, u32 remote_barrier, bool is_wanted) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred p; setp.ne.u32 p, %3, 0;"
        " @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2]; }" ::"r"(remote),
        "f"(value), "r"(remote_barrier), "r"(static_cast<u32>(is_wanted))
        : "memory");
#endif
}

// Says in another block that something has been read. Makes no write visible there, see above.
__device__ __forceinline__ void barrier_arrive_in_block(u32 remote_barrier) {
#if __CUDA_ARCH__ >= 900
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
#endif
}

// Lets the next kernel of the stream start its prologue as soon as this one leaves it room. To be called first: kernels then
// stand ready one behind the other, and a short one costs little more than its work. None writes before its wait, so nothing
// is ahead of its turn.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until all memory that earlier kernels of the stream wrote is visible. Every kernel must call it, or a later one
// could be through its own wait too early. Before it, only what no kernel writes may be read: weights, and lists that the
// host sent before the sequence.
__device__ __forceinline__ void wait_for_predecessors() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
