// A GPU's threads on a CPU, for tests: what backend/codegen/cuda_device.cuh says in a GPU's own
// instructions. Each thread of a cluster is a fiber. Its warps run one after the other, each as far
// as it comes without the others: of every second cluster the last one first.
//
// It is stricter than a GPU. What has not been waited for is not there, and neither is what another
// block wrote before a block began. Errors are what lies beyond a block's memory, at a place that a
// copy cannot begin at, or in a block that has ended, and a thread that waits for others that wait
// for something else.

#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define CLUSTER(blocks)
#define ON_CHIP(name) unsigned char* const name = normpass::host::here->block->chip()
#define threadIdx (normpass::host::here->index_of_thread)
#define blockIdx (normpass::host::here->block->index_of_block)

struct alignas(8) uint2 { uint32_t x, y; };
struct alignas(16) uint4 { uint32_t x, y, z, w; };

namespace normpass {

using std::abs;
using std::ceil;
using std::cos;
using std::erf;
using std::exp;
using std::expm1;
using std::fabs;
using std::floor;
using std::log;
using std::log1p;
using std::pow;
using std::rint;
using std::sin;
using std::sqrt;
using std::tanh;
using std::trunc;
template <typename T> T rsqrt(T x) { return T(1) / std::sqrt(x); }

namespace host {

[[noreturn]] inline void fail(const char* what) {
  std::fprintf(stderr, "a kernel went wrong: %s\n", what);
  std::abort();
}

struct Index { unsigned x; };
enum class Waits { no, warp, block, cluster, copies, done };
struct Copy { void* to; const void* from; int bytes; };

constexpr unsigned char FILLED = 0xff;  // not a number, whatever its type
constexpr std::size_t STACK = 64 * 1024, BEYOND = 256;

struct Turn { int expected; std::vector<Copy> copies; };

struct Block {
  Index index_of_block;
  std::map<uint64_t*, std::vector<Turn>> turns;  // of a barrier that counts bytes
  std::size_t size;
  std::vector<unsigned char> memory;
  bool has_begun = false;
  int running;  // threads that have not ended
  Block(unsigned index, std::size_t size, int threads)
      : index_of_block{index}, size(size), memory(size + BEYOND + 16), running(threads) {}
  void begin() {
    if (!has_begun) std::fill(memory.begin(), memory.end(), FILLED);
    has_begun = true;
  }
  unsigned char* chip() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    return memory.data() + (16 - address % 16) % 16;
  }
  void check() {
    for (std::size_t k = 0; k < BEYOND; ++k)
      if (chip()[size + k] != FILLED) fail("it wrote beyond its block's memory");
    for (const auto& [barrier, turns] : turns)
      if (!turns.empty() && !turns.back().copies.empty()) fail("it ended before a copy had come");
  }
};

struct Thread {
  Index index_of_thread;
  Block* block;
  std::vector<std::unique_ptr<Block>>* cluster;
  ucontext_t context;
  std::unique_ptr<char[]> stack{new char[STACK]};
  Waits waits = Waits::no;
  uint64_t shown = 0;  // to the other threads of its warp
  std::vector<Copy> copies;
  std::deque<std::vector<Copy>> groups;
  Thread* warp = nullptr;  // its warp's first thread
};

inline thread_local Thread* here = nullptr;
inline thread_local ucontext_t scheduler;
inline thread_local void (*run_kernel)() = nullptr;

inline void wait_for(Waits others) {
  Thread* const me = here;
  me->waits = others;
  swapcontext(&me->context, &scheduler);
}

inline void fiber() {
  run_kernel();
  here->waits = Waits::done;
}

// Lets go of the threads from `first` on if all of them wait for each other.
inline bool release(std::vector<Thread>& all, std::size_t first, std::size_t count, Waits others) {
  for (std::size_t k = first; k < first + count; ++k)
    if (all[k].waits != others) return false;
  for (std::size_t k = first; k < first + count; ++k) all[k].waits = Waits::no;
  return true;
}

// Runs the threads of a warp until they wait for other warps, or have ended.
inline void run_warp(std::vector<Thread>& all, std::size_t first) {
  do {
    for (std::size_t k = first; k < first + 32; ++k) {
      Thread& one = all[k];
      if (one.waits != Waits::no) continue;
      one.block->begin();
      here = &one;
      swapcontext(&scheduler, &one.context);
      one.block->running -= one.waits == Waits::done;
    }
  } while (release(all, first, 32, Waits::warp));
}

inline void run_cluster(unsigned first, int threads, int blocks, std::size_t shared) {
  std::vector<std::unique_ptr<Block>> cluster;
  for (int b = 0; b < blocks; ++b)
    cluster.push_back(std::make_unique<Block>(first + b, shared, threads));
  std::vector<Thread> all(threads * blocks);
  for (int k = 0; k < threads * blocks; ++k) {
    Thread& one = all[k];
    one.index_of_thread.x = k % threads;
    one.block = cluster[k / threads].get();
    one.cluster = &cluster;
    one.warp = &all[k - k % 32];
    getcontext(&one.context);
    one.context.uc_stack.ss_sp = one.stack.get();
    one.context.uc_stack.ss_size = STACK;
    one.context.uc_link = &scheduler;
    makecontext(&one.context, fiber, 0);
  }
  const std::size_t warps = all.size() / 32;
  const bool last_first = first / blocks % 2;
  bool any = true;
  int in_vain = 0;  // times that threads looked for copies, and nothing else happened
  while (any) {
    for (std::size_t w = 0; w < warps; ++w)
      run_warp(all, 32 * (last_first ? warps - 1 - w : w));
    any = release(all, 0, all.size(), Waits::cluster);
    for (std::size_t k = 0; k < all.size(); k += threads)
      any |= release(all, k, threads, Waits::block);
    in_vain = any ? 0 : in_vain + 1;
    if (in_vain > 2) break;
    for (Thread& one : all)
      if (one.waits == Waits::copies) {
        one.waits = Waits::no;
        any = true;
      }
  }
  for (Thread& one : all)
    if (one.waits != Waits::done) fail("its threads wait for different things");
  for (auto& block : cluster) block->check();
}

template <typename... Arguments, std::size_t... K>
void launch(void (*kernel)(Arguments...), std::index_sequence<K...>, int64_t grid, int threads,
            int blocks, int64_t shared, void* const* arguments) {
  static thread_local void (*function)(Arguments...);
  static thread_local void* const* given;
  function = kernel;
  given = arguments;
  run_kernel = [] { function(*static_cast<std::remove_reference_t<Arguments>*>(given[K])...); };
  // What a cluster writes beyond its own results is not written over by the next one.
  for (int64_t first = grid; first > 0; first -= blocks)
    run_cluster(first - blocks, threads, blocks, shared);
}

// Runs a kernel. grid: blocks. arguments: the address of each.
template <typename... Arguments>
void launch(void (*kernel)(Arguments...), int64_t grid, int threads, int blocks, int64_t shared,
            void* const* arguments) {
  launch(kernel, std::index_sequence_for<Arguments...>(), grid, threads, blocks, shared,
         arguments);
}

}  // namespace host

namespace device {

template <int BYTES> void copy(void* on_chip, const void* memory) {
  host::Thread& me = *host::here;
  if (reinterpret_cast<std::uintptr_t>(memory) % BYTES || reinterpret_cast<std::uintptr_t>(on_chip) % BYTES)
    host::fail("a copy does not begin at a multiple of its bytes");
  const auto offset = static_cast<unsigned char*>(on_chip) - me.block->chip();
  if (offset < 0 || offset + BYTES > static_cast<std::ptrdiff_t>(me.block->size))
    host::fail("a copy goes beyond its block's memory");
  std::memset(on_chip, host::FILLED, BYTES);
  me.copies.push_back({on_chip, memory, BYTES});
}

inline void group() {
  host::here->groups.push_back(std::move(host::here->copies));
  host::here->copies.clear();
}

template <int GROUPS> void wait() {
  auto& groups = host::here->groups;
  for (; groups.size() > GROUPS; groups.pop_front())
    for (const host::Copy& each : groups.front()) std::memcpy(each.to, each.from, each.bytes);
}

// Such a barrier knows its copies by the turn that they are of. They come to whoever waits first.
inline void begin_counting(uint64_t* barrier) {
  const host::Block& block = *host::here->block;
  const auto end = reinterpret_cast<unsigned char*>(barrier + 1) - host::here->block->chip();
  if (end > static_cast<std::ptrdiff_t>(block.size))
    host::fail("a barrier lies beyond its block's memory");
  *barrier = 0;
}
inline void counting_begins() {}
inline void expect(uint64_t* barrier, int bytes) {
  if (*barrier) host::fail("a barrier counts before it is one");
  host::here->block->turns[barrier].push_back({bytes, {}});
}
inline void copy_all(void* on_chip, const void* memory, int bytes, uint64_t* barrier) {
  host::Block& block = *host::here->block;
  if (reinterpret_cast<std::uintptr_t>(memory) % 16 || reinterpret_cast<std::uintptr_t>(on_chip) % 16 || bytes % 16)
    host::fail("a copy does not begin at a multiple of its bytes");
  const auto offset = static_cast<unsigned char*>(on_chip) - block.chip();
  if (offset < 0 || offset + bytes > static_cast<std::ptrdiff_t>(block.size))
    host::fail("a copy goes beyond its block's memory");
  std::memset(on_chip, host::FILLED, bytes);
  block.turns[barrier].back().copies.push_back({on_chip, memory, bytes});
}
inline void wait_for_all(uint64_t* barrier, int parity) {
  auto& turns = host::here->block->turns[barrier];
  const auto has_come = [&] { return turns.empty() || turns.back().copies.empty(); };
  // The turn after the last one is waited for; of the one before that it is known that it is over.
  while (turns.size() % 2 == unsigned(parity) && has_come()) host::wait_for(host::Waits::copies);
  if (turns.empty() || turns.size() % 2 == unsigned(parity)) return;
  host::Turn& turn = turns.back();
  for (const host::Copy& each : turn.copies) {
    std::memcpy(each.to, each.from, each.bytes);
    turn.expected -= each.bytes;
  }
  turn.copies.clear();
  if (turn.expected) host::fail("other bytes come than are expected");
}

template <typename T> T of_partner(T value, int bit) {
  host::Thread& me = *host::here;
  std::memcpy(&me.shown, &value, sizeof value);
  host::wait_for(host::Waits::warp);
  const host::Thread& other = me.warp[(me.index_of_thread.x % 32) ^ bit];
  std::memcpy(&value, &other.shown, sizeof value);
  host::wait_for(host::Waits::warp);
  return value;
}

inline void block_barrier() { host::wait_for(host::Waits::block); }
inline void cluster_barrier() { host::wait_for(host::Waits::cluster); }

template <typename T> void put_in_block(T* on_chip, int block, T value) {
  host::Thread& me = *host::here;
  const auto offset = reinterpret_cast<unsigned char*>(on_chip) - me.block->chip();
  if (!(*me.cluster)[block]->running) host::fail("it writes to a block that has ended");
  std::memcpy((*me.cluster)[block]->chip() + offset, &value, sizeof value);
}

inline float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof x);
  return bits;
}
inline uint16_t bfloat16_of(float x) {
  const uint32_t bits = bits_of(x);
  if (x != x) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t half_of(float x) {
  const uint16_t sign = bits_of(x) >> 16 & 0x8000;
  if (x != x) return 0x7fff;
  const float size = std::fabs(x);
  if (size == 0) return sign;
  if (size >= 65520.0f) return sign | 0x7c00;
  // A place of the result is a power of two; to round to it is to round a whole number.
  int exponent = 0;
  std::frexp(size, &exponent);
  const int place = (exponent < -13 ? -13 : exponent) - 11;
  const float whole = std::rint(std::ldexp(size, -place));
  const int biased = place + 24;  // 0 where the smallest numbers are
  return sign | static_cast<uint16_t>(biased * 1024 + static_cast<int>(whole));
}
inline float float_of_half(uint16_t bits) {
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  float size = std::ldexp(float(exponent ? mantissa + 1024 : mantissa), (exponent ? exponent : 1) - 25);
  if (exponent == 31) size = mantissa ? std::nanf("") : std::numeric_limits<float>::infinity();
  return bits & 0x8000 ? -size : size;
}

}  // namespace device
}  // namespace normpass
