// Groups asked for ahead, and records brought to the device; kv_fetch.py says more.
//
// A lane looks a group up, then its warp copies the records that were found, some at once, so that the link has enough
// to do. The blocks are few and small: they run beside what needs the device.
#pragma once
#include "kv_half.cuh"
#include "kv_lookup.cuh"

const int FETCHING = 128, TOGETHER = 8;  // threads of a block, records of a warp under way

struct Groups {  // listed, of KV heads [batch · kv_heads, room]
  const int *numbers, *counts;
  const u32* strengths;  // bits of shares
  i64 first_oid;
};
struct Blocks {  // where groups lie
  const i64* bases;
  const int* table;
  int kv_heads, most_tiles, of_tile, room;
  // The object id of a group, -1 where it has no record.
  __device__ __forceinline__ i64 oid_of(int owner, int group, i64 first_oid) const {
    const i64 base = load_cell(bases + load_int(table + (size_t)(owner / kv_heads) * most_tiles + group / of_tile));
    return base < 0 ? -1 : base + first_oid + owner % kv_heads * of_tile + group % of_tile;
  }
};

__device__ __forceinline__ void ask_for(const Lookup& in, const Blocks& blocks, const Groups& groups, int owner) {
  const int count = load_int(groups.counts + owner);
  for (int i = threadIdx.x; i < count; i += FETCHING) {
    const size_t at = (size_t)owner * blocks.room + i;
    const i64 oid = blocks.oid_of(owner, load_int(groups.numbers + at), groups.first_oid);
    if (oid >= 0) ask_ahead(in, oid, load_word(groups.strengths + at));
  }
}

// Copies the records at each lane's `address` to their places, `first` on; 0 has none. All lanes take part.
template <int PIECES>
__device__ __forceinline__ void copy_records(u64 address, u8* first, int stride, int lane) {
  const int DEEP = (PIECES + 31) / 32, BATCH = DEEP > TOGETHER ? 1 : TOGETHER / DEEP;
  for (int start = 0; start < 32; start += BATCH) {
    uint4 piece[BATCH][DEEP];
    u64 from[BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const u32 high = __shfl_sync(LANES, (u32)(address >> 32), start + b);
      from[b] = (u64)high << 32 | __shfl_sync(LANES, (u32)address, start + b);
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (from[b] && lane + 32 * d < PIECES) piece[b][d] = load_host_piece(from[b] + 16 * (lane + 32 * d));
    }
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
      for (int d = 0; d < DEEP; d++)
        if (from[b] && lane + 32 * d < PIECES)
          *(uint4*)(first + (size_t)(start + b) * stride + 16 * (lane + 32 * d)) = piece[b][d];
  }
}

struct Rows {  // of KV heads [batch · kv_heads, lists · room], see kv_work.py
  int *numbers, *held, *where;
  u8* records;
  int lists, most_groups, stride;
};

// Brings a list's records into the rows whose turn it is, `part` of `parts` blocks a share of them. What lies in other
// rows is copied from there, and refines there no more; the rows that have refined longest do neither from now on.
template <int PIECES>
__device__ __forceinline__ void fetch(const Lookup& lookup, const Blocks& blocks, const Groups& wanted, const Rows& to,
                                      int owner, int part, int parts, int turn, int* counts) {
  const int WARPS = FETCHING / 32, warp = threadIdx.x / 32, lane = threadIdx.x % 32, room = blocks.room;
  const int count = load_int(wanted.counts + owner);
  const int mine = turn * room, oldest = (turn + 1) % to.lists * room;
  int *numbers = to.numbers + (size_t)owner * to.lists * room, *held = to.held + (size_t)owner * to.lists * room;
  int* where = to.where + (size_t)owner * to.most_groups;
  u8* records = to.records + (size_t)owner * to.lists * room * to.stride;
  for (int start = 32 * (part * WARPS + warp); start < room; start += 32 * WARPS * parts) {
    const int i = start + lane;
    const bool here = i < count;
    const int group = here ? load_int(wanted.numbers + (size_t)owner * room + i) : -1, last = here ? where[group] : mine;
    const bool kept = here && last / room != turn && held[last] == group;
    const i64 oid = here && !kept ? blocks.oid_of(owner, group, wanted.first_oid) : -1;
    const u32 strength = here ? load_word(wanted.strengths + (size_t)owner * room + i) : 0;
    const u64 found = look_up(lookup, oid >= 0, oid, strength, counts, counts + 1);
    const u64 address = kept ? (u64)(records + (size_t)last * to.stride) : found;
    if (i < room) numbers[mine + i] = held[mine + i] = address ? group : -1, numbers[oldest + i] = -1;
    if (kept) numbers[last] = -1;
    if (address) where[group] = mine + i;
    copy_records<PIECES>(address, records + (size_t)(mine + start) * to.stride, to.stride, lane);
  }
}
