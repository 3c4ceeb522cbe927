"""Run a model with keys and values kept in some way: prompts, the tokens after them, and what is made of them."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.dense import score_logits
from strataflux.client.evaluate.methods.base import Held, KvMethod, Rebuild
from strataflux.client.evaluate.scoring import Reference, Score
from strataflux.client.runtime.block import Project, multiply, run_block
from strataflux.client.runtime.models import DecoderWeights, LayerWeights, ModelConfig
from strataflux.client.runtime.rope import rotary_table

__all__ = ["Sequences", "after_prompt", "generate", "project_rebuilt", "score_method"]


def project_rebuilt(config: ModelConfig, layer: LayerWeights, rebuild: Rebuild) -> Project:
    """What ``layer`` multiplies by with its keys and values out of ``rebuild``."""
    queries = config.heads * config.head_dim

    def project(name: str, x: Tensor) -> Tensor:
        if name != "qkv":
            return linear(x, layer.projections[name])
        return torch.cat((linear(x, layer.projections[name][:queries]), rebuild(x)), -1)

    return project


class Sequences:
    """A batch of sequences of one length. Not safe for use from two threads.

    First :meth:`prefill`, unless there is no prompt; then :meth:`decode`, as often as needed.
    """

    def __init__(self, weights: DecoderWeights, method: KvMethod, context: int) -> None:
        """No token is taken yet; there is room for ``context``."""
        config, device = weights.config, weights.embedding.device
        # fixed after construction
        self._weights = weights
        self._turns = tuple(table.to(device) for table in rotary_table(config, context))
        self._context = context
        self._projects = [
            project_rebuilt(config, layer, method.rebuild[index]) if method.rebuild else partial(multiply, layer)
            for index, layer in enumerate(weights.layers)
        ]
        # changed by prefill and decode
        self._held = [method.hold(index) for index in range(config.layers)]
        self.length = 0

    @torch.inference_mode()
    def prefill(self, tokens: Tensor) -> Tensor:
        """Logits [sequences, vocabulary] after prompts [sequences, n] int64.

        Raises:
            MisuseError: tokens were taken before, or there is no room.
        """
        if self.length:
            raise MisuseError("prefill", f"position {self.length}", "position 0", "start new sequences")
        return self._head(self._run(tokens, lambda held: held.prefill)[:, -1])

    @torch.inference_mode()
    def decode(self, tokens: Tensor) -> Tensor:
        """Logits [sequences, m, vocabulary] after each of ``tokens`` [sequences, m] int64, which come next.

        Raises:
            MisuseError: there is no room.
        """
        return self._head(self._run(tokens, lambda held: held.decode))

    def _run(self, tokens: Tensor, take: Callable[[Held], Callable[[Tensor, Tensor, Tensor], Tensor]]) -> Tensor:
        weights, end = self._weights, self.length + tokens.shape[1]
        if end > self._context:
            raise MisuseError("sequences", f"{end} tokens", f"at most {self._context}", "make room for more")
        cosine, sine = (table[self.length : end] for table in self._turns)
        hidden = weights.embedding[tokens.to(weights.embedding.device)]
        for layer, project, held in zip(weights.layers, self._projects, self._held, strict=True):
            hidden = run_block(weights.config, layer, hidden, (cosine, sine), project, take(held))
        self.length = end
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        weights, config = self._weights, self._weights.config
        return linear(rms_norm(hidden, (config.hidden,), weights.norm, config.norm_epsilon), weights.head)


def after_prompt(reference: Reference, prompt: int) -> Reference:
    """What a reference says about the tokens that come after the first ``prompt``; at least two are left."""
    score = reference.score
    parts = (part[prompt:] for part in (score.surprise, score.divergence, score.divergence_top))
    return Reference(reference.tokens[prompt:], reference.log_probabilities[prompt:], Score(*parts))


def score_method(weights: DecoderWeights, method: KvMethod, reference: Reference, prompt: int = 0) -> Score:
    """Score what comes after the first ``prompt`` tokens of the reference's text, which are prefilled.

    A prompt changes nothing for methods whose prompts see what later positions see.
    """
    tokens = torch.tensor(reference.tokens[:-1])[None]
    sequences = Sequences(weights, method, tokens.shape[1])
    if prompt:
        sequences.prefill(tokens[:, :prompt])
    return score_logits(sequences.decode(tokens[:, prompt:])[0], after_prompt(reference, prompt))


@torch.inference_mode()
def generate(
    weights: DecoderWeights, method: KvMethod, prompts: Tensor, count: int, stops: Sequence[int] = ()
) -> list[list[int]]:
    """The likeliest continuation of each prompt [sequences, n], at most ``count`` tokens, without the token of
    ``stops`` that ended it.
    """
    sequences = Sequences(weights, method, prompts.shape[1] + count)
    logits, chosen = sequences.prefill(prompts), list[Tensor]()
    running = torch.ones(prompts.shape[0], dtype=torch.bool, device=logits.device)
    ends = torch.tensor(list(stops), device=logits.device)
    while len(chosen) < count:
        chosen.append(logits.argmax(-1))
        running &= ~torch.isin(chosen[-1], ends)
        if len(chosen) == count or not running.any():
            break
        logits = sequences.decode(chosen[-1][:, None])[:, 0]
    return [_until(row, set(stops)) for row in torch.stack(chosen, 1).tolist()]


def _until(tokens: Sequence[int], stops: set[int]) -> list[int]:
    ended = next((place for place, token in enumerate(tokens) if token in stops), len(tokens))
    return list(tokens[:ended])
