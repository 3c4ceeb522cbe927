"""Draws the Grafana dashboard of systemd/monitoring as it looks over a daemon that works: docs/img/dashboard.png.

    python bench/dashboard_picture.py [--seconds 240] [--out docs/img/dashboard.png]

A real daemon serves three sessions: two look weights up, with a working set that drifts, and one of these asks for some
of its next step's records ahead; one puts KV blocks and looks theirs up, too. Half-way the set grows and three records
on disk are damaged. A real Prometheus scrapes it, and every panel's own queries are put to that Prometheus. Only the
drawing is not Grafana's: matplotlib puts the answers where the dashboard's grid says, in its units. Needs Debian's
`prometheus` and the `docs` extra.
"""

import argparse
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))
from dashboard_panels import draw

from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.messages import KvGeometry
from strataflux.proto.store_format import SectionSpec, StoreManifest
from strataflux.proto.store_writer import StoreWriter

ROOT = Path(__file__).parents[1]
DASHBOARD = ROOT / "systemd/monitoring/grafana.json"
STEP_SECONDS = 0.015
RECORDS, RECORD_BYTES = 16_384, 2048
GEOMETRY = KvGeometry("kv_group", 128, 4, 256, 256, 128)
SCRAPE = """
global: {{scrape_interval: 1s, evaluation_interval: 1s}}
scrape_configs:
  - job_name: stratafluxd
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""
TENANTS = """
[kv]
free_bytes = 0
folder = "{folder}"
[[tenant]]
name = "me"
uids = [{uid}]
kv_file_bytes = "32MiB"
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_store(folder: Path) -> StoreManifest:
    random = np.random.default_rng(1)
    sections = [
        SectionSpec(f"{layer}", "weight_channel", layer, "qkv", RECORDS // 4, RECORD_BYTES) for layer in range(4)
    ]
    with StoreWriter(folder, {"picture": "dashboard"}, sections) as writer:
        for number, section in enumerate(sections):
            writer.write(number, 0, random.integers(0, 256, (section.count, RECORD_BYTES), dtype=np.uint8))
        return writer.publish()


def damage(manifest: StoreManifest, oids: tuple[int, ...]) -> None:
    section = manifest.sections[0]
    with manifest.records_path.open("r+b") as file:
        for oid in oids:
            file.seek(section.offset + oid * section.stride)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))
        os.fsync(file.fileno())


class Reader:
    """Looks up what a decoder might: few records again and again, others now and then, the favourites changing."""

    def __init__(self, session: Session, table: int, records: int, seed: int) -> None:
        self._session, self._table, self._records = session, table, records
        self._random = np.random.default_rng(seed)
        self._drift = 0.0
        self._next = self._draw(self._random, 64)

    def look_up(self, count: int) -> None:
        """Inside a step."""
        self._ask(self._draw(self._random, count))

    def look_up_and_ahead(self, count: int) -> None:
        """Inside a step: what the step before foresaw, and then a guess at the next one's, half of it right."""
        self._ask(self._next)
        self._next = self._draw(self._random, count)
        guess = np.concatenate([self._next[::2], self._draw(np.random.default_rng(self._next[0]), count // 2)])
        self._session.prefetch(self._table, guess, np.full(guess.size, 128, np.uint8), guess.size)

    def _draw(self, random: np.random.Generator, count: int) -> NDArray[np.int64]:
        self._drift += count / 40
        ranks = (random.pareto(0.7, count) * self._records / 60).astype(np.int64) % self._records
        return np.unique((ranks * 7919 + int(self._drift)) % self._records)

    def _ask(self, oids: NDArray[np.int64]) -> None:
        scores = self._random.integers(1, 256, oids.size, dtype=np.uint8)
        self._session.lookup(self._table, oids, scores, np.zeros(oids.size, np.uint64))


def work(daemon: PrivateDaemon, manifest: StoreManifest, seconds: float) -> None:
    """Steps of three sessions in turn."""
    groups, random = GEOMETRY.groups_per_block, np.random.default_rng(2)
    with (
        Control(daemon.runtime_dir) as control,
        Session.attach([manifest], selections_per_step=2048, runtime_dir=daemon.runtime_dir) as first,
        Session.attach([manifest], selections_per_step=2048, runtime_dir=daemon.runtime_dir) as second,
        Session.attach([manifest], selections_per_step=4096, runtime_dir=daemon.runtime_dir, kv=GEOMETRY) as third,
    ):
        assert third.kv is not None
        weights = [Reader(session, 0, RECORDS, seed) for seed, session in enumerate((first, second, third))]
        blocks = third.kv.reserve(96)
        payload = random.integers(0, 256, (groups, GEOMETRY.record_bytes), dtype=np.uint8)
        begun, put, step, spoiled = time.monotonic(), 0, 0, False
        while (now := time.monotonic() - begun) < seconds:
            late = now > seconds / 2
            if late and not spoiled:
                spoiled = True
                damage(manifest, (3, 5, 9))
            for session, reader in zip((first, second, third), weights, strict=True):
                with session.step():
                    (reader.look_up_and_ahead if session is first else reader.look_up)(160 if late else 64)
                    if session is third and put:
                        Reader(third, third.kv.table, put * groups, step).look_up(128)
            if put < len(blocks) * min(1.0, now / seconds * 1.2) and third.kv.put(blocks[put], payload):
                put += 1
            if step % 128 == 0:
                control.stats()
            step += 1
            time.sleep(max(0.0, begun + step * STEP_SECONDS - time.monotonic()))


@contextmanager
def prometheus(folder: Path, target: int) -> Iterator[str]:
    """A Prometheus of one's own that scrapes ``target``; its address."""
    port = free_port()
    (folder / "prometheus.yml").write_text(SCRAPE.format(port=target))
    command = ["prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    with subprocess.Popen(command) as process:
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=240.0)
    parser.add_argument("--out", type=Path, default=ROOT / "docs/img/dashboard.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        manifest = make_store(folder / "store")
        (folder / "daemon.toml").write_text(TENANTS.format(folder=folder / "kv", uid=os.getuid()))
        daemon = PrivateDaemon(
            [manifest.folder],
            weight_cache_bytes=RECORDS * RECORD_BYTES // 8,
            kv_cache_bytes=4 << 20,
            options=[f"--config={folder / 'daemon.toml'}", f"--metrics-listen=127.0.0.1:{port}"],
        )
        with daemon, prometheus(folder, port) as address:
            begun = time.time()
            work(daemon, manifest, options.seconds)
            picture = io.BytesIO()
            draw(DASHBOARD, address, begun, time.time(), picture)
    options.out.write_bytes(picture.getvalue())
    print(f"{options.out}: {len(picture.getvalue()):,} bytes")


if __name__ == "__main__":
    main()
