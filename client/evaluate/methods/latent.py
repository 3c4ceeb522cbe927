"""Low-rank latents without a grid, and with one put on afterwards: what discreteness from the start is worth.

``u = P (x - x̄)``, ``[k; v] = D u + b``. P has the leading directions of keys and values at equal total variance, each
scaled to unit variance; D and b are regressed, as for codes, on the unconverted model's keys and values; layers are
fitted one after the other, each fed by those before. So the procedure is that of ``client/prepare/fsq.py`` with the
rounding left out.

- *latent*: u in float16, 2 bytes a coordinate.
- *posthoc* [O]: four times as many coordinates in 16 levels between the least and the largest that the text showed,
  the same for every token; D stays what it was made for the latent as it is. No scales, like a code.

Both can be trained before the rounding (``client/evaluate/methods/tuned.py``).
"""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from strataflux.client.evaluate.methods.base import KvMethod, Making, MethodSpec, Rebuild, budget_bytes
from strataflux.client.evaluate.methods.factors import Factors
from strataflux.client.evaluate.methods.fitting import moments, require_tokens
from strataflux.client.evaluate.methods.held import Appended
from strataflux.client.evaluate.methods.tuned import fit_factors

__all__ = ["fit_latent", "make_latent", "make_posthoc", "round_latent"]

_LEVELS = 16
_RIDGE = 1e-4


def _directions(matrix: Tensor, x: Tensor, width: int) -> Tensor:
    """P [width, hidden]."""
    mean = x.mean(0, keepdim=True)
    rows = matrix.double()
    covariance = rows @ moments(x - mean, x - mean) @ rows.T
    metric = covariance.diagonal().view(2, -1).mean(-1).rsqrt().repeat_interleave(matrix.shape[0] // 2)
    values, vectors = torch.linalg.eigh(metric[:, None] * covariance * metric)
    values, vectors = values.flip(0)[:width], vectors.flip(1)[:, :width]
    strong = values > 1e-6 * values[0]
    scaled = vectors[:, strong] / values[strong].sqrt()
    encoder: Tensor = (scaled.T @ (metric[:, None] * rows)).float()
    return encoder


def fit_latent(matrix: Tensor, exact: Tensor, fed: Tensor, width: int) -> Factors:
    """One layer.

    Args:
        matrix: [keys and values, hidden].
        exact: inputs [tokens, hidden] in the unconverted model.
        fed: the same behind converted layers.
        width: coordinates; no more than there are directions are used.
    """
    encoder, mean = _directions(matrix, exact, width), fed.mean(0)
    u, y = linear(fed - mean, encoder), linear(exact, matrix)
    centre = y.mean(0)
    square = moments(u, u)
    square.diagonal().add_(_RIDGE * square.diagonal().mean())
    decoder = torch.linalg.solve(square, moments(u, y - centre)).T.float()
    return Factors(encoder, -(encoder @ mean), decoder, centre)


def round_latent(factors: Factors, fed: Tensor, *, grid: bool) -> Rebuild:
    """Put 16 levels on each coordinate, between the least and the largest that inputs ``fed`` [tokens, hidden] make;
    without ``grid`` latents are kept in float16.
    """
    u = factors.latent(fed)
    low, high = u.amin(0), u.amax(0)
    step = (high - low) / (_LEVELS - 1)

    def rebuild(x: Tensor) -> Tensor:
        latent = factors.latent(x)
        if not grid:
            return factors.outputs(latent.half().float())
        return factors.outputs(low + step * ((latent - low) / step).round().clamp(0, _LEVELS - 1))

    return rebuild


def _make(spec: MethodSpec, making: Making, width: int, bits: int) -> KvMethod:
    config, given = making.config, making.text(spec)
    width = min(width, config.hidden, 2 * config.kv_heads * config.head_dim)
    require_tokens(spec, given, 20 * width)
    fit, finish = partial(fit_latent, width=width), partial(round_latent, grid=bits < 16)
    rebuild = fit_factors(making, given, fit, finish, sequential=True)
    size = config.layers * -(-width * bits // 8)
    facts = {"width": width, "bits": bits}
    return KvMethod(
        str(spec), lambda _: Appended(), lambda prompt, further: size * (prompt + further), rebuild, facts=facts
    )


def make_latent(spec: MethodSpec, making: Making) -> KvMethod:
    """``latent:8x``.

    Raises:
        InputError: there is too little text.
    """
    return _make(spec, making, max(1, budget_bytes(making.config, spec) // 2), 16)


def make_posthoc(spec: MethodSpec, making: Making) -> KvMethod:
    """``posthoc:8x``.

    Raises:
        InputError: there is too little text.
    """
    return _make(spec, making, 2 * budget_bytes(making.config, spec), 4)
