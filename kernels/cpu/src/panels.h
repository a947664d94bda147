// Products of many rows by panels of TILE_COLUMNS columns, copied to where the cache keeps them:
// a piece of one panel and a tile of sums stay in the first-level cache while all rows pass.
#pragma once

#include <algorithm>
#include <utility>

#include "vector.h"

constexpr int64_t ROWS = 256;   // of x that a task multiplies by a panel
constexpr int64_t PIECE = 192;  // rows of a panel that are copied at a time

// Panels of f32 [depth][TILE_COLUMNS], and one step of their product.
struct FloatPanel {
  using Input = float;
  using Copied = float;
  static constexpr int STEP = 1;

  template <int R>
  INLINE static void add(Floats (&sum)[R][TILE_VECTORS], const float* const (&x)[R],
                         const float* panel, int64_t k) {
    Floats weights[TILE_VECTORS];
    UNROLL for (int j = 0; j < TILE_VECTORS; j++)
      weights[j] = load(panel + k * TILE_COLUMNS + j * WIDTH);
    UNROLL for (int i = 0; i < R; i++) {
      const Floats number = broadcast(x[i][k]);
      UNROLL for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] += number * weights[j];
    }
  }
};

// sums [R][TILE_COLUMNS] (+)= R rows of x by `depth` rows of the copied panel
template <int R, typename Form>
void multiply_tile(const typename Form::Input* x, int64_t K, const typename Form::Copied* panel,
                   int64_t depth, float* sums, bool more) {
  Floats sum[R][TILE_VECTORS];
  const typename Form::Input* row[R];
  UNROLL for (int i = 0; i < R; i++) {
    row[i] = x + i * K;
    UNROLL for (int j = 0; j < TILE_VECTORS; j++)
      sum[i][j] = more ? load(sums + i * TILE_COLUMNS + j * WIDTH) : Floats{};
  }
  for (int64_t k = 0; k < depth; k += Form::STEP) Form::add(sum, row, panel, k);
  UNROLL for (int i = 0; i < R; i++)
    UNROLL for (int j = 0; j < TILE_VECTORS; j++)
      store(sums + i * TILE_COLUMNS + j * WIDTH, sum[i][j]);
}

// sums [to - from][TILE_COLUMNS] (+)= rows [from, to) of x by a copied panel. x: its first column
// that the panel multiplies. call: says how long rows are, and whether `any` of some is no padding.
template <typename Form, typename Call>
void multiply_panel(const Call& call, const typename Form::Input* x, int64_t from, int64_t to,
                    const typename Form::Copied* panel, int64_t depth, float* sums, bool more) {
  for (int64_t t = from; t < to;) {
    const typename Form::Input* rows = x + t * call.K;
    const int64_t left = to - t;
    auto multiply = [&]<int R>(std::integral_constant<int, R>) {
      if (call.any(t, t + R))
        multiply_tile<R, Form>(rows, call.K, panel, depth, sums, more);
      else
        std::fill(sums, sums + R * TILE_COLUMNS, 0.f);
      t += R;
      sums += R * TILE_COLUMNS;
    };
    if (left >= TILE_ROWS) multiply(std::integral_constant<int, TILE_ROWS>());
    else if (left >= 4) multiply(std::integral_constant<int, 4>());
    else if (left >= 2) multiply(std::integral_constant<int, 2>());
    else multiply(std::integral_constant<int, 1>());
  }
}
