"""Encoding on a device against the reference: same codes but for boundaries, as near to the original, same records."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.kernels.gpu.kv_encode import kv_encode
from strataflux.kernels.kv_encode import (
    KEY_ROWS,
    VALUE_ROWS,
    HalfTiles,
    KvFormat,
    decode_half,
    encode_tiles,
    refinement_codes,
    unpack_groups,
)
from strataflux.kernels.kv_pack import unpack_codes

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LAYERS, BATCH, KV_HEADS, BLOCKS, TILES = 2, 3, 1, 4, 2


def room(form: KvFormat, rows: int, bits: int, device: torch.device) -> HalfTiles:
    half = HalfTiles.empty((LAYERS, BLOCKS, KV_HEADS), bits, form.head_dim, rows)
    return HalfTiles(*(t.to(device) for t in (half.codes, half.scale, half.zero, half.other)))


def tails(form: KvFormat, device: torch.device) -> Tensor:
    """Keys and values with large channels and tokens; one channel and one token are constant, one tile is tiny."""
    shape = (2, LAYERS, BATCH, KV_HEADS, 128, form.head_dim)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    x[..., 3] *= 9
    x[..., 5, :] *= 6
    x[..., 7] = 1.5
    x[1, 0, :, :, 9] = 0.25
    if form.prenormalize:
        x *= 0.02
    return x.half().to(device)


@pytest.mark.parametrize(
    "form",
    [
        KvFormat(2, 2, 64, 4, 4, 2),
        KvFormat(3, 1, 64, 3, 2, 16, prenormalize=True),
        KvFormat(1, 4, 128, 1, 4, 4, iterations=3),
    ],
)
def test_full_tails_become_tiles(device: torch.device, form: KvFormat) -> None:
    x = tails(form, device)
    keys, values = room(form, KEY_ROWS, form.key_bits, device), room(form, VALUE_ROWS, form.value_bits, device)
    table = torch.tensor([[3, 0], [1, 1], [2, 0]], dtype=torch.int32, device=device)
    # The first tail is full for the first time, the second is not full, the third is the second of its sequence.
    positions = torch.tensor([256, 300, 384], dtype=torch.int32, device=device)
    payload = LAYERS * KV_HEADS * form.groups_per_tile * form.record_bytes
    staged = torch.zeros(BATCH, payload, dtype=torch.uint8, device=device)
    staging = torch.tensor([staged[0].data_ptr(), staged[1].data_ptr(), 0], device=device)
    kv_encode(positions, form, keys, values, table, x[0], x[1], staging)
    for layer in range(LAYERS):
        for sequence, place in ((0, 3), (2, 0)):
            check(form, keys[layer, place], x[0, layer, sequence].float(), form.key_bits, KEY_ROWS)
            check(form, values[layer, place], x[1, layer, sequence].float(), form.value_bits, VALUE_ROWS)
    assert not keys.codes[:, 1:3].any()
    assert not staged[1:].any()
    records = staged[0].reshape(LAYERS, KV_HEADS, form.groups_per_tile, form.record_bytes)
    found = unpack_groups(records, form)
    for half, rows, bits, fine, tile, codes in (
        (keys, KEY_ROWS, form.key_bits, form.refine_key_bits, x[0], found[0]),
        (values, VALUE_ROWS, form.value_bits, form.refine_value_bits, x[1], found[1]),
    ):
        expected = refinement_codes(tile[:, 0].float(), half[:, 3], bits, rows, fine)
        apart = (codes.flatten(2, 3).int() - expected.int()).abs()
        assert int(apart.max()) <= 1
        assert float((apart > 0).float().mean()) < 1e-3


def check(form: KvFormat, half: HalfTiles, tile: Tensor, bits: int, rows: int) -> None:
    """A tile's codes against the reference's, and what both decode to."""
    encoded = encode_tiles(tile, tile, form)
    expected = encoded.keys if rows == KEY_ROWS else encoded.values
    d = form.head_dim
    same = unpack_codes(half.codes, bits, d) == unpack_codes(expected.codes, bits, d)
    assert float(same.float().mean()) > 0.999
    assert torch.allclose(half.scale.float(), expected.scale.float(), rtol=2e-3, atol=1e-7)
    errors = [(decode_half(h, bits, rows) - tile).norm() for h in (half, expected)]
    assert errors[0] <= 1.001 * errors[1]


def test_what_has_no_kernel_is_refused(device: torch.device) -> None:
    form = KvFormat(2, 2, 32)
    x = torch.zeros(2, 2, 1, 1, 128, 32, dtype=torch.float16, device=device)
    keys, values = room(form, KEY_ROWS, 2, device), room(form, VALUE_ROWS, 2, device)
    number = torch.zeros(1, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match="have a kernel"):
        kv_encode(number, form, keys, values, number[None], x[0], x[1], number.long())
