// Codes of low-bit weights as fragments of the tensor core's m16n8k16 product, for the products that use them;
// lowbit_gemv.py gives every byte.
#pragma once
#include "gpu/errands.cuh"

#ifndef HOST_EMULATION  // a test compiles the rest for the host and brings its own versions of these
__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
// Inputs may be written by the kernel before this one while this one waits: not through the read-only path.
__device__ __forceinline__ uint4 load_input(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
__device__ __forceinline__ u32 add_halves(u32 a, u32 b) {
  u32 d;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
  return d;
}
__device__ __forceinline__ u32 fma_halves(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ __forceinline__ float low_half(u32 v) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v));
  return f;
}
__device__ __forceinline__ void multiply(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// Towards the device's cache; nobody waits for it.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void bring_nearer(const uint4* from, int count) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(16 * count) : "memory");
}
#else
__device__ __forceinline__ void bring_nearer(const uint4*, int) {}
#endif
#endif

// Word i of a tile with each of its eight codes in a nibble of its own.
template <int BITS>
__device__ __forceinline__ u32 nibbles(const u32* words, int i) {
  if (BITS == 4) return words[i];
  u32 low = (words[i >> 1] >> (2 * (i & 1))) & 0x33333333u;
  if (BITS == 2) return low;
  u32 high = i == 0 ? words[2] << 2 : i == 1 ? words[2] << 1 : i == 2 ? words[2] : words[2] >> 1;
  return low | (high & 0x44444444u);
}

// Codes minus zero-point as float16, exactly: a code in the low bits of 1024 (0x6400) is 1024 + code, and four bits
// further up 1024 + 16·code. `first` is -(1024 + zero) of row g, `second` -(64 + zero) of row g + 8.
__device__ __forceinline__ void spread(u32 (&a)[4], u32 codes, u32 first, u32 second) {
  const u32 sixteenth = 0x2C002C00u;
  u32 later = codes >> 8;
  a[0] = add_halves((codes & 0x000F000Fu) | 0x64006400u, first);
  a[1] = fma_halves((codes & 0x00F000F0u) | 0x64006400u, sixteenth, second);
  a[2] = add_halves((later & 0x000F000Fu) | 0x64006400u, first);
  a[3] = fma_halves((later & 0x00F000F0u) | 0x64006400u, sixteenth, second);
}

// Nibbles as a byte permutation takes them: of four bits, three that choose a byte, and from which half of a table.
struct Picks { u32 entry, half; };
template <int BITS>
__device__ __forceinline__ Picks picks(u32 codes) {
  if (BITS < 4) return {codes, 0};
  return {codes & 0x77777777u, (codes >> 1 & 0x44444444u) | 0x32103210u};
}

// Four bytes of a table of 2^BITS bytes, chosen by the four nibbles of the picks' low halves.
template <int BITS>
__device__ __forceinline__ u32 choose(const u32* table, Picks by) {
  if (BITS == 2) return __byte_perm(table[0], 0, by.entry);
  if (BITS == 3) return __byte_perm(table[0], table[1], by.entry);
  return __byte_perm(__byte_perm(table[0], table[1], by.entry), __byte_perm(table[2], table[3], by.entry), by.half);
}

// Codebook values of four codes of one row: low bytes from the table's first half, high bytes from its second.
template <int BITS>
__device__ __forceinline__ void look_up(u32& first, u32& second, const u32* table, Picks by) {
  u32 low = choose<BITS>(table, by), high = choose<BITS>(table + (1 << BITS) / 4, by);
  first = __byte_perm(low, high, 0x5140u);
  second = __byte_perm(low, high, 0x7362u);
}
