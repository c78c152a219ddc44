// ParallelFor: every index once, distinct workers, exceptions, nesting, concurrent callers, fork.
#include "core/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <stdexcept>
#include <thread>
#include <vector>

namespace fenwick {
namespace {

TEST(ThreadPoolTest, RunsEveryIndexOnce) {
  for (const int threads : {1, 2, 5}) {
    for (const std::int64_t n : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> count(n);
      std::atomic<bool> worker_in_range = true;
      ParallelFor(n, threads, [&](std::int64_t i, int worker) {
        ++count[i];
        if (worker < 0 || worker >= threads) worker_in_range = false;
      });
      for (const auto& c : count) ASSERT_EQ(c, 1);
      EXPECT_TRUE(worker_in_range);
    }
  }
}

TEST(ThreadPoolTest, ConcurrentCallsHaveDifferentWorkers) {
  constexpr int kThreads = 4;
  std::vector<std::atomic<int>> busy(kThreads);
  std::atomic<bool> shared = false;
  ParallelFor(400, kThreads, [&](std::int64_t, int worker) {
    if (busy[worker]++ != 0) shared = true;
    std::this_thread::yield();
    --busy[worker];
  });
  EXPECT_FALSE(shared);
}

TEST(ThreadPoolTest, UsesSeveralThreads) {
  // Index 0 waits for index 1: only another thread can run it.
  std::atomic<bool> done = false;
  ParallelFor(2, 2, [&](std::int64_t i, int) {
    if (i == 1) done = true;
    while (i == 0 && !done) std::this_thread::yield();
  });
  EXPECT_TRUE(done);
}

TEST(ThreadPoolTest, ThrowsTheFirstExceptionAndStaysUsable) {
  for (const int threads : {1, 3}) {
    std::atomic<int> calls = 0;
    EXPECT_THROW(ParallelFor(100000, threads,
                             [&](std::int64_t i, int) {
                               ++calls;
                               if (i == 5) throw std::runtime_error("five");
                             }),
                 std::runtime_error);
    EXPECT_LT(calls, 100000);
    std::atomic<int> after = 0;
    ParallelFor(10, threads, [&](std::int64_t, int) { ++after; });
    EXPECT_EQ(after, 10);
  }
}

TEST(ThreadPoolTest, NestedCallsRunInline) {
  std::atomic<int> inner = 0;
  std::atomic<bool> other_thread = false;
  ParallelFor(8, 3, [&](std::int64_t, int) {
    const auto self = std::this_thread::get_id();
    ParallelFor(5, 3, [&](std::int64_t, int worker) {
      ++inner;
      if (worker != 0 || std::this_thread::get_id() != self) other_thread = true;
    });
  });
  EXPECT_EQ(inner, 40);
  EXPECT_FALSE(other_thread);
}

TEST(ThreadPoolTest, CallersOnSeveralThreads) {
  std::atomic<int> total = 0;
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        ParallelFor(20, 3, [&](std::int64_t, int) { ++total; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(total, 4 * 50 * 20);
}

TEST(ThreadPoolTest, WorksInAForkedChild) {
  std::atomic<int> before = 0;
  ParallelFor(10, 2, [&](std::int64_t, int) { ++before; });
  const pid_t child = fork();
  if (child == 0) {
    std::atomic<int> count = 0;
    ParallelFor(100, 2, [&](std::int64_t, int) { ++count; });
    _exit(count == 100 ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace fenwick
