"""Selection and refinement against attention computed anew, and the compiled path against the definition."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from strataflux.kernels import kv_attention_cpu
from strataflux.kernels.kv_attention import (
    KvLayer,
    Resident,
    attend_reference,
    encoded_tiles,
    exact_spans,
    expected_shares_reference,
    group_shares,
    refine_reference,
    select_groups,
    selected_groups,
)
from strataflux.kernels.kv_encode import KEY_ROWS, VALUE_ROWS, KvFormat, decode_half, encode_tiles, unpack_groups
from strataflux.kernels.kv_pack import TILE_TOKENS

Attend = Callable[[Tensor, KvLayer], Resident]
FORMS = [
    KvFormat(2, 2, 16, 4, 4, 4),
    KvFormat(3, 1, 32, 2, 3, 2),
    KvFormat(4, 3, 64, 1, 4, 4),
    KvFormat(2, 1, 64, 0, 1, 2),
    KvFormat(1, 2, 16, 3, 0, 8),
]


@dataclass(frozen=True)
class Case:
    """A layer over random sequences whose tiles lie in shuffled blocks."""

    layer: KvLayer
    queries: Tensor
    records: Tensor
    """[blocks, kv_heads, groups_per_tile, record_bytes]"""

    def gather(self, groups: Tensor) -> Tensor:
        """Records of selected groups [batch, kv_heads, n]."""
        per = self.layer.form.groups_per_tile
        known = groups.clamp_min(0)
        blocks = torch.stack([self.layer.table[i][known[i] // per] for i in range(len(known))])
        heads = torch.arange(self.layer.kv_heads)[None, :, None]
        return self.records[blocks, heads, known % per]

    def addresses(self, records: Tensor, present: Tensor) -> Tensor:
        size = records.shape[-1]
        at = records.data_ptr() + size * torch.arange(present.numel()).view(present.shape)
        return torch.where(present, at, 0).to(torch.uint64)


def make_case(form: KvFormat, lengths: tuple[int, ...], kv_heads: int = 2, share: int = 3, seed: int = 0) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    tiles = max(encoded_tiles(n) for n in lengths)
    blocks = len(lengths) * tiles + 1
    shape = (blocks, kv_heads, TILE_TOKENS, form.head_dim)
    encoded = encode_tiles(normal(*shape) * 1.5, normal(*shape), form)
    table = torch.randperm(blocks, generator=generator)[: len(lengths) * tiles].view(len(lengths), tiles)
    exact = [normal(len(lengths), kv_heads, TILE_TOKENS, form.head_dim).half() for _ in range(4)]
    layer = KvLayer(form, encoded.keys, encoded.values, table, exact[0], exact[1], exact[2], exact[3], lengths)
    return Case(layer, normal(len(lengths), kv_heads * share, form.head_dim), encoded.records)


def recomputed(case: Case, index: int, groups: Tensor | None, present: Tensor | None) -> Tensor:
    """Attention [heads, D] in float64 over whole keys and values, refined ones in place."""
    layer, form = case.layer, case.layer.form
    sink, tail = exact_spans(layer.lengths[index])
    blocks = layer.table[index, : encoded_tiles(layer.lengths[index])]
    outputs = []
    for head in range(layer.kv_heads):
        sides = []
        for half, bits, rows, first, last, side in (
            (layer.keys, form.key_bits, KEY_ROWS, layer.sink_keys, layer.tail_keys, 0),
            (layer.values, form.value_bits, VALUE_ROWS, layer.sink_values, layer.tail_values, 1),
        ):
            mine = half[blocks, head]
            middle = decode_half(mine, bits, rows).flatten(0, 1)
            if groups is not None and present is not None:
                code = unpack_groups(case.records[blocks, head], form)[side].flatten(1, 2)
                width = (form.refine_key_bits, form.refine_value_bits)[side]
                fine = decode_half(mine, bits, rows, code, width).flatten(0, 1)
                for group in groups[index, head][present[index, head]].tolist():
                    at = slice(group * form.group_tokens, (group + 1) * form.group_tokens)
                    middle[at] = fine[at]
            sides.append(torch.cat((first[index, head, :sink], middle, last[index, head, :tail])).double())
        share = case.queries.shape[1] // layer.kv_heads
        query = case.queries[index, head * share : (head + 1) * share].double()
        outputs.append((query @ sides[0].T / math.sqrt(form.head_dim)).softmax(-1) @ sides[1])
    return torch.cat(outputs).float()


@pytest.mark.parametrize("attend", [attend_reference, kv_attention_cpu.attend], ids=["reference", "cpu"])
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("lengths", [(1,), (128,), (129, 256), (257, 1), (640, 513, 300)])
def test_resident_attention_is_attention_over_decoded_tiles(
    attend: Attend, form: KvFormat, lengths: tuple[int, ...]
) -> None:
    case = make_case(form, lengths)
    resident = attend(case.queries, case.layer)
    for index in range(len(lengths)):
        torch.testing.assert_close(resident.output[index], recomputed(case, index, None, None), rtol=1e-3, atol=1e-4)
    right = attend_reference(case.queries, case.layer)
    torch.testing.assert_close(resident.logits, right.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(resident.total, right.total, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(resident.maximum, right.maximum, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("kv_heads", "share"), [(1, 1), (2, 3), (3, 2)])
def test_the_update_equals_attention_computed_anew(form: KvFormat, kv_heads: int, share: int) -> None:
    case = make_case(form, (700, 400), kv_heads, share)
    resident = attend_reference(case.queries, case.layer)
    groups, _ = select_groups(resident, case.layer, Fraction(1, 16))
    present = (groups >= 0) & (torch.arange(groups.shape[-1]) % 3 != 1)
    records = case.gather(groups)
    reference = refine_reference(case.queries, case.layer, resident, groups, records, present)
    fast = kv_attention_cpu.refine(case.queries, case.layer, resident, groups, case.addresses(records, present))
    for index in range(2):
        right = recomputed(case, index, groups, present)
        torch.testing.assert_close(reference[index], right, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(fast[index], right, rtol=1e-3, atol=1e-4)
    assert not torch.allclose(reference, resident.output, atol=1e-3)


def test_a_refined_logit_above_every_resident_one() -> None:
    form = KvFormat(1, 2, 64, 4, 4, 4)
    case = make_case(form, (400,), 1, 1)
    # Towards what one token's keys lack: its refined logit rises by hundreds, far beyond what float32's exp holds.
    block = case.layer.table[0, 0]
    code = unpack_groups(case.records[block, 0], form)[0].flatten(0, 1)
    coarse = decode_half(case.layer.keys[block, 0], 1, KEY_ROWS)
    fine = decode_half(case.layer.keys[block, 0], 1, KEY_ROWS, code, 4)
    case = replace(case, queries=(fine - coarse)[9][None, None] * 60)
    resident = attend_reference(case.queries, case.layer)
    groups = torch.tensor([[[9 // 4]]])
    present = torch.ones(1, 1, 1, dtype=torch.bool)
    records = case.gather(groups)
    right = recomputed(case, 0, groups, present)
    for output in (
        refine_reference(case.queries, case.layer, resident, groups, records, present),
        kv_attention_cpu.refine(case.queries, case.layer, resident, groups, case.addresses(records, present)),
    ):
        torch.testing.assert_close(output[0], right, rtol=1e-3, atol=1e-3)


def test_nothing_present_changes_nothing() -> None:
    case = make_case(FORMS[0], (400,))
    resident = attend_reference(case.queries, case.layer)
    groups, _ = select_groups(resident, case.layer, Fraction(1, 8))
    absent = torch.zeros(groups.shape, dtype=torch.bool)
    records = case.gather(groups)
    assert torch.equal(refine_reference(case.queries, case.layer, resident, groups, records, absent), resident.output)
    fast = kv_attention_cpu.refine(case.queries, case.layer, resident, groups, case.addresses(records, absent))
    torch.testing.assert_close(fast, resident.output, rtol=1e-6, atol=1e-6)


def test_a_share_is_the_largest_sum_of_weights_among_the_heads_of_a_kv_head() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.0, 0.1], [0.3, 0.1, 0.1, 0.0], [0.0, 0.0, 0.2, 0.3], [0.2, 0.0, 0.1, 0.1]])
    # Some weight lies on tokens outside of tiles: shares are of all tokens.
    shares = group_shares(weights.log() + 2, torch.full((4,), 2.0), torch.ones(4), 2, 2)
    torch.testing.assert_close(shares, torch.tensor([[0.4, 0.1], [0.2, 0.5]]))


@pytest.mark.parametrize("expected", [expected_shares_reference, kv_attention_cpu.expected_shares])
@pytest.mark.parametrize("form", FORMS)
def test_expected_shares_are_those_of_all_tokens_but_the_newest(
    expected: Callable[[Tensor, KvLayer], Tensor], form: KvFormat
) -> None:
    case = make_case(form, (700, 300, 257, 100))
    # Whatever lies in the newest token's place has no say.
    newest = [(exact_spans(length)[1] or exact_spans(length)[0]) - 1 for length in case.layer.lengths]
    for index, at in enumerate(newest):
        part = case.layer.tail_keys if exact_spans(case.layer.lengths[index])[1] else case.layer.sink_keys
        part[index, :, at] = 100
    found = expected(case.queries, case.layer)
    shorter = replace(case.layer, lengths=(699, 299, 256, 99))
    resident = attend_reference(case.queries, shorter)
    right = group_shares(resident.logits, resident.maximum, resident.total, 2, form.group_tokens)
    torch.testing.assert_close(found[:2, :, : right.shape[-1]], right[:2], rtol=2e-3, atol=1e-5)
    # At 257 tokens a tile is encoded that one token less had exact.
    assert float(found[2].sum()) > 0
    assert not found[3].any()


def test_the_strongest_groups_first_and_short_sequences_filled_up() -> None:
    case = make_case(KvFormat(2, 2, 16, 4, 4, 4), (900, 300, 200))
    resident = attend_reference(case.queries, case.layer)
    groups, shares = select_groups(resident, case.layer, Fraction(1, 32))
    assert groups.shape == (3, 2, 6)
    assert bool((shares[0].diff(dim=-1) <= 0).all())
    every = group_shares(resident.logits[0], resident.maximum[0], resident.total[0], 2, 4)
    for head in range(2):
        assert set(groups[0, head].tolist()) == set(every[head].argsort(descending=True)[:6].tolist())
    assert groups[1].tolist() == [[groups[1, j, 0].item(), -1, -1, -1, -1, -1] for j in range(2)]
    assert int(groups[1, :, 0].max()) < 32
    assert bool((groups[2] == -1).all())
    assert not shares[2].any()


@pytest.mark.parametrize(
    ("fraction", "groups", "count"),
    [("1/128", 1952, 15), ("1/64", 1952, 30), ("1/128", 32, 1), ("1/16", 31, 1), ("1", 32, 32), ("1/128", 0, 0)],
)
def test_how_many_groups(fraction: str, groups: int, count: int) -> None:
    assert selected_groups(Fraction(fraction), groups) == count


@pytest.mark.parametrize(
    ("length", "tiles", "spans"),
    [
        (1, 0, (1, 0)),
        (128, 0, (128, 0)),
        (129, 0, (128, 1)),
        (256, 0, (128, 128)),
        (257, 1, (128, 1)),
        (385, 2, (128, 1)),
    ],
)
def test_a_tile_is_encoded_at_the_step_after_it_is_full(length: int, tiles: int, spans: tuple[int, int]) -> None:
    assert encoded_tiles(length) == tiles
    assert exact_spans(length) == spans


def test_nothing_is_compiled_after_everything_was() -> None:
    kv_attention_cpu.compile_all()
    called = (kv_attention_cpu._key_logits, kv_attention_cpu._mix_values, kv_attention_cpu._refine)
    functions: list[Any] = list(called)  # the others are compiled into these
    before = [len(f.signatures) for f in functions]
    assert min(before) > 0
    for form in FORMS:
        case = make_case(form, (400, 300))
        resident = kv_attention_cpu.attend(case.queries, case.layer)
        groups, _ = select_groups(resident, case.layer, Fraction(1, 16))
        records = case.gather(groups)
        kv_attention_cpu.refine(case.queries, case.layer, resident, groups, case.addresses(records, groups >= 0))
    assert [len(f.signatures) for f in functions] == before
