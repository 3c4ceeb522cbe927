"""What refines codes, from the step that makes it until a daemon has it: blocks of 128 positions, one put each.

A block's records are those of all its layers, each of one group of consecutive tokens; the code is shared by heads, so
one record refines keys and values of all of them. Until the daemon says that it has a block, its refinement is *at
hand* here, so that no position is coarse merely because its put is under way. States of a block, and what moves it:

    HERE    at hand: filling up, or nobody took it yet  → SENT by put; → LOST where nobody takes it in time
    SENT    at hand, its put under way                  → STORED or LOST by what the daemon says of it
    STORED  its records can be looked up                → LOST with its attachment
    LOST    resident codes alone, for good

Object ids: ``block id · records a block + layer · groups a block and layer + group``.
"""

import contextlib
import logging
import time
from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strataflux.client.errors import MisuseError, StrataFluxError
from strataflux.client.kv_blocks import PutTarget
from strataflux.client.kv_puts import PUT_RESULTS, Settled
from strataflux.proto import layout

__all__ = ["BLOCK_TOKENS", "FsqBlocks"]

BLOCK_TOKENS: Final = 128
"""Positions of a put."""
_LOG: Final = logging.getLogger(__name__)
_PUT_SECONDS: Final = 10.0
"""The most that is waited for staging memory after a prompt, for each block, and for what is under way at a reset."""

_HERE, _SENT, _STORED, _LOST = range(4)


class FsqBlocks:
    """The blocks of one sequence. One thread at a time.

    Pairs: :meth:`write` / :meth:`hand_over`, of positions; :meth:`hand_over` / :meth:`settle`, of blocks.
    """

    def __init__(self, sizes: Sequence[int], group_tokens: int, context: int, target: PutTarget) -> None:
        """Ask for the ids of all whole blocks of ``context`` positions, so that no step asks for one.

        Args:
            sizes: bytes of a token's refinement, a layer each.
            group_tokens: of a record; divides 128.
            context: positions.
            target: where records are put.

        Raises:
            MisuseError: groups do not divide a block.
            RefusedError: the daemon has no room for the records of so many. DaemonUnavailableError: nobody answers.
        """
        if group_tokens < 1 or BLOCK_TOKENS % group_tokens:
            expected = f"a divisor of {BLOCK_TOKENS}"
            raise MisuseError("group", f"{group_tokens} tokens", expected, "use 1, 2, 4, 8 … tokens")
        # fixed after construction
        self.groups = BLOCK_TOKENS // group_tokens
        """Of a block and layer."""
        self.records_a_block = len(sizes) * self.groups
        self.record_bytes = group_tokens * max(sizes)
        self._sizes = tuple(sizes)
        self._record_sizes = [group_tokens * size for size in sizes]
        self._target = target
        # changed by calls
        count = context // BLOCK_TOKENS
        self.bases = np.full(count, -1, np.int64)
        """Object id of each block's first record [blocks]; -1 where there are no records to look up."""
        self.start = 0
        """First position that is at hand; all later ones are."""
        self.unrefined = 0
        """Blocks that stay coarse: nobody took them in time, or they were refused or lost with an attachment."""
        self._states = np.full(count, _HERE, np.int64)
        self._pieces = [torch.empty((0, size), dtype=torch.uint8) for size in sizes]
        self._epoch = target.epoch
        self._ids = np.array(target.reserve(count) if count else [], np.int64)

    # --- what is at hand ---------------------------------------------------------------------------------------------

    def write(self, layer: int, start: int, pieces: Tensor) -> None:
        """Keep packed ``pieces`` [n, bytes] uint8 of positions ``start`` …, which are at hand."""
        first, last = start - self.start, start - self.start + pieces.shape[0]
        held = self._pieces[layer]
        if last > held.shape[0]:
            room = layout.round_up(last, BLOCK_TOKENS) - held.shape[0]
            held = self._pieces[layer] = torch.cat((held, held.new_zeros((room, held.shape[1]))))
        held[first:last] = pieces

    def read(self, layer: int, start: int, stop: int) -> Tensor:
        """Pieces [stop - start, bytes] uint8 of positions that are at hand; a view."""
        return self._pieces[layer][start - self.start : stop - self.start]

    # --- what goes to the daemon -------------------------------------------------------------------------------------

    def hand_over(self, length: int) -> None:
        """Put blocks that are full at ``length`` positions. The newest one is tried again at later calls until another
        one is full; of several, as after a prompt, each older one is waited for.
        """
        self._renew()
        full = np.flatnonzero(self._states[: length // BLOCK_TOKENS] == _HERE).tolist()
        for block in full:
            newest = block == full[-1]
            if self._put(block, 0.0 if newest else _PUT_SECONDS):
                self._states[block] = _SENT
            elif not newest or self._ids[block] < 0:
                self._lose(block)
                self._target.count_dropped()
        self._advance()

    def _put(self, block: int, wait_seconds: float) -> bool:
        number = int(self._ids[block])
        if number < 0:  # nobody granted one
            return False
        if wait_seconds:
            return self._target.put_waiting(number, self._payload(block), time.monotonic() + wait_seconds)
        return self._target.put(number, self._payload(block))

    def _payload(self, block: int) -> NDArray[np.uint8]:
        records = np.zeros((self.records_a_block, self.record_bytes), np.uint8)
        for layer, size in enumerate(self._record_sizes):
            pieces = self.read(layer, block * BLOCK_TOKENS, (block + 1) * BLOCK_TOKENS)
            records[layer * self.groups : (layer + 1) * self.groups, :size] = pieces.reshape(-1, size).numpy()
        return records.ravel()

    def settle(self, wait_seconds: float = 0.0) -> None:
        """Learn what became of puts; with ``wait_seconds``, of all that are under way."""
        self._renew()
        if wait_seconds and (self._states == _SENT).any():
            self._target.wait_settled(time.monotonic() + wait_seconds)
        for settled in self._target.settled():
            if settled.result != layout.PUT_NONE:  # of an attachment that ended: the next call renews all
                self._settle(settled)
        self._advance()

    def _settle(self, settled: Settled) -> None:
        found = np.flatnonzero(self._ids == settled.block)
        if not len(found):  # put before a reset that could not wait for it
            return
        block = int(found[0])
        if settled.accepted:
            self._states[block] = _STORED
            self.bases[block] = settled.block * self.records_a_block
            return
        if not self.unrefined:
            reason = PUT_RESULTS.get(settled.result, f"refused: code {settled.result}")
            _LOG.warning("block %d of codes stays coarse: %s (told once)", block, reason)
        self._lose(block)

    def _lose(self, block: int) -> None:
        self._states[block] = _LOST
        self.bases[block] = -1
        self.unrefined += 1

    def _advance(self) -> None:
        """Let go of blocks that the daemon has, or that nobody wants."""
        first = self.start // BLOCK_TOKENS
        done = np.append(np.isin(self._states[first:], (_STORED, _LOST)), False)
        count = int(np.argmin(done)) * BLOCK_TOKENS
        if count:
            self.start += count
            # Copied, so that what was let go of is free.
            self._pieces = [pieces[count:].clone() for pieces in self._pieces]

    def _renew(self) -> None:
        """After another attachment took over what was put is gone; what is at hand can be put again, under new ids."""
        if self._target.epoch == self._epoch:
            return
        self._epoch = self._target.epoch
        self._target.settled()  # of the attachment before
        for block in np.flatnonzero(self._states == _STORED):
            self._lose(int(block))
        self._states[self._states == _SENT] = _HERE
        self._ids[:] = -1
        self._grant(np.flatnonzero(self._states == _HERE))

    def _grant(self, blocks: NDArray[np.int64]) -> None:
        with contextlib.suppress(StrataFluxError):  # without ids they are lost, and counted, as they fill up
            self._ids[blocks] = self._target.reserve(len(blocks))

    # --- going back --------------------------------------------------------------------------------------------------

    def truncate(self, length: int) -> None:
        """Forget positions from ``length`` on: all, or some of those that were not handed over.

        Raises:
            MisuseError: they were; nothing has changed.
        """
        handed = np.flatnonzero(self._states != _HERE)
        oldest = (int(handed[-1]) + 1) * BLOCK_TOKENS if len(handed) else 0
        if 0 < length < oldest:
            found, expected = f"position {length}", f"0, or {oldest} and later"
            raise MisuseError("reset", found, expected, "blocks are with the daemon: start over")
        if length == 0:
            self._start_over()

    def _start_over(self) -> None:
        """Outside of steps, because the daemon waits for those before it grants ids again."""
        self.settle(_PUT_SECONDS)
        spent = np.flatnonzero(self._states != _HERE)
        done = np.isin(self._states, (_STORED, _LOST)) & (self._ids >= 0)
        try:
            self._target.release(self._ids[done].tolist())
        except StrataFluxError as error:
            _LOG.info("ids of blocks of codes are kept: %s", error)
        self._ids[spent], self.bases[:], self._states[:], self.start = -1, -1, _HERE, 0
        self._pieces = [pieces[:0] for pieces in self._pieces]
        self._grant(spent)
