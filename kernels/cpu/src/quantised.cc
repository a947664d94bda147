// Products of activations and weights that stay quantised: y [T, N] = x [T, K] w [K, N], or of
// groups of rows with a matrix each, summed in f32 on XLA's own threads. Called by
// kernels/cpu/quantised.py; kernels/quantised.py says how weights lie.
//
// Few rows: codes are widened in registers and used at once. With w = scale code + offset, products
// of a group of inputs are summed before they are scaled, and an offset is multiplied by the sum of
// the group's activations. Many rows: panels of columns are widened to where the cache keeps them.

#include <algorithm>
#include <memory>
#include <vector>

#include "panels.h"
#include "threads.h"
#include "vector.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t INPUTS = 32;   // of a tile
constexpr int64_t OUTPUTS = 16;
constexpr int64_t SUPER = 256;   // inputs that share the factors of a super-block
constexpr int VECTORS = OUTPUTS / WIDTH;
constexpr int64_t FEW = 16;      // most rows for which codes are widened in registers
constexpr int FEW_TILE = WIDTH == 8 ? 4 : 8;  // rows of them at a time
constexpr int64_t COLUMNS = 48;  // of a task: tiles and panels of every width divide it
constexpr int64_t TASKS = 4;     // least tasks of a thread, so that none waits for long
constexpr int64_t SMALL = 1 << 16;  // products below which one thread does all

// Numbers of floats without sign, of MANTISSA bits of a mantissa below an exponent; subnormals do
// not pass through subnormal floats, which XLA's threads flush to zero.
template <int MANTISSA, int BIAS>
INLINE Floats unsigned_float(Bits bits) {
  const Floats normal = as<Floats>((bits << (23 - MANTISSA)) + (uint32_t(127 - BIAS) << 23));
  const float unit = as<float>(uint32_t(127 + 1 - BIAS - MANTISSA) << 23);
  const Floats subnormal = __builtin_convertvector(as<Ints>(bits), Floats) * unit;
  return as<Ints>(bits) < (1 << MANTISSA) ? subnormal : normal;
}

// Codes of BITS bits: integers, less 128 if they have 8 bits, or floats with a sign.
template <int BITS, int MANTISSA>
struct Code {
  static constexpr int64_t WORDS = BITS * OUTPUTS;  // of a tile

  INLINE static Bits word(const uint32_t* tile, int number, int v) {
    return load_as<Bits>(tile + number * OUTPUTS + v * WIDTH);
  }

  // Bits [from, from + count) of words, as bits from 4 on.
  INLINE static Bits high(Bits words, int from, int count) {
    const Bits there = from > 4 ? words >> (from - 4) : words << (4 - from);
    return there & (((1u << count) - 1) << 4);
  }

  INLINE static Bits bits(const uint32_t* tile, int k, int v) {
    if constexpr (BITS == 8) return word(tile, k / 4, v) >> k % 4 * 8 & 255;
    const Bits low = word(tile, k % 16 / 4, v) >> (k % 4 * 8 + k / 16 * 4) & 15;
    if constexpr (BITS == 5) return low | high(word(tile, 4, v), k, 1);
    if constexpr (BITS == 6) return low | high(word(tile, 4 + k / 16, v), k % 16 * 2, 2);
    return low;
  }

  INLINE static Floats number(const uint32_t* tile, int k, int v) {
    if constexpr (MANTISSA > 0) {
      constexpr int BIAS = (1 << (BITS - 2 - MANTISSA)) - 1;
      constexpr uint32_t SIGN = 1u << (BITS - 1);
      const Bits code = bits(tile, k, v);
      const Floats size = unsigned_float<MANTISSA, BIAS>(code & (SIGN - 1));
      return as<Floats>(as<Bits>(size) | (code & SIGN) << (32 - BITS));
    } else if constexpr (BITS == 8) {
      const Bits four = word(tile, k / 4, v) ^ 0x80808080u;
      return __builtin_convertvector(as<Ints>(four << (24 - k % 4 * 8)) >> 24, Floats);
    } else {
      return __builtin_convertvector(as<Ints>(bits(tile, k, v)), Floats);
    }
  }
};

// Scales, offsets and their factors, of any type.
struct Factors {
  ffi::DataType type;
  const char* data;  // null: there are none

  INLINE Floats at(int64_t index) const {
    switch (type) {
      case ffi::DataType::F32: return load((const float*)data + index);
      case ffi::DataType::BF16: return load((const BF16*)data + index);
      case ffi::DataType::S8: {
        const Bits code = load_bytes((const uint8_t*)data + index) ^ 128;
        return __builtin_convertvector(as<Ints>(code) - 128, Floats);
      }
      case ffi::DataType::U8:
        return __builtin_convertvector(as<Ints>(load_bytes((const uint8_t*)data + index)), Floats);
      default: return half(index);
    }
  }

  INLINE Floats half(int64_t index) const {
    const Halves halves = load_as<Halves>((const uint16_t*)data + index);
    const Bits bits = __builtin_convertvector(halves, Bits);
    const Floats size = unsigned_float<10, 15>(bits & 0x7fff);
    return as<Floats>(as<Bits>(size) | (bits & 0x8000) << 16);
  }
};

struct Product {
  int64_t T, K, N;
  const float* x;
  const uint32_t* codes;  // [N / 16][K / 32][bits][16]
  Factors scales, offsets, supers;
  int64_t group;  // inputs of a scale
  int64_t parts;  // of `supers`: 1, or 2 with offsets
  float zero;     // what is left to subtract from numbers
  float* y;
  const int32_t* positions;  // [T]; negative: padding. Null: there is none

  // Inputs of a tile whose products are summed before they are scaled.
  int64_t step() const { return std::min(group, INPUTS); }
  bool has_offsets() const { return offsets.data || zero != 0; }

  bool any(int64_t from, int64_t to) const {
    auto counts = [](int32_t position) { return position >= 0; };
    return !positions || std::any_of(positions + from, positions + to, counts);
  }

  // Scales and offsets in f32 of inputs [from, to) of a column of tiles: [inputs / step][16] each.
  void widen_factors(int64_t column, int64_t from, int64_t to, float* scale, float* offset) const {
    const int64_t first = column * (K / group);
    int64_t number = from / group, end = (number + 1) * group;  // counted: divisions take longer
    for (int64_t k = from; k < to; k += step(), scale += OUTPUTS, offset += OUTPUTS) {
      if (k == end) {
        number++;
        end += group;
      }
      UNROLL for (int v = 0; v < VECTORS; v++) {
        const int64_t at = (first + number) * OUTPUTS + v * WIDTH;
        const int64_t super = (column * (K / SUPER) + k / SUPER) * parts * OUTPUTS + v * WIDTH;
        Floats factor = scales.at(at);
        if (supers.data) factor *= supers.half(super);
        store(scale + v * WIDTH, factor);
        if (!has_offsets()) continue;
        Floats more = {};
        if (offsets.data) more = offsets.at(at);
        if (offsets.data && supers.data) more *= supers.half(super + OUTPUTS);
        store(offset + v * WIDTH, more - factor * zero);
      }
    }
  }
};

// --- few rows

// y of R rows and one column of tiles. sums [rows][K / step]: of the activations. A row's sums do
// not depend on R: products of each half of a step are summed for themselves, at once where
// registers allow it, so that a sum does not wait for the one before. All vectors of a tile are
// multiplied by a number before the next one is read: GCC would keep all 32 x R of them on the stack.
template <int R, typename Code, int STEP>
void multiply_column(const Product& call, int64_t row, int64_t column, const float* scale,
                     const float* offset, const float* sums) {
  constexpr int HALF = STEP / 2;
  constexpr bool AT_ONCE = R * VECTORS <= 4;
  const int64_t steps = call.K / STEP;
  const bool offsets = call.has_offsets();
  const uint32_t* tile = call.codes + column * (call.K / INPUTS) * Code::WORDS;
  const float* x = call.x + row * call.K;
  sums += row * steps;
  Floats total[R][VECTORS] = {};
  for (int64_t k = 0; k < call.K; k += INPUTS, tile += Code::WORDS) {
    UNROLL for (int word = 0; word < Code::WORDS; word += 16)
      __builtin_prefetch(tile + 4 * Code::WORDS + word, 0, 3);
    UNROLL for (int part = 0; part < INPUTS / STEP; part++) {
      Floats halves[2][R][VECTORS] = {};
      UNROLL for (int i = 0; i < STEP; i++) {
        const int half = AT_ONCE ? i % 2 : i / HALF;
        const int input = part * STEP + (AT_ONCE ? half * HALF + i / 2 : i);
        Floats numbers[VECTORS];
        UNROLL for (int v = 0; v < VECTORS; v++) numbers[v] = Code::number(tile, input, v);
        UNROLL for (int r = 0; r < R; r++) {
          const Floats one = broadcast(x[r * call.K + k + input]);
          UNROLL for (int v = 0; v < VECTORS; v++) halves[half][r][v] += numbers[v] * one;
        }
      }
      const int64_t at = k / STEP + part;
      UNROLL for (int v = 0; v < VECTORS; v++) {
        const Floats factor = load(scale + at * OUTPUTS + v * WIDTH);
        UNROLL for (int r = 0; r < R; r++)
          total[r][v] += factor * (halves[0][r][v] + halves[1][r][v]);
        if (!offsets) continue;
        const Floats more = load(offset + at * OUTPUTS + v * WIDTH);
        UNROLL for (int r = 0; r < R; r++) total[r][v] += more * sums[r * steps + at];
      }
    }
  }
  UNROLL for (int r = 0; r < R; r++)
    UNROLL for (int v = 0; v < VECTORS; v++)
      store(call.y + (row + r) * call.N + column * OUTPUTS + v * WIDTH, total[r][v]);
}

template <typename Code, int STEP>
void few_rows_of_column(const Product& call, int64_t column, const float* sums) {
  thread_local std::vector<float> factors;
  const int64_t count = call.K / STEP * OUTPUTS;
  factors.resize(2 * count);
  float *scale = factors.data(), *offset = scale + count;
  call.widen_factors(column, 0, call.K, scale, offset);
  for (int64_t t = 0; t < call.T;) {
    auto multiply = [&]<int R>(std::integral_constant<int, R>) {
      multiply_column<R, Code, STEP>(call, t, column, scale, offset, sums);
      t += R;
    };
    const int64_t left = call.T - t;
    if (left >= FEW_TILE) multiply(std::integral_constant<int, FEW_TILE>());
    else if (left >= 4) multiply(std::integral_constant<int, 4>());
    else if (left >= 2) multiply(std::integral_constant<int, 2>());
    else multiply(std::integral_constant<int, 1>());
  }
}

// All products at once; K and N are the same in each.
template <typename Code, int STEP>
void few_rows(const std::vector<Product>& products, const Threads& threads) {
  const int64_t K = products[0].K, columns = products[0].N / OUTPUTS;
  int64_t rows = 0;
  std::vector<int64_t> first;  // row of each product among all
  for (const Product& product : products) {
    first.push_back(rows);
    rows += product.T;
  }
  std::vector<float> sums(products[0].has_offsets() ? rows * (K / STEP) : 0);
  for (size_t i = 0; i < products.size() && !sums.empty(); i++) {
    float* to = sums.data() + first[i] * (K / STEP);
    const float* from = products[i].x;
    for (int64_t at = 0; at < products[i].T * (K / STEP); at++, from += STEP) {
      Floats total = {};
      for (int64_t k = 0; k < STEP; k += WIDTH) total += load(from + k);
      to[at] = sum(total);
    }
  }
  const int64_t all = products.size() * columns;
  const int64_t share = std::max<int64_t>(1, all / (TASKS * threads.count()));
  const bool small = rows * K * columns * OUTPUTS < SMALL;
  threads.run((all + share - 1) / share, small, [&](int64_t task) {
    for (int64_t i = task * share; i < std::min(all, (task + 1) * share); i++) {
      const int64_t number = i / columns;
      few_rows_of_column<Code, STEP>(products[number], i % columns,
                                     sums.data() + (sums.empty() ? 0 : first[number] * (K / STEP)));
    }
  });
}

// --- many rows

constexpr int64_t PANELS = COLUMNS / TILE_COLUMNS;  // of a task
constexpr int64_t COPY = PIECE * TILE_COLUMNS;      // numbers of a widened panel
constexpr int64_t SUMS = ROWS * TILE_COLUMNS;

// Widens inputs [from, from + depth) of `tiles` columns of tiles, from column `first` on, to panels
// [PANELS][PIECE][TILE_COLUMNS].
template <typename Code, int STEP>
void widen(const Product& call, int64_t from, int64_t depth, int64_t first, int64_t tiles,
           float* panels) {
  float scale[PIECE / STEP * OUTPUTS], offset[PIECE / STEP * OUTPUTS] = {};
  for (int64_t column = 0; column < tiles; column++) {
    call.widen_factors(first + column, from, from + depth, scale, offset);
    const int64_t tile = (first + column) * (call.K / INPUTS) + from / INPUTS;
    const uint32_t* codes = call.codes + tile * Code::WORDS;
    for (int64_t k = 0; k < depth; k += INPUTS, codes += Code::WORDS) {
      for (int v = 0; v < VECTORS; v++) {
        const int64_t at = column * OUTPUTS + v * WIDTH;
        float* to = panels + at / TILE_COLUMNS * COPY + k * TILE_COLUMNS + at % TILE_COLUMNS;
        UNROLL for (int part = 0; part < INPUTS / STEP; part++) {
          const int64_t group = (k / STEP + part) * OUTPUTS + v * WIDTH;
          const Floats factor = load(scale + group), more = load(offset + group);
          UNROLL for (int i = part * STEP; i < (part + 1) * STEP; i++)
            store(to + i * TILE_COLUMNS, factor * Code::number(codes, i, v) + more);
        }
      }
    }
  }
}

template <typename Code, int STEP>
void multiply_part(const Product& call, int64_t from, int64_t to, int64_t first, int64_t tiles) {
  thread_local std::vector<float> panels(PANELS * COPY), sums(PANELS * SUMS);
  const bool some = call.any(from, to);
  if (!some) std::fill(sums.begin(), sums.end(), 0.f);
  for (int64_t k = 0; some && k < call.K; k += PIECE) {
    const int64_t depth = std::min(PIECE, call.K - k);
    widen<Code, STEP>(call, k, depth, first, tiles, panels.data());
    for (int64_t panel = 0; panel * TILE_COLUMNS < tiles * OUTPUTS; panel++)
      multiply_panel<FloatPanel>(call, call.x + k, from, to, panels.data() + panel * COPY, depth,
                                 sums.data() + panel * SUMS, k > 0);
  }
  for (int64_t t = from; t < to; t++) {
    float* y = call.y + t * call.N + first * OUTPUTS;
    for (int64_t j = 0; j < tiles * OUTPUTS; j += WIDTH)
      store(y + j, load(sums.data() + j / TILE_COLUMNS * SUMS + (t - from) * TILE_COLUMNS +
                        j % TILE_COLUMNS));
  }
}

template <typename Code, int STEP>
void many_rows(const Product& call, const Threads& threads) {
  constexpr int64_t TILES = COLUMNS / OUTPUTS;
  const int64_t parts = (call.T + ROWS - 1) / ROWS;
  const int64_t rows = ((call.T + parts - 1) / parts + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
  const int64_t columns = call.N / OUTPUTS, panels = (columns + TILES - 1) / TILES;
  threads.run(parts * panels, false, [&](int64_t i) {
    const int64_t from = i / panels * rows, first = i % panels * TILES;
    if (from >= call.T) return;
    multiply_part<Code, STEP>(call, from, std::min(call.T, from + rows), first,
                              std::min(TILES, columns - first));
  });
}

template <typename Code, int STEP>
void multiply(const std::vector<Product>& products, const Threads& threads) {
  std::vector<Product> few;
  for (const Product& product : products) {
    if (product.T > FEW) many_rows<Code, STEP>(product, threads);
    else few.push_back(product);
  }
  if (!few.empty()) few_rows<Code, STEP>(few, threads);
}

// --- calls

// Rows of f32 or bf16 as f32, and results of their type.
struct Rows {
  Rows(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> y)
      : wide_(x.element_type() == ffi::DataType::F32), y_(y->untyped_data()) {
    count_ = y->element_count();
    if (wide_) return;
    widened_.resize(x.element_count());
    narrow_.resize(count_);
    for (size_t i = 0; i < widened_.size(); i++) widened_[i] = widen(((const BF16*)x.untyped_data())[i]);
  }

  const float* in(ffi::AnyBuffer x) const {
    return wide_ ? (const float*)x.untyped_data() : widened_.data();
  }
  float* out() { return wide_ ? (float*)y_ : narrow_.data(); }

  // Writes the results where they are not yet. Their count is a multiple of OUTPUTS.
  void finish() {
    for (int64_t i = 0; !wide_ && i < count_; i += WIDTH)
      store((BF16*)y_ + i, load(narrow_.data() + i));
  }

 private:
  bool wide_;
  void* y_;
  int64_t count_;
  std::vector<float> widened_, narrow_;
};

Factors factors_of(ffi::AnyBuffer buffer) {
  const bool some = buffer.element_count() > 0;
  return {buffer.element_type(), some ? (const char*)buffer.untyped_data() : nullptr};
}

ffi::Error run(const std::vector<Product>& products, int64_t bits, int64_t mantissa,
               const Threads& threads) {
  if (products.empty()) return ffi::Error::Success();
  const bool halves = products[0].step() < INPUTS;
  auto with = [&]<int BITS, int MANTISSA>() {
    if (halves) multiply<Code<BITS, MANTISSA>, 16>(products, threads);
    else multiply<Code<BITS, MANTISSA>, 32>(products, threads);
    return ffi::Error::Success();
  };
  if (bits == 4 && mantissa == 0) return with.template operator()<4, 0>();
  if (bits == 5 && mantissa == 0) return with.template operator()<5, 0>();
  if (bits == 6 && mantissa == 0) return with.template operator()<6, 0>();
  if (bits == 8 && mantissa == 0) return with.template operator()<8, 0>();
  if (bits == 4 && mantissa == 1) return with.template operator()<4, 1>();
  if (bits == 8 && mantissa == 3) return with.template operator()<8, 3>();
  return ffi::Error::InvalidArgument("quantised: codes of another type");
}

// x [T, K] f32 or bf16; codes [E, N / 16, K / 32, bits, 16], scales, offsets (or of no elements)
// [E, N / 16, K / group, 16], supers (or of no elements) [E, N / 16, K / 256, parts, 16]; counts [E],
// or positions [T] or [0] where E is 1 -> y [T, N] like x. The caller has checked shapes and types.
ffi::Error quantised(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Buffer<ffi::U32> codes,
                     ffi::AnyBuffer scales, ffi::AnyBuffer offsets, ffi::AnyBuffer supers,
                     ffi::Buffer<ffi::S32> rows, ffi::Result<ffi::AnyBuffer> y, bool grouped,
                     int64_t zero, int64_t mantissa) {
  const auto shape = codes.dimensions();
  const int64_t T = x.dimensions()[0], K = x.dimensions()[1], bits = shape[3];
  const int64_t E = shape[0], N = shape[1] * OUTPUTS;
  const int64_t groups = scales.dimensions()[2];
  const bool super = supers.element_count() > 0;
  Rows numbers(x, y);
  float* out = numbers.out();
  const Product whole{
      .T = T, .K = K, .N = N,
      .x = numbers.in(x),
      .codes = codes.typed_data(),
      .scales = factors_of(scales), .offsets = factors_of(offsets), .supers = factors_of(supers),
      .group = K / groups,
      .parts = super ? supers.dimensions()[3] : 1,
      .zero = float(mantissa ? 0 : bits == 8 ? zero - 128 : zero),
      .y = out,
      .positions = grouped || !rows.element_count() ? nullptr : rows.typed_data(),
  };
  std::vector<Product> products;
  int64_t from = 0;
  for (int64_t e = 0; e < E; e++) {
    const int64_t count = grouped ? std::clamp<int64_t>(rows.typed_data()[e], 0, T - from) : T;
    if (count == 0) continue;
    Product one = whole;
    auto expert = [&](Factors& factors, int64_t size) {
      if (factors.data) factors.data += e * size;
    };
    one.T = count;
    one.x += from * K;
    one.y += from * N;
    one.codes += e * (codes.element_count() / E);
    expert(one.scales, scales.size_bytes() / E);
    expert(one.offsets, offsets.size_bytes() / E);
    expert(one.supers, supers.size_bytes() / E);
    if (one.any(0, count)) products.push_back(one);
    else std::fill(one.y, one.y + count * N, 0.f);
    from += count;
  }
  std::fill(out + from * N, out + T * N, 0.f);
  const ffi::Error error = run(products, bits, mantissa, Threads(pool));
  numbers.finish();
  return error;
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_quantised, quantised,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::U32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<bool>("grouped")
                                  .Attr<int64_t>("zero")
                                  .Attr<int64_t>("mantissa"));
