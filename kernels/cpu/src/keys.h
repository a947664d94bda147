// Arguments of a call of attention, and a reader of the keys that a row of queries sees.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "vector.h"

constexpr float LOWEST = -1e30f;  // in place of -inf where subtracting -inf would give NaN
constexpr float NOTHING = -std::numeric_limits<float>::infinity();  // lse where no key was seen
constexpr float LOG2_E = 1.44269504f;

enum class Number { F32, BF16, FP8 };

INLINE int64_t bytes_of(Number type) {
  return type == Number::F32 ? 4 : type == Number::BF16 ? 2 : 1;
}

template <typename From>
INLINE void widen_row(float* to, const From* from, int64_t count, float factor) {
  for (int64_t i = 0; i < count; i += WIDTH) store(to + i, load(from + i) * factor);
}

// Numbers of a type that is known when the kernel runs. Counts are multiples of WIDTH.
struct Numbers {
  Number type;
  char* data;

  char* at(int64_t index) const { return data + index * bytes_of(type); }

  void read(float* to, int64_t index, int64_t count, float factor = 1) const {
    if (type == Number::F32) widen_row(to, (const float*)at(index), count, factor);
    if (type == Number::BF16) widen_row(to, (const BF16*)at(index), count, factor);
    if (type == Number::FP8) widen_row(to, (const FP8*)at(index), count, factor);
  }

  INLINE Floats read_vector(int64_t index) const {
    return type == Number::F32 ? load((const float*)at(index)) : load((const BF16*)at(index));
  }

  INLINE void write_vector(int64_t index, Floats x) const {
    if (type == Number::F32) store((float*)at(index), x);
    if (type == Number::BF16) store((BF16*)at(index), x);
  }
};

// The arguments of reference.attend, by the letters of kernels/__init__.py.
struct Attention {
  int64_t R, T, K, G, H, P, C, slots, W;
  int64_t V;        // value dim
  int64_t vectors;  // of a token and kv head on a page: key and value, or one that is both
  int64_t window;  // in tokens; 0: no limit
  float scale;  // of scores in the softmax
  float inner;  // scores are tanh(q k inner), and `scale` their soft cap; 0: they are q k
  Numbers q, kv, out;
  const BF16* kv_scales;  // [P, K, vectors, C]; null unless kv is FP8
  const int32_t *q_pos, *table, *slot, *entries;
  float* lse;

  // Indices are kept in range whatever the arguments hold: no memory but theirs is read.
  int64_t table_row(int64_t row) const { return std::clamp<int64_t>(slot[row], 0, slots - 1); }
  const int32_t* pages_of(int64_t row) const { return table + table_row(row) * W; }
  const int32_t* blocks_of(int64_t row) const { return table + (slots + table_row(row)) * W; }
  int64_t entries_of(int64_t row) const { return std::clamp<int64_t>(entries[row], 0, W); }

  // First position of an entry's block: blocks lie in any order only beyond the valid entries.
  int64_t start(int32_t block) const { return int64_t(block) * C; }

  // The first of entries [from, to) with a position of at least `position`.
  int64_t first_entry(int64_t row, int64_t from, int64_t to, int64_t position) const {
    const int32_t* blocks = blocks_of(row);
    auto before = [&](int32_t block) { return start(block) + C <= position; };
    return std::partition_point(blocks + from, blocks + to, before) - blocks;
  }

  int64_t first_position_seen(int64_t position) const {
    return window ? std::max<int64_t>(0, position - window + 1) : 0;
  }
};

// Some keys with their values, in f32: pointers into the pages, or to widened copies.
constexpr int BATCH = 32;

struct KeyBatch {
  int count = 0;
  const float* keys[BATCH + WIDTH];  // the last one again, up to a whole tile or vector
  const float* values[BATCH];
  int64_t positions[BATCH];
};

// Reads the keys of one kv head in [first, last] among entries [from, to) of a row, in batches.
// copy: keys of f32 are copied too, one after the other, as pays where several tiles read them.
class KeyReader {
 public:
  KeyReader(const Attention& call, int64_t row, int64_t head, int64_t from, int64_t to,
            int64_t first, int64_t last, bool copy)
      : call_(call),
        pages_(call.pages_of(row)),
        blocks_(call.blocks_of(row)),
        head_(head),
        first_(first),
        last_(last),
        copies_(copy || call.kv.type != Number::F32),
        entry_(call.first_entry(row, from, to, first)),
        end_(to) {
    if (copies_) wide_.resize(call.vectors * BATCH * call.H);
  }

  // The next batch into `batch`; false if there is none.
  bool next(KeyBatch& batch) {
    batch.count = 0;
    while (entry_ < end_ && batch.count < BATCH) {
      const int64_t start = call_.start(blocks_[entry_]);
      if (start > last_) break;
      if (offset_ == 0 && entry_ + AHEAD < end_) prefetch(pages_[entry_ + AHEAD]);
      read_page(batch, start);
    }
    constexpr int WHOLE = std::max(TILE_ROWS, WIDTH);
    for (int i = batch.count; i > 0 && i % WHOLE; i++) batch.keys[i] = batch.keys[i - 1];
    return batch.count > 0;
  }

 private:
  static constexpr int64_t AHEAD = 2;  // pages: processors do not prefetch across pages themselves
  static constexpr int64_t CACHE_LINE = 64;

  // Index of a page's first key, in vectors of H numbers; its first value, if values are vectors
  // of their own, is C later.
  int64_t first_vector(int32_t page) const {
    const int64_t inside = std::clamp<int64_t>(page, 0, call_.P - 1);
    return (inside * call_.K + head_) * call_.vectors * call_.C;
  }

  // Adds keys of the current entry until the batch is full or the entry is done.
  void read_page(KeyBatch& batch, int64_t start) {
    const int64_t vector = first_vector(pages_[entry_]);
    const int64_t stop = std::min(call_.C, last_ + 1 - start);
    int64_t offset = std::max(offset_, first_ - start);
    for (; offset < stop && batch.count < BATCH; offset++) {
      const int i = batch.count++;
      batch.keys[i] = row(vector + offset, i, call_.H);
      batch.values[i] = batch.keys[i];
      if (call_.vectors == 2)
        batch.values[i] = row(vector + call_.C + offset, BATCH + i, call_.V);
      batch.positions[i] = start + offset;
    }
    const bool done = offset >= stop;
    offset_ = done ? 0 : offset;
    entry_ += done;
  }

  // The first `count` numbers of a vector.
  const float* row(int64_t vector, int at, int64_t count) {
    const Numbers& kv = call_.kv;
    if (!copies_) return (const float*)kv.at(vector * call_.H);
    float* wide = wide_.data() + at * call_.H;
    kv.read(wide, vector * call_.H, count, call_.kv_scales ? widen(call_.kv_scales[vector]) : 1);
    return wide;
  }

  void prefetch(int32_t page) const {
    const char* data = call_.kv.at(first_vector(page) * call_.H);
    const int64_t bytes = call_.vectors * call_.C * call_.H * bytes_of(call_.kv.type);
    for (int64_t at = 0; at < bytes; at += CACHE_LINE) __builtin_prefetch(data + at, 0, 2);
  }

  const Attention& call_;
  const int32_t *pages_, *blocks_;
  const int64_t head_, first_, last_;
  const bool copies_;
  int64_t entry_;
  const int64_t end_;
  int64_t offset_ = 0;  // of the next key in the current page
  std::vector<float> wide_;
};
