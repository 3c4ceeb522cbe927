"""How fast the service starts, what it costs when idle and how much memory it takes, for a store of a million records.

    python bench/service.py [--starts 20] [--records 1000000] [--out FILE]

The records are zeros in a sparse file. The clock runs from before the process is made to the READY datagram; the
first start is not counted, because it may compile. Prints one JSON object.
"""

import argparse
import datetime
import json
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.proto.checksum import crc32c, crc32c_rows
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

CACHE_BYTES = 128 << 20
RECORD_BYTES = 2048
IDLE_SECONDS = 20.0


def sparse_store(folder: Path, records: int) -> Path:
    """A right store of zero records that takes no disk space."""
    folder.mkdir()
    identity = {"bench": "service"}
    sections, size = plan_sections((SectionSpec("bench", "weight_channel", 0, "qkv", records, RECORD_BYTES),))
    with (folder / RECORDS_FILE).open("wb") as file:
        file.write(records_header(identity_digest(identity), 1, records))
        file.truncate(size)
    zero = np.zeros(1, np.uint32)
    crc32c_rows(np.zeros((1, RECORD_BYTES), np.uint8), zero)
    checksums = np.full(records, zero[0], "<u4")
    checksums.tofile(folder / CHECKSUMS_FILE)
    body = manifest_body(identity, 1, sections, size, crc32c(checksums.view(np.uint8)))
    (folder / MANIFEST_FILE).write_text(json.dumps(body))
    return folder


def status_kib(pid: int, name: str) -> int:
    """A size of /proc/PID/status in KiB."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name))


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def start_once(store: Path) -> tuple[float, PrivateDaemon]:
    """(seconds to READY, the running daemon)."""
    daemon = PrivateDaemon([store], weight_cache_bytes=CACHE_BYTES)
    began = time.perf_counter()
    daemon.start()
    return time.perf_counter() - began, daemon


def measure(store: Path, starts: int) -> dict[str, Any]:
    """All figures."""
    _, first = start_once(store)
    first.stop()
    seconds = []
    for _ in range(starts):
        took, daemon = start_once(store)
        seconds.append(took)
        daemon.stop()
    _, daemon = start_once(store)
    with Control(daemon.runtime_dir) as control:
        metadata = control.stats().metadata_bytes
    time.sleep(2)
    began = cpu_seconds(daemon.pid)
    time.sleep(IDLE_SECONDS)
    idle = (cpu_seconds(daemon.pid) - began) / IDLE_SECONDS
    memory = 1024 * (status_kib(daemon.pid, "RssAnon") + status_kib(daemon.pid, "RssShmem"))
    daemon.stop()
    budgets = CACHE_BYTES + (1 << 20)
    return {
        "ready_seconds_median": float(np.median(seconds)),
        "ready_seconds_p95": float(np.percentile(seconds, 95)),
        "ready_seconds_max": max(seconds),
        "idle_cpu_share": idle,
        "rss_anon_and_shmem_bytes": memory,
        "cache_budget_bytes": budgets,
        "metadata_bytes": metadata,
        "beyond_budgets_and_metadata_bytes": memory - budgets - metadata,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strataflux-bench-") as folder:
        result = measure(sparse_store(Path(folder, "store"), options.records), options.starts)
    result |= {
        "records": options.records,
        "starts": options.starts,
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Linux {platform.release()}",
        "load_average": os.getloadavg()[0],
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
