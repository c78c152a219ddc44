#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cuda/launch.h"
#include "cuda/upload.h"

namespace fenwick::cuda {
namespace {

constexpr int kPiece = 896;  // words: kernel parameters hold 4 KB everywhere
struct Piece {
  std::uint32_t words[kPiece];
};

__global__ void WritePiece(std::uint32_t* to, const __grid_constant__ Piece piece, int count) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) to[i] = piece.words[i];
}

}  // namespace

void Upload(void* to, const void* from, std::size_t bytes, cudaStream_t stream) {
  const std::size_t words = bytes / sizeof(std::uint32_t);
  for (std::size_t begin = 0; begin < words; begin += kPiece) {
    const int count = static_cast<int>(std::min<std::size_t>(kPiece, words - begin));
    Piece piece;
    std::memcpy(piece.words, static_cast<const std::uint32_t*>(from) + begin,
                count * sizeof(std::uint32_t));
    Launch("upload table", WritePiece, 1, 128, 0, stream, static_cast<std::uint32_t*>(to) + begin,
           piece, count);
  }
}

}  // namespace fenwick::cuda
