"""Live bytes: what is planned from data is what is held, to the byte, each time a buffer is made."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import sys
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zfun as zf
from tests.conftest import examples
from zfun import ops, tree
from zfun.collectives import Call, Group, Pending, mesh_of
from zfun.flat import flats
from zfun.live import Held, Live
from zfun.optim import as_optimizer
from zfun.stores._host import HostStore

# A kernel has room for a chunk of fixed size, however long buffers are. Its readable twin, which runs where operations are watched, may
# have more: of those that return something new, that is what counts.
KERNELS = "zfun/ops/_optimizers.py"
RETURNING = ("quantise", "dequantise", "sum_dequantised")
WIRE = "zfun/wire/_collectives.py"
PARTS = {
    "zfun/optim/": "an optimizer",
    "zfun/recipes.py:_unscaled": "unscaled",
    "zfun/transforms/params/_gathered.py": "gathered",
    WIRE: "reduced",
    # Where a mesh has an axis of one rank, its sums are copied, not sent, to where they are to be.
    "zfun/transforms/grads/_hooks.py:start": "reduced",
    "zfun/transforms/values/_redistribute.py:_communicate": "reduced",
}
SIZE, ROWS = 4, 3
# Products of odd numbers, while the length of every flat buffer is a multiple of 32: so the two cannot be taken for each other.
WIDTHS = (7, 33, 15, 61, 9, 7)


@dataclass
class Made:
    """A flat buffer, as long as it lives."""

    storage: StorageWeakRef
    nbytes: int
    name: str = ""
    maker: str = ""
    put: int | None = None


class Meter(TorchDispatchMode):
    """Follows the flat buffers that operations of this thread make: one entry whenever one is made."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[Made] = []
        self._now: dict[int, Made] = {}
        self.entries: list[list[Made]] = []
        self._is_in_kernel = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._bury()
        out = func(*args, **(kwargs or {}))
        if self._is_in_kernel:
            return out
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        for leaf in tree_leaves(out):
            if (
                isinstance(leaf, Tensor)
                and (is_flat(leaf) or (leaf.dtype is torch.uint8 and called_in(WIRE)))
                and leaf.untyped_storage()._cdata not in given | self._now.keys()
                and not called_in(KERNELS)
            ):
                self._note(leaf, str(func))
        return out

    def _note(self, x: Tensor, func: str) -> None:
        self.follow(x, maker=next((maker for part, maker in PARTS.items() if called_in(part)), func))
        self.entries.append(list(self._now.values()))

    @contextlib.contextmanager
    def counting_results(self) -> Iterator[None]:
        """Count kernels by what they return."""

        def counted(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
            def run(*args: Any, **kwargs: Any) -> Tensor:
                outer, self._is_in_kernel = self._is_in_kernel, True
                out = kernel(*args, **kwargs)
                self._is_in_kernel = outer
                if not outer:
                    self._bury()
                    self._note(out, kernel.__name__)
                return out

            return run

        with contextlib.ExitStack() as stack:
            for name in RETURNING:
                stack.enter_context(unittest.mock.patch.object(ops, name, counted(getattr(ops, name))))
            yield

    def follow(self, x: Tensor, name: str = "", maker: str = "") -> None:
        storage = x.untyped_storage()
        made = self._now.setdefault(storage._cdata, Made(StorageWeakRef(storage), storage.nbytes(), maker=maker))
        self.all.append(made)
        made.name, made.maker = name or made.name, maker or made.maker

    def name(self, x: Tensor, name: str) -> None:
        """Say what a buffer is, unless that is known."""
        made = self._now[x.untyped_storage()._cdata]
        made.name = made.name or name

    def put(self, x: Tensor) -> None:
        made = self._now.get(x.untyped_storage()._cdata)
        if made is not None and made.put is None:
            made.put = len(self.entries)

    def finish(self) -> None:
        self._bury()
        self.entries.append(list(self._now.values()))

    def _bury(self) -> None:
        self._now = {key: made for key, made in self._now.items() if not made.storage.expired()}

    def held(self) -> list[tuple[Held, Held]]:
        found = []
        for index, entry in enumerate(self.entries):
            device, store = dict.fromkeys(Held._fields, 0), dict.fromkeys(Held._fields, 0)
            for made in entry:
                # Work on a state that is in a store is done where the store says; other things are on the device until they are put.
                assert made.name, f"{made.nbytes} bytes of {made.maker}"
                is_put = made.put is not None and (made.name == "optimizer" or made.put <= index)
                (store if is_put else device)[made.name] += made.nbytes
            found.append((Held(**device), Held(**store)))
        return found


def called_in(part: str) -> bool:
    """Whether a part of the library is at work."""
    frame: Any = sys._getframe(1)
    while frame is not None and part not in f"{frame.f_code.co_filename}:{frame.f_code.co_name}":
        frame = frame.f_back
    return frame is not None


def is_flat(x: Tensor) -> bool:
    numel = x.untyped_storage().nbytes() // x.dtype.itemsize
    return x.dtype in (torch.float32, torch.bfloat16, torch.float16) and numel > 0 and numel % 32 == 0


class Echo(Group):
    """Rank 0 of several that all do the same. What a collective reads and writes is held from its start until it is waited for."""

    meter: Meter | None = None

    def __init__(self, stage: int, size: int = SIZE) -> None:
        self.rank, self.size = 0, size
        self.gathered = "gathered" if stage == 3 else "params"

    @property
    def allocate(self) -> Any:
        return self._allocate

    def _allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        out = torch.empty(numel, dtype=dtype, device=device)
        if self.meter is not None:
            self.meter.follow(out, maker="buffer")
        return out

    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        x = x.detach()
        result = x.new_empty(call.op.output_numel(x.numel(), self.size)) if out is None else out
        if self.meter is not None and call.name in ("params", "grads"):
            names = (self.gathered, self.gathered) if call.name == "params" else ("gradients", "reduced")
            # Messages are neither terms nor sums.
            names = (names[1], names[1]) if x.dtype is torch.uint8 else names
            for value, name in zip((x, result), names, strict=True):
                self.meter.name(value, name)

        def finish() -> Tensor:
            with torch.no_grad():
                if call.op.kind != "all_gather":
                    return result.copy_(x.view(-1)[: result.numel()].view(result.shape))
                for piece in result.view(self.size, -1):
                    if not piece.is_set_to(x.view(-1)):
                        piece.copy_(x.view(-1))
                return result

        return Pending(finish)


class EchoMesh(zf.Mesh):
    """Rank 0 of a mesh of those. Where an axis has one rank, what is sent over it is copied, and nobody else says what it is."""

    meter: Meter | None = None

    def start(self, call: Call, x: Tensor, out: Tensor | None = None) -> Pending:
        if self.meter is not None and call.name == "params":
            row = self._plain["inner"]
            assert isinstance(row, Echo)
            self.meter.name(x, row.gathered)
        return super().start(call, x, out)


class Store(HostStore):
    """Host memory that says what it is given."""

    meter: Meter | None = None

    def put(self, tensor: Tensor, name: str) -> Any:
        if self.meter is not None:
            self.meter.put(tensor)
        return super().put(tensor, name)


def params(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape, generator=made) * 0.2).to(dtype)
    value: dict[str, Any] = {"h": [{"w": draw(a, b), "b": draw(b)} for a, b in itertools.pairwise(WIDTHS)]}
    value["head"] = value["h"][0]["w"] if tied else draw(WIDTHS[-1], 33)
    return value


def loss_fn(params: Any, x: Tensor) -> Tensor:
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["head"]).pow(2).mean()


def recomputed(params: Any, x: Tensor) -> Tensor:
    block = zf.remat(lambda w, x: torch.tanh(x @ w))
    for layer in params["h"]:
        x = block(layer["w"], x) + layer["b"]
    return (x @ params["head"]).pow(2).mean()


def not_third(path: str, leaf: Any) -> bool:
    return not path.startswith("h.2")


ADAMW = zf.optim.adamw(0.1)
CLIPPED = zf.optim.chain(zf.optim.clip_by_global_norm(1e-3), zf.optim.sgd(0.1, momentum=0.9))
BY_LABEL = zf.optim.by_label({"w": zf.optim.lamb(0.1), "b": CLIPPED}, lambda path, leaf: "b" if path.endswith("b") else "w")


def stepped_by_hand(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """An update with room for two buffers more than it returns."""
    return tree.map(lambda g, m, p: (m * 0.9 + g) * -0.1 + p.sign() * 0.01, grads, state, params), tree.map(torch.neg, grads)


BY_HAND = (lambda params: tree.map(torch.zeros_like, params), stepped_by_hand)

SCALED = zf.Precision(reduce=torch.bfloat16, loss_scale=2.0)


def slowly() -> zf.wire.Wire:
    return zf.wire.int4(feedback=zf.wire.error_feedback())


def at_once() -> zf.wire.Wire:
    # Blocks that end anywhere.
    return zf.wire.int8(block=34, feedback=zf.wire.error_feedback(err_beta=0.0))


@dataclass(frozen=True)
class Case:
    stage: int
    loss: Any = loss_fn
    optimizer: Any = ADAMW
    precision: Any = None
    bucket_bytes: int = 600
    knobs: tuple[tuple[str, Any], ...] = ()
    offload: tuple[str, ...] = ()
    num_micro_batches: int = 1
    donate: bool = True
    tied: bool = False
    trainable: Callable[[str, Any], bool] | None = None
    # Over what: a group, a mesh or its inner axis, and how many ranks are in a row; and over what backward gathers.
    over: str = "group"
    size: int = SIZE
    inner: int = 2
    secondary: bool = False
    first_step: bool = False
    # The formats in which parameters and gradients are sent; each run has a feedback of its own.
    wires: tuple[Callable[[], zf.wire.Wire] | None, Callable[[], zf.wire.Wire] | None] = (None, None)


def grouped(case: Case, make: Callable[[int], Group], mesh_of: type[zf.Mesh] = zf.Mesh) -> tuple[Group, Group | None]:
    if case.over == "group":
        return make(case.size), None
    mesh = mesh_of(make(case.inner), make(case.size // case.inner))
    return (mesh if case.over == "mesh" else mesh.inner), mesh.inner if case.secondary else None


def dtypes(precision: Any) -> zf.Precision:
    whole = zf.Precision(torch.bfloat16, torch.bfloat16, torch.float32, torch.float32)
    return whole if precision is torch.bfloat16 else precision or zf.Precision()


@functools.cache
def trace_of(
    loss: Any, which: zf.Precision, tied: bool, trainable: Any, bucket_bytes: int, persistence: int, over: tuple[Any, ...], labels: Any
) -> Any:
    cast = loss if which.compute is None else zf.cast(loss, which.compute)
    value = params(which.param or torch.float32, tied=tied)
    options = {"trainable": trainable, "bucket_bytes": bucket_bytes, "persistence": persistence, "reduce_dtype": which.reduce}
    options["labels"] = labels
    return zf.trace(cast, value, torch.empty(ROWS, WIDTHS[0]), grouped(Case(3, **dict(over)), zf.abstract_group)[0], **options)


def planned(case: Case) -> Live:
    which = dtypes(case.precision)
    knobs = dict(case.knobs)
    persistence = knobs.get("persistence", 0)
    value = params(which.param or torch.float32, tied=case.tied)
    chosen, rest = (value, None) if case.trainable is None else zf.partition(value, case.trainable)
    labels = as_optimizer(case.optimizer).labels
    over = (("over", case.over), ("size", case.size), ("inner", case.inner))
    traced = trace_of(case.loss, which, case.tied, case.trainable, case.bucket_bytes, persistence, over, labels)
    group, secondary = grouped(case, zf.abstract_group)
    options: dict[str, Any] = {**wires_of(case), **dict.fromkeys(case.offload, True)}
    return zf.live_bytes(
        case.stage,
        zf.layout_of(chosen, case.size, case.bucket_bytes, persistence),
        zf.schedule(traced, **knobs),
        case.optimizer,
        frozen=None if rest is None else zf.layout_of(rest, case.size, case.bucket_bytes, persistence),
        precision=case.precision,
        num_micro_batches=case.num_micro_batches,
        donate=case.donate,
        group=group,
        secondary=secondary,
        first_step=case.first_step,
        **options,
    )


def wires_of(case: Case) -> dict[str, zf.wire.Wire]:
    return {name: make() for name, make in zip(("wire_params", "wire_grads"), case.wires, strict=True) if make is not None}


def resident(value: Any) -> list[Tensor]:
    found = [getattr(x, "tensor", x) for x in tree.leaves(value)]
    return [x for x in found if isinstance(x, Tensor) and is_flat(x)]


# Gradients that are added to others are never sent themselves; what is gathered may be widened for its use, or a part of it kept.
NAMES = {
    "an optimizer": "optimizer",
    "unscaled": "reduced",
    "gathered": "gathered",
    "reduced": "reduced",
    "buffer": "gradients",
    "aten.empty.memory_format": "gradients",
    "aten._to_copy.default": "gathered",
    "aten.clone.default": "gathered",
}


def watch(echoes: Sequence[Echo | EchoMesh], store: Store, meter: Meter | None) -> None:
    store.meter = meter
    for echo in echoes:
        echo.meter = meter


def follow_state(meter: Meter, state: Any, case: Case, wire: zf.wire.Wire | None) -> None:
    for place, x in wire.feedback.kept().items() if wire is not None and wire.feedback is not None else ():
        if not place.endswith(" count"):
            meter.follow(x, "reduced")
    for name, part in (("params", (state.params, state.frozen)), ("optimizer", state.opt_state)):
        for x in resident(part):
            meter.follow(x, name)
    for flat in flats((state.params, state.frozen)):
        for _, x in flat.life.cached.values():
            # Of one rank alone it is the shard.
            if x.untyped_storage()._cdata not in {shard.untyped_storage()._cdata for shard in resident(flat)}:
                meter.follow(x, "gathered")
    for name, part in (("params", (state.params, state.frozen)), ("state", state.opt_state)):
        if f"offload_{'optimizer' if name == 'state' else name}" in case.offload:
            for x in resident(part):
                meter.put(x)
    meter.finish()


def measured(case: Case) -> tuple[tuple[Held, Held], list[tuple[Held, Held]]]:
    echoes: list[Echo] = []
    store = Store(pin=False)

    def make(size: int) -> Echo:
        echoes.append(Echo(case.stage, size))
        return echoes[-1]

    group, secondary = grouped(case, make, EchoMesh)
    mesh = mesh_of(group)
    watched = [*echoes, mesh] if isinstance(mesh, EchoMesh) else echoes
    options: dict[str, Any] = {**dict(case.knobs), **dict.fromkeys(case.offload, store)}
    wires: dict[str, Any] = wires_of(case)
    z = zf.zero(
        case.stage,
        case.loss,
        case.optimizer,
        group,
        precision=case.precision,
        bucket_bytes=case.bucket_bytes,
        num_micro_batches=case.num_micro_batches,
        donate=case.donate,
        trainable=case.trainable,
        secondary=secondary,
        **wires,
        **options,
    )
    state = z.init(params(tied=case.tied))
    batch = torch.ones(ROWS * case.num_micro_batches, WIDTHS[0])
    if not case.first_step:
        state, _ = z.step(state, batch)  # it learns the order of use
    meter = Meter()
    follow_state(meter, state, case, wires.get("wire_grads"))
    watch(watched, store, meter)
    gc.disable()
    try:
        with meter.counting_results(), meter:
            new, _ = z.step(state, batch)
    finally:
        gc.enable()
    watch(watched, store, None)
    for name, part in (("params", new.params), ("optimizer", new.opt_state)):
        for x in resident(part):
            meter.follow(x, name)
    meter.finish()
    for made in meter.all:
        made.name = made.name or NAMES.get(made.maker, "")
        # Of one rank alone they are the sum.
        made.name = "reduced" if made.name == "gradients" and case.size == 1 else made.name
        if made.maker == "an optimizer" and made.name == "optimizer" and "offload_optimizer" in case.offload:
            made.put = 0
    held = meter.held()
    return held[0], held[1:]


def check(case: Case) -> Live:
    plan = planned(case)
    before, moments = measured(case)
    assert before == (plan.kept.device, plan.kept.store)
    for number, (moment, found) in enumerate(zip(plan.moments, moments, strict=False)):
        assert found == (moment.device, moment.store), (number, moment.what)
    assert len(moments) == len(plan.moments)
    return plan


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("donate", [True, False])
def test_live_bytes_are_what_is_held(stage: int, precision: Any, donate: bool) -> None:
    for offload in [(), ("offload_optimizer",)]:
        check(Case(stage, offload=offload, precision=precision, donate=donate))


CASES = {
    "one micro-batch after the other": [Case(stage, num_micro_batches=3) for stage in (0, 1, 2, 3)],
    "gradients in a store": [Case(stage, offload=("offload_grads",), num_micro_batches=2) for stage in (0, 1, 2, 3)],
    "everything in a store": [
        Case(3, offload=("offload_params", "offload_grads", "offload_optimizer"), precision=precision, donate=donate)
        for precision, donate in ((None, True), (torch.bfloat16, False))
    ],
    "blocks computed again": [Case(3, loss=recomputed), Case(3, loss=recomputed, precision=torch.bfloat16), Case(2, loss=recomputed)],
    "tied and frozen": [Case(stage, tied=True, trainable=not_third) for stage in (0, 1, 2, 3)],
    "a bucket for each leaf": [Case(2, bucket_bytes=1), Case(3, bucket_bytes=1)],
    "other schedules": [
        Case(3, knobs=(("prefetch", 0),)),
        Case(3, knobs=(("prefetch", 3),), bucket_bytes=1),
        Case(3, knobs=(("reuse_distance", 10_000),)),
        Case(3, knobs=(("max_live", 2600),), bucket_bytes=1),
        Case(3, knobs=(("persistence", 100),), trainable=not_third, num_micro_batches=2),
    ],
    "wide parameters, computed with in few bits": [
        Case(3, precision=zf.Precision(compute=torch.bfloat16)),
        Case(3, precision=zf.Precision(param=torch.bfloat16, compute=torch.float32, master=torch.float32), donate=False),
    ],
    "over a mesh": [Case(stage, over="mesh", offload=("offload_optimizer",) if stage else ()) for stage in (0, 1, 2, 3)],
    "over its inner axis": [Case(stage, over="inner", num_micro_batches=stage % 2 + 1) for stage in (0, 1, 2, 3)],
    "long sums over a mesh": [Case(stage, over="mesh", bucket_bytes=2**20) for stage in (0, 1)],
    "secondary shards": [
        Case(3, over="mesh", secondary=True),
        Case(3, over="mesh", secondary=True, precision=torch.bfloat16, donate=False, knobs=(("persistence", 100),)),
        Case(
            3, over="mesh", secondary=True, loss=recomputed, num_micro_batches=2, trainable=not_third, knobs=(("reuse_distance", 10_000),)
        ),
        Case(3, over="mesh", secondary=True, precision=zf.Precision(param=torch.bfloat16, compute=torch.float32), first_step=True),
    ],
    "the first step": [
        *(Case(stage, first_step=True) for stage in (0, 2, 3)),
        Case(3, first_step=True, bucket_bytes=1, knobs=(("prefetch", 3),)),
        Case(3, first_step=True, bucket_bytes=1, knobs=(("max_live", 2600),)),
        Case(3, first_step=True, loss=recomputed, num_micro_batches=2, precision=torch.bfloat16),
        Case(3, first_step=True, knobs=(("persistence", 100), ("prefetch", 0)), tied=True, trainable=not_third),
    ],
    "other optimizers": [
        Case(1, optimizer=zf.optim.sgd(0.1, momentum=0.9), donate=False),
        Case(3, optimizer=zf.optim.sgd(0.1)),
        Case(3, optimizer=zf.optim.lamb(0.1)),
        Case(1, optimizer=zf.optim.lamb(0.1), donate=False, precision=torch.bfloat16),
    ],
    "what a step of an optimizer makes on the way": [
        *(Case(stage, optimizer=CLIPPED, donate=stage % 2 == 0) for stage in (0, 1, 2, 3)),
        Case(3, optimizer=CLIPPED, precision=torch.bfloat16, offload=("offload_optimizer", "offload_params")),
        Case(0, optimizer=BY_HAND, offload=("offload_optimizer",)),
        Case(1, optimizer=BY_HAND),
        Case(3, optimizer=BY_HAND, precision=torch.bfloat16, donate=False),
    ],
    "loss scales": [
        *(Case(stage, precision=SCALED, donate=stage % 2 == 0) for stage in (0, 1, 2, 3)),
        Case(3, precision=SCALED, offload=("offload_grads",), num_micro_batches=2, optimizer=CLIPPED),
        Case(3, precision=dataclasses.replace(SCALED, loss_scale=1.0)),
        Case(2, precision=zf.Precision(torch.float16, torch.float16, torch.float32, torch.float32, 8.0)),
    ],
    "in few bits": [
        *(Case(stage, wires=(None, zf.wire.int4), offload=("offload_grads",), num_micro_batches=2) for stage in (0, 1, 2)),
        Case(3, wires=(zf.wire.int8, None), trainable=not_third, knobs=(("prefetch", 3),)),
        Case(3, wires=(zf.wire.int8, zf.wire.int4), precision=torch.bfloat16, loss=recomputed, donate=False),
        Case(3, wires=(zf.wire.int8, zf.wire.int4), precision=SCALED, knobs=(("persistence", 100), ("max_live", 2600)), bucket_bytes=1),
        Case(3, wires=(zf.wire.int8, slowly), first_step=True, knobs=(("prefetch", 0),)),
    ],
    "with what messages lost": [
        *(Case(stage, wires=(None, slowly if stage % 2 else at_once)) for stage in (0, 1, 2)),
        Case(3, wires=(None, slowly), precision=zf.Precision(reduce=torch.bfloat16), num_micro_batches=2),
        Case(2, wires=(None, slowly), first_step=True, num_micro_batches=2),
    ],
    "in few bits over a mesh": [
        *(Case(stage, over="mesh", wires=(None, slowly)) for stage in (0, 1, 2)),
        *(Case(stage, over="inner", wires=(None, at_once)) for stage in (0, 1, 2)),
        Case(3, over="mesh", secondary=True, wires=(zf.wire.int8, slowly), precision=torch.bfloat16),
        Case(3, over="inner", wires=(zf.wire.int8, zf.wire.int4)),
        *(Case(stage, over="inner", inner=inner, wires=(None, slowly)) for stage, inner in ((1, 1), (2, 4))),
    ],
    "axes of one rank": [
        *(Case(stage, over="mesh", inner=inner) for stage in (0, 1, 2, 3) for inner in (1, SIZE)),
        *(Case(stage, over="inner", inner=1, donate=False) for stage in (0, 1, 2, 3)),
        Case(3, over="mesh", inner=1, secondary=True, precision=zf.Precision(param=torch.bfloat16, compute=torch.float32)),
        Case(3, over="inner", inner=1, knobs=(("persistence", 100),), trainable=not_third),
    ],
    "one rank": [
        *(Case(stage, size=1, offload=("offload_grads",)) for stage in (0, 1, 2, 3)),
        Case(3, size=1, precision=zf.Precision(compute=torch.bfloat16), wires=(zf.wire.int8, slowly)),
    ],
    "by label": [
        Case(0, optimizer=BY_LABEL),
        Case(2, optimizer=BY_LABEL, donate=False),
        Case(3, optimizer=BY_LABEL, precision=torch.bfloat16, trainable=not_third, tied=True),
        Case(3, optimizer=BY_LABEL, over="mesh", donate=False, offload=("offload_optimizer",)),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_live_bytes_of_other_compositions(name: str) -> None:
    for case in CASES[name]:
        check(case)


PRECISIONS = [
    *(None, torch.bfloat16, SCALED, zf.Precision(compute=torch.bfloat16), zf.Precision(reduce=torch.bfloat16)),
    zf.Precision(param=torch.bfloat16, compute=torch.float32, master=torch.float32),
    zf.Precision(param=torch.bfloat16, compute=torch.bfloat16, reduce=torch.bfloat16, loss_scale=4.0),
    zf.Precision(torch.float16, torch.float16, torch.float32, torch.float32, 8.0),
]
OPTIMIZERS = [ADAMW, CLIPPED, BY_LABEL, BY_HAND, zf.optim.lamb(0.1), zf.optim.sgd(0.1), zf.optim.lion(0.1), zf.optim.adagrad(0.1)]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    one_of = lambda *values: draw(st.sampled_from(values))
    stage, over, size = one_of(0, 1, 2, 3, 3), one_of("group", "mesh", "inner"), one_of(1, 2, SIZE)
    stores = ("offload_optimizer", "offload_grads", *(("offload_params",) if stage == 3 else ()))
    knobs: dict[str, Any] = {}
    if stage == 3:
        knobs = {"prefetch": one_of(0, 1, 2, 3), "persistence": one_of(0, 10, 100, 600), "max_persistent": one_of(None, 200, 1000)}
        knobs |= {"reuse_distance": one_of(None, 0, 500, 3000, 100_000), "max_live": one_of(None, None, 5000, 9000)}
    return Case(
        stage,
        loss=one_of(loss_fn, recomputed),
        optimizer=one_of(*OPTIMIZERS),
        precision=one_of(*PRECISIONS),
        bucket_bytes=one_of(1, 600, 1500, 4000),
        knobs=tuple(knobs.items()),
        offload=tuple(name for name in stores if one_of(False, False, True)),
        num_micro_batches=one_of(1, 1, 2, 3),
        donate=one_of(True, False),
        tied=one_of(False, True),
        trainable=one_of(None, not_third),
        over=over,
        size=size,
        inner=one_of(*(n for n in (1, 2, SIZE) if size % n == 0)),
        secondary=stage == 3 and over == "mesh" and one_of(False, True),
        first_step=one_of(False, False, True),
        wires=(one_of(None, zf.wire.int8) if stage == 3 else None, one_of(None, zf.wire.int4, slowly, at_once)),
    )


@settings(max_examples=examples(8))
@given(cases())
def test_live_bytes_of_drawn_compositions(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("loss", [loss_fn, recomputed])
def test_above_what_is_kept_there_are_a_few_buckets(prefetch: int, loss: Any) -> None:
    plan = check(Case(3, loss=loss, knobs=(("prefetch", prefetch),), bucket_bytes=1))
    padded = lambda numel: -(-numel // (32 * SIZE)) * 32 * SIZE
    bucket = 4 * max(padded(leaf.numel()) for leaf in tree.leaves(params()))
    for device in (moment.device for moment in plan.moments):
        assert device.gathered <= (prefetch + 2) * bucket
        assert device.gradients <= 2 * bucket
        above = device.total - plan.kept.device.total - device.reduced
        assert above <= (prefetch + 4) * bucket


def test_what_cannot_be_planned_is_refused() -> None:
    value = params()
    traced = lambda optimizer: zf.trace(loss_fn, value, torch.empty(ROWS, WIDTHS[0]), SIZE, labels=as_optimizer(optimizer).labels)
    found = zf.schedule(traced(ADAMW))
    layout = zf.layout_of(value, SIZE)
    with pytest.raises(zf.OptionError, match="stage must be 0, 1, 2 or 3; got 4"):
        zf.live_bytes(4, layout, found, zf.optim.sgd(0.1))
    with pytest.raises(zf.OptionError, match="num_micro_batches must be at least 1; got 0"):
        zf.live_bytes(3, layout, found, zf.optim.sgd(0.1), num_micro_batches=0)
    with pytest.raises(zf.OptionError, match=r"offload_params keeps shards.*got stage 2; use stage=3"):
        zf.live_bytes(2, layout, found, zf.optim.sgd(0.1), offload_params=True)
    with pytest.raises(zf.OptionError, match="schedule must be of the buckets of the layout; got 1 buckets on 4 ranks for 9 on 4"):
        zf.live_bytes(3, zf.layout_of(value, SIZE, 600), found, zf.optim.sgd(0.1))
    mesh = zf.split(zf.abstract_group(SIZE), 2)
    with pytest.raises(zf.OptionError, match=r"schedule must be of the buckets of the layout; got 1 buckets on 4 ranks for 1 on 4"):
        zf.live_bytes(3, layout, found, zf.optim.sgd(0.1), group=mesh.inner)
    with pytest.raises(zf.OptionError, match="known over a group, a mesh or its inner axis; got <outer axis"):
        zf.live_bytes(3, layout, found, zf.optim.sgd(0.1), group=mesh.outer)
    with pytest.raises(zf.OptionError, match="wire_params is for stage 3, which gathers what it does not keep; got stage 2; use stage=3"):
        zf.live_bytes(2, layout, found, zf.optim.sgd(0.1), wire_params=zf.wire.int8())
    with pytest.raises(zf.OptionError, match=r"gathers parameters in forward and again in backward.*; leave feedback"):
        zf.live_bytes(3, layout, found, zf.optim.sgd(0.1), wire_params=slowly())
    for stage, group in ((2, mesh), (3, mesh.inner)):
        with pytest.raises(zf.OptionError, match=f"secondary is the inner axis .* at stage {stage}; leave it out, or pass group=mesh"):
            zf.live_bytes(stage, layout, found, zf.optim.sgd(0.1), group=group, secondary=mesh.inner)
    for optimizer, name in ((zf.optim.muon(0.1, ADAMW), "MuonState"), (zf.optim.from_torch(torch.optim.RMSprop), "TorchState")):
        with pytest.raises(zf.OptionError, match=f"known for optimizers that work on flat buffers; got one with a {name}, .*; use another"):
            zf.live_bytes(3, layout, zf.schedule(traced(optimizer)), optimizer)
    for optimizer, got in (
        (zf.optim.onebit_adam(0.1), "sums the terms .*, leaf by leaf"),
        (zf.shard_optimizer(ADAMW, mesh), "computes in S"),
    ):
        with pytest.raises(zf.OptionError, match=f"leave placements to the stage; got one that {got}.*; use another one"):
            zf.live_bytes(3, layout, found, optimizer)
    with pytest.raises(zf.OptionError, match=r"got 1 buckets on 4 ranks for 2 on 4; trace .* the same .* labels"):
        zf.live_bytes(3, layout, found, BY_LABEL)
