"""Every byte of a prepared model is vouched for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.errors import InputError
from strataflux.client.prepare.prepared import open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.verify import verify_prepared
from strataflux.client.prepare.write import prepare
from strataflux.proto.errors import ContractError, StoreCorrupt


def flip(path: Path, at: Callable[[int], int]) -> None:
    data = bytearray(path.read_bytes())
    data[at(len(data))] ^= 1
    path.write_bytes(data)


def test_what_was_just_written_is_right(tmp_path: Path, tiny_source: Any) -> None:
    verify_prepared(prepare(tiny_source, tmp_path / "p", PrepareSettings()))


@pytest.mark.parametrize(
    ("name", "at", "error"),
    [
        ("resident.safetensors", lambda size: size - 10, InputError),
        ("refine/records.bin", lambda _: 4096 + 5, StoreCorrupt),
        ("refine/records.crc", lambda _: 7, ContractError),
        ("refine/manifest.json", lambda size: size // 2, ContractError),
    ],
)
def test_a_flipped_bit_is_found(
    name: str, at: Callable[[int], int], error: type[Exception], tmp_path: Path, tiny_source: Any
) -> None:
    prepare(tiny_source, tmp_path / "p", PrepareSettings())
    flip(tmp_path / "p" / name, at)
    with pytest.raises(error):
        verify_prepared(open_prepared(tmp_path / "p"))


def test_a_store_of_another_model_is_refused(tmp_path: Path, tiny_source: Any) -> None:
    prepare(tiny_source, tmp_path / "a", PrepareSettings())
    prepare(tiny_source.with_config(rope_theta=500.0), tmp_path / "b", PrepareSettings())
    (tmp_path / "a" / "refine").rename(tmp_path / "aside")
    (tmp_path / "b" / "refine").rename(tmp_path / "a" / "refine")
    with pytest.raises(ContractError, match="identity"):
        verify_prepared(open_prepared(tmp_path / "a"))
