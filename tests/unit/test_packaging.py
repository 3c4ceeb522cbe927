import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import strataflux

ROOT = Path(__file__).parents[2]
KEPT = {".py", ".md", ".svg", ".png", ".h"}
"""Endings of what people read or tests need, in folders that are not installed."""
DATA = (
    "py.typed",
    "client/dashboard/page.html",
    "kernels/lowbit_gemv.cu",
    "proto/FORMAT.md",
    "proto/control.proto",
    "proto/control_pb2.pyi",
    "systemd/stratafluxd.service",
    "systemd/stratafluxd.socket",
    "systemd/stratafluxd.toml",
    "systemd/sysusers.d/stratafluxd.conf",
    "systemd/tmpfiles.d/stratafluxd.conf",
    "systemd/monitoring/grafana.json",
    "systemd/monitoring/prometheus-alerts.yml",
)
FOLDERS = ("daemon", "client", "proto", "kernels", "cache_policy", "systemd")


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pairs = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {normal(name): version for name, version in pairs}


def source_names() -> set[str]:
    """What a wheel has to hold, told from the working tree."""
    names = {"strataflux/__init__.py", "strataflux/py.typed"}
    for top in FOLDERS:
        for folder, inner, files in os.walk(ROOT / top):
            inner[:] = [name for name in inner if name != "__pycache__" and not name.startswith(".")]
            path = Path(folder).relative_to(ROOT)
            names |= {f"strataflux/{path.as_posix()}/{name}" for name in files if not name.endswith(".pyc")}
    return names


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of the working tree, and the wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT],
        env={**os.environ, "PYTHONSAFEPATH": "1"},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return folder


def test_wheel_from_sdist_holds_every_source(built: Path) -> None:
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert held == source_names()


def test_sdist_holds_what_its_readers_need(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "Makefile", "constraints.txt", ".ci/run"} <= held
    for top in ("tests", "docs", "bench"):
        assert {str(path.relative_to(ROOT)) for path in (ROOT / top).rglob("*") if path.suffix in KEPT} <= held
    assert not [name for name in held if name.startswith(tuple(f".importroot/strataflux/{top}" for top in FOLDERS))]


def test_wheel_brings_data_types_and_metadata(built: Path) -> None:
    """By name, so that a file which moves away from its reader is missed here as well."""
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        held = set(wheel.namelist())
        metadata = wheel.read(next(name for name in held if name.endswith(".dist-info/METADATA"))).decode()
    assert {f"strataflux/{name}" for name in DATA} <= held
    assert set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE)) == set(project()["optional-dependencies"])
    assert "Requires-Python: >=3.11" in metadata


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment that holds the wheel, and otherwise what it depends on."""
    folder = tmp_path_factory.mktemp("clean")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    wheel = str(next(built.glob("*.whl")))
    command = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(folder / "bin" / "python"),
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run([*command, "--no-index", "--no-compile", "--disable-pip-version-check", wheel], check=True)
    # A line of a .pth file is searched, but .pth files there (an editable install) are not read.
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def run_installed(installed: Path, place: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    command = [str(installed / words[0]), *words[1:]]
    return subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("program", ["strataflux", "stratafluxd"])
def test_programs_of_the_wheel_run(installed: Path, tmp_path: Path, program: str) -> None:
    assert set(project()["scripts"]) == {"strataflux", "stratafluxd"}
    assert run_installed(installed, tmp_path, program, "--version") == f"{program} {project()['version']}\n"


def test_an_installed_wheel_finds_its_data(installed: Path, tmp_path: Path) -> None:
    asked = (
        "import strataflux; from strataflux.client.dashboard.server import page; from importlib.resources import files;"
        "print(strataflux.__file__, len(page()), files('strataflux').joinpath('py.typed').is_file())"
    )
    where, size, typed = run_installed(installed, tmp_path, "python", "-c", asked).split()
    assert Path(where).is_relative_to(installed.parent)
    assert int(size) > 0
    assert typed == "True"
    plan = json.loads(run_installed(installed, tmp_path, "strataflux", "install-service", "--root", "root", "--json"))
    assert plan["program"] == str(installed / "stratafluxd")
    assert (tmp_path / "root" / "etc" / "systemd" / "system" / "stratafluxd.service").is_file()


def test_extras_that_texts_and_errors_name_exist() -> None:
    paths = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "client").rglob("*.py")]
    named = {extra for path in paths for extra in re.findall(r"(?:strataflux|\.)\[(\w+)\]['\"]", path.read_text())}
    assert {"gpu", "serve", "transformers"} <= named <= set(project()["optional-dependencies"])


def test_import_root_links_to_the_real_folders() -> None:
    for top in FOLDERS:
        link = ROOT / ".importroot" / "strataflux" / top
        assert link.is_symlink()
        assert os.readlink(link) == f"../../{top}"


def test_version_is_the_same_everywhere() -> None:
    version = project()["version"]
    assert strataflux.__version__ == version
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_every_dependency_is_pinned() -> None:
    listed = [
        *project()["dependencies"],
        *(need for extra in project()["optional-dependencies"].values() for need in extra),
    ]
    names = {normal(re.split(r"[^\w.-]", need)[0]) for need in listed}
    assert names - pins().keys() == set()


def test_pins_install_on_any_machine() -> None:
    """A local version tag, as in 2.13.0+cpu, exists on one index only."""
    assert pins()["torch"] == "2.13.0"
    assert not [version for version in pins().values() if "+" in version]


def test_liburing_is_pinned_to_the_version_that_runs_without_avx512() -> None:
    assert project()["optional-dependencies"]["liburing"] == ["liburing==2024.5.3"]


def test_make_without_a_target_explains_every_target() -> None:
    said = subprocess.run(["make", "-C", ROOT], capture_output=True, text=True, check=True).stdout
    makefile = (ROOT / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony
    listed = [line.split()[0] for line in said.splitlines() if line.startswith("  ")]
    assert listed == phony[1].split()
