"""What errors of keys and values do to the divergence: layer by layer the same as of the whole model at once."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from strataflux.client.evaluate.dense import dense_reference, score_logits
from strataflux.client.evaluate.fsq import fsq_logits
from strataflux.client.prepare import fsq_sensitivity
from strataflux.client.prepare.fsq import FsqSettings, convert
from strataflux.client.prepare.fsq_sensitivity import sensitivities
from strataflux.client.runtime.block import run_block
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.runtime.rope import rotary_table

CPU = torch.device("cpu")
TOKENS = torch.randint(0, 258, (24, 60), generator=torch.Generator().manual_seed(0))


def at_once(weights: DecoderWeights, tokens: Tensor) -> list[Tensor]:
    """By the definition, with the likeliest token in the place of a drawn one."""
    config, kept = weights.config, []
    rows, turns = config.heads * config.head_dim, rotary_table(config, tokens.shape[1])
    hidden = weights.embedding[tokens].requires_grad_()
    for layer in weights.layers:

        def project(name: str, x: Tensor, layer: Any = layer) -> Tensor:
            made = linear(x, layer.projections[name])
            if name != "qkv":
                return made
            kept.append(made[..., rows:].clone())
            return torch.cat((made[..., :rows], kept[-1]), -1)

        hidden = run_block(config, layer, hidden, turns, project)
    shares = linear(rms_norm(hidden, (config.hidden,), weights.norm, config.norm_epsilon), weights.head).log_softmax(-1)
    gradients = torch.autograd.grad(shares.amax(-1).sum(), kept)
    each = [gradient[:, 4:].flatten(0, 1).double() for gradient in gradients]
    return [gradient.T @ gradient / tokens.numel() for gradient in each]


@pytest.mark.parametrize(
    "changes", [{}, {"architecture": "qwen3"}, {"tied_head": False}, {"windows": (24, 0)}], ids=str
)
def test_layer_by_layer_is_the_whole_model(
    tiny_source: Any, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def likeliest(shares: Tensor, count: int, generator: torch.Generator) -> Tensor:
        assert generator is not None
        return shares.topk(count).indices

    monkeypatch.setattr(torch, "multinomial", likeliest)
    monkeypatch.setattr(fsq_sensitivity, "_ROWS", 37)
    monkeypatch.setattr(fsq_sensitivity, "_AT_ONCE", 180)  # three sequences, then two
    source = tiny_source.with_config(**changes)
    found, expected = sensitivities(source, TOKENS[:5], CPU), at_once(DecoderWeights.read(source), TOKENS[:5])
    assert len(found) == len(source.config.whole)
    for index, one in zip(source.config.whole, found, strict=True):
        torch.testing.assert_close(one, expected[index], rtol=1e-3, atol=1e-6 * float(expected[index].abs().max()))


def test_no_more_text_is_gone_through_than_needed(tiny_source: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsq_sensitivity, "_TOKENS", 100)
    for one, other in zip(*(sensitivities(tiny_source, TOKENS[:n], CPU) for n in (2, 9)), strict=True):
        assert torch.equal(one, other)


def test_directions_by_divergence_are_better(tiny_source: Any) -> None:
    """A layer reads its values in few directions: those are worth their bits."""
    source = tiny_source.with_config()
    narrow = torch.zeros(64, 64)
    narrow[:, ::8] = 1
    for index in range(source.config.layers):
        source.layer(index).projections["o"].mul_(narrow)
    weights = DecoderWeights.read(source)
    references = [dense_reference(weights, row.tolist()) for row in TOKENS[:4]]

    def kl(metric: Any) -> float:
        codes = [one.layer for one in convert(source, TOKENS, FsqSettings(8, 0, "clamp", metric), CPU)]
        return sum(score_logits(fsq_logits(weights, codes, one.tokens[:-1]), one).kl for one in references)

    assert kl("divergence") < 0.8 * kl("balanced")


def test_what_is_looked_at_by_default(tiny_source: Any) -> None:
    config = tiny_source.config  # 128 bytes of keys and values
    looks = {
        (nbytes, levels): FsqSettings(nbytes, levels).looks_at_divergence(config)
        for nbytes in (15, 16)
        for levels in (0, 16)
    }
    assert [key for key, value in looks.items() if value] == [(16, 0)]
    assert FsqSettings(15, 16, metric="divergence").looks_at_divergence(config)
    assert not FsqSettings(16, 0, metric="balanced").looks_at_divergence(config)
