"""Queues of copies on a device, beside the queue that computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import zfun as zf
from zfun.stores._streams import MAX_UNDER_WAY, hosted
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.cuda

_CYCLES = 1_000_000_000


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def _busy() -> torch.cuda.Event:
    """Keep the queue that computes busy; return the event of its end."""
    torch.cuda._sleep(_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


def test_a_copy_to_the_host_ends_beside_later_work() -> None:
    store, x = zf.stores.host(), torch.arange(2**20, device=_device())
    expected = x.cpu()
    handle = store.put(x, "params")
    end = _busy()
    assert torch.equal(handle.get(torch.device("cpu")).wait(), expected)
    assert not end.query()


def test_a_copy_to_the_device_ends_beside_later_work() -> None:
    store, x = zf.stores.host(), torch.arange(2**20)
    handle = store.put(x, "params")
    torch.cuda.synchronize()
    pending = handle.get(_device())
    end = _busy()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        found = pending.wait().cpu()
    assert not end.query()
    assert torch.equal(found, x)


def test_no_memory_is_used_again_before_its_copy() -> None:
    store, values = zf.stores.host(), [torch.randn(2**18) for _ in range(8 * MAX_UNDER_WAY)]

    def moved(x: Tensor) -> zf.stores.Stored:
        # Work that takes the memory of the tensor as soon as the store lets go of it.
        handle = store.put(x.to(_device()), "activations")
        torch.full((2**18,), float("nan"), device=_device())
        return handle

    handles = [moved(x) for x in values]
    for handle in handles:
        handle.get(_device())  # nobody waits
        torch.full((2**18,), float("nan"), device=_device())
    assert_same_bits([handle.get(_device()).wait().cpu() for handle in handles], values)


def test_a_checkpoint_reads_through_the_ring() -> None:
    values = [torch.randn(2**23 + 5), torch.randn(0), torch.randn(3).bfloat16()]
    assert_same_bits(list(hosted(x.to(_device()) for x in values)), values)
