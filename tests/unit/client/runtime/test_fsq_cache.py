"""A cache of codes against whole windows, the definition of attention to codes, and its formula of bytes."""

from fractions import Fraction
from typing import Any

import pytest
import torch

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.runtime import fsq_cache
from strataflux.client.runtime.decoder import ContextFull
from strataflux.client.runtime.fsq_cache import FsqCache
from strataflux.client.runtime.fsq_decoder import FsqDecoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer
from strataflux.kernels.fsq_attention import FsqHeads, attend_codes

GIVEN = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))
TEXT = GIVEN[0, :40].tolist()


def converted(source: Any, nbytes: int = 16, levels: int = 0) -> tuple[DecoderWeights, list[FsqLayer]]:
    made = convert(source, GIVEN, FsqSettings(nbytes, levels, "clamp"), GIVEN.device)
    return DecoderWeights.read(source), [one.layer for one in made]


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_steps_and_prompts_in_chunks_say_what_whole_windows_say(tiny_source: Any, architecture: str) -> None:
    weights, codes = converted(tiny_source.with_config(architecture=architecture))
    expected = fsq_logits(weights, codes, TEXT)
    steps = FsqDecoder(weights, codes, len(TEXT))
    for token, row in zip(TEXT, expected, strict=True):
        assert torch.allclose(steps.step(token), row, atol=2e-4)
    for chunk in (7, 40, 512):
        decoder = FsqDecoder(weights, codes, len(TEXT))
        assert torch.allclose(decoder.prefill(TEXT[:33], chunk), expected[32], atol=2e-4)
        assert torch.allclose(decoder.prefill(TEXT[33:36], chunk), expected[35], atol=2e-4)
        assert torch.allclose(decoder.step(TEXT[36]), expected[36], atol=2e-4)
        packed = decoder.codes.buffer.layers[1][:37]
        # Sums in another order may move a coordinate that lies on the edge of a cell.
        assert (packed != steps.codes.buffer.layers[1][:37]).float().mean() < 0.01


@pytest.mark.parametrize("levels", [0, 4, 16, 256])
def test_bytes_are_those_of_the_formula(tiny_source: Any, levels: int) -> None:
    weights, codes = converted(tiny_source, nbytes=9, levels=levels)
    decoder = FsqDecoder(weights, codes, 50)
    assert decoder.codes.buffer.nbytes == 50 * 2 * 9
    assert decoder.codes.nbytes == 0
    decoder.prefill(TEXT[:20])
    decoder.step(TEXT[20])
    assert decoder.codes.nbytes == 21 * 2 * 9
    assert not decoder.codes.buffer.layers[1][21:].any()


@pytest.mark.parametrize("norms", [False, True])
def test_attention_is_that_of_the_definition(tiny_source: Any, norms: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsq_cache, "_TILE", 8)
    weights, codes = converted(tiny_source.with_config(architecture="qwen3" if norms else "llama"))
    config, random = weights.config, torch.Generator().manual_seed(3)
    cache = FsqCache(weights, codes, 64)
    cache.take(1, torch.randn(30, config.hidden, generator=random))
    cache.end_fill(29)
    queries = torch.randn(config.heads, config.head_dim, generator=random)
    frequencies = config.rope_theta ** (-torch.arange(8, dtype=torch.float64) / 8)
    heads = FsqHeads.of_layer(codes[1], config.kv_heads, frequencies, weights.layers[1].key_norm, config.norm_epsilon)
    levels = codes[1].grid.unpack(cache.buffer.layers[1][:30])
    expected = attend_codes(queries, levels, torch.arange(30), heads)
    nothing = torch.zeros(config.kv_heads, config.head_dim)
    assert torch.allclose(cache.attend(1, queries, nothing, nothing), expected.flatten().float(), atol=1e-5)


def test_going_back_is_going_on_differently(tiny_source: Any) -> None:
    weights, codes = converted(tiny_source)
    decoder = FsqDecoder(weights, codes, len(TEXT))
    decoder.prefill([*TEXT[:10], 5, 6, 7])
    decoder.reset(10)
    assert torch.allclose(decoder.prefill(TEXT[10:20]), fsq_logits(weights, codes, TEXT[:20])[-1], atol=2e-4)
    with pytest.raises(MisuseError, match="position 21"):
        decoder.reset(21)


def test_what_does_not_fit_is_refused_and_changes_nothing(tiny_source: Any) -> None:
    weights, codes = converted(tiny_source)
    decoder = FsqDecoder(weights, codes, 10)
    decoder.prefill(TEXT[:8])
    with pytest.raises(ContextFull, match=r"3 tokens at position 8.*10"):
        decoder.prefill(TEXT[:3])
    with pytest.raises(MisuseError, match="0 tokens"):
        decoder.prefill([])
    assert decoder.position == 8
    decoder.prefill(TEXT[8:10])
    with pytest.raises(ContextFull, match="position 10"):
        decoder.step(1)
    with pytest.raises(MisuseError, match=r"1 layers.*2"):
        FsqCache(weights, codes[:1], 10)


def test_refinement_of_other_projections_goes_on(tiny_source: Any) -> None:
    weights, codes = converted(tiny_source)

    class Doubling:
        """Doubles what the MLP gives out."""

        def refine(self, layer: int, set_index: int, x: Any, y: Any) -> None:
            if set_index == 3:
                y *= 2

    plain, refined = FsqDecoder(weights, codes, 10), FsqDecoder(weights, codes, 10, Doubling())
    assert float((plain.step(3) - refined.step(3)).abs().max()) > 0.01


def test_the_share_of_bytes_is_the_ratio(tiny_source: Any) -> None:
    weights, codes = converted(tiny_source, nbytes=8, levels=16)
    config = weights.config
    full = 4 * config.kv_heads * config.head_dim * config.layers
    assert Fraction(full * 10, FsqCache(weights, codes, 10).buffer.nbytes) == 16
