"""A model that decodes with codes in two tiers, the finer one at a daemon: one session's step around each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

from torch import Tensor

from strataflux.cache_policy.miss import MissPolicy, Skip, Wait
from strataflux.client.errors import MisuseError
from strataflux.client.fsq_blocks import BLOCK_TOKENS, FsqBlocks
from strataflux.client.fsq_tiers import TieredFsqCache
from strataflux.client.recording import describe_tables, session_kind
from strataflux.client.runtime.fsq_decoder import FsqDecoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.session import Session
from strataflux.client.session_model import SessionModel
from strataflux.kernels.fsq_nested import FsqTier
from strataflux.kernels.kv_attention import selected_groups
from strataflux.proto.layout import (
    CACHE_LINE,
    CACHE_PAGE_BYTES,
    KV_WRITE_BUFFERS,
    PAGE_HEADER_BYTES,
    round_up,
    slot_bytes,
)
from strataflux.proto.messages import KvGeometry

__all__ = ["TierOptions", "TieredModel"]


@dataclass(frozen=True)
class TierOptions:
    """What is refined at a step, of codes in two tiers. Fraction 0 refines what is at hand alone.

    Raises:
        MisuseError: on construction, if groups do not divide a block of 128 positions.
    """

    fraction: Fraction = Fraction(1, 32)
    group_tokens: int = 1

    def __post_init__(self) -> None:
        if self.group_tokens < 1 or BLOCK_TOKENS % self.group_tokens:
            expected = f"a divisor of {BLOCK_TOKENS}"
            raise MisuseError("--group", f"{self.group_tokens} tokens", expected, "use 1, 2, 4, 8 … tokens")

    def record_bytes(self, tiers: Sequence[FsqTier]) -> int:
        """Bytes of a group's record, the same for all layers."""
        return self.group_tokens * max(tier.grid.refinement.nbytes for tier in tiers)

    def records_a_block(self, tiers: Sequence[FsqTier]) -> int:
        """Records of 128 positions."""
        return len(tiers) * BLOCK_TOKENS // self.group_tokens

    def geometry(self, tiers: Sequence[FsqTier], context: int) -> KvGeometry:
        """What a session is told, for a sequence of ``context`` positions."""
        records, blocks = self.records_a_block(tiers), max(1, context // BLOCK_TOKENS)
        return KvGeometry("fsq_unit", BLOCK_TOKENS, self.group_tokens, records, self.record_bytes(tiers), blocks)

    def selections(self, context: int) -> int:
        """Groups that a layer selects at most at a step."""
        return selected_groups(self.fraction, context // BLOCK_TOKENS * (BLOCK_TOKENS // self.group_tokens))

    def slots_of(self, tiers: Sequence[FsqTier], context: int) -> int:
        """Bytes of slots that hold every record of a sequence of ``context`` positions."""
        records = self.records_a_block(tiers) * (context // BLOCK_TOKENS)
        return records * slot_bytes(self.record_bytes(tiers))

    def daemon_bytes(self, tiers: Sequence[FsqTier], slot_bytes_wanted: int) -> int:
        """What a daemon's KV budget must be for one session to have so many bytes of slots: its write buffers are
        paid from the budget, too.
        """
        stride = round_up(self.record_bytes(tiers), CACHE_LINE)
        block = round_up(self.records_a_block(tiers) * stride, PAGE_HEADER_BYTES)
        return KV_WRITE_BUFFERS * block + max(slot_bytes_wanted, CACHE_PAGE_BYTES)


class TieredModel(SessionModel):
    """Decodes one sequence with a :class:`TieredFsqCache`. A step without what the daemon holds is coarse but for what
    is at hand.

    Pairs: :meth:`attach` / :meth:`close`.
    """

    def __init__(self, session: Session, decoder: FsqDecoder, cache: TieredFsqCache) -> None:
        """Use :meth:`attach`."""
        super().__init__(session, decoder)
        # fixed after construction
        self._codes = decoder
        self.cache = cache

    @classmethod
    def attach(
        cls,
        weights: DecoderWeights,
        tiers: Sequence[FsqTier],
        options: TierOptions,
        *,
        context: int,
        runtime_dir: Path | None = None,
        miss: MissPolicy = Skip(),  # noqa: B008 (immutable)
    ) -> "TieredModel":
        """Attach to a daemon, for one sequence of ``context`` positions.

        Args:
            weights: the model's.
            tiers: one for each layer, made over these weights.
            options: what is refined.
            context: positions.
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            miss: what to do about absent records.

        Raises:
            MisuseError: tiers are not this model's.
            DaemonUnavailableError: nobody answers. RefusedError: the daemon said no.
        """
        selected = options.selections(context)
        waits = isinstance(miss, Wait)
        session = session_kind().attach(
            [],
            selections_per_step=max(1, len(tiers) * selected),
            largest_set_bytes=selected * slot_bytes(options.record_bytes(tiers)) if waits else 0,
            runtime_dir=runtime_dir,
            miss=miss,
            kv=options.geometry(tiers, context),
            client="strataflux fsq",
        )
        try:
            describe_tables(session, None, len(tiers), 1)
            assert session.kv is not None
            sizes = [tier.grid.refinement.nbytes for tier in tiers]
            blocks = FsqBlocks(sizes, options.group_tokens, context, session.kv)
            seconds = miss.deadline_seconds if isinstance(miss, Wait) else 0.0
            cache = TieredFsqCache(
                weights, tiers, context, options.fraction, blocks, session, session.kv.table, seconds
            )
            return cls(session, FsqDecoder(weights, cache, context), cache)
        except BaseException:
            session.close()
            raise

    def prefill(self, tokens: Sequence[int], chunk: int = 512) -> Tensor:
        """As :meth:`FsqDecoder.prefill`; attention is to whole codes."""
        return self._codes.prefill(tokens, chunk)

    def _refine(self, on: bool) -> None:
        self.cache.refining = on
