// Look-up of selected token groups, and what their refinement changes; kv_refine.py gives the formula.
//
// A warp handles a group at a time. Its record lies in host memory: one load a lane brings all of it, and what is
// resident of the group is read meanwhile. A lane has D/32 channels; sums over channels go through the warp. Warps of a
// block are merged here, blocks by the kernel that comes after. Which warp has which group is fixed, and so are sums.
#include "select.cuh"

typedef unsigned char u8;
const int TILE = 128;
#define NONE __int_as_float(0xFF800000)  // minus infinity

struct Half {  // keys or values of tiles [blocks, kv_heads, ...]
  const u8* codes;
  const u16 *scale, *zero, *other;
};
struct Lookup {  // cells of the attach block that each look-up needs, read once
  i64* block;
  const float* thresholds;
  int table;
  bool enabled;
  u64 directory, stamps;
  i64 last_chunk;
  u32 clock;
  __device__ __forceinline__ Lookup(i64* block, const float* thresholds, int table)
      : block(block), thresholds(thresholds), table(table) {
    enabled = load_cell(block + ENABLED) != 0;
    directory = (u64)load_cell(block + TABLES + TABLE_CELLS * table);
    stamps = (u64)load_cell(block + STAMPS);
    last_chunk = load_cell(block + LAST_CHUNK);
    clock = (u32)load_cell(block + CLOCK);
  }
};

// --- look-up ----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void ask(const Lookup& in, i64 oid, u32 share) {
  const i64 position = (i64)atomicAdd((u64*)(in.block + TAIL), 1ull);
  if (position >= load_cell(in.block + LIMIT)) {
    count(in.block + DROPPED, 1);
    return;
  }
  const i64 log2 = load_cell(in.block + RING_LOG2);
  const u64 lap = 1 + (u64)(position >> log2) % LAPS, score = score_of((int)share, 0x3F800000, in.thresholds);
  // SYNC: ring-entry (publish). One 8-byte store: a request announces no bytes, only itself.
  store_host_entry((u64)load_cell(in.block + RING) + 8 * (position & (((i64)1 << log2) - 1)),
                   lap << LAP_SHIFT | score << SCORE_SHIFT | (u64)in.table << TABLE_SHIFT | (u64)oid);
}

// Where each lane's record lies, 0 where it is absent or the lane has none; stamps, requests and counts.
__device__ __forceinline__ u64 look_up(const Lookup& in, bool known, i64 oid, u32 share, int* wanted, int* hits) {
  // SYNC: directory-entry (read).
  const u32 entry = known && in.enabled ? load_host_word(in.directory + 4 * (u64)oid) : QUARANTINED;
  const bool named = entry != ABSENT && entry != QUARANTINED;
  const u64 address = named ? address_of(in.block, entry, in.last_chunk) : 0;
  if (address) store_host_word(in.stamps + 4 * ((u64)entry - 1), in.clock);
  if (known) atomicAdd(wanted, 1);
  if (address) atomicAdd(hits, 1);
  count(in.block + RUBBISH, named && !address);
  count(in.block + DROPPED, known && !in.enabled);
  if (entry == ABSENT) ask(in, oid, share);
  return address;
}

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
struct State {  // of each query head: maximum so far, sum of weights, this lane's channels
  float top[HEADS], total[HEADS], mixed[HEADS][D / 32];
};

__device__ __forceinline__ float sum_over_lanes(float v) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) v += __shfl_xor_sync(EVERY, v, step);
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
__device__ __forceinline__ void weigh(State<D, HEADS>& state, float (&gone)[TOKENS][HEADS], float (&come)[TOKENS][HEADS]) {
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
__device__ __forceinline__ void mix(State<D, HEADS>& state, const float (&gone)[TOKENS][HEADS],
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

// The block's warps as one part.
template <int D, int HEADS, int WARPS>
__device__ __forceinline__ void merge_warps(const State<D, HEADS>& state, float* parts, float* tops, float* totals,
                                            size_t head0, int pieces, int piece, int warp, int lane) {
  __shared__ float most[WARPS][HEADS], total[WARPS][HEADS], memory[WARPS][HEADS * D];
#pragma unroll
  for (int h = 0; h < HEADS; h++) {
    if (lane == 0) most[warp][h] = state.top[h], total[warp][h] = state.total[h];
#pragma unroll
    for (int c = 0; c < D / 32; c++) memory[warp][h * D + D / 32 * lane + c] = state.mixed[h][c];
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
        out += keep * memory[w][i];
      }
    }
    const size_t at = (head0 + head) * pieces + piece;
    parts[at * D + i % D] = out;
    if (i % D == 0) tops[at] = top, totals[at] = sum;
  }
}

// Blocks: batch · kv_heads · refiners. A refiner's warps share every `refiners`-th of the chosen groups.
template <int D, int KEY_BITS, int VALUE_BITS, int KEY_FINE, int VALUE_FINE, int HEADS, int GROUP>
__global__ void __launch_bounds__(HEADS > 4 ? 128 : 256, 2)
kv_refine(const float* queries, const u8* key_codes, const u16* key_scale, const u16* key_zero, const u16* key_other,
          const u8* value_codes, const u16* value_scale, const u16* value_zero, const u16* value_other,
          const int* tile_blocks, const float* shares, const int* chosen, const int* found, float* parts, float* tops,
          float* totals, i64* block, const float* thresholds, const i64* bases, i64 first_oid, int table, int kv_heads,
          int splits, int refiners, int most_tiles, int room) {
  const int WARPS = HEADS > 4 ? 4 : 8, TOKENS = HEADS > 4 ? 2 : GROUP < 4 ? GROUP : 4, C = D / 32, OF_TILE = TILE / GROUP;
  const int PIECES = GROUP * D * (KEY_FINE + VALUE_FINE) / 128, DEEP = (PIECES + 31) / 32;
  __shared__ uint4 records[WARPS][PIECES + 1];  // a lane reads two bytes, of which the second may lie behind the last
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

  State<D, HEADS> state = {};
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
      uint4 piece[DEEP];
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (lane + 32 * d < PIECES) piece[d] = load_host_piece(at + 16 * (lane + 32 * d));
      const int token = number % OF_TILE * GROUP;
      Resident<D, KEY_BITS, VALUE_BITS, TOKENS> resident;
      resident.load(keys, values, tile, token, lane);
      __syncwarp();
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (lane + 32 * d < PIECES) records[warp][lane + 32 * d] = piece[d];
      __syncwarp();
      const u8 *of_keys = (const u8*)records[warp], *of_values = of_keys + GROUP * D * KEY_FINE / 8;
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
  }
  merge_warps<D, HEADS, WARPS>(state, parts, tops, totals, head0, splits + refiners, splits + refiner, warp, lane);
  if (threadIdx.x < 2) count(block + load_cell(block + TABLES + TABLE_CELLS * table + 2) + threadIdx.x, counts[threadIdx.x]);
}
