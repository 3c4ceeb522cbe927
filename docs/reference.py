"""Writes docs/REFERENCE-*.md from what they describe: commands, configuration keys and metrics. ``make reference``.

A test compares the pages with what this makes (``tests/unit/test_docs_reference.py``).
"""

import contextlib
import dataclasses
import io
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, get_args, get_type_hints
from unittest import mock

from typer.main import get_command

from strataflux import __version__
from strataflux.client.cli.main import build_app
from strataflux.daemon.config import Config
from strataflux.daemon.flags import parse_flags
from strataflux.daemon.histograms import HISTOGRAMS, INFOS
from strataflux.daemon.metrics import METRICS
from strataflux.daemon.reload import merge
from strataflux.daemon.values import Kind, size_text

__all__ = ["PAGES", "cli_page", "config_page", "main", "metrics_page"]

ROOT: Final = Path(__file__).parents[1]
_MADE: Final = "This page is made by `make reference`; change what it is made from.\n"


def cli_page() -> str:
    """Every command of ``strataflux``, and the flags of ``stratafluxd``."""
    app = get_command(build_app())
    parts = [
        "# Reference: command line\n",
        _MADE,
        _words(app.help or ""),
        _words(app.epilog or ""),
        "Sizes are bytes, or text with a unit such as `64MiB`. Where a share is allowed, `25%` is one of the store.\n",
    ]
    parts += [part for words, command in _commands(app, "strataflux") for part in _command(words, command)]
    parts += ["## `stratafluxd`\n", f"```text\n{_daemon_help()}\n```\n", _ENVIRONMENT]
    return "\n".join(parts)


_ENVIRONMENT: Final = """\
Exit codes: 0 it served and stopped, or did what was asked; 1 it failed while serving; 2 it refused to start.

## Environment

| variable | meaning |
|---|---|
| `STRATAFLUX_RUNTIME_DIR` | folder of the sockets, where no `--runtime-dir` names one |
| `XDG_RUNTIME_DIR` | without either: its folder `stratafluxd`; without that `/run/stratafluxd` |
| `STRATAFLUX_COMPILED_DIR` | compiled code; else `CACHE_DIRECTORY` (systemd), else `XDG_CACHE_HOME`, `~/.cache` |
| `NO_COLOR` | set: no colours in what `strataflux` writes |
"""


def _commands(group: Any, words: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{words} {name}")
        else:
            yield f"{words} {name}", command


def _command(words: str, command: Any) -> Iterator[str]:
    arguments = [_name(one) for one in command.params if one.param_type_name == "argument"]
    yield f"## `{' '.join([words, *arguments])}`\n"
    yield _words(command.help)
    yield "\n".join(["| | value | default | |", "|---|---|---|---|", *map(_row, command.params)]) + "\n"


def _name(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return " / ".join(parameter.opts + parameter.secondary_opts)


def _row(parameter: Any) -> str:
    shown, default = parameter.show_default, parameter.default
    if parameter.required:
        text = "required"
    elif isinstance(shown, str):
        text = f"({shown})"
    elif isinstance(default, bool):
        text = parameter.opts[0] if default else ""
    else:
        text = "" if default is None else str(default)
    value = "" if getattr(parameter, "is_flag", False) else _kind(parameter)
    return _cells(f"`{_name(parameter)}`", value, text, parameter.help or "")


def _kind(parameter: Any) -> str:
    """As typer keeps it in the version that constraints.txt pins."""
    annotation = parameter.type_descriptor.annotation
    inner = next(iter(get_args(annotation)), annotation)
    base = {int: "integer", float: "number", str: "text", Path: "path"}[inner]
    low, high = parameter.min, parameter.max
    if low is None:
        return base if high is None else f"{base} ≤ {high:g}"
    return f"{base} ≥ {low:g}" if high is None else f"{base}, {low:g} … {high:g}"


def _words(text: str) -> str:
    """Help as Markdown paragraphs, lines of at most 120 characters."""
    paragraphs = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text.strip()))
    return "\n\n".join(_wrapped(part) for part in paragraphs) + "\n"


def _wrapped(text: str) -> str:
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= 120:
            lines.append("")
        lines[-1] += f" {word}" if lines[-1] else word
    return "\n".join(lines)


def _cells(*cells: str) -> str:
    return f"| {' | '.join(' '.join(cell.split()).replace('|', chr(92) + '|') for cell in cells)} |".replace("  ", " ")


def _daemon_help() -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit), mock.patch.dict(os.environ, COLUMNS="120"):
        parse_flags(["--help"], __version__)
    return said.getvalue().partition("options:\n")[2].rstrip()


def config_page() -> str:
    """Every key of the configuration: bounds and defaults from the code, words from the example file."""
    words = _example((ROOT / "systemd" / "stratafluxd.toml").read_text())
    parts = [
        "# Reference: configuration of stratafluxd\n",
        _MADE,
        "One TOML file (`--config`, installed as `/etc/strataflux/stratafluxd.toml`); a flag of the same meaning goes\n"
        "before it. A key that is not known or a value out of bounds stops the start with a message that names it.\n"
        "Sizes are bytes, or text with a unit: `64MiB`. `stratafluxd --config FILE --check-config` only checks.\n",
        "*Live* keys change on a reload, the others with a restart; a reload also takes stores up and lets them go.\n",
        "## Top level\n",
        _table([_cells("`runtime_dir`", "the path of a folder", "", "", words[("", "runtime_dir")])]),
    ]
    live = _live()
    for name, kind in get_type_hints(Config).items():
        if dataclasses.is_dataclass(kind):
            parts += [f"## `[{name}]`\n", _table(_keys(kind, name, name in live, words))]
    for name, kind in get_type_hints(Config).items():
        if dataclasses.is_dataclass(entry := next(iter(get_args(kind)), None)):
            one = name.removesuffix("s")
            parts += [f"## `[[{one}]]`\n", f"Once for each {one}.\n", _table(_keys(entry, one, name in live, words))]
    return "\n".join(parts)


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| key | accepts | default | live | meaning |", "|---|---|---|---|---|", *rows]) + "\n"


def _live() -> set[str]:
    """The sections that a reload changes, asked from the one who does."""
    sections = {field.name for field in dataclasses.fields(Config)}
    wanted = dataclasses.replace(Config(), **{name: name for name in sections})  # type: ignore[arg-type]
    merged, _ = merge(Config(), wanted)
    return {name for name in sections if getattr(merged, name) == name}


def _keys(section: Any, name: str, live: bool, words: Mapping[tuple[str, str], str]) -> Iterator[str]:
    for field in dataclasses.fields(section):
        kind, default = field.metadata.get("kind"), "required"
        if field.default is not dataclasses.MISSING:
            default = _default(field.name, field.default)
        accepts = kind.expected if isinstance(kind, Kind) else "text"
        yield _cells(f"`{field.name}`", accepts, default, "live" if live else "", words[(name, field.name)])


def _default(name: str, value: object) -> str:
    if value is None:
        return {"allow": "everybody", "uids": "nobody", "gids": "nobody"}.get(name.partition("_")[0], '`""`')
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if name.endswith("_bytes") and value:
        return size_text(int(str(value)))
    return f"`{value}`"


def _example(text: str) -> dict[tuple[str, str], str]:
    """Comments of the example file by section and key; a key without its own shares the one above it, if any."""
    found, section, comment, fresh = {}, "", [], True
    for line in text.splitlines():
        if header := re.fullmatch(r"#?\[+(\w+)\]+", line):
            section, fresh = header[1], True
        elif line.startswith("# "):
            comment, fresh = [*([] if fresh else comment), line[2:]], False
        elif key := re.match(r"#(\w+) = ", line):
            found[(section, key[1])] = " ".join(comment)
            fresh = True
        else:
            comment, fresh = [], True
    return found


_HIT_RATE: Final = 'sum(rate(strataflux_lookups_total{result="hit"}[1m])) / sum(rate(strataflux_lookups_total[1m]))'


def metrics_page() -> str:
    """Every metric that is declared."""
    rows = []
    for one in METRICS:
        kind = one.kind(one.name, one.help).type
        rows.append((one.name + ("_total" if kind == "counter" else ""), kind, one.labels, one.help))
    rows += [(one.name, "histogram", one.labels, one.help) for one in HISTOGRAMS]
    rows += [(f"{one.name}_info", "info", one.labels, one.help) for one in INFOS]
    rows.append(("strataflux_scrape_seconds", "gauge", (), "What this scrape cost."))
    lines = [_cells(f"`{n}`", kind, ", ".join(f"`{x}`" for x in labels), text) for n, kind, labels, text in rows]
    parts = [
        "# Reference: metrics\n",
        _MADE,
        "Served at `/metrics` of the address that `metrics.listen` names, for Prometheus. Ratios are left to queries;\n"
        "the hit rate of the last minute, for one:\n",
        f"```text\n{_HIT_RATE}\n```\n",
        "`model` is a shortened digest of a store. Counters are totals since the service started.\n",
        "\n".join(["| metric | kind | labels | |", "|---|---|---|---|", *lines]) + "\n",
    ]
    return "\n".join(parts)


PAGES: Final = {
    "REFERENCE-CLI.md": cli_page,
    "REFERENCE-CONFIG.md": config_page,
    "REFERENCE-METRICS.md": metrics_page,
}


def main() -> None:
    """Write all of them."""
    for name, make in PAGES.items():
        (ROOT / "docs" / name).write_text(make())


if __name__ == "__main__":
    main()
