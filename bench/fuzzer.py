"""The process behind fuzz.py that sends rubbish to daemons: python fuzzer.py STORE SEED HERE ELSEWHERE.

Reads lines ``here|elsewhere ENTRIES MESSAGES`` and answers ``done`` to each: so many entries went through the ring of
its session at that daemon, and so many messages to its sockets. Ends when its input does.
"""

import ctypes
import random
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))  # last: the folders share names with other packages

from strataflux.client import attach_block
from strataflux.client.session import Session
from strataflux.proto import layout, messages
from strataflux.proto.messages import Hello, KvGeometry, KvRelease, KvReserve, SegmentDropped, StoreRef
from strataflux.proto.runtime import ATTACH_SOCKET, CONTROL_SOCKET
from strataflux.proto.store_format import StoreManifest, open_store
from tests.fakes.rubbish import attach_rubbish, control_rubbish, mutated, spray_ring

CHUNK = 4096
ANSWER_SECONDS = 20.0
METHODS = ("GetInfo", "ListStores", "ListSessions", "GetStats", "WatchStats", "GetConfig", "NoSuchMethod")
HEAD_AT = np.uint64(layout.offset_of(layout.SESSION_VIEW, "ring_head"))
TAIL_AT = np.uint64(layout.offset_of(layout.SESSION_PAGE, "ring_tail"))


class Target:
    """One daemon, and this process' session at it."""

    def __init__(self, runtime_dir: Path, store: StoreManifest, seed: int) -> None:
        self.source = random.Random(seed)
        self._folder = runtime_dir
        self._store = store
        self._session = Session.attach([store], selections_per_step=8192, runtime_dir=runtime_dir, client="fuzzer")
        self._attachment = self._session._attachment
        self._position = np.uint64(0)
        self._channel = grpc.insecure_channel(f"unix:{runtime_dir / CONTROL_SOCKET}")
        ref = StoreRef(store.identity_digest, store.identity)
        kv = KvGeometry("kv_group", 64, 4, 16, 512, 8)
        self._hello = messages.encode(Hello(layout.LAYOUT_VERSION, "fuzz", [ref], 100, 0))
        self._right = [
            messages.encode(Hello(layout.LAYOUT_VERSION, "fuzz", [ref], 100, 4096, kv)),
            messages.encode(KvRelease(3, [[0, 4], [9, 1]])),
            messages.encode(KvReserve(2, 8)),
            messages.encode(SegmentDropped(512)),
        ]

    def work(self, entries: int, count: int) -> None:
        """Send so many messages, and between them, evenly, so many entries."""
        begun = self._taken()
        for number in range(count):
            self._spray(begun + entries * (number + 1) // count)
            self._message()
        self._spray(begun + entries)

    def close(self) -> None:
        self._channel.close()
        self._session.close()

    def _taken(self) -> int:
        """Entries that the reader has taken from the ring so far."""
        view = int(self._attachment.block[attach_block.VIEW])
        return ctypes.c_uint64.from_address(view + int(HEAD_AT)).value

    def _spray(self, until: int) -> None:
        """Write entries until the reader has taken as many in all."""
        block = self._attachment.block
        while self._taken() < until:
            count = min(CHUNK, until - self._taken())
            self._position = np.uint64(
                spray_ring(
                    block[attach_block.RING],
                    block[attach_block.RING_LOG2],
                    block[attach_block.PAGE] + TAIL_AT,
                    block[attach_block.VIEW] + HEAD_AT,
                    self._position,
                    count,
                    np.uint64(self.source.getrandbits(64)),
                    np.uint64(self._store.record_count),
                )
            )
            self._attachment.ring_doorbell()
            time.sleep(0)

    def _message(self) -> None:
        kinds: tuple[Callable[[], None], ...] = (self._attach, self._control, self._attached, self._call)
        (kind,) = self.source.choices(kinds, (60, 30, 4, 6))
        with suppress(ConnectionError, BrokenPipeError, grpc.RpcError):
            kind()

    def _attach(self) -> None:
        """A first message; the daemon answers or hangs up."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(self._folder / ATTACH_SOCKET))
            if self.source.random() < 0.05:
                socket.send_fds(connection, [self._hello], [connection.fileno()] * self.source.randrange(1, 4))
            elif self.source.random() > 0.02:  # else hang up without a word
                connection.send(attach_rubbish(self.source, [self._hello, *self._right]))
                connection.recv(1 << 17)

    def _attached(self) -> None:
        """A right hello, and rubbish once the session is there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(self._folder / ATTACH_SOCKET))
            connection.send(self._hello)
            _, descriptors, _, _ = socket.recv_fds(connection, 1 << 17, messages.MAX_DESCRIPTORS)
            for descriptor in descriptors:
                socket.close(descriptor)
            connection.send(mutated(self.source, self.source.choice(self._right)))
            connection.recv(1 << 17)

    def _control(self) -> None:
        """Bytes that are no gRPC."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.connect(str(self._folder / CONTROL_SOCKET))
            connection.sendall(control_rubbish(self.source))
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(1 << 16):
                pass

    def _call(self) -> None:
        """A right call with a message of noise."""
        method = f"/strataflux.control.v1.Control/{self.source.choice(METHODS)}"
        request = self.source.randbytes(self.source.randrange(1, 200))
        self._channel.unary_unary(method, None, None)(request, timeout=ANSWER_SECONDS)


def main() -> int:
    store, seed = open_store(Path(sys.argv[1])), int(sys.argv[2])
    targets = {
        name: Target(Path(folder), store, seed)
        for name, folder in zip(("here", "elsewhere"), sys.argv[3:], strict=True)
    }
    print("ready", flush=True)
    for line in sys.stdin:
        name, entries, count = line.split()
        targets[name].work(int(entries), int(count))
        print("done", flush=True)
    for target in targets.values():
        target.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
