"""Codes under a Transformers model: the decoder's numbers, batches with padding, beams, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.prepare.fsq import FsqSettings
from strataflux.client.prepare.fsq_file import load_codes, read_about
from strataflux.client.prepare.fsq_request import FsqRequest
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import open_source
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import ContextFull
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import CodesCache, attach, attach_codes, detach_codes
from tests.unit.client.conftest import TinySource
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf
from tests.unit.client.transformers.conftest import NEAR, Load, tokens

BYTES = 16
GIVEN = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def coded(tmp_path: Path, checkpoint: Path) -> PreparedModel:
    settings = FsqSettings(BYTES, 0, "clamp")
    requests = (FsqRequest("8x", settings), FsqRequest("8x-original", settings, "original"))
    return prepare(open_source(checkpoint), tmp_path / "coded", PrepareSettings(tokens=GIVEN, codes=requests))


@pytest.fixture
def model(load: Load, coded: PreparedModel) -> Any:
    return attach_codes(load(), coded.folder, "8x-original")


def expected(coded: PreparedModel, name: str, source: Any, ids: Tensor) -> Tensor:
    path = coded.codes[name]
    codes = load_codes(path, coded.config, read_about(path).weights_sha256)
    return fsq_logits(DecoderWeights.read(source), codes.layers, ids[0].tolist())[None]


def through_cache(model: Any, ids: Tensor, *chunks: int, **options: Any) -> tuple[Tensor, CodesCache]:
    cache, rows, start = CodesCache(model, ids.shape[1]), [], 0
    with torch.no_grad():
        for count in chunks:
            part = ids[:, start : start + count]
            rows.append(model(input_ids=part, cache=cache, use_cache=True, **options).logits)
            start += count
    return torch.cat(rows, 1), cache


@pytest.mark.parametrize("chunks", [(30,), (1,) * 30, (17, 8, 1, 1, 3)])
def test_prompts_chunks_and_steps_say_what_whole_windows_say(
    chunks: tuple[int, ...], model: Any, coded: PreparedModel, checkpoint: Path
) -> None:
    ids = tokens(30)
    wanted = expected(coded, "8x-original", open_source(checkpoint), ids)
    found, cache = through_cache(model, ids, *chunks)
    torch.testing.assert_close(found, wanted, **NEAR)
    assert cache.nbytes == 30 * 2 * BYTES
    assert (cache.get_seq_length(), cache.get_max_length()) == (30, 30)
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids=ids, use_cache=False).logits, wanted, **NEAR)


def test_codes_over_the_base_need_it_attached(load: Load, coded: PreparedModel) -> None:
    with pytest.raises(InputError, match="attach the prepared model first"):
        attach_codes(load(), coded.folder, "8x")
    low_bit = attach(load(), coded.folder, runtime_dir="/nowhere")
    with pytest.raises(InputError, match="codes made over weights"):
        attach_codes(low_bit, coded.folder, "8x-original")
    ids = tokens(20)
    found, _ = through_cache(attach_codes(low_bit, coded.folder, "8x"), ids, 12, *(1,) * 8)
    torch.testing.assert_close(found, expected(coded, "8x", open_prepared(coded.folder), ids), **NEAR)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])
def test_other_architectures(architecture: str, tmp_path: Path, source: TinySource, load: Load) -> None:
    other = source.with_config(architecture=architecture)
    tensors = hf_tensors(other)
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].half().float()
    folder = tmp_path / architecture
    write_hf(folder, other, tensors, model_type=architecture)
    request = FsqRequest("8x", FsqSettings(BYTES, 0, "clamp"), "original")
    made = prepare(open_source(folder), tmp_path / "made", PrepareSettings(tokens=GIVEN, codes=(request,)))
    model = attach_codes(AutoModelForCausalLM.from_pretrained(folder), made.folder, "8x")
    ids = tokens(20)
    found, _ = through_cache(model, ids, 9, 1, 10)
    torch.testing.assert_close(found, expected(made, "8x", open_source(folder), ids), **NEAR)


KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]


@pytest.mark.parametrize("name", ["ministral", "qwen3"])
def test_layers_with_windows_keep_their_own_cache(name: str, tmp_path: Path, source: TinySource, load: Load) -> None:
    other = source.with_config(architecture="qwen3" if name == "qwen3" else "llama", layers=4)
    told: dict[str, Any] = {"sliding_window": 7, "use_sliding_window": True, "layer_types": KINDS, "model_type": name}
    write_hf(tmp_path / "m", other, hf_tensors(other), architectures=[f"{name.capitalize()}ForCausalLM"], **told)
    request = FsqRequest("8x", FsqSettings(BYTES, 0, "clamp"), "original")
    made = prepare(open_source(tmp_path / "m"), tmp_path / "made", PrepareSettings(tokens=GIVEN, codes=(request,)))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = tokens(20)
    with torch.no_grad():
        before = plain(input_ids=ids).logits
    model = attach_codes(plain, made.folder, "8x")
    wanted = expected(made, "8x", open_source(tmp_path / "m"), ids)
    assert not torch.allclose(before, wanted, **NEAR)
    for chunks in ((20,), (9, 1, 10), (1,) * 20):
        found, cache = through_cache(model, ids, *chunks)
        torch.testing.assert_close(found, wanted, **NEAR)
        assert cache.nbytes == 20 * 2 * BYTES
        assert (cache.is_sliding, cache.get_seq_length()) == ([True, False, True, False], 20)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "num_beams": 3}
    assert torch.equal(model.generate(ids, **options), model.generate(ids, use_cache=False, **options))
    detach_codes(model)
    with torch.no_grad():
        assert torch.equal(plain(input_ids=ids).logits, before)
    plain.config.sliding_window = 9
    with pytest.raises(MisuseError, match=r"windows \(9, 0, 9, 0\); expected \(7, 0, 7, 0\), as when prepared"):
        attach_codes(plain, made.folder, "8x")


def test_padding_on_the_left_changes_nothing(model: Any) -> None:
    ids, short = tokens(24), 15
    alone, _ = through_cache(model, ids[:, :short], 10, *(1,) * 5)
    pad = 24 - short
    rows = torch.cat((ids, torch.cat((torch.zeros(1, pad, dtype=torch.int64), ids[:, :short]), 1)))
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[1, :pad] = 0
    places = (mask.cumsum(1) - 1).clamp(min=0)
    cache, found = CodesCache(model, 24), []
    with torch.no_grad():
        for start, stop in ((0, 19), *((at, at + 1) for at in range(19, 24))):
            outputs = model(
                input_ids=rows[:, start:stop],
                attention_mask=mask[:, :stop],
                position_ids=places[:, start:stop],
                cache=cache,
                use_cache=True,
            )
            found.append(outputs.logits)
    torch.testing.assert_close(torch.cat(found, 1)[1, pad:], alone[0], **NEAR)
    assert cache.nbytes == 2 * 24 * 2 * BYTES


def test_generation_makes_its_own_cache_and_beams_follow_it(model: Any) -> None:
    ids = tokens(12)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    greedy = model.generate(ids, return_dict_in_generate=True, **options)
    kept = getattr(greedy, "cache", None) or greedy.past_key_values
    assert isinstance(kept, CodesCache)
    whole = model.generate(ids, use_cache=False, **options)
    assert torch.equal(greedy.sequences, whole)
    beams = model.generate(ids, num_beams=3, **options)
    assert torch.equal(beams, model.generate(ids, num_beams=3, use_cache=False, **options))


def test_taking_back_and_going_on(model: Any) -> None:
    ids = tokens(20)
    wanted, _ = through_cache(model, ids, 20)
    cache = CodesCache(model, 20)
    with torch.no_grad():
        model(input_ids=torch.cat((ids[:, :10], tokens(5, seed=9)), 1), cache=cache, use_cache=True)
        cache.crop(-5)
        found = model(input_ids=ids[:, 10:], cache=cache, use_cache=True).logits
    torch.testing.assert_close(found, wanted[:, 10:], **NEAR)
    with pytest.raises(MisuseError, match="-21 after 20 tokens"):
        cache.crop(-21)
    with pytest.raises(ContextFull, match="token 21"), torch.no_grad():
        model(input_ids=ids[:, :1], cache=cache, use_cache=True)


def test_detached_models_are_what_they_were(load: Load, coded: PreparedModel) -> None:
    plain, ids = load(), tokens(10)
    with torch.no_grad():
        before = plain(input_ids=ids).logits
        attach_codes(plain, coded.folder, "8x-original")
        assert not torch.equal(plain(input_ids=ids).logits, before)
        names = [name for name, _ in plain.named_modules()]
        with pytest.raises(MisuseError, match="one with codes"):
            attach_codes(plain, coded.folder, "8x-original")
        detach_codes(plain)
        assert torch.equal(plain(input_ids=ids).logits, before)
    assert names == [name for name, _ in plain.named_modules()]
    with pytest.raises(MisuseError, match="one without codes"):
        detach_codes(plain)
    with pytest.raises(MisuseError, match="a model without any"):
        CodesCache(plain, 10)
    with pytest.raises(InputError, match=r"codes 8x-original, 8x.*--fsq 16x"):
        attach_codes(plain, coded.folder, "16x")
