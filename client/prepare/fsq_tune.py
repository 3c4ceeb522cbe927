"""Finetune the encoders and decoders of a converted model; everything else stays as it is.

The grid is on while training, rounding counted as the identity (the paper's recipe: AdamW, warm-up over a twentieth of
the steps, cosine down to a twentieth of the rate). Ours: the loss is the divergence from the unconverted model instead
of the text's surprise, so a little text goes further; levels are scaled to about one, so that encoder and decoder see
gradients of like size. Quantization runs in float32, products of frozen weights in bfloat16 where the device has it.

The state of a run is one file, written by rename every few steps: an interrupted run goes on from it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm
from torch.utils.checkpoint import checkpoint

from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.rope import rotary_table
from strataflux.kernels.fsq import FsqGrid, FsqLayer, quantize_straight_through

__all__ = ["FsqTuning", "TuneSettings", "random_sequences"]


@dataclass(frozen=True)
class TuneSettings:
    """How long and how fast to train."""

    steps: int
    rate: float = 1e-3
    decay: float = 0.01
    clip: float = 1.0
    save_every: int = 200
    """Steps between states on disk; what an interruption costs."""

    def rate_at(self, step: int) -> float:
        """Warm-up, then cosine."""
        warm = max(1, self.steps // 20)
        if step < warm:
            return self.rate * (step + 1) / warm
        along = (step - warm) / max(1, self.steps - warm)
        return self.rate * (0.05 + 0.95 * (1 + math.cos(math.pi * along)) / 2)


class _Code(nn.Module):
    """One layer's parameters; the decoder works on levels scaled to about one."""

    def __init__(self, layer: FsqLayer) -> None:
        super().__init__()
        self.grid: FsqGrid = layer.grid
        self.scale = layer.grid.levels.to(layer.encoder.device) / 2
        self.encoder = nn.Parameter(layer.encoder.clone())
        self.encoder_bias = nn.Parameter(layer.encoder_bias.clone())
        self.decoder = nn.Parameter(layer.decoder * self.scale)
        self.decoder_bias = nn.Parameter(layer.decoder_bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        """Keys and values [..., m] of inputs [..., hidden]."""
        with torch.autocast(x.device.type, enabled=False):
            z = linear(x.float(), self.encoder, self.encoder_bias)
            scaled = quantize_straight_through(z, self.grid) / self.scale
        return linear(scaled, self.decoder, self.decoder_bias)

    def result(self) -> FsqLayer:
        """The layer as it decodes."""
        decoder = self.decoder.detach() / self.scale
        return FsqLayer(
            self.grid,
            self.encoder.detach().clone(),
            self.encoder_bias.detach().clone(),
            decoder,
            self.decoder_bias.detach().clone(),
        )


class FsqTuning:
    """One run. ``run`` may be interrupted at any time; a new object with the same arguments goes on."""

    def __init__(
        self, weights: DecoderWeights, codes: Sequence[FsqLayer], settings: TuneSettings, state: Path | None = None
    ) -> None:
        """Train ``codes``, one for each layer of ``weights``, on their device; keep the run's state in ``state``."""
        # fixed after construction
        self._weights = weights
        self._settings = settings
        self._state = state
        # changed by training
        self._codes = nn.ModuleList(_Code(code) for code in codes)
        self._optimizer = torch.optim.AdamW(
            self._codes.parameters(), settings.rate, betas=(0.9, 0.95), weight_decay=settings.decay
        )
        self.step = 0
        if state is not None and state.exists():
            self._load(state)

    def run(self, batches: Iterable[Tensor], progress: Callable[[int, float], object] = lambda _, __: None) -> None:
        """Train on ``batches`` of tokens [sequences, n] int64 until all steps are done; ``progress`` is told of each
        step and its divergence in nats a token.
        """
        for tokens in batches:
            if self.step == self._settings.steps:
                break
            loss = self._train(tokens)
            self.step += 1
            progress(self.step, loss)
            if self._state is not None and (self.step % self._settings.save_every == 0):
                self._save(self._state)
        if self._state is not None:
            self._save(self._state)

    def result(self) -> list[FsqLayer]:
        """The layers as trained so far."""
        return [code.result() for code in self._codes]  # type: ignore[operator]

    def _train(self, tokens: Tensor) -> float:
        for group in self._optimizer.param_groups:
            group["lr"] = self._settings.rate_at(self.step)
        with torch.autocast(tokens.device.type, torch.bfloat16):
            with torch.no_grad():
                wanted = torch.log_softmax(self._logits(tokens, converted=False).float(), -1)
            found = torch.log_softmax(self._logits(tokens, converted=True).float(), -1)
        loss = (wanted.exp() * (wanted - found)).sum(-1).mean()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._codes.parameters(), self._settings.clip)
        self._optimizer.step()
        return loss.item()

    def _logits(self, tokens: Tensor, *, converted: bool) -> Tensor:
        weights, config = self._weights, self._weights.config
        cosine, sine = rotary_table(config, tokens.shape[1])
        turns = cosine.to(tokens.device), sine.to(tokens.device)
        hidden = weights.embedding[tokens]
        for index in range(config.layers):
            if converted:
                hidden = checkpoint(self._layer, hidden, index, turns, True, use_reentrant=False)
            else:
                hidden = self._layer(hidden, index, turns, False)
        return linear(rms_norm(hidden, (config.hidden,), weights.norm, config.norm_epsilon), weights.head)

    def _layer(self, hidden: Tensor, index: int, turns: tuple[Tensor, Tensor], converted: bool) -> Tensor:
        config, layer = self._weights.config, self._weights.layers[index]
        queries, code = config.heads * config.head_dim, self._codes[index]

        def project(name: str, x: Tensor) -> Tensor:
            if not converted or name != "qkv":
                return linear(x, layer.projections[name])
            return torch.cat((linear(x, layer.projections["qkv"][:queries]), code(x)), -1)

        return run_block(config, layer, hidden, turns, project)

    def _save(self, path: Path) -> None:
        tensors = {f"code.{name}": tensor for name, tensor in self._codes.state_dict().items()}
        for index, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"optimizer.{index}.{name}": torch.as_tensor(value) for name, value in state.items()}
        partial = path.with_name(f".{path.name}")
        held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        save_file(held, partial)
        partial.replace(path)

    def _load(self, path: Path) -> None:
        tensors = load_file(path)
        self._codes.load_state_dict({n.removeprefix("code."): t for n, t in tensors.items() if n.startswith("code.")})
        state: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            if name.startswith("optimizer."):
                _, index, field = name.split(".")
                state.setdefault(int(index), {})[field] = tensor
        self._optimizer.load_state_dict({"state": state, "param_groups": self._optimizer.state_dict()["param_groups"]})
        self.step = int(max((float(parts["step"]) for parts in state.values()), default=0))


def random_sequences(tokens: Tensor, sequences: int, length: int, seed: int, first: int = 0) -> Iterable[Tensor]:
    """Batches [sequences, length] from random places of ``tokens`` [n]; number ``first`` on, each always the same."""
    number = first
    while True:
        random = torch.Generator().manual_seed(seed * 1_000_003 + number)
        starts = torch.randint(0, tokens.shape[0] - length + 1, (sequences,), generator=random)
        yield tokens[starts[:, None] + torch.arange(length)]
        number += 1
