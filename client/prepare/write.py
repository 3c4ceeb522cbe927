"""Prepare a model: quantize it, write the resident weights, and store what was lost as refinement bits.

Two passes over the layers, one layer in memory at a time. The first writes the resident weights and knows
their digest at its end; the second reads them back and stores the residual against exactly what was
written. Everything grows in one hidden folder beside the target and is published by one rename.
"""

import json
import os
import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.bases.rtn import RtnSettings, quantize_rtn
from strataflux.client.prepare.errors import DamagedModel
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
from strataflux.client.prepare.residual import residual_codes, residual_scales
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.tensor_file import TensorFileWriter
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.kernels.refine import pack_records
from strataflux.proto.store_writer import StoreWriter, replace_folder

__all__ = ["PrepareSettings", "prepare", "prepare_steps"]


@dataclass(frozen=True)
class PrepareSettings:
    """How a model is prepared."""

    base: RtnSettings = field(default_factory=RtnSettings)
    k: int = 32
    """Default budget of every projection set, in channels per 1,024; can be overridden when decoding."""


def prepare_steps(config: ModelConfig) -> int:
    """How often :func:`prepare` calls ``advance``."""
    return 2 * config.layers


def prepare(
    source: ModelSource, folder: Path, settings: PrepareSettings, advance: Callable[[], object] = lambda: None
) -> PreparedModel:
    """Prepare ``source`` into ``folder``, replacing a prepared model that is there.

    Args:
        source: the model.
        folder: where the prepared model shall lie; nothing is there before it is whole.
        settings: base and budgets.
        advance: called after each layer of each pass, :func:`prepare_steps` times in all.

    Raises:
        InputError: ``folder`` holds something else, or the model is damaged.
        MisuseError: the settings do not fit the model.
        OSError: the disk is full or may not be written to.
    """
    if folder.exists() and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(folder, "files that are no prepared model", "a new folder", "choose another folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{secrets.token_hex(8)}.tmp")
    partial.mkdir()
    try:
        source.tokenizer().save(str(partial / TOKENIZER))
        digest = _write_resident(source, partial / RESIDENT, settings.base, advance)
        manifest = _manifest(source.config, settings, digest)
        _write_synced(partial / MANIFEST, json.dumps(manifest.to_json(), indent=2))
        _write_store(source, PreparedModel(partial, manifest), advance)
        replace_folder(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return open_prepared(folder)


def _write_resident(source: ModelSource, path: Path, base: RtnSettings, advance: Callable[[], object]) -> str:
    """Write the resident weights; returns their SHA-256."""
    config = source.config
    _check_group(config, base)
    with TensorFileWriter(path, resident_tensors(config, base.bits, base.group)) as file:
        file.write("embedding", _half("embedding", source.embedding()))
        file.write("norm", source.norm())
        if not config.tied_head:
            file.write("head", _half("head", source.head()))
        for index in range(config.layers):
            layer = source.layer(index)
            file.write(f"layers.{index}.attention_norm", layer.attention_norm)
            file.write(f"layers.{index}.mlp_norm", layer.mlp_norm)
            for name in SETS:
                _write_projection(file, f"layers.{index}.{name}", layer.projections[name], base)
            advance()
    return file.digest.hexdigest()


def _write_projection(file: TensorFileWriter, name: str, weight: Tensor, base: RtnSettings) -> None:
    low = quantize_rtn(name, weight, base)
    file.write(f"{name}.codes", low.codes)
    file.write(f"{name}.scales", low.scales)
    file.write(f"{name}.zeros", low.zeros)
    file.write(f"{name}.refinement_scales", residual_scales(weight - low.dequantized()))


def _write_store(source: ModelSource, resident: PreparedModel, advance: Callable[[], object]) -> None:
    config = source.config
    with StoreWriter(resident.folder / STORE, resident.manifest.identity, store_sections(config)) as store:
        for index in range(config.layers):
            exact, low = source.layer(index), resident.layer(index)
            for position, name in enumerate(SETS):
                residual = exact.projections[name] - low.projections[name]
                codes = residual_codes(residual, resident.refinement_scales(index, name))
                store.write(index * len(SETS) + position, 0, pack_records(codes).numpy())
            advance()
        store.publish()


def _manifest(config: ModelConfig, settings: PrepareSettings, digest: str) -> Manifest:
    base = settings.base
    identity: dict[str, Any] = {
        "base_weights_sha256": digest,
        "architecture": config.to_json(),
        "quantizer": base.to_json(),
        "layout": {"record": "channel", "residual_bits": 4, "residual_scale": "row", "sets": list(SETS)},
        "format_version": 1,
    }
    return Manifest(
        config=config,
        base="rtn",
        bits=base.bits,
        group=base.group,
        k=dict.fromkeys(SETS, settings.k),
        shift=dict.fromkeys(SETS, 0.0),
        mlp_scheme="channels",
        kv=None,
        identity=identity,
    )


def _check_group(config: ModelConfig, base: RtnSettings) -> None:
    # Before the first byte is written, for all sets at once.
    for name in SETS:
        quantize_rtn(name, torch.zeros(1, config.set_shape(name)[1]), base)


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
