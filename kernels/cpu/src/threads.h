// Loops over the threads of XLA's own pool; no thread is started here.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#include "xla/ffi/api/ffi.h"

// The threads that one call of a kernel may use: this one, and as many of the pool's as there are
// cores that no other call uses. The pool has a thread for each device, of which there may be more
// than cores: calls that all shared their work would only take turns.
class Threads {
 public:
  explicit Threads(xla::ffi::ThreadPool& pool)
      : pool_(pool), count_(std::clamp<int64_t>(cores() - calls_++, 1, pool.num_threads())) {}
  ~Threads() { calls_--; }
  Threads(const Threads&) = delete;

  int64_t count() const { return count_; }

  // The most that any call may use.
  int64_t most() const { return std::min<int64_t>(cores(), pool_.num_threads()); }

  // Calls task(0) to task(count - 1), each once; small: on this thread, as others would cost more.
  //
  // Only tasks that have begun are waited for. A thread that comes late finds none left and does
  // not touch `task`: kernels of several devices that share the pool cannot wait for each other.
  template <typename Task>
  void run(int64_t count, bool small, const Task& task) const {
    const int64_t threads = small ? 1 : std::min(count, count_);
    if (threads <= 1) {
      for (int64_t i = 0; i < count; i++) task(i);
      return;
    }
    auto progress = std::make_shared<Progress>();
    auto work = [progress, count, &task] {
      for (int64_t i; (i = progress->begun.fetch_add(1, std::memory_order_relaxed)) < count;) {
        task(i);
        const int64_t done = progress->done.fetch_add(1, std::memory_order_acq_rel) + 1;
        if (done == count) progress->done.notify_all();
      }
    };
    for (int64_t i = 1; i < threads; i++) pool_.Schedule([work] { work(); });
    work();
    for (int spins = 0;; spins++) {
      const int64_t done = progress->done.load(std::memory_order_acquire);
      if (done == count) return;
      if (spins > SPINS) progress->done.wait(done, std::memory_order_acquire);
    }
  }

 private:
  static constexpr int SPINS = 2000;  // before this thread sleeps: waking takes as long

  struct Progress {
    std::atomic<int64_t> begun{0};
    std::atomic<int64_t> done{0};
  };

  static int64_t cores() {
    static const int64_t found = std::max(1u, std::thread::hardware_concurrency());
    return found;
  }

  static inline std::atomic<int64_t> calls_{0};  // that run now
  xla::ffi::ThreadPool& pool_;
  const int64_t count_;
};
