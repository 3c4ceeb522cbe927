// Matrix-vector product with low-bit weights; lowbit_gemv.py gives the formula and every byte of the operands.
//
// One block computes 16·TILES rows for 1 … 8·COLUMNS inputs; its warps share the strips of 256 channels among
// themselves and add up through shared memory in a fixed order, so equal operands give equal bits. A warp turns codes
// into fragments of the tensor core's m16n8k16 product in registers: weights are its 16 rows, inputs its 8 columns,
// sums are float32.
#include "lowbit_codes.cuh"

// Of codebooks of 16 values one row in two is looked up in shared memory instead, two values at once: permutations alone
// would take as long as the weights take to come. All pairs of rows 8 … 15 of each tile.
template <int TILES, int THREADS>
__device__ __forceinline__ void make_pairs(u32 (*pairs)[8][256], const u32* tables) {
  for (int i = threadIdx.x; i < TILES * 8 * 64; i += THREADS) {
    const int first = i % 16, four = i / 16 % 4, row = i / 64 % 8, tile = i / 512, shift = 8 * (first % 4);
    const u32* table = tables + (16 * tile + 8 + row) * 8;
    const u32 value = (table[first / 4] >> shift & 255) | (table[4 + first / 4] >> shift & 255) << 8;
    const u32 low = table[four], high = table[4 + four];
#pragma unroll
    for (int s = 0; s < 4; s++)
      pairs[tile][row][first + 16 * (4 * four + s)] = value | (low >> 8 * s & 255) << 16 | (high >> 8 * s & 255) << 24;
  }
}

template <int COUNT>
__device__ __forceinline__ void fetch(u32* to, const uint4* from, int stride) {
#pragma unroll
  for (int i = 0; i < COUNT; i++) {
    uint4 v = load_once(from + i * stride);
    to[4 * i] = v.x, to[4 * i + 1] = v.y, to[4 * i + 2] = v.z, to[4 * i + 3] = v.w;
  }
}

// GROUPS: groups in a strip (4, 2), or 0 for a codebook. DEPTH: strips in flight a warp; `ahead` more, at most 32, are
// brought nearer meanwhile. ONTO: add to y, else store.
// BESIDE: the first `beside` blocks have errands to run, the rest multiply.
template <int BITS, int GROUPS, int TILES, int WARPS, int DEPTH, int COLUMNS, int ONTO, int BESIDE>
__global__ void __launch_bounds__(32 * WARPS, BESIDE ? 16 / WARPS : 1)  // errands take no registers from products
lowbit_gemv(const uint4* words, const uint4* meta, const u16* x, float* y, int rows, int inputs, int strips, int batch,
            int ahead, const Errand* errands, int errand_count, int beside) {
  constexpr int META = GROUPS ? GROUPS / 2 : 1;              // uint4 a strip and lane
  constexpr int TABLE = GROUPS ? 4 : 2 * (1 << BITS) / 4;    // words of one row's codebook
  constexpr bool PAIRS = !GROUPS && BITS == 4;
  constexpr int PARTIAL = WARPS * 16 * TILES * 8 * COLUMNS, PAIRED = PAIRS ? TILES * 8 * 256 : 0;
  __shared__ u32 memory[PARTIAL > PAIRED ? PARTIAL : PAIRED];  // pairs of values, and in the end partial sums
  auto pairs = (u32(*)[8][256])memory;
  auto partial = (float(*)[16 * TILES][8 * COLUMNS])memory;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int block = (int)blockIdx.x - (BESIDE ? beside : 0), tile0 = block * TILES;

  if (BESIDE && block < 0) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    __shared__ float scratch[ERRAND_SCRATCH<32 * WARPS>];
    run_errands<32 * WARPS>(errands, errand_count, blockIdx.x, scratch);
    return;
  }
  u32 w[DEPTH][TILES][4 * BITS], m[DEPTH][TILES][4 * META], table[TILES][2][TABLE];
  auto prefetch = [&](int d, int strip) {
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      size_t at = (size_t)(tile0 + r) * strips + strip;
      fetch<BITS>(w[d][r], words + at * (BITS * 32) + lane, 32);
      if (GROUPS) fetch<META>(m[d][r], meta + (at * 8 + g) * META, 1);
    }
  };
  let_next_kernel_start();
#pragma unroll
  for (int d = 0; d < DEPTH; d++)
    if (warp + d * WARPS < strips) prefetch(d, warp + d * WARPS);
  if (const int strip = warp + (DEPTH + lane) * WARPS; lane < ahead && strip < strips)
#pragma unroll
    for (int r = 0; r < TILES; r++) {
      const size_t at = (size_t)(tile0 + r) * strips + strip;
      bring_nearer(words + at * (BITS * 32), 32 * BITS);
      if (GROUPS) bring_nearer(meta + at * 8 * META, 8 * META);
    }
  if (!GROUPS) {
    const u32* tables = (const u32*)meta + (size_t)tile0 * 16 * TABLE;
#pragma unroll
    for (int r = 0; r < TILES; r++)
#pragma unroll
      for (int half = 0; half < 2; half++)
#pragma unroll
        for (int i = 0; i < TABLE; i++) table[r][half][i] = tables[(16 * r + 8 * half + g) * TABLE + i];
    if (PAIRS) {
      make_pairs<TILES, 32 * WARPS>(pairs, tables);
      __syncthreads();
    }
  }
  float sum[TILES][COLUMNS][4] = {};
  wait_for_previous_kernel();

  for (int base = warp; base < strips; base += WARPS * DEPTH) {
#pragma unroll
    for (int d = 0; d < DEPTH; d++) {
      const int strip = base + d * WARPS;
      if (strip >= strips) break;
      uint4 in[COLUMNS][8];
#pragma unroll
      for (int c = 0; c < COLUMNS; c++)
#pragma unroll
        for (int i = 0; i < 8; i++) {
          const int k = 256 * strip + 32 * i + 8 * t;
          in[c][i] = make_uint4(0, 0, 0, 0);
          if (8 * c + g < batch && k < inputs) in[c][i] = load_input((const uint4*)(x + (size_t)(8 * c + g) * inputs + k));
        }
#pragma unroll
      for (int r = 0; r < TILES; r++) {
        float part[COLUMNS][4] = {};
#pragma unroll
        for (int i = 0; i < 16; i++) {  // one product of 16 channels each
          u32 codes = nibbles<BITS>(&w[d][r][BITS * (i / 4)], i % 4), a[4];
          if (GROUPS) {
            const u32 *pair = &m[d][r][2 * (i * GROUPS / 16)];
            u32 zero0 = __byte_perm(pair[0], 0, 0x3232u), zero1 = __byte_perm(pair[1], 0, 0x3232u);
            spread(a, codes, zero0 | 0xE400E400u, (zero1 << 4) | 0xD400D400u);
          } else {
            const Picks by = picks<BITS>(codes);
            look_up<BITS>(a[0], a[2], table[r][0], by);
            if (PAIRS) a[1] = pairs[r][g][codes >> 16 & 255], a[3] = pairs[r][g][codes >> 24];
            else look_up<BITS>(a[1], a[3], table[r][1], {by.entry >> 16, by.half >> 16});
          }
#pragma unroll
          for (int c = 0; c < COLUMNS; c++) {
            uint4 v = in[c][i / 2];
            multiply(GROUPS ? part[c] : sum[r][c], a, i % 2 ? v.z : v.x, i % 2 ? v.w : v.y);
          }
          if (GROUPS && (i + 1) * GROUPS % 16 == 0) {  // the group ends here: its scales, then from zero again
            const u32 *pair = &m[d][r][2 * (i * GROUPS / 16)];
            const float scale0 = low_half(pair[0]), scale1 = low_half(pair[1]);
#pragma unroll
            for (int c = 0; c < COLUMNS; c++) {
              sum[r][c][0] += scale0 * part[c][0], sum[r][c][1] += scale0 * part[c][1];
              sum[r][c][2] += scale1 * part[c][2], sum[r][c][3] += scale1 * part[c][3];
              part[c][0] = part[c][1] = part[c][2] = part[c][3] = 0;
            }
          }
        }
      }
      if (strip + DEPTH * WARPS < strips) prefetch(d, strip + DEPTH * WARPS);
    }
  }
  if (PAIRS) __syncthreads();  // no warp looks pairs up any more
#pragma unroll
  for (int r = 0; r < TILES; r++)
#pragma unroll
    for (int c = 0; c < COLUMNS; c++)
#pragma unroll
      for (int i = 0; i < 4; i++) partial[warp][16 * r + g + 8 * (i / 2)][8 * c + 2 * t + i % 2] = sum[r][c][i];
  __syncthreads();
  for (int i = threadIdx.x; i < 16 * TILES * batch; i += 32 * WARPS) {
    const int local = i % (16 * TILES), column = i / (16 * TILES), row = 16 * tile0 + local;
    float total = 0;
#pragma unroll
    for (int s = 0; s < WARPS; s++) total += partial[s][local][column];
    if (row >= rows) continue;
    if (ONTO) atomicAdd(y + (size_t)column * rows + row, total);
    else y[(size_t)column * rows + row] = total;
  }
}
