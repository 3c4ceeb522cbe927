"""Codes divided into a resident tier and refinement: the resident one is the best of its bytes, the whole untouched."""

from typing import Any

import pytest
import torch

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.kernels.fsq import FsqLayer

CPU = torch.device("cpu")


@pytest.fixture
def codes(tiny_source: Any) -> tuple[list[FsqLayer], torch.Tensor]:
    tokens = torch.randint(0, 64, (24, 64), generator=torch.Generator().manual_seed(1))
    made = convert(tiny_source, tokens, FsqSettings(12, levels=0, bound="clamp"), CPU)
    return [one.layer for one in made], tokens


def test_whole_codes_stay_and_resident_ones_fit(tiny_source: Any, codes: tuple[list[FsqLayer], torch.Tensor]) -> None:
    layers, tokens = codes
    tiers = divide_codes(tiny_source, layers, tokens, 6, CPU)
    for layer, tier in zip(layers, tiers, strict=True):
        assert tier.whole is layer
        assert tier.grid.resident.nbytes <= 6
        assert sum(tier.grid.resident.bits) + sum(tier.grid.refinement.bits) == sum(layer.grid.bits)


def test_its_own_decoder_serves_the_resident_tier_better(
    tiny_source: Any, codes: tuple[list[FsqLayer], torch.Tensor]
) -> None:
    layers, tokens = codes
    tier = divide_codes(tiny_source, layers, tokens, 6, CPU)[0]
    x = tiny_source.embedding()[tokens].flatten(0, 1)
    x = torch.nn.functional.rms_norm(x, x.shape[-1:], tiny_source.layer(0).attention_norm)
    exact = x @ tiny_source.layer(0).projections["qkv"][-tier.coarse_bias.shape[0] :].T
    resident = tier.coarse.encode(x)
    middle = tier.grid.whole.centres(tier.grid.join(resident, tier.grid.split(tier.whole.encode(x))[1] * 0))
    own = (tier.coarse.decode(resident) - exact).square().sum()
    borrowed = (middle @ tier.whole.decoder.T + tier.whole.decoder_bias - exact).square().sum()
    assert own < borrowed


def test_nothing_left_to_refine(tiny_source: Any, codes: tuple[list[FsqLayer], torch.Tensor]) -> None:
    with pytest.raises(InputError, match="nothing else"):
        divide_codes(tiny_source, codes[0], codes[1], 12, CPU)


def test_codes_are_not_divided_beside_layers_that_have_none(
    tiny_source: Any, codes: tuple[list[FsqLayer], torch.Tensor]
) -> None:
    windowed = tiny_source.with_config(windows=(5, 0))
    with pytest.raises(MisuseError, match="1 of 2 layers that attend to a window"):
        divide_codes(windowed, codes[0][1:], codes[1], 6, CPU)
