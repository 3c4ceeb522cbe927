"""Write a safetensors file one tensor at a time: shapes are declared first, so nothing is held back in
memory.
"""

import hashlib
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["TensorDigest", "TensorFileWriter", "TensorShape"]

TensorShape = tuple[torch.dtype, tuple[int, ...]]

_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}
# safetensors aligns its data to 8 bytes by padding the header with spaces.
_ALIGNMENT = 8


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...
    def hexdigest(self) -> str: ...


class TensorDigest:
    """SHA-256 over canonical tensors: for each, in order, one line ``name dtype [shape]``, then its bytes.

    The bytes are row-major and little-endian. Nothing of the file around them counts.
    """

    def __init__(self) -> None:
        self._hash: _Hash = hashlib.sha256()

    def add(self, name: str, tensor: Tensor) -> None:
        """Take ``tensor`` in under ``name``."""
        self._hash.update(f"{name} {_NAMES[tensor.dtype]} {list(tensor.shape)}\n".encode())
        self._hash.update(_bytes(tensor))

    def hexdigest(self) -> str:
        """64 hexadecimal digits over everything added so far."""
        return self._hash.hexdigest()


class TensorFileWriter:
    """A context that writes ``tensors`` to ``path`` in the order declared; ``digest`` covers what was
    written. ``metadata`` goes into the header, and not into the digest.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, TensorShape], metadata: Mapping[str, str] | None = None
    ) -> None:
        self.digest = TensorDigest()
        self._expected = list(tensors.items())
        self._written = 0
        self._file = path.open("xb")
        header = _header(tensors, metadata)
        self._file.write(struct.pack("<Q", len(header)) + header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append ``tensor``.

        Raises:
            ValueError: it is not the next one declared, or has another shape or dtype.
        """
        expected = self._expected[self._written] if self._written < len(self._expected) else None
        if expected != (name, (tensor.dtype, tuple(tensor.shape))):
            raise ValueError(f"{name} {tensor.dtype} {tuple(tensor.shape)} written where {expected} was declared")
        self.digest.add(name, tensor)
        self._file.write(_bytes(tensor).data)
        self._written += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None and self._written < len(self._expected):
            self._file.close()
            raise ValueError(f"{self._written} of {len(self._expected)} declared tensors were written")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


def _header(tensors: Mapping[str, TensorShape], metadata: Mapping[str, str] | None) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT)


def _bytes(tensor: Tensor) -> NDArray[np.uint8]:
    return tensor.contiguous().numpy().reshape(-1).view(np.uint8)
