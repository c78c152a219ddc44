// See thread_pool.h. Threads sleep between calls; indices are handed out by one atomic counter.
#include "core/thread_pool.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fenwick {
namespace {

using Body = std::function<void(std::int64_t, int)>;

// One ParallelFor call.
struct Job {
  const Body* fn = nullptr;
  std::int64_t n = 0;
  std::atomic<std::int64_t> next{0};
  std::mutex error_mutex;
  std::exception_ptr error;

  void Work(int worker) {
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        (*fn)(i, worker);
      }
    } catch (...) {
      next.store(n, std::memory_order_relaxed);
      std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }
};

thread_local bool t_inside = false;  // this thread runs an fn

class Pool {
 public:
  ~Pool() {
    {
      std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  // False where another thread holds the pool; then nothing was run.
  bool TryRun(Job& job, int num_threads) {
    std::unique_lock busy(busy_, std::try_to_lock);
    if (!busy.owns_lock()) return false;
    Grow(num_threads - 1);
    {
      std::lock_guard lock(mutex_);
      job_ = &job;
      helpers_ = num_threads - 1;
      ++generation_;
    }
    wake_.notify_all();
    t_inside = true;
    job.Work(0);
    t_inside = false;
    // No index is left: a helper that has not woken up yet is not waited for.
    std::unique_lock lock(mutex_);
    job_ = nullptr;
    done_.wait(lock, [&] { return running_ == 0; });
    return true;
  }

 private:
  // As far as the system lets it: with fewer threads the same work takes longer.
  void Grow(int count) {
    while (static_cast<int>(threads_.size()) < count) {
      const int worker = static_cast<int>(threads_.size()) + 1;
      std::lock_guard lock(mutex_);
      try {
        threads_.emplace_back([this, worker, seen = generation_] { Loop(worker, seen); });
      } catch (const std::system_error&) {
        return;
      }
    }
  }

  void Loop(int worker, std::uint64_t seen) {
    t_inside = true;
    std::unique_lock lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return stop_ || generation_ != seen; });
      if (stop_) return;
      seen = generation_;
      if (job_ == nullptr || worker > helpers_) continue;
      Job* job = job_;
      ++running_;
      lock.unlock();
      job->Work(worker);
      lock.lock();
      if (--running_ == 0) done_.notify_one();
    }
  }

  std::mutex busy_;   // held by the caller whose job runs
  std::mutex mutex_;  // guards all below
  std::condition_variable wake_, done_;
  std::vector<std::thread> threads_;  // threads_[i] is worker i + 1
  Job* job_ = nullptr;
  int helpers_ = 0;  // workers 1..helpers_ take part in the job
  int running_ = 0;  // of them, at work
  std::uint64_t generation_ = 0;
  bool stop_ = false;
};

// The pool of this process. A forked child has none of its parent's threads: it leaves the old pool
// alone and makes a new one.
Pool& ProcessPool() {
  struct Slot {
    std::mutex mutex;
    Pool* pool = nullptr;
    pid_t pid = 0;
    ~Slot() {
      if (pid == getpid()) delete pool;
    }
  };
  static Slot slot;
  std::lock_guard lock(slot.mutex);
  if (slot.pid != getpid()) {
    slot.pool = new Pool;
    slot.pid = getpid();
  }
  return *slot.pool;
}

}  // namespace

void ParallelFor(std::int64_t n, int num_threads, const Body& fn) {
  num_threads = static_cast<int>(std::min<std::int64_t>(num_threads, n));
  if (num_threads > 1 && !t_inside) {
    Job job;
    job.fn = &fn;
    job.n = n;
    if (ProcessPool().TryRun(job, num_threads)) {
      if (job.error) std::rethrow_exception(job.error);
      return;
    }
  }
  for (std::int64_t i = 0; i < n; ++i) fn(i, 0);
}

}  // namespace fenwick
