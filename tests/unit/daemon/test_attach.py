"""The attach socket, by raw clients: what a session gets, what is refused, and what frees it."""

import asyncio
import errno
import mmap
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strataflux.daemon import attach
from strataflux.daemon.config import AttachConfig
from strataflux.daemon.errors import ReaderFailed
from strataflux.proto import layout, messages, segment
from strataflux.proto.errors import SegmentError
from strataflux.proto.messages import StoreRef, Welcome
from tests.unit.daemon.conftest import (
    CACHE_BYTES,
    STAMPS,
    Bench,
    MakeBench,
    fake_store,
    refusal,
    until,
)


async def test_welcome_carries_everything_read_only(bench: Bench) -> None:
    client = bench.client()
    answer = await client.ask(bench.hello())
    assert isinstance(answer, Welcome)
    assert (answer.session, answer.generation, answer.engine, answer.direct_io) == (1000, 77, "threads", "direct")
    assert [table.store for table in answer.tables] == [bench.stores[0].manifest.identity_digest]
    assert (answer.ring_log2, answer.stamps_count) == (11, STAMPS)
    page, view, own, doorbell, directory, cache = client.descriptors
    for descriptor, size in ((page, 4096), (view, 4096), (directory, 4096), (cache, CACHE_BYTES)):
        with pytest.raises(PermissionError):
            mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.ftruncate(own, 0)
        mmap.mmap(descriptor, size, mmap.MAP_SHARED, mmap.PROT_READ).close()
    size = layout.session_geometry(answer.ring_log2, answer.stamps_count, 0).total_bytes
    mapped = segment.map_descriptor(os.dup(own), size, writable=True)
    mapped.close()
    os.eventfd_write(doorbell, 1)
    assert os.eventfd_read(bench.reader.doorbell) == 1


async def test_descriptors_are_closed_after_sending(bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello())
    await until(lambda: bench.server.session_count == 1)
    (handed,) = bench.reader.handed
    # The numbers may be in use again, by what the client received in this same process.
    for descriptor in set(handed) - set(client.descriptors):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


async def test_a_client_cannot_be_tricked_into_a_smaller_map(bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello())
    with pytest.raises(SegmentError):
        segment.map_descriptor(os.dup(client.descriptors[5]), 2 * CACHE_BYTES, writable=False)


async def test_hang_up_frees_the_session(bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello())
    assert list(bench.reader.open) == [0]
    client.close()
    await until(lambda: not bench.server.holders)  # a moment after the reader let go
    assert not bench.reader.open
    assert bench.server.counters.ended["hang_up"] == 1
    assert bench.server.session_count == 0


async def test_hang_up_while_the_session_is_made_frees_it(bench: Bench) -> None:
    bench.reader.gate.clear()
    client = bench.client()
    client.say(bench.hello())
    await until(lambda: len(bench.server.holders) == 1)
    client.close()
    bench.reader.gate.set()
    await until(lambda: bool(bench.reader.handed) and not bench.server.holders)
    assert not bench.reader.open
    assert bench.server.session_count == 0


_CLIENT_PROGRAM = """
import sys, socket
from strataflux.proto import messages
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(sys.stdin.buffer.read())
welcome, descriptors = messages.receive(sock)
print(welcome.type, flush=True)
sock.recv(1)
"""


async def start_client(bench: Bench, program: str = _CLIENT_PROGRAM) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, str(bench.path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(messages.encode(bench.hello()))
    process.stdin.close()
    assert await process.stdout.readline() == b"welcome\n"
    return process


async def test_killed_client_frees_the_session(bench: Bench) -> None:
    process = await start_client(bench)
    assert list(bench.reader.open) == [0]
    process.kill()
    await until(lambda: not bench.reader.open)
    await process.wait()
    assert bench.server.counters.ended.total() == 1


async def test_end_of_the_process_frees_a_session_whose_socket_lives_on(bench: Bench) -> None:
    """A child that inherited the socket keeps it open; the process that attached is what counts."""
    # The child outlives its parent until its own standard input, a pipe that this test holds, is closed.
    inherit = (
        "import os\nos.set_inheritable(sock.fileno(), True)\n"
        "import subprocess\nread, write = (int(n) for n in sys.argv[2:4])\nos.close(write)\n"
        "subprocess.Popen(['cat'], stdin=read, stdout=subprocess.DEVNULL, close_fds=False)\n"
        "print('ready', flush=True)\nos._exit(0)\n"
    )
    read, write = os.pipe()
    program = _CLIENT_PROGRAM.replace("sock.recv(1)\n", inherit)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        program,
        str(bench.path),
        str(read),
        str(write),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(read, write),
    )
    os.close(read)
    out, _ = await process.communicate(messages.encode(bench.hello()))
    assert out == b"welcome\nready\n"
    await until(lambda: not bench.reader.open)
    assert bench.server.counters.ended["process_end"] == 1
    os.close(write)


async def test_another_layout_is_refused_with_both_numbers(bench: Bench) -> None:
    client = bench.client()
    answer = refusal(await client.ask(bench.hello(layout=layout.LAYOUT_VERSION + 1)), "layout")
    assert str(layout.LAYOUT_VERSION + 1) in answer.found
    assert answer.expected == str(layout.LAYOUT_VERSION)
    assert await client.hear() is None


async def test_unknown_store_is_refused_by_the_fields_that_differ(bench: Bench) -> None:
    identity = {**bench.stores[0].manifest.identity, "weights": "b"}
    answer = refusal(await bench.client().ask(bench.hello(stores=[StoreRef("f" * 64, identity)])), "identity")
    assert 'weights = "a"' in answer.found
    assert 'weights = "b"' in answer.expected
    assert "architecture" not in answer.found + answer.expected


async def test_one_session_too_many_of_a_user(make_bench: MakeBench) -> None:
    bench = await make_bench(AttachConfig(max_sessions_per_uid=16))
    for _ in range(16):
        assert isinstance(await bench.client().ask(bench.hello()), Welcome)
    answer = refusal(await bench.client().ask(bench.hello()), "limit")
    assert "16" in answer.found
    assert "at most 16" in answer.expected
    bench.clients[3].close()
    await until(lambda: len(bench.server.holders) == 15)
    assert isinstance(await bench.client().ask(bench.hello()), Welcome)


async def test_one_session_too_many(make_bench: MakeBench) -> None:
    bench = await make_bench(AttachConfig(max_sessions=2))
    for _ in range(2):
        assert isinstance(await bench.client().ask(bench.hello()), Welcome)
    answer = refusal(await bench.client().ask(bench.hello()), "limit")
    assert "max_sessions" in answer.expected


async def test_connections_that_say_nothing_are_bounded_and_sent_away(make_bench: MakeBench) -> None:
    bench = await make_bench(AttachConfig(max_sessions=2, hello_seconds=60))
    silent = [bench.client() for _ in range(4)]
    await until(lambda: bench.server.counters.accepted == 4)
    assert await bench.client().hear() is None
    assert bench.server.counters.turned_away == 1
    silent[0].say(bench.hello())
    assert isinstance(await silent[0].hear(), Welcome)


async def test_a_slow_hello_is_refused(make_bench: MakeBench) -> None:
    bench = await make_bench(AttachConfig(hello_seconds=0.001))
    client = bench.client()
    answer = refusal(await client.hear(), "limit")
    assert "0.001 s" in answer.expected
    assert await client.hear() is None


async def test_kv_requests_of_a_session_without_kv_are_answered(bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello())
    answer = refusal(await client.ask(messages.KvReserve(request=5, blocks=1)), "unsupported")
    assert answer.request == 5
    assert bench.server.session_count == 1


async def test_a_release_is_answered_when_it_is_settled(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, False, True])
    monkeypatch.setattr(bench.reader, "release_blocks", lambda index, ranges: lambda: next(answers))
    client = bench.client()
    await client.ask(bench.hello())
    assert await client.ask(messages.KvRelease(7, [[0, 1]])) == messages.KvReleased(7)
    assert list(answers) == []


async def test_a_set_larger_than_the_cache_is_refused_with_both_numbers(bench: Bench) -> None:
    room = CACHE_BYTES - CACHE_BYTES // 16
    answer = refusal(await bench.client().ask(bench.hello(largest_set_bytes=room + 1)), "too_large")
    assert str(room + 1) in answer.found
    assert str(room) in answer.expected
    assert isinstance(await bench.client().ask(bench.hello(largest_set_bytes=room)), Welcome)


async def test_a_store_that_is_not_shared_is_refused_while_it_is_used(make_bench: MakeBench) -> None:
    bench = await make_bench(store_settings={"share": "session"})
    first = bench.client()
    assert isinstance(await first.ask(bench.hello()), Welcome)
    refusal(await bench.client().ask(bench.hello()), "denied")
    first.close()
    await until(lambda: not bench.server.holders)
    assert isinstance(await bench.client().ask(bench.hello()), Welcome)


async def test_stores_get_table_numbers_in_the_order_of_the_hello(make_bench: MakeBench, tmp_path: Path) -> None:
    stores = [fake_store(tmp_path / name, weights=name) for name in ("a", "b", "c")]
    bench = await make_bench(stores=stores)
    refs = [StoreRef(stores[i].manifest.identity_digest, stores[i].manifest.identity) for i in (2, 0)]
    answer = await bench.client().ask(bench.hello(stores=refs))
    assert isinstance(answer, Welcome)
    assert [table.store for table in answer.tables] == [ref.digest for ref in refs]


async def test_a_reader_that_fails_is_a_refusal(bench: Bench) -> None:
    bench.reader.failure = ReaderFailed("reader thread", "not running", "running", "restart the daemon")
    answer = refusal(await bench.client().ask(bench.hello()), "limit")
    assert "not running" in answer.found
    assert bench.server.holders == []


async def test_a_fault_of_ours_hangs_up_too(bench: Bench) -> None:
    bench.reader.failure = ZeroDivisionError()
    client = bench.client()
    refusal(await client.ask(bench.hello()), "limit")
    assert await client.hear() is None
    assert bench.server.holders == []


async def test_stop_tells_the_sessions_and_refuses_the_rest(bench: Bench) -> None:
    attached, waiting = bench.client(), bench.client()
    await attached.ask(bench.hello())
    await until(lambda: bench.server.counters.accepted == 2 and bench.server.session_count == 1)
    bench.server.stop_intake()
    assert isinstance(await attached.hear(), messages.Draining)
    refusal(await waiting.hear(), "draining")
    assert bench.server.session_count == 1
    await bench.server.close()
    assert await attached.hear() is None
    assert not bench.reader.open


async def test_a_client_that_does_not_read_is_cut_off(bench: Bench) -> None:
    client = bench.client()
    await client.ask(bench.hello())
    # Answers pile up until the socket takes no more.
    client.socket.setblocking(False)
    request = messages.KvReserve(1, 1)
    while bench.server.session_count:
        try:
            client.say(request)
        except BlockingIOError:
            await asyncio.sleep(0)
        except BrokenPipeError:
            break
    await until(lambda: not bench.reader.open)
    assert bench.server.counters.ended["slow"] == 1


_OTHER_USER_PROGRAM = """
import os, socket, sys
from strataflux.proto import messages
hello = sys.stdin.buffer.read()
os.setgroups([]); os.setgid(65534); os.setuid(65534)
sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
sock.connect(sys.argv[1])
sock.send(hello)
answer, descriptors = messages.receive(sock)
print(getattr(answer, "code", answer.type), len(descriptors))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize(("allowed", "expected"), [(None, "welcome 6"), ((5,), "denied 0"), ((65_534,), "welcome 6")])
async def test_another_user_needs_to_be_listed(
    make_bench: MakeBench, allowed: tuple[int, ...] | None, expected: str
) -> None:
    with tempfile.TemporaryDirectory(prefix="strataflux-test-") as folder:  # others cannot enter tmp_path
        Path(folder).chmod(0o755)
        bench = await make_bench(store_settings={"allow_uids": allowed}, folder=Path(folder))
        bench.path.chmod(0o666)
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _OTHER_USER_PROGRAM, str(bench.path), stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        out, _ = await process.communicate(messages.encode(bench.hello()))
        assert out.decode().strip() == expected
        await until(lambda: not bench.reader.open)


async def test_running_out_of_descriptors_is_a_pause(make_bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener is not asked again until the pause is over, and whoever waited is served then."""
    bench = await make_bench()
    attempts: list[socket.socket] = []
    accept: Callable[[socket.socket], Any] = socket.socket.accept

    def failing(listener: socket.socket) -> Any:
        attempts.append(listener)
        if len(attempts) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    monkeypatch.setattr(attach, "_RETRY_SECONDS", 0.0)
    monkeypatch.setattr(socket.socket, "accept", failing)
    assert isinstance(await bench.client().ask(bench.hello()), Welcome)
    assert len(attempts) == 2
