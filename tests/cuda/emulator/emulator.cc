#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace emulator {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr int kNamedBarriers = 16;

struct Barrier {
  int arrived = 0;
  std::uint64_t generation = 0;
};

// A fiber is entered through ucontext once; all later switches are _longjmp, which unlike
// swapcontext makes no system calls.
struct Fiber {
  ucontext_t entry;
  jmp_buf resume;
  std::vector<char> stack;
  bool started = false, done = false;
  const std::function<bool()>* ready = nullptr;  // where it waits
};

ucontext_t g_unused;
jmp_buf g_scheduler;
std::vector<Fiber> g_fibers;
std::vector<Barrier> g_warp_barriers;
Barrier g_named_barriers[kNamedBarriers];
Barrier g_block_barrier;
std::vector<std::uint64_t> g_lanes;
struct alignas(64) Line {
  unsigned char bytes[64];
};
std::vector<Line> g_shared;
std::size_t g_shared_bytes = 0;
struct Delayed {
  std::function<void()> operation;
  unsigned delay;  // turns, about
};
std::vector<Delayed> g_later;
std::mt19937 g_random;
int g_current = 0, g_live = 0;
const std::function<void()>* g_body = nullptr;

unsigned Draw(auto... values) {
  const unsigned all[] = {static_cast<unsigned>(values)...};
  return all[g_random() % sizeof...(values)];
}

void Yield() {
  if (_setjmp(g_fibers[g_current].resume) == 0) _longjmp(g_scheduler, 1);
}

// This and Prepare are not inlined: nothing of a caller lives in registers that a jump restores.
[[gnu::noinline]] void Resume(Fiber& fiber) {
  if (_setjmp(g_scheduler) != 0) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.entry);
}

void Wait(Barrier& barrier, int expected) {
  const std::uint64_t generation = barrier.generation;
  if (++barrier.arrived == expected) {
    barrier.arrived = 0;
    ++barrier.generation;
    return;
  }
  WaitUntil([&barrier, generation] { return barrier.generation != generation; });
}

void Enter() {
  (*g_body)();
  g_fibers[g_current].done = true;
  --g_live;
  _longjmp(g_scheduler, 1);
}

[[gnu::noinline]] void Prepare(Fiber& fiber) {
  if (fiber.stack.empty()) fiber.stack.resize(kStackBytes);
  fiber.started = fiber.done = false;
  fiber.ready = nullptr;
  getcontext(&fiber.entry);
  fiber.entry.uc_stack.ss_sp = fiber.stack.data();
  fiber.entry.uc_stack.ss_size = fiber.stack.size();
  fiber.entry.uc_link = &g_unused;
  makecontext(&fiber.entry, Enter, 0);
}

int LiveLanes() {
  const int begin = g_current / kWarp * kWarp;
  const int end = std::min<int>(begin + kWarp, static_cast<int>(blockDim.x));
  int live = 0;
  for (int i = begin; i < end; ++i) live += !g_fibers[i].done;
  return live;
}

void RunLater(std::size_t i) {
  const std::function<void()> operation = std::move(g_later[i].operation);
  g_later[i] = std::move(g_later.back());
  g_later.pop_back();
  operation();
}

}  // namespace

void Fail(const char* what) {
  std::fprintf(stderr, "emulator: thread %u of block %u: %s\n", threadIdx.x, blockIdx.x, what);
  std::abort();
}

void WaitUntil(const std::function<bool()>& ready) {
  if (ready()) return;
  Fiber& fiber = g_fibers[g_current];
  fiber.ready = &ready;
  Yield();
  fiber.ready = nullptr;
}

void SyncThreads() { Wait(g_block_barrier, g_live); }
void SyncWarp() { Wait(g_warp_barriers[g_current / kWarp], LiveLanes()); }
void NamedBarrier(int id, int threads) { Wait(g_named_barriers[id], threads); }
unsigned Random() { return static_cast<unsigned>(g_random()); }
void Later(std::function<void()> operation) {
  g_later.push_back({std::move(operation), Draw(1, 4, 64, 1024)});
}

std::array<std::uint64_t, kWarp> Gather(std::uint64_t value) {
  g_lanes[g_current] = value;
  SyncWarp();
  std::array<std::uint64_t, kWarp> all;
  std::copy_n(g_lanes.begin() + g_current / kWarp * kWarp, kWarp, all.begin());
  SyncWarp();
  return all;
}

unsigned char* SharedMemory() { return g_shared.data()->bytes + kSharedStart; }

unsigned char* Shared(std::uint32_t address, std::uint32_t bytes, std::uint32_t alignment) {
  if (address % alignment != 0) Fail("misaligned access of shared memory");
  if (address < kSharedStart || address + bytes > kSharedStart + g_shared_bytes) {
    Fail("access outside of shared memory");
  }
  return g_shared.data()->bytes + address;
}

void Run(std::int64_t blocks, int threads, std::size_t shared_bytes,
         const std::function<void()>& body) {
  if (static_cast<int>(g_fibers.size()) < threads) g_fibers.resize(threads);
  g_warp_barriers.assign((threads + kWarp - 1) / kWarp, Barrier{});
  g_lanes.assign(threads + kWarp, 0);
  g_shared.resize((kSharedStart + shared_bytes) / sizeof(Line) + 1);
  std::memset(g_shared.data(), 0xff, g_shared.size() * sizeof(Line));
  g_shared_bytes = shared_bytes;
  g_body = &body;
  blockDim = dim3(threads);
  gridDim = dim3(static_cast<unsigned>(blocks));
  std::vector<int> order(threads);
  std::vector<unsigned> slowness(g_warp_barriers.size());  // a warp takes part in one turn of ...
  std::vector<bool> sleeps(slowness.size());
  for (std::int64_t block = 0; block < blocks; ++block) {
    blockIdx = uint3{static_cast<unsigned>(block), 0, 0};
    g_block_barrier = Barrier{};
    std::fill(std::begin(g_named_barriers), std::end(g_named_barriers), Barrier{});
    g_live = threads;
    for (int i = 0; i < threads; ++i) Prepare(g_fibers[i]);
    const unsigned together = Draw(1, 4, 4);  // warps of one speed
    for (std::size_t i = 0; i < slowness.size(); ++i) {
      slowness[i] = i % together == 0 ? Draw(1, 1, 8, 256) : slowness[i - 1];
    }
    std::iota(order.begin(), order.end(), 0);
    int wake = 0;  // how much faster than usual slow warps are, as nobody else can go on
    while (g_live > 0) {
      for (std::size_t i = 0; i < sleeps.size(); ++i) {
        sleeps[i] = g_random() % std::max(1u, slowness[i] >> 2 * wake) != 0;
      }
      bool progress = false;
      std::shuffle(order.begin(), order.end(), g_random);
      for (const int i : order) {
        const Fiber& fiber = g_fibers[i];
        if (sleeps[i / kWarp] || fiber.done || (fiber.ready && !(*fiber.ready)())) continue;
        progress = true;
        g_current = i;
        threadIdx = uint3{static_cast<unsigned>(i), 0, 0};
        Resume(g_fibers[i]);
      }
      bool copied = false;
      for (std::size_t i = g_later.size(); i-- > 0;) {
        const bool last_resort = !progress && !copied && Draw(0, 1) == 0;
        if (!last_resort && g_random() % g_later[i].delay != 0) continue;
        RunLater(i);
        copied = true;
      }
      if (progress || copied) {
        wake = 0;
      } else if (wake < 4) {
        ++wake;
      } else if (g_later.empty()) {
        throw std::logic_error("emulator: deadlock in a block");
      }
    }
    EndBlock();
    g_later.clear();
  }
}

float RoundTf32(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7f800000u) != 0x7f800000u) bits = (bits + 0x1000u) & ~0x1fffu;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

void MmaTf32(float* c, const float* a, const float* b) {
  float all_a[16][8], all_b[8][8];
  const int lane = Lane();
  float from_a[4][kWarp], from_b[2][kWarp];
  for (int i = 0; i < 6; ++i) {
    const auto all = Gather(std::bit_cast<std::uint32_t>(i < 4 ? a[i] : b[i - 4]));
    for (int l = 0; l < kWarp; ++l) {
      (i < 4 ? from_a[i] : from_b[i - 4])[l] =
          std::bit_cast<float>(static_cast<std::uint32_t>(all[l]));
    }
  }
  for (int l = 0; l < kWarp; ++l) {
    all_a[l / 4][l % 4] = from_a[0][l];
    all_a[l / 4 + 8][l % 4] = from_a[1][l];
    all_a[l / 4][l % 4 + 4] = from_a[2][l];
    all_a[l / 4 + 8][l % 4 + 4] = from_a[3][l];
    all_b[l % 4][l / 4] = from_b[0][l];
    all_b[l % 4 + 4][l / 4] = from_b[1][l];
  }
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
    for (int d = 0; d < 8; ++d) c[i] += all_a[row][d] * all_b[d][column];
  }
}

}  // namespace emulator
