// Attention of new tokens to discrete codes of 4 bits a coordinate; fsq_attend.py gives the formulas and every operand.
//
// fsq_scores: a block rebuilds the keys of one KV head. The head's decoder stays in shared memory; codes come in blocks
// of 64 tokens, one a warpgroup, and become the left side of products in registers. A thread has channels d and d + D/2
// of two tokens next to each other, so that rotation needs no exchange; squares are summed by the tensor cores.
// fsq_mix.cu comes next: softmax and sums of codes, of all heads at once, since they share the codes.

#include "fsq_device.cuh"

const u32 MAGIC_BITS = 0x4B400000u;  // of 1.5 · 2^23: plus a whole number they are that float plus the number

template <Kind KIND> struct Sum { typedef float Type; };
template <> struct Sum<INT8> { typedef u32 Type; };
__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(u32 x) { return __int_as_float((int)x); }

template <Kind KIND, int D, int BYTES, int GROUP, int TEAMS, bool NORM, int SHARES>
struct Scores {
  typedef typename Sum<KIND>::Type Value;
  static const int CHUNKS = (BYTES + 15) / 16, STEPS_A_CHUNK = KIND == HALF ? 2 : 1, STEPS = CHUNKS * STEPS_A_CHUNK;
  static const int N = D / SHARES, STEP_BYTES = N * 32, IMAGE = STEPS * STEP_BYTES, BLOCK = 64 * BYTES, PAIRS = N / 16;
  static const int TURN = 2 * D, AT_CODES = IMAGE, AT_TURNS = AT_CODES + TEAMS * BLOCK, AT_AFFINE = AT_TURNS + TEAMS * 2 * TURN;
  static const int QUERY = D / 2 + 4;  // words of a head's query: so far apart that eight rows never meet in a bank
  static const int AT_GAMMA = AT_AFFINE + 8 * D, AT_QUERIES = AT_GAMMA + 2 * D, AT_BARRIERS = AT_QUERIES + 8 * 4 * QUERY;

  // A block's codes, and the turns of its first position, which are read longer: they have two places.
  static __device__ __forceinline__ void fetch(u8* shared, int team, u32 place, const u8* codes, const uint2* base, int tile) {
    u64* barrier = (u64*)(shared + AT_BARRIERS) + team;
    expect_bytes(barrier, BLOCK + TURN);
    copy_bytes(shared + AT_CODES + team * BLOCK, codes + (u64)tile * BLOCK, BLOCK, barrier);
    copy_bytes(shared + AT_TURNS + (2 * team + place) * TURN, base + (u64)tile * (D / 4), TURN, barrier);
  }

  // Left sides of `count` steps from `first` on. Two levels at a time become numbers by masks alone: q as a byte, or
  // 1024 + q and 1024 + 16 q as a half; the decoder's image has what undoes that.
  static __device__ __forceinline__ void unpack(u32 (&a)[4][4], const u8* codes, int first, int count, int token, int c) {
#pragma unroll
    for (int i = 0; i < 4; i += STEPS_A_CHUNK) {
      if (i >= count) break;
      const int chunk = (first + i) / STEPS_A_CHUNK;
      u32 low = code_word<BYTES>(codes, chunk, token, c), high = code_word<BYTES>(codes, chunk, token + 8, c);
      if constexpr (KIND == HALF) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
          a[i + s][0] = low & 0x000F000Fu | 0x64006400u, a[i + s][1] = high & 0x000F000Fu | 0x64006400u;
          a[i + s][2] = low & 0x00F000F0u | 0x64006400u, a[i + s][3] = high & 0x00F000F0u | 0x64006400u;
          low >>= 8, high >>= 8;
        }
      } else {
        a[i][0] = low & 0x0F0F0F0Fu, a[i][1] = high & 0x0F0F0F0Fu;
        a[i][2] = low >> 4 & 0x0F0F0F0Fu, a[i][3] = high >> 4 & 0x0F0F0F0Fu;
      }
    }
  }

  // Rows of a block of codes times the decoder: while four steps run, the next four are unpacked.
  // The next team's products start when the last of these are queued.
  static __device__ __forceinline__ void rebuild(
      Value (&acc)[N / 2], const u8* codes, const u8* image, int token, int c, int next) {
    u32 a[2][4][4];
    const u64 start = tile_at<N>(image);
#pragma unroll
    for (int i = 0; i < N / 2; i++) acc[i] = KIND == INT8 ? (Value)MAGIC_BITS : (Value)0;
#pragma unroll
    for (int first = 0; first < STEPS; first += 4) {
      const int count = STEPS - first < 4 ? STEPS - first : 4, turn = first / 4 % 2;
      unpack(a[turn], codes, first, count, token, c);
      hold(acc);
      begin_products();
#pragma unroll
      for (int i = 0; i < count; i++) product<KIND, N>(acc, a[turn][i], step_of(start, (first + i) * STEP_BYTES));
      commit_products();
      if (first + 4 < STEPS) finish_products<1>();
    }
    if (next >= 0) pass_turn(next);
    finish_products<0>();
    hold(acc);
  }

  // Logits of this lane's two tokens: of heads 2c and 2c + 1 for the first, then for the second. Of a share of the
  // channels only the sums, and of squares; `at` is where its words begin.
  static __device__ __forceinline__ void score(
      float (&found)[4], float (&squares)[4], const Value (&acc)[N / 2], const float4* affine, const u32* gamma, const uint2* turned,
      const u32 (&cosine)[2][PAIRS], const u32 (&sine)[2][PAIRS], const u32* query, float2 scalar, int at) {
    float other[4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) found[i] = squares[i] = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const float4 first = affine[4 * j + at], second = affine[4 * j + at + D / 4];
      const uint2 turn = turned[4 * j + at];  // cosines and sines of two channels at the block's first position
      u32 a[4], squared[4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const float x0 = as_float(acc[4 * j + 2 * r]) * first.x + first.y;
        const float x1 = as_float(acc[4 * j + 2 * r + 1]) * first.z + first.w;
        const float y0 = as_float(acc[4 * (j + PAIRS) + 2 * r]) * second.x + second.y;
        const float y1 = as_float(acc[4 * (j + PAIRS) + 2 * r + 1]) * second.z + second.w;
        u32 x = halves(x0, x1), y = halves(y0, y1);
        if (NORM) {
          squared[r] = multiply_halves(x, x), squared[r + 2] = multiply_halves(y, y);
          x = multiply_halves(x, gamma[4 * j + at]), y = multiply_halves(y, gamma[4 * j + at + D / 4]);
        }
        a[r] = fma_halves(x, cosine[r][j], minus_halves(multiply_halves(y, sine[r][j])));
        a[r + 2] = fma_halves(y, cosine[r][j], multiply_halves(x, sine[r][j]));
      }
      const u32 p = query[4 * j + at], q = query[4 * j + at + D / 4];
      const u32 b0 = fma_halves(p, turn.x, multiply_halves(q, turn.y));
      const u32 b1 = fma_halves(q, turn.x, minus_halves(multiply_halves(p, turn.y)));
      if (NORM) multiply(squares, squared, 0x3C003C00u, 0x3C003C00u);  // times ones: sums over all channels
      multiply(j % 2 ? other : found, a, b0, b1);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const float norm = NORM ? rsqrtf(squares[2 * r] * (1.0f / D) + scalar.x) : 1.0f;
      const float scale = SHARES == 1 ? scalar.y * norm : 1.0f;
      found[2 * r] = (found[2 * r] + other[2 * r]) * scale;
      found[2 * r + 1] = (found[2 * r + 1] + other[2 * r + 1]) * scale;
    }
  }
};

// Logits for powers of two, [batch, blocks, heads, 64], each head's where logit_place says; those of tokens beyond a
// sequence's length mean nothing. In shares of the channels: sums for fsq_join, [batch, shares, blocks, heads, 64], and
// sums of squares, [batch, shares, blocks, KV heads, 64].
template <Kind KIND, int D, int BYTES, int GROUP, int TEAMS, bool NORM, bool ORDERED, int SHARES>
__global__ void __launch_bounds__(128 * TEAMS, 1) fsq_scores(
    const u8* codes, const u8* images, const float4* affine, const u32* gamma, const float2* scalars, const uint2* base,
    const u32* inner, const u32* queries, const int* lengths, float* scores, float* squares, int kv_heads,
    int splits, int blocks) {
  typedef Scores<KIND, D, BYTES, GROUP, TEAMS, NORM, SHARES> Of;
  const int PAIRS = Of::PAIRS;
#ifdef HOST_EMULATION
  u8* shared = (u8*)block_memory;
#else
  extern __shared__ __align__(128) u8 shared[];
#endif
  const int image = blockIdx.x % (kv_heads * SHARES), head = image / SHARES, share = image % SHARES;
  const int split = blockIdx.x / (kv_heads * SHARES) % splits, sequence = blockIdx.x / (kv_heads * SHARES) / splits;
  const int team = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  u64* barriers = (u64*)(shared + Of::AT_BARRIERS);
  u8* own = shared + Of::AT_CODES + team * Of::BLOCK;

  if (threadIdx.x == 0) {
    for (int i = 0; i <= TEAMS; i++) make_barrier(barriers + i);
    announce_barriers();
  }
  for (int i = threadIdx.x; i < 2 * D; i += 128 * TEAMS)
    ((float*)(shared + Of::AT_AFFINE))[i] = ((const float*)affine)[head * 2 * D + i];
  for (int i = threadIdx.x; i < D / 2; i += 128 * TEAMS) ((u32*)(shared + Of::AT_GAMMA))[i] = gamma[i];
  for (int i = threadIdx.x; i < 4 * D; i += 128 * TEAMS) {
    const int row = i / (D / 2), at = i % (D / 2);
    const u32 word = row < GROUP ? queries[((sequence * kv_heads + head) * GROUP + row) * (D / 2) + at] : 0;
    ((u32*)(shared + Of::AT_QUERIES))[row * Of::QUERY + at] = word;
  }
  __syncthreads();

  const int tiles = (lengths[sequence] + 63) / 64;
  const int first = (int)((u64)tiles * split / splits), last = (int)((u64)tiles * (split + 1) / splits);
  const u8* from = codes + (u64)sequence * blocks * Of::BLOCK;
  if (threadIdx.x == 0) {
    expect_bytes(barriers + TEAMS, Of::IMAGE);
    for (int i = 0; i < Of::STEPS; i++)
      copy_bytes(shared + i * Of::STEP_BYTES, images + (u64)image * Of::IMAGE + i * Of::STEP_BYTES, Of::STEP_BYTES, barriers + TEAMS);
  }
  if (threadIdx.x % 128 == 0 && first + team < last) Of::fetch(shared, team, 0, from, base, first + team);

  const int token = 16 * warp + g, at = 4 * PAIRS * share + c;
  u32 cosine[2][PAIRS], sine[2][PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      cosine[r][j] = inner[(token + 8 * r) * (D / 4) + 4 * j + at];
      sine[r][j] = inner[(64 + token + 8 * r) * (D / 4) + 4 * j + at];
    }
  }
  const float2 scalar = scalars[head];
  wait_for_bytes(barriers + TEAMS, 0);

  u32 parity = 0;
  for (int tile = first + team; tile < last; tile += TEAMS, parity ^= 1) {
    wait_for_bytes(barriers + team, parity);
    typename Of::Value acc[Of::N / 2];
    if (ORDERED && tile > first) wait_for_turn(team);
    Of::rebuild(acc, own, shared, token, c, ORDERED && tile + 1 < last ? (team + 1) % TEAMS : -1);
    meet_group(team);  // all have read their codes
    if (threadIdx.x % 128 == 0 && tile + TEAMS < last) Of::fetch(shared, team, parity ^ 1, from, base, tile + TEAMS);
    float found[4], summed[4];
    Of::score(found, summed, acc, (const float4*)(shared + Of::AT_AFFINE), (const u32*)(shared + Of::AT_GAMMA),
              (const uint2*)(shared + Of::AT_TURNS + (2 * team + parity) * Of::TURN), cosine, sine,
              (const u32*)(shared + Of::AT_QUERIES) + g * Of::QUERY, scalar, at);
    const int heads = kv_heads * GROUP;
    float* to = SHARES == 1 ? scores + ((u64)sequence * blocks + tile) * heads * 64
                            : scores + ((u64)(sequence * SHARES + share) * blocks + tile) * heads * 64;
    if (SHARES > 1 && c == 0) {
      float* sums = squares + ((u64)(sequence * SHARES + share) * blocks + tile) * kv_heads * 64 + head * 64;
      sums[token] = summed[0], sums[token + 8] = summed[2];
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
      if (2 * c + i < GROUP) {
        const int row = head * GROUP + 2 * c + i;
        to[64 * row + logit_place(row, token)] = found[i], to[64 * row + logit_place(row, token + 8)] = found[2 + i];
      }
  }
}

// Logits from sums over shares of the channels, 256 tokens of a head a block.
template <int D, int GROUP, bool NORM, int SHARES>
__global__ void __launch_bounds__(256) fsq_join(
    const float* sums, const float* squares, const float2* scalars, float* scores, int kv_heads, int blocks) {
  const int pieces = (blocks + 3) / 4, heads = kv_heads * GROUP, row = blockIdx.x / pieces;
  const int tile = blockIdx.x % pieces * 4 + threadIdx.x / 64, head = row % heads, sequence = row / heads;
  if (tile >= blocks) return;
  const int token = threadIdx.x % 64, place = 64 * head + logit_place(head, token);
  const float2 scalar = scalars[head / GROUP];
  float sum = 0, square = 0;
#pragma unroll
  for (int i = 0; i < SHARES; i++) {
    const u64 block = (u64)(sequence * SHARES + i) * blocks + tile;
    sum += sums[block * heads * 64 + place];
    if (NORM) square += squares[block * kv_heads * 64 + head / GROUP * 64 + token];
  }
  const float norm = NORM ? rsqrtf(square * (1.0f / D) + scalar.x) : 1.0f;
  scores[((u64)sequence * blocks + tile) * heads * 64 + place] = sum * scalar.y * norm;
}
