"""What a scrape says is what the numbers are, and nothing listens where nobody asked."""

import json
import math
import socket
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from strataflux.daemon.attached import AttachCounters
from strataflux.daemon.config import TenantConfig
from strataflux.daemon.errors import ConfigError
from strataflux.daemon.exporter import Exporter, StrataFluxCollector
from strataflux.daemon.histograms import HISTOGRAMS, INFOS
from strataflux.daemon.metrics import METRICS
from strataflux.daemon.moment import Moment, ServedFiles
from strataflux.daemon.pressure import MemoryState
from strataflux.daemon.rpc_counter import RpcTimes
from strataflux.daemon.stats import (
    CacheStats,
    ClassStats,
    FillStats,
    IoErrorStats,
    KindStats,
    KvStats,
    LookupStats,
    ReadStats,
    RequestStats,
    Stats,
    StoreStats,
    TenantStats,
    WriteStats,
)
from strataflux.daemon.values import Address

STATS = Stats(
    lookups=LookupStats(weight_lookups=100, weight_hits=70, waits=3, wait_nanoseconds=1_500_000_000),
    requests=RequestStats(dropped_ring=5, dropped_queue=3, rejected=6),
    fills=FillStats(latency_bounds_us=(50, 100)),
    kinds=(
        KindStats(
            "weight",
            requests=30,
            cold=10,
            evicted=8,
            duplicates=7,
            resident_already=4,
            quarantined=1,
            asked=15,
            preloaded=3,
            useful=9,
            unused=2,
            corrupt=1,
            evictions_capacity=4,
            evictions_pressure=2,
            demand_bytes=40_000,
            ahead_bytes=9_152,
            entries=10,
            latency_us=900,
            latency_counts=(10, 5, 3),
            age_counts=(1, 2, 3, 3),
            reuse_us=2_000_000,
            reuse_counts=(1, 0, 1),
            idle_us=5_000_000,
            idle_counts=(0, 0, 1),
            rejected=6,
            prefetches=20,
            prefetch_needless=5,
            prefetch_dropped=4,
            prefetched=11,
            prefetch_used=7,
            prefetch_unused=2,
        ),
        KindStats("kv", put=6, write_bytes=8192, evictions_clear=1, latency_counts=(0, 0, 0), age_counts=(0, 0, 0, 0)),
    ),
    age_bounds_steps=(1, 2, 4),
    gap_bounds_us=(100_000, 1_000_000),
    writes=WriteStats(2, 8192, 3000, 1, (1, 1, 0)),
    kv=KvStats(put=4, refused=1, written=3, granted_bytes=16_384, limit_bytes=1 << 20, free_bytes=1 << 30),
    io_errors=(IoErrorStats("read", "EIO", 2), IoErrorStats("write", "ENOSPC", 1)),
    tenants=(TenantStats("others", requests=1), TenantStats("lab", requests=29, fills=14, kv_bytes=4096)),
    ring_depth=11,
    warmed=12,
    reads=ReadStats(
        reads=12,
        in_flight=2,
        microseconds=2_000_000,
        latency_bounds_us=(50, 100),
        latency_counts=(8, 4, 0),
        depth_bounds=(1, 2),
        depth_counts=(7, 4, 1),
        depth_sum=19,
    ),
    caches=(CacheStats("weight", 1000, 100, 50, 800, 50), CacheStats("kv", 500)),
    classes=(
        ClassStats("weight", 512, slots=10, free=3, filling=2, retired=1),
        ClassStats("kv", 512, slots=7, free=7),
        ClassStats("weight", 512, slots=1),
    ),
    stores=(StoreStats(index=3, resident_records=6, quarantined=1, direct=True), StoreStats(index=4)),
    turns=1234,
)


def moment(stats: Stats = STATS, degraded: dict[str, str] | None = None) -> Moment:
    attach = AttachCounters(attached=4)
    attach.refused["denied"] += 2
    attach.ended["hang_up"] += 3
    return Moment(
        stats=stats,
        attach=attach,
        control_connections={"admin": 1, "reader": 0, "refused": 0},
        rpcs={("GetStats", "OK"): 5, ("Drain", "PERMISSION_DENIED"): 2},
        rpc_times={"GetStats": RpcTimes([5] + [0] * 12, 0.002)},
        sessions=1,
        stores={3: ServedFiles("abcdef012345", 2, 10, 5120, 8192, 1 << 30)},
        tenants=(TenantConfig("lab", kv_file_bytes=1 << 30),),
        tenant_sessions={"": 2, "lab": 1, "gone": 1},
        reloads={"ok": 1, "failed": 2},
        last_reload=1.5e9,
        scrubbed_bytes=4096,
        scrub_passes=3,
        scrub_damaged=1,
        memory=MemoryState(1 << 30, 2.5, 0.5),
        releases=2,
        released_bytes=32 << 20,
        ready=True,
        degraded=degraded or {},
        progress_age_seconds=0.25,
        engine="uring",
        direct_io="direct",
        registered_buffers=True,
        policy="lru",
        hot_set={("save", "ok"): 3, ("load", "damaged"): 1},
        version="1.2.3",
    )


def fine() -> tuple[bool, dict[str, Any]]:
    return True, {}


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StrataFluxCollector(lambda: moment(degraded={"buffered": "why"})))
    return registry


@pytest.mark.parametrize(
    ("name", "labels", "value"),
    [
        ("lookups_total", {"kind": "weight", "result": "hit"}, 70),
        ("lookups_total", {"kind": "weight", "result": "miss"}, 30),
        ("miss_reason_total", {"kind": "weight", "reason": "cold"}, 10),
        ("requests_dropped_total", {"hop": "ring", "why": "full"}, 5),
        ("requests_total", {"kind": "weight"}, 30),
        ("ring_depth", {}, 11),
        ("fills_total", {"kind": "weight", "cause": "request"}, 15),
        ("fills_total", {"kind": "weight", "cause": "ahead"}, 3),
        ("fills_total", {"kind": "kv", "cause": "put"}, 6),
        ("fills_useful_total", {"kind": "weight"}, 9),
        ("evictions_total", {"kind": "weight", "cause": "pressure"}, 2),
        ("evictions_total", {"kind": "kv", "cause": "clear"}, 1),
        ("records_corrupt_total", {"kind": "weight"}, 1),
        ("index_entries", {"kind": "weight"}, 10),
        ("wait_seconds_total", {}, 1.5),
        ("cache_bytes", {"kind": "weight", "state": "valid"}, 800),
        ("cache_capacity_bytes", {"kind": "weight"}, 1000),
        ("cache_capacity_bytes", {"kind": "kv"}, 500),
        ("cache_slots", {"kind": "weight", "slot_bytes": "512", "state": "valid"}, 5),
        ("cache_slots", {"kind": "kv", "slot_bytes": "512", "state": "free"}, 7),
        ("ssd_read_bytes_total", {"kind": "weight", "class": "demand"}, 40_000),
        ("ssd_read_bytes_total", {"kind": "weight", "class": "prefetch"}, 9_152),
        ("ssd_write_bytes_total", {"kind": "kv"}, 8192),
        ("ssd_write_seconds_count", {}, 2),
        ("ssd_write_seconds_sum", {}, 0.003),
        ("io_errors_total", {"op": "read", "errno": "EIO"}, 2),
        ("io_errors_total", {"op": "write", "errno": "ENOSPC"}, 1),
        ("kv_blocks_total", {"result": "refused"}, 1),
        ("kv_file_bytes", {}, 16_384),
        ("kv_file_limit_bytes", {}, 1 << 20),
        ("kv_disk_free_bytes", {}, 1 << 30),
        ("tenant_sessions", {"tenant": "lab"}, 1),
        ("tenant_sessions", {"tenant": "others"}, 3),
        ("tenant_requests_total", {"tenant": "lab"}, 29),
        ("tenant_fills_total", {"tenant": "lab"}, 14),
        ("tenant_bytes", {"tenant": "lab"}, 4096),
        ("tenant_quota_bytes", {"tenant": "lab"}, 1 << 30),
        ("ssd_read_seconds_sum", {}, 2),
        ("ssd_read_seconds_count", {}, 12),
        ("ssd_read_seconds_bucket", {"le": "0.0001"}, 12),
        ("io_depth_bucket", {"le": "1"}, 7),
        ("io_depth_bucket", {"le": "2"}, 11),
        ("io_depth_sum", {}, 19),
        ("fill_age_steps_bucket", {"kind": "weight", "le": "1"}, 1),
        ("fill_age_steps_bucket", {"kind": "weight", "le": "4"}, 6),
        ("fill_age_steps_bucket", {"kind": "weight", "le": "+Inf"}, 9),
        ("reuse_gap_seconds_bucket", {"kind": "weight", "le": "0.1"}, 1),
        ("reuse_gap_seconds_sum", {"kind": "weight"}, 2),
        ("idle_before_evict_seconds_count", {"kind": "weight"}, 1),
        ("fills_unused_total", {"kind": "weight"}, 2),
        ("disk_used_bytes", {"model": "abcdef012345"}, 8192),
        ("disk_free_bytes", {"model": "abcdef012345"}, 1 << 30),
        ("config_reload_total", {"result": "failed"}, 2),
        ("config_last_success_timestamp_seconds", {}, 1.5e9),
        ("scrub_bytes_total", {}, 4096),
        ("scrub_passes_total", {}, 3),
        ("scrub_damaged_records", {}, 1),
        ("memory_pressure", {"kind": "some"}, 0.025),
        ("memory_available_bytes", {}, 1 << 30),
        ("pressure_releases_total", {}, 2),
        ("pressure_released_bytes_total", {}, 32 << 20),
        ("rpc_total", {"method": "GetStats", "code": "OK"}, 5),
        ("rpc_seconds_bucket", {"method": "GetStats", "le": "0.001"}, 5),
        ("io_inflight", {"op": "read"}, 2),
        ("io_inflight", {"op": "write"}, 1),
        ("records_quarantined", {"model": "abcdef012345"}, 1),
        ("shard_bytes", {"model": "abcdef012345"}, 5120),
        ("shard_resident_records", {"model": "abcdef012345"}, 6),
        ("clients", {}, 1),
        ("sessions_ended_total", {"cause": "hang_up"}, 3),
        ("sessions_ended_total", {"cause": "process_end"}, 0),
        ("auth_denied_total", {"reason": "store"}, 2),
        ("auth_denied_total", {"reason": "role"}, 2),
        ("control_connections_total", {"role": "admin"}, 1),
        ("ready", {}, 1),
        ("degraded", {"reason": "buffered"}, 1),
        ("watchdog_last_progress_seconds", {}, 0.25),
        ("fill_seconds_bucket", {"kind": "weight", "le": "5e-05"}, 10),
        ("fill_seconds_bucket", {"kind": "weight", "le": "0.0001"}, 15),
        ("fill_seconds_bucket", {"kind": "weight", "le": "+Inf"}, 18),
        ("fill_seconds_count", {"kind": "weight"}, 18),
        ("fill_seconds_sum", {"kind": "weight"}, 0.0009),
        ("cache_info", {"policy": "lru"}, 1),
        ("requests_dropped_total", {"hop": "reader", "why": "admission"}, 6),
        ("fills_total", {"kind": "weight", "cause": "prefetch"}, 11),
        ("prefetches_total", {"kind": "weight"}, 20),
        ("prefetches_unread_total", {"kind": "weight", "why": "needless"}, 5),
        ("prefetches_unread_total", {"kind": "weight", "why": "dropped"}, 4),
        ("prefetches_used_total", {"kind": "weight"}, 7),
        ("prefetches_unused_total", {"kind": "weight"}, 2),
        ("warm_reads_total", {}, 12),
        ("hot_set_total", {"op": "save", "result": "ok"}, 3),
        ("hot_set_total", {"op": "load", "result": "damaged"}, 1),
        ("io_backend_info", {"engine": "uring", "direct": "direct", "registered": "true"}, 1),
        ("build_info", {"version": "1.2.3"}, 1),
        ("shard_info", {"model": "abcdef012345", "epoch": "2", "format": "1"}, 1),
    ],
)
def test_samples(registry: CollectorRegistry, name: str, labels: dict[str, str], value: float) -> None:
    found = registry.get_sample_value(f"strataflux_{name}", labels)
    assert found is not None
    assert math.isclose(found, value)


def test_the_parts_of_the_cache_add_up(registry: CollectorRegistry) -> None:
    states = ("free", "filling", "valid", "retired")
    parts = [registry.get_sample_value("strataflux_cache_bytes", {"kind": "weight", "state": s}) for s in states]
    assert sum(part or 0 for part in parts) == 1000


def test_each_metric_is_declared_once_with_its_help() -> None:
    names = [declared.name for group in (METRICS, HISTOGRAMS, INFOS) for declared in group]
    assert len(names) == len(set(names))
    for declared in METRICS:
        assert declared.name.startswith("strataflux_")
        assert declared.help.endswith(".")
        for labels, _ in declared.read(moment()):
            assert len(labels) == len(declared.labels), declared.name


def test_a_daemon_without_stores_or_fills_can_be_scraped() -> None:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StrataFluxCollector(lambda: moment(Stats())._replace(stores={})))
    assert registry.get_sample_value("strataflux_ssd_read_seconds_count") == 0


def test_a_scrape_over_http_is_read_from_live_state() -> None:
    now = [moment()]
    exporter = Exporter(Address("127.0.0.1", 0), lambda: now[0], fine, fine)
    try:
        url = f"http://127.0.0.1:{exporter.port}/metrics"
        for sessions in (1, 2):
            now[0] = moment()._replace(sessions=sessions)
            with urllib.request.urlopen(url) as answer:
                families = {f.name: f for f in text_string_to_metric_families(answer.read().decode())}
            assert families["strataflux_clients"].samples[0].value == sessions
        assert families["strataflux_lookups"].type == "counter"
    finally:
        exporter.close()
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", exporter.port)) != 0


def test_an_address_in_use_is_refused_by_its_key(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="in use") as caught:
            Exporter(Address("127.0.0.1", taken.getsockname()[1]), moment, fine, fine)
    assert caught.value.subject == "metrics.listen"


def ask(port: int, path: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}") as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def test_probes_say_what_they_know_and_keep_apart() -> None:
    ready = [True]
    exporter = Exporter(Address("127.0.0.1", 0), moment, fine, lambda: (ready[0], {"state": "as it is"}))
    try:
        assert ask(exporter.port, "/readyz") == (200, {"state": "as it is"})
        ready[0] = False
        assert ask(exporter.port, "/readyz") == (503, {"state": "as it is"})
        assert ask(exporter.port, "/healthz") == (200, {})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/config")
    finally:
        exporter.close()


def test_rubbish_on_the_port_disturbs_nobody() -> None:
    exporter = Exporter(Address("::1", 0), moment, fine, fine)
    try:
        with socket.create_connection(("::1", exporter.port)) as client:
            client.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
            while client.recv(4096):
                pass
        with urllib.request.urlopen(f"http://[::1]:{exporter.port}/metrics") as answer:
            assert b"strataflux_ready 1.0" in answer.read()
    finally:
        exporter.close()
