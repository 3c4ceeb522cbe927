"""Model configurations: what is refused, and the way through JSON."""

import json
from dataclasses import replace
from typing import Any

import pytest

from strataflux.client.runtime.models import ModelConfig, ModelConfigError


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": 0}, "layers is 0"),
        ({"hidden": 64.0}, "hidden is 64.0"),
        ({"kv_heads": 3}, "multiple of kv_heads = 3"),
        ({"head_dim": 15}, "head_dim is 15"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"norm_epsilon": 0.0}, "norm_epsilon"),
        ({"rope_divisors": (1.0,)}, "nothing or 8"),
        ({"architecture": "gpt2"}, "'llama'"),
    ],
)
def test_contradictions_name_the_field(tiny_source: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        replace(tiny_source.config, **change)


def test_json_round_trip(tiny_source: Any) -> None:
    config = replace(tiny_source.config, rope_divisors=(1.0,) * 8)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    with pytest.raises(ModelConfigError, match="surplus"):
        ModelConfig.from_json(config.to_json() | {"surplus": 1})


def test_shapes_of_projection_sets(tiny_source: Any) -> None:
    shapes = {name: weight.shape for name, weight in tiny_source.layer(0).projections.items()}
    assert shapes == {name: tiny_source.config.set_shape(name) for name in shapes}
