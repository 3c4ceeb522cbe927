"""What a prepared model keeps where, what a token will ask for, and whether a machine suits it.

Everything but the machine is arithmetic on the model's dimensions and settings, so it can be told before a model is
prepared. Source: ours; the expected hit rates are the recorded ones of docs/CACHING.md.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Final

from strataflux.client.disk import DiskSpeed
from strataflux.client.prepare.prepared import PreparedModel, resident_tensors, store_sections
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.schemes import BUNDLES, Scheme, budgets_by_set, section_of, store_slot_bytes
from strataflux.kernels.topk import selected_count
from strataflux.proto.store_format import plan_sections

__all__ = [
    "Explanation",
    "Machine",
    "TokenDemand",
    "Verdict",
    "expected_hit_rate",
    "explain_model",
    "explain_prepared",
    "judge",
    "size_text",
]

_BLOCK: Final = 4096
_CHECKSUM: Final = 4
_RECORDED: Final = ((0.0, 0.0), (0.05, 0.302), (0.10, 0.492), (0.25, 0.718), (1.0, 1.0))
"""(share of the records that the cache holds, hit rate): trace W under LRU, docs/CACHING.md."""

_PARTS: Final[Mapping[str, str]] = {
    "embedding": "embeddings",
    "head": "embeddings",
    "codes": "codes",
    "planes": "codes",
    "scales": "scales",
    "zeros": "scales",
    "codebook": "scales",
    "refinement_scales": "refinement scales",
}


@dataclass(frozen=True)
class TokenDemand:
    """What one decoded token asks for."""

    records: int
    """Looked up."""
    record_bytes: int
    """Of all of them."""
    disk_bytes: int
    """Read for all of them if none is cached: whole blocks around each record."""


@dataclass(frozen=True)
class Explanation:
    """A model by tiers. Bytes are bytes."""

    architecture: str
    layers: int
    weights: int
    """Of all projections."""
    base: str
    bits: int
    group: int
    mlp: Scheme
    fast_bytes: Mapping[str, int]
    """Fast memory by what it holds: codes, scales, embeddings, refinement scales, norms."""
    kv_bytes_a_token: int
    """Of an exact cache in float16; beside ``fast_bytes``."""
    kv_window_bytes: int
    """Likewise, of all that is in the windows of layers that have one; no context makes that grow."""
    cpu_bytes: int
    """What a CPU holds instead of ``fast_bytes``: it expands weights to float32."""
    cache_bytes: int
    cache_share: float
    """Of the records."""
    records: int
    store_bytes: int
    bits_per_weight: float
    refined_bits_per_weight: float
    """With all refinement bits added."""
    token: TokenDemand
    expected_hit_rate: float

    @property
    def misses_a_token(self) -> float:
        """Records that are expected to be absent."""
        return self.token.records * (1 - self.expected_hit_rate)

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "misses_a_token": self.misses_a_token}


@dataclass(frozen=True)
class Machine:
    """What was found here; the disk is None if it was not measured."""

    memory_bytes: int
    available_bytes: int
    disk_free_bytes: int
    disk: DiskSpeed | None


@dataclass(frozen=True)
class Verdict:
    """One thing that suits, or does not: with both numbers and what to change."""

    name: str
    suits: bool
    found: str
    needed: str
    remedy: str


def explain_prepared(prepared: PreparedModel, k: int | None, cache_bytes: int | None) -> Explanation:
    """A model that is prepared, with its own budgets unless ``k`` says otherwise.

    Raises:
        MisuseError: ``k`` is out of range.
    """
    manifest = prepared.manifest
    budgets = manifest.k if k is None else k
    form = _Form(manifest.base, manifest.bits, manifest.group, manifest.mlp_scheme, prepared.sets)
    return _explain(manifest.config, form, budgets, cache_bytes)


def explain_model(config: ModelConfig, settings: PrepareSettings, cache_bytes: int | None) -> Explanation:
    """A model that is not prepared yet, as ``settings`` would prepare it."""
    base = settings.base
    name = type(base).__name__.removesuffix("Settings").lower()
    form = _Form(name, base.bits, settings.group, settings.chosen_scheme, settings.sets)
    return _explain(config, form, settings.k, cache_bytes)


def expected_hit_rate(share: float) -> float:
    """For a cache that holds this share of the records; between recorded points on a straight line."""
    for (low, low_rate), (high, high_rate) in pairwise(_RECORDED):
        if share <= high:
            return low_rate + (high_rate - low_rate) * (share - low) / (high - low)
    return 1.0


def judge(explained: Explanation, machine: Machine, tokens_per_second: float, *, prepared: bool) -> list[Verdict]:
    """Whether ``machine`` suits: memory to decode in, room for the store if it is yet to be made, and speed."""
    memory = explained.cpu_bytes + explained.cache_bytes
    verdicts = [
        Verdict(
            "memory",
            machine.available_bytes >= memory,
            f"{size_text(machine.available_bytes)} available of {size_text(machine.memory_bytes)}",
            f"{size_text(memory)} on a CPU, RAM cache included",
            "lower --weight-cache, take a smaller model, or decode on a GPU",
        )
    ]
    if not prepared:
        need = explained.store_bytes + sum(explained.fast_bytes.values())
        found = f"{size_text(machine.disk_free_bytes)} free"
        enough = machine.disk_free_bytes >= need
        verdicts.append(
            Verdict("disk space", enough, found, size_text(need), "make room, or name another folder with --at")
        )
    if machine.disk is not None:
        wanted = explained.misses_a_token * tokens_per_second
        found = f"{machine.disk.reads_per_second:,.0f} random reads/s of {machine.disk.read_bytes // 1024} KiB"
        remedy = "a larger --weight-cache, a lower --k, or a faster disk; what comes late is skipped, never waited for"
        needed = f"{wanted:,.0f} for {tokens_per_second:g} tokens/s"
        verdicts.append(
            Verdict("disk speed", machine.disk.reads_per_second >= wanted, found, needed, remedy),
        )
    return verdicts


@dataclass(frozen=True)
class _Form:
    base: str
    bits: int
    group: int
    mlp: Scheme
    sets: tuple[str, ...]


def _explain(config: ModelConfig, form: _Form, k: int | Mapping[str, int], cache_bytes: int | None) -> Explanation:
    fast = _fast_bytes(config, form)
    sections, records_bytes = plan_sections(store_sections(config, form.sets))
    records = sum(section.count for section in sections)
    slots = store_slot_bytes(config, form.sets)
    cache = slots // 4 if cache_bytes is None else min(cache_bytes, slots)
    weights = config.layers * sum(math.prod(config.set_shape(name)) for name in SETS)
    resident = 8 * (fast["codes"] + fast["scales"]) / weights
    embeddings = fast["embeddings"] // 2
    kv_bytes = 2 * 2 * config.kv_heads * config.head_dim
    return Explanation(
        architecture=config.architecture,
        layers=config.layers,
        weights=weights,
        base=form.base,
        bits=form.bits,
        group=form.group,
        mlp=form.mlp,
        fast_bytes=fast,
        kv_bytes_a_token=len(config.whole) * kv_bytes,
        kv_window_bytes=sum(config.windows) * kv_bytes,
        cpu_bytes=4 * (weights + embeddings),
        cache_bytes=cache,
        cache_share=cache / slots,
        records=records,
        store_bytes=records_bytes + _CHECKSUM * records,
        bits_per_weight=resident,
        refined_bits_per_weight=resident + 8 * sum(s.count * s.record_bytes for s in sections) / weights,
        token=_token(config, form, k),
        expected_hit_rate=expected_hit_rate(cache / slots),
    )


def _fast_bytes(config: ModelConfig, form: _Form) -> dict[str, int]:
    found = dict.fromkeys((*dict.fromkeys(_PARTS.values()), "norms"), 0)
    for name, (dtype, shape) in resident_tensors(config, form.bits, form.group, form.sets, form.base).items():
        found[_PARTS.get(name.rpartition(".")[2], "norms")] += math.prod(shape) * dtype.itemsize
    return found


def _token(config: ModelConfig, form: _Form, k: int | Mapping[str, int]) -> TokenDemand:
    records = size = disk = 0
    for name, budget in budgets_by_set(k, form.mlp).items():
        section = section_of(config, 0, BUNDLES if form.mlp == "bundles" and name == "down" else name)
        count = config.layers * selected_count(budget, section.count)
        records += count
        size += count * section.record_bytes
        disk += count * _around(section.record_bytes)
    return TokenDemand(records, size, disk)


def _around(record_bytes: int) -> int:
    """Bytes of whole blocks around a record that begins anywhere, in the mean and rounded up to whole blocks."""
    return -(-(record_bytes + _BLOCK // 2) // _BLOCK) * _BLOCK


def size_text(count: float) -> str:
    """Bytes for a person: ``98.3 MB``."""
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count / 1e3:,.1f} KB"
