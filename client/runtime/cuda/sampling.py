"""The next token, chosen on the device as :func:`strataflux.client.runtime.generation.choose_token` does on a host."""

import torch
from torch import Tensor

from strataflux.client.runtime.generation import Sampling
from strataflux.kernels.gpu.greedy import GreedyScratch, take_largest

__all__ = ["Sampler"]


class Sampler:
    """Greedy, or drawn with a generator of the device."""

    def __init__(self, sampling: Sampling, device: torch.device) -> None:
        """Seed the generator."""
        self._sampling = sampling
        self._scratch = GreedyScratch(device)
        self.random: torch.Generator | None = None
        """What a captured graph must register; None where nothing is drawn."""
        if sampling.temperature > 0:
            self.random = torch.Generator(device).manual_seed(sampling.seed)

    def choose(self, logits: Tensor, token: Tensor) -> None:
        """Put the next token for ``logits`` [vocabulary] into ``token`` [1] int64. Queued on the current stream; the
        host waits for nothing, or else it could not be captured.
        """
        if self.random is None:
            take_largest(logits, token, self._scratch)
            return
        probability, order = torch.softmax(logits.float() / self._sampling.temperature, -1).sort(descending=True)
        before = probability.cumsum(-1) - probability
        # A token stays if the ones before it do not yet reach top_p, so at least one always stays.
        kept = torch.where(before < self._sampling.top_p, probability, 0.0)
        # The smallest of exponential variables with these rates falls to each token with its probability.
        noise = torch.empty_like(kept).exponential_(generator=self.random)
        # Gathered: an index that is a tensor without dimensions would be read by the host.
        token.copy_(order.gather(0, (kept / noise).argmax().view(1)))
