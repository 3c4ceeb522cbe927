"""What a long preparation has finished, kept beside its target: an interrupted one goes on from here."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from strataflux.client.prepare.bases.matrices import CodebookCodes, GroupedCodes, MatrixCodes, NormalFloatCodes
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.states import StateFolder
from strataflux.client.prepare.tensor_file import TensorDigest
from strataflux.client.runtime.models import SETS, WeightSource

__all__ = ["Matrices", "WorkFolder", "open_work", "work_key"]

Matrices = Mapping[str, MatrixCodes]
"""A layer's quantized matrices by projection set, on the CPU."""


class WorkFolder:
    """Finished layers by stage, each there whole or not at all, and states between layers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def states(self, walk: str) -> StateFolder:
        """The states of a walk over the layers."""
        return StateFolder(self.folder / walk)

    def has(self, stage: str, layer: int) -> bool:
        """Whether ``stage`` finished ``layer``."""
        return self._path(stage, layer).exists()

    def save(self, stage: str, layer: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep what ``stage`` made of ``layer``."""
        path = self._path(stage, layer)
        path.parent.mkdir(exist_ok=True)
        partial = path.with_suffix(".partial")
        save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial)
        partial.replace(path)

    def load(self, stage: str, layer: int) -> dict[str, Tensor]:
        """What :meth:`save` kept."""
        return load_file(self._path(stage, layer))

    def save_base(self, layer: int, matrices: Matrices, scales: Mapping[str, Tensor]) -> None:
        """Keep a layer's quantized matrices and the scales of its inputs, if it has any."""
        tensors = {f"{name}.input_scales": scale for name, scale in scales.items()}
        for name, matrix in matrices.items():
            tensors[f"{name}.codes"] = matrix.codes
            if isinstance(matrix, CodebookCodes):
                tensors[f"{name}.codebook"] = matrix.codebook
                continue
            tensors[f"{name}.scales"] = matrix.scales
            if isinstance(matrix, GroupedCodes):
                tensors[f"{name}.zeros"] = matrix.zeros
        self.save("base", layer, tensors)

    def load_base(self, layer: int, bits: int, group: int) -> tuple[Matrices, dict[str, Tensor]]:
        """What :meth:`save_base` kept."""
        kept = self.load("base", layer)
        scales = {name: kept[f"{name}.input_scales"] for name in SETS if f"{name}.input_scales" in kept}

        def matrix(name: str) -> MatrixCodes:
            codes = kept[f"{name}.codes"]
            if not group:
                return CodebookCodes(codes, kept[f"{name}.codebook"], bits)
            if f"{name}.zeros" not in kept:
                return NormalFloatCodes(codes, kept[f"{name}.scales"], group)
            return GroupedCodes(codes, kept[f"{name}.scales"], kept[f"{name}.zeros"], bits, group)

        return {name: matrix(name) for name in SETS}, scales

    def remove(self) -> None:
        """Everything is published: forget it."""
        shutil.rmtree(self.folder)

    def _path(self, stage: str, layer: int) -> Path:
        return self.folder / stage / f"{layer}.safetensors"


def work_key(source: WeightSource, settings: PrepareSettings) -> str:
    """A name for all that decides the outcome: model, settings, text.

    The model is told by its dimensions, embedding and last norm; two models that share all three are one.
    """
    digest = TensorDigest()
    digest.add("embedding", source.embedding())
    digest.add("norm", source.norm())
    if settings.tokens is not None:
        digest.add("tokens", settings.tokens.contiguous().view(torch.uint8))
    told = {
        "config": source.config.to_json(),
        "base": settings.base.to_json(),
        "k": settings.k if isinstance(settings.k, int) else dict(settings.k),
        "mlp": settings.mlp,
        "scheme": settings.chosen_scheme,
        "ladder": settings.ladder,
        "fit": settings.fit.to_json() if settings.fit else None,
        "codes": [request.to_json() for request in settings.codes],
        "tensors": digest.hexdigest(),
    }
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def open_work(target: Path, key: str, *, restart: bool) -> WorkFolder:
    """The work folder of ``target``: an earlier run's with the same key, unless ``restart``; else a new one.

    What another model, text or setting left is of no use to this one and goes.
    """
    folder = target.with_name(f".{target.name}.work")
    found = folder / "key"
    if restart or not found.is_file() or found.read_text() != key:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        found.write_text(key)
    return WorkFolder(folder)
