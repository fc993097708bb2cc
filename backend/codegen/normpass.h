// What generated CPU kernels are written in: lanes, masks, reductions, workers.
//
// A value is either one number (scalar) or as many as a vector register holds (Vec, from at::vec). A truth
// value is bool, or a Vec whose lanes have all bits set or none. `lanes` says which of a Vec's lanes count: All,
// known when compiling, the first so many at the end of a row, or those From one on at its beginning.
#pragma once

#include <ATen/cpu/vec/vec.h>
#include <omp.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <limits>
#include <memory>
#include <type_traits>
#include <vector>

#include "functions.h"

#ifndef NORMPASS_WITHOUT_PYTHON
// Of Python's own interface, whose header kernels do without.
extern "C" {
typedef struct _object PyObject;
extern PyObject* PyExc_RuntimeError;
std::ptrdiff_t PyTuple_Size(PyObject*);
PyObject* PyTuple_GetItem(PyObject*, std::ptrdiff_t);
void PyErr_SetString(PyObject*, const char*);
void* PyEval_SaveThread();
void PyEval_RestoreThread(void*);

// What every generated file defines.
void kernel(void* const* tensors, const int64_t* sizes, int workers, bool past_caches);

// All of a launch but the tensors: `Arguments` of backend/run/runtime.py.
struct Arguments {
  void* (*data_ptr)(PyObject*);  // torch's
  const int64_t* sizes;
  int most_workers;
  bool past_caches;
};

// Called by Python with a tuple of tensors, which stay as they are while others run Python.
void launch(const Arguments* arguments, PyObject* tensors, int threads) {
  std::vector<void*> pointers(PyTuple_Size(tensors));
  try {
    for (std::size_t i = 0; i < pointers.size(); i++)
      pointers[i] = arguments->data_ptr(PyTuple_GetItem(tensors, i));
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
    return;
  }
  void* state = PyEval_SaveThread();
  kernel(pointers.data(), arguments->sizes, std::min(threads, arguments->most_workers),
         arguments->past_caches);
  PyEval_RestoreThread(state);
}
}
#endif

namespace normpass {

using at::vec::Vectorized;

template <class T>
struct All {
  constexpr operator int() const { return Vectorized<T>::size(); }
};

struct From {
  int lane;
};

template <class L>
inline constexpr bool is_all = !std::is_same_v<L, int> && !std::is_same_v<L, From>;

// The lanes that count, one by one.
template <class T, class L, class Body>
inline void each_lane(L lanes, const Body& body) {
  if constexpr (std::is_same_v<L, From>) {
    for (int i = lanes.lane; i < Vectorized<T>::size(); ++i) body(i);
  } else {
    for (int i = 0; i < lanes; ++i) body(i);
  }
}

// ---- memory

// A number as memory keeps it. Integers of one byte take the long way: what C++ does not define, a number that they do
// not hold, has the last eight bits on some processors and is the nearest one that they hold on others.
template <class S, class T>
inline S kept_as(T value) {
  if constexpr (std::is_same_v<S, int8_t> || std::is_same_v<S, uint8_t>)
    return static_cast<S>(static_cast<int32_t>(value));
  else return static_cast<S>(value);
}

template <class T, class S>
inline T get(const S* p) {
  return static_cast<T>(*p);
}

template <class T, class S>
inline void put(S* p, T value) {
  *p = kept_as<S>(value);
}

template <class T, class S>
inline constexpr bool is_half = std::is_same_v<T, float> && (std::is_same_v<S, c10::BFloat16> || std::is_same_v<S, c10::Half>);

#if defined(CPU_CAPABILITY_AVX512)
// A Vec of floats has half as many lanes as one of 16-bit numbers. at::vec goes through the wider one with
// masks, and every other access of it crosses a cache line.
template <class S>
inline Vectorized<float> widen(__m256i bits) {
  if constexpr (std::is_same_v<S, c10::Half>) return _mm512_cvtph_ps(bits);
  else return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

template <class S>
inline __m256i narrow(Vectorized<float> value) {
  if constexpr (std::is_same_v<S, c10::Half>)
    return _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  else return at::vec::cvtfp32_bf16(value);
}

inline __mmask16 mask_of_lanes(int lanes) { return static_cast<__mmask16>((1u << lanes) - 1); }
inline __mmask16 mask_of_lanes(From lanes) { return static_cast<__mmask16>(0xffffu << lanes.lane); }
#elif defined(CPU_CAPABILITY_AVX2)
template <class S>
inline Vectorized<float> widen(__m128i bits) {
  if constexpr (std::is_same_v<S, c10::Half>) return _mm256_cvtph_ps(bits);
  else return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

template <class S>
inline __m128i narrow(Vectorized<float> value) {
  if constexpr (std::is_same_v<S, c10::Half>)
    return _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  else return at::vec::cvtfp32_bf16(value);
}
#endif

// Truth values lie in memory as bytes, of 1 or 0. A number is true unless it is zero, and so is NaN. What
// quantization leaves are bytes too: integers keep the last eight bits of a number without its fraction.
template <class T, class S>
inline constexpr bool is_byte = std::is_same_v<T, float> && sizeof(S) == 1;

#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
using Bits = Vectorized<int32_t>;

// The bits of numbers with so many in the mantissa, rounded to nearest. What is too large is what torch makes of
// it: infinity, the largest number from 2.13 on where there is none, NaN before.
template <int mantissa, int bias>
inline Bits to_float8(Vectorized<float> value) {
  using at::vec::cast;
  constexpr int drop = 23 - mantissa, one = 1 << 23;
  const Bits bits = cast<int32_t>(value), size = bits & Bits(0x7fffffff);
  // Half of the last place is added, and one more bit where the last place would be odd.
  const Bits odd = (size >> Bits(drop)) & Bits(1);
  const Bits normal = (size + Bits((bias - 127) * one + (1 << (drop - 1)) - 1) + odd) >> Bits(drop);
  // A sum with this has its last place where the smallest numbers have theirs.
  const Bits ruler((151 - bias - mantissa) * one);
  const Bits tiny = cast<int32_t>(cast<float>(size) + cast<float>(ruler)) - ruler;
  Bits rounded = Bits::blendv(normal, tiny, size < Bits((128 - bias) * one));
  const Bits largest(mantissa == 3 ? c10::Float8_e4m3fn(1e6f).x : c10::Float8_e5m2(1e6f).x);
  rounded = at::vec::minimum(rounded, largest);
  rounded = Bits::blendv(rounded, Bits(0x7f), size > Bits(0x7f800000));
  return rounded | ((bits >> Bits(24)) & Bits(0x80));
}

template <int mantissa, int bias>
inline Vectorized<float> from_float8(Bits bits) {
  using at::vec::cast;
  const Bits size = bits & Bits(0x7f), unit((254 - bias) * (1 << 23));
  Bits value = cast<int32_t>(cast<float>(size << Bits(23 - mantissa)) * cast<float>(unit));
  // Not >=: with it g++ 12 makes infinities of all where vectors of 256 bits are built for AVX-512VL.
  if (mantissa == 2) value = Bits::blendv(value, Bits(0x7f800000), size > Bits(0x7b));
  value = Bits::blendv(value, Bits(0x7fc00000), size > Bits(mantissa == 3 ? 0x7e : 0x7c));
  return cast<float>(value | ((bits & Bits(0x80)) << Bits(24)));
}

// Numbers, of bytes that lie in the lowest bits of lanes.
template <class S>
inline Vectorized<float> from_bytes(Bits bytes) {
  if constexpr (std::is_same_v<S, c10::Float8_e4m3fn>) return from_float8<3, 7>(bytes);
  else if constexpr (std::is_same_v<S, c10::Float8_e5m2>) return from_float8<2, 15>(bytes);
  else if constexpr (std::is_same_v<S, int8_t>) return at::vec::convert<float>((bytes << Bits(24)) >> Bits(24));
  else return at::vec::convert<float>(bytes);
}

template <class S>
inline Bits to_bytes(Vectorized<float> value) {
  if constexpr (std::is_same_v<S, c10::Float8_e4m3fn>) return to_float8<3, 7>(value);
  else if constexpr (std::is_same_v<S, c10::Float8_e5m2>) return to_float8<2, 15>(value);
  else if constexpr (std::is_same_v<S, bool>)
    return at::vec::cast<int32_t>(value != Vectorized<float>(0.0f)) & Bits(1);
  else return at::vec::convert<int32_t>(value);
}

inline Bits load_bytes(const void* p) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
#else
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#endif
}

inline void store_bytes(void* p, Bits value) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(value));
#else
  const __m256i bytes = value & Bits(0xff);
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(bytes), _mm256_extracti128_si256(bytes, 1));
  _mm_storel_epi64(static_cast<__m128i*>(p), _mm_packus_epi16(half, half));
#endif
}

// Some lanes, one by one; all at once where there are masks for bytes.
template <class L>
inline Bits load_bytes(const void* p, L lanes) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask_of_lanes(lanes), p));
#else
  alignas(16) uint8_t bytes[16] = {};
  each_lane<float>(lanes, [&](int i) { bytes[i] = static_cast<const uint8_t*>(p)[i]; });
  return load_bytes(bytes);
#endif
}

template <class L>
inline void store_bytes(void* p, Bits value, L lanes) {
#if defined(CPU_CAPABILITY_AVX512)
  _mm_mask_storeu_epi8(p, mask_of_lanes(lanes), _mm512_cvtepi32_epi8(value));
#else
  alignas(16) uint8_t bytes[16];
  store_bytes(bytes, value);
  each_lane<float>(lanes, [&](int i) { static_cast<uint8_t*>(p)[i] = bytes[i]; });
#endif
}
#endif

template <class T, class S, class L>
inline Vectorized<T> load(const S* p, L lanes) {
  using V = Vectorized<T>;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (is_half<T, S>) {
    if constexpr (is_all<L>) return widen<S>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    else return widen<S>(_mm256_maskz_loadu_epi16(mask_of_lanes(lanes), p));
  }
  if constexpr (std::is_same_v<T, float> && std::is_same_v<S, float> && !is_all<L>)
    return _mm512_maskz_loadu_ps(mask_of_lanes(lanes), p);
  if constexpr (std::is_same_v<T, float> && std::is_same_v<S, int32_t>)
    return _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(mask_of_lanes(lanes), p));
  if constexpr (std::is_same_v<T, float> && std::is_same_v<S, int64_t>) {
    const __mmask16 mask = mask_of_lanes(lanes);
    const __m256 low = _mm512_cvtepi64_ps(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask), p));
    const __m256 high = _mm512_cvtepi64_ps(_mm512_maskz_loadu_epi64(static_cast<__mmask8>(mask >> 8), p + 8));
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
  }
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (is_byte<T, S>) {
    if constexpr (is_all<L>) return from_bytes<S>(load_bytes(p));
    else return from_bytes<S>(load_bytes(p, lanes));
  }
#endif
#if defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
  if constexpr (is_half<T, S> && is_all<L>) return widen<S>(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#endif
#if !defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float> && std::is_same_v<S, int32_t> && is_all<L>)
    return at::vec::convert<float>(Vectorized<int32_t>::loadu(p));
#endif
  if constexpr (std::is_same_v<S, T> && is_all<L>) {
    return V::loadu(p);
  } else if constexpr (std::is_same_v<S, T> && std::is_same_v<L, int>) {
    return V::loadu(p, lanes);
  } else if constexpr (is_half<T, S> && !std::is_same_v<L, From>) {
    return at::vec::convert<float, 1, S, 1>(Vectorized<S>::loadu(p, lanes));
  } else {
    alignas(64) T buffer[V::size()] = {};
    each_lane<T>(lanes, [&](int i) { buffer[i] = static_cast<T>(p[i]); });
    return V::loadu(buffer);
  }
}

template <class T, class S, class L>
inline Vectorized<T> gather(const S* p, int64_t stride, L lanes) {
  alignas(64) T buffer[Vectorized<T>::size()] = {};
  each_lane<T>(lanes, [&](int i) { buffer[i] = static_cast<T>(p[i * stride]); });
  return Vectorized<T>::loadu(buffer);
}

// Lane i is p[2 * i]. What lies behind the last of them is not read: it may be nobody's.
template <class T, class S, class L>
inline Vectorized<T> load_every_second(const S* p, L lanes) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float> && is_all<L>) {
    constexpr int size = Vectorized<float>::size();
    const auto low = load<float>(p, lanes), high = load<float>(p + size - 1, lanes);
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i wanted = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 17, 19, 21, 23, 25, 27, 29, 31);
    return _mm512_permutex2var_ps(low, wanted, high);
#else
    const __m256 pairs = _mm256_shuffle_ps(low, high, _MM_SHUFFLE(3, 1, 2, 0));
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), _MM_SHUFFLE(3, 1, 2, 0)));
#endif
  }
#endif
  return gather<T>(p, 2, lanes);
}

template <class T, class S, class L>
inline void store(S* p, Vectorized<T> value, L lanes) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (is_half<T, S>) {
    if constexpr (is_all<L>) return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow<S>(value));
    else return _mm256_mask_storeu_epi16(p, mask_of_lanes(lanes), narrow<S>(value));
  }
  if constexpr (std::is_same_v<T, float> && std::is_same_v<S, float> && !is_all<L>)
    return _mm512_mask_storeu_ps(p, mask_of_lanes(lanes), value);
#endif
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  if constexpr (is_byte<T, S>) {
    if constexpr (is_all<L>) return store_bytes(p, to_bytes<S>(value));
    else return store_bytes(p, to_bytes<S>(value), lanes);
  }
#endif
#if defined(CPU_CAPABILITY_AVX2) && !defined(CPU_CAPABILITY_AVX512)
  if constexpr (is_half<T, S> && is_all<L>) return _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow<S>(value));
#endif
  if constexpr (std::is_same_v<S, T> && !std::is_same_v<L, From>) {
    value.store(p, lanes);
  } else if constexpr (is_half<T, S> && !std::is_same_v<L, From>) {
    at::vec::convert<S, 1, float, 1>(value).store(p, lanes);
  } else {
    alignas(64) T buffer[Vectorized<T>::size()];
    value.store(buffer);
    each_lane<T>(lanes, [&](int i) { p[i] = kept_as<S>(buffer[i]); });
  }
}

template <class T, class S, class L>
inline void scatter(S* p, int64_t stride, Vectorized<T> value, L lanes) {
  alignas(64) T buffer[Vectorized<T>::size()];
  value.store(buffer);
  each_lane<T>(lanes, [&](int i) { p[i * stride] = kept_as<S>(buffer[i]); });
}

// Lane i of row j becomes lane j of row i, of as many rows as there are lanes.
#if defined(CPU_CAPABILITY_AVX512)
inline void transpose(Vectorized<float>* tile) {
  __m512 row[16], other[16];
  for (int i = 0; i < 16; ++i) row[i] = tile[i];
  for (int i = 0; i < 16; i += 2) {  // pairs of rows, numbers taking turns
    other[i] = _mm512_unpacklo_ps(row[i], row[i + 1]);
    other[i + 1] = _mm512_unpackhi_ps(row[i], row[i + 1]);
  }
  const auto pairs = [](__m512 a, __m512 b, bool high) {
    const __m512d c = _mm512_castps_pd(a), d = _mm512_castps_pd(b);
    return _mm512_castpd_ps(high ? _mm512_unpackhi_pd(c, d) : _mm512_unpacklo_pd(c, d));
  };
  for (int i = 0; i < 16; i += 4)  // quarters of a register have four rows each
    for (int k = 0; k < 4; ++k) row[i + k] = pairs(other[i + k / 2], other[i + 2 + k / 2], k % 2);
  for (int i = 0; i < 16; i += 8)
    for (int k = 0; k < 4; ++k) {
      other[i + k] = _mm512_shuffle_f32x4(row[i + k], row[i + 4 + k], 0x88);
      other[i + 4 + k] = _mm512_shuffle_f32x4(row[i + k], row[i + 4 + k], 0xdd);
    }
  for (int k = 0; k < 8; ++k) {
    tile[k] = _mm512_shuffle_f32x4(other[k], other[8 + k], 0x88);
    tile[8 + k] = _mm512_shuffle_f32x4(other[k], other[8 + k], 0xdd);
  }
}
#elif defined(CPU_CAPABILITY_AVX2)
inline void transpose(Vectorized<float>* tile) {
  __m256 other[8];
  for (int i = 0; i < 8; i += 2) {  // pairs of rows, numbers taking turns
    other[i] = _mm256_unpacklo_ps(tile[i], tile[i + 1]);
    other[i + 1] = _mm256_unpackhi_ps(tile[i], tile[i + 1]);
  }
  const auto pairs = [](__m256 a, __m256 b, bool high) {
    const __m256d c = _mm256_castps_pd(a), d = _mm256_castps_pd(b);
    return _mm256_castpd_ps(high ? _mm256_unpackhi_pd(c, d) : _mm256_unpacklo_pd(c, d));
  };
  for (int k = 0; k < 4; ++k) {  // halves of a register have four rows each
    const __m256 low = pairs(other[k / 2], other[2 + k / 2], k % 2);
    const __m256 high = pairs(other[4 + k / 2], other[6 + k / 2], k % 2);
    tile[k] = _mm256_permute2f128_ps(low, high, 0x20);
    tile[4 + k] = _mm256_permute2f128_ps(low, high, 0x31);
  }
}
#endif

// The same lanes of J rows that are neighbours in memory, where lanes are far apart: lane i of rows[j] is
// p[i * stride + j]. A line of memory is read once for all rows that are in it.
template <class T, int J, class S, class L>
inline void load_rows(Vectorized<T> (&rows)[J], const S* p, int64_t stride, L lanes) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  constexpr int W = Vectorized<T>::size();
  if constexpr (std::is_same_v<T, float> && J % W == 0 && is_all<L>) {
    for (int j = 0; j < J; j += W) {
      for (int i = 0; i < W; ++i) rows[j + i] = load<float>(p + i * stride + j, All<float>());
      transpose(rows + j);
    }
    return;
  }
#endif
  for (int j = 0; j < J; ++j) rows[j] = gather<T>(p + j, stride, lanes);
}

// The reverse: p[i * stride + j] = lane i of rows[j].
template <class T, int J, class S, class L>
inline void store_rows(S* p, int64_t stride, const Vectorized<T> (&rows)[J], L lanes) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  constexpr int W = Vectorized<T>::size();
  if constexpr (std::is_same_v<T, float> && J % W == 0 && is_all<L>) {
    for (int j = 0; j < J; j += W) {
      Vectorized<float> tile[W];
      for (int i = 0; i < W; ++i) tile[i] = rows[j + i];
      transpose(tile);
      for (int i = 0; i < W; ++i) store(p + i * stride + j, tile[i], All<float>());
    }
    return;
  }
#endif
  for (int j = 0; j < J; ++j) scatter(p + j, stride, rows[j], lanes);
}

// Writes past the caches where the caller says that they could not hold the result anyway: the old
// content of a line is then never read. Needs whole, aligned vectors; writes as usual otherwise.
// alone: whether the vectors beside it are written much later. Where a vector is less than a line, memory would not
// wait for the rest of it, and each part be a write of its own.
template <bool alone = false, class T, class S, class L>
inline void write(S* p, Vectorized<T> value, L lanes, bool past_caches) {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  constexpr int bytes = sizeof(S) * Vectorized<T>::size();
  if constexpr (std::is_same_v<T, float> && is_all<L> && (bytes == 64 || !alone)) {
    if (past_caches && reinterpret_cast<uintptr_t>(p) % bytes == 0) {
#if defined(CPU_CAPABILITY_AVX512)
      if constexpr (std::is_same_v<S, float>) return _mm512_stream_ps(p, value);
      if constexpr (is_half<T, S>) return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow<S>(value));
#else
      if constexpr (std::is_same_v<S, float>) return _mm256_stream_ps(p, value);
#endif
    }
  }
#endif
  store(p, value, lanes);
}

template <class T, class S, class L>
inline void write_apart(S* p, Vectorized<T> value, L lanes, bool past_caches) {
  write<true>(p, value, lanes, past_caches);
}

// Writes lane i of one to p[2 * i], and of the other behind it.
template <class T, class S, class L>
inline void write_in_turn(S* p, Vectorized<T> one, Vectorized<T> other, L lanes, bool past_caches) {
  if constexpr (is_all<L>) {
    const auto [low, high] = at::vec::interleave2(one, other);
    write(p, low, lanes, past_caches);
    write(p + Vectorized<T>::size(), high, lanes, past_caches);
  } else {
    scatter(p, 2, one, lanes);
    scatter(p + 1, 2, other, lanes);
  }
}

// Orders a worker's writes past the caches before whatever follows.
inline void settle() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

// A number as half precision keeps it.
template <class S, class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline T round_to(T x) { return static_cast<T>(kept_as<S>(x)); }
template <class S, class T>
inline Vectorized<T> round_to(Vectorized<T> x) {
  alignas(64) S half[Vectorized<T>::size()];
  store(half, x, All<T>());
  return load<T>(half, All<T>());
}

// ---- truth values

template <class T>
inline Vectorized<T> mask(bool value) {
  return value ? Vectorized<T>(T(0)) == Vectorized<T>(T(0)) : Vectorized<T>(T(0)) != Vectorized<T>(T(0));
}

template <class T>
inline Vectorized<T> mask(Vectorized<T> number) {
  return number != Vectorized<T>(T(0));
}

template <class T>
inline bool mask_of(T number) { return number != T(0); }

inline float where_(bool condition, float a, float b) { return condition ? a : b; }
inline double where_(bool condition, double a, double b) { return condition ? a : b; }
template <class T>
inline Vectorized<T> where_(Vectorized<T> condition, Vectorized<T> a, Vectorized<T> b) {
  return Vectorized<T>::blendv(b, a, condition);
}
inline bool both_(bool a, bool b) { return a && b; }
inline bool either_(bool a, bool b) { return a || b; }
inline bool not_(bool a) { return !a; }
template <class T>
inline Vectorized<T> both_(Vectorized<T> a, Vectorized<T> b) { return a & b; }
template <class T>
inline Vectorized<T> either_(Vectorized<T> a, Vectorized<T> b) { return a | b; }
template <class T>
inline Vectorized<T> not_(Vectorized<T> a) { return a ^ mask<T>(true); }

// ---- reductions: neutral element and combination

struct Sum {
  template <class T> static constexpr T neutral() { return T(0); }
  template <class V> static V combine(V a, V b) { return a + b; }
};
struct Prod {
  template <class T> static constexpr T neutral() { return T(1); }
  template <class V> static V combine(V a, V b) { return a * b; }
};
struct Amax {
  template <class T> static constexpr T neutral() { return -std::numeric_limits<T>::infinity(); }
  template <class V> static V combine(V a, V b) { return maximum_(a, b); }
};
struct Amin {
  template <class T> static constexpr T neutral() { return std::numeric_limits<T>::infinity(); }
  template <class V> static V combine(V a, V b) { return minimum_(a, b); }
};

// Adds a value to an accumulator; lanes that do not count keep what they have.
template <class R, class T, class L>
inline void accumulate(Vectorized<T>& total, Vectorized<T> value, L lanes) {
  const Vectorized<T> sum = R::combine(total, value);
  if constexpr (is_all<L>) {
    total = sum;
    return;
  }
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float> && !is_all<L>) {
    total = _mm512_mask_mov_ps(total, mask_of_lanes(lanes), sum);
    return;
  }
#endif
  if constexpr (std::is_same_v<L, int>) {
    total = Vectorized<T>::set(total, sum, lanes);
  } else {
    alignas(64) T each[Vectorized<T>::size()];
    total.store(each);
    store(each, sum, lanes);
    total = Vectorized<T>::loadu(each);
  }
}
template <class R, class T, class L, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline void accumulate(T& total, T value, L) {
  total = R::combine(total, value);
}

template <class R, class T, class L>
inline void add_to(T* p, Vectorized<T> value, L lanes) {
  store(p, R::combine(load<T>(p, lanes), value), lanes);
}

// All lanes in one number, always in the same order.
template <class R, class T>
inline T across(Vectorized<T> value) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float> && std::is_same_v<R, Sum>) return _mm512_reduce_add_ps(value);
  if constexpr (std::is_same_v<T, float> && (std::is_same_v<R, Amax> || std::is_same_v<R, Amin>)) {
    if (_mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q) == 0)  // no NaN
      return std::is_same_v<R, Amax> ? _mm512_reduce_max_ps(value) : _mm512_reduce_min_ps(value);
  }
#endif
  alignas(64) T lane[Vectorized<T>::size()];
  value.store(lane);
  for (int half = Vectorized<T>::size() / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = R::combine(lane[i], lane[i + half]);
  return lane[0];
}
// Several accumulators of one reduction.
template <class R, class T, int U>
inline Vectorized<T> together(const Vectorized<T> (&values)[U]) {
  Vectorized<T> total = values[0];
  for (int u = 1; u < U; ++u) total = R::combine(total, values[u]);
  return total;
}
template <class R, class T, int U>
inline T across(const Vectorized<T> (&values)[U]) { return across<R>(together<R>(values)); }
template <class R, class T, class L>
inline T across(Vectorized<T> value, L lanes) {
  Vectorized<T> total(R::template neutral<T>());
  accumulate<R>(total, value, lanes);
  return across<R>(total);
}

// All lanes of each of as many rows as there are lanes: lane j of the result is row j's.
template <class R, class T>
inline Vectorized<T> across_rows(const Vectorized<T>* rows) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float>) {
    const auto both = [](auto a, auto b) -> __m512 { return R::combine(Vectorized<float>(a), Vectorized<float>(b)); };
    const auto pair = [&](__m512 a, __m512 b) { return both(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b)); };
    __m512 four[4];  // of four rows each: every quarter of the register has a part of each row
    for (int i = 0; i < 4; ++i)
      four[i] = pair(pair(rows[4 * i], rows[4 * i + 2]), pair(rows[4 * i + 1], rows[4 * i + 3]));
    const auto halves = [&](__m512 a, __m512 b) {
      return both(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    };
    const __m512 low = halves(four[0], four[1]), high = halves(four[2], four[3]);
    return both(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float>) {
    const auto both = [](auto a, auto b) -> __m256 { return R::combine(Vectorized<float>(a), Vectorized<float>(b)); };
    const auto pair = [&](__m256 a, __m256 b) { return both(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b)); };
    const __m256 low = pair(pair(rows[0], rows[2]), pair(rows[1], rows[3]));
    const __m256 high = pair(pair(rows[4], rows[6]), pair(rows[5], rows[7]));
    return both(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
  }
#endif
  alignas(64) T each[Vectorized<T>::size()];
  for (int j = 0; j < Vectorized<T>::size(); ++j) each[j] = across<R>(rows[j]);
  return Vectorized<T>::loadu(each);
}

// What lanes hold, to be read one by one.
template <class T>
class Each {
 public:
  explicit Each(Vectorized<T> lanes) { lanes.store(each_); }
  T operator[](int j) const { return each_[j]; }

 private:
  alignas(64) T each_[Vectorized<T>::size()];
};

// Additions of numbers between two that are exact to the last digit. Each loses half a unit in the last place
// of all that was added before, so sums of many numbers are made of many short ones: of registers, and of arrays,
// where starting anew costs more.
constexpr int64_t FOLD = 64, CASCADE = 256;

inline float finite_or_zero(float x) { return std::isfinite(x) ? x : 0; }
inline double finite_or_zero(double x) { return std::isfinite(x) ? x : 0; }
template <class T>
inline Vectorized<T> finite_or_zero(Vectorized<T> x) {
  return Vectorized<T>::blendv(Vectorized<T>(T(0)), x, (x - x) == Vectorized<T>(T(0)));
}

// Adds a short sum to a total, and what the total loses to the next one (Kahan). An infinite total loses nothing:
// infinity less infinity is no number.
template <class V>
inline void add_exactly(V& total, V& lost, V part) {
  const V more = part - lost;
  const V sum = total + more;
  lost = finite_or_zero((sum - total) - more);
  total = sum;
}

// A sum of many numbers, of lanes or of one: a loop adds to `part` and says how often.
template <class V, int U = 1>
class LongSum {
 public:
  V part[U];
  LongSum() : total_(0), lost_(0) { clear(); }
  void added(int64_t times) {
    times_ += times;
    if (times_ >= FOLD) fold();
  }
  V total() {
    fold();
    return total_;
  }

 private:
  void clear() {
    for (V& each : part) each = V(0);
    times_ = 0;
  }
  void fold() {
    V sum = part[0];
    for (int u = 1; u < U; ++u) sum = sum + part[u];
    add_exactly(total_, lost_, sum);
    clear();
  }
  V total_, lost_;
  int64_t times_;
};

template <class V, int U>
inline void added(int64_t times, LongSum<V, U>& sum) { sum.added(times); }
template <class V, int U, int J>
inline void added(int64_t times, LongSum<V, U> (&rows)[J]) {
  for (LongSum<V, U>& sum : rows) sum.added(times);
}

// ---- loops

// How many vectors a loop that reduces takes at a time, each with an accumulator of its own: additions into
// one would wait for each other.
constexpr int UNROLL = 4;

template <int slot>
using Slot = std::integral_constant<int, slot>;

// body(i, lanes, slot) for i from begin to end, a vector at a time; slot < U says whose accumulators are meant.
template <class T, int U, class Body>
inline void each_vector(int64_t begin, int64_t end, const Body& body) {
  constexpr int W = Vectorized<T>::size();
  int64_t i = begin;
  if constexpr (U == 4) {
    for (; i + 4 * W <= end; i += 4 * W) {
      body(i, All<T>(), Slot<0>());
      body(i + W, All<T>(), Slot<1>());
      body(i + 2 * W, All<T>(), Slot<2>());
      body(i + 3 * W, All<T>(), Slot<3>());
    }
  }
  for (; i + W <= end; i += W) body(i, All<T>(), Slot<0>());
  if (i < end) body(i, int(end - i), Slot<0>());
}
// The same where the body adds to long sums: these get a chance to fold every so often.
template <class T, int U, class Body, class... Sums>
inline void each_vector(int64_t begin, int64_t end, const Body& body, Sums&... sums) {
  constexpr int64_t step = U * Vectorized<T>::size();
  for (; end - begin > FOLD * step; begin += FOLD * step) {
    each_vector<T, U>(begin, begin + FOLD * step, body);
    (added(FOLD, sums), ...);
  }
  each_vector<T, U>(begin, end, body);
  (added((end - begin) / step + 1, sums), ...);
}

// body(i, lanes, slot) for all elements of a row that may be written past the caches: whole vectors begin where
// `row`, which it is written to, is aligned, so that they can be. Not worth it for rows of a few vectors.
template <class T, class S, class Body>
inline void each_aligned(const S* row, int64_t end, bool past_caches, const Body& body) {
#if defined(CPU_CAPABILITY_AVX512)
  constexpr int W = Vectorized<T>::size();
  const int before = reinterpret_cast<uintptr_t>(row) / sizeof(S) % W;
  if (past_caches && before > 0 && end >= 8 * W) {
    body(-before, From{before}, Slot<0>());
    return each_vector<T, 1>(W - before, end, body);
  }
#endif
  each_vector<T, 1>(0, end, body);
}

// Of rows that go abreast, so many at a time take what does not depend on the row: weights are then read, and arrays
// of sums written, once for all of these. More would write to more lines of memory at a time than can wait.
constexpr int GROUP = 4;

// ---- workers

struct Share {
  int64_t begin, end;
};

// A worker's contiguous share of n pieces of work, in multiples of `unit`.
inline Share share(int64_t n, int workers, int worker, int64_t unit = 1) {
  const int64_t units = (n + unit - 1) / unit;
  const int64_t each = units / workers, more = units % workers;
  const int64_t begin = worker * each + std::min<int64_t>(worker, more);
  return {std::min(begin * unit, n), std::min((begin + each + (worker < more)) * unit, n)};
}

// A worker's share of a nest of loops: runs of the innermost one, each with the places of those around it.
template <int N>
class Runs {
 public:
  int64_t at[N] = {}, begin = 0, end = 0;
  Runs(const std::array<int64_t, N>& extents, Share mine) : extents_(extents), left_(mine.end - mine.begin) {
    int64_t place = mine.begin;
    for (int k = N - 1; k >= 0 && left_ > 0; --k) {
      at[k] = place % extents[k];
      place /= extents[k];
    }
    start();
  }
  explicit operator bool() const { return left_ > 0; }
  void next() {
    left_ -= end - begin;
    at[N - 1] = 0;
    for (int k = N - 2; k >= 0 && ++at[k] == extents_[k]; --k) at[k] = 0;
    start();
  }

 private:
  void start() {
    begin = at[N - 1];
    end = std::min(extents_[N - 1], begin + left_);
  }
  std::array<int64_t, N> extents_;
  int64_t left_;
};

// One array a worker, each on cache lines of its own.
template <class T>
class Arrays {
 public:
  Arrays(int workers, int64_t size)
      : size_(size), pitch_((size + 31) / 16 * 16), workers_(workers), data_(new T[workers * pitch_ + 16]) {}
  T* of(int worker) { return data_.get() + worker * pitch_; }

 protected:
  int64_t size_, pitch_;
  int workers_;
  std::unique_ptr<T[]> data_;
};

// From so many elements on, what is combined of workers' arrays is divided among them.
constexpr int64_t COMBINED_BY_ALL = 16 * 1024;

// A reduction of many rows into arrays: each worker has one for the CASCADE rows at hand, one for its total, and
// one for what the total has lost. Each begins its own; workers share a reduction (combine), or each has its own
// (close).
template <class T, class R>
class Partials : Arrays<T> {
 public:
  Partials(int workers, int64_t size) : Arrays<T>(3 * workers, size), most_(workers) {}
  T* of(int worker) { return Arrays<T>::of(worker); }
  // Also workers that get no share must add nothing.
  void begin(int worker) {
    if (worker == 0) team_ = omp_get_num_threads();  // may be fewer than were asked for
    std::fill_n(of(worker), this->size_, R::template neutral<T>());
    std::fill_n(total(worker), this->size_, R::template neutral<T>());
    std::fill_n(lost(worker), this->size_, T(0));
  }
  // Leaves a worker's total in its first array.
  void close(int worker) {
    cascade(worker);
    std::copy_n(total(worker), this->size_, of(worker));
  }
  // Adds a worker's rows at hand to its total and begins anew.
  void cascade(int worker) {
    cascade(worker, {0, this->size_});
    std::fill_n(of(worker), this->size_, R::template neutral<T>());
  }
  // The result: all workers' totals, in worker order for every element.
  const T* combine() {
    const bool all = this->size_ * team_ >= COMBINED_BY_ALL;
#pragma omp parallel num_threads(all ? team_ : 1) if (all)
    {
      const Share mine = share(this->size_, omp_get_num_threads(), omp_get_thread_num(), 16);
      for (int worker = 0; worker < team_; ++worker) cascade(worker, mine);
      for (int worker = 1; worker < team_; ++worker)
        each_vector<T, 1>(mine.begin, mine.end, [&](int64_t i, auto lanes, auto) {
          add_to<R>(total(0) + i, load<T>(total(worker) + i, lanes), lanes);
        });
    }
    return total(0);
  }

 private:
  void cascade(int worker, Share some) {
    T *part = of(worker), *all = total(worker), *rest = lost(worker);
    each_vector<T, 1>(some.begin, some.end, [&](int64_t i, auto lanes, auto) {
      auto sum = load<T>(all + i, lanes);
      const auto more = load<T>(part + i, lanes);
      if constexpr (std::is_same_v<R, Sum>) {
        auto loss = load<T>(rest + i, lanes);
        add_exactly(sum, loss, more);
        store(rest + i, loss, lanes);
      } else {
        sum = R::combine(sum, more);
      }
      store(all + i, sum, lanes);
    });
  }
  T* total(int worker) { return of(most_ + worker); }
  T* lost(int worker) { return of(2 * most_ + worker); }
  int most_, team_ = 1;
};

}  // namespace normpass
