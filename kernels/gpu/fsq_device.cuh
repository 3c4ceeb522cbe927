// What the attention to discrete codes asks of a Hopper GPU, and nothing else; a test brings its own versions for a host.
//
// Warpgroup products take their left side from registers (64 tokens, 32 bytes of each) and their right side from shared
// memory: 8 rows × 16 bytes lie together (128 bytes), row groups follow each other, then the next 16 bytes of all rows.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

enum Kind { HALF, INT8, FP8 };
const u32 EVERY = 0xFFFFFFFFu;

#ifndef HOST_EMULATION
#define REGISTERS_8(b) "%" #b "0,%" #b "1,%" #b "2,%" #b "3,%" #b "4,%" #b "5,%" #b "6,%" #b "7,%" #b "8,%" #b "9"
#define FIRST_16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FIRST_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9," REGISTERS_8(1) "," REGISTERS_8(2) ",%30,%31"
#define NEXT_32 "%32,%33,%34,%35,%36,%37,%38,%39," REGISTERS_8(4) "," REGISTERS_8(5) ",%60,%61,%62,%63"
#define EACH_8(k, x, i) k(x[i]), k(x[i + 1]), k(x[i + 2]), k(x[i + 3]), k(x[i + 4]), k(x[i + 5]), k(x[i + 6]), k(x[i + 7])
#define EACH_32(k, x, i) EACH_8(k, x, i), EACH_8(k, x, i + 8), EACH_8(k, x, i + 16), EACH_8(k, x, i + 24)
#define PRODUCT_4(k, what, more)                                                                          \
  asm volatile("wgmma.mma_async.sync.aligned." what " {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, " more ";"         \
               : k(acc[0]), k(acc[1]), k(acc[2]), k(acc[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))
#define PRODUCT_8(k, what, more)                                                                          \
  asm volatile("wgmma.mma_async.sync.aligned." what " {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, " more ";" \
               : EACH_8(k, acc, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))
#define PRODUCT_16(k, what, more)                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned." what " {" FIRST_16 "}, {%16,%17,%18,%19}, %20, " more ";"   \
               : EACH_8(k, acc, 0), EACH_8(k, acc, 8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))
#define PRODUCT_32(k, what, more)                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned." what " {" FIRST_32 "}, {%32,%33,%34,%35}, %36, " more ";"   \
               : EACH_32(k, acc, 0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))
#define PRODUCT_64(k, what, more)                                                                         \
  asm volatile("wgmma.mma_async.sync.aligned." what " {" FIRST_32 "," NEXT_32 "}, {%64,%65,%66,%67}, %68, " more ";" \
               : EACH_32(k, acc, 0), EACH_32(k, acc, 32) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(tile))
#define PRODUCT(registers, k, what, more)                        \
  if constexpr (FIRST) PRODUCT_##registers(k, what, "0" more);   \
  else PRODUCT_##registers(k, what, "1" more)

// One step: acc[64 tokens × N] += a · tileᵀ, or = where it is the FIRST. Asynchronous: see finish_products.
template <Kind KIND, int N, bool FIRST>
__device__ __forceinline__ void product(float (&acc)[N / 2], const u32 (&a)[4], u64 tile) {
  if constexpr (N == 8 && KIND == HALF) { PRODUCT(4, "+f", "m64n8k16.f32.f16.f16", ", 1, 1, 0"); }
  if constexpr (N == 16 && KIND == HALF) { PRODUCT(8, "+f", "m64n16k16.f32.f16.f16", ", 1, 1, 0"); }
  if constexpr (N == 64 && KIND == HALF) { PRODUCT(32, "+f", "m64n64k16.f32.f16.f16", ", 1, 1, 0"); }
  if constexpr (N == 128 && KIND == HALF) { PRODUCT(64, "+f", "m64n128k16.f32.f16.f16", ", 1, 1, 0"); }
}
template <Kind KIND, int N, bool FIRST>
__device__ __forceinline__ void product(u32 (&acc)[N / 2], const u32 (&a)[4], u64 tile) {
  if constexpr (N == 64) { PRODUCT(32, "+r", "m64n64k32.s32.u8.s8", ""); }
  if constexpr (N == 128) { PRODUCT(64, "+r", "m64n128k32.s32.u8.s8", ""); }
}
// Sums of two columns in a word.
template <Kind KIND, int N, bool FIRST>
__device__ __forceinline__ void product(u32 (&acc)[N / 4], const u32 (&a)[4], u64 tile) {
  if constexpr (N == 64) { PRODUCT(16, "+r", "m64n64k32.f16.e4m3.e4m3", ", 1, 1"); }
  if constexpr (N == 128) { PRODUCT(32, "+r", "m64n128k32.f16.e4m3.e4m3", ", 1, 1"); }
}
// Not to be computed again later from what it came from.
__device__ __forceinline__ void keep(int& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void keep(u32& x) { asm volatile("" : "+r"(x)); }
// The first lane's, which the compiler then knows to be the same in a warp.
__device__ __forceinline__ int same(int x) { return __shfl_sync(EVERY, x, 0); }
// Nothing about these registers moves across.
template <int N>
__device__ __forceinline__ void hold(float (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(acc[i])::"memory");
}
template <int N>
__device__ __forceinline__ void hold(u32 (&acc)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+r"(acc[i])::"memory");
}
__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most LEFT committed groups still run; only then may their registers be touched.
template <int LEFT>
__device__ __forceinline__ void finish_products() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory"); }

__device__ __forceinline__ u32 shared_address(const void* pointer) { return (u32)__cvta_generic_to_shared(pointer); }
// What a product is told about the tile at `pointer`: where it is, and from one 16-byte column to the next N · 16 bytes,
// from one row group to the next 128.
template <int N>
__device__ __forceinline__ u64 tile_at(const void* pointer) {
  return (u64)(shared_address(pointer) >> 4) | (u64)N << 16 | (u64)8 << 32;
}
__device__ __forceinline__ u64 step_of(u64 tile, u32 bytes) {
  return tile >> 32 << 32 | ((u32)tile + (bytes >> 4));  // nothing is carried beyond the address
}

// What this thread stored in shared memory is there for products after the next barrier.
__device__ __forceinline__ void show_products() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Copies of multiples of 16 bytes into shared memory that count on a barrier there.
__device__ __forceinline__ void make_barrier(u64* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void announce_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect_bytes(u64* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy_bytes(void* to, const void* from, u32 bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(shared_address(to)), "l"(from), "r"(bytes), "r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void wait_for_bytes(u64* barrier, u32 parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}" ::"r"(shared_address(barrier)), "r"(parity) : "memory");
}
__device__ __forceinline__ void meet_warps(int team, int threads) {
  if (threads == 32) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "r"(threads) : "memory");
}
__device__ __forceinline__ void meet_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(group + 1) : "memory");
}

// The next kernel may start now, launched early: it waits before it touches anything that this one writes.
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// One team says that the next may go on, whose threads wait for that.
__device__ __forceinline__ void pass_turn(int to) { asm volatile("bar.arrive %0, 256;" ::"r"(to + 8) : "memory"); }
__device__ __forceinline__ void wait_for_turn(int team) { asm volatile("bar.sync %0, 256;" ::"r"(team + 8) : "memory"); }

__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 halves(float low, float high) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(high), "f"(low));
  return v;
}
__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
__device__ __forceinline__ u32 multiply_halves(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ __forceinline__ u32 minus_halves(u32 a) {
  u32 v;
  asm("neg.f16x2 %0, %1;" : "=r"(v) : "r"(a));
  return v;
}
__device__ __forceinline__ float power(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
#endif

// Which bits of the quarter c of a token's last chunk of 16 bytes belong to it.
template <int BYTES>
__device__ __forceinline__ u32 last_mask(int c) {
  const int bits = 8 * (BYTES % 16 - 4 * c);
  return bits >= 32 ? ~0u : bits > 0 ? (1u << bits) - 1 : 0;
}
// Masks of levels 0, 2, … of a half and of 1, 3, … in registers: an instruction takes one constant only.
struct Masks {
  u32 even = 0x000F000Fu, odd = 0x00F000F0u;
  __device__ __forceinline__ Masks() { keep(even), keep(odd); }
};
// Where a token's logit lies among the 64 of a block: turned by head, so that reading eight heads at once meets no bank
// twice.
__device__ __forceinline__ int logit_place(int head, int token) { return (token + 8 * head) % 64; }
