"""lm-evaluation-harness over a prepared model and a real daemon, on tasks that lie in local files."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from strataflux.proto.extras import install_command

pytest.importorskip("lm_eval", reason=f"lm-eval is not installed; {install_command('eval')}")

from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from strataflux.cache_policy.miss import Wait
from strataflux.client.errors import DaemonUnavailableError, MisuseError
from strataflux.client.launch import PrivateDaemon
from strataflux.client.lm_eval import StrataFluxLM
from strataflux.client.prepare.chat import ChatTemplate
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.write import prepare
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import ContextFull
from strataflux.client.runtime.models import DecoderWeights
from tests.system.test_demo import tiny_source

pytestmark = pytest.mark.system

TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}he: "
QUESTIONS = [
    {"question": "he said that", "choices": [" yes", " no", "he"], "answer": 1},
    {"question": "once upon a", "choices": [" time", " he"], "answer": 0},
]
CHOICES = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
PERPLEXITY = """
task: local_perplexity
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> PreparedModel:
    source = replace(tiny_source(), chat=ChatTemplate(TEMPLATE, eos_token="<|end|>"))
    return prepare(source, tmp_path_factory.mktemp("m") / "prepared", PrepareSettings())


@pytest.fixture(scope="module")
def runtime(prepared: PreparedModel) -> Iterator[Path]:
    with PrivateDaemon([prepared.store], weight_cache_bytes=64 << 20, grace_seconds=60.0) as daemon:
        yield daemon.runtime_dir


@pytest.fixture
def model(prepared: PreparedModel, runtime: Path) -> Iterator[StrataFluxLM]:
    model = StrataFluxLM(str(prepared.folder), str(runtime), miss="wait:60000", require_daemon=True)
    yield model
    model.close()


def instance(kind: str, *arguments: Any) -> Instance:
    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0)


def log_probability(prepared: PreparedModel, runtime: Path, tokens: list[int], last: int) -> tuple[float, bool]:
    """Of the ``last`` last tokens, by the project's decoder from the beginning."""
    weights = DecoderWeights.read(prepared)
    with RefinedModel.attach(prepared, weights, context=64, runtime_dir=runtime, miss=Wait(60.0)) as own:
        rows = torch.stack([own.step(token) for token in tokens[:-1]])[-last:]
    chosen = torch.tensor(tokens[-last:])
    total = torch.log_softmax(rows, -1).gather(1, chosen[:, None]).sum()
    return float(total), bool((rows.argmax(-1) == chosen).all())


def test_continuations_have_the_probabilities_of_refined_steps(
    model: StrataFluxLM, prepared: PreparedModel, runtime: Path
) -> None:
    pairs = [("he said", " yes he"), ("he said", " no"), ("he said", "he"), ("", "once"), ("x" * 90, " yes")]
    found = model.loglikelihood([instance("loglikelihood", *pair) for pair in pairs], disable_tqdm=True)
    end = model.eot_token_id
    for (context, continuation), (total, greedy) in zip(pairs, found, strict=True):
        before, after = model.tok_encode(context) or [end], model.tok_encode(continuation)
        tokens = (before + after)[-model.max_length - 1 :]
        expected, also_greedy = log_probability(prepared, runtime, tokens, len(after))
        assert total == pytest.approx(expected, abs=1e-3)
        assert greedy == also_greedy


def test_a_long_text_is_scored_in_windows(model: StrataFluxLM, prepared: PreparedModel, runtime: Path) -> None:
    text = "he said that once upon a time he had said no, and then he said it again and again and again"
    tokens = model.tok_encode(text)
    assert len(tokens) > model.max_length == 64
    (found,) = model.loglikelihood_rolling([instance("loglikelihood_rolling", text)], disable_tqdm=True)
    first, rest = tokens[:64], tokens[64:]
    windows = [([model.eot_token_id, *first], 64), (tokens[-65:], len(rest))]
    assert found == pytest.approx(sum(log_probability(prepared, runtime, *window)[0] for window in windows), abs=5e-3)


def test_generation_stops_where_it_is_told(model: StrataFluxLM) -> None:
    def generate(**named: Any) -> str:
        return model.generate_until([instance("generate_until", "he said", named)], disable_tqdm=True)[0]

    whole = generate(max_gen_toks=12)
    assert len(whole) > 4
    stop = whole[3:5]
    assert generate(max_gen_toks=12, until=[stop]) == whole[: whole.index(stop)]
    assert generate(max_gen_toks=12, until=["never said"]) == whole


def test_local_tasks(
    prepared: PreparedModel, runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: StrataFluxLM
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    data = tmp_path / "questions.jsonl"
    data.write_text("\n".join(map(json.dumps, QUESTIONS)))
    (tmp_path / "choices.yaml").write_text(CHOICES.format(data=data))
    (tmp_path / "perplexity.yaml").write_text(PERPLEXITY.format(data=data))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)
    results = simple_evaluate(
        model="strataflux",
        model_args={"prepared": str(prepared.folder), "runtime_dir": str(runtime), "miss": "wait:60000"},
        tasks=["local_choices", "local_perplexity"],
        task_manager=tasks,
        bootstrap_iters=0,
    )["results"]
    right = 0
    for question in QUESTIONS:
        pairs = [instance("loglikelihood", question["question"], choice) for choice in question["choices"]]  # type: ignore[attr-defined]
        totals = [total for total, _ in model.loglikelihood(pairs, disable_tqdm=True)]
        right += totals.index(max(totals)) == question["answer"]
    assert results["local_choices"]["acc,none"] == right / len(QUESTIONS)
    assert results["local_perplexity"]["bits_per_byte,none"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 4}, "batch_size: found 4; expected 1"),
        ({"device": "cuda:1"}, "device: found cuda:1; expected cpu"),
        ({"max_length": 65}, "max_length: found 65 tokens; expected 2 to 64"),
        ({"kv": "9/9"}, "--kv: found '9/9'"),
        ({"miss": "hope"}, "--miss: found 'hope'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be(prepared: PreparedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        StrataFluxLM(str(prepared.folder), **arguments)


def test_what_the_command_says_when_nothing_was_said_is_taken(prepared: PreparedModel, tmp_path: Path) -> None:
    said = EvaluatorConfig()
    common = {"batch_size": said.batch_size, "max_batch_size": said.max_batch_size, "device": said.device}
    assert StrataFluxLM.create_from_arg_obj({"prepared": str(prepared.folder), "runtime_dir": str(tmp_path)}, common)


def test_without_a_daemon(prepared: PreparedModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(DaemonUnavailableError):
        StrataFluxLM(str(prepared.folder), str(tmp_path), require_daemon=True)
    model = StrataFluxLM(str(prepared.folder), str(tmp_path))
    assert [record.message.partition(":")[0] for record in caplog.records] == ["not refined"]
    (scored,) = model.loglikelihood([instance("loglikelihood", "he", " said")], disable_tqdm=True)
    assert scored[0] < 0
    with pytest.raises(ContextFull, match="a continuation of 90 tokens; expected at most 64"):
        model.loglikelihood([instance("loglikelihood", "he", "x" * 90)], disable_tqdm=True)


def test_conversations_are_written_as_the_model_wants(model: StrataFluxLM) -> None:
    turns = [{"role": "user", "content": "what?"}]
    assert model.chat_template(True) == TEMPLATE
    assert model.apply_chat_template(turns) == "user: what?\nhe: "
    with pytest.raises(MisuseError, match="an answer that was begun"):
        model.apply_chat_template(turns, add_generation_prompt=False)
