"""Evaluate a prepared model over windows of a text as if nothing missed: :mod:`strataflux.client.evaluate.dense`."""

from collections.abc import Callable, Mapping, Sequence

import torch

from strataflux.client.evaluate.compare import Row, join_scores, require_same_dimensions
from strataflux.client.evaluate.dense import DenseModel, dense_reference, dense_score
from strataflux.client.evaluate.scoring import Score
from strataflux.client.prepare.prepared import PreparedModel
from strataflux.client.prepare.refinement import read_refinement
from strataflux.client.runtime.models import SETS, DecoderWeights

__all__ = ["evaluate_dense"]


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
        k: channels per 1,024; None takes the prepared model's.
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
    values = [{name: matrix.to(where) for name, matrix in layer.items()} for layer in read_refinement(prepared)]
    budgets = dict.fromkeys(SETS, k) if isinstance(k, int) else dict(k or prepared.manifest.k)
    models = {"base": DenseModel(low), "refined": DenseModel(low, values, budgets)}
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
