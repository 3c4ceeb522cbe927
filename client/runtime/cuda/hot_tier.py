"""The hottest records of a pinned store once more, in device memory: what is there needs no link.

Nothing looks up differently: the tier is a further part of the store's slots, and the directory names a record's slot
in whichever part it is. A record moves between steps only, on the stream that steps run on, so no kernel sees one move.

States of a record: *home*, in host memory → *hot* (:meth:`HotTier.adapt` copied it; the directory names the copy) →
*home* again, when its place goes to another. Its home slot is never given up, so nothing is ever written back.

Which: every record that was read over the link lately takes a place that nothing used meanwhile (second chance, in the
order of places). Slots of each size have their own places, in proportion to what the records of that size take.
"""

from collections.abc import Iterator
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.kernels.gpu.fetch import copy_records
from strataflux.proto import layout

__all__ = ["HotTier"]

_WINDOW: Final = 4
"""Places that are looked at for each one that is wanted."""
_UNIT: Final = layout.SLOT_UNIT_BYTES


class HotTier:
    """Places in device memory for records of one store. The stepping thread's alone.

    Attributes:
        hits: records that steps found here, each counted once between two calls of :meth:`adapt`.
        misses: records that they read over the link, counted likewise.
    """

    def __init__(
        self,
        size: int,
        slots: NDArray[np.int64],
        home: NDArray[np.uint32],
        home_address: int,
        first_unit: int,
        device: torch.device,
    ) -> None:
        """Reserve ``size`` bytes, rounded up to whole chunks; all places are empty.

        Args:
            size: above 0.
            slots: [records] bytes of each one's slot.
            home: [records] directory entries at home.
            home_address: where slot unit 0 lies.
            first_unit: number of the tier's first slot unit, a multiple of a chunk's; all of home's are lower.
            device: of the tier.
        """
        # fixed after construction
        self.bytes = layout.round_up(size, layout.SEGMENT_MIN_BYTES)
        self._memory = torch.zeros(self.bytes + layout.PAGE_HEADER_BYTES, dtype=torch.uint8, device=device)
        self.address = layout.round_up(self._memory.data_ptr(), layout.PAGE_HEADER_BYTES)
        self._home_address, self._first_unit = home_address, first_unit
        self._classes = list(_classes(self.bytes, slots, home, first_unit, device))
        # changed by adapt
        self.hits = self.misses = 0

    def adapt(self, directory: Tensor, stamps: Tensor, clock: int) -> None:
        """Take in what was read over the link since the last call; between steps. Queued on the current stream.

        Args:
            directory: [records] int32, as kernels read it; changed.
            stamps: [slot units] int32, of home and hot slots alike; changed.
            clock: what steps since the last call stamped with.
        """
        for one in self._classes:
            entries = directory.index_select(0, one.oids)
            recent = stamps.index_select(0, entries - 1) == clock
            hot = entries > self._first_unit
            found = (recent & ~hot).nonzero()[:, 0]
            self.hits += int((recent & hot).sum())
            self.misses += found.numel()
            if found.numel():
                self._take(one, found, directory, stamps, clock)

    def _take(self, one: "_Class", found: Tensor, directory: Tensor, stamps: Tensor, clock: int) -> None:
        """Copy those of the class's records ``found`` for which there are places."""
        places = one.window(_WINDOW * found.numel())
        idle = (one.owner[places] < 0) | (stamps[one.units[places]] != clock)
        places = places[idle][: found.numel()]
        count = places.numel()
        # Where places are fewer, each layer gets its part of them.
        found = found[torch.arange(count, device=found.device) * found.numel() // max(1, count)]
        former = one.owner[places]
        former = former[former >= 0]
        directory[one.oids[former]] = one.home[former]
        units = one.units[places]
        source = self._home_address + _UNIT * (one.home[found].long() - 1)
        copy_records(source, self.address + _UNIT * (units - self._first_unit), one.slot)
        directory[one.oids[found]] = (units + 1).int()
        stamps[units] = clock
        one.owner[places] = found


class _Class:
    """Records of one slot size, and the places for them: oids [records] int32, home entries [records] int32, first slot
    unit of each place [places] int64.
    """

    def __init__(self, oids: Tensor, home: Tensor, units: Tensor, slot: int) -> None:
        # fixed after construction
        self.oids, self.home, self.units, self.slot = oids, home, units, slot
        # changed by adapt
        self.owner = torch.full_like(units, -1)
        """[places]: which of ``oids`` is there; -1: none."""
        self._hand = 0

    def window(self, count: int) -> Tensor:
        """The next ``count`` places, or all of them."""
        count = min(count, self.units.numel())
        first, self._hand = self._hand, (self._hand + count) % self.units.numel()
        return (first + torch.arange(count, device=self.units.device)) % self.units.numel()


def _classes(
    size: int, slots: NDArray[np.int64], home: NDArray[np.uint32], first_unit: int, device: torch.device
) -> Iterator[_Class]:
    """Every slot size with its part of the pages; a size whose part is none has no places."""
    first_page, pages = first_unit // layout.UNITS_PER_PAGE, size // layout.CACHE_PAGE_BYTES
    for slot in np.unique(slots).tolist():
        oids = np.flatnonzero(slots == slot)
        per_page = layout.CACHE_PAGE_BYTES // slot
        own = min(int(pages * (oids.size * slot / slots.sum())), -(-oids.size // per_page))
        page, place = np.divmod(np.arange(own * per_page), per_page)
        units = (first_page + page) * layout.UNITS_PER_PAGE + place * (slot // _UNIT)
        first_page += own
        if units.size:
            records, entries = oids.astype(np.int32), home[oids].view(np.int32)
            oids_of, home_of, units_of = (torch.from_numpy(one).to(device) for one in (records, entries, units))
            yield _Class(oids_of, home_of, units_of, slot)
