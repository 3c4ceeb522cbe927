"""Finetune the encoders and decoders of a converted model; everything else stays as it is.

The grid is on while training, rounding counted as the identity (the paper's recipe: AdamW, warm-up over a twentieth of
the steps, cosine down to a twentieth of the rate). Ours:

- the loss is the divergence from the unconverted model instead of the text's surprise, so a little text goes further;
- rates are relative: each row of an encoder and each column of a decoder is trained in units of its size. Directions
  differ in size by orders of magnitude, and one absolute rate that moves the strong ones drowns the weak ones;
- with held-out text, what is kept is the best that any check saw there, the untrained codes included.

Quantization runs in float32, products of frozen weights in bfloat16. What the unconverted model makes of a text is not
computed again each time that it comes (:class:`~strataflux.client.prepare.fsq_tune_text.Course`). The state of a run
is one file, written by rename every minute: an interrupted run goes on from it.
"""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from strataflux.client.prepare.fsq_tune_code import TrainedCode
from strataflux.client.prepare.fsq_tune_loss import head_divergence
from strataflux.client.prepare.fsq_tune_model import FrozenModel, Replaced
from strataflux.client.prepare.fsq_tune_text import Lesson
from strataflux.client.runtime.models import DecoderWeights
from strataflux.kernels.fsq import FsqLayer

__all__ = ["FsqTuning", "TuneSettings", "Tuning"]

Made = TypeVar("Made")


@dataclass(frozen=True)
class TuneSettings:
    """How long and how fast to train: until ``steps`` are done or ``seconds`` are over, whichever is first."""

    steps: int
    rate: float = 3e-3
    """The largest step, relative to the size of what it changes."""
    seconds: float = math.inf
    """Of training, over all runs from one state."""
    decay: float = 0.01
    clip: float = 1.0
    save_seconds: float = 60.0
    """Of training between states on disk; what an interruption costs at most, beside the step it cuts off."""
    check_every: int = 20
    """Steps between looks at held-out text."""
    recompute: bool = True
    """Compute a layer again when its gradients are due instead of keeping what is between."""

    def rate_at(self, along: float) -> float:
        """Warm-up, then cosine; ``along`` is the share of the run that is over."""
        if along < 0.05:
            return self.rate * max(along / 0.05, 0.01)
        return self.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * (along - 0.05) / 0.95)) / 2)


class Tuning(ABC, Generic[Made]):
    """One run. ``run`` may be interrupted at any time; a new object with the same arguments goes on."""

    def __init__(
        self,
        weights: DecoderWeights,
        parts: Iterable[nn.Module],
        settings: TuneSettings,
        state: Path | None = None,
        held_out: Sequence[Tensor] = (),
    ) -> None:
        """Train ``parts``, one for each layer of ``weights`` that attends to all positions, on their device.

        Args:
            weights: the model, all of it frozen.
            parts: where to begin; each has a method ``result``.
            settings: how long and how fast.
            state: the file that keeps the run's state; None keeps none.
            held_out: batches of tokens [sequences, n] that are not trained on; what does best on them is the result.
        """
        # fixed after construction
        self._model = FrozenModel(weights)
        self._settings = settings
        self._state = state
        self._held_out = [Lesson(tokens, self.teach(tokens)) for tokens in held_out]
        # changed by training
        self._parts = nn.ModuleList(parts)
        self._optimizer = torch.optim.AdamW(
            self._parts.parameters(), settings.rate, betas=(0.9, 0.95), weight_decay=settings.decay
        )
        self._best: dict[str, Tensor] = {}
        self.step = 0
        self.seconds = 0.0
        """Spent in training, checks included."""
        self.held_out_loss = math.inf
        """The least loss that a check saw, in nats a token."""
        self.held_out_before = math.inf
        """What the first check saw, before training."""
        if state is not None and state.exists():
            self._load(state)

    @property
    def done(self) -> bool:
        """Whether nothing is left to do."""
        return self.step >= self._settings.steps or self.seconds >= self._settings.seconds

    @torch.no_grad()
    def teach(self, tokens: Tensor) -> Tensor:
        """The unconverted model's states [sequences, n, hidden] of ``tokens`` [sequences, n], for lessons."""
        return self._model.states(tokens)

    def run(self, lessons: Iterable[Lesson], progress: Callable[[int, float], object] = lambda _, __: None) -> None:
        """Train on ``lessons`` until all is done; ``progress`` is told of each step and its loss in nats a token."""
        last, settings, saved = time.monotonic(), self._settings, self.seconds
        if self.step == 0:
            self._check()
            self.held_out_before = self.held_out_loss
        for lesson in lessons:
            if self.done:
                break
            loss = self._train(lesson)
            self.step += 1
            if self.step % settings.check_every == 0:
                self._check()
            self.seconds, last = self.seconds + time.monotonic() - last, time.monotonic()
            progress(self.step, loss)
            if self._state is not None and self.seconds - saved >= settings.save_seconds:
                self._save(self._state)
                saved = self.seconds
        self._check()
        if self._state is not None:
            self._save(self._state)

    def result(self) -> list[Made]:
        """The layers as trained so far; with held-out text the best of them."""
        now = {name: tensor.detach().clone() for name, tensor in self._parts.state_dict().items()}
        self._parts.load_state_dict(self._best or now)
        found: list[Made] = [part.result() for part in self._parts]  # type: ignore[operator]
        self._parts.load_state_dict(now)
        return found

    @torch.no_grad()
    def _check(self) -> None:
        if not self._held_out:
            return
        loss = sum(self._loss(lesson, None).item() for lesson in self._held_out) / len(self._held_out)
        if loss < self.held_out_loss:
            self.held_out_loss = loss
            self._best = {name: tensor.detach().clone() for name, tensor in self._parts.state_dict().items()}

    def _train(self, lesson: Lesson) -> float:
        settings = self._settings
        along = max((self.step + 1) / settings.steps, self.seconds / settings.seconds)
        for group in self._optimizer.param_groups:
            group["lr"] = settings.rate_at(min(1.0, along))
        loss = self._loss(lesson, self.step)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._parts.parameters(), settings.clip)
        self._optimizer.step()
        return loss.item()

    @abstractmethod
    def _loss(self, lesson: Lesson, number: int | None) -> Tensor:
        """The scalar to lower; ``number`` of the step, None where a check asks."""

    def _divergence(self, lesson: Lesson, replaced: Replaced) -> Tensor:
        """From the unconverted model of the one with ``replaced``."""
        wanted = self.teach(lesson.tokens) if lesson.states is None else lesson.states
        found = self._model.states(lesson.tokens, replaced, recompute=self._settings.recompute)
        return head_divergence(found, wanted, self._model.head)

    def _save(self, path: Path) -> None:
        tensors = {f"code.{name}": tensor for name, tensor in self._parts.state_dict().items()}
        tensors |= {f"best.{name}": tensor for name, tensor in self._best.items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        tensors["progress"] = torch.tensor(
            [self.step, self.seconds, self.held_out_loss, self.held_out_before], dtype=torch.float64
        )
        partial = path.with_name(f".{path.name}")
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, partial)
        partial.replace(path)

    def _load(self, path: Path) -> None:
        tensors = load_file(path)
        self._parts.load_state_dict({n.removeprefix("code."): t for n, t in tensors.items() if n.startswith("code.")})
        self._best = {n.removeprefix("best."): t for n, t in tensors.items() if n.startswith("best.")}
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, field = name.split(".")
                state.setdefault(int(index), {})[field] = tensor
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        step, self.seconds, self.held_out_loss, self.held_out_before = tensors["progress"].tolist()
        self.step = int(step)


class FsqTuning(Tuning[FsqLayer]):
    """A run over codes of one tier."""

    def __init__(
        self,
        weights: DecoderWeights,
        codes: Sequence[FsqLayer],
        settings: TuneSettings,
        state: Path | None = None,
        held_out: Sequence[Tensor] = (),
    ) -> None:
        """As :class:`Tuning`, beginning at ``codes``."""
        super().__init__(weights, map(TrainedCode, codes), settings, state, held_out)

    def _loss(self, lesson: Lesson, number: int | None) -> Tensor:  # noqa: ARG002 (every step is like the others)
        return self._divergence(lesson, self._replaced)

    def _replaced(self, index: int, x: Tensor, _: Tensor) -> Tensor:
        made: Tensor = self._parts[index](x)
        return made
