#include "hopper.h"

#include <deque>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "emulator.h"

namespace emulator {
namespace {

constexpr std::uint32_t kSwizzlePeriod = 1024;

// 128-byte swizzle: bits 7-9 of an address are added to bits 4-6.
std::uint32_t Swizzled(std::uint32_t address) { return address ^ ((address >> 7 & 7) << 4); }

// Inside the opaque CUtensorMap; axes from the innermost on, strides in bytes.
struct TensorMap {
  unsigned char* data;
  std::int64_t sizes[4], strides[4];
  int box[4];
  bool swizzle;

  int box_bytes() const { return 2 * box[0] * box[1] * box[2] * box[3]; }

  // Calls f(shared address, element in global memory, its column in the tensor); the element is
  // null where its row lies outside.
  template <typename F>
  void ForEach(std::uint32_t shared, const std::array<int, 4>& at, F&& f) const {
    std::uint32_t address = shared;
    for (int w = 0; w < box[3]; ++w) {
      for (int z = 0; z < box[2]; ++z) {
        for (int y = 0; y < box[1]; ++y) {
          for (int x = 0; x < box[0]; ++x, address += 2) {
            const std::int64_t index[4] = {at[0] + x, at[1] + y, at[2] + z, at[3] + w};
            bool rows_inside = index[0] >= 0;
            for (int axis = 1; axis < 4; ++axis) {
              rows_inside &= index[axis] >= 0 && index[axis] < sizes[axis];
            }
            std::int64_t offset = 0;
            for (int axis = 0; axis < 4; ++axis) offset += index[axis] * strides[axis];
            f(swizzle ? Swizzled(address) : address, rows_inside ? data + offset : nullptr,
              index[0]);
          }
        }
      }
    }
  }
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

TensorMap Open(const CUtensorMap* map) {
  TensorMap opened;
  std::memcpy(&opened, map, sizeof(opened));
  return opened;
}

void CheckTile(const TensorMap& map, std::uint32_t shared) {
  Shared(shared, map.box_bytes(), map.swizzle ? kSwizzlePeriod / 8 : 128);
}

struct Mbarrier {
  std::int32_t bytes;  // still to come in this phase
  std::uint16_t pending;
  std::uint16_t expected : 15;
  std::uint16_t phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

Mbarrier& BarrierAt(std::uint32_t address) {
  return *reinterpret_cast<Mbarrier*>(Shared(address, sizeof(Mbarrier), 8));
}

void Settle(Mbarrier& barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.expected;
  barrier.phase ^= 1;
}

void Arrive(Mbarrier& barrier) {
  if (barrier.pending == 0) Fail("one arrival too many at a barrier");
  --barrier.pending;
  Settle(barrier);
}

int g_loads = 0;  // under way

void Complete(std::uint32_t address, std::uint32_t bytes) {
  Mbarrier& barrier = BarrierAt(address);
  barrier.bytes -= static_cast<std::int32_t>(bytes);
  Settle(barrier);
  --g_loads;
}

void StartLoad(std::uint32_t barrier, std::uint32_t bytes, std::function<void()> perform) {
  ++g_loads;
  Later([=] {
    perform();
    Complete(barrier, bytes);
  });
}

void CheckBytes(const void* global, std::uint32_t bytes) {
  if (bytes % 16 != 0 || reinterpret_cast<std::uintptr_t>(global) % 16 != 0) {
    Fail("a misaligned copy");
  }
}

// A store under way: whoever comes first, chance or a wait, performs it.
struct Store {
  std::function<void()> perform;
  bool done = false;
  void Finish() {
    if (!done) perform();
    done = true;
  }
};

// What a thread has asked for and not yet waited for.
struct Thread {
  std::vector<std::shared_ptr<Store>> stores;
  std::deque<std::vector<std::shared_ptr<Store>>> store_groups;
  std::vector<Wgmma> products;
  std::deque<std::vector<Wgmma>> product_groups;
};
std::map<unsigned, Thread> g_threads;

Thread& This() { return g_threads[threadIdx.x]; }

void StartStore(std::function<void()> perform) {
  const auto store = std::make_shared<Store>(Store{std::move(perform)});
  This().stores.push_back(store);
  Later([store] { store->Finish(); });
}

float Widen(std::uint16_t bits, bool bfloat16) {
  if (bfloat16) return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16);
  return __half2float(std::bit_cast<__half>(bits));
}

// Element of a tile: `major` runs along the rows of 128 bytes, `minor` across them.
float TileElement(std::uint64_t descriptor, int major, int minor, bool bfloat16) {
  const auto field = [descriptor](int shift) {
    return static_cast<std::uint32_t>(descriptor >> shift & 0x3fff) << 4;
  };
  if (descriptor >> 62 != 1) Fail("a tile without the 128-byte swizzle");
  const std::uint32_t address =
      field(0) + major / 64 * field(16) + minor / 8 * field(32) + minor % 8 * 128 + major % 64 * 2;
  std::uint16_t bits;
  std::memcpy(&bits, Shared(Swizzled(address), 2, 2), 2);
  return Widen(bits, bfloat16);
}

// The calling lane's part; lane l of the warp holds fragments[l].
void Multiply(const Wgmma& product, const std::array<std::array<std::uint32_t, 4>, 32>& fragments) {
  const int lane = Lane(), warp = Warp() % 4;
  float a[2][16];
  for (int half = 0; half < 2; ++half) {
    const int row = 16 * warp + lane / 4 + 8 * half;
    for (int k = 0; k < 16; ++k) {
      if (product.registers) {
        const std::uint32_t pair = fragments[lane / 4 * 4 + k % 8 / 2][half + (k >= 8 ? 2 : 0)];
        a[half][k] = Widen(static_cast<std::uint16_t>(pair >> 16 * (k % 2)), product.bfloat16);
      } else {
        a[half][k] = product.transpose_a ? TileElement(product.a, row, k, product.bfloat16)
                                         : TileElement(product.a, k, row, product.bfloat16);
      }
    }
  }
  for (int n = 0; n < product.columns / 8; ++n) {
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * n + 2 * (lane % 4) + i;
      float sums[2] = {};
      for (int k = 0; k < 16; ++k) {
        const float b = product.transpose_b ? TileElement(product.b, column, k, product.bfloat16)
                                            : TileElement(product.b, k, column, product.bfloat16);
        sums[0] += a[0][k] * b;
        sums[1] += a[1][k] * b;
      }
      for (int half = 0; half < 2; ++half) {
        float& d = product.d[4 * n + 2 * half + i];
        d = (product.accumulate ? d : 0.f) + sums[half];
      }
    }
  }
}

bool g_products_at_once = false;

// The products of this thread's groups begin .. end - 1, once.
void Perform(std::size_t begin, std::size_t end) {
  SyncWarp();  // all lanes have asked for their parts
  auto& groups = This().product_groups;
  const int first = Warp() * kWarp;
  for (std::size_t group = begin; group < end; ++group) {
    for (std::size_t i = 0; i < groups[group].size(); ++i) {
      std::array<std::array<std::uint32_t, 4>, 32> fragments;
      for (int lane = 0; lane < kWarp; ++lane) {
        fragments[lane] = g_threads[first + lane].product_groups[group][i].fragment;
      }
      Multiply(groups[group][i], fragments);
    }
  }
  SyncWarp();  // and have seen those of the others
  for (std::size_t group = begin; group < end; ++group) groups[group].clear();
}

}  // namespace

CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* address,
                     const cuuint64_t* sizes, const cuuint64_t* strides, const cuuint32_t* box,
                     const cuuint32_t* element_strides, CUtensorMapInterleave,
                     CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap opened{};
  opened.data = static_cast<unsigned char*>(address);
  opened.swizzle = swizzle == CU_TENSOR_MAP_SWIZZLE_128B;
  bool valid = rank == 4 && reinterpret_cast<std::uintptr_t>(address) % 16 == 0 &&
               box[0] * 2 % 16 == 0 && (!opened.swizzle || box[0] * 2 <= 128);
  for (int axis = 0; axis < 4; ++axis) {
    opened.sizes[axis] = static_cast<std::int64_t>(sizes[axis]);
    opened.strides[axis] = axis == 0 ? 2 : static_cast<std::int64_t>(strides[axis - 1]);
    opened.box[axis] = static_cast<int>(box[axis]);
    valid &= sizes[axis] >= 1 && sizes[axis] <= std::uint64_t{1} << 32 && box[axis] >= 1 &&
             box[axis] <= 256 && element_strides[axis] == 1;
    if (axis > 0)
      valid &= strides[axis - 1] % 16 == 0 && strides[axis - 1] < std::uint64_t{1} << 40;
  }
  if (!valid) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &opened, sizeof(opened));
  return CUDA_SUCCESS;
}

void LoadTile(std::uint32_t shared, const CUtensorMap* map, std::uint32_t barrier,
              const std::array<int, 4>& at) {
  const TensorMap tensor = Open(map);
  CheckTile(tensor, shared);
  StartLoad(barrier, tensor.box_bytes(), [=] {
    tensor.ForEach(shared, at, [&](std::uint32_t to, const void* from, std::int64_t column) {
      std::uint16_t bits = 0;
      if (from != nullptr && column < tensor.sizes[0]) std::memcpy(&bits, from, 2);
      std::memcpy(Shared(to, 2, 2), &bits, 2);
    });
  });
}

void StoreTile(const CUtensorMap* map, std::uint32_t shared, const std::array<int, 4>& at) {
  const TensorMap tensor = Open(map);
  CheckTile(tensor, shared);
  StartStore([=] {
    // Like an H200: whole groups of 16 bytes, also where a row ends inside one.
    const std::int64_t end = (tensor.sizes[0] + 7) / 8 * 8;
    tensor.ForEach(shared, at, [&](std::uint32_t from, void* to, std::int64_t column) {
      if (to != nullptr && column < end) std::memcpy(to, Shared(from, 2, 2), 2);
    });
  });
}

void LoadBytes(std::uint32_t shared, const void* global, std::uint32_t bytes,
               std::uint32_t barrier) {
  CheckBytes(global, bytes);
  StartLoad(barrier, bytes, [=] { std::memcpy(Shared(shared, bytes, 16), global, bytes); });
}

void StoreBytes(void* global, std::uint32_t shared, std::uint32_t bytes) {
  CheckBytes(global, bytes);
  StartStore([=] { std::memcpy(global, Shared(shared, bytes, 16), bytes); });
}

void CommitStores() {
  This().store_groups.push_back(std::move(This().stores));
  This().stores.clear();
}

void WaitStores(int pending) {
  auto& groups = This().store_groups;
  while (static_cast<int>(groups.size()) > pending) {
    for (const auto& store : groups.front()) store->Finish();
    groups.pop_front();
  }
}

void BarrierInit(std::uint32_t barrier, std::uint32_t arrivals) {
  BarrierAt(barrier) = {0, static_cast<std::uint16_t>(arrivals),
                        static_cast<std::uint16_t>(arrivals), 0};
}

void BarrierArrive(std::uint32_t barrier) { Arrive(BarrierAt(barrier)); }

void BarrierExpect(std::uint32_t barrier, std::uint32_t bytes) {
  BarrierAt(barrier).bytes += static_cast<std::int32_t>(bytes);
  Arrive(BarrierAt(barrier));
}

void BarrierWait(std::uint32_t barrier, std::uint32_t parity) {
  WaitUntil([=] { return BarrierAt(barrier).phase != parity; });
}

void WgmmaStart(const Wgmma& product) { This().products.push_back(product); }

void WgmmaCommit() {
  This().product_groups.push_back(std::move(This().products));
  This().products.clear();
  if (g_products_at_once) Perform(This().product_groups.size() - 1, This().product_groups.size());
}

void WgmmaWait(int pending) {
  auto& groups = This().product_groups;
  const int ready = std::max(0, static_cast<int>(groups.size()) - pending);
  Perform(0, ready);
  groups.erase(groups.begin(), groups.begin() + ready);
}

void EndBlock() {
  if (g_loads != 0) Fail("the block ended before its loads did");
  for (const auto& [index, thread] : g_threads) {
    if (!thread.stores.empty() || !thread.store_groups.empty()) Fail("stores were not waited for");
    if (!thread.products.empty() || !thread.product_groups.empty()) {
      Fail("products were not waited for");
    }
  }
  g_threads.clear();
  g_products_at_once = Random() % 2 == 0;
}

}  // namespace emulator
