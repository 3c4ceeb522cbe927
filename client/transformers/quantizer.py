"""Load a checkpoint straight onto the low-bit weights of a prepared model, by the library's quantization interface.

The checkpoint gives embeddings, head and norms; its projections are not read.
"""

import logging
from pathlib import Path
from typing import Any, Final

import torch
from transformers import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from strataflux.client.errors import MisuseError
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.transformers.attachment import attach_loaded
from strataflux.client.transformers.checks import require_model
from strataflux.client.transformers.options import AttachOptions
from strataflux.client.transformers.projections import PARTS, RefinedLinear

__all__ = ["METHOD", "StrataFluxConfig", "StrataFluxQuantizer"]

METHOD: Final = "strataflux"
"""The name of this way of quantization among the library's."""
_LOG: Final = logging.getLogger(__name__)


@register_quantization_config(METHOD)
class StrataFluxConfig(QuantizationConfigMixin):
    """``from_pretrained(checkpoint, quantization_config=StrataFluxConfig(prepared))`` loads and attaches in one."""

    def __init__(
        self,
        prepared: Path | str,
        *,
        runtime_dir: Path | str | None = None,
        k: int | None = None,
        miss: str = "skip",
        kv: str | None = None,
        refine_kv: str = "4/4",
        context: int | None = None,
        sequences: int = 1,
        require_daemon: bool = False,
        quant_method: str = METHOD,
    ) -> None:
        """Arguments are those of :func:`~strataflux.client.transformers.attach`, all such that JSON can hold them.

        Raises:
            MisuseError: one of them cannot be.
        """
        self.quant_method = quant_method
        self.prepared = str(prepared)
        self.runtime_dir = None if runtime_dir is None else str(runtime_dir)
        self.k, self.miss, self.kv, self.refine_kv = k, miss, kv, refine_kv
        self.context, self.sequences, self.require_daemon = context, sequences, require_daemon
        self.options()

    def options(self) -> AttachOptions:
        """What the fields say.

        Raises:
            MisuseError: one of them cannot be.
        """
        return AttachOptions.read(
            runtime_dir=self.runtime_dir,
            k=self.k,
            miss=self.miss,
            kv=self.kv,
            refine_kv=self.refine_kv,
            context=self.context,
            sequences=self.sequences,
            require_daemon=self.require_daemon,
        )


@register_quantizer(METHOD)
class StrataFluxQuantizer(HfQuantizer):
    """What the library calls while it loads a model with a :class:`StrataFluxConfig`."""

    quantization_config: StrataFluxConfig

    def validate_environment(self, *_arguments: Any, device_map: Any = None, **_named: Any) -> None:
        """Refuse any device but the CPU.

        Raises:
            MisuseError: naming it.
        """
        places = set(device_map.values()) if isinstance(device_map, dict) else {device_map}
        if others := {str(place) for place in places if place is not None} - {"cpu", "auto"}:
            raise MisuseError("device_map", ", ".join(sorted(others)), "cpu", "load it without a device_map")

    def update_device_map(self, device_map: Any) -> Any:
        """All on the CPU, which is where the library would put it if nothing was said."""
        return {"": "cpu"} if device_map is not None else None

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Float32, in which low-bit matrices are multiplied on a CPU."""
        if dtype != torch.float32:
            _LOG.info("parameters in torch.float32, not %s: low-bit matrices are multiplied in it", dtype)
        return torch.float32

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **_named: Any) -> None:
        self._prepared: PreparedModel = open_prepared(Path(self.quantization_config.prepared))
        require_model(model, self._prepared.config)
        for layer in model.base_model.layers:
            for path in (path for paths in PARTS.values() for path in paths):
                parent, _, child = path.partition(".")
                part = getattr(getattr(layer, parent), child)
                setattr(getattr(layer, parent), child, RefinedLinear(part.in_features, part.out_features, part.bias))
        unread = {rf"layers\.\d+\.{path}\.weight" for paths in PARTS.values() for path in paths}
        model._keys_to_ignore_on_load_unexpected = set(model._keys_to_ignore_on_load_unexpected or ()) | unread

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_named: Any) -> PreTrainedModel:
        attach_loaded(model, self._prepared, self.quantization_config.options())
        return model

    def is_serializable(self) -> bool:
        """No: the weights are those of the prepared model, which is kept elsewhere."""
        return False

    @property
    def is_trainable(self) -> bool:
        """No: low-bit matrices are frozen."""
        return False
