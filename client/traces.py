"""Recorded selections, read for the simulator.

A trace is an ``.npz`` file of integer arrays, one a source of requests:

* weights: ``LAYER.SET`` → [token, selected channels]; sets of one name have the same number of channels in every layer;
* KV: ``LAYER`` → [head, step, selected token groups]; every head has the same number of groups.

Scores lie beside them under the same name with ``s`` in front. A step asks for its keys source by source, in the order
of the file. The number of records is not in the file: an index range is the largest index seen in any source of its
kind, plus one.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.simulate import Trace
from strataflux.client.errors import InputError

__all__ = ["load_trace"]

_EXPECTED = "an .npz of LAYER.SET → [token, k] or LAYER → [head, step, k], integers, as strataflux records them"


def load_trace(path: Path) -> Trace:
    """Read a trace.

    Returns:
        The trace, named by the file. Weight scores are divided by the largest of their token and source, as requests
        carry them; KV scores are attention shares and stay as they are.

    Raises:
        InputError: the file is missing, no ``.npz``, or holds arrays of another shape or type.
    """
    try:
        zipfile.ZipFile(path).close()  # of another file NumPy would say that it holds pickled data, and how to trust it
        file = np.load(path, allow_pickle=False)
        with file:
            arrays = {name: file[name] for name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        found = (isinstance(error, OSError) and error.strerror) or str(error)
        raise InputError(path, found, _EXPECTED, "name a recorded trace") from error
    names = [name for name in arrays if not name.startswith("s")]
    sources = [rows for name in names for rows in _by_head(path, name, arrays[name])]
    kinds = [name.partition(".")[2] for name in names for _ in _by_head(path, name, arrays[name])]
    steps = {len(rows) for rows in sources}
    if len(steps) != 1:
        raise InputError(path, f"sources of {sorted(steps)} steps", "one number of steps", "record the trace again")
    widths = {kind: 1 + max(int(r.max()) for r, k in zip(sources, kinds, strict=True) if k == kind) for kind in kinds}
    bases = np.cumsum([0] + [widths[kind] for kind in kinds])
    keys = np.concatenate([rows + base for rows, base in zip(sources, bases[:-1], strict=True)], axis=1)
    return Trace(path.stem, keys, int(bases[-1]), _scores(path, names, arrays))


def _by_head(path: Path, name: str, array: NDArray[np.generic]) -> list[NDArray[np.int64]]:
    """The sources in one array: itself, or one a head."""
    if array.ndim not in (2, 3) or array.size == 0 or not np.issubdtype(array.dtype, np.integer) or array.min() < 0:
        found = f"array {name!r} of {array.dtype}{list(array.shape)}"
        raise InputError(path, found, _EXPECTED, "name a recorded trace")
    return [rows.astype(np.int64) for rows in (array if array.ndim == 3 else array[None])]


def _scores(path: Path, names: list[str], arrays: Mapping[str, NDArray[np.generic]]) -> NDArray[np.float32] | None:
    if not any("s" + name in arrays for name in names):
        return None
    parts: list[NDArray[np.float32]] = []
    for name in names:
        scores = arrays.get("s" + name)
        if scores is None or scores.shape != arrays[name].shape:
            found = "no scores" if scores is None else f"scores {list(scores.shape)}"
            raise InputError(path, f"{found} for {name!r}", f"{list(arrays[name].shape)}", "record the trace again")
        values = scores.astype(np.float32)
        if values.ndim == 2:
            values = (values / values.max(axis=1, keepdims=True))[None]
        parts.extend(values)
    return np.concatenate(parts, axis=1)
