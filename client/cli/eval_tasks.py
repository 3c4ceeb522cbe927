"""``strataflux eval --kv METHOD --tasks retrieval``: whether a model still finds what a long prompt said."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from strataflux.client.cli.eval_method import Evaluated, MethodCommand, fitted_method, open_evaluated
from strataflux.client.cli.output import Output, progress
from strataflux.client.errors import MisuseError
from strataflux.proto.extras import install_command

if TYPE_CHECKING:
    from strataflux.client.evaluate.methods.base import KvMethod
    from strataflux.client.evaluate.retrieval.run import Retrieved
    from strataflux.client.evaluate.retrieval.tasks import Asked
    from strataflux.client.prepare.chat import ChatTemplate

__all__ = ["TaskCommand", "TaskCountOption", "TaskSeedOption", "TaskTokensOption", "TasksOption", "run_eval_tasks"]

TasksOption = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        help="With --kv METHOD: retrieval, or some of its tasks, such as retrieval:vt,qa_1, in the place of windows.",
        show_default="none",
    ),
]
TaskTokensOption = Annotated[int, typer.Option("--task-tokens", min=1, help="With --tasks: tokens of each prompt.")]
TaskCountOption = Annotated[int, typer.Option("--task-count", min=1, help="With --tasks: prompts of each task.")]
TaskSeedOption = Annotated[int, typer.Option("--task-seed", help="With --tasks: what prompts are drawn from.")]

_TOKENS_AT_ONCE = {"cpu": 8192, "cuda": 131072}
"""Prompt tokens of a batch: their keys and values take 46 KB each in a model of 135 M parameters."""


@dataclass(frozen=True)
class TaskCommand:
    """What was asked for beside the method."""

    tasks: str
    tokens: int
    count: int
    seed: int


def run_eval_tasks(output: Output, command: MethodCommand, asked: TaskCommand) -> None:
    """Answer every prompt with an exact cache and with the method, and show both scores.

    Raises:
        StrataFluxError: what stood in the way.
    """
    from strataflux.client.evaluate.methods.base import Making, parse_method
    from strataflux.client.evaluate.methods.registry import check_method, make_method
    from strataflux.client.evaluate.retrieval.tasks import parse_tasks
    from strataflux.client.evaluate.text import python_prose, read_text

    if command.sequential:
        raise MisuseError("--tasks", "together with --sequential", "one of the two", "leave one out")
    spec, names = parse_method(command.spec), parse_tasks(asked.tasks)
    check_method(spec)
    words = python_prose() if command.text is None else read_text(command.text)
    with progress("reading the model"):
        found = open_evaluated(command.model, str(spec), command.reference, command.device)
        problems, chat = _drawn(found, asked, names, words)
    method = fitted_method(command, spec, found, found.tokenizer.encode(words).ids)
    # Asked now, because a method that cannot take prompts of this size says so here, and not after all exact answers.
    size = method.nbytes(asked.tokens, 0)
    exact = make_method(parse_method("exact"), Making(found.weights))
    with progress("answering prompts", len(problems) * (1 + (method.name != "exact"))) as advance:
        before = _answers(found, exact, problems, command.device, advance)
        after = before if method.name == "exact" else _answers(found, method, problems, command.device, advance)
    _show(output, asked, (found, method, size), (before, after), chat)


def _drawn(found: Evaluated, asked: TaskCommand, names: list[str], words: str) -> "tuple[list[Asked], bool]":
    """Problems, and whether they are asked by the model's chat template."""
    from strataflux.client.evaluate.retrieval.problem import Haystack
    from strataflux.client.evaluate.retrieval.tasks import Wrapping, draw_problems

    template = _template(found)
    wrapping = Wrapping() if template is None else Wrapping.by(_renderer(template))
    sizes = {"tokens": asked.tokens, "count": asked.count, "seed": asked.seed}
    problems = draw_problems(names, found.tokenizer, Haystack.of(words), **sizes, wrapping=wrapping)
    return problems, template is not None


def _template(found: Evaluated) -> "ChatTemplate | None":
    from strataflux.client.prepare.chat import read_chat
    from strataflux.client.prepare.prepared import PreparedModel

    source = found.source
    return read_chat(source.folder) if isinstance(source, PreparedModel) else source.chat_template()


def _renderer(template: "ChatTemplate") -> Callable[[str], str]:
    if find_spec("jinja2") is None:
        raise MisuseError(
            "--tasks", "no jinja2, which the model's chat template needs", "the extra serve", install_command("serve")
        )
    from strataflux.client.serve.chat import ChatRenderer
    from strataflux.client.serve.schemas import Message

    renderer = ChatRenderer(template)
    return lambda text: renderer.render([Message("user", text)])


def _answers(
    found: Evaluated, method: "KvMethod", problems: "list[Asked]", device: str, advance: Callable[..., object]
) -> "Retrieved":
    from strataflux.client.evaluate.retrieval.run import retrieve

    batch = max(1, _TOKENS_AT_ONCE["cpu" if device == "cpu" else "cuda"] // len(problems[0].tokens))

    def told(count: int) -> None:
        for _ in range(count):
            advance()

    return retrieve(found.weights, method, problems, found.tokenizer, batch=batch, on_batch=told)


def _show(
    output: Output,
    asked: TaskCommand,
    made: "tuple[Evaluated, KvMethod, int]",
    answers: "tuple[Retrieved, Retrieved]",
    chat: bool,
) -> None:
    (found, method, size), (before, after) = made, answers
    a_token = size / (found.weights.config.layers * asked.tokens)
    output.print(f"{'':16}{'exact':>8}{method.name:>18}")
    for name, score in before.scores.items():
        output.print(f"{name:16}{score:8.3f}{after.scores[name]:18.3f}")
    output.print(f"{'mean':16}{before.mean:8.3f}{after.mean:18.3f}")
    output.print(f"{a_token:.1f} bytes a token and layer at the end of a prompt")
    output.result(
        {
            "kv": {
                "method": method.name,
                "bytes_a_token_and_layer": a_token,
                "bytes": size,
                "facts": method.facts,
                "prepared": found.codes is not None,
            },
            "tasks": {name: {"exact": score, "kv": after.scores[name]} for name, score in before.scores.items()},
            "mean": {"exact": before.mean, "kv": after.mean},
            "task_tokens": asked.tokens,
            "task_count": asked.count,
            "task_seed": asked.seed,
            "chat_template": chat,
        }
    )
