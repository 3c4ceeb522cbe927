"""The Python of docs/INTEGRATING.md, run as it stands there, against a real daemon."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast

from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.fsq import FsqSettings
from strataflux.client.prepare.fsq_request import FsqRequest
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from tests.system.test_demo import tiny_source
from tests.unit.client.prepare.test_sources import hf_tensors, write_hf

pytestmark = pytest.mark.system

PAGE = Path(__file__).parents[2] / "docs" / "INTEGRATING.md"


def section(title: str) -> list[str]:
    """The Python blocks below a heading of the second level."""
    text = PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with what the page names, a daemon that serves it, and the environment that finds that."""
    source = tiny_source().with_config(context=512)
    write_hf(tmp_path / "checkpoint", source, hf_tensors(source), model_type="llama")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=source.tokenizer(), eos_token="<|end|>")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    given = torch.randint(0, 258, (8, 400), generator=torch.Generator().manual_seed(0))
    codes = FsqRequest("16x", FsqSettings(16, 0, "clamp"), "original")
    prepared = prepare(source, tmp_path / "prepared", PrepareSettings(tokens=given, codes=(codes,)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with PrivateDaemon(
        [prepared.store], weight_cache_bytes=64 << 20, kv_cache_bytes=64 << 20, grace_seconds=60.0
    ) as daemon:
        monkeypatch.setenv("STRATAFLUX_RUNTIME_DIR", str(daemon.runtime_dir))
        yield tmp_path


def run(blocks: list[str]) -> dict[str, Any]:
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


def test_a_transformers_model(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(section("Transformers"))
    said = capsys.readouterr().out
    assert said.startswith("The city of")
    assert "state='attached'" in said
    assert names["model"].strataflux.stats().state == "attached"
    assert names["cache"].nbytes == 512 * 2 * 16
    names["detach"](names["model"])


def test_a_loop_of_ones_own(place: Path) -> None:
    first, second = section("A PyTorch loop")
    loop = [node for node in ast.parse(first).body if not isinstance(node, ast.Import | ast.ImportFrom)]
    assert loop[-1].end_lineno is not None
    assert loop[-1].end_lineno - loop[0].lineno + 1 == 15
    names = run([first, second])
    assert len(names["tokens"]) == 33
    stats = names["session"].stats()
    assert stats.lookups > 0
    assert stats.state == "detached"
    assert names["logits"].isfinite().all()
