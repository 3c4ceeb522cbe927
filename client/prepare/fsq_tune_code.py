"""Codes as parameters of training, in units of their sizes.

Each row of an encoder and each column of a decoder counts in units of its size: directions differ in size by orders of
magnitude, and one absolute rate that moves the strong ones drowns the weak ones (ours). Quantization runs in float32.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from strataflux.kernels.fsq import FsqGrid, FsqLayer, quantize_straight_through

__all__ = ["TrainedCode"]


class TrainedCode(nn.Module):
    """One layer's encoder and decoder."""

    def __init__(self, layer: FsqLayer) -> None:
        super().__init__()
        self.grid: FsqGrid = layer.grid
        self.scale = layer.grid.levels.to(layer.encoder.device) / 2
        decoder = layer.decoder * self.scale
        self.rows = _size(layer.encoder, 1)
        self.columns = _size(decoder, 0)
        # A bias counts as the weight of an input as large as all others together.
        self.row_shift = self.rows.flatten() * layer.encoder.shape[1] ** 0.5
        self.output_shift = _size(decoder, 1).flatten() * decoder.shape[1] ** 0.5
        self.encoder = nn.Parameter(layer.encoder / self.rows)
        self.encoder_bias = nn.Parameter(layer.encoder_bias / self.row_shift)
        self.decoder = nn.Parameter(decoder / self.columns)
        self.decoder_bias = nn.Parameter(layer.decoder_bias / self.output_shift)

    def forward(self, x: Tensor) -> Tensor:
        """Keys and values [..., m] of inputs [..., hidden]."""
        with torch.autocast(x.device.type, enabled=False):
            z = linear(x.float(), self.encoder * self.rows, self.encoder_bias * self.row_shift)
            scaled = quantize_straight_through(z, self.grid) / self.scale
        return linear(scaled, self.decoder * self.columns, self.decoder_bias * self.output_shift)

    @torch.no_grad()
    def result(self) -> FsqLayer:
        """The layer as it decodes."""
        return FsqLayer(
            self.grid,
            self.encoder * self.rows,
            self.encoder_bias * self.row_shift,
            self.decoder * self.columns / self.scale,
            self.decoder_bias * self.output_shift,
        )


def _size(matrix: Tensor, dim: int) -> Tensor:
    """Root mean squares along ``dim``, which stays."""
    size: Tensor = matrix.square().mean(dim, keepdim=True).sqrt().clamp_min(1e-12)
    return size
