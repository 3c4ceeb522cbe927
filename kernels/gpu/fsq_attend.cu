// Attention of new tokens to discrete codes of 4 bits a coordinate; fsq_attend.py gives the formulas and every operand.
//
// fsq_scores: a block rebuilds the keys of one KV head. The head's decoder stays in shared memory; codes come in blocks
// of 64 tokens, one a warpgroup, and become the left side of products in registers. A thread has channels d and d + D/2
// of two tokens next to each other, so that rotation needs no exchange; squares are summed by the tensor cores.
// fsq_mix.cu comes next: softmax and sums of codes, of all heads at once, since they share the codes.

#include "fsq_device.cuh"

const u32 MAGIC_BITS = 0x4B400000u;  // of 1.5 · 2^23: plus a whole number they are that float plus the number

#define NO_LOGIT (-__int_as_float(0x7F800000))  // the logit of no token

template <Kind KIND> struct Sum { typedef float Type; };
template <> struct Sum<INT8> { typedef u32 Type; };
template <> struct Sum<FP8> { typedef u32 Type; };  // two columns' halves
__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(u32 x) { return __int_as_float((int)x); }

// Where a lane's eight levels of a chunk are, of tokens g and g + 8: offsets that stay in registers.
template <int BYTES>
struct Lane {
  int whole, last[2];
  u32 shift[2], mask;
  Masks masks;

  __device__ __forceinline__ Lane(int block, int token, int c) {
    whole = block + token * 16 + 4 * c, mask = last_mask<BYTES>(c);
    keep(whole), keep(mask);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int at = (token + 8 * r) * (BYTES % 16) + 4 * c;
      last[r] = block + BYTES / 16 * 1024 + at / 4 * 4, shift[r] = 8 * (at % 4);
      keep(last[r]), keep(shift[r]);
    }
  }
  __device__ __forceinline__ u32 word(const u8* shared, int chunk, int r) const {
    if (chunk < BYTES / 16) return *(const u32*)(shared + whole + chunk * 1024 + r * 128);
    if (BYTES % 16 == 0) return 0;
    const u32* words = (const u32*)(shared + last[r]);
    return __funnelshift_r(words[0], words[1], shift[r]) & mask;
  }
};

// SPREAD: eight columns of products have four heads at a place and at the eighth after it, so that both tokens of a
// lane turn by the same place; for more heads there are two SETS of columns.
template <Kind KIND, int D, int BYTES, int GROUP, int TEAMS, bool NORM, int SHARES, bool GROUPED>
struct Scores {
  typedef typename Sum<KIND>::Type Value;
  static const bool BIASED = KIND == FP8 || KIND == FP8_WIDE;  // products have added the bias, rows have no scale
  static const int CHUNKS = BIASED ? BYTES / 16 + 1 : (BYTES + 15) / 16;
  static const int STEPS_A_CHUNK = KIND == HALF ? 2 : 1, STEPS = CHUNKS * STEPS_A_CHUNK, SETS = GROUP > 4 ? 2 : 1;
  static const int N = D / SHARES, STEP_BYTES = N * 32, IMAGE = STEPS * STEP_BYTES, BLOCK = 64 * BYTES, PAIRS = N / 16, SUMS = KIND == FP8 ? N / 4 : N / 2;
  static const int ITEMS = (2 * GROUP * N / 4 + 127) / 128;  // pairs of words of queries that a thread turns
  static const int TURN = 2 * D, AT_CODES = IMAGE, AT_TURNS = AT_CODES + TEAMS * BLOCK, AT_AFFINE = AT_TURNS + TEAMS * 2 * TURN;
  static const int QUERY = GROUPED ? 16 * N * SETS : 0, AT_QUERIES = AT_AFFINE + (BIASED ? 0 : 8 * D);
  static const int AT_ONES = AT_QUERIES + TEAMS * 2 * QUERY, AT_BARRIERS = AT_ONES + (GROUPED ? 256 : 0);

  // A block's codes, and the turns of its first position, which are read longer: they have two places.
  static __device__ __forceinline__ void fetch(u8* shared, int team, u32 place, const u8* codes, const uint2* base, int tile) {
    u64* barrier = (u64*)(shared + AT_BARRIERS) + team;
    expect_bytes(barrier, BLOCK + TURN);
    copy_bytes(shared + AT_CODES + team * BLOCK, codes + (u64)tile * BLOCK, BLOCK, barrier);
    copy_bytes(shared + AT_TURNS + (2 * team + place) * TURN, base + (u64)tile * (D / 4), TURN, barrier);
  }

  // Left sides of `count` steps from `first` on. Two levels at a time become numbers by masks alone: q as a byte, or
  // 1024 + q and 1024 + 16 q as a half; the decoder's image has what undoes that. Bytes after the code are 1/8 in fp8.
  static __device__ __forceinline__ void unpack(u32 (&a)[4][4], const u8* shared, const Lane<BYTES>& lane, int first, int count) {
#pragma unroll
    for (int i = 0; i < 4; i += STEPS_A_CHUNK) {
      if (i >= count) break;
      const int chunk = (first + i) / STEPS_A_CHUNK;
      u32 low = lane.word(shared, chunk, 0), high = lane.word(shared, chunk, 1);
      if constexpr (KIND == HALF) {
#pragma unroll
        for (int s = 0; s < 2; s++) {
          a[i + s][0] = low & lane.masks.even | 0x64006400u, a[i + s][1] = high & lane.masks.even | 0x64006400u;
          a[i + s][2] = low & lane.masks.odd | 0x64006400u, a[i + s][3] = high & lane.masks.odd | 0x64006400u;
          low >>= 8, high >>= 8;
        }
      } else {
        const u32 after = BIASED && chunk == BYTES / 16 ? 0x20202020u & ~lane.mask : 0;
        a[i][0] = low & 0x0F0F0F0Fu | after, a[i][1] = high & 0x0F0F0F0Fu | after;
        a[i][2] = low >> 4 & 0x0F0F0F0Fu | after, a[i][3] = high >> 4 & 0x0F0F0F0Fu | after;
      }
    }
  }

  // Rows of a block of codes times the decoder: while four steps run, the next four are unpacked.
  // The next team's products start when the last of these are queued; these may go on when this returns.
  static __device__ __forceinline__ void rebuild(
      Value (&acc)[SUMS], const u8* shared, const Lane<BYTES>& lane, int next) {
    u32 a[2][4][4];
    const u64 start = tile_at<N>(shared);
    if constexpr (KIND == INT8) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) acc[i] = MAGIC_BITS;
    }
#pragma unroll
    for (int first = 0; first < STEPS; first += 4) {
      const int count = STEPS - first < 4 ? STEPS - first : 4, turn = first / 4 % 2;
      unpack(a[turn], shared, lane, first, count);
      hold(acc);
      begin_products();
#pragma unroll
      for (int i = 0; i < count; i++) {
        const u64 tile = step_of(start, (first + i) * STEP_BYTES);
        if (KIND != INT8 && first + i == 0) product<KIND, N, true>(acc, a[turn][i], tile);
        else product<KIND, N, false>(acc, a[turn][i], tile);
      }
      commit_products();
      if (first + 4 < STEPS) finish_products<1>();
    }
    if (next >= 0) pass_turn(next);
  }

  // Two words of a query, channels that turn together, turned back.
  static __device__ __forceinline__ void turn_back(u32& p, u32& q, uint2 turn) {
    const u32 before = p;
    p = fma_halves(before, turn.x, multiply_halves(q, turn.y));
    q = fma_halves(q, turn.x, minus_halves(multiply_halves(before, turn.y)));
  }

  // Turned keys of this lane's two tokens as the left side of products, and sums of squares likewise; `at` is where the
  // words of its channels begin.
  static __device__ __forceinline__ void turn_keys(
      u32 (&a)[PAIRS][4], u32 (&squares)[4], const Value (&acc)[SUMS], const float4* affine, const uint4 (&turns)[PAIRS], int at) {
#pragma unroll
    for (int i = 0; i < 4; i++) squares[i] = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      float4 first = {1, 0, 1, 0}, second = first;
      if constexpr (!BIASED) first = affine[4 * j + at], second = affine[4 * j + at + D / 4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 x, y;
        if constexpr (KIND == FP8) {
          x = acc[2 * j + r], y = acc[2 * (j + PAIRS) + r];
        } else {
          float x0 = as_float(acc[4 * j + 2 * r]), x1 = as_float(acc[4 * j + 2 * r + 1]);
          float y0 = as_float(acc[4 * (j + PAIRS) + 2 * r]), y1 = as_float(acc[4 * (j + PAIRS) + 2 * r + 1]);
          if constexpr (!BIASED) {
            x0 = x0 * first.x + first.y, x1 = x1 * first.z + first.w;
            y0 = y0 * second.x + second.y, y1 = y1 * second.z + second.w;
          }
          x = halves(x0, x1), y = halves(y0, y1);
        }
        if (NORM) squares[r] = fma_halves(x, x, squares[r]), squares[r + 2] = fma_halves(y, y, squares[r + 2]);
        a[j][r] = fma_halves(x, turns[j].x, multiply_halves(y, turns[j].y));
        a[j][r + 2] = fma_halves(y, turns[j].z, multiply_halves(x, turns[j].w));
      }
    }
  }

  // Where a thread's part of the queries goes as the right side of products: of each eight channels and the eight that
  // turn with them, rows of 16 bytes.
  static __device__ __forceinline__ int place_of(int item) {
    const int row = item / (N / 4), word = item % (N / 4);
    return word / 4 * 256 * SETS + (row / GROUP * 4 * SETS + row % GROUP) * 16 + word % 4 * 4;
  }
  static __device__ __forceinline__ void turn_queries(
      u8* to, const u32 (&queries)[ITEMS][2], const int (&places)[ITEMS], const uint2* turned, int thread, int share) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int item = thread + 128 * i;
      if (item >= 2 * GROUP * N / 4) break;
      u32 p = queries[i][0], q = queries[i][1];
      turn_back(p, q, turned[N / 4 * share + item % (N / 4)]);
      u32* at = (u32*)(to + places[i]);
      at[0] = p, at[32 * SETS] = q;
    }
  }

  // Sums of columns 2c, 2c + 1 for tokens g and g + 8, each set's, and sums of squares of these tokens.
  static __device__ __forceinline__ void score_grouped(
      float (&found)[4 * SETS], float (&squares)[4], u32 (&a)[PAIRS][4], u32 (&squared)[4], const u8* queries, const u8* ones) {
    const u64 start = tile_at<8 * SETS>(queries);
#pragma unroll
    for (int j = 0; j < PAIRS; j++) hold(a[j]);
    hold(squared), hold(found), hold(squares);
    begin_products();
    if (NORM) product<HALF, 8, true>(squares, squared, tile_at<8>(ones));
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const u64 tile = step_of(start, 256 * SETS * j);
      if (j == 0) product<HALF, 8 * SETS, true>(found, a[j], tile);
      else product<HALF, 8 * SETS, false>(found, a[j], tile);
    }
    commit_products();
    finish_products<0>();
    hold(found), hold(squares);
  }
  static __device__ __forceinline__ void score_alone(
      float (&found)[4 * SETS], float (&squares)[4], const u32 (&a)[PAIRS][4], const u32 (&squared)[4],
      const u32 (&queries)[SETS][PAIRS][2], const uint2* turned, int at) {
    if (NORM) multiply(squares, squared, 0x3C003C00u, 0x3C003C00u);
    float sums[2 * SETS][4] = {};
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      const uint2 turn = turned[4 * j + at];
#pragma unroll
      for (int s = 0; s < SETS; s++) {
        u32 p = queries[s][j][0], q = queries[s][j][1];
        turn_back(p, q, turn);
        multiply(sums[2 * s + j % 2], a[j], p, q);
      }
    }
#pragma unroll
    for (int i = 0; i < 4 * SETS; i++) found[i] = sums[i / 4 * 2][i % 4] + sums[i / 4 * 2 + 1][i % 4];
  }
};

// Logits for powers of two, [batch, blocks, heads, 64], each head's where logit_place says; those of tokens beyond a
// sequence's length are -inf. In shares of the channels: sums for fsq_join, [batch, shares, blocks, heads, 64], and
// sums of squares, [batch, shares, blocks, KV heads, 64].
template <Kind KIND, int D, int BYTES, int GROUP, int TEAMS, bool NORM, bool ORDERED, int SHARES, bool GROUPED>
__global__ void __launch_bounds__(128 * TEAMS, 1) fsq_scores(
    const u8* codes, const u8* images, const float4* affine, const float2* scalars, const uint2* base, const uint2* eighth,
    const u32* inner, const u32* queries, const int* lengths, float* scores, float* squares, int kv_heads,
    int splits, int blocks) {
  typedef Scores<KIND, D, BYTES, GROUP, TEAMS, NORM, SHARES, GROUPED> Of;
  const int PAIRS = Of::PAIRS, SETS = Of::SETS, N = Of::N;
#ifdef HOST_EMULATION
  u8* shared = (u8*)block_memory;
#else
  extern __shared__ __align__(128) u8 shared[];
#endif
  const int image = blockIdx.x % (kv_heads * SHARES), head = image / SHARES, share = image % SHARES;
  const int split = blockIdx.x / (kv_heads * SHARES) % splits, sequence = blockIdx.x / (kv_heads * SHARES) / splits;
  const int team = same(threadIdx.x / 128);
  int thread = threadIdx.x % 128, g = thread % 32 / 4, c = thread % 4;
  const int token = 16 * (thread / 32) + g;
  keep(thread), keep(c);
  u64* barriers = (u64*)(shared + Of::AT_BARRIERS);
  const Lane<BYTES> lane(Of::AT_CODES + team * Of::BLOCK, token, c);

  if (threadIdx.x == 0) {
    for (int i = 0; i <= TEAMS; i++) make_barrier(barriers + i);
    announce_barriers();
  }
  if constexpr (!Of::BIASED)
    for (int i = threadIdx.x; i < 2 * D; i += 128 * TEAMS)
      ((float*)(shared + Of::AT_AFFINE))[i] = ((const float*)affine)[head * 2 * D + i];
  if constexpr (GROUPED) {
    for (int i = threadIdx.x; i < TEAMS * 2 * Of::QUERY / 4; i += 128 * TEAMS) ((u32*)(shared + Of::AT_QUERIES))[i] = 0;
    for (int i = threadIdx.x; i < 64; i += 128 * TEAMS) ((u32*)(shared + Of::AT_ONES))[i] = 0x3C003C00u;
  }
  __syncthreads();

  const int length = lengths[sequence], tiles = (length + 63) / 64;
  const int first = (int)((u64)tiles * split / splits), last = (int)((u64)tiles * (split + 1) / splits);
  const u8* from = codes + (u64)sequence * blocks * Of::BLOCK;
  if (threadIdx.x == 0) {
    expect_bytes(barriers + TEAMS, Of::IMAGE);
    for (int i = 0; i < Of::STEPS; i++)
      copy_bytes(shared + i * Of::STEP_BYTES, images + (u64)image * Of::IMAGE + i * Of::STEP_BYTES, Of::STEP_BYTES, barriers + TEAMS);
  }
  const bool fetches = thread == 32 * (team % 4);  // not all of them in the same quarter of a multiprocessor
  if (fetches && first + team < last) Of::fetch(shared, team, 0, from, base, first + team);

  const int at = 4 * PAIRS * share + c;
  const u32* of_group = queries + (sequence * kv_heads + head) * GROUP * (D / 2);
  uint4 turns[PAIRS];
#pragma unroll
  for (int j = 0; j < PAIRS; j++) {
    const u32* of_place = inner + token * (D / 4) + 4 * j + at;
    turns[j] = {of_place[0], of_place[16 * D], of_place[32 * D], of_place[48 * D]};
  }
  u32 query[GROUPED ? Of::ITEMS : SETS * PAIRS][2] = {};
#pragma unroll
  for (int i = 0; i < (GROUPED ? Of::ITEMS : SETS * PAIRS); i++) {
    const int item = thread + 128 * i, set = i / PAIRS;
    const int row = GROUPED ? item / (N / 4) % GROUP : SETS == 1 ? g % 4 : g;
    const int later = GROUPED ? item / (N / 4) / GROUP : SETS == 1 ? g / 4 : set;
    const int word = GROUPED ? N / 4 * share + item % (N / 4) : 4 * (i % PAIRS) + at;
    if (row >= GROUP || later > 1) continue;
    query[i][0] = of_group[row * (D / 2) + word], query[i][1] = of_group[row * (D / 2) + word + D / 4];
    if (later) Of::turn_back(query[i][0], query[i][1], eighth[word]);
  }
  const float2 scalar = scalars[head];
  if (GROUPED) show_products();  // the ones
  __syncthreads();
  wait_for_bytes(barriers + TEAMS, 0);

  const int heads = kv_heads * GROUP;
  int places[Of::ITEMS];
#pragma unroll
  for (int i = 0; i < Of::ITEMS; i++) places[i] = Of::place_of(thread + 128 * i), keep(places[i]);
  u32 to[SETS][2];
#pragma unroll
  for (int s = 0; s < SETS; s++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = head * GROUP + (SETS == 1 ? 2 * (c % 2) : 2 * c) + i;
      const u32 tile = (SHARES == 1 ? sequence : sequence * SHARES + share) * blocks + first + team;
      to[s][i] = tile * heads * 64 + 64 * row + logit_place(row, token + 8 * (SETS == 1 ? c / 2 : s));
      keep(to[s][i]);
    }
  int latter = c / 2, column = SETS == 1 ? 2 * (c % 2) : 2 * c;
  keep(latter), keep(column);

  u32 parity = 0;
  for (int tile = first + team; tile < last; tile += TEAMS, parity ^= 1) {
    wait_for_bytes(barriers + team, parity);
    typename Of::Value acc[Of::SUMS];
    u32 keys[PAIRS][4], squared[4];
    float found[4 * SETS], summed[4] = {};
    const uint2* turn = (const uint2*)(shared + Of::AT_TURNS + (2 * team + parity) * Of::TURN);
    u8* turned = shared + Of::AT_QUERIES + (2 * team + parity) * Of::QUERY;
    if (ORDERED && tile > first) wait_for_turn(team);
    Of::rebuild(acc, shared, lane, ORDERED && tile + 1 < last ? (team + 1) % TEAMS : -1);
    if constexpr (GROUPED) {
      Of::turn_queries(turned, query, places, turn, thread, share);
      show_products();
    }
    finish_products<0>();
    hold(acc);
    meet_group(team);  // all have read their codes, and all queries are there
    if (fetches && tile + TEAMS < last) Of::fetch(shared, team, parity ^ 1, from, base, tile + TEAMS);
    Of::turn_keys(keys, squared, acc, (const float4*)(shared + Of::AT_AFFINE), turns, at);
    if constexpr (GROUPED) Of::score_grouped(found, summed, keys, squared, turned, shared + Of::AT_ONES);
    else Of::score_alone(found, summed, keys, squared, (const u32(&)[SETS][PAIRS][2])query, turn, at);
    if (SHARES > 1 && c == 0) {
      float* sums = squares + ((u64)(sequence * SHARES + share) * blocks + tile) * kv_heads * 64 + head * 64;
      sums[token] = summed[0], sums[token + 8] = summed[2];
    }
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      const bool later = SETS == 1 ? latter : s;
      const float norm = NORM ? rsqrtf((later ? summed[2] : summed[0]) * (1.0f / D) + scalar.x) : 1.0f;
      const float scale = SHARES == 1 ? scalar.y * norm : 1.0f;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float logit = (later ? found[4 * s + 2 + i] : found[4 * s + i]) * scale;
        if (column + i < GROUP) scores[to[s][i]] = 64 * tile + token + 8 * later < length ? logit : NO_LOGIT;
        to[s][i] += TEAMS * heads * 64;
      }
    }
  }
}

// Logits from sums over shares of the channels, 256 tokens of a head a block.
template <int D, int GROUP, bool NORM, int SHARES>
__global__ void __launch_bounds__(256) fsq_join(
    const float* sums, const float* squares, const float2* scalars, const int* lengths, float* scores, int kv_heads,
    int blocks) {
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
  scores[((u64)sequence * blocks + tile) * heads * 64 + place] =
      64 * tile + token < lengths[sequence] ? sum * scalar.y * norm : NO_LOGIT;
}
