"""Each base's search against its definition, on matrices small enough to look at all of it."""

import itertools
from statistics import NormalDist

import pytest
import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.bases.lnq import LnqSettings, _Problem, descend_block, quantize_lnq
from strataflux.client.prepare.bases.matrices import CodebookCodes, nearest_codes, power_cost, round_groups
from strataflux.client.prepare.bases.nf4 import Nf4Settings, quantize_nf4
from strataflux.client.prepare.bases.rtn import EXPONENT, FACTORS, LEAST_FACTOR, RtnSettings, quantize_rtn
from strataflux.client.prepare.bases.sqllm import SqllmSettings, quantize_sqllm
from strataflux.client.prepare.errors import DamagedModel
from strataflux.kernels.nf4 import NF4, dequantize_nf4


def random_weight(outputs: int, inputs: int, seed: int = 0) -> Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed)) * 0.02


def test_nf4_is_the_table_of_qlora() -> None:
    # Appendix E there: quantiles, eight positive and seven negative, over the largest.
    quantile = NormalDist().inv_cdf
    above, below = (torch.linspace(0.9677083, 0.5, count)[:-1].double().tolist() for count in (9, 8))
    values = sorted([*map(quantile, above), 0.0, *(-quantile(p) for p in below)])
    torch.testing.assert_close(torch.tensor(NF4), torch.tensor(values) / max(values), atol=3e-7, rtol=0)
    assert torch.tensor(NF4).double().tolist() == list(NF4)  # float32 holds them


@pytest.mark.parametrize("group", [64, 128])
def test_nf4_takes_the_nearest_value_under_the_largest_magnitude(group: int) -> None:
    weight = random_weight(5, 256)
    weight[1, :group] = 0
    low = quantize_nf4("w", weight, Nf4Settings(group=group))
    assert torch.equal(low.scales, weight.view(5, -1, group).abs().amax(-1).half())
    values = low.scales.float().repeat_interleave(group, 1)[..., None] * torch.tensor(NF4)
    found = low.dequantized()
    torch.testing.assert_close((found - weight).abs(), (values - weight[..., None]).abs().amin(-1))
    assert torch.equal(found, values.gather(-1, low.codes.long()[..., None])[..., 0])
    assert not found[1, :group].any()
    assert low.bits_per_weight == 4 + 16 / group


def test_nf4_refuses_what_it_cannot_hold() -> None:
    with pytest.raises(DamagedModel, match=r"layers\.0\.o"):
        quantize_nf4("layers.0.o", random_weight(2, 64) * 1e9, Nf4Settings())
    with pytest.raises(MisuseError, match="group"):
        Nf4Settings(group=32)
    with pytest.raises(ValueError, match=r"codes \[2, 64\] and scales \[2, 2\] of groups of 64"):
        dequantize_nf4(torch.zeros(2, 64, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.float16), 64)


def random_hessian(inputs: int, seed: int = 0) -> Tensor:
    x = torch.randn(4 * inputs, inputs, generator=torch.Generator().manual_seed(seed))
    x = x + x[:, :1] * torch.linspace(0, 2, inputs)
    return x.T @ x


def weighted_error(weight: Tensor, low: Tensor, fisher: Tensor) -> Tensor:
    return ((weight - low).square() * fisher).sum(-1)


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [64, 128])
def test_rounding_on_any_device_equals_the_compiled_base(bits: int, group: int) -> None:
    weight = random_weight(6, 256, bits)
    shrink = torch.linspace(1.0, LEAST_FACTOR, FACTORS)
    low = round_groups("w", weight, bits, group, shrink, power_cost(EXPONENT))
    assert torch.equal(low.dequantized(), quantize_rtn("w", weight, RtnSettings(bits, group)).dequantized())
    assert low.bits_per_weight == bits + 24 / group


def test_rounding_refuses_what_float16_cannot_scale() -> None:
    with pytest.raises(DamagedModel, match="layers"):
        round_groups("layers.0.o", random_weight(2, 64) * 1e9, 3, 64, torch.ones(1), power_cost(2.0))


def best_split(weight: Tensor, fisher: Tensor, entries: int) -> float:
    """Weighted k-means in one dimension by trying every split of the sorted row."""
    values, order = weight.sort()
    shares = fisher[order]
    best = float("inf")
    for borders in itertools.combinations(range(1, len(values)), entries - 1):
        total = 0.0
        for start, stop in itertools.pairwise((0, *borders, len(values))):
            share, part = shares[start:stop], values[start:stop]
            total += float((share * (part - (share * part).sum() / share.sum()).square()).sum())
        best = min(best, total)
    return best


def test_sqllm_comes_close_to_the_best_codebook_there_is() -> None:
    weight = random_weight(12, 16)
    fisher = torch.rand(12, 16, generator=torch.Generator().manual_seed(1)).pow(4)
    low = quantize_sqllm(weight, fisher, 2)
    found = weighted_error(weight, low.dequantized(), fisher)
    best = torch.tensor([best_split(*row, 4) for row in zip(weight, fisher, strict=True)])
    assert float((found / best).median()) < 1.02
    assert float(found.sum()) < 1.15 * float(best.sum())


def test_sqllm_codes_are_the_nearest_entries_and_codebooks_ascend() -> None:
    weight = random_weight(5, 64)
    low = quantize_sqllm(weight, torch.ones(5, 64), 3)
    entries = low.codebook.float()
    assert bool((entries.diff(dim=-1) >= 0).all())
    nearest = (weight[:, :, None] - entries[:, None]).abs().min(-1).values
    torch.testing.assert_close((low.dequantized() - weight).abs(), nearest)
    assert low.bits_per_weight == 3 + 16 * 8 / 64


def test_sqllm_spends_its_codebook_where_the_loss_depends() -> None:
    weight = random_weight(4, 256)
    fisher = torch.ones(4, 256)
    fisher[:, :64] = 1000
    guided, even = (quantize_sqllm(weight, share, 3).dequantized() for share in (fisher, torch.ones(4, 256)))
    assert float((guided - weight)[:, :64].square().mean()) < 0.9 * float((even - weight)[:, :64].square().mean())


def test_sqllm_restores_rows_with_few_values_and_rows_without_gradients() -> None:
    weight = torch.tensor([[0.5, -0.25, 0.0, 1.0] * 4, [0.125] * 16])
    fisher = torch.zeros(2, 16)
    assert torch.equal(quantize_sqllm(weight, fisher, 2).dequantized(), weight)


def test_lnq_codebooks_solve_the_least_squares_problem() -> None:
    weight, hessian = random_weight(6, 40), random_hessian(40)
    random = torch.Generator().manual_seed(3)
    codes = torch.stack([torch.randperm(40, generator=random) % 8 for _ in range(6)])
    problem = _Problem.of(weight, hessian[None], [slice(0, 6)])
    fitted = problem.fit_codebook(codes, torch.zeros(6, 8))
    root = torch.linalg.cholesky(problem.hessians[0].double()).T
    for row in range(6):
        hot = torch.nn.functional.one_hot(codes[row], 8).double()
        expected = torch.linalg.lstsq(root @ hot, (root @ weight[row].double())[:, None]).solution[:, 0]
        torch.testing.assert_close(fitted[row].double(), expected, rtol=1e-3, atol=1e-6)


def test_lnq_descent_is_cyclic_coordinate_descent() -> None:
    weight, hessians = random_weight(4, 130), torch.stack((random_hessian(130), random_hessian(130, 1)))
    start = quantize_sqllm(weight, torch.ones(4, 130), 2)
    problem = _Problem.of(weight, hessians, [slice(0, 2), slice(2, 4)])
    codebook = start.codebook.float()
    codes = problem.descend(codebook, start.codes.long(), 1, descend_block)
    for row in range(4):
        hessian, low = problem.hessians[row // 2].double(), start.dequantized()[row].double()
        for i in range(130):
            error = low - weight[row].double()
            target = low[i] - (hessian[i] @ error) / hessian[i, i]
            low[i] = codebook[row].double()[(codebook[row].double() - target).abs().argmin()]
        assert float((codebook[row][codes[row]].double() - low).abs().max()) < 1e-6


def test_lnq_improves_every_row_and_finds_the_best_of_all_codes() -> None:
    weight, hessian = random_weight(8, 6), random_hessian(6)
    start = quantize_sqllm(weight, hessian.diagonal().expand(8, 6), 1 + 1)
    low = quantize_lnq(weight, start, hessian[None], [slice(0, 8)])
    problem = _Problem.of(weight, hessian[None], [slice(0, 8)])
    before, after = problem.cost(start.dequantized()), problem.cost(low.dequantized())
    assert bool((after <= before).all())
    options = torch.cartesian_prod(*[torch.arange(4)] * 6)
    for row in range(8):
        # With its codebook given, no assignment of codes that coordinate descent ends at is far from the best one.
        error = low.codebook[row].float()[options] - weight[row]
        best = ((error @ problem.hessians[0]) * error).sum(-1).min()
        assert float(after[row]) < 4 * float(best) + 1e-9


def test_lnq_beats_its_start_by_far_when_inputs_hang_together() -> None:
    weight, x = (
        random_weight(32, 128),
        random_weight(600, 8, 1) @ random_weight(8, 128, 2) + 1e-4 * random_weight(600, 128),
    )
    hessian = x.T @ x * 1e6
    start = quantize_sqllm(weight, hessian.diagonal().expand(32, 128), 3)
    groups = [slice(0, 8), slice(8, 32)]
    low = quantize_lnq(weight, start, hessian.expand(2, 128, 128), groups)
    problem = _Problem.of(weight, hessian.expand(2, 128, 128), groups)
    assert float(problem.cost(low.dequantized()).sum()) < 0.6 * float(problem.cost(start.dequantized()).sum())


def test_lnq_without_gradients_keeps_its_start_or_better() -> None:
    weight = random_weight(4, 64)
    start = quantize_sqllm(weight, torch.ones(4, 64), 3)
    low = quantize_lnq(weight, start, torch.zeros(1, 64, 64), [slice(0, 4)])
    assert float((low.dequantized() - weight).square().sum()) <= float((start.dequantized() - weight).square().sum())


def test_nearest_codes_of_a_row() -> None:
    codebook = torch.tensor([[-1.0, 0.0, 0.5, 2.0]])
    assert nearest_codes(torch.tensor([[-9.0, -0.4, 0.3, 1.2, 1.3]]), codebook).tolist() == [[0, 1, 2, 2, 3]]
    low = CodebookCodes(torch.tensor([[3, 0]], dtype=torch.uint8), codebook.half(), 2)
    assert low.dequantized().tolist() == [[2.0, -1.0]]


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(MisuseError, match="5"):
        SqllmSettings(5)
    with pytest.raises(MisuseError, match="guide groups: found 3"):
        LnqSettings(3, 3)
