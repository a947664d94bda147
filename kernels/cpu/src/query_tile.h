// Queries in the lanes of vectors.
//
// Scores [key][query] and outputs [dim][query] are then sums of a number of a page times a vector
// of queries: pages are read as they lie, and neither softmax nor mask crosses lanes.
#pragma once

#include <cmath>
#include <vector>

#include "keys.h"

// Attention of some queries of a row and kv head, at most TILE_COLUMNS, over batches of keys.
class QueryTile {
 public:
  // Takes queries [from, to), and forgets what it had. Query i is query head i % G of token i / G.
  void start(const Attention& call, int64_t row, int64_t head, int64_t from, int64_t to) {
    call_ = &call;
    row_ = row;
    head_ = head;
    from_ = from;
    queries_ = to - from;
    first_ = std::numeric_limits<int32_t>::max();
    last_ = -1;
    q_.resize(call.H * TILE_COLUMNS);
    out_.assign(call.V * TILE_COLUMNS, 0);
    int32_t positions[TILE_COLUMNS];
    for (int64_t lane = 0; lane < TILE_COLUMNS; lane++) {
      positions[lane] = lane < queries_ ? std::max<int64_t>(-1, position(lane)) : -1;
      if (positions[lane] < 0) continue;
      last_ = std::max<int64_t>(last_, positions[lane]);
      first_ = std::min<int64_t>(first_, positions[lane]);
    }
    for (int j = 0; j < TILE_VECTORS; j++) {
      positions_[j] = load_as<Ints>(positions + j * WIDTH);
      top_[j] = broadcast(LOWEST);
      total_[j] = Floats{};
    }
    read_queries();
  }

  // Bytes of a tile.
  static int64_t bytes(const Attention& call) { return 4 * TILE_COLUMNS * (call.H + call.V); }

  // Positions of the first and the last query; none is padding where first <= last.
  int64_t first() const { return first_; }
  int64_t last() const { return last_; }

  // False if all keys come after all queries. Those that lie in no order come before.
  bool sees(const KeyBatch& batch) const { return batch.positions[0] <= last_; }

  void attend(const KeyBatch& batch) {
    if (queries_ <= WIDTH) return attend_with<1>(batch);
    if (queries_ <= 2 * WIDTH) return attend_with<2>(batch);
    attend_with<TILE_VECTORS>(batch);
  }

  // Writes out and lse.
  void write() const {
    float tops[TILE_COLUMNS], totals[TILE_COLUMNS], factors[TILE_COLUMNS];
    read_softmax(tops, totals);
    for (int64_t lane = 0; lane < queries_; lane++) {
      const bool nothing = position(lane) < 0 || totals[lane] == 0;
      const float lse = tops[lane] * call_->scale + std::log(totals[lane]);
      call_->lse[place(lane)] = nothing ? NOTHING : lse;
      factors[lane] = nothing ? 0 : 1 / totals[lane];
    }
    for_each_output([&](int64_t lane, int64_t h, Floats sum) {
      const Floats out = factors[lane] == 0 ? Floats{} : sum * factors[lane];
      call_->out.write_vector(place(lane) * call_->V + h, out);
    });
  }

  // Copies sums of weights times values [queries][V], and for each query the highest score and the
  // sum of weights relative to it.
  void copy_sums(float* out, float* top, float* total) const {
    float tops[TILE_COLUMNS], totals[TILE_COLUMNS];
    read_softmax(tops, totals);
    std::copy(tops, tops + queries_, top);
    std::copy(totals, totals + queries_, total);
    for_each_output([&](int64_t lane, int64_t h, Floats sum) {
      store(out + lane * call_->V + h, sum);
    });
  }

 private:
  // Dims whose queries stay in the nearest cache while all keys of a batch are multiplied.
  static constexpr int64_t DIMS = 128;

  int64_t position(int64_t query) const {
    return call_->q_pos[row_ * call_->T + (from_ + query) / call_->G];
  }

  // Where a query lies in q, out and lse, in vectors of H or V numbers.
  int64_t place(int64_t query) const {
    const int64_t token = row_ * call_->T + (from_ + query) / call_->G;
    return (token * call_->K + head_) * call_->G + (from_ + query) % call_->G;
  }

  void read_queries() {
    for (int64_t lane = 0; lane < TILE_COLUMNS; lane += WIDTH) {
      for (int64_t h = 0; h < call_->H; h += WIDTH) {
        Floats square[WIDTH];
        for (int64_t i = 0; i < WIDTH; i++) {
          const bool used = lane + i < queries_;
          square[i] = used ? call_->q.read_vector(place(lane + i) * call_->H + h) : Floats{};
        }
        transpose(square);
        for (int i = 0; i < WIDTH; i++) store(q_.data() + (h + i) * TILE_COLUMNS + lane, square[i]);
      }
    }
  }

  template <int VECTORS>
  void attend_with(const KeyBatch& batch) {
    constexpr int ROWS = VECTORS == 1 ? std::max(8, TILE_ROWS) : TILE_ROWS;
    for (int64_t h = 0; h < call_->H; h += DIMS)
      multiply_keys<ROWS, VECTORS>(batch, h, std::min(h + DIMS, call_->H));
    if (call_->inner) cap<VECTORS>(batch.count);
    const bool future = batch.positions[batch.count - 1] > first_;
    const bool past = call_->window && last_ - batch.positions[0] >= call_->window;
    if (future || past) mask<VECTORS>(batch);
    soften<VECTORS>(batch.count);
    for (int64_t h = 0; h < call_->V; h += ROWS) add_values<ROWS, VECTORS>(batch, h);
  }

  // Adds the products of dims [from, to) to the scores, which the first dims begin.
  template <int ROWS, int VECTORS>
  void multiply_keys(const KeyBatch& batch, int64_t from, int64_t to) {
    for (int first = 0; first < batch.count; first += ROWS) {
      Floats sum[ROWS][VECTORS] = {};
      if (from > 0)
        UNROLL for (int i = 0; i < ROWS; i++)
          UNROLL for (int j = 0; j < VECTORS; j++)
            sum[i][j] = load(scores_[first + i] + j * WIDTH);
      const float* key[ROWS];
      UNROLL for (int i = 0; i < ROWS; i++) key[i] = batch.keys[first + i];
      const float* q = q_.data() + from * TILE_COLUMNS;
      for (int64_t h = from; h < to; h++, q += TILE_COLUMNS) {
        Floats queries[VECTORS];
        UNROLL for (int j = 0; j < VECTORS; j++) queries[j] = load(q + j * WIDTH);
        UNROLL for (int i = 0; i < ROWS; i++) {
          const Floats number = broadcast(key[i][h]);
          UNROLL for (int j = 0; j < VECTORS; j++) sum[i][j] += number * queries[j];
        }
      }
      UNROLL for (int i = 0; i < ROWS; i++)
        UNROLL for (int j = 0; j < VECTORS; j++) store(scores_[first + i] + j * WIDTH, sum[i][j]);
    }
  }

  // Scores get a soft cap: those of it that are in (-1, 1).
  template <int VECTORS>
  void cap(int count) {
    for (int i = 0; i < count; i++) {
      for (int j = 0; j < VECTORS; j++) {
        float* scores = scores_[i] + j * WIDTH;
        store(scores, tanh(load(scores) * call_->inner));
      }
    }
  }

  // Scores of keys that a query does not see become -inf.
  template <int VECTORS>
  void mask(const KeyBatch& batch) {
    for (int i = 0; i < batch.count; i++) {
      for (int j = 0; j < VECTORS; j++) {
        const Ints distance = positions_[j] - int32_t(batch.positions[i]);
        Ints seen = distance >= 0;
        if (call_->window) seen &= distance < int32_t(call_->window);
        float* scores = scores_[i] + j * WIDTH;
        store(scores, seen ? load(scores) : broadcast(NOTHING));
      }
    }
  }

  // Scores become weights relative to the highest so far; `shrink` is the factor on earlier sums.
  template <int VECTORS>
  void soften(int count) {
    const float scale = call_->scale * LOG2_E;
    for (int j = 0; j < VECTORS; j++) {
      Floats top = top_[j];
      for (int i = 0; i < count; i++) top = max(top, load(scores_[i] + j * WIDTH));
      shrink_[j] = exp2_of_negative((top_[j] - top) * scale);
      const Floats offset = top * scale;
      Floats total = total_[j] * shrink_[j];
      for (int i = 0; i < count; i++) {
        float* scores = scores_[i] + j * WIDTH;
        const Floats weight = exp2_of_negative(load(scores) * scale - offset);
        store(scores, weight);
        total += weight;
      }
      top_[j] = top;
      total_[j] = total;
    }
  }

  // out = out shrink + values weights, for dims [h, h + ROWS)
  template <int ROWS, int VECTORS>
  void add_values(const KeyBatch& batch, int64_t h) {
    float* out = out_.data() + h * TILE_COLUMNS;
    Floats sum[ROWS][VECTORS];
    UNROLL for (int i = 0; i < ROWS; i++)
      UNROLL for (int j = 0; j < VECTORS; j++)
        sum[i][j] = load(out + i * TILE_COLUMNS + j * WIDTH) * shrink_[j];
    for (int key = 0; key < batch.count; key++) {
      const float* value = batch.values[key] + h;
      Floats weights[VECTORS];
      UNROLL for (int j = 0; j < VECTORS; j++) weights[j] = load(scores_[key] + j * WIDTH);
      UNROLL for (int i = 0; i < ROWS; i++) {
        const Floats number = broadcast(value[i]);
        UNROLL for (int j = 0; j < VECTORS; j++) sum[i][j] += number * weights[j];
      }
    }
    UNROLL for (int i = 0; i < ROWS; i++)
      UNROLL for (int j = 0; j < VECTORS; j++)
        store(out + i * TILE_COLUMNS + j * WIDTH, sum[i][j]);
  }

  void read_softmax(float* tops, float* totals) const {
    for (int j = 0; j < TILE_VECTORS; j++) {
      store(tops + j * WIDTH, top_[j]);
      store(totals + j * WIDTH, total_[j]);
    }
  }

  // Calls take(query, h, sums of dims from h on) for all queries and vectors of dims.
  template <typename Take>
  void for_each_output(const Take& take) const {
    for (int64_t lane = 0; lane < queries_; lane += WIDTH) {
      for (int64_t h = 0; h < call_->V; h += WIDTH) {
        Floats square[WIDTH];
        for (int i = 0; i < WIDTH; i++)
          square[i] = load(out_.data() + (h + i) * TILE_COLUMNS + lane);
        transpose(square);
        for (int64_t i = 0; i < std::min<int64_t>(WIDTH, queries_ - lane); i++)
          take(lane + i, h, square[i]);
      }
    }
  }

  const Attention* call_;
  int64_t row_, head_, from_, queries_;
  int64_t first_, last_;
  std::vector<float> q_, out_;  // [H][TILE_COLUMNS], [V][TILE_COLUMNS]
  float scores_[BATCH][TILE_COLUMNS];
  Floats top_[TILE_VECTORS], total_[TILE_VECTORS], shrink_[TILE_VECTORS];
  Ints positions_[TILE_VECTORS];
};
