"""Evaluate a prepared model over windows of a text as if nothing missed: :mod:`strataflux.client.evaluate.dense`."""

from collections.abc import Callable, Mapping, Sequence

import torch

from strataflux.client.evaluate.compare import Row, join_scores, require_same_dimensions
from strataflux.client.evaluate.dense import DenseModel, dense_reference, dense_score
from strataflux.client.evaluate.scoring import Score
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.refinement import COPY, read_refinement
from strataflux.client.runtime.models import DecoderWeights
from strataflux.client.schemes import Scheme, budgets_by_set

__all__ = ["evaluate_dense", "refined_dense"]


def refined_dense(
    prepared: PreparedModel,
    low: DecoderWeights,
    k: int | Mapping[str, int] | None = None,
    scheme: Scheme | None = None,
    shift: Mapping[str, float] | None = None,
    *,
    laddered: bool = False,
) -> DenseModel:
    """``prepared`` refined as if nothing missed.

    Args:
        prepared: the model.
        low: its resident weights; what refines them is taken to their device.
        k: budgets of all projection sets or of each; None takes the prepared model's.
        scheme: how MLPs are refined; None takes the prepared model's.
        shift: blocks of fetch lead or lag of each set; None takes the prepared model's.
        laddered: take each set's values from the fit for the nearest budget, not from the store.

    Raises:
        MisuseError: a budget is out of range, or the store does not serve ``scheme``.
        ContractError: the store is damaged.
    """
    manifest = prepared.manifest
    chosen = manifest.mlp_scheme if scheme is None else scheme
    budgets = budgets_by_set(manifest.k if k is None else k, chosen)
    device = low.embedding.device
    values = [
        {name: matrix.to(device) for name, matrix in layer.items()}
        for layer in read_refinement(prepared, chosen, budgets if laddered else None)
    ]
    copies = [layer.pop(COPY) for layer in values if COPY in layer]
    blocks = manifest.shift if shift is None else shift
    return DenseModel(low, values, budgets, shift=blocks, down_copies=copies)


def evaluate_dense(
    prepared: PreparedModel,
    reference: DecoderWeights | None,
    windows: Sequence[Sequence[int]],
    *,
    k: int | Mapping[str, int] | None,
    device: str = "cpu",
    on_window: Callable[[], object] = lambda: None,
) -> dict[str, Row]:
    """Score every window with the reference, the base and the refined model, under these names.

    Args:
        prepared: the model.
        reference: the unquantized weights; without them rows have perplexity and no divergence, and there is no
            ``reference`` row.
        windows: tokens, the first of each given and the others scored.
        k: channels per 1,024; None takes the prepared model's. Shifts and MLP scheme are the prepared model's.
        device: where it runs.
        on_window: called after each window.

    Raises:
        MisuseError: the reference is of other dimensions than the prepared model.
        ContractError: the store is damaged.
    """
    if reference is not None:
        require_same_dimensions(reference.config, prepared.config)
    where = torch.device(device)
    low = DecoderWeights.read(prepared).to(where)
    exact = low if reference is None else reference.to(where)
    models = {"base": DenseModel(low), "refined": refined_dense(prepared, low, k)}
    scores: dict[str, list[Score]] = {"reference": [], "base": [], "refined": []}
    for window in windows:
        expected = dense_reference(exact, window)
        scores["reference"].append(expected.score)
        for name, model in models.items():
            scores[name].append(dense_score(model, expected))
        on_window()
    rows = {name: Row(join_scores(parts), reference is not None) for name, parts in scores.items()}
    if reference is None:
        del rows["reference"]
    return rows
