"""Record what a live session selects, as a trace for the simulator (docs/TRACES.md).

The client is where selections and their scores are known exactly; a daemon sees misses alone, and of hits no more than
that a slot was used within a millisecond. So the session itself notes what it is asked to look up, in a class of its
own: a process that records nothing runs none of this.

Sampling is by layer and by length, never by step: a trace with steps left out would show a cache other gaps between
uses than it has.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from strataflux.client.errors import FailureError, MisuseError
from strataflux.client.session import Session
from strataflux.proto.store_format import Section

__all__ = [
    "RecordingSession",
    "TraceRecorder",
    "describe_tables",
    "recording",
    "session_kind",
]

_ENTRY: Final = np.dtype([("source", "<u2"), ("index", "<u4"), ("score", "u1")])


@dataclass(frozen=True)
class _Sources:
    """What the object ids of one table stand for. ``locate`` gives source and index of each id."""

    kind: str
    names: tuple[str, ...]
    layers: NDArray[np.int64]
    locate: Callable[[NDArray[np.int64]], tuple[NDArray[np.int64], NDArray[np.int64]]]
    counts: Callable[[], list[int]]
    """Records of each source."""


class TraceRecorder:
    """Collects the selections of whole steps, up to a number of steps and of bytes, whichever comes first.

    Steps that the daemon cut off are left out: they were decoded again without refinement.
    """

    def __init__(self, steps: int = 512, max_bytes: int = 256 << 20, layers: int | None = None) -> None:
        """``layers``: how many of the model's layers are recorded, evenly spread; None for all.

        Raises:
            MisuseError: a bound below 1.
        """
        for name, value in (("steps", steps), ("max_bytes", max_bytes), ("layers", layers or 1)):
            if value < 1:
                raise MisuseError(name, str(value), "at least 1", "record something, or do not record")
        # fixed after construction
        self._most_steps = steps
        self._most_bytes = max_bytes
        self._layers = layers
        # guarded by _lock
        self._lock = threading.Lock()
        self._sources: dict[str, _Sources] = {}
        self._steps: dict[str, list[NDArray[np.void]]] = {}
        self._bytes = 0
        self.steps = 0
        """Steps recorded so far."""

    @property
    def full(self) -> bool:
        """No further step is taken."""
        return self.steps >= self._most_steps or self._bytes >= self._most_bytes

    def add(self, asked: Sequence[tuple[_Sources, NDArray[np.int64], NDArray[np.uint8]]]) -> None:
        """Take the look-ups (object ids, scores) of one step; nothing once it is full."""
        parts: dict[str, list[NDArray[np.void]]] = {}
        with self._lock:
            if self.full or not asked:
                return
            for sources, oids, scores in asked:
                self._sources[sources.kind] = sources
                parts.setdefault(sources.kind, []).append(self._entries(sources, oids, scores))
            for kind, each in parts.items():
                step = np.concatenate(each)
                self._steps.setdefault(kind, []).append(step)
                self._bytes += step.nbytes
            self.steps += 1

    def _entries(self, sources: _Sources, oids: NDArray[np.int64], scores: NDArray[np.uint8]) -> NDArray[np.void]:
        source, index = sources.locate(oids)
        kept = np.isin(sources.layers[source], _spread(int(sources.layers.max()) + 1, self._layers))
        entries = np.empty(int(kept.sum()), _ENTRY)
        entries["source"], entries["index"], entries["score"] = source[kept], index[kept], scores[kept]
        return entries

    def arrays(self) -> dict[str, NDArray[np.generic]]:
        """The trace: arrays by name, as docs/TRACES.md has them."""
        with self._lock:
            found: dict[str, NDArray[np.generic]] = {}
            for kind, steps in self._steps.items():
                found |= _arrays(self._sources[kind], steps)
            return found

    def save(self, path: Path) -> None:
        """Write the trace, whole or not at all.

        Raises:
            FailureError: nothing was recorded. OSError: the file cannot be written.
        """
        arrays = self.arrays()
        if not arrays:
            expected = "steps that look records up on this side"
            remedy = "is a daemon serving this model (strataflux status)? A GPU selects by itself: record on the CPU"
            raise FailureError("trace", "no refined step", expected, remedy)
        part = path.with_name(f".{path.name}.part")
        try:
            with part.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]  # names are not keywords here
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)


class RecordingSession(Session):
    """A session that tells a recorder what it is asked for."""

    _recorder: TraceRecorder | None = None
    _tables: dict[int, _Sources] = {}  # noqa: RUF012 (replaced, never changed)
    _asked: list[tuple[_Sources, NDArray[np.int64], NDArray[np.uint8]]] | None = None

    def record(self, recorder: TraceRecorder, tables: dict[int, _Sources]) -> None:
        """From the next step on; ``tables`` says what is recorded of which table."""
        self._recorder, self._tables = recorder, tables

    def lookup(
        self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]
    ) -> int:
        """As :class:`Session`."""
        self._note(table, oids, scores)
        return super().lookup(table, oids, scores, addresses)

    def ask(self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8], addresses: NDArray[np.uint64]) -> int:
        """As :class:`Session`."""
        self._note(table, oids, scores)
        return super().ask(table, oids, scores, addresses)

    def _begin(self) -> None:
        super()._begin()
        self._asked = None if self._recorder is None or self._recorder.full else []

    def _end(self) -> bool:
        valid = super()._end()
        asked, self._asked = self._asked, None
        if asked and valid and self._recorder is not None:
            self._recorder.add(asked)
        return valid

    def _note(self, table: int, oids: NDArray[np.int64], scores: NDArray[np.uint8]) -> None:
        if self._asked is not None and table in self._tables:
            self._asked.append((self._tables[table], oids.copy(), scores.copy()))


_active: TraceRecorder | None = None


@contextmanager
def recording(recorder: TraceRecorder) -> Iterator[TraceRecorder]:
    """Sessions that models attach meanwhile, in any thread, tell ``recorder`` what they select.

    One for the process: what attaches lies below commands and servers that have nothing to do with recording.

    Raises:
        MisuseError: another one is being recorded.
    """
    global _active
    if _active is not None:
        raise MisuseError("recording", "another trace under way", "one at a time", "end the other first")
    _active = recorder
    try:
        yield recorder
    finally:
        _active = None


def session_kind() -> type[Session]:
    """The class of session to attach: the plain one unless a trace is being recorded."""
    return Session if _active is None else RecordingSession


def describe_tables(
    session: Session, sections: Callable[[], Sequence[Section]] | None, layers: int, kv_heads: int
) -> None:
    """Tell a session that records what its tables are; nothing for any other.

    Args:
        session: freshly attached.
        sections: of the store that is table 0; None if there is none.
        layers: of the model.
        kv_heads: of the model.
    """
    if not isinstance(session, RecordingSession) or _active is None:
        return
    tables = {} if sections is None else {0: _weights(sections())}
    if session.kv is not None:
        tables[session.kv.table] = _kv(session, layers, kv_heads)
    session.record(_active, tables)


def _weights(sections: Sequence[Section]) -> _Sources:
    firsts = np.array([section.first_oid for section in sections], np.int64)

    def locate(oids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        source = np.searchsorted(firsts, oids, side="right") - 1
        return source, oids - firsts[source]

    names = tuple(f"{section.layer}.{section.set}" for section in sections)
    layers = np.array([section.layer for section in sections], np.int64)
    return _Sources("weights", names, layers, locate, lambda: [section.count for section in sections])


def _kv(session: Session, layers: int, kv_heads: int) -> _Sources:
    """Groups are numbered through all blocks that were ever looked up. A block's number is given again to other tokens
    once it was dropped, or by another attachment: each of its lives is a block of its own here.
    """
    kv = session.kv
    assert kv is not None
    a_block, heads = kv.geometry.groups_per_block, layers * kv_heads
    groups = a_block // heads
    blocks: dict[tuple[int, int, int], int] = {}

    def locate(oids: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        ids, inverse = np.unique(oids // a_block, return_inverse=True)
        lives = [blocks.setdefault((kv.epoch, block, kv.lives[block]), len(blocks)) for block in ids.tolist()]
        within = oids % a_block
        return within // groups, np.array(lives, np.int64)[inverse] * groups + within % groups

    names = tuple(str(source // kv_heads) for source in range(heads))
    return _Sources("kv", names, np.arange(heads) // kv_heads, locate, lambda: [len(blocks) * groups] * heads)


def _spread(layers: int, wanted: int | None) -> NDArray[np.int64]:
    """``wanted`` of ``layers`` layers, the first among them, as evenly as can be."""
    count = layers if wanted is None else min(wanted, layers)
    return np.arange(count, dtype=np.int64) * layers // count


def _arrays(sources: _Sources, steps: Sequence[NDArray[np.void]]) -> dict[str, NDArray[np.generic]]:
    """Indices, scores and counts, by name; sources of one name (the heads of a layer) are stacked."""
    entries = np.concatenate(steps)
    step = np.repeat(np.arange(len(steps)), [len(each) for each in steps])
    order = np.argsort(entries["source"], kind="stable")
    entries, step = entries[order], step[order]
    ends = np.searchsorted(entries["source"], np.arange(len(sources.names) + 1))
    stacks: dict[str, list[tuple[NDArray[np.int64], NDArray[np.void]]]] = {}
    counts: dict[str, int] = {}
    for number, (name, count) in enumerate(zip(sources.names, sources.counts(), strict=True)):
        part = slice(ends[number], ends[number + 1])
        if part.stop > part.start:
            stacks.setdefault(name, []).append((step[part], entries[part]))
            counts[name] = count
    found: dict[str, NDArray[np.generic]] = {}
    for name, stack in stacks.items():
        indices, scores = _rows(stack, len(steps))
        heads = sources.kind == "kv"
        found[name], found["s" + name] = (indices, scores) if heads else (indices[0], scores[0])
        found["n" + name] = np.array(counts[name], np.uint32)
    return found


def _rows(
    stack: Sequence[tuple[NDArray[np.int64], NDArray[np.void]]], steps: int
) -> tuple[NDArray[np.int32], NDArray[np.float16]]:
    """[sources, steps, widest selection] of indices, -1 where there is none, and scores, 0 there."""
    sizes = [np.bincount(step, minlength=steps) for step, _ in stack]
    shape = (len(stack), steps, max(int(size.max()) for size in sizes))
    indices, scores = np.full(shape, -1, np.int32), np.zeros(shape, np.float16)
    for row, ((step, entries), size) in enumerate(zip(stack, sizes, strict=True)):
        at = np.arange(len(step)) - np.repeat(np.cumsum(size) - size, size)
        indices[row, step, at] = entries["index"]
        # The middle of what a request's score stands for: 1 + floor(16 · (log2 v + 12)), 0 = unknown.
        value = np.exp2((entries["score"].astype(np.float64) - 0.5) / 16 - 12)
        scores[row, step, at] = np.where(entries["score"] == 0, 0, value)
    return indices, scores
