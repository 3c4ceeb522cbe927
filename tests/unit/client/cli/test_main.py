import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from strataflux import __version__
from strataflux.client.cli import main as module
from strataflux.client.cli.main import COMMANDS, build_app, main
from strataflux.client.errors import InputError
from strataflux.proto.errors import StoreMissing


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command with two commands that refuse, each with an error of another tree."""

    def register(app: typer.Typer) -> None:
        @app.command()
        def read(as_json: bool = typer.Option(False, "--json")) -> None:
            raise InputError("model.gguf", "architecture 'bert'", "llama or qwen3", "choose another model")

        @app.command()
        def serve() -> None:
            raise StoreMissing("refine/", "no manifest", "a store", "run strataflux prepare")

    monkeypatch.setattr(module, "COMMANDS", ("refuse",))
    monkeypatch.setattr(
        module, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace(register=register))
    )


def leave(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(words)
    return left.value.code


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("--version") == 0
    assert capsys.readouterr().out == f"strataflux {__version__}\n"


def test_no_arguments_shows_help_and_unknown_command_is_misuse(
    capsys: pytest.CaptureFixture[str], failing: None
) -> None:
    assert leave() == 2
    assert "Usage: strataflux" in capsys.readouterr().out
    assert leave("rubbish") == 2
    assert "rubbish" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "parts"),
    [
        ("read", ("model.gguf", "architecture 'bert'", "llama or qwen3", "choose another model")),
        ("serve", ("refine/", "no manifest", "a store", "run strataflux prepare")),
    ],
)
def test_refusal_leaves_with_two_and_says_all_parts(
    command: str, parts: tuple[str, ...], failing: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(command) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for part in parts:
        assert part in said.err


def test_refusal_with_json_is_one_object(failing: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert leave("read", "--json") == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert error == {
        "kind": "InputError",
        "subject": "model.gguf",
        "found": "architecture 'bert'",
        "expected": "llama or qwen3",
        "remedy": "choose another model",
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("swallowed", [False, True])
def test_a_signal_unwinds_and_decides_the_code(
    number: signal.Signals, swallowed: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unwound: list[bool] = []

    def register(app: typer.Typer) -> None:
        @app.command()
        def work() -> None:
            try:
                signal.raise_signal(number)
            except BaseException as error:
                if swallowed:
                    raise RuntimeError("what a library makes of it") from error
                raise
            finally:
                unwound.append(True)

        @app.command()
        def rest() -> None:
            pass

    monkeypatch.setattr(module, "COMMANDS", ("work",))
    monkeypatch.setattr(
        module, "importlib", SimpleNamespace(import_module=lambda name: SimpleNamespace(register=register))
    )
    before = signal.getsignal(number)
    assert leave("work") == 128 + number
    assert (unwound, signal.getsignal(number)) == ([True], before)
    assert capsys.readouterr() == ("", "")


def test_every_command_registers() -> None:
    app = build_app()
    assert len(app.registered_commands) + len(app.registered_groups) >= len(COMMANDS)


def test_starting_the_command_loads_nothing_heavy() -> None:
    program = (
        "import sys; from strataflux.client.cli.main import build_app; build_app();"
        "print([name for name in ('torch', 'numba', 'tokenizers', 'grpc') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "subject", "found"),
    [
        (("status", "--nope"), "strataflux status", "--nope"),
        (("statu",), "strataflux", "statu"),
        (("prepare", "a.gguf"), "strataflux prepare", "Missing argument"),
        (("store", "verify", "x", "--threads", "no"), "strataflux store verify", "--threads"),
    ],
)
def test_words_that_cannot_be_read_are_told_as_everything_else(
    words: tuple[str, ...], subject: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert leave(*words, "--json") == 2
    said = capsys.readouterr()
    error = json.loads(said.out)["error"]
    assert (error["kind"], error["subject"], error["remedy"]) == ("MisuseError", subject, f"see {subject} --help")
    assert found in error["found"]
    assert said.err.startswith(f"error: {subject}")


def commands(group: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands(command, f"{path} {name}")
        else:
            yield f"{path} {name}".strip(), command


def test_every_command_speaks_json() -> None:
    found = dict(commands(typer.main.get_command(build_app())))
    assert {"status", "store verify", "bench fill"} <= found.keys()
    # What takes the words of another command passes --json on to it.
    own = {name: command for name, command in found.items() if not command.context_settings.get("allow_extra_args")}
    assert found.keys() - own.keys() == {"trace record"}
    assert [name for name, command in own.items() if not any("--json" in p.opts for p in command.params)] == []


def run(program: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-P", "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shells_complete_commands(shell: str) -> None:
    words = {"COMP_WORDS": "strataflux stat", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "strataflux stat"}
    fish = {"_TYPER_COMPLETE_FISH_ACTION": "get-args", "_TYPER_COMPLETE_WORD_TO_COMPLETE": "stat"}
    program = "from strataflux.client.cli.main import main; main()"
    done = run(program, _STRATAFLUX_COMPLETE=f"complete_{shell}", **words, **fish)
    assert "status" in done.stdout
    assert "prepare" not in done.stdout


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--help"], 0),
        (["top", "--help"], 0),
        (["status"], 2),
        (["top", "--once"], 2),
        (["stores"], 2),
        (["sessions"], 2),
        (["doctor"], 1),
    ],
)
def test_what_operators_ask_loads_nothing_heavy(words: list[str], code: int, tmp_path: Path) -> None:
    """Neither torch nor compiled code; only a round trip that doctor is asked to prove needs the latter."""
    program = f"""
import json, sys
from strataflux.client.cli.main import main
try:
    main({words!r})
except SystemExit as left:
    heavy = [name for name in ("torch", "numba", "transformers") if name in sys.modules]
    print("\\n" + json.dumps([left.code, heavy]))
"""
    # Without any other place to look in, nobody answers.
    nowhere = str(tmp_path)
    done = run(program, STRATAFLUX_RUNTIME_DIR=nowhere, XDG_RUNTIME_DIR=nowhere)
    left, heavy = json.loads(done.stdout.splitlines()[-1])
    assert left == code, done.stderr
    assert heavy == []
