// What is done for refinement to come by a few blocks of an attention's launch, or of one of their own: errands.
//
// A selection takes three launches: in the first, SHARERS blocks of each KV head make shares of groups and count them by
// their leading bits; in the second one block ranks them, in the third one lists. One more block asks for what was listed
// and fetches records.
// Errands are a row of 64-bit numbers in device memory, made by kv_beside.py in this order. Where the first pointer of
// one is null it is not done.
#pragma once
#include "kv_fetch.cuh"
#include "kv_rank.cuh"

enum {
  POSITIONS, TABLE_OF_TILES, KV_HEADS, SPLITS, PIECES_OF_HEAD, MOST_TILES, ROOM,
  SHARE_SUMS, SHARE_TOPS, SHARE_TOTALS, SHARE_TILE_TOPS, SHARE_TO, SHARE_BINS,
  RANK_SHARES, RANK_BINS, RANK_FLOORS, NUMERATOR, DENOMINATOR,
  LIST_SHARES, LIST_FLOORS, LIST_GROUPS, LIST_COUNTS, LIST_STRENGTHS,
  ASK_GROUPS, ASK_COUNTS, ASK_STRENGTHS, ASK_OID,
  FETCH_GROUPS, FETCH_COUNTS, FETCH_STRENGTHS, FETCH_NUMBERS, FETCH_HELD, FETCH_WHERE, FETCH_ROWS, FETCH_OID,
  ATTACH_BLOCK, SCORE_THRESHOLDS, RECORD_BASES, KV_TABLE, LISTS, ROW_STRIDE, ERRAND_CELLS
};
const int SHARERS = 2, ERRAND_BLOCKS = SHARERS + 3;  // of each KV head

template <typename Value>
__device__ __forceinline__ Value* pointer_at(const i64* errand, int cell) { return (Value*)load_cell(errand + cell); }

// Shares of a KV head's groups, and how many have the same leading bits: part `part` of SHARERS.
template <int HEADS, int OF_TILE>
__device__ __forceinline__ void share_groups(const i64* errand, int owner, int part, u32* memory) {
  const int WARPS = FETCHING / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int DEEP = HEADS > 4 ? 2 : 4;  // so that what is under way fits into registers
  const float* sums = pointer_at<const float>(errand, SHARE_SUMS);
  if (!sums) return;
  u32* counted = memory;
  float *most = (float*)(memory + BINS), *total = most + HEADS;
  const float* tops = pointer_at<const float>(errand, SHARE_TOPS);
  const float* totals = pointer_at<const float>(errand, SHARE_TOTALS);
  const float* tile_tops = pointer_at<const float>(errand, SHARE_TILE_TOPS);
  const int kv_heads = (int)load_cell(errand + KV_HEADS), splits = (int)load_cell(errand + SPLITS);
  const int pieces = (int)load_cell(errand + PIECES_OF_HEAD), most_tiles = (int)load_cell(errand + MOST_TILES);
  const int count = groups_of(pointer_at<const int>(errand, POSITIONS), owner / kv_heads, OF_TILE);
  const size_t groups = (size_t)most_tiles * OF_TILE;
  float* shares = pointer_at<float>(errand, SHARE_TO) + (size_t)owner * groups;
  for (int i = threadIdx.x; i < BINS; i += FETCHING) counted[i] = 0;
  for (int h = warp; h < HEADS; h += WARPS) {
    const size_t at = ((size_t)owner * HEADS + h) * pieces;
    float top = NONE, all = 0;
    for (int i = lane; i < splits; i += 32) top = fmaxf(top, __int_as_float((int)load_word(tops + at + i)));
#pragma unroll
    for (int step = 1; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(LANES, top, step));
    for (int i = lane; i < splits; i += 32) {
      const float own = __int_as_float((int)load_word(tops + at + i));
      if (own > NONE) all += __int_as_float((int)load_word(totals + at + i)) * exp2f(own - top);
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) all += __shfl_xor_sync(LANES, all, step);
    if (lane == 0) most[h] = top, total[h] = 1 / all;
  }
  __syncthreads();
  for (int base = 4 * DEEP * FETCHING * part; base < count; base += 4 * DEEP * FETCHING * SHARERS) {
    Four sum[DEEP][HEADS];
    float tile_top[DEEP][HEADS];
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
      const int first = base + 4 * (d * FETCHING + (int)threadIdx.x);
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        const size_t head = (size_t)owner * HEADS + h;
        if (first < count) sum[d][h] = load_four(sums + head * groups + first);
        const float* at = tile_tops + head * most_tiles + first / OF_TILE;
        tile_top[d][h] = first < count ? __int_as_float((int)load_word(at)) : NONE;
      }
    }
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
      const int first = base + 4 * (d * FETCHING + (int)threadIdx.x);
      const bool inside = first < count;
      float share[4] = {};
#pragma unroll
      for (int h = 0; h < HEADS; h++) {
        const float by = exp2f(tile_top[d][h] - most[h]) * total[h];
#pragma unroll
        for (int i = 0; i < 4; i++)
          if (inside) share[i] = fmaxf(share[i], __int_as_float((int)sum[d][h].bits[i]) * by);
      }
      // Maxima may be of refined logits, beside which the totals of what is resident vanish.
#pragma unroll
      for (int i = 0; i < 4; i++) share[i] = fminf(share[i], 1.0f);
      if (inside) *(float4*)(shares + first) = float4{share[0], share[1], share[2], share[3]};
#pragma unroll
      for (int i = 0; i < 4; i++) tally(counted, inside ? (int)(__float_as_uint(share[i]) >> BIN_SHIFT) : -1, lane);
    }
  }
  __syncthreads();
  u32* bins = pointer_at<u32>(errand, SHARE_BINS) + (size_t)owner * BINS;
  for (int i = threadIdx.x; i < BINS; i += FETCHING)
    if (counted[i]) atomicAdd(bins + i, counted[i]);
}

// The bin in which the `wanted`-th largest lies. A thread has some bins in a row, the highest ones first.
__device__ __forceinline__ Digit bin_of(const u32* bins, int wanted, int* each, Digit* found, int warp, int lane) {
  const int OWN = BINS / FETCHING, high = BINS - 1 - OWN * threadIdx.x;
  int sum = 0;
  for (int i = 0; i < OWN; i++) sum += bins[high - i];
  int above = scan<FETCHING / 32>(sum, each, warp, lane).before;
  if (above < wanted && wanted <= above + sum) {
    int bin = high;
    for (; above + (int)bins[bin] < wanted; bin--) above += bins[bin];
    *found = {bin, wanted - above};
  }
  __syncthreads();
  return *found;
}

// A warp's part of the shares, 128 at a time; `each` gets a lane's four and where they begin. Below any share: not there.
template <typename Each>
__device__ __forceinline__ void for_fours(const float* shares, int begin, int end, int lane, Each each) {
  const int DEEP = 16;
  for (int base = begin; base < end; base += 128 * DEEP) {
    Four four[DEEP];
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
      const int first = base + 128 * d + 4 * lane;
      four[d] = first < end ? load_four(shares + first) : Four{LANES, LANES, LANES, LANES};
    }
#pragma unroll
    for (int d = 0; d < DEEP; d++)
      if (base + 128 * d < end) each(four[d], base + 128 * d + 4 * lane);
  }
}

// Where a KV head's groups lie, and the part of them that this warp has.
template <int OF_TILE>
struct Part {
  int count, selected, begin, end;
  size_t first;
  __device__ __forceinline__ Part(const i64* errand, int owner, int warp) {
    const int WARPS = FETCHING / 32, kv_heads = (int)load_cell(errand + KV_HEADS);
    count = groups_of(pointer_at<const int>(errand, POSITIONS), owner / kv_heads, OF_TILE);
    selected = count ? (int)max(count * load_cell(errand + NUMERATOR) / load_cell(errand + DENOMINATOR), (i64)1) : 0;
    const int part = (count + 128 * WARPS - 1) / (128 * WARPS) * 128;
    begin = warp * part, end = min(count, begin + part);
    first = (size_t)owner * load_cell(errand + MOST_TILES) * OF_TILE;
  }
};

// Finds the share of a KV head's weakest selected group, and how many that have it are selected.
template <int OF_TILE>
__device__ __forceinline__ void rank_groups(const i64* errand, int owner, u32* memory) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* shares = pointer_at<const float>(errand, RANK_SHARES);
  if (!shares) return;
  u32* counted = memory;
  int* each = (int*)(memory + BINS);
  Digit* digit = (Digit*)(each + FETCHING / 32);
  const Part<OF_TILE> of(errand, owner, warp);
  if (!of.count) return;
  shares += of.first;
  u32* bins = pointer_at<u32>(errand, RANK_BINS) + (size_t)owner * BINS;
  for (int i = threadIdx.x; i < BINS; i += FETCHING) counted[i] = load_word(bins + i), bins[i] = 0;
  __syncthreads();
  Digit at = bin_of(counted, of.selected, each, digit, warp, lane);
  u32 floor = (u32)at.bin << BIN_SHIFT;
  for (int low = BIN_SHIFT - DIGIT; low > -DIGIT; low -= DIGIT) {  // bits 8 to 18, then 0 to 7
    const int shift = max(low, 0), bits = min(DIGIT, DIGIT + low);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += FETCHING) counted[i] = 0;
    __syncthreads();
    for_fours(shares, of.begin, of.end, lane, [&](const Four& four, int) {
#pragma unroll
      for (int i = 0; i < 4; i++)
        if ((four.bits[i] ^ floor) >> (shift + bits) == 0)
          atomicAdd(counted + (four.bits[i] >> shift & ((1 << bits) - 1)), 1u);
    });
    __syncthreads();
    at = bin_of(counted, at.wanted, each, digit, warp, lane);
    floor |= (u32)at.bin << shift;
  }
  if (threadIdx.x == 0) pointer_at<i64>(errand, RANK_FLOORS)[owner] = (i64)floor << 32 | (u32)at.wanted;
}

// Lists a KV head's groups from that share on, ascending.
template <int OF_TILE>
__device__ __forceinline__ void list_groups(const i64* errand, int owner, u32* memory) {
  const int WARPS = FETCHING / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* shares = pointer_at<const float>(errand, LIST_SHARES);
  if (!shares) return;
  int *ups = (int*)memory, *ties = ups + WARPS;
  const Part<OF_TILE> of(errand, owner, warp);
  if (threadIdx.x == 0) pointer_at<int>(errand, LIST_COUNTS)[owner] = of.selected;
  if (!of.count) return;
  shares += of.first;
  const i64 found = load_cell(pointer_at<const i64>(errand, LIST_FLOORS) + owner);
  const u32 floor = (u32)(found >> 32);
  const int wanted = (int)(u32)found;
  int above = 0, level = 0;  // of this lane: above the floor, and on it
  for_fours(shares, of.begin, of.end, lane, [&](const Four& four, int) {
#pragma unroll
    for (int i = 0; i < 4; i++) above += (int)four.bits[i] > (int)floor, level += four.bits[i] == floor;
  });
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    above += __shfl_xor_sync(LANES, above, step);
    level += __shfl_xor_sync(LANES, level, step);
  }
  if (lane == 0) ups[warp] = above, ties[warp] = level;
  __syncthreads();
  above = level = 0;
  for (int w = 0; w < warp; w++) above += ups[w], level += ties[w];
  const size_t room = (size_t)owner * load_cell(errand + ROOM);
  int* groups = pointer_at<int>(errand, LIST_GROUPS) + room;
  u32* strengths = pointer_at<u32>(errand, LIST_STRENGTHS) + room;
  for_fours(shares, of.begin, of.end, lane, [&](const Four& four, int first) {
    u32 mine = 0;  // above the floor, and in the upper half on it
#pragma unroll
    for (int i = 0; i < 4; i++) mine += ((int)four.bits[i] > (int)floor) + ((u32)(four.bits[i] == floor) << 16);
    if (!__ballot_sync(LANES, mine != 0)) return;
    u32 upto = mine;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 left = __shfl_up_sync(LANES, upto, step);
      if (lane >= step) upto += left;
    }
    int own_ups = above + (int)(upto - mine & 0xFFFF), own_ties = level + (int)(upto - mine >> 16);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool tie = four.bits[i] == floor;
      if ((int)four.bits[i] < (int)floor || (tie && own_ties >= wanted)) continue;
      const int place = own_ups + min(own_ties, wanted);
      groups[place] = first + i, strengths[place] = four.bits[i];
      if (tie) own_ties++;
      else own_ups++;
    }
    const u32 all = __shfl_sync(LANES, upto, 31);
    above += all & 0xFFFF, level += all >> 16;
  });
}

// Asks for what one layer listed, and brings what another listed a step ago.
template <int OF_TILE, int PIECES>
__device__ __forceinline__ void ask_and_fetch(const i64* errand, int owner, u32* memory) {
  int* counts = (int*)memory;
  const Blocks blocks = {pointer_at<const i64>(errand, RECORD_BASES), pointer_at<const int>(errand, TABLE_OF_TILES),
                         (int)load_cell(errand + KV_HEADS), (int)load_cell(errand + MOST_TILES), OF_TILE,
                         (int)load_cell(errand + ROOM)};
  i64* block = pointer_at<i64>(errand, ATTACH_BLOCK);
  const int table = (int)load_cell(errand + KV_TABLE), lists = (int)load_cell(errand + LISTS);
  const Lookup lookup(block, pointer_at<const float>(errand, SCORE_THRESHOLDS), table);
  const Groups asked = {pointer_at<const int>(errand, ASK_GROUPS), pointer_at<const int>(errand, ASK_COUNTS),
                        pointer_at<const u32>(errand, ASK_STRENGTHS), load_cell(errand + ASK_OID)};
  const Groups wanted = {pointer_at<const int>(errand, FETCH_GROUPS), pointer_at<const int>(errand, FETCH_COUNTS),
                         pointer_at<const u32>(errand, FETCH_STRENGTHS), load_cell(errand + FETCH_OID)};
  if (wanted.numbers) {
    if (threadIdx.x < 2) counts[threadIdx.x] = 0;
    __syncthreads();
    const Rows rows = {pointer_at<int>(errand, FETCH_NUMBERS), pointer_at<int>(errand, FETCH_HELD),
                       pointer_at<int>(errand, FETCH_WHERE), pointer_at<u8>(errand, FETCH_ROWS), lists,
                       blocks.most_tiles * OF_TILE, (int)load_cell(errand + ROW_STRIDE)};
    fetch<PIECES>(lookup, blocks, wanted, rows, owner, 0, 1, (int)(load_cell(block + STEP) % lists), counts);
    __syncthreads();
    const i64 counter = load_cell(block + TABLES + TABLE_CELLS * table + 2);
    if (threadIdx.x < 2) count(block + counter + threadIdx.x, counts[threadIdx.x]);
  }
  if (asked.numbers) ask_for(lookup, blocks, asked, owner);
}

// Block `number` of the ERRAND_BLOCKS for each of `owners` KV heads; those that take longest come first.
template <int HEADS, int OF_TILE, int PIECES>
__device__ __forceinline__ void run_errand(const i64* errand, int number, int owners, u32* memory) {
  const int kind = number / owners, owner = number % owners;
  if (kind < SHARERS) share_groups<HEADS, OF_TILE>(errand, owner, kind, memory);
  else if (kind == SHARERS) rank_groups<OF_TILE>(errand, owner, memory);
  else if (kind == SHARERS + 1) ask_and_fetch<OF_TILE, PIECES>(errand, owner, memory);
  else list_groups<OF_TILE>(errand, owner, memory);
}
