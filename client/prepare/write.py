"""Prepare a model: quantize it, write the resident weights, and store what was lost as refinement bits.

One layer in memory at a time. Bases that need no text are made while they are written; others, and fitted refinement,
go through stages first, which an interrupted run can resume. What is published is published by one rename.
"""

import hashlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.bases.nf4 import Nf4Settings
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.fsq_stage import FsqStage
from strataflux.client.prepare.layers import StagedLayers, StreamedLayers
from strataflux.client.prepare.prepared import MANIFEST, Manifest, PreparedModel
from strataflux.client.prepare.publish import Content, publish
from strataflux.client.prepare.refine_stage import RefineStage
from strataflux.client.prepare.settings import PrepareSettings, check_inputs
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.stages import QuantizeStage
from strataflux.client.prepare.work import WorkFolder, open_work, work_key
from strataflux.client.runtime.models import SETS, ModelConfig
from strataflux.client.schemes import budgets_by_set

__all__ = ["fit_layout", "prepare", "prepare_steps"]


def prepare_steps(config: ModelConfig, settings: PrepareSettings) -> int:
    """How often :func:`prepare` calls ``advance``."""
    written = 2 * config.layers + FsqStage.steps(len(config.whole), settings)
    if settings.streams_once:
        return written
    return QuantizeStage.steps(config.layers, settings) + config.layers + written


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
    if settings.streams_once and not settings.codes:
        return publish(_streamed(source, settings), folder, advance)
    work = open_work(folder, work_key(source, settings), restart=restart)
    content = _streamed(source, settings) if settings.streams_once else _staged(source, settings, work, advance)
    codes = FsqStage(source, settings, work)
    content = replace(content, finish=partial(codes.run, advance=advance))
    prepared = publish(content, folder, advance)
    work.remove()
    return prepared


def _streamed(source: ModelSource, settings: PrepareSettings) -> Content:
    assert isinstance(settings.base, RtnSettings | Nf4Settings), "only these bases need no text"
    layers = StreamedLayers(source, settings.base, settings.sets)
    return Content(source, layers, partial(_manifest, source.config, settings))


def _staged(source: ModelSource, settings: PrepareSettings, work: WorkFolder, advance: Callable[[], object]) -> Content:
    QuantizeStage(source, settings, work).run(advance)
    stage = RefineStage(source, settings, work)
    stage.run(advance)
    describe = partial(_manifest, source.config, settings)
    calibration = _calibration(stage, source.config, settings)
    return Content(source, StagedLayers(stage), describe, settings.ladder, calibration=calibration)


def fit_layout(settings: PrepareSettings) -> dict[str, Any]:
    """What a store's identity says of its fitted values; empty if they are plain.

    They depend on budgets and text, which the resident weights' digest does not cover.
    """
    if settings.fit is None or settings.tokens is None:
        return {}
    text = hashlib.sha256(settings.tokens.contiguous().numpy().tobytes()).hexdigest()
    k = settings.k if isinstance(settings.k, int) else settings.stored_budgets
    return {"fit": settings.fit.to_json() | {"k": k, "text_sha256": text}}


def _manifest(config: ModelConfig, settings: PrepareSettings, digest: str) -> Manifest:
    layout = {"record": "channel", "residual_bits": 4, "residual_scale": "row", "sets": list(settings.sets)}
    identity: dict[str, Any] = {
        "base_weights_sha256": digest,
        "architecture": config.to_json(),
        "quantizer": settings.base.to_json(),
        "layout": layout | fit_layout(settings),
        "format_version": 1,
    }
    scheme = settings.chosen_scheme
    return Manifest(
        config=config,
        base=settings.base.to_json()["name"],
        bits=settings.base.bits,
        group=settings.group,
        k=budgets_by_set(settings.k, scheme),
        shift=dict.fromkeys(SETS, 0.0),
        mlp_scheme=scheme,
        kv=None,
        identity=identity,
        origin=settings.origin,
    )


def _calibration(stage: RefineStage, config: ModelConfig, settings: PrepareSettings) -> dict[str, Tensor]:
    """What fitting anew needs beside the published weights: the text, and the scales folded into them."""
    if settings.fit is None or settings.tokens is None:
        return {}
    scales = {
        f"layers.{index}.{name}.input_scales": scale
        for index in range(config.layers)
        for name, scale in stage.input_scales(index).items()
    }
    return {"tokens": settings.tokens.contiguous(), **scales}
