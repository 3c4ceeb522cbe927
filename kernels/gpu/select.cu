// Select, look up, request and stamp in one launch; select.py gives the formula and the portable path.
//
// One block handles a chunk of 1,024 channels, a thread each. The floor is found by bisection, a barrier that counts
// each time; ranks come from ballots and one scan over warps. What a step wrote before (input, clock, limit of the ring)
// is read after the kernel before this one has ended. Nothing is included, so that the compiler needs no headers.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#ifndef HOST_EMULATION  // a test compiles the rest for the host and brings its own versions of these
// Inputs and cells may be written by the kernel before this one while this one waits: not through the read-only path.
__device__ __forceinline__ u32 load_word(const void* address) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ u32 load_half(const void* address) {
  unsigned short v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ i64 load_cell(const i64* address) {
  i64 v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}
// Never from a cache that an earlier launch filled.
__device__ __forceinline__ u32 load_host_word(u64 address) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ void store_host_word(u64 address, u32 v) {
  asm volatile("st.global.u32 [%0], %1;" :: "l"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_host_entry(u64 address, u64 v) {
  asm volatile("st.volatile.global.u64 [%0], %1;" :: "l"(address), "l"(v) : "memory");
}
__device__ __forceinline__ float half_to_float(u32 v) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v));
  return f;
}
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ __forceinline__ void let_next_kernel_start() {}
__device__ __forceinline__ void wait_for_previous_kernel() {}
#endif
#endif

// Cells of the attach block and fields of entries; a test compares them with cells.py and the format.
enum {
  ENABLED = 0, CLOCK = 2, RING = 6, RING_LOG2 = 7, TAIL = 8, LIMIT = 9, DROPPED = 10, STAMPS = 11, RUBBISH = 12,
  LAST_CHUNK = 14, TABLES = 32, TABLE_CELLS = 4, BASES = 1052, CHUNK_UNITS_LOG2 = 16, PAGE_UNITS_LOG2 = 10,
  CHUNK_PAGES = 64, UNIT_BYTES_LOG2 = 8, PAGES_MASK = 4095, LAP_SHIFT = 56, LAPS = 255, SCORE_SHIFT = 48,
  TABLE_SHIFT = 40
};
const u32 ABSENT = 0, QUARANTINED = 0xFFFFFFFFu, EVERY = 0xFFFFFFFFu;
const int CHUNK = 1024, WARPS = 32, INFINITE = 0x7F800000;

// Bits of |x|, which order as the numbers do; a NaN ranks as zero. TYPE: 0 float32, 1 float16, 2 bfloat16.
template <int TYPE>
__device__ __forceinline__ int magnitude(const void* x, int index) {
  u32 bits;
  if (TYPE == 0) bits = load_word((const u32*)x + index);
  else bits = load_half((const unsigned short*)x + index);
  if (TYPE == 1) bits = __float_as_uint(half_to_float(bits));
  if (TYPE == 2) bits <<= 16;
  bits &= 0x7FFFFFFFu;
  return bits > (u32)INFINITE ? 0 : (int)bits;
}

__device__ __forceinline__ int largest_of(int bits, int* each, int warp, int lane) {
  int most = __reduce_max_sync(EVERY, bits);
  if (lane == 0) each[warp] = most;
  __syncthreads();
  return __reduce_max_sync(EVERY, each[lane]);
}

// The largest magnitude that at least `wanted` threads reach, or a lower one that exactly `wanted` reach.
__device__ __forceinline__ int floor_of(int bits, int largest, int wanted) {
  int low = 0, high = largest + 1;
  int middle = largest - (3 << 23);  // first an eighth of the largest: what is wanted mostly lies above
  if (middle <= 0) middle = high / 2;
  while (high - low > 1) {
    int reach = __syncthreads_count(bits >= middle);
    if (reach >= wanted) low = middle;
    if (reach <= wanted) high = reach == wanted ? middle + 1 : middle;
    middle = low + (high - low) / 2;
  }
  return low;
}

// Ranks, from 1, of this thread among those of `first` and of `second`, and how many there are of each.
struct Ranks { int first, second, firsts, seconds; };
__device__ __forceinline__ Ranks rank(bool first, bool second, int* each, int warp, int lane) {
  const u32 upto = EVERY >> (31 - lane), one = __ballot_sync(EVERY, first), two = __ballot_sync(EVERY, second);
  if (lane == 0) each[warp] = __popc(one) | __popc(two) << 16;
  __syncthreads();
  const int own = each[lane];
  int sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    int left = __shfl_up_sync(EVERY, sum, step);
    if (lane >= step) sum += left;
  }
  const int all = __shfl_sync(EVERY, sum, 31), before = __shfl_sync(EVERY, sum - own, warp);
  return {(before & 0xFFFF) + __popc(one & upto), (before >> 16) + __popc(two & upto), all & 0xFFFF, all >> 16};
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

template <int TYPE>
__global__ void __launch_bounds__(1024)
select_and_look_up(const void* x, i64* block, const float* thresholds, int* channels, u64* addresses, i64 first_oid,
                   int width, int table, int full_quota, int last_quota) {
  __shared__ int most[WARPS], chosen[WARPS], found[WARPS];
  __shared__ i64 reserved;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, index = blockIdx.x * CHUNK + threadIdx.x;
  const int wanted = (blockIdx.x + 1) * CHUNK >= width ? last_quota : full_quota;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int bits = index < width ? magnitude<TYPE>(x, index) : -1;
  const bool enabled = load_cell(block + ENABLED) != 0;
  const i64 directory = load_cell(block + TABLES + TABLE_CELLS * table);
  const i64 counters = load_cell(block + TABLES + TABLE_CELLS * table + 2);
  const i64 last_chunk = load_cell(block + LAST_CHUNK), stamps = load_cell(block + STAMPS);
  const u32 clock = (u32)load_cell(block + CLOCK);
  const i64 limit = load_cell(block + LIMIT), lap_log2 = load_cell(block + RING_LOG2), ring = load_cell(block + RING);

  const int largest = largest_of(bits, most, warp, lane);
  const int bound = floor_of(bits, largest, wanted);
  const Ranks of = rank(bits > bound, bits == bound, chosen, warp, lane);
  const int spare = wanted - of.firsts;
  const bool selected = bits > bound || (bits == bound && of.second <= spare);
  const int place = of.first + min(of.second, spare) - 1;

  // SYNC: directory-entry (read).
  const u64 oid = (u64)(first_oid + index);
  const bool asks = selected && enabled;
  const u32 entry = asks ? load_host_word((u64)directory + 4 * oid) : QUARANTINED;
  const bool named = asks && entry != ABSENT && entry != QUARANTINED;
  const u64 address = named ? address_of(block, entry, last_chunk) : 0;
  const bool hit = address != 0, asked = asks && entry == ABSENT;
  if (hit) store_host_word((u64)stamps + 4 * ((u64)entry - 1), clock);

  const Ranks in = rank(hit, asked, found, warp, lane);
  if (selected) {
    const int at = blockIdx.x * full_quota + (hit ? in.first - 1 : in.firsts + place - in.first);
    channels[at] = index;
    addresses[at] = address;
  }
  const int rubbish = __popc(__ballot_sync(EVERY, named && !hit));
  if (lane == 0) count(block + RUBBISH, rubbish);
  if (threadIdx.x == 0) {
    count(block + counters, wanted);
    count(block + counters + 1, in.firsts);
    if (!enabled) count(block + DROPPED, wanted);
  }
  if (in.seconds == 0) return;
  // Positions come from a counter in device memory; what lies beyond the step's limit is counted and forgotten.
  if (threadIdx.x == 0) {
    reserved = (i64)atomicAdd((u64*)(block + TAIL), (u64)in.seconds);
    count(block + DROPPED, min((i64)in.seconds, max((i64)0, reserved + in.seconds - limit)));
  }
  const u64 score = asked ? score_of(bits, largest, thresholds) : 0;
  __syncthreads();
  const i64 position = reserved + in.second - 1;
  if (asked && position < limit) {
    const u64 lap = 1 + (u64)(position >> lap_log2) % LAPS;
    // SYNC: ring-entry (publish). One 8-byte store: a request announces no bytes, only itself.
    store_host_entry((u64)ring + 8 * (position & (((i64)1 << lap_log2) - 1)),
                     lap << LAP_SHIFT | score << SCORE_SHIFT | (u64)table << TABLE_SHIFT | oid);
  }
}
