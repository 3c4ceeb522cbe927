"""Hidden states and gradients between layers, on disk: what lets calibration hold one layer at a time, and go on
where it was interrupted.
"""

import os
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

__all__ = ["StateFolder"]


class StateFolder:
    """Named float32 tensors in a folder, each there whole or not at all."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder

    def has(self, name: str) -> bool:
        """Whether ``name`` was saved."""
        return self._path(name).exists()

    def save(self, name: str, tensor: Tensor) -> None:
        """Keep ``tensor``, whatever had the name before."""
        partial = self.folder / f".{name}.npy"
        with partial.open("wb") as file:
            np.save(file, tensor.cpu().numpy())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._path(name))

    def load(self, name: str) -> Tensor:
        """The tensor, mapped from its file; changes to it do not reach the file."""
        return torch.from_numpy(np.load(self._path(name), mmap_mode="c", allow_pickle=False))

    def drop(self, name: str) -> None:
        """Forget ``name`` if it is there."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.npy"
