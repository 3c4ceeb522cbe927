// Select, look up, request and stamp: one chunk of 1,024 channels by one block; select.py gives the formula.
//
// A thread has 1,024 / THREADS neighbouring channels. The floor is found by bisection, a barrier for each count;
// ranks come from one scan over the block.
#pragma once
#include "device.cuh"

// Cells of the attach block and fields of entries; a test compares them with cells.py and the format.
enum {
  ENABLED = 0, CLOCK = 2, RING = 6, RING_LOG2 = 7, TAIL = 8, LIMIT = 9, DROPPED = 10, STAMPS = 11, RUBBISH = 12,
  LAST_CHUNK = 14, TABLES = 32, TABLE_CELLS = 4, BASES = 1052, CHUNK_UNITS_LOG2 = 16, PAGE_UNITS_LOG2 = 10,
  CHUNK_PAGES = 64, UNIT_BYTES_LOG2 = 8, PAGES_MASK = 4095, LAP_SHIFT = 56, LAPS = 255, SCORE_SHIFT = 48,
  TABLE_SHIFT = 40
};
const u32 ABSENT = 0, QUARANTINED = 0xFFFFFFFFu, EVERY = 0xFFFFFFFFu;
const int CHUNK = 1024, INFINITE = 0x7F800000;

struct Selecting {
  const void* x;
  const float* gain;  // each channel's factor, or null; with it the input is float32
  i64* block;
  const float* thresholds;
  int* channels;
  u64* addresses;
  i64 first_oid;
  int width, table, full_quota, last_quota;
};

// Bits of |x|, which order as the numbers do; a NaN ranks as zero. TYPE: 0 float32, 1 float16, 2 bfloat16.
template <int TYPE>
__device__ __forceinline__ int magnitude(const void* x, const float* gain, int index) {
  u32 bits;
  if (TYPE == 0) bits = load_word((const u32*)x + index);
  else bits = load_half((const u16*)x + index);
  if (TYPE == 0 && gain) bits = __float_as_uint(__int_as_float((int)bits) * gain[index]);
  if (TYPE == 1) bits = __float_as_uint(half_to_float(bits));
  if (TYPE == 2) bits <<= 16;
  bits &= 0x7FFFFFFFu;
  return bits > (u32)INFINITE ? 0 : (int)bits;
}

template <int VALUES, int WARPS>
__device__ __forceinline__ int largest_of(const int (&bits)[VALUES], int* each, int warp, int lane) {
  int most = bits[0];
#pragma unroll
  for (int v = 1; v < VALUES; v++) most = max(most, bits[v]);
  most = __reduce_max_sync(EVERY, most);
  if (lane == 0) each[warp] = most;
  __syncthreads();
  return __reduce_max_sync(EVERY, lane < WARPS ? each[lane] : -1);
}

// The largest magnitude that at least `wanted` channels reach, or a lower one that exactly `wanted` reach. `counts` is
// for threads that have several channels each: one barrier a count, in turns, so that none is written while it is read.
template <int WARPS, int VALUES>
__device__ __forceinline__ int floor_of(const int (&bits)[VALUES], int largest, int wanted, int (*counts)[WARPS],
                                        int warp, int lane) {
  int low = 0, high = largest + 1, turn = 0;
  int middle = largest - (3 << 23);  // first an eighth of the largest: what is wanted mostly lies above
  if (middle <= 0) middle = high / 2;
  while (high - low > 1) {
    int reach = 0;
    if (VALUES == 1) reach = __syncthreads_count(bits[0] >= middle);
    else {
#pragma unroll
      for (int v = 0; v < VALUES; v++) reach += bits[v] >= middle;
      reach = __reduce_add_sync(EVERY, reach);
      if (lane == 0) counts[turn][warp] = reach;
      __syncthreads();
      reach = __reduce_add_sync(EVERY, lane < WARPS ? counts[turn][lane] : 0);
      turn ^= 1;
    }
    if (reach >= wanted) low = middle;
    if (reach <= wanted) high = reach == wanted ? middle + 1 : middle;
    middle = low + (high - low) / 2;
  }
  return low;
}

// How many of `first` and of `second` the threads before this one have, and all of them.
struct Ranks { int first, second, firsts, seconds; };
template <int WARPS>
__device__ __forceinline__ Ranks before(int first, int second, int* each, int warp, int lane) {
  const int own = first | second << 16;
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(EVERY, sum, step);
    if (lane >= step) sum += left;
  }
  if (lane == 31) each[warp] = sum;
  __syncthreads();
  const int total = lane < WARPS ? each[lane] : 0;
  int upto = total;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(EVERY, upto, step);
    if (lane >= step) upto += left;
  }
  const int all = __shfl_sync(EVERY, upto, 31), place = __shfl_sync(EVERY, upto - total, warp) + sum - own;
  return {place & 0xFFFF, place >> 16, all & 0xFFFF, all >> 16};
}

// By comparison with thresholds: the logarithm only says where to look, its last bit decides nothing.
__device__ __forceinline__ int score_of(int bits, int largest, const float* thresholds) {
  float share = 0;
  if (bits == INFINITE) share = 1;
  else if (bits > 0) share = __fdiv_rn(__int_as_float(bits), __int_as_float(largest));
  int at = (int)fminf(fmaxf(floorf(16 * (log2f(fmaxf(share, 1e-6f)) + 12)), 0.0f), 254.0f);
  int score = at + 1 + (share >= thresholds[at + 1]) - (share < thresholds[at]);
  return min(max(score, 1), 255);
}

// Where the slot lies that an entry names, 0 where it names none that is mapped.
__device__ __forceinline__ u64 address_of(const i64* block, u32 entry, i64 last_chunk) {
  const i64 slot = (i64)entry - 1;
  const i64 base = load_cell(block + BASES + min(slot >> CHUNK_UNITS_LOG2, last_chunk));
  const i64 page = (slot >> PAGE_UNITS_LOG2) & (CHUNK_PAGES - 1);
  if (page >= (base & PAGES_MASK)) return 0;
  return (u64)((base & ~(i64)PAGES_MASK) + ((slot & ((1 << CHUNK_UNITS_LOG2) - 1)) << UNIT_BYTES_LOG2));
}

__device__ __forceinline__ void count(i64* cell, i64 by) {
  if (by) atomicAdd((u64*)cell, (u64)by);
}

// Put what is asked for into the ring: `rank` of them lie before this thread's, `asks` in the whole block.
template <int VALUES>
__device__ __forceinline__ void request(const Selecting& s, const int (&bits)[VALUES], int largest, u32 asked,
                                        i64 oid, int rank, int asks, i64* reserved) {
  const i64 limit = load_cell(s.block + LIMIT), lap_log2 = load_cell(s.block + RING_LOG2);
  const i64 ring = load_cell(s.block + RING);
  // Positions come from a counter in device memory; what lies beyond the step's limit is counted and forgotten.
  if (threadIdx.x == 0) {
    *reserved = (i64)atomicAdd((u64*)(s.block + TAIL), (u64)asks);
    count(s.block + DROPPED, min((i64)asks, max((i64)0, *reserved + asks - limit)));
  }
  __syncthreads();
  i64 position = *reserved + rank;
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    if (!(asked >> v & 1)) continue;
    if (position < limit) {
      const u64 lap = 1 + (u64)(position >> lap_log2) % LAPS, score = score_of(bits[v], largest, s.thresholds);
      // SYNC: ring-entry (publish). One 8-byte store: a request announces no bytes, only itself.
      store_host_entry((u64)ring + 8 * (position & (((i64)1 << lap_log2) - 1)),
                       lap << LAP_SHIFT | score << SCORE_SHIFT | (u64)s.table << TABLE_SHIFT | (u64)(oid + v));
    }
    position++;
  }
}

template <int TYPE, int THREADS>
__device__ __forceinline__ void select_chunk(const Selecting& s, int chunk) {
  constexpr int VALUES = CHUNK / THREADS, WARPS = THREADS / 32;
  __shared__ int most[WARPS], counts[2][WARPS], chosen[WARPS], found[WARPS];
  __shared__ i64 reserved;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = chunk * CHUNK + threadIdx.x * VALUES;
  const int wanted = (chunk + 1) * CHUNK >= s.width ? s.last_quota : s.full_quota;
  int bits[VALUES];
#pragma unroll
  for (int v = 0; v < VALUES; v++) bits[v] = index + v < s.width ? magnitude<TYPE>(s.x, s.gain, index + v) : -1;
  const bool enabled = load_cell(s.block + ENABLED) != 0;
  const u64 directory = (u64)load_cell(s.block + TABLES + TABLE_CELLS * s.table);
  const i64 counters = load_cell(s.block + TABLES + TABLE_CELLS * s.table + 2);
  const i64 last_chunk = load_cell(s.block + LAST_CHUNK), stamps = load_cell(s.block + STAMPS);
  const u32 clock = (u32)load_cell(s.block + CLOCK);

  const int largest = largest_of<VALUES, WARPS>(bits, most, warp, lane);
  const int bound = floor_of<WARPS>(bits, largest, wanted, counts, warp, lane);
  int above = 0, level = 0;
#pragma unroll
  for (int v = 0; v < VALUES; v++) above += bits[v] > bound, level += bits[v] == bound;
  const Ranks of = before<WARPS>(above, level, chosen, warp, lane);
  const int spare = wanted - of.firsts;  // so many of those on the floor, the first ones

  u32 selected = 0, asked = 0, entry[VALUES];
  int ties = of.second;
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    const bool chosen_here = bits[v] > bound || (bits[v] == bound && ties++ < spare);
    if (chosen_here) selected |= 1u << v;
    // SYNC: directory-entry (read).
    const u64 word = directory + 4 * (u64)(s.first_oid + index + v);
    entry[v] = chosen_here && enabled ? load_host_word(word) : QUARANTINED;
  }
  u64 address[VALUES];
  int hits = 0, asks = 0, rubbish = 0;
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    const bool named = entry[v] != ABSENT && entry[v] != QUARANTINED;
    address[v] = named ? address_of(s.block, entry[v], last_chunk) : 0;
    if (address[v]) store_host_word((u64)stamps + 4 * ((u64)entry[v] - 1), clock);
    hits += address[v] != 0, rubbish += named && !address[v];
    if (entry[v] == ABSENT) asked |= 1u << v, asks++;
  }
  const Ranks in = before<WARPS>(hits, asks, found, warp, lane);
  // Hits first, then misses, each ascending.
  int hit = in.first, place = of.first + min(of.second, spare) - in.first;
#pragma unroll
  for (int v = 0; v < VALUES; v++) {
    if (!(selected >> v & 1)) continue;
    const int at = chunk * s.full_quota + (address[v] ? hit++ : in.firsts + place++);
    s.channels[at] = index + v;
    s.addresses[at] = address[v];
  }
  count(s.block + RUBBISH, rubbish);
  if (threadIdx.x == 0) {
    count(s.block + counters, wanted);
    count(s.block + counters + 1, in.firsts);
    if (!enabled) count(s.block + DROPPED, wanted);
  }
  if (in.seconds) request(s, bits, largest, asked, s.first_oid + index, in.second, in.seconds, &reserved);
}
