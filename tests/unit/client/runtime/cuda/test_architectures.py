"""A model whose architecture or base has no kernels on a device is refused, not run without a part of it."""

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.settings import PrepareSettings, base_settings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.cuda.model import load_prepared
from tests.unit.client.conftest import TinySource


def test_biases_have_no_kernel(tiny_source: TinySource, tmp_path: Path) -> None:
    prepared = prepare(tiny_source.with_config(architecture="qwen2"), tmp_path / "p", PrepareSettings())
    with pytest.raises(MisuseError, match="architecture 'qwen2', with biases; expected one without; use the CPU"):
        load_prepared(prepared, torch.device("cpu"))


def test_normal_floats_have_no_kernel(tiny_source: TinySource, tmp_path: Path) -> None:
    prepared = prepare(tiny_source, tmp_path / "p", PrepareSettings(base_settings("nf4", None, 64)))
    with pytest.raises(MisuseError, match=r"base nf4, whose table .* expected rtn, awq, sqllm or lnq; use the CPU"):
        load_prepared(prepared, torch.device("cpu"))
