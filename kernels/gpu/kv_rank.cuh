// Shares of groups counted by their leading bits, and the bin in which the n-th largest lies; kv_select.py says what for.
#pragma once
#include "kv_half.cuh"

const int BINS = 2048, DIGIT = 11, BIN_SHIFT = 19;  // a share is at most 1: its two highest bits are zeros

struct Four { u32 bits[4]; };
__device__ __forceinline__ Four load_four(const float* at) {
  const uint4 v = load_exact(at);
  return {v.x, v.y, v.z, v.w};
}
__device__ __forceinline__ int groups_of(const int* positions, int sequence, int of_tile) {
  return max((int)load_word(positions + sequence) / TILE - 1, 0) * of_tile;
}

// Counts a number of each lane below `BINS`; lanes with -1 have none. Where all have the same, one adds for all.
__device__ __forceinline__ void tally(u32* bins, int bin, int lane) {
  const int most = __reduce_max_sync(LANES, bin), least = -__reduce_max_sync(LANES, -bin);
  if (most == least) {
    if (lane == 0 && most >= 0) atomicAdd(bins + most, 32u);
  } else if (bin >= 0) {
    atomicAdd(bins + bin, 1u);
  }
}

// The sum of `value` over the threads before this one, and over all of them.
struct Sums { int before, all; };
template <int WARPS>
__device__ __forceinline__ Sums scan(int value, int* each, int warp, int lane) {
  int upto = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(LANES, upto, step);
    if (lane >= step) upto += left;
  }
  __syncthreads();  // what was there before has been read
  if (lane == 31) each[warp] = upto;
  __syncthreads();
  int warps = lane < WARPS ? each[lane] : 0;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(LANES, warps, step);
    if (lane >= step) warps += left;
  }
  const int all = __shfl_sync(LANES, warps, 31), of_warp = __shfl_sync(LANES, warps, warp) - each[warp];
  return {of_warp + upto - value, all};
}

// A bin, and how many are still wanted of those in it.
struct Digit { int bin, wanted; };
