"""How often the host waits for the device in a step, on the group of nccl.

No GPU takes part. A tensor "on the device" keeps its numbers in host memory and says that it lies
elsewhere, so that a number that the host reads, and a copy from one side to the other, can be
counted. Three peers have the values of this rank. The kernels for CPUs stand for those in Triton.
"""

from __future__ import annotations

import collections
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map_only

import zfun as zf
from tests.conftest import FORM
from zfun import ops
from zfun.collectives import AllGather, AllReduce, ReduceScatter, gather_values
from zfun.collectives.backends import _nccl
from zfun.collectives.backends._nccl import NativeGroup
from zfun.ops import _norm, _ravel, _steps
from zfun.recipes import _update
from zfun.reductions import mean_metrics
from zfun.stores import _streams
from zfun.testing import assert_same_bits

ROOT = Path(zf.__file__).parent
# Autograd runs the backward of this device on the calling thread, and torch has no kernels for it.
DEVICE, HOST = torch.device("lazy"), torch.device("cpu")
SIZE = 4
READS = {
    "_local_scalar_dense",
    "_unique2",
    "bincount",
    "equal",
    "masked_select",
    "nonzero",
    "unique_dim",
}
LAYERS = [f"h.{i}" for i in range(3)]


class OnDevice(Tensor):
    """A tensor that says that it lies on the device."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # pyrefly: ignore[bad-override]
    held: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        made: Any = Tensor._make_wrapper_subclass(
            cls,
            values.shape,
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=DEVICE,
        )
        made.held = values
        return made

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.cpu().numpy(force=force)


class Waits(TorchDispatchMode):
    """Makes tensors on the device, and counts the waits by their place in zfun.

    A copy from the host counts too: from memory that is not pinned, it waits for its turn. A copy
    to pinned memory, over a queue, does not; a wait for the event of its end does, unless the
    device is there already.
    """

    places: ClassVar[collections.Counter[str]] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    name, wanted = func.overloadpacket.__name__, kwargs.get("device")
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    lie_there = [isinstance(x, OnDevice) for x in tensors]
    goes_there = any(lie_there) if wanted is None else torch.device(wanted).type == DEVICE.type
    here = tree_map_only((OnDevice, torch.device), _here, (args, kwargs))
    out = func(*here[0], **here[1])
    if name in READS and any(lie_there):
        _note(name)
    elif name == "_to_copy" and goes_there is not lie_there[0]:
        _note("to device" if goes_there else "to host")
    elif name == "copy_" and lie_there[0] is not lie_there[1]:
        _note("copy to device" if lie_there[0] else "copy to host")
    elif any(lie_there) and any(
        x.ndim and not there for x, there in zip(tensors, lie_there, strict=True)
    ):
        raise RuntimeError(f"{func} takes tensors on one device; got some on two")
    if not goes_there:
        return out
    made = tree_map_only(Tensor, lambda x: x if isinstance(x, OnDevice) else OnDevice(x), out)
    return return_and_correct_aliasing(func, args, kwargs, made) if any(lie_there) else made


def _here(x: Any) -> Any:
    if isinstance(x, OnDevice):
        return x.held
    return HOST if x == DEVICE else x


def _note(kind: str) -> None:
    frame: Any = sys._getframe(1)
    places = []
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(ROOT):
            places.append(f"{file.relative_to(ROOT).as_posix()}:{frame.f_lineno}")
        frame = frame.f_back
    if places:
        # The line that waits, and the lines that led there.
        Waits.places[f"{kind}: {' < '.join(places[:4])}"] += 1


class _Event:
    """The end of a copy to pinned memory, which has other values until the device is there."""

    def __init__(self, out: Tensor, x: OnDevice) -> None:
        self._copy: tuple[Tensor, Tensor] | None = (out.fill_(-9), x.held.clone())

    def query(self) -> bool:
        return self._copy is None

    def synchronize(self) -> None:
        if self._copy is not None:
            _note("event")
        self.arrive()

    def arrive(self) -> None:
        if self._copy is not None:
            self._copy[0].copy_(self._copy[1])
        self._copy = None


class _Queue:
    """A queue of copies to the host, and the events that the device has not reached."""

    ahead: ClassVar[list[_Event]] = []

    def start(self, out: Tensor, x: OnDevice, after: Any = None) -> _Event:
        assert after is None
        with _disable_current_modes():
            self.ahead.append(_Event(out, x))
        return self.ahead[-1]

    def slot(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)

    @classmethod
    def arrive(cls) -> None:
        """Let the device do all that the host has started."""
        with _disable_current_modes():
            while cls.ahead:
                cls.ahead.pop().arrive()


class _Kernels:
    """Kernels of the device, which read nothing."""

    @staticmethod
    def takes(*tensors: Tensor) -> bool:
        return True

    @staticmethod
    def squares_in_bins(x: OnDevice) -> OnDevice:
        return OnDevice(_on_values(ops.squares_in_bins, x))

    @staticmethod
    def step(*arguments: Any) -> bool:
        _on_values(_steps._step, *arguments)
        return True

    @staticmethod
    def ravel_into(out: Tensor, tensors: Any, offsets: Any, scale: Any) -> bool:
        _on_values(functools.partial(ops.ravel_into, scale=_here(scale)), out, tensors, offsets)
        return True


def _on_values(kernel: Callable[..., Any], *args: Any) -> Any:
    with _disable_current_modes():
        return kernel(*tree_map_only(Tensor, _here, args))


class _Complete:
    def wait(self) -> None: ...


def _issue(group: Any, call: Any, x: Tensor, out: Tensor) -> list[Any]:
    """Take part in a collective whose other ranks have the values of this rank."""
    match call.op:
        case AllGather():
            out.copy_(x.repeat(SIZE))
        case ReduceScatter():
            out.copy_(x.view(SIZE, -1)[group.rank] * SIZE)
        case AllReduce():
            out.copy_(x * SIZE)
        case _:
            out.copy_(x)
    return [_Complete()]


def _gather_over_host(group: Any, x: Tensor, out: Tensor) -> _Complete:
    assert not isinstance(x, OnDevice)
    assert not isinstance(out, OnDevice)
    out.copy_(x.repeat(SIZE))
    return _Complete()


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[NativeGroup]:
    monkeypatch.setattr(_nccl, "_device_of_rank", lambda: DEVICE)
    monkeypatch.setattr(NativeGroup, "_issue", _issue)
    monkeypatch.setattr(NativeGroup, "_gather_over_host", _gather_over_host)
    monkeypatch.setattr(NativeGroup, "_connect_hosts", lambda self: None)
    monkeypatch.setattr(_streams, "queue_of", lambda device: _Queue())
    _Queue.ahead.clear()
    for module in (_norm, _ravel, _steps):
        monkeypatch.setattr(
            module, "triton_for", lambda x: _Kernels if isinstance(x, OnDevice) else None
        )
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=SIZE)
    try:
        with NativeGroup(dist.group.WORLD, dist.HashStore(), 0, SIZE, 20.0, None) as made:
            yield made
    finally:
        dist.destroy_process_group()


def _loss(params: Any, batch: Tensor) -> Tensor:
    for layer in LAYERS:
        batch = torch.tanh(batch @ params[layer]["w"] + params[layer]["b"])
    return batch.square().sum()


def _weighted(params: Any, batch: Tensor) -> Any:
    # The device computes the number of tokens.
    return zf.weighted_mean(_loss(params, batch), (batch > -9.0).sum())


def _counted(params: Any, batch: Tensor) -> Any:
    return zf.weighted_mean(_loss(params, batch), len(batch))


def _using_less(params: Any, batch: Tensor) -> Tensor:
    return torch.tanh(batch @ params["h.0"]["w"]).sum()


def _params() -> dict[str, dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return {
        layer: {
            "w": torch.randn(6, 6, generator=generator).to(DEVICE),
            "b": torch.zeros(6, device=DEVICE),
        }
        for layer in LAYERS
    }


def _waits(
    group: NativeGroup,
    stage: int,
    loss: Callable[..., Any] = _loss,
    clips: bool = False,
    is_near: bool = True,
    **options: Any,
) -> int:
    """Return how often the host waits in the second step.

    A device that is near does the work of a step while the host issues the next forward pass.
    """
    optimizer = zf.optim.adamw(0.01)
    if clips:
        optimizer = zf.optim.chain(zf.optim.clip_by_global_norm(0.01), optimizer)

    def followed(params: Any, batch: Tensor) -> Any:
        if is_near:
            _Queue.arrive()
        return loss(params, batch)

    z = zf.zero(stage, followed, optimizer, group, bucket_bytes=200, **options)
    with Waits():
        state = z.init(_params())
        batch = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        state, _ = z.step(state, batch)
        Waits.places.clear()
        state, info = z.step(state, batch)
        # The report of a failure shows the output.
        print(*(f"{count} x {place}" for place, count in Waits.places.items()), sep="\n")
        total = Waits.places.total()
        assert not info.skipped
    assert state.step == 2
    return total


SCALE = zf.Precision(loss_scale=zf.optim.dynamic_loss_scale(256.0))
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clips": True},
    "weighted": {"num_micro_batches": 4, "loss": _weighted},
    "weighted by numbers": {"num_micro_batches": 4, "loss": _counted},
    "scaled": {"precision": SCALE},
    "with an unused leaf": {"loss": _using_less},
    "bfloat16": {"precision": torch.bfloat16, "clips": True},
    "all": {"clips": True, "num_micro_batches": 4, "loss": _weighted, "precision": SCALE},
}


@pytest.mark.parametrize("stage", range(4))
def test_the_host_waits_once_in_a_step(group: NativeGroup, stage: int) -> None:
    """For the norm and the numbers of unused leaves, which decide whether to take the step."""
    waits = {form: _waits(group, stage, **options) for form, options in FORMS.items()}
    assert waits == dict.fromkeys(FORMS, 1)


@pytest.mark.parametrize("stage", range(4))
def test_the_host_does_not_wait_where_the_device_decides(group: NativeGroup, stage: int) -> None:
    """Except for the steps that leaves have missed, which the host counts."""
    forms = FORMS if FORM == "all" else {"all": FORMS["all"]}
    waits = {form: _waits(group, stage, max_skipped=None, **forms[form]) for form in forms}
    assert waits == {form: int(form == "with an unused leaf") for form in forms}


def test_unused_leaves_that_step_by_zeros_make_no_wait(group: NativeGroup) -> None:
    assert _waits(group, 3, _using_less, max_skipped=None, unused="zeros") == 0


def test_a_host_that_is_a_step_ahead_waits_for_the_count_alone(group: NativeGroup) -> None:
    assert _waits(group, 3, max_skipped=None, is_near=False, **FORMS["all"]) == 1
    assert next(iter(Waits.places)).startswith("event: stores/_streams.py")


@pytest.mark.parametrize(("stage", "kernels"), [(0, "readable"), (3, "of the device")])
def test_a_step_that_the_device_leaves_out_has_the_bits_of_the_host(
    group: NativeGroup, monkeypatch: pytest.MonkeyPatch, stage: int, kernels: str
) -> None:
    if kernels == "readable":
        monkeypatch.setattr(_Kernels, "step", lambda *arguments: False)
    # Torch has no kernel that finds the bad elements on the device of this test.
    monkeypatch.setattr(_update, "first_bad_leaf", lambda grads: None)
    rule = zf.optim.chain(
        zf.optim.clip_by_global_norm(0.1), zf.optim.adamw(zf.optim.linear(0.1, 0, 9))
    )

    def train(max_skipped: int | None) -> Any:
        z = zf.zero(
            stage,
            _weighted,
            rule,
            group,
            bucket_bytes=200,
            max_skipped=max_skipped,
            num_micro_batches=2,
            precision=SCALE,
        )
        with Waits():
            state, run = z.init(_params()), []
            for step in range(3):
                batch = torch.full((8, 6), float("inf") if step == 1 else 0.1 * step)
                state, info = z.step(state, batch.to(DEVICE))
                assert bool(info.skipped) is (step == 1)
                run += [float(info.grad_norm), float(info.loss_scale), info.learning_rate]
                run += [int(info.num_applied), int(state.num_skipped)]
            # The norm of the step that is left out is no number.
            numbers = [x for x in run if x == x]
            return numbers, [x.cpu() for x in zf.tree.leaves((z.params(state), state.opt_state))]

    assert_same_bits(train(None), train(9))


@pytest.fixture
def ways(group: NativeGroup, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The way of each gather over the hosts, and the connections."""
    noted: list[str] = []

    def gather(group: Any, x: Tensor, out: Tensor) -> _Complete:
        noted.append("over the hosts")
        return _gather_over_host(group, x, out)

    monkeypatch.setattr(NativeGroup, "_gather_over_host", gather)
    monkeypatch.setattr(NativeGroup, "_connect_hosts", lambda group: noted.append("connected"))
    return noted


def test_ranks_connect_over_the_hosts_when_all_have_gathered(
    group: NativeGroup, ways: list[str]
) -> None:
    with Waits():
        for _ in range(2):
            gather_values(torch.ones(2), group, "words")
    assert ways == ["connected", "over the hosts", "connected"]


@pytest.mark.parametrize("value", [0.5, torch.tensor(0.5)])
def test_metrics_go_one_way_whatever_a_rank_passes(
    group: NativeGroup, ways: list[str], value: Any
) -> None:
    with Waits():
        gather_values(torch.ones(2), group, "words")
        ways.clear()
        value = value.to(DEVICE) if isinstance(value, Tensor) else value
        found = mean_metrics([({"accuracy": value}, 3)], group)["accuracy"]
        assert float(found) == 0.5
    assert ways == ["over the hosts", "connected"]


def _summed(group: NativeGroup) -> Any:
    return zf.data_parallel(zf.value_and_grad(_loss), group)


GRADIENTS: dict[str, Callable[[Any], Any]] = {
    "of a rank": lambda group: zf.value_and_grad(_loss),
    "parts of a sum": _summed,
    "whole": lambda group: zf.transforms.replicate_grads(_summed(group), group),
    "in shards": lambda group: zf.shard_grads(_summed(group), group),
    "of shards": lambda group: zf.value_and_grad(zf.shard_params(_loss, group)),
}


@pytest.mark.parametrize("form", GRADIENTS)
def test_a_graph_of_gradients_would_leave_nothing_out_below_stage_3(
    group: NativeGroup, ways: list[str], form: str
) -> None:
    """A replay repeats no read of a number, and no gather over the hosts."""
    with Waits():
        parts = {"w": torch.eye(6).to(DEVICE), "b": torch.zeros(6, device=DEVICE)}
        params: Any = dict.fromkeys(LAYERS, parts)
        params = zf.tree.map(torch.clone, params)
        value = zf.shard(params, group) if form == "of shards" else params
        vg = GRADIENTS[form](group)
        for _ in range(3):
            Waits.places.clear()
            ways.clear()
            vg(value, torch.ones(8, 6, device=DEVICE))
    assert Waits.places.total() == 0
    assert bool(ways) == (form == "of shards")
