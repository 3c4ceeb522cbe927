"""Conversion to discrete codes on a synthetic layer with known results, sizes, and training of what was inserted."""

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from strataflux.client.errors import InputError
from strataflux.client.evaluate.dense import dense_reference, score_logits
from strataflux.client.evaluate.fsq import FsqTiers, fsq_logits, recall_of_tiers
from strataflux.client.evaluate.methods.latent import fit_latent, round_latent
from strataflux.client.prepare.fsq import (
    Conversion,
    FsqSettings,
    code_bytes,
    convert,
    convert_layer,
    full_bytes,
    uniform_width,
)
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings
from strataflux.client.prepare.fsq_tune_text import hold_out, random_sequences
from strataflux.client.runtime.forward import forward_text
from strataflux.client.runtime.models import DecoderWeights, LayerWeights, ModelConfig
from strataflux.kernels.fsq import FsqLayer

HIDDEN, KEYS = 576, 192
CPU = torch.device("cpu")


class Synthetic:
    """A layer like SmolLM2-135M's: a decaying spectrum, topics, a few large offsets, keys four times louder."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(1)
        scales = torch.arange(1, HIDDEN + 1).float().pow(-0.45)
        basis, topics, mean = self.turn(HIDDEN), self.draw(48, HIDDEN) * scales * 0.9, self.draw(HIDDEN) * 0.05
        mean[torch.randperm(HIDDEN, generator=self.random)[:4]] += 1.5
        norm = 1 + 0.3 * self.draw(HIDDEN)
        qkv = torch.cat((self.matrix(HIDDEN, 0.3, 0.2), self.matrix(KEYS, 0.45, 0.3), self.matrix(KEYS, 0.25, 0.08)))
        self.layer = LayerWeights(norm, norm, {"qkv": qkv, "o": self.matrix(HIDDEN, 0.2, 0.1)})
        topic = torch.randint(0, 48, (13_000,), generator=self.random)
        loud = torch.exp(0.35 * self.draw(13_000, 1))
        self.hidden = (((self.draw(13_000, HIDDEN) * scales + topics[topic]) * loud) @ basis.T + mean)[None]
        self.config = ModelConfig(99, HIDDEN, 64, 1, 9, 3, 64, 64, 10000.0, 1e-6, True)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def turn(self, size: int) -> Tensor:
        turned: Tensor = torch.linalg.qr(self.draw(size, size))[0]
        return turned

    def matrix(self, rows: int, decay: float, scale: float) -> Tensor:
        sizes = torch.arange(1, rows + 1).float().pow(-decay)
        return self.turn(rows) @ torch.diag(sizes / sizes.norm() * rows**0.5) @ self.turn(HIDDEN)[:rows] * scale

    def seen(self) -> tuple[Tensor, Tensor]:
        """Inputs [tokens, hidden] of the layer's projections, and its keys and values."""
        x = rms_norm(self.hidden[0], (HIDDEN,), self.layer.attention_norm, 1e-6)
        return x, x @ self.layer.projections["qkv"][HIDDEN:].T

    def converted(self, **settings: Any) -> Conversion:
        return convert_layer(self.config, self.layer, self.hidden, self.hidden, FsqSettings(**settings))


@pytest.fixture(scope="module")
def synthetic() -> Synthetic:
    return Synthetic()


@pytest.mark.parametrize(
    ("nbytes", "levels", "bound", "key_error", "value_error"),
    [
        (24, 4, "tanh", 0.441, 0.479),
        (48, 4, "tanh", 0.385, 0.385),
        (96, 4, "tanh", 0.348, 0.352),
        (24, 16, "tanh", 0.434, 0.523),
        (48, 16, "tanh", 0.324, 0.376),
        (96, 16, "tanh", 0.230, 0.223),
        (192, 16, "tanh", 0.143, 0.145),
        (24, 16, "clamp", 0.426, 0.517),
        (48, 16, "clamp", 0.313, 0.366),
        (96, 16, "clamp", 0.211, 0.203),
        (192, 16, "clamp", 0.110, 0.112),
        (200, 16, "clamp", 0.110, 0.112),  # wider than the rank: the same directions again
        (48, 256, "tanh", 0.416, 0.509),
        (96, 256, "tanh", 0.296, 0.352),
        (192, 256, "tanh", 0.184, 0.173),
        (384, 256, "tanh", 0.022, 0.023),
        (384, 256, "clamp", 0.011, 0.012),
        (24, 0, "clamp", 0.381, 0.453),  # bits by direction
        (48, 0, "clamp", 0.277, 0.310),
        (96, 0, "clamp", 0.165, 0.166),
        (192, 0, "clamp", 0.060, 0.061),
    ],
)
def test_errors_of_a_synthetic_layer_are_those_of_another_implementation(
    synthetic: Synthetic, nbytes: int, levels: int, bound: str, key_error: float, value_error: float
) -> None:
    found = synthetic.converted(nbytes=nbytes, levels=levels, bound=bound, metric="balanced")
    assert found.rank == 2 * KEYS
    assert found.layer.grid.nbytes == nbytes
    # The layers are drawn anew: errors of about a hundredth differ by more than a tenth between draws.
    assert found.key_error == pytest.approx(key_error, rel=0.1, abs=0.003)
    assert found.value_error == pytest.approx(value_error, rel=0.1, abs=0.003)


@pytest.mark.parametrize(
    ("rank", "key_error", "value_error"),
    [(12, 0.648, 0.762), (24, 0.538, 0.653), (48, 0.415, 0.508), (96, 0.295, 0.351), (192, 0.182, 0.172)],
)
def test_latents_of_the_same_bytes_in_float16_lose_more(
    synthetic: Synthetic, rank: int, key_error: float, value_error: float
) -> None:
    x, exact = synthetic.seen()
    rebuilt = round_latent(fit_latent(synthetic.layer.projections["qkv"][HIDDEN:], x, x, rank), x, grid=False)(x)
    found = [float(part.norm()) for part in (exact - rebuilt).chunk(2, 1)]
    sizes = [float(part.norm()) for part in (exact - exact.mean(0)).chunk(2, 1)]
    assert found[0] / sizes[0] == pytest.approx(key_error, rel=0.1)
    assert found[1] / sizes[1] == pytest.approx(value_error, rel=0.1)


def test_bits_by_direction_beat_equal_bits_of_the_same_bytes(synthetic: Synthetic) -> None:
    equal = synthetic.converted(nbytes=96, levels=16, bound="clamp", metric="balanced")
    mixed = synthetic.converted(nbytes=96, levels=0, bound="clamp", metric="balanced")
    assert mixed.layer.grid.nbytes <= 96
    assert mixed.key_error < 0.85 * equal.key_error
    assert mixed.value_error < 0.85 * equal.value_error


def test_errors_are_those_of_the_text(synthetic: Synthetic) -> None:
    found = synthetic.converted(nbytes=96, levels=16, bound="clamp")
    x, exact = synthetic.seen()
    errors = (exact - found.layer.decode(found.layer.encode(x)))[:, :KEYS].norm()
    assert float(errors / (exact - exact.mean(0))[:, :KEYS].norm()) == pytest.approx(found.key_error, rel=1e-3)


def test_bytes_are_floored_before_coordinates_are_counted() -> None:
    eight_heads = ModelConfig(99, 1024, 64, 1, 16, 8, 128, 64, 10000.0, 1e-6, True)
    assert full_bytes(eight_heads) == 4096
    assert [code_bytes(eight_heads, ratio) for ratio in (8, 12, 97.5, 409.6)] == [512, 341, 42, 10]
    assert [uniform_width(nbytes, 16) for nbytes in (512, 341, 42, 10)] == [1024, 682, 84, 20]
    assert uniform_width(682, 256) == 682


TOKENS = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))


def layers_of(made: list[Conversion]) -> list[FsqLayer]:
    return [one.layer for one in made]


@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
@pytest.mark.parametrize("sequential", [True, False])
def test_a_fine_code_changes_next_to_nothing(tiny_source: Any, architecture: str, sequential: bool) -> None:
    source = tiny_source.with_config(architecture=architecture)
    settings = FsqSettings(64, 256, "clamp", sequential=sequential)
    codes = layers_of(convert(source, TOKENS, settings, CPU))
    weights, tokens = DecoderWeights.read(source), TOKENS[0].tolist()
    reference = dense_reference(weights, tokens)
    assert score_logits(forward_text(weights, tokens[:-1]), reference).kl < 1e-6
    assert score_logits(fsq_logits(weights, codes, tokens[:-1]), reference).kl < 2e-3


def test_tiers_lie_between_their_parts_and_meet_the_whole_when_all_is_refined(tiny_source: Any) -> None:
    from fractions import Fraction

    fine = layers_of(convert(tiny_source, TOKENS, FsqSettings(24, 16, "clamp"), CPU))
    coarse = [layer.first(6, layer.decoder_bias) for layer in fine]
    weights, tokens = DecoderWeights.read(tiny_source), TOKENS[0].tolist()
    reference = dense_reference(weights, tokens)

    def kl(codes: list[FsqLayer] | list[FsqTiers]) -> float:
        return score_logits(fsq_logits(weights, codes, tokens[:-1]), reference).kl

    def tiers(fraction: Fraction) -> list[FsqTiers]:
        return [FsqTiers(c, f, fraction, 1) for c, f in zip(coarse, fine, strict=True)]

    assert kl(tiers(Fraction(1))) == pytest.approx(kl(fine), rel=1e-3)
    assert kl(fine) < kl(tiers(Fraction(1, 4))) < kl(coarse)
    assert all(0 < share <= 1 for share in recall_of_tiers(weights, tiers(Fraction(1, 4)), tokens[:-1] * 6))


def test_training_helps_and_goes_on_after_an_interruption(tiny_source: Any, tmp_path: Path) -> None:
    weights = DecoderWeights.read(tiny_source)
    codes = layers_of(convert(tiny_source, TOKENS, FsqSettings(4, 16, "tanh"), CPU))
    settings = TuneSettings(steps=12, rate=3e-3)
    text = TOKENS.flatten()
    losses: list[float] = []
    whole = FsqTuning(weights, codes, settings)
    whole.run(random_sequences(text, 4, 32, seed=0), lambda _, loss: losses.append(loss))
    assert losses[-1] < losses[0]

    state = tmp_path / "state"
    FsqTuning(weights, codes, settings, state).run(islice(random_sequences(text, 4, 32, seed=0), 5))
    second = FsqTuning(weights, codes, settings, state)
    assert second.step == 5
    second.run(random_sequences(text, 4, 32, seed=0, first=5))
    assert second.step == 12
    for one, other in zip(whole.result(), second.result(), strict=True):
        assert torch.allclose(one.encoder, other.encoder, atol=1e-6)
        assert torch.allclose(one.decoder, other.decoder, atol=1e-6)


def test_what_does_best_on_held_out_text_is_kept_over_an_interruption(tiny_source: Any, tmp_path: Path) -> None:
    weights = DecoderWeights.read(tiny_source)
    codes = layers_of(convert(tiny_source, TOKENS, FsqSettings(4, 16, "tanh"), CPU))
    held_out, text = [TOKENS[:4, :32]], TOKENS[4:].flatten()
    ruinous = TuneSettings(steps=6, rate=3.0, check_every=1)
    state = tmp_path / "state"
    first = FsqTuning(weights, codes, ruinous, state, held_out)
    first.run(islice(random_sequences(text, 4, 32, seed=0), 3))
    second = FsqTuning(weights, codes, ruinous, state, held_out)
    second.run(random_sequences(text, 4, 32, seed=0, first=3))
    assert second.done
    assert second.held_out_loss == second.held_out_before == first.held_out_before
    for one, other in zip(codes, second.result(), strict=True):
        assert torch.allclose(one.encoder, other.encoder, atol=1e-6)
        assert torch.allclose(one.decoder, other.decoder, atol=1e-6)

    gentle = FsqTuning(weights, codes, TuneSettings(steps=20, rate=3e-3, check_every=2), held_out=held_out)
    gentle.run(random_sequences(text, 4, 32, seed=0))
    assert gentle.held_out_loss < gentle.held_out_before


def test_what_is_held_out_comes_from_everywhere_and_is_not_trained_on() -> None:
    train, held = hold_out(torch.arange(103), 4, 5)
    assert held.tolist() == [list(range(end - 5, end)) for end in (25, 50, 75, 103)]
    assert sorted([*train.tolist(), *held.flatten().tolist()]) == list(range(103))


def test_a_step_is_relative_to_what_it_changes(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source)
    codes = layers_of(convert(tiny_source, TOKENS, FsqSettings(16, 0, "clamp"), CPU))
    tuning = FsqTuning(weights, codes, TuneSettings(steps=1, rate=1e-2, decay=0.0))
    tuning.run(random_sequences(TOKENS.flatten(), 4, 32, seed=0))
    rate = tuning._settings.rate_at(1.0)
    for one, other in zip(codes, tuning.result(), strict=True):
        sizes = one.decoder.square().mean(0).sqrt()
        changes = (other.decoder - one.decoder).square().mean(0).sqrt() / sizes
        assert sizes.max() > 2 * sizes.min()
        assert float(changes.max()) == pytest.approx(rate, rel=0.05)
        assert float(changes.median()) == pytest.approx(rate, rel=0.05)


def test_the_rate_warms_up_and_falls_by_steps_or_by_the_clock() -> None:
    settings = TuneSettings(steps=100, rate=1.0)
    assert settings.rate_at(0.025) == pytest.approx(0.5)
    assert settings.rate_at(0.05) == pytest.approx(1.0)
    assert settings.rate_at(0.525) == pytest.approx(0.525)
    assert settings.rate_at(1.0) == pytest.approx(0.05)


def test_an_interruption_costs_no_more_than_what_came_after_the_last_state(tiny_source: Any, tmp_path: Path) -> None:
    weights, state = DecoderWeights.read(tiny_source), tmp_path / "state"
    codes = layers_of(convert(tiny_source, TOKENS, FsqSettings(4, 16, "tanh"), CPU))

    def interrupt(step: int, _: float) -> None:
        if step == 3:
            raise KeyboardInterrupt

    settings = TuneSettings(steps=5, save_seconds=0.0)
    with pytest.raises(KeyboardInterrupt):
        FsqTuning(weights, codes, settings, state).run(random_sequences(TOKENS.flatten(), 4, 32, seed=0), interrupt)
    again = FsqTuning(weights, codes, settings, state)
    assert (again.step, again.done) == (2, False)
    assert again.seconds > 0


def test_time_that_is_over_ends_training(tiny_source: Any) -> None:
    weights = DecoderWeights.read(tiny_source)
    codes = layers_of(convert(tiny_source, TOKENS, FsqSettings(4, 16, "tanh"), CPU))
    tuning = FsqTuning(weights, codes, TuneSettings(steps=10**9, seconds=1e-9))
    tuning.run(random_sequences(TOKENS.flatten(), 4, 32, seed=0))
    assert (tuning.step, tuning.done) == (1, True)


def test_too_little_text_names_what_is_needed(tiny_source: Any) -> None:
    with pytest.raises(InputError, match=r"60 tokens.*640"):
        convert(tiny_source, TOKENS[:1], FsqSettings(16, 16), CPU)


def test_settings_that_hold_nothing_are_refused() -> None:
    with pytest.raises(InputError, match="0 bytes"):
        replace(FsqSettings(1), nbytes=0)
