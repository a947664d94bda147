// Products of activations and weights for CPUs: y [T, N] = x [T, K] w [K, N], or of groups of rows
// with a matrix each, summed in f32 on XLA's own threads. Called by kernels/cpu/linear.py. Weights
// are read as they lie, those of groups without rows not at all.
//
// Few rows take as long as memory needs for the weights: they are read once, in the order in which
// they lie. Many rows go over pieces of a panel of columns, copied to where the cache keeps them.

#include <algorithm>
#include <memory>
#include <vector>

#include "panels.h"
#include "threads.h"
#include "vector.h"
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace ffi = xla::ffi;

namespace {

constexpr int64_t FEW = 16;         // most rows for which weights are read as they lie
constexpr int DEPTH = WIDTH == 8 ? 4 : 8;  // of their rows at a time: as many as registers hold
constexpr int64_t STRIP_SUMS = 24576;  // most sums of a task, for few rows: they stay in the cache
constexpr int64_t PANELS = 8;       // most panels of a task
constexpr int64_t TASKS = 4;        // least tasks of a thread, so that none waits for long
constexpr int64_t SMALL = 1 << 16;  // products below which one thread does all

template <typename X>
struct Linear {
  int64_t T, K, N;
  const X *x, *w;
  X* y;
  const int32_t* positions;  // [T]; negative: padding. Null: there is none

  // Whether any of rows [from, to) is no padding.
  bool any(int64_t from, int64_t to) const {
    auto counts = [](int32_t position) { return position >= 0; };
    return !positions || std::any_of(positions + from, positions + to, counts);
  }
};

// The last numbers of a row may be fewer than a vector.
template <typename From>
INLINE Floats load_some(const From* from, int64_t count) {
  if (count >= WIDTH) return load(from);
  From all[WIDTH] = {};
  std::copy(from, from + count, all);
  return load(all);
}

template <typename To>
INLINE void store_some(To* to, Floats x, int64_t count) {
  if (count >= WIDTH) return store(to, x);
  To all[WIDTH];
  store(all, x);
  std::copy(all, all + count, to);
}

template <typename X>
void store_row(X* to, const float* from, int64_t count) {
  for (int64_t j = 0; j < count; j += WIDTH) store_some(to + j, load(from + j), count - j);
}

// --- few rows

// sums [T][stride] += x [T, K], rows k to k + D of w, of `columns` columns from w on
template <int D, typename W>
INLINE void add_rows(const float* x, int64_t T, int64_t K, int64_t k, const W* w, int64_t N,
                     int64_t columns, float* sums, int64_t stride) {
  const bool more = k + 2 * D <= K;
  for (int64_t j = 0; j < columns; j += WIDTH) {
    Floats weights[D];
    UNROLL for (int i = 0; i < D; i++) {
      weights[i] = load_some(w + i * N + j, columns - j);
      if (more) __builtin_prefetch(w + (D + i) * N + j, 0, 2);
    }
    for (int64_t t = 0; t < T; t++) {
      const float* numbers = x + t * K + k;
      float* sum = sums + t * stride + j;
      Floats even = load(sum), odd = {};
      UNROLL for (int i = 0; i < D; i++) (i % 2 ? odd : even) += weights[i] * numbers[i];
      store(sum, even + odd);
    }
  }
}

template <typename X>
void multiply_strip(const Linear<X>& call, const float* x, int64_t from, int64_t columns) {
  const int64_t stride = (columns + WIDTH - 1) / WIDTH * WIDTH;
  thread_local std::vector<float> sums;
  sums.assign(call.T * stride, 0);
  const X* w = call.w + from;
  int64_t k = 0;
  for (; k + DEPTH <= call.K; k += DEPTH)
    add_rows<DEPTH>(x, call.T, call.K, k, w + k * call.N, call.N, columns, sums.data(), stride);
  for (; k < call.K; k++)
    add_rows<1>(x, call.T, call.K, k, w + k * call.N, call.N, columns, sums.data(), stride);
  for (int64_t t = 0; t < call.T; t++)
    store_row(call.y + t * call.N + from, sums.data() + t * stride, columns);
}

// Rows of x in f32: themselves, or copies.
struct Widened {
  Widened(const float* x, int64_t, int64_t, const Threads&) : rows(x) {}

  Widened(const BF16* x, int64_t T, int64_t K, const Threads& threads)
      : copies(new float[T * K]), rows(copies.get()) {
    threads.run((T + FEW - 1) / FEW, T <= FEW, [&](int64_t i) {
      const int64_t to = std::min(T, (i + 1) * FEW) * K;
      for (int64_t at = i * FEW * K; at < to; at += WIDTH)
        store_some(copies.get() + at, load_some(x + at, to - at), to - at);
    });
  }

  const std::unique_ptr<float[]> copies;
  const float* const rows;
};

// A product of few rows, which x has in f32.
template <typename X>
struct Few {
  Linear<X> call;
  const float* x;
};

// All products at once; K and N are the same in each.
template <typename X>
void few_rows(const std::vector<Few<X>>& products, const Threads& threads) {
  int64_t most_rows = 1, rows = 0;
  for (const Few<X>& product : products) {
    most_rows = std::max(most_rows, product.call.T);
    rows += product.call.T;
  }
  const int64_t K = products[0].call.K, N = products[0].call.N, count = products.size();
  // One strip a thread, if the cache has room: the longer its rows, the faster memory gives them.
  // Of several products, strips are longer, and enough for threads to end at the same time.
  const int64_t least = (N + threads.count() - 1) / threads.count();
  const int64_t fair = std::min(N, count * N / (TASKS * threads.count()));
  const int64_t most = std::min(STRIP_SUMS / most_rows, std::max(least, fair));
  const int64_t columns = std::max<int64_t>(1, (most + WIDTH - 1) / WIDTH) * WIDTH;
  const int64_t strips = (N + columns - 1) / columns;
  threads.run(count * strips, rows * K * N < SMALL, [&](int64_t i) {
    const Few<X>& product = products[i / strips];
    const int64_t from = i % strips * columns;
    multiply_strip(product.call, product.x, from, std::min(columns, N - from));
  });
}

// --- many rows

// How a panel is copied, and one step of its product: f32, or pairs of bf16 where the processor
// multiplies those.
template <typename W>
struct Plain : FloatPanel {
  // Panels of `columns` columns of w, each `stride` numbers after the one before.
  static void copy(float* to, int64_t stride, const W* w, int64_t N, int64_t depth,
                   int64_t columns) {
    for (int64_t k = 0; k < depth; k++, w += N, to += TILE_COLUMNS)
      for (int64_t panel = 0; panel * TILE_COLUMNS < columns; panel++)
        for (int64_t i = 0, j = panel * TILE_COLUMNS; i < TILE_COLUMNS; i += WIDTH, j += WIDTH)
          store(to + panel * stride + i, j < columns ? load_some(w + j, columns - j) : Floats{});
  }
};

#if defined(__AVX512BF16__)
struct Pairs {  // [depth / 2][TILE_COLUMNS][2]
  using Input = BF16;
  using Copied = BF16;
  static constexpr int STEP = 2;

  static Bits some(const BF16* from, int64_t count) {
    Halves halves = {};
    memcpy(&halves, from, 2 * std::clamp<int64_t>(count, 0, WIDTH));
    return __builtin_convertvector(halves, Bits);
  }

  static void copy(BF16* to, int64_t stride, const BF16* w, int64_t N, int64_t depth,
                   int64_t columns) {
    for (int64_t k = 0; k < depth; k += 2, w += 2 * N, to += 2 * TILE_COLUMNS) {
      for (int64_t panel = 0; panel * TILE_COLUMNS < columns; panel++) {
        for (int64_t i = 0, j = panel * TILE_COLUMNS; i < TILE_COLUMNS; i += WIDTH, j += WIDTH) {
          const Bits pairs = some(w + j, columns - j) | some(w + N + j, columns - j) << 16;
          memcpy(to + panel * stride + 2 * i, &pairs, sizeof(pairs));
        }
      }
    }
  }

  template <int R>
  INLINE static void add(Floats (&sum)[R][TILE_VECTORS], const BF16* const (&x)[R],
                         const BF16* panel, int64_t k) {
    __m512bh weights[TILE_VECTORS];
    UNROLL for (int j = 0; j < TILE_VECTORS; j++)
      weights[j] = load_as<__m512bh>(panel + k * TILE_COLUMNS + j * 2 * WIDTH);
    UNROLL for (int i = 0; i < R; i++) {
      const __m512bh pair = (__m512bh)broadcast(load_as<int32_t>(x[i] + k));
      UNROLL for (int j = 0; j < TILE_VECTORS; j++)
        sum[i][j] = (Floats)_mm512_dpbf16_ps((__m512)sum[i][j], pair, weights[j]);
    }
  }
};
#endif

// Rows [from, to) and panels [first, last), which one task multiplies. Neighbouring panels are
// copied and written together: the rows of a matrix lie far apart, and each takes a look at the
// page table.
struct Part {
  int64_t from, to, first, last;
};

template <typename Form, typename X>
void multiply_part(const Linear<X>& call, const typename Form::Input* x, const Part& part) {
  constexpr int64_t COPY = PIECE * TILE_COLUMNS;
  constexpr int64_t SUMS = ROWS * TILE_COLUMNS;
  thread_local std::vector<typename Form::Copied> copies(PANELS * COPY);
  thread_local std::vector<float> sums(PANELS * SUMS);
  const int64_t column = part.first * TILE_COLUMNS;
  const int64_t columns = std::min(part.last * TILE_COLUMNS, call.N) - column;
  const bool some = call.any(part.from, part.to);
  for (int64_t k = 0; some && k < call.K; k += PIECE) {
    const int64_t depth = std::min(PIECE, call.K - k);
    Form::copy(copies.data(), COPY, call.w + k * call.N + column, call.N, depth, columns);
    for (int64_t panel = 0; panel < part.last - part.first; panel++)
      multiply_panel<Form>(call, x + k, part.from, part.to, copies.data() + panel * COPY, depth,
                           sums.data() + panel * SUMS, k > 0);
  }
  if (!some) std::fill(sums.begin(), sums.end(), 0.f);
  for (int64_t t = part.from; t < part.to; t++) {
    const float* sum = sums.data() + (t - part.from) * TILE_COLUMNS;
    X* y = call.y + t * call.N + column;
    for (int64_t j = 0; j < columns; j += TILE_COLUMNS, sum += SUMS)
      store_row(y + j, sum, std::min<int64_t>(TILE_COLUMNS, columns - j));
  }
}

template <typename Form, typename X>
void many_rows(const Linear<X>& call, const typename Form::Input* x, const Threads& threads) {
  const int64_t parts = (call.T + ROWS - 1) / ROWS;
  const int64_t rows = ((call.T + parts - 1) / parts + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  const int64_t panels = (call.N + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const int64_t fair = parts * panels / (TASKS * threads.count());
  const int64_t wide = std::clamp<int64_t>(fair, 1, PANELS);
  const int64_t across = (panels + wide - 1) / wide;
  threads.run(parts * across, false, [&](int64_t i) {
    const int64_t from = i / across * rows, first = i % across * wide;
    const Part part{from, std::min(call.T, from + rows), first, std::min(panels, first + wide)};
    multiply_part<Form>(call, x, part);
  });
}

template <typename X>
void many_rows(const Linear<X>& call, const Threads& threads) {
#if defined(__AVX512BF16__)
  if constexpr (std::is_same_v<X, BF16>) {
    if (call.K % 2 == 0) return many_rows<Pairs>(call, call.x, threads);
  }
#endif
  const Widened x(call.x, call.T, call.K, threads);
  many_rows<Plain<X>>(call, x.rows, threads);
}

template <typename X>
void multiply(const Linear<X>& call, const Threads& threads) {
  if (call.T > FEW) return many_rows(call, threads);
  if (!call.any(0, call.T)) {
    std::fill(call.y, call.y + call.T * call.N, X());
    return;
  }
  const Widened x(call.x, call.T, call.K, threads);
  few_rows<X>({{call, x.rows}}, threads);
}

// The first counts[0] rows of `all` by the first of E matrices, the next counts[1] by the second,
// and so on; y of rows past the last group is 0.
template <typename X>
void multiply_groups(const Linear<X>& all, const int32_t* counts, int64_t E,
                     const Threads& threads) {
  const Widened x(all.x, all.T, all.K, threads);
  std::vector<Few<X>> few;
  int64_t from = 0;
  for (int64_t group = 0; group < E; group++) {
    const int64_t rows = std::clamp<int64_t>(counts[group], 0, all.T - from);
    if (rows == 0) continue;
    const Linear<X> call{rows, all.K, all.N, all.x + from * all.K,
                         all.w + group * all.K * all.N, all.y + from * all.N, nullptr};
    if (rows > FEW) many_rows(call, threads);
    else few.push_back({call, x.rows + from * all.K});
    from += rows;
  }
  if (!few.empty()) few_rows(few, threads);
  std::fill(all.y + from * all.N, all.y + all.T * all.N, X());
}

// x [T, K], w [K, N] -> y [T, N], all f32 or all bf16. positions [T] or [0]: rows with a negative
// one are padding, for which y is 0 or what the product gives. The caller has checked shapes and
// types.
ffi::Error linear(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                  ffi::Buffer<ffi::S32> positions, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1], N = w.dimensions()[1];
  const Threads threads(pool);
  auto call = [&](auto number) {
    using X = decltype(number);
    multiply(Linear<X>{T, K, N, (const X*)x.untyped_data(), (const X*)w.untyped_data(),
                       (X*)y->untyped_data(),
                       positions.element_count() ? positions.typed_data() : nullptr},
             threads);
    return ffi::Error::Success();
  };
  if (x.element_type() == ffi::DataType::F32) return call(0.f);
  if (x.element_type() == ffi::DataType::BF16) return call(BF16());
  return ffi::Error::InvalidArgument("linear: neither f32 nor bf16");
}

// x [T, K], w [E, K, N], counts [E] -> y [T, N], all f32 or all bf16. The caller has checked shapes
// and types.
ffi::Error grouped(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                   ffi::Buffer<ffi::S32> counts, ffi::Result<ffi::AnyBuffer> y) {
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1];
  const int64_t E = w.dimensions()[0], N = w.dimensions()[2];
  const Threads threads(pool);
  auto call = [&](auto number) {
    using X = decltype(number);
    multiply_groups(Linear<X>{T, K, N, (const X*)x.untyped_data(), (const X*)w.untyped_data(),
                              (X*)y->untyped_data(), nullptr},
                    counts.typed_data(), E, threads);
    return ffi::Error::Success();
  };
  if (x.element_type() == ffi::DataType::F32) return call(0.f);
  if (x.element_type() == ffi::DataType::BF16) return call(BF16());
  return ffi::Error::InvalidArgument("grouped: neither f32 nor bf16");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxserve_linear, linear,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::AnyBuffer>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(
    jaxserve_grouped, grouped,
    ffi::Ffi::Bind()
        .Ctx<ffi::ThreadPool>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::AnyBuffer>()
        .Arg<ffi::Buffer<ffi::S32>>()
        .Ret<ffi::AnyBuffer>());
