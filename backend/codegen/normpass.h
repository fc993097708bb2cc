// What generated CPU kernels are written in: lanes, masks, reductions, workers.
//
// A value is either one number (scalar) or as many as a vector register holds (Vec, from at::vec). A truth
// value is bool, or a Vec whose lanes have all bits set or none. `lanes` says how many of a Vec's lanes count:
// All, known when compiling, or a number at the end of a row.
#pragma once

#include <ATen/cpu/vec/vec.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <type_traits>

namespace normpass {

using at::vec::Vectorized;

template <class T>
struct All {
  constexpr operator int() const { return Vectorized<T>::size(); }
};

template <class L>
inline constexpr bool is_all = !std::is_same_v<L, int>;

// ---- memory

template <class T, class S>
inline T get(const S* p) {
  return static_cast<T>(*p);
}

template <class T, class S>
inline void put(S* p, T value) {
  *p = static_cast<S>(value);
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
#endif

template <class T, class S, class L>
inline Vectorized<T> load(const S* p, L lanes) {
  using V = Vectorized<T>;
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (is_half<T, S> && is_all<L>)
    return widen<S>(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#endif
  if constexpr (std::is_same_v<S, T>) {
    if constexpr (is_all<L>) return V::loadu(p);
    else return V::loadu(p, lanes);
  } else if constexpr (is_half<T, S>) {
    return at::vec::convert<float, 1, S, 1>(Vectorized<S>::loadu(p, lanes));
  } else {
    alignas(64) T buffer[V::size()] = {};
    for (int i = 0; i < lanes; ++i) buffer[i] = static_cast<T>(p[i]);
    return V::loadu(buffer);
  }
}

template <class T, class S, class L>
inline Vectorized<T> gather(const S* p, int64_t stride, L lanes) {
  alignas(64) T buffer[Vectorized<T>::size()] = {};
  for (int i = 0; i < lanes; ++i) buffer[i] = static_cast<T>(p[i * stride]);
  return Vectorized<T>::loadu(buffer);
}

template <class T, class S, class L>
inline void store(S* p, Vectorized<T> value, L lanes) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (is_half<T, S> && is_all<L>)
    return _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow<S>(value));
#endif
  if constexpr (std::is_same_v<S, T>) {
    value.store(p, lanes);
  } else if constexpr (is_half<T, S>) {
    at::vec::convert<S, 1, float, 1>(value).store(p, lanes);
  } else {
    alignas(64) T buffer[Vectorized<T>::size()];
    value.store(buffer);
    for (int i = 0; i < lanes; ++i) p[i] = static_cast<S>(buffer[i]);
  }
}

template <class T, class S, class L>
inline void scatter(S* p, int64_t stride, Vectorized<T> value, L lanes) {
  alignas(64) T buffer[Vectorized<T>::size()];
  value.store(buffer);
  for (int i = 0; i < lanes; ++i) p[i * stride] = static_cast<S>(buffer[i]);
}

// Writes past the caches where the caller says that they could not hold the result anyway: the old
// content of a line is then never read. Needs whole, aligned vectors; writes as usual otherwise.
template <class T, class S, class L>
inline void write(S* p, Vectorized<T> value, L lanes, bool past_caches) {
#if defined(CPU_CAPABILITY_AVX512)
  if constexpr (std::is_same_v<T, float> && is_all<L>) {
    if constexpr (std::is_same_v<S, float>) {
      if (past_caches && reinterpret_cast<uintptr_t>(p) % 64 == 0) return _mm512_stream_ps(p, value);
    } else if constexpr (is_half<T, S>) {
      if (past_caches && reinterpret_cast<uintptr_t>(p) % 32 == 0)
        return _mm256_stream_si256(reinterpret_cast<__m256i*>(p), narrow<S>(value));
    }
  }
#elif defined(CPU_CAPABILITY_AVX2)
  if constexpr (std::is_same_v<T, float> && std::is_same_v<S, float> && is_all<L>) {
    if (past_caches && reinterpret_cast<uintptr_t>(p) % 32 == 0) return _mm256_stream_ps(p, value);
  }
#endif
  store(p, value, lanes);
}

// Orders a worker's writes past the caches before whatever follows.
inline void settle() {
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
  _mm_sfence();
#endif
}

inline void prefetch(const void* p) { __builtin_prefetch(p); }

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

// ---- functions that numbers and vectors spell differently

#if defined(CPU_CAPABILITY_AVX512)
// 2^n (1 + r + r^2 / 2 + ...) where x = n ln 2 + r: half as long as a library's, as exact (one unit in the last
// place). ln 2 is taken off in two parts, of which the first is short enough for n times it to be exact.
inline Vectorized<float> exp_(Vectorized<float> x) {
  using V = Vectorized<float>;
  const V held = at::vec::clamp(x, V(-104.0f), V(89.0f));  // 0 and infinity beyond; NaN stays
  const V n = _mm512_roundscale_ps(held * V(1.44269504f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const V r = at::vec::fmadd(n, V(-1.42860682e-6f), at::vec::fmadd(n, V(-0.69314575f), held));
  V p(1 / 5040.0f);
  for (const float c : {1 / 720.0f, 1 / 120.0f, 1 / 24.0f, 1 / 6.0f, 0.5f, 1.0f, 1.0f}) p = at::vec::fmadd(p, r, V(c));
  return _mm512_scalef_ps(p, n);
}
#endif

#define NORMPASS_UNARY(name, scalar_expression, vector_expression) \
  inline float name(float x) { return scalar_expression; }         \
  inline double name(double x) { return scalar_expression; }       \
  template <class T>                                               \
  inline Vectorized<T> name(Vectorized<T> x) { return vector_expression; }

NORMPASS_UNARY(neg_, -x, x.neg())
NORMPASS_UNARY(sqrt_, std::sqrt(x), x.sqrt())
NORMPASS_UNARY(rsqrt_, 1 / std::sqrt(x), x.rsqrt())
NORMPASS_UNARY(reciprocal_, 1 / x, x.reciprocal())
NORMPASS_UNARY(abs_, std::abs(x), x.abs())
NORMPASS_UNARY(exp_, std::exp(x), x.exp())
NORMPASS_UNARY(expm1_, std::expm1(x), x.expm1())
NORMPASS_UNARY(log_, std::log(x), x.log())
NORMPASS_UNARY(log1p_, std::log1p(x), x.log1p())
NORMPASS_UNARY(tanh_, std::tanh(x), x.tanh())
NORMPASS_UNARY(erf_, std::erf(x), x.erf())
NORMPASS_UNARY(sin_, std::sin(x), x.sin())
NORMPASS_UNARY(cos_, std::cos(x), x.cos())
NORMPASS_UNARY(sigmoid_, 1 / (1 + std::exp(-x)), (Vectorized<T>(T(1)) + exp_(x.neg())).reciprocal())
#undef NORMPASS_UNARY

// x P(x^2) / Q(x^2), held at its value in `bound` beyond. Fitted to a relative error below 2e-8 in exact
// arithmetic; three units in the last place as computed. at::vec takes an exponential for erf, which is off by
// 5e-7 and by all of a small result, and a library's call for tanh: three and six times as long.
template <size_t N, size_t M>
inline Vectorized<float> odd_ratio(
    Vectorized<float> x, float bound, const float (&numerator)[N], const float (&denominator)[M]) {
  using V = Vectorized<float>;
  const V held = at::vec::clamp(x, V(-bound), V(bound)), square = held * held;  // NaN stays
  V p(numerator[N - 1]), q(denominator[M - 1]);
  for (size_t k = N - 1; k-- > 0;) p = at::vec::fmadd(p, square, V(numerator[k]));
  for (size_t k = M - 1; k-- > 0;) q = at::vec::fmadd(q, square, V(denominator[k]));
  return at::vec::clamp(held * p / q, V(-1), V(1));
}

inline Vectorized<float> erf_(Vectorized<float> x) {
  return odd_ratio(
      x, 3.92f,
      {1.1283791464902603f, 0.1903787428234759f, 0.05274455759951146f, 0.00376429435611342f,
       0.00028483031235321801f, 2.0499998287500616e-6f},
      {1.0f, 0.50205151697658399f, 0.11409719930442625f, 0.014966582824622059f, 0.0011621727928654083f,
       3.8088077431635578e-5f});
}

inline Vectorized<float> tanh_(Vectorized<float> x) {
  return odd_ratio(
      x, 9.02f,
      {0.99999999871186613f, 0.13679956598305715f, 0.0038683782625251193f, 2.8008386502805623e-5f,
       3.0586891989268438e-8f, -1.2204530640892255e-11f},
      {1.0f, 0.47013288674685645f, 0.027246027623619035f, 0.00039387169055002992f, 1.2874265726167488e-6f});
}

inline float pow_(float x, float y) { return std::pow(x, y); }
inline double pow_(double x, double y) { return std::pow(x, y); }
template <class T>
inline Vectorized<T> pow_(Vectorized<T> x, Vectorized<T> y) { return x.pow(y); }

// A number as half precision keeps it.
template <class S, class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline T round_to(T x) { return static_cast<T>(static_cast<S>(x)); }
template <class S, class T>
inline Vectorized<T> round_to(Vectorized<T> x) {
  alignas(64) S half[Vectorized<T>::size()];
  store(half, x, All<T>());
  return load<T>(half, All<T>());
}

// The larger and the smaller of two; NaN if one is.
template <class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline T maximum_(T a, T b) { return std::isnan(a) || a > b ? a : b; }
template <class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline T minimum_(T a, T b) { return std::isnan(a) || a < b ? a : b; }
template <class T>
inline Vectorized<T> maximum_(Vectorized<T> a, Vectorized<T> b) { return at::vec::maximum(a, b); }
template <class T>
inline Vectorized<T> minimum_(Vectorized<T> a, Vectorized<T> b) { return at::vec::minimum(a, b); }

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

// Adds a value to an accumulator; lanes beyond the row's end keep what they have.
template <class R, class T, class L>
inline void accumulate(Vectorized<T>& total, Vectorized<T> value, L lanes) {
  const Vectorized<T> sum = R::combine(total, value);
  if constexpr (is_all<L>) total = sum;
  else total = Vectorized<T>::set(total, sum, lanes);
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
inline T across(const Vectorized<T> (&values)[U]) {
  Vectorized<T> total = values[0];
  for (int u = 1; u < U; ++u) total = R::combine(total, values[u]);
  return across<R>(total);
}
template <class R, class T, class L>
inline T across(Vectorized<T> value, L lanes) {
  Vectorized<T> total(R::template neutral<T>());
  accumulate<R>(total, value, lanes);
  return across<R>(total);
}

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

// A reduction of many rows into arrays: each worker has one for the CASCADE rows at hand, one for its total, and
// one for what the total has lost. Workers share a reduction (combine), or each has its own (begin, close).
template <class T, class R>
class Partials : Arrays<T> {
 public:
  // Also workers that get no share must add nothing.
  Partials(int workers, int64_t size) : Arrays<T>(3 * workers, size), sharing_(workers) {
    for (int worker = 0; worker < workers; ++worker) begin(worker);
  }
  T* of(int worker) { return Arrays<T>::of(worker); }
  void begin(int worker) {
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
    T *part = of(worker), *all = total(worker), *rest = lost(worker);
    each_vector<T, 1>(0, this->size_, [&](int64_t i, auto lanes, auto) {
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
    std::fill_n(part, this->size_, R::template neutral<T>());
  }
  // The result: all workers' totals, in worker order.
  const T* combine() {
    for (int worker = 0; worker < sharing_; ++worker) cascade(worker);
    for (int worker = 1; worker < sharing_; ++worker)
      each_vector<T, 1>(0, this->size_, [&](int64_t i, auto lanes, auto) {
        add_to<R>(total(0) + i, load<T>(total(worker) + i, lanes), lanes);
      });
    return total(0);
  }

 private:
  T* total(int worker) { return of(sharing_ + worker); }
  T* lost(int worker) { return of(2 * sharing_ + worker); }
  int sharing_;
};

}  // namespace normpass
