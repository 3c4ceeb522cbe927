"""Which layers attend to a window, as published models say it."""

from pathlib import Path
from typing import Any

import pytest

from strataflux.client.prepare.errors import DamagedModel, UnsupportedModel
from strataflux.client.prepare.source import open_source
from strataflux.client.runtime.models import ModelConfigError
from tests.unit.client.prepare.test_sources import assert_same, gguf_tensors, hf_tensors, write_gguf, write_hf

FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("name", "told", "windows"),
    [
        ("Mistral", {"sliding_window": None}, ()),
        ("Mistral", {"sliding_window": 24}, (24, 24)),
        ("Mistral", {"sliding_window": 24, "layer_types": [SLIDING, SLIDING]}, (24, 24)),
        ("Mistral", {}, (4096, 4096)),
        ("Ministral", {"sliding_window": 24, "layer_types": [SLIDING, FULL]}, (24, 0)),
        ("Ministral", {"sliding_window": 24}, (24, 24)),
        ("Llama", {"sliding_window": 24}, ()),
        ("Qwen3", {"sliding_window": 24, "use_sliding_window": False}, ()),
        ("Qwen3", {"sliding_window": 24, "use_sliding_window": True}, ()),
        ("Qwen3", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 1}, (0, 24)),
        ("Qwen3", {"use_sliding_window": True, "layer_types": [SLIDING, FULL]}, (4096, 0)),
    ],
)
def test_windows_are_read_as_transformers_reads_them(
    tmp_path: Path, tiny_source: Any, name: str, told: dict[str, Any], windows: tuple[int, ...]
) -> None:
    source = tiny_source.with_config(architecture="qwen3" if name == "Qwen3" else "llama")
    write_hf(tmp_path / "m", source, hf_tensors(source), architectures=[f"{name}ForCausalLM"], **told)
    read = open_source(tmp_path / "m")
    assert read.config.windows == windows
    assert read.config.context == source.config.context
    assert [read.layer(index).window for index in range(2)] == list(windows or (0, 0))
    assert_same(read, source)


@pytest.mark.parametrize(
    ("name", "told", "found"),
    [
        ("Mistral", {"sliding_window": "24"}, "sliding_window = '24'"),
        ("Ministral", {"sliding_window": -1}, "sliding_window = -1"),
        ("Qwen3", {"use_sliding_window": True, "max_window_layers": None}, "max_window_layers = None"),
        ("Mistral", {"num_hidden_layers": "2"}, "num_hidden_layers = '2'"),
        ("Qwen3", {"use_sliding_window": True, "layer_types": 2}, "layer_types = 2"),
    ],
)
def test_windows_of_other_kinds_are_named(
    tmp_path: Path, tiny_source: Any, name: str, told: dict[str, Any], found: str
) -> None:
    source = tiny_source.with_config(architecture="qwen3" if name == "Qwen3" else "llama")
    write_hf(tmp_path / "m", source, hf_tensors(source), architectures=[f"{name}ForCausalLM"], **told)
    with pytest.raises(DamagedModel, match=found):
        _ = open_source(tmp_path / "m").config


@pytest.mark.parametrize("windows", [(4.5, 0), ("4", 0), (0, 0), (True, 0), (-1, 4), (4,)])
def test_windows_that_are_none_are_refused(tiny_source: Any, windows: tuple[Any, ...]) -> None:
    with pytest.raises(ModelConfigError, match="windows"):
        tiny_source.with_config(windows=windows)


def test_gguf_with_a_window_is_refused_unless_the_context_is_within(tmp_path: Path, tiny_source: Any) -> None:
    context = tiny_source.config.context
    write_gguf(tmp_path / "m.gguf", tiny_source, gguf_tensors(tiny_source), window=context - 1)
    with pytest.raises(UnsupportedModel, match=r"llama\.attention\.sliding_window = 63 of 64 positions.*Hugging Face"):
        _ = open_source(tmp_path / "m.gguf").config
    write_gguf(tmp_path / "whole.gguf", tiny_source, gguf_tensors(tiny_source), window=context)
    read = open_source(tmp_path / "whole.gguf").config
    assert (read.windows, read.context) == ((), context)
