"""How keys and values are kept, as a user says it, and what that means to a session and its daemon."""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Final

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.models import ModelConfig
from strataflux.client.weights import StepDemand
from strataflux.kernels.kv_attention import encoded_tiles, selected_groups
from strataflux.kernels.kv_encode import KvFormat
from strataflux.kernels.kv_pack import TILE_TOKENS
from strataflux.proto.layout import (
    CACHE_LINE,
    CACHE_PAGE_BYTES,
    KV_WRITE_BUFFERS,
    PAGE_HEADER_BYTES,
    round_up,
    slot_bytes,
)
from strataflux.proto.messages import KvGeometry

__all__ = ["MOST_KEPT_STEPS", "KvOptions", "blocks_for"]

MOST_KEPT_STEPS: Final = 64
"""Steps whose selections may be refined by a later one."""


@dataclass(frozen=True)
class KvOptions:
    """How keys and values are kept. Fraction 0 refines nothing.

    With ``select_lag`` 1 a step refines the groups that the ``kept_steps`` steps before it selected: nothing of
    refinement is waited for, and a record has a step's time to come; with 0 those that it selects itself.
    """

    key_bits: int
    value_bits: int
    refine_key_bits: int = 4
    refine_value_bits: int = 4
    group_tokens: int = 4
    fraction: Fraction = Fraction(1, 128)
    prenormalize: bool = False
    select_lag: int = 0
    kept_steps: int = 1

    def __post_init__(self) -> None:
        if self.select_lag not in (0, 1):
            raise MisuseError("select_lag", f"{self.select_lag}", "0 or 1", "select by this step, or by the one before")
        if not 1 <= self.kept_steps <= MOST_KEPT_STEPS:
            expected = f"1 to {MOST_KEPT_STEPS}"
            raise MisuseError("kept_steps", f"{self.kept_steps}", expected, "refine what so many steps selected")

    def form(self, head_dim: int) -> KvFormat:
        """The format for heads of this size.

        Raises:
            MisuseError: it cannot be, naming what.
        """
        widths = (self.key_bits, self.value_bits, head_dim, self.refine_key_bits, self.refine_value_bits)
        try:
            return KvFormat(*widths, self.group_tokens, self.prenormalize)
        except ValueError as error:
            raise MisuseError(
                "KV cache", str(error), "a format that exists", "change --kv, --refine-kv or --group"
            ) from (error)

    def geometry(self, config: ModelConfig, blocks: int) -> KvGeometry | None:
        """What a session is told, for ``blocks`` blocks at once; None if nothing is refined."""
        form = self.form(config.head_dim)
        if form.record_bytes == 0 or not self.fraction or blocks == 0:
            return None
        groups = config.layers * config.kv_heads * form.groups_per_tile
        return KvGeometry("kv_group", TILE_TOKENS, self.group_tokens, groups, form.record_bytes, blocks)

    def daemon_bytes(self, config: ModelConfig, slot_bytes_wanted: int) -> int:
        """What a daemon's KV budget must be for one session to have so many bytes of slots: its write buffers are
        paid from the budget, too.
        """
        form = self.form(config.head_dim)
        records = config.layers * config.kv_heads * form.groups_per_tile
        block = round_up(records * round_up(form.record_bytes, CACHE_LINE), PAGE_HEADER_BYTES)
        return KV_WRITE_BUFFERS * block + max(slot_bytes_wanted, CACHE_PAGE_BYTES)

    def slots_of(self, config: ModelConfig, context: int) -> int:
        """Bytes of slots that hold every record of a sequence of ``context`` tokens."""
        form = self.form(config.head_dim)
        records = config.layers * config.kv_heads * form.groups_per_tile * blocks_for(context)
        return records * slot_bytes(form.record_bytes)

    def demand(self, config: ModelConfig, context: int) -> StepDemand:
        """What a sequence of ``context`` tokens asks of a session in its last step."""
        form = self.form(config.head_dim)
        if form.record_bytes == 0 or not self.fraction:
            return StepDemand(0, 0)
        groups = selected_groups(self.fraction, blocks_for(context) * form.groups_per_tile)
        a_layer = config.kv_heads * groups
        if self.select_lag:
            # What is selected before it is looked up may be asked for twice.
            a_layer *= min(self.kept_steps, ceil(1 / self.fraction))
            return StepDemand(2 * config.layers * a_layer, a_layer * slot_bytes(form.record_bytes))
        return StepDemand(config.layers * a_layer, a_layer * slot_bytes(form.record_bytes))


def blocks_for(context: int) -> int:
    """Blocks that a sequence of ``context`` tokens fills."""
    return encoded_tiles(context)
