"""The Trainer of transformers on two processes, beside plain transformers on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed import processes, run_program
from zfun.collectives import Workers
from zfun.testing import assert_same_bits

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from tests.interop import trainers

# The start of two processes that import transformers takes most of the time.
pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(300)]

STAGES = ["0", "1", "2", "3", "offload"]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with processes(2, timeout_s=200.0, collective_timeout_s=60.0) as held:
        yield held


@pytest.mark.parametrize(
    ("names", "options"),
    [
        pytest.param(STAGES, {}, id="accumulation"),
        pytest.param(
            STAGES,
            {"max_steps": 8, "gradient_accumulation_steps": 1},
            id="one micro-batch",
        ),
    ],
)
def test_steps_are_those_of_plain_transformers_on_the_joined_batch(
    workers: Workers, names: list[str], options: dict[str, Any]
) -> None:
    rows, params = trainers.plain(**options)
    assert abs(rows[0][0] - rows[-1][0]) > 1e-3
    assert max(row[2] for row in rows) > 0.5  # the bound of the norm
    found = workers.run(trainers.every_stage, names, options)
    for rank in found:
        for name in names:
            got, values = rank[name]
            torch.testing.assert_close(
                torch.tensor(got), torch.tensor(rows), rtol=1e-5, atol=1e-5, msg=name
            )
            torch.testing.assert_close(values, params, rtol=1e-3, atol=1e-4)
    for name in names:
        for rank in found:
            assert rank[name][0] == found[0][names[0]][0]
            assert_same_bits(rank[name][1], found[0][names[0]][1])


@pytest.mark.parametrize("name", STAGES)
def test_a_run_goes_on_with_the_same_bits(workers: Workers, name: str, tmp_path: Path) -> None:
    import transformers

    found = workers.run(trainers.resumed, name, str(tmp_path))
    for rank in found:
        assert rank["second"][0] == rank["first"][0]
        assert_same_bits(rank["second"][1], rank["first"][1])
        assert_same_bits(rank["second"][1], found[0]["first"][1])
    saved = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "saved").eval()
    assert_same_bits(trainers.whole(saved), found[0]["first"][1])
    for rank, result in enumerate(found):
        tokens = saved.generate(
            torch.arange(4)[None], max_new_tokens=5 + rank, do_sample=False, pad_token_id=0
        )
        assert torch.equal(result["tokens"], tokens)
    oracle = trainers.make(
        transformers.Trainer,
        str(tmp_path / "plain"),
        model=saved,
        options={"per_device_eval_batch_size": 8},
    )
    assert abs(found[0]["loss"] - oracle.evaluate()["eval_loss"]) < 1e-5


def test_the_example_trains_on_two_ranks(tmp_path: Path) -> None:
    import transformers

    program = (
        f"import runpy, sys; sys.argv = ['hf_trainer.py', {str(tmp_path)!r}]; "
        "sys.path.insert(0, 'examples'); "
        "runpy.run_path('examples/hf_trainer.py', run_name='__main__')"
    )
    (code, text, error), (other, nothing, _) = run_program(program, timeout_s=200.0)
    assert (code, other) == (0, 0), error
    assert "def " in text
    assert "def " not in nothing
    assert transformers.GPT2LMHeadModel.from_pretrained(tmp_path).config.n_layer == 2


def test_trainers_of_trl_have_the_numbers_of_trl(workers: Workers, tmp_path: Path) -> None:
    trls = pytest.importorskip("tests.interop.trls")
    found = workers.run(trls.compare, trls.KINDS, trls.saved_model(tmp_path / "model"))
    for rank in found:
        trls.check(rank)
