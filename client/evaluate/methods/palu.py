"""Palu: keys and values of groups of heads, each group by its own low-rank latent in a few bits (Chang et al., 2025).

[P] Key and value projections are factorised apart, for groups of up to four heads: with ``C Cᵀ`` the second moment of
the inputs, ``W C = U Σ Vᵀ`` cut to rank r gives ``W ≈ (U √Σ) (√Σ Vᵀ C⁻¹)``, the best of that rank on such inputs. What
the right factor makes of a token is cached, in 4, 3 or 2 bits between its least and its largest number, with a scale
and a zero point in float16; before that it is turned by an orthogonal matrix that spreads it evenly and is folded into
both factors. Keys are rebuilt, normed and rotated when attention needs them.
[O] The same rank for all groups and layers (the paper also searches ranks), trained only if asked for
(``client/evaluate/methods/tuned.py``); a rank that is no
power of two is turned by the product of a Hadamard matrix and a cosine transform of the odd rest.
"""

import math

import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec, Rebuild, budget_bytes
from strataflux.client.evaluate.methods.factors import Factors
from strataflux.client.evaluate.methods.fitting import moments, require_tokens
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.evaluate.methods.ranges import RANGE_BYTES, range_group_bytes, round_in_range
from strataflux.client.evaluate.methods.tuned import fit_factors
from strataflux.client.runtime.models import ModelConfig

__all__ = ["factors_of", "fit_palu", "heads_of_group", "make_palu", "palu_rank", "spread_latents", "spreading"]

_HEADS = 4
_RIDGE = 1e-6


def heads_of_group(kv_heads: int) -> int:
    """Heads that share a latent: the largest divisor up to four."""
    return max(count for count in range(1, _HEADS + 1) if kv_heads % count == 0)


def palu_rank(config: ModelConfig, nbytes: int, bits: int) -> int:
    """Coordinates of a group's latent in ``nbytes`` a token and layer.

    Raises:
        MisuseError: scales leave none.
    """
    heads = heads_of_group(config.kv_heads)
    groups = 2 * config.kv_heads // heads
    rank = (nbytes // groups - RANGE_BYTES) * 8 // bits
    if rank < 1:
        least = groups * range_group_bytes(1, bits)
        raise MisuseError("palu", f"{nbytes} bytes a token", f"at least {least}", "ask for a smaller ratio")
    return min(rank, heads * config.head_dim, config.hidden)


def spreading(size: int) -> Tensor:
    """An orthogonal matrix [size, size] float64 whose entries are all alike: Hadamard for powers of two."""
    power = size & -size
    odd = size // power
    places = torch.arange(odd, dtype=torch.float64)
    turned = (math.pi / odd * (places + 0.5) * places[:, None]).cos() * math.sqrt(2 / odd)
    turned[0] = math.sqrt(1 / odd)
    signs = torch.ones(1, 1, dtype=torch.float64)
    while signs.shape[0] < power:
        signs = torch.cat((torch.cat((signs, signs), 1), torch.cat((signs, -signs), 1)))
    return torch.kron(turned, signs / math.sqrt(power))


def factors_of(matrix: Tensor, second_moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Left [rows, rank] and right [rank, hidden] float64 of a matrix [rows, hidden] on inputs of this second moment
    [hidden, hidden].
    """
    square = second_moment.clone()
    square.diagonal().add_(_RIDGE * square.diagonal().mean())
    whitening = torch.linalg.cholesky(square)
    left, strengths, right = torch.linalg.svd(matrix.double() @ whitening, full_matrices=False)
    root = strengths[:rank].sqrt()
    behind = torch.linalg.solve_triangular(whitening, right[:rank], upper=False, left=False)
    return left[:, :rank] * root, root[:, None] * behind


def fit_palu(matrix: Tensor, x: Tensor, rank: int, rows: int) -> Factors:
    """One layer.

    Args:
        matrix: [keys and values, hidden].
        x: inputs [tokens, hidden] in the model as it is.
        rank: coordinates of a group.
        rows: outputs of a group.
    """
    second_moment = moments(x, x)
    lefts, rights = zip(*(factors_of(group, second_moment, rank) for group in torch.split(matrix, rows)), strict=True)
    right, left = torch.cat(rights).float(), torch.block_diag(*lefts).float()  # type: ignore[no-untyped-call]
    return Factors(right, right.new_zeros(right.shape[0]), left, left.new_zeros(left.shape[0]), len(lefts))


def spread_latents(factors: Factors, bits: int) -> Rebuild:
    """Turn each group's latent so that it is spread evenly, and round it to ``bits`` in its range."""
    groups = factors.groups
    rank = factors.encoder.shape[0] // groups
    turned = torch.block_diag(*[spreading(rank)] * groups).float()  # type: ignore[no-untyped-call]
    turned = turned.to(factors.encoder.device)
    spread = Factors(
        turned @ factors.encoder,
        turned @ factors.encoder_bias,
        factors.decoder @ turned.T,
        factors.decoder_bias,
        groups,
    )

    def rebuild(x: Tensor) -> Tensor:
        latents = spread.latent(x).unflatten(-1, (groups, rank))  # type: ignore[no-untyped-call]
        return spread.outputs(round_in_range(latents, bits).flatten(-2))

    return rebuild


def make_palu(spec: MethodSpec, making: Making) -> KvMethod:
    """``palu:8x``, in 4 bits, or ``palu:8x:3``.

    Raises:
        MisuseError: the ratio leaves nothing beside scales.
        InputError: there is too little text.
    """
    config, given, bits = making.config, making.text(spec), spec.number or 4
    rank, rows = palu_rank(config, budget_bytes(config, spec), bits), heads_of_group(config.kv_heads) * config.head_dim
    require_tokens(spec, given, 2 * config.hidden)

    def fit(matrix: Tensor, exact: Tensor, _: Tensor) -> Factors:
        return fit_palu(matrix, exact, rank, rows)

    def finish(factors: Factors, _: Tensor) -> Rebuild:
        return spread_latents(factors, bits)

    rebuild = fit_factors(making, given, fit, finish, sequential=False)
    size = config.layers * (2 * config.kv_heads * config.head_dim // rows) * range_group_bytes(rank, bits)
    facts = {"rank": rank, "bits": bits, "groups": 2 * config.kv_heads * config.head_dim // rows}
    return KvMethod(
        str(spec), lambda _: Appended(), lambda prompt, further: size * (prompt + further), rebuild, facts=facts
    )
