"""A daemon that nobody asks anything counts nothing, however often it wakes and is scraped."""

from pathlib import Path

import numpy as np
import pytest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from strataflux.daemon.exporter import StrataFluxCollector
from strataflux.daemon.reader_settings import ReaderSettings
from strataflux.daemon.reader_thread import ReaderThread
from strataflux.daemon.store import open_served
from strataflux.proto.store_format import SectionSpec
from strataflux.proto.store_writer import StoreWriter
from tests.unit.daemon.conftest import until
from tests.unit.daemon.test_metrics import moment

WAKES = 60
"""An idle daemon wakes once a second, so these stand for a minute."""


def counted(collector: StrataFluxCollector) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Every sample of every counter and histogram."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in collector.collect()
        if isinstance(family, CounterMetricFamily | HistogramMetricFamily)
        for sample in family.samples
    }


@pytest.mark.parametrize("engine", ["uring", "threads"])
async def test_no_counter_moves_in_an_idle_minute(tmp_path: Path, engine: str) -> None:
    with StoreWriter(tmp_path / "store", {}, [SectionSpec("s", "weight_channel", 0, "qkv", 64, 512)]) as writer:
        writer.write(0, 0, np.zeros((64, 512), np.uint8))
        writer.publish()
    store = open_served(tmp_path / "store", direct_io="off", preload=True)
    reader = ReaderThread(ReaderSettings(1 << 20, engine=engine, idle_seconds=0.001), [store])
    reader.start()
    try:
        await until(lambda: reader.snapshot().fills.fills == 64)
        collector = StrataFluxCollector(lambda: moment(reader.snapshot()))
        before, turns = counted(collector), reader.snapshot().turns
        await until(lambda: reader.snapshot().turns >= turns + WAKES)
        assert counted(collector) == before
    finally:
        reader.stop()
    assert before["strataflux_fills_total", (("cause", "ahead"), ("kind", "weight"))] == 64
    assert before["strataflux_ssd_read_seconds_count", ()] == before["strataflux_ssd_reads_total", ()] > 0
    assert before["strataflux_io_depth_count", ()] == before["strataflux_ssd_reads_total", ()]
