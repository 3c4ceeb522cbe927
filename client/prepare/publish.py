"""Write a prepared model and put it in place, whole.

Two passes over the layers: the first writes the resident weights and knows their digest at its end, which names the
store that the second fills. Everything grows in one hidden folder beside the target and is published by one rename.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from strataflux.client.prepare.chat import CHAT
from strataflux.client.prepare.encode import Encoded
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.layers import LayerMaker
from strataflux.client.prepare.prepared import (
    CALIBRATION,
    LADDER,
    MANIFEST,
    RESIDENT,
    STORE,
    TOKENIZER,
    Manifest,
    PreparedModel,
    open_prepared,
    resident_tensors,
    store_sections,
)
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.tensor_file import TensorFileWriter, TensorShape
from strataflux.client.runtime.models import ModelConfig
from strataflux.client.schemes import BUNDLES
from strataflux.kernels.refine import record_bytes
from strataflux.proto.store_writer import StoreWriter, replace_folder, write_synced

__all__ = ["Content", "publish"]


@dataclass(frozen=True)
class Content:
    """What a prepared model is made of."""

    source: ModelSource
    layers: LayerMaker
    describe: Callable[[str], Manifest]
    """The manifest, given the digest of the resident weights; all but that has to be right in ``describe("")``."""
    ladder: Sequence[int] = ()
    """Budgets whose fitted columns are written beside the store."""
    kept: Mapping[str, Path] = field(default_factory=dict)
    """Files that come along, by their place in the folder; linked where that is possible."""
    calibration: Mapping[str, Tensor] = field(default_factory=dict)
    """What fitting anew needs."""
    finish: Callable[[PreparedModel], object] = lambda _: None
    """Adds to the folder what is made from the finished model, before anybody sees it."""


def publish(content: Content, folder: Path, advance: Callable[[], object]) -> PreparedModel:
    """Write ``content`` into ``folder``, in the place of what is there; ``advance`` is called twice a layer."""
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    partial.mkdir()
    try:
        content.source.tokenizer().save(str(partial / TOKENIZER))
        if (chat := content.source.chat_template()) is not None:
            chat.save(partial / CHAT)
        _bring(content, partial)
        manifest = content.describe(_write_resident(content, partial / RESIDENT, advance))
        write_synced(partial / MANIFEST, json.dumps(manifest.to_json(), indent=2).encode())
        prepared = PreparedModel(partial, manifest)
        _write_store(prepared, content, advance)
        content.finish(prepared)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_prepared(folder)


def _bring(content: Content, folder: Path) -> None:
    if content.calibration:
        save_file(dict(content.calibration), folder / CALIBRATION)
        with (folder / CALIBRATION).open("rb") as file:
            os.fsync(file.fileno())
    for place, path in content.kept.items():
        target = folder / place
        target.parent.mkdir(exist_ok=True)
        try:
            os.link(path, target)
        except OSError:  # a file system without links
            shutil.copyfile(path, target)


def _write_resident(content: Content, path: Path, advance: Callable[[], object]) -> str:
    """Write the resident weights; returns their SHA-256."""
    source, manifest = content.source, content.describe("")
    config, sets = source.config, tuple(manifest.identity["layout"]["sets"])
    with TensorFileWriter(path, resident_tensors(config, manifest.bits, manifest.group, sets, manifest.base)) as file:
        file.write("embedding", _half("embedding", source.embedding()))
        file.write("norm", source.norm())
        if not config.tied_head:
            file.write("head", _half("head", source.head()))
        for index in range(config.layers):
            for name, tensor in content.layers.resident(index).items():
                file.write(f"layers.{index}.{name}", tensor)
            advance()
    return file.digest.hexdigest()


def _write_store(resident: PreparedModel, content: Content, advance: Callable[[], object]) -> None:
    config, sets = resident.config, resident.sets
    shapes = _rung_tensors(config, sets)
    with ExitStack() as files:
        specs = store_sections(config, sets)
        store = files.enter_context(StoreWriter(resident.folder / STORE, resident.manifest.identity, specs))
        if content.ladder:
            (resident.folder / LADDER).mkdir(exist_ok=True)
        paths = {rung: resident.folder / LADDER / f"{rung}.safetensors" for rung in content.ladder}
        rungs = {rung: files.enter_context(TensorFileWriter(path, shapes)) for rung, path in paths.items()}
        for index in range(config.layers):
            records = content.layers.records(index, resident)
            for position, name in enumerate(sets):
                store.write(index * len(sets) + position, 0, records[name].numpy())
            for rung, file in rungs.items():
                _write_rung(file, index, sets, content.layers.rung(index, rung))
            advance()
        store.publish()


def _write_rung(file: TensorFileWriter, layer: int, sets: Sequence[str], encoded: Mapping[str, Encoded]) -> None:
    for name in sets:
        file.write(f"layers.{layer}.{name}.records", encoded[name].records)
        file.write(f"layers.{layer}.{name}.scales", encoded[name].scales)


def _rung_tensors(config: ModelConfig, sets: Sequence[str]) -> dict[str, TensorShape]:
    shapes: dict[str, TensorShape] = {}
    for layer in range(config.layers):
        for name in sets:
            outputs, inputs = config.set_shape("down" if name == BUNDLES else name)
            shapes[f"layers.{layer}.{name}.records"] = torch.uint8, (inputs, record_bytes(outputs))
            shapes[f"layers.{layer}.{name}.scales"] = torch.float32, (outputs,)
    return shapes


def _half(name: str, tensor: Tensor) -> Tensor:
    half = tensor.half()
    if not bool(half.isfinite().all()):
        raise DamagedModel(name, f"values up to {float(tensor.abs().max()):.3g}", "less than 65,504", "check the model")
    return half
