"""Prepare a model: quantize it, write the resident weights, and store what was lost as refinement bits.

One layer in memory at a time. Bases that need no text are made while they are written; others, and fitted refinement,
go through stages first, which an interrupted run can resume. Writing takes two passes over the layers: the first writes
the resident weights and knows their digest at its end, which names the store that the second fills. Everything grows
in one hidden folder beside the target and is published by one rename.
"""

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.chat import CHAT
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.layers import LayerMaker, StagedLayers, StreamedLayers
from strataflux.client.prepare.prepared import (
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
from strataflux.client.prepare.settings import PrepareSettings, check_inputs
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.stages import Stages, stage_steps
from strataflux.client.prepare.tensor_file import TensorFileWriter
from strataflux.client.prepare.work import open_work, work_key
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.kernels.refine import pack_records
from strataflux.proto.store_writer import StoreWriter, replace_folder

__all__ = ["prepare", "prepare_steps"]


def prepare_steps(config: ModelConfig, settings: PrepareSettings) -> int:
    """How often :func:`prepare` calls ``advance``."""
    return 2 * config.layers + (0 if settings.streams_once else stage_steps(config.layers, settings))


def prepare(
    source: ModelSource,
    folder: Path,
    settings: PrepareSettings,
    advance: Callable[[], object] = lambda: None,
    *,
    restart: bool = False,
) -> PreparedModel:
    """Prepare ``source`` into ``folder``, replacing a prepared model that is there.

    Stages that take long leave what they finished in ``.NAME.work`` beside the folder until all is published.

    Args:
        source: the model.
        folder: where the prepared model shall lie; nothing is there before it is whole.
        settings: base, budgets, fitting, text.
        advance: called after each layer of each pass, :func:`prepare_steps` times in all.
        restart: drop what an interrupted run of the same preparation finished.

    Raises:
        InputError: ``folder`` holds something else, or the model is damaged.
        MisuseError: the settings do not fit the model.
        OSError: the disk is full or may not be written to.
    """
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(folder, "files that are no prepared model", "a new folder", "choose another folder")
    check_inputs(source.config, settings)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if settings.streams_once:
        assert isinstance(settings.base, RtnSettings), "only this base needs no text"
        return _write(source, folder, settings, StreamedLayers(source, settings.base), advance)
    work = open_work(folder, work_key(source, settings), restart=restart)
    stages = Stages(source, settings, work)
    stages.run(advance)
    prepared = _write(source, folder, settings, StagedLayers(stages), advance)
    work.remove()
    return prepared


def _write(
    source: ModelSource, folder: Path, settings: PrepareSettings, layers: LayerMaker, advance: Callable[[], object]
) -> PreparedModel:
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    partial.mkdir()
    try:
        source.tokenizer().save(str(partial / TOKENIZER))
        if (chat := source.chat_template()) is not None:
            chat.save(partial / CHAT)
        digest = _write_resident(source, partial / RESIDENT, settings, layers, advance)
        manifest = _manifest(source.config, settings, digest)
        _write_synced(partial / MANIFEST, json.dumps(manifest.to_json(), indent=2))
        _write_store(PreparedModel(partial, manifest), layers, advance)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_prepared(folder)


def _write_resident(
    source: ModelSource, path: Path, settings: PrepareSettings, layers: LayerMaker, advance: Callable[[], object]
) -> str:
    """Write the resident weights; returns their SHA-256."""
    config = source.config
    with TensorFileWriter(path, resident_tensors(config, settings.base.bits, settings.group)) as file:
        file.write("embedding", _half("embedding", source.embedding()))
        file.write("norm", source.norm())
        if not config.tied_head:
            file.write("head", _half("head", source.head()))
        for index in range(config.layers):
            for name, tensor in layers.resident(index).items():
                file.write(f"layers.{index}.{name}", tensor)
            advance()
    return file.digest.hexdigest()


def _write_store(resident: PreparedModel, layers: LayerMaker, advance: Callable[[], object]) -> None:
    config = resident.config
    with StoreWriter(resident.folder / STORE, resident.manifest.identity, store_sections(config)) as store:
        for index in range(config.layers):
            codes = layers.codes(index, resident)
            for position, name in enumerate(SETS):
                store.write(index * len(SETS) + position, 0, pack_records(codes[name]).numpy())
            advance()
        store.publish()


def _manifest(config: ModelConfig, settings: PrepareSettings, digest: str) -> Manifest:
    layout: dict[str, Any] = {"record": "channel", "residual_bits": 4, "residual_scale": "row", "sets": list(SETS)}
    if settings.fit is not None:
        # Fitted values depend on budget and text, which the resident weights' digest does not cover.
        layout["fit"] = settings.fit.to_json() | {"k": settings.k, "text_sha256": _text_digest(settings)}
    identity: dict[str, Any] = {
        "base_weights_sha256": digest,
        "architecture": config.to_json(),
        "quantizer": settings.base.to_json(),
        "layout": layout,
        "format_version": 1,
    }
    return Manifest(
        config=config,
        base=settings.base.to_json()["name"],
        bits=settings.base.bits,
        group=settings.group,
        k=dict.fromkeys(SETS, settings.k),
        shift=dict.fromkeys(SETS, 0.0),
        mlp_scheme="channels",
        kv=None,
        identity=identity,
        origin=settings.origin,
    )


def _text_digest(settings: PrepareSettings) -> str:
    assert settings.tokens is not None, "fitting needs text"
    return hashlib.sha256(settings.tokens.contiguous().numpy().tobytes()).hexdigest()


def _half(name: str, tensor: Tensor) -> Tensor:
    half = tensor.half()
    if not bool(half.isfinite().all()):
        raise DamagedModel(name, f"values up to {float(tensor.abs().max()):.3g}", "less than 65,504", "check the model")
    return half


def _write_synced(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
