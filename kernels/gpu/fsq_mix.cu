// Softmax and sums of discrete codes of 4 bits a coordinate, from logits; fsq_attend.py gives the formulas.
//
// A block goes through a range of a sequence's blocks of 64 tokens, whose codes and logits are copied ahead into shared
// memory. TURNS teams of warps take every so many of them, each with stages of its own. A warp has SPANS spans of 64
// coordinates for 16 heads. Weights are the left sides of products, codes the right: levels of two tokens at a time
// become q - 8 in registers.

#include "fsq_device.cuh"

// Centres plus a half, q - 8, of two tokens' levels number 0 … 3 of a word pair's halves.
__device__ __forceinline__ u32 centres(u32 pair, int level, const Masks& masks) {
  const u32 v = level & 2 ? pair >> 8 : pair;
  return level & 1 ? fma_halves(v & masks.odd | 0x64006400u, 0x2C002C00u, 0xD480D480u)   // (1024 + 16 q) / 16 - 72
                   : fma_halves(v & masks.even | 0x64006400u, 0x3C003C00u, 0xE408E408u);  // 1024 + q - 1032
}

template <int BYTES, int SPANS, int TURNS, int STAGES>
struct Mix {
  static const int ALL = (BYTES + 31) / 32, LANES = (ALL + SPANS - 1) / SPANS, HEADS = 16, THREADS = 32 * LANES * TURNS;
  static const int WHOLE = BYTES / 16, LEFT = BYTES % 16, BLOCK = 64 * BYTES, STAGE = BLOCK + 256 * HEADS;
  static const int AT_BARRIERS = TURNS * STAGES * STAGE, KEPT = 32 * SPANS + 5;  // words a lane, odd: no bank meets two
  typedef float Sums[SPANS][8][4];

  // What a lane has read of codes and logits: sums, by row maxima and totals (of rows g and g + 8: words 0 and 2).
  struct State {
    Sums sums;
    float most[2], total[4];
  };
  static __device__ __forceinline__ void scale(State& state, int r, float by) {
    state.total[2 * r] *= by;
#pragma unroll
    for (int u = 0; u < SPANS; u++)
#pragma unroll
      for (int j = 0; j < 8; j++) state.sums[u][j][2 * r] *= by, state.sums[u][j][2 * r + 1] *= by;
  }

  // Put away, and added to another's.
  static __device__ __forceinline__ void keep_state(float* to, const State& state) {
#pragma unroll
    for (int i = 0; i < 32 * SPANS; i++) to[i] = state.sums[i / 32][i / 4 % 8][i % 4];
#pragma unroll
    for (int r = 0; r < 2; r++) to[32 * SPANS + r] = state.most[r], to[32 * SPANS + 2 + r] = state.total[2 * r];
  }
  static __device__ __forceinline__ void add_state(State& state, const float* from) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float other = from[32 * SPANS + r], both = fmaxf(state.most[r], other), gain = power(other - both);
      scale(state, r, power(state.most[r] - both));
      state.most[r] = both, state.total[2 * r] += from[32 * SPANS + 2 + r] * gain;
#pragma unroll
      for (int i = 0; i < 32 * SPANS; i++)
        if (i / 2 % 2 == r) state.sums[i / 32][i / 4 % 8][i % 4] += from[i] * gain;
    }
  }

  // Logits of a lane's row: of tokens 2c and 2c + 1 behind `first`.
  static __device__ __forceinline__ float2 take(const float* rows, int row, int first, int c) {
    return *(const float2*)(rows + 64 * (row % HEADS) + logit_place(row, first + 2 * c));
  }

  // New maxima; what there is becomes relative to them.
  static __device__ __forceinline__ void raise(State& state, const float* rows, const int (&row)[2], int c) {
    float most[2] = {state.most[0], state.most[1]};
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const float2 two = take(rows, row[r], 8 * i, c);
        most[r] = fmaxf(most[r], fmaxf(two.x, two.y));
      }
      most[r] = fmaxf(most[r], __shfl_xor_sync(EVERY, most[r], 1));
      most[r] = fmaxf(most[r], __shfl_xor_sync(EVERY, most[r], 2));
    }
    if (!__any_sync(EVERY, most[0] > state.most[0] || most[1] > state.most[1])) return;
#pragma unroll
    for (int r = 0; r < 2; r++) scale(state, r, power(state.most[r] - most[r])), state.most[r] = most[r];
  }

  // Weights of 16 tokens as the left side of products.
  static __device__ __forceinline__ void weigh(u32 (&a)[4], const State& state, const float* rows, const int (&row)[2], int first, int c) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float2 two = take(rows, row[i % 2], first + 8 * (i / 2), c);
      a[i] = halves(power(two.x - state.most[i % 2]), power(two.y - state.most[i % 2]));
    }
  }

  // Sums of a span over 16 tokens, whose words are given: of tokens 2c and 2c + 1, then of the eighth after each. Lanes of
  // other chunks have read them in another order, so that no bank meets two.
  static __device__ __forceinline__ void add(float (&sums)[8][4], const u32 (&a)[4], const u32 (&words)[4], bool odd, const Masks& masks) {
    const int low = odd ? 0x1054 : 0x5410, high = odd ? 0x3276 : 0x7632;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const u32 near = __byte_perm(words[0], words[1], half ? high : low);
      const u32 far = __byte_perm(words[2], words[3], half ? high : low);
#pragma unroll
      for (int j = 0; j < 4; j++) multiply(sums[4 * half + j], a, centres(near, j, masks), centres(far, j, masks));
    }
  }

  // A block's words of this lane. Lanes with g below four have a span's first chunk, the others the next.
  static __device__ __forceinline__ void add_whole(Sums& sums, int u, const u32 (&a)[4], const u8* from, int step, bool odd, const Masks& masks) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++)
      words[i] = *(const u32*)(from + 2048 * u + 256 * step + 128 * (i / 2) + 16 * (odd ? 1 - i % 2 : i % 2));
    add(sums[u], a, words, odd, masks);
  }
  static __device__ __forceinline__ void add_last(
      Sums& sums, int u, const u32 (&a)[4], const u8* block, int chunk, int step, int g, int c,
      const Masks& masks) {
    const bool odd = g / 4;
    const int stride = chunk < WHOLE ? 16 : LEFT, base = min(chunk, WHOLE) * 1024 + 4 * (g % 4);
    const u32 mask = chunk < WHOLE ? ~0u : chunk == WHOLE ? last_mask<BYTES>(g % 4) : 0;
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u32 at = base + (16 * step + 8 * (i / 2) + 2 * c + (odd ? 1 - i % 2 : i % 2)) * stride;
      const u32* two = (const u32*)(block + at / 4 * 4);  // the last may be logits, of which the mask has no bit
      words[i] = __funnelshift_r(two[0], two[1], 8 * (at % 4)) & mask;
    }
    add(sums[u], a, words, odd, masks);
  }

  // A row's sums, where they belong: a lane has 16 coordinates of each span next to each other.
  static __device__ __forceinline__ void leave_sums(const State& state, int r, float* part, int span, int c) {
#pragma unroll
    for (int u = 0; u < SPANS; u++) {
      if (span + u >= ALL) break;
      float4* to = (float4*)(part + (span + u) * 64 + 16 * c);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float(*four)[4] = state.sums[u] + 4 * (i % 2);
        const int n = 2 * r + i / 2;
        to[i] = {four[0][n], four[1][n], four[2][n], four[3][n]};
      }
    }
  }
  static __device__ __forceinline__ void leave_total(const State& state, int r, float* top, float* total) {
    *total = state.total[2 * r];
    *top = *total > 0 ? state.most[r] : -__int_as_float(0x7F800000);
  }

  static __device__ __forceinline__ void fetch(u8* stage, u64* barrier, const u8* block, const float* logits, int rows) {
    expect_bytes(barrier, BLOCK + 256 * rows);
    copy_bytes(stage, block, BLOCK, barrier);
    copy_bytes(stage + BLOCK, logits, 256 * rows, barrier);
  }
};

// parts [batch, heads, splits, 64 · spans], tops and totals without the last.
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
  let_next_kernel_start();
  const int rounds = (heads + Of::HEADS - 1) / Of::HEADS, round = blockIdx.x % rounds, first_head = Of::HEADS * round;
  const int split = blockIdx.x / rounds % splits, sequence = blockIdx.x / rounds / splits;
  const int warp = same(threadIdx.x / 32), lane = threadIdx.x % 32;
  int g = lane / 4, c = lane % 4;
  keep(g), keep(c);
  const bool odd = g / 4;
  const int span = warp % Of::LANES * SPANS, turn = warp / Of::LANES, place = warp % Of::LANES * 32 + lane;
  const int held = min(heads - first_head, Of::HEADS);
  int row[2] = {first_head + min(g, held - 1), first_head + min(g + 8, held - 1)};
  int at = (2 * span + g / 4) * 1024 + 32 * c + 4 * (g % 4);
  keep(row[0]), keep(row[1]), keep(at);
  const u8* from = codes + (u64)sequence * blocks * Of::BLOCK;
  const float* logits_of = scores + ((u64)sequence * blocks * heads + first_head) * 64;
  u64* barriers = (u64*)(shared + Of::AT_BARRIERS) + turn * STAGES;
  u8* stages = shared + turn * STAGES * Of::STAGE;
  const bool fetches = place == 0;
  const Masks masks;
  typename Of::State state = {};
  state.most[0] = state.most[1] = -1e30f;

  if (fetches) {  // the thread that makes barriers is the first to use them, before others are told to wait for them
    for (int i = 0; i < STAGES; i++) make_barrier(barriers + i);
    announce_barriers();
  }
  wait_for_previous_kernel();
  const int tiles = (lengths[sequence] + 63) / 64;
  const int first = (int)((u64)tiles * split / splits), last = (int)((u64)tiles * (split + 1) / splits);
  if (fetches)
    for (int i = 0, tile = first + turn; i < STAGES && tile < last; i++, tile += TURNS)
      Of::fetch(stages + i * Of::STAGE, barriers + i, from + (u64)tile * Of::BLOCK, logits_of + (u64)tile * heads * 64, held);
  __syncthreads();

  int stage = 0, parity = 0;
  for (int tile = first + turn; tile < last; tile += TURNS) {
    const u8* block = stages + stage * Of::STAGE;
    const float* rows = (const float*)(block + Of::BLOCK);
    wait_for_bytes(barriers + stage, parity);
    Of::raise(state, rows, row, c);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      u32 a[4];
      Of::weigh(a, state, rows, row, 16 * s, c);
      multiply(state.total, a, 0x3C003C00u, 0x3C003C00u);  // times ones: sums of weights
#pragma unroll
      for (int u = 0; u < SPANS; u++) {
        if (2 * (span + u) + 1 < Of::WHOLE) Of::add_whole(state.sums, u, a, block + at, s, odd, masks);
        else if (span + u < Of::ALL) Of::add_last(state.sums, u, a, block, 2 * (span + u) + g / 4, s, g, c, masks);
      }
    }
    meet_warps(turn, 32 * Of::LANES);  // all have read this stage
    if (fetches && tile + STAGES * TURNS < last) {
      const u64 next = tile + STAGES * TURNS;
      Of::fetch(stages + stage * Of::STAGE, barriers + stage, from + next * Of::BLOCK, logits_of + next * heads * 64, held);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }

  if constexpr (TURNS > 1) {
    __syncthreads();  // stages are no longer needed
    float* left = (float*)shared;
    if (turn > 0) Of::keep_state(left + Of::KEPT * ((turn - 1) * 32 * Of::LANES + place), state);
    __syncthreads();
    if (turn > 0) return;
    for (int i = 0; i < TURNS - 1; i++) Of::add_state(state, left + Of::KEPT * (i * 32 * Of::LANES + place));
  }
#pragma unroll
  for (int r = 0; r < 2; r++)
    if (g + 8 * r < held) {
      const u64 piece = ((u64)sequence * heads + first_head + g + 8 * r) * splits + split;
      if (span == 0 && c == 0) Of::leave_total(state, r, tops + piece, totals + piece);
      Of::leave_sums(state, r, parts + piece * Of::ALL * 64, span, c);
    }
}
