"""Unmodified models of transformers over a sequence axis, beside the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests.unit.parallel import sequence_models as models
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(120)

MESHES = [(2, 2), (1, 4)]
KINDS = [("ulysses", False), ("ring", False), ("ring", True)]


def assert_close(found: Any, expected: Any) -> None:
    losses, params = expected
    assert found[0] == pytest.approx(losses, abs=1e-12, rel=0)
    assert found[1].keys() == params.keys()
    for key, leaf in params.items():
        torch.testing.assert_close(found[1][key], leaf, atol=1e-12, rtol=0, msg=key)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize(("kind", "zigzag"), KINDS)
@pytest.mark.parametrize("name", models.NAMES)
def test_a_model_is_the_plain_one(name: str, kind: str, zigzag: bool, sizes: Any) -> None:
    for optimizer, stage in (("adamw", 3), ("sgd", 0)):
        expected = models.plain(name, optimizer, 3)
        for found in zf.simulate(
            4, lambda group: models.train(group, name, stage, optimizer, sizes, kind, zigzag)
        ):
            assert_close(found, expected)


@pytest.mark.parametrize(("kind", "zigzag"), [KINDS[0], KINDS[2]])
def test_every_stage_has_the_same_bits(kind: str, zigzag: bool) -> None:
    expected = None
    for stage in range(4):
        found = zf.simulate(
            4, lambda group: models.train(group, "Qwen3", stage, kind=kind, zigzag=zigzag)
        )
        assert_same_bits(found, [found[0]] * 4)
        expected = expected or found
        assert_same_bits(found, expected)
