"""The descent over a block, recorded and replayed on a device, against its definition there."""

import pytest
import torch

from strataflux.client.prepare.bases.descent import block_descent
from strataflux.client.prepare.bases.lnq import descend_block
from tests.unit.client.prepare.test_descent import block

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_a_replay_moves_weights_as_the_definition_does() -> None:
    device = torch.device("cuda")
    descend = block_descent(device)
    for seed, shape in enumerate([(300, 128, 8, 3), (300, 64, 8, 3), (300, 128, 8, 3), (70, 128, 16, 1)]):
        expected, found = ([one.to(device) for one in block(*shape, seed=seed)] for _ in range(2))
        descend_block(*expected)
        descend(*found)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
