"""All faults mixed, tens of thousands of them: nothing wrong is served, every fault is counted, nothing leaks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from strataflux.cache_policy.policies import DEFAULT
from tests.fakes import read_chaos, write_chaos
from tests.fakes.board_worker import RIGHT, Job
from tests.fakes.held_jobs import LATE, OVERTAKEN, HeldJobs
from tests.fakes.read_chaos import ReadChaos
from tests.fakes.write_chaos import WriteChaos

READ_FAULTS = 20_000
WRITE_FAULTS = 2_000


@pytest.mark.parametrize(("seed", "policy"), [(1, "lru"), (2, DEFAULT)])
def test_random_faults_of_reads(tmp_path: Path, seed: int, policy: str) -> None:
    chaos = ReadChaos(tmp_path / "store", seed, policy)
    chaos.run(READ_FAULTS)
    assert [check for check in chaos.checks() if not check.right] == []
    assert all(chaos.ledger.given[kind] > 0 for kind in read_chaos.FAULTS)
    assert chaos.ledger.compared > READ_FAULTS // 4
    assert chaos.rig.rd["evictions"] > READ_FAULTS // 4
    chaos.close()


def test_random_faults_of_writes(tmp_path: Path) -> None:
    chaos = WriteChaos(tmp_path, seed=3)
    chaos.run(WRITE_FAULTS)
    assert [check for check in chaos.checks() if not check.right] == []
    assert all(chaos.ledger.given[kind] > 0 for kind in write_chaos.FAULTS)
    assert chaos.ledger.compared > WRITE_FAULTS
    chaos.close()


@pytest.mark.parametrize(
    ("make", "spoil", "name"),
    [
        (lambda folder: ReadChaos(folder / "s", 1), lambda c: c.rig.rd.__setitem__("corrupt", 0), "corrupt"),
        (lambda folder: ReadChaos(folder / "s", 1), lambda c: c.right.reverse(), "wrong records served"),
        (lambda folder: WriteChaos(folder, 1), lambda c: c.rig.rd.__setitem__("io_errors", 0), "io_errors"),
    ],
)
def test_the_ledger_notices(
    tmp_path: Path, make: Callable[[Path], object], spoil: Callable[..., None], name: str
) -> None:
    """A count that is off, or a byte that is not the record's, fails its check."""
    chaos = make(tmp_path)
    assert isinstance(chaos, ReadChaos | WriteChaos)
    chaos.run(300)
    spoil(chaos)
    chaos.run(600)
    assert name in [check.name for check in chaos.checks() if not check.right]
    chaos.close()


def test_held_jobs_complete_late_or_overtaken() -> None:
    held, jobs = HeldJobs(late_turns=3), [Job(window, 0, 0, 512, 0) for window in range(4)]
    for job, kind in zip(jobs, (OVERTAKEN, LATE, RIGHT, OVERTAKEN), strict=True):
        held.add(job, kind, turn=0)
    assert held.due(1) == [(jobs[2], RIGHT)]
    assert held.due(2) == [(jobs[0], OVERTAKEN)]
    assert held.due(3) == []
    assert held.due(4) == [(jobs[1], LATE)]
    assert held.due(5) == [(jobs[3], RIGHT)]  # nothing came after it
