// Loops over the threads of XLA's own pool; no thread is started here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>

#include "xla/ffi/api/ffi.h"

// Calls task(0) to task(count - 1), each once, on XLA's threads and this one.
//
// Only tasks that have begun are waited for. A thread that comes late finds none left and does not
// touch `task`: kernels of several devices that share the pool cannot wait for each other.
template <typename Task>
void parallel(xla::ffi::ThreadPool& pool, int64_t count, const Task& task) {
  constexpr int SPINS = 2000;  // before this thread sleeps: waking costs more than the last task
  const int64_t threads = std::min(count, pool.num_threads());
  if (threads <= 1) {
    for (int64_t i = 0; i < count; i++) task(i);
    return;
  }
  struct Progress {
    std::atomic<int64_t> begun{0};
    std::atomic<int64_t> done{0};
  };
  auto progress = std::make_shared<Progress>();
  auto work = [progress, count, &task] {
    for (int64_t i; (i = progress->begun.fetch_add(1, std::memory_order_relaxed)) < count;) {
      task(i);
      const int64_t done = progress->done.fetch_add(1, std::memory_order_acq_rel) + 1;
      if (done == count) progress->done.notify_all();
    }
  };
  for (int64_t i = 1; i < threads; i++) pool.Schedule([work] { work(); });
  work();
  for (int spins = 0;; spins++) {
    const int64_t done = progress->done.load(std::memory_order_acquire);
    if (done == count) return;
    if (spins > SPINS) progress->done.wait(done, std::memory_order_acquire);
  }
}
