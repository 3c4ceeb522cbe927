"""The model class ``strataflux`` of lm-evaluation-harness: tasks scored with refined decode steps.

Every token, of a prompt too, is a decode step, as ``strataflux eval`` scores: a pass over many tokens at once would be
the low-bit model's alone. Importing this module registers the class, and running it is the harness's own command with
the class registered::

    python -m strataflux.client.lm_eval run --model strataflux --model_args prepared=prepared/ --tasks arc_easy
"""

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from tqdm import tqdm

from strataflux.client.cli.kv_options import parse_kv
from strataflux.client.cli.options import parse_miss
from strataflux.client.errors import DaemonUnavailableError, MisuseError, RefusedError
from strataflux.client.kv_options import KvOptions
from strataflux.client.prepare.chat import ChatTemplate, read_chat
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.refined import RefinedModel
from strataflux.client.runtime.decoder import ContextFull, Decoder
from strataflux.client.runtime.generation import (
    Advance,
    Sampling,
    generate_tokens,
    special_tokens,
    text_pieces,
)
from strataflux.client.runtime.models import DecoderWeights

__all__ = ["StrataFluxLM"]

_LOG: Final = logging.getLogger(__name__)
_LENGTH: Final = 2048
"""Tokens of a sequence at most if nothing is said; less where the model has less."""

_DEVICES: Final = (None, "cpu", "cuda:0")
"""The CPU, and what the harness's command passes to every model class unless told otherwise."""

_Scored = tuple[float, bool]
"""The log-probability of a continuation, and whether greedy decoding would have given it."""


@register_model("strataflux")
class StrataFluxLM(TemplateLM):
    """A prepared model, refined if a daemon serves it."""

    def __init__(
        self,
        prepared: str,
        runtime_dir: str | None = None,
        k: int | None = None,
        miss: str = "skip",
        kv: str = "off",
        refine_kv: str = "4/4",
        max_length: int | None = None,
        require_daemon: bool = False,
        batch_size: int | str = 1,
        max_batch_size: int | None = None,
        device: str | None = None,
    ) -> None:
        """Attach to the daemon that serves ``prepared``; where none does, say so once and go on in low bits.

        Args:
            prepared: the folder that ``strataflux prepare`` wrote.
            runtime_dir: where the daemon's sockets are; None looks in the usual places.
            k: refined channels per 1,024; None takes the prepared model's.
            miss: what to do about absent records, ``skip``, ``wait:MS`` or ``budget:P%``.
            kv: bits of cached keys and values, such as ``2/2``, or ``off``.
            refine_kv: bits that refine those.
            max_length: tokens of a sequence; None: 2,048, or what the model has if that is less.
            require_daemon: fail if no daemon serves this model.
            batch_size: the harness's; sequences are decoded one at a time.
            max_batch_size: likewise.
            device: the harness's; ``cpu``, and ``cuda:0``, which its command says when nothing was said.

        Raises:
            MisuseError: an argument cannot be.
            InputError: ``prepared`` is damaged.
            DaemonUnavailableError, RefusedError: no daemon serves this model, and one is required.
        """
        super().__init__()
        _require_one_at_a_time(batch_size, max_batch_size, device)
        self._prepared = open_prepared(Path(prepared))
        most = self._prepared.config.context
        self.max_length = min(most, _LENGTH) if max_length is None else int(max_length)
        if not 1 < self.max_length <= most:
            raise MisuseError("max_length", f"{max_length} tokens", f"2 to {most}, as the model has", "change it")
        self._tokenizer = self._prepared.tokenizer()
        self._chat = read_chat(self._prepared.folder)
        self._special = special_tokens(self._tokenizer)
        settings = parse_kv(kv, refine_kv, 4, "1/128", False)
        arguments = (None if runtime_dir is None else Path(runtime_dir), k, miss, settings, require_daemon)
        self._sequence = _Sequence(_open(self._prepared, self.max_length, *arguments))

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text; it also stands where a text without a beginning would need one.

        Raises:
            MisuseError: the tokenizer has no control tokens.
        """
        named = None if self._chat is None else self._tokenizer.token_to_id(self._chat.eos_token)
        if named is None and not self._special:
            raise MisuseError("tokenizer", "no control tokens", "one that ends a text", "prepare a whole model")
        return min(self._special) if named is None else int(named)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_named: Any) -> list[int]:
        """Tokens of ``string``, with special ones where the model's own tokenizer adds them."""
        ids: list[int] = self._tokenizer.encode(string, add_special_tokens=add_special_tokens is not False).ids
        return ids

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_named: Any
    ) -> list[_Scored]:
        results = []
        for texts, context, continuation in tqdm(requests, disable=disable_tqdm, desc="Scoring"):
            results.append(self._score(context, continuation))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, results[-1])
        return results

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of whole texts, cut into windows of the longest sequence."""
        sums = []
        for (text,) in (request.args for request in tqdm(requests, disable=disable_tqdm, desc="Scoring")):
            tokens = self.tok_encode(text)
            windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
            sums.append(sum(self._score(*make_disjoint_window(window))[0] for window in windows))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Texts that go on from contexts, up to a stopping sequence, a control token, or ``max_gen_toks``."""
        texts = []
        for context, named in (request.args for request in tqdm(requests, disable=disable_tqdm, desc="Generating")):
            texts.append(self._generate(context, normalize_gen_kwargs(named)))
            self.cache_hook.add_partial("generate_until", (context, named), texts[-1])
        return texts

    @property
    def tokenizer_name(self) -> str:
        """What the harness tells cached prompts apart by."""
        return f"strataflux-{self._prepared.manifest.digest[:16]}"

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The model's own template; empty if it has none or none is wanted."""
        return self._chat.template if self._chat is not None and chat_template else ""

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as the model wants it written.

        Raises:
            MisuseError: the model has no template, or an answer was begun, which templates cannot say.
        """
        if self._chat is None or not add_generation_prompt:
            found = "a model without a chat template" if self._chat is None else "an answer that was begun"
            raise MisuseError("chat template", found, "a conversation that ends before an answer", "do without")
        return _render(self._chat, chat_history)

    def close(self) -> None:
        """Leave the daemon."""
        if isinstance(self._sequence.model, RefinedModel):
            self._sequence.model.close()

    def _score(self, context: list[int], continuation: list[int]) -> _Scored:
        if len(continuation) > self.max_length:
            found, most = f"a continuation of {len(continuation)} tokens", f"at most {self.max_length}"
            raise ContextFull("lm_eval", found, most, "raise max_length")
        tokens = (context + continuation)[-self.max_length - 1 :]
        rows = torch.stack(list(self._sequence.predict(tokens[:-1], len(continuation))))
        chosen = torch.tensor(continuation)
        total = torch.log_softmax(rows, -1).gather(1, chosen[:, None]).sum()
        return float(total), bool((rows.argmax(-1) == chosen).all())

    def _generate(self, context: str, named: Any) -> str:
        count = min(int(named["max_gen_toks"]), self.max_length - 1)
        prompt = self.tok_encode(context)[count - self.max_length :] or [self.prefix_token_id]
        sampling = Sampling(float(named.get("temperature", 0.0)), float(named.get("top_p", 1.0)))
        stops = handle_stop_sequences(named["until"], eos=None)
        tokens = generate_tokens(self._sequence.fresh(), prompt, count, sampling, self._special)
        text = ""
        for piece in text_pieces(self._tokenizer, tokens):
            text += piece
            if found := [text.index(stop) for stop in stops if stop and stop in text]:
                return text[: min(found)]
        return text


class _Sequence:
    """One sequence, which goes back no further than it has to."""

    def __init__(self, model: RefinedModel | Decoder) -> None:
        # fixed after construction
        self.model = model
        # changed by steps
        self._taken: list[int] = []

    def predict(self, tokens: Sequence[int], last: int) -> Iterator[Tensor]:
        """Logits [vocabulary] after each of the ``last`` last of ``tokens``, at least one."""
        asked = len(tokens) - last
        same = next((at for at, pair in enumerate(zip(self._taken, tokens, strict=False)) if pair[0] != pair[1]), None)
        kept = min(len(self._taken), len(tokens)) if same is None else same
        self._go_back(min(kept, asked))
        for at in range(len(self._taken), len(tokens)):
            logits = self._step(tokens[at])
            if at >= asked:
                yield logits

    def fresh(self) -> Advance:
        """Steps from the beginning."""
        self._go_back(0)
        return self._step

    def _step(self, token: int) -> Tensor:
        logits = self.model.step(token)
        self._taken.append(token)
        return logits

    def _go_back(self, position: int) -> None:
        try:
            self.model.reset(position)
        except MisuseError:  # a low-bit cache cannot go back into what it encoded
            position = 0
            self.model.reset(0)
        del self._taken[position:]


def _open(
    prepared: PreparedModel,
    context: int,
    runtime_dir: Path | None,
    k: int | None,
    miss: str,
    kv: KvOptions | None,
    required: bool,
) -> RefinedModel | Decoder:
    weights = DecoderWeights.read(prepared)
    try:
        return RefinedModel.attach(
            prepared, weights, context=context, runtime_dir=runtime_dir, k=k, miss=parse_miss(miss), kv=kv
        )
    except (DaemonUnavailableError, RefusedError) as error:
        if required:
            raise
        _LOG.warning("not refined: %s: %s; %s", error.subject, error.found, error.remedy)
        return Decoder(weights, context)


def _require_one_at_a_time(batch_size: int | str, most: int | None, device: str | None) -> None:
    if str(batch_size) not in ("1", "auto") or most not in (None, 1):
        raise MisuseError("batch_size", f"{batch_size}", "1: sequences are decoded one at a time", "leave it out")
    if device not in _DEVICES:
        raise MisuseError("device", device, "cpu", "leave it out")


def _render(chat: ChatTemplate, history: list[dict[str, str]]) -> str:
    from strataflux.client.serve.chat import ChatRenderer
    from strataflux.client.serve.schemas import Message

    return ChatRenderer(chat).render([Message(turn["role"], turn["content"]) for turn in history])


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
