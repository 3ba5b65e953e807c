"""Fixtures for tests of adapters."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """Take away the process group and the variables that trainers leave."""
    before = dict(os.environ)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def fresh_accelerate() -> Iterator[None]:
    """Let accelerate know no earlier Accelerator, and no later one this test's."""
    from tests.unit.interop.gradients.test_followed import fresh

    fresh()
    yield
    fresh()


@pytest.fixture(scope="session")
def deepspeed_source() -> Path:
    """The sources of DeepSpeed, which ``make test-all`` installs in an environment of its own."""
    python = os.environ.get("ZFUN_DEEPSPEED_PYTHON")
    if python is None:
        pytest.skip("ZFUN_DEEPSPEED_PYTHON must name a python that has DeepSpeed")
    (root,) = Path(python).parents[1].glob("lib/python*/site-packages/deepspeed")
    return root
