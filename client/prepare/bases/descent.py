"""Fast ways to run :func:`strataflux.client.prepare.bases.lnq.descend_block`, which is their definition.

Its steps are many and small: a row of a block moves one input at a time. On a CPU they are compiled, a row after the
other, and a weight that stays where it is costs nothing but the look. On a GPU the thousand launches of a block are
recorded once a shape and replayed as one, since Python needs longer to ask for them than the device to do them.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from strataflux.client.prepare.bases.lnq import BlockDescent, descend_block

__all__ = ["block_descent"]


def block_descent(device: torch.device) -> BlockDescent:
    """The fast way for tensors on ``device``; keep it, what it compiles or records is for all matrices."""
    return _Replayed() if device.type == "cuda" else _compiled_descent()


def _compiled_descent() -> BlockDescent:
    # Where everything runs on a GPU, nothing else here needs a compiler.
    from strataflux.client.prepare.bases.descent_cpu import descend_rows

    def descend(low: Tensor, slope: Tensor, among: Tensor, owner: Tensor, diagonal: Tensor, codebook: Tensor) -> None:
        arrays = (one.numpy() for one in (low, slope, among, owner, diagonal, codebook.contiguous()))
        descend_rows(*arrays)

    return descend


class _Replayed:
    """One recording for each set of shapes; not safe for use from two threads."""

    def __init__(self) -> None:
        self._recordings: dict[tuple[torch.Size, ...], tuple[list[Tensor], Callable[[], None]]] = {}

    def __call__(
        self, low: Tensor, slope: Tensor, among: Tensor, owner: Tensor, diagonal: Tensor, codebook: Tensor
    ) -> None:
        given = [low, slope, among, owner, diagonal, codebook]
        shapes = tuple(one.shape for one in given)
        if shapes not in self._recordings:
            self._recordings[shapes] = _record([one.clone() for one in given])
        fixed, replay = self._recordings[shapes]
        for to, one in zip(fixed, given, strict=True):
            to.copy_(one)
        replay()
        low.copy_(fixed[0])
        slope.copy_(fixed[1])


def _record(fixed: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """Record the block over the memory of ``fixed``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        # Once before recording, so that nothing is set up for the first time inside it.
        descend_block(*fixed)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        descend_block(*fixed)
    return fixed, graph.replay
