"""The two ways to refine an MLP, and what each asks of a store.

*Channels*: ``gate_up`` and ``down`` are refined like the other projection sets, by the channels of their inputs.
*Bundles*: the neurons with the largest ``|h_j|``, ``h = silu(gate) · up``, are computed anew with their gate and up
rows refined, and put out through a refined down column; what belongs to a neuron is one record (Eq. 5-6). A store has
records for one of them or for both.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Literal

from strataflux.client.errors import MisuseError
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.kernels.topk import CHUNK
from strataflux.proto.layout import slot_bytes
from strataflux.proto.store_format import SectionSpec

__all__ = [
    "BUNDLES",
    "STORED_SETS",
    "Scheme",
    "budgets_by_set",
    "require_scheme",
    "section_of",
    "store_slot_bytes",
    "stored_budgets",
    "stored_schemes",
]

Scheme = Literal["channels", "bundles"]

BUNDLES: Final = "mlp"
"""The name of the neuron bundles where projection sets have theirs."""

STORED_SETS: Final[Mapping[str, tuple[str, ...]]] = {
    "channels": SETS,
    "bundles": ("qkv", "o", BUNDLES),
    "both": (*SETS, BUNDLES),
}
"""What a store has records of, in their order in each layer, by what it was prepared for."""


def stored_schemes(sets: Sequence[str]) -> tuple[Scheme, ...]:
    """The schemes that a store with records of ``sets`` serves."""
    found: tuple[Scheme, ...] = ("channels",) if "down" in sets else ()
    return (*found, "bundles") if BUNDLES in sets else found


def require_scheme(sets: Sequence[str], scheme: Scheme) -> None:
    """Refuse a scheme that a store with records of ``sets`` does not serve.

    Raises:
        MisuseError: naming those it serves.
    """
    served = stored_schemes(sets)
    if scheme not in served:
        raise MisuseError("MLP scheme", scheme, " or ".join(served), "prepare the model with --mlp both")


def budgets_by_set(k: int | Mapping[str, int], scheme: Scheme) -> dict[str, int]:
    """The budget of each projection set, in channels per 1,024.

    With bundles the budget of ``down`` counts neurons and that of ``gate_up`` is 0; one number k for all gives
    round(3k/4) neurons then, which fetches as many bytes.

    Raises:
        MisuseError: a budget is outside 0…1,024, for an unknown set, or for channels of ``gate_up`` beside bundles.
    """
    if isinstance(k, int):
        budgets = dict.fromkeys(SETS, k)
        if scheme == "bundles":
            budgets |= {"gate_up": 0, "down": round(3 * k / 4)}
    elif k.keys() != set(SETS):
        raise MisuseError("k", f"budgets for {', '.join(k)}", f"one for each of {', '.join(SETS)}", "name all")
    else:
        budgets = {name: k[name] for name in SETS}
    for name, budget in budgets.items():
        if not 0 <= budget <= CHUNK:
            raise MisuseError(f"k of {name}", f"{budget}", f"0 to {CHUNK} per {CHUNK}", "change --k")
    if scheme == "bundles" and budgets["gate_up"]:
        found = f"{budgets['gate_up']} channels beside neuron bundles"
        raise MisuseError("k of gate_up", found, "0", "bundles hold the gate and up rows: budget them as down")
    return budgets


def section_of(config: ModelConfig, layer: int, name: str) -> SectionSpec:
    """The store's section of projection set ``name`` of ``layer``, or of its bundles: a record a channel or neuron."""
    # These compile; budgets and names do without.
    from strataflux.kernels.bundle import bundle_bytes
    from strataflux.kernels.refine import record_bytes

    if name == BUNDLES:
        kind, count, size = "neuron_bundle", config.intermediate, bundle_bytes(config.hidden)
    else:
        outputs, count = config.set_shape(name)
        kind, size = "weight_channel", record_bytes(outputs)
    return SectionSpec(f"layers.{layer}.{name}", kind, layer, name, count, size)


def store_slot_bytes(config: ModelConfig, sets: Sequence[str]) -> int:
    """Bytes of cache slots that hold a whole store with records of ``sets``."""
    sections = [section_of(config, 0, name) for name in sets]
    return config.layers * sum(section.count * slot_bytes(section.record_bytes) for section in sections)


def stored_budgets(k: int | Mapping[str, int], scheme: Scheme, sets: Sequence[str]) -> dict[str, int]:
    """Budgets of all that a store has records of, ``sets``, where ``k`` is meant for ``scheme``.

    What belongs to the other scheme gets a budget of as many bytes.

    Raises:
        MisuseError: as :func:`budgets_by_set`.
    """
    budgets = budgets_by_set(k, scheme)
    if scheme == "bundles":
        channels = min(CHUNK, round(4 * budgets["down"] / 3))
        budgets |= {"gate_up": channels, "down": channels, BUNDLES: budgets["down"]}
    else:
        budgets[BUNDLES] = round(3 * budgets["down"] / 4)
    return {name: budgets[name] for name in sets}
