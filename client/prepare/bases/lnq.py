"""Codebooks fitted to what a layer puts out (LNQ), under Hessians guided by the loss (GuidedQuant, Kim et al. 2025).

For each row w of a group of rows that share a Hessian H,

    (w - ŵ)ᵀ H (w - ŵ),  ŵ_i = c[code_i],  H = Σ_tokens s · x xᵀ

is made small, starting from SqueezeLLM's codes and codebooks. s is the mean squared gradient of the loss by the
group's outputs; one group a matrix (g = 1) or four. A round refits the codebooks, then moves the codes:

- codebook: least squares. With P the one-hot codes, ``(Pᵀ H P + εI) c = Pᵀ H w``, 2^bits unknowns a row.
- codes: cyclic coordinate descent over the inputs. With e = ŵ - w, input i alone would best be ``ŵ_i - (He)_i / H_ii``;
  it takes the nearest codebook entry. All rows move at once, as each depends on itself alone.

The first round refits codebooks only. Each row keeps the best it has seen.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.matrices import CodebookCodes, nearest_codes
from strataflux.client.prepare.bases.sqllm import CODEBOOK_BITS

__all__ = [
    "CYCLES",
    "DAMPING",
    "GUIDE_GROUPS",
    "ROUNDS",
    "BlockDescent",
    "LnqSettings",
    "descend_block",
    "quantize_lnq",
]

GUIDE_GROUPS = (1, 4)
"""Supported numbers of row groups a matrix."""
ROUNDS, CYCLES = 3, 4
"""Rounds in all, and passes of coordinate descent over the inputs in each but the first."""

DAMPING = 1e-3
"""Of the mean diagonal, added to every Hessian. The authors' 1e-5 is for four million tokens; of a few thousand, those
few on which the loss depends most would decide alone."""

_BLOCK = 128
# Rows whose Pᵀ H P are formed at a time: inputs · rows · 2^bits numbers.
_ROWS_CPU, _ROWS_GPU = 64, 512
_RIDGE = 1e-7


@dataclass(frozen=True)
class LnqSettings:
    """What the base is made of.

    Raises:
        MisuseError: on construction, naming the setting and what is supported.
    """

    bits: int = 3
    guide_groups: int = 4
    """Groups of rows of a matrix that have Hessians of their own."""

    def __post_init__(self) -> None:
        if self.bits not in CODEBOOK_BITS:
            raise MisuseError("bits", f"{self.bits}", "2, 3 or 4", "choose one of these")
        if self.guide_groups not in GUIDE_GROUPS:
            raise MisuseError("guide groups", f"{self.guide_groups}", "1 or 4", "choose one of these")

    def to_json(self) -> dict[str, Any]:
        """Everything beside the calibration that decides which codes a weight gets."""
        rounds = {"rounds": ROUNDS, "cycles": CYCLES, "damping": DAMPING}
        return {"name": "lnq", "bits": self.bits, "codebook": "row", "guide_groups": self.guide_groups, **rounds}


BlockDescent = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None]
"""Moves the weights of a block of inputs; :func:`descend_block` is the definition."""


def quantize_lnq(
    weight: Tensor,
    start: CodebookCodes,
    hessians: Tensor,
    groups: Sequence[slice],
    damping: float = DAMPING,
    descend: BlockDescent | None = None,
) -> CodebookCodes:
    """Improve ``start``, a quantized ``weight`` [outputs, inputs] float32.

    Args:
        weight: the matrix.
        start: codes and codebooks to begin with.
        hessians: [groups, inputs, inputs] float32, symmetric, not negative.
        groups: rows of each, together all of them.
        damping: share of its mean diagonal that is added to each Hessian.
        descend: a fast way to do what :func:`descend_block` does, which is the default.
    """
    problem = _Problem.of(weight, hessians, groups, damping)
    codebook, codes = start.codebook.float(), start.codes.long()
    best = start
    least = problem.cost(start.dequantized())
    for round_number in range(ROUNDS):
        if round_number:
            codes = problem.descend(codebook, codes, CYCLES, descend or descend_block)
        codebook, order = problem.fit_codebook(codes, codebook).sort(-1)
        # Codes follow their entries to where sorting put them.
        codes = order.argsort(-1).gather(-1, codes)
        candidate = CodebookCodes(codes.to(torch.uint8), codebook.half(), start.bits)
        cost = problem.cost(candidate.dequantized())
        better = (cost < least)[:, None]
        best = CodebookCodes(
            torch.where(better, candidate.codes, best.codes),
            torch.where(better, candidate.codebook, best.codebook),
            start.bits,
        )
        least = torch.minimum(cost, least)
    return best


@dataclass(frozen=True)
class _Problem:
    """Rows, and the Hessian that each belongs to."""

    weight: Tensor
    hessians: Tensor
    groups: Sequence[slice]
    owner: Tensor
    """[outputs] int64: the group of each row."""

    @classmethod
    def of(cls, weight: Tensor, hessians: Tensor, groups: Sequence[slice], damping: float = DAMPING) -> "_Problem":
        mean = hessians.diagonal(dim1=-2, dim2=-1).mean(-1)
        # A group whose outputs the loss never depended on counts all inputs alike.
        added = torch.where(mean > 0, damping * mean, 1.0)
        damped = hessians + torch.diag_embed(added[:, None].expand(-1, weight.shape[1]))
        owner = torch.empty(weight.shape[0], dtype=torch.int64, device=weight.device)
        for index, rows in enumerate(groups):
            owner[rows] = index
        return cls(weight, damped, groups, owner)

    def times_hessian(self, rows_by_inputs: Tensor, inputs: slice = slice(None)) -> Tensor:
        """Each row, given over ``inputs``, times its Hessian: [outputs, all inputs]."""
        product = torch.empty_like(self.weight)
        for hessian, rows in zip(self.hessians, self.groups, strict=True):
            product[rows] = rows_by_inputs[rows] @ hessian[inputs]
        return product

    def cost(self, low: Tensor) -> Tensor:
        """[outputs] float32."""
        error = low - self.weight
        return (self.times_hessian(error) * error).sum(-1)

    def fit_codebook(self, codes: Tensor, codebook: Tensor) -> Tensor:
        """Least-squares entries [outputs, entries]; entries that no input uses stay as they are."""
        right = torch.zeros_like(codebook).scatter_add_(-1, codes, self.times_hessian(self.weight))
        fitted = torch.empty_like(codebook)
        step = _ROWS_CPU if codes.device.type == "cpu" else _ROWS_GPU
        for hessian, group in zip(self.hessians, self.groups, strict=True):
            ridge = _RIDGE * hessian.diagonal().sum()
            for first in range(group.start, group.stop, step):
                rows = slice(first, min(first + step, group.stop))
                left = _by_entries(hessian, codes[rows], codebook.shape[1])
                # The ridge pulls towards the present entry, so an unused one keeps it and others hardly notice.
                left += ridge * torch.eye(codebook.shape[1], device=left.device)
                pulled = right[rows] + ridge * codebook[rows]
                fitted[rows] = torch.linalg.solve(left.double(), pulled.double()[..., None])[..., 0].float()
        return fitted

    def descend(self, codebook: Tensor, codes: Tensor, cycles: int, descend_one: BlockDescent) -> Tensor:
        """Codes [outputs, inputs] after ``cycles`` passes over the inputs."""
        low = codebook.gather(-1, codes)
        slope = self.times_hessian(low - self.weight)
        diagonal = self.hessians.diagonal(dim1=-2, dim2=-1)[self.owner]
        inputs = self.weight.shape[1]
        for _ in range(cycles):
            for first in range(0, inputs, _BLOCK):
                block = slice(first, min(first + _BLOCK, inputs))
                before, near = low[:, block].clone(), slope[:, block].clone()
                among = self.hessians[:, block, block].contiguous()
                moved = before.clone()
                descend_one(moved, near, among, self.owner, diagonal[:, block].contiguous(), codebook)
                low[:, block] = moved
                slope += self.times_hessian(moved - before, block)
        return nearest_codes(low, codebook).long()


def _by_entries(hessian: Tensor, codes: Tensor, entries: int) -> Tensor:
    """``Pᵀ H P`` [rows, entries, entries] of the one-hot P of each row of ``codes`` [rows, inputs]."""
    rows, inputs = codes.shape
    hot = (codes.T.contiguous()[..., None] == torch.arange(entries, device=codes.device)).to(hessian.dtype)
    # One product for all rows: theirs one by one are too narrow to be fast.
    product = (hessian @ hot.view(inputs, rows * entries)).view(inputs, rows, entries)
    return hot.permute(1, 2, 0) @ product.permute(1, 0, 2)


def descend_block(low: Tensor, slope: Tensor, among: Tensor, owner: Tensor, diagonal: Tensor, codebook: Tensor) -> None:
    """Move the weights ``low`` [outputs, block] one input after the other, in place.

    Args:
        low: weights, each an entry of its row's codebook.
        slope: [outputs, block], He of these inputs; follows.
        among: [groups, block, block], the Hessians' own blocks.
        owner: [outputs] int64, the group of each row.
        diagonal: [outputs, block], the Hessians' diagonals by row.
        codebook: [outputs, entries] float32.
    """
    for i in range(low.shape[1]):
        target = low[:, i] - slope[:, i] / diagonal[:, i]
        nearest = (codebook - target[:, None]).abs_().argmin(-1, keepdim=True)
        chosen = codebook.gather(-1, nearest)
        slope.addcmul_(chosen - low[:, i : i + 1], among[:, i].index_select(0, owner))
        low[:, i : i + 1] = chosen
