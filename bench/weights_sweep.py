"""Every number of docs/RESULTS.md on weights: bases, bits, budgets, plain and fitted refinement, on one model.

    PYTHONSAFEPATH=1 PYTHONPATH=.importroot python bench/weights_sweep.py \
        --model SmolLM2-135M-Instruct.Q4_1.gguf --text wikitext2-valid.txt --device cuda > rows.jsonl

Prints one JSON object a row. Reads the model and the text and needs neither Numba nor a daemon: refinement is evaluated
as if nothing missed. The unquantized model is the reference of every divergence.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from pack_model import join

from strataflux.client.evaluate.compare import cut_windows, join_scores
from strataflux.client.evaluate.dense import DenseModel, dense_reference, dense_score
from strataflux.client.evaluate.scoring import Reference, Score
from strataflux.client.evaluate.text import python_prose, read_text
from strataflux.client.prepare.bases.awq import AwqSettings, quantize_awq
from strataflux.client.prepare.bases.descent import block_descent
from strataflux.client.prepare.bases.lnq import DAMPING, BlockDescent, quantize_lnq
from strataflux.client.prepare.bases.matrices import CodebookCodes, QuantizedMatrix, power_cost, round_groups
from strataflux.client.prepare.bases.nf4 import Nf4Settings, quantize_nf4
from strataflux.client.prepare.bases.sqllm import quantize_sqllm
from strataflux.client.prepare.calibrate import Calibration, calibration_windows, walk_back, walk_forward
from strataflux.client.prepare.fit_layer import FitRun, fit_layer
from strataflux.client.prepare.source import ModelSource, open_source
from strataflux.client.prepare.states import StateFolder
from strataflux.client.prepare.statistics import LayerStatistics, row_groups
from strataflux.client.runtime.models import SETS, DecoderWeights, LayerWeights, ModelConfig, WeightSource
from strataflux.client.schemes import BUNDLES
from strataflux.kernels.nf4 import NF4_BITS
from strataflux.kernels.residual import round_residual

# The rtn base's search; its module is compiled, so its settings stand here, and a test compares them.
RTN_SHRINK, RTN_EXPONENT = torch.linspace(1.0, 0.7, 7), 2.5
GUIDES = 4


class HeldStates(StateFolder):
    """States in memory, where a disk would take longer than a GPU does."""

    def __init__(self) -> None:
        self.held: dict[str, Tensor] = {}

    def has(self, name: str) -> bool:
        return name in self.held

    def save(self, name: str, tensor: Tensor) -> None:
        self.held[name] = tensor

    def load(self, name: str) -> Tensor:
        return self.held[name]

    def drop(self, name: str) -> None:
        self.held.pop(name, None)


class HeldSource:
    """A model that was read already."""

    def __init__(self, weights: DecoderWeights) -> None:
        self.config, self._weights = weights.config, weights

    def embedding(self) -> Tensor:
        return self._weights.embedding

    def norm(self) -> Tensor:
        return self._weights.norm

    def head(self) -> Tensor:
        return self._weights.head

    def layer(self, index: int) -> LayerWeights:
        return self._weights.layers[index]


@dataclass(frozen=True, order=True)
class Variant:
    """A base with its settings."""

    base: str
    bits: int
    group: int = 0
    """Inputs that share a scale; 0 for codebooks."""
    guides: int = 0
    """Row groups with Hessians of their own, of lnq."""

    @property
    def needs(self) -> str:
        return {"rtn": "nothing", "nf4": "nothing", "awq": "inputs"}.get(self.base, "gradients")


@dataclass
class Model:
    """A variant's layers as they come: what is resident, and what it lacks."""

    exact: dict[int, LayerWeights] = field(default_factory=dict)
    low: dict[int, LayerWeights] = field(default_factory=dict)
    bits: list[tuple[float, int]] = field(default_factory=list)

    def add(self, index: int, exact: LayerWeights, matrices: Mapping[str, QuantizedMatrix]) -> None:
        low = {name: matrix.dequantized() for name, matrix in matrices.items()}
        self.exact[index] = exact
        self.low[index] = replace(exact, projections=low)
        self.bits += [(matrix.bits_per_weight, low[name].numel()) for name, matrix in matrices.items()]

    @property
    def bits_per_weight(self) -> float:
        return sum(bits * count for bits, count in self.bits) / sum(count for _, count in self.bits)

    def weights(self, reference: DecoderWeights) -> DecoderWeights:
        # Embeddings and the head are not quantized beyond float16, in which they are prepared.
        embedding = reference.embedding.half().float()
        head = embedding if reference.config.tied_head else reference.head.half().float()
        layers = [self.low[index] for index in range(reference.config.layers)]
        return DecoderWeights(reference.config, embedding, reference.norm, head, layers)

    def residuals(self, index: int) -> dict[str, Tensor]:
        exact, low = self.exact[index].projections, self.low[index].projections
        return {name: exact[name] - low[name] for name in SETS}


class Quantizer:
    """Quantizes each layer for every variant as calibration tells of it."""

    def __init__(self, config: ModelConfig, variants: Sequence[Variant], damping: float) -> None:
        self.config, self.damping = config, damping
        self.models = {variant: Model() for variant in variants}
        self.seconds: dict[Variant, float] = dict.fromkeys(variants, 0.0)
        self.descend: BlockDescent | None = None

    def __call__(self, index: int, layer: LayerWeights, found: LayerStatistics) -> None:
        device = layer.mlp_norm.device
        if self.descend is None and device.type == "cuda":
            self.descend = block_descent(device)
        starts: dict[int, dict[str, CodebookCodes]] = {}
        for variant, model in self.models.items():
            started = time.monotonic()
            if variant.base == "awq":
                settings = AwqSettings(variant.bits, variant.group)
                made = quantize_awq(f"layers.{index}", self.config, layer, found.inputs, settings)
                model.add(index, made.exact, made.matrices)
            elif variant.base == "rtn":
                model.add(index, layer, {name: _rounded(variant, layer, name) for name in SETS})
            elif variant.base == "nf4":
                normal = Nf4Settings(group=variant.group)
                made_of = {name: quantize_nf4(name, layer.projections[name], normal) for name in SETS}
                model.add(index, layer, made_of)
            else:
                # All codebooks of so many bits begin with these.
                if variant.bits not in starts:
                    starts[variant.bits] = {
                        name: quantize_sqllm(layer.projections[name], found.outputs[name].fisher, variant.bits)
                        for name in SETS
                    }
                begun = starts[variant.bits]
                model.add(index, layer, {name: self._matrix(variant, layer, name, begun, found) for name in SETS})
            if device.type == "cuda":
                torch.cuda.synchronize()
            self.seconds[variant] += time.monotonic() - started

    def _matrix(
        self,
        variant: Variant,
        layer: LayerWeights,
        name: str,
        begun: Mapping[str, CodebookCodes],
        found: LayerStatistics,
    ) -> QuantizedMatrix:
        if variant.base == "sqllm":
            return begun[name]
        weight, hessians = layer.projections[name], found.outputs[name].hessians
        groups = row_groups(self.config, name, GUIDES)
        if variant.guides != GUIDES:
            rows = torch.tensor([part.stop - part.start for part in groups], device=weight.device)
            hessians = (hessians * rows[:, None, None]).unflatten(0, (-1, GUIDES)).sum(1)  # type: ignore[no-untyped-call]
            groups = row_groups(self.config, name, 1)
        return quantize_lnq(weight, begun[name], hessians, groups, self.damping, self.descend)


def _rounded(variant: Variant, layer: LayerWeights, name: str) -> QuantizedMatrix:
    weight = layer.projections[name]
    return round_groups(name, weight, variant.bits, variant.group, RTN_SHRINK, power_cost(RTN_EXPONENT))


def quantize_all(
    source: WeightSource, calibration: Calibration, variants: Sequence[Variant], damping: float
) -> dict[Variant, Model]:
    quantizer = Quantizer(source.config, variants, damping)
    if any(variant.needs == "gradients" for variant in variants):
        walk_forward(source, calibration, None, lambda: None, keep=True)
        walk_back(source, calibration, quantizer)
    elif any(variant.needs == "inputs" for variant in variants):
        walk_forward(source, calibration, quantizer, lambda: None, keep=False)
    else:
        for index in range(source.config.layers):
            quantizer(index, source.layer(index).to(calibration.device), LayerStatistics({}, {}))
    for variant, seconds in quantizer.seconds.items():
        print(f"{variant}: quantized in {seconds:.1f} s", file=sys.stderr)
    return quantizer.models


Refinement = list[dict[str, Tensor]]


def bundled(k: int) -> int:
    """Neurons per 1,024 whose bundles are as many bytes as ``k`` channels: a bundle is 4/3 of its share of them."""
    return round(3 * k / 4)


def fitted(
    model: Model, weights: DecoderWeights, calibration: Calibration, plain: Refinement, budgets: Sequence[int]
) -> dict[tuple[int, str], Refinement]:
    """Refinement values by budget and MLP scheme, as they are stored: fitted, then rounded to 4 bits."""
    config = weights.config
    wanted = {**dict.fromkeys(SETS, budgets), BUNDLES: [bundled(k) for k in budgets]}
    run = FitRun(config, calibration.turns(config), wanted, dict.fromkeys(SETS, 32))
    hidden = weights.embedding[calibration.tokens.to(calibration.device)]
    values: dict[tuple[int, str], Refinement] = {(k, mlp): [] for k in budgets for mlp in ("channels", "bundles")}
    chosen: dict[str, int] = {}
    for index in range(config.layers):
        residuals = model.residuals(index)
        hidden, moments = fit_layer(run, model.low[index], plain[index], hidden)
        for k in budgets:
            fits = {name: moments.fit(name, k, residuals[name]) for name in SETS}
            fits[BUNDLES] = moments.fit(BUNDLES, bundled(k), residuals["down"])
            rounded = {name: round_residual(fit.values) for name, fit in fits.items()}
            values[k, "channels"].append({name: rounded[name] for name in SETS})
            # Rows of bundles see all of their input: the residual is best for them.
            own = {"gate_up": plain[index]["gate_up"], "down": rounded[BUNDLES]}
            values[k, "bundles"].append({name: rounded[name] for name in ("qkv", "o")} | own)
            for fit in fits.values():
                chosen[str(fit.multiplier)] = chosen.get(str(fit.multiplier), 0) + 1
    print(f"chosen multipliers of lambda: {chosen}", file=sys.stderr)
    return values


def candidates(
    model: Model, weights: DecoderWeights, calibration: Calibration, arguments: argparse.Namespace
) -> Iterator[tuple[dict[str, object], DenseModel]]:
    budgets, layers = arguments.k, range(weights.config.layers)
    plain = [{name: round_residual(residual) for name, residual in model.residuals(i).items()} for i in layers]
    copies = [round_residual(model.exact[index].projections["down"].T).T for index in layers]
    row: dict[str, object] = {"fit": False, "choice": "largest"}
    yield row | {"k": 0}, DenseModel(weights)
    for k in (*budgets, 1024):
        yield row | {"k": k}, DenseModel(weights, plain, dict.fromkeys(SETS, k))
    every = dict.fromkeys(SETS, 32)
    yield row | {"k": 32, "choice": "random"}, DenseModel(weights, plain, every, "random")
    for k in budgets:
        neurons = dict.fromkeys(SETS, k) | {"down": bundled(k)}
        yield row | {"k": k, "mlp": "bundles"}, DenseModel(weights, plain, neurons, down_copies=copies)
    for blocks in () if arguments.no_shifts else (0.5, 1.0, 2.0):
        shifted = DenseModel(weights, plain, every, shift=dict.fromkeys(SETS, blocks))
        yield row | {"k": 32, "shift": blocks}, shifted
    if not arguments.no_fit:
        for (k, mlp), values in fitted(model, weights, calibration, plain, budgets).items():
            down, copied = (bundled(k), copies) if mlp == "bundles" else (k, ())
            budget = dict.fromkeys(SETS, k) | {"down": down}
            yield row | {"k": k, "fit": True, "mlp": mlp}, DenseModel(weights, values, budget, down_copies=copied)


def references(weights: DecoderWeights, windows: Sequence[Sequence[int]]) -> Iterator[Reference]:
    for window in windows:
        yield dense_reference(weights, window)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", required=True, help="a .gguf file, its parts, or a folder")
    parser.add_argument("--text", type=Path, required=True, help="what is scored")
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=2048, help="tokens a window; all but the first are scored")
    parser.add_argument("--calibration", default="python", help="python (its own help), rest (of the text), or a file")
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--bases", nargs="+", default=["rtn", "awq", "sqllm", "lnq", "nf4"])
    parser.add_argument("--bits", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--groups", type=int, nargs="+", default=[64])
    parser.add_argument("--guides", type=int, nargs="+", default=[1, GUIDES])
    parser.add_argument("--damping", type=float, default=DAMPING, help="of lnq's Hessians")
    parser.add_argument("--k", type=int, nargs="+", default=[16, 32, 64])
    parser.add_argument("--no-fit", action="store_true")
    parser.add_argument("--no-shifts", action="store_true", help="leave out fetch lead and lag")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def variants_of(arguments: argparse.Namespace) -> list[Variant]:
    found = []
    for bits in arguments.bits:
        for base in arguments.bases:
            # With a scale a group, two bits are too few to begin with.
            if (base in ("rtn", "awq") and bits > 2) or (base == "nf4" and bits == NF4_BITS):
                found += [Variant(base, bits, group) for group in arguments.groups]
            elif base == "sqllm":
                found.append(Variant(base, bits))
            elif base == "lnq":
                found += [Variant(base, bits, guides=guides) for guides in arguments.guides]
    return found


def calibration_tokens(arguments: argparse.Namespace, source: ModelSource, used: int) -> Tensor:
    tokenizer = source.tokenizer()
    if arguments.calibration == "rest":
        tokens = torch.tensor(tokenizer.encode(read_text(arguments.text)).ids[used:])
        return tokens[: arguments.sequences * arguments.length].view(-1, arguments.length)
    text = python_prose() if arguments.calibration == "python" else read_text(Path(arguments.calibration))
    return calibration_windows(arguments.calibration, tokenizer, text, arguments.sequences, arguments.length)


def main() -> None:
    arguments = parse()
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as name:
        source = open_source(join(arguments.model, Path(name)))
        ids = source.tokenizer().encode(read_text(arguments.text)).ids
        windows = cut_windows(arguments.text, ids, arguments.window - 1, arguments.windows)
        tokens = calibration_tokens(arguments, source, arguments.window * arguments.windows)
        calibration = Calibration(tokens, HeldStates(), device, guide_groups=GUIDES)
        reference = DecoderWeights.read(source).to(device)
        models = quantize_all(HeldSource(reference), calibration, variants_of(arguments), arguments.damping)
        for variant, model in models.items():
            report(variant, model, reference, windows, calibration, arguments)
            model.low.clear(), model.exact.clear()


def report(
    variant: Variant,
    model: Model,
    reference: DecoderWeights,
    windows: Sequence[Sequence[int]],
    calibration: Calibration,
    arguments: argparse.Namespace,
) -> None:
    started = time.monotonic()
    tried = list(candidates(model, model.weights(reference), calibration, arguments))
    scores: list[list[Score]] = [[] for _ in tried]
    exact: list[Score] = []
    for window in references(reference, windows):
        exact.append(window.score)
        for found, (_, candidate) in zip(scores, tried, strict=True):
            found.append(dense_score(candidate, window))
    settings = {"base": variant.base, "bits": variant.bits, "group": variant.group, "guides": variant.guides}
    settings |= {"mlp": "channels", "shift": 0.0}
    for (row, _), found in zip(tried, scores, strict=True):
        score = join_scores(found)
        numbers = {"kl": score.kl, "kl_top_1024": score.kl_top, "ppl": score.perplexity}
        rest = {
            "reference_ppl": join_scores(exact).perplexity,
            "bits_per_weight": model.bits_per_weight,
            "calibration": arguments.calibration,
            "damping": arguments.damping,
            "calibration_tokens": calibration.tokens.numel(),
            "tokens": score.tokens,
        }
        print(json.dumps(settings | row | numbers | rest), flush=True)
    print(f"{variant}: refined and scored in {time.monotonic() - started:.1f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
