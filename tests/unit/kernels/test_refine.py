"""Refinement from records in place, against matrix products."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from strataflux.kernels.refine import (
    code_columns,
    pack_records,
    record_bytes,
    refine_addresses,
    refine_reference,
)


def random_codes(outputs: int, channels: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, (outputs, channels), generator=generator, dtype=torch.int8)


@settings(deadline=None)
@given(outputs=st.integers(1, 65), channels=st.integers(1, 9), seed=st.integers(0, 2**31))
def test_packing_round_trip(outputs: int, channels: int, seed: int) -> None:
    codes = random_codes(outputs, channels, seed)
    records = pack_records(codes)
    assert records.shape == (channels, record_bytes(outputs))
    assert torch.equal(code_columns(records, outputs), codes)


def test_bytes_of_a_record() -> None:
    codes = torch.tensor([[-7], [7], [0]], dtype=torch.int8)
    assert pack_records(codes).tolist() == [[0x1 | 0xF << 4, 0x8 | 0x8 << 4]]


@settings(deadline=None)
@given(
    outputs=st.integers(1, 200),
    present=st.lists(st.booleans(), min_size=1, max_size=12),
    seed=st.integers(0, 99),
)
def test_present_records_are_added_and_absent_ones_are_not(outputs: int, present: list[bool], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = random_codes(outputs, 40, seed)
    records = pack_records(codes).contiguous().numpy()
    x = torch.randn(40, generator=generator)
    scale = torch.rand(outputs, generator=generator)
    y = torch.randn(outputs, generator=generator)
    indices = torch.randperm(40, generator=generator)[: len(present)]
    rows = records.ctypes.data + indices.numpy().astype(np.uint64) * np.uint64(records.shape[1])
    addresses = np.where(present, rows, 0).astype(np.uint64)
    kept = indices[torch.tensor(present)]

    expected = y.clone()
    refine_reference(expected, x, kept, torch.from_numpy(records)[kept], scale)
    dense = y.double() + scale.double() * (codes[:, kept].double() @ x[kept].double())
    got = y.clone().numpy()
    scratch = np.full(2 * record_bytes(outputs), np.nan, np.float32)
    added = refine_addresses(got, x.numpy(), indices.numpy(), addresses, scale.numpy(), scratch)

    assert added == sum(present)
    torch.testing.assert_close(torch.from_numpy(got), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(torch.from_numpy(got).double(), dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outputs", [960, 961])
def test_equal_inputs_give_equal_bits(outputs: int) -> None:
    records = pack_records(random_codes(outputs, 18, 3)).contiguous().numpy()
    addresses = records.ctypes.data + np.arange(18, dtype=np.uint64) * np.uint64(records.shape[1])
    x = np.linspace(-3, 3, 18, dtype=np.float32)
    scale, scratch = np.full(outputs, 0.1, np.float32), np.empty(outputs + 1, np.float32)
    results = []
    for _ in range(2):
        y = np.zeros(outputs, np.float32)
        refine_addresses(y, x, np.arange(18), addresses, scale, scratch)
        results.append(y.tobytes())
    assert results[0] == results[1]
