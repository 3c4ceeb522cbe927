"""The bundle refiner: select the neurons of an MLP that matter now, look their bundles up, and add what is present.

It takes the place of a :class:`~strataflux.client.weights.WeightRefiner` and is called in the same manner, set by set;
``qkv`` and ``o`` are refined by channels as there. The MLP differs:

- ``gate_up`` stays at its resident precision. Its input and output are noted, no more.
- ``down`` is where refinement comes: by its input ``h = silu(gate) · up`` the neurons with the largest ``|h_j|`` are
  selected, computed anew, and put out again (:mod:`strataflux.kernels.bundle` has the formula).

There is no lead, since neurons are known only when h is; a lag of ``down`` works as it does for channels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.residents import Residents
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import BUNDLES, Scheme, budgets_by_set, require_scheme
from strataflux.client.weights import LAYERS_BEGUN, AskedSource, SetStatistics, WeightRefiner, record_bases
from strataflux.kernels.bundle import add_bundles
from strataflux.kernels.select import select_channels
from strataflux.kernels.topk import selected_count

__all__ = ["BundleRefiner", "make_refiner"]

_GATE_UP, _DOWN = SETS.index("gate_up"), SETS.index("down")


@dataclass(frozen=True)
class _Buffers:
    """One layer's MLP between its calls; reused by every ``LAYERS_BEGUN``-th layer."""

    x: NDArray[np.float32]
    gate_up: NDArray[np.float32]
    neurons: NDArray[np.int64]
    oids: NDArray[np.int64]
    scores: NDArray[np.uint8]
    addresses: NDArray[np.uint64]


class BundleRefiner:
    """Refines the projections of one model, its MLPs by neuron bundles. Not safe for use from two threads.

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
            prepared: the model, prepared with neuron bundles.
            k: channels per 1,024 for all projection sets, or for each with neurons for ``down`` and 0 for
                ``gate_up``; None takes the prepared model's.
            residents: channels and neurons per 1,024 beyond ``k`` that refine, too, where they are present.

        Raises:
            MisuseError: a budget is outside 0…1,024 or for an unknown set, or ``residents`` is, or the model has no
                bundles.
        """
        config = prepared.config
        require_scheme(prepared.sets, "bundles")
        budgets = budgets_by_set(prepared.manifest.k if k is None else k, "bundles")
        # fixed after construction
        self._source = source
        self._table = table
        self._channels = WeightRefiner(source, table, prepared, {**budgets, "down": 0}, residents)
        self._neurons = budgets["down"]
        self._bases = record_bases(config, prepared.sets)[BUNDLES]
        self._others = Residents(source, table, self._neurons, residents, config.intermediate)
        self._scales = [prepared.refinement_scales(layer, BUNDLES).numpy() for layer in range(config.layers)]
        count = selected_count(self._neurons, config.intermediate)
        self._buffers = [_allocate(config.hidden, config.intermediate, count) for _ in range(LAYERS_BEGUN)]
        self._sums = np.empty(2 * config.hidden, np.float32)
        # changed by begin and refine
        self._begun: set[int] = set()
        self._lookups = self._hits = 0

    def begin(self, layer: int, set_index: int, x: NDArray[np.float32]) -> None:
        """Select by ``x`` [inputs] now, and ask for records; nothing for ``gate_up``.

        The next :meth:`refine` of the same layer and set takes this selection, whatever its own input. No more than
        ``LAYERS_BEGUN`` successive layers of a set may have begun.
        """
        if set_index < _GATE_UP:
            self._channels.begin(layer, set_index, x)
        elif set_index == _DOWN and self._neurons:
            buffers = self._selected(layer, x)
            self._count(self._source.ask(self._table, buffers.oids, buffers.scores, buffers.addresses), buffers)
            self._begun.add(layer)

    def refine(self, layer: int, set_index: int, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Add to ``y`` [outputs] what is present for the selected channels or neurons of ``x`` [inputs].

        ``gate_up``, which adds nothing, has to come before ``down`` of its layer, with the resident outputs in ``y``.
        """
        if set_index < _GATE_UP:
            self._channels.refine(layer, set_index, x, y)
        elif set_index == _GATE_UP:
            buffers = self._buffers[layer % LAYERS_BEGUN]
            buffers.x[:], buffers.gate_up[:] = x, y
        elif self._neurons:
            buffers = self._found(layer, x)
            neurons, addresses = self._others.join(x, self._bases[layer], buffers.neurons, buffers.addresses)
            add_bundles(y, buffers.x, buffers.gate_up, neurons, addresses, self._scales[layer], self._sums)

    def foresee(
        self, layer: int, set_index: int, x: NDArray[np.float32]
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8]]:
        """As of a :class:`~strataflux.client.weights.WeightRefiner`. Neurons are known only when they were computed:
        nothing for ``gate_up``.
        """
        return self._channels.foresee(layer, set_index, x)

    @property
    def residents(self) -> int:
        """Channels and neurons that refined without having been selected so far."""
        return self._channels.residents + self._others.used

    def statistics(self) -> dict[str, SetStatistics]:
        """Look-ups and hits by what has records: ``qkv``, ``o`` and ``mlp``."""
        channels = self._channels.statistics()
        return {name: channels[name] for name in ("qkv", "o")} | {BUNDLES: SetStatistics(self._lookups, self._hits)}

    def _found(self, layer: int, h: NDArray[np.float32]) -> _Buffers:
        if layer in self._begun:
            self._begun.remove(layer)
            buffers = self._buffers[layer % LAYERS_BEGUN]
            self._source.collect(self._table, buffers.oids, buffers.scores, buffers.addresses)
        else:
            buffers = self._selected(layer, h)
            self._count(self._source.lookup(self._table, buffers.oids, buffers.scores, buffers.addresses), buffers)
        return buffers

    def _selected(self, layer: int, h: NDArray[np.float32]) -> _Buffers:
        buffers = self._buffers[layer % LAYERS_BEGUN]
        select_channels(h, self._neurons, buffers.neurons, buffers.scores)
        np.add(buffers.neurons, self._bases[layer], out=buffers.oids)
        return buffers

    def _count(self, hits: int, buffers: _Buffers) -> None:
        self._lookups += buffers.oids.size
        self._hits += hits


def make_refiner(
    source: AskedSource,
    table: int,
    prepared: PreparedModel,
    k: int | Mapping[str, int] | None = None,
    scheme: Scheme | None = None,
    residents: int = 0,
) -> WeightRefiner | BundleRefiner:
    """The refiner of ``scheme``, by default the one the prepared model names; arguments and errors are theirs."""
    chosen = prepared.manifest.mlp_scheme if scheme is None else scheme
    kind = BundleRefiner if chosen == "bundles" else WeightRefiner
    return kind(source, table, prepared, k, residents)


def _allocate(hidden: int, intermediate: int, count: int) -> _Buffers:
    return _Buffers(
        x=np.empty(hidden, np.float32),
        gate_up=np.empty(2 * intermediate, np.float32),
        neurons=np.empty(count, np.int64),
        oids=np.empty(count, np.int64),
        scores=np.empty(count, np.uint8),
        addresses=np.empty(count, np.uint64),
    )
