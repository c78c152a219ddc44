#include "core/backend.h"

namespace fenwick {

#if !defined(FENWICK_CUDA)
const Backend* CudaBackend() { return nullptr; }
#endif

}  // namespace fenwick
