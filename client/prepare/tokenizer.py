"""Build a tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizer the file names."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Digits, PreTokenizer, Sequence, Split
from tokenizers.processors import TemplateProcessing

from strataflux.client.prepare.errors import DamagedModel, UnsupportedModel

__all__ = ["tokenizer_from_gguf"]

_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The same, but for digits, which stand alone.
_PATTERNS = {"llama-bpe": _LLAMA3_PATTERN, "qwen2": _LLAMA3_PATTERN.replace("{1,3}", "")}


def tokenizer_from_gguf(path: object, metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that ``metadata`` (keys ``tokenizer.ggml.*``) of the file ``path`` describes.

    Raises:
        UnsupportedModel: it is not byte-level BPE, or names a pre-tokenizer not known here.
        DamagedModel: tokens or merges are missing.
    """
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2":
        raise UnsupportedModel(
            path, f"tokenizer.ggml.model = {kind!r}", "'gpt2' (byte-level BPE)", "use the Hugging Face folder"
        )
    tokens, merges = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.merges")
    if not tokens or merges is None:
        raise DamagedModel(path, "no tokens or merges", "tokenizer.ggml.tokens and .merges", "convert it again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(path, pre)
    tokenizer.decoder = ByteLevelDecoder()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    tokenizer.add_special_tokens(_of_kind(tokens, kinds, _CONTROL))
    tokenizer.add_tokens(_of_kind(tokens, kinds, _USER_DEFINED))
    # Llama 3's files leave the flag out and mean it to be set.
    if metadata.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        first = int(metadata["tokenizer.ggml.bos_token_id"])
        tokenizer.post_processor = TemplateProcessing(
            single=f"{tokens[first]} $A", special_tokens=[(tokens[first], first)]
        )
    return tokenizer


def _pre_tokenizer(path: object, name: str) -> PreTokenizer:
    byte_level = ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return byte_level
    if name == "smollm":
        return Sequence([Digits(individual_digits=True), byte_level])
    if name in _PATTERNS:
        split = Split(Regex(_PATTERNS[name]), behavior="isolated")
        return Sequence([split, ByteLevel(add_prefix_space=False, use_regex=False)])
    raise UnsupportedModel(
        path,
        f"tokenizer.ggml.pre = {name!r}",
        "'gpt-2', 'smollm', 'llama-bpe' or 'qwen2'",
        "use the Hugging Face folder of this model",
    )


def _of_kind(tokens: list[str], kinds: list[int], kind: int) -> list[AddedToken]:
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, found in zip(tokens, kinds, strict=False)
        if found == kind
    ]
