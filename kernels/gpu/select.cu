// Select, look up, request and stamp in one launch; select.py gives the formula and the portable path.
//
// A block handles a chunk. What a step wrote before (input, clock, limit of the ring) is read after the kernel before
// this one has ended.
#include "select.cuh"

template <int TYPE>
__global__ void __launch_bounds__(1024)
select_and_look_up(const void* x, i64* block, const float* thresholds, int* channels, u64* addresses, i64 first_oid,
                   int width, int table, int full_quota, int last_quota) {
  const Selecting s = {x, 0, block, thresholds, channels, addresses, first_oid, width, table, full_quota, last_quota};
  let_next_kernel_start();
  wait_for_previous_kernel();
  select_chunk<TYPE, CHUNK>(s, blockIdx.x);
}
