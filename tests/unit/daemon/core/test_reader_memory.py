"""What a reader costs in memory: its budget, its metadata, and the interpreter with its compiled code."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from strataflux.proto.checksum import crc32c
from strataflux.proto.store_format import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    RECORDS_FILE,
    SectionSpec,
    identity_digest,
    manifest_body,
    plan_sections,
    records_header,
)

RECORDS = 1_000_000
RECORD_BYTES = 2048
BUDGET = 64 << 20
ALLOWANCE = 120 << 20
WATCHDOG_SECONDS = 120.0

# In a process of its own: this one has the test's arrays, and whatever other tests imported. The cache is filled first.
MEASURE = """
import json, sys, threading
from pathlib import Path
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.store import open_served
store, budget, records = open_served(Path(sys.argv[1]), direct_io="off", preload=True), *map(int, sys.argv[2:])
reader = ReaderThread(ReaderSettings(budget, engine="threads"), [store])
reader.start()
pause = threading.Event()
while reader.snapshot().fills.fills < records:
    pause.wait(0.001)
status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
held = {name: int(status[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem")}
print(json.dumps({**held, "metadata": reader.snapshot().metadata_bytes}))
reader.stop()
"""


def make_sparse_store(folder: Path) -> None:
    """A valid store of a million records of zeros that takes no disk."""
    sections, size = plan_sections([SectionSpec("s", "weight_channel", 0, "qkv", RECORDS, RECORD_BYTES)])
    checksums = np.full(RECORDS, crc32c(bytes(RECORD_BYTES)), "<u4")
    folder.mkdir()
    with (folder / RECORDS_FILE).open("wb") as file:
        file.write(records_header(identity_digest({}), 1, RECORDS))
        file.truncate(size)
    (folder / CHECKSUMS_FILE).write_bytes(checksums.tobytes())
    body = manifest_body({}, 1, sections, size, crc32c(checksums.view(np.uint8)))
    (folder / MANIFEST_FILE).write_text(json.dumps(body))


def test_memory_is_budget_and_metadata_and_little_more(tmp_path: Path) -> None:
    make_sparse_store(tmp_path / "store")
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "store"), str(BUDGET), str(BUDGET // RECORD_BYTES)],
        timeout=WATCHDOG_SECONDS,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(run.stdout)
    assert found["RssShmem"] >= BUDGET
    assert found["RssAnon"] + found["RssShmem"] <= BUDGET + found["metadata"] + ALLOWANCE, found
