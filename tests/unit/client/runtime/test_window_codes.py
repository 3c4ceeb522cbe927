"""Codes for a model some of whose layers attend to a window: those stay as they are, and count for what they keep."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.evaluate.methods.base import Making, full_bytes, parse_method
from strataflux.client.evaluate.methods.registry import make_method
from strataflux.client.evaluate.methods.sequences import Sequences
from strataflux.client.fsq_blocks import FsqBlocks
from strataflux.client.fsq_tiers import TieredFsqCache
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_file import FsqAbout, load_codes, save_codes
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.refined import DeviceDecoder
from strataflux.client.runtime.fsq_cache import FsqCache
from strataflux.client.runtime.fsq_decoder import FsqDecoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer
from tests.fakes.records import LocalRecords

LENGTH = 40


def converted(source: Any, windows: tuple[int, ...]) -> tuple[DecoderWeights, list[FsqLayer]]:
    given = torch.randint(0, source.config.vocabulary, (24, 60), generator=torch.Generator().manual_seed(0))
    over = source.with_config(layers=3, windows=windows)
    made = convert(over, given, FsqSettings(16, 0, "clamp"), given.device)
    return DecoderWeights.read(over), [one.layer for one in made]


@pytest.mark.parametrize(("windows", "coded"), [((7, 0, 5), [1]), ((0, 7, 0), [0, 2])])
def test_layers_with_windows_keep_keys_and_values_beside_codes(
    tiny_source: Any, windows: tuple[int, ...], coded: list[int]
) -> None:
    weights, codes = converted(tiny_source, windows)
    assert len(codes) == len(coded)
    tokens = [7 * n % weights.config.vocabulary for n in range(LENGTH)]
    expected = fsq_logits(weights, codes, tokens)
    steps = FsqDecoder(weights, codes, LENGTH)
    for token, row in zip(tokens, expected, strict=True):
        assert torch.allclose(steps.step(token), row, atol=2e-4)
    for chunk in (3, 40):
        decoder = FsqDecoder(weights, codes, LENGTH)
        assert torch.allclose(decoder.prefill(tokens[:21], chunk), expected[20], atol=2e-4)
        assert torch.allclose(decoder.prefill(tokens[21:33], chunk), expected[32], atol=2e-4)
        assert torch.allclose(decoder.step(tokens[33]), expected[33], atol=2e-4)
        decoder.reset(33)
        assert torch.allclose(decoder.step(tokens[33]), expected[33], atol=2e-4)
    # To the byte: codes in coded layers, and float32 of what is in the windows of the others.
    config = weights.config
    assert steps.codes.buffer.nbytes == steps.codes.nbytes == LENGTH * 16 * len(coded)
    a_position = 2 * config.kv_heads * config.head_dim * 4
    assert steps.codes.exact_nbytes == sum(windows) * a_position
    assert sum(layer.nbytes for layer in steps.codes.exact.values()) == sum(windows) * a_position


def test_codes_of_other_layers_are_refused(tiny_source: Any) -> None:
    weights, codes = converted(tiny_source, (7, 0, 5))
    with pytest.raises(MisuseError, match=r"codes: found 3 layers; expected 1, the model's that attend to all"):
        FsqCache(weights, codes * 3, 10)
    with pytest.raises(InputError, match=r"--fsq: found 3 layers with windows of at most 9 .* windows are bounded"):
        converted(tiny_source, (7, 9, 5))


def test_the_method_counts_codes_and_windows(tiny_source: Any) -> None:
    weights, codes = converted(tiny_source, (7, 0, 5))
    config, making = weights.config, Making(weights, codes=codes)
    spec = parse_method(f"fsq:{full_bytes(config) / 16:g}x")
    method = make_method(spec, making)
    assert method.nbytes(3, 20) == 23 * 16 + 12 * full_bytes(config)
    assert method.nbytes(0, 6) == 6 * 16 + (6 + 5) * full_bytes(config)
    assert make_method(parse_method("exact"), making).nbytes(3, 20) == (23 + 12) * full_bytes(config)
    tokens = [7 * n % config.vocabulary for n in range(LENGTH)]
    sequences = Sequences(weights, method, LENGTH)
    first, rest = (torch.tensor(part)[None] for part in (tokens[:20], tokens[20:]))
    expected = fsq_logits(weights, codes, tokens)
    assert torch.allclose(sequences.prefill(first), expected[19:20], atol=2e-4)
    assert torch.allclose(sequences.decode(rest)[0], expected[20:], atol=2e-4)
    with pytest.raises(MisuseError, match=r"kivi:2: found 2 of 3 layers that attend to a window .* choose exact, fsq"):
        make_method(parse_method("kivi:2"), making)


def test_what_has_no_place_for_windows_says_so(tiny_source: Any) -> None:
    weights, _ = converted(tiny_source, (7, 0, 5))
    records = LocalRecords(0, 1, 1)
    blocks = KvBlocks(weights.config, KvOptions(2, 2).form(16), 1)
    with pytest.raises(MisuseError, match="--kv: found layer 0, which attends to 7 positions"):
        RefinedKVCache(blocks, 8)
    device = SimpleNamespace(config=weights.config)
    with pytest.raises(MisuseError, match="--kv: found layer 0, which attends to 7 positions"):
        DeviceDecoder(device, device, context=8, budget=Budget.common(0), kv=KvOptions(2, 2))  # type: ignore[arg-type]
    with pytest.raises(MisuseError, match="codes in two tiers: found 2 of 3 layers"):
        TieredFsqCache(weights, [], 8, Fraction(1), FsqBlocks([1], 1, 8, records), records)


def test_a_file_has_codes_of_coded_layers_only(tiny_source: Any, tmp_path: Path) -> None:
    weights, codes = converted(tiny_source, (0, 7, 0))
    path, about = tmp_path / "8x.safetensors", FsqAbout(16, 0, "clamp", "base", "0" * 64)
    save_codes(path, codes, about, weights.config.whole)
    read = load_codes(path, weights.config, "0" * 64)
    assert [torch.equal(a.encoder, b.encoder) for a, b in zip(read.layers, codes, strict=True)] == [True, True]
    assert read.nbytes == 32
    for windows in ((), (7, 0, 0), (0, 7, 7)):
        other = tiny_source.with_config(layers=3, windows=windows).config
        with pytest.raises((InputError, KeyError), match=r"layers of |layers\.1"):
            load_codes(path, other, "0" * 64)
