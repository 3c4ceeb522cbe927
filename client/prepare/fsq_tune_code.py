"""Codes as parameters of training, in units of their sizes.

Each row of an encoder and each column of a decoder counts in units of its size: directions differ in size by orders of
magnitude, and one absolute rate that moves the strong ones drowns the weak ones (ours). Quantization runs in float32.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from strataflux.kernels.fsq import FsqGrid, FsqLayer, quantize_straight_through
from strataflux.kernels.fsq_nested import FsqTier

__all__ = ["TrainedCode", "TrainedDecoder", "TrainedEncoder", "TrainedTier"]


class TrainedEncoder(nn.Module):
    """From a layer's inputs to coordinates before their grid."""

    def __init__(self, encoder: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.rows = _size(encoder, 1)
        # A bias counts as the weight of an input as large as all others together.
        self.shift = self.rows.flatten() * encoder.shape[1] ** 0.5
        self.matrix = nn.Parameter(encoder / self.rows)
        self.bias = nn.Parameter(bias / self.shift)

    def forward(self, x: Tensor) -> Tensor:
        """Z [..., width] float32 of inputs [..., hidden]."""
        with torch.autocast(x.device.type, enabled=False):
            return linear(x.float(), self.matrix * self.rows, self.bias * self.shift)

    @torch.no_grad()
    def result(self) -> tuple[Tensor, Tensor]:
        """E and e as they encode."""
        return self.matrix * self.rows, self.bias * self.shift


class TrainedDecoder(nn.Module):
    """From coordinates through a grid to keys and values."""

    def __init__(self, grid: FsqGrid, decoder: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.grid = grid
        self.scale = grid.levels.to(decoder.device) / 2
        scaled = decoder * self.scale
        self.columns = _size(scaled, 0)
        self.shift = _size(scaled, 1).flatten() * decoder.shape[1] ** 0.5
        self.matrix = nn.Parameter(scaled / self.columns)
        self.bias = nn.Parameter(bias / self.shift)

    def forward(self, z: Tensor) -> Tensor:
        """Keys and values [..., m] of coordinates [..., width] float32."""
        with torch.autocast(z.device.type, enabled=False):
            scaled = quantize_straight_through(z, self.grid) / self.scale
        return linear(scaled, self.matrix * self.columns, self.bias * self.shift)

    @torch.no_grad()
    def result(self) -> tuple[Tensor, Tensor]:
        """D and b as they decode."""
        return self.matrix * self.columns / self.scale, self.bias * self.shift


class TrainedCode(nn.Module):
    """One layer's encoder and decoder."""

    def __init__(self, layer: FsqLayer) -> None:
        super().__init__()
        self.encoder = TrainedEncoder(layer.encoder, layer.encoder_bias)
        self.decoder = TrainedDecoder(layer.grid, layer.decoder, layer.decoder_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Keys and values [..., m] of inputs [..., hidden]."""
        made: Tensor = self.decoder(self.encoder(x))
        return made

    def result(self) -> FsqLayer:
        """The layer as it decodes."""
        return FsqLayer(self.decoder.grid, *self.encoder.result(), *self.decoder.result())


class TrainedTier(nn.Module):
    """One layer's encoder, the decoder of whole codes and that of the resident tier.

    On a grid of equal cells the resident levels of z are what the resident grid makes of the same z, so the tier needs
    no encoder of its own.
    """

    def __init__(self, tier: FsqTier) -> None:
        super().__init__()
        self.grid = tier.grid
        self.encoder = TrainedEncoder(tier.whole.encoder, tier.whole.encoder_bias)
        self.whole = TrainedDecoder(tier.grid.whole, tier.whole.decoder, tier.whole.decoder_bias)
        self.coarse = TrainedDecoder(tier.grid.resident, tier.coarse_decoder, tier.coarse_bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [..., m] of the resident tier, and of the whole code, of inputs [..., hidden]."""
        z = self.encoder(x)
        return self.coarse(z[..., : self.grid.resident.width]), self.whole(z)

    def result(self) -> FsqTier:
        """The tiers as they decode."""
        whole = FsqLayer(self.grid.whole, *self.encoder.result(), *self.whole.result())
        return FsqTier(self.grid, whole, *self.coarse.result())


def _size(matrix: Tensor, dim: int) -> Tensor:
    """Root mean squares along ``dim``, which stays."""
    size: Tensor = matrix.square().mean(dim, keepdim=True).sqrt().clamp_min(1e-12)
    return size
