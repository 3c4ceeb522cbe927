"""Codes of finite scalar quantization: grids, nesting, packing, gradients, and mixing values among codes."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from strataflux.kernels.fsq import FsqGrid, FsqLayer, bits_of_levels, quantize_straight_through

Z = torch.linspace(-4, 4, 20_001)


def grid(levels: int, bound: str) -> FsqGrid:
    return FsqGrid.uniform(1, levels, bound)  # type: ignore[arg-type]


def codes_of(z: Tensor, levels: int, bound: str) -> Tensor:
    return grid(levels, bound).quantize(z[:, None])[:, 0].long()


@pytest.mark.parametrize("levels", [4, 16, 256])
@pytest.mark.parametrize("bound", ["tanh", "floor", "clamp"])
def test_every_level_is_reached_in_order_and_centres_are_symmetric(levels: int, bound: str) -> None:
    codes = codes_of(Z, levels, bound)
    assert torch.unique(codes).tolist() == list(range(levels))
    assert bool((codes.diff() >= 0).all())
    centres = grid(levels, bound).centres(torch.arange(levels, dtype=torch.uint8)[:, None]).flatten()
    assert torch.equal(centres, -centres.flip(0))
    assert torch.equal(centres.diff(), torch.ones(levels - 1))


def published(levels: int, sign: int, shift_of: Callable[[float], float]) -> Tensor:
    """Codes -L/2 … L/2 - 1 of ``Z`` in a published form for even L: H (1 ∓ eps), and how a shift is made of 0.5 / H."""
    half = (levels - 1) * (1 - sign * 1e-3) / 2
    return (half * (Z + shift_of(0.5 / half)).tanh() - 0.5).round().long()


@pytest.mark.parametrize("levels", [4, 16, 256])
def test_both_published_even_forms_agree_but_for_their_epsilon(levels: int) -> None:
    one, other = published(levels, 1, math.tan), published(levels, -1, math.atanh)
    for codes in (one, other):
        assert torch.unique(codes).tolist() == list(range(-levels // 2, levels // 2))
        assert int(codes[len(Z) // 2]) == 0  # a mid-tread grid: zero lies in the middle of its cell
        near = 800 // levels
        assert not codes[len(Z) // 2 - near : len(Z) // 2 + near].any()
    # Half-ranges that are 2 eps apart move a value by up to that share of (L - 1) / 2 cells.
    assert float((one != other).float().mean()) < 2e-3 * (levels - 1) / 2
    assert int((one - other).abs().max()) == 1
    if levels == 4:
        assert math.atanh(1 / 3) - math.tan(1 / 3) == pytest.approx(3.2e-4, rel=0.05)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_published_even_form_is_the_symmetric_one_with_a_shift(sign: int) -> None:
    half = 15 * (1 - sign * 1e-3) / 2
    shift = math.atanh(0.5 / half)
    published = (half * (Z + shift).tanh() - 0.5).round().long() + 8
    # They differ by the published form's epsilon alone: at most at the borders of cells.
    differing = published != codes_of(Z + shift, 16, "tanh")
    assert float(differing.float().mean()) < 0.005
    assert int((published - codes_of(Z + shift, 16, "tanh")).abs().max()) <= 1


@pytest.mark.parametrize("bound", ["floor", "clamp"])
@pytest.mark.parametrize(("coarse", "fine"), [(4, 16), (4, 256), (16, 256)])
def test_fewer_bits_are_the_high_bits_of_more(bound: str, coarse: int, fine: int) -> None:
    assert torch.equal(codes_of(Z, coarse, bound), codes_of(Z, fine, bound) * coarse // fine)


def test_rounding_at_tanh_does_not_nest_by_bits() -> None:
    assert not torch.equal(codes_of(Z, 4, "tanh"), codes_of(Z, 16, "tanh") // 4)


@given(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=40), st.integers(0, 2**31))
def test_packing_is_dense_and_reversible(bits: list[int], seed: int) -> None:
    mixed = FsqGrid(tuple(sorted(bits, reverse=True)), "clamp")
    random = torch.Generator().manual_seed(seed)
    codes = (torch.rand(3, mixed.width, generator=random) * mixed.levels).floor().to(torch.uint8)
    packed = mixed.pack(codes)
    assert packed.shape == (3, -(-sum(bits) // 8))
    assert packed.dtype == torch.uint8
    assert torch.equal(mixed.unpack(packed), codes)


def test_bytes_are_as_written() -> None:
    assert FsqGrid.uniform(3, 16).pack(torch.tensor([1, 2, 15], dtype=torch.uint8)).tolist() == [0x21, 0x0F]
    assert FsqGrid((8, 4, 2, 2)).pack(torch.tensor([200, 9, 3, 1], dtype=torch.uint8)).tolist() == [200, 0x79]


@pytest.mark.parametrize("bound", ["tanh", "floor", "clamp"])
def test_training_sees_levels_forward_and_the_bound_s_slope_backward(bound: str) -> None:
    z = torch.linspace(-0.9, 0.9, 37).requires_grad_()
    c = quantize_straight_through(z[:, None], grid(16, bound))
    assert torch.allclose(c.detach().flatten(), codes_of(z.detach(), 16, bound) - 7.5, atol=1e-5)
    c.sum().backward()  # type: ignore[no-untyped-call]
    slope = 1 - z.detach().tanh() ** 2
    expected = {"tanh": 7.5 * slope, "floor": 8 * slope, "clamp": torch.full_like(slope, 8.0)}[bound]
    assert z.grad is not None
    assert torch.allclose(z.grad, expected, atol=1e-5)


def test_beyond_the_range_of_clamp_only_the_way_back_has_a_slope() -> None:
    z = torch.tensor([-2.0, -2.0, 2.0, 2.0]).requires_grad_()
    c = quantize_straight_through(z[:, None], grid(16, "clamp")).flatten()
    (c * torch.tensor([1.0, -1.0, 1.0, -1.0])).sum().backward()  # type: ignore[no-untyped-call]
    assert z.grad is not None
    # A step goes against the gradient: up from -2 needs a negative one, down from 2 a positive one.
    assert z.grad.tolist() == [0.0, -8.0, 8.0, 0.0]


def layer_of(width: int = 24, hidden: int = 32, outputs: int = 48) -> FsqLayer:
    random = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random)

    return FsqLayer(
        FsqGrid.uniform(width, 16, "clamp"),
        draw(width, hidden) / 20,
        draw(width) / 9,
        draw(outputs, width),
        draw(outputs),
    )


def test_values_may_be_mixed_among_codes_and_decoded_once() -> None:
    layer = layer_of()
    codes = layer.encode(torch.randn(50, 32, generator=torch.Generator().manual_seed(4)))
    weights = torch.rand(5, 50, generator=torch.Generator().manual_seed(5)).softmax(-1)
    mixed = weights @ layer.grid.centres(codes)
    assert torch.allclose(mixed @ layer.decoder.T + layer.decoder_bias, weights @ layer.decode(codes), atol=1e-4)


def test_the_first_coordinates_are_a_code_of_their_own_and_the_rest_adds() -> None:
    layer, x = layer_of(), torch.randn(50, 32, generator=torch.Generator().manual_seed(4))
    part = layer.first(10, layer.decoder_bias)
    assert torch.equal(part.encode(x), layer.encode(x)[:, :10])
    rest = layer.grid.centres(layer.encode(x))[:, 10:] @ layer.decoder[:, 10:].T
    assert torch.allclose(part.decode(part.encode(x)) + rest, layer.decode(layer.encode(x)), atol=1e-4)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: bits_of_levels(12), "12 levels"),
        (lambda: FsqGrid(()), "widest first"),
        (lambda: FsqGrid((2, 4)), "widest first"),
        (lambda: FsqGrid((3,)), "widest first"),
        (lambda: FsqGrid((4,), "sigmoid"), "sigmoid"),  # type: ignore[arg-type]
        (lambda: FsqGrid((4, 4)).unpack(torch.zeros(2, dtype=torch.uint8)), "2 bytes"),
    ],
)
def test_what_cannot_be_is_refused_by_name(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
