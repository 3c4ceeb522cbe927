// Attention of new tokens to a low-bit KV cache; kv_attend.py gives the formula and every operand.
//
// A block shares a part of the units of one KV head among its warps: pieces of 16 tokens in float16, then tiles of 128
// tokens in low bits. Copies of a warp's next tile run while it works on this one. Warps of a block are merged here,
// blocks by the kernel that comes after.

#include "kv_beside.cuh"
#include "kv_correct.cuh"
#include "kv_tiles.cuh"

const int WARPS = 4, PIECE = 16;

struct Exact {  // [batch, kv_heads, 128, D] float16
  u16 *sink_keys, *sink_values, *tail_keys, *tail_values;
};
struct Result {  // pieces a head: blocks here, the rest is for whoever refines
  float *queries, *parts, *tops, *totals;
  float *sums, *tile_tops;  // [batch, heads, tiles · groups] and [batch, heads, tiles], relative to 2^tile_tops
  float* changes;           // of totals by refinement, where there is any
};

// A head of D channels, channel lane + 32i in x[i], turned by the normalised Hadamard matrix.
template <int D>
__device__ __forceinline__ void turn(float (&x)[D / 32], int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2)
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const float other = __shfl_xor_sync(LANES, x[i], step);
      x[i] = lane & step ? other - x[i] : x[i] + other;
    }
#pragma unroll
  for (int step = 1; step < D / 32; step *= 2)
#pragma unroll
    for (int i = 0; i < D / 32; i++)
      if (!(i & step)) {
        const float low = x[i], high = x[i + step];
        x[i] = low + high, x[i + step] = low - high;
      }
#pragma unroll
  for (int i = 0; i < D / 32; i++) x[i] *= D == 128 ? 0.08838834764831845f : 0.125f;
}

// Queries of one KV head, turned and scaled for powers of two: as they are for later kernels, and for this one in
// shared memory below 1, with what undoes that in `units`. Heads that there are not are zeros.
template <int D, int HEADS, int SETS>
__device__ __forceinline__ void take_queries(float* queries, float* units, const u16* from, float* keep, int warp, int lane) {
  for (int head = warp; head < 4 * SETS; head += WARPS) {
    float x[D / 32] = {}, most = 0;
    if (head < HEADS) {
#pragma unroll
      for (int i = 0; i < D / 32; i++) x[i] = low_half(load_half(from + head * D + lane + 32 * i));
      turn<D>(x, lane);
    }
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      x[i] *= 1.4426950408889634f * (D == 128 ? 0.08838834764831845f : 0.125f);
      if (keep && head < HEADS) keep[head * D + lane + 32 * i] = x[i];
      most = fmaxf(most, fabsf(x[i]));
    }
#pragma unroll
    for (int step = 1; step < 32; step *= 2) most = fmaxf(most, __shfl_xor_sync(LANES, most, step));
    const int exponent = max((int)(__float_as_uint(most) >> 23) - 126, -100);
#pragma unroll
    for (int i = 0; i < D / 32; i++) {
      const int c = lane + 32 * i;
      queries[head * D + spot(c & ~3) + (c & 3)] = x[i] * two_to(-exponent);
    }
    if (lane == 0) units[head] = two_to(exponent);
  }
}

template <int D>
__device__ __forceinline__ void store_turned(u16* to, const u16* from, int lane) {
  float x[D / 32];
#pragma unroll
  for (int i = 0; i < D / 32; i++) x[i] = low_half(load_half(from + lane + 32 * i));
  turn<D>(x, lane);
#pragma unroll
  for (int i = 0; i < D / 32; i++) to[lane + 32 * i] = (u16)halves(x[i], 0);
}

// This lane's channels D/8 · g … of a token in float16.
template <int D>
__device__ __forceinline__ void load_channels(float (&to)[D / 8], const u16* row) {
#pragma unroll
  for (int i = 0; i < D / 64; i++) {
    const uint4 v = load_exact(row + 8 * i);
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int j = 0; j < 4; j++) to[8 * i + 2 * j] = low_half(words[j]), to[8 * i + 2 * j + 1] = high_half(words[j]);
  }
}

// Up to 16 tokens in float16.
template <int D, int SETS>
__device__ __forceinline__ void attend_piece(State<D, SETS>& state, const u16* keys, const u16* values, int count,
                                             const float* queries, const float* units, int g, int q) {
  const int first = D / 8 * g;
  float logits[SETS][PIECE][1];
#pragma unroll
  for (int t = 0; t < PIECE; t++) {
    float key[D / 8];
    load_channels<D>(key, keys + min(t, count - 1) * D + first);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      const float* query = queries + (q + 4 * set) * D;
      float sum = 0;
#pragma unroll
      for (int c = 0; c < D / 8; c += 4) {
        const float4 x = *(const float4*)(query + spot(first + c));
        sum += x.x * key[c] + x.y * key[c + 1] + x.z * key[c + 2] + x.w * key[c + 3];
      }
      logits[set][t][0] = t < count ? sum_over_rows(sum) * units[q + 4 * set] : NONE;
    }
  }
  weigh<D>(state, logits, false, g == 0);
#pragma unroll
  for (int t = 0; t < PIECE; t++) {
    float value[D / 8];
    load_channels<D>(value, values + min(t, count - 1) * D + first);
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int c = 0; c < D / 8; c++) state.out[set][c] += logits[set][t][0] * value[c];
  }
}

// Weights of a tile's groups of TOKENS tokens, and the maximum they are relative to.
template <int D, int HEADS, int TOKENS, int SETS>
__device__ __forceinline__ void tell_groups(const State<D, SETS>& state, const float (&weights)[SETS][4][4],
                                            const Result& to, size_t head0, int tiles, int tile, int g, int q) {
  const int QUADS = TOKENS > 4 ? TOKENS / 4 : 1;
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    const int head = q + 4 * set;
    float* sums = to.sums + ((head0 + head) * tiles + tile) * (TILE / TOKENS);
#pragma unroll
    for (int block = 0; block < 4; block++) {
      const float* w = weights[set][block];
      const int quad = 8 * block + g;
      if (TOKENS == 2) {
        if (head < HEADS) *(float2*)(sums + 2 * quad) = float2{w[0] + w[1], w[2] + w[3]};
        continue;
      }
      float sum = (w[0] + w[1]) + (w[2] + w[3]);
      if (TOKENS >= 8) sum += __shfl_xor_sync(LANES, sum, 4);
      if (TOKENS >= 16) sum += __shfl_xor_sync(LANES, sum, 8);
      if (head < HEADS && quad % QUADS == 0) sums[quad / QUADS] = sum;
    }
    if (head < HEADS && g == 0) to.tile_tops[(head0 + head) * tiles + tile] = state.most[set];
  }
}

// Pieces in float16 of this warp, the newest token's after it was stored.
template <int D, int SETS>
__device__ __forceinline__ void attend_pieces(State<D, SETS>& state, const Exact& exact, const u16* new_key,
                                              const u16* new_value, size_t of_head, int position, int unit, int stride,
                                              const float* queries, const float* units, int lane) {
  const int in_sink = min(position + 1, TILE), in_tail = position >= TILE ? position % TILE + 1 : 0;
  const int of_sink = (in_sink + PIECE - 1) / PIECE, pieces = of_sink + (in_tail + PIECE - 1) / PIECE;
  for (; unit < pieces; unit += stride) {
    const bool sink = unit < of_sink;
    const int start = PIECE * (sink ? unit : unit - of_sink), held = (sink ? in_sink : in_tail) - start;
    u16* keys = (sink ? exact.sink_keys : exact.tail_keys) + (of_head * TILE + start) * D;
    u16* values = (sink ? exact.sink_values : exact.tail_values) + (of_head * TILE + start) * D;
    const int now = position % TILE - start;
    if (sink == (position < TILE) && now >= 0 && now < PIECE) {
      store_turned<D>(keys + now * D, new_key, lane);
      store_turned<D>(values + now * D, new_value, lane);
      __syncwarp();
    }
    attend_piece<D, SETS>(state, keys, values, min(held, PIECE), queries, units, lane / 4, lane % 4);
  }
}

// What a block's warps changed by refinement, kept until they are merged: an output of all heads each, `stride` apart.
template <int HEADS>
struct Changed {
  float *mixed, *most, *total;  // the latter two [warps, HEADS]
  int stride;
};

// The block's warps as one part, with what they changed if anything; `memory` is free.
template <int D, int HEADS, int SETS, bool REFINED>
__device__ __forceinline__ void merge_warps(State<D, SETS>& state, float* memory, const Changed<HEADS>& changed,
                                            const Result& to, size_t head0, int pieces, int piece, int warp, int lane) {
  __shared__ float most[WARPS][4 * SETS], total[WARPS][4 * SETS];
  const int g = lane / 4, q = lane % 4;
  __syncthreads();
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    const int head = q + 4 * set;
    const float sum = sum_over_rows(state.total[set]);
    if (g == 0) most[warp][head] = state.most[set], total[warp][head] = sum;
    if (head >= HEADS) continue;
#pragma unroll
    for (int c = 0; c < D / 8; c++) memory[(warp * HEADS + head) * D + D / 8 * g + c] = state.out[set][c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * D; i += 32 * WARPS) {
    const int head = i / D;
    float top = NONE, sum = 0, change = 0, out = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
      top = fmaxf(top, most[w][head]);
      if (REFINED) top = fmaxf(top, changed.most[w * HEADS + head]);
    }
    if (top > NONE) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float keep = power(most[w][head] - top);
        sum += keep * total[w][head];
        out += keep * memory[w * HEADS * D + i];
      }
      if (REFINED) {
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float keep = power(changed.most[w * HEADS + head] - top);
          change += keep * changed.total[w * HEADS + head];
          out += keep * changed.mixed[w * changed.stride + i];
        }
      }
    }
    const size_t at = (head0 + head) * pieces + piece;
    to.parts[at * D + i % D] = out;
    if (i % D == 0) to.tops[at] = top, to.totals[at] = sum;
    if (REFINED && i % D == 0) to.changes[at] = change;
  }
}

struct Given {  // what a launch is about
  const u16 *queries, *new_keys, *new_values;
  const int *positions, *table;
  Half keys, values;
  Exact exact;
  Result result;
  int kv_heads, splits, pieces, most_tiles;
};

// What fetched records change of the block's part: every split-th of them, the warps in turns.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int GROUP>
__device__ __forceinline__ void correct_split(const Given& in, const Fetched& fetched, const Changed<HEADS>& to,
                                              const float* queries, const float* units, const int* blocks, int split,
                                              int of_head, int warp, int lane) {
  const int C = D / 32;
  float query[HEADS][C];
#pragma unroll
  for (int h = 0; h < HEADS; h++)
#pragma unroll
    for (int c = 0; c < C; c++) {
      const int channel = C * lane + c;
      query[h][c] = queries[h * D + spot(channel & ~3) + (channel & 3)] * units[h];
    }
  Change<D, HEADS> state = {};
#pragma unroll
  for (int h = 0; h < HEADS; h++) state.top[h] = NONE;
  float* mixed = to.mixed + warp * to.stride;  // until the end the warp's records go through there
  correct_fetched<D, KEY_BITS, VALUE_BITS, KEY_FINE, VALUE_FINE, HEADS, GROUP>(
      state, query, in.keys, in.values, blocks, fetched, of_head, in.kv_heads, warp * in.splits + split,
      WARPS * in.splits, (uint4*)mixed, lane);
  __syncwarp();
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (lane == 0) to.most[warp * HEADS + h] = state.top[h], to.total[warp * HEADS + h] = state.total[h];
#pragma unroll
    for (int c = 0; c < C; c++) mixed[h * D + C * lane + c] = state.mixed[h][c];
  }
}

// One block's part. TOKENS: tokens of a group whose weights are told, 0 for none. REFINED: by what was fetched.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int TOKENS, bool REFINED>
__device__ __forceinline__ void attend_split(const Given& in, const Fetched& fetched, int split, int of_head) {
  const int SETS = HEADS > 4 ? 2 : 1;
  typedef Staged<D, KEY_BITS, true> Keys;
  typedef Staged<D, VALUE_BITS, false> Values;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, splits = in.splits;
  const int sequence = of_head / in.kv_heads;
  const size_t head0 = (size_t)of_head * HEADS;
  float* staged_queries = (float*)block_memory;
  float* units = staged_queries + 4 * SETS * D;
  u8* all = (u8*)(units + 4 * SETS);
  u8 *keys = all + warp * (Keys::BYTES + Values::BYTES), *values = keys + Keys::BYTES;
  const int position = load_int(in.positions + sequence), tiles = max(0, position / TILE - 1);
  const int in_tail = position >= TILE ? position % TILE + 1 : 0;
  const int before = (min(position + 1, TILE) + PIECE - 1) / PIECE + (in_tail + PIECE - 1) / PIECE;
  const int stride = splits * WARPS, unit = split * WARPS + warp;
  // Pieces come first in the order of units, and a warp's first tile is under way while it attends to them.
  int tile = unit < before ? unit + (before - unit + stride - 1) / stride * stride - before : unit - before;
  const int* blocks = in.table + (size_t)sequence * in.most_tiles;
  auto at = [&](int block) { return (long long)block * in.kv_heads + of_head % in.kv_heads; };
  if (tile < tiles) {
    const long long first = at(load_int(blocks + tile));
    Keys::copy(keys, in.keys, first, lane);
    commit_copies();
    Values::copy(values, in.values, first, lane);
    commit_copies();
  }
  int next = tile + stride < tiles ? load_int(blocks + tile + stride) : 0;
  take_queries<D, HEADS, SETS>(staged_queries, units, in.queries + head0 * D,
                               split ? nullptr : in.result.queries + head0 * D, warp, lane);
  __syncthreads();
  float* after = (float*)(all + WARPS * (Keys::BYTES + Values::BYTES));
  const int RECORD = (TOKENS * D * (KEY_FINE + VALUE_FINE) / 8 + 16) / 4, KEPT = HEADS * D > RECORD ? HEADS * D : RECORD;
  const Changed<HEADS> changed = {after + 2 * WARPS * HEADS, after, after + WARPS * HEADS, KEPT};
  if constexpr (REFINED)
    correct_split<D, KEY_BITS, VALUE_BITS, KEY_FINE, VALUE_FINE, HEADS, TOKENS ? TOKENS : 4>(
        in, fetched, changed, staged_queries, units, blocks, split, of_head, warp, lane);

  State<D, SETS> state = {};
#pragma unroll
  for (int set = 0; set < SETS; set++) state.most[set] = NONE;
  const size_t own = (size_t)of_head * D;
  attend_pieces<D, SETS>(state, in.exact, in.new_keys + own, in.new_values + own, of_head, position, unit, stride,
                         staged_queries, units, lane);
  for (; tile < tiles; tile += stride) {
    const bool more = tile + stride < tiles;
    float weights[SETS][4][4];
    wait_for_copies();
    __syncwarp();
    key_logits<D, KEY_BITS, SETS>(weights, keys, staged_queries, units, g, q);
    __syncwarp();
    if (more) Keys::copy(keys, in.keys, at(next), lane);
    commit_copies();
    weigh<D>(state, weights, true, true);
    if (TOKENS)
      tell_groups<D, HEADS, TOKENS ? TOKENS : 4, SETS>(state, weights, in.result, head0, in.most_tiles, tile, g, q);
    wait_for_copies();
    __syncwarp();
    mix_values<D, VALUE_BITS, SETS>(state, weights, values, g, q);
    __syncwarp();
    if (more) Values::copy(values, in.values, at(next), lane);
    commit_copies();
    if (tile + 2 * stride < tiles) next = load_int(blocks + tile + 2 * stride);
  }
  merge_warps<D, HEADS, SETS, REFINED>(state, (float*)all, changed, in.result, head0, in.pieces, split, warp, lane);
}

// Blocks: batch · kv_heads · splits.
template <int D, int KEY_BITS, int VALUE_BITS, int HEADS, int TOKENS>
__global__ void __launch_bounds__(32 * WARPS, HEADS > 4 ? 2 : 3)
kv_attend(const u16* queries, const u16* new_keys, const u16* new_values, const int* positions, const u8* key_codes,
          const u16* key_scale, const u16* key_zero, const u16* key_other, const u8* value_codes,
          const u16* value_scale, const u16* value_zero, const u16* value_other, const int* table, u16* sink_keys,
          u16* sink_values, u16* tail_keys, u16* tail_values, float* turned, float* parts, float* tops, float* totals,
          float* sums, float* tile_tops, int kv_heads, int splits, int pieces, int most_tiles) {
  const Given in = {queries, new_keys, new_values, positions, table,
                    {key_codes, key_scale, key_zero, key_other}, {value_codes, value_scale, value_zero, value_other},
                    {sink_keys, sink_values, tail_keys, tail_values},
                    {turned, parts, tops, totals, sums, tile_tops, nullptr},
                    kv_heads, splits, pieces, most_tiles};
  let_next_kernel_start();
  wait_for_previous_kernel();
  attend_split<D, KEY_BITS, VALUE_BITS, 0, 0, HEADS, TOKENS, false>(in, {}, blockIdx.x % splits, blockIdx.x / splits);
}

// The same, refined. Blocks: ERRAND_BLOCKS · owners for errands if there are any, and batch · kv_heads · splits.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int GROUP>
__global__ void __launch_bounds__(32 * WARPS, HEADS > 4 ? 2 : 3)
kv_attend_refined(const u16* queries, const u16* new_keys, const u16* new_values, const int* positions,
                  const u8* key_codes, const u16* key_scale, const u16* key_zero, const u16* key_other,
                  const u8* value_codes, const u16* value_scale, const u16* value_zero, const u16* value_other,
                  const int* table, u16* sink_keys, u16* sink_values, u16* tail_keys, u16* tail_values, float* turned,
                  float* parts, float* tops, float* totals, float* sums, float* tile_tops, int kv_heads, int splits,
                  int pieces, int most_tiles, float* changes, const u8* rows, const int* numbers,
                  const i64* errand, int owners, int room, int stride) {
  const Given in = {queries, new_keys, new_values, positions, table,
                    {key_codes, key_scale, key_zero, key_other}, {value_codes, value_scale, value_zero, value_other},
                    {sink_keys, sink_values, tail_keys, tail_values},
                    {turned, parts, tops, totals, sums, tile_tops, changes},
                    kv_heads, splits, pieces, most_tiles};
  const Fetched fetched = {rows, numbers, room, stride};
  let_next_kernel_start();
  wait_for_previous_kernel();
  const int other = errand ? (int)blockIdx.x - ERRAND_BLOCKS * owners : blockIdx.x;
  if (other < 0)
    run_errand<HEADS, TILE / GROUP, GROUP * D * (KEY_FINE + VALUE_FINE) / 128>(errand, blockIdx.x, owners,
                                                                               (u32*)block_memory);
  else
    attend_split<D, KEY_BITS, VALUE_BITS, KEY_FINE, VALUE_FINE, HEADS, GROUP, true>(in, fetched, other % splits,
                                                                                    other / splits);
}
