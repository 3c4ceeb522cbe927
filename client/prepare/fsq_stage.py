"""The stage of a preparation that makes discrete codes; it comes last, over weights that are final.

Each converted layer and the state of training are kept in the work folder; what is there is not made again.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.fsq import Conversion, convert, full_bytes
from strataflux.client.prepare.fsq_file import FsqAbout, save_codes, weights_digest
from strataflux.client.prepare.fsq_request import FsqRequest, FsqTraining
from strataflux.client.prepare.fsq_tiers import divide_codes
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings, Tuning
from strataflux.client.prepare.fsq_tune_model import FrozenModel, write_more
from strataflux.client.prepare.fsq_tune_text import Course, hold_out, overlapping
from strataflux.client.prepare.fsq_tune_tiers import TierTuning
from strataflux.client.prepare.prepared import FSQ, PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.work import WorkFolder
from strataflux.client.runtime.models import DecoderWeights, WeightSource
from strataflux.kernels.fsq import FsqGrid, FsqLayer
from strataflux.kernels.fsq_nested import FsqTier

__all__ = ["FsqStage"]

_HELD_OUT = 8
"""Sequences that are not trained on."""
_TRAINING_STEPS = 100
"""Calls of ``advance`` that training is told by."""
_PROMPT = 128
"""Tokens of the text, at most a quarter of a sequence, that one of the model's own begins with."""
_OWN_BYTES = 8 << 30
"""Of keys and values while the model writes, if there is room for as much of what is kept."""
_KEPT_BYTES = 2 << 30
"""Of what the unconverted model makes of the text, in main memory; on a GPU a quarter of its memory."""
_TIMES = 2
"""Sequences that a token of the training text is in."""
_PARTS = ("encoder", "encoder_bias", "decoder", "decoder_bias")


class FsqStage:
    """Makes the codes of one preparation."""

    def __init__(self, source: ModelSource, settings: PrepareSettings, work: WorkFolder) -> None:
        self._source, self._settings, self._work = source, settings, work
        self._device = torch.device(settings.device)

    @staticmethod
    def steps(layers: int, settings: PrepareSettings) -> int:
        """How often :meth:`run` calls ``advance`` for a model of so many ``layers`` that get codes."""
        trained = sum(request.training is not None for request in settings.codes)
        return len(settings.codes) * layers + trained * _TRAINING_STEPS

    def run(self, prepared: PreparedModel, advance: Callable[[], object]) -> None:
        """Make all codes and write them into the folder of ``prepared``, which is not published yet.

        Raises:
            InputError: there is too little text.
        """
        for request in self._settings.codes:
            source = prepared if request.weights == "base" else self._source
            made = self._convert(request, source, advance)
            converted = [one.layer for one in made]
            layers: Sequence[FsqLayer] | Sequence[FsqTier] = converted
            about = _about(request, made, weights_digest(source))
            if request.training is not None:
                layers, about = self._trained(request, request.training, source, converted, about, advance)
            elif request.resident:
                layers = self._divided(request, source, converted)
            save_codes(prepared.folder / FSQ / f"{request.name}.safetensors", layers, about, source.config.whole)

    def _convert(
        self, request: FsqRequest, source: WeightSource, advance: Callable[[], object]
    ) -> Sequence[Conversion]:
        stage, layers = f"fsq-{request.name}", source.config.whole
        if layers and all(self._work.has(stage, index) for index in layers):
            for _ in layers:
                advance()
            return [self._kept(request, index) for index in layers]

        def told(index: int, made: Conversion) -> None:
            if not self._work.has(stage, index):
                self._keep(stage, index, made)
            advance()

        def kept(index: int) -> Conversion | None:
            return self._kept(request, index) if self._work.has(stage, index) else None

        tokens = self._settings.tokens
        assert tokens is not None, "settings with codes have text"
        return convert(source, tokens, request.settings, self._device, told, kept)

    def _keep(self, stage: str, index: int, made: Conversion) -> None:
        tensors = {name: getattr(made.layer, name) for name in _PARTS}
        tensors["bits"] = torch.tensor(made.layer.grid.bits)
        tensors["errors"] = torch.tensor([made.key_error, made.value_error, made.rank], dtype=torch.float64)
        self._work.save(stage, index, tensors)

    def _kept(self, request: FsqRequest, index: int) -> Conversion:
        held = self._work.load(f"fsq-{request.name}", index)
        grid = FsqGrid(tuple(held["bits"].tolist()), request.settings.bound)
        key_error, value_error, rank = held["errors"].tolist()
        layer = FsqLayer(grid, *(held[name] for name in _PARTS)).to(self._device)
        return Conversion(layer, key_error, value_error, int(rank))

    def _divided(self, request: FsqRequest, source: WeightSource, layers: Sequence[FsqLayer]) -> list[FsqTier]:
        tokens = self._settings.tokens
        assert tokens is not None, "settings with codes have text"
        return divide_codes(source, layers, tokens, request.resident, self._device)

    def _trained(
        self,
        request: FsqRequest,
        training: FsqTraining,
        source: WeightSource,
        layers: Sequence[FsqLayer],
        about: FsqAbout,
        advance: Callable[[], object],
    ) -> tuple[Sequence[FsqLayer] | Sequence[FsqTier], FsqAbout]:
        """Codes trained, of two tiers half the time as one; and what is said of them."""
        weights = DecoderWeights.read(source).to(self._device)
        text, held_out = _split(training, weights)
        parts = 2 if request.resident else 1
        settings = TuneSettings(training.steps // parts, training.rate, training.seconds / parts)
        state = self._work.folder / f"fsq-{request.name}.training"
        tuning = FsqTuning(weights, layers, settings, state, held_out)
        self._run(tuning, settings, text, _TRAINING_STEPS // parts, advance)
        if not request.resident:
            return tuning.result(), _told_of(about, tuning, tuning.seconds)
        tiers = self._divided(request, source, tuning.result())
        second = TierTuning(weights, tiers, settings, state.with_suffix(".tiers"), held_out)
        self._run(second, settings, text, _TRAINING_STEPS // parts, advance)
        return second.result(), _told_of(about, second, tuning.seconds + second.seconds)

    def _run(
        self, tuning: Tuning[Any], settings: TuneSettings, sequences: Tensor, steps: int, advance: Callable[[], object]
    ) -> None:
        told, batch = 0, min(16 if self._device.type == "cuda" else 2, sequences.shape[0])

        def progress(step: int, _: float) -> None:
            nonlocal told
            done = max(step / settings.steps, tuning.seconds / settings.seconds)
            while told < min(1.0, done) * steps:
                told += 1
                advance()

        course = Course(sequences, tuning.teach, self._source.config.hidden, _kept_bytes(self._device))
        tuning.run(course.batches(batch, 0, first=tuning.step), progress)
        for _ in range(told, steps):
            advance()


def _kept_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else _KEPT_BYTES


def _split(training: FsqTraining, weights: DecoderWeights) -> tuple[Tensor, list[Tensor]]:
    """Sequences to train on [count, length], and batches of what is held out."""
    least = 2 * _HELD_OUT * training.length
    if training.tokens.numel() < least:
        found = f"{training.tokens.numel()} tokens"
        raise InputError("training text", found, f"at least {least}", "give a longer --text")
    length, config = training.length, weights.config
    tokens, held = hold_out(training.tokens.to(weights.embedding.device), _HELD_OUT, length)
    sequences = overlapping(tokens, length, _TIMES)
    if training.own:
        room = min(_OWN_BYTES, _kept_bytes(weights.embedding.device))
        at_once = max(1, room // (config.layers * full_bytes(config) * length))
        count = -(-training.own // length)
        own = write_more(FrozenModel(weights), tokens, count, length, min(_PROMPT, length // 4), at_once)
        sequences = torch.cat((sequences, own))
    return sequences, list(held.split(4))  # type: ignore[no-untyped-call]


def _about(request: FsqRequest, made: Sequence[Conversion], digest: str) -> FsqAbout:
    settings = request.settings
    return FsqAbout(
        settings.nbytes,
        settings.levels,
        settings.bound,
        request.weights,
        digest,
        rank=min(one.rank for one in made),
        key_errors=tuple(one.key_error for one in made),
        value_errors=tuple(one.value_error for one in made),
        resident_nbytes=request.resident,
    )


def _told_of(about: FsqAbout, tuning: Tuning[Any], seconds: float) -> FsqAbout:
    return replace(about, tuned_seconds=seconds, held_out=(tuning.held_out_before, tuning.held_out_loss))
