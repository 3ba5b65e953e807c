"""A small model, and the batches of its ranks."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import zfun as zf
from tests import models

STAGES = [0, 1, 2, 3]
EACH_STAGE = pytest.mark.parametrize("stage", STAGES)


def fresh() -> dict[str, Any]:
    return models.mlp(num_layers=3)


def batch_of(group: zf.Group, step: int = 0) -> Tensor:
    return models.mlp_batches(step + 1, group.size)[step][group.rank]
