#include "emulator.h"

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <numeric>
#include <random>
#include <stdexcept>
#include <vector>

namespace emulator {
namespace {

constexpr std::size_t kStackBytes = 256 << 10;
constexpr int kWarp = 32;

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
  const Barrier* waits = nullptr;  // at this barrier, for its generation to pass
  std::uint64_t generation = 0;
};

ucontext_t g_unused;
jmp_buf g_scheduler;
std::vector<Fiber> g_fibers;
std::vector<Barrier> g_warp_barriers;
std::vector<std::uint64_t> g_lanes;
std::vector<unsigned char> g_shared;
Barrier g_block_barrier;
int g_current = 0, g_live = 0;
const std::function<void()>* g_body = nullptr;

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
  Fiber& fiber = g_fibers[g_current];
  fiber.waits = &barrier;
  fiber.generation = generation;
  Yield();
  fiber.waits = nullptr;
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
  fiber.waits = nullptr;
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

}  // namespace

void SyncThreads() { Wait(g_block_barrier, g_live); }
void SyncWarp() { Wait(g_warp_barriers[g_current / kWarp], LiveLanes()); }

std::uint64_t Exchange(std::uint64_t value, int source) {
  const int warp = g_current / kWarp * kWarp;
  g_lanes[g_current] = value;
  SyncWarp();
  const std::uint64_t result = g_lanes[warp + source];
  SyncWarp();
  return result;
}

unsigned char* SharedMemory() { return g_shared.data(); }

void Run(std::int64_t blocks, int threads, std::size_t shared_bytes,
         const std::function<void()>& body) {
  if (static_cast<int>(g_fibers.size()) < threads) g_fibers.resize(threads);
  g_warp_barriers.assign((threads + kWarp - 1) / kWarp, Barrier{});
  g_lanes.assign(threads + kWarp, 0);
  g_shared.assign(shared_bytes + 64, 0xff);
  g_body = &body;
  blockDim = dim3(threads);
  gridDim = dim3(static_cast<unsigned>(blocks));
  static std::mt19937 random;
  std::vector<int> order(threads);
  for (std::int64_t block = 0; block < blocks; ++block) {
    blockIdx = uint3{static_cast<unsigned>(block), 0, 0};
    g_block_barrier = Barrier{};
    g_live = threads;
    for (int i = 0; i < threads; ++i) Prepare(g_fibers[i]);
    std::iota(order.begin(), order.end(), 0);
    while (g_live > 0) {
      bool progress = false;
      std::shuffle(order.begin(), order.end(), random);
      for (const int i : order) {
        const Fiber& fiber = g_fibers[i];
        if (fiber.done || (fiber.waits && fiber.waits->generation == fiber.generation)) continue;
        progress = true;
        g_current = i;
        threadIdx = uint3{static_cast<unsigned>(i), 0, 0};
        Resume(g_fibers[i]);
      }
      if (!progress) throw std::logic_error("emulator: deadlock in a block");
    }
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
    const float mine = i < 4 ? a[i] : b[i - 4];
    std::uint64_t bits = 0;
    std::memcpy(&bits, &mine, sizeof(mine));
    const int warp = g_current / kWarp * kWarp;
    g_lanes[g_current] = bits;
    SyncWarp();
    for (int l = 0; l < kWarp; ++l) {
      float value;
      std::memcpy(&value, &g_lanes[warp + l], sizeof(value));
      (i < 4 ? from_a[i] : from_b[i - 4])[l] = value;
    }
    SyncWarp();
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
