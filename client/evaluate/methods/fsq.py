"""Finite-scalar-quantized codes as a method: bits given out by direction, ``⌈Σ bits / 8⌉`` bytes a token and layer."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec, Rebuild, budget_bytes
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.prepare.fsq import Conversion, FsqSettings, convert
from strataflux.client.runtime.models import DecoderWeights, LayerWeights, ModelConfig
from strataflux.kernels.fsq import FsqLayer

__all__ = ["InMemory", "codes_of", "make_fsq", "rebuild_from"]


@dataclass(frozen=True)
class InMemory:
    """Weights that are there already, as a :class:`~strataflux.client.runtime.models.WeightSource`."""

    weights: DecoderWeights

    @property
    def config(self) -> ModelConfig:
        """The model's dimensions."""
        return self.weights.config

    def embedding(self) -> Tensor:
        """[vocabulary, hidden]."""
        return self.weights.embedding

    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""
        return self.weights.norm

    def head(self) -> Tensor:
        """[vocabulary, hidden]."""
        return self.weights.head

    def layer(self, index: int) -> LayerWeights:
        """Layer ``index``."""
        return self.weights.layers[index]


def codes_of(spec: MethodSpec, making: Making, nbytes: int) -> Sequence[FsqLayer]:
    """The codes that were given, or the model converted into codes of ``nbytes``.

    Raises:
        MisuseError: those that were given have another size, or there is nothing to fit on.
        InputError: there is too little of it.
    """
    if making.codes is not None:
        sizes = {code.grid.nbytes for code in making.codes}
        if len(making.codes) != making.config.layers or max(sizes) > nbytes:
            found = f"{len(making.codes)} codes of {sorted(sizes)} bytes"
            expected = f"{making.config.layers} of at most {nbytes}"
            raise MisuseError(str(spec), found, expected, "name the ratio that they were made for")
        return making.codes

    def told(_: int, __: Conversion) -> None:
        making.on_layer()

    device = making.weights.embedding.device
    settings = FsqSettings(nbytes, levels=0, bound="clamp")
    made = convert(InMemory(making.weights), making.text(spec), settings, device, told)
    return [one.layer for one in made]


def rebuild_from(codes: Sequence[FsqLayer]) -> list[Rebuild]:
    """Keys and values by way of ``codes``."""

    def through(code: FsqLayer) -> Rebuild:
        return lambda x: code.decode(code.encode(x))

    return [through(code) for code in codes]


def make_fsq(spec: MethodSpec, making: Making) -> KvMethod:
    """``fsq:16x``."""
    codes = codes_of(spec, making, budget_bytes(making.config, spec))
    size = sum(code.grid.nbytes for code in codes)
    facts = {"width": [code.grid.width for code in codes]}
    return KvMethod(
        str(spec),
        lambda _: Appended(),
        lambda prompt, further: size * (prompt + further),
        rebuild_from(codes),
        facts=facts,
    )
