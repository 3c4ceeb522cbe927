// What the CUDA sources ask of the device in words of its own; nothing else is included, so that the compiler needs no
// headers. A test compiles the rest for the host and brings its own versions of these.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
typedef long long i64;

#ifndef HOST_EMULATION
// Inputs and cells may be written by the kernel before this one while this one waits: not through the read-only path.
__device__ __forceinline__ u32 load_word(const void* address) {
  u32 v;
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ u32 load_half(const void* address) {
  u16 v;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ i64 load_cell(const i64* address) {
  i64 v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ int load_int(const int* address) {
  int v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ uint4 load_exact(const void* address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
// Never from a cache that an earlier launch filled.
__device__ __forceinline__ u32 load_host_word(u64 address) {
  u32 v;
  asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
  return v;
}
__device__ __forceinline__ uint4 load_host_piece(u64 address) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(address));
  return v;
}
__device__ __forceinline__ void store_host_word(u64 address, u32 v) {
  asm volatile("st.global.u32 [%0], %1;" :: "l"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void store_host_entry(u64 address, u64 v) {
  asm volatile("st.volatile.global.u64 [%0], %1;" :: "l"(address), "l"(v) : "memory");
}
__device__ __forceinline__ float half_to_float(u32 v) {
  float f;
  asm("{.reg .f16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l;}" : "=f"(f) : "r"(v));
  return f;
}
// With programmatic dependent launch the next kernel starts now and fetches what is constant while this one runs; it
// waits before it touches anything that this one writes. Without it both are no-ops.
#if __CUDA_ARCH__ >= 900
__device__ __forceinline__ void let_next_kernel_start() { asm volatile("griddepcontrol.launch_dependents;"); }
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
#else
__device__ __forceinline__ void let_next_kernel_start() {}
__device__ __forceinline__ void wait_for_previous_kernel() {}
#endif
#endif
