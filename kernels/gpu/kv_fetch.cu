// Requests for the groups that were just selected, and records of groups selected a step ago; kv_fetch.py says more.
//
// A lane looks a group up, then its warp copies the records that were found, some at once, so that the link has enough
// to do. The blocks are few and small: they run beside kernels that need the device.
#include "kv_half.cuh"
#include "kv_lookup.cuh"

const int THREADS = 128, WARPS = THREADS / 32, TOGETHER = 8;

struct Groups {  // of KV heads [batch · kv_heads, room]
  const int *numbers, *counts;
  const u32* strengths;  // bits of shares
  i64 first_oid;
};
struct Blocks {  // where groups lie
  const i64* bases;
  const int* table;
  int kv_heads, most_tiles, of_tile, room;
  // The object id of a group, -1 where it has no record.
  __device__ __forceinline__ i64 oid_of(int owner, int group, i64 first_oid) const {
    const i64 base = load_cell(bases + load_int(table + (size_t)(owner / kv_heads) * most_tiles + group / of_tile));
    return base < 0 ? -1 : base + first_oid + owner % kv_heads * of_tile + group % of_tile;
  }
};

__device__ __forceinline__ void ask_for(const Lookup& in, const Blocks& blocks, const Groups& groups, int owner) {
  const int count = load_int(groups.counts + owner);
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const size_t at = (size_t)owner * blocks.room + i;
    const i64 oid = blocks.oid_of(owner, load_int(groups.numbers + at), groups.first_oid);
    if (oid >= 0) ask_ahead(in, oid, load_word(groups.strengths + at));
  }
}

// Copies the records at each lane's `address` to their places, `first` on; 0 has none. All lanes take part.
template <int PIECES>
__device__ __forceinline__ void copy_records(u64 address, u8* first, int stride, int lane) {
  const int DEEP = (PIECES + 31) / 32, BATCH = DEEP > TOGETHER ? 1 : TOGETHER / DEEP;
  for (int start = 0; start < 32; start += BATCH) {
    uint4 piece[BATCH][DEEP];
    u64 from[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      from[b] = (u64)__shfl_sync(EVERY, (u32)(address >> 32), start + b) << 32 | __shfl_sync(EVERY, (u32)address, start + b);
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (from[b] && lane + 32 * d < PIECES) piece[b][d] = load_host_piece(from[b] + 16 * (lane + 32 * d));
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (from[b] && lane + 32 * d < PIECES)
          *(uint4*)(first + (size_t)(start + b) * stride + 16 * (lane + 32 * d)) = piece[b][d];
  }
}

// Blocks: batch · kv_heads · (1 + fetchers), the first one of each KV head asks.
template <int PIECES>
__global__ void __launch_bounds__(THREADS)
kv_fetch(i64* block, const float* thresholds, const i64* bases, const int* table, const int* asked, const int* asked_counts,
         const u32* asked_strengths, const int* wanted, const int* wanted_counts, const u32* wanted_strengths, int* numbers,
         u8* rows, i64 asked_oid, i64 wanted_oid, int kv_table, int kv_heads, int most_tiles, int of_tile, int room,
         int stride, int fetchers) {
  __shared__ int counts[2];
  const int owner = blockIdx.x / (1 + fetchers), part = blockIdx.x % (1 + fetchers) - 1;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Blocks blocks = {bases, table, kv_heads, most_tiles, of_tile, room};
  const Lookup lookup(block, thresholds, kv_table);
  if (part < 0) {
    ask_for(lookup, blocks, {asked, asked_counts, asked_strengths, asked_oid}, owner);
    return;
  }
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  __syncthreads();
  const int count_here = load_int(wanted_counts + owner);
  for (int start = 32 * (part * WARPS + warp); start < count_here; start += 32 * WARPS * fetchers) {
    const size_t at = (size_t)owner * room + start + lane;
    const bool here = start + lane < count_here;
    const int group = here ? load_int(wanted + at) : 0;
    const i64 oid = here ? blocks.oid_of(owner, group, wanted_oid) : -1;
    const u32 strength = here ? load_word(wanted_strengths + at) : 0;
    const u64 address = look_up(lookup, oid >= 0, oid, strength, counts, counts + 1);
    if (here) numbers[at] = address ? group : -1;
    copy_records<PIECES>(address, rows + ((size_t)owner * room + start) * stride, stride, lane);
  }
  __syncthreads();
  if (threadIdx.x < 2) count(block + load_cell(block + TABLES + TABLE_CELLS * kv_table + 2) + threadIdx.x, counts[threadIdx.x]);
}
