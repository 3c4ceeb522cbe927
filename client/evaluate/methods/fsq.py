"""Finite-scalar-quantized codes as a method: bits given out by direction, ``⌈Σ bits / 8⌉`` bytes a token and layer.

Layers that attend to a window of positions stay as they are, and are counted as float16 of what is in their windows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import linear

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec, Rebuild, budget_bytes, full_bytes
from strataflux.client.evaluate.methods.fitting import kv_rows
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
        if len(making.codes) != len(making.config.whole) or max(sizes) > nbytes:
            found = f"{len(making.codes)} codes of {sorted(sizes)} bytes"
            expected = f"{len(making.config.whole)} of at most {nbytes}"
            raise MisuseError(str(spec), found, expected, "name the ratio that they were made for")
        return making.codes

    def told(_: int, __: Conversion) -> None:
        making.on_layer()

    device = making.weights.embedding.device
    settings = FsqSettings(nbytes, levels=0, bound="clamp")
    made = convert(InMemory(making.weights), making.text(spec), settings, device, told)
    return [one.layer for one in made]


def rebuild_from(making: Making, codes: Sequence[FsqLayer]) -> list[Rebuild]:
    """Keys and values by way of ``codes``, or the model's own in layers without one."""

    def through(index: int, code: FsqLayer | None) -> Rebuild:
        if code is None:
            return partial(linear, weight=kv_rows(making, index))
        return lambda x: code.decode(code.encode(x))

    return [through(index, code) for index, code in enumerate(making.config.by_layer(codes))]


def make_fsq(spec: MethodSpec, making: Making) -> KvMethod:
    """``fsq:16x``."""
    config = making.config
    codes = codes_of(spec, making, budget_bytes(config, spec))
    facts: dict[str, object] = {"width": [code.grid.width for code in codes]}
    if config.sliding:
        facts["kept"] = {"layers": list(config.sliding), "windows": [config.window(at) for at in config.sliding]}
    size = sum(code.grid.nbytes for code in codes)

    def nbytes(prompt: int, further: int) -> int:
        tokens = prompt + further
        return size * tokens + full_bytes(config) * sum(min(tokens, config.window(at)) for at in config.sliding)

    hold = lambda index: Appended(config.window(index))  # noqa: E731
    return KvMethod(str(spec), hold, nbytes, rebuild_from(making, codes), facts=facts)
