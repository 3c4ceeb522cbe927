"""The next token, chosen on the device as :func:`strataflux.client.runtime.generation.choose_token` does on a host."""

import torch
from torch import Tensor

from strataflux.client.runtime.generation import Sampling

__all__ = ["Sampler"]


class Sampler:
    """Greedy, or drawn with a generator of the device."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        """Seed the generator."""
        self._sampling = sampling
        self.random: torch.Generator | None = None
        """What a captured graph must register; None where nothing is drawn."""
        if sampling.temperature > 0:
            self.random = torch.Generator(device).manual_seed(sampling.seed)

    def choose(self, logits: Tensor, token: Tensor) -> None:
        """Put the next token for ``logits`` [vocabulary] into ``token`` [1] int64. Queued on the current stream."""
        if self.random is None:
            token.copy_(logits.argmax().view(1))
            return
        probability, order = torch.softmax(logits.float() / self._sampling.temperature, -1).sort(descending=True)
        before = probability.cumsum(-1) - probability
        # A token stays if the ones before it do not yet reach top_p, so at least one always stays.
        kept = torch.where(before < self._sampling.top_p, probability, 0.0)
        # The smallest of exponential variables with these rates falls to each token with its probability.
        noise = torch.empty_like(kept).exponential_(generator=self.random)
        token.copy_(order[(kept / noise).argmax()].view(1))
