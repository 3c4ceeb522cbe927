"""What a way of keeping keys and values has to say, so that all of them are compared by one program.

A method may do two things, each or both:

- *rebuild*: keys and values come out of something smaller than what the model projects (a code, a latent). That
  happens before norm and rotation, and stands in for the projection itself.
- *hold*: what is kept of a layer's keys and values, turned by position, and what a later position sees of it (fewer
  bits, fewer tokens).

Nothing here saves memory: held tensors are float32, so that what is measured is the method and no implementation of it.
What it would take is counted by :attr:`KvMethod.nbytes`, to the byte. All tensors have a batch of sequences of one
length as their first dimension.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Protocol

from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.factors import Factors
from strataflux.client.runtime.models import DecoderWeights, ModelConfig
from strataflux.kernels.fsq import FsqLayer

__all__ = [
    "Held",
    "KvMethod",
    "Making",
    "MethodSpec",
    "Rebuild",
    "budget_bytes",
    "full_bytes",
    "parse_method",
]

Rebuild = Callable[[Tensor], Tensor]
"""Keys and values [..., 2 · kv_heads · head_dim] before bias, norm and rotation, of a layer's inputs [..., hidden]."""


class Held(Protocol):
    """One layer of a batch of sequences. ``prefill`` comes once and first, unless there is no prompt; ``decode``
    follows, as often as needed.
    """

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take a prompt's keys and values [sequences, kv_heads, n, head_dim]; mixed values [sequences, heads, n,
        head_dim] of its queries [sequences, heads, n, head_dim].
        """

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The same of m further positions at once. Each sees what it would if they came one after the other."""


@dataclass(frozen=True)
class KvMethod:
    """One way, made for one model."""

    name: str
    """As :func:`parse_method` reads it."""
    hold: Callable[[int], Held]
    """A new, empty layer of this index."""
    nbytes: Callable[[int, int], int]
    """Bytes that all layers of one sequence take after a prompt of so many tokens and so many tokens more: codes,
    scales, positions and what is kept exact meanwhile, at 2 bytes a number.
    """
    rebuild: Sequence[Rebuild] = ()
    """A layer each; empty: keys and values are the model's own."""
    evicts: bool = False
    """Whether tokens of a prompt are forgotten: such a method does nothing to a text without a prompt."""
    facts: Mapping[str, object] = field(default_factory=dict)
    """What else a report should say: ranks, widths, budgets."""

    def bytes_a_token(self, config: ModelConfig, prompt: int, further: int) -> Fraction:
        """Mean of all tokens and layers."""
        return Fraction(self.nbytes(prompt, further), config.layers * (prompt + further))


@dataclass(frozen=True)
class MethodSpec:
    """``NAME:8x``, ``NAME:8x:3`` or ``NAME:2``."""

    name: str
    ratio: Fraction | None = None
    """How many times fewer bytes than float16."""
    number: int | None = None
    """Bits of a number; or, where tokens are evicted, how many last ones choose."""

    def __str__(self) -> str:
        parts = [self.name]
        if self.ratio is not None:
            parts.append(f"{float(self.ratio):g}x")
        return ":".join(parts if self.number is None else [*parts, str(self.number)])


@dataclass(frozen=True)
class Making:
    """What methods are made from."""

    weights: DecoderWeights
    """On the device where it is evaluated."""
    given: Tensor | None = None
    """[sequences, n] int64 of text to fit on; methods that need none do not look at it."""
    codes: Sequence[FsqLayer] | None = None
    """Codes that exist already, one for each layer that attends to all positions; None converts the model by what
    ``given`` shows.
    """
    on_layer: Callable[[], object] = lambda: None
    """Called for each layer that was fitted."""
    tune: Callable[[Sequence[Factors]], Sequence[Factors]] | None = None
    """Trains the factors that a method has fitted, one a layer; None: they stay as fitted."""

    @property
    def config(self) -> ModelConfig:
        """The model's dimensions."""
        return self.weights.config

    def text(self, spec: MethodSpec) -> Tensor:
        """``given``, on the weights' device.

        Raises:
            MisuseError: there is none.
        """
        if self.given is None:
            raise MisuseError(str(spec), "no calibration text", "text to fit on", "give a --calibration text")
        return self.given.to(self.weights.embedding.device)


_SPEC = re.compile(r"([a-z][a-z+-]*)(?::(\d{1,4}(?:\.\d{1,4})?)x)?(?::(\d{1,2}))?")


def parse_method(text: str) -> MethodSpec:
    """``palu:8x``, ``palu:8x:3``, ``kivi:2``, ``exact``: a name, and how much is kept.

    Raises:
        MisuseError: it is written otherwise; whether such a method exists is not looked at.
    """
    match = _SPEC.fullmatch(text)
    if match is None or (match[2] and float(match[2]) < 1):
        raise MisuseError(
            "--kv", repr(text), "NAME:RATIOx, NAME:NUMBER or both, such as fsq:16x or kivi:2", "write it so"
        )
    return MethodSpec(match[1], Fraction(match[2]) if match[2] else None, int(match[3]) if match[3] else None)


def full_bytes(config: ModelConfig) -> int:
    """Bytes of a token's keys and values in float16, a layer."""
    return 4 * config.kv_heads * config.head_dim


def budget_bytes(config: ModelConfig, spec: MethodSpec) -> int:
    """Bytes a token and layer that ``spec`` leaves, floored (the paper's sheet).

    Raises:
        MisuseError: it leaves none.
    """
    ratio = spec.ratio or Fraction(1)
    nbytes = int(full_bytes(config) / ratio)
    if nbytes < 1:
        raise MisuseError(str(spec), f"{full_bytes(config)} / {float(ratio):g} bytes", "at least 1", "ask for less")
    return nbytes
