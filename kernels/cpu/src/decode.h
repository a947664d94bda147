// Rows of one token. Where a kv head has few queries, too few to fill the lanes of a vector with,
// the lanes are the dims of a head. Long contexts are cut into parts that threads share, merged at
// the end.
#pragma once

#include <cmath>
#include <vector>

#include "keys.h"
#include "query_tile.h"

// Attention of the G queries of one kv head over a part of the keys.
struct PartialAttention {
  std::vector<float> out;         // [G][V], sums of weights times values
  std::vector<float> top, total;  // [G]: highest score, sum of weights relative to it

  PartialAttention() = default;
  explicit PartialAttention(const Attention& call)
      : out(call.G * call.V), top(call.G, LOWEST), total(call.G) {}
};

// out[n][h..] = out shrink + values weights, for N queries and DEPTH vectors of dims from h on
template <int N, int DEPTH>
INLINE void add_some_values(float* out, int64_t V, int64_t h, const float* weights,
                            const KeyBatch& batch, const float* shrink) {
  Floats sum[N][DEPTH];
  UNROLL for (int n = 0; n < N; n++)
    UNROLL for (int j = 0; j < DEPTH; j++)
      sum[n][j] = load(out + n * V + h + j * WIDTH) * shrink[n];
  for (int i = 0; i < batch.count; i++) {
    Floats value[DEPTH];
    UNROLL for (int j = 0; j < DEPTH; j++) value[j] = load(batch.values[i] + h + j * WIDTH);
    UNROLL for (int n = 0; n < N; n++)
      UNROLL for (int j = 0; j < DEPTH; j++)
        sum[n][j] += broadcast(weights[n * BATCH + i]) * value[j];
  }
  UNROLL for (int n = 0; n < N; n++)
    UNROLL for (int j = 0; j < DEPTH; j++) store(out + n * V + h + j * WIDTH, sum[n][j]);
}

template <int N>
inline void add_values_of(float* out, int64_t V, const float* weights, const KeyBatch& batch,
                          const float* shrink) {
  constexpr int DEPTH = N > 2 ? 2 : 4;
  int64_t h = 0;
  for (; h + DEPTH * WIDTH <= V; h += DEPTH * WIDTH)
    add_some_values<N, DEPTH>(out, V, h, weights, batch, shrink);
  for (; h < V; h += WIDTH) add_some_values<N, 1>(out, V, h, weights, batch, shrink);
}

// Attention of a row and kv head over entries [from, to) of the row's page table.
class DecodeTask {
 public:
  DecodeTask(const Attention& call, int64_t row, int64_t head, int64_t from, int64_t to)
      : call_(call), row_(row), head_(head), from_(from), to_(to) {}

  PartialAttention run() {
    PartialAttention part(call_);
    if (call_.G < TILE_FROM)
      run_by_dims(part);
    else
      run_by_queries(part);
    return part;
  }

 private:
  // Queries from which on they are in the lanes: with fewer, keys come from memory no faster than
  // their dims are multiplied.
  static constexpr int64_t TILE_FROM = 2 * WIDTH;

  KeyReader reader() const {
    const int64_t last = call_.q_pos[row_];
    return {call_, row_, head_, from_, to_, call_.first_position_seen(last), last, false};
  }

  // All queries take their turn with each batch of keys, which is read and widened once.
  void run_by_queries(PartialAttention& part) {
    thread_local std::vector<QueryTile> tiles;
    tiles.resize((call_.G + TILE_COLUMNS - 1) / TILE_COLUMNS);
    for (size_t i = 0; i < tiles.size(); i++)
      tiles[i].start(call_, row_, head_, i * TILE_COLUMNS,
                     std::min<int64_t>(call_.G, (i + 1) * TILE_COLUMNS));
    KeyReader keys = reader();
    KeyBatch batch;
    while (keys.next(batch))
      for (QueryTile& tile : tiles) tile.attend(batch);
    for (size_t i = 0; i < tiles.size(); i++) {
      const int64_t g = i * TILE_COLUMNS;
      tiles[i].copy_sums(part.out.data() + g * call_.V, part.top.data() + g, part.total.data() + g);
    }
  }

  void run_by_dims(PartialAttention& part) {
    q_.resize(call_.G * call_.H);
    weights_.resize(call_.G * BATCH);
    shrink_.resize(call_.G);
    call_.q.read(q_.data(), (row_ * call_.K + head_) * call_.G * call_.H, call_.G * call_.H);
    KeyReader keys = reader();
    KeyBatch batch;
    while (keys.next(batch)) {
      for (int64_t g = 0; g < call_.G; g++) weigh(part, batch, g);
      add_values(part, batch);
    }
  }

  // Weights of the batch for query g, relative to its highest score so far.
  void weigh(PartialAttention& part, const KeyBatch& batch, int64_t g) {
    const float scale = call_.scale * LOG2_E;
    float* weights = weights_.data() + g * BATCH;
    for (int first = 0; first < batch.count; first += WIDTH) {
      Floats sum[WIDTH] = {};
      for (int64_t h = 0; h < call_.H; h += WIDTH) {
        const Floats q = load(q_.data() + g * call_.H + h);
        UNROLL for (int i = 0; i < WIDTH; i++) sum[i] += q * load(batch.keys[first + i] + h);
      }
      const Floats scores = sums(sum);
      store(weights + first, call_.inner ? tanh(scores * call_.inner) : scores);
    }
    float top = part.top[g];
    for (int i = 0; i < batch.count; i++) top = weights[i] > top ? weights[i] : top;
    for (int i = batch.count; i % WIDTH; i++) weights[i] = NOTHING;
    Floats totals = {};
    for (int i = 0; i < batch.count; i += WIDTH) {
      const Floats weight = exp2_of_negative((load(weights + i) - top) * scale);
      store(weights + i, weight);
      totals += weight;
    }
    shrink_[g] = std::exp2((part.top[g] - top) * scale);
    part.total[g] = part.total[g] * shrink_[g] + sum(totals);
    part.top[g] = top;
  }

  void add_values(PartialAttention& part, const KeyBatch& batch) {
    for (int64_t g = 0; g < call_.G;) {
      float* out = part.out.data() + g * call_.V;
      const float *weights = weights_.data() + g * BATCH, *shrink = shrink_.data() + g;
      const int64_t left = call_.G - g;
      if (left >= 4) add_values_of<4>(out, call_.V, weights, batch, shrink);
      if (left == 3) add_values_of<3>(out, call_.V, weights, batch, shrink);
      if (left == 2) add_values_of<2>(out, call_.V, weights, batch, shrink);
      if (left == 1) add_values_of<1>(out, call_.V, weights, batch, shrink);
      g += std::min<int64_t>(4, left);
    }
  }

  const Attention& call_;
  const int64_t row_, head_, from_, to_;
  std::vector<float> q_, weights_, shrink_;  // [G][H], [G][BATCH], [G]
};

// Writes out and lse of a row and kv head from the partial attention over its parts.
inline void merge_parts(const Attention& call, int64_t row, int64_t head,
                        const PartialAttention* parts, int64_t count) {
  std::vector<float> out(call.V);
  for (int64_t g = 0; g < call.G; g++) {
    const int64_t place = (row * call.K + head) * call.G + g;
    float top = LOWEST, total = 0;
    for (int64_t i = 0; i < count; i++) top = std::max(top, parts[i].top[g]);
    std::fill(out.begin(), out.end(), 0.f);
    for (int64_t i = 0; i < count; i++) {
      const float share = std::exp((parts[i].top[g] - top) * call.scale);
      const float* part = parts[i].out.data() + g * call.V;
      total += parts[i].total[g] * share;
      for (int64_t h = 0; h < call.V; h += WIDTH)
        store(out.data() + h, load(out.data() + h) + load(part + h) * share);
    }
    const bool nothing = call.q_pos[row] < 0 || total == 0;
    call.lse[place] = nothing ? NOTHING : top * call.scale + std::log(total);
    const float factor = nothing ? 0 : 1 / total;
    for (int64_t h = 0; h < call.V; h += WIDTH)
      call.out.write_vector(place * call.V + h, load(out.data() + h) * factor);
  }
}
