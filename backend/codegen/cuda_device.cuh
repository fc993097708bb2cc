// What only a GPU's own instructions say: the one file with PTX. Everything in normpass.cuh is
// written in these, and the tests have them for a CPU (tests/cuda_on_cpu.h).

#pragma once

#ifdef __CUDACC_RTC__
using int8_t = signed char;
using uint8_t = unsigned char;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
namespace std {
template <typename T> struct numeric_limits {
  static __device__ T infinity() { return T(__int_as_float(0x7f800000)); }
  static __device__ T quiet_NaN() { return T(__int_as_float(0x7fc00000)); }
};
}  // namespace std
#endif

// Memory of a block, as bytes.
#define ON_CHIP(name) extern __shared__ __align__(16) unsigned char name[]
// So many blocks that are neighbours see each other's memory.
#define CLUSTER(blocks) __cluster_dims__(blocks, 1, 1)

namespace normpass {
namespace device {

__device__ __forceinline__ uint32_t address_of(const void* on_chip) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(on_chip));
}

// Begins to copy BYTES from memory onto the chip: 4, 8 or 16, at a multiple of as many.
template <int BYTES>
__device__ __forceinline__ void copy(void* on_chip, const void* memory) {
  if constexpr (BYTES == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address_of(on_chip)),
                 "l"(memory)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address_of(on_chip)),
                 "l"(memory), "n"(BYTES)
                 : "memory");
  }
}

// What this thread has begun to copy since the last call is a group.
__device__ __forceinline__ void group() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits for this thread's groups, but for the last so many.
template <int GROUPS>
__device__ __forceinline__ void wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

// A barrier on chip that counts bytes which one thread expects. What was read from where they will
// lie was read before that thread says so.
__device__ __forceinline__ void begin_counting(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address_of(barrier)) : "memory");
}
__device__ __forceinline__ void counting_begins() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void expect(uint64_t* barrier, int bytes) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(address_of(barrier)),
               "r"(bytes)
               : "memory");
}
// Begins to copy so many bytes onto the chip, a multiple of 16 as both addresses are.
__device__ __forceinline__ void copy_all(void* on_chip, const void* memory, int bytes,
                                         uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          address_of(on_chip)),
      "l"(memory), "r"(bytes), "r"(address_of(barrier))
      : "memory");
}
// Waits until all have come that were expected in a turn, of which the parity is given.
__device__ __forceinline__ void wait_for_all(uint64_t* barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done; }"
        : "=r"(done)
        : "r"(address_of(barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

// The value that the thread of this warp has whose number differs in one bit.
template <typename T>
__device__ __forceinline__ T of_partner(T value, int bit) {
  return __shfl_xor_sync(0xffffffffu, value, bit);
}

__device__ __forceinline__ void block_barrier() { __syncthreads(); }

// All threads of a cluster have come here, and see what was written before.
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes a number to the same place in another block's memory.
__device__ __forceinline__ void put_in_block(float* on_chip, int block, float value) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(address_of(on_chip)), "r"(block));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(there), "f"(value) : "memory");
}
__device__ __forceinline__ void put_in_block(double* on_chip, int block, double value) {
  uint32_t there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
               : "=r"(there)
               : "r"(address_of(on_chip)), "r"(block));
  asm volatile("st.shared::cluster.f64 [%0], %1;" ::"r"(there), "d"(value) : "memory");
}

// Numbers of 16 bits, rounded to nearest, ties to even.
__device__ __forceinline__ uint16_t bfloat16_of(float x) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ uint16_t half_of(float x) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
__device__ __forceinline__ float float_of_half(uint16_t bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ __forceinline__ float float_of(uint32_t bits) { return __uint_as_float(bits); }

}  // namespace device
}  // namespace normpass
