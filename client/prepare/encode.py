"""A layer's refinement values as the records of a store, and the scales that stay with the resident weights."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.client.schemes import BUNDLES
from strataflux.kernels.bundle import pack_bundles
from strataflux.kernels.refine import pack_records

__all__ = ["Encoded", "LayerValues", "encode_columns", "encode_layer"]


@dataclass(frozen=True)
class Encoded:
    """What a store has of one projection set, or of an MLP's bundles."""

    records: Tensor
    """[channels or neurons, record bytes] uint8."""
    scales: Tensor
    """[outputs] float32; of bundles those of the down columns."""


@dataclass(frozen=True)
class LayerValues:
    """Refinement values of one layer before they are encoded."""

    channels: Mapping[str, Tensor]
    """[outputs, inputs] float32 by projection set; for ``mlp`` the bundles' down columns [hidden, intermediate]."""
    rows: Tensor
    """[2 · intermediate, hidden]: what the gate and up rows lack; only bundles hold these as rows."""
    down: Tensor
    """[hidden, intermediate]: the unquantized down matrix, which bundles copy."""


def encode_columns(values: Tensor, scales: Tensor | None = None) -> Encoded:
    """Records of ``values`` [outputs, inputs] float32, a column each, under ``scales`` or the best ones."""
    chosen = residual_scales(values) if scales is None else scales
    return Encoded(pack_records(residual_codes(values, chosen)), chosen)


def encode_layer(
    values: LayerValues, sets: Sequence[str], scales: Mapping[str, Tensor] | None = None
) -> dict[str, Encoded]:
    """All of ``sets``; ``scales`` are those of outputs where they are known already."""
    known = scales or {}
    found = {name: encode_columns(values.channels[name], known.get(name)) for name in sets if name != BUNDLES}
    if BUNDLES in sets:
        found[BUNDLES] = _encode_bundles(values, known.get(BUNDLES))
    return found


def _encode_bundles(values: LayerValues, scales: Tensor | None) -> Encoded:
    columns, copies = values.channels[BUNDLES], values.down.T.contiguous()
    chosen = residual_scales(columns) if scales is None else scales
    row_scales, copy_scales = residual_scales(values.rows), residual_scales(copies)
    rows = residual_codes(values.rows, row_scales).chunk(2)
    codes = torch.stack((*rows, residual_codes(columns, chosen).T, residual_codes(copies, copy_scales)), 1)
    return Encoded(pack_bundles(codes, torch.stack((*row_scales.chunk(2), copy_scales), 1)), chosen)
