"""Codes of a model on disk: one safetensors file that says in its header what it was made from and how.

| tensor                  | content                                                        |
|-------------------------|----------------------------------------------------------------|
| `layers.I.bits`         | [width] uint8, bits of each coordinate, the widest first       |
| `layers.I.encoder`      | [width, hidden] float16                                        |
| `layers.I.encoder_bias` | [width] float32                                                |
| `layers.I.decoder`      | [keys and values, width] float16                               |
| `layers.I.decoder_bias` | [keys and values] float32                                      |

and, of codes in two tiers, format 2,

| `layers.I.resident_bits`  | [width] uint8, of each coordinate; 0 for those that are not resident    |
| `layers.I.coarse_decoder` | [keys and values, resident width] float16, of the resident levels       |
| `layers.I.coarse_bias`    | [keys and values] float32                                               |

Layers that attend to a window of positions have none. The header has one entry of metadata, ``fsq``: :class:`FsqAbout`
as JSON. Codes belong to the weights they were made of, which are told by a digest; over others they are refused.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.tensor_file import TensorDigest, TensorFileWriter, TensorShape
from strataflux.client.runtime.models import SETS, ModelConfig, WeightSource
from strataflux.kernels.fsq import FsqGrid, FsqLayer
from strataflux.kernels.fsq_nested import FsqTier, NestedGrid
from strataflux.proto.store_writer import sync_folder

__all__ = ["FsqAbout", "FsqCodes", "load_codes", "read_about", "save_codes", "weights_digest"]

_FORMAT, _FORMAT_TIERS = 1, 2
_ENTRY = "fsq"
_REMEDY = "make the codes again with `strataflux prepare --fsq`"
_PARTS = ("encoder", "encoder_bias", "decoder", "decoder_bias")
_TIER_PARTS = ("coarse_decoder", "coarse_bias")


@dataclass(frozen=True)
class FsqAbout:
    """What a file of codes says of itself."""

    nbytes: int
    """Of a token's code, a layer."""
    levels: int
    """Of each coordinate; 0: given out by direction."""
    bound: str
    weights: str
    """``base``: a prepared model's low-bit weights; ``original``: the model as it was published."""
    weights_sha256: str
    """Of the weights, as :func:`weights_digest`."""
    rank: int = 0
    """Directions that the keys and values of the poorest layer have; coordinates beyond repeat some."""
    key_errors: tuple[float, ...] = ()
    """Of the closed form, a coded layer each, relative and about the mean; on the text that it was fitted to."""
    value_errors: tuple[float, ...] = ()
    tuned_seconds: float = 0.0
    """Of training after the closed form."""
    held_out: tuple[float, ...] = ()
    """Loss on held-out text of the tuning text before and after training, in nats a token: the divergence; of tiers
    that with a sixteenth of the tokens whole, and a quarter of the resident tier's.
    """
    resident_nbytes: int = 0
    """Of a token's code, of codes in two tiers; 0: there is one."""


@dataclass(frozen=True)
class FsqCodes:
    """Codes as loaded: one for each layer that attends to all positions, and what they were made from."""

    about: FsqAbout
    layers: tuple[FsqLayer, ...]
    """Whole codes."""
    tiers: tuple[FsqTier, ...] = ()
    """The same in two tiers, if they were saved so."""

    @property
    def nbytes(self) -> int:
        """Bytes of a token's codes, all layers."""
        return sum(layer.grid.nbytes for layer in self.layers)

    @property
    def width(self) -> int:
        """Coordinates of the widest layer."""
        return max(layer.grid.width for layer in self.layers)

    def to(self, device: torch.device) -> "FsqCodes":
        """The same codes on ``device``."""
        if self.tiers:
            tiers = tuple(tier.to(device) for tier in self.tiers)
            return FsqCodes(self.about, tuple(tier.whole for tier in tiers), tiers)
        return FsqCodes(self.about, tuple(layer.to(device) for layer in self.layers))


def weights_digest(source: WeightSource) -> str:
    """SHA-256 over everything that decides what a model computes without refinement; reads all weights."""
    if isinstance(source, PreparedModel):
        return source.weights_sha256
    digest = TensorDigest()
    digest.add("embedding", source.embedding())
    digest.add("norm", source.norm())
    if not source.config.tied_head:
        digest.add("head", source.head())
    if source.config.windows:
        digest.add("windows", torch.tensor(source.config.windows, dtype=torch.float32))
    for index in range(source.config.layers):
        layer = source.layer(index)
        own = {"attention_norm": layer.attention_norm, "mlp_norm": layer.mlp_norm, "query_norm": layer.query_norm}
        own |= {"key_norm": layer.key_norm, "qkv_bias": layer.qkv_bias}
        own |= {name: layer.projections[name] for name in SETS}
        for name, tensor in own.items():
            if tensor is not None:
                digest.add(f"layers.{index}.{name}", tensor)
    return digest.hexdigest()


def save_codes(
    path: Path, layers: Sequence[FsqLayer] | Sequence[FsqTier], about: FsqAbout, places: Sequence[int] | None = None
) -> None:
    """Write ``layers`` to ``path``; it is there whole or not at all.

    Args:
        path: of the file.
        layers: one for each of the model's that attends to all positions.
        about: what the header says; with ``resident_nbytes`` if ``layers`` are in two tiers.
        places: which of the model's layers these are; None: all.
    """
    held = dict(zip(range(len(layers)) if places is None else places, map(_tensors, layers), strict=True))
    shapes: dict[str, TensorShape] = {
        f"layers.{index}.{name}": (tensor.dtype, tuple(tensor.shape))
        for index, tensors in held.items()
        for name, tensor in tensors.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.unlink(missing_ok=True)
    header = {_ENTRY: json.dumps(_told(about), sort_keys=True)}
    with TensorFileWriter(partial, shapes, header) as file:
        for index, tensors in held.items():
            for name, tensor in tensors.items():
                file.write(f"layers.{index}.{name}", tensor)
    partial.replace(path)
    sync_folder(path.parent)


def _told(about: FsqAbout) -> dict[str, object]:
    """The header: of one tier as it was before there were two, so that earlier versions read it."""
    told = asdict(about)
    if not about.resident_nbytes:
        del told["resident_nbytes"]
    return {"format": _FORMAT_TIERS if about.resident_nbytes else _FORMAT, **told}


def _tensors(layer: FsqLayer | FsqTier) -> dict[str, Tensor]:
    if isinstance(layer, FsqTier):
        return {
            **_tensors(layer.whole),
            "resident_bits": torch.tensor(layer.grid.resident_bits, dtype=torch.uint8),
            "coarse_decoder": layer.coarse_decoder.half().cpu(),
            "coarse_bias": layer.coarse_bias.float().cpu(),
        }
    return {
        "bits": torch.tensor(layer.grid.bits, dtype=torch.uint8),
        "encoder": layer.encoder.half().cpu(),
        "encoder_bias": layer.encoder_bias.float().cpu(),
        "decoder": layer.decoder.half().cpu(),
        "decoder_bias": layer.decoder_bias.float().cpu(),
    }


def read_about(path: Path) -> FsqAbout:
    """What the file at ``path`` says of itself.

    Raises:
        InputError: there is none, or it is no file of codes that this version reads.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            told = json.loads((opened.metadata() or {})[_ENTRY])
        found = told.pop("format")
        if found not in (_FORMAT, _FORMAT_TIERS):
            expected = f"format {_FORMAT} or {_FORMAT_TIERS}"
            raise InputError(path, f"format {found!r}", expected, "use a matching version of strataflux")
        if (found == _FORMAT_TIERS) != (told.get("resident_nbytes", 0) > 0):
            raise ValueError(f"format {found} with {told.get('resident_nbytes', 0)} resident bytes")
        lists = {name: tuple(told[name]) for name in ("key_errors", "value_errors", "held_out")}
        about = FsqAbout(**{**told, **lists})
        _check_kinds(about)
        return about
    except (OSError, SafetensorError) as error:
        raise InputError(path, str(error), "a file of codes", _REMEDY) from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(path, f"a header that cannot be read ({error})", "a file of codes", _REMEDY) from error


def _check_kinds(about: FsqAbout) -> None:
    numbers = (int, float)
    kinds: dict[str, type | tuple[type, ...]] = {"tuned_seconds": numbers}
    kinds |= dict.fromkeys(("nbytes", "levels", "rank", "resident_nbytes"), int)
    kinds |= dict.fromkeys(("bound", "weights", "weights_sha256"), str)
    for name, kind in kinds.items():
        if not isinstance(getattr(about, name), kind):
            raise ValueError(f"{name} {getattr(about, name)!r}")
    for name in ("key_errors", "value_errors", "held_out"):
        if not all(isinstance(value, numbers) for value in getattr(about, name)):
            raise ValueError(f"{name} {getattr(about, name)!r}")


def load_codes(path: Path, config: ModelConfig, weights_sha256: str) -> FsqCodes:
    """The codes in ``path``, for a model of these dimensions and weights.

    Raises:
        InputError: the file is missing or damaged, or was made over other weights.
    """
    about = read_about(path)
    if about.weights_sha256 != weights_sha256:
        found = f"codes made over weights {about.weights_sha256[:12]}…"
        raise InputError(path, found, f"weights {weights_sha256[:12]}…, the model's", _REMEDY)
    each = 1 + len(_PARTS) + (1 + len(_TIER_PARTS) if about.resident_nbytes else 0)
    tiers: tuple[FsqTier, ...] = ()
    try:
        with safe_open(path, framework="pt") as opened:
            if len(opened.keys()) != each * len(config.whole):
                found, expected = f"{len(opened.keys())} tensors", f"{len(config.whole)} layers of {each}"
                raise InputError(path, found, expected, _REMEDY)
            layers = tuple(_read_layer(path, opened, index, config, about) for index in config.whole)
            if about.resident_nbytes:
                pairs = zip(config.whole, layers, strict=True)
                tiers = tuple(_read_tier(path, opened, index, layer, about) for index, layer in pairs)
    except SafetensorError as error:
        raise InputError(path, str(error), "a whole file of codes", _REMEDY) from error
    return FsqCodes(about, layers, tiers)


def _read_layer(path: Path, opened: Any, index: int, config: ModelConfig, about: FsqAbout) -> FsqLayer:
    held = {name: opened.get_tensor(f"layers.{index}.{name}") for name in ("bits", *_PARTS)}
    try:
        grid = FsqGrid(tuple(held["bits"].tolist()), about.bound)  # type: ignore[arg-type]
    except ValueError as error:
        raise InputError(path, f"layer {index}: {error}", "a grid", _REMEDY) from error
    width, outputs = grid.width, 2 * config.kv_heads * config.head_dim
    expected = dict(zip(_PARTS, ((width, config.hidden), (width,), (outputs, width), (outputs,)), strict=True))
    for name, shape in expected.items():
        _require_numbers(path, f"layers.{index}.{name}", held[name], shape)
    if grid.nbytes > about.nbytes:
        raise InputError(path, f"{grid.nbytes} bytes a token in layer {index}", f"{about.nbytes}", _REMEDY)
    return FsqLayer(grid, *(held[name].float() for name in _PARTS))


def _read_tier(path: Path, opened: Any, index: int, layer: FsqLayer, about: FsqAbout) -> FsqTier:
    bits, decoder, bias = (opened.get_tensor(f"layers.{index}.{name}") for name in ("resident_bits", *_TIER_PARTS))
    try:
        grid = NestedGrid(layer.grid, tuple(bits.tolist()))
    except ValueError as error:
        raise InputError(path, f"layer {index}: {error}", "a resident part of a grid", _REMEDY) from error
    outputs = layer.decoder_bias.shape[0]
    for name, tensor, shape in zip(
        _TIER_PARTS, (decoder, bias), ((outputs, grid.resident.width), (outputs,)), strict=True
    ):
        _require_numbers(path, f"layers.{index}.{name}", tensor, shape)
    if grid.resident.nbytes > about.resident_nbytes:
        found = f"{grid.resident.nbytes} resident bytes a token in layer {index}"
        raise InputError(path, found, f"{about.resident_nbytes}", _REMEDY)
    return FsqTier(grid, layer, decoder.float(), bias.float())


def _require_numbers(path: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape or not bool(tensor.isfinite().all()):
        raise InputError(path, f"{name} of shape {tuple(tensor.shape)}", f"finite numbers of shape {shape}", _REMEDY)
