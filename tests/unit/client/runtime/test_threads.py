import os

import pytest
import torch

from strataflux.client.runtime.threads import decoding_threads


@pytest.mark.parametrize(("cores", "threads"), [(1, 1), (2, 1), (3, 2), (64, 2)])
def test_a_core_is_left_to_the_reader(cores: int, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)))
    before = torch.get_num_threads()
    with decoding_threads() as count:
        assert (count, torch.get_num_threads()) == (threads, threads)
    assert torch.get_num_threads() == before
