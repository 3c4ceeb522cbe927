"""``bench decode``'s search for the largest budget, and its rows, with the step run through Triton's interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.bench import decode
from strataflux.client.bench.decode import DecodeSetup, bench_decode
from strataflux.client.errors import MisuseError
from strataflux.client.runtime.cuda import random_model
from strataflux.client.runtime.cuda.linear import LowbitLinear
from strataflux.client.runtime.cuda.random_model import SHAPES, shape_of
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.kernels.topk import selected_count
from tests.fakes.device_model import Expanded

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes lanes that masks discard


@pytest.fixture
def config(tiny_source: Any) -> ModelConfig:
    found: ModelConfig = tiny_source.with_config(layers=1, intermediate=64).config
    return found


@pytest.fixture(autouse=True)
def expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_model, "LowbitLinear", lambda weights: Expanded(LowbitLinear(weights)))


def test_rows_stand_beside_each_other(config: ModelConfig) -> None:
    setup = DecodeSetup(bases=("4-bit",), budgets=(1,), shifts=(0.0,), share=2.0, largest=1, tokens=1, rounds=1)
    told: list[dict[str, Any]] = []
    rows = bench_decode(config, setup, torch.device("cpu"), told.append)
    assert told == rows
    bf16, base, refined, largest = rows
    assert [row["name"] for row in rows] == ["bf16", "4-bit", "4-bit, refined", "4-bit, largest k"]
    assert largest["k"] == 0  # no step is twice as fast with refinement
    assert bf16["of_bf16"] == 1
    assert (base["bits"], base["group"]) == (4, 128)
    sizes = {name: selected_count(1, config.set_shape(name)[1]) * config.set_shape(name)[0] / 2 for name in SETS}
    assert refined["record_bytes"] == sum(sizes.values())
    assert refined["access"] == "this processor"


@pytest.mark.parametrize("fitting", [0, 1, 5, 8, 23, 64])
def test_the_largest_budget_that_keeps_the_share_is_found(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, fitting: int
) -> None:
    """With a clock that says: budgets up to ``fitting`` cost nothing, others half of the tokens a second."""
    asked: list[int] = []

    def timed(_bench: Any, _model: Any, block: Any, budget: Any) -> dict[str, float]:
        k = budget.k["qkv"]
        if block is not None:
            asked.append(k)
        return {"tokens_per_second": 100.0 if k <= fitting else 50.0, "milliseconds": 0.0}

    monkeypatch.setattr(decode._Bench, "_time", timed)
    setup = DecodeSetup(bases=("4-bit",), baselines=False, budgets=(8,), shifts=(1.0,))
    largest = bench_decode(config, setup, torch.device("cpu"))[-1]
    assert (largest["k"], largest["shift"]) == (fitting, 1.0)
    assert len(asked) == len(set(asked)) <= 12


def test_shapes_are_those_of_the_models() -> None:
    assert SHAPES["llama-3.1-8b"].set_shape("gate_up") == (28672, 4096)
    assert SHAPES["qwen3-8b"].head_norms
    weights = sum(a * b for a, b in map(SHAPES["llama-3.1-8b"].set_shape, SETS)) * 32
    assert weights + 2 * 128256 * 4096 == pytest.approx(8.03e9, rel=0.001)
    with pytest.raises(MisuseError, match="qwen3-8b"):
        shape_of("gpt")


def test_a_random_model_of_any_base_can_be_made(config: ModelConfig) -> None:
    for base, (bits, group) in random_model.BASES.items():
        made = random_model.random_model(replace(config, hidden=256, heads=8), base, torch.device("cpu"))
        rows, inputs = config.set_shape("down")[0], config.intermediate
        assert made.layers[0].linears[3].inputs == inputs, (base, bits, group, rows)
        assert made.head is made.embedding
