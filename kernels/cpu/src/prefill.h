// Rows of many tokens: the lanes of a vector are queries.
//
// Scores [key][query] and outputs [dim][query] are then sums of a number of a page times a vector
// of queries: pages are read as they lie, and neither softmax nor mask crosses lanes.
#pragma once

#include <cmath>
#include <vector>

#include "keys.h"

struct QueryTile {
  std::vector<float> q, out;  // [H][TILE_COLUMNS]
  float scores[BATCH][TILE_COLUMNS];
  Floats top[TILE_VECTORS], total[TILE_VECTORS], shrink[TILE_VECTORS];
  Ints positions[TILE_VECTORS];
};

// scores = keys q
inline void multiply_keys(QueryTile& tile, const KeyBatch& batch, int64_t H) {
  for (int first = 0; first < batch.count; first += TILE_ROWS) {
    Floats sum[TILE_ROWS][TILE_VECTORS] = {};
    const float* key[TILE_ROWS];
    UNROLL for (int i = 0; i < TILE_ROWS; i++) key[i] = batch.keys[first + i];
    const float* q = tile.q.data();
    for (int64_t h = 0; h < H; h++, q += TILE_COLUMNS) {
      Floats queries[TILE_VECTORS];
      UNROLL for (int j = 0; j < TILE_VECTORS; j++) queries[j] = load(q + j * WIDTH);
      UNROLL for (int i = 0; i < TILE_ROWS; i++) {
        const Floats number = broadcast(key[i][h]);
        UNROLL for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] += number * queries[j];
      }
    }
    UNROLL for (int i = 0; i < TILE_ROWS; i++)
      UNROLL for (int j = 0; j < TILE_VECTORS; j++)
        store(tile.scores[first + i] + j * WIDTH, sum[i][j]);
  }
}

// Scores get a soft cap: those of it that are in (-1, 1).
inline void cap(QueryTile& tile, int count, float inner) {
  for (int i = 0; i < count; i++) {
    for (int j = 0; j < TILE_VECTORS; j++) {
      float* scores = tile.scores[i] + j * WIDTH;
      store(scores, tanh(load(scores) * inner));
    }
  }
}

// Scores of keys that a query does not see become -inf.
inline void mask(QueryTile& tile, const KeyBatch& batch, int64_t window) {
  for (int i = 0; i < batch.count; i++) {
    for (int j = 0; j < TILE_VECTORS; j++) {
      const Ints distance = tile.positions[j] - int32_t(batch.positions[i]);
      Ints seen = distance >= 0;
      if (window) seen &= distance < int32_t(window);
      float* scores = tile.scores[i] + j * WIDTH;
      store(scores, seen ? load(scores) : broadcast(NOTHING));
    }
  }
}

// Scores become weights relative to the highest so far; `shrink` is the factor on earlier sums.
inline void soften(QueryTile& tile, int count, float scale) {
  for (int j = 0; j < TILE_VECTORS; j++) {
    Floats top = tile.top[j];
    for (int i = 0; i < count; i++) top = max(top, load(tile.scores[i] + j * WIDTH));
    tile.shrink[j] = exp2_of_negative((tile.top[j] - top) * scale);
    const Floats offset = top * scale;
    Floats total = tile.total[j] * tile.shrink[j];
    for (int i = 0; i < count; i++) {
      float* scores = tile.scores[i] + j * WIDTH;
      const Floats weight = exp2_of_negative(load(scores) * scale - offset);
      store(scores, weight);
      total += weight;
    }
    tile.top[j] = top;
    tile.total[j] = total;
  }
}

// out = out shrink + values weights
inline void add_values(QueryTile& tile, const KeyBatch& batch, int64_t H) {
  for (int64_t h = 0; h < H; h += TILE_ROWS) {
    float* out = tile.out.data() + h * TILE_COLUMNS;
    Floats sum[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int i = 0; i < TILE_ROWS; i++)
      UNROLL for (int j = 0; j < TILE_VECTORS; j++)
        sum[i][j] = load(out + i * TILE_COLUMNS + j * WIDTH) * tile.shrink[j];
    for (int key = 0; key < batch.count; key++) {
      const float* value = batch.values[key] + h;
      Floats weights[TILE_VECTORS];
      UNROLL for (int j = 0; j < TILE_VECTORS; j++)
        weights[j] = load(tile.scores[key] + j * WIDTH);
      UNROLL for (int i = 0; i < TILE_ROWS; i++) {
        const Floats number = broadcast(value[i]);
        UNROLL for (int j = 0; j < TILE_VECTORS; j++) sum[i][j] += number * weights[j];
      }
    }
    UNROLL for (int i = 0; i < TILE_ROWS; i++)
      UNROLL for (int j = 0; j < TILE_VECTORS; j++)
        store(out + i * TILE_COLUMNS + j * WIDTH, sum[i][j]);
  }
}

// Attention of queries [from, to) of a row and kv head, at most TILE_COLUMNS. Query i is query head
// i % G of token i / G.
class PrefillTask {
 public:
  PrefillTask(const Attention& call, int64_t row, int64_t head, int64_t from, int64_t to)
      : call_(call), row_(row), head_(head), from_(from), queries_(to - from) {}

  void run(QueryTile& tile) {
    start(tile);
    const int64_t entries = last_ < 0 ? 0 : call_.entries_of(row_);
    KeyReader reader(call_, row_, head_, 0, entries, call_.first_position_seen(first_), last_);
    KeyBatch batch;
    while (reader.next(batch)) {
      multiply_keys(tile, batch, call_.H);
      if (call_.inner) cap(tile, batch.count, call_.inner);
      const bool future = batch.positions[batch.count - 1] > first_;
      const bool past = call_.window && last_ - batch.positions[0] >= call_.window;
      if (future || past) mask(tile, batch, call_.window);
      soften(tile, batch.count, call_.scale * LOG2_E);
      add_values(tile, batch, call_.H);
    }
    finish(tile);
  }

 private:
  int64_t position(int64_t query) const {
    return call_.q_pos[row_ * call_.T + (from_ + query) / call_.G];
  }

  // Where a query lies in q, out and lse, in vectors of H numbers.
  int64_t place(int64_t query) const {
    const int64_t token = row_ * call_.T + (from_ + query) / call_.G;
    return (token * call_.K + head_) * call_.G + (from_ + query) % call_.G;
  }

  void start(QueryTile& tile) {
    tile.q.resize(call_.H * TILE_COLUMNS);
    tile.out.assign(call_.H * TILE_COLUMNS, 0);
    int32_t positions[TILE_COLUMNS];
    for (int64_t lane = 0; lane < TILE_COLUMNS; lane++) {
      positions[lane] = lane < queries_ ? std::max<int64_t>(-1, position(lane)) : -1;
      if (positions[lane] < 0) continue;
      last_ = std::max<int64_t>(last_, positions[lane]);
      first_ = std::min<int64_t>(first_, positions[lane]);
    }
    for (int j = 0; j < TILE_VECTORS; j++) {
      tile.positions[j] = load_as<Ints>(positions + j * WIDTH);
      tile.top[j] = broadcast(LOWEST);
      tile.total[j] = Floats{};
    }
    for (int64_t lane = 0; lane < TILE_COLUMNS; lane += WIDTH) {
      for (int64_t h = 0; h < call_.H; h += WIDTH) {
        Floats square[WIDTH];
        for (int64_t i = 0; i < WIDTH; i++) {
          const bool used = lane + i < queries_;
          square[i] = used ? call_.q.read_vector(place(lane + i) * call_.H + h) : Floats{};
        }
        transpose(square);
        for (int i = 0; i < WIDTH; i++)
          store(tile.q.data() + (h + i) * TILE_COLUMNS + lane, square[i]);
      }
    }
  }

  void finish(QueryTile& tile) {
    float totals[TILE_COLUMNS], tops[TILE_COLUMNS], factors[TILE_COLUMNS];
    for (int j = 0; j < TILE_VECTORS; j++) {
      store(totals + j * WIDTH, tile.total[j]);
      store(tops + j * WIDTH, tile.top[j]);
    }
    for (int64_t lane = 0; lane < queries_; lane++) {
      const bool nothing = position(lane) < 0 || totals[lane] == 0;
      const float lse = tops[lane] * call_.scale + std::log(totals[lane]);
      call_.lse[place(lane)] = nothing ? NOTHING : lse;
      factors[lane] = nothing ? 0 : 1 / totals[lane];
    }
    for (int64_t lane = 0; lane < queries_; lane += WIDTH) {
      for (int64_t h = 0; h < call_.H; h += WIDTH) {
        Floats square[WIDTH];
        for (int i = 0; i < WIDTH; i++)
          square[i] = load(tile.out.data() + (h + i) * TILE_COLUMNS + lane);
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(WIDTH, queries_ - lane); i++) {
          const Floats out = factors[lane + i] == 0 ? Floats{} : square[i] * factors[lane + i];
          call_.out.write_vector(place(lane + i) * call_.H + h, out);
        }
      }
    }
  }

  const Attention& call_;
  const int64_t row_, head_, from_, queries_;
  int64_t first_ = std::numeric_limits<int32_t>::max(), last_ = -1;  // positions of the queries
};
