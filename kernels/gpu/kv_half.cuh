// What every kernel over a low-bit KV cache means by a tile and by a half of it.
#pragma once
#include "device.cuh"

typedef unsigned char u8;
const u32 LANES = 0xFFFFFFFFu;  // all of a warp
const int TILE = 128;
#define NONE __int_as_float(0xFF800000)  // minus infinity

struct Half {  // keys or values of tiles [blocks, kv_heads, ...]
  const u8* codes;
  const u16 *scale, *zero, *other;
};
