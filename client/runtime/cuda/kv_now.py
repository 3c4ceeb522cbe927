"""Attention to a low-bit KV cache, refined by what it selects itself, or not at all: one launch after another."""

from fractions import Fraction
from typing import Final

import torch
from torch import Tensor

from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.gpu.kv_attend import kv_attend
from strataflux.kernels.gpu.kv_merge import kv_merge
from strataflux.kernels.gpu.kv_refine import kv_refine
from strataflux.kernels.gpu.kv_select import kv_select
from strataflux.kernels.gpu.kv_work import KvRecords, KvTiles, KvWork
from strataflux.kernels.kv_encode import KvFormat

__all__ = ["NewToken", "SelectedNow"]

_REFINERS: Final = 32
"""Programs that share a KV head's selected groups."""

NewToken = tuple[Tensor, Tensor, Tensor]
"""Its queries, key and value, as :func:`~strataflux.kernels.gpu.kv_attend.kv_attend` takes them."""


class SelectedNow:
    """Of one sequence. Within a step: :meth:`attend` for each layer, then :meth:`join`. One thread."""

    def __init__(
        self,
        config: ModelConfig,
        form: KvFormat,
        tiles: int,
        device: torch.device,
        fraction: Fraction = Fraction(0),
        records: KvRecords | None = None,
    ) -> None:
        """Allocate for sequences of up to ``tiles`` tiles.

        Args:
            config: of the model.
            form: of the cache.
            tiles: the most in low bits; at least 1.
            device: of everything.
            fraction: how many groups are refined, above 0 where there are ``records``.
            records: where they are looked up; None refines nothing.
        """
        refiners = 0 if records is None else _REFINERS
        # fixed after construction
        self._fraction, self._records = fraction, records
        # device memory
        self._work = KvWork(form, 1, config.heads, config.kv_heads, tiles, device, refiners=refiners)

    def attend(self, layer: int, cache: KvTiles, new: NewToken, position: Tensor, out: Tensor) -> None:
        """Queue one layer's attention to ``cache``, into ``out`` as
        :func:`~strataflux.kernels.gpu.kv_merge.kv_merge` takes it; ``position`` is where the new token comes.
        """
        work = self._work
        kv_attend(*new, position, cache, work)
        if self._records is not None:
            kv_select(position, work, self._fraction)
            kv_refine(position, cache, work, *self._records, layer * cache.kv_heads * cache.form.groups_per_tile)
        kv_merge(work, out)

    def join(self) -> None:
        """Nothing was begun beside."""

    def forget(self) -> None:
        """Nothing is kept from one step to the next."""
