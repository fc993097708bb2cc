// Functions that numbers and vectors spell differently.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cmath>
#include <type_traits>

namespace normpass {

using at::vec::Vectorized;

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
NORMPASS_UNARY(round_, std::nearbyint(x), x.round())
NORMPASS_UNARY(floor_, std::floor(x), x.floor())
NORMPASS_UNARY(ceil_, std::ceil(x), x.ceil())
NORMPASS_UNARY(trunc_, std::trunc(x), x.trunc())
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

// The larger and the smaller of two; NaN if one is.
template <class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline T maximum_(T a, T b) { return std::isnan(a) || a > b ? a : b; }
template <class T, std::enable_if_t<std::is_floating_point_v<T>, int> = 0>
inline T minimum_(T a, T b) { return std::isnan(a) || a < b ? a : b; }
template <class T>
inline Vectorized<T> maximum_(Vectorized<T> a, Vectorized<T> b) { return at::vec::maximum(a, b); }
template <class T>
inline Vectorized<T> minimum_(Vectorized<T> a, Vectorized<T> b) { return at::vec::minimum(a, b); }

}  // namespace normpass
