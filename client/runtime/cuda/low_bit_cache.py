"""Keys and values in low bits on a device, its strongest token groups refined at each step.

What :class:`~strataflux.client.kv.RefinedKVCache` is on a CPU: the first 128 tokens and the newest 1 to 128 in float16,
tiles in low bits between them, in blocks whose records go to a daemon. A tile is encoded before the step after it
filled up, outside of the captured step: the host knows positions, and a step that is run again must not encode again.
Its records are made in memory of ours that the device writes to, and copied from there into the session's staging
memory, once in 128 steps.

Look-ups are the device's (:mod:`strataflux.kernels.gpu.kv_refine`), in the same attach block as those of weights.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.kv_blocks import KvBlocks, PutTarget
from strataflux.client.kv_options import KvOptions, blocks_for
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.kv_before import SelectedBefore
from strataflux.client.runtime.cuda.kv_now import SelectedNow
from strataflux.client.runtime.models import ModelConfig
from strataflux.kernels.gpu.kv_encode import kv_encode
from strataflux.kernels.gpu.kv_work import HEAD_DIMS, MAX_GROUP, KvRecords, KvTiles
from strataflux.kernels.gpu.select import score_thresholds
from strataflux.kernels.kv_attention import encoded_tiles
from strataflux.kernels.kv_encode import KvFormat
from strataflux.kernels.kv_pack import TILE_TOKENS

__all__ = ["LowBitCache"]


class LowBitCache:
    """One sequence; an :class:`~strataflux.client.runtime.cuda.attention.Attention`. One thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        context: int,
        device: torch.device,
        options: KvOptions,
        block: DeviceBlock | None = None,
        table: int = 0,
    ) -> None:
        """An empty sequence, which nobody takes records of yet.

        Args:
            config: of the model.
            context: positions there is room for.
            device: of everything.
            options: widths, and how many groups are refined.
            block: where records are looked up, under ``table``; without it nothing is refined.
            table: number of the KV table.

        Raises:
            MisuseError: heads without a kernel, or no such format.
        """
        _check_heads(config)
        form = options.form(config.head_dim)
        tiles = max(1, blocks_for(context))
        # fixed after construction
        self.context = context
        self.blocks = KvBlocks(config, form, tiles, device=device)
        self._table = table
        # device memory
        shape = (config.layers, 1, config.kv_heads, TILE_TOKENS, config.head_dim)
        self._exact = [torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(4)]
        self._places = torch.zeros(1, tiles, dtype=torch.int32, device=device)
        self._bases = torch.full((tiles,), -1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int32, device=device)
        self._staging = torch.zeros(1, dtype=torch.int64, device=device)
        self._way: SelectedNow | SelectedBefore = SelectedNow(config, form, tiles, device)
        if block is not None and form.record_bytes and options.fraction and blocks_for(context):
            records = KvRecords(block.tensor, score_thresholds(device), self._bases, table)
            self._way = _refining(config, form, tiles, options, records)
        # host memory that the device writes to
        self._records: Tensor | None = None
        # changed by steps
        self._encoded = 0
        self._pending: tuple[int, NDArray[np.uint8]] | None = None
        self._shown = self.blocks.bases.copy()
        self._held: list[int] = []
        self._take()
        self._layers = [self._view(layer) for layer in range(config.layers)]
        self._queue_encoding(0)  # compiles it: a tile that fills up should not wait for that

    @staticmethod
    def bytes_for(config: ModelConfig, context: int, options: KvOptions) -> int:
        """Device memory of a cache of ``context`` positions, without a step's buffers."""
        form = options.form(config.head_dim)
        tiles, heads = max(1, blocks_for(context)), config.layers * config.kv_heads
        return heads * (tiles * form.tile_bytes + 8 * TILE_TOKENS * config.head_dim)

    def connect(self, target: PutTarget, table: int) -> None:
        """Put the records of what will be encoded to ``target``, before anything is.

        Raises:
            MisuseError: its table is not the one that look-ups were captured for.
            RefusedError: the daemon has no room for the records of so many. DaemonUnavailableError: nobody answers.
        """
        if table != self._table:
            raise MisuseError(
                "KV table", f"number {table}", f"number {self._table}", "attach to this model's store alone"
            )
        self.blocks.connect(target)
        if self.blocks.recording:
            pinned = self._bases.device.type == "cuda"
            self._records = torch.empty(self.blocks.payload_bytes, dtype=torch.uint8, pin_memory=pinned)
            self._staging.fill_(self._records.data_ptr())

    # --- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, position: int) -> None:
        """As :class:`~strataflux.client.runtime.cuda.attention.Attention`: encode the tile that filled up, if one did,
        and go on with what is to be put. No step waits for a write.
        """
        if encoded_tiles(position + 1) > self._encoded:
            self._encode(position)
        elif self._pending is not None and self.blocks.put(*self._pending):
            self._pending = None
        self.blocks.settle()
        if not np.array_equal(self._shown, self.blocks.bases):
            self._shown = self.blocks.bases.copy()
            self._bases.copy_(torch.from_numpy(self._shown))

    def attend(
        self,
        layer: int,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        position: Tensor,
        out: Tensor,
        *,
        early: bool,  # noqa: ARG002 (nothing does)
    ) -> None:
        """As :class:`~strataflux.client.runtime.cuda.attention.Attention`. Nothing starts early: these launches fill
        the device, and took 5 to 15 % longer where the next ones wait beside them (bench/gpu_kv.py, H200, 128K).
        """
        new = queries[None], keys[None], values[None]
        self._way.attend(layer, self._layers[layer], new, position, out)

    def join(self) -> None:
        """As :class:`~strataflux.client.runtime.cuda.attention.Attention`."""
        self._way.join()

    def extend(self, position: int, keys: Tensor, values: Tensor) -> None:
        """Append tokens from ``position`` on, up to the end of its tile at most; between steps.

        Args:
            position: of the first one; all before are there.
            keys: [layers, kv_heads, tokens, head_dim] float16, turned by position and rotated
                (:mod:`~strataflux.kernels.hadamard`); ``values`` likewise, but for the position.
            values: see there.

        Raises:
            MisuseError: they do not fit.
        """
        begin, count = position % TILE_TOKENS, keys.shape[2]
        room = min(TILE_TOKENS - begin, self.context - position)
        if count > room:
            raise MisuseError("extend", f"{count} tokens at {position}", f"at most {room}", "go on tile by tile")
        self.begin_step(position)
        for part, tokens in zip(self._newest(position), (keys, values), strict=True):
            part[:, 0, :, begin : begin + count] = tokens

    def truncate(self, length: int) -> None:
        """As :class:`~strataflux.client.runtime.cuda.attention.Attention`: to nothing, or within the newest tile.

        Raises:
            MisuseError: those tokens are encoded already.
        """
        oldest = TILE_TOKENS * (1 + self._encoded) if self._encoded else 0
        if 0 < length < oldest:
            expected = f"0, or {oldest} and later"
            raise MisuseError("reset", f"position {length}", expected, "tiles stay encoded: start over")
        self._way.forget()
        if length == 0 and self._encoded:
            self.blocks.drop(self._held)
            self._encoded, self._pending = 0, None
            self._take()

    # --- blocks ------------------------------------------------------------------------------------------------------

    def _take(self) -> None:
        self._held = self.blocks.take(self._places.shape[1])
        self._places.copy_(torch.tensor([self._held], dtype=torch.int32))

    def _encode(self, position: int) -> None:
        if self._pending is not None and not self.blocks.put(*self._pending):
            self.blocks.give_up()
        self._queue_encoding(position)
        place = self._held[self._encoded]
        self._encoded += 1
        self._pending = None
        if self._records is not None:
            if self._bases.device.type == "cuda":
                torch.cuda.current_stream(self._bases.device).synchronize()
            payload = self._records.numpy()
            self._pending = None if self.blocks.put(place, payload) else (place, payload)

    def _queue_encoding(self, position: int) -> None:
        self._position.fill_(position)
        blocks, (keys, values) = self.blocks, self._exact[2:]
        kv_encode(self._position, blocks.form, blocks.keys, blocks.values, self._places, keys, values, self._staging)

    def _newest(self, position: int) -> list[Tensor]:
        """Where keys and values at ``position`` lie in float16: in the sink or the tail."""
        return self._exact[:2] if position < TILE_TOKENS else self._exact[2:]

    def _view(self, layer: int) -> KvTiles:
        blocks = self.blocks
        exact = [part[layer] for part in self._exact]
        return KvTiles(blocks.form, blocks.keys[layer], blocks.values[layer], self._places, *exact)


def _refining(
    config: ModelConfig, form: KvFormat, tiles: int, options: KvOptions, records: KvRecords
) -> SelectedNow | SelectedBefore:
    if options.select_lag:
        return SelectedBefore(config, form, tiles, options.fraction, options.kept_steps, records)
    return SelectedNow(config, form, tiles, records.bases.device, options.fraction, records)


def _check_heads(config: ModelConfig) -> None:
    group = config.heads // config.kv_heads
    if config.head_dim not in HEAD_DIMS or group > MAX_GROUP:
        found = f"head_dim {config.head_dim}, {group} query heads for a key head"
        expected = f"head_dim of {', '.join(map(str, HEAD_DIMS))} and at most {MAX_GROUP}"
        raise MisuseError("a low-bit KV cache on a GPU", found, expected, "leave --kv away, or use --device cpu")
