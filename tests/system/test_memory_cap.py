"""A real daemon in a real cgroup whose limit comes down: it gives cache back to its floor, and a client decodes on."""

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.cache_policy.miss import Wait
from strataflux.client.control import Control
from strataflux.client.session import Session
from tests.system.conftest import COUNT, RECORD_BYTES, START_SECONDS, Daemon, SmallStore, Starter
from tests.system.memory_group import MemoryGroup, memory_group

pytestmark = pytest.mark.system

MIB = 1 << 20
WAIT_SECONDS = 60.0
SEGMENT = 16 * MIB
LOW, ROOM = 24 * MIB, 16 * MIB
"""A cap leaves less free than the daemon wants, so one segment goes, after which it has what it wants."""


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_group() as made:
        yield made


@pytest.fixture
def daemon(group: MemoryGroup, tmp_path: Path, store: SmallStore) -> Iterator[Daemon]:
    config = tmp_path / "config.toml"
    config.write_text(
        f'[memory]\nlow_bytes = "{LOW >> 20}MiB"\nhigh_bytes = "1GiB"\npressure_percent = 100\n'
        '[reader]\ndirect_io = "off"\n'
    )
    starter = Starter(tmp_path)
    options = ("--config", str(config), "--store", store.path, "--weight-cache", f"{3 * SEGMENT >> 20}MiB")
    started = starter(*options, wrapper=group.wrapper())
    started.expect(b"READY=1")
    yield started
    starter.finish()


def read(session: Session, store: SmallStore, random: np.random.Generator) -> None:
    """One step that waits for what is missing and compares each record."""
    oids = np.sort(random.choice(COUNT, 256, replace=False)).astype(np.int64)
    addresses = np.zeros(256, np.uint64)
    with session.step() as step:
        assert session.lookup(0, oids, np.zeros(256, np.uint8), addresses) == 256
        found = [ctypes.string_at(int(address), RECORD_BYTES) for address in addresses]
        assert step.end()
    assert found == [store.records[oid].tobytes() for oid in oids]


def test_a_cap_takes_cache_down_to_the_floor_and_decode_goes_on(
    group: MemoryGroup, daemon: Daemon, store: SmallStore
) -> None:
    random, steps = np.random.default_rng(1), 0
    with (
        Session.attach(
            [store.manifest], selections_per_step=512, runtime_dir=daemon.folder, miss=Wait(WAIT_SECONDS)
        ) as session,
        Control(daemon.folder) as control,
    ):
        assert control.stats().caches[0].capacity_bytes == 3 * SEGMENT
        for _ in range(50):  # what a daemon allocates once it has now
            read(session, store, random)
        for left in (2, 1):
            before = group.used()
            group.cap(before + ROOM)
            deadline = time.monotonic() + START_SECONDS
            while group.used() > before - SEGMENT // 2:
                assert time.monotonic() < deadline, f"the cache never shrank to {left} segments"
                read(session, store, random)
                steps += 1
            assert control.stats().caches[0].capacity_bytes == left * SEGMENT
        group.cap(group.used() + ROOM)  # there is no more to give: the last segment stays, and so does the service
        turns, deadline = control.stats().turns, time.monotonic() + START_SECONDS
        while control.stats().turns < turns + 1000 or "memory" not in control.info().degraded:
            assert time.monotonic() < deadline, "the service never said that memory is short"
            read(session, store, random)
        assert control.stats().caches[0].capacity_bytes == SEGMENT
        assert (control.info().state, session.state, group.killed()) == ("ready", "attached", 0)
    assert steps > 0
    assert daemon.process.poll() is None
