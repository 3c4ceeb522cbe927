// Matrix-vector product with group-scaled weights, one input: weights stream through shared memory.
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

// Sums of 16 rows by the 256 channels of a strip; all eight columns of the tensor core's product have the same input,
// so each holds the sums. Groups are independent chains of products, which the device works on in turns.
template <int BITS, int GROUPS>
__device__ __forceinline__ void add_strip(float (&sum)[4], const uint4* stage, const uint4* x, int lane) {
  constexpr int META = GROUPS / 2;  // uint4 of a row pair's scales and zeros
  const int g = lane / 4, t = lane % 4;
  u32 w[4 * BITS], m[4 * META];
#pragma unroll
  for (int i = 0; i < BITS; i++) {
    const uint4 v = stage[32 * i + lane];
    w[4 * i] = v.x, w[4 * i + 1] = v.y, w[4 * i + 2] = v.z, w[4 * i + 3] = v.w;
  }
#pragma unroll
  for (int i = 0; i < META; i++) {
    const uint4 v = stage[32 * BITS + g * META + i];
    m[4 * i] = v.x, m[4 * i + 1] = v.y, m[4 * i + 2] = v.z, m[4 * i + 3] = v.w;
  }
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

// GROUPS: groups in a strip. ONTO: add to y, else store. BESIDE: the first `beside` blocks have errands to run;
// `blocks` others multiply, with at least one strip for each warp; `ahead` more strips of each, at most 32, are brought
// nearer meanwhile.
template <int BITS, int GROUPS, int WARPS, int STAGES, int ONTO, int BESIDE>
__global__ void __launch_bounds__(32 * WARPS, 24 / WARPS)  // 80 registers
lowbit_stream(const uint4* words, const uint4* meta, const u16* x, float* y, int rows, int inputs, int strips,
              int tiles, int blocks, int ahead, const Errand* errands, int errand_count, int beside) {
  constexpr int SCALES = 4 * GROUPS, STAGE = 32 * BITS + SCALES;  // uint4 of a tile's strip
  const int block = (int)blockIdx.x - (BESIDE ? beside : 0), warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (BESIDE && block < 0) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    run_errands<32 * WARPS>(errands, errand_count, blockIdx.x, (float*)block_memory);
    return;
  }
  uint4 *ring = block_memory + warp * STAGES * STAGE, *staged_x = block_memory + WARPS * STAGES * STAGE;
  auto partial = (float(*)[WARPS][16])(staged_x + 32 * strips);
  int next_tile = block, next_strip = warp;
  auto request = [&](uint4* stage) {
    if (next_tile < tiles) {
      const size_t at = (size_t)next_tile * strips + next_strip;
#pragma unroll
      for (int i = 0; i < BITS; i++) copy_async(stage + 32 * i + lane, words + at * (32 * BITS) + 32 * i + lane);
      if (lane < SCALES) copy_async(stage + 32 * BITS + lane, meta + at * SCALES + lane);
      next_strip += WARPS;
      if (next_strip >= strips) next_strip = warp, next_tile += blocks;
    }
    commit_copies();  // also of none: groups are counted
  };
  let_next_kernel_start();
#pragma unroll
  for (int stage = 0; stage < STAGES; stage++) request(ring + stage * STAGE);
  if (lane < ahead) {
    const int own = (strips - warp + WARPS - 1) / WARPS, number = STAGES + lane, tile = block + number / own * blocks;
    const size_t at = (size_t)tile * strips + warp + number % own * WARPS;
    if (tile < tiles) bring_nearer(words + at * (32 * BITS), 32 * BITS), bring_nearer(meta + at * SCALES, SCALES);
  }
  wait_for_previous_kernel();
  for (int strip = warp; strip < strips; strip += WARPS) {
    const int k = 256 * strip + 8 * lane;
    staged_x[32 * strip + lane] = k < inputs ? load_input((const uint4*)(x + k)) : make_uint4(0, 0, 0, 0);
  }

  int stage = 0;
  for (int tile = block, number = 0; tile < tiles; tile += blocks, number++) {
    float sum[4] = {};
    for (int strip = warp; strip < strips; strip += WARPS) {
      uint4* own = ring + stage * STAGE;
      wait_for_copies_before<STAGES - 1>();
      __syncwarp();
      add_strip<BITS, GROUPS>(sum, own, staged_x + 32 * strip, lane);
      __syncwarp();  // no lane reads this stage any more
      request(own);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    if (lane % 4 == 0) partial[number][warp][lane / 4] = sum[0], partial[number][warp][8 + lane / 4] = sum[2];
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
