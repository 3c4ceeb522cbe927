"""The page in a real browser, beside a real daemon that serves a real session."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strataflux.client.dashboard.sampler import Sampler
from strataflux.client.dashboard.server import DashboardServer
from strataflux.client.serve.listen import address_of, listen
from strataflux.client.session import Session
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter
from tests.fakes.watch import Watch
from tests.system.conftest import COUNT, RECORD_BYTES, STOP_SECONDS, SmallStore, Start
from tests.system.test_daemon import attach, read

pytestmark = pytest.mark.system

BROWSERS = ("chromium-headless-shell", "chromium", "google-chrome")
LAYERS = 4


@pytest.fixture
def browser() -> str:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip(f"no browser: {', '.join(BROWSERS)}")
    return found


@pytest.fixture
def layered(tmp_path: Path) -> SmallStore:
    """A store whose records belong to four layers of two sets."""
    count = COUNT // (2 * LAYERS)
    records = np.random.default_rng(3).integers(0, 256, (COUNT, RECORD_BYTES), dtype=np.uint8)
    names = [(layer, name) for layer in range(LAYERS) for name in ("qkv", "o")]
    sections = [SectionSpec(f"{n}.{s}", "weight_channel", n, s, count, RECORD_BYTES) for n, s in names]
    with StoreWriter(tmp_path / "store", {"weights": "layered"}, sections) as out:
        for number in range(len(sections)):
            out.write(number, 0, records[number * count : (number + 1) * count])
        return SmallStore(out.publish(), records)


@pytest.fixture
def served() -> Iterator[list[threading.Thread]]:
    threads: list[threading.Thread] = []
    yield threads
    for thread in threads:
        thread.join()


def dump(browser: str, url: str, tmp_path: Path) -> str:
    """The document after its script ran for three seconds of the browser's clock."""
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom"]
    profile = f"--user-data-dir={tmp_path / 'profile'}"
    done = subprocess.run([*command, profile, url], capture_output=True, text=True, timeout=STOP_SECONDS, check=True)
    return done.stdout


def expect(session: Session) -> None:
    """Ask ahead for what is absent of the last eight records, and wait until it is there."""
    oids = np.arange(COUNT - 8, COUNT)
    with session.step():
        assert session.prefetch(0, oids, np.full(8, 9, np.uint8), 8) > 0
    Watch().wait_for(lambda: session.absent(0, oids) == 0)


def shown(document: str, name: str) -> str:
    match = re.search(rf'id="{name}"[^>]*>([^<]*)<', document)
    assert match is not None, document
    return match[1]


def test_the_page_shows_what_the_daemon_counts(
    browser: str, start: Start, layered: SmallStore, served: list[threading.Thread], tmp_path: Path
) -> None:
    daemon = start("--store", layered.path)
    daemon.expect(b"READY=1")
    sampler = Sampler(daemon.folder, 3600.0)
    with listen("127.0.0.1", 0) as bound, DashboardServer(bound, sampler) as server:
        served.append(threading.Thread(target=server.serve_forever))
        served[0].start()
        try:
            with attach(daemon.folder, layered) as session:
                sampler.sample()
                read(session, layered, 1)
                expect(session)
                sampler.sample()
                document = dump(browser, f"{address_of(bound)}/", tmp_path)
        finally:
            server.shutdown()
            sampler.stop()
    assert shown(document, "state") == "ready"
    assert "stratafluxd" in shown(document, "about")
    assert shown(document, "hit-weight") == "0.0 %"  # what was waited for counts as the miss it was
    assert float(shown(document, "steps")) > 0
    assert float(shown(document, "ahead")) > 0
    asked = re.fullmatch(r"([0-9.,]+) asked, 0.0 dropped", shown(document, "ahead-asked"))
    assert asked is not None
    assert shown(document, "rejected") == "0.0"
    assert shown(document, "policy") == "policy lru, 0 read again after the start"
    cells = [float(value) for value in re.findall(r'data-misses="([^"]+)"', document)]
    assert len(cells) == 2 * LAYERS
    assert all(cells)
    assert document.count("<tr>") == 2  # the head, and one session
    assert "weight: 0.1 MB of 8.4 MB" in document


def test_the_page_says_that_nobody_answers(browser: str, served: list[threading.Thread], tmp_path: Path) -> None:
    sampler = Sampler(tmp_path, 3600.0)
    sampler.sample()
    with listen("127.0.0.1", 0) as bound, DashboardServer(bound, sampler) as server:
        served.append(threading.Thread(target=server.serve_forever))
        served[0].start()
        try:
            document = dump(browser, f"{address_of(bound)}/", tmp_path)
        finally:
            server.shutdown()
            sampler.stop()
    assert shown(document, "state").startswith("no daemon: ")
    assert "start stratafluxd" in shown(document, "state")
