"""A prepared model: a folder that holds a low-bit model and, beside it, the bits that quantization took away.

| file                      | content                                                                    |
|---------------------------|----------------------------------------------------------------------------|
| `prepared.json`           | :class:`Manifest`                                                          |
| `resident.safetensors`    | packed codes, scales or codebooks, refinement scales, norms, embeddings    |
| `refine/`                 | the store: records of channels, of neuron bundles, or of both              |
| `tokenizer.json`          | the tokenizer                                                              |
| `fsq/NAME.safetensors`    | discrete codes in place of keys and values, by ratio; only if asked for    |
| `ladder/K.safetensors`    | columns fitted for other budgets, for a tuner; only of fitted refinement   |
| `calibration.safetensors` | the text and scales from which fitting can be done anew; likewise          |
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor

from strataflux.client.errors import InputError
from strataflux.client.prepare.tensor_file import TensorDigest, TensorShape
from strataflux.client.runtime.models import SETS, LayerWeights, ModelConfig, ModelConfigError
from strataflux.client.schemes import BUNDLES, STORED_SETS, Scheme, section_of, stored_budgets, stored_schemes
from strataflux.kernels.codebook import dequantize_codebook
from strataflux.kernels.lowbit import dequantize, packed_bytes, unpack_codes
from strataflux.kernels.nf4 import dequantize_nf4
from strataflux.proto.store_format import SectionSpec, identity_digest

__all__ = [
    "CALIBRATION",
    "FORMAT",
    "FSQ",
    "LADDER",
    "MANIFEST",
    "RESIDENT",
    "STORE",
    "TOKENIZER",
    "Manifest",
    "PreparedModel",
    "open_prepared",
    "resident_tensors",
    "store_sections",
]

FORMAT = 1
"""Version of the folder; a newer one is refused."""
MANIFEST, RESIDENT, STORE, TOKENIZER = "prepared.json", "resident.safetensors", "refine", "tokenizer.json"
LADDER, CALIBRATION, FSQ = "ladder", "calibration.safetensors", "fsq"
_REMEDY = "prepare the model again"


@dataclass(frozen=True)
class Manifest:
    """What ``prepared.json`` says."""

    config: ModelConfig
    base: str
    """The low-bit base: ``rtn``, ``awq``, ``sqllm``, ``lnq`` or ``nf4``; its parameters are in the identity's
    ``quantizer``.
    """
    bits: int
    group: int
    """Inputs that share a scale; 0: each output row has a codebook."""
    k: Mapping[str, int]
    """Default budget of each projection set: channels per 1,024, or neurons for ``down`` if the MLP has bundles."""
    shift: Mapping[str, float]
    """How much earlier than its input each set's refinement may start, in layers: 0 when it uses its own
    input."""
    mlp_scheme: Scheme
    """How the MLP is refined: by channels of gate-up and down, or by neuron bundles."""
    kv: Mapping[str, Any] | None
    """Settings of the key and value cache; none is prepared yet if null."""
    identity: Mapping[str, Any]
    origin: str | None = None
    """Where the unquantized model was read from, if that is known."""

    @property
    def digest(self) -> str:
        """The identity's SHA-256: the name of the store that belongs to these resident weights."""
        return identity_digest(self.identity)

    def to_json(self) -> dict[str, Any]:
        """The content of ``prepared.json``."""
        return {
            "format": FORMAT,
            "config": self.config.to_json(),
            "base": self.base,
            "bits": self.bits,
            "group": self.group,
            "k": dict(self.k),
            "shift": dict(self.shift),
            "mlp_scheme": self.mlp_scheme,
            "kv": self.kv,
            "tokenizer": TOKENIZER,
            "origin": self.origin,
            "identity": dict(self.identity),
            "identity_digest": self.digest,
        }


class PreparedModel:
    """An opened prepared folder; a weight source whose weights are the low-bit ones, expanded to float32."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self._resident = safe_open(folder / RESIDENT, framework="pt")

    @property
    def config(self) -> ModelConfig:
        """The model's dimensions."""
        return self.manifest.config

    @property
    def sets(self) -> tuple[str, ...]:
        """What the store has records of, in their order in each layer: one of ``STORED_SETS``."""
        return tuple(self.manifest.identity["layout"]["sets"])

    @property
    def fitted_budgets(self) -> dict[str, int] | None:
        """For which budget the store's values of each of :attr:`sets` were fitted; None if they are plain residuals,
        which suit any.
        """
        fit = self.manifest.identity["layout"].get("fit")
        if fit is None:
            return None
        k = fit["k"]
        return stored_budgets(k, stored_schemes(self.sets)[0], self.sets) if isinstance(k, int) else dict(k)

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.folder / STORE

    @property
    def codes(self) -> dict[str, Path]:
        """Files of discrete codes by name, such as ``16x``."""
        return {path.stem: path for path in sorted((self.folder / FSQ).glob("*.safetensors"))}

    @cached_property
    def resident_bytes(self) -> int:
        """Bytes of the resident weights as packed, embeddings included."""
        return (self.folder / RESIDENT).stat().st_size

    @property
    def bits_per_weight(self) -> float:
        """Bits of the projections' codes, scales, zero-points and codebooks, over the number of their weights."""
        parts = {"codes", "scales", "zeros", "planes", "codebook"}
        shapes = self._tensors()
        stored = sum(
            math.prod(shape) * dtype.itemsize for name, (dtype, shape) in shapes.items() if name.split(".")[-1] in parts
        )
        return 8 * stored / (self.config.layers * sum(math.prod(self.config.set_shape(name)) for name in SETS))

    def embedding(self) -> Tensor:
        """[vocabulary, hidden] float32."""
        return self._tensor("embedding").float()

    def norm(self) -> Tensor:
        """The norm before the head, [hidden]."""
        return self._tensor("norm")

    def head(self) -> Tensor:
        """The output head [vocabulary, hidden] float32."""
        return self._tensor("head").float()

    def layer(self, index: int) -> LayerWeights:
        """Layer ``index``, dequantized."""
        return LayerWeights(
            attention_norm=self._tensor(f"layers.{index}.attention_norm"),
            mlp_norm=self._tensor(f"layers.{index}.mlp_norm"),
            projections={name: self._projection(index, name) for name in SETS},
            query_norm=self._tensor(f"layers.{index}.query_norm") if self.config.head_norms else None,
            key_norm=self._tensor(f"layers.{index}.key_norm") if self.config.head_norms else None,
            qkv_bias=self._tensor(f"layers.{index}.qkv_bias") if self.config.qkv_bias else None,
            window=self.config.window(index),
        )

    def refinement_scales(self, layer: int, set_name: str) -> Tensor:
        """The scale of each output's refinement codes, [outputs] float32; of bundles those of the down columns."""
        return self._tensor(f"layers.{layer}.{set_name}.refinement_scales")

    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return Tokenizer.from_file(str(self.folder / TOKENIZER))

    def verify(self) -> None:
        """Check that the resident weights are those the store was made for; reads the whole file.

        Raises:
            InputError: they are not.
        """
        digest = TensorDigest()
        for name in self._tensors():
            digest.add(name, self._tensor(name))
        expected = self.manifest.identity["base_weights_sha256"]
        if digest.hexdigest() != expected:
            raise InputError(
                self.folder / RESIDENT, f"SHA-256 {digest.hexdigest()[:12]}…", f"{expected[:12]}…", _REMEDY
            )

    @cached_property
    def weights_sha256(self) -> str:
        """SHA-256 over the low-bit weights alone, which fitting refinement anew leaves as they are; reads them all."""
        digest = TensorDigest()
        if self.config.windows:
            digest.add("windows", torch.tensor(self.config.windows, dtype=torch.float32))
        for name in self._tensors():
            if not name.endswith(".refinement_scales"):
                digest.add(name, self._tensor(name))
        return digest.hexdigest()

    def _tensors(self) -> dict[str, TensorShape]:
        manifest = self.manifest
        return resident_tensors(self.config, manifest.bits, manifest.group, self.sets, manifest.base)

    def packed(self, layer: int, set_name: str) -> dict[str, Tensor]:
        """A projection set as it is resident: ``planes`` and ``codebook``, or ``codes``, ``scales`` and, but for nf4,
        ``zeros``.
        """
        manifest = self.manifest
        parts = _matrix_tensors(self.config.set_shape(set_name), manifest.bits, manifest.group, manifest.base)
        return {part: self._tensor(f"layers.{layer}.{set_name}.{part}") for part in parts}

    def _projection(self, layer: int, set_name: str) -> Tensor:
        packed = self.packed(layer, set_name)
        if not self.manifest.group:
            return dequantize_codebook(packed["planes"], packed["codebook"])
        bits, group = self.manifest.bits, self.manifest.group
        if "zeros" not in packed:
            codes = unpack_codes(packed["codes"], bits, self.config.set_shape(set_name)[1])
            return dequantize_nf4(codes, packed["scales"], group)
        return dequantize(packed["codes"], packed["scales"], packed["zeros"], bits, group)

    def _tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._resident.get_tensor(name)
        return tensor


def open_prepared(folder: Path) -> PreparedModel:
    """Open a prepared folder: its manifest is checked, and every resident tensor's presence and shape.

    The store is not opened here: the daemon owns it, and compares identities when a client attaches.

    Raises:
        InputError: a file is missing, truncated, of a newer format, or contradicts the manifest.
    """
    manifest = _read_manifest(folder / MANIFEST)
    for name in (RESIDENT, TOKENIZER, STORE):
        if not (folder / name).exists():
            raise InputError(folder, f"no {name}", f"{name} beside {MANIFEST}", _REMEDY)
    try:
        model = PreparedModel(folder, manifest)
    except SafetensorError as error:
        raise InputError(folder / RESIDENT, str(error), "a whole safetensors file", _REMEDY) from error
    _check_tensors(model)
    return model


def resident_tensors(
    config: ModelConfig, bits: int, group: int, sets: Sequence[str] = SETS, base: str = "rtn"
) -> dict[str, TensorShape]:
    """Names, dtypes and shapes in ``resident.safetensors``, in file order.

    Args:
        config: the model's dimensions.
        bits: of a code.
        group: inputs that share a scale; 0 for codebooks.
        sets: what the store has records of.
        base: the low-bit base.
    """
    vocabulary = (torch.float16, (config.vocabulary, config.hidden))
    norm = (torch.float32, (config.hidden,))
    tensors: dict[str, TensorShape] = {"embedding": vocabulary, "norm": norm}
    if not config.tied_head:
        tensors["head"] = vocabulary
    head_norm = (torch.float32, (config.head_dim,))
    for layer in range(config.layers):
        tensors |= {f"layers.{layer}.attention_norm": norm, f"layers.{layer}.mlp_norm": norm}
        if config.head_norms:
            tensors |= {f"layers.{layer}.query_norm": head_norm, f"layers.{layer}.key_norm": head_norm}
        if config.qkv_bias:
            tensors[f"layers.{layer}.qkv_bias"] = torch.float32, (config.set_shape("qkv")[0],)
        for name in SETS:
            prefix = f"layers.{layer}.{name}."
            shapes = _matrix_tensors(config.set_shape(name), bits, group, base)
            tensors |= {prefix + part: shape for part, shape in shapes.items()}
            if name in sets:
                tensors[prefix + "refinement_scales"] = torch.float32, (config.set_shape(name)[0],)
        if BUNDLES in sets:
            tensors[f"layers.{layer}.{BUNDLES}.refinement_scales"] = norm
    return tensors


def _matrix_tensors(shape: tuple[int, int], bits: int, group: int, base: str) -> dict[str, TensorShape]:
    outputs, inputs = shape
    if not group:
        return {
            "planes": (torch.uint8, (bits, outputs, inputs // 8)),
            "codebook": (torch.float16, (outputs, 1 << bits)),
        }
    groups = outputs, inputs // group
    parts: dict[str, TensorShape] = {
        "codes": (torch.uint8, (outputs, packed_bytes(inputs, bits))),
        "scales": (torch.float16, groups),
    }
    return parts if base == "nf4" else parts | {"zeros": (torch.uint8, groups)}


def store_sections(config: ModelConfig, sets: Sequence[str] = SETS) -> list[SectionSpec]:
    """The store's sections: layers in order, in each ``sets`` in their order."""
    return [section_of(config, layer, name) for layer in range(config.layers) for name in sets]


def _read_manifest(path: Path) -> Manifest:
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        remedy = "check the path, or make one with `strataflux prepare`"
        raise InputError(path, error.strerror or "an error", "a prepared model's manifest", remedy) from error
    except ValueError as error:
        raise InputError(path, f"no JSON ({error})", "a prepared model's manifest", _REMEDY) from error
    found = value.get("format") if isinstance(value, dict) else None
    if found != FORMAT:
        raise InputError(path, f"format {found!r}", f"format {FORMAT}", "use a matching version of strataflux")
    try:
        names = ("base", "bits", "group", "k", "shift", "mlp_scheme", "kv", "identity")
        _check_fields(path, value)
        manifest = Manifest(
            config=ModelConfig.from_json(value["config"]),
            origin=value.get("origin"),
            **{name: value[name] for name in names},
        )
        if manifest.digest != value["identity_digest"]:
            raise InputError(path, f"identity {manifest.digest[:12]}…", f"{value['identity_digest']}", _REMEDY)
        quantizer = manifest.identity["quantizer"]["name"]
        if manifest.base != quantizer:
            raise InputError(path, f"base {manifest.base!r} of a {quantizer!r} quantizer", "one and the same", _REMEDY)
        sets = tuple(manifest.identity["layout"]["sets"])
        if manifest.mlp_scheme not in stored_schemes(sets) or sets not in STORED_SETS.values():
            found = f"MLP scheme {manifest.mlp_scheme!r} beside records of {', '.join(sets)}"
            raise InputError(path, found, "a scheme that has its records", _REMEDY)
    except (KeyError, TypeError, ModelConfigError) as error:
        raise InputError(path, f"{error}", "all fields of a prepared model", _REMEDY) from error
    return manifest


def _check_fields(path: Path, value: Mapping[str, Any]) -> None:
    """What the fields hold, before anything is made of them."""
    checks: dict[str, tuple[bool, str]] = {
        "base": (isinstance(value["base"], str), "a name"),
        "bits": (value["bits"] in ((4,) if value["base"] == "nf4" else (2, 3, 4)), "2, 3 or 4, and 4 for nf4"),
        "group": (type(value["group"]) is int and value["group"] >= 0, "an integer from 0 on"),
        "k": (_by_set(value["k"], lambda k: type(k) is int and 0 <= k <= 1024), "0 to 1024 for each projection set"),
        "shift": (_by_set(value["shift"], lambda s: type(s) in (int, float) and 0 <= s <= 2), "0 to 2 blocks for each"),
    }
    for name, (holds, expected) in checks.items():
        if not holds:
            raise InputError(path, f"{name} {value[name]!r}", expected, _REMEDY)


def _by_set(value: object, holds: Callable[[Any], bool]) -> bool:
    return isinstance(value, dict) and value.keys() == set(SETS) and all(map(holds, value.values()))


def _check_tensors(model: PreparedModel) -> None:
    path = model.folder / RESIDENT
    expected = model._tensors()
    dtypes = {torch.float32: "F32", torch.float16: "F16", torch.uint8: "U8"}
    with safe_open(path, framework="pt") as opened:
        present = set(opened.keys())
        for name, (dtype, shape) in expected.items():
            entry = opened.get_slice(name) if name in present else None
            found = (entry.get_dtype(), tuple(entry.get_shape())) if entry else "nothing"
            if found != (dtypes[dtype], shape):
                raise InputError(path, f"{name}: {found}", f"{(dtypes[dtype], shape)}", _REMEDY)
