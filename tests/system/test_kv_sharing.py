"""Sequences that fork, and sessions that end, told by the disk: the anonymous file that a real daemon has for them."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from strataflux.cache_policy.miss import Wait
from strataflux.client.kv import RefinedKVCache
from strataflux.client.kv_blocks import KvBlocks
from strataflux.client.kv_options import KvOptions
from strataflux.client.launch import PrivateDaemon
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.session import Session
from strataflux.proto.messages import KvGeometry
from tests.fakes.records import LocalRecords
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

WATCHDOG_SECONDS = 120.0
OPTIONS = KvOptions(2, 2, 4, 4, 4, Fraction(1, 8))
WEIGHTS = DecoderWeights.read(tiny_source())
FORM = OPTIONS.form(WEIGHTS.config.head_dim)
CONTEXT, PREFILLED, STEPS = 600, 400, 120
"""Three blocks: two are full after the prefill, one fills up during the steps."""
CAPACITY = 4
BLOCK_BYTES = 2 * 2 * FORM.groups_per_tile * FORM.record_bytes
"""16 KiB, so that a block takes whole pages of a file and nothing beside."""

# Puts a block and looks its records up, then holds everything until it is killed.
CLIENT = """
import json, sys, time
from pathlib import Path
import numpy as np
from strataflux.client.session import Session
from strataflux.proto.messages import KvGeometry
geometry = KvGeometry(**json.loads(sys.argv[2]))
session = Session.attach([], selections_per_step=512, runtime_dir=Path(sys.argv[1]), kv=geometry)
ids = session.kv.reserve(2)
data = np.ones(geometry.groups_per_block * geometry.record_bytes, np.uint8)
assert all(session.kv.put(i, data) for i in ids) and session.kv.wait_settled(time.monotonic() + 60)
oids = np.arange(128)
with session.step():
    session.lookup(session.kv.table, oids, np.ones(128, np.uint8), np.zeros(128, np.uint64))
    print("inside a step", flush=True)
    sys.stdin.read()
"""


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for what another process brings about; a watchdog, not a time limit, ends a hang."""
    given_up = threading.Event()
    watchdog = threading.Timer(WATCHDOG_SECONDS, given_up.set)
    watchdog.start()
    try:
        while not condition():
            assert not given_up.is_set(), what
            os.sched_yield()
    finally:
        watchdog.cancel()


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrivateDaemon]:
    folder = tmp_path_factory.mktemp("d")
    config = folder / "config.toml"
    config.write_text(f'[kv]\nfolder = "{folder / "kv"}"\nfree_bytes = 0\n[reader]\ngrace_seconds = 60\n')
    slots = OPTIONS.slots_of(WEIGHTS.config, CONTEXT)
    budget = OPTIONS.daemon_bytes(WEIGHTS.config, slots)
    with PrivateDaemon([], weight_cache_bytes=0, kv_cache_bytes=budget, options=[f"--config={config}"]) as running:
        yield running


def kv_files(daemon: PrivateDaemon) -> list[Path]:
    """Descriptors of the daemon that are files without a name; the session's file has two."""
    found = []
    for fd in Path(f"/proc/{daemon.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed while we look
            target = os.readlink(fd)
            if target.endswith(" (deleted)") and not target.startswith("/memfd:"):
                found.append(fd)
    return found


def disk_bytes(daemon: PrivateDaemon) -> int:
    """What the session's file takes on the disk."""
    found = {os.stat(fd).st_ino: os.stat(fd).st_blocks * 512 for fd in kv_files(daemon)}
    assert len(found) == 1
    return sum(found.values())


def blocks_on_disk(daemon: PrivateDaemon) -> list[bytes]:
    """Whole blocks of the session's file that hold anything."""
    data = kv_files(daemon)[0].read_bytes()
    pieces = [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]
    return [piece for piece in pieces if any(piece)]


def geometry(blocks: int = CAPACITY) -> KvGeometry:
    found = OPTIONS.geometry(WEIGHTS.config, blocks)
    assert found is not None
    return found


def attach(daemon: PrivateDaemon) -> Session:
    return Session.attach(
        [],
        selections_per_step=1024,
        largest_set_bytes=64 << 10,
        runtime_dir=daemon.runtime_dir,
        miss=Wait(60.0),
        kv=geometry(),
    )


def steps(decoder: Decoder, session: Session, tokens: list[int]) -> Tensor:
    rows = []
    for token in tokens:
        decoder.cache.begin_step()
        with session.step() as step:
            rows.append(decoder.step(token))
        assert step.end()
    return torch.stack(rows)


def some_tokens(count: int, seed: int) -> list[int]:
    return torch.randint(0, 250, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def alone(before: list[int], after: list[int]) -> tuple[Tensor, list[bytes]]:
    """Logits of a sequence that never forked and never misses, and the records of its blocks."""
    records = LocalRecords(3, geometry().groups_per_block, FORM.record_bytes)
    cache = RefinedKVCache(KvBlocks(WEIGHTS.config, FORM, 3, records), CONTEXT, OPTIONS.fraction, records, 0)
    decoder = Decoder(WEIGHTS, 0, cache=cache)
    decoder.prefill(before)
    rows = torch.stack([decoder.step(token) for token in after])
    return rows, [block.tobytes() for block in records.blocks.values()]


def test_a_fork_adds_no_bytes_and_diverging_adds_only_what_is_new(daemon: PrivateDaemon) -> None:
    before, left, right = some_tokens(PREFILLED, 1), some_tokens(STEPS, 2), some_tokens(STEPS, 3)
    with attach(daemon) as session:
        assert session.kv is not None
        pool = KvBlocks(WEIGHTS.config, FORM, CAPACITY, session.kv)
        assert disk_bytes(daemon) == 0
        cache = RefinedKVCache(pool, CONTEXT, OPTIONS.fraction, session, session.kv.table, 60.0)
        decoder = Decoder(WEIGHTS, 0, cache=cache)
        decoder.prefill(before)
        assert disk_bytes(daemon) == 3 * BLOCK_BYTES
        fork = cache.fork()
        # Two blocks are shared; the third is the fork's own, as each sequence may fill one.
        assert disk_bytes(daemon) == 4 * BLOCK_BYTES
        other = Decoder(WEIGHTS, 0, cache=fork)
        mine, theirs = steps(decoder, session, left), steps(other, session, right)
        assert disk_bytes(daemon) == 4 * BLOCK_BYTES
        right_rows = [alone(before, tokens) for tokens in (left, right)]
        torch.testing.assert_close(mine, right_rows[0][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(theirs, right_rows[1][0], rtol=1e-3, atol=1e-3)
        assert session.stats().kv_lookups > 0
        until(lambda: len(blocks_on_disk(daemon)) == 4, "blocks were never written")
        shared, expected = set(right_rows[0][1]) & set(right_rows[1][1]), set(right_rows[0][1]) | set(right_rows[1][1])
        assert (len(shared), len(expected)) == (2, 4)
        assert shared < set(blocks_on_disk(daemon))
        cache.close()
        assert disk_bytes(daemon) == 3 * BLOCK_BYTES
        steps(other, session, [5])
        twice = fork.fork()
        assert disk_bytes(daemon) == 3 * BLOCK_BYTES  # all of its blocks are full: a fork needs none
        fork.close()
        assert disk_bytes(daemon) == 3 * BLOCK_BYTES
        steps(Decoder(WEIGHTS, 0, cache=twice), session, [6])
        twice.close()
        assert (disk_bytes(daemon), pool.free) == (0, CAPACITY)
        assert sorted(session.kv.reserve(CAPACITY)) == list(range(CAPACITY))
        assert (session.stats().steps_invalid, session.stats().puts_dropped) == (0, 0)


def test_a_session_that_is_killed_within_a_step_leaves_its_place_and_its_disk(daemon: PrivateDaemon) -> None:
    words = json.dumps(asdict(geometry()))
    for _ in range(2):
        command = [sys.executable, "-P", "-c", CLIENT, str(daemon.runtime_dir), words]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "inside a step\n"
            assert disk_bytes(daemon) == 2 * BLOCK_BYTES
            client.kill()
        # Its place may be just leaving: a newcomer tries again until it is free.
        with attach(daemon) as session:
            assert session.kv is not None
            assert disk_bytes(daemon) == 0
            (block,) = session.kv.reserve(1)
            assert session.kv.put(block, np.ones(BLOCK_BYTES, np.uint8))
            assert session.kv.wait_settled(float("inf"))
        until(lambda: not kv_files(daemon), "the file was never closed")
