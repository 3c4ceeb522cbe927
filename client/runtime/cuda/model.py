"""A model's weights where a device can multiply by them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from safetensors import safe_open
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import RESIDENT, PreparedModel
from strataflux.client.runtime.cuda.linear import Linear, LowbitLinear
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.kernels.codebook import unpack_planes
from strataflux.kernels.lowbit import unpack_codes
from strataflux.kernels.lowbit_gemv import LowbitWeights, pack_codebook, pack_scaled

__all__ = ["DeviceLayer", "DeviceModel", "load_prepared"]


@dataclass(frozen=True)
class DeviceLayer:
    """One layer; norms are float32."""

    attention_norm: Tensor
    mlp_norm: Tensor
    linears: Sequence[Linear]
    """One for each of ``SETS``."""
    scales: Sequence[Tensor] | None
    """Scale of each output's refinement codes, float32, for each of ``SETS``; None: it cannot be refined."""
    query_norm: Tensor | None
    key_norm: Tensor | None


@dataclass(frozen=True)
class DeviceModel:
    """All weights of a model on one device."""

    config: ModelConfig
    embedding: Tensor
    """[vocabulary, hidden] of 16-bit floats."""
    norm: Tensor
    head: Tensor
    """[vocabulary, hidden]; the embedding where they are tied."""
    layers: Sequence[DeviceLayer]
    sets: tuple[str, ...] = SETS
    """What its store has records of, in their order in each layer."""

    @property
    def device(self) -> torch.device:
        """Where it lies."""
        return self.embedding.device

    @property
    def linear_bytes(self) -> int:
        """What the projections of one token must read."""
        return sum(linear.bytes for layer in self.layers for linear in layer.linears)


def load_prepared(prepared: PreparedModel, device: torch.device) -> DeviceModel:
    """The low-bit weights of a prepared model, packed for the device's kernel; nothing is expanded.

    Raises:
        ValueError: a shape without a kernel.
        MisuseError: an architecture or base without one.
    """
    config, manifest = prepared.config, prepared.manifest
    if config.qkv_bias:
        raise MisuseError("device", f"architecture {config.architecture!r}, with biases", "one without", "use the CPU")
    if manifest.base == "nf4":
        found, expected = "base nf4, whose table and group scales have no kernel", "rtn, awq, sqllm or lnq"
        raise MisuseError("device", found, expected, "use the CPU, or prepare with --base rtn --bits 4")
    with safe_open(prepared.folder / RESIDENT, framework="pt") as opened:

        def take(name: str) -> Tensor:
            tensor: Tensor = opened.get_tensor(name)
            return tensor.to(device)

        def weights(prefix: str) -> LowbitWeights:
            if not manifest.group:
                return pack_codebook(unpack_planes(take(prefix + "planes")), take(prefix + "codebook"), manifest.bits)
            scales, zeros = take(prefix + "scales"), take(prefix + "zeros")
            inputs = scales.shape[1] * manifest.group
            codes = unpack_codes(opened.get_tensor(prefix + "codes"), manifest.bits, inputs).to(device)
            return pack_scaled(codes, scales, zeros, manifest.bits, manifest.group)

        def layer(number: int) -> DeviceLayer:
            at = f"layers.{number}."
            norms = [take(f"{at}{name}_norm") if config.head_norms else None for name in ("query", "key")]
            return DeviceLayer(
                take(at + "attention_norm"),
                take(at + "mlp_norm"),
                [LowbitLinear(weights(f"{at}{name}.")) for name in SETS],
                [take(f"{at}{name}.refinement_scales") for name in SETS],
                *norms,
            )

        embedding = take("embedding")
        head = embedding if config.tied_head else take("head")
        layers = [layer(number) for number in range(config.layers)]
        return DeviceModel(config, embedding, take("norm"), head, layers, prepared.sets)
