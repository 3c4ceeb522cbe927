"""The methods by name. Labels: [P] as its paper says, [O] our own choice where papers differ or are silent."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec, full_bytes
from strataflux.client.evaluate.methods.fsq import make_fsq
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.evaluate.methods.kivi import make_kivi
from strataflux.client.evaluate.methods.latent import make_latent, make_posthoc
from strataflux.client.evaluate.methods.palu import make_palu
from strataflux.client.evaluate.methods.pyramid import WINDOWS, make_fsq_pyramid, make_pyramid
from strataflux.client.evaluate.methods.turboquant import make_turboquant

__all__ = ["METHODS", "Method", "check_method", "make_method"]


@dataclass(frozen=True)
class Method:
    """A method before it is made for a model."""

    amount: Literal["ratio", "bits", "none"]
    """What comes after its name."""
    fitted: bool
    """Whether it needs text to be made from."""
    make: Callable[[MethodSpec, Making], KvMethod]
    about: str
    allowed: tuple[int, ...] = ()
    """Numbers it can do; beside a ratio they may be left out."""
    windows: bool = False
    """Whether it leaves layers as they are that attend to a window of positions."""


def _make_exact(spec: MethodSpec, making: Making) -> KvMethod:
    config, size = making.config, full_bytes(making.config)

    def nbytes(prompt: int, further: int) -> int:
        tokens = prompt + further
        return size * sum(min(tokens, config.window(at) or tokens) for at in range(config.layers))

    return KvMethod(str(spec), lambda index: Appended(config.window(index)), nbytes)


METHODS: Mapping[str, Method] = {
    "exact": Method("none", False, _make_exact, "every key and value; counted as float16", windows=True),
    "fsq": Method("ratio", True, make_fsq, "a finite-scalar-quantized code, bits given out by direction", windows=True),
    "fsq+pyramid": Method(
        "ratio", True, make_fsq_pyramid, "such a code of half the ratio, and head-shared eviction", WINDOWS
    ),
    "kivi": Method("bits", False, make_kivi, "integers by group, the newest 128 tokens exact", (2, 3, 4)),
    "latent": Method("ratio", True, make_latent, "a low-rank latent in float16"),
    "palu": Method("ratio", True, make_palu, "low-rank latents of groups of heads, in 4 bits", (2, 3, 4)),
    "posthoc": Method("ratio", True, make_posthoc, "a low-rank latent, put on a grid of 16 levels afterwards"),
    "pyramid": Method("ratio", False, make_pyramid, "eviction after the prompt, each head for itself", WINDOWS),
    "pyramid-shared": Method(
        "ratio", False, make_pyramid, "eviction after the prompt, one choice for all heads", WINDOWS
    ),
    "turboquant": Method("bits", False, make_turboquant, "turned vectors on the best grid, a norm each", (1, 2, 3, 4)),
}
"""Names as ``--kv`` takes them."""


def check_method(spec: MethodSpec) -> Method:
    """The method that ``spec`` names.

    Raises:
        MisuseError: there is none, or it takes another amount.
    """
    if spec.name not in METHODS:
        raise MisuseError("--kv", repr(spec.name), f"one of {', '.join(sorted(METHODS))}", "name one of them")
    method = METHODS[spec.name]
    amounts = {"ratio": spec.ratio is not None, "bits": spec.number is not None and spec.ratio is None, "none": True}
    if method.amount == "none":
        amounts["none"] = spec.ratio is None and spec.number is None
    if not amounts[method.amount] or (spec.number is not None and spec.number not in method.allowed):
        examples = {"ratio": ":8x", "bits": f":{' or :'.join(map(str, method.allowed))}", "none": " alone"}
        raise MisuseError("--kv", str(spec), f"{spec.name}{examples[method.amount]}", "write it so")
    return method


def make_method(spec: MethodSpec, making: Making) -> KvMethod:
    """Make the method that ``spec`` names for a model.

    Raises:
        MisuseError: as :func:`check_method`, or it needs text to fit on and has none, or the model has layers with
            windows and the method no place for such.
        InputError: there is too little text.
    """
    method, sliding = check_method(spec), making.config.sliding
    if sliding and not method.windows:
        found = f"{len(sliding)} of {making.config.layers} layers that attend to a window of positions"
        able = ", ".join(name for name, other in METHODS.items() if other.windows)
        raise MisuseError(str(spec), found, "attention to all positions in every layer", f"choose {able}")
    return method.make(spec, making)
