// What CUDA sources need to run on a host: all threads of a block are fibers of one thread, which take turns wherever
// they wait for each other. So a block of many thousand exchanges takes milliseconds, and the order is always the same.
// Fragments follow the PTX manual (mma.m16n8k16, movmatrix) from the definition; copies are made at once.
#define HOST_EMULATION
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <functional>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static  // one block at a time

struct uint2 { unsigned int x, y; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct Index { int x; };
static Index threadIdx, blockIdx;
static uint4 block_memory[16384];
using std::max, std::min;

// --- fibers -----------------------------------------------------------------------------------------------------------

struct Meeting { int expected = 0, arrived = 0, held = 0; };
struct Fiber { ucontext_t context; std::vector<char> stack; bool done; int exchanges; };
static std::vector<Fiber> fibers;
static ucontext_t scheduler;
static Meeting of_block, of_warp[32];
static std::function<void()> body;

static void meet(Meeting& meeting) {
  const int mine = meeting.held;
  if (++meeting.arrived == meeting.expected) {
    meeting.arrived = 0, meeting.held++;
    return;
  }
  while (meeting.held == mine) swapcontext(&fibers[threadIdx.x].context, &scheduler);
}
static void run_fiber() {
  body();
  fibers[threadIdx.x].done = true;
}
template <typename Kernel>
static void run_blocks(int blocks, int threads, Kernel kernel) {
  body = kernel;
  fibers.resize(threads);
  for (int block = 0; block < blocks; block++) {
    blockIdx.x = block;
    of_block = {threads};
    for (Meeting& meeting : of_warp) meeting = {32};
    for (Fiber& fiber : fibers) {
      fiber.done = false, fiber.exchanges = 0;
      fiber.stack.resize(1 << 17);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      fiber.context.uc_link = &scheduler;
      makecontext(&fiber.context, run_fiber, 0);
    }
    for (int left = threads; left > 0;)
      for (int i = 0; i < threads; i++)
        if (!fibers[i].done) {
          threadIdx.x = i;
          swapcontext(&scheduler, &fibers[i].context);
          left -= fibers[i].done;
        }
  }
}

// --- exchanges --------------------------------------------------------------------------------------------------------

struct Said { unsigned int words[6]; };
static Said spoken[2][32][32];  // by parity of the exchange: nobody is two ahead of a lane that still listens

template <typename Answer>
static auto together(const Said& said, Answer answer) {
  const int warp = threadIdx.x / 32, turn = fibers[threadIdx.x].exchanges++ % 2;
  spoken[turn][warp][threadIdx.x % 32] = said;
  meet(of_warp[warp]);
  return answer(spoken[turn][warp]);
}
template <typename Value>
static Value from_lane(Value value, int lane) {
  Said said = {};
  std::memcpy(said.words, &value, 4);
  return together(said, [=](const Said* all) {
    Value result;
    std::memcpy(&result, all[lane].words, 4);
    return result;
  });
}
template <typename Value>
static Value __shfl_sync(unsigned int, Value value, int lane) { return from_lane(value, lane % 32); }
template <typename Value>
static Value __shfl_xor_sync(unsigned int, Value value, int step) { return from_lane(value, threadIdx.x % 32 ^ step); }
template <typename Value>
static Value __shfl_up_sync(unsigned int, Value value, int step) {
  const int lane = threadIdx.x % 32;
  return from_lane(value, lane < step ? lane : lane - step);
}
static int __reduce_max_sync(unsigned int, int value) {
  return together({{(unsigned int)value}}, [](const Said* all) {
    int most = (int)all[0].words[0];
    for (int i = 1; i < 32; i++) most = max(most, (int)all[i].words[0]);
    return most;
  });
}
static int __reduce_add_sync(unsigned int, int value) {
  return together({{(unsigned int)value}}, [](const Said* all) {
    int sum = 0;
    for (int i = 0; i < 32; i++) sum += (int)all[i].words[0];
    return sum;
  });
}
static unsigned int __ballot_sync(unsigned int, bool value) {
  return together({{(unsigned int)value}}, [](const Said* all) {
    unsigned int said = 0;
    for (int i = 0; i < 32; i++) said |= all[i].words[0] << i;
    return said;
  });
}
static int __ffs(unsigned int value) { return __builtin_ffs((int)value); }
static void __syncthreads() { meet(of_block); }
static int block_count;
static int __syncthreads_count(bool value) {
  block_count += value;
  meet(of_block);
  const int result = block_count;
  meet(of_block);
  if (threadIdx.x == 0) block_count = 0;
  meet(of_block);
  return result;
}
static void __syncwarp() { meet(of_warp[threadIdx.x / 32]); }

// --- arithmetic -------------------------------------------------------------------------------------------------------

static float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static unsigned int __float_as_uint(float value) { unsigned int bits; std::memcpy(&bits, &value, 4); return bits; }
static unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  unsigned char bytes[8];
  std::memcpy(bytes, &low, 4), std::memcpy(bytes + 4, &high, 4);
  unsigned int chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= (unsigned int)bytes[(selector >> (4 * i)) & 7] << (8 * i);
  return chosen;
}
static float half_value(unsigned int bits) {
  _Float16 value;
  unsigned short low = (unsigned short)bits;
  std::memcpy(&value, &low, 2);
  return (float)value;
}
static unsigned int half_bits(float value) {
  _Float16 rounded = (_Float16)value;
  unsigned short bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
static float low_half(unsigned int v) { return half_value(v); }
static float high_half(unsigned int v) { return half_value(v >> 16); }
static unsigned int halves(float low, float high) { return half_bits(low) | half_bits(high) << 16; }
static unsigned int most_halves(unsigned int a, unsigned int b) {
  return halves(max(low_half(a), low_half(b)), max(high_half(a), high_half(b)));
}
static float power(float x) { return exp2f(x); }
static unsigned int transposed(unsigned int v) {
  const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
  return together({{v}}, [=](const Said* all) {
    const unsigned int low = all[4 * (2 * q) + g / 2].words[0], high = all[4 * (2 * q + 1) + g / 2].words[0];
    return (low >> 16 * (g % 2) & 0xFFFF) | (high >> 16 * (g % 2) & 0xFFFF) << 16;
  });
}
static const int NOTHING = -1000;
static int half_exponent(unsigned int v) { return std::max((int)(v >> 10 & 31), 1) - 15; }
// As an H200 does it: terms are cut 25 bits below the largest power of two that exponent fields name. A denormal number's
// field names one that is up to 2^10 times its value. With this, errors of whole kernels are within 2 % of measured ones.
static void multiply(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
  const int lane = threadIdx.x % 32;
  together({{a[0], a[1], a[2], a[3], b0, b1}}, [&](const Said* all) {
    for (int i = 0; i < 4; i++) {
      const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
      double terms[17] = {c[i]};
      int top = c[i] ? std::ilogb(c[i]) : NOTHING;
      for (int k = 0; k < 16; k++) {
        const unsigned int left = all[4 * (row % 8) + k % 8 / 2].words[row / 8 + 2 * (k / 8)] >> (16 * (k % 2));
        const unsigned int right = all[4 * column + k % 8 / 2].words[4 + k / 8] >> (16 * (k % 2));
        terms[k + 1] = (double)half_value(left) * (double)half_value(right);
        if (terms[k + 1]) top = std::max(top, half_exponent(left) + half_exponent(right));
      }
      const double unit = std::ldexp(1.0, top - 25);
      double total = 0;
      for (double term : terms) total += unit * std::trunc(term / unit);
      c[i] = top == NOTHING ? 0 : (float)total;
    }
    return 0;
  });
}

static unsigned int fma_halves(unsigned int a, unsigned int b, unsigned int c) {
  return halves(low_half(a) * low_half(b) + low_half(c), high_half(a) * high_half(b) + high_half(c));
}
static unsigned int add_halves(unsigned int a, unsigned int b) { return fma_halves(a, 0x3C003C00u, b); }
static float half_to_float(unsigned int v) { return half_value(v); }
static float __fdiv_rn(float a, float b) { return a / b; }

// --- memory -----------------------------------------------------------------------------------------------------------

static void copy_async(void* to, const void* from) { std::memcpy(to, from, 16); }
static void commit_copies() {}
static void wait_for_copies() {}
template <int NEWEST>
static void wait_for_copies_before() {}
static void bring_nearer(const uint4* from, int count) {
  volatile unsigned int touched = from[0].x + from[count - 1].w;  // outside of what there is, a checker would see it
}
static uint4 load_exact(const void* address) { return *(const uint4*)address; }
static unsigned int load_half(const unsigned short* address) { return *address; }
static int load_int(const int* address) { return *address; }
static void let_next_kernel_start() {}
static void wait_for_previous_kernel() {}
static uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
static uint4 load_once(const uint4* address) { return *address; }
static uint4 load_input(const uint4* address) { return *address; }
static unsigned int load_word(const void* address) { return *(const unsigned int*)address; }
static long long load_cell(const long long* address) { return *address; }
static unsigned int load_host_word(unsigned long long address) { return *(unsigned int*)address; }
static uint4 load_host_piece(unsigned long long address) { return *(uint4*)address; }
static void store_host_word(unsigned long long address, unsigned int v) { *(unsigned int*)address = v; }
static void store_host_entry(unsigned long long address, unsigned long long v) { *(unsigned long long*)address = v; }
template <typename Value>
static Value atomicAdd(Value* address, Value value) {
  const Value before = *address;
  *address += value;
  return before;
}
