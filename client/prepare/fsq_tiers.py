"""Divide the codes of a model into a resident tier and one that refines it, without touching the codes (ours).

What is resident of a code is decided as the code itself was: bits go where a bit removes most distortion, until the
resident bytes are spent. What a coordinate is worth is read off the code, ``|S D_i|² Var(c_i)`` with keys and values
balanced by S, so that trained codes are divided like converted ones. The resident tier gets a decoder of its own by
regression on its levels: those of the whole code expect finer ones.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import InputError
from strataflux.client.prepare.fsq import (
    FsqSettings,
    give_out_bits,
    project_fsq,
    regress_decoder,
    run_converted,
)
from strataflux.client.runtime.block import multiply
from strataflux.client.runtime.cache import require_no_windows
from strataflux.client.runtime.models import LayerWeights, ModelConfig, WeightSource
from strataflux.client.runtime.rope import rotary_table
from strataflux.kernels.fsq import FsqLayer
from strataflux.kernels.fsq_nested import FsqTier, NestedGrid

__all__ = ["divide_codes", "divide_layer"]


@torch.no_grad()
def divide_codes(
    source: WeightSource,
    codes: Sequence[FsqLayer],
    tokens: Tensor,
    resident_bytes: int,
    device: torch.device,
    advance: Callable[[int], object] = lambda _: None,
) -> list[FsqTier]:
    """Divide every layer's code, one layer in memory at a time.

    Args:
        source: the model that the codes were made over.
        codes: one for each layer, on ``device``.
        tokens: [sequences, n] int64 of text like that which will be decoded.
        resident_bytes: of a token's code, a layer; the rest refines.
        device: where to compute.
        advance: told of each layer as it is done.

    Raises:
        InputError: the codes' cells are unequal, or there is nothing left to refine.
        MisuseError: a layer attends to a window, and so has no code.
    """
    config = source.config
    require_no_windows(config, "codes in two tiers")
    exact = fed = source.embedding()[tokens].to(device)
    cosine, sine = rotary_table(config, tokens.shape[1])
    turns = cosine.to(device), sine.to(device)
    found = []
    for index, code in enumerate(codes):
        layer = source.layer(index).to(device)
        inputs, targets = (
            rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_epsilon).flatten(0, 1)
            for hidden in (fed, exact)
        )
        found.append(divide_layer(config, layer, code, inputs, targets, resident_bytes))
        advance(index)
        exact = run_converted(config, layer, exact, turns, partial(multiply, layer))
        fed = run_converted(config, layer, fed, turns, project_fsq(config, layer, code))
    return found


def divide_layer(
    config: ModelConfig, layer: LayerWeights, code: FsqLayer, inputs: Tensor, targets: Tensor, resident_bytes: int
) -> FsqTier:
    """Divide one layer's code.

    Args:
        config: the model's dimensions.
        layer: the layer, on the device of the inputs.
        code: its code.
        inputs: [n, hidden] float32, normed inputs of the layer's projections in the converted model.
        targets: the same in the unconverted model, whose keys and values are regressed on.
        resident_bytes: of a token's code.

    Raises:
        InputError: as :func:`divide_codes`.
    """
    worth = _worth(config, code, inputs)
    given = give_out_bits(sorted(worth.tolist(), reverse=True), 8 * resident_bytes)
    given += (0,) * (code.grid.width - len(given))
    bits = tuple(min(few, most) for few, most in zip(given, code.grid.bits, strict=True))
    try:
        grid = NestedGrid(code.grid, bits)
    except ValueError as error:
        found = f"{resident_bytes} of {code.grid.nbytes} bytes resident, bound {code.grid.bound}: {error}"
        raise InputError("tiers", found, "fewer resident bytes than the code has, and bound clamp or floor", "") from (
            error
        )
    matrix = layer.projections["qkv"][config.heads * config.head_dim :]
    width = grid.resident.width
    decoder, bias, _ = regress_decoder(
        code.encoder[:width],
        code.encoder_bias[:width],
        grid.resident,
        matrix,
        inputs,
        targets,
        FsqSettings(nbytes=resident_bytes).ridge,
    )
    return FsqTier(grid, code, decoder, bias)


def _worth(config: ModelConfig, code: FsqLayer, inputs: Tensor) -> Tensor:
    """[width]: what each coordinate adds to keys and values, both at equal variance."""
    few = inputs[:: max(1, inputs.shape[0] // 8192)]
    centres = code.grid.centres(code.grid.quantize(linear(few, code.encoder, code.encoder_bias)))
    parts = code.decoder.square() * centres.var(0)
    keys = config.kv_heads * config.head_dim
    each = torch.stack([parts[:keys].sum(0), parts[keys:].sum(0)])
    balanced: Tensor = (each / each.sum(1, keepdim=True)).sum(0)
    return balanced
