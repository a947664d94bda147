// Attention over pages for CPUs, as kernels/reference.py defines it: flash attention on XLA's own
// threads. Called by kernels/cpu/attention.py.

#include "decode.h"
#include "query_tile.h"
#include "threads.h"

namespace ffi = xla::ffi;

namespace {

constexpr int64_t PART = 1024;              // keys of a decode task
constexpr int64_t CACHE_BYTES = 256 << 10;  // of query tiles that share a task: half a core's cache
constexpr int64_t TASKS_PER_THREAD = 4;     // of prefill, so that threads end together
constexpr int64_t SMALL = int64_t(1) << 17;  // numbers of keys below which one thread does all

// Attention of some query tiles of a row and kv head, which take turns with each batch of keys.
struct PrefillTask {
  int64_t row, head;
  int64_t from, to;  // queries, as QueryTile counts them

  void run(const Attention& call) const {
    thread_local std::vector<QueryTile> tiles;
    tiles.resize((to - from + TILE_COLUMNS - 1) / TILE_COLUMNS);
    int64_t at = from, first = std::numeric_limits<int64_t>::max(), last = -1;
    for (QueryTile& tile : tiles) {
      tile.start(call, row, head, at, std::min(at + TILE_COLUMNS, to));
      at += TILE_COLUMNS;
      first = std::min(first, tile.first());
      last = std::max(last, tile.last());
    }
    const int64_t entries = last < 0 ? 0 : call.entries_of(row);
    const int64_t seen = call.first_position_seen(first);
    KeyReader keys(call, row, head, 0, entries, seen, last, tiles.size() > 1);
    KeyBatch batch;
    while (keys.next(batch))
      for (QueryTile& tile : tiles)
        if (tile.sees(batch)) tile.attend(batch);
    for (const QueryTile& tile : tiles) tile.write();
  }
};

// How queries are dealt to tasks does not depend on other rows or calls, and neither do results.
void run_prefill(const Attention& call, const Threads& threads) {
  const int64_t queries = call.T * call.G;
  const int64_t tiles = (queries + TILE_COLUMNS - 1) / TILE_COLUMNS;
  const int64_t fit = CACHE_BYTES / QueryTile::bytes(call);
  const int64_t fair = tiles * call.K / (TASKS_PER_THREAD * threads.most());
  const int64_t step = std::max<int64_t>(1, std::min(fit, fair)) * TILE_COLUMNS;
  const int64_t steps = (queries + step - 1) / step;
  threads.run(call.R * steps * call.K, false, [&](int64_t i) {
    const int64_t from = (steps - 1 - i / call.K % steps) * step;  // the longest first
    const int64_t row = i / call.K / steps;
    PrefillTask{row, i % call.K, from, std::min(from + step, queries)}.run(call);
  });
}

void run_decode(const Attention& call, const Threads& threads) {
  std::vector<DecodeTask> tasks;
  std::vector<int64_t> first;  // task of each row and kv head
  const int64_t step = std::max<int64_t>(1, PART / call.C);
  int64_t numbers = 0;
  for (int64_t row = 0; row < call.R; row++) {
    const int64_t last = call.q_pos[row], held = last < 0 ? 0 : call.entries_of(row);
    const int32_t* blocks = call.blocks_of(row);
    auto seen = [&](int32_t block) { return call.start(block) <= last; };
    const int64_t to = std::partition_point(blocks, blocks + held, seen) - blocks;
    const int64_t from = call.first_entry(row, 0, to, call.first_position_seen(last));
    numbers += (to - from) * call.C * call.K * call.G * call.H;
    for (int64_t head = 0; head < call.K; head++) {
      first.push_back(tasks.size());
      for (int64_t at = from; at < to; at += step)
        tasks.emplace_back(call, row, head, at, std::min(at + step, to));
    }
  }
  first.push_back(tasks.size());
  std::vector<PartialAttention> parts(tasks.size());
  const bool small = numbers < SMALL;
  threads.run(tasks.size(), small, [&](int64_t i) { parts[i] = tasks[i].run(); });
  threads.run(call.R * call.K, small, [&](int64_t i) {
    merge_parts(call, i / call.K, i % call.K, parts.data() + first[i], first[i + 1] - first[i]);
  });
}

Numbers numbers_of(ffi::AnyBuffer buffer) {
  const ffi::DataType type = buffer.element_type();
  const Number number = type == ffi::DataType::F32    ? Number::F32
                        : type == ffi::DataType::BF16 ? Number::BF16
                                                      : Number::FP8;
  return {number, (char*)buffer.untyped_data()};
}

// q [R, T, K, G, H], q_pos [R, T], kv [P, K, vectors, C, H], scales [P, K, vectors, C] (or of no
// elements), table [2, slots, W], slot [R], entries [R] -> out [R, T, K, G, V], lse [R, T, K, G].
// The caller has checked shapes and types.
ffi::Error attend(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::Buffer<ffi::S32> q_pos,
                  ffi::AnyBuffer kv, ffi::Buffer<ffi::BF16> scales, ffi::Buffer<ffi::S32> table,
                  ffi::Buffer<ffi::S32> slot, ffi::Buffer<ffi::S32> entries,
                  ffi::Result<ffi::AnyBuffer> out, ffi::ResultBuffer<ffi::F32> lse, float scale,
                  int64_t window, float softcap) {
  const auto queries = q.dimensions(), pages = kv.dimensions(), rows = table.dimensions();
  const int64_t values = out->dimensions()[4];
  if (queries[4] % WIDTH || values % WIDTH)
    return ffi::Error::InvalidArgument("attend: a head or value dim does not fit the vectors");
  Attention call{
      .R = queries[0],
      .T = queries[1],
      .K = queries[2],
      .G = queries[3],
      .H = queries[4],
      .P = pages[0],
      .C = pages[3],
      .slots = rows[1],
      .W = rows[2],
      .V = values,
      .vectors = pages[2],
      .window = window,
      .scale = softcap ? softcap : scale,
      .inner = softcap ? scale / softcap : 0,
      .q = numbers_of(q),
      .kv = numbers_of(kv),
      .out = numbers_of(*out),
      .kv_scales =
          scales.element_count() ? (const BF16*)scales.untyped_data() : nullptr,
      .q_pos = q_pos.typed_data(),
      .table = table.typed_data(),
      .slot = slot.typed_data(),
      .entries = entries.typed_data(),
      .lse = lse->typed_data(),
  };
  const Threads threads(pool);
  if (call.T == 1)
    run_decode(call, threads);
  else
    run_prefill(call, threads);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxserve_attention, attend,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::BF16>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<float>("scale")
                                  .Attr<int64_t>("window")
                                  .Attr<float>("softcap"));
