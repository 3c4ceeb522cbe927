// What the CUDA sources need to run on a host: each thread of a block is a thread of ours, blocks run one after another.
// The tensor core's product follows the fragment layout of the PTX manual (mma.m16n8k16) from the definition.
#define HOST_EMULATION
#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>
#define __device__
#define __forceinline__ inline
#define __global__
#define __launch_bounds__(threads)
#define __shared__ static  // one block at a time

struct uint4 { unsigned int x, y, z, w; };
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static std::unique_ptr<std::barrier<>> block_barrier;
static std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
static struct { unsigned int a[32][4], b[32][2]; } exchange[32];  // one a warp

using std::max, std::min;
static unsigned int spoken[32][32];  // what each lane of a warp says to the others

template <typename Answer>
static auto together(unsigned int said, Answer answer) {
  const int warp = threadIdx.x / 32;
  spoken[warp][threadIdx.x % 32] = said;
  warp_barriers[warp]->arrive_and_wait();
  auto result = answer(spoken[warp]);
  warp_barriers[warp]->arrive_and_wait();
  return result;
}
static int __shfl_sync(unsigned int, int value, int lane) {
  return together(value, [=](auto& all) { return (int)all[lane]; });
}
static int __shfl_up_sync(unsigned int, int value, int step) {
  const int lane = threadIdx.x % 32;
  return together(value, [=](auto& all) { return (int)all[lane < step ? lane : lane - step]; });
}
static unsigned int __ballot_sync(unsigned int, bool value) {
  return together(value, [](auto& all) {
    unsigned int bits = 0;
    for (int i = 0; i < 32; i++) bits |= all[i] << i;
    return bits;
  });
}
static int __reduce_max_sync(unsigned int, int value) {
  return together(value, [](auto& all) {
    int most = (int)all[0];
    for (int i = 1; i < 32; i++) most = max(most, (int)all[i]);
    return most;
  });
}
static int block_count;
static int __syncthreads_count(bool value) {
  if (value) __atomic_fetch_add(&block_count, 1, __ATOMIC_RELAXED);
  block_barrier->arrive_and_wait();
  const int result = block_count;
  block_barrier->arrive_and_wait();
  if (threadIdx.x == 0) block_count = 0;
  block_barrier->arrive_and_wait();
  return result;
}
static unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  return __atomic_fetch_add(address, value, __ATOMIC_RELAXED);
}
static int __popc(unsigned int bits) { return __builtin_popcount(bits); }
static float __int_as_float(int bits) { float value; std::memcpy(&value, &bits, 4); return value; }
static unsigned int __float_as_uint(float value) { unsigned int bits; std::memcpy(&bits, &value, 4); return bits; }
static float __fdiv_rn(float a, float b) { return a / b; }
static unsigned int load_word(const void* address) { return *(const unsigned int*)address; }
static unsigned int load_half(const void* address) { return *(const unsigned short*)address; }
static long long load_cell(const long long* address) { return *(const volatile long long*)address; }
static unsigned int load_host_word(unsigned long long address) { return *(unsigned int*)address; }
static void store_host_word(unsigned long long address, unsigned int v) { *(unsigned int*)address = v; }
static void store_host_entry(unsigned long long address, unsigned long long v) { *(unsigned long long*)address = v; }

static uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }
static void __syncthreads() { block_barrier->arrive_and_wait(); }
static void atomicAdd(float* address, float value) { *address += value; }
static unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  unsigned char bytes[8];
  std::memcpy(bytes, &low, 4), std::memcpy(bytes + 4, &high, 4);
  unsigned int chosen = 0;
  for (int i = 0; i < 4; i++) chosen |= (unsigned int)bytes[(selector >> (4 * i)) & 7] << (8 * i);
  return chosen;
}
static double half_value(unsigned int bits) {
  _Float16 value;
  unsigned short low = (unsigned short)bits;
  std::memcpy(&value, &low, 2);
  return (double)value;
}
static unsigned int half_bits(double value) {
  _Float16 rounded = (_Float16)value;
  unsigned short bits;
  std::memcpy(&bits, &rounded, 2);
  return bits;
}
static unsigned int fma_halves(unsigned int a, unsigned int b, unsigned int c) {
  unsigned int low = half_bits(half_value(a) * half_value(b) + half_value(c));
  return low | half_bits(half_value(a >> 16) * half_value(b >> 16) + half_value(c >> 16)) << 16;
}
static unsigned int add_halves(unsigned int a, unsigned int b) { return fma_halves(a, 0x3C003C00u, b); }
static float low_half(unsigned int v) { return (float)half_value(v); }
static float half_to_float(unsigned int v) { return (float)half_value(v); }
static uint4 load_once(const uint4* address) { return *address; }
static uint4 load_input(const uint4* address) { return *address; }
static void let_next_kernel_start() {}
static void wait_for_previous_kernel() {}
static void multiply(float (&c)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  auto& shared = exchange[warp];
  std::memcpy(shared.a[lane], a, sizeof a);
  shared.b[lane][0] = b0, shared.b[lane][1] = b1;
  warp_barriers[warp]->arrive_and_wait();
  for (int i = 0; i < 4; i++) {
    const int row = lane / 4 + 8 * (i / 2), column = 2 * (lane % 4) + i % 2;
    double total = c[i];
    for (int k = 0; k < 16; k++) {
      const unsigned int left = shared.a[4 * (row % 8) + k % 8 / 2][row / 8 + 2 * (k / 8)] >> (16 * (k % 2));
      const unsigned int right = shared.b[4 * column + k % 8 / 2][k / 8] >> (16 * (k % 2));
      total += half_value(left) * half_value(right);
    }
    c[i] = (float)total;
  }
  warp_barriers[warp]->arrive_and_wait();
}

template <typename Kernel>
static void run_blocks(int blocks, int threads, Kernel kernel) {
  for (int block = 0; block < blocks; block++) {
    block_barrier = std::make_unique<std::barrier<>>(threads);
    warp_barriers.clear();
    for (int i = 0; i < threads / 32; i++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> all;
    for (int i = 0; i < threads; i++)
      all.emplace_back([=] { threadIdx.x = i, blockIdx.x = block, kernel(); });
    for (auto& one : all) one.join();
  }
}
