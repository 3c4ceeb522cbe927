"""``strataflux eval --kv METHOD``: what a way of keeping keys and values costs, against the same weights without it.

Whole windows at once by default; ``--sequential`` decodes a cache of codes token by token, which is the same function.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from strataflux.client.cli.output import Output, print_note, progress
from strataflux.client.errors import InputError, MisuseError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from torch import Tensor

    from strataflux.client.evaluate.methods.base import KvMethod, MethodSpec
    from strataflux.client.evaluate.scoring import Reference, Score
    from strataflux.client.prepare.fsq_file import FsqCodes
    from strataflux.client.prepare.prepared import PreparedModel
    from strataflux.client.prepare.source import ModelSource
    from strataflux.client.runtime.models import DecoderWeights

__all__ = [
    "Evaluated",
    "MethodCommand",
    "fitted_method",
    "given_text",
    "is_method",
    "method_windows",
    "open_evaluated",
    "run_eval_method",
]

_SCORED_AFTER_EVICTION = 256
_SEQUENCE = 512


@dataclass(frozen=True)
class MethodCommand:
    """What was asked for."""

    model: Path
    spec: str
    text: Path | None
    reference: Path | None
    calibration: Path | None
    calibration_tokens: int
    context: int
    """Tokens of a window; all but the first are scored, or the last 256 where tokens are evicted before."""
    windows: int
    sequential: bool
    device: str


def is_method(kv: str) -> bool:
    """Whether ``--kv`` names a method, and not widths such as ``2/2``, or ``off``."""
    return kv != "off" and "/" not in kv


@dataclass(frozen=True)
class Evaluated:
    """The weights under which a method is judged, on their device, and codes that were made over them."""

    source: "PreparedModel | ModelSource"
    weights: "DecoderWeights"
    tokenizer: "Tokenizer"
    codes: "FsqCodes | None"


def run_eval_method(output: Output, command: MethodCommand) -> None:
    """Evaluate and show.

    Raises:
        StrataFluxError: what stood in the way.
    """
    from strataflux.client.evaluate.compare import join_scores
    from strataflux.client.evaluate.dense import dense_reference
    from strataflux.client.evaluate.methods.base import parse_method
    from strataflux.client.evaluate.methods.registry import check_method

    spec = parse_method(command.spec)
    check_method(spec)
    if command.sequential and spec.name != "fsq":
        raise MisuseError("--sequential", f"--kv {spec}", "--kv fsq:RATIOx", "only codes have a cache of their own")
    with progress("reading the model"):
        found = open_evaluated(command.model, str(spec), command.reference, command.device)
        windows, rest = method_windows(command, found.tokenizer)
    method = fitted_method(command, spec, found, rest)
    scores: list[tuple[Reference, Score]] = []
    with progress("scoring windows", len(windows)) as advance:
        for window in windows:
            reference = dense_reference(found.weights, window)
            scores.append(_scored(command, found, method, reference))
            advance()
    exact, kept = (join_scores(part) for part in zip(*((one.score, two) for one, two in scores), strict=True))
    _show(output, command, found, method, exact, kept)


def fitted_method(command: MethodCommand, spec: "MethodSpec", found: Evaluated, rest: Sequence[int]) -> "KvMethod":
    """The method that ``spec`` names, made of the model's codes, or of --calibration or ``rest``, tokens of the text.

    Raises:
        MisuseError, InputError: there is no such method, or too little to fit on.
    """
    from strataflux.client.evaluate.methods.base import Making
    from strataflux.client.evaluate.methods.registry import check_method, make_method

    given = None
    if check_method(spec).fitted and found.codes is None:
        given = given_text(command, found.tokenizer, rest)
        if spec.name == "fsq":
            print_note(f"{command.model} has no codes of {spec}: converted here; `strataflux prepare --fsq` keeps them")
    with progress("fitting layers", found.weights.config.layers) as advance:
        codes = None if found.codes is None else found.codes.layers
        return make_method(spec, Making(found.weights, given, codes, advance))


def open_evaluated(model: Path, name: str, reference: Path | None, device: str) -> Evaluated:
    """A prepared model's low-bit weights, or those of a model as it is published, and its codes called ``name`` (such
    as ``fsq:16x``), if there are any; codes made over the original of a prepared model are judged over that.

    Raises:
        InputError: there is no such model, or codes are those of another.
    """
    import torch

    from strataflux.client.prepare.fsq_file import load_codes, read_about, weights_digest
    from strataflux.client.prepare.prepared import MANIFEST, open_prepared
    from strataflux.client.prepare.source import open_source
    from strataflux.client.runtime.models import DecoderWeights

    prepared = open_prepared(model) if (model / MANIFEST).exists() else None
    source: PreparedModel | ModelSource = prepared or open_source(model)
    codes = None
    if prepared is not None and (path := prepared.codes.get(name.removeprefix("fsq:"))) is not None:
        if read_about(path).weights == "original":
            source = open_source(_original(prepared, reference))
        codes = load_codes(path, prepared.config, weights_digest(source)).to(torch.device(device))
    weights = DecoderWeights.read(source).to(torch.device(device))
    return Evaluated(source, weights, source.tokenizer(), codes)


def _original(prepared: "PreparedModel", reference: Path | None) -> Path:
    origin = reference or (Path(prepared.manifest.origin) if prepared.manifest.origin else None)
    if origin is None or not origin.exists():
        found = f"no original model at {origin}"
        raise InputError(prepared.folder, found, "the model its codes were made over", "name it by --reference")
    return origin


def method_windows(command: MethodCommand, tokenizer: "Tokenizer") -> tuple[list[list[int]], list[int]]:
    """Windows to score, and the tokens after them.

    Raises:
        InputError: the text is too short.
    """
    from strataflux.client.evaluate.compare import cut_windows
    from strataflux.client.evaluate.text import python_prose, read_text

    words = python_prose() if command.text is None else read_text(command.text)
    subject = "pydoc_data.topics" if command.text is None else command.text
    tokens = tokenizer.encode(words).ids
    windows = cut_windows(subject, tokens, command.context - 1, command.windows)
    return windows, tokens[command.windows * command.context :]


def given_text(command: MethodCommand, tokenizer: "Tokenizer", rest: Sequence[int]) -> "Tensor":
    """Text to fit on that is not scored: --calibration, or what is left of the text, or Python's prose beside it.

    Raises:
        InputError: it is too short.
    """
    import torch

    from strataflux.client.evaluate.text import python_prose, read_text

    if command.calibration is not None:
        rest = tokenizer.encode(read_text(command.calibration)).ids
    elif command.text is not None and len(rest) < command.calibration_tokens:
        rest = tokenizer.encode(python_prose()).ids
    sequences = command.calibration_tokens // _SEQUENCE
    if len(rest) < sequences * _SEQUENCE:
        found, expected = f"{len(rest)} tokens that are not scored", f"{sequences * _SEQUENCE} to fit on"
        raise InputError("calibration", found, expected, "give a longer --calibration, or lower --calibration-tokens")
    return torch.tensor(rest[: sequences * _SEQUENCE]).view(sequences, _SEQUENCE)


def _scored(
    command: MethodCommand, found: Evaluated, method: "KvMethod", reference: "Reference"
) -> "tuple[Reference, Score]":
    from strataflux.client.evaluate.methods.sequences import after_prompt, score_method

    if command.sequential:
        return reference, _token_by_token(command, found, method, reference)
    prompt = _prompt(command, method)
    return after_prompt(reference, prompt), score_method(found.weights, method, reference, prompt)


def _prompt(command: MethodCommand, method: "KvMethod") -> int:
    """Tokens before those that are scored: all, for methods that keep every token."""
    return max(1, command.context - 1 - _SCORED_AFTER_EVICTION) if method.evicts else 0


def _token_by_token(command: MethodCommand, found: Evaluated, method: "KvMethod", reference: "Reference") -> "Score":
    from strataflux.client.evaluate.scoring import score
    from strataflux.client.runtime.fsq_decoder import FsqDecoder
    from strataflux.client.runtime.threads import decoding_threads

    if found.codes is None:
        raise MisuseError("--sequential", "a model without codes", "prepared codes", "make some: prepare --fsq")
    decoder = FsqDecoder(found.weights, found.codes.layers, command.context)
    count = len(reference.tokens) - 1
    with decoding_threads(), progress("decoding tokens", count) as advance:
        made = score(decoder.step, reference, advance)
    # What is no code lies in float32 here, and is counted as float16.
    expected, held = method.nbytes(0, count), decoder.codes.nbytes + decoder.codes.exact_nbytes // 2
    assert held == expected, (held, expected)
    return made


def _show(
    output: Output, command: MethodCommand, found: Evaluated, method: "KvMethod", exact: "Score", kept: "Score"
) -> None:
    prompt, config = _prompt(command, method), found.weights.config
    further = command.context - 1 - prompt
    a_token = float(method.bytes_a_token(config, prompt, further))
    ratio = 4 * config.kv_heads * config.head_dim / a_token
    output.print(f"exact      perplexity {exact.perplexity:.3f}")
    output.print(f"{method.name:9}  perplexity {kept.perplexity:.3f}  KL {kept.kl:.5f}")
    output.print(f"{a_token:.1f} bytes a token and layer, {ratio:.1f} times fewer than float16")
    output.result(
        {
            "kv": {
                "method": method.name,
                "kl": kept.kl,
                "kl_top_1024": kept.kl_top,
                "ppl": kept.perplexity,
                "exact_ppl": exact.perplexity,
                "bytes_a_token_and_layer": a_token,
                "bytes": method.nbytes(prompt, further),
                "ratio": ratio,
                "facts": method.facts,
                "prepared": found.codes is not None,
                "sequential": command.sequential,
            },
            "weights": "base" if hasattr(found.source, "manifest") else "original",
            "context": command.context,
            "prompt": prompt,
            "tokens": further,
            "windows": command.windows,
        }
    )
