// Errands in a launch of their own; kv_beside.py says which, kv_beside.cuh how.
#include "kv_beside.cuh"

// Blocks: ERRAND_BLOCKS · batch · kv_heads.
template <int HEADS, int OF_TILE, int PIECES>
__global__ void __launch_bounds__(FETCHING)
kv_beside(const i64* errand, int owners) {
  __shared__ uint4 memory[BINS / 4 + 32];
  run_errand<HEADS, OF_TILE, PIECES>(errand, blockIdx.x, owners, (u32*)memory);
}
