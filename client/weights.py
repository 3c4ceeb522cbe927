"""The weight refiner: for each projection, select channels, look their records up, and add what is present.

Records are read where the daemon put them; absent ones are skipped, and the look-up has already asked for
them. Object ids are dense: ``oid = base[layer, set] + channel`` in the order of the store's sections.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.residents import PresentSource, Residents
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.schemes import BUNDLES, Scheme, budgets_by_set, require_scheme, section_of
from strataflux.kernels.refine import record_bytes, refine_addresses
from strataflux.kernels.select import select_channels
from strataflux.kernels.topk import selected_count
from strataflux.proto.layout import slot_bytes

__all__ = [
    "LAYERS_BEGUN",
    "MORE",
    "AskedSource",
    "RecordSource",
    "SetStatistics",
    "StepDemand",
    "WeightRefiner",
    "record_bases",
    "step_demand",
]

MORE = Fraction(5, 4)
"""Guessed for each record that will be selected: a guess costs a read at most, and the last ones are near the edge."""
LAYERS_BEGUN = 3
"""Layers of a projection set whose selections are kept apart: a lead or lag of two blocks, and the layer itself."""


class RecordSource(Protocol):
    """Where records are found: a session, or a stand-in."""

    def lookup(
        self,
        table: int,
        oids: NDArray[np.int64],
        scores: NDArray[np.uint8],
        addresses: NDArray[np.uint64],
    ) -> int:
        """Find ``oids`` [n] of ``table``; what is absent is asked for in the background, high ``scores`` first.

        ``addresses`` [n] is filled with where each record lies in this process, 0 where it is absent. They
        hold until the current step ends or the next call, whichever is first. Returns how many are present.
        Never raises for a daemon that is gone: everything not resident is absent.
        """


class AskedSource(RecordSource, PresentSource, Protocol):
    """A source whose look-ups also come in two halves, with time between them for records to come."""

    def ask(self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]) -> int:
        """The first half of a look-up: how many are present now; asks for the others, never waits. ``addresses`` is
        scratch.
        """

    def collect(
        self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]
    ) -> int:
        """The second half, with what :meth:`ask` was given, in the same step: fills ``addresses`` as :meth:`lookup`
        does; returns how many are present by now.
        """


@dataclass(frozen=True)
class SetStatistics:
    """Look-ups of one projection set since the refiner was made."""

    lookups: int
    hits: int

    @property
    def hit_rate(self) -> float:
        """Hits per look-up; 0 before the first."""
        return self.hits / self.lookups if self.lookups else 0.0


@dataclass(frozen=True)
class StepDemand:
    """What decoding asks of a session; it is told when it attaches, before there is a refiner."""

    selections: int
    """Look-ups of one decode step over all layers."""
    largest_set_bytes: int
    """Slot bytes of the largest selection of one look-up, all of which must be resident at once to wait for it."""


@dataclass(frozen=True)
class _Buffers:
    """Scratch of one projection set, as long as its selection; reused in every call."""

    indices: NDArray[np.int64]
    oids: NDArray[np.int64]
    scores: NDArray[np.uint8]
    addresses: NDArray[np.uint64]
    sums: NDArray[np.float32]


class WeightRefiner:
    """Refines the projections of one model from the records of one table. Not safe for use from two threads.

    Pairs: :meth:`begin` / :meth:`refine` of one layer and set, in one step; ``refine`` alone does both.
    """

    def __init__(
        self,
        source: AskedSource,
        table: int,
        prepared: PreparedModel,
        k: int | Mapping[str, int] | None = None,
        residents: int = 0,
    ) -> None:
        """Read the refinement scales and allocate every buffer.

        Args:
            source: finds records.
            table: the number under which ``source`` knows the store of ``prepared``.
            prepared: the model.
            k: channels per 1,024 for all projection sets or for each; None takes the prepared model's.
            residents: channels per 1,024 beyond ``k`` that refine, too, where they are present.

        Raises:
            MisuseError: a budget is outside 0…1,024 or for an unknown set, or ``residents`` is.
        """
        config = prepared.config
        # fixed after construction
        self._source = source
        self._table = table
        self._budgets = _budgets(prepared, k)
        self._bases = record_bases(config, prepared.sets)
        self._scales = [
            {
                name: prepared.refinement_scales(layer, name).numpy()
                for name, budget in zip(SETS, self._budgets, strict=True)
                if budget
            }
            for layer in range(config.layers)
        ]
        self._buffers = [
            [_allocate(config, name, budget) for _ in range(LAYERS_BEGUN)]
            for name, budget in zip(SETS, self._budgets, strict=True)
        ]
        self._others = [
            Residents(source, table, budget, residents, config.set_shape(name)[1])
            for name, budget in zip(SETS, self._budgets, strict=True)
        ]
        self._guessed = [min(1024, ceil(MORE * budget)) for budget in self._budgets]
        # changed by begin and refine
        self._begun: set[tuple[int, int]] = set()
        self._lookups = np.zeros(len(SETS), np.int64)
        self._hits = np.zeros(len(SETS), np.int64)

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """Select channels by ``x`` [inputs] now, and ask for their records.

        The next :meth:`refine` of the same layer and set takes this selection, whatever its own input. No more than
        ``LAYERS_BEGUN`` successive layers of a set may have begun.
        """
        buffers = self._buffers[set_index][layer % LAYERS_BEGUN]
        if buffers.indices.size:
            self._select(buffers, layer, set_index, x)
            hits = self._source.ask(self._table, buffers.oids, buffers.scores, buffers.addresses)
            self._count(set_index, buffers.oids.size, hits)
            self._begun.add((layer, set_index))

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Add to ``y`` [outputs] the refinement of the selected channels of ``x`` [inputs] that are present."""
        buffers = self._buffers[set_index][layer % LAYERS_BEGUN]
        if buffers.indices.size == 0:
            return
        if (layer, set_index) in self._begun:
            self._begun.remove((layer, set_index))
            self._source.collect(self._table, buffers.oids, buffers.scores, buffers.addresses)
        else:
            self._select(buffers, layer, set_index, x)
            hits = self._source.lookup(self._table, buffers.oids, buffers.scores, buffers.addresses)
            self._count(set_index, buffers.oids.size, hits)
        scale, base = self._scales[layer][SETS[set_index]], self._bases[SETS[set_index]][layer]
        channels, addresses = self._others[set_index].join(x, base, buffers.indices, buffers.addresses)
        refine_addresses(y, x, channels, addresses, scale, buffers.sums)

    def foresee(
        self, layer: int, set_index: int, x: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """Ids and scores of the records that an input like ``x`` [inputs] would select, and some more. New arrays."""
        count = selected_count(self._guessed[set_index], x.size)
        channels, scores = np.empty(count, np.int64), np.empty(count, np.uint8)
        if count:
            select_channels(x, self._guessed[set_index], channels, scores)
            channels += self._bases[SETS[set_index]][layer]
        return channels, scores

    def _select(self, buffers: _Buffers, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        select_channels(x, self._budgets[set_index], buffers.indices, buffers.scores)
        np.add(buffers.indices, self._bases[SETS[set_index]][layer], out=buffers.oids)

    def _count(self, set_index: int, lookups: int, hits: int) -> None:
        self._lookups[set_index] += lookups
        self._hits[set_index] += hits

    @property
    def residents(self) -> int:
        """Channels that refined without having been selected so far."""
        return sum(others.used for others in self._others)

    def statistics(self) -> dict[str, SetStatistics]:
        """Look-ups and hits by projection set."""
        return {name: SetStatistics(int(self._lookups[i]), int(self._hits[i])) for i, name in enumerate(SETS)}


def step_demand(
    prepared: PreparedModel,
    k: int | Mapping[str, int] | None = None,
    shift: Mapping[str, float] | None = None,
    scheme: Scheme | None = None,
) -> StepDemand:
    """What a refiner with these arguments will ask of its source; sets with a ``shift`` may ask twice.

    Raises:
        MisuseError: as the refiner of ``scheme``, by default the one the prepared model names.
    """
    config, manifest = prepared.config, prepared.manifest
    chosen = manifest.mlp_scheme if scheme is None else scheme
    require_scheme(prepared.sets, chosen)
    budgets = budgets_by_set(manifest.k if k is None else k, chosen)
    blocks = manifest.shift if shift is None else shift
    selections, largest = 0, 0
    for name, budget in budgets.items():
        stored = BUNDLES if chosen == "bundles" and name == "down" else name
        section = section_of(config, 0, stored)
        count = selected_count(budget, section.count)
        selections += count * (2 if blocks[name] else 1)
        largest = max(largest, count * slot_bytes(section.record_bytes))
    return StepDemand(config.layers * selections, largest)


def record_bases(config: ModelConfig, sets: Sequence[str]) -> dict[str, NDArray[np.int64]]:
    """The object ids of record 0 of each of ``sets``, which a store has in this order in each layer: [layers] int64."""
    counts = np.array([section_of(config, layer, name).count for layer in range(config.layers) for name in sets])
    firsts = (np.cumsum(counts) - counts).reshape(config.layers, len(sets)).astype(np.int64)
    return {name: np.ascontiguousarray(firsts[:, position]) for position, name in enumerate(sets)}


def _budgets(prepared: PreparedModel, k: int | Mapping[str, int] | None) -> tuple[int, ...]:
    if k is None and prepared.manifest.mlp_scheme != "channels":
        found = f"the budgets of {prepared.manifest.mlp_scheme}"
        raise MisuseError("k", found, "budgets of channels", "pass them, or refine by neuron bundles")
    budgets = budgets_by_set(prepared.manifest.k if k is None else k, "channels")
    if budgets["gate_up"] or budgets["down"]:
        require_scheme(prepared.sets, "channels")
    return tuple(budgets.values())


def _allocate(config: ModelConfig, name: str, budget: int) -> _Buffers:
    outputs, inputs = config.set_shape(name)
    count = selected_count(budget, inputs)
    return _Buffers(
        indices=np.empty(count, np.int64),
        oids=np.empty(count, np.int64),
        scores=np.empty(count, np.uint8),
        addresses=np.empty(count, np.uint64),
        sums=np.empty(2 * record_bytes(outputs), np.float32),
    )
