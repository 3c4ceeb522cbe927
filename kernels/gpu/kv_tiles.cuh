// Tiles of a low-bit KV cache on their way into the tensor core; kv_attend.cu gives the whole picture.
//
// Codes are never expanded: a byte holds codes of neighbouring tokens of one channel, and masked they are denormal float16
// numbers, code · 2^(lift - 24), which the product m16n8k16 takes as they are. They are its 16 rows; its 8 columns are four
// query heads, each as a high and a low half. Their sums are cut 25 bits below the largest exponent, and codes lie up to
// 10 below theirs: 15 bits are kept, of logits an error of 3e-5 or a few. In both products lane 4g + q ends with head q
// (and q + 4): of the logits with tokens 4g … 4g + 3 of each 32, of the output with channels D/8 · g …

#include "kv_half.cuh"

#ifndef HOST_EMULATION  // a test compiles the rest for the host and brings its own versions of these
extern __shared__ uint4 block_memory[];
__device__ __forceinline__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;"
               :: "r"((u32)__cvta_generic_to_shared(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of copies but the newest.
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_group 1;" ::: "memory"); }
__device__ __forceinline__ float low_half(u32 v) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v));
  return f;
}
__device__ __forceinline__ float high_half(u32 v) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(v));
  return f;
}
__device__ __forceinline__ u32 halves(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 most_halves(u32 a, u32 b) {
  u32 v;
  asm("max.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ float power(float x) {
  float f;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(f) : "f"(x));
  return f;
}
// The warp's 8 × 8 matrix of halves, lane 4g + q with columns 2q and 2q + 1 of row g, transposed.
__device__ __forceinline__ u32 transposed(u32 v) {
  u32 t;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(t) : "r"(v));
  return t;
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// --- codes ------------------------------------------------------------------------------------------------------------

// Codes of token s (of four neighbours) in the low bytes of both 16-bit halves, at bit `lift` of each.
template <int BITS>
__device__ __forceinline__ u32 masked(u32 first, u32 second, int s) {
  if (BITS == 1) return first & (0x00010001u << s);
  if (BITS == 2) return first & (0x00030003u << (2 * s));
  if (BITS == 4) return (s < 2 ? first : second) & (0x000F000Fu << (4 * (s & 1)));
  return (first & (0x00030003u << (2 * s))) | ((second << (s + 2)) & (0x00040004u << (2 * s)));
}
template <int BITS>
__device__ __forceinline__ constexpr int lift(int s) { return BITS == 1 ? s : BITS == 4 ? 4 * (s & 1) : 2 * s; }
__device__ __forceinline__ float two_to(int exponent) { return __int_as_float((127 + exponent) << 23); }

// Where chunk `chunk` of 16 bytes of a plane's row lies in shared memory: rows that lanes read together lie in other
// banks. A plane of WIDTH bits has 16 · WIDTH rows of D bytes, each with the codes of 8 / WIDTH tokens.
template <int D, int WIDTH, bool KEYS>
__device__ __forceinline__ int place(int row, int chunk) {
  const int turn = KEYS ? (WIDTH == 1 ? 0 : 4 * (row / ((WIDTH + 1) / 2) & 1)) : 2 * (row / WIDTH & 3);
  return row * D + 16 * ((chunk ^ turn) & (D / 16 - 1));
}
template <int D, int WIDTH, bool KEYS>
__device__ __forceinline__ void copy_plane(u8* to, const u8* from, int lane) {
#pragma unroll
  for (int i = 0; i < WIDTH * D / 32; i++) {
    const int chunk = lane + 32 * i;
    copy_async(to + place<D, WIDTH, KEYS>(chunk / (D / 16), chunk % (D / 16)), from + 16 * chunk);
  }
}
template <int COUNT>
__device__ __forceinline__ void copy_halves(u8* to, const u16* from, int lane) {
  if (lane < COUNT / 8) copy_async(to + 16 * lane, from + 8 * lane);
}

template <int D, int BITS, bool KEYS>
struct Staged {  // keys or values of one tile in shared memory: codes, then A, Z and B
  static const int ROW = KEYS ? D : TILE, COLUMN = KEYS ? TILE : D, FIRST = BITS == 3 ? 2 : BITS;
  static const int CODES = TILE * D * BITS / 8, BYTES = CODES + 4 * ROW + 2 * COLUMN;
  static __device__ __forceinline__ void copy(u8* to, const Half& half, long long tile, int lane) {
    copy_plane<D, FIRST, KEYS>(to, half.codes + tile * CODES, lane);
    if (BITS == 3) copy_plane<D, 1, KEYS>(to + 32 * D, half.codes + tile * CODES + 32 * D, lane);
    copy_halves<ROW>(to + CODES, half.scale + tile * ROW, lane);
    copy_halves<ROW>(to + CODES + 2 * ROW, half.zero + tile * ROW, lane);
    copy_halves<COLUMN>(to + CODES + 4 * ROW, half.other + tile * COLUMN, lane);
  }
};

// --- products ---------------------------------------------------------------------------------------------------------

template <int D, int SETS>
struct State {  // of heads q and q + 4: maximum so far, this lane's part of the sum, channels D/8 · g …
  float most[SETS], total[SETS], out[SETS][D / 8];
};

__device__ __forceinline__ float most_over_rows(float v) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) v = fmaxf(v, __shfl_xor_sync(LANES, v, step));
  return v;
}
__device__ __forceinline__ float sum_over_rows(float v) {
#pragma unroll
  for (int step = 4; step < 32; step *= 2) v += __shfl_xor_sync(LANES, v, step);
  return v;
}

// Queries lie in shared memory so that the four lanes q read neighbours: channel c (a multiple of four) is here.
__device__ __forceinline__ int spot(int c) { return (c & ~63) | (c & 12) << 2 | (c & 48) >> 2; }

// Exponent of the largest of some halves that are not negative, no less than that of the smallest half.
__device__ __forceinline__ int exponent_of(u32 pair) {
  return max((int)(__float_as_uint(fmaxf(low_half(pair), high_half(pair))) >> 23) - 127, -24);
}

// The product's columns for a tile: query · A as halves, highs in even and lows in odd ones, lifted to just below 2^15.
template <int D, int SETS>
struct Folded {
  u32 column[SETS][D / 16][2];
  float constant[SETS];  // query · Z
  int exponent;          // of what the lift is undone by
};
template <int D, int SETS>
__device__ __forceinline__ void fold(Folded<D, SETS>& to, const u8* scales, const float* queries, int g, int q) {
  const u16 *scale = (const u16*)scales, *zero = scale + D;
  u32 most = 0;
#pragma unroll
  for (int i = 0; i < D / 16; i++) {
    const uint2 a = *(const uint2*)(scale + 64 * (i / 4) + 16 * q + 4 * (i % 4));
    most = most_halves(most, most_halves(a.x, a.y));
  }
  most = most_halves(most, __shfl_xor_sync(LANES, most, 1));
  most = most_halves(most, __shfl_xor_sync(LANES, most, 2));
  to.exponent = exponent_of(most) - 14;
  const float up = two_to(-to.exponent);
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    float constant = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
      const int c = 64 * (i / 4) + 16 * q + 4 * (i % 4);
      const float4 x = *(const float4*)(queries + (g / 2 + 4 * set) * D + spot(c));
      const uint2 a = *(const uint2*)(scale + c), z = *(const uint2*)(zero + c);
      constant += x.x * low_half(z.x) + x.y * high_half(z.x) + x.z * low_half(z.y) + x.w * high_half(z.y);
      const float y[4] = {x.x * low_half(a.x) * up, x.y * high_half(a.x) * up, x.z * low_half(a.y) * up,
                          x.w * high_half(a.y) * up};
#pragma unroll
      for (int odd = 0; odd < 2; odd++) {
        const u32 high = halves(y[odd], y[odd + 2]);
        const u32 low = halves(y[odd] - low_half(high), y[odd + 2] - high_half(high));
        to.column[set][i][odd] = g & 1 ? low : high;
      }
    }
    constant += __shfl_xor_sync(LANES, constant, 1);
    constant += __shfl_xor_sync(LANES, constant, 2);
    to.constant[set] = __shfl_sync(LANES, constant, 8 * q);
  }
}

// Logits of a tile, [set][block of 32 tokens][token 4g + s].
template <int D, int BITS, int SETS>
__device__ __forceinline__ void key_logits(float (&logits)[SETS][4][4], const u8* staged, const float* queries,
                                           const float* units, int g, int q) {
  typedef Staged<D, BITS, true> S;
  const int W = S::FIRST;
  Folded<D, SETS> by;
  fold<D, SETS>(by, staged + S::CODES, queries, g, q);
#pragma unroll
  for (int block = 0; block < 4; block++) {
    const int quad = 8 * block + g;
    float sums[2][SETS][4] = {};
#pragma unroll
    for (int part = 0; part < D / 64; part++) {
      uint4 one = *(const uint4*)(staged + place<D, W, true>(quad * W / 2, 4 * part + q)), two = one;
      if (BITS == 4) two = *(const uint4*)(staged + place<D, W, true>(2 * quad + 1, 4 * part + q));
      if (BITS == 3) two = *(const uint4*)(staged + 32 * D + place<D, 1, true>(quad / 2, 4 * part + q));
      const u32 ones[4] = {one.x, one.y, one.z, one.w}, twos[4] = {two.x, two.y, two.z, two.w};
      const int nibble = 4 * (quad & 1);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const u32 first = BITS == 1 ? ones[j] >> nibble : ones[j], second = BITS == 3 ? twos[j] >> nibble : twos[j];
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
          const u32 a[4] = {masked<BITS>(first, second, 2 * pair), masked<BITS>(first, second, 2 * pair + 1),
                            masked<BITS>(first >> 8, second >> 8, 2 * pair),
                            masked<BITS>(first >> 8, second >> 8, 2 * pair + 1)};
#pragma unroll
          for (int set = 0; set < SETS; set++)
            multiply(sums[pair][set], a, by.column[set][4 * part + j][0], by.column[set][4 * part + j][1]);
        }
      }
    }
    const uint2 b = *(const uint2*)(staged + S::CODES + 4 * D + 8 * quad);
    const float other[4] = {low_half(b.x), high_half(b.x), low_half(b.y), high_half(b.y)};
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const float sum = sums[s / 2][set][2 * (s % 2)] + sums[s / 2][set][2 * (s % 2) + 1];
        logits[set][block][s] =
            (sum * two_to(by.exponent + 24 - lift<BITS>(s)) + by.constant[set]) * (other[s] * units[q + 4 * set]);
      }
  }
}

// Logits become weights relative to the new maximum; what was gathered before is scaled to it. Either each lane g has
// tokens of its own (`apart`), or all of a q have the same ones, and one of them counts.
template <int D, int SETS, int ROWS, int COLUMNS>
__device__ __forceinline__ void weigh(State<D, SETS>& state, float (&logits)[SETS][ROWS][COLUMNS], bool apart,
                                      bool counts) {
#pragma unroll
  for (int set = 0; set < SETS; set++) {
    float most = NONE, sum = 0;
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) most = fmaxf(most, logits[set][i / COLUMNS][i % COLUMNS]);
    if (apart) most = most_over_rows(most);
    most = fmaxf(most, state.most[set]);
    const float keep = power(state.most[set] - most);
#pragma unroll
    for (int i = 0; i < ROWS * COLUMNS; i++) {
      float& weight = logits[set][i / COLUMNS][i % COLUMNS];
      weight = power(weight - most);
      sum += weight;
    }
    state.most[set] = most;
    state.total[set] = state.total[set] * keep + (counts ? sum : 0);
#pragma unroll
    for (int c = 0; c < D / 8; c++) state.out[set][c] *= keep;
  }
}

// Adds a tile's values, weighted; weights as the logits lie.
template <int D, int BITS, int SETS>
__device__ __forceinline__ void mix_values(State<D, SETS>& state, const float (&weights)[SETS][4][4], const u8* staged,
                                           int g, int q) {
  typedef Staged<D, BITS, false> S;
  const int W = S::FIRST, WORDS = D / 32;
  const u8* scales = staged + S::CODES;
  u32 most = 0;
#pragma unroll
  for (int block = 0; block < 4; block++) {
    const uint2 a = *(const uint2*)(scales + 64 * block + 8 * g);
    most = most_halves(most, most_halves(a.x, a.y));
  }
#pragma unroll
  for (int step = 4; step < 32; step *= 2) most = most_halves(most, __shfl_xor_sync(LANES, most, step));
  const int exponent = exponent_of(most) - 14;
  float sums[2 * WORDS][SETS][4] = {}, constant[SETS] = {};
#pragma unroll
  for (int block = 0; block < 4; block++) {
    const uint2 a = *(const uint2*)(scales + 64 * block + 8 * g), z = *(const uint2*)(scales + 2 * TILE + 64 * block + 8 * g);
    const float scale[4] = {low_half(a.x), high_half(a.x), low_half(a.y), high_half(a.y)};
    const float zero[4] = {low_half(z.x), high_half(z.x), low_half(z.y), high_half(z.y)};
    u32 column[SETS][4];
#pragma unroll
    for (int set = 0; set < SETS; set++)
#pragma unroll
      for (int s = 0; s < 4; s++) {
        const float weight = weights[set][block][s], y = weight * scale[s] * two_to(-exponent - lift<BITS>(s));
        constant[set] += weight * zero[s];
        const float high = low_half(halves(y, 0));
        column[set][s] = transposed(halves(high, y - high));
      }
    // Of quads 2q and 2q + 1, whose codes shall lie in the two halves of each word.
    u32 rows[BITS == 4 ? 4 : 2][WORDS], bits[WORDS];
    auto fetch = [&](u32 (&to)[WORDS], const u8* plane, int at) {
      if (D == 128) {
        const uint4 v = *(const uint4*)(plane + at);
        to[0] = v.x, to[1] = v.y, to[WORDS - 2] = v.z, to[WORDS - 1] = v.w;
      } else {
        const uint2 v = *(const uint2*)(plane + at + 8 * (g & 1));
        to[0] = v.x, to[1] = v.y;
      }
    };
    const int chunk = D == 128 ? g : g / 2;
    if (BITS == 1) {
      fetch(rows[0], staged, place<D, 1, false>(4 * block + q, chunk));
    } else {
#pragma unroll
      for (int row = 0; row < W; row++) fetch(rows[row], staged, place<D, W, false>((4 * block + q) * W + row, chunk));
    }
    if (BITS == 3) fetch(bits, staged + 32 * D, place<D, 1, false>(4 * block + q, chunk));
#pragma unroll
    for (int i = 0; i < 2 * WORDS; i++) {
      const int j = i / 2;
      const u32 these = i % 2 ? 0x7632u : 0x5410u;  // channels 4j + 2 and 4j + 3, or 4j and 4j + 1
      u32 first, second = 0;
      if (BITS == 1) first = __byte_perm(rows[0][j], rows[0][j] >> 4, these);
      else first = __byte_perm(rows[0][j], rows[W / 2][j], these);
      if (BITS == 4) second = __byte_perm(rows[1][j], rows[BITS == 4 ? 3 : 1][j], these);
      if (BITS == 3) second = __byte_perm(bits[j], bits[j] >> 4, these);
#pragma unroll
      for (int pair = 0; pair < 2; pair++) {
        const u32 a[4] = {masked<BITS>(first, second, 2 * pair), masked<BITS>(first >> 8, second >> 8, 2 * pair),
                          masked<BITS>(first, second, 2 * pair + 1), masked<BITS>(first >> 8, second >> 8, 2 * pair + 1)};
#pragma unroll
        for (int set = 0; set < SETS; set++)
          multiply(sums[i][set], a, column[set][2 * pair], column[set][2 * pair + 1]);
      }
    }
  }
  const float down = two_to(exponent + 24);
  const u16* other = (const u16*)(scales + 4 * TILE) + D / 8 * g;
#pragma unroll
  for (int set = 0; set < SETS; set++) constant[set] = sum_over_rows(constant[set]);
#pragma unroll
  for (int i = 0; i < 2 * WORDS; i++) {
    const u32 b = *(const u32*)(other + 2 * i);
#pragma unroll
    for (int set = 0; set < SETS; set++) {
      const float* sum = sums[i][set];
      state.out[set][2 * i] += low_half(b) * ((sum[0] + sum[1]) * down + constant[set]);
      state.out[set][2 * i + 1] += high_half(b) * ((sum[2] + sum[3]) * down + constant[set]);
    }
  }
}
