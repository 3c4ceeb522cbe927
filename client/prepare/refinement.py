"""The whole store of a prepared model as matrices, for evaluation without a daemon."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.models import SETS
from strataflux.kernels.refine import code_columns
from strataflux.proto.store_format import open_store

__all__ = ["read_refinement"]


def read_refinement(prepared: PreparedModel) -> Iterator[dict[str, Tensor]]:
    """Refinement values [outputs, inputs] float32 of each projection set, layer by layer.

    Raises:
        ContractError: the store is damaged, or belongs to another model.
    """
    store = open_store(prepared.store, prepared.manifest.digest)
    records = np.memmap(store.records_path, np.uint8, "r")
    for layer in range(prepared.config.layers):
        values = {}
        for name in SETS:
            section = store.section(layer, name)
            rows = records[section.offset : section.offset + section.count * section.stride]
            packed = rows.reshape(section.count, section.stride)[:, : section.record_bytes].copy()
            codes = code_columns(torch.from_numpy(packed), prepared.config.set_shape(name)[0])
            values[name] = codes.float() * prepared.refinement_scales(layer, name)[:, None]
        yield values
