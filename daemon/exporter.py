"""The metrics port: ``/metrics`` for Prometheus, ``/healthz`` and ``/readyz`` for probes. Read-only, one thread.

``/healthz`` answers 200 while the data path moves, ``/readyz`` while requests are taken and a read of the device was
answered in time; otherwise 503. Both say what they know as JSON.
"""

import http.server
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from strataflux.daemon.errors import ConfigError
from strataflux.daemon.histograms import HISTOGRAMS, INFOS
from strataflux.daemon.metrics import METRICS
from strataflux.daemon.moment import Moment
from strataflux.daemon.values import Address

__all__ = ["Exporter", "Probe", "StrataFluxCollector"]

Probe = Callable[[], tuple[bool, dict[str, Any]]]
"""Whether it is so, and what is known about it."""

_TIMEOUT_SECONDS: Final = 10
_BACKLOG: Final = 16


class StrataFluxCollector(Collector):
    """Turns a moment into metric families. ``look`` is called once a scrape, on the scraper's thread."""

    def __init__(self, look: Callable[[], Moment]) -> None:
        # fixed after construction
        self._look = look

    def collect(self) -> Iterator[Metric]:
        """One family a declaration, and what this scrape cost."""
        begun = time.perf_counter()
        moment = self._look()
        for declared in METRICS:
            family = declared.kind(declared.name, declared.help, labels=declared.labels)
            for labels, value in declared.read(moment):
                family.add_metric(labels, float(value))
            yield family
        for histogram in HISTOGRAMS:
            buckets = HistogramMetricFamily(histogram.name, histogram.help, labels=histogram.labels)
            for labels, bounds, counts, total in histogram.read(moment):
                buckets.add_metric(labels, _cumulative(bounds, counts), sum_value=total)
            yield buckets
        for info in INFOS:
            facts = InfoMetricFamily(info.name, info.help, labels=info.labels)
            for labels, values in info.read(moment):
                facts.add_metric(labels, dict(values))
            yield facts
        yield GaugeMetricFamily("strataflux_scrape_seconds", "What this scrape cost.", time.perf_counter() - begun)

    def describe(self) -> Iterator[Metric]:
        """Nothing: the registry then does not look at live state when this collector is registered."""
        return iter(())


def _cumulative(bounds: Sequence[float], counts: Sequence[int]) -> list[tuple[str, float]]:
    """Prometheus' buckets of a histogram that is kept by bucket; without counts: nothing was seen yet."""
    total, buckets = 0, []
    for bound, count in zip([*(f"{b:g}" for b in bounds), "+Inf"], counts or [0] * (len(bounds) + 1), strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets


class Exporter:
    """Serves one address. Pairs: construction / ``close``."""

    def __init__(self, address: Address, look: Callable[[], Moment], live: Probe, ready: Probe) -> None:
        """Listen on ``address``.

        Raises:
            ConfigError: it cannot be listened on.
        """
        registry = CollectorRegistry(auto_describe=False)
        registry.register(StrataFluxCollector(look))
        try:
            server = _Server(address, registry, {"/healthz": live, "/readyz": ready})
        except OSError as error:
            raise ConfigError(
                "metrics.listen",
                f"{address.host}:{address.port} ({error.strerror or error})",
                "an address of this machine with a free port",
                "choose another, or leave it empty for no metrics",
            ) from error
        # fixed after construction
        self._server = server
        self.port = server.server_port
        self._thread = threading.Thread(target=server.serve_forever, name="strataflux-metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end the thread."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(http.server.HTTPServer):
    """One request at a time: a scraper that is slow keeps others waiting, never the service."""

    request_queue_size = _BACKLOG

    def __init__(self, address: Address, registry: CollectorRegistry, probes: dict[str, Probe]) -> None:
        # fixed after construction
        self.registry = registry
        self.probes = probes
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        super().__init__((address.host, address.port), _Handler)

    def server_bind(self) -> None:
        """As http.server's, without asking a name server who we are."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hung up, or rubbish: nothing to tell anybody."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Server
    server_version = "stratafluxd"
    sys_version = ""
    timeout = _TIMEOUT_SECONDS

    def do_GET(self) -> None:
        """Metrics or a probe; anything else is not found."""
        path = self.path.partition("?")[0]
        if path in ("/", "/metrics"):
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encode(self.server.registry))
        elif path in self.server.probes:
            good, known = self.server.probes[path]()
            self._answer(200 if good else 503, "application/json", json.dumps(known).encode() + b"\n")
        else:
            self._answer(404, "text/plain", b"/metrics, /healthz or /readyz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 – http.server names it
        """Scrapes are no news."""
