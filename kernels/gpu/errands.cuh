// What a product's launch does beside it, in blocks of its own: errands.py says what they are and lays out their fields.
#pragma once
#include "select.cuh"

struct Errand {
  i64 kind, first, blocks;  // the blocks first … first + blocks - 1 share it
  i64 field[13];
};
enum { SELECT = 0, FETCH = 1, ADD = 2 };

// Floats of shared memory that a block's errands take beside what they declare.
template <int THREADS>
constexpr int ERRAND_SCRATCH = 256 + 8 * THREADS;

template <int THREADS>
__device__ __forceinline__ void select_channels(const i64* f, int block, int blocks) {
  const Selecting s = {(const void*)f[0], (const float*)f[1], (i64*)f[2], (const float*)f[3], (int*)f[4], (u64*)f[5],
                       f[6], (int)f[7], (int)f[8], (int)f[9], (int)f[10]};
  for (int chunk = block; chunk * CHUNK < s.width; chunk += blocks) {
    if (s.gain) select_chunk<0, THREADS>(s, chunk);
    else select_chunk<1, THREADS>(s, chunk);
  }
}

// Pieces of 16 bytes begin … end - 1, counted through all records, to the rows of those that are present.
template <int THREADS>
__device__ __forceinline__ void fetch_records(const i64* f, int block, int blocks) {
  constexpr int DEEP = 8;  // pieces a thread has under way: the link is full from about 80 KiB
  const i64* addresses = (const i64*)f[0];
  uint4* rows = (uint4*)f[1];
  const int pieces = (int)f[2], stride = (int)f[3], end = (int)f[5];
  for (int at = (int)f[4] + block * THREADS * DEEP; at < end; at += blocks * THREADS * DEEP) {
    u64 from[DEEP];
    int to[DEEP];
    uint4 piece[DEEP];
#pragma unroll
    for (int d = 0; d < DEEP; d++) {
      const int i = at + d * THREADS + threadIdx.x, record = i / pieces;
      from[d] = i < end ? (u64)load_cell(addresses + record) : 0;
      to[d] = record * stride + (i - record * pieces);
      if (from[d]) from[d] += 16 * (u64)(i - record * pieces);
    }
#pragma unroll
    for (int d = 0; d < DEEP; d++)
      if (from[d]) piece[d] = load_host_piece(from[d]);
#pragma unroll
    for (int d = 0; d < DEEP; d++)
      if (from[d]) rows[to[d]] = piece[d];
  }
}

// y += scale ⊙ Σ x · (code - 8) over fetched rows. A block has 64 words of eight outputs at a time, and its groups of 64
// threads share the records; sums have a fixed order, so equal operands give equal bits.
template <int THREADS>
__device__ __forceinline__ void add_records(const i64* f, int block, int blocks, float* scratch) {
  constexpr int WORDS = THREADS < 64 ? THREADS : 64, GROUPS = THREADS / WORDS, BATCH = 256, DEEP = 8;
  constexpr int OWN = 8 * WORDS / THREADS;  // outputs of a column that a thread adds up
  static_assert(OWN >= 1 && BATCH + GROUPS * 8 * WORDS <= ERRAND_SCRATCH<THREADS>, "threads, or scratch");
  float* weight = scratch;
  auto sums = (float(*)[8 * WORDS])(scratch + BATCH);
  const u16* x = (const u16*)f[0];
  const int* channels = (const int*)f[1];
  const i64* addresses = (const i64*)f[2];
  const u32* rows = (const u32*)f[3];
  const int stride = (int)f[4], selected = (int)f[5], outputs = (int)f[8];
  const float* scale = (const float*)f[6];
  float* y = (float*)f[7];
  const int word0 = threadIdx.x % WORDS, group = threadIdx.x / WORDS;
  for (int column = block; column * 8 * WORDS < outputs; column += blocks) {
    const int word = column * WORDS + word0, first = column * 8 * WORDS + threadIdx.x;
    const bool inside = 8 * word < outputs;
    // Whatever needs no other number is asked for at once: a short launch waits for the last of these.
    float before[OWN], factor[OWN], sum[8] = {};
#pragma unroll
    for (int o = 0; o < OWN; o++)
      if (first + o * THREADS < outputs) before[o] = y[first + o * THREADS], factor[o] = scale[first + o * THREADS];
    for (int base = 0; base < selected; base += BATCH) {
      const int records = min(BATCH, selected - base);
      u32 codes[DEEP];
      auto take = [&](int record) {
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
          const int i = record + d * GROUPS;
          codes[d] = inside && i < records ? load_word(rows + (i64)(base + i) * stride + word) : 0;
        }
      };
      take(group);
      __syncthreads();
      // An absent record's input must not come near the sum: it may be infinite.
      for (int i = threadIdx.x; i < records; i += THREADS) {
        const int channel = load_int(channels + base + i);
        weight[i] = load_cell(addresses + base + i) ? half_to_float(load_half(x + channel)) : 0;
      }
      __syncthreads();
      for (int record = group; record < records; record += GROUPS * DEEP) {
        if (record != group) take(record);
#pragma unroll
        for (int d = 0; d < DEEP; d++) {
          const int i = record + d * GROUPS;
          const float by = i < records ? weight[i] : 0;
#pragma unroll
          for (int n = 0; n < 8; n++) sum[n] += by * (float)((int)(codes[d] >> 4 * n & 15) - 8);
        }
      }
    }
#pragma unroll
    for (int n = 0; n < 8; n++) sums[group][n * WORDS + word0] = sum[n];
    __syncthreads();
#pragma unroll
    for (int o = 0; o < OWN; o++) {
      const int i = threadIdx.x + o * THREADS;
      if (first + o * THREADS >= outputs) continue;
      float total = 0;
#pragma unroll
      for (int s = 0; s < GROUPS; s++) total += sums[s][i % 8 * WORDS + i / 8];
      y[first + o * THREADS] = before[o] + factor[o] * total;
    }
  }
}

// The errands of block `block`, one after another; `errands` is constant, all else waits for the kernel before.
template <int THREADS>
__device__ __forceinline__ void run_errands(const Errand* errands, int count, int block, float* scratch) {
  for (int i = 0; i < count; i++) {
    const Errand* errand = errands + i;
    const int blocks = (int)errand->blocks, own = block - (int)errand->first;
    if (own < 0 || own >= blocks) continue;
    const i64* f = errand->field;
    if (errand->kind == SELECT) select_channels<THREADS>(f, own, blocks);
    else if (errand->kind == FETCH) fetch_records<THREADS>(f, own, blocks);
    else add_records<THREADS>(f, own, blocks, scratch);
  }
}
