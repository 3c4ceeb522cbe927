"""How fast the service starts, what it costs when idle and how much memory it takes, for a store of a million records.

    python bench/service.py [--starts 20] [--records 1000000] [--idle-seconds 60] [--out FILE]

The records are zeros in a sparse file. The clock runs from before the process is made to the READY datagram; the
first start is not counted, because it may compile. Idle is with a session attached that asks for nothing; every counter
of the metrics page is compared before and after. Prints one JSON object; exit code 1 if a counter moved while idle, or
a hundredth of a CPU was used.
"""

import argparse
import json
import os
import re
import socket
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from service_report import machine, write_report

from strataflux.client.control import Control
from strataflux.client.launch import PrivateDaemon
from strataflux.client.session import Session
from strataflux.proto.checksum import crc32c, crc32c_rows
from strataflux.proto.store_format import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    RECORDS_FILE,
    SectionSpec,
    identity_digest,
    manifest_body,
    open_store,
    plan_sections,
    records_header,
)

CACHE_BYTES = 128 << 20
RECORD_BYTES = 2048
READY = {"ready_seconds_median": 50, "ready_seconds_p95": 95, "ready_seconds_max": 100}
SETTLE_SECONDS = 2.0
IDLE_CPU_AIM = 0.01
COUNTER = re.compile(r"^(strataflux_\S*_(?:total|bucket|count|sum)(?:{[^}]*})?) (\S+)$", re.MULTILINE)


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


def start_once(store: Path, *options: str) -> tuple[float, PrivateDaemon]:
    """(seconds to READY, the running daemon)."""
    daemon = PrivateDaemon([store], weight_cache_bytes=CACHE_BYTES, options=options)
    began = time.perf_counter()
    daemon.start()
    return time.perf_counter() - began, daemon


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def counters(port: int) -> dict[str, float]:
    """Every counter and histogram of the metrics page, by name and labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as page:
        return {name: float(value) for name, value in COUNTER.findall(page.read().decode())}


def idle(daemon: PrivateDaemon, store: Path, port: int, seconds: float) -> dict[str, Any]:
    """CPU share and counters that moved, with a session attached that asks for nothing."""
    with Session.attach([open_store(store)], selections_per_step=64, runtime_dir=daemon.runtime_dir):
        time.sleep(SETTLE_SECONDS)
        before, cpu = counters(port), cpu_seconds(daemon.pid)
        time.sleep(seconds)
        used, after = (cpu_seconds(daemon.pid) - cpu) / seconds, counters(port)
    moved = {name: after[name] - before.get(name, 0.0) for name in after if after[name] != before.get(name, 0.0)}
    return {"idle_seconds": seconds, "idle_cpu_share": used, "counters": len(before), "counters_that_moved": moved}


def measure(store: Path, starts: int, idle_seconds: float) -> dict[str, Any]:
    """All figures."""
    _, first = start_once(store)
    first.stop()
    seconds = []
    for _ in range(starts):
        took, daemon = start_once(store)
        seconds.append(took)
        daemon.stop()
    port, config = free_port(), store.with_name("config.toml")
    config.write_text(f'[metrics]\nlisten = "127.0.0.1:{port}"\n')
    _, daemon = start_once(store, f"--config={config}")
    with Control(daemon.runtime_dir) as control:
        metadata = control.stats().metadata_bytes
    at_rest = idle(daemon, store, port, idle_seconds)
    memory = 1024 * (status_kib(daemon.pid, "RssAnon") + status_kib(daemon.pid, "RssShmem"))
    daemon.stop()
    budgets = CACHE_BYTES + (1 << 20)
    return {
        **({name: float(np.percentile(seconds, at)) for name, at in READY.items()} if seconds else {}),
        **at_rest,
        "rss_anon_and_shmem_bytes": memory,
        "cache_budget_bytes": budgets,
        "metadata_bytes": metadata,
        "beyond_budgets_and_metadata_bytes": memory - budgets - metadata,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=20)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="strataflux-bench-") as folder:
        store = sparse_store(Path(folder, "store"), options.records)
        result = measure(store, options.starts, options.idle_seconds)
    result |= {"records": options.records, "starts": options.starts} | machine()
    write_report(result, options.out)
    return 1 if result["counters_that_moved"] or result["idle_cpu_share"] >= IDLE_CPU_AIM else 0


if __name__ == "__main__":
    sys.exit(main())
