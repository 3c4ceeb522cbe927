"""The device's step against the CPU's decoder: unrefined and refined, at each shift, in any order of its lanes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import PreparedModel, store_sections
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.cuda.attention import HalfCache
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.decoder import GraphDecoder
from strataflux.client.runtime.cuda.pinned_store import PinnedStore, records_of
from strataflux.client.runtime.cuda.refined import make_decoder
from strataflux.client.runtime.cuda.refinement import Refinement
from strataflux.client.runtime.cuda.sampling import Sampler
from strataflux.client.runtime.cuda.step import Step
from strataflux.client.runtime.decoder import ContextFull, Decoder
from strataflux.client.runtime.generation import Sampling
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.weights import WeightRefiner
from tests.fakes.device_model import ShuffledLanes, emulated_model, logits_over, relative
from tests.unit.client.test_weights import InMemory

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes lanes that masks discard

CPU = torch.device("cpu")
TOKENS = (7, 9)  # whose selections hold no channels that float16 makes equal
CONTEXT = 4
K = 64
ERRANDS: dict[str, Any] = {"errands_below": K + 1, "errands_from": 0.5}
LANES: dict[str, Any] = {"errands_below": K}
WAYS = pytest.mark.parametrize("way", [ERRANDS, LANES], ids=["errands", "lanes"])
HALF = 2e-3
"""Inputs and keys are float16 on the device and float32 on the CPU."""


def refined(prepared: PreparedModel, budget: Budget, **changes: Any) -> tuple[GraphDecoder, PinnedStore]:
    """A decoder with the whole store in this process."""
    block = DeviceBlock(CPU)
    decoder = make_decoder(emulated_model(prepared), CONTEXT, block, budget, **changes)
    sections = store_sections(prepared.config, prepared.sets)
    store = PinnedStore(sections, records_of(prepared.store, prepared.manifest.digest), block)
    store.wait()
    return decoder, store


def advance(decoder: GraphDecoder, token: int) -> torch.Tensor:
    decoder.launch(token)
    return decoder.logits


def on_cpu(prepared: PreparedModel, shift: Mapping[str, float], k: int | Mapping[str, int] = K) -> torch.Tensor:
    refiner = WeightRefiner(InMemory(prepared.store), 0, prepared, k)
    decoder = Decoder(DecoderWeights.read(prepared), CONTEXT, refiner, shift=shift)
    return logits_over(decoder.step, TOKENS)


def test_without_refinement_it_is_the_base(prepared: PreparedModel) -> None:
    decoder = make_decoder(emulated_model(prepared), CONTEXT, None, Budget.common(0))
    expected = logits_over(Decoder(DecoderWeights.read(prepared), CONTEXT).step, TOKENS)
    found = logits_over(lambda token: advance(decoder, token), TOKENS)
    assert relative(found, expected) < HALF
    decoder.reset()
    assert torch.equal(logits_over(lambda token: advance(decoder, token), TOKENS), found)


@pytest.mark.parametrize("blocks", [(0.0, 0.0, 0.0, 0.0), (1.0, 0.5, 2.0, 1.5), (2.0, 2.0, 0.5, 0.0)])
@WAYS
def test_refined_it_is_the_cpus_step_at_each_shift(
    prepared: PreparedModel, blocks: tuple[float, ...], way: dict[str, Any]
) -> None:
    budget = Budget(dict.fromkeys(SETS, K), dict(zip(SETS, blocks, strict=True)), **way)
    decoder, store = refined(prepared, budget)
    expected = on_cpu(prepared, budget.shift)
    base = logits_over(Decoder(DecoderWeights.read(prepared), CONTEXT).step, TOKENS)
    assert relative(base, expected) > 5 * HALF  # or else this proves nothing
    assert relative(logits_over(lambda token: advance(decoder, token), TOKENS), expected) < HALF
    store.close()


@pytest.mark.parametrize("seed", range(3))
def test_any_order_that_the_lanes_allow_gives_the_same(prepared: PreparedModel, seed: int) -> None:
    blocks, way = (((1.0, 0.5, 2.0, 1.5), ERRANDS), ((0.0, 0.0, 0.0, 0.0), LANES), ((2.0, 0.5, 0.5, 2.0), LANES))[
        seed % 3
    ]
    budget = Budget(dict.fromkeys(SETS, K), dict(zip(SETS, blocks, strict=True)), **way)
    inline, store = refined(prepared, budget)
    expected = logits_over(lambda token: advance(inline, token), TOKENS[:1])
    store.close()

    model, lanes, block = emulated_model(prepared), ShuffledLanes(seed), DeviceBlock(CPU)
    step = Step(
        model,
        HalfCache(model.config, CONTEXT, CPU),
        Refinement(model, block, 0, budget, lanes),
        Sampler(Sampling(), CPU),
        lanes,
    )
    sections = store_sections(prepared.config, prepared.sets)
    store = PinnedStore(sections, records_of(prepared.store, prepared.manifest.digest), block)
    store.wait()
    for token, right in zip(TOKENS[:1], expected, strict=True):
        step.token.fill_(token)
        step.run()
        order = lanes.flush()
        assert order != sorted(order)  # it was another order
        assert relative(step.logits.float(), right) < 1e-3
    store.close()


def test_errands_are_for_few_records_and_long_leads() -> None:
    assert Budget.common(4, 1.5).by_errands("o")
    for k, shift in ((0, 2.0), (12, 2.0), (4, 1.0), (4, 0.0)):
        assert not Budget.common(k, shift).by_errands("o")
    assert not Budget(dict.fromkeys(SETS, 4), dict.fromkeys(SETS, 0.0), errands_from=0.0).by_errands("o")


def test_sets_without_a_budget_are_left_alone(prepared: PreparedModel) -> None:
    only = Budget(dict(zip(SETS, (K, 0, 0, K), strict=True)), dict.fromkeys(SETS, 0.0))
    decoder, store = refined(prepared, only)
    refiner = WeightRefiner(InMemory(prepared.store), 0, prepared, only.k)
    expected = logits_over(Decoder(DecoderWeights.read(prepared), CONTEXT, refiner).step, TOKENS)
    assert relative(logits_over(lambda token: advance(decoder, token), TOKENS), expected) < HALF
    store.close()


def test_heads_are_normed_where_the_model_does_that(folder: Path, tiny_source: Any) -> None:
    source = tiny_source.with_config(architecture="qwen3", intermediate=256, tied_head=False)
    prepared = prepare(source, folder / "qwen", PrepareSettings())
    decoder = make_decoder(emulated_model(prepared), CONTEXT, None, Budget.common(0))
    expected = logits_over(Decoder(DecoderWeights.read(prepared), CONTEXT).step, TOKENS)
    assert relative(logits_over(lambda token: advance(decoder, token), TOKENS), expected) < HALF


def test_a_step_can_append_what_the_step_before_chose(prepared: PreparedModel) -> None:
    decoder = make_decoder(emulated_model(prepared), CONTEXT, None, Budget.common(0))
    decoder.launch(TOKENS[0])
    first = decoder.token
    assert first == int(decoder.logits.argmax())
    decoder.launch()
    followed = decoder.logits
    decoder.reset(1)
    assert torch.equal(advance(decoder, first), followed)


def test_what_cannot_be_is_refused(prepared: PreparedModel) -> None:
    model = emulated_model(prepared)
    decoder = make_decoder(model, 1, None, Budget.common(0))
    with pytest.raises(MisuseError, match="token"):
        decoder.launch(-1)
    with pytest.raises(MisuseError, match="token"):
        decoder.launch(prepared.config.vocabulary)
    decoder.launch(1)
    with pytest.raises(ContextFull, match="position 1"):
        decoder.launch(1)
    with pytest.raises(MisuseError, match="head_dim 24"):
        HalfCache(replace(prepared.config, head_dim=24), 8, CPU)
    with pytest.raises(MisuseError, match="k of o"):
        Budget(dict(zip(SETS, (1, 2000, 1, 1), strict=True)), dict.fromkeys(SETS, 0.0))
    with pytest.raises(MisuseError, match="shift of qkv"):
        Budget.common(1, 0.3)
    with pytest.raises(MisuseError, match="programs"):
        Budget.common(1, programs=0)
    bare = replace(model, layers=[replace(layer, scales=None) for layer in model.layers])
    with pytest.raises(MisuseError, match="refinement scales"):
        make_decoder(bare, 1, DeviceBlock(CPU), Budget.common(1))


@pytest.fixture
def counts() -> torch.Tensor:
    """How often each of four tokens is drawn in 2,000 draws at temperature 2, top-p 0.8."""
    sampler = Sampler(Sampling(2.0, 0.8, 3), CPU)
    logits, token = torch.tensor([1.0, 4.0, 3.0, -2.0]), torch.zeros(1, dtype=torch.int64)
    drawn = torch.zeros(4)
    for _ in range(2000):
        sampler.choose(logits, token)
        drawn[int(token)] += 1
    return drawn


class NothingReadByTheHost(TorchDispatchMode):  # type: ignore[no-untyped-call, unused-ignore]
    """Refuses what would end the capture of a graph: a number that the host waits for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert function is not torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_host_waits_for_no_number_while_a_token_is_chosen(temperature: float) -> None:
    sampler = Sampler(Sampling(temperature, 0.8, 3), CPU)
    logits, token = torch.tensor([1.0, 4.0, 3.0, -2.0]), torch.zeros(1, dtype=torch.int64)
    with NothingReadByTheHost():  # type: ignore[no-untyped-call, unused-ignore]
        sampler.choose(logits, token)
    assert int(token) in (1, 2)


def test_tokens_are_drawn_as_often_as_they_are_probable(counts: torch.Tensor) -> None:
    share = torch.softmax(torch.tensor([4.0, 3.0]) / 2, -1)  # the two that reach 0.8 together
    assert counts[0] == counts[3] == 0
    assert abs(float(counts[1]) / 2000 - float(share[0])) < 0.05
