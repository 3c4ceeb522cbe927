"""Preflight: the tightest of the machine's and every cgroup's room."""

from pathlib import Path

import pytest

from strataflux.daemon.errors import CacheTooLarge
from strataflux.daemon.memory import Available, available_memory, require_memory

MIB = 1 << 20


def put(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    put(tmp_path, "proc/meminfo", "MemTotal:  9000000 kB\nMemFree: 1 kB\nMemAvailable:  1048576 kB\n")
    return tmp_path


def test_without_limits_the_machine_counts(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "0::/a/b\n")
    put(machine, "sys/fs/cgroup/a/memory.max", "max\n")
    put(machine, "sys/fs/cgroup/a/memory.current", "5\n")
    found = available_memory(machine)
    assert found is not None
    assert (found.size, found.source) == (1024 * MIB, "MemAvailable of /proc/meminfo")


def test_a_limit_on_any_cgroup_above_counts(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "0::/a/b\n")
    put(machine, "sys/fs/cgroup/a/b/memory.max", f"{900 * MIB}\n")
    put(machine, "sys/fs/cgroup/a/b/memory.current", f"{100 * MIB}\n")
    put(machine, "sys/fs/cgroup/a/memory.max", f"{500 * MIB}\n")
    put(machine, "sys/fs/cgroup/a/memory.current", f"{200 * MIB}\n")
    assert available_memory(machine) == Available(300 * MIB, "/sys/fs/cgroup/a/memory.max")


def test_a_cgroup_over_its_limit_has_no_room(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "0::/\n")
    put(machine, "sys/fs/cgroup/memory.max", "10\n")
    put(machine, "sys/fs/cgroup/memory.current", "20\n")
    found = available_memory(machine)
    assert found is not None
    assert found.size == 0


def test_the_first_version_of_cgroups_counts(machine: Path) -> None:
    put(machine, "proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/m\n0::/\n")
    put(machine, "sys/fs/cgroup/memory/m/memory.limit_in_bytes", f"{64 * MIB}\n")
    put(machine, "sys/fs/cgroup/memory/m/memory.usage_in_bytes", "0\n")
    assert available_memory(machine) == Available(64 * MIB, "/sys/fs/cgroup/memory/m/memory.limit_in_bytes")


@pytest.mark.parametrize(
    ("line", "files", "stat"),
    [
        ("0::/m\n", ("sys/fs/cgroup/m/memory.max", "sys/fs/cgroup/m/memory.current"), "anon 1\ninactive_file {}\n"),
        (
            "4:memory:/m\n",
            ("sys/fs/cgroup/memory/m/memory.limit_in_bytes", "sys/fs/cgroup/memory/m/memory.usage_in_bytes"),
            "inactive_file 7\nactive_file 9\ntotal_inactive_file {}\ntotal_active_file 1\n",
        ),
    ],
)
def test_file_pages_that_nobody_uses_are_free(machine: Path, line: str, files: tuple[str, str], stat: str) -> None:
    put(machine, "proc/self/cgroup", line)
    put(machine, files[0], f"{100 * MIB}\n")
    put(machine, files[1], f"{90 * MIB}\n")
    put(machine, str(Path(files[0]).with_name("memory.stat")), stat.format(60 * MIB))
    assert available_memory(machine) == Available(70 * MIB, f"/{files[0]}")


def test_a_system_that_says_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) is None
    require_memory(1 << 60, 1 << 60, None)


def test_budgets_that_fit_to_the_byte_are_taken() -> None:
    require_memory(100, 28, Available(128, "file"))


def test_budgets_that_do_not_fit_are_refused_with_numbers() -> None:
    with pytest.raises(CacheTooLarge) as caught:
        require_memory(96 * MIB, 32 * MIB + 1, Available(128 * MIB, "/sys/limit"))
    assert str(128 * MIB + 1) in caught.value.found
    assert str(128 * MIB) in caught.value.expected
    assert "/sys/limit" in caught.value.expected
    assert "--weight-cache" in caught.value.remedy
