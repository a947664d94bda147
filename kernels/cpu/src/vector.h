// Vectors of f32 as wide as the instruction set that this file is compiled for, by extensions that
// GCC and Clang share: no intrinsics, so that AVX2, AVX-512 and NEON come from one text.
#pragma once

#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__)
constexpr int WIDTH = 16;  // numbers of a vector
#elif defined(__AVX2__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif

// A register tile has TILE_ROWS x TILE_VECTORS accumulators; one row of vectors and a broadcast
// number must fit beside them in the registers (32 with AVX-512 and NEON, 16 with AVX2).
constexpr int TILE_ROWS = WIDTH == 8 ? 4 : 8;
constexpr int TILE_VECTORS = WIDTH == 4 ? 2 : 3;
constexpr int TILE_COLUMNS = WIDTH * TILE_VECTORS;

#define UNROLL _Pragma("GCC unroll 64")
#define INLINE inline __attribute__((always_inline))

typedef float Floats __attribute__((vector_size(WIDTH * 4)));
typedef int32_t Ints __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t Bits __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t Halves __attribute__((vector_size(WIDTH * 2)));
typedef uint8_t Bytes __attribute__((vector_size(WIDTH)));

struct BF16 {
  uint16_t bits;
};
struct FP8 {  // float8_e4m3fn
  uint8_t bits;
};

template <typename To, typename From>
INLINE To as(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

template <typename Vector>
INLINE Vector load_as(const void* from) {
  Vector vector;
  memcpy(&vector, from, sizeof(vector));
  return vector;
}

INLINE Floats broadcast(float x) { return x - Floats{}; }
INLINE Ints broadcast(int32_t x) { return x - Ints{}; }
INLINE Floats max(Floats a, Floats b) { return b > a ? b : a; }

INLINE float widen(float x) { return x; }
INLINE float widen(BF16 x) { return as<float>(uint32_t(x.bits) << 16); }

INLINE Floats load(const float* from) { return load_as<Floats>(from); }

INLINE Floats load(const BF16* from) {
  return as<Floats>(__builtin_convertvector(load_as<Halves>(from), Bits) << 16);
}

// In two steps: of one step from bytes to ints GCC 12 makes WIDTH scalar moves.
INLINE Bits load_bytes(const uint8_t* from) {
  return __builtin_convertvector(__builtin_convertvector(load_as<Bytes>(from), Halves), Bits);
}

// Exact, without subnormal floats on the way, which XLA's threads flush to zero.
INLINE Floats load(const FP8* from) {
  Bits bits = load_bytes(&from->bits);
  Bits magnitude = bits & 0x7f;
  Floats normal = as<Floats>((magnitude << 20) + (120u << 23));
  Floats subnormal = __builtin_convertvector(as<Ints>(magnitude), Floats) * 0x1p-9f;
  Floats value = as<Ints>(magnitude) < 8 ? subnormal : normal;
  value = as<Ints>(magnitude) == 0x7f ? broadcast(__builtin_nanf("")) : value;
  return as<Floats>(as<Bits>(value) | (bits & 0x80) << 24);
}

INLINE void store(float* to, Floats x) { memcpy(to, &x, sizeof(x)); }

// To the nearest, ties to even; NaN stays NaN.
INLINE void store(BF16* to, Floats x) {
  Bits bits = as<Bits>(x);
  Bits rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  Bits kept = as<Bits>(x == x ? as<Ints>(rounded) : broadcast(int32_t(0x7fc0)));
  Halves halves = __builtin_convertvector(kept, Halves);
  memcpy(to, &halves, sizeof(halves));
}

// 2^x for x <= 0, to about one unit in the last place; 0 below 2^-126.
INLINE Floats exp2_of_negative(Floats x) {
  constexpr float ROUND = 0x1.8p23f;  // adding it rounds to an integer, in the low bits
  Floats bounded = x < -126.f ? broadcast(-126.f) : x;
  Floats shifted = bounded + ROUND;
  Floats fraction = bounded - (shifted - ROUND);  // -0.5 to 0.5
  Floats power = broadcast(1.5403530e-4f);
  power = power * fraction + 1.3333558e-3f;
  power = power * fraction + 9.6181291e-3f;
  power = power * fraction + 5.5504109e-2f;
  power = power * fraction + 2.4022651e-1f;
  power = power * fraction + 6.9314718e-1f;
  power = power * fraction + 1.f;
  Floats scale = as<Floats>((as<Bits>(shifted) << 23) + 0x3f800000u);
  return x < -126.f ? Floats{} : power * scale;
}

// To about one unit in the last place of 1.
INLINE Floats tanh(Floats x) {
  constexpr float TWICE_LOG2_E = 2.88539008f;
  Floats size = as<Floats>(as<Bits>(x) & 0x7fffffff);
  Floats power = exp2_of_negative(size * -TWICE_LOG2_E);
  return as<Floats>(as<Bits>((1 - power) / (1 + power)) | (as<Bits>(x) & 0x80000000));
}

INLINE float sum(Floats x) {
  float total = 0;
  UNROLL for (int i = 0; i < WIDTH; i++) total += x[i];
  return total;
}

// Of each pair of lanes whose numbers differ in bit STRIDE: the lower (HIGH: the higher) of a in
// the lower place, and that of b in the higher one.
template <int STRIDE, bool HIGH, int... LANE>
INLINE Floats interleave(Floats a, Floats b, std::integer_sequence<int, LANE...>) {
#if defined(__clang__)
  return __builtin_shufflevector(
      a, b, ((LANE & STRIDE) ? WIDTH + LANE - (HIGH ? 0 : STRIDE) : LANE + (HIGH ? STRIDE : 0))...);
#else
  return __builtin_shuffle(
      a, b,
      Ints{((LANE & STRIDE) ? WIDTH + LANE - (HIGH ? 0 : STRIDE) : LANE + (HIGH ? STRIDE : 0))...});
#endif
}

using Lanes = std::make_integer_sequence<int, WIDTH>;

// Transposes a square of WIDTH x WIDTH numbers.
template <int STRIDE = WIDTH / 2>
INLINE void transpose(Floats (&x)[WIDTH]) {
  UNROLL for (int i = 0; i < WIDTH; i++) {
    if (i & STRIDE) continue;
    Floats low = interleave<STRIDE, false>(x[i], x[i + STRIDE], Lanes());
    Floats high = interleave<STRIDE, true>(x[i], x[i + STRIDE], Lanes());
    x[i] = low;
    x[i + STRIDE] = high;
  }
  if constexpr (STRIDE > 1) transpose<STRIDE / 2>(x);
}

// Sums of WIDTH vectors: lane i of the result is the sum of x[i]. Overwrites x.
template <int STRIDE = WIDTH / 2>
INLINE Floats sums(Floats (&x)[WIDTH]) {
  UNROLL for (int i = 0; i < STRIDE; i++) {
    Floats low = interleave<STRIDE, false>(x[i], x[i + STRIDE], Lanes());
    x[i] = low + interleave<STRIDE, true>(x[i], x[i + STRIDE], Lanes());
  }
  if constexpr (STRIDE > 1) return sums<STRIDE / 2>(x);
  return x[0];
}
