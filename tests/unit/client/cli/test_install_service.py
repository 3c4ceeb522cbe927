import json
import stat
from pathlib import Path

import pytest

from strataflux.client.cli import install_service as module
from strataflux.client.cli.main import main


def leave(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


@pytest.fixture(autouse=True)
def unbooted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No test talks to a service manager of this machine."""
    monkeypatch.setattr(module, "_MANAGER", tmp_path / "no-systemd")


def test_files_are_laid_out_and_a_configuration_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    words = ("install-service", "--system", f"--root={root}", "--program=/opt/strataflux/bin/stratafluxd", "--json")
    assert leave(*words) == 0
    first = json.loads(capsys.readouterr().out)
    assert set(first["files"].values()) == {"written"}
    unit = root / "etc/systemd/system/stratafluxd.service"
    assert stat.S_IMODE(unit.stat().st_mode) == 0o644
    assert "\nExecStart=/opt/strataflux/bin/stratafluxd --config /etc/strataflux/stratafluxd.toml" in unit.read_text()
    assert "/usr/bin/stratafluxd" not in unit.read_text()
    config = root / "etc/strataflux/stratafluxd.toml"
    config.write_text("[cache]\n")
    unit.write_text("# an older version\n")
    assert leave(*words) == 0
    second = json.loads(capsys.readouterr().out)["files"]
    assert second[str(config)] == "kept"
    assert config.read_text() == "[cache]\n"
    assert second[str(unit)] == "written"
    assert second[str(unit.with_suffix(".socket"))] == "unchanged"
    assert [path.name for path in unit.parent.iterdir() if path.name.startswith(".")] == []


def test_a_dry_run_shows_all_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("install-service", f"--root={tmp_path / 'root'}", "--program=/opt/sf/stratafluxd", "--dry-run") == 0
    said = capsys.readouterr().out
    assert "ExecStartPre=/opt/sf/stratafluxd --compile" in said
    assert "would run  systemctl daemon-reload" in said
    assert not (tmp_path / "root").exists()


def test_a_user_service_needs_no_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert leave("install-service", "--user", "--program=/home/a b/50%/stratafluxd") == 0
    unit = (tmp_path / "config/systemd/user/stratafluxd.service").read_text()
    assert 'ExecStartPre="/home/a b/50%%/stratafluxd" --compile' in unit
    assert (tmp_path / "config/strataflux/stratafluxd.toml").exists()
    assert "systemctl --user daemon-reload" in capsys.readouterr().err


def test_the_machine_needs_root(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert leave("install-service", "--program=/opt/sf/stratafluxd") == 2
    assert "uid 1000" in capsys.readouterr().err


def test_a_program_that_the_sandbox_hides_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("install-service", f"--root={tmp_path}", "--program=/home/me/.venv/bin/stratafluxd") == 2
    assert "below /home" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_the_operator_made_of_it_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A configuration in another encoding, or behind a link to what is not mounted now; a unit that is masked."""
    words = ("install-service", f"--root={tmp_path}", "--program=/opt/sf/stratafluxd", "--json")
    config, unit = tmp_path / "etc/strataflux/stratafluxd.toml", tmp_path / "etc/systemd/system/stratafluxd.service"
    for folder in (config.parent, unit.parent):
        folder.mkdir(parents=True)
    unit.symlink_to("/dev/null")
    config.write_bytes("# gr\u00fc\u00dfe\n".encode("latin-1"))
    assert leave(*words) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["files"] | {str(config): "kept", str(unit): "masked"} == json.loads(said.out)["files"]
    assert "systemctl unmask" in said.err
    assert str(unit.readlink()) == "/dev/null"
    config.unlink()
    config.symlink_to(tmp_path / "nfs/stratafluxd.toml")
    assert leave(*words, "--dry-run") == 0
    fates = json.loads(capsys.readouterr().out)["files"]
    assert (fates[str(config)], fates[str(unit)]) == ("would stay kept", "would stay masked")
    assert fates[str(unit.with_suffix(".socket"))] == "would stay unchanged"
    assert leave(*words) == 0
    assert config.is_symlink()
