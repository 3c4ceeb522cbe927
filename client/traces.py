"""Recorded selections, read for the simulator; docs/TRACES.md is the format's text of record.

A trace is an ``.npz`` file of integer arrays, one a source of requests:

* weights: ``LAYER.SET`` → [token, selected channels]; sets of one name have the same number of channels in every layer;
* KV: ``LAYER`` → [head, step, selected token groups]; every head has the same number of groups.

-1 fills up the row of a step that selected less than others. Scores lie beside them under the same name with ``s`` in
front, the number of records with ``n``. Where it is not told, a source has as many as the largest index in any source
of its kind, plus one. A step asks for its keys source by source, in the order of the file.
"""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from strataflux.cache_policy.simulate import Trace
from strataflux.client.errors import InputError

__all__ = ["load_traces"]

_EXPECTED = "an .npz of LAYER.SET → [token, k] or LAYER → [head, step, k], integers, as strataflux records them"
_Arrays = Mapping[str, NDArray[np.generic]]


def load_traces(path: Path) -> list[Trace]:
    """Read a file: one trace of weights, one of KV, or both, since they are cached apart.

    Returns:
        The traces, named by the file, and by their kind if there are two. Weight scores are divided by the largest of
        their token and source, as requests carry them; KV scores are attention shares and stay as they are.

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
    names = [name for name in arrays if not name.startswith(("s", "n"))]
    kinds = {"weights": [n for n in names if "." in n], "kv": [n for n in names if "." not in n]}
    present = {kind: each for kind, each in kinds.items() if each}
    if not present:
        raise InputError(path, "no selections", _EXPECTED, "record the trace again")
    title = {kind: path.stem if len(present) == 1 else f"{path.stem}.{kind}" for kind in present}
    return [_trace(path, title[kind], each, arrays) for kind, each in present.items()]


def _trace(path: Path, title: str, names: list[str], arrays: _Arrays) -> Trace:
    by_name = {name: _by_head(path, name, arrays[name]) for name in names}
    sources = [rows for rows_of in by_name.values() for rows in rows_of]
    steps = {len(rows) for rows in sources}
    if len(steps) != 1:
        raise InputError(path, f"sources of {sorted(steps)} steps", "one number of steps", "record the trace again")
    counts = _counts(path, by_name, arrays)
    bases = np.cumsum([0, *counts])
    keys = np.concatenate(
        [np.where(rows < 0, -1, rows + base) for rows, base in zip(sources, bases[:-1], strict=True)], axis=1
    )
    if not (keys >= 0).any():
        raise InputError(path, "no request in any step", "steps that select something", "record the trace again")
    return Trace(title, keys, int(bases[-1]), _scores(path, names, arrays))


def _counts(path: Path, by_name: Mapping[str, list[NDArray[np.int64]]], arrays: _Arrays) -> list[int]:
    """Records of each source: as told, or by the largest index of its kind."""
    largest: dict[str, int] = {}
    for name, sources in by_name.items():
        kind = name.partition(".")[2]
        largest[kind] = max(largest.get(kind, 0), 1 + max(int(rows.max()) for rows in sources))
    counts = []
    for name, sources in by_name.items():
        count = own = largest[name.partition(".")[2]]
        if (told := arrays.get("n" + name)) is not None:
            own = 1 + max(int(rows.max()) for rows in sources)
            count = int(told) if told.shape == () and np.issubdtype(told.dtype, np.integer) else -1
        if count < own:
            found = f"'n{name}' {told} and an index of {own - 1}"
            raise InputError(path, found, "a count above every index", "record the trace again")
        counts += [count] * len(sources)
    return counts


def _by_head(path: Path, name: str, array: NDArray[np.generic]) -> list[NDArray[np.int64]]:
    """The sources in one array: itself, or one a head."""
    if array.ndim not in (2, 3) or array.size == 0 or not np.issubdtype(array.dtype, np.integer) or array.min() < -1:
        found = f"array {name!r} of {array.dtype}{list(array.shape)}"
        raise InputError(path, found, _EXPECTED, "name a recorded trace")
    return [rows.astype(np.int64) for rows in (array if array.ndim == 3 else array[None])]


def _scores(path: Path, names: list[str], arrays: _Arrays) -> NDArray[np.float32] | None:
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
            values = (values / np.maximum(values.max(axis=1, keepdims=True), np.float32(1e-30)))[None]
        parts.extend(values)
    return np.concatenate(parts, axis=1)
