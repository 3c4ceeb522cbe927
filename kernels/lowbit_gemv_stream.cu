// Matrix-vector product with low-bit weights, one input: weights stream through shared memory.
//
// lowbit_gemv.py gives the formula and every byte of the operands. About one block a multiprocessor computes a tile of
// 16 rows after another; its warps share the strips of 256 channels, each with a ring of STAGES strips that it fills
// and empties by itself. The ring is filled before the kernel before this one has ended, since weights depend on
// nothing: so memory has no pause between launches. A warp's sums of a tile wait in shared memory until the end, where
// they are added in the order of warps: equal operands give equal bits.
#include "lowbit_codes.cuh"

#ifndef HOST_EMULATION
extern __shared__ uint4 block_memory[];
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the NEWEST ones.
template <int NEWEST>
__device__ __forceinline__ void wait_for_copies_before() {
  asm volatile("cp.async.wait_group %0;" :: "n"(NEWEST) : "memory");
}
#endif

template <int COUNT>
__device__ __forceinline__ void take(u32* to, const uint4* from, int stride) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    const uint4 v = from[i * stride];
    to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
  }
}

// Sums of 16 rows by the 256 channels of a strip; all eight columns of the tensor core's product have the same input,
// so each holds the sums. Groups are independent chains of products, which the device works on in turns.
template <int BITS, int GROUPS>
__device__ __forceinline__ void add_scaled(float (&sum)[4], const uint4* stage, const uint4* x, int g, int t) {
  constexpr int META = GROUPS / 2;  // uint4 of a row pair's scales and zeros
  u32 w[4 * BITS], m[4 * META];
  take<BITS>(w, stage + 4 * g + t, 32);
  take<META>(m, stage + 32 * BITS + g * META, 1);
  float part[GROUPS][4] = {};
#pragma unroll
  for (int step = 0; step < 8 / GROUPS; step++)
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      const u32 zero0 = __byte_perm(m[2 * group], 0, 0x3232u), zero1 = __byte_perm(m[2 * group + 1], 0, 0x3232u);
      const uint4 v = x[4 * (group * 8 / GROUPS + step) + t];
#pragma unroll
      for (int half = 0; half < 2; half++) {  // one product of 16 channels each
        const int i = 2 * (group * 8 / GROUPS + step) + half;
        u32 a[4];
        spread(a, nibbles<BITS>(&w[BITS * (i / 4)], i % 4), zero0 | 0xE400E400u, (zero1 << 4) | 0xD400D400u);
        multiply(part[group], a, half ? v.z : v.x, half ? v.w : v.y);
      }
    }
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    const float scale0 = low_half(m[2 * group]), scale1 = low_half(m[2 * group + 1]);
    sum[0] += scale0 * part[group][0], sum[2] += scale1 * part[group][2];
  }
}

// The same with values from the codebooks of rows g and g + 8, as two chains.
template <int BITS, int TABLE>
__device__ __forceinline__ void add_chosen(float (&sum)[4], const uint4* stage, const u32 (&table)[2][TABLE],
                                           const uint4* x, int g, int t) {
  u32 w[4 * BITS];
  take<BITS>(w, stage + 4 * g + t, 32);
  float part[2][4] = {};
#pragma unroll
  for (int i = 0; i < 16; i++) {
    const Picks by = picks<BITS>(nibbles<BITS>(&w[BITS * (i / 4)], i % 4));
    const uint4 v = x[4 * (i / 2) + t];
    u32 a[4];
    look_up<BITS>(a[0], a[2], table[0], by);
    look_up<BITS>(a[1], a[3], table[1], {by.entry >> 16, by.half >> 16});
    multiply(part[i % 2], a, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
  }
  sum[0] += part[0][0] + part[1][0], sum[2] += part[0][2] + part[1][2];
}

// GROUPS: groups in a strip, or 0 for codebooks. ONTO: add to y, else store. Each warp has at least one strip; `ahead`
// more strips of each, at most 32, are brought nearer meanwhile.
template <int BITS, int GROUPS, int WARPS, int STAGES, int ONTO>
__global__ void __launch_bounds__(32 * WARPS)
lowbit_stream(const uint4* words, const uint4* meta, const u16* x, float* y, int rows, int inputs, int strips,
              int tiles, int blocks, int ahead) {
  constexpr int SCALES = 4 * GROUPS, STAGE = 32 * BITS + SCALES;         // uint4 of a tile's strip
  constexpr int BOOKS = GROUPS ? 0 : 2 << BITS, TABLE = (1 << BITS) / 2;  // uint4 of a tile's codebooks, words of one
  const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  let_next_kernel_start();
  uint4* ring = block_memory + warp * (STAGES * STAGE + (STAGES + 1) * BOOKS);
  uint4* books = ring + STAGES * STAGE;  // of as many tiles as may be in the ring, and of the one before
  uint4* staged_x = block_memory + WARPS * (STAGES * STAGE + (STAGES + 1) * BOOKS);
  auto partial = (float(*)[WARPS][16])(staged_x + 32 * strips);
  int next_tile = block, next_strip = warp, next_book = 0;
  auto request = [&](uint4* stage) {
    if (next_tile < tiles) {
      const size_t at = (size_t)next_tile * strips + next_strip;
#pragma unroll
      for (int i = 0; i < BITS; i++) copy_async(stage + 32 * i + lane, words + at * (32 * BITS) + 32 * i + lane);
      if (lane < SCALES) copy_async(stage + 32 * BITS + lane, meta + at * SCALES + lane);
      if (next_strip == warp && lane < BOOKS)
        copy_async(books + next_book * BOOKS + lane, meta + (size_t)next_tile * BOOKS + lane);
      next_strip += WARPS;
      if (next_strip >= strips) {
        next_strip = warp, next_tile += blocks;
        next_book = next_book < STAGES ? next_book + 1 : 0;
      }
    }
    commit_copies();  // also of none: groups are counted
  };
#pragma unroll
  for (int stage = 0; stage < STAGES; stage++) request(ring + stage * STAGE);
  if (lane < ahead) {
    const int own = (strips - warp + WARPS - 1) / WARPS, number = STAGES + lane, tile = block + number / own * blocks;
    const size_t at = (size_t)tile * strips + warp + number % own * WARPS;
    if (tile < tiles) bring_nearer(words + at * (32 * BITS), 32 * BITS);
    if (GROUPS && tile < tiles) bring_nearer(meta + at * SCALES, SCALES);
  }
  wait_for_previous_kernel();
  for (int strip = warp; strip < strips; strip += WARPS) {
    const int k = 256 * strip + 8 * lane;
    staged_x[32 * strip + lane] = k < inputs ? load_input((const uint4*)(x + k)) : make_uint4(0, 0, 0, 0);
  }

  int stage = 0, book = 0;
  for (int tile = block, number = 0; tile < tiles; tile += blocks, number++) {
    float sum[4] = {};
    u32 table[2][TABLE];
    for (int strip = warp; strip < strips; strip += WARPS) {
      uint4* own = ring + stage * STAGE;
      wait_for_copies_before<STAGES - 1>();
      __syncwarp();
      if (!GROUPS && strip == warp)
#pragma unroll
        for (int i = 0; i < 2 * TABLE; i++)
          table[i / TABLE][i % TABLE] = ((const u32*)(books + book * BOOKS))[(i / TABLE * 8 + g) * TABLE + i % TABLE];
      if (GROUPS) add_scaled<BITS, GROUPS ? GROUPS : 2>(sum, own, staged_x + 32 * strip, g, t);
      else add_chosen<BITS>(sum, own, table, staged_x + 32 * strip, g, t);
      __syncwarp();  // no lane reads this stage any more
      request(own);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    book = book < STAGES ? book + 1 : 0;
    if (t == 0) partial[number][warp][g] = sum[0], partial[number][warp][8 + g] = sum[2];
  }
  __syncthreads();
  for (int i = threadIdx.x; block + i / 16 * blocks < tiles; i += 32 * WARPS) {
    const int row = 16 * (block + i / 16 * blocks) + i % 16;
    float total = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) total += partial[i / 16][s][i % 16];
    if (row >= rows) continue;
    if (ONTO) atomicAdd(y + row, total);
    else y[row] = total;
  }
}
