"""The documentation: links lead somewhere, blocks say what they are, and commands in them exist."""

import contextlib
import grp
import io
import pwd
import re
import shlex
import tomllib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.main import get_command

from strataflux.client.cli.main import build_app
from strataflux.daemon.config import resolve_config
from strataflux.daemon.flags import parse_flags
from tests.fakes.pages import ALL_PAGES, READERS_PAGES, ROOT, Block, Page

NEEDS = ("gpu", "root", "network", "time", "data")
RUN_BY = {ROOT / "docs" / "INTEGRATING.md": "tests/system/test_integrating.py"}
"""Pages with Python in them, and who runs it."""
LANGUAGES = ("sh", "toml", "python", "text")
ENDS = frozenset({"&&", "||", "|", ";", "&", "do", "done", "until", "{", "}"})
REDIRECTION = re.compile(r"\d?(>&?|<) *[^\s'\"]+")

pages = pytest.mark.parametrize("page", [Page(path) for path in ALL_PAGES], ids=str)
readers = pytest.mark.parametrize("page", [Page(path) for path in READERS_PAGES], ids=str)


@pages
def test_links_lead_to_files_and_headings_that_exist(page: Page) -> None:
    broken = []
    for line, target in page.links:
        name, _, anchor = target.partition("#")
        path = (page.path.parent / name).resolve() if name else page.path
        if not path.exists() or (anchor and anchor not in Page(path).anchors):
            broken.append(f"{page}:{line}: {target}")
    assert not broken


@pages
def test_files_named_in_the_text_exist(page: Page) -> None:
    made = ("bench/results/",)  # some are made by the command beside them
    missing = [f"{page}:{line}: {word}" for line, word in page.named_files if not (ROOT / word).exists()]
    assert not [said for said in missing if not said.split(": ")[1].startswith(made)]


@readers
def test_headings_begin_with_a_title_and_skip_no_level(page: Page) -> None:
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))
    assert len(set(page.anchors)) == len(page.anchors)


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set(), [ROOT / "docs" / "README.md"]
    while waiting:
        page = Page(waiting.pop())
        reached.add(page.path)
        targets = {(page.path.parent / target.partition("#")[0]).resolve() for _, target in page.links}
        waiting += [path for path in targets if path.suffix == ".md" and path not in reached]
    assert set((ROOT / "docs").glob("*.md")) - reached == set()
    assert Path("docs/README.md") in {Path(target) for _, target in Page(ROOT / "README.md").links}


@readers
def test_every_block_says_what_it_is(page: Page) -> None:
    wrong = []
    for block in page.blocks:
        marks = {"sh": ("test", *(f"needs={need}" for need in NEEDS))}.get(block.language, ("",))
        if block.language not in LANGUAGES or block.mark not in marks:
            wrong.append(f"{page}:{block.line}: {block.language!r} {block.mark!r}; see docs/README.md")
        if block.language == "python" and page.path not in RUN_BY:
            wrong.append(f"{page}:{block.line}: Python that no test runs")
    assert not wrong


@readers
def test_configuration_in_the_text_is_accepted(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever users and groups it names as examples."""
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_gid=1))
    monkeypatch.setattr(pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=1))
    for block in page.blocks:
        if block.language == "toml":
            resolve_config(tomllib.loads(block.text), f"{page}:{block.line}")


def test_the_readme_takes_two_screens() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100


@readers
def test_commands_and_options_exist(page: Page) -> None:
    refused = []
    for block in page.blocks:
        if block.language == "sh":
            for words in commands_of(block):
                if reason := why_not(words):
                    refused.append(f"{page}:{block.line}: {shlex.join(words)}: {reason}")
    assert not refused


def commands_of(block: Block) -> Iterator[list[str]]:
    """The simple commands of a block, without variables set before them and redirections."""
    for line in block.text.replace("\\\n", " ").splitlines():
        held: list[str] = []
        lexer = shlex.shlex(REDIRECTION.sub("", line), posix=True, punctuation_chars="|&;")
        lexer.whitespace_split, lexer.commenters = True, "#"
        for word in lexer:
            if word in ENDS:
                yield from [held] if held else []
                held = []
            elif held or not re.match(r"\w+=", word):
                held.append(word)
        yield from [held] if held else []


def why_not(words: list[str]) -> str | None:
    """Why a command of StrataFlux would not be taken; None if it would, or is another's."""
    name, *rest = words
    match Path(name).name:
        case "strataflux":
            return refused_by_cli(rest)
        case "stratafluxd":
            return refused_by_daemon(rest)
        case "make":
            listed = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
            return None if listed and set(rest) <= set(listed[1].split()) else "no such target"
        case "python" | "python3" if rest[0].startswith("bench/"):
            return refused_by_script(rest)
    return None


def refused_by_cli(words: list[str]) -> str | None:
    command = get_command(build_app())
    while words and (inner := getattr(command, "commands", {}).get(words[0])):
        command, words = inner, words[1:]
    if words and hasattr(command, "commands") and not words[0].startswith("-"):
        return "no such command"
    try:
        with command.make_context(command.name, words):
            return None
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def refused_by_daemon(words: list[str]) -> str | None:
    said = io.StringIO()
    known = [word for word in words if word.startswith("--")]
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            parse_flags(["--help"], "")
    except SystemExit:
        return next((word for word in known if word not in said.getvalue()), None)
    return None


def refused_by_script(words: list[str]) -> str | None:
    path = ROOT / words[0]
    if not path.exists():
        return "no such script"
    text = path.read_text()
    # Scripts share options by functions of their neighbours.
    beside = [path.with_name(f"{name}.py") for name in re.findall(r"^from (\w+) import", text, re.MULTILINE)]
    text += "".join(other.read_text() for other in beside if other.exists())
    return next((word for word in words[1:] if word.startswith("--") and f'"{word}"' not in text), None)


def test_a_command_that_does_not_exist_is_found() -> None:
    text = (
        "FOO=1 strataflux generate prepared/ hello --max-tokens 4 > out 2>&1 && strataflux tell x\n"
        "stratafluxd --stores x &\nmake nothing | cat\npython bench/policies.py --nothing\nls --all\n"
    )
    found = [why_not(words) is not None for words in commands_of(Block(1, "sh", "test", text))]
    assert found == [False, True, True, True, False, True, False]


def test_options_are_checked_as_the_command_would() -> None:
    assert why_not(["strataflux", "generate", "prepared/", "x", "--max-tokens", "0"]) is not None
    assert why_not(["strataflux", "store", "repair", "x"]) is not None
    assert why_not(["strataflux", "store", "repair", "x", "--from", "y"]) is None
