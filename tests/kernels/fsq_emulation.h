// What kernels/gpu/fsq_attend.cu asks of a Hopper GPU, for a host: warpgroup products from their definition (the PTX
// manual's wgmma, K-major without swizzle), and copies made at once.
#include "fiber_emulation.h"

static Meeting of_team[8] = {{128}, {128}, {128}, {128}, {128}, {128}, {128}, {128}};
static unsigned int left_sides[8][2][128][4];
static int team_turns[1024];

static void meet_group(int team) { meet(of_team[team]); }
static Meeting of_part[32];
static void meet_warps(int team, int threads) {
  of_part[team].expected = threads;
  meet(of_part[team]);
}
static bool __any_sync(unsigned int, bool value) { return __reduce_max_sync(~0u, value); }
static Meeting of_turn[8] = {{256}, {256}, {256}, {256}, {256}, {256}, {256}, {256}};
static void wait_for_turn(int team) { meet(of_turn[team]); }
static void pass_turn(int to) {
  if (++of_turn[to].arrived == of_turn[to].expected) of_turn[to].arrived = 0, of_turn[to].held++;
}
template <typename Value>
static void keep(Value&) {}
static int same(int x) { return __shfl_sync(~0u, x, 0); }
static void show_products() {}
static void begin_products() {}
static void commit_products() {}
template <int LEFT>
static void finish_products() {}
template <typename Value, int N>
static void hold(Value (&)[N]) {}
template <int N>
static unsigned long long tile_at(const void* pointer) { return (unsigned long long)pointer; }
static unsigned long long step_of(unsigned long long tile, unsigned int bytes) { return tile + bytes; }

static float fp8_value(unsigned int bits) {
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
  return bits & 128 ? -size : size;
}
// Number k of a row of the left side: of two bytes, or of one.
static unsigned int left_number(const unsigned int (*all)[4], int row, int k, int size) {
  const int each = 4 / size, inside = k % (4 * each);
  const unsigned int word = all[row / 16 * 32 + row % 8 * 4 + inside / each][row % 16 / 8 + 2 * (k / (4 * each))];
  return word >> 8 * size * (inside % each) & (size == 2 ? 0xFFFF : 0xFF);
}
static unsigned int right_number(const unsigned char* tile, int row, int k, int size, int rows) {
  const int at = k * size;
  unsigned int v = 0;
  std::memcpy(&v, tile + at / 16 * rows * 16 + row / 8 * 128 + row % 8 * 16 + at % 16, size);
  return v;
}
// Sums of this thread, `found` places.
template <int KIND, int N, typename Found>
static void each_sum(const unsigned int (&a)[4], unsigned long long tile, Found found) {
  const int size = KIND == 0 ? 2 : 1, thread = threadIdx.x % 128, team = threadIdx.x / 128, lane = thread % 32;
  unsigned int(*all)[4] = left_sides[team][team_turns[threadIdx.x]++ % 2];
  std::memcpy(all[thread], a, 16);
  meet(of_team[team]);
  for (int i = 0; i < N / 2; i++) {
    const int row = thread / 32 * 16 + lane / 4 + 8 * (i % 4 / 2), column = i / 4 * 8 + 2 * (lane % 4) + i % 2;
    double sum = 0;
    for (int k = 0; k < 32 / size; k++) {
      const unsigned int x = left_number(all, row, k, size), y = right_number((unsigned char*)tile, column, k, size, N);
      sum += KIND == 0 ? (double)half_value(x) * half_value(y)
           : KIND == 1 ? (double)x * (signed char)y : (double)fp8_value(x) * fp8_value(y);
    }
    found(i, sum);
  }
}
template <int KIND, int N, bool FIRST>
static void product(float (&acc)[N / 2], const unsigned int (&a)[4], unsigned long long tile) {
  each_sum<KIND, N>(a, tile, [&](int i, double sum) { acc[i] = (float)((FIRST ? 0 : acc[i]) + sum); });
}
template <int KIND, int N, bool FIRST>
static void product(unsigned int (&acc)[N / 2], const unsigned int (&a)[4], unsigned long long tile) {
  each_sum<KIND, N>(a, tile, [&](int i, double sum) { acc[i] = (FIRST ? 0 : (int)acc[i]) + (int)sum; });
}
template <int KIND, int N, bool FIRST>
static void product(unsigned int (&acc)[N / 4], const unsigned int (&a)[4], unsigned long long tile) {
  each_sum<KIND, N>(a, tile, [&](int i, double sum) {
    unsigned short* half = (unsigned short*)acc + i;
    *half = half_bits((float)((FIRST ? 0 : half_value(*half)) + sum));
  });
}

// A barrier counts the phases that are over, below, and the bytes that this phase still waits for, above.
static void make_barrier(unsigned long long* barrier) { *barrier = 0; }
static void announce_barriers() {}
static void expect_bytes(unsigned long long* barrier, unsigned int bytes) { *barrier += (unsigned long long)bytes << 32; }
static void copy_bytes(void* to, const void* from, unsigned int bytes, unsigned long long* barrier) {
  std::memcpy(to, from, bytes);
  *barrier -= (unsigned long long)bytes << 32;
  if (*barrier >> 32 == 0) ++*barrier;
}
static void wait_for_bytes(unsigned long long* barrier, unsigned int parity) {
  while (*barrier % 2 == parity) swapcontext(&fibers[threadIdx.x].context, &scheduler);
}
static unsigned int multiply_halves(unsigned int a, unsigned int b) {
  return halves(low_half(a) * low_half(b), high_half(a) * high_half(b));
}
static unsigned int __funnelshift_r(unsigned int low, unsigned int high, unsigned int bits) {
  return (unsigned int)(((unsigned long long)high << 32 | low) >> bits);
}
static unsigned int minus_halves(unsigned int a) { return a ^ 0x80008000u; }
static float rsqrtf(float x) { return 1 / std::sqrt(x); }
