"""A private daemon's life with programs in its place that misbehave in every way; the real one is in tests/system."""

import os
import pkgutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from strataflux.client import launch
from strataflux.client.errors import DaemonUnavailableError, RefusedError
from strataflux.client.launch import PrivateDaemon
from strataflux.client.leftovers import Leftovers

HEAD = """
import os, signal, socket, sys
folder = next(word for word in sys.argv if word.startswith("--runtime-dir=")).partition("=")[2]
def ready():
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as out:
        out.sendto(b"STATUS=soon", os.environ["NOTIFY_SOCKET"])
        out.sendto(b"STATUS=now\\nREADY=1", os.environ["NOTIFY_SOCKET"])
"""


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where private folders appear; its path is short enough for sockets."""
    folder = tmp_path_factory.mktemp("r")
    monkeypatch.setattr(launch, "_base_folder", lambda: str(folder))
    return folder


def child(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(launch, "_CHILD", HEAD + program)


def daemon(**bounds: Any) -> PrivateDaemon:
    return PrivateDaemon([Path("store")], weight_cache_bytes=5 << 20, **bounds)


def test_ready_then_gone(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "os.mkdir(folder); open(folder + '/words', 'w').write(repr(sys.argv)); ready(); signal.pause()")
    private = daemon()
    with pytest.raises(AssertionError):
        _ = private.runtime_dir
    private.start()
    assert private.runtime_dir.parent.stat().st_mode & 0o777 == 0o700
    words = (private.runtime_dir / "words").read_text()
    assert f"--store={Path('store').absolute()}" in words
    assert f"--weight-cache={5 << 20}" in words
    assert os.getpgid(private.pid) == private.pid
    left = private.stop()
    assert [Path(name.removeprefix("file ")).name for name in left.files] == ["d", "words"]
    assert left.names == left.files
    assert private.stop() == left
    assert list(base.iterdir()) == []


def test_its_grace_and_kv_memory(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = """
words = dict(word.partition("=")[::2] for word in sys.argv)
os.mkdir(folder); open(folder + "/words", "w").write(open(words["--config"]).read() + words["--kv-cache"])
ready(); signal.pause()
"""
    child(monkeypatch, program)
    with daemon(kv_cache_bytes=3 << 20, grace_seconds=60.0) as private:
        said = (private.runtime_dir / "words").read_text()
    assert said == f"[reader]\ngrace_seconds = 60.0\n{3 << 20}"


def test_one_that_leaves_nothing(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); ready(); signal.pause()")
    with daemon() as private:
        pass
    assert private.stop() == Leftovers()


def test_one_that_does_not_stop_is_killed_and_counted(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "signal.signal(signal.SIGTERM, signal.SIG_IGN); ready()\nwhile True: signal.pause()")
    with daemon(stop_seconds=0.0) as private:
        pid = private.pid
    assert private.stop().processes == ("a daemon that did not stop and was killed",)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert list(base.iterdir()) == []


def test_a_refusal_keeps_its_four_parts(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["stratafluxd: error: reader.depth", "  found:    9", "  expected: 8", "  remedy:   lower it"]
    child(monkeypatch, f"sys.stderr.write({chr(10).join(lines)!r}); sys.exit(2)")
    with pytest.raises(RefusedError) as refused:
        daemon().start()
    error = refused.value
    assert (error.subject, error.found, error.expected, error.remedy) == ("reader.depth", "9", "8", "lower it")
    assert list(base.iterdir()) == []


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("sys.stderr.write('ouch'); sys.exit(3)", "exit code 3 before READY"),
        ("sys.stderr.write('ouch'); sys.stderr.flush(); os.kill(os.getpid(), signal.SIGKILL)", "signal SIGKILL"),
    ],
)
def test_an_end_before_ready(program: str, found: str, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, program)
    with pytest.raises(DaemonUnavailableError, match="ouch") as unavailable:
        daemon().start()
    assert found in unavailable.value.found
    assert "stratafluxd --weight-cache=" in unavailable.value.remedy
    assert list(base.iterdir()) == []


def test_one_that_is_never_ready(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "signal.pause()")
    with pytest.raises(DaemonUnavailableError, match="no READY within 0 s"):
        daemon(start_seconds=0.0).start()
    assert list(base.iterdir()) == []


@pytest.mark.parametrize("moment", ["tempfile.mkdtemp", "subprocess.Popen"])
def test_a_ctrl_c_as_soon_as_there_is_something_to_undo(
    moment: str, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child(monkeypatch, "signal.pause()")
    real: Callable[..., Any] = pkgutil.resolve_name(moment)
    made: list[Any] = []

    def interrupted(*words: Any, **options: Any) -> Any:
        made.append(real(*words, **options))
        signal.raise_signal(signal.SIGINT)
        return made[-1]

    monkeypatch.setattr(moment, interrupted)
    with pytest.raises(KeyboardInterrupt):
        daemon().start()
    assert list(base.iterdir()) == []
    assert len(made) == 1
    if moment == "subprocess.Popen":
        assert made[0].returncode == -signal.SIGTERM


def test_a_stop_cut_short_is_finished_at_exit(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    child(monkeypatch, "ready(); signal.pause()")
    at_exit: list[Callable[[], object]] = []
    monkeypatch.setattr("atexit.register", at_exit.append)
    monkeypatch.setattr("atexit.unregister", at_exit.remove)
    private = daemon()
    private.start()
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_words, **_options: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            private.stop()
    assert len(list(base.iterdir())) == 1
    (finish,) = at_exit
    finish()
    assert (list(base.iterdir()), at_exit) == ([], [])


def test_folder_is_where_sockets_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path / ("long" * 20)))
    assert launch._base_folder() == "/tmp"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/dev")
    assert launch._base_folder() == "/dev"
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    assert launch._base_folder() == "/tmp"
