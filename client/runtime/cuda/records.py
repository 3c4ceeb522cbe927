"""Where a step's look-ups go: one table of the attach block, and each set's records in it."""

from collections.abc import Mapping
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.model import DeviceModel
from strataflux.client.runtime.models import SETS
from strataflux.client.weights import record_bases
from strataflux.kernels.gpu.select import score_thresholds

__all__ = ["Records"]


class Records(NamedTuple):
    """Of one model's store."""

    block: Tensor
    """The attach block on the device."""
    table: int
    thresholds: Tensor
    bases: Mapping[str, NDArray[np.int64]]

    @classmethod
    def of(cls, model: DeviceModel, block: DeviceBlock, table: int) -> Self:
        """Those of ``model``, as they are numbered in table ``table`` of ``block``."""
        thresholds = score_thresholds(model.device)
        return cls(block.tensor, table, thresholds, record_bases(model.config, model.sets))

    def first(self, layer: int, number: int) -> int:
        """The record of channel 0 of a set."""
        return int(self.bases[SETS[number]][layer])
