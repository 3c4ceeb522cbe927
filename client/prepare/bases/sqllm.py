"""A codebook for every output row, by weighted k-means over the row's weights (SqueezeLLM, Kim et al. 2024).

For each row, ``Σ_i F_i · (w_i - c[code_i])²`` is made small over 2^bits values c and the codes; F is the diagonal of
the Fisher information, how much the loss curves along each weight. In one dimension the best clusters are runs of the
sorted weights, so the best codebook can be had by dynamic programming: exactly over the weights of a short row, over
bins of neighbours in a long one. From there Lloyd's steps lead to a local minimum over the weights themselves; with
prefix sums over the sorted row a step costs one binary search for each border.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.matrices import CodebookCodes, nearest_codes

__all__ = ["CODEBOOK_BITS", "STEPS", "SqllmSettings", "quantize_sqllm"]

CODEBOOK_BITS = (2, 3, 4)
"""Supported code widths."""
STEPS = 20
"""Lloyd's steps at the end."""

# What a weight counts for even if the loss never depended on it, as a share of its row's mean: without it a row that
# calibration did not reach would have no codebook.
_LEAST_SHARE = 1e-4
# With 64 bins the cost is within 0.2 % of the exact optimum's at 2 and 3 bits, 1 % at 4, and takes a twentieth.
_BINS = 64
# Rows whose costs of all runs of bins are held at a time, rows · bins² float64: what fits a cache, or fills a GPU.
_ROWS_CPU, _ROWS_GPU = 64, 2048


@dataclass(frozen=True)
class SqllmSettings:
    """What the base is made of.

    Raises:
        MisuseError: on construction, naming the setting and what is supported.
    """

    bits: int = 3

    def __post_init__(self) -> None:
        if self.bits not in CODEBOOK_BITS:
            raise MisuseError("bits", f"{self.bits}", "2, 3 or 4", "choose one of these")

    def to_json(self) -> dict[str, Any]:
        """Everything beside the calibration that decides which codes a weight gets."""
        return {"name": "sqllm", "bits": self.bits, "codebook": "row", "steps": STEPS}


def quantize_sqllm(weight: Tensor, fisher: Tensor, bits: int) -> CodebookCodes:
    """Quantize ``weight`` [outputs, inputs] float32 under ``fisher`` [outputs, inputs], not negative."""
    step = _ROWS_CPU if weight.device.type == "cpu" else _ROWS_GPU
    parts = [slice(first, first + step) for first in range(0, weight.shape[0], step)]
    rounded = torch.cat([_codebook(weight[part], fisher[part], 1 << bits) for part in parts]).half()
    return CodebookCodes(nearest_codes(weight, rounded.float()), rounded, bits)


def _codebook(weight: Tensor, fisher: Tensor, entries: int) -> Tensor:
    """[rows, entries] float64, ascending."""
    weights, order = weight.double().sort(-1)
    share = fisher.double().gather(-1, order)
    mean = share.mean(-1, keepdim=True)
    sums = _Sums.of(weights, torch.where(mean > 0, share / mean, 1) + _LEAST_SHARE)
    borders = sums.best_borders(sums.bins(), entries)
    codebook = sums.centres(borders)
    for _ in range(STEPS):
        codebook = sums.centres(sums.nearest_borders(codebook))
    return codebook


@dataclass(frozen=True)
class _Sums:
    """Sorted weights of each row [rows, n], and prefix sums [rows, n + 1] of F, F·w and F·w² over them; float64.

    Runs of a row are given by borders [rows, runs + 1], the first 0 and the last n.
    """

    weights: Tensor
    share: Tensor
    moment: Tensor
    square: Tensor

    @classmethod
    def of(cls, weights: Tensor, share: Tensor) -> "_Sums":
        terms = (share, share * weights, share * weights.square())
        return cls(weights, *(torch.nn.functional.pad(term.cumsum(-1), (1, 0)) for term in terms))

    def bins(self) -> Tensor:
        """Borders of at most ``_BINS`` bins: one weight each in a short row, else fine where distortion would be."""
        rows, n = self.weights.shape
        if n <= _BINS:
            return torch.arange(n + 1, device=self.weights.device).expand(rows, -1).contiguous()
        gaps = torch.nn.functional.pad(self.weights.diff(dim=-1), (1, 0))
        # High-resolution theory: equal distortion a bin. An even part keeps crowded weights apart, too.
        density = (self.share.diff(dim=-1) * gaps.square()).pow(1 / 3)
        cumulated = (density / density.sum(-1, keepdim=True).clamp(min=1e-300) + 1 / n).cumsum(-1)
        inner = torch.arange(1, _BINS, device=gaps.device) / _BINS * cumulated[:, -1:]
        borders = torch.searchsorted(cumulated, inner)
        return torch.nn.functional.pad(torch.nn.functional.pad(borders, (1, 0)), (0, 1), value=n)

    def best_borders(self, bins: Tensor, runs: int) -> Tensor:
        """Borders of the ``runs`` runs of whole bins with the least ``Σ F (w - mean)²`` in all; runs may be empty."""
        share, moment, square = (prefix.gather(-1, bins) for prefix in (self.share, self.moment, self.square))
        # cost[r, i, j]: of one run from border i to border j.
        mass = (share[:, None] - share[..., None]).clamp(min=0)
        first = moment[:, None] - moment[..., None]
        cost = square[:, None] - square[..., None] - first.square() / mass.clamp(min=1e-300)
        count = bins.shape[1]
        backwards = torch.ones(count, count, dtype=torch.bool, device=bins.device).tril(-1)
        cost = cost.clamp(min=0).masked_fill(backwards, torch.inf)
        least, steps = cost[:, 0], []
        for _ in range(runs - 1):
            least, step = (least[..., None] + cost).min(1)
            steps.append(step)
        ends = [torch.full_like(bins[:, :1], count - 1)]
        for step in reversed(steps):
            ends.append(step.gather(-1, ends[-1]))
        ends.append(torch.zeros_like(ends[0]))
        return bins.gather(-1, torch.cat(ends[::-1], -1))

    def nearest_borders(self, codebook: Tensor) -> Tensor:
        """Borders of the runs of weights nearest each entry of an ascending ``codebook`` [rows, entries]."""
        middles = (codebook[:, 1:] + codebook[:, :-1]) / 2
        inner = torch.searchsorted(self.weights, middles.contiguous())
        return torch.nn.functional.pad(torch.nn.functional.pad(inner, (1, 0)), (0, 1), value=self.weights.shape[1])

    def centres(self, borders: Tensor) -> Tensor:
        """Weighted means of the runs, ascending; an empty run takes the weight at its border."""
        share, moment = (prefix.gather(-1, borders).diff(dim=-1) for prefix in (self.share, self.moment))
        at_border = self.weights.gather(-1, borders[:, :-1].clamp(max=self.weights.shape[1] - 1))
        return torch.where(share > 0, moment / share, at_border).sort(-1).values
