import json
import signal
import subprocess
import sys
from types import SimpleNamespace

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
