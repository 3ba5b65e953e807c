"""Values of a live module that other libraries save, by the memory that they have."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import nn

import zfun as zf
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.interop.engine import Engine


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 64))


def stepped(stage: int, group: zf.Group) -> tuple[nn.Sequential, Engine]:
    model = make()
    engine = Engine(model, torch.optim.Adam(model.parameters(), 0.1), zero=stage, group=group)
    engine.backward(engine(torch.ones(8, 64)).square().mean())
    engine.step()
    return model, engine


def saved_bytes(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


@EACH_STAGE
@pytest.mark.parametrize("size", [1, 2])
def test_a_part_is_saved_without_the_rest(stage: int, size: int) -> None:
    part = make()[2]
    expected = [saved_bytes(part.state_dict()), saved_bytes(part.weight.data)]

    def main(group: zf.Group) -> None:
        model, _ = stepped(stage, group)
        assert [saved_bytes(model[2].state_dict()), saved_bytes(model[2].weight.data)] == expected
        for buffer in model.buffers():
            assert buffer.untyped_storage().nbytes() == buffer.nbytes

    zf.simulate(size, main)


@EACH_STAGE
@pytest.mark.parametrize("size", [1, 2])
def test_safetensors_saves_and_loads_a_model(stage: int, size: int, tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        model, engine = stepped(stage, group)
        path = tmp_path / f"{group.rank}.safetensors"
        safetensors.torch.save_model(model, str(path))
        plain = make()
        safetensors.torch.load_model(plain, str(path))
        torch.testing.assert_close(plain.state_dict(), engine.state_dict(), rtol=0, atol=0)
        # And back, after another step.
        engine.backward(engine(torch.ones(8, 64)).square().mean())
        engine.step()
        safetensors.torch.load_model(model, str(path))
        torch.testing.assert_close(engine.state_dict(), plain.state_dict(), rtol=0, atol=0)

    zf.simulate(size, main)
