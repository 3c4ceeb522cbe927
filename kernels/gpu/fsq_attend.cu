// Attention of new tokens to discrete codes of 4 bits a coordinate; fsq_attend.py gives the formulas and every operand.
//
// fsq_scores: a block rebuilds the keys of one KV head. The head's decoder stays in shared memory; codes come in blocks
// of 64 tokens, one a team of 128 threads, and become the left side of products in registers. A thread has channels d and
// d + D/2 of two tokens next to each other, so that rotation needs no exchange. Turned keys are the left side of the next
// products, whose right side are the queries, turned back by the block's first position; so is the sum of squares. All
// products go through one queue, in which teams take turns: while one multiplies, the others turn.
// fsq_mix.cu comes next: softmax and sums of codes, of all heads at once, since they share the codes.

#include "fsq_device.cuh"

const u32 MAGIC_BITS = 0x4B400000u;  // of 1.5 · 2^23: plus a whole number they are that float plus the number
const u32 ONES = 0x3C003C00u;
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
    // Of the last tokens these words may lie up to 16 bytes behind the block, where another stage's codes or turns are
    // on their way. The mask has no bit of those, and the block's memory goes on there.
    const u32* words = (const u32*)(shared + last[r]);
    return __funnelshift_r(words[0], words[1], shift[r]) & mask;
  }
};

// Products of keys and queries have four heads in columns 0 to 3, and in the next four the same heads turned back by
// eight positions more: so both tokens of a lane, eight apart, turn by the same place. More heads take two SETS of
// columns, one for each token.
template <Kind KIND, int D, int BYTES, int GROUP, int TEAMS, int STAGES, bool NORM, int SHARES>
struct Scores {
  typedef typename Sum<KIND>::Type Value;
  static const bool BIASED = KIND == FP8;  // products have added the bias, rows have no scale
  static const int CHUNKS = BIASED ? BYTES / 16 + 1 : (BYTES + 15) / 16;
  static const int STEPS_A_CHUNK = KIND == HALF ? 2 : 1, STEPS = CHUNKS * STEPS_A_CHUNK, SETS = GROUP > 4 ? 2 : 1;
  static const int N = D / SHARES, PAIRS = N / 16, SUMS = KIND == FP8 ? N / 4 : N / 2, THREADS = 128 * TEAMS;
  static const int STEP_BYTES = N * 32, IMAGE = STEPS * STEP_BYTES, BLOCK = 64 * BYTES, TURN = 2 * D, QUERY = 16 * N * SETS;
  static const int ITEMS = (2 * GROUP * N / 4 + 127) / 128;  // pairs of words of queries that a thread turns
  static const int AT_CODES = IMAGE, AT_TURNS = AT_CODES + TEAMS * STAGES * BLOCK;
  static const int AT_AFFINE = AT_TURNS + TEAMS * STAGES * TURN, AT_QUERIES = AT_AFFINE + 8 * D;
  static const int AT_ONES = AT_QUERIES + TEAMS * QUERY, AT_BARRIERS = AT_ONES + 256;

  static __device__ __forceinline__ void prepare(u8* shared, const u8* image, const float* affine) {
    u64* barriers = (u64*)(shared + AT_BARRIERS);
    if (threadIdx.x == 0) {
      for (int i = 0; i <= TEAMS * STAGES; i++) make_barrier(barriers + i);
      announce_barriers();
    }
    if constexpr (!BIASED)
      for (int i = threadIdx.x; i < 2 * D; i += THREADS) ((float*)(shared + AT_AFFINE))[i] = affine[i];
    for (int i = threadIdx.x; i < TEAMS * QUERY / 4; i += THREADS) ((u32*)(shared + AT_QUERIES))[i] = 0;
    for (int i = threadIdx.x; i < 64; i += THREADS) ((u32*)(shared + AT_ONES))[i] = ONES;
    show_products();
    __syncthreads();
    if (threadIdx.x == 0) {
      expect_bytes(barriers + TEAMS * STAGES, IMAGE);
      for (int i = 0; i < STEPS; i++)
        copy_bytes(shared + i * STEP_BYTES, image + i * STEP_BYTES, STEP_BYTES, barriers + TEAMS * STAGES);
    }
  }

  // A block's codes, and the turns of its first position.
  static __device__ __forceinline__ void fetch(u8* shared, int stage, const u8* codes, const uint2* base, int tile) {
    u64* barrier = (u64*)(shared + AT_BARRIERS) + stage;
    expect_bytes(barrier, BLOCK + TURN);
    copy_bytes(shared + AT_CODES + stage * BLOCK, codes + (u64)tile * BLOCK, BLOCK, barrier);
    copy_bytes(shared + AT_TURNS + stage * TURN, base + (u64)tile * (D / 4), TURN, barrier);
  }

  // Left sides of `count` steps from `first` on. Two levels at a time become numbers by masks alone: q as a byte, or
  // 1024 + q and 1024 + 16 q as a half; the decoder's image has what undoes that. Bytes after the code are 1/8 in fp8.
  static __device__ __forceinline__ void unpack(
      u32 (&a)[4][4], const u8* shared, const Lane<BYTES>& lane, int first, int count) {
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

  // Rows of a block of codes, `shift` bytes behind a team's first, times the decoder: while four steps run, the next four
  // are unpacked. The next team's products start when the last of these are queued; these may go on when this returns.
  static __device__ __forceinline__ void rebuild(
      Value (&acc)[SUMS], const u8* shared, int shift, const Lane<BYTES>& lane, int next) {
    u32 a[2][4][4];
    const u64 start = tile_at<N>(shared);
    if constexpr (KIND == INT8) {
#pragma unroll
      for (int i = 0; i < SUMS; i++) acc[i] = MAGIC_BITS;
    }
#pragma unroll
    for (int first = 0; first < STEPS; first += 4) {
      const int count = STEPS - first < 4 ? STEPS - first : 4, turn = first / 4 % 2;
      unpack(a[turn], shared + shift, lane, first, count);
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

  // A thread's part of the queries, those of the later token turned back by eight positions.
  static __device__ __forceinline__ void load_queries(
      u32 (&query)[ITEMS][2], const u32* queries, const uint2* eighth, int thread, int share) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int item = thread + 128 * i, row = item / (N / 4), word = N / 4 * share + item % (N / 4);
      query[i][0] = query[i][1] = 0;
      if (row >= 2 * GROUP) break;
      const u32* of_head = queries + row % GROUP * (D / 2);
      query[i][0] = of_head[word], query[i][1] = of_head[word + D / 4];
      if (row >= GROUP) turn_back(query[i][0], query[i][1], eighth[word]);
    }
  }
  // Where it goes as the right side of products: of each eight channels and the eight that turn with them, rows of 16
  // bytes.
  static __device__ __forceinline__ int place_of(int item) {
    const int row = item / (N / 4), word = item % (N / 4);
    return word / 4 * 256 * SETS + (row / GROUP * 4 * SETS + row % GROUP) * 16 + word % 4 * 4;
  }
  static __device__ __forceinline__ void turn_queries(
      u8* to, const u32 (&query)[ITEMS][2], const int (&places)[ITEMS], const uint2* turned, int thread, int share) {
#pragma unroll
    for (int i = 0; i < ITEMS; i++) {
      const int item = thread + 128 * i;
      if (item >= 2 * GROUP * N / 4) break;
      u32 p = query[i][0], q = query[i][1];
      turn_back(p, q, turned[N / 4 * share + item % (N / 4)]);
      u32* at = (u32*)(to + places[i]);
      at[0] = p, at[32 * SETS] = q;
    }
    show_products();
  }

  // Turned keys of this lane's two tokens as the left side of products, and sums of squares likewise; `at` is where the
  // words of its channels begin. Norm weights are in the turns.
  static __device__ __forceinline__ void turn_keys(
      u32 (&a)[PAIRS][4], u32 (&squares)[4], const Value (&acc)[SUMS], const float4* affine, const uint4 (&turns)[PAIRS], int at) {
#pragma unroll
    for (int i = 0; i < 4; i++) squares[i] = 0;
#pragma unroll
    for (int j = 0; j < PAIRS; j++) {
      float4 first, second;
      if constexpr (!BIASED) first = affine[4 * j + at], second = affine[4 * j + at + D / 4];
#pragma unroll
      for (int r = 0; r < 2; r++) {
        u32 x, y;
        if constexpr (BIASED) {
          x = acc[2 * j + r], y = acc[2 * (j + PAIRS) + r];
        } else {
          const Value *of_x = acc + 4 * j + 2 * r, *of_y = acc + 4 * (j + PAIRS) + 2 * r;
          x = halves(as_float(of_x[0]) * first.x + first.y, as_float(of_x[1]) * first.z + first.w);
          y = halves(as_float(of_y[0]) * second.x + second.y, as_float(of_y[1]) * second.z + second.w);
        }
        if (NORM) squares[r] = fma_halves(x, x, squares[r]), squares[r + 2] = fma_halves(y, y, squares[r + 2]);
        a[j][r] = fma_halves(x, turns[j].x, multiply_halves(y, turns[j].y));
        a[j][r + 2] = fma_halves(y, turns[j].z, multiply_halves(x, turns[j].w));
      }
    }
  }

  // Sums of each set's columns 2c and 2c + 1 for tokens g and g + 8, and sums of squares: words 0 and 2 for these tokens.
  static __device__ __forceinline__ void score(
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
};

// Which logits a lane has: of heads `column` and the next of a group, of one token, or of both in two sets.
template <int GROUP>
struct Place {
  static const int SETS = GROUP > 4 ? 2 : 1;
  int column, later, token;
  u32 to[SETS][2];

  __device__ __forceinline__ Place(int first_head, int first_token, int c, u32 base) {
    column = SETS == 1 ? 2 * (c % 2) : 2 * c, later = c / 2, token = first_token;
    keep(column), keep(later), keep(token);
#pragma unroll
    for (int s = 0; s < SETS; s++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const int head = first_head + column + i;
        to[s][i] = base + 64 * head + logit_place(head, first_token + 8 * (SETS == 1 ? c / 2 : s));
        keep(to[s][i]);
      }
  }
  // `left` tokens are there; the next block of this team is `step` words on.
  __device__ __forceinline__ void store(
      float* scores, const float (&found)[4 * SETS], float early, float late, int left, u32 step) {
#pragma unroll
    for (int s = 0; s < SETS; s++) {
      const bool second = SETS == 1 ? later : s;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float logit = second ? found[4 * s + 2 + i] * late : found[4 * s + i] * early;
        if (column + i < GROUP) scores[to[s][i]] = token + 8 * second < left ? logit : NO_LOGIT;
        to[s][i] += step;
      }
    }
  }
};

// Logits for powers of two, [batch, blocks, heads, 64], each head's where logit_place says; those of tokens beyond a
// sequence's length are -inf. In shares of the channels: sums for fsq_join, [batch, shares, blocks, heads, 64], and
// sums of squares, [batch, shares, blocks, KV heads, 64].
template <Kind KIND, int D, int BYTES, int GROUP, int TEAMS, int STAGES, bool NORM, int SHARES>
__global__ void __launch_bounds__(128 * TEAMS, 1) fsq_scores(
    const u8* codes, const u8* images, const float* affine, const float2* scalars, const uint2* base, const uint2* eighth,
    const u32* inner, const u32* queries, const int* lengths, float* scores, float* squares, int kv_heads,
    int splits, int blocks) {
  typedef Scores<KIND, D, BYTES, GROUP, TEAMS, STAGES, NORM, SHARES> Of;
#ifdef HOST_EMULATION
  u8* shared = (u8*)block_memory;
#else
  extern __shared__ __align__(128) u8 shared[];
#endif
  const int image = blockIdx.x % (kv_heads * SHARES), head = image / SHARES, share = image % SHARES;
  const int split = blockIdx.x / (kv_heads * SHARES) % splits, sequence = blockIdx.x / (kv_heads * SHARES) / splits;
  const int team = same(threadIdx.x / 128), heads = kv_heads * GROUP;
  int thread = threadIdx.x % 128, c = thread % 4;
  const int token = 16 * (thread / 32) + thread % 32 / 4, at = 4 * Of::PAIRS * share + c;
  keep(thread), keep(c);
  const Lane<BYTES> lane(Of::AT_CODES + team * STAGES * Of::BLOCK, token, c);
  u64* barriers = (u64*)(shared + Of::AT_BARRIERS);

  let_next_kernel_start();
  Of::prepare(shared, images + (u64)image * Of::IMAGE, affine + head * 2 * D);
  uint4 turns[Of::PAIRS];
#pragma unroll
  for (int j = 0; j < Of::PAIRS; j++) {
    const u32* of_place = inner + token * (D / 4) + 4 * j + at;
    turns[j] = {of_place[0], of_place[16 * D], of_place[32 * D], of_place[48 * D]};
  }
  const float2 scalar = scalars[head];
  wait_for_previous_kernel();

  const int length = lengths[sequence], tiles = (length + 63) / 64;
  const int first = (int)((u64)tiles * split / splits), last = (int)((u64)tiles * (split + 1) / splits);
  const u8* from = codes + (u64)sequence * blocks * Of::BLOCK;
  const bool fetches = thread == 32 * (team % 4);  // not all of them in the same quarter of a multiprocessor
  for (int i = 0; i < STAGES; i++)
    if (fetches && first + team + i * TEAMS < last) Of::fetch(shared, team * STAGES + i, from, base, first + team + i * TEAMS);
  u32 query[Of::ITEMS][2];
  Of::load_queries(query, queries + (sequence * kv_heads + head) * GROUP * (D / 2), eighth, thread, share);
  int places[Of::ITEMS];
#pragma unroll
  for (int i = 0; i < Of::ITEMS; i++) places[i] = Of::place_of(thread + 128 * i), keep(places[i]);
  const u32 row = (SHARES == 1 ? sequence : sequence * SHARES + share) * blocks;
  Place<GROUP> place(head * GROUP, token, c, (row + first + team) * heads * 64);
  wait_for_bytes(barriers + TEAMS * STAGES, 0);

  u32 count = 0;
  for (int tile = first + team; tile < last; tile += TEAMS, count++) {
    const int own = STAGES == 1 ? 0 : count % 2, stage = team * STAGES + own;
    u8* turned = shared + Of::AT_QUERIES + team * Of::QUERY;
    typename Of::Value acc[Of::SUMS];
    u32 keys[Of::PAIRS][4], squared[4];
    float found[4 * Of::SETS], summed[4] = {};
    wait_for_bytes(barriers + stage, count / STAGES % 2);
    if (TEAMS > 1 && tile > first) wait_for_turn(team);  // as a whole: nobody reads the queries of its last block
    if (TEAMS == 1) meet_group(team);
    Of::rebuild(acc, shared, own * Of::BLOCK, lane, TEAMS > 1 && tile + 1 < last ? (team + 1) % TEAMS : -1);
    Of::turn_queries(turned, query, places, (const uint2*)(shared + Of::AT_TURNS + stage * Of::TURN), thread, share);
    finish_products<0>();
    hold(acc);
    meet_group(team);  // all have read this stage, and all queries are there
    if (fetches && tile + STAGES * TEAMS < last) Of::fetch(shared, stage, from, base, tile + STAGES * TEAMS);
    Of::turn_keys(keys, squared, acc, (const float4*)(shared + Of::AT_AFFINE), turns, at);
    Of::score(found, summed, keys, squared, turned, shared + Of::AT_ONES);
    if (SHARES > 1 && c == 0) {
      float* sums = squares + (u64)(row + tile) * kv_heads * 64 + head * 64;
      sums[token] = summed[0], sums[token + 8] = summed[2];
    }
    float scale[2] = {1, 1};
#pragma unroll
    for (int r = 0; r < 2; r++)
      if (SHARES == 1) scale[r] = scalar.y * (NORM ? rsqrtf(summed[2 * r] * (1.0f / D) + scalar.x) : 1.0f);
    place.store(scores, found, scale[0], scale[1], length - 64 * tile, TEAMS * heads * 64);
  }
}

// Logits from sums over shares of the channels, 256 tokens of a head a block.
template <int D, int GROUP, bool NORM, int SHARES>
__global__ void __launch_bounds__(256) fsq_join(
    const float* sums, const float* squares, const float2* scalars, const int* lengths, float* scores, int kv_heads,
    int blocks) {
  const int pieces = (blocks + 3) / 4, heads = kv_heads * GROUP, row = blockIdx.x / pieces;
  const int tile = blockIdx.x % pieces * 4 + threadIdx.x / 64, head = row % heads, sequence = row / heads;
  let_next_kernel_start();
  if (tile >= blocks) return;
  wait_for_previous_kernel();
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
