"""The divergence that training lowers, from states instead of logits: those of a text at once would fill a device."""

import torch
from torch import Tensor
from torch.nn.functional import linear

__all__ = ["head_divergence"]

# Rows of logits that are there at a time, thrice in float32: of a vocabulary of 50,000, 200 kB a row.
_ROWS_CPU, _ROWS_GPU = 256, 4096


def head_divergence(found: Tensor, wanted: Tensor, head: Tensor) -> Tensor:
    """KL(p ‖ q) in nats, the mean over tokens, of p = softmax(wanted headᵀ) and q = softmax(found headᵀ).

    Args:
        found: [..., hidden], normed states before the head; the gradient is theirs alone.
        wanted: the same of the model that is to be imitated.
        head: [vocabulary, hidden] of the dtype of both.

    Returns:
        A scalar, float32.
    """
    divergence: Tensor = _HeadDivergence.apply(  # type: ignore[no-untyped-call]
        found.flatten(0, -2), wanted.flatten(0, -2), head
    )
    return divergence


class _HeadDivergence(torch.autograd.Function):
    """The gradient by logits is q - p, so it is made along with the loss and nothing of a vocabulary's size is kept."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, found: Tensor, wanted: Tensor, head: Tensor) -> Tensor:
        total = torch.zeros((), device=found.device)
        gradient = torch.empty_like(found) if ctx.needs_input_grad[0] else None  # type: ignore[attr-defined]
        rows = _ROWS_GPU if found.is_cuda else _ROWS_CPU
        for start in range(0, found.shape[0], rows):
            part = slice(start, start + rows)
            log_q = torch.log_softmax(linear(found[part], head).float(), -1)
            log_p = torch.log_softmax(linear(wanted[part], head).float(), -1)
            p = log_p.exp()
            total += torch.dot(p.flatten(), log_p.sub_(log_q).flatten())
            if gradient is not None:
                gradient[part] = log_q.exp_().sub_(p).to(head.dtype) @ head
        if gradient is not None:
            ctx.save_for_backward(gradient)
        return total / found.shape[0]

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, upstream: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * (upstream / gradient.shape[0]).to(gradient.dtype), None, None
