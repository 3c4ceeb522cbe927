"""The streaming safetensors writer, read back by the library itself."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from strataflux.client.prepare.tensor_file import TensorDigest, TensorFileWriter, TensorShape

DECLARED: dict[str, TensorShape] = {
    "a": (torch.float16, (3, 5)),
    "b": (torch.uint8, (7,)),
    "c": (torch.float32, (2, 2)),
}


def tensors() -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        for name, (dtype, shape) in DECLARED.items()
    }


def test_the_library_reads_what_was_written(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "f", DECLARED) as file:
        for name, tensor in tensors().items():
            file.write(name, tensor)
    read = load_file(tmp_path / "f")
    assert read.keys() == DECLARED.keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors().items())


def test_digest_depends_on_names_shapes_and_bytes_only(tmp_path: Path) -> None:
    def digest(entries: dict[str, torch.Tensor]) -> str:
        result = TensorDigest()
        for name, tensor in entries.items():
            result.add(name, tensor)
        return result.hexdigest()

    original = digest(tensors())
    transposed = tensors() | {"c": tensors()["c"].t().contiguous().t()}
    assert digest(transposed) == original
    assert digest(tensors() | {"b": tensors()["b"] + 1}) != original
    assert digest(tensors() | {"b": tensors()["b"].view(7, 1)}) != original
    assert digest({"x" if name == "b" else name: tensor for name, tensor in tensors().items()}) != original


def test_undeclared_and_missing_tensors_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="declared"), TensorFileWriter(tmp_path / "f", DECLARED) as file:
        file.write("b", tensors()["b"])
    with pytest.raises(ValueError, match="1 of 3"), TensorFileWriter(tmp_path / "g", DECLARED) as file:
        file.write("a", tensors()["a"])
