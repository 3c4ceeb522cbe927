"""What a preparation is asked to make of keys and values: discrete codes of one size, trained or not."""

import hashlib
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from strataflux.client.prepare.fsq import FsqSettings

__all__ = ["FsqRequest", "FsqTraining"]


@dataclass(frozen=True)
class FsqTraining:
    """How codes are trained after their conversion."""

    tokens: Tensor = field(compare=False)
    """[n] int64 of text; some of it is held out."""
    seconds: float
    rate: float = 3e-3
    """The largest step, relative to the size of what it changes; 1e-2 was worse (docs/FSQ.md)."""
    length: int = 512
    """Tokens of a sequence."""
    steps: int = 1_000_000
    """At most."""
    own: int = 0
    """Further tokens that the model writes itself, after stretches of the text."""


@dataclass(frozen=True)
class FsqRequest:
    """Codes of one size."""

    name: str
    """What they are called by, such as ``16x``."""
    settings: FsqSettings
    weights: Literal["base", "original"] = "base"
    """Over which model: the low-bit weights that are prepared, or those they were made of."""
    training: FsqTraining | None = None
    resident: int = 0
    """Bytes of a token's code, a layer, that are resident, of codes in two tiers; 0: codes of one tier."""

    def to_json(self) -> dict[str, Any]:
        """What decides which codes come out, beside the model and its calibration text."""
        told: dict[str, Any] = {"name": self.name, "weights": self.weights, "settings": vars(self.settings)}
        if self.training is not None:
            text = hashlib.sha256(self.training.tokens.contiguous().numpy().tobytes()).hexdigest()
            told["training"] = {**vars(self.training), "tokens": text}
        if self.resident:
            told["resident"] = self.resident
        return told
