// A persistent pool of threads for the CPU kernels.
#pragma once

#include <cstdint>
#include <functional>

namespace fenwick {

// Calls fn(index, worker) once for every index in [0, n), on up to `num_threads` threads, the
// calling one included. `worker` in [0, num_threads) names the thread, so that it can index
// scratch memory: no two calls that run at the same time have the same worker. Which worker gets an
// index is not fixed: results must depend on the index alone, then they are the same for any number
// of threads.
//
// The first exception of an fn stops the handing out of indices and is thrown here once every
// running call has returned.
//
// A call from inside an fn, or while another thread's call holds the pool, runs all its indices on
// the calling thread as worker 0 (scratch of an outer call must not be shared with an inner one).
// Safe after fork(): the child starts threads of its own.
void ParallelFor(std::int64_t n, int num_threads,
                 const std::function<void(std::int64_t index, int worker)>& fn);

}  // namespace fenwick
