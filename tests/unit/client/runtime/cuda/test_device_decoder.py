"""A prepared model on a device through a daemon's sessions: misses asked for, hits read in place, and what may end."""

import ctypes
import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed (the gpu extra)")

from strataflux.client import attach_block
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.cuda.block import DeviceBlock
from strataflux.client.runtime.cuda.budget import Budget
from strataflux.client.runtime.cuda.maps import DeviceMaps
from strataflux.client.runtime.cuda.refined import DeviceDecoder
from strataflux.client.runtime.cuda.session import DeviceSession
from strataflux.client.runtime.models import SETS
from strataflux.kernels.cuda_build import CudaError
from strataflux.kernels.gpu.host_memory import Access
from strataflux.proto import layout
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.device_model import emulated_model, relative
from tests.unit.client.runtime.cuda.test_step import CONTEXT, HALF, TOKENS, K, on_cpu

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes lanes that masks discard

CPU = torch.device("cpu")
BUDGET = Budget({"qkv": K, "o": 0, "gate_up": 0, "down": K}, dict.fromkeys(SETS, 0.0))
STEPS = 50
"""A watchdog: far more steps than anything here takes."""


@pytest.fixture
def daemon(tmp_path: Path, prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(tmp_path, [open_store(prepared.store)], ring_log2=14) as fake:
        yield fake


@pytest.fixture
def events() -> queue.SimpleQueue[str]:
    """What happened to the session."""
    return queue.SimpleQueue()


@pytest.fixture
def decoder(
    tmp_path: Path, prepared: PreparedModel, daemon: FakeDaemon, events: queue.SimpleQueue[str]
) -> Iterator[DeviceDecoder]:
    made = DeviceDecoder(prepared, emulated_model(prepared), context=CONTEXT, budget=BUDGET)
    made.attach(tmp_path, lambda event: events.put(event.kind))
    with made:
        yield made


def again(decoder: DeviceDecoder) -> torch.Tensor:
    """Logits after the first token, of a new sequence."""
    decoder.decoder.reset()
    return decoder.advance(TOKENS[0])


def publish_all(daemon: FakeDaemon) -> None:
    daemon.publish(0, *range(daemon.manifests[0].record_count))


def test_what_misses_is_asked_for_and_hits_once_it_is_there(decoder: DeviceDecoder, daemon: FakeDaemon) -> None:
    base = again(decoder)
    first = decoder.hit_rate()
    assert (first.hits, first.lookups > 0) == (0, True)
    assert len(daemon.take_requests()) == first.lookups
    publish_all(daemon)
    found = until_all_hits(decoder)
    expected = on_cpu(decoder._prepared, BUDGET.shift, BUDGET.k)[0]
    assert relative(found, expected) < HALF < relative(base, expected)
    assert decoder.access == "this processor"


def until_all_hits(decoder: DeviceDecoder) -> torch.Tensor:
    """Step until nothing misses: what was mapped is made reachable beside the steps."""
    for _ in range(STEPS):
        before = decoder.hit_rate()
        found = again(decoder)
        now = decoder.hit_rate()
        if now.hits - before.hits == now.lookups - before.lookups:
            return found
    raise AssertionError(f"still missing: {decoder.hit_rate()}")


def test_a_step_that_was_fenced_is_run_again_unrefined(decoder: DeviceDecoder, daemon: FakeDaemon) -> None:
    base = again(decoder)
    publish_all(daemon)
    until_all_hits(decoder)
    launch, fences = decoder.decoder.launch, [daemon.fence]

    def fenced_launch(token: int | None = None) -> None:
        launch(token)
        while fences:
            fences.pop()()

    decoder.decoder.launch = fenced_launch  # type: ignore[method-assign]
    assert torch.equal(again(decoder), base)
    assert decoder._session is not None
    assert decoder._session.stats().steps_invalid == 1
    assert decoder.decoder.position == 1


def test_after_a_hang_up_it_attaches_anew_and_refines_again(
    decoder: DeviceDecoder, daemon: FakeDaemon, events: queue.SimpleQueue[str]
) -> None:
    again(decoder)
    daemon.hang_up()
    while events.get(timeout=60) != "attached":
        again(decoder)
    publish_all(daemon)
    until_all_hits(decoder)


class Registration:
    """Stands for one with the driver; keeps what is registered at this moment."""

    access = Access.REGISTERED_READ_ONLY
    held: ClassVar[dict[int, int]] = {}

    def __init__(self, address: int, size: int, writable: bool) -> None:
        self.address, self.writable = address, writable
        self.held[address] = size

    def close(self) -> None:
        ctypes.string_at(self.address, 1)  # it is still mapped
        self.held.pop(self.address, None)


class Driver:
    """Registers, and says when; refuses cache chunks when told so."""

    def __init__(self) -> None:
        self.refuse = False
        self.asked: queue.SimpleQueue[tuple[int, bool]] = queue.SimpleQueue()

    def __call__(self, address: int, size: int, writable: bool) -> Any:
        if self.refuse and size == layout.SEGMENT_MIN_BYTES:
            self.asked.put((size, False))
            raise CudaError("no more pages")
        made = Registration(address, size, writable)
        self.asked.put((size, True))
        return made

    def until_chunk(self) -> bool:
        while True:
            size, granted = self.asked.get(timeout=60)
            if size == layout.SEGMENT_MIN_BYTES:
                return granted


@pytest.fixture
def driver() -> Driver:
    Registration.held.clear()
    return Driver()


def session_with(driver: Driver, daemon: FakeDaemon, folder: Path) -> tuple[DeviceSession, DeviceMaps]:
    maps = DeviceMaps(DeviceBlock(CPU), CPU, driver)
    session = DeviceSession.attach_device(daemon.manifests, maps, selections_per_step=8, runtime_dir=folder)
    return session, maps


def step(session: DeviceSession) -> None:
    with session.step():
        pass


def test_registrations_follow_what_is_mapped(driver: Driver, daemon: FakeDaemon, tmp_path: Path) -> None:
    session, maps = session_with(driver, daemon, tmp_path)
    daemon.publish(0, 0)
    step(session)
    assert driver.until_chunk()
    step(session)
    assert maps.reachable_bytes == maps.mapped_bytes == layout.SEGMENT_MIN_BYTES
    assert maps.access == "registered read-only"
    pages = len(Registration.held) - 1
    daemon.retire(0)
    while layout.SEGMENT_MIN_BYTES in Registration.held.values():
        step(session)  # the change waits for a moment between two steps
    step(session)
    assert (maps.reachable_bytes, maps.mapped_bytes, len(Registration.held)) == (0, 0, pages)
    session.close()
    assert not Registration.held


def test_what_the_driver_refuses_misses_and_is_told(driver: Driver, daemon: FakeDaemon, tmp_path: Path) -> None:
    driver.refuse = True
    session, maps = session_with(driver, daemon, tmp_path)
    step(session)
    assert not driver.until_chunk()
    for _ in range(STEPS):
        step(session)
    session.close()
    assert isinstance(maps.error, CudaError)
    assert not Registration.held


def test_only_the_sessions_own_memory_is_asked_for_writable(
    driver: Driver, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writable: list[int] = []
    monkeypatch.setattr(Registration, "close", lambda self: None)
    session, maps = session_with(driver, daemon, tmp_path)
    step(session)
    writable = [page.address for page in maps._pages if page is not None and getattr(page, "writable", False)]
    assert writable == [int(session._block[attach_block.PAGE])]
    session.close()
