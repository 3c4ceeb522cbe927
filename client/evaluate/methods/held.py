"""What is held of a layer when every token stays, and attention to it."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from strataflux.client.runtime.block import attend_causally

__all__ = ["Appended", "attend_newest", "seen_by_newest"]


def seen_by_newest(count: int, held: int, device: torch.device) -> Tensor:
    """[count, held] bool: the last ``count`` of ``held`` tokens see themselves and all before."""
    positions = torch.arange(held, device=device)
    return positions <= positions[held - count :, None]


def attend_newest(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Mixed values [sequences, heads, m, head_dim] of queries of the newest m among the tokens of ``keys`` and
    ``values`` [sequences, kv_heads, n, head_dim].
    """
    count, held = queries.shape[2], keys.shape[2]
    if count == held:
        return attend_causally(queries, keys, values)
    seen = None if count == 1 else seen_by_newest(count, held, keys.device)
    mixed: Tensor = scaled_dot_product_attention(queries, keys, values, attn_mask=seen, enable_gqa=True)
    return mixed


class Appended:
    """Every token's keys and values as they came: a :class:`~strataflux.client.evaluate.methods.base.Held`."""

    def __init__(self) -> None:
        """Hold nothing yet."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def prefill(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Take all; exact attention."""
        return self.decode(queries, keys, values)

    def decode(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Append; exact attention."""
        return attend_newest(queries, *self.append(keys, values))

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values so far, these included."""
        if self.keys is not None and self.values is not None:
            keys, values = torch.cat((self.keys, keys), 2), torch.cat((self.values, values), 2)
        self.keys, self.values = keys, values
        return keys, values
