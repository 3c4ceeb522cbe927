"""Hugging Face models with low-bit weights, and a low-bit KV cache, that a daemon refines.

``attach`` puts a prepared model under a loaded one, ``detach`` takes it out again; ``StrataFluxConfig`` loads a model
that way from the start. ``attach_codes`` puts discrete codes in the place of keys and values. Generation, pipelines,
streaming, batches and chat templates work as before.
"""

import transformers

from strataflux.client.transformers.versions import check_version

check_version(transformers.__version__)  # before anything below needs a name that another version may lack

from strataflux.client.transformers.attachment import Attachment, attach, detach  # noqa: E402
from strataflux.client.transformers.cache import StrataFluxCache  # noqa: E402
from strataflux.client.transformers.codes import attach_codes, detach_codes  # noqa: E402
from strataflux.client.transformers.codes_cache import CodesCache  # noqa: E402
from strataflux.client.transformers.quantizer import StrataFluxConfig  # noqa: E402

__all__ = [
    "Attachment",
    "CodesCache",
    "StrataFluxCache",
    "StrataFluxConfig",
    "attach",
    "attach_codes",
    "detach",
    "detach_codes",
]
