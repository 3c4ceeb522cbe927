// Look-up of selected token groups, and what their refinement changes; kv_refine.py gives the formula.
//
// A warp handles a group at a time. Its record lies in host memory: one load a lane brings all of it, and what is
// resident of the group is read meanwhile. A lane has D/32 channels; sums over channels go through the warp. Warps of a
// block are merged here, blocks by the kernel that comes after. Which warp has which group is fixed, and so are sums.
#include "kv_correct.cuh"
#include "kv_lookup.cuh"

// Blocks: batch · kv_heads · refiners. A refiner's warps share every `refiners`-th of the chosen groups.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int GROUP>
__global__ void __launch_bounds__(HEADS > 4 ? 128 : 256, 2)
kv_refine(const float* queries, const u8* key_codes, const u16* key_scale, const u16* key_zero, const u16* key_other,
          const u8* value_codes, const u16* value_scale, const u16* value_zero, const u16* value_other,
          const int* tile_blocks, const float* shares, const int* chosen, const int* found, float* parts, float* tops,
          float* totals, i64* block, const float* thresholds, const i64* bases, i64 first_oid, int table, int kv_heads,
          int splits, int refiners, int most_tiles, int room) {
  const int WARPS = HEADS > 4 ? 4 : 8, C = D / 32, OF_TILE = TILE / GROUP;
  const int PIECES = GROUP * D * (KEY_FINE + VALUE_FINE) / 128;
  __shared__ uint4 records[WARPS][PIECES + 1];
  __shared__ float memory[WARPS * HEADS * D];
  __shared__ int counts[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int owner = blockIdx.x / refiners, refiner = blockIdx.x % refiners, sequence = owner / kv_heads;
  const size_t head0 = (size_t)owner * HEADS;
  const Half keys = {key_codes, key_scale, key_zero, key_other};
  const Half values = {value_codes, value_scale, value_zero, value_other};
  if (threadIdx.x < 2) counts[threadIdx.x] = 0;
  __syncthreads();
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int count_here = load_int(found + owner), stride = WARPS * refiners, first = warp * refiners + refiner;
  chosen += (size_t)owner * room;
  int next = load_int(chosen + min(first + lane * stride, room - 1));  // asked for before it is known whether it is one
  const Lookup lookup(block, thresholds, table);

  Change<D, HEADS> state = {};
  float query[HEADS][C];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    state.top[h] = NONE;
#pragma unroll
    for (int c = 0; c < C; c++) query[h][c] = __int_as_float((int)load_word(queries + (head0 + h) * D + C * lane + c));
  }
  for (int start = first; start < count_here; start += 32 * stride) {
    const int own = start + lane * stride;
    const bool here = own < count_here;
    const int group = here ? next : 0;
    const int place = here ? load_int(tile_blocks + (size_t)sequence * most_tiles + group / OF_TILE) : 0;
    const i64 base = here ? load_cell(bases + place) : -1;
    const u32 share = here ? load_word(shares + (size_t)owner * most_tiles * OF_TILE + group) : 0;
    const i64 oid = base + first_oid + owner % kv_heads * OF_TILE + group % OF_TILE;
    const u64 address = look_up(lookup, base >= 0, oid, share, counts, counts + 1);
    next = load_int(chosen + min(own + 32 * stride, room - 1));
    const int together = min(32, (count_here - start + stride - 1) / stride);
    for (int i = 0; i < together; i++) {
      const u64 at = (u64)__shfl_sync(EVERY, (u32)(address >> 32), i) << 32 | __shfl_sync(EVERY, (u32)address, i);
      const int number = __shfl_sync(EVERY, group, i);
      const i64 tile = (i64)__shfl_sync(EVERY, place, i) * kv_heads + owner % kv_heads;
      if (!at) continue;
      correct_group<D, KEY_BITS, VALUE_BITS, KEY_FINE, VALUE_FINE, HEADS, GROUP, true>(
          state, query, keys, values, tile, number % OF_TILE * GROUP, at, records[warp], lane);
    }
  }
  const Parts to = {parts, tops, totals, head0, splits + refiners, splits + refiner};
  merge_changes<D, HEADS, WARPS>(state, memory, to, warp, lane);
  if (threadIdx.x < 2) count(block + load_cell(block + TABLES + TABLE_CELLS * table + 2) + threadIdx.x, counts[threadIdx.x]);
}
