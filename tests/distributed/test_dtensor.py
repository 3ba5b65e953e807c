"""DTensors of FSDP2, HSDP and tensor parallelism on four processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import zfun as zf
from tests.distributed import processes
from tests.distributed.programs import dtensors
from zfun.collectives import Workers

pytestmark = [pytest.mark.processes, pytest.mark.timeout(90)]


@pytest.fixture(scope="module")
def four() -> Iterator[Workers]:
    with processes(4, timeout_s=60.0, collective_timeout_s=20.0) as held:
        yield held


@pytest.mark.parametrize(
    "body",
    [
        dtensors.there_and_back,
        dtensors.beside_tensor_parallelism,
        dtensors.out_of_fsdp_and_into,
        dtensors.mistakes,
    ],
    ids=lambda body: body.__name__,
)
def test_dtensors_go_in_and_out(four: Workers, body: Callable[[zf.Group], Any]) -> None:
    assert four.run(body) == [True] * 4
