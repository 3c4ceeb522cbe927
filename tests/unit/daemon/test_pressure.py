"""Free memory and stalls are read where the kernel tells them, and watermarks decide without going to and fro."""

from pathlib import Path

import pytest

from strataflux.daemon.config import MemoryConfig, resolve_config
from strataflux.daemon.errors import ConfigError
from strataflux.daemon.pressure import GROW, HOLD, RELEASE, MemoryState, Watermarks, memory_state

MIB = 1 << 20
SEGMENT = 16 * MIB
LOW, HIGH = MemoryState(100 * MIB), MemoryState(2000 * MIB)


class Rig:
    def __init__(self, **settings: float) -> None:
        self.now = 1000.0
        self.marks = Watermarks(MemoryConfig(**settings), lambda: self.now)  # type: ignore[arg-type]

    def after(self, seconds: float, state: MemoryState, missing: int = SEGMENT) -> str:
        self.now += seconds
        return self.marks.decide(state, missing, SEGMENT)


def test_one_release_after_another_while_it_stays_low() -> None:
    rig = Rig()
    assert [rig.after(seconds, LOW) for seconds in (0, 1, 1, 1, 1)] == [RELEASE, HOLD, RELEASE, HOLD, RELEASE]


def test_a_stall_releases_and_waits_until_its_average_can_show_it() -> None:
    rig = Rig()
    stalled = MemoryState(2000 * MIB, some_percent=11)
    assert rig.after(0, stalled) == RELEASE
    assert rig.after(9, stalled) == HOLD
    assert rig.after(1, stalled) == RELEASE


def test_cache_comes_back_after_a_calm_time_and_with_room_to_spare() -> None:
    rig = Rig()
    assert rig.after(0, LOW) == RELEASE
    assert rig.after(59, HIGH) == HOLD
    assert rig.after(1, MemoryState(512 * MIB + SEGMENT - 1)) == HOLD
    assert rig.after(0, MemoryState(512 * MIB + SEGMENT)) == GROW
    assert rig.after(1, HIGH) == HOLD
    assert rig.after(1, HIGH) == GROW
    assert rig.after(2, HIGH, missing=0) == HOLD


def test_between_the_marks_nothing_happens() -> None:
    rig = Rig()
    assert [rig.after(100, MemoryState(400 * MIB)) for _ in range(5)] == [HOLD] * 5


def test_some_stall_is_not_calm_enough_to_grow() -> None:
    rig = Rig()
    assert rig.after(1000, MemoryState(2000 * MIB, some_percent=1.1)) == HOLD
    assert rig.after(1, HIGH) == GROW


def test_a_system_that_says_nothing_keeps_its_cache() -> None:
    rig = Rig()
    assert rig.after(0, MemoryState(None), missing=0) == HOLD


def test_zero_never_releases() -> None:
    assert Rig(low_bytes=0).after(0, MemoryState(0)) == HOLD


def test_crossed_marks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"at least memory\.low_bytes, 2 GiB"):
        resolve_config({"memory": {"low_bytes": "2GiB"}}, "file")


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


PRESSURE = "some avg10={} avg60=0.00 avg300=0.00 total=1\nfull avg10={} avg60=0.00 avg300=0.00 total=1\n"


def test_the_own_groups_pressure_is_preferred(tmp_path: Path) -> None:
    root = lay_out(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 2048 kB\n",
            "proc/self/cgroup": "0::/system.slice/stratafluxd.service\n",
            "proc/pressure/memory": PRESSURE.format("1.00", "0.50"),
        },
    )
    assert memory_state(root) == MemoryState(2048 * 1024, 1.0, 0.5)
    group = "sys/fs/cgroup/system.slice/stratafluxd.service/"
    lay_out(root, {group + "memory.pressure": PRESSURE.format("20.50", "3.00")})
    lay_out(root, {group + "memory.max": "1048576\n", group + "memory.current": "1000000\n"})
    assert memory_state(root) == MemoryState(48_576, 20.5, 3.0)


def test_a_kernel_without_any_of_it(tmp_path: Path) -> None:
    assert memory_state(tmp_path) == MemoryState(None)


def test_this_machine_says_something() -> None:
    assert (memory_state().available or 0) > 0
