"""``strataflux generate``: with a daemon, without one, and with one that does not know the model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.generation import Sampling, generate_tokens, special_tokens
from strataflux.client.runtime.models import DecoderWeights
from strataflux.proto.store_format import open_store
from tests.fakes.daemon import FakeDaemon
from tests.fakes.store import make_store
from tests.unit.client.cli.conftest import Run
from tests.unit.client.conftest import TOKENS

PROMPT = "he said"


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("g")


@pytest.fixture
def daemon(folder: Path, tiny_prepared: PreparedModel) -> Iterator[FakeDaemon]:
    with FakeDaemon(folder, [open_store(tiny_prepared.store)], ring_log2=14) as fake:
        fake.publish(0, *range(fake.manifests[0].record_count))
        yield fake


def expected(prepared: PreparedModel, count: int) -> str:
    tokenizer = prepared.tokenizer()
    given = tokenizer.encode(PROMPT).ids
    decoder = Decoder(DecoderWeights.read(prepared), len(given) + count)
    tokens = list(generate_tokens(decoder.step, given, count, Sampling(), special_tokens(tokenizer)))
    return str(tokenizer.decode(tokens))


def test_without_a_daemon_the_base_speaks_and_says_so_once(
    tiny_prepared: PreparedModel, folder: Path, run: Run
) -> None:
    said = run("generate", tiny_prepared.folder, PROMPT, "--max-tokens", 8, "--runtime-dir", folder)
    assert said.code == 0
    assert said.out == expected(tiny_prepared, 8) + "\n"
    assert said.err.count("not refined") == 1
    assert str(folder) in said.err


def test_a_daemon_can_be_required(tiny_prepared: PreparedModel, folder: Path, run: Run) -> None:
    said = run("generate", tiny_prepared.folder, PROMPT, "--require-daemon", "--runtime-dir", folder, "--json")
    assert said.code == 2
    assert str(folder) in said.json()["error"]["subject"]


def test_with_a_daemon_it_is_refined(tiny_prepared: PreparedModel, daemon: FakeDaemon, folder: Path, run: Run) -> None:
    options = ("--max-tokens", 8, "--runtime-dir", folder, "--require-daemon", "--k", 1024)
    found = run("generate", tiny_prepared.folder, PROMPT, *options, "--json").json()
    assert (found["refined"], found["weight_hit_rate"]) == (True, 1.0)
    assert (set(found["k"].values()), set(found["shift"].values()), found["mlp_scheme"]) == ({1024}, {0.0}, "channels")
    said = run("generate", tiny_prepared.folder, PROMPT, *options)
    assert (said.out, said.err) == (found["text"] + "\n", "")


def test_a_daemon_that_serves_another_model(
    tmp_path: Path, tiny_prepared: PreparedModel, folder: Path, run: Run
) -> None:
    with FakeDaemon(folder, [make_store(tmp_path / "other", records=4, record_bytes=8)]):
        said = run("generate", tiny_prepared.folder, PROMPT, "--max-tokens", 2, "--runtime-dir", folder)
        assert said.code == 0
        assert "not refined" in said.err
        required = run("generate", tiny_prepared.folder, PROMPT, "--runtime-dir", folder, "--require-daemon")
        assert required.code == 2


def test_the_same_seed_gives_the_same_text(tiny_prepared: PreparedModel, folder: Path, run: Run) -> None:
    options = ("--temperature", 1.5, "--top-p", 0.9, "--max-tokens", 12, "--runtime-dir", folder)
    texts = [run("generate", tiny_prepared.folder, PROMPT, *options, "--seed", seed).out for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("options", [("--temperature", -1), ("--top-p", 0), ("--max-tokens", 0), ("--miss", "x")])
def test_refusals(options: tuple[object, ...], tiny_prepared: PreparedModel, run: Run) -> None:
    assert run("generate", tiny_prepared.folder, PROMPT, *options).code == 2


def test_an_empty_prompt_is_refused(tiny_prepared: PreparedModel, folder: Path, run: Run) -> None:
    said = run("generate", tiny_prepared.folder, "", "--runtime-dir", folder)
    assert said.code == 2
    assert "prompt" in said.err


def test_no_position_is_beyond_the_models(tiny_prepared: PreparedModel, folder: Path, run: Run) -> None:
    most, given = tiny_prepared.config.context, len(tiny_prepared.tokenizer().encode(PROMPT).ids)
    said = run("generate", tiny_prepared.folder, PROMPT, "--max-tokens", most, "--runtime-dir", folder)
    assert said.out == expected(tiny_prepared, most - given) + "\n"
    assert f"at most {most - given} tokens" in said.err
    said = run("generate", tiny_prepared.folder, f"{PROMPT} " * most, "--runtime-dir", folder)
    assert said.code == 2
    assert f"the model's {most} positions" in said.err


def test_an_unknown_platform_is_refused_on_a_cpu_too(tiny_prepared: PreparedModel, folder: Path, run: Run) -> None:
    said = run("generate", tiny_prepared.folder, PROMPT, "--platform", "x", "--runtime-dir", folder)
    assert said.code == 2
    assert "--platform" in said.err


def test_special_tokens_are_those_of_control(tiny_prepared: PreparedModel) -> None:
    assert special_tokens(tiny_prepared.tokenizer()) == {TOKENS.index("<|end|>")}
