// Softmax and sums of discrete codes of 4 bits a coordinate, from logits; fsq_attend.py gives the formulas.
//
// A block goes through a range of a sequence's blocks of 64 tokens, whose codes and logits are copied ahead into shared
// memory. A warp has SPANS spans of 64 coordinates for 16 heads. Weights are the left sides of products, codes the right:
// levels of two tokens at a time become q - 8 in registers.

#include "fsq_device.cuh"

// Centres plus a half, q - 8, of two tokens' levels number 0 … 3 of a word pair's halves.
__device__ __forceinline__ u32 centres(u32 pair, int level) {
  const u32 v = level & 2 ? pair >> 8 : pair;
  return level & 1 ? fma_halves(v & 0x00F000F0u | 0x64006400u, 0x2C002C00u, 0xD480D480u)   // (1024 + 16 q) / 16 - 72
                   : fma_halves(v & 0x000F000Fu | 0x64006400u, 0x3C003C00u, 0xE408E408u);  // 1024 + q - 1032
}

// A lane's sums of a span with maxima and totals of its two rows: put away, and added to others.
__device__ __forceinline__ void keep_part(float* to, const float (&sums)[8][4], const float (&most)[2], const float (&total)[2]) {
#pragma unroll
  for (int i = 0; i < 32; i++) to[i] = sums[i / 4][i % 4];
#pragma unroll
  for (int r = 0; r < 2; r++) to[32 + r] = most[r], to[34 + r] = total[r];
}
__device__ __forceinline__ void add_part(const float* from, float (&sums)[8][4], float (&most)[2], float (&total)[2]) {
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const float other = from[32 + r], least = -1e30f, both = fmaxf(fmaxf(most[r], other), least);
    const float keep = power(most[r] - both), gain = power(other - both);  // 0 for parts without tokens
    total[r] = total[r] * keep + from[34 + r] * gain, most[r] = fmaxf(most[r], other);
#pragma unroll
    for (int i = 0; i < 8; i++)
#pragma unroll
      for (int n = 2 * r; n < 2 * r + 2; n++) sums[i][n] = sums[i][n] * keep + from[4 * i + n] * gain;
  }
}

template <int BYTES, int SPANS, int TURNS, int STAGES>
struct Mix {
  static const int ALL = (BYTES + 31) / 32, LANES = (ALL + SPANS - 1) / SPANS, CHUNKS = (BYTES + 15) / 16, HEADS = 16;
  static const int THREADS = 32 * LANES * TURNS, STEPS = 4 / TURNS;
  static const int BLOCK = 64 * BYTES, STAGE = BLOCK + 256 * HEADS, AT_BARRIERS = STAGES * STAGE;

  // Logits [step][row][tokens 2c, 2c + 1, 2c + 8, 2c + 9] of a lane's rows; `left` tokens are there.
  static __device__ __forceinline__ void take(
      float (&logits)[STEPS][2][4], float (&most)[2], const float* rows, const int (&row)[2], int first, int left, int c) {
    const float none = -__int_as_float(0x7F800000);  // below every maximum, which begins at a number
#pragma unroll
    for (int s = 0; s < STEPS; s++)
#pragma unroll
      for (int r = 0; r < 2; r++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const int at = first + 16 * s + 8 * i + 2 * c;
          const float2 two = *(const float2*)(rows + 64 * (row[r] % HEADS) + logit_place(row[r], at));
          logits[s][r][2 * i] = at < left ? two.x : none, logits[s][r][2 * i + 1] = at + 1 < left ? two.y : none;
          most[r] = fmaxf(most[r], fmaxf(logits[s][r][2 * i], logits[s][r][2 * i + 1]));
        }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      most[r] = fmaxf(most[r], __shfl_xor_sync(EVERY, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(EVERY, most[r], 2));
    }
  }

  // Sums of a span over 16 tokens. Lanes of other chunks read tokens in another order, so that no bank meets two.
  static __device__ __forceinline__ void add(float (&sums)[8][4], const u32 (&a)[4], const u8* codes, int chunk, int token, int g) {
    if (chunk - g / 4 >= CHUNKS) return;  // the same for all lanes
    const int odd = g / 4, low = odd ? 0x1054 : 0x5410, high = odd ? 0x3276 : 0x7632;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = chunk >= CHUNKS ? 0 : code_word<BYTES>(codes, chunk, token + ((i & 1) ^ odd) + 4 * (i & 2), g % 4);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 near = __byte_perm(words[0], words[1], half ? high : low);
      const u32 far = __byte_perm(words[2], words[3], half ? high : low);
#pragma unroll
      for (int j = 0; j < 4; j++) multiply(sums[4 * half + j], a, centres(near, j), centres(far, j));
    }
  }

  static __device__ __forceinline__ void fetch(u8* shared, int stage, const u8* block, const float* logits, int rows) {
    u64* barrier = (u64*)(shared + AT_BARRIERS) + stage;
    expect_bytes(barrier, BLOCK + 256 * rows);
    copy_bytes(shared + stage * STAGE, block, BLOCK, barrier);
    copy_bytes(shared + stage * STAGE + BLOCK, logits, 256 * rows, barrier);
  }
};

// parts [batch, heads, splits, 64 · spans], tops and totals without the last. Warps whose steps take turns are merged.
template <int BYTES, int SPANS, int TURNS, int STAGES>
__global__ void __launch_bounds__(Mix<BYTES, SPANS, TURNS, STAGES>::THREADS, 2) fsq_mix(
    const u8* codes, const float* scores, const int* lengths, float* parts, float* tops, float* totals, int heads,
    int splits, int blocks) {
  typedef Mix<BYTES, SPANS, TURNS, STAGES> Of;
#ifdef HOST_EMULATION
  u8* shared = (u8*)block_memory;
#else
  extern __shared__ __align__(128) u8 shared[];
#endif
  const int rounds = (heads + Of::HEADS - 1) / Of::HEADS, round = blockIdx.x % rounds, first_head = Of::HEADS * round;
  const int split = blockIdx.x / rounds % splits, sequence = blockIdx.x / rounds / splits;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int span = warp % Of::LANES * SPANS, turn = warp / Of::LANES, place = warp % Of::LANES * 32 + lane;
  const int length = lengths[sequence], tiles = (length + 63) / 64, held = min(heads - first_head, Of::HEADS);
  const int first = (int)((u64)tiles * split / splits), last = (int)((u64)tiles * (split + 1) / splits);
  const int row[2] = {first_head + min(g, held - 1), first_head + min(g + 8, held - 1)};
  const u8* from = codes + (u64)sequence * blocks * Of::BLOCK;
  const float* logits_of = scores + ((u64)sequence * blocks * heads + first_head) * 64;
  u64* barriers = (u64*)(shared + Of::AT_BARRIERS);
  float sums[SPANS][8][4] = {}, most[2] = {-1e30f, -1e30f}, total[2] = {};

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) make_barrier(barriers + i);
    announce_barriers();
    for (int i = 0; i < STAGES && first + i < last; i++)
      Of::fetch(shared, i, from + (u64)(first + i) * Of::BLOCK, logits_of + (u64)(first + i) * heads * 64, held);
  }
  __syncthreads();

  for (int tile = first, stage = 0, parity = 0; tile < last; tile++) {
    const u8* block = shared + stage * Of::STAGE;
    wait_for_bytes(barriers + stage, parity);
    float logits[Of::STEPS][2][4], before[2] = {most[0], most[1]};
    const int begin = 16 * Of::STEPS * turn;
    Of::take(logits, most, (const float*)(block + Of::BLOCK), row, begin, length - 64 * tile, c);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float keep = power(before[r] - most[r]);
      total[r] *= keep;
#pragma unroll
      for (int u = 0; u < SPANS; u++)
#pragma unroll
        for (int j = 0; j < 8; j++) sums[u][j][2 * r] *= keep, sums[u][j][2 * r + 1] *= keep;
    }
#pragma unroll
    for (int s = 0; s < Of::STEPS; s++) {
      u32 a[4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float p[4];
#pragma unroll
        for (int i = 0; i < 4; i++) p[i] = power(logits[s][r][i] - most[r]), total[r] += p[i];
        a[r] = halves(p[0], p[1]), a[2 + r] = halves(p[2], p[3]);
      }
#pragma unroll
      for (int u = 0; u < SPANS; u++) Of::add(sums[u], a, block, 2 * (span + u) + g / 4, begin + 16 * s + 2 * c, g);
    }
    __syncthreads();  // all have read this stage
    if (threadIdx.x == 0 && tile + STAGES < last) {
      const u64 next = tile + STAGES;
      Of::fetch(shared, stage, from + next * Of::BLOCK, logits_of + next * heads * 64, held);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }

  if constexpr (TURNS > 1) {
    float* left = (float*)shared;  // 37 words a lane, an odd number: lanes never meet in a bank
    if (turn > 0) keep_part(left + 37 * ((turn - 1) * 32 * Of::LANES + place), sums[0], most, total);
    __syncthreads();
    if (turn > 0) return;
    for (int i = 0; i < TURNS - 1; i++) add_part(left + 37 * (i * 32 * Of::LANES + place), sums[0], most, total);
  }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    total[r] += __shfl_xor_sync(EVERY, total[r], 1);
    total[r] += __shfl_xor_sync(EVERY, total[r], 2);
    if (g + 8 * r >= held) continue;
    const u64 piece = ((u64)sequence * heads + first_head + g + 8 * r) * splits + split;
    if (span == 0 && c == 0) tops[piece] = total[r] > 0 ? most[r] : -__int_as_float(0x7F800000), totals[piece] = total[r];
#pragma unroll
    for (int u = 0; u < SPANS; u++) {
      if (span + u >= Of::ALL) break;
      float4* to = (float4*)(parts + (piece * Of::ALL + span + u) * 64 + 16 * c);
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int q = 0; q < 2; q++) {
          const float x = sums[u][4 * q][2 * r + n], y = sums[u][4 * q + 1][2 * r + n];
          const float z = sums[u][4 * q + 2][2 * r + n], w = sums[u][4 * q + 3][2 * r + n];
          to[2 * n + q] = {x, y, z, w};
        }
    }
  }
}
