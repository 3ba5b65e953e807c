"""The host waits for the device at one place of a step; counted on simulated ranks of the CPU.

A wait of the host is a read of a number that the device computes (``item()``, ``bool()``,
``tolist()``), a result whose shape depends on values (``nonzero()``), or a copy to the device from
memory that is not pinned (``torch.tensor(x, device=...)``). On a CPU the same calls are made, and
can be counted. Two parts are not counted: kernels with a separate form for devices, and the
transport of the simulated ranks, which on devices is nccl.
"""

from __future__ import annotations

import collections
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import zfun as zf
from zfun import tree

ROOT = Path(zf.__file__).parent
# Kernels with a form for devices; the forms for CPUs read arrays.
KERNELS = {
    "_step",
    "dequantise",
    "pack_signs",
    "quantise",
    "ravel",
    "ravel_into",
    "squares_in_bins",
    "sum_dequantised",
    "unpack_signs",
}
READS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten._unique2.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.unique_dim.default,
}
# The end of the loss begins backward, and the end of backward begins the norm.
PHASES = ("before", "forward", "backward", "norm", "update")
# Functions that read numbers of the host.
ON_THE_HOST = {"step_count"}
PARAMS = {f"layer{i}": {"w": (6, 6), "b": (6,)} for i in range(4)}


def place_of_read() -> str | None:
    """Return the line of zfun that waits, or ``None`` for a call that does not wait on a device."""
    frame: Any = sys._getframe(2)
    place = None
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            module = file.relative_to(ROOT).as_posix()
            if frame.f_code.co_name in ON_THE_HOST or (
                module.startswith("ops/") and frame.f_code.co_name in KERNELS
            ):
                return None
            if place is None:
                place = f"{module}:{frame.f_lineno} {frame.f_code.co_name}"
            if not module.startswith("ops/"):
                return None if "simulat" in module else place
        frame = frame.f_back
    return place


class Recorder(TorchDispatchMode):
    """Counts, for one rank, the places that wait, by the phase of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.phase = "before"
        self.found: dict[str, list[str]] = collections.defaultdict(list)

    def note(self) -> None:
        place = place_of_read()
        if place is not None:
            self.found[self.phase].append(place)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [x for x in tree.leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        local = bool(inputs) and all(is_local(x) for x in inputs)
        if func in READS and not local:
            self.note()
        out = func(*args, **(kwargs or {}))
        if local:
            for x in tree.leaves(out):
                mark_local(x)
        return out


def mark_local(x: Any) -> Any:
    """Mark a tensor that would be in host memory with a device too: a copy for the host, or a
    result of such copies.
    """
    if isinstance(x, Tensor):
        x._is_local = True  # pyrefly: ignore[missing-attribute]
    return x


def is_local(x: Any) -> bool:
    return getattr(x, "_is_local", False)


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> dict[int, Recorder]:
    """Return the recorders by thread, and hook the calls that a dispatch mode does not see."""
    found: dict[int, Recorder] = {}

    def telling(owner: Any, name: str, waits: Callable[..., bool]) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            recorder = found.get(threading.get_ident())
            if recorder is None:
                return original(*args, **kwargs)
            waited = waits(*args, **kwargs)
            if waited:
                recorder.note()
            out = original(*args, **kwargs)
            if name == "tensor":
                return out if waited else mark_local(out)
            # A copy, because the tensor of the device must stay unmarked.
            return mark_local(out.clone()) if name == "cpu" else out

        monkeypatch.setattr(owner, name, call)

    def uploads(*args: Any, device: Any = None, **kwargs: Any) -> bool:
        if isinstance(device, str) and device == "cpu":  # the host, with a device too
            return False
        # The named device is the host if the caller has tensors of the host only.
        tensors = [x for x in sys._getframe(2).f_locals.values() if isinstance(x, Tensor)]
        return device is not None and not (tensors and all(is_local(x) for x in tensors))

    for name in ("tolist", "numpy", "cpu"):
        telling(Tensor, name, lambda x, *args, **kwargs: not is_local(x))
    telling(torch, "tensor", uploads)
    grad, depth = torch.autograd.grad, collections.Counter[int]()

    def marked(*args: Any, **kwargs: Any) -> Any:
        recorder = found.get(threading.get_ident())
        if recorder is None:
            return grad(*args, **kwargs)
        depth[threading.get_ident()] += 1
        try:
            return grad(*args, **kwargs)
        finally:
            depth[threading.get_ident()] -= 1
            # The recomputation of a block calls this function within backward.
            if not depth[threading.get_ident()]:
                recorder.phase = "norm"

    monkeypatch.setattr(torch.autograd, "grad", marked)
    return found


def params_of() -> Any:
    generator = torch.Generator().manual_seed(0)
    return {
        layer: {
            name: 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
        }
        for layer, shapes in PARAMS.items()
    }


def waits_of_a_step(
    recorders: dict[int, Recorder], stage: int, weighted: bool = False, **options: Any
) -> dict[str, list[str]]:
    """Take steps on two ranks; return the places where rank 0 waits in the fourth, by phase."""

    def main(group: zf.Group) -> dict[str, list[str]]:
        recorder = Recorder()

        def loss_fn(params: Any, batch: Tensor) -> Any:
            recorder.phase = "forward"
            x = batch
            for layer in PARAMS:
                x = torch.tanh(x @ params[layer]["w"] + params[layer]["b"])
            loss = x.square().sum()
            recorder.phase = "backward"
            return zf.weighted_mean(loss, torch.tensor(float(len(batch)))) if weighted else loss

        inner = zf.optim.adamw(0.01)

        def apply(*args: Any, **kwargs: Any) -> Any:
            recorder.phase = "update"
            return inner.apply(*args, **kwargs)

        z = zf.zero(stage, loss_fn, inner._replace(apply=apply), group, bucket_bytes=200, **options)
        state = z.init(params_of())
        batches = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(group.rank))
        for batch in batches[:3]:
            state, _ = z.step(state, batch)
        recorder.phase = "before"
        recorders[threading.get_ident()] = recorder
        with recorder:
            state, _ = z.step(state, batches[3])
        del recorders[threading.get_ident()]
        return dict(recorder.found)

    return zf.simulate(2, main)[0]


# The host waits once, to read the norm. The divergence check reads tensors of the host.
NORM = {"norm": 1}
STAGES = range(4)


def check(found: dict[str, list[str]], bounds: dict[str, int]) -> None:
    for phase in PHASES:
        places = found.get(phase, [])
        assert len(places) <= bounds.get(phase, 0), (
            f"in phase {phase!r} the host waits for the device at {places}"
        )
    # The read of the norm must be found, or the recorder sees nothing.
    assert found["norm"]


@pytest.mark.parametrize(
    "options", [{}, {"precision": torch.bfloat16}], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_waits_for_the_norm(
    recorders: dict[int, Recorder], stage: int, options: dict[str, Any]
) -> None:
    check(waits_of_a_step(recorders, stage, **options), NORM)


@pytest.mark.parametrize("stage", STAGES)
def test_a_step_with_micro_batches_waits_once(recorders: dict[int, Recorder], stage: int) -> None:
    check(waits_of_a_step(recorders, stage, num_micro_batches=2), NORM)


@pytest.mark.parametrize("stage", STAGES)
def test_a_weighted_mean_waits_for_the_weight(recorders: dict[int, Recorder], stage: int) -> None:
    # Backward reads the weight, which the device computes at the end of forward.
    bounds = {"backward": 1, **NORM}
    check(waits_of_a_step(recorders, stage, weighted=True), bounds)
