"""Fit a prepared model's refinement values anew, at the budgets that a tuner found, and publish it in place.

What is resident stays as it is, codes and scales: only refinement values and their own scales change. The activations
that they are fitted to are not kept, nor their moments, which would be larger than the model; the calibration text is,
and running it again costs what it cost when the model was prepared, without quantizing. The ladder stays as well.

A store's name covers its values, so the outcome has another one: a daemon that serves the old goes on with it until it
reloads.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.prepare.bases.matrices import CodebookCodes, GroupedCodes, MatrixCodes, NormalFloatCodes
from strataflux.client.prepare.layers import StagedLayers
from strataflux.client.prepare.prepared import CALIBRATION, FSQ, LADDER, Manifest, PreparedModel
from strataflux.client.prepare.publish import Content, publish
from strataflux.client.prepare.refine_stage import RefineStage
from strataflux.client.prepare.refinement import ladder_rungs
from strataflux.client.prepare.settings import FitSettings, PrepareSettings, base_settings
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.work import WorkFolder, open_work
from strataflux.client.prepare.write import fit_layout
from strataflux.client.runtime.models import SETS
from strataflux.client.schemes import STORED_SETS, Scheme, budgets_by_set, require_scheme
from strataflux.kernels.codebook import unpack_planes
from strataflux.kernels.lowbit import unpack_codes

__all__ = ["refit", "refit_steps", "require_same_model"]


def refit_steps(prepared: PreparedModel) -> int:
    """How often :func:`refit` calls ``advance``."""
    return 3 * prepared.config.layers


def refit(
    prepared: PreparedModel,
    source: ModelSource,
    k: int | Mapping[str, int],
    scheme: Scheme | None = None,
    advance: Callable[[], object] = lambda: None,
    *,
    shift: Mapping[str, float] | None = None,
    device: str = "cpu",
    restart: bool = False,
) -> PreparedModel:
    """Fit at exactly ``k``, and put the outcome in the place of ``prepared``, with ``k`` and ``scheme`` its defaults.

    An interrupted run leaves ``prepared`` as it was, and what it finished for the next one with the same arguments.

    Args:
        prepared: a model with fitted refinement; not to be used afterwards.
        source: the unquantized model that it was made of.
        k: budgets for ``scheme``, of all projection sets or of each.
        scheme: how MLPs are refined; None takes the prepared model's.
        advance: called after each layer of each pass, :func:`refit_steps` times in all.
        shift: blocks of fetch lead or lag of each projection set, to be its defaults, too; None leaves them.
        device: where fitting runs.
        restart: drop what an interrupted run finished.

    Raises:
        MisuseError: refinement is not fitted, or the budgets or the scheme cannot be.
        InputError: the calibration is missing, or ``source`` is another model.
        OSError: the disk is full or may not be written to.
    """
    settings, scales = _settings(prepared, k, scheme, device)
    require_same_model(prepared, source)
    work = open_work(prepared.folder, _key(prepared, settings), restart=restart)
    _keep_resident(prepared, work, scales)
    stage = RefineStage(source, settings, work)
    stage.run(advance)
    kept = [Path(LADDER) / f"{rung}.safetensors" for rung in ladder_rungs(prepared)]
    kept += [Path(FSQ) / path.name for path in prepared.codes.values()]
    files = {str(place): prepared.folder / place for place in (*kept, Path(CALIBRATION))}
    layers = StagedLayers(stage)
    manifest = prepared.manifest if shift is None else replace(prepared.manifest, shift=shift)
    published = publish(
        Content(source, layers, lambda digest: _manifest(manifest, settings, digest), kept=files),
        prepared.folder,
        advance,
    )
    work.remove()
    return published


def _settings(
    prepared: PreparedModel, k: int | Mapping[str, int], scheme: Scheme | None, device: str
) -> tuple[PrepareSettings, dict[str, Tensor]]:
    """Settings that make the same model with other budgets, and the scales of inputs."""
    manifest = prepared.manifest
    fit = manifest.identity["layout"].get("fit")
    if fit is None:
        found = "plain residuals, which suit any budget"
        raise MisuseError("refit", found, "fitted refinement", "prepare the model with --fit auto")
    require_scheme(prepared.sets, scheme or manifest.mlp_scheme)
    path = prepared.folder / CALIBRATION
    if not path.is_file():
        raise InputError(path, "no calibration", "the text that values were fitted on", "prepare the model again")
    kept = load_file(path)
    quantizer = manifest.identity["quantizer"]
    base = base_settings(manifest.base, manifest.bits, manifest.group or 64, quantizer.get("guide_groups", 4))
    mlp = next(choice for choice, sets in STORED_SETS.items() if sets == prepared.sets)
    settings = PrepareSettings(
        base=base,
        k=k,
        mlp=mlp,
        scheme=scheme or manifest.mlp_scheme,
        fit=FitSettings(None if fit["plain"] else fit["multipliers"][0]),
        tokens=kept.pop("tokens"),
        device=device,
        origin=manifest.origin,
    )
    return settings, kept


def require_same_model(prepared: PreparedModel, source: ModelSource) -> None:
    """Refuse a model that ``prepared`` was not made of, by its dimensions and embedding.

    Raises:
        InputError: it is another.
    """
    if source.config != prepared.config or not torch.equal(source.embedding().half().float(), prepared.embedding()):
        raise InputError(
            "the unquantized model",
            "other dimensions or embeddings than the prepared model has",
            "the model it was made of",
            "pass that one as --reference",
        )


def _key(prepared: PreparedModel, settings: PrepareSettings) -> str:
    told = {"refit": prepared.manifest.digest, "k": settings.stored_budgets, "scheme": settings.chosen_scheme}
    return hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()


def _keep_resident(prepared: PreparedModel, work: WorkFolder, scales: Mapping[str, Tensor]) -> None:
    for layer in range(prepared.config.layers):
        if not work.has("base", layer):
            names = {name: f"layers.{layer}.{name}.input_scales" for name in SETS}
            own = {name: scales[key] for name, key in names.items() if key in scales}
            work.save_base(layer, {name: _matrix(prepared, layer, name) for name in SETS}, own)


def _matrix(prepared: PreparedModel, layer: int, name: str) -> MatrixCodes:
    packed, bits, group = prepared.packed(layer, name), prepared.manifest.bits, prepared.manifest.group
    if not group:
        return CodebookCodes(unpack_planes(packed["planes"]), packed["codebook"], bits)
    codes = unpack_codes(packed["codes"], bits, prepared.config.set_shape(name)[1])
    if "zeros" not in packed:
        return NormalFloatCodes(codes, packed["scales"], group)
    return GroupedCodes(codes, packed["scales"], packed["zeros"], bits, group)


def _manifest(old: Manifest, settings: PrepareSettings, digest: str) -> Manifest:
    scheme = settings.chosen_scheme
    layout: dict[str, Any] = {**old.identity["layout"], **fit_layout(settings)}
    identity = {**old.identity, "base_weights_sha256": digest, "layout": layout}
    return replace(old, k=budgets_by_set(settings.k, scheme), mlp_scheme=scheme, identity=identity)
