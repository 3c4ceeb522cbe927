"""What kernels over a low-bit KV cache read, and what they leave for each other: device memory that never moves.

A step's attention in one layer is a chain of launches: :func:`~strataflux.kernels.gpu.kv_attend.kv_attend` leaves
*parts* (sums over some tokens, relative to the part's own maximum) and weights of groups;
:func:`~strataflux.kernels.gpu.kv_select.kv_select` finds the strongest groups;
:func:`~strataflux.kernels.gpu.kv_refine.kv_refine` looks them up and leaves further parts, which correct the sums;
:func:`~strataflux.kernels.gpu.kv_merge.kv_merge` puts all parts together. How long a sequence is, each of them reads on
the device: one captured chain serves every length.
"""

from fractions import Fraction
from typing import Final, NamedTuple

import torch
from torch import Tensor

from strataflux.kernels.kv_encode import HalfTiles, KvFormat
from strataflux.proto.layout import slot_bytes

__all__ = [
    "BINS_LOG2",
    "HEAD_DIMS",
    "MAX_GROUP",
    "Fetched",
    "KvRecords",
    "KvTiles",
    "KvWork",
    "Listed",
    "check_heads",
    "default_splits",
    "halves_of",
]

HEAD_DIMS: Final = (64, 128)
"""Head sizes that have kernels."""
MAX_GROUP: Final = 8
"""Query heads that may share a KV head."""
BINS_LOG2: Final = 11
"""Groups are counted by so many leading bits of their share."""

_BLOCK_WARPS: Final = 4
_INTERLEAVE: Final = 8


class KvTiles(NamedTuple):
    """One layer of a batch of sequences as kernels see it. Rotated, as :mod:`strataflux.kernels.kv_attention` says;
    token t of the newest 1 to 128 lies at ``t mod 128`` of the tail.
    """

    form: KvFormat
    keys: HalfTiles
    """[blocks, kv_heads, ...] on the device; ``values`` likewise."""
    values: HalfTiles
    table: Tensor
    """[batch, tiles] int32: the block of tile 1, 2, … of each sequence."""
    sink_keys: Tensor
    """[batch, kv_heads, 128, head_dim] float16, as are the next three."""
    sink_values: Tensor
    tail_keys: Tensor
    tail_values: Tensor

    @property
    def kv_heads(self) -> int:
        """KV heads of the layer."""
        return self.sink_keys.shape[1]


def halves_of(cache: KvTiles) -> list[Tensor]:
    """Codes and scales of keys, then of values, as kernels take them."""
    return [t for half in (cache.keys, cache.values) for t in (half.codes, half.scale, half.zero, half.other)]


class KvRecords(NamedTuple):
    """Where records are found."""

    block: Tensor
    """int64, the attach block on the device (:mod:`~strataflux.kernels.gpu.cells`)."""
    thresholds: Tensor
    """:func:`~strataflux.kernels.gpu.select.score_thresholds` of the device."""
    bases: Tensor
    """[blocks] int64: object id of each block's first record, -1 where it has no records."""
    table: int
    """Number of the KV table."""


class Listed(NamedTuple):
    """Selected groups of each KV head, ascending."""

    groups: Tensor
    """[batch · kv_heads, room] int32, counted from the first one of tile 1."""
    counts: Tensor
    """[batch · kv_heads] int32: how many there are."""
    strengths: Tensor
    """[batch · kv_heads, room] float32: their shares of the attention."""

    @classmethod
    def empty(cls, owners: int, room: int, device: torch.device) -> "Listed":
        """Room for so many; none are selected."""
        groups = torch.zeros(owners, room, dtype=torch.int32, device=device)
        return cls(groups, torch.zeros_like(groups[:, 0]), torch.zeros_like(groups, dtype=torch.float32))


class Fetched(NamedTuple):
    """Records in device memory, of the groups that the last steps selected, in one layer.

    There is room for the lists of so many steps and one more, which take turns; a group has one row at most that
    counts, in the list that named it last. Where several steps named it, its record was brought once.
    """

    listed: Listed
    """What was selected, and is fetched next."""
    numbers: Tensor
    """[batch · kv_heads, lists · room] int32: of each row the group that it refines, -1 for none."""
    held: Tensor
    """[batch · kv_heads, lists · room] int32: of each row the group whose record lies there, -1 for none."""
    where: Tensor
    """[batch · kv_heads, groups] int32: a group's last row; it lies there if the row says so."""
    rows: Tensor
    """[batch · kv_heads, lists · room, slot bytes] uint8: records."""
    places: Tensor
    """[batch · kv_heads, lists · room] int64: the address of each row."""

    @classmethod
    def empty(
        cls, owners: int, groups: int, room: int, steps: int, record_bytes: int, device: torch.device
    ) -> "Fetched":
        """Nothing was fetched.

        Args:
            owners: batch · kv_heads.
            groups: of each of them, at most.
            room: selected groups of a step, at most.
            steps: so many steps' selections count.
            record_bytes: of a group.
            device: of everything.
        """
        listed, count = Listed.empty(owners, room, device), (steps + 1) * room
        numbers = torch.full((owners, count), -1, dtype=torch.int32, device=device)
        where = torch.zeros(owners, groups, dtype=torch.int32, device=device)
        rows = torch.zeros(owners, count, slot_bytes(record_bytes), dtype=torch.uint8, device=device)
        places = torch.arange(owners * count, device=device).view(owners, count) * rows.shape[2] + rows.data_ptr()
        return cls(listed, numbers, numbers.clone(), where, rows, places)

    def forget(self) -> None:
        """Let nothing be selected or fetched. Queued on the current stream."""
        self.listed.counts.zero_()
        self.numbers.fill_(-1)
        self.held.fill_(-1)


def check_heads(head_dim: int, heads: int, kv_heads: int) -> int:
    """How many query heads share a KV head.

    Raises:
        ValueError: such heads have no kernel.
    """
    group, rest = divmod(heads, kv_heads)
    if head_dim not in HEAD_DIMS or rest or not 1 <= group <= MAX_GROUP:
        raise ValueError(
            f"heads of {head_dim} and {heads} query heads for {kv_heads} KV heads: sizes {HEAD_DIMS} and 1 to "
            f"{MAX_GROUP} query heads for each have a kernel"
        )
    return group


def default_splits(device: torch.device, owners: int, tiles: int, group: int) -> int:
    """Blocks that share the tokens of each of ``owners`` KV heads (of all sequences): one wave of them."""
    most = -(-(tiles + 16) // _BLOCK_WARPS)
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
    return max(1, min(most, (2 if group > 4 else 3) * processors // owners))


class KvWork:
    """Shared by all layers of a step. ``refiners`` = 0: nothing is refined.

    Attributes:
        queries: [batch, heads, head_dim] float32, rotated and scaled so that logits are powers of two.
        parts: [batch, heads, splits + refiners, head_dim] float32, relative to 2^tops; ``tops`` and ``totals`` lack the
            last axis. A part without tokens has the top -inf.
        changes: as totals, added to them in the end: by what was refined in the same part.
        sums: [batch, heads, groups] float32, each group's sum of weights, relative to its tile's 2^tile_tops.
        tile_tops: [batch, heads, tiles] float32.
        shares: [batch · kv_heads, groups] float32, each group's share of the attention.
        bins: [batch · kv_heads, 2^11] int32, how many groups have a share with these leading bits; zeros between steps.
        keys: [batch · kv_heads, groups] int64, groups that may be the last selected ones.
        counts: [batch · kv_heads, 2] int32, of ``keys`` and of programs that are done; zeros between steps.
        floors: [batch · kv_heads] int64: a group is selected if its key is not below; the key is the share's bits over
            the inverted group number.
        listed: the selected groups, where no other list was given.
        groups: [batch · kv_heads, refiners, most] int32, what each refiner has to do; ``addresses`` int64.
    """

    def __init__(
        self,
        form: KvFormat,
        batch: int,
        heads: int,
        kv_heads: int,
        tiles: int,
        device: torch.device,
        *,
        splits: int | None = None,
        refiners: int = 0,
    ) -> None:
        """Allocate for sequences of up to ``tiles`` tiles.

        Args:
            form: of the cache.
            batch: sequences.
            heads: query heads.
            kv_heads: heads of keys and values.
            tiles: the most tiles of a sequence in low bits; at least 1.
            device: of everything.
            splits: programs that share a KV head's tokens; None: as many as fill the device.
            refiners: programs that share a KV head's selected groups.

        Raises:
            ValueError: such heads have no kernel, or there is nothing to refine with.
        """
        group = check_heads(form.head_dim, heads, kv_heads)
        if refiners and not form.record_bytes:
            raise ValueError("refinement asked for, of a format without refinement bits")
        owners, groups = batch * kv_heads, tiles * form.groups_per_tile if refiners else 1
        # fixed after construction
        self.form, self.tiles, self.refiners = form, tiles, refiners
        self.group_tokens = form.group_tokens if refiners else 0
        self.splits = default_splits(device, owners, tiles, group) if splits is None else splits
        self.most = -(-groups // (_INTERLEAVE * max(refiners, 1))) * _INTERLEAVE
        # device memory

        def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        pieces = self.splits + refiners
        self.queries = room(batch, heads, form.head_dim)
        self.parts = room(batch, heads, pieces, form.head_dim)
        self.tops, self.totals = room(batch, heads, pieces).fill_(-torch.inf), room(batch, heads, pieces)
        self.changes = torch.zeros_like(self.totals)
        self.sums, self.tile_tops = room(batch, heads, groups), room(batch, heads, tiles)
        self.shares, self.bins = room(owners, groups), room(owners, 1 << BINS_LOG2, dtype=torch.int32)
        self.keys, self.counts = room(owners, groups, dtype=torch.int64), room(owners, 2, dtype=torch.int32)
        self.floors = room(owners, dtype=torch.int64)
        self.listed = Listed.empty(owners, groups, device)
        self.groups = room(owners, max(refiners, 1), self.most, dtype=torch.int32)
        self.addresses = room(owners, max(refiners, 1), self.most, dtype=torch.int64)

    @property
    def batch(self) -> int:
        """Sequences."""
        return self.queries.shape[0]

    @property
    def heads(self) -> int:
        """Query heads."""
        return self.queries.shape[1]

    def selected_groups(self, fraction: Fraction, tiles: int) -> int:
        """How many groups of a KV head are selected of ``tiles`` tiles, at most."""
        groups = tiles * self.form.groups_per_tile
        return min(groups, max(1, groups * fraction.numerator // fraction.denominator))
