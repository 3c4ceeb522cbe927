"""What the tests of methods share."""

from typing import Any

import pytest
import torch

from strataflux.client.evaluate.methods.base import Making
from strataflux.client.runtime.models import DecoderWeights


@pytest.fixture
def weights(tiny_source: Any) -> DecoderWeights:
    return DecoderWeights.read(tiny_source)


@pytest.fixture
def making(weights: DecoderWeights) -> Making:
    random = torch.Generator().manual_seed(3)
    return Making(weights, torch.randint(0, 256, (40, 48), generator=random))
