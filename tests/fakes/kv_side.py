"""An attachment with a KV table that holds the records of a small cache, as kernels see it."""

import torch

from strataflux.client import attach_block as ab
from strataflux.proto import layout
from tests.fakes.gpu_side import Side
from tests.fakes.kv_device import Case

__all__ = ["LAYER", "LAYERS", "side_of"]

LAYERS, LAYER = 2, 1
"""A block has records of two layers; the cases are the second one."""


def side_of(case: Case, missing: set[int], device: torch.device) -> tuple[Side, torch.Tensor, dict[int, int]]:
    """An attachment whose KV table 1 holds the records of all blocks but those ``missing``; bases; slots by id."""
    form, kv_heads = case.cache.form, case.cache.kv_heads
    blocks, per = len(case.records), form.groups_per_tile
    a_block = LAYERS * kv_heads * per
    side = Side((blocks + 1) * a_block, device)
    ab.set_table(side.host, 1, int(side.host[ab.TABLES + 4]), (blocks + 1) * a_block, kv=True)
    side.block = side.copy_block()
    bases = torch.arange(1, blocks + 1) * a_block  # the block's place is not its id
    units = layout.slot_bytes(form.record_bytes) // layout.SLOT_UNIT_BYTES
    slots = side.slots.reshape(-1, layout.SLOT_UNIT_BYTES * units)
    where, at = {}, 0
    for place in case.cache.table.flatten().tolist():
        for head in range(kv_heads):
            for group in range(per):
                oid = int(bases[place]) + (LAYER * kv_heads + head) * per + group
                if oid % 7 in missing or at == len(slots):
                    side.words[oid] = layout.ENTRY_ABSENT
                    continue
                side.words[oid] = at * units + 1
                slots[at, : form.record_bytes] = case.records[place, head, group].cpu().numpy()
                where[oid] = at * units
                at += 1
    side.daemon["clock"] = 5
    return side, bases.to(device), where
