// What refinement changes of attention, group by group; kv_refine.py gives the formula.
//
// A warp handles a group at a time: its record lies in shared memory, what is resident of it is read in place. A lane has
// D/32 channels; sums over channels go through the warp.
#pragma once
#include "kv_half.cuh"

// --- codes ------------------------------------------------------------------------------------------------------------

// A row of a plane: one byte each of this lane's channels.
template <int C>
__device__ __forceinline__ u32 load_row(const u8* row, int lane) {
  if (C == 4) return load_word(row + 4 * lane);
  return load_half((const u16*)(row + 2 * lane));
}
template <int C>
__device__ __forceinline__ void load_channels(float (&to)[C], const u16* at, int lane) {
#pragma unroll
  for (int i = 0; i < C; i += 2) {
    const u32 pair = load_word(at + C * lane + i);
    to[i] = half_to_float(pair), to[i + 1] = half_to_float(pair >> 16);
  }
}

// Resident codes of TOKENS tokens in a row (1, 2 or 4, aligned), a byte of each channel holding those of neighbours.
template <int D, int BITS, int TOKENS>
struct Codes {
  static const int C = D / 32, FIRST = BITS == 3 ? 2 : BITS, ROWS = TOKENS * FIRST > 8 ? TOKENS * FIRST / 8 : 1;
  u32 low[ROWS], high;
  __device__ __forceinline__ void load(const u8* tile, int token, int lane) {
    const int shift = token * FIRST % 8;  // not 0 only where all lie in one byte
#pragma unroll
    for (int row = 0; row < ROWS; row++) low[row] = load_row<C>(tile + (token * FIRST / 8 + row) * D, lane) >> shift;
    high = BITS == 3 ? load_row<C>(tile + 32 * D + token / 8 * D, lane) >> token % 8 : 0;
  }
  __device__ __forceinline__ int at(int t, int c) const {
    const int code = low[t * FIRST / 8] >> (8 * c + t * FIRST % 8) & ((1 << FIRST) - 1);
    return BITS == 3 ? code | (high >> (8 * c + t) & 1) << 2 : code;
  }
};

// How far refinement moves a code: to the middle of its part of the code's interval. `parts` are of one token.
template <int D, int BITS, int FINE>
__device__ __forceinline__ void load_moves(float (&to)[D / 32], const int (&codes)[D / 32], const u8* parts, int lane) {
  const int C = D / 32, first = C * FINE * lane;
  const u32 bits = FINE ? (parts[first / 8] | parts[first / 8 + 1] << 8) >> first % 8 : 0;
#pragma unroll
  for (int c = 0; c < C; c++) {
    const bool lowest = codes[c] == 0, outermost = lowest || codes[c] == (1 << BITS) - 1;
    const float middle = ((float)(bits >> FINE * c & ((1 << FINE) - 1)) + 0.5f) * (1.0f / (1 << FINE));
    to[c] = FINE ? middle * (outermost ? 0.5f : 1.0f) - (lowest ? 0.0f : 0.5f) : 0;
  }
}

// --- sums -------------------------------------------------------------------------------------------------------------

template <int D, int HEADS>
struct Change {  // of each query head: maximum so far, sum of weights, this lane's channels
  float top[HEADS], total[HEADS], mixed[HEADS][D / 32];
};

__device__ __forceinline__ float sum_over_lanes(float v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) v += __shfl_xor_sync(LANES, v, step);
  return v;
}

// What is resident of some tokens, under way while their record is.
template <int D, int KEY_BITS, int VALUE_BITS, int TOKENS>
struct Resident {
  static const int C = D / 32;
  Codes<D, KEY_BITS, TOKENS> key;
  Codes<D, VALUE_BITS, TOKENS> value;
  float key_scale[C], key_zero[C], key_other[TOKENS], value_scale[TOKENS], value_zero[TOKENS], value_other[C];
  __device__ __forceinline__ void load(const Half& keys, const Half& values, i64 tile, int token, int lane) {
    key.load(keys.codes + tile * (TILE * D * KEY_BITS / 8), token, lane);
    value.load(values.codes + tile * (TILE * D * VALUE_BITS / 8), token, lane);
    load_channels<C>(key_scale, keys.scale + tile * D, lane);
    load_channels<C>(key_zero, keys.zero + tile * D, lane);
    load_channels<C>(value_other, values.other + tile * D, lane);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      const i64 at = tile * TILE + token + t;
      key_other[t] = half_to_float(load_half(keys.other + at));
      value_scale[t] = half_to_float(load_half(values.scale + at));
      value_zero[t] = half_to_float(load_half(values.zero + at));
    }
  }
};

// Logits of tokens by their resident codes, and by their refined ones.
template <int D, int KEY_BITS, int VALUE_BITS, int FINE, int HEADS, int TOKENS>
__device__ __forceinline__ void logits_of(float (&before)[TOKENS][HEADS], float (&after)[TOKENS][HEADS],
                                          const float (&queries)[HEADS][D / 32],
                                          const Resident<D, KEY_BITS, VALUE_BITS, TOKENS>& of, const u8* parts, int lane) {
  const int C = D / 32;
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    int code[C];
    float move[C];
#pragma unroll
    for (int c = 0; c < C; c++) code[c] = of.key.at(t, c);
    load_moves<D, KEY_BITS, FINE>(move, code, parts + t * (D * FINE / 8), lane);
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
      float resident = 0, more = 0;
#pragma unroll
      for (int c = 0; c < C; c++) {
        resident += queries[h][c] * (code[c] * of.key_scale[c] + of.key_zero[c]);
        more += queries[h][c] * (move[c] * of.key_scale[c]);
      }
      before[t][h] = sum_over_lanes(resident) * of.key_other[t];
      after[t][h] = before[t][h] + sum_over_lanes(more) * of.key_other[t];
    }
  }
}

// Logits become weights relative to the new maximum, by refined codes and what they replace.
template <int D, int HEADS, int TOKENS>
__device__ __forceinline__ void weigh(Change<D, HEADS>& state, float (&gone)[TOKENS][HEADS], float (&come)[TOKENS][HEADS]) {
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    float most = state.top[h], sum = 0;
#pragma unroll
    for (int t = 0; t < TOKENS; t++) most = fmaxf(most, fmaxf(gone[t][h], come[t][h]));
    const float keep = exp2f(state.top[h] - most);
#pragma unroll
    for (int t = 0; t < TOKENS; t++) {
      gone[t][h] = exp2f(gone[t][h] - most), come[t][h] = exp2f(come[t][h] - most);
      sum += come[t][h] - gone[t][h];
    }
    state.top[h] = most, state.total[h] = state.total[h] * keep + sum;
#pragma unroll
    for (int c = 0; c < D / 32; c++) state.mixed[h][c] *= keep;
  }
}

template <int D, int KEY_BITS, int VALUE_BITS, int FINE, int HEADS, int TOKENS>
__device__ __forceinline__ void mix(Change<D, HEADS>& state, const float (&gone)[TOKENS][HEADS],
                                    const float (&come)[TOKENS][HEADS],
                                    const Resident<D, KEY_BITS, VALUE_BITS, TOKENS>& of, const u8* parts, int lane) {
  const int C = D / 32;
#pragma unroll
  for (int t = 0; t < TOKENS; t++) {
    int code[C];
    float move[C];
#pragma unroll
    for (int c = 0; c < C; c++) code[c] = of.value.at(t, c);
    load_moves<D, VALUE_BITS, FINE>(move, code, parts + t * (D * FINE / 8), lane);
#pragma unroll
    for (int c = 0; c < C; c++) {
      const float resident = (code[c] * of.value_scale[t] + of.value_zero[t]) * of.value_other[c];
      const float more = move[c] * of.value_scale[t] * of.value_other[c];
#pragma unroll
      for (int h = 0; h < HEADS; h++)
        state.mixed[h][c] += (come[t][h] - gone[t][h]) * resident + come[t][h] * more;
    }
  }
}

// Adds what the refinement of one group changes: its record lies at `at`, in host memory or on the device, and goes
// through `record`, PIECES + 1 long, since a lane reads two bytes, of which the second may lie behind the last.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int GROUP, bool HOST>
__device__ __forceinline__ void correct_group(Change<D, HEADS>& state, const float (&query)[HEADS][D / 32],
                                              const Half& keys, const Half& values, i64 tile, int token, u64 at,
                                              uint4* record, int lane) {
  const int TOKENS = HEADS > 4 ? 2 : GROUP < 4 ? GROUP : 4;
  const int PIECES = GROUP * D * (KEY_FINE + VALUE_FINE) / 128, DEEP = (PIECES + 31) / 32;
  uint4 piece[DEEP];
#pragma unroll
  for (int d = 0; d < DEEP; d++) {
    const u64 from = at + 16 * (lane + 32 * d);
    if (lane + 32 * d < PIECES) piece[d] = HOST ? load_host_piece(from) : load_exact((const void*)from);
  }
  Resident<D, KEY_BITS, VALUE_BITS, TOKENS> resident;
  resident.load(keys, values, tile, token, lane);
  __syncwarp();
#pragma unroll
  for (int d = 0; d < DEEP; d++)
    if (lane + 32 * d < PIECES) record[lane + 32 * d] = piece[d];
  __syncwarp();
  const u8 *of_keys = (const u8*)record, *of_values = of_keys + GROUP * D * KEY_FINE / 8;
  for (int t = 0; t < GROUP; t += TOKENS) {
    float before[TOKENS][HEADS], after[TOKENS][HEADS];
    if (t) resident.load(keys, values, tile, token + t, lane);
    logits_of<D, KEY_BITS, VALUE_BITS, KEY_FINE, HEADS, TOKENS>(before, after, query, resident,
                                                                of_keys + t * (D * KEY_FINE / 8), lane);
    weigh<D, HEADS, TOKENS>(state, before, after);
    mix<D, KEY_BITS, VALUE_BITS, VALUE_FINE, HEADS, TOKENS>(state, before, after, resident,
                                                            of_values + t * (D * VALUE_FINE / 8), lane);
  }
}

// Where the parts of a KV head's query heads go; a head has so many of them.
struct Parts {
  float *mixed, *tops, *totals;
  size_t head0;
  int pieces, piece;
};

// The block's warps as one part; `memory` has room for WARPS · HEADS · D numbers.
template <int D, int HEADS, int WARPS>
__device__ __forceinline__ void merge_changes(const Change<D, HEADS>& state, float* memory, const Parts& to, int warp,
                                              int lane) {
  __shared__ float most[WARPS][HEADS], total[WARPS][HEADS];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (lane == 0) most[warp][h] = state.top[h], total[warp][h] = state.total[h];
#pragma unroll
    for (int c = 0; c < D / 32; c++) memory[(warp * HEADS + h) * D + D / 32 * lane + c] = state.mixed[h][c];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < HEADS * D; i += 32 * WARPS) {
    const int head = i / D;
    float top = NONE, sum = 0, out = 0;
#pragma unroll
    for (int w = 0; w < WARPS; w++) top = fmaxf(top, most[w][head]);
    if (top > NONE) {
#pragma unroll
      for (int w = 0; w < WARPS; w++) {
        const float keep = exp2f(most[w][head] - top);
        sum += keep * total[w][head];
        out += keep * memory[w * HEADS * D + i];
      }
    }
    const size_t at = (to.head0 + head) * to.pieces + to.piece;
    to.mixed[at * D + i % D] = out;
    if (i % D == 0) to.tops[at] = top, to.totals[at] = sum;
  }
}

// Records in device memory, [batch · kv_heads, room] of them.
struct Fetched {
  const u8* rows;      // a record every `stride` bytes
  const int* numbers;  // of the groups that they refine, -1 for none
  int room, stride;
};

// Adds every `stride`-th of a KV head's groups from `first` on to a warp's state; `record` as of correct_group.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int GROUP>
__device__ __forceinline__ void correct_fetched(Change<D, HEADS>& state, const float (&query)[HEADS][D / 32],
                                                const Half& keys, const Half& values, const int* blocks,
                                                const Fetched& from, int owner, int kv_heads, int first, int stride,
                                                uint4* record, int lane) {
  const int OF_TILE = TILE / GROUP;
  const int* numbers = from.numbers + (size_t)owner * from.room;
  const u8* rows = from.rows + (size_t)owner * from.room * from.stride;
  for (int start = first; start < from.room; start += 32 * stride) {
    const int own = start + lane * stride, group = own < from.room ? load_int(numbers + own) : -1;
    const int place = group < 0 ? 0 : load_int(blocks + group / OF_TILE);
    u32 left = __ballot_sync(LANES, group >= 0);
    while (left) {
      const int i = __ffs(left) - 1;
      left &= left - 1;
      const int number = __shfl_sync(LANES, group, i);
      const i64 tile = (i64)__shfl_sync(LANES, place, i) * kv_heads + owner % kv_heads;
      const u64 at = (u64)(rows + (size_t)(start + i * stride) * from.stride);
      correct_group<D, KEY_BITS, VALUE_BITS, KEY_FINE, VALUE_FINE, HEADS, GROUP, false>(
          state, query, keys, values, tile, number % OF_TILE * GROUP, at, record, lane);
    }
  }
}
