"""Configuration: what is right is taken over with its units, what is not stops the start and says where."""

import os
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strataflux.daemon import values
from strataflux.daemon.config import Config, Override, load_config, resolve_config
from strataflux.daemon.errors import ConfigError
from strataflux.daemon.flags import parse_flags

EXAMPLE = Path(__file__).parents[3] / "systemd" / "stratafluxd.toml"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "stratafluxd.toml"
    path.write_text(text)
    return path


def test_defaults_need_no_file() -> None:
    config = load_config(None)
    assert config == Config()
    assert (config.cache.weight_bytes, config.cache.kv_bytes) == (128 << 20, 128 << 20)
    assert (config.reader.engine, config.reader.queue_depth, config.reader.direct_io) == ("uring", 128, "prefer")
    assert (config.attach.max_sessions, config.attach.max_sessions_per_uid, config.attach.hello_seconds) == (64, 16, 2)
    assert config.metrics.listen is None


def test_every_value_of_a_file_is_taken_over(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        """
runtime_dir = "/run/other"
[[store]]
path = "/stores/a"
preload = true
share = "uid"
allow_uids = [0, 1000, "root"]
allow_groups = ["root"]
[cache]
weight_bytes = "64MiB"
kv_bytes = 67108864
policy = "sieve"
warm_start = false
[reader]
engine = "threads"
queue_depth = 7
direct_io = "off"
grace_seconds = 0.5
threads = 2
[attach]
max_sessions = 3
max_sessions_per_uid = 2
hello_seconds = 1
[life]
drain_seconds = 0
[metrics]
listen = "[::1]:9464"
[log]
level = "debug"
json = true
""",
    )
    config = load_config(path)
    (store,) = config.stores
    assert (store.path, store.preload, store.share) == (Path("/stores/a"), True, "uid")
    assert (store.allow_uids, store.allow_groups) == ((0, 1000, 0), (0,))
    assert config.runtime_dir == Path("/run/other")
    assert config.cache.weight_bytes == config.cache.kv_bytes == 64 << 20
    assert (config.cache.policy, config.cache.warm_start) == ("sieve", False)
    assert (config.reader.engine, config.reader.queue_depth, config.reader.threads) == ("threads", 7, 2)
    assert (config.reader.direct_io, config.reader.grace_seconds) == ("off", 0.5)
    assert (config.attach.max_sessions, config.attach.max_sessions_per_uid) == (3, 2)
    assert (config.life.drain_seconds, config.log.level, config.log.json) == (0, "debug", True)
    assert config.metrics.listen == values.Address("::1", 9464)


@pytest.mark.parametrize(
    ("text", "subject", "found"),
    [
        ("chache = 1", "chache", "an unknown key"),
        ("[cache]\nweigth_bytes = 1", "cache.weigth_bytes", "an unknown key"),
        ("cache = 3", "cache", "3"),
        ('[cache]\nweight_bytes = "64MB"', "cache.weight_bytes", "'64MB'"),
        ("[cache]\nweight_bytes = -1", "cache.weight_bytes", "-1"),
        ("[cache]\nweight_bytes = true", "cache.weight_bytes", "True"),
        ('[cache]\npolicy = "best"', "cache.policy", "'best'; there are lru, "),
        ("[cache]\npolicy = 3", "cache.policy", "3"),
        ("[cache]\nkv_bytes = 1", "cache.kv_bytes", "1"),
        ('[reader]\nengine = "spdk"', "reader.engine", "'spdk'"),
        ("[reader]\nqueue_depth = 0", "reader.queue_depth", "0"),
        ("[reader]\ngrace_seconds = nan", "reader.grace_seconds", "nan"),
        ("[reader]\ngrace_seconds = inf", "reader.grace_seconds", "inf"),
        (f"[reader]\ngrace_seconds = 1{400 * '0'}", "reader.grace_seconds", "1000"),
        ('[reader]\ngrace_seconds = "2"', "reader.grace_seconds", "'2'"),
        ("[attach]\nmax_sessions = 65", "attach.max_sessions", "65"),
        ('[metrics]\nlisten = "localhost:9464"', "metrics.listen", "'localhost:9464'"),
        ('[metrics]\nlisten = "127.0.0.1:99999"', "metrics.listen", "'127.0.0.1:99999'"),
        ('[log]\nlevel = "loud"', "log.level", "'loud'"),
        ("[log]\njson = 1", "log.json", "1"),
        ("store = 1", "store", "1"),
        ("[[store]]\npreload = true", "store[0].path", "no such key"),
        ('[[store]]\npath = ""', "store[0].path", "''"),
        ('[[store]]\npath = "/a"\npreload = "yes"', "store[0].preload", "'yes'"),
        ('[[store]]\npath = "/a"\nmode = 1', "store[0].mode", "an unknown key"),
        ('[[store]]\npath = "/a"\nallow_uids = 5', "store[0].allow_uids", "5"),
        ('[[store]]\npath = "/a"\nallow_uids = ["no such user"]', "store[0].allow_uids", "does not know"),
        ('[[store]]\npath = "/a"\n[[store]]\npath = "/a"', "store", "/a twice"),
        ("runtime_dir = 5", "runtime_dir", "5"),
    ],
)
def test_what_cannot_be_followed_names_file_and_key(tmp_path: Path, text: str, subject: str, found: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert caught.value.subject == f"{path}:{subject}"
    assert found in caught.value.found
    assert caught.value.expected
    assert caught.value.remedy


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file") as caught:
        load_config(tmp_path / "absent.toml")
    assert caught.value.subject == str(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match="no TOML"):
        load_config(write(tmp_path, "[cache"))
    with pytest.raises(ConfigError, match="no TOML"):
        load_config(write(tmp_path, f"x = {20_000 * '['}"))
    with pytest.raises(ConfigError, match="an empty file"):
        load_config(write(tmp_path, "\n"))
    assert load_config(write(tmp_path, "# all as it comes\n")) == Config()
    with pytest.raises(ConfigError, match="more than"):
        load_config(write(tmp_path, "#" * (1 << 21)))
    path = tmp_path / "latin.toml"
    path.write_bytes(b'runtime_dir = "\xff"')
    with pytest.raises(ConfigError, match="no TOML"):
        load_config(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no regular file"):
        load_config(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"regular|directory"):
        load_config(tmp_path)


def test_flags_stand_over_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, '[cache]\nweight_bytes = "1MiB"\nkv_bytes = "2MiB"\n[[store]]\npath = "/a"\n')
    arguments = ["--config", str(path), "--weight-cache", "3MiB", "--store", "/b", "--store", "/c"]
    arguments += ["--runtime-dir", "/r", "--engine", "threads", "--direct-io", "off", "--metrics-listen", "127.0.0.1:1"]
    invocation = parse_flags([*arguments, "--log-level", "error"], "1")
    config = invocation.config
    assert invocation.action == "serve"
    assert (config.cache.weight_bytes, config.cache.kv_bytes) == (3 << 20, 2 << 20)
    assert [store.path for store in config.stores] == [Path("/a"), Path("/b"), Path("/c")]
    assert (config.runtime_dir, config.reader.engine, config.reader.direct_io) == (Path("/r"), "threads", "off")
    assert config.metrics.listen == values.Address("127.0.0.1", 1)
    assert config.log.level == "error"


def test_a_bad_flag_is_named_by_its_name() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_flags(["--weight-cache", "lots"], "1")
    assert caught.value.subject == "--weight-cache"


@pytest.mark.parametrize(("flag", "action"), [("--compile", "compile"), ("--check-config", "check")])
def test_actions(flag: str, action: str) -> None:
    assert parse_flags([flag], "1").action == action


@pytest.mark.parametrize(("arguments", "code"), [(["--version"], 0), (["--no-such-flag"], 2), (["--check", "x"], 2)])
def test_argparse_exits(arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_flags(arguments, "1.2")
    assert caught.value.code == code
    assert code or capsys.readouterr().out == "stratafluxd 1.2\n"


@given(st.integers(0, 1 << 46))
def test_a_size_reads_back_as_it_is_written(value: int) -> None:
    kind = values.size(0, 1 << 60)
    text = values.size_text(value)
    assert kind.parse(value) == value
    if not text.endswith("bytes"):
        assert kind.parse(text) == kind.parse(text.replace(" ", "")) == value


def test_an_override_of_a_section_keeps_its_other_keys() -> None:
    config = resolve_config({"log": {"json": True}}, "f", [Override("log.level", "--log-level", "error")])
    assert (config.log.level, config.log.json) == ("error", True)


# --- the example file -------------------------------------------------------------------------------------------------


def keys_of(config: Any, prefix: str = "") -> set[str]:
    found = set()
    for field in fields(config):
        value = getattr(config, field.name)
        name = f"{prefix}{field.name}"
        found |= keys_of(value, f"{name}.") if is_dataclass(value) and "kind" not in field.metadata else {name}
    return found


def test_the_example_shows_every_key_and_changes_nothing(tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert load_config(EXAMPLE) == Config()
    lines = []
    for line in text.splitlines():
        bare = line.removeprefix("#")
        # A key or table that is commented out has no space after the sign; prose has one.
        lines.append(bare if line.startswith("#") and not bare.startswith((" ", "#")) else line)
    config = load_config(write(tmp_path, "\n".join(lines)))
    assert config.stores
    assert config.runtime_dir is not None
    shown = "\n".join(lines)
    tables = (config.stores[0], config.tenants[0])
    wanted = {name.rsplit(".")[-1] for name in keys_of(config)} | {f.name for table in tables for f in fields(table)}
    for name in wanted - {"stores", "tenants"}:
        assert f"\n{name} = " in shown, name
