"""Entries of a state_dict() of tied parameters share memory at each stage, as in torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
from zfun import optim
from zfun.interop import Engine

EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.mid = nn.Embedding(5, 4), nn.Linear(4, 4)
        self.part = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Linear(5, 5))
        self.part[0].weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.mid(self.table(x)))


def shared(entries: Mapping[str, Tensor]) -> list[set[str]]:
    """Return the sets of names whose values have one memory."""
    found: dict[int, set[str]] = {}
    for name, x in entries.items():
        found.setdefault(x.untyped_storage().data_ptr(), set()).add(name)
    return [names for names in found.values() if len(names) > 1]


@EACH_STAGE
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
def test_tied_entries_share_memory_at_each_stage(stage: int, grad: bool, frozen: bool) -> None:
    def main(group: zf.Group) -> None:
        module = Tied()
        module.table.weight.requires_grad_(not frozen)
        plain = Tied()
        engine = Engine(module, optim.sgd(0.1), zero=stage, group=group)
        with nullcontext() if grad else torch.no_grad():
            entries = module.state_dict()
            around = nn.ModuleDict({"inner": module}).state_dict()
        wanted = {"table.weight", "part.0.weight"}
        assert shared(plain.state_dict()) == shared(entries) == [wanted]
        # A part without the other name, and a module around the engine's.
        assert shared(around) == [{f"inner.{name}" for name in wanted}]
        assert shared(module.part.state_dict()) == []
        for name, x in plain.state_dict().items():
            assert torch.equal(entries[name], x)
        # A dict that is filled again has the values of then.
        with torch.no_grad():
            kept: Any = OrderedDict()
            module.state_dict(destination=kept)
            before = kept["table.weight"].clone()
            module.table.weight.mul_(2.0)
            module.state_dict(destination=kept)
        assert torch.equal(kept["table.weight"], 2 * before)
        assert torch.equal(kept["part.0.weight"], 2 * before)
        assert torch.equal(engine.state_dict()["table.weight"], 2 * before)

    zf.simulate(2, main)
