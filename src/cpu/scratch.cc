#include "cpu/scratch.h"

#include <algorithm>
#include <new>
#include <vector>

namespace fenwick::cpu {
namespace {

constexpr std::size_t kFirstBlock = std::size_t{1} << 20;

struct Block {
  std::byte* data;
  std::size_t size;
};

struct Stack {
  std::vector<Block> blocks;
  std::size_t block = 0;   // index of the block in use
  std::size_t offset = 0;  // bytes of it in use
  int scopes = 0;

  ~Stack() { Free(); }

  void Free() {
    for (const Block& b : blocks) ::operator delete (b.data, std::align_val_t{Scratch::kAlignment});
    blocks.clear();
    block = offset = 0;
  }
};

thread_local Stack t_stack;

}  // namespace

Scratch::Scratch() : block_(t_stack.block), offset_(t_stack.offset) { ++t_stack.scopes; }

Scratch::~Scratch() {
  t_stack.block = block_;
  t_stack.offset = offset_;
  // Several blocks were needed: one of their total size takes their place next time.
  if (--t_stack.scopes == 0 && t_stack.blocks.size() > 1) {
    std::size_t total = 0;
    for (const Block& b : t_stack.blocks) total += b.size;
    t_stack.Free();
    try {
      Scratch again;
      again.Bytes(total);
    } catch (const std::bad_alloc&) {
    }
  }
}

void* Scratch::Bytes(std::size_t bytes) {
  Stack& stack = t_stack;
  bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  while (stack.block < stack.blocks.size() &&
         stack.blocks[stack.block].size - stack.offset < bytes) {
    ++stack.block;
    stack.offset = 0;
  }
  if (stack.block == stack.blocks.size()) {
    const std::size_t size =
        std::max({bytes, kFirstBlock, stack.blocks.empty() ? 0 : 2 * stack.blocks.back().size});
    void* data = ::operator new (size, std::align_val_t{kAlignment});
    stack.blocks.push_back({static_cast<std::byte*>(data), size});
    stack.offset = 0;
  }
  void* result = stack.blocks[stack.block].data + stack.offset;
  stack.offset += bytes;
  return result;
}

}  // namespace fenwick::cpu
