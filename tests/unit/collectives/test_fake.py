"""Tensors without data, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import zfun as zf


def test_tracing_leaves_no_thread_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built for CUDA, on a machine without CUDA, would crash in the second thread."""

    def refuse() -> None:
        raise AssertionError("a stand-in for devices goes with its thread")

    def main(group: zf.Group) -> int:
        params = {"w": torch.zeros(300)}
        loss = lambda p, x: (p["w"] * x).sum()
        assert zf.planner.trace(loss, params, torch.zeros(300), group.size).forward == (0,)
        make = lambda abstract: zf.zero(0, loss, zf.optim.sgd(0.1), abstract)
        return zf.planner.live_bytes(
            make, params, torch.zeros(300), group.size
        ).steady.device.params

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", refuse)
    assert zf.simulate(2, main) == [1280, 1280]
