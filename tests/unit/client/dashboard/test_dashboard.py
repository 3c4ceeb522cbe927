"""The page's data, and the two addresses it is served under."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from strataflux.client.dashboard.sampler import Sampler
from strataflux.client.dashboard.server import DashboardServer, page
from strataflux.client.errors import DaemonUnavailableError, FailureError, RefusedError
from strataflux.client.serve.listen import listen
from strataflux.client.watch import Moment
from strataflux.proto import control_pb2
from tests.unit.client.test_watch import DIGEST, moment


class Daemon:
    """Says one prepared moment after another, or raises what stands in its place."""

    def __init__(self, *moments: Moment | FailureError) -> None:
        self.left = list(moments)

    def info(self) -> control_pb2.GetInfoResponse:
        now = self.left.pop(0)
        if isinstance(now, FailureError):
            raise now
        self.now: Moment = now
        return self.now.info

    def stats(self) -> control_pb2.Stats:
        return self.now.stats

    def stores(self) -> list[control_pb2.Store]:
        return list(self.now.stores)

    def sessions(self) -> list[control_pb2.Session]:
        return list(self.now.sessions)


def states(*moments: Moment | FailureError) -> list[dict[str, Any]]:
    """What the page gets after each look."""
    daemon = Daemon(*moments)
    sampler = Sampler(Path("anywhere"), 1.0, lambda folder: daemon)
    found = []
    for _ in moments:
        sampler.sample()
        found.append(json.loads(sampler.text))
    return found


def test_now_the_last_minute_and_history() -> None:
    first, second, third = states(moment(10.0, 1), moment(11.0, 2), moment(12.0, 4))
    assert first["history"] == []
    assert (first["minute_seconds"], second["minute_seconds"], third["minute_seconds"]) == (8.0, 1.0, 2.0)
    assert third["now"]["fills_per_second"] == 30.0  # a few seconds are now
    assert third["stores"][0]["sets"] == ["qkv"]
    assert third["stores"][0]["layers"] == [[4 * 3 / 2], [6 * 3 / 2]]
    assert third["stores"][0]["digest"] == DIGEST
    assert [(point["weight"], point["kv"], point["steps"]) for point in third["history"]] == [
        (0.75, None, 12.0),
        (0.75, None, 24.0),
    ]


def test_layers_with_different_sets_leave_holes() -> None:
    now = moment(10.0, 1)
    now.stores[0].sections[1].set = "down"
    (state,) = states(now)
    assert state["stores"][0]["sets"] == ["qkv", "down"]
    assert state["stores"][0]["layers"] == [[0.5, None], [None, 0.75]]


def test_a_daemon_that_goes_away_and_another_that_comes() -> None:
    nobody = DaemonUnavailableError("control.sock", "nobody", "a daemon", "start it")
    stopping = RefusedError("reader thread", "not running", "running", "restart the daemon")
    before, ending, gone, after = states(moment(10.0, 5), stopping, nobody, moment(1.0, 1, generation=2))
    assert "error" not in before
    assert ending["error"] == {"subject": "reader thread", "found": "not running", "remedy": "restart the daemon"}
    assert gone["error"] == {"subject": "control.sock", "found": "nobody", "remedy": "start it"}
    assert after["now"]["seconds"] == 8.0  # since it started, and not against the other's counters


@pytest.fixture
def server() -> Iterator[DashboardServer]:
    daemon = Daemon(moment(10.0, 1))
    sampler = Sampler(Path("anywhere"), 1000.0, lambda folder: daemon)
    with listen("127.0.0.1", 0) as bound, DashboardServer(bound, sampler) as made:
        sampler.start()
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()
        sampler.stop()


def get(server: DashboardServer, path: str, host: str = "127.0.0.1") -> tuple[int, Any, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.socket.getsockname()[1])
    try:
        connection.request("GET", path, headers={"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()


def test_the_page_and_its_data(server: DashboardServer) -> None:
    status, headers, body = get(server, "/")
    assert (status, body) == (200, page())
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    status, headers, body = get(server, "/state?x=1")
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body)["daemon"]["uptime_seconds"] == 8.0
    assert get(server, "/../etc/passwd")[0] == 404


def test_other_pages_may_not_look(server: DashboardServer) -> None:
    assert get(server, "/state", host="evil.example")[0] == 403
    assert "Access-Control-Allow-Origin" not in get(server, "/state")[1]


def test_the_page_needs_and_names_no_other_host(server: DashboardServer) -> None:
    names = set(re.findall(rb"\w+://[^\s\"']+", page()))
    assert names == {b"http://www.w3.org/2000/svg"}  # the name of SVG, which nobody fetches
    policy = get(server, "/")[1]["Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    # Names of clients are strangers' text.
    assert b"innerHTML" not in page()
