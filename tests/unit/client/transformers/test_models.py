"""Every supported architecture: the library's model and the project's say the same, exact and in low bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import open_source
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.transformers import StrataFluxConfig, attach, detach
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.conftest import TinySource
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf
from tests.unit.client.transformers.conftest import NEAR, own_logits, step_logits, tokens

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": ({"tied_head": False}, {}),
    "mistral": ({}, {"architectures": ["MistralForCausalLM"], "sliding_window": None}),
    "ministral": (
        {},
        {"architectures": ["MinistralForCausalLM"], "sliding_window": 24, "layer_types": ["full_attention"] * 2},
    ),
    "qwen2": ({"architecture": "qwen2"}, {}),
    "qwen3": ({"architecture": "qwen3", "head_dim": 32, "heads": 6}, {}),
}


@pytest.mark.parametrize("kind", MODELS)
def test_both_say_the_same(
    tiny_source: TinySource, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, kind: str
) -> None:
    changes, written = MODELS[kind]
    source = tiny_source.with_config(**changes)
    weights = hf_tensors(source)
    for name in weights.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        weights[name] = weights[name].half().float()  # as a prepared model keeps them
    write_hf(tmp_path / "checkpoint", source, weights, model_type=kind, **written)
    exact = open_source(tmp_path / "checkpoint")
    ids = tokens(7)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    ours = forward_text(DecoderWeights.read(exact), ids[0].tolist())
    torch.testing.assert_close(model(input_ids=ids).logits[0], ours, **NEAR)
    prepared = prepare(exact, tmp_path / "prepared", PrepareSettings())
    with FakeDaemon(tmp_path_factory.mktemp("f"), [open_store(prepared.store)], ring_log2=14) as daemon:
        daemon.publish(0, *range(daemon.manifests[0].record_count))
        expected = own_logits(prepared, daemon, ids, k=256)
        runtime = daemon.path.parent
        settings = StrataFluxConfig(prepared.folder, runtime_dir=runtime, k=256)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", quantization_config=settings)
        for low in (attach(model, prepared.folder, runtime_dir=runtime, k=256), loaded):
            torch.testing.assert_close(step_logits(low, ids), expected, **NEAR)
            detach(low)
    torch.testing.assert_close(model(input_ids=ids).logits[0], ours, **NEAR)
