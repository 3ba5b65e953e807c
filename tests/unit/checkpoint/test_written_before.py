"""Checkpoints that an earlier zfun wrote load, and the same state is saved as the same bytes.

See ``tests/fixtures/checkpoints``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zfun as zf
from tests.fixtures.checkpoints import write
from zfun.checkpoint import read_manifest, step_path, verify

pytestmark = pytest.mark.timeout(60)

EACH_CASE = pytest.mark.parametrize("name", write.CASES)


def expected(name: str) -> list[dict[str, Any]]:
    ranks = json.loads((write.HERE / name / "expected.json").read_text(encoding="utf-8"))
    return [{key: json.loads(value) for key, value in held.items()} for held in ranks]


@EACH_CASE
@pytest.mark.parametrize(("size", "stage"), [(2, 3), (2, 0), (1, 3), (3, 2)])
def test_an_old_checkpoint_loads_under_each_composition(name: str, size: int, stage: int) -> None:
    compose, start = write.CASES[name]

    def run(group: zf.Group) -> Any:
        fresh = {key: torch.zeros_like(x) for key, x in start().items()}
        like = compose(group, stage).init(fresh)
        generator = torch.Generator()
        found = zf.load(write.HERE / name, like, rng={"augment": generator} if size < 3 else False)
        if size < 3:
            assert generator.initial_seed() == group.rank
        assert found.step == 3
        assert found.data["epoch"] == 2
        assert found.data["mask"].tolist() == [True, False]
        assert found.loader == ({"row": 10 + group.rank} if group.rank < 2 else None)
        return write.listed(found.state)

    for rank, values in enumerate(zf.simulate(size, run)):
        assert values == expected(name)[rank % 2]


@EACH_CASE
def test_the_same_state_is_saved_as_the_same_bytes(name: str, tmp_path: Path) -> None:
    compose, start = write.CASES[name]

    def run(group: zf.Group) -> None:
        found = zf.load(write.HERE / name, compose(group).init(start()), rng=False)
        zf.save(tmp_path, found.state, data=found.data, loader=found.loader)

    zf.simulate(2, run)
    old, new = (Path(step_path(path)) for path in (write.HERE / name, tmp_path))
    files = sorted(file.name for file in old.glob("*.safetensors"))
    assert files == ["00000.safetensors", "00001.safetensors"]
    for file in files:
        assert (old / file).read_bytes() == (new / file).read_bytes()
    first, second = (replace(read_manifest(path), rng=[]) for path in (old, new))
    assert first == second


@EACH_CASE
def test_every_byte_of_an_old_checkpoint_verifies(name: str) -> None:
    assert not verify(write.HERE / name).problems
