"""The bundle refiner against matrices, and the arithmetic of bundles against the dense MLP."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import silu

from strataflux.client.bundles import BundleRefiner, make_refiner
from strataflux.client.errors import InputError, MisuseError
from strataflux.client.evaluate.dense import dense_logits
from strataflux.client.evaluate.dense_run import refined_dense
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.refinement import COPY, read_refinement
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.schemes import STORED_SETS, store_slot_bytes
from strataflux.client.weights import SetStatistics, WeightRefiner, record_bases, step_demand
from strataflux.kernels.bundle import bundle_bytes
from strataflux.kernels.select import select_reference
from strataflux.proto.store_format import open_store
from tests.unit.client.prepare.test_write import edit_manifest
from tests.unit.client.test_weights import InMemory

TOKENS = [5, 80, 80, 3, 200, 17, 256, 1, 9]
GATE_UP, DOWN = SETS.index("gate_up"), SETS.index("down")


@pytest.fixture(params=["bundles", "both"])
def prepared(request: pytest.FixtureRequest, tmp_path: Path, tiny_source: Any) -> PreparedModel:
    return prepare(tiny_source, tmp_path / "p", PrepareSettings(mlp=request.param))


def test_the_store_has_a_section_of_bundles_a_layer(prepared: PreparedModel) -> None:
    store = open_store(prepared.store)
    assert [(one.layer, one.set) for one in store.sections] == [(i, name) for i in range(2) for name in prepared.sets]
    section = store.section(1, "mlp")
    assert (section.kind, section.count, section.record_bytes) == ("neuron_bundle", 1088, bundle_bytes(64))
    bases = record_bases(prepared.config, prepared.sets)
    assert [bases[one.set][one.layer] for one in store.sections] == [one.first_oid for one in store.sections]
    slots = sum(one.count * -(-one.record_bytes // 256) * 256 for one in store.sections)
    assert store_slot_bytes(prepared.config, prepared.sets) == slots


def test_bundles_hold_what_rows_and_columns_lack(prepared: PreparedModel, tiny_source: Any) -> None:
    for index, values in enumerate(read_refinement(prepared, "bundles")):
        exact, low = tiny_source.layer(index).projections, prepared.layer(index).projections
        for name in SETS:
            lacking = exact[name] - low[name]
            assert float((values[name] - lacking).square().mean()) < 0.02 * float(lacking.square().mean())
        copied = exact["down"]
        assert float((values[COPY] - copied).square().mean()) < 0.02 * float(copied.square().mean())


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("halves", [False, True])
def test_a_bundle_is_the_dense_definition_and_missing_ones_are_skipped(
    prepared: PreparedModel, missing: bool, halves: bool
) -> None:
    layer, k, random = 1, 100, torch.Generator().manual_seed(3)
    x, low = torch.randn(64, generator=random), prepared.layer(layer).projections
    gate_up = low["gate_up"] @ x
    h = silu(gate_up[:1088]) * gate_up[1088:]
    neurons, scores = select_reference(h, k)
    base = int(record_bases(prepared.config, prepared.sets)["mlp"][layer])
    source = InMemory(prepared.store, frozenset((neurons[::2] + base).tolist()) if missing else frozenset())
    refiner = BundleRefiner(source, 3, prepared, {"qkv": 0, "o": 0, "gate_up": 0, "down": k})
    y = torch.ones(64)
    refiner.refine(layer, GATE_UP, x.numpy(), gate_up.clone().numpy())
    if halves:
        refiner.begin(layer, GATE_UP, x.numpy())
        refiner.begin(layer, DOWN, h.numpy())
        # What was selected counts, and what was noted: the input of the second half is not looked at.
        refiner.refine(layer, DOWN, torch.zeros(1088).numpy(), y.numpy())
    else:
        refiner.refine(layer, DOWN, h.numpy(), y.numpy())

    kept = neurons[1::2] if missing else neurons
    values = list(read_refinement(prepared, "bundles"))[layer]
    refined = gate_up + values["gate_up"] @ x
    again = silu(refined[:1088]) * refined[1088:]
    expected = 1 + values[COPY][:, kept] @ (again - h)[kept] + values["down"][:, kept] @ h[kept]
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
    once = (3, (neurons + base).tolist(), scores.tolist())
    assert source.asked == [once] * (2 if halves else 1)
    assert refiner.statistics() == {
        "qkv": SetStatistics(0, 0),
        "o": SetStatistics(0, 0),
        "mlp": SetStatistics(neurons.numel(), kept.numel()),
    }


def test_decoding_is_what_whole_windows_say(prepared: PreparedModel) -> None:
    low = DecoderWeights.read(prepared)
    for k in (32, 200):
        refiner = BundleRefiner(InMemory(prepared.store), 0, prepared, k)
        decoder = Decoder(low, len(TOKENS), refiner)
        stepped = torch.stack([decoder.step(token) for token in TOKENS])
        model = refined_dense(prepared, low, k, "bundles")
        torch.testing.assert_close(stepped, dense_logits(model, TOKENS), rtol=1e-3, atol=1e-3)
        asked = sum(one.lookups for one in refiner.statistics().values())
        assert asked == len(TOKENS) * step_demand(prepared, k, scheme="bundles").selections


def test_all_neurons_nearly_give_back_the_model(prepared: PreparedModel, tiny_source: Any) -> None:
    exact, low = DecoderWeights.read(tiny_source), DecoderWeights.read(prepared)
    every = {"qkv": 1024, "o": 1024, "gate_up": 0, "down": 1024}
    refiner = BundleRefiner(InMemory(prepared.store), 0, prepared, every)
    decoders = [Decoder(exact, 4), Decoder(low, 4), Decoder(low, 4, refiner)]
    for token in (9, 33, 2, 250):
        reference, base, refined = (decoder.step(token) for decoder in decoders)
        assert float((refined - reference).norm()) < 0.2 * float((base - reference).norm())


def test_three_layers_may_be_between_selection_and_product(tmp_path: Path, tiny_source: Any) -> None:
    prepared = prepare(tiny_source.with_config(layers=3), tmp_path / "p", PrepareSettings(mlp="bundles"))
    source, random = InMemory(prepared.store), torch.Generator().manual_seed(0)
    late, at_once = (BundleRefiner(source, 0, prepared) for _ in range(2))
    seen = []
    for layer in range(3):
        x = torch.randn(64, generator=random).numpy()
        gate_up, h = torch.randn(2176, generator=random).numpy(), torch.randn(1088, generator=random).numpy()
        late.refine(layer, GATE_UP, x, gate_up)
        late.begin(layer, DOWN, h)
        at_once.refine(layer, GATE_UP, x, gate_up)
        expected = np.zeros(64, np.float32)
        at_once.refine(layer, DOWN, h, expected)
        seen.append((h, expected))
    for layer, (h, expected) in enumerate(seen):
        found = np.zeros(64, np.float32)
        late.refine(layer, DOWN, h, found)
        assert np.abs(expected).max() > 0
        np.testing.assert_array_equal(found, expected)


def test_demand_counts_neurons_and_their_records(prepared: PreparedModel) -> None:
    demand = step_demand(prepared, 32, scheme="bundles")
    # 2 of 64 channels for qkv and for o; 24 + 2 neurons of 1,088 in slots of 256 bytes (140 each).
    assert demand.selections == 2 * (2 + 2 + 26)
    assert demand.largest_set_bytes == 26 * 256


def test_the_prepared_model_names_its_scheme(tmp_path: Path, tiny_source: Any) -> None:
    bundles = prepare(tiny_source, tmp_path / "a", PrepareSettings(mlp="bundles"))
    both = prepare(tiny_source, tmp_path / "b", PrepareSettings(mlp="both"))
    assert dict(bundles.manifest.k) == {"qkv": 32, "o": 32, "gate_up": 0, "down": 24}
    assert dict(both.manifest.k) == dict.fromkeys(SETS, 32)
    assert isinstance(make_refiner(InMemory(bundles.store), 0, bundles), BundleRefiner)
    assert isinstance(make_refiner(InMemory(both.store), 0, both), WeightRefiner)
    assert isinstance(make_refiner(InMemory(both.store), 0, both, 32, "bundles"), BundleRefiner)


def test_channels_beside_bundles_read_their_own_records(tmp_path: Path, tiny_source: Any) -> None:
    channels = prepare(tiny_source, tmp_path / "a", PrepareSettings())
    both = prepare(tiny_source, tmp_path / "b", PrepareSettings(mlp="both"))
    low = DecoderWeights.read(channels)
    decoders = [
        Decoder(low, 4, WeightRefiner(InMemory(prepared.store), 0, prepared, 100)) for prepared in (channels, both)
    ]
    for token in TOKENS[:4]:
        one, other = (decoder.step(token) for decoder in decoders)
        assert torch.equal(one, other)


def test_refusals(tmp_path: Path, tiny_source: Any) -> None:
    channels = prepare(tiny_source, tmp_path / "a", PrepareSettings())
    bundles = prepare(tiny_source, tmp_path / "b", PrepareSettings(mlp="bundles"))
    with pytest.raises(MisuseError, match="found bundles; expected channels; prepare the model with --mlp both"):
        BundleRefiner(InMemory(channels.store), 0, channels, 32)
    with pytest.raises(MisuseError, match="found channels; expected bundles"):
        WeightRefiner(InMemory(bundles.store), 0, bundles, 32)
    with pytest.raises(MisuseError, match="budgets of bundles"):
        WeightRefiner(InMemory(bundles.store), 0, bundles)
    with pytest.raises(MisuseError, match="7 channels beside neuron bundles"):
        BundleRefiner(InMemory(bundles.store), 0, bundles, {"qkv": 1, "o": 1, "gate_up": 7, "down": 1})
    with pytest.raises(MisuseError, match="1025"):
        BundleRefiner(InMemory(bundles.store), 0, bundles, {"qkv": 1, "o": 1, "gate_up": 0, "down": 1025})
    with pytest.raises(MisuseError, match="'neither'"):
        PrepareSettings(mlp="neither")
    odd = tiny_source.with_config(hidden=63)
    with pytest.raises(MisuseError, match="bundles of 63 channels"):
        prepare(odd, tmp_path / "c", PrepareSettings(mlp="bundles"))
    edit_manifest(bundles.folder, mlp_scheme="channels")
    with pytest.raises(InputError, match="'channels' beside records of qkv, o, mlp"):
        open_prepared(bundles.folder)
    assert set(STORED_SETS) == {"channels", "bundles", "both"}
