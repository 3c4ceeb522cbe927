// Look-up of token groups in a session's directory, and requests for what is absent; select.cuh does so for channels.
#pragma once
#include "select.cuh"

const u64 PREFETCH = 1ull << 39;
const int STEP = 1;  // a cell of the attach block, as those of select.cuh

struct Lookup {  // cells of the attach block that each look-up needs, read once
  i64* block;
  const float* thresholds;
  int table;
  bool enabled;
  u64 directory, stamps;
  i64 last_chunk;
  u32 clock;
  __device__ __forceinline__ Lookup(i64* block, const float* thresholds, int table)
      : block(block), thresholds(thresholds), table(table) {
    enabled = load_cell(block + ENABLED) != 0;
    directory = (u64)load_cell(block + TABLES + TABLE_CELLS * table);
    stamps = (u64)load_cell(block + STAMPS);
    last_chunk = load_cell(block + LAST_CHUNK);
    clock = (u32)load_cell(block + CLOCK);
  }
};

// `kind`: PREFETCH, or 0 for what was missed.
__device__ __forceinline__ void ask(const Lookup& in, i64 oid, u32 share, u64 kind) {
  const i64 position = (i64)atomicAdd((u64*)(in.block + TAIL), 1ull);
  if (position >= load_cell(in.block + LIMIT)) {
    count(in.block + DROPPED, 1);
    return;
  }
  const i64 log2 = load_cell(in.block + RING_LOG2);
  const u64 lap = 1 + (u64)(position >> log2) % LAPS, score = score_of((int)share, 0x3F800000, in.thresholds);
  // SYNC: ring-entry (publish). One 8-byte store: a request announces no bytes, only itself.
  store_host_entry((u64)load_cell(in.block + RING) + 8 * (position & (((i64)1 << log2) - 1)),
                   lap << LAP_SHIFT | score << SCORE_SHIFT | (u64)in.table << TABLE_SHIFT | kind | (u64)oid);
}

// Asks for a record that will be looked up in the next step: that is no look-up, and nothing is counted or stamped. The
// ring's second half is for what is missed; threads that ask at the same time may go a few entries beyond the first.
__device__ __forceinline__ void ask_ahead(const Lookup& in, i64 oid, u32 share) {
  // SYNC: directory-entry (read).
  if (!in.enabled || load_host_word(in.directory + 4 * (u64)oid) != ABSENT) return;
  const i64 half = (i64)1 << (load_cell(in.block + RING_LOG2) - 1);
  if (load_cell(in.block + TAIL) < load_cell(in.block + LIMIT) - half) ask(in, oid, share, PREFETCH);
}

// Where each lane's record lies, 0 where it is absent or the lane has none; stamps, requests and counts.
__device__ __forceinline__ u64 look_up(const Lookup& in, bool known, i64 oid, u32 share, int* wanted, int* hits) {
  // SYNC: directory-entry (read).
  const u32 entry = known && in.enabled ? load_host_word(in.directory + 4 * (u64)oid) : QUARANTINED;
  const bool named = entry != ABSENT && entry != QUARANTINED;
  const u64 address = named ? address_of(in.block, entry, in.last_chunk) : 0;
  if (address) store_host_word(in.stamps + 4 * ((u64)entry - 1), in.clock);
  if (known) atomicAdd(wanted, 1);
  if (address) atomicAdd(hits, 1);
  count(in.block + RUBBISH, named && !address);
  count(in.block + DROPPED, known && !in.enabled);
  if (entry == ABSENT) ask(in, oid, share, 0);
  return address;
}
