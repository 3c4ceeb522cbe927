"""KV blocks asked for over the attach socket: those who wait for them hold up nobody else."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from strataflux.proto import messages
from strataflux.proto.messages import Welcome
from tests.unit.daemon.conftest import WATCHDOG_SECONDS, Bench, until

RELEASES = 64
"""More than there are threads to wait in."""


async def test_releases_that_wait_for_a_step_hold_nobody_else_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many a client has under way, others attach, and its own session can be freed."""
    asked: set[int] = set()

    def release(index: int, ranges: list[list[int]]) -> Callable[[], bool]:
        def settled() -> bool:
            asked.add(ranges[0][0])
            return False

        return settled

    monkeypatch.setattr(bench.reader, "release_blocks", release)
    client = bench.client()
    await client.ask(bench.hello())
    for block in range(RELEASES):
        client.say(messages.KvRelease(block + 1, [[block, 1]]))
    await until(lambda: len(asked) == RELEASES)
    assert isinstance(await bench.client().ask(bench.hello()), Welcome)
    client.close()
    await until(lambda: len(bench.reader.open) == 1)


async def test_a_disk_that_hangs_for_many_keeps_nobody_from_attaching(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    let = threading.Event()
    asked: set[int] = set()

    def hang(index: int, count: int) -> list[list[int]]:
        asked.add(index)
        assert let.wait(WATCHDOG_SECONDS)
        return [[0, count]]

    monkeypatch.setattr(bench.reader, "grant_blocks", hang)
    # As many as on a machine with one CPU, and one for this test to hear in.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(6))
    waiting = [bench.client() for _ in range(8)]
    for client in waiting:
        assert isinstance(await client.ask(bench.hello()), Welcome)
    for client in waiting:
        client.say(messages.KvReserve(1, 1))
    try:
        await until(lambda: len(asked) >= 4)
        async with asyncio.timeout(WATCHDOG_SECONDS):
            assert isinstance(await bench.client().ask(bench.hello()), Welcome)
        assert len(asked) == 4
    finally:
        let.set()
    for client in waiting:
        assert await client.hear() == messages.KvReserved(1, [[0, 1]])
