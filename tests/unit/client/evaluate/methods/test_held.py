"""What positions see by each method of holding keys and values, against its definition one number at a time."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from strataflux.client.errors import MisuseError
from strataflux.client.evaluate.methods.base import Held, Making, parse_method
from strataflux.client.evaluate.methods.kivi import kivi_bytes
from strataflux.client.evaluate.methods.pyramid import WINDOW, PyramidPlan, past_tokens, scores_of_past
from strataflux.client.evaluate.methods.ranges import round_in_range
from strataflux.client.evaluate.methods.registry import make_method
from strataflux.client.evaluate.methods.turboquant import best_levels, code_vectors
from strataflux.client.runtime.models import DecoderWeights, ModelConfig

HEADS, KV_HEADS, DIM = 4, 2, 16


def heads(tokens: int, seed: int = 0, sequences: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = [(sequences, count, tokens, DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]
    queries, keys, values = (torch.randn(shape, generator=random) for shape in shapes)
    return 2 * queries, keys, values


def attend_one(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [D] over keys and values [tokens, D]."""
    return (keys @ query / math.sqrt(DIM)).softmax(0) @ values


def one_by_one(held: Held, parts: tuple[Tensor, Tensor, Tensor], prompt: int) -> Tensor:
    found = [held.prefill(*(part[:, :, :prompt] for part in parts))] if prompt else []
    count = parts[0].shape[2]
    found += [held.decode(*(part[:, :, at : at + 1] for part in parts)) for at in range(prompt, count)]
    return torch.cat(found, 2)


# --- ranges -----------------------------------------------------------------------------------------------------------


def test_ranges_are_their_definition() -> None:
    x = torch.randn(7, 32, generator=torch.Generator().manual_seed(1))
    for row, found in zip(x.tolist(), round_in_range(x, 2).tolist(), strict=True):
        zero = float(torch.tensor(min(row)).half())
        scale = float(torch.tensor((max(row) - zero) / 3).half())
        for number, value in zip(row, found, strict=True):
            nearest = min((zero + scale * level for level in range(4)), key=lambda level: abs(level - number))
            assert value == pytest.approx(nearest, abs=1e-5)


def test_a_range_of_nothing_is_its_zero_point() -> None:
    assert round_in_range(torch.full((1, 32), 0.5), 2).tolist() == [[0.5] * 32]
    assert torch.isfinite(round_in_range(torch.full((1, 32), 1e-9), 2)).all()


# --- KIVI -------------------------------------------------------------------------------------------------------------


def kivi_seen(keys: Tensor, values: Tensor, now: int) -> tuple[Tensor, Tensor]:
    """What the position ``now`` sees of keys and values [tokens, D], straight from the paper's algorithm."""
    coded = now // 128 * 128
    seen_keys, seen_values = keys[: now + 1].half().float(), values[: now + 1].half().float()
    for start in range(0, coded, 32):
        for channel in range(DIM):
            seen_keys[start : start + 32, channel] = round_in_range(seen_keys[start : start + 32, channel], 2)
    for token in range(max(0, now - 128)):
        seen_values[token] = round_in_range(seen_values[token], 2)
    return seen_keys, seen_values


@pytest.mark.parametrize("prompt", [0, 130, 256])
def test_kivi_sees_what_its_paper_says(weights: DecoderWeights, prompt: int) -> None:
    queries, keys, values = heads(290)
    held = make_method(parse_method("kivi:2"), Making(weights)).hold(0)
    if prompt:
        held.prefill(*(part[:, :, :prompt] for part in (queries, keys, values)))
    found = held.decode(*(part[:, :, prompt:] for part in (queries, keys, values)))
    for now in (prompt, 131, 160, 256, 289):
        if now < prompt:
            continue
        for head in (0, HEADS - 1):
            seen = kivi_seen(keys[0, head // 2], values[0, head // 2], now)
            expected = attend_one(queries[0, head, now], *seen)
            torch.testing.assert_close(found[0, head, now - prompt], expected, atol=1e-5, rtol=1e-4)


def test_kivi_prompts_attend_exactly(weights: DecoderWeights) -> None:
    parts = heads(200)
    exact = make_method(parse_method("exact"), Making(weights)).hold(0)
    held = make_method(parse_method("kivi:2"), Making(weights)).hold(0)
    torch.testing.assert_close(held.prefill(*parts), exact.prefill(*parts))


def test_kivi_counts_windows_and_scales() -> None:
    config = ModelConfig(8, 8, 8, 3, 4, 2, 64, 8, 1e4, 1e-5, True)
    assert kivi_bytes(config, 2, 128) == 3 * 2 * (64 * 4 * (8 + 4) + 128 * 64 * 2)
    # 100 keys and 128 values are exact; the other 256 and 228 take 2 bits each and 4 bytes for every 32.
    assert kivi_bytes(config, 2, 356) == 3 * 2 * (64 * 8 * 12 + 228 * 2 * 12 + 228 * 64 * 2)
    # With both windows full: what the Transformer-FSQ paper's tables show for its tasks and 4,096 bytes a token.
    paper = replace(config, kv_heads=8, heads=16, head_dim=128)
    assert kivi_bytes(paper, 2, 6783) / (3 * 6783) == pytest.approx(832, rel=0.002)


def test_kivi_refuses_heads_it_cannot_group(weights: DecoderWeights) -> None:
    odd = replace(weights, config=replace(weights.config, head_dim=48))
    with pytest.raises(MisuseError, match="multiple of 32"):
        make_method(parse_method("kivi:2"), Making(odd))


# --- TurboQuant -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bits", "distortion"), [(1, 0.3634), (2, 0.1175), (3, 0.0345), (4, 0.0095)])
def test_turboquant_distorts_as_the_best_grid_of_a_gaussian_does(bits: int, distortion: float) -> None:
    x = torch.randn(4000, 128, generator=torch.Generator().manual_seed(2)) * torch.linspace(0.1, 3, 4000)[:, None]
    error = ((code_vectors(x, bits) - x).square().sum(-1) / x.square().sum(-1)).mean()
    assert float(error) == pytest.approx(distortion, rel=0.06)


def test_levels_are_means_of_their_cells() -> None:
    levels = best_levels(16, 2)
    u = torch.nn.functional.normalize(torch.randn(400_000, 16, generator=torch.Generator().manual_seed(4)), dim=1)
    u = u[:, 0].contiguous()
    cells = torch.bucketize(u, (levels[1:] + levels[:-1]) / 2)
    means = torch.stack([u[cells == cell].mean() for cell in range(4)])
    torch.testing.assert_close(means, levels, atol=2e-3, rtol=0)
    torch.testing.assert_close(levels, -levels.flip(0), atol=1e-4, rtol=0)


def test_turboquant_sees_codes_from_the_first(weights: DecoderWeights) -> None:
    method = make_method(parse_method("turboquant:3"), Making(weights))
    queries, keys, values = heads(20)
    exact = make_method(parse_method("exact"), Making(weights)).hold(0)
    expected = exact.prefill(queries, code_vectors(keys, 3), code_vectors(values, 3))
    torch.testing.assert_close(one_by_one(method.hold(0), (queries, keys, values), 7), expected)
    assert method.nbytes(10, 3) == 13 * 2 * (2 * 2 * (16 * 3 // 8 + 2))
    assert code_vectors(torch.zeros(1, 16), 3).abs().max() == 0


# --- PyramidKV --------------------------------------------------------------------------------------------------------


def test_past_tokens_fall_in_equal_steps() -> None:
    assert past_tokens(4, 1000, 108) == [195, 132, 69, 6]  # min 100 // 20 = 5, max 195, steps of 190 // 3 = 63
    assert past_tokens(4, 128, 108) == [120, 107, 94, 81]  # no more than 120 in the first layer, so 80 in the last
    assert past_tokens(1, 1000, 108) == [195]


def plan(ratio: int, position_bytes: int = 4) -> PyramidPlan:
    return PyramidPlan(30, Fraction(768, ratio), 768, position_bytes)


@pytest.mark.parametrize("prompt", [60, 1024, 8192])
@pytest.mark.parametrize("ratio", [2, 4])
def test_no_more_is_kept_than_the_budget_and_not_much_less(ratio: int, prompt: int) -> None:
    kept = plan(ratio).kept(prompt)
    assert kept == sorted(kept, reverse=True)
    assert min(kept) >= WINDOW
    assert max(kept) <= prompt
    spent, budget = sum(kept) * 772, 30 * prompt * 768 / ratio
    assert budget - 30 * 3 * 772 <= spent <= budget
    assert plan(ratio).nbytes(prompt, 5) == spent + 5 * 30 * 768
    assert plan(ratio, 12).nbytes(prompt, 0) == sum(plan(ratio, 12).kept(prompt)) * 780


def test_all_is_kept_where_all_fits_and_nothing_less_than_the_window() -> None:
    assert plan(1).kept(100) == [100] * 30
    assert plan(1).nbytes(100, 10) == 110 * 30 * 768
    assert plan(4).nbytes(0, 10) == 10 * 30 * 768
    with pytest.raises(MisuseError, match="more than the 8 tokens of 772 bytes"):
        plan(32).kept(256)


def by_hand(queries: Tensor, keys: Tensor, head: int) -> list[float]:
    """What the last eight tokens paid each past one, by one query head, straight from the definition."""
    count = keys.shape[2]
    total = [0.0] * (count - WINDOW)
    for now in range(count - WINDOW, count):
        logits = [float(queries[0, head, now] @ keys[0, head // 2, at]) / math.sqrt(DIM) for at in range(now + 1)]
        weights = torch.tensor(logits).softmax(0).tolist()
        total = [one + weights[at] for at, one in enumerate(total)]
    return total


def test_scores_are_the_attention_of_the_window() -> None:
    queries, keys, _ = heads(40)
    paid = torch.tensor([by_hand(queries, keys, head) for head in range(HEADS)])

    def pooled(row: Tensor) -> list[float]:
        return [float(row[max(0, at - 3) : at + 4].max()) for at in range(len(row))]

    by_head = torch.tensor([pooled(paid[:2].mean(0)), pooled(paid[2:].mean(0))])
    torch.testing.assert_close(scores_of_past(queries, keys, shared=False)[0], by_head)
    shared = torch.tensor([pooled(paid.mean(0))])
    torch.testing.assert_close(scores_of_past(queries, keys, shared=True)[0], shared)


@pytest.mark.parametrize(("name", "window"), [("pyramid", 8), ("pyramid-shared", 8), ("pyramid-shared", 16)])
def test_positions_after_a_prompt_see_what_was_kept(weights: DecoderWeights, name: str, window: int) -> None:
    method = make_method(parse_method(f"{name}:2x:{window}"), Making(weights))
    queries, keys, values = heads(64, seed=5, sequences=2)
    held, prompt = method.hold(1), 60
    exact = make_method(parse_method("exact"), Making(weights)).hold(1)
    before = [part[:, :, :prompt] for part in (queries, keys, values)]
    torch.testing.assert_close(held.prefill(*before), exact.prefill(*before))
    found = held.decode(*(part[:, :, prompt:] for part in (queries, keys, values)))
    positions = 4 if name == "pyramid-shared" else 8
    kept = PyramidPlan(2, Fraction(64), 128, positions, window).kept(prompt)[1]
    scores = scores_of_past(before[0], before[1], window, shared=name == "pyramid-shared")
    for sequence in range(2):
        for head in range(HEADS):
            own = scores[sequence, 0 if name == "pyramid-shared" else head // 2]
            chosen = sorted(own.topk(kept - window).indices.tolist()) + list(range(prompt - window, prompt + 3))
            seen = (part[sequence, head // 2][chosen] for part in (keys, values))
            expected = attend_one(queries[sequence, head, prompt + 2], *seen)
            torch.testing.assert_close(found[sequence, head, 2], expected)
    assert method.evicts
    assert method.nbytes(prompt, 4) < 0.55 * method.nbytes(0, prompt + 4)


def test_steps_one_by_one_are_steps_at_once(making: Making) -> None:
    parts = heads(300, seed=6)
    for text in ("kivi:4", "turboquant:2", "pyramid:4x", "pyramid-shared:4x", "exact"):
        method = make_method(parse_method(text), making)
        held = method.hold(0)
        at_once = [held.prefill(*(part[:, :, :250] for part in parts))]
        at_once.append(held.decode(*(part[:, :, 250:] for part in parts)))
        stepped = one_by_one(method.hold(0), parts, 250)
        torch.testing.assert_close(stepped, torch.cat(at_once, 2), atol=1e-5, rtol=1e-4)


# --- codes and eviction -----------------------------------------------------------------------------------------------


def test_the_stack_evicts_codes(making: Making) -> None:
    method = make_method(parse_method("fsq+pyramid:4x"), making)
    alone = make_method(parse_method("fsq:2x"), making)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(7))
    torch.testing.assert_close(method.rebuild[1](x), alone.rebuild[1](x))
    kept = PyramidPlan(2, Fraction(32), 64).kept(100)
    assert method.nbytes(100, 6) == sum(kept) * 68 + 6 * 2 * 64
    assert method.nbytes(100, 0) <= 100 * 2 * 32
    with pytest.raises(MisuseError, match="at least 4x"):
        make_method(parse_method("fsq+pyramid:2x"), making)
