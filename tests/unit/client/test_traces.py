"""Trace files: both layouts, their scores, and what is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strataflux.client.errors import InputError
from strataflux.client.traces import load_traces


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_weight_sets_follow_each_other_and_one_name_has_one_width(tmp_path: Path) -> None:
    path = write(
        tmp_path / "w.npz",
        **{
            "0.qkv": np.array([[0, 2]]),
            "0.down": np.array([[5]]),
            "1.qkv": np.array([[1, 3]]),
            "1.down": np.array([[0]]),
        },
    )
    [trace] = load_traces(path)
    assert (trace.name, trace.n_keys) == ("w", 4 + 6 + 4 + 6)
    assert trace.keys.tolist() == [[0, 2, 4 + 5, 10 + 1, 10 + 3, 14 + 0]]
    assert trace.scores is None


def test_kv_heads_are_sources_of_their_own(tmp_path: Path) -> None:
    layer = np.array([[[0], [1]], [[2], [0]]], np.int16)  # [head, step, k]
    scores = np.array([[[0.5], [0.25]], [[1], [0.125]]], np.float16)
    [trace] = load_traces(write(tmp_path / "kv.npz", **{"0": layer, "s0": scores}))
    assert trace.n_keys == 6
    assert trace.keys.tolist() == [[0, 3 + 2], [1, 3 + 0]]
    assert trace.scores is not None
    assert trace.scores.tolist() == [[0.5, 1], [0.25, 0.125]]


def test_weight_scores_are_shares_of_their_largest(tmp_path: Path) -> None:
    arrays = {"0.o": np.array([[0, 1], [1, 2]]), "s0.o": np.array([[2, 8], [3, 3]], np.float32)}
    [trace] = load_traces(write(tmp_path / "w.npz", **arrays))
    assert trace.scores is not None
    assert trace.scores.tolist() == [[0.25, 1], [1, 1]]


@pytest.mark.parametrize(
    ("arrays", "found"),
    [
        ({"0.o": np.zeros((2, 2))}, r"array '0.o' of float64\[2, 2\]"),
        ({"0.o": np.zeros(3, np.int16)}, r"array '0.o' of int16\[3\]"),
        ({"0.o": np.full((1, 1), -2)}, "array '0.o'"),
        ({"0.o": np.zeros((2, 1), int), "1.o": np.zeros((3, 1), int)}, r"sources of \[2, 3\] steps"),
        ({"0.o": np.zeros((2, 1), int), "s0.o": np.zeros((2, 2))}, r"scores \[2, 2\] for '0.o'"),
        ({"0.o": np.full((1, 1), -1)}, "no request in any step"),
        ({"0.o": np.array([[3]]), "n0.o": np.array(3)}, "'n0.o' 3 and an index of 3"),
        ({"0.o": np.array([[3]]), "n0.o": np.array([9])}, "'n0.o'"),
        ({}, "no selections"),
    ],
)
def test_other_arrays_are_refused(tmp_path: Path, arrays: dict[str, Any], found: str) -> None:
    with pytest.raises(InputError, match=found):
        load_traces(write(tmp_path / "t.npz", **arrays))


def test_other_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("no archive")
    np.save(tmp_path / "one.npy", np.zeros(3))
    found = {"text.npz": "not a zip file", "one.npy": "not a zip file", "absent.npz": "No such file"}
    for name, reason in found.items():
        with pytest.raises(InputError, match=f"{name}: found .*{reason}"):
            load_traces(tmp_path / name)


def test_rows_may_be_short_and_counts_told(tmp_path: Path) -> None:
    arrays = {
        "0": np.array([[[4, -1], [1, 2]]]),
        "n0": np.array(9),
        "1": np.array([[[0, -1], [8, -1]]]),
        "n1": np.array(9),
    }
    [trace] = load_traces(write(tmp_path / "kv.npz", **arrays))
    assert (trace.n_keys, trace.requests) == (18, 5)
    assert trace.keys.tolist() == [[4, -1, 9, -1], [1, 2, 17, -1]]


def test_weights_and_kv_of_one_file_are_two_traces(tmp_path: Path) -> None:
    path = write(tmp_path / "t.npz", **{"0.o": np.array([[1], [0]]), "0": np.array([[[5]]])})
    assert [(trace.name, trace.n_keys, len(trace.keys)) for trace in load_traces(path)] == [
        ("t.weights", 2, 2),
        ("t.kv", 6, 1),
    ]
