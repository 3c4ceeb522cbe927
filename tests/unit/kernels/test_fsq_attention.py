"""Blocks of codes lose nothing, and attention in code space is attention to rebuilt keys and values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strataflux.kernels.fsq import FsqGrid, FsqLayer
from strataflux.kernels.fsq_attention import (
    FsqHeads,
    attend_codes,
    block_codes,
    merge_parts,
    part_of_codes,
    token_codes,
)
from tests.fakes.fsq_device import make_fsq_case, random_heads

CPU = torch.device("cpu")
MIXED = FsqGrid((8,) * 5 + (4,) * 9 + (2,) * 6 + (1,) * 3)


@given(tokens=st.integers(1, 200), nbytes=st.integers(1, 50), batch=st.integers(1, 2))
def test_blocks_hold_every_byte_and_nothing_beside(tokens: int, nbytes: int, batch: int) -> None:
    packed = torch.randint(256, (batch, tokens, nbytes), dtype=torch.uint8)
    blocks = block_codes(packed)
    assert blocks.shape == (batch, -(-tokens // 64), 64 * nbytes)
    assert torch.equal(token_codes(blocks, tokens), packed)


def test_a_block_has_sixteen_bytes_of_each_token_and_then_the_next() -> None:
    packed = torch.arange(64 * 20).view(64, 20).to(torch.uint8)
    (block,) = block_codes(packed)
    assert torch.equal(block[3 * 16 : 4 * 16], packed[3, :16])
    assert torch.equal(block[64 * 16 + 3 * 4 : 64 * 16 + 4 * 4], packed[3, 16:])


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize("grid", [FsqGrid.uniform(21, 16), MIXED], ids=["uniform", "mixed"])
def test_parts_of_any_split_merge_into_the_whole(grid: FsqGrid, normed: bool) -> None:
    case = make_fsq_case(grid, (150,), 2, 3, 64, normed, CPU)
    levels, positions = case.levels[0, :150], torch.arange(150)
    expected = attend_codes(case.queries[0], levels, positions, case.heads)
    for cuts in ([150], [0, 150], [1, 64, 150], list(range(10, 160, 10))):
        edges = zip([0, *cuts[:-1]], cuts, strict=True)
        parts = [part_of_codes(case.queries[0], levels[a:b], positions[a:b], case.heads) for a, b in edges]
        torch.testing.assert_close(merge_parts(parts, case.heads), expected, rtol=1e-11, atol=1e-11)


def test_a_layer_is_cut_into_heads_of_keys_then_of_values() -> None:
    heads = random_heads(FsqGrid.uniform(10, 16), 2, 64, False, CPU)
    decoder = torch.cat([heads.key_decoder.flatten(0, 1), heads.value_decoder.flatten(0, 1)])
    bias = torch.cat([heads.key_bias.flatten(), heads.value_bias.flatten()])
    layer = FsqLayer(heads.grid, torch.zeros(10, 8), torch.zeros(10), decoder, bias)
    again = FsqHeads.of_layer(layer, 2, heads.frequencies)
    codes = torch.randint(16, (7, 10), dtype=torch.uint8)
    keys, _ = layer.decode(codes).view(7, 2, 2, 64).unbind(1)
    torch.testing.assert_close(again.keys(codes, torch.zeros(7)).float(), keys.transpose(0, 1), rtol=1e-4, atol=1e-4)
    assert torch.equal(again.value_decoder, heads.value_decoder)
    assert torch.equal(again.value_bias, heads.value_bias)


def test_decoders_that_contradict_each_other_are_refused() -> None:
    heads = random_heads(FsqGrid.uniform(10, 16), 2, 64, True, CPU)
    rest = (heads.value_decoder, heads.value_bias, heads.frequencies)
    with pytest.raises(ValueError, match="for a code of 11 coordinates"):
        FsqHeads(FsqGrid.uniform(11, 16), heads.key_decoder, heads.key_bias, *rest)
    with pytest.raises(ValueError, match="a norm of"):
        FsqHeads(heads.grid, heads.key_decoder, heads.key_bias, *rest, torch.ones(3))
