"""Ways to keep fewer bytes of keys and values, side by side: divergence, retrieval, and what each takes.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/fsq_compare.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --device cuda > rows.jsonl

Prints one JSON object a row, methods in the order given; what a method raises is its row, and the next one follows.
``kl`` is of the tokens after a prompt of ``--prompt`` tokens in each window, so that methods which forget tokens of a
prompt can be compared; ``kl_whole`` of all tokens without a prompt, for those that do not. Methods are fitted on the
part of the text that is not scored. ``--codes fsq:8x=FILE`` takes trained codes as a method of their own, called
``fsq:8x trained``; ``--trained palu:8x fsq:8x`` trains methods here, for ``--train-seconds`` each and on one text,
others than codes before a grid is put on; they are called ``palu:8x trained 40 s``. Retrieval tasks are drawn from
Python's prose; the exact cache is asked them, too.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
from fsq_finetune import add_text_options, sequences
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows, join_scores
from strataflux.client.evaluate.dense import dense_reference
from strataflux.client.evaluate.methods.base import KvMethod, Making, budget_bytes, full_bytes, parse_method
from strataflux.client.evaluate.methods.factors import Factors
from strataflux.client.evaluate.methods.fsq import codes_of
from strataflux.client.evaluate.methods.registry import make_method
from strataflux.client.evaluate.methods.sequences import score_method
from strataflux.client.evaluate.methods.tuned import FactorTuning
from strataflux.client.evaluate.retrieval.problem import Haystack
from strataflux.client.evaluate.retrieval.run import retrieve
from strataflux.client.evaluate.retrieval.tasks import Wrapping, draw_problems, parse_tasks
from strataflux.client.evaluate.scoring import Reference
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.prepare.fsq_file import load_codes, weights_digest
from strataflux.client.prepare.fsq_tune import FsqTuning, TuneSettings, Tuning
from strataflux.client.prepare.fsq_tune_model import FrozenModel
from strataflux.client.prepare.fsq_tune_text import Course
from strataflux.client.prepare.source import ModelSource, open_source
from strataflux.client.runtime.models import DecoderWeights

METHODS = [
    "exact",
    *(f"{name}:{ratio}x" for ratio in (8, 16, 4) for name in ("fsq", "palu", "posthoc", "latent", "pyramid-shared")),
    *("fsq+pyramid:16x", "palu:8x:3", "kivi:2", "kivi:4", "turboquant:2", "turboquant:4"),
    *("pyramid:4x", "pyramid:8x", "pyramid:16x", "fsq+pyramid:8x", "fsq+pyramid:32x", "turboquant:3"),
]


@dataclass(frozen=True)
class Bench:
    """What every method is measured on."""

    options: argparse.Namespace
    source: ModelSource
    making: Making
    references: Sequence[Reference]
    problems: Sequence
    rest: Sequence[int]
    """Tokens of the text that are not scored."""

    def measure(self, method: KvMethod) -> dict[str, object]:
        options, weights = self.options, self.making.weights
        began = time.monotonic()
        further = options.window - 1 - options.prompt
        after = join_scores([score_method(weights, method, r, options.prompt) for r in self.references])
        row: dict[str, object] = {"kl": after.kl, "kl_top": after.kl_top, "ppl": after.perplexity}
        if not method.evicts:
            whole = join_scores([score_method(weights, method, r) for r in self.references])
            row |= {"kl_whole": whole.kl, "ppl_whole": whole.perplexity}
        scored = time.monotonic()
        found = retrieve(weights, method, self.problems, self.source.tokenizer(), batch=options.batch)
        row |= {"retrieval": found.mean, "tasks": found.scores}
        full = full_bytes(weights.config)
        for name, where in (("window", (options.prompt, further)), ("prompt", (options.task_tokens, 0))):
            a_token = float(method.bytes_a_token(weights.config, *where))
            row |= {f"bytes_{name}": a_token, f"ratio_{name}": full / a_token}
        if method.name == "exact":
            pairs = list(zip(self.problems, found.said, strict=True))[:: options.task_count]
            row["said"] = [{"task": one.task, "answers": one.answers, "said": said} for one, said in pairs]
        return row | {"score_seconds": scored - began, "retrieval_seconds": time.monotonic() - scored}


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as folder:
        bench = set_up(options, open_source(join(options.model, Path(folder))))
        until = time.monotonic() + options.seconds
        for name, making in asked(bench):
            if time.monotonic() > until:
                print(json.dumps({"method": name, "left_out": f"{options.seconds} s were over"}), flush=True)
                continue
            put(bench, name, making)


def put(bench: Bench, name: str, making: Making) -> None:
    began = time.monotonic()
    row: dict[str, object] = {"method": name}
    try:
        method = make_method(parse_method(name.partition(" ")[0]), making)
        row |= {"facts": method.facts, "fit_seconds": time.monotonic() - began, **bench.measure(method)}
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"
    print(json.dumps(row), flush=True)
    told = {key: row[key] for key in ("kl", "kl_whole", "retrieval", "bytes_window", "error") if key in row}
    print(f"{name}: {told}, {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)


def asked(bench: Bench) -> Iterator[tuple[str, Making]]:
    plain = bench.making
    first, *others = bench.options.methods
    yield first, plain
    digest = weights_digest(bench.source) if bench.options.codes else ""
    for given in bench.options.codes:
        name, _, path = given.partition("=")
        codes = load_codes(Path(path), bench.source.config, digest).to(plain.weights.embedding.device)
        yield f"{name} trained", replace(plain, codes=codes.layers)
    yield from ((name, plain) for name in others)
    if bench.options.trained:
        trainer = Trainer.on(bench)
        yield from ((f"{name} trained {trainer.seconds:g} s", trainer.making(name)) for name in bench.options.trained)


@dataclass(frozen=True)
class Trainer:
    """Trains what is fitted, all on one text for the same time."""

    plain: Making
    course: Course
    held: Sequence[torch.Tensor]
    seconds: float
    batch: int

    @classmethod
    def on(cls, bench: Bench) -> "Trainer":
        options, weights = bench.options, bench.making.weights
        model = FrozenModel(weights)
        made, held = sequences(options, model, bench.source.tokenizer(), bench.rest)
        course = Course(made, model.states, weights.config.hidden)
        return cls(bench.making, course, held.split(8), options.train_seconds, options.train_batch)

    def making(self, name: str) -> Making:
        if not name.startswith("fsq:"):
            return replace(self.plain, tune=self.factors)
        spec = parse_method(name)
        codes = codes_of(spec, self.plain, budget_bytes(self.plain.config, spec))
        return replace(self.plain, codes=self.run(FsqTuning(self.plain.weights, codes, *self.how)))

    def factors(self, factors: Sequence[Factors]) -> Sequence[Factors]:
        return self.run(FactorTuning(self.plain.weights, factors, *self.how))

    @property
    def how(self) -> tuple[TuneSettings, None, Sequence[torch.Tensor]]:
        return TuneSettings(10**6, seconds=self.seconds, check_every=40, recompute=False), None, self.held

    def run(self, tuning: Tuning) -> Sequence:
        tuning.run(self.course.batches(self.batch, 0))
        found = f"{tuning.step} steps, held out {tuning.held_out_before:.4f} -> {tuning.held_out_loss:.4f}"
        print(found, file=sys.stderr, flush=True)
        return tuning.result()


def set_up(options: argparse.Namespace, source: ModelSource) -> Bench:
    weights, tokenizer = DecoderWeights.read(source).to(torch.device(options.device)), source.tokenizer()
    tokens = tokenizer.encode(read_text(options.text)).ids
    windows = cut_windows(options.text, tokens, options.window - 1, options.windows)
    rest = torch.tensor(tokens[options.windows * options.window :])
    given = rest[: min(options.sequences, len(rest) // 512) * 512].view(-1, 512)
    drawn = draw_problems(
        parse_tasks(options.tasks),
        tokenizer,
        Haystack.of(python_prose()),
        tokens=options.task_tokens,
        count=options.task_count,
        seed=options.seed,
        wrapping=wrapping(options, source),
    )
    references = [dense_reference(weights, window) for window in windows]
    about = {"row": "setup", "torch": torch.__version__, "calibration": given.numel(), "problems": len(drawn)}
    print(json.dumps(about | {name: str(value) for name, value in vars(options).items()}), flush=True)
    return Bench(options, source, Making(weights, given), references, drawn, rest.tolist())


def wrapping(options: argparse.Namespace, source: ModelSource) -> Wrapping:
    if not options.chat:
        return Wrapping()
    from strataflux.client.serve.chat import ChatRenderer
    from strataflux.client.serve.schemas import Message

    renderer = ChatRenderer(source.chat_template())
    return Wrapping.by(lambda text: renderer.render([Message("user", text)]))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file, its parts, or a folder")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--codes", nargs="*", default=[], help="METHOD=FILE: trained codes")
    parser.add_argument("--trained", nargs="*", default=[], help="methods to train here")
    parser.add_argument("--train-seconds", type=float, default=40, help="of training, a method")
    parser.add_argument("--train-batch", type=int, default=16)
    add_text_options(parser)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--sequences", type=int, default=128, help="of 512 tokens, to fit on")
    parser.add_argument("--tasks", default="retrieval")
    parser.add_argument("--task-tokens", type=int, default=1024)
    parser.add_argument("--task-count", type=int, default=8)
    parser.add_argument("--chat", action="store_true", help="ask by the model's chat template")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no further method after so long")
    return parser.parse_args()


if __name__ == "__main__":
    main()
