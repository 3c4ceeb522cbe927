"""A prepared folder: what it holds, and that it is whole or not there."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strataflux.client.errors import InputError, MisuseError
from strataflux.client.prepare.bases.rtn import RtnSettings
from strataflux.client.prepare.errors import DamagedModel
from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare, prepare_steps
from strataflux.client.runtime.models import SETS
from strataflux.kernels.refine import code_columns
from strataflux.proto.store_format import open_store


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_resident_weights_and_records_restore_the_model(
    tmp_path: Path, tiny_source: Any, bits: int, tied: bool
) -> None:
    source = tiny_source.with_config(tied_head=tied)
    calls: list[None] = []
    model = prepare(source, tmp_path / "p", PrepareSettings(RtnSettings(bits)), lambda: calls.append(None))
    assert len(calls) == prepare_steps(source.config, PrepareSettings())
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    assert model.config == source.config
    model.verify()
    torch.testing.assert_close(model.embedding(), source.embedding(), rtol=1e-3, atol=1e-6)
    if not tied:
        torch.testing.assert_close(model.head(), source.head(), rtol=1e-3, atol=1e-6)

    store = open_store(model.store, expected_digest=model.manifest.digest)
    raw = np.fromfile(store.records_path, np.uint8)
    for layer in range(source.config.layers):
        exact, low = source.layer(layer), model.layer(layer)
        assert torch.equal(low.attention_norm, exact.attention_norm)
        for name in SETS:
            section = store.section(layer, name)
            rows = raw[section.offset : section.offset + section.count * section.stride]
            records = torch.from_numpy(rows.reshape(section.count, section.stride)[:, : section.record_bytes].copy())
            codes = code_columns(records, exact.projections[name].shape[0]).float()
            restored = low.projections[name] + codes * model.refinement_scales(layer, name)[:, None]
            before = (low.projections[name] - exact.projections[name]).square().mean()
            after = (restored - exact.projections[name]).square().mean()
            assert 0 < float(after) < 0.02 * float(before)


def test_the_tokenizer_comes_along(tmp_path: Path, tiny_source: Any) -> None:
    model = prepare(tiny_source, tmp_path / "p", PrepareSettings())
    assert model.tokenizer().encode("he 1").ids == tiny_source.tokenizer().encode("he 1").ids


def test_identity_follows_weights_and_settings(tmp_path: Path, tiny_source: Any) -> None:
    first = prepare(tiny_source, tmp_path / "a", PrepareSettings()).manifest
    again = prepare(tiny_source, tmp_path / "b", PrepareSettings()).manifest
    other = prepare(tiny_source, tmp_path / "c", PrepareSettings(RtnSettings(bits=4))).manifest
    assert first == again
    assert len({first.digest, other.digest}) == 2


def test_an_old_prepared_model_is_replaced_and_other_files_are_not(tmp_path: Path, tiny_source: Any) -> None:
    prepare(tiny_source, tmp_path / "p", PrepareSettings())
    assert prepare(tiny_source, tmp_path / "p", PrepareSettings(RtnSettings(bits=2))).manifest.bits == 2
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "draft.txt").write_text("years of work")
    with pytest.raises(InputError, match="no prepared model"):
        prepare(tiny_source, other, PrepareSettings())
    assert (other / "draft.txt").read_text() == "years of work"


def test_nothing_is_left_when_a_layer_is_damaged(tmp_path: Path, tiny_source: Any) -> None:
    tiny_source.layer(1)
    tiny_source.cache["1.up"][0, 0] = 1e9
    with pytest.raises(DamagedModel, match=r"layers\.1\.gate_up"):
        prepare(tiny_source, tmp_path / "p", PrepareSettings())
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_does_not_divide_is_refused_at_once(tmp_path: Path, tiny_source: Any) -> None:
    with pytest.raises(MisuseError, match="128 for qkv with 64 inputs"):
        prepare(tiny_source, tmp_path / "p", PrepareSettings(RtnSettings(group=128)))
    assert list(tmp_path.iterdir()) == []


def test_changed_resident_weights_do_not_verify(tmp_path: Path, tiny_source: Any) -> None:
    prepare(tiny_source, tmp_path / "p", PrepareSettings())
    path = tmp_path / "p" / "resident.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(InputError, match="SHA-256"):
        open_prepared(tmp_path / "p").verify()


def edit_manifest(folder: Path, **changes: Any) -> None:
    path = folder / "prepared.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2"),
        ({"identity_digest": "0" * 64}, "identity"),
        ({"config": {}}, "missing or unknown fields"),
        ({"bits": 4}, "codes"),
        ({"bits": "3"}, "bits '3'"),
        ({"base": "nf4"}, "bits 3; expected 2, 3 or 4, and 4 for nf4"),
        ({"base": "nf4", "bits": 4}, "base 'nf4' of a 'rtn' quantizer"),
        ({"group": -1}, "group -1"),
        ({"k": {"qkv": 8}}, "k {'qkv': 8}"),
        ({"k": dict.fromkeys(SETS, 2000)}, "0 to 1024"),
        ({"shift": dict.fromkeys(SETS, "1")}, "0 to 2 blocks"),
    ],
)
def test_manifests_that_do_not_fit_are_refused(
    tmp_path: Path, tiny_source: Any, changes: dict[str, Any], message: str
) -> None:
    prepare(tiny_source, tmp_path / "p", PrepareSettings())
    edit_manifest(tmp_path / "p", **changes)
    with pytest.raises(InputError, match=message):
        open_prepared(tmp_path / "p")


@pytest.mark.parametrize("name", ["prepared.json", "resident.safetensors", "tokenizer.json"])
def test_missing_and_truncated_files_are_refused(tmp_path: Path, tiny_source: Any, name: str) -> None:
    prepare(tiny_source, tmp_path / "p", PrepareSettings())
    path = tmp_path / "p" / name
    if name != "tokenizer.json":
        path.write_bytes(path.read_bytes()[:-50])
        with pytest.raises(InputError, match=name):
            open_prepared(tmp_path / "p")
    path.unlink()
    with pytest.raises(InputError, match=name):
        open_prepared(tmp_path / "p")
