"""Linear factors in the place of a layer's key and value projections, before anything is rounded."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import linear

__all__ = ["Factors"]


@dataclass(frozen=True)
class Factors:
    """``u = E x + e``, ``[k; v] = D u + b``: what is rounded of u, and how, is up to a method."""

    encoder: Tensor
    """E, [width, hidden] float32."""
    encoder_bias: Tensor
    """e, [width] float32."""
    decoder: Tensor
    """D, [keys and values, width] float32."""
    decoder_bias: Tensor
    """b, [keys and values] float32."""
    groups: int = 1
    """D has so many blocks of equal size on its diagonal, and is 0 elsewhere."""

    def latent(self, x: Tensor) -> Tensor:
        """Coordinates u [..., width] of inputs [..., hidden]."""
        return linear(x, self.encoder, self.encoder_bias)

    def outputs(self, latent: Tensor) -> Tensor:
        """Keys and values [..., m] of u [..., width]."""
        return linear(latent, self.decoder, self.decoder_bias)

    def rebuild(self, x: Tensor) -> Tensor:
        """Keys and values [..., m] of inputs [..., hidden], nothing rounded."""
        return self.outputs(self.latent(x))
