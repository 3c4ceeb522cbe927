"""How a model is prepared."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.awq import AwqSettings
from strataflux.client.prepare.bases.lnq import LnqSettings
from strataflux.client.prepare.bases.nf4 import Nf4Settings
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.bases.sqllm import SqllmSettings
from strataflux.client.prepare.fit import MULTIPLIERS
from strataflux.client.prepare.fsq import require_coded_layers
from strataflux.client.prepare.fsq_request import FsqRequest
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.schemes import STORED_SETS, Scheme, budgets_by_set, stored_budgets
from strataflux.kernels.nf4 import NF4_BITS
from strataflux.kernels.topk import CHUNK

__all__ = [
    "BASES",
    "BaseSettings",
    "FitSettings",
    "PrepareSettings",
    "base_settings",
    "check_inputs",
    "default_ladder",
]

BaseSettings = RtnSettings | AwqSettings | SqllmSettings | LnqSettings | Nf4Settings

BASES = ("rtn", "awq", "sqllm", "lnq", "nf4")
"""Names of the low-bit bases."""


@dataclass(frozen=True)
class FitSettings:
    """How refinement values are fitted.

    Raises:
        MisuseError: on construction, if the multiplier is negative or no number.
    """

    multiplier: float | None = None
    """Of λ; None tries several, and the plain residual, and takes for each projection set what held-out tokens like."""

    def __post_init__(self) -> None:
        if self.multiplier is not None and not 0 < self.multiplier < float("inf"):
            raise MisuseError("fit", f"{self.multiplier}", "auto, or a number above 0", "1 is the usual one")

    @property
    def multipliers(self) -> tuple[float, ...]:
        """The candidates."""
        return MULTIPLIERS if self.multiplier is None else (self.multiplier,)

    @property
    def usual(self) -> float:
        """The multiplier where there is nothing to choose it by."""
        return 1.0 if self.multiplier is None else self.multiplier

    def to_json(self) -> dict[str, Any]:
        """What decides which refinement values come out, beside text and budgets."""
        return {"multipliers": list(self.multipliers), "plain": self.multiplier is None}


@dataclass(frozen=True)
class PrepareSettings:
    """How a model is prepared.

    Raises:
        MisuseError: on construction, if text to calibrate on is needed and missing.
    """

    base: BaseSettings = field(default_factory=RtnSettings)
    k: int | Mapping[str, int] = 32
    """Default budget of all projection sets or of each, in channels per 1,024; can be overridden when decoding."""
    fit: FitSettings | None = None
    """None stores plain residuals."""
    tokens: Tensor | None = None
    """[sequences, n] int64 to calibrate on; see :func:`strataflux.client.prepare.calibrate.calibration_windows`."""
    device: str = "cpu"
    """Where calibration, quantization and fitting run."""
    origin: str | None = None
    """Where the model was read from, remembered so that it can be compared with; no part of the identity."""
    mlp: str = "channels"
    """What of the MLP the store has records of: ``channels``, ``bundles``, or ``both`` for a tuner to choose."""
    scheme: Scheme | None = None
    """How the MLP is refined, and what ``k`` is meant for; None: by bundles if there is nothing else."""
    ladder: tuple[int, ...] = ()
    """Budgets, in channels per 1,024, whose fitted values are kept beside the store's, for a tuner."""
    codes: tuple[FsqRequest, ...] = ()
    """Discrete codes to make in the place of keys and values."""

    def __post_init__(self) -> None:
        if self.tokens is None and (self.codes or not self.streams_once):
            raise MisuseError("calibration", "no text", "text for this base, for fitting or for codes", "give some")
        if self.mlp not in STORED_SETS:
            raise MisuseError("--mlp", repr(self.mlp), ", ".join(STORED_SETS), "choose one of these")
        if self.ladder and self.fit is None:
            raise MisuseError(
                "--ladder", f"{list(self.ladder)} without fitting", "--fit", "plain values suit any budget"
            )
        for rung in self.ladder:
            if not 1 <= rung <= CHUNK:
                raise MisuseError("--ladder", f"{rung}", f"budgets of 1 to {CHUNK} per {CHUNK}", "mend the list")
        budgets_by_set(self.k, self.chosen_scheme)

    @property
    def chosen_scheme(self) -> Scheme:
        """How the MLP is refined unless something else is asked for."""
        return self.scheme or ("bundles" if self.mlp == "bundles" else "channels")

    @property
    def sets(self) -> tuple[str, ...]:
        """What the store has records of."""
        return STORED_SETS[self.mlp]

    @property
    def stored_budgets(self) -> dict[str, int]:
        """The budget for which the values of each of ``sets`` are fitted."""
        return stored_budgets(self.k, self.chosen_scheme, self.sets)

    def rung_budgets(self, rung: int) -> dict[str, int]:
        """The same on a rung of the ladder."""
        return stored_budgets(rung, "channels", self.sets)

    @property
    def streams_once(self) -> bool:
        """Whether layers are independent: no calibration, no fitting, nothing to resume."""
        return isinstance(self.base, RtnSettings | Nf4Settings) and self.fit is None

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0 for codebooks."""
        return self.base.group if isinstance(self.base, RtnSettings | AwqSettings | Nf4Settings) else 0


def base_settings(name: str, bits: int | None, group: int, guide_groups: int = 4) -> BaseSettings:
    """The settings of the base called ``name``; without ``bits`` the usual ones, 3, or the 4 of nf4.

    Raises:
        MisuseError: there is no such base, or it does not support these numbers.
    """
    if name == "nf4":
        return Nf4Settings(NF4_BITS if bits is None else bits, group)
    bits = 3 if bits is None else bits
    match name:
        case "rtn":
            return RtnSettings(bits, group)
        case "awq":
            return AwqSettings(bits, group)
        case "sqllm":
            return SqllmSettings(bits)
        case "lnq":
            return LnqSettings(bits, guide_groups)
    raise MisuseError("--base", repr(name), ", ".join(BASES), "choose one of these")


def default_ladder(k: int) -> tuple[int, ...]:
    """A quarter and four times ``k``: with the store's own values, every budget from k/8 to 8k is within a factor of
    two of one that was fitted for, which keeps nine tenths of what fitting gains.
    """
    return tuple(sorted({rung for rung in (k // 4, min(CHUNK, 4 * k)) if rung not in (0, k)}))


def check_inputs(config: ModelConfig, settings: PrepareSettings) -> None:
    """Refuse a model that cannot be prepared so, before the first byte is written.

    Raises:
        MisuseError: matrices do not divide as the base needs, naming the projection set.
        InputError: codes are wanted of layers that all attend to windows.
    """
    if settings.codes:
        require_coded_layers(config)
    if config.hidden % 2 and settings.mlp != "channels":
        raise MisuseError("--mlp", f"{settings.mlp} of {config.hidden} channels", "an even number", "use channels")
    for name in SETS:
        inputs, unit = config.set_shape(name)[1], settings.group or 8
        if inputs % unit:
            if settings.group:
                raise MisuseError("group", f"{unit} for {name} with {inputs} inputs", "a divisor of them", "use 64")
            found = f"{name} with {inputs} inputs"
            raise MisuseError("codebook", found, f"a multiple of {unit}", "use --base rtn or awq, or another model")
