// What generated CUDA C++ is written in, beside C++: what normpass.h is to the kernels of CPUs.
//
// The threads of a team (program/team.py) have the same elements of every row: `Row` says which,
// and `Segments` where a row lies along two axes. `Slots` are a thread's places on chip for them,
// `Exchange` adds up over the team, and `Bands` over the threads that have a segment. A team that has
// `Columns` adds them up by `Down`. Division and square roots are rounded to nearest, and the largest
// of values of which one is NaN is NaN.

#pragma once

#include <cuda_device.cuh>

// The types of elements that C++ has by these names in torch.
namespace c10 {
struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  __device__ explicit BFloat16(float x) : bits(normpass::device::bfloat16_of(x)) {}
  __device__ explicit BFloat16(double x) : BFloat16(static_cast<float>(x)) {}
  __device__ operator float() const { return normpass::device::float_of(uint32_t(bits) << 16); }
};
struct Half {
  uint16_t bits;
  Half() = default;
  __device__ explicit Half(float x) : bits(normpass::device::half_of(x)) {}
  __device__ explicit Half(double x) : Half(static_cast<float>(x)) {}
  __device__ operator float() const { return normpass::device::float_of_half(bits); }
};
}  // namespace c10

namespace normpass {

constexpr int WARP = 32;

// ---- numbers

template <typename T> __device__ T neg_(T x) { return -x; }
template <typename T> __device__ T abs_(T x) { return fabs(x); }
template <typename T> __device__ T maximum_(T x, T y) { return x > y || x != x ? x : y; }
template <typename T> __device__ T minimum_(T x, T y) { return x < y || x != x ? x : y; }
template <typename T> __device__ T sqrt_(T x) { return sqrt(x); }
template <typename T> __device__ T rsqrt_(T x) { return rsqrt(x); }
template <typename T> __device__ T reciprocal_(T x) { return T(1) / x; }
template <typename T> __device__ T pow_(T x, T y) { return pow(x, y); }
template <typename T> __device__ T exp_(T x) { return exp(x); }
template <typename T> __device__ T expm1_(T x) { return expm1(x); }
template <typename T> __device__ T log_(T x) { return log(x); }
template <typename T> __device__ T log1p_(T x) { return log1p(x); }
template <typename T> __device__ T tanh_(T x) { return tanh(x); }
template <typename T> __device__ T sigmoid_(T x) { return T(1) / (T(1) + exp(-x)); }
template <typename T> __device__ T erf_(T x) { return erf(x); }
template <typename T> __device__ T sin_(T x) { return sin(x); }
template <typename T> __device__ T cos_(T x) { return cos(x); }
template <typename T> __device__ T round_(T x) { return rint(x); }
template <typename T> __device__ T floor_(T x) { return floor(x); }
template <typename T> __device__ T ceil_(T x) { return ceil(x); }
template <typename T> __device__ T trunc_(T x) { return trunc(x); }
template <typename To, typename T> __device__ T round_to(T x) { return T(float(To(x))); }

__device__ inline bool both_(bool x, bool y) { return x && y; }
__device__ inline bool either_(bool x, bool y) { return x || y; }
__device__ inline bool not_(bool x) { return !x; }
template <typename T> __device__ T where_(bool which, T x, T y) { return which ? x : y; }
template <typename T> __device__ bool mask_of(T x) { return x != T(0); }

// ---- elements of tensors

template <typename scalar, typename T> __device__ scalar number_of(T x) {
  if constexpr (sizeof(T) == sizeof(uint16_t)) return scalar(float(x));
  else return scalar(x);
}
template <typename T, typename scalar> __device__ T element_of(scalar x) {
  if constexpr (sizeof(T) == sizeof(bool)) return T(x != scalar(0));
  else return T(x);
}
template <typename scalar, typename T> __device__ scalar get(const T* from) {
  return number_of<scalar>(*from);
}
template <typename T, typename scalar> __device__ void put(T* to, scalar x) {
  *to = element_of<T>(x);
}

// ---- reductions

struct Sum {
  template <typename T> static __device__ T neutral() { return T(0); }
  template <typename T> static __device__ T combine(T x, T y) { return x + y; }
};
struct Prod {
  template <typename T> static __device__ T neutral() { return T(1); }
  template <typename T> static __device__ T combine(T x, T y) { return x * y; }
};
struct Amax {
  template <typename T> static __device__ T neutral() {
    return -std::numeric_limits<T>::infinity();
  }
  template <typename T> static __device__ T combine(T x, T y) { return maximum_(x, y); }
};
struct Amin {
  template <typename T> static __device__ T neutral() { return std::numeric_limits<T>::infinity(); }
  template <typename T> static __device__ T combine(T x, T y) { return minimum_(x, y); }
};

template <typename Op, typename T> __device__ void accumulate(T& sum, T x) {
  sum = Op::combine(sum, x);
}

// Over a warp; every thread gets the same bits.
template <typename Op, typename T> __device__ T across(T x) {
#pragma unroll
  for (int bit = WARP / 2; bit > 0; bit /= 2) x = Op::combine(x, device::of_partner(x, bit));
  return x;
}

// ---- rows

// So many bytes, read and written in one instruction.
template <int BYTES> struct Bytes;
template <> struct Bytes<16> { using type = uint4; };
template <> struct Bytes<8> { using type = uint2; };
template <> struct Bytes<4> { using type = uint32_t; };
template <> struct Bytes<2> { using type = uint16_t; };
template <> struct Bytes<1> { using type = uint8_t; };
template <int BYTES> using Vector = typename Bytes<BYTES>::type;

// What a thread has of a row, wherever it lies: VECTORS of LANES neighbours.
template <int THREADS, int BLOCKS, int VECTORS, int LANES>
struct Share {
  static constexpr int threads = THREADS, blocks = BLOCKS, lanes = LANES;
  static constexpr int elements = VECTORS * LANES, of_block = THREADS * VECTORS * LANES;
  static constexpr int slots = VECTORS;
  const int block = BLOCKS > 1 ? blockIdx.x % BLOCKS : 0;

  // Whether this thread does what is done once for a row.
  __device__ bool is_first() const { return threadIdx.x == 0 && block == 0; }

  // Waits for one vector of everything that is read of a row, where each vector of each of STAGES
  // rows is a group of its own.
  template <int STAGES, int K = 0> __device__ static void wait(int k) {
    if (k == K) {
      device::wait<VECTORS * STAGES - 1 - K>();
    } else if constexpr (K + 1 < VECTORS) {
      wait<STAGES, K + 1>(k);
    }
  }

  template <typename T, typename scalar>
  __device__ static void read(const T* from, scalar (&values)[LANES]) {
    constexpr int bytes = LANES * sizeof(T), piece = bytes < 16 ? bytes : 16;
    alignas(16) T elements[LANES];
#pragma unroll
    for (int p = 0; p < bytes / piece; ++p)
      reinterpret_cast<Vector<piece>*>(elements)[p] = reinterpret_cast<const Vector<piece>*>(from)[p];
#pragma unroll
    for (int j = 0; j < LANES; ++j) values[j] = number_of<scalar>(elements[j]);
  }

  template <typename T, typename scalar>
  __device__ static void write(T* to, const scalar (&values)[LANES]) {
    constexpr int bytes = LANES * sizeof(T), piece = bytes < 16 ? bytes : 16;
    alignas(16) T elements[LANES];
#pragma unroll
    for (int j = 0; j < LANES; ++j) elements[j] = element_of<T>(values[j]);
#pragma unroll
    for (int p = 0; p < bytes / piece; ++p)
      reinterpret_cast<Vector<piece>*>(to)[p] = reinterpret_cast<Vector<piece>*>(elements)[p];
  }
};

// Of a row of so many COLUMNS. What the threads of a block have are neighbours, too.
template <int COLUMNS, int THREADS, int BLOCKS, int VECTORS, int LANES>
struct Row : Share<THREADS, BLOCKS, VECTORS, LANES> {
  static constexpr int columns = COLUMNS, vectors = VECTORS;
  static constexpr int of_block = THREADS * VECTORS * LANES;

  // The first element of a vector.
  __device__ int at(int k) const {
    return this->block * of_block + (k * THREADS + int(threadIdx.x)) * LANES;
  }
  // Whether there is one: the last vectors may lie beyond a row's end.
  __device__ bool has(int k) const {
    return COLUMNS == BLOCKS * of_block || at(k) < COLUMNS;
  }
  // The first of a block's elements, and how many it has.
  __device__ int begin() const { return this->block * of_block; }
  __device__ int count() const {
    const int rest = COLUMNS - begin();
    return rest < 0 ? 0 : rest < of_block ? rest : of_block;
  }
};

// Of a row of so many SEGMENTS of COLUMNS; 0 where their number is told at run time. The threads of a
// block are BANDS; each band has a segment at a time, TURNS of them, and each of its threads VECTORS
// of a segment.
template <int SEGMENTS, int COLUMNS, int THREADS, int BLOCKS, int BANDS, int TURNS, int VECTORS,
          int LANES>
struct Segments : Share<THREADS, BLOCKS, TURNS * VECTORS, LANES> {
  static constexpr int turns = TURNS, vectors = VECTORS, of_band = THREADS / BANDS;
  const int segments;
  const int thread = threadIdx.x % of_band, band = threadIdx.x / of_band;
  __device__ explicit Segments(int segments = SEGMENTS) : segments(segments) {}

  // The segment of this thread's band in a turn, and whether there is one.
  __device__ int segment(int turn) const { return (turn * BLOCKS + this->block) * BANDS + band; }
  __device__ bool has(int turn) const {
    return SEGMENTS == TURNS * BLOCKS * BANDS || segment(turn) < segments;
  }
  // The first element of a vector in its segment, and whether there is one.
  __device__ int at(int k) const { return (k * of_band + thread) * LANES; }
  __device__ bool has(int turn, int k) const {
    return has(turn) && (COLUMNS == VECTORS * of_band * LANES || at(k) < COLUMNS);
  }
  // A vector's number among all that a thread has of a row.
  __device__ static constexpr int slot(int turn, int k) { return turn * VECTORS + k; }
  // Whether this thread does what is done once for a segment.
  __device__ bool leads(int turn) const { return thread == 0 && has(turn); }
};

// Of ACROSS times LANES columns of so many ROWS; 0 where their number is told at run time. The
// threads side by side have neighbours, and those after them the next rows.
template <int ROWS, int THREADS, int BLOCKS, int ACROSS, int VECTORS, int LANES>
struct Columns : Share<THREADS, BLOCKS, VECTORS, LANES> {
  static constexpr int vectors = VECTORS, across = ACROSS, columns = ACROSS * LANES;
  static constexpr int at_once = THREADS / ACROSS;
  const int rows;
  __device__ explicit Columns(int rows = ROWS) : rows(rows) {}

  // The first of a thread's columns.
  __device__ int column() const { return int(threadIdx.x) % ACROSS * LANES; }
  // The row of a vector, and whether there is one.
  __device__ int at(int k) const {
    return (k * BLOCKS + this->block) * at_once + int(threadIdx.x) / ACROSS;
  }
  __device__ bool has(int k) const { return ROWS == VECTORS * BLOCKS * at_once || at(k) < rows; }
  // Whether this thread does what is done once for its columns, or for a group of which so many
  // threads side by side have columns.
  __device__ bool leads() const { return this->block == 0 && threadIdx.x < ACROSS; }
  __device__ bool leads(int group) const { return leads() && threadIdx.x % group == 0; }
};

// What tells that all bytes of a row have come, of each of STAGES rows. Which turn of a stage it is
// says the parity of those before it.
template <int STAGES>
struct Arrivals {
  uint64_t* const first;
  __device__ explicit Arrivals(unsigned char* on_chip) : first(reinterpret_cast<uint64_t*>(on_chip)) {
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < STAGES; ++stage) device::begin_counting(at(stage));
      device::counting_begins();
    }
    device::block_barrier();
  }
  __device__ uint64_t* at(int stage) const { return first + stage; }
  __device__ void expect(int stage, int bytes) const { device::expect(at(stage), bytes); }
  __device__ void wait(int stage, int parity) const { device::wait_for_all(at(stage), parity); }
};

// A thread's places on chip for its elements of a tensor's rows, of which STAGES are there or on
// their way. No other thread looks there. The pieces that a warp reads at a time are neighbours.
template <typename Row, typename T, int STAGES>
struct Slots {
  static constexpr int bytes = Row::lanes * sizeof(T), piece = bytes < 16 ? bytes : 16;
  static constexpr int pieces = bytes / piece;
  static constexpr int size = STAGES * Row::of_block * sizeof(T);
  unsigned char* const first;
  __device__ explicit Slots(unsigned char* on_chip) : first(on_chip + threadIdx.x * piece) {}

  __device__ unsigned char* slot(int stage, int k, int p) const {
    return first + ((stage * Row::slots + k) * pieces + p) * Row::threads * piece;
  }
  // Begins to copy a vector. from: where it lies in memory.
  __device__ void ask(const T* from, int stage, int k) const {
#pragma unroll
    for (int p = 0; p < pieces; ++p)
      device::copy<piece>(slot(stage, k, p), reinterpret_cast<const unsigned char*>(from) +
                                                 p * piece);
  }
  // Begins to copy all that a block has of a row: so many elements. arrivals: where that is counted.
  template <typename Arrivals>
  __device__ void ask_row(const T* from, int stage, int count, const Arrivals& arrivals) const {
    static_assert(pieces == 1, "vectors that lie on chip as in memory");
    if (count) device::copy_all(slot(stage, 0, 0), from, count * int(sizeof(T)), arrivals.at(stage));
  }
  // A vector that has come, as numbers or truth values.
  template <typename scalar>
  __device__ void read(scalar (&values)[Row::lanes], int stage, int k) const {
    alignas(16) T elements[Row::lanes];
#pragma unroll
    for (int p = 0; p < pieces; ++p)
      reinterpret_cast<Vector<piece>*>(elements)[p] =
          *reinterpret_cast<const Vector<piece>*>(slot(stage, k, p));
#pragma unroll
    for (int j = 0; j < Row::lanes; ++j) values[j] = number_of<scalar>(elements[j]);
  }
};

// Adds up over a team, in the same order every time. All threads of it get the same bits. Each warp
// writes its sum to every block, and each warp adds up what all of them have written: one barrier,
// after which a block may end. Two sums after each other take turns in where they are written.
template <typename scalar, typename Row, int TOGETHER>
struct Exchange {
  static constexpr int warps = Row::threads / WARP, parts = warps * Row::blocks;
  scalar* const first;
  int turn = 0;
  __device__ explicit Exchange(unsigned char* on_chip) : first(reinterpret_cast<scalar*>(on_chip)) {}

  template <typename... Ops, typename... Values> __device__ void all(Values&... values) {
    static_assert(sizeof...(Values) <= TOGETHER, "more sums than there is room for");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    scalar* const here = first + turn * TOGETHER * parts;
    turn ^= 1;
    ((values = across<Ops>(values)), ...);
    if constexpr (parts > 1) {
      int n = 0;
      if constexpr (Row::blocks > 1) {
        const int mine = (blockIdx.x % Row::blocks) * warps + warp;
        if (lane < Row::blocks)
          (device::put_in_block(here + n++ * parts + mine, lane, values), ...);
        device::cluster_barrier();
      } else {
        if (lane == 0) ((here[n++ * parts + warp] = values), ...);
        device::block_barrier();
      }
      n = 0;
      ((values = combined<Ops>(here + n++ * parts, lane)), ...);
    }
  }

  template <typename Op> __device__ static scalar combined(const scalar* sums, int lane) {
    scalar sum = Op::template neutral<scalar>();
#pragma unroll
    for (int part = 0; part < parts; part += WARP)
      if (part + lane < parts) sum = Op::combine(sum, sums[part + lane]);
    return across<Op>(sum);
  }
};

// Over a warp that is a band.
template <typename... Ops, typename... Values> __device__ void all_of_warp(Values&... values) {
  ((values = across<Ops>(values)), ...);
}

// Adds up over each band of a block, of several warps, in the same order every time. All threads of
// a band get the same bits.
template <typename scalar, typename Row, int TOGETHER>
struct Bands {
  static constexpr int warps = Row::threads / WARP, of_band = Row::of_band / WARP;
  scalar* const first;
  int turn = 0;
  __device__ explicit Bands(unsigned char* on_chip) : first(reinterpret_cast<scalar*>(on_chip)) {}

  template <typename... Ops, typename... Values> __device__ void all(Values&... values) {
    static_assert(sizeof...(Values) <= TOGETHER, "more sums than there is room for");
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    scalar* const here = first + turn * TOGETHER * warps;
    turn ^= 1;
    ((values = across<Ops>(values)), ...);
    int n = 0;
    if (lane == 0) ((here[n++ * warps + warp] = values), ...);
    device::block_barrier();
    n = 0;
    ((values = of_warps<Ops>(here + n++ * warps + warp / of_band * of_band)), ...);
  }

  template <typename Op> __device__ static scalar of_warps(const scalar* sums) {
    scalar sum = sums[0];
#pragma unroll
    for (int warp = 1; warp < of_band; ++warp) sum = Op::combine(sum, sums[warp]);
    return sum;
  }
};

// Adds up columns over a team, in the same order every time. All threads that have a column get the
// same bits. Each warp leaves its sums to its block, or each row where no warp has whole ones, and
// each block its own to every other one.
template <typename scalar, typename Row, int TOGETHER>
struct Down {
  static constexpr bool is_of_warps = WARP % Row::across == 0;
  static constexpr int parts = is_of_warps ? Row::threads / WARP : Row::at_once;
  scalar* const of_parts;
  scalar* const of_blocks;
  int turn = 0;
  __device__ explicit Down(unsigned char* on_chip)
      : of_parts(reinterpret_cast<scalar*>(on_chip)),
        of_blocks(of_parts + TOGETHER * parts * Row::columns) {}

  // Sums of each column.
  template <typename... Ops, typename... Arrays> __device__ void all(Arrays&... values) {
    add<Row::lanes, 1, Ops...>(values...);
  }
  // Sums of all columns of a group, of which GROUP threads side by side have some.
  template <int GROUP, typename... Ops, typename... Numbers>
  __device__ void groups(Numbers&... numbers) {
    add<1, GROUP, Ops...>(reinterpret_cast<scalar(&)[1]>(numbers)...);
  }

  template <int LANES, int GROUP, typename... Ops, typename... Arrays>
  __device__ void add(Arrays&... values) {
    static_assert(sizeof...(Arrays) <= TOGETHER, "more sums than there is room for");
    constexpr int columns = Row::across * LANES;
    scalar* const here = of_blocks + turn * TOGETHER * Row::blocks * Row::columns;
    turn ^= 1;
    int n = 0;
    (leave<Ops>(values, of_parts + n++ * parts * columns), ...);
    device::block_barrier();
    n = 0;
    ((share<Ops, columns>(of_parts + n * parts * columns, here + n * Row::blocks * columns), ++n),
     ...);
    if constexpr (Row::blocks > 1) device::cluster_barrier();
    else device::block_barrier();
    n = 0;
    (take<Ops, GROUP>(values, here + n++ * Row::blocks * columns), ...);
  }

  // What a part has of its threads' columns.
  template <typename Op, int LANES>
  __device__ static void leave(scalar (&values)[LANES], scalar* sums) {
    constexpr int columns = Row::across * LANES;
    const int thread = int(threadIdx.x) % Row::across;
    const int part = int(threadIdx.x) / (is_of_warps ? WARP : Row::across);
    const bool leaves = !is_of_warps || threadIdx.x % WARP < Row::across;
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      if constexpr (is_of_warps) {
#pragma unroll
        for (int bit = WARP / 2; bit >= Row::across; bit /= 2)
          values[j] = Op::combine(values[j], device::of_partner(values[j], bit));
      }
      if (leaves) sums[part * columns + thread * LANES + j] = values[j];
    }
  }

  // A block's sums, to all blocks.
  template <typename Op, int COLUMNS> __device__ static void share(const scalar* sums, scalar* to) {
    for (int column = threadIdx.x; column < COLUMNS; column += Row::threads) {
      scalar sum = sums[column];
      for (int part = 1; part < parts; ++part) sum = Op::combine(sum, sums[part * COLUMNS + column]);
      if constexpr (Row::blocks > 1) {
        const int mine = blockIdx.x % Row::blocks * COLUMNS + column;
        for (int block = 0; block < Row::blocks; ++block) device::put_in_block(to + mine, block, sum);
      } else {
        to[column] = sum;
      }
    }
  }

  template <typename Op, int GROUP, int LANES>
  __device__ static void take(scalar (&values)[LANES], const scalar* sums) {
    constexpr int columns = Row::across * LANES;
    const int first = int(threadIdx.x) % Row::across / GROUP * GROUP * LANES;
#pragma unroll
    for (int j = 0; j < LANES; ++j) {
      values[j] = sums[first + j];
#pragma unroll
      for (int other = 1; other < GROUP * Row::blocks; ++other)
        values[j] = Op::combine(
            values[j], sums[other / GROUP * columns + first + other % GROUP + j]);
    }
  }
};

// Adds up what threads side by side have of a group, GROUP of them, in the same order every time.
// Those that have the same columns have the same numbers.
template <typename scalar, typename Row, int GROUP, int TOGETHER>
struct Beside {
  scalar* const first;
  int turn = 0;
  __device__ explicit Beside(unsigned char* on_chip) : first(reinterpret_cast<scalar*>(on_chip)) {}

  template <typename... Ops, typename... Numbers> __device__ void all(Numbers&... numbers) {
    static_assert(sizeof...(Numbers) <= TOGETHER, "more sums than there is room for");
    scalar* const here = first + turn * TOGETHER * Row::across;
    turn ^= 1;
    int n = 0;
    if (threadIdx.x < Row::across) ((here[n++ * Row::across + threadIdx.x] = numbers), ...);
    device::block_barrier();
    n = 0;
    ((numbers = of_group<Ops>(here + n++ * Row::across)), ...);
  }

  template <typename Op> __device__ static scalar of_group(const scalar* numbers) {
    const int begin = int(threadIdx.x) % Row::across / GROUP * GROUP;
    scalar sum = numbers[begin];
#pragma unroll
    for (int k = 1; k < GROUP; ++k) sum = Op::combine(sum, numbers[begin + k]);
    return sum;
  }
};

// ---- partial results

// Adds up one element's parts, which lie `apart` from each other: the warps of a block take turns,
// and the first one adds up what they have. Always in the same order.
template <typename Op, int THREADS, typename scalar>
__device__ scalar combine(const scalar* part, int64_t parts, int64_t apart, bool there,
                          scalar* on_chip) {
  constexpr int warps = THREADS / WARP;
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  scalar sum = Op::template neutral<scalar>();
#pragma unroll 4
  for (int64_t k = warp; k < parts; k += warps)
    if (there) sum = Op::combine(sum, part[k * apart]);
  device::block_barrier();  // what was combined before has been read
  on_chip[warp * WARP + lane] = sum;
  device::block_barrier();
  sum = on_chip[lane];
#pragma unroll
  for (int k = 1; k < warps; ++k) sum = Op::combine(sum, on_chip[k * WARP + lane]);
  return sum;
}

}  // namespace normpass
