"""Tensors without numbers, on ranks that are threads."""

from __future__ import annotations

import pytest
import torch

import zfun as zf


def test_tracing_leaves_nothing_of_its_thread_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch made for CUDA, on a machine without, would crash in the second thread."""

    def refuse() -> None:
        raise AssertionError("a stand-in for devices goes with its thread")

    def main(group: zf.Group) -> int:
        params = {"w": torch.zeros(3)}
        found = zf.trace(lambda p, x: (p["w"] * x).sum(), params, torch.zeros(3), group.size)
        return zf.live_bytes(0, zf.layout_of(params, group.size), zf.schedule(found), zf.optim.sgd(0.1)).kept.device.params

    monkeypatch.setattr(torch._C, "_ensureCUDADeviceGuardSet", refuse)
    assert zf.simulate(2, main) == [256, 256]
