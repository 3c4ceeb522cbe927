"""Closed-form conversion of a model's key and value projections into one finite-scalar-quantized code a token.

Nothing is trained (the paper names such a start and gives no formulas; what follows is ours). With y = W x the stacked
keys and values of a layer and S a metric on them, the best pair of linear maps of width w for ``E|S(y - D u)|²`` has
the leading eigenvectors of ``Cov(S y)`` as its directions:

    u_i = U_iᵀ S (y - ȳ) / √λ_i                      unit variance
    E_i = g_i U_iᵀ S W / √λ_i,  e = -E x̄             the gain g_i that makes u_i most like its own levels
    D = Cov(y, c) (Cov(c) + ridge)⁻¹,  b = ȳ - D c̄   regression on the levels that really come out

Both matrices are rounded to float16, in which they are stored, before what follows from them is computed.

The metric weighs keys and values alike (``balanced``), or half so and half by what errors do to the divergence, or by
what they do to the layer's output: see ``client/prepare/fsq_metric.py``.

Widths of coordinates are equal, or given out by how much divergence a bit removes (``mixed``): directions differ in
variance by orders of magnitude, so equal ones are far from the best.

Layers that attend to a window of positions stay as they are: a cache bounds what they keep already. The others are
converted one after the other. ``sequential`` feeds each with what the converted layers before it make of the
text, and regresses on the keys and values of the unconverted model.
"""

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.errors import InputError
from strataflux.client.prepare.fsq_metric import balanced_metric, divergence_metric, output_metric
from strataflux.client.prepare.fsq_sensitivity import sensitivities
from strataflux.client.runtime.block import Project, multiply, run_block
from strataflux.client.runtime.models import LayerWeights, ModelConfig, WeightSource
from strataflux.client.runtime.rope import rotary_table
from strataflux.kernels.fsq import Bound, FsqGrid, FsqLayer, bits_of_levels

__all__ = [
    "Conversion",
    "FsqSettings",
    "code_bytes",
    "convert",
    "convert_layer",
    "full_bytes",
    "give_out_bits",
    "project_fsq",
    "regress_decoder",
    "require_coded_layers",
    "run_converted",
    "uniform_width",
]

_GAINS = torch.logspace(-1.2, 0.2, 22)
"""Standard deviations of a coordinate before its bound, tried for each."""
_GAIN_TOKENS = 8192
_BATCH = 8192


@dataclass(frozen=True)
class FsqSettings:
    """How a model is converted."""

    nbytes: int
    """Of a token's code, a layer."""
    levels: int = 16
    """Of each coordinate; 0 gives out bits by direction."""
    bound: Bound = "tanh"
    metric: Literal["auto", "balanced", "divergence", "output"] = "auto"
    """``auto`` is ``divergence`` where bits are given out by direction and a code has an eighth of the bytes of keys
    and values or more, as it measured best there, and else ``balanced`` (docs/FSQ.md)."""
    sequential: bool = True
    ridge: float = 1e-4
    skipped: int = 0
    """First positions of each sequence that are not looked at. Their keys and values are unlike all others, but a code
    that never saw them cuts them off at the ends of its grid, and every later position attends to them."""

    def __post_init__(self) -> None:
        if self.nbytes < 1:
            raise InputError("--fsq", f"{self.nbytes} bytes a token", "at least 1", "ask for a smaller ratio")

    def looks_at_divergence(self, config: ModelConfig) -> bool:
        """Whether directions are chosen by what errors do to the divergence."""
        if self.metric != "auto":
            return self.metric == "divergence"
        return self.levels == 0 and 8 * self.nbytes >= full_bytes(config)


def full_bytes(config: ModelConfig) -> int:
    """Bytes of a token's keys and values in float16, a layer."""
    return 4 * config.kv_heads * config.head_dim


def code_bytes(config: ModelConfig, ratio: float) -> int:
    """Bytes of a code that takes ``ratio`` times less than keys and values in float16 (the paper's sheet: floored)."""
    return int(full_bytes(config) / ratio)


def uniform_width(nbytes: int, levels: int) -> int:
    """Coordinates of ``levels`` levels that ``nbytes`` hold."""
    return 8 * nbytes // bits_of_levels(levels)


@dataclass(frozen=True)
class Conversion:
    """One layer's replacement, and how well it fits the text it was made from."""

    layer: FsqLayer
    key_error: float
    """Norm of the keys' error over that of the keys, both about the keys' mean."""
    value_error: float
    rank: int
    """Directions that keys and values have at all."""


@torch.no_grad()
def convert(
    source: WeightSource,
    tokens: Tensor,
    settings: FsqSettings,
    device: torch.device,
    advance: Callable[[int, Conversion], object] = lambda _, __: None,
    kept: Callable[[int], Conversion | None] = lambda _: None,
) -> list[Conversion]:
    """Convert every layer of a model that attends to all positions, one layer in memory at a time.

    Args:
        source: the model; its other weights stay as they are.
        tokens: [sequences, n] int64 of text like that which will be decoded.
        settings: size and manner of the code.
        device: where to compute.
        advance: told of each layer as it is done.
        kept: what an earlier run made of a layer, or None; that is not made again.

    Returns:
        One for each of :attr:`~strataflux.client.runtime.models.ModelConfig.whole`.

    Raises:
        InputError: no layer attends to all positions, or there are fewer tokens than the decoder's regression needs.
    """
    config = source.config
    require_coded_layers(config)
    _require_tokens(config, tokens, settings)
    exact = source.embedding()[tokens].to(device)
    fed = exact
    cosine, sine = rotary_table(config, tokens.shape[1])
    turns = cosine.to(device), sine.to(device)
    weighed = cache(lambda: dict(zip(config.whole, sensitivities(source, tokens, device), strict=True)))
    made = []
    for index in range(config.layers):
        layer = source.layer(index).to(device)
        project: Project = partial(multiply, layer)
        through = project
        if not layer.window:
            done = kept(index)
            if done is None:
                sensitivity = weighed()[index] if settings.looks_at_divergence(config) else None
                done = convert_layer(config, layer, exact, fed, settings, sensitivity)
            made.append(done)
            advance(index, done)
            through = project_fsq(config, layer, done.layer)
        apart = settings.sequential and bool(made)
        after = run_converted(config, layer, exact, turns, project)
        fed = run_converted(config, layer, fed, turns, through) if apart else after
        exact = after
    return made


def require_coded_layers(config: ModelConfig) -> None:
    """Refuse a model of which no layer would get a code.

    Raises:
        InputError: all its layers attend to windows of positions.
    """
    if not config.whole:
        found = f"{config.layers} layers with windows of at most {max(config.windows)} positions"
        raise InputError("--fsq", found, "a layer that attends to all positions", "leave it away: windows are bounded")


def _require_tokens(config: ModelConfig, tokens: Tensor, settings: FsqSettings) -> None:
    most = min(config.hidden, full_bytes(config) // 2)
    width = min(most, 8 * settings.nbytes if settings.levels == 0 else uniform_width(settings.nbytes, settings.levels))
    if tokens.numel() < 20 * width:
        raise InputError(
            "calibration",
            f"{tokens.numel()} tokens",
            f"at least {20 * width}, twenty for each of {width} coordinates",
            "give a longer --calibration text",
        )


def project_fsq(config: ModelConfig, layer: LayerWeights, code: FsqLayer) -> Callable[[str, Tensor], Tensor]:
    """What ``layer`` multiplies by with its keys and values out of ``code``: a projection for
    :func:`strataflux.client.runtime.block.run_block`.
    """
    queries = config.heads * config.head_dim

    def project(name: str, x: Tensor) -> Tensor:
        if name != "qkv":
            return linear(x, layer.projections[name])
        return torch.cat((linear(x, layer.projections["qkv"][:queries]), code.decode(code.encode(x))), -1)

    return project


def run_converted(
    config: ModelConfig,
    layer: LayerWeights,
    hidden: Tensor,
    turns: tuple[Tensor, Tensor],
    project: Callable[[str, Tensor], Tensor],
) -> Tensor:
    """What ``layer`` makes of ``hidden`` [sequences, n, hidden] with ``project``, a few sequences at a time."""
    return torch.cat([run_block(config, layer, part, turns, project) for part in torch.split(hidden, 4)])


def convert_layer(
    config: ModelConfig,
    layer: LayerWeights,
    exact: Tensor,
    fed: Tensor,
    settings: FsqSettings,
    sensitivity: Tensor | None = None,
) -> Conversion:
    """Convert one layer.

    Args:
        config: the model's dimensions.
        layer: the layer, on the device of the states.
        exact: [sequences, n, hidden] float32 before the layer, of the unconverted model.
        fed: the same of the model that the code will work in.
        settings: size and manner of the code.
        sensitivity: [m, m] float64, how the divergence grows with an error; None: keys and values are weighed alike, or
            as the metric ``output`` does.
    """
    inputs, target_inputs = (
        rms_norm(hidden, (config.hidden,), layer.attention_norm, config.norm_epsilon)[:, settings.skipped :].flatten(
            0, 1
        )
        for hidden in (fed, exact)
    )
    matrix = layer.projections["qkv"][config.heads * config.head_dim :]
    directions = _directions(config, layer, matrix, target_inputs, settings, sensitivity)
    grid = _grid(directions.variances, settings)
    rows = directions.rows[_repeated(grid.width, directions.rank)]
    encoder, bias = _with_gains(rows, inputs, grid)
    decoder, decoder_bias, errors = regress_decoder(encoder, bias, grid, matrix, inputs, target_inputs, settings.ridge)
    code = FsqLayer(grid, encoder, bias, decoder, decoder_bias)
    keys = config.kv_heads * config.head_dim
    key_error, value_error = (float(part.sum().sqrt()) for part in (errors[0, :keys], errors[0, keys:]))
    key_size, value_size = (float(part.sum().sqrt()) for part in (errors[1, :keys], errors[1, keys:]))
    return Conversion(code, key_error / key_size, value_error / value_size, directions.rank)


@dataclass(frozen=True)
class _Directions:
    rows: Tensor
    """[rank, hidden]: unit-variance coordinates of the input, the strongest first."""
    variances: Tensor
    """[rank] float64, in the metric."""

    @property
    def rank(self) -> int:
        return self.rows.shape[0]


def _directions(
    config: ModelConfig,
    layer: LayerWeights,
    matrix: Tensor,
    x: Tensor,
    settings: FsqSettings,
    sensitivity: Tensor | None,
) -> _Directions:
    mean = x.mean(0)
    moments = torch.zeros(x.shape[1], x.shape[1], dtype=torch.float64, device=x.device)
    for part in torch.split(x, _BATCH):
        apart = (part - mean).double()
        moments += apart.T @ apart
    covariance = matrix.double() @ (moments / x.shape[0]) @ matrix.double().T
    if settings.metric == "output":
        metric = output_metric(config, layer, x, covariance)
    elif sensitivity is not None:
        metric = divergence_metric(config, covariance, sensitivity)
    else:
        metric = balanced_metric(config, covariance)
    values, vectors = torch.linalg.eigh(metric @ covariance @ metric.T)
    rank = int((values > 1e-6 * values[-1]).sum())
    values, vectors = values.flip(0)[:rank], vectors.flip(1)[:, :rank]
    return _Directions(((vectors / values.sqrt()).T @ metric @ matrix.double()).float(), values)


_DISTORTION: Mapping[int, float] = {0: 1.0, 1: 0.363, 2: 0.1188, 4: 0.01154, 8: 0.00009}
"""Of a Gaussian coordinate on the best uniform grid of so many bits (numerical integration)."""


def _grid(variances: Tensor, settings: FsqSettings) -> FsqGrid:
    if settings.levels:
        return FsqGrid.uniform(uniform_width(settings.nbytes, settings.levels), settings.levels, settings.bound)
    return FsqGrid(give_out_bits(variances.tolist(), 8 * settings.nbytes), settings.bound)


def give_out_bits(variances: list[float], left: int) -> tuple[int, ...]:
    """Bits of coordinates, the widest first: each step goes where it removes most distortion a bit."""
    steps = [(-variance * (_DISTORTION[0] - _DISTORTION[1]), index, 0, 1) for index, variance in enumerate(variances)]
    heapq.heapify(steps)
    bits = [0] * len(variances)
    while steps:
        _, index, now, then = heapq.heappop(steps)
        if then - now <= left:
            left -= then - now
            bits[index] = then
            if then < 8:
                gain = variances[index] * (_DISTORTION[then] - _DISTORTION[2 * then]) / then
                heapq.heappush(steps, (-gain, index, then, 2 * then))
    # Variances fall along the directions, and with them the bits.
    return tuple(sorted((width for width in bits if width), reverse=True))


def _repeated(width: int, rank: int) -> Tensor:
    """Which direction each coordinate is: beyond the rank they come again (the paper)."""
    return torch.arange(width) % rank


def _with_gains(rows: Tensor, x: Tensor, grid: FsqGrid) -> tuple[Tensor, Tensor]:
    """E [w, hidden] and e [w], each row at the gain whose levels say most about it."""
    mean = x.mean(0)
    u = linear(x[:: max(1, x.shape[0] // _GAIN_TOKENS)] - mean, rows)
    best = torch.full((rows.shape[0],), -1.0, device=x.device)
    gains = torch.zeros_like(best)
    for gain in _GAINS.to(x.device):
        centres = grid.centres(grid.quantize(u * gain))
        likeness = _correlation(u, centres)
        gains = torch.where(likeness > best, gain, gains)
        best = torch.maximum(best, likeness)
    encoder = (rows * gains[:, None]).half().float()
    return encoder, -encoder @ mean


def _correlation(u: Tensor, c: Tensor) -> Tensor:
    u, c = u - u.mean(0), c - c.mean(0)
    product: Tensor = (u * c).mean(0).square() / (u.square().mean(0) * c.square().mean(0)).clamp_min(1e-12)
    return product


def regress_decoder(
    encoder: Tensor, bias: Tensor, grid: FsqGrid, matrix: Tensor, x: Tensor, exact: Tensor, ridge: float
) -> tuple[Tensor, Tensor, Tensor]:
    """D [m, w], b [m], and a row's squared errors beside its squared values about the mean: [2, m]."""
    width, outputs = grid.width, matrix.shape[0]
    sums = [torch.zeros(n, dtype=torch.float64, device=x.device) for n in (width, outputs)]
    products = [torch.zeros(n, width, dtype=torch.float64, device=x.device) for n in (width, outputs)]
    squares = torch.zeros(outputs, dtype=torch.float64, device=x.device)
    for part, wanted in zip(torch.split(x, _BATCH), torch.split(exact, _BATCH), strict=True):
        c = grid.centres(grid.quantize(linear(part, encoder, bias))).double()
        y = linear(wanted, matrix).double()
        for total, product, left in zip(sums, products, (c, y), strict=True):
            total += left.sum(0)
            product += left.T @ c
        squares += y.square().sum(0)
    count = x.shape[0]
    mean_c, mean_y = (total / count for total in sums)
    cov_c, cov_y = products[0] / count - mean_c.outer(mean_c), products[1] / count - mean_y.outer(mean_c)
    cov_c.diagonal().add_(ridge * cov_c.diagonal().mean())
    decoder = torch.linalg.solve(cov_c, cov_y.T).T
    variance = squares / count - mean_y.square()
    # What regression leaves: Var(y) - 2 D Cov(c, y) + D Cov(c) Dᵀ, its diagonal.
    left_over = variance - 2 * (decoder * cov_y).sum(1) + ((decoder @ cov_c) * decoder).sum(1)
    decoder = decoder.half().double()
    return decoder.float(), (mean_y - decoder @ mean_c).float(), torch.stack((left_over.clamp_min(0), variance))
