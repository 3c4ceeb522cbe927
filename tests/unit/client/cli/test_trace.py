"""``strataflux trace record``: what commands that decode select, as the simulator reads it."""

import string
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random

import numpy as np
import pytest

from strataflux.cache_policy.simulate import quantize_scores
from strataflux.client.errors import FailureError, MisuseError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.recording import TraceRecorder, recording, session_kind
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.session import Session
from strataflux.client.traces import load_traces
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.unit.client.cli.conftest import Run

PROMPT = "he said"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("t")


@pytest.fixture
def daemon(folder: Path, tiny_prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(folder, [open_store(tiny_prepared.store)], ring_log2=14) as fake:
        yield fake


def test_what_is_recorded_is_what_the_daemon_is_asked_for(
    tmp_path: Path, tiny_prepared: PreparedModel, daemon: FakeDaemon, folder: Path
) -> None:
    weights = DecoderWeights.read(tiny_prepared)
    out = tmp_path / "w.npz"
    with (
        recording(TraceRecorder()) as recorder,
        RefinedModel.attach(tiny_prepared, weights, context=8, runtime_dir=folder) as model,
    ):
        asked = []
        for token in (5, 80, 3):
            model.step(token)
            asked.append(daemon.take_requests())  # nothing is resident: all is asked for
    recorder.save(out)
    [trace] = load_traces(out)
    store = open_store(tiny_prepared.store)
    assert trace.n_keys == store.record_count
    assert trace.scores is not None
    # The store's sections follow each other as the sources of the trace do, so its keys are the object ids.
    for keys, scores, requests in zip(trace.keys, trace.scores, asked, strict=True):
        by_key = {request.oid: request.score for request in requests}
        assert Counter(keys.tolist()) == Counter(by_key.keys())
        largest = quantize_scores(scores, scores.shape)
        assert all(abs(int(largest[i]) - by_key[key]) <= 1 for i, key in enumerate(keys.tolist()))
    with np.load(out) as file:
        assert {name for name in file.files if name[0] not in "sn"} == {f"{s.layer}.{s.set}" for s in store.sections}


def test_the_command_runs_as_it_would_alone(
    tmp_path: Path, tiny_prepared: PreparedModel, daemon: FakeDaemon, folder: Path, run: Run
) -> None:
    words = ("generate", tiny_prepared.folder, PROMPT, "--max-tokens", 4, "--runtime-dir", folder, "--json")
    alone = run(*words).json()
    said = run("trace", "record", tmp_path / "w.npz", *words)
    assert (said.code, said.json()) == (0, alone)
    assert f"recorded in {tmp_path / 'w.npz'}" in said.err
    assert len(load_traces(tmp_path / "w.npz")[0].keys) >= 4


def test_steps_and_layers_bound_it(
    tmp_path: Path, tiny_prepared: PreparedModel, daemon: FakeDaemon, folder: Path, run: Run
) -> None:
    out = tmp_path / "w.npz"
    words = ("generate", tiny_prepared.folder, PROMPT, "--max-tokens", 6, "--runtime-dir", folder)
    said = run("trace", "record", "--steps", 3, "--layers", 1, out, *words)
    assert said.code == 0
    with np.load(out) as file:
        names = [name for name in file.files if name[0] not in "sn"]
        assert {name.partition(".")[0] for name in names} == {"0"}
        assert {len(file[name]) for name in names} == {3}
    assert run("simulate", out, "--policy", "lru", "--capacity", "50%", "--json").code == 0


def test_kv_groups_of_dropped_blocks_are_others(tmp_path: Path, folder: Path, tiny_gguf: Path, run: Run) -> None:
    text = tmp_path / "text.txt"
    text.write_text("".join(Random(1).choices(string.ascii_lowercase + " ", k=1400)))
    out = tmp_path / "kv.npz"
    with FakeDaemon(folder, [], ring_log2=14):
        options = ("--text", text, "--windows", 2, "--runtime-dir", folder)
        said = run("trace", "record", out, "eval", tiny_gguf, "--kv", "2/2", "--context", 600, *options, "--json")
    assert said.code == 0, said.err
    [trace] = load_traces(out)
    # Two layers of two heads; in each of two windows of 600 tokens three blocks of 32 groups, each a life of its own.
    assert trace.n_keys == 4 * 2 * 3 * 32
    begin, end = trace.keys[:32], trace.keys[-32:]  # a block's records are there a few steps after it was put
    assert not set(begin[begin >= 0].tolist()) & set(end[end >= 0].tolist())


def test_nothing_to_record_is_said(tmp_path: Path, tiny_prepared: PreparedModel, folder: Path, run: Run) -> None:
    out = tmp_path / "none.npz"
    said = run("trace", "record", out, "generate", tiny_prepared.folder, PROMPT, "--runtime-dir", folder)
    assert said.code == 2
    assert "no refined step" in said.err
    assert list(tmp_path.glob("*none*")) == []


@pytest.mark.parametrize(
    ("words", "subject"),
    [(("w.npz", "simulate"), "COMMAND"), (("w.txt", "generate"), "OUT.npz"), (("no/w.npz", "eval"), "OUT.npz")],
)
def test_other_commands_and_names_are_refused(
    tmp_path: Path, run: Run, words: tuple[str, str], subject: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = run("trace", "record", *words)
    assert said.code == 2
    assert f"error: {subject}" in said.err


def test_a_failing_command_still_leaves_what_was_recorded(
    tmp_path: Path, tiny_prepared: PreparedModel, daemon: FakeDaemon, folder: Path, run: Run
) -> None:
    out = tmp_path / "w.npz"
    words = ("generate", tiny_prepared.folder, PROMPT, "--max-tokens", 2, "--runtime-dir", folder)
    add = TraceRecorder.add

    def interrupted(self: TraceRecorder, *asked: object) -> None:
        add(self, *asked)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TraceRecorder, "add", interrupted)
        assert run("trace", "record", out, *words).code != 0
    assert len(load_traces(out)[0].keys) == 1


def test_one_recording_at_a_time_and_none_by_default() -> None:
    assert session_kind() is Session
    with recording(TraceRecorder()):
        assert session_kind() is not Session
        with pytest.raises(MisuseError, match="one at a time"), recording(TraceRecorder()):
            pass
    assert session_kind() is Session
    with pytest.raises(MisuseError, match="at least 1"):
        TraceRecorder(steps=0)
    with pytest.raises(FailureError, match="no refined step"):
        TraceRecorder().save(Path("unused.npz"))
