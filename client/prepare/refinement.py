"""The whole store of a prepared model as matrices, for evaluation without a daemon; and its ladder of fits."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from strataflux.client.prepare.prepared import LADDER, PreparedModel
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import BUNDLES, Scheme, require_scheme, stored_budgets
from strataflux.kernels.bundle import unpack_bundles
from strataflux.kernels.refine import code_columns
from strataflux.proto.store_format import StoreManifest, open_store

__all__ = ["COPY", "ladder_rungs", "read_refinement"]

COPY = "copy"
"""Beside projection sets: the whole down matrix [hidden, intermediate] as bundles hold it."""


def ladder_rungs(prepared: PreparedModel) -> tuple[int, ...]:
    """Budgets, in channels per 1,024, for which there are fitted values beside the store's; ascending."""
    return tuple(sorted(int(path.stem) for path in (prepared.folder / LADDER).glob("*.safetensors")))


def read_refinement(
    prepared: PreparedModel, scheme: Scheme | None = None, budgets: Mapping[str, int] | None = None
) -> Iterator[dict[str, Tensor]]:
    """Refinement values [outputs, inputs] float32 of each projection set, layer by layer; with bundles also
    :data:`COPY`, and ``gate_up`` holds the bundles' rows.

    Args:
        prepared: the model.
        scheme: how MLPs are refined; None takes the prepared model's.
        budgets: by projection set, for ``scheme``: each set's values are then those fitted for the nearest budget, the
            store's or a rung's of the ladder. None takes the store's.

    Raises:
        MisuseError: the store does not serve ``scheme``.
        ContractError: the store is damaged, or belongs to another model.
    """
    chosen = prepared.manifest.mlp_scheme if scheme is None else scheme
    require_scheme(prepared.sets, chosen)
    store = open_store(prepared.store, prepared.manifest.digest)
    columns = _Columns(prepared, store, {} if budgets is None else _nearest_rungs(prepared, chosen, budgets))
    for layer in range(prepared.config.layers):
        if chosen == "channels":
            yield {name: columns.read(layer, name) for name in SETS}
        else:
            yield {name: columns.read(layer, name) for name in ("qkv", "o")} | columns.bundles(layer)


def _nearest_rungs(prepared: PreparedModel, scheme: Scheme, budgets: Mapping[str, int]) -> dict[str, int]:
    """The rung from which each set's values come, without those that come from the store."""
    fitted = prepared.fitted_budgets
    if fitted is None:
        return {}
    wanted = stored_budgets(budgets, scheme, prepared.sets)
    rungs = {rung: stored_budgets(rung, "channels", prepared.sets) for rung in ladder_rungs(prepared)}
    found = {}
    for name, budget in wanted.items():
        distances = {rung: _distance(budget, by_set[name]) for rung, by_set in rungs.items()}
        nearest = min(distances, key=distances.__getitem__, default=None)
        if nearest is not None and distances[nearest] < _distance(budget, fitted[name]):
            found[name] = nearest
    return found


def _distance(one: int, other: int) -> float:
    return abs(math.log2(max(1, one) / max(1, other)))


class _Columns:
    """Reads a store's records, and columns from the ladder in their place."""

    def __init__(self, prepared: PreparedModel, store: StoreManifest, rungs: Mapping[str, int]) -> None:
        self._prepared, self._store, self._rungs = prepared, store, rungs
        self._records: NDArray[np.uint8] = np.memmap(store.records_path, np.uint8, "r")

    def read(self, layer: int, name: str) -> Tensor:
        outputs = self._prepared.config.set_shape("down" if name == BUNDLES else name)[0]
        if name in self._rungs:
            path = self._prepared.folder / LADDER / f"{self._rungs[name]}.safetensors"
            return _from_ladder(path, f"layers.{layer}.{name}", outputs)
        scales = self._prepared.refinement_scales(layer, name)
        return code_columns(self._rows(layer, name), outputs).float() * scales[:, None]

    def bundles(self, layer: int) -> dict[str, Tensor]:
        codes, scales = unpack_bundles(self._rows(layer, BUNDLES))
        gate, up, down, copy = codes.float().unbind(1)
        rows = torch.cat((gate * scales[:, :1], up * scales[:, 1:2]))
        columns = down.T * self._prepared.refinement_scales(layer, BUNDLES)[:, None]
        if BUNDLES in self._rungs:
            columns = self.read(layer, BUNDLES)
        return {"gate_up": rows, "down": columns, COPY: (copy * scales[:, 2:]).T}

    def _rows(self, layer: int, name: str) -> Tensor:
        section = self._store.section(layer, name)
        rows = self._records[section.offset : section.offset + section.count * section.stride]
        return torch.from_numpy(rows.reshape(section.count, section.stride)[:, : section.record_bytes].copy())


def _from_ladder(path: Path, prefix: str, outputs: int) -> Tensor:
    with safe_open(path, framework="pt") as opened:
        records, scales = opened.get_tensor(f"{prefix}.records"), opened.get_tensor(f"{prefix}.scales")
    values: Tensor = code_columns(records, outputs).float() * scales[:, None]
    return values
