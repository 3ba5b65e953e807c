"""Live bytes: a step on tensors without data makes and frees the same bytes as a real step."""

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
RULES = [ops.AdagradRule, ops.AdamRule, ops.LambRule, ops.LionRule, ops.SgdRule]
KERNELS = [
    name
    for name in ops.__all__
    if not name.endswith("Rule")
    and name
    not in ("AddressTable", "fake_mode", "is_abstract", "message_bytes", "unravel", "use", "wide")
]


@contextlib.contextmanager
def compiled_kernels(meter: Meter) -> Iterator[None]:
    """Run kernels as outside of a dispatch mode, and count the buffers that the kernels return."""
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
        for rule in RULES:
            stack.enter_context(
                unittest.mock.patch.object(rule, "__call__", counted(rule.__call__))
            )
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
    """A block that keeps more than matrices for backward: a mask, attention weights, a norm, random
    bits.
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


def writing(params: Any, x: Tensor) -> Tensor:
    """A loss whose second bias is a mean of the inputs, not trained."""
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"])
        if len(layer["b"]) == WIDTHS[2]:
            layer["b"].lerp_(x.detach().mean(0).to(layer["b"].dtype), 0.1)
        x = x - layer["b"].to(x.dtype)
    return (x @ params["head"]).pow(2).mean()


def mean_of_second(path: str, leaf: Any) -> str | None:
    return "mean" if path == "h.1.b" else "rank 0" if path == "h.2.b" else None


def not_third(path: str, leaf: Any) -> bool:
    return not path.startswith("h.2")


ADAMW = zf.optim.adamw(0.1)
CLIPPED = zf.optim.chain(zf.optim.clip_by_global_norm(1e-3), zf.optim.sgd(0.1, momentum=0.9))
BY_LABEL = zf.optim.by_label(
    {"w": zf.optim.lamb(0.1), "b": CLIPPED}, lambda path, leaf: "b" if path.endswith("b") else "w"
)


def stepped_by_hand(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    """An update that allocates two buffers more than the result needs."""
    return tree.map(
        lambda g, m, p: (m * 0.9 + g) * -0.1 + p.sign() * 0.01, grads, state, params
    ), tree.map(torch.neg, grads)


MUON = zf.optim.muon(0.1, ADAMW)
RMSPROP = zf.optim.from_torch(torch.optim.RMSprop, lr=0.1, momentum=0.9)
ADAM_OF_TORCH = zf.optim.from_torch(torch.optim.Adam, lr=0.1)
ONE_BIT = zf.optim.onebit_adam(0.1, freeze_step=1)
BY_HAND = (lambda params: tree.map(torch.zeros_like, params), stepped_by_hand)

SCALED = zf.Precision(reduce=torch.bfloat16, loss_scale=2.0)


def int4_with_feedback() -> zf.compression.Codec:
    return zf.compression.int4(feedback=zf.compression.error_feedback())


def int8_with_short_feedback() -> zf.compression.Codec:
    # Blocks of 34 elements end at any place of a leaf.
    return zf.compression.int8(block=34, feedback=zf.compression.error_feedback(err_beta=0.0))


@dataclass(frozen=True)
class Case:
    stage: int
    loss: Any = loss_fn
    optimizer: Any = ADAMW
    precision: Any = None
    bucket_bytes: int = 600
    schedule: tuple[tuple[str, Any], ...] = ()
    offload: tuple[str, ...] = ()
    num_micro_batches: int = 1
    donate: bool = True
    tied: bool = False
    trainable: Callable[[str, Any], bool] | None = None
    buffers: Callable[[str, Any], str | None] | None = None
    # The ranks: a group, a mesh or the inner axis; the ranks of a row; whether backward gathers
    # over the inner axis.
    over: str = "group"
    size: int = SIZE
    inner: int = 2
    rank: int = 0
    secondary: bool = False
    steps: int = 2
    # The codecs for parameters and gradients; each run makes new error feedback.
    codecs: tuple[
        Callable[[], zf.compression.Codec] | None, Callable[[], zf.compression.Codec] | None
    ] = (None, None)


def run_of(case: Case, group: zf.Group) -> zf.recipes.Zero:
    if case.over != "group":
        mesh = zf.split(group, case.inner)
        group = mesh if case.over == "mesh" else mesh.inner
    host: Any = zf.stores.host(pin=False)
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
        buffers=case.buffers,
        schedule=zf.ScheduleOptions(secondary=case.secondary, **dict(case.schedule)),
        offload=zf.stores.Offload(**dict.fromkeys(case.offload, host)),
        compression=zf.compression.Compression(**codecs),
    )


def planned(case: Case) -> Live:
    batch = torch.ones(ROWS * case.num_micro_batches, WIDTHS[0])
    return zf.planner.live_bytes(
        functools.partial(run_of, case),
        params(tied=case.tied),
        batch,
        zf.collectives.abstract_group(case.size, case.rank),
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
    assert found.steady.device == plan.steady.device
    for number, (moment, real) in enumerate(zip(plan.instants, found.instants, strict=False)):
        assert real.device == moment.device, (number, moment.what, real.what)
    assert len(found.instants) == len(plan.instants)
    return plan


@pytest.mark.parametrize(
    ("stage", "precision", "donate"),
    [
        # Every stage and both precisions; all combinations in the long form.
        pytest.param(
            stage,
            precision,
            donate,
            marks=() if donate and bool(precision) == bool(stage % 2) else pytest.mark.slow,
        )
        for stage in (0, 1, 2, 3)
        for precision in (None, torch.bfloat16)
        for donate in (True, False)
    ],
)
def test_live_bytes_equal_the_measured_bytes(stage: int, precision: Any, donate: bool) -> None:
    for offload in [(), ("optimizer",)]:
        check(Case(stage, offload=offload, precision=precision, donate=donate))


CASES = {
    "micro-batches": [Case(stage, num_micro_batches=3) for stage in (0, 1, 2, 3)],
    "gradients in a store": [
        Case(stage, offload=("grads",), num_micro_batches=2) for stage in (0, 1, 2, 3)
    ],
    "everything in a store": [
        Case(3, offload=("params", "grads", "optimizer"), precision=precision, donate=donate)
        for precision, donate in ((None, True), (torch.bfloat16, False))
    ],
    "recomputed blocks": [
        Case(3, loss=recomputed),
        Case(3, loss=recomputed, precision=torch.bfloat16),
        Case(2, loss=recomputed),
    ],
    "tied and frozen": [Case(stage, tied=True, trainable=not_third) for stage in (0, 1, 2, 3)],
    "leaves that the loss writes": [
        Case(
            stage,
            loss=writing,
            buffers=mean_of_second,
            num_micro_batches=1 + stage % 2,
            precision=torch.bfloat16 if stage == 1 else None,
        )
        for stage in (0, 1, 2, 3)
    ],
    "a bucket for each leaf": [Case(2, bucket_bytes=1), Case(3, bucket_bytes=1)],
    "other schedules": [
        Case(3, schedule=(("prefetch", 0),)),
        Case(3, schedule=(("prefetch", 3),), bucket_bytes=1),
        Case(3, schedule=(("reuse_distance", 10_000),)),
        Case(3, schedule=(("max_live", 9000),), bucket_bytes=1),
        Case(3, schedule=(("persistence", 100),), trainable=not_third, num_micro_batches=2),
    ],
    "another compute dtype": [
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
    "over the inner axis": [
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
            schedule=(("persistence", 100),),
        ),
        Case(
            3,
            over="mesh",
            secondary=True,
            loss=recomputed,
            num_micro_batches=2,
            trainable=not_third,
            schedule=(("reuse_distance", 10_000),),
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
        Case(3, steps=1, bucket_bytes=1, schedule=(("prefetch", 3),)),
        Case(3, steps=1, bucket_bytes=1, schedule=(("max_live", 9000),)),
        Case(3, steps=1, loss=recomputed, num_micro_batches=2, precision=torch.bfloat16),
        Case(
            3,
            steps=1,
            schedule=(("persistence", 100), ("prefetch", 0)),
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
    "temporary buffers of optimizers": [
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
    "compressed": [
        *(
            Case(stage, codecs=(None, zf.compression.int4), offload=("grads",), num_micro_batches=2)
            for stage in (0, 1, 2)
        ),
        Case(
            3, codecs=(zf.compression.int8, None), trainable=not_third, schedule=(("prefetch", 3),)
        ),
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
            schedule=(("persistence", 100), ("max_live", 9000)),
            bucket_bytes=1,
        ),
        Case(
            3,
            codecs=(zf.compression.int8, int4_with_feedback),
            steps=1,
            schedule=(("prefetch", 0),),
        ),
    ],
    "with error feedback": [
        *(
            Case(
                stage, codecs=(None, int4_with_feedback if stage % 2 else int8_with_short_feedback)
            )
            for stage in (0, 1, 2)
        ),
        Case(
            3,
            codecs=(None, int4_with_feedback),
            precision=zf.Precision(reduce=torch.bfloat16),
            num_micro_batches=2,
        ),
        Case(2, codecs=(None, int4_with_feedback), steps=1, num_micro_batches=2),
    ],
    "compressed over a mesh": [
        *(Case(stage, over="mesh", codecs=(None, int4_with_feedback)) for stage in (0, 1, 2)),
        *(
            Case(stage, over="inner", codecs=(None, int8_with_short_feedback))
            for stage in (0, 1, 2)
        ),
        Case(
            3,
            over="mesh",
            secondary=True,
            codecs=(zf.compression.int8, int4_with_feedback),
            precision=torch.bfloat16,
        ),
        Case(3, over="inner", codecs=(zf.compression.int8, zf.compression.int4)),
        *(
            Case(stage, over="inner", inner=inner, codecs=(None, int4_with_feedback))
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
        Case(3, over="inner", inner=1, schedule=(("persistence", 100),), trainable=not_third),
    ],
    "one rank": [
        *(Case(stage, size=1, offload=("grads",)) for stage in (0, 1, 2, 3)),
        Case(
            3,
            size=1,
            precision=zf.Precision(compute=torch.bfloat16),
            codecs=(zf.compression.int8, int4_with_feedback),
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
    "1-bit Adam": [
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


# Each takes a second or more, and shares most of its code with a case of every day.
LONG = {
    "1-bit Adam",
    "activations",
    "by label",
    "loss scales",
    "micro-batches",
    "other schedules",
    "over the inner axis",
    "secondary shards",
    "with error feedback",
    "axes of one rank",
    "compressed",
    "compressed over a mesh",
    "temporary buffers of optimizers",
    "torch's own",
    "whole leaves",
}
NAMES = [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in CASES]


@pytest.mark.parametrize("name", NAMES)
def test_live_bytes_equal_the_measured_bytes_of_other_compositions(name: str) -> None:
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
    schedule: dict[str, Any] = {}
    if stage == 3:
        schedule = {
            "prefetch": one_of(0, 1, 2, 3),
            "persistence": one_of(0, 30, 100, 2000),
            "max_persistent": one_of(None, 200, 3000),
        }
        schedule |= {
            "reuse_distance": one_of(None, 0, 500, 3000, 100_000),
            "max_live": one_of(None, None, 20_000, 40_000),
        }
    return Case(
        stage,
        loss=one_of(loss_fn, recomputed, attentive, attentive_recomputed),
        optimizer=one_of(*OPTIMIZERS, *([ONE_BIT] if stage < 3 else [])),
        precision=one_of(*PRECISIONS),
        bucket_bytes=one_of(1, 600, 4000, 16_000),
        schedule=tuple(schedule.items()),
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
            one_of(None, zf.compression.int4, int4_with_feedback, int8_with_short_feedback),
        ),
    )


@settings(max_examples=examples(8))
@given(cases())
def test_live_bytes_equal_the_measured_bytes_of_drawn_compositions(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("loss", [loss_fn, recomputed])
def test_a_step_holds_the_state_and_a_few_buckets(prefetch: int, loss: Any) -> None:
    plan = check(Case(3, loss=loss, schedule=(("prefetch", prefetch),), bucket_bytes=1))
    padded = lambda numel: -(-numel // (32 * SIZE)) * 32 * SIZE
    largest = 4 * max(padded(leaf.numel()) for leaf in tree.leaves(params()))
    assert plan.largest.gathered <= (prefetch + 2) * largest
    # Two buckets in flight, the leaves of another bucket, and every reduced shard.
    shards = sum(4 * padded(leaf.numel()) for leaf in tree.leaves(params())) // SIZE
    assert plan.largest.grads + plan.largest.communication <= 4 * largest + shards


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_between_steps_a_rank_holds_only_the_state(stage: int) -> None:
    kept = check(Case(stage, bucket_bytes=16_000)).steady.device
    padded = sum(slot.padded_numel for slot in zf.layout.layout_of(params(), SIZE, 16_000).buckets)
    whole = 4 * padded
    assert kept == zf.planner.Bytes(
        params=whole // SIZE if stage == 3 else whole, moments=2 * whole // (SIZE if stage else 1)
    )


def test_stores_are_counted_apart_from_an_accelerator() -> None:
    """``meta`` stands for a device: the state of an offloaded optimizer moves from host memory and
    back.
    """
    case = Case(2, offload=("optimizer",))
    batch = torch.ones(ROWS, WIDTHS[0])
    found = {
        device: zf.planner.live_bytes(
            functools.partial(run_of, case), params(), batch, SIZE, device=device
        )
        for device in ("cpu", "meta")
    }
    assert found["cpu"].steady.host.total == found["meta"].steady.device.moments == 0
    assert found["cpu"].steady.device.moments == found["meta"].steady.host.moments > 0
    assert "host, peak" in str(found["meta"])
    assert "host, peak" not in str(found["cpu"])


def test_live_bytes_measure_a_loop_written_by_hand() -> None:
    """A recipe is only a composition: the same transforms by hand hold the same bytes."""

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
            zf.reductions.norm_and_counts(grads, 0)
            return State(
                *zf.apply(optimizer, grads, state.opt_state, state.params, donate=True)
            ), loss

        return types.SimpleNamespace(init=init, step=step)

    batch = torch.ones(ROWS, WIDTHS[0])
    found = zf.planner.live_bytes(by_hand, params(), batch, SIZE)
    assert [moment.device for moment in found.instants[:-1]] == [
        moment.device for moment in planned(Case(3)).instants[:-1]
    ]


def test_live_bytes_need_neither_data_nor_memory() -> None:
    width, size = 1 << 15, 1024
    huge = {"h": [{"w": torch.empty(width, width, device="meta")} for _ in range(4)]}
    loss = lambda p, x: sum(torch.tanh(x @ layer["w"]).sum() for layer in p["h"])
    make = lambda group: zf.zero(3, loss, ADAMW, group, bucket_bytes=1)
    found = zf.planner.live_bytes(make, huge, torch.empty(1, width, device="meta"), size)
    assert found.steady.device == zf.planner.Bytes(
        params=4 * 4 * width**2 // size, moments=2 * 4 * 4 * width**2 // size
    )
    assert found.largest.gathered == 2 * 4 * width**2


def test_live_bytes_allow_a_loss_that_reads_numbers() -> None:
    def asking(p: Any, x: Tensor) -> Tensor:
        out = (x @ p["w"]).sum()
        return out if torch.isfinite(out) and out.item() > 0 else out * float("nan")

    make = lambda group: zf.zero(2, asking, ADAMW, group)
    assert (
        zf.planner.live_bytes(
            make, {"w": torch.ones(64, 64)}, torch.ones(2, 64), 2
        ).peak.device.total
        > 0
    )


def test_the_number_of_steps_and_the_names_of_buffers_are_checked() -> None:
    make = lambda group: zf.zero(0, loss_fn, ADAMW, group)
    with pytest.raises(zf.errors.OptionError, match=r"an integer of at least 1, .*; got 0"):
        zf.planner.live_bytes(make, params(), torch.ones(ROWS, WIDTHS[0]), 2, steps=0)
    with pytest.raises(zf.errors.OptionError, match="0 <= rank < size; got rank 2, size 2"):
        zf.planner.live_bytes(
            make, params(), torch.ones(ROWS, WIDTHS[0]), zf.collectives.abstract_group(2, 2)
        )
    with pytest.raises(
        zf.errors.OptionError, match=r"a buffer is one of params, masters, .*; got 'weights'"
    ):
        Meter().name("weights", torch.ones(1000))
