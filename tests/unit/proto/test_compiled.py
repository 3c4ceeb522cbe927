import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba.core.config
import numpy as np
import pytest
from numba.core.errors import NumbaError
from numpy.typing import NDArray

from strataflux.proto import compiled as module
from strataflux.proto.compiled import (
    PACKAGE_ROOT,
    CompiledCacheError,
    Sources,
    borrowing,
    cache_folder,
    cache_root,
    compiled,
)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private root for compiled code; the process's own choice is put back afterwards."""
    folder = tmp_path / "compiled"
    monkeypatch.setenv("STRATAFLUX_COMPILED_DIR", str(folder))
    cache_folder.cache_clear()
    yield folder
    cache_folder.cache_clear()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package in which ``user`` is compiled, calls into ``callee`` and takes a constant from ``layout``; ``other``
    is compiled, too, and has nothing to do with them.
    """
    folder = tmp_path / "package"
    files = {
        "proto/compiled.py": "def compiled(fn): return fn\n",
        "proto/callee.py": "from strataflux.proto import layout\n",
        "proto/layout.py": "SIZE = 1\n",
        "daemon/user.py": (
            "from strataflux.proto.compiled import compiled\nfrom strataflux.proto.callee import (\n    f,\n    g,\n)\n"
        ),
        "client/other.py": "from strataflux.proto.compiled import compiled\n",
        "client/apart.py": "import strataflux.proto.layout\n",
    }
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_compiled_function_computes_what_it_says(root: Path) -> None:
    @compiled
    def divide(a: float, b: float) -> float:
        return a / b

    assert divide(1.0, 4.0) == 0.25
    assert divide(1.0, 0.0) == float("inf")


def test_borrowing_function_counts_no_references(root: Path) -> None:
    @compiled
    def counting(arrays: tuple[NDArray[np.int64], NDArray[np.int64]]) -> int:
        return int(arrays[0][1] + arrays[1][2])

    @borrowing
    def plain(arrays: tuple[NDArray[np.int64], NDArray[np.int64]]) -> int:
        return int(arrays[0][1] + arrays[1][2])

    def code(function: Any) -> str:
        return "".join(function.inspect_llvm().values())

    arrays = (np.arange(4), np.arange(4))
    assert counting(arrays) == plain(arrays) == 3
    assert "NRT_" in code(counting)
    assert "NRT_" not in code(plain)


def test_borrowing_function_may_not_make_an_array(root: Path) -> None:
    @borrowing
    def make(n: int) -> int:
        return np.zeros(n).size

    with pytest.raises(NumbaError, match="array passed into the function"):
        make(3)


def test_machine_code_lands_in_the_digest_folder(root: Path) -> None:
    @compiled
    def double(a: int) -> int:
        return a + a

    assert double(21) == 42
    assert list((root / Sources(PACKAGE_ROOT).digest("")).rglob("*.nbc"))


def test_each_module_has_its_own_folder(root: Path) -> None:
    def double(a: int) -> int:
        return a + a

    double.__module__ = "strataflux.proto.ring"
    compiled(double)(21)
    assert list((root / Sources(PACKAGE_ROOT).digest("strataflux.proto.ring")).rglob("*.nbc"))
    assert not (root / Sources(PACKAGE_ROOT).digest("")).exists()


def test_code_for_a_type_lies_apart_under_the_module_of_that_type(root: Path) -> None:
    """What a type chooses is not imported by who is compiled for it, and changes nobody else's code."""
    from strataflux.cache_policy import lru, sieve

    def length(state: Any) -> int:
        return len(state.counts)

    length.__module__ = "strataflux.proto.ring"
    counting = compiled(length)
    for policy in (lru, sieve):
        assert counting(policy.make_state(4, 3, 1)) == 3
    sources = Sources(PACKAGE_ROOT)
    for policy in (lru, sieve):
        folder = root / sources.digest("strataflux.proto.ring", policy.__name__)
        assert len(list(folder.rglob("*.nbc"))) == 1
    assert not list((root / sources.digest("strataflux.proto.ring")).rglob("*.nbc"))


def test_closure_stands_under_the_digest_of_all_compiled_code(root: Path) -> None:
    @compiled
    def double(a: int) -> int:
        return a + a

    def quadruple(a: int) -> int:
        return double(double(a))

    quadruple.__module__ = "strataflux.proto.ring"
    assert compiled(quadruple)(10) == 40
    assert {folder.name for folder in root.iterdir()} == {Sources(PACKAGE_ROOT).digest("")}


def test_numba_setting_of_others_is_put_back(root: Path) -> None:
    before = vars(numba.core.config)["CACHE_DIR"]
    compiled(lambda a: a)
    assert vars(numba.core.config)["CACHE_DIR"] == before


@pytest.mark.parametrize("module", ["strataflux.daemon.user", ""])
@pytest.mark.parametrize("changed", ["proto/compiled.py", "proto/callee.py", "proto/layout.py", "daemon/user.py"])
def test_digest_follows_what_compiled_code_depends_on(package: Path, changed: str, module: str) -> None:
    before = Sources(package).digest(module)
    with (package / changed).open("a") as file:
        file.write("# changed\n")
    assert Sources(package).digest(module) != before


def test_edit_leaves_the_code_of_other_modules_alone(package: Path) -> None:
    before = Sources(package)
    others = before.digest("strataflux.client.other"), before.digest("strataflux.proto.layout")
    whole = before.digest("")
    (package / "daemon/user.py").write_text("from strataflux.proto.compiled import compiled\n")
    after = Sources(package)
    assert (after.digest("strataflux.client.other"), after.digest("strataflux.proto.layout")) == others
    assert after.digest("") != whole


def test_digest_ignores_files_without_compiled_code(package: Path) -> None:
    before = Sources(package).digest("")
    (package / "client/apart.py").write_text("# changed\n")
    assert Sources(package).digest("") == before


def test_package_is_imported_through_its_init_file(package: Path) -> None:
    (package / "daemon/engines").mkdir()
    (package / "daemon/engines/__init__.py").write_text("import strataflux.proto.callee\n")
    (package / "daemon/loop.py").write_text("from strataflux.daemon import engines\n")
    closure = Sources(package).closure(["strataflux.daemon.loop"])
    assert {"strataflux.daemon.engines", "strataflux.proto.callee", "strataflux.proto.layout"} <= closure


def test_this_package_is_understood() -> None:
    sources = Sources(PACKAGE_ROOT)
    assert {"strataflux.proto.ring", "strataflux.cache_policy.lru", "strataflux.daemon.reader"} <= sources.compiling()
    reader = sources.closure(["strataflux.daemon.reader"])
    assert {"strataflux.daemon.engines.uring", "strataflux.proto.atomics", "strataflux.cache_policy.budget"} <= reader
    assert "strataflux.daemon.reader" not in sources.closure(["strataflux.proto.ring"])


def test_folders_are_private(root: Path) -> None:
    old = os.umask(0)
    try:
        folder = cache_folder("")
    finally:
        os.umask(old)
    assert folder.parent == root
    assert folder.stat().st_mode & 0o777 == 0o700
    assert root.stat().st_mode & 0o777 == 0o700


def test_root_that_others_may_write_is_refused(root: Path) -> None:
    root.mkdir()
    root.chmod(0o770)
    with pytest.raises(CompiledCacheError, match=r"mode 0770, expected at most 0755.*STRATAFLUX_COMPILED_DIR"):
        cache_folder("")


def test_digest_folder_that_others_may_read_is_refused(root: Path) -> None:
    folder = cache_folder("")
    folder.chmod(0o755)
    cache_folder.cache_clear()
    with pytest.raises(CompiledCacheError, match="mode 0755, expected at most 0700"):
        cache_folder("")


def test_folder_of_another_user_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = os.geteuid()
    root.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    with pytest.raises(CompiledCacheError, match=f"belongs to uid {owner}, expected {owner + 1}"):
        cache_folder("")


def test_link_in_place_of_the_folder_is_refused(root: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CompiledCacheError, match="is a link"):
        cache_folder("")


def test_file_in_place_of_the_parent_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STRATAFLUX_COMPILED_DIR", str(tmp_path / "file" / "compiled"))
    with pytest.raises(CompiledCacheError, match="cannot be kept in"):
        cache_folder("")


def test_root_is_the_first_that_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("STRATAFLUX_COMPILED_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("CACHE_DIRECTORY", raising=False)
    assert cache_root() == Path("/home/someone/.cache/strataflux/compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_root() == Path("/xdg/strataflux/compiled")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/a:/var/cache/b")
    assert cache_root() == Path("/var/cache/a/compiled")
    monkeypatch.setenv("STRATAFLUX_COMPILED_DIR", "/own")
    assert cache_root() == Path("/own")


def test_only_long_unused_digest_folders_are_pruned(root: Path) -> None:
    now = time.time()
    old, recent, foreign = root / ("a" * 32), root / ("b" * 32), root / "notes"
    for folder, days in ((old, 31), (recent, 29), (foreign, 31)):
        folder.mkdir(parents=True, mode=0o700)
        (folder / "code.nbc").write_text("")
        os.utime(folder, (now - days * 86400,) * 2)
    root.chmod(0o700)
    kept = cache_folder("")
    assert not old.exists()
    assert recent.exists()
    assert foreign.exists()
    assert kept.exists()


def test_changed_callee_is_not_served_from_the_cache(tmp_path: Path) -> None:
    """What the digest is for: with Numba's own check alone the second run prints the first one's answer."""
    for folder in module._FOLDERS:
        (tmp_path / "strataflux" / folder).mkdir(parents=True)
    (tmp_path / "strataflux/__init__.py").write_text("")
    (tmp_path / "strataflux/proto/compiled.py").write_text(Path(module.__file__).read_text())
    callee = tmp_path / "strataflux/proto/callee.py"
    head = "from strataflux.proto.compiled import compiled\n"
    (tmp_path / "strataflux/daemon/caller.py").write_text(
        f"{head}from strataflux.proto.callee import value\n\n"
        "@compiled\ndef outer() -> int:\n    return value()\n\nprint(outer())\n"
    )
    answers = []
    for value in (1, 2):
        callee.write_text(head + f"\n@compiled\ndef value() -> int:\n    return {value}\n")
        run = subprocess.run(
            [sys.executable, "-c", "import strataflux.daemon.caller"],
            env={
                **os.environ,
                "PYTHONPATH": str(tmp_path),
                "PYTHONSAFEPATH": "1",
                # Python itself takes a source of the same size and second for unchanged, and would run the old one.
                "PYTHONDONTWRITEBYTECODE": "1",
                "STRATAFLUX_COMPILED_DIR": str(tmp_path / "compiled"),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        answers.append(run.stdout.strip())
    assert answers == ["1", "2"]
