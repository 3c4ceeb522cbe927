"""Selection and look-up in one launch against the compiled client's, and a step's first and last node.

Both paths run: Triton in its interpreter and the CUDA source on emulated blocks, or each on the GPU where there is one.
"""

import ctypes
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client import attach_block as ab
from strataflux.client import directory
from strataflux.kernels.gpu import cells
from strataflux.kernels.gpu.errands import Errands, Select
from strataflux.kernels.gpu.select import Selection, score_thresholds, select_and_look_up
from strataflux.kernels.gpu.step import begin_step, end_step
from strataflux.kernels.select import select_reference
from strataflux.kernels.topk import quota
from strataflux.proto import layout
from tests.fakes.emulation import emulated
from tests.fakes.errands import needs_compiler, run_beside
from tests.fakes.gpu_side import PAGES, RING_LOG2, Side

# The interpreter computes lanes that a mask then throws away, and NumPy warns of what it finds in them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

RECORDS = 3000
FIRST = 100
KERNELS = Path(__file__).parents[2] / "kernels"
SOURCE = KERNELS / "gpu" / "select.cu"

Launch = Callable[[torch.Tensor, Side, Selection, int, int], None]


def _on_device(path: Literal["cuda", "triton"]) -> Launch:
    def launch(x: torch.Tensor, side: Side, selection: Selection, table: int, first: int) -> None:
        thresholds = score_thresholds(side.device)
        select_and_look_up(x.to(side.device), side.block, thresholds, selection, table, first, path=path)

    return launch


def _on_emulation(library: ctypes.CDLL) -> Launch:
    def launch(x: torch.Tensor, side: Side, selection: Selection, table: int, first: int) -> None:
        thresholds, width = score_thresholds(side.device), selection.width
        tensors = (x, side.block, thresholds, selection.channels, selection.addresses)
        quotas = quota(selection.k, 1024), quota(selection.k, (width - 1) % 1024 + 1)
        run = library[f"run{[torch.float32, torch.float16, torch.bfloat16].index(x.dtype)}"]
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]
        run(-(-width // 1024), *pointers, ctypes.c_int64(first), width, table, *quotas)

    return launch


def _beside_a_product(threads: int, library: Callable[[], ctypes.CDLL]) -> Launch:
    """The same as an errand in blocks of so many threads."""

    def launch(x: torch.Tensor, side: Side, selection: Selection, table: int, first: int) -> None:
        plain = x.dtype == torch.float16
        x = (x if plain else x.float() * 0.5).to(side.device)
        gain = None if plain else torch.full_like(x, 2.0)
        thresholds = score_thresholds(side.device)
        errands = Errands([Select(x, gain, side.block, thresholds, selection, table, first)])
        run_beside(errands, threads, library)

    return launch


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The CUDA source with its three types, for the host."""
    needs_compiler()
    runs = [
        f"""extern "C" void run{i}(int blocks, void* x, i64* block, float* thresholds, int* channels, u64* addresses,
        i64 first, int width, int table, int full, int last) {{
          run_blocks(blocks, CHUNK, [=] {{
            select_and_look_up<{i}>(x, block, thresholds, channels, addresses, first, width, table, full, last);
          }});
        }}"""
        for i in range(3)
    ]
    return emulated(SOURCE, "\n".join(runs), tmp_path_factory.mktemp("select"))


@pytest.fixture(params=["triton", "cuda", 32, 128, 512])
def launch(request: pytest.FixtureRequest) -> Launch:
    """One way of the selection: on the GPU, or what stands for it here."""
    if isinstance(request.param, int):
        return _beside_a_product(request.param, lambda: request.getfixturevalue("errand_library"))
    if request.param == "triton" or torch.cuda.is_available():
        return _on_device(request.param)
    return _on_emulation(request.getfixturevalue("library"))


@pytest.fixture
def pair(device: torch.device) -> Iterator[tuple[Side, Side]]:
    """An attachment for the compiled client, and one for kernels."""
    sides = Side(RECORDS, torch.device("cpu")), Side(RECORDS, device)
    yield sides
    for side in sides:
        side.close()


def test_numbers_in_the_cuda_source_are_ours() -> None:
    found = {
        name: int(value) for name, value in re.findall(r"(\w+) = (\d+)[,\s]", SOURCE.with_suffix(".cuh").read_text())
    }
    named = [name for name in cells.__all__ if name in found]
    assert len(named) == 18
    assert {name: found[name] for name in named} == {name: getattr(cells, name).value for name in named}
    fields = ("LAP_SHIFT", "LAPS", "SCORE_SHIFT", "TABLE_SHIFT")
    assert {name: found[name] for name in fields} == {name: getattr(layout, name) for name in fields}
    assert (layout.ENTRY_ABSENT, layout.ENTRY_QUARANTINED) == (0, 0xFFFFFFFF)


def test_cells_are_the_clients() -> None:
    for name in cells.__all__:
        if name not in ("N_COUNTERS", "CHUNK_UNITS_MASK"):
            assert getattr(cells, name).value == getattr(ab, name), name
    assert cells.CHUNK_UNITS_MASK.value == (1 << ab.CHUNK_UNITS_LOG2) - 1
    assert cells.N_COUNTERS.value == len(layout.COUNTERS)


def fill(sides: tuple[Side, Side], seed: int) -> None:
    """The same directory, clock and step for both: hits, misses, quarantined records and slots that are not mapped."""
    random = np.random.default_rng(seed)
    units = PAGES * layout.UNITS_PER_PAGE
    kinds = random.integers(0, 10, RECORDS)
    entries = random.integers(1, units + 1, RECORDS).astype(np.uint32)
    entries[kinds > 5] = layout.ENTRY_ABSENT
    entries[kinds == 0] = layout.ENTRY_QUARANTINED
    entries[kinds == 1] = random.integers(units + 1, 1 << 31, (kinds == 1).sum())
    for side in sides:
        side.words[:] = entries
        side.daemon["clock"] = 77
        side.view["ring_head"] = 0


def inputs(width: int, seed: int) -> torch.Tensor:
    """Activations with ties, zeros, infinities and NaNs among them."""
    x = torch.randn(width, generator=torch.Generator().manual_seed(seed))
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.5, -1.5, 1e-30])
    at = torch.randperm(width, generator=torch.Generator().manual_seed(seed))[: width // 4]
    x[at] = special[torch.arange(at.numel()) % special.numel()]
    return x


@pytest.mark.parametrize(
    ("width", "k", "special", "dtype"),
    [
        (1024, 16, True, torch.float32),
        (1024, 16, False, torch.float16),
        (2500, 40, True, torch.float32),
        (2500, 7, False, torch.bfloat16),
        (576, 1024, True, torch.float32),
        (100, 64, True, torch.float16),
    ],
)
def test_it_does_what_the_client_does(
    pair: tuple[Side, Side], launch: Launch, width: int, k: int, special: bool, dtype: torch.dtype
) -> None:
    host, gpu = pair
    fill(pair, width + k)
    x = (inputs(width, k) if special else torch.randn(width)).to(dtype)
    channels, scores = select_reference(x.float(), k)
    addresses = np.zeros(channels.numel(), np.uint64)
    ab.begin_step(host.host)
    directory.look_up(host.host, 1, channels.numpy() + FIRST, scores.numpy(), addresses, False)
    ab.end_step(host.host)

    selection = Selection(k, width, gpu.device)
    begin_step(gpu.block)
    launch(x, gpu, selection, 1, FIRST)
    end_step(gpu.block)
    if gpu.device.type == "cuda":
        torch.cuda.synchronize()

    # Same channels, each at the same place in its slot range; within a chunk hits lead, both parts ascending.
    base = np.uint64(int(host.host[ab.BASES])) & ~np.uint64(0xFFF)
    expected = {int(c): int(a - base) if a else None for c, a in zip(channels, addresses, strict=True)}
    base_gpu = gpu.cell(ab.BASES) & ~0xFFF
    listed = list(zip(selection.channels.tolist(), selection.addresses.tolist(), strict=True))
    assert {c: a - base_gpu if a else None for c, a in listed} == expected
    for start in range(0, len(listed), max(quota(k, 1024), 1)):
        part = listed[start : start + quota(k, 1024)]
        assert part == sorted(part, key=lambda item: (item[1] == 0, item[0]))
    assert np.array_equal(gpu.stamps, host.stamps)
    # Programs reserve positions in any order: the same entries, whatever fits.
    pushed = int(host.session["ring_tail"][0])
    mine = {int(entry) & (1 << 56) - 1 for entry in gpu.ring[:pushed]}
    if int(host.host[ab.DROPPED]) == 0:
        assert mine == {int(entry) & (1 << 56) - 1 for entry in host.ring[:pushed]}
    assert len(mine) == pushed
    assert not gpu.ring[pushed:].any()
    assert set((gpu.ring[:pushed] >> 56).tolist()) <= {1}
    for field in (*layout.COUNTERS, "ring_tail", "step_ended"):
        assert int(gpu.session[field][0]) == int(host.session[field][0]), field
    assert gpu.cell(ab.RUBBISH) == int(host.host[ab.RUBBISH])


def test_a_fenced_session_misses_and_asks_for_nothing(pair: tuple[Side, Side], launch: Launch) -> None:
    _, gpu = pair
    fill(pair, 1)
    gpu.block[ab.ENABLED] = 0
    selection = Selection(16, 1024, gpu.device)
    begin_step(gpu.block)
    launch(torch.randn(1024), gpu, selection, 1, 0)
    end_step(gpu.block)
    assert not selection.addresses.any()
    assert gpu.cell(ab.DROPPED) == 16
    assert not gpu.ring.any()
    assert not gpu.stamps.any()


def test_positions_go_round_the_ring_with_their_lap(pair: tuple[Side, Side], launch: Launch) -> None:
    _, gpu = pair
    gpu.words[:] = layout.ENTRY_ABSENT
    start = (3 << RING_LOG2) - 5
    gpu.block[ab.TAIL] = start
    gpu.view["ring_head"] = start - 2
    selection = Selection(16, 1024, gpu.device)
    begin_step(gpu.block)
    launch(torch.randn(1024), gpu, selection, 1, 0)
    end_step(gpu.block)
    assert gpu.cell(ab.TAIL) == start + 16  # and all was stored by then
    assert int(gpu.session["ring_tail"][0]) == start + 16
    assert (gpu.ring[-5:] >> 56).tolist() == [3] * 5
    assert (gpu.ring[:11] >> 56).tolist() == [4] * 11
    assert not gpu.ring[11:-5].any()


def test_another_width_is_refused(device: torch.device) -> None:
    selection = Selection(16, 1024, device)
    with pytest.raises(ValueError, match=r"made for \[1024\]"):
        select_and_look_up(torch.zeros(576), torch.zeros(1), torch.zeros(1), selection, 0, 0)
    with pytest.raises(ValueError, match=r"contiguous floats"):
        select_and_look_up(torch.zeros(1024).double(), torch.zeros(1), torch.zeros(1), selection, 0, 0)
