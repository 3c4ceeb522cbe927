// The strongest token groups of each KV head, listed; kv_select.py gives the formula.
//
// Shares are counted by their leading bits while they are made. Then one block a KV head finds the n-th largest by its
// further bits, counting those that agree with it so far: two passes, whatever the distribution. One more lists. Up to
// 32,768 shares are read once and stay in registers.
#include "kv_rank.cuh"

// A block has 4 · THREADS groups of one KV head. Blocks: batch · kv_heads · chunks.
template <int HEADS, int THREADS>
__global__ void __launch_bounds__(THREADS)
kv_shares(const int* positions, const float* tops, const float* totals, const float* sums, const float* tile_tops,
          float* shares, u32* bins, int kv_heads, int splits, int pieces, int most_tiles, int of_tile, int chunks) {
  __shared__ u32 counted[BINS];
  __shared__ float most[HEADS], total[HEADS];
  const int owner = blockIdx.x / chunks, chunk = blockIdx.x % chunks, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const size_t groups = (size_t)most_tiles * of_tile;
  for (int i = threadIdx.x; i < BINS; i += THREADS) counted[i] = 0;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int count = groups_of(positions, owner / kv_heads, of_tile), first = 4 * (chunk * THREADS + threadIdx.x);
  if (4 * chunk * THREADS >= count) return;

  // Tiles are whole: four groups in a row are all there or none, and of one tile.
  const bool inside = first < count;
  Four sum[HEADS];
  float tile_top[HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const size_t head = (size_t)owner * HEADS + h;
    if (inside) sum[h] = load_four(sums + head * groups + first);
    tile_top[h] = inside ? __int_as_float((int)load_word(tile_tops + head * most_tiles + first / of_tile)) : NONE;
  }
  for (int h = warp; h < HEADS; h += THREADS / 32) {
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
    if (lane == 0) most[h] = top, total[h] = all;
  }
  __syncthreads();
  float share[4] = {};
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    const float by = exp2f(tile_top[h] - most[h]) / total[h];
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (inside) share[i] = fmaxf(share[i], __int_as_float((int)sum[h].bits[i]) * by);
  }
  // Maxima may be of refined logits, beside which the totals of what is resident vanish.
#pragma unroll
  for (int i = 0; i < 4; i++) share[i] = fminf(share[i], 1.0f);
  if (inside) *(float4*)(shares + (size_t)owner * groups + first) = float4{share[0], share[1], share[2], share[3]};
#pragma unroll
  for (int i = 0; i < 4; i++) tally(counted, inside ? (int)(__float_as_uint(share[i]) >> BIN_SHIFT) : -1, lane);
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (counted[i]) atomicAdd(bins + (size_t)owner * BINS + i, counted[i]);
}

// The bin in which the `wanted`-th largest lies, and how many are still wanted of those in it. A thread has two bins.
template <int THREADS>
__device__ __forceinline__ Digit digit_of(const u32* bins, int wanted, int* each, Digit* found, int warp, int lane) {
  const int high = BINS - 1 - 2 * threadIdx.x;
  const int upper = 2 * threadIdx.x < BINS ? bins[high] : 0, lower = 2 * threadIdx.x < BINS ? bins[high - 1] : 0;
  const int above = scan<THREADS / 32>(upper + lower, each, warp, lane).before;
  if (above < wanted && wanted <= above + upper + lower) {
    const bool in_upper = wanted <= above + upper;
    *found = {in_upper ? high : high - 1, wanted - above - (in_upper ? 0 : upper)};
  }
  __syncthreads();
  return *found;
}

// The part of a KV head's shares that the block holds, four in a row at a time. Where there are none: below any share.
template <int THREADS>
struct Held {
  static const int FOURS = 8, ALL = 4 * FOURS * THREADS;
  Four of[FOURS];
  __device__ __forceinline__ int first(int base, int j) const { return base + 4 * ((int)threadIdx.x + THREADS * j); }
  __device__ __forceinline__ void load(const float* shares, int base, int count) {
#pragma unroll
    for (int j = 0; j < FOURS; j++)
      of[j] = first(base, j) < count ? load_four(shares + first(base, j)) : Four{LANES, LANES, LANES, LANES};
  }
};

// How many of those before are above the floor, and, in the upper half, how many lie on it; `rows` and `all` are shared.
template <int THREADS>
__device__ __forceinline__ void rank(u32 (&before)[Held<THREADS>::FOURS], const Held<THREADS>& held, int floor,
                                     u32 (*rows)[THREADS / 32], u32* all, int warp, int lane) {
  const int FOURS = Held<THREADS>::FOURS, WARPS = THREADS / 32;
  static_assert(WARPS >= FOURS, "a warp adds up a row");
  auto upto = [&](u32 sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const u32 left = __shfl_up_sync(LANES, sum, step);
      if (lane >= step) sum += left;
    }
    return sum;
  };
#pragma unroll
  for (int j = 0; j < FOURS; j++) {
    u32 mine = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) mine += ((int)held.of[j].bits[i] > floor) + ((u32)((int)held.of[j].bits[i] == floor) << 16);
    const u32 sum = upto(mine);
    before[j] = sum - mine;
    if (lane == 31) rows[j][warp] = sum;
  }
  __syncthreads();
  if (warp < FOURS) {
    const u32 own = lane < WARPS ? rows[warp][lane] : 0, sum = upto(own);
    if (lane < WARPS) rows[warp][lane] = sum - own;
    if (lane == 31) all[warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < FOURS; j++) before[j] += rows[j][warp];
}

// Lists the selected groups of a KV head, ascending, and leaves the key of the weakest. Blocks: batch · kv_heads.
template <int THREADS>
__global__ void __launch_bounds__(THREADS)
kv_choose(const int* positions, const float* shares, u32* bins, i64* floors, int* chosen, u32* strengths, int* found,
          int kv_heads, int most_groups, int room, int of_tile, i64 numerator, i64 denominator) {
  static_assert(2 * THREADS >= BINS, "a thread has two bins");
  typedef Held<THREADS> Part;
  __shared__ u32 counted[BINS], rows[Part::FOURS][THREADS / 32], all[Part::FOURS];
  __shared__ int each[THREADS / 32];
  __shared__ Digit digit;
  const int owner = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  shares += (size_t)owner * most_groups;
  bins += (size_t)owner * BINS;
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int count = groups_of(positions, owner / kv_heads, of_tile);
  const int selected = count ? (int)max(count * numerator / denominator, (i64)1) : 0;
  if (threadIdx.x == 0) found[owner] = selected;
  if (!count) {
    if (threadIdx.x == 0) floors[owner] = 0x7FFFFFFFFFFFFFFFll;
    return;
  }
  Part held;
  held.load(shares, 0, count);
  for (int i = threadIdx.x; i < BINS; i += THREADS) counted[i] = load_word(bins + i), bins[i] = 0;
  __syncthreads();
  Digit at = digit_of<THREADS>(counted, selected, each, &digit, warp, lane);
  u32 floor = (u32)at.bin << BIN_SHIFT;
#pragma unroll
  for (int low = BIN_SHIFT - DIGIT; low > -DIGIT; low -= DIGIT) {  // bits 8 to 18, then 0 to 7
    const int shift = max(low, 0), bits = min(DIGIT, DIGIT + low);
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) counted[i] = 0;
    __syncthreads();
    for (int base = 0; base < count; base += Part::ALL) {
      if (count > Part::ALL) held.load(shares, base, count);
#pragma unroll
      for (int i = 0; i < 4 * Part::FOURS; i++) {
        const u32 share = held.of[i / 4].bits[i % 4];
        if ((share ^ floor) >> (shift + bits) == 0) atomicAdd(counted + (share >> shift & ((1 << bits) - 1)), 1u);
      }
    }
    __syncthreads();
    at = digit_of<THREADS>(counted, at.wanted, each, &digit, warp, lane);
    floor |= (u32)at.bin << shift;
  }
  int above = 0, level = 0;  // selected so far of those above the floor, and how many lie on it
  for (int base = 0; base < count; base += Part::ALL) {
    if (count > Part::ALL) held.load(shares, base, count);
    u32 before[Part::FOURS], start = 0;
    __syncthreads();
    rank<THREADS>(before, held, (int)floor, rows, all, warp, lane);
#pragma unroll
    for (int j = 0; j < Part::FOURS; j++) {
      int ups = above + (start + before[j] & 0xFFFF), ties = level + (start + before[j] >> 16);
      start += all[j];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int share = (int)held.of[j].bits[i], group = held.first(base, j) + i;
        const bool tie = share == (int)floor;
        if (share < (int)floor || (tie && ties >= at.wanted)) continue;
        const size_t place = (size_t)owner * room + ups + min(ties, at.wanted);
        chosen[place] = group, strengths[place] = (u32)share;
        if (tie && ties == at.wanted - 1) floors[owner] = (i64)floor << 32 | (0x7FFFFFFF - group);
        if (tie) ties++;
        else ups++;
      }
    }
    above += start & 0xFFFF, level += start >> 16;
  }
}
