"""Live bytes: a step on tensors without numbers makes and frees the same bytes as a real one."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import threading
import types
import unittest.mock
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

import zfun as zf
from tests.conftest import examples
from zfun import ops, tree
from zfun.planner import Live, Meter

SIZE, ROWS = 4, 3
WIDTHS = (21, 70, 33, 100, 17, 21)
KERNELS = [
    name
    for name in ops.__all__
    if name
    not in (
        "AddressTable",
        "Measures",
        "fake_mode",
        "is_abstract",
        "message_bytes",
        "unravel",
        "use",
        "wide",
    )
]


@contextlib.contextmanager
def compiled_kernels(meter: Meter) -> Iterator[None]:
    """Run kernels as they run without a dispatch mode, and count the buffers that they return."""
    thread = threading.get_ident()

    def counted(kernel: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread or not torch._C._len_torch_dispatch_stack():
                return kernel(*args, **kwargs)
            with _disable_current_modes():
                out = kernel(*args, **kwargs)
            meter.made(kernel.__name__, out, (args, kwargs))
            return out

        return run

    with contextlib.ExitStack() as stack:
        for name in KERNELS:
            stack.enter_context(unittest.mock.patch.object(ops, name, counted(getattr(ops, name))))
        yield


def params(dtype: torch.dtype = torch.float32, *, tied: bool = False) -> dict[str, Any]:
    made = torch.Generator().manual_seed(0)
    draw = lambda *shape: (torch.randn(*shape, generator=made) * 0.2).to(dtype)
    value: dict[str, Any] = {
        "h": [{"w": draw(a, b), "b": draw(b)} for a, b in itertools.pairwise(WIDTHS)]
    }
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


def attend(layer: Any, x: Tensor) -> Tensor:
    """A block that keeps more for backward than its matrices: a mask, weights of attention, a norm,
    random bits.
    """
    q = torch.nn.functional.layer_norm(x @ layer["w"] + layer["b"], layer["b"].shape)
    mask = torch.arange(len(q))[:, None] >= torch.arange(len(q))
    weights = (q @ q.T).masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.nn.functional.dropout(torch.nn.functional.gelu(weights @ q), 0.1)


def attentive(params: Any, x: Tensor, block: Any = attend) -> Tensor:
    x = x.repeat(5, 1)
    for layer in params["h"]:
        x = block(layer, x)
    logits = torch.nn.functional.log_softmax(x @ params["head"], -1)
    return -logits.gather(1, torch.zeros(len(x), 1, dtype=torch.int64)).mean() + 0 * logits.sum()


def attentive_recomputed(params: Any, x: Tensor) -> Tensor:
    return attentive(params, x, zf.remat(attend))


def not_third(path: str, leaf: Any) -> bool:
    return not path.startswith("h.2")


ADAMW = zf.optim.adamw(0.1)
CLIPPED = zf.optim.chain(zf.optim.clip_by_global_norm(1e-3), zf.optim.sgd(0.1, momentum=0.9))
BY_LABEL = zf.optim.by_label(
    {"w": zf.optim.lamb(0.1), "b": CLIPPED}, lambda path, leaf: "b" if path.endswith("b") else "w"
)


def stepped_by_hand(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """An update with room for two buffers more than it returns."""
    return tree.map(
        lambda g, m, p: (m * 0.9 + g) * -0.1 + p.sign() * 0.01, grads, state, params
    ), tree.map(torch.neg, grads)


MUON = zf.optim.muon(0.1, ADAMW)
RMSPROP = zf.optim.from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.9)
ADAM_OF_TORCH = zf.optim.from_torch(torch.optim.Adam, lr=0.1)
ONE_BIT = zf.optim.onebit_adam(0.1, freeze_step=1)
BY_HAND = (lambda params: tree.map(torch.zeros_like, params), stepped_by_hand)

SCALED = zf.Precision(reduce=torch.bfloat16, loss_scale=2.0)


def slowly() -> zf.compression.Codec:
    return zf.compression.int4(feedback=zf.compression.error_feedback())


def at_once() -> zf.compression.Codec:
    # Blocks that end anywhere.
    return zf.compression.int8(block=34, feedback=zf.compression.error_feedback(err_beta=0.0))


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
    # The ranks: a group, a mesh or its inner axis; the ranks of a row; whether backward gathers
    # over the inner axis.
    over: str = "group"
    size: int = SIZE
    inner: int = 2
    rank: int = 0
    secondary: bool = False
    steps: int = 2
    # The formats in which parameters and gradients are sent; each run has a feedback of its own.
    codecs: tuple[
        Callable[[], zf.compression.Codec] | None, Callable[[], zf.compression.Codec] | None
    ] = (None, None)


def run_of(case: Case, group: zf.Group) -> zf.recipes.Zero:
    if case.over != "group":
        mesh = zf.split(group, case.inner)
        group = mesh if case.over == "mesh" else mesh.inner
    host = zf.stores.host(pin=False)
    codecs = {
        name: make()
        for name, make in zip(("params", "grads"), case.codecs, strict=True)
        if make is not None
    }
    return zf.zero(
        case.stage,
        case.loss,
        case.optimizer,
        group,
        precision=case.precision,
        bucket_bytes=case.bucket_bytes,
        num_micro_batches=case.num_micro_batches,
        donate=case.donate,
        trainable=case.trainable,
        schedule=zf.ScheduleOptions(secondary=case.secondary, **dict(case.knobs)),
        offload=zf.Offload(**dict.fromkeys(case.offload, host)),
        compression=zf.Compression(**codecs),
    )


def planned(case: Case) -> Live:
    batch = torch.ones(ROWS * case.num_micro_batches, WIDTHS[0])
    return zf.planner.live_bytes(
        functools.partial(run_of, case),
        params(tied=case.tied),
        batch,
        size=case.size,
        rank=case.rank,
        steps=case.steps,
    )


def measured(case: Case) -> Live:
    """Take the steps on simulated ranks, and watch rank 0."""

    def main(group: zf.Group) -> Live | None:
        batch = torch.ones(ROWS * case.num_micro_batches, WIDTHS[0])
        start = params(tied=case.tied)
        if group.rank != case.rank:
            z = run_of(case, group)
            state = z.init(start)
            for _ in range(case.steps):
                state, _ = z.step(state, batch)
            return None
        meter = Meter()
        z = run_of(case, meter.watch(group))
        with compiled_kernels(meter), meter:
            state = z.init(start)
            for _ in range(case.steps - 1):
                state = z.step(state, batch)[0]
            meter.name_state(state)
            meter.begin()
            after = z.step(state, batch)
            meter.name_state(after[0])
            return meter.live()

    gc.disable()
    try:
        found = zf.simulate(case.size, main)[case.rank]
    finally:
        gc.enable()
    assert found is not None
    return found


def check(case: Case) -> Live:
    plan, found = planned(case), measured(case)
    assert found.kept.device == plan.kept.device
    for number, (moment, real) in enumerate(zip(plan.moments, found.moments, strict=False)):
        assert real.device == moment.device, (number, moment.what, real.what)
    assert len(found.moments) == len(plan.moments)
    return plan


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("precision", [None, torch.bfloat16])
@pytest.mark.parametrize("donate", [True, False])
def test_live_bytes_are_what_is_held(stage: int, precision: Any, donate: bool) -> None:
    for offload in [(), ("optimizer",)]:
        check(Case(stage, offload=offload, precision=precision, donate=donate))


CASES = {
    "one micro-batch after the other": [Case(stage, num_micro_batches=3) for stage in (0, 1, 2, 3)],
    "gradients in a store": [
        Case(stage, offload=("grads",), num_micro_batches=2) for stage in (0, 1, 2, 3)
    ],
    "everything in a store": [
        Case(3, offload=("params", "grads", "optimizer"), precision=precision, donate=donate)
        for precision, donate in ((None, True), (torch.bfloat16, False))
    ],
    "blocks computed again": [
        Case(3, loss=recomputed),
        Case(3, loss=recomputed, precision=torch.bfloat16),
        Case(2, loss=recomputed),
    ],
    "tied and frozen": [Case(stage, tied=True, trainable=not_third) for stage in (0, 1, 2, 3)],
    "a bucket for each leaf": [Case(2, bucket_bytes=1), Case(3, bucket_bytes=1)],
    "other schedules": [
        Case(3, knobs=(("prefetch", 0),)),
        Case(3, knobs=(("prefetch", 3),), bucket_bytes=1),
        Case(3, knobs=(("reuse_distance", 10_000),)),
        Case(3, knobs=(("max_live", 9000),), bucket_bytes=1),
        Case(3, knobs=(("persistence", 100),), trainable=not_third, num_micro_batches=2),
    ],
    "wide parameters, computed with in few bits": [
        Case(3, precision=zf.Precision(compute=torch.bfloat16)),
        Case(
            3,
            precision=zf.Precision(
                param=torch.bfloat16, compute=torch.float32, master=torch.float32
            ),
            donate=False,
        ),
    ],
    "over a mesh": [
        Case(stage, over="mesh", offload=("optimizer",) if stage else ()) for stage in (0, 1, 2, 3)
    ],
    "over its inner axis": [
        Case(stage, over="inner", num_micro_batches=stage % 2 + 1) for stage in (0, 1, 2, 3)
    ],
    "long sums over a mesh": [Case(stage, over="mesh", bucket_bytes=2**20) for stage in (0, 1)],
    "secondary shards": [
        Case(3, over="mesh", secondary=True),
        Case(
            3,
            over="mesh",
            secondary=True,
            precision=torch.bfloat16,
            donate=False,
            knobs=(("persistence", 100),),
        ),
        Case(
            3,
            over="mesh",
            secondary=True,
            loss=recomputed,
            num_micro_batches=2,
            trainable=not_third,
            knobs=(("reuse_distance", 10_000),),
        ),
        Case(
            3,
            over="mesh",
            secondary=True,
            precision=zf.Precision(param=torch.bfloat16, compute=torch.float32),
            steps=1,
        ),
    ],
    "the first step": [
        *(Case(stage, steps=1) for stage in (0, 2, 3)),
        Case(3, steps=1, bucket_bytes=1, knobs=(("prefetch", 3),)),
        Case(3, steps=1, bucket_bytes=1, knobs=(("max_live", 9000),)),
        Case(3, steps=1, loss=recomputed, num_micro_batches=2, precision=torch.bfloat16),
        Case(
            3,
            steps=1,
            knobs=(("persistence", 100), ("prefetch", 0)),
            tied=True,
            trainable=not_third,
        ),
    ],
    "other optimizers": [
        Case(1, optimizer=zf.optim.sgd(0.1, momentum=0.9), donate=False),
        Case(3, optimizer=zf.optim.sgd(0.1)),
        Case(3, optimizer=zf.optim.lamb(0.1)),
        Case(1, optimizer=zf.optim.lamb(0.1), donate=False, precision=torch.bfloat16),
    ],
    "what a step of an optimizer makes on the way": [
        *(Case(stage, optimizer=CLIPPED, donate=stage % 2 == 0) for stage in (0, 1, 2, 3)),
        Case(3, optimizer=CLIPPED, precision=torch.bfloat16, offload=("optimizer", "params")),
        Case(0, optimizer=BY_HAND, offload=("optimizer",)),
        Case(1, optimizer=BY_HAND),
        Case(3, optimizer=BY_HAND, precision=torch.bfloat16, donate=False),
    ],
    "loss scales": [
        *(Case(stage, precision=SCALED, donate=stage % 2 == 0) for stage in (0, 1, 2, 3)),
        Case(3, precision=SCALED, offload=("grads",), num_micro_batches=2, optimizer=CLIPPED),
        Case(3, precision=dataclasses.replace(SCALED, loss_scale=1.0)),
        Case(
            2,
            precision=zf.Precision(torch.float16, torch.float16, torch.float32, torch.float32, 8.0),
        ),
    ],
    "in few bits": [
        *(
            Case(stage, codecs=(None, zf.compression.int4), offload=("grads",), num_micro_batches=2)
            for stage in (0, 1, 2)
        ),
        Case(3, codecs=(zf.compression.int8, None), trainable=not_third, knobs=(("prefetch", 3),)),
        Case(
            3,
            codecs=(zf.compression.int8, zf.compression.int4),
            precision=torch.bfloat16,
            loss=recomputed,
            donate=False,
        ),
        Case(
            3,
            codecs=(zf.compression.int8, zf.compression.int4),
            precision=SCALED,
            knobs=(("persistence", 100), ("max_live", 9000)),
            bucket_bytes=1,
        ),
        Case(3, codecs=(zf.compression.int8, slowly), steps=1, knobs=(("prefetch", 0),)),
    ],
    "with what messages lost": [
        *(Case(stage, codecs=(None, slowly if stage % 2 else at_once)) for stage in (0, 1, 2)),
        Case(
            3,
            codecs=(None, slowly),
            precision=zf.Precision(reduce=torch.bfloat16),
            num_micro_batches=2,
        ),
        Case(2, codecs=(None, slowly), steps=1, num_micro_batches=2),
    ],
    "in few bits over a mesh": [
        *(Case(stage, over="mesh", codecs=(None, slowly)) for stage in (0, 1, 2)),
        *(Case(stage, over="inner", codecs=(None, at_once)) for stage in (0, 1, 2)),
        Case(
            3,
            over="mesh",
            secondary=True,
            codecs=(zf.compression.int8, slowly),
            precision=torch.bfloat16,
        ),
        Case(3, over="inner", codecs=(zf.compression.int8, zf.compression.int4)),
        *(
            Case(stage, over="inner", inner=inner, codecs=(None, slowly))
            for stage, inner in ((1, 1), (2, 4))
        ),
    ],
    "axes of one rank": [
        *(Case(stage, over="mesh", inner=inner) for stage in (0, 1, 2, 3) for inner in (1, SIZE)),
        *(Case(stage, over="inner", inner=1, donate=False) for stage in (0, 1, 2, 3)),
        Case(
            3,
            over="mesh",
            inner=1,
            secondary=True,
            precision=zf.Precision(param=torch.bfloat16, compute=torch.float32),
        ),
        Case(3, over="inner", inner=1, knobs=(("persistence", 100),), trainable=not_third),
    ],
    "one rank": [
        *(Case(stage, size=1, offload=("grads",)) for stage in (0, 1, 2, 3)),
        Case(
            3,
            size=1,
            precision=zf.Precision(compute=torch.bfloat16),
            codecs=(zf.compression.int8, slowly),
        ),
    ],
    "whole leaves": [
        *(Case(stage, optimizer=MUON, num_micro_batches=stage % 2 + 1) for stage in (0, 1, 2, 3)),
        Case(1, optimizer=MUON, over="mesh", precision=torch.bfloat16),
        Case(3, optimizer=MUON, over="inner", steps=1, donate=False, rank=2),
        *(Case(stage, optimizer=MUON, rank=3) for stage in (1, 3)),
    ],
    "torch's own": [
        *(Case(stage, optimizer=RMSPROP, steps=3) for stage in (0, 1, 2, 3)),
        Case(2, optimizer=RMSPROP, steps=1),
        Case(3, optimizer=ADAM_OF_TORCH, precision=torch.bfloat16, donate=False),
    ],
    "one bit": [
        *(
            Case(stage, optimizer=ONE_BIT, steps=steps)
            for stage in (0, 1, 2)
            for steps in (1, 2, 3)
        ),
        Case(1, optimizer=ONE_BIT, over="mesh", steps=3, donate=False),
    ],
    "activations": [
        *(Case(stage, loss=attentive, trainable=not_third, tied=True) for stage in (0, 1, 2, 3)),
        Case(3, loss=attentive, precision=torch.bfloat16, num_micro_batches=2),
        Case(3, loss=attentive_recomputed),
        Case(
            2,
            loss=attentive_recomputed,
            precision=zf.Precision(torch.float16, torch.float16, torch.float32, torch.float32, 8.0),
        ),
    ],
    "by label": [
        Case(0, optimizer=BY_LABEL),
        Case(2, optimizer=BY_LABEL, donate=False),
        Case(3, optimizer=BY_LABEL, precision=torch.bfloat16, trainable=not_third, tied=True),
        Case(3, optimizer=BY_LABEL, over="mesh", donate=False, offload=("optimizer",)),
    ],
}


@pytest.mark.parametrize("name", CASES)
def test_live_bytes_of_other_compositions(name: str) -> None:
    for case in CASES[name]:
        check(case)


PRECISIONS = [
    *(
        None,
        torch.bfloat16,
        SCALED,
        zf.Precision(compute=torch.bfloat16),
        zf.Precision(reduce=torch.bfloat16),
    ),
    zf.Precision(param=torch.bfloat16, compute=torch.float32, master=torch.float32),
    zf.Precision(
        param=torch.bfloat16, compute=torch.bfloat16, reduce=torch.bfloat16, loss_scale=4.0
    ),
    zf.Precision(torch.float16, torch.float16, torch.float32, torch.float32, 8.0),
]
OPTIMIZERS = [
    ADAMW,
    CLIPPED,
    BY_LABEL,
    BY_HAND,
    MUON,
    RMSPROP,
    zf.optim.lamb(0.1),
    zf.optim.sgd(0.1),
    zf.optim.lion(0.1),
    zf.optim.adagrad(0.1),
]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    one_of = lambda *values: draw(st.sampled_from(values))
    stage, over, size = one_of(0, 1, 2, 3, 3), one_of("group", "mesh", "inner"), one_of(1, 2, SIZE)
    stores = ("optimizer", "grads", *(("params",) if stage == 3 else ()))
    knobs: dict[str, Any] = {}
    if stage == 3:
        knobs = {
            "prefetch": one_of(0, 1, 2, 3),
            "persistence": one_of(0, 30, 100, 2000),
            "max_persistent": one_of(None, 200, 3000),
        }
        knobs |= {
            "reuse_distance": one_of(None, 0, 500, 3000, 100_000),
            "max_live": one_of(None, None, 20_000, 40_000),
        }
    return Case(
        stage,
        loss=one_of(loss_fn, recomputed, attentive, attentive_recomputed),
        optimizer=one_of(*OPTIMIZERS, *([ONE_BIT] if stage < 3 else [])),
        precision=one_of(*PRECISIONS),
        bucket_bytes=one_of(1, 600, 4000, 16_000),
        knobs=tuple(knobs.items()),
        offload=tuple(name for name in stores if one_of(False, False, True)),
        num_micro_batches=one_of(1, 1, 2, 3),
        donate=one_of(True, False),
        tied=one_of(False, True),
        trainable=one_of(None, not_third),
        over=over,
        size=size,
        inner=one_of(*(n for n in (1, 2, SIZE) if size % n == 0)),
        rank=draw(st.integers(0, size - 1)),
        secondary=stage == 3 and over == "mesh" and one_of(False, True),
        steps=one_of(1, 2, 2, 3),
        codecs=(
            one_of(None, zf.compression.int8) if stage == 3 else None,
            one_of(None, zf.compression.int4, slowly, at_once),
        ),
    )


@settings(max_examples=examples(8))
@given(cases())
def test_live_bytes_of_drawn_compositions(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("loss", [loss_fn, recomputed])
def test_above_the_state_there_are_a_few_buckets(prefetch: int, loss: Any) -> None:
    plan = check(Case(3, loss=loss, knobs=(("prefetch", prefetch),), bucket_bytes=1))
    padded = lambda numel: -(-numel // (32 * SIZE)) * 32 * SIZE
    largest = 4 * max(padded(leaf.numel()) for leaf in tree.leaves(params()))
    assert plan.largest.gathered <= (prefetch + 2) * largest
    # Two buckets on their way, the leaves of another, and every reduced shard.
    shards = sum(4 * padded(leaf.numel()) for leaf in tree.leaves(params())) // SIZE
    assert plan.largest.gradients <= 4 * largest + shards


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_between_steps_there_is_the_state_and_nothing_else(stage: int) -> None:
    kept = check(Case(stage, bucket_bytes=16_000)).kept.device
    padded = sum(slot.padded_numel for slot in zf.layout.layout_of(params(), SIZE, 16_000).buckets)
    whole = 4 * padded
    assert kept == zf.planner.Held(
        params=whole // SIZE if stage == 3 else whole, optimizer=2 * whole // (SIZE if stage else 1)
    )


def test_stores_are_counted_apart_from_an_accelerator() -> None:
    """On ``meta``, which stands for a device, the state of an offloaded optimizer is in host memory
    and goes there again.
    """
    case = Case(2, offload=("optimizer",))
    batch = torch.ones(ROWS, WIDTHS[0])
    found = {
        device: zf.planner.live_bytes(
            functools.partial(run_of, case), params(), batch, size=SIZE, device=device
        )
        for device in ("cpu", "meta")
    }
    assert found["cpu"].kept.host.total == found["meta"].kept.device.optimizer == 0
    assert found["cpu"].kept.device.optimizer == found["meta"].kept.host.optimizer > 0
    assert "in host memory" in str(found["meta"])
    assert "in host memory" not in str(found["cpu"])


def test_a_loop_of_ones_own_is_measured() -> None:
    """A recipe is no more than a composition: the same transforms by hand hold the same bytes."""

    class State(NamedTuple):
        params: Any
        opt_state: Any

    def by_hand(group: zf.Group) -> Any:
        vg = zf.shard_grads(
            zf.data_parallel(zf.value_and_grad(zf.shard_params(loss_fn, group)), group), group
        )
        optimizer = zf.shard_optimizer(ADAMW, group)

        def init(value: Any) -> State:
            placed = zf.shard(value, group, bucket_bytes=600)
            return State(placed, optimizer.init(placed))

        def step(state: State, batch: Any) -> tuple[State, Any]:
            loss, grads = vg(state.params, batch)
            zf.reductions.global_norm(grads)
            return State(
                *zf.apply(optimizer, grads, state.opt_state, state.params, donate=True)
            ), loss

        return types.SimpleNamespace(init=init, step=step)

    batch = torch.ones(ROWS, WIDTHS[0])
    found = zf.planner.live_bytes(by_hand, params(), batch, size=SIZE)
    assert [moment.device for moment in found.moments[:-1]] == [
        moment.device for moment in planned(Case(3)).moments[:-1]
    ]


def test_a_plan_needs_neither_data_nor_memory() -> None:
    width, size = 1 << 15, 1024
    huge = {"h": [{"w": torch.empty(width, width, device="meta")} for _ in range(4)]}
    loss = lambda p, x: sum(torch.tanh(x @ layer["w"]).sum() for layer in p["h"])
    make = lambda group: zf.zero(3, loss, ADAMW, group, bucket_bytes=1)
    found = zf.planner.live_bytes(make, huge, torch.empty(1, width, device="meta"), size=size)
    assert found.kept.device == zf.planner.Held(
        params=4 * 4 * width**2 // size, optimizer=2 * 4 * 4 * width**2 // size
    )
    assert found.largest.gathered == 2 * 4 * width**2


def test_a_loss_may_ask_for_numbers() -> None:
    def asking(p: Any, x: Tensor) -> Tensor:
        out = (x @ p["w"]).sum()
        return out if torch.isfinite(out) and out.item() > 0 else out * float("nan")

    make = lambda group: zf.zero(2, asking, ADAMW, group)
    assert (
        zf.planner.live_bytes(
            make, {"w": torch.ones(64, 64)}, torch.ones(2, 64), size=2
        ).peak.device.total
        > 0
    )


def test_numbers_of_steps_and_names_of_buffers_are_checked() -> None:
    make = lambda group: zf.zero(0, loss_fn, ADAMW, group)
    with pytest.raises(zf.errors.OptionError, match="steps must be at least 1; got 0"):
        zf.planner.live_bytes(make, params(), torch.ones(ROWS, WIDTHS[0]), size=2, steps=0)
    with pytest.raises(zf.errors.OptionError, match="0 <= rank < size; got rank 2, size 2"):
        zf.planner.live_bytes(make, params(), torch.ones(ROWS, WIDTHS[0]), size=2, rank=2)
    with pytest.raises(
        zf.errors.OptionError, match=r"a buffer is one of params, gathered, .*; got 'weights'"
    ):
        Meter().name("weights", torch.ones(1000))
