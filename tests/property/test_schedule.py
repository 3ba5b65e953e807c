"""The schedule of gathers: a function of the trace, and invisible in the result."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests import models
from tests.conftest import examples
from zfun import optim
from zfun.collectives import Collective, sum_group
from zfun.planner import Event, Noted, Profile, Schedule, Trace, TracedBucket
from zfun.testing import assert_same_bits, same_bits


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    numels = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    trained = [draw(st.booleans()) for _ in numels]
    buckets = tuple(
        TracedBucket(f"bucket {i}", ((f"leaf {i}", 32 * n),), 32 * n, 4, 4, 4 if train else 0)
        for i, (n, train) in enumerate(zip(numels, trained, strict=True))
    )
    uses = st.lists(st.integers(0, len(numels) - 1), max_size=12)
    forward = draw(uses)
    forward = [b for i, b in enumerate(forward) if i == 0 or forward[i - 1] != b]
    if draw(st.booleans()):
        return Trace(buckets, 2, tuple(forward))
    # Backward may use anything; the gradients of a bucket may be complete before or after the
    # last use.
    backward = [Event("use", b) for b in draw(uses)]
    for b, train in enumerate(trained):
        if train and draw(st.booleans()):
            backward.insert(draw(st.integers(0, len(backward))), Event("reduce", b))
    return Trace(buckets, 2, tuple(forward), tuple(backward))


def largest(trace: Trace) -> int:
    return max(bucket.numel for bucket in trace.buckets)


def replay(schedule: Schedule) -> list[int]:
    """Run a schedule on a set of buckets, and return the live elements after each step."""
    held: set[int] = set()
    live = []
    for step in schedule.steps:
        if step.kind == "gather":
            assert step.bucket not in held, "gathered twice"
            held.add(step.bucket)
        elif step.kind == "release":
            held.remove(step.bucket)
        elif step.kind == "use":
            assert step.bucket in held, "used, but not gathered"
        live.append(sum(schedule.trace.buckets[b].numel for b in held))
    assert held == schedule.persistent
    return live


@settings(max_examples=examples(100))
@given(
    trace=traces(),
    prefetch=st.integers(0, 4),
    extra=st.one_of(st.none(), st.integers(0, 600)),
    reuse_distance=st.one_of(st.none(), st.integers(0, 900)),
    persistence=st.sampled_from([0, 32, 96, 1000]),
    max_persistent=st.one_of(st.none(), st.integers(0, 300)),
)
def test_a_schedule_stays_within_the_bounds(
    trace: Trace,
    prefetch: int,
    extra: int | None,
    reuse_distance: int | None,
    persistence: int,
    max_persistent: int | None,
) -> None:
    options: dict[str, Any] = {
        "prefetch": prefetch,
        "reuse_distance": reuse_distance,
        "persistence": persistence,
        "max_persistent": max_persistent,
    }
    free = zf.planner.schedule(trace, zf.ScheduleOptions(**options))
    kept = sum(trace.buckets[b].numel for b in free.persistent)
    assert max_persistent is None or kept <= max_persistent
    assert (
        free.persistent == set(range(len(trace.buckets)))
        or persistence < largest(trace)
        or max_persistent is not None
    )
    bound = None if extra is None else kept + largest(trace) + extra
    made = zf.planner.schedule(trace, zf.ScheduleOptions(max_live=bound, **options))
    live = replay(made)
    assert live == made.live()
    assert bound is None or max(live) <= bound
    # The uses are those of the trace, in order.
    uses = [(step.phase, step.bucket) for step in made.steps if step.kind == "use"]
    assert uses == [("forward", b) for b in trace.forward] + [
        ("backward", e.bucket) for e in trace.backward if e.kind == "use"
    ]
    # A rank may use any bucket: each bucket is gathered, or already there, in each pass.
    for phase in ("forward", "backward"):
        assert {
            s.bucket for s in made.steps if s.phase == phase and s.kind in ("gather", "use")
        } >= set(range(len(trace.buckets))) - set(made.persistent) - {
            s.bucket for s in made.steps if s.kind == "use"
        }
    # Every trained bucket is reduced once.
    assert sorted(s.bucket for s in made.steps if s.kind == "reduce") == [
        b for b, t in enumerate(trace.buckets) if t.grad_itemsize
    ]
    # No bucket is gathered further ahead than ``prefetch``.
    waiting: set[int] = set()
    for step in made.steps:
        if step.kind == "gather" and step.phase != "start":
            waiting.add(step.bucket)
        elif step.kind in ("use", "release"):
            waiting.discard(step.bucket)
        assert len(waiting) <= prefetch + 1
    assert made == zf.planner.schedule(trace, zf.ScheduleOptions(max_live=bound, **options))


@settings(max_examples=examples(60))
@given(trace=traces(), stored=st.sets(st.integers(0, 5)), ahead=st.integers(0, 3), data=st.data())
def test_reads_precede_gathers_and_change_no_other_step(
    trace: Trace, stored: set[int], ahead: int, data: st.DataObject
) -> None:
    made = data.draw(schedule_options())
    buckets = tuple(
        dataclasses.replace(bucket, stored_itemsize=4 if i in stored else 0)
        for i, bucket in enumerate(trace.buckets)
    )
    total = sum(bucket.numel for bucket in buckets)
    made["max_live"] = None if made["max_live"] is None else made["max_live"] * total
    options = zf.ScheduleOptions(**made, read_ahead=ahead)
    plain = zf.planner.schedule(trace, options)
    reading = zf.planner.schedule(dataclasses.replace(trace, buckets=buckets), options)
    assert [step for step in reading.steps if step.kind != "read"] == list(plain.steps)
    under_way: list[int] = []
    for step in reading.steps:
        if step.kind == "read":
            under_way.append(step.bucket)
            assert len(under_way) <= max(1, ahead)
        elif step.kind == "gather" and step.bucket in stored:
            assert under_way.pop(0) == step.bucket
    assert not under_way
    # Without backward, the reads of a pass belong to the gathers of the same pass.
    for phase in ("start", "forward", "backward"):
        read = [step.bucket for step in reading.steps if step[::2] == ("read", phase)]
        assert read == [bucket for bucket in reading.order(phase) if bucket in stored]


@settings(max_examples=examples(60))
@given(trace=traces(), prefetch=st.integers(0, 3))
def test_only_the_bucket_in_use_and_prefetched_buckets_are_live(
    trace: Trace, prefetch: int
) -> None:
    """If no bucket is used twice in a pass, only the bucket in use and the prefetched ones are
    live.
    """
    once = Trace(trace.buckets, 2, tuple(dict.fromkeys(trace.forward)))
    held, most = set(), 0
    for step in zf.planner.schedule(once, zf.ScheduleOptions(prefetch=prefetch)).steps:
        held = (
            held | {step.bucket}
            if step.kind == "gather"
            else held - {step.bucket}
            if step.kind == "release"
            else held
        )
        most = max(most, len(held))
    assert most <= prefetch + 1


@settings(max_examples=examples(60))
@given(trace=traces(), prefetch=st.integers(0, 3))
def test_the_first_buckets_of_backward_are_gathered_before_the_end_of_forward(
    trace: Trace, prefetch: int
) -> None:
    once = Trace(trace.buckets, 2, tuple(dict.fromkeys(trace.forward)))
    made = zf.planner.schedule(once, zf.ScheduleOptions(prefetch=prefetch))
    held = set[int]()
    for step in made.steps[: made.turn]:
        held = (
            held | {step.bucket}
            if step.kind == "gather"
            else held - {step.bucket}
            if step.kind == "release"
            else held
        )
    assert held >= set(once.forward[::-1][: prefetch + 1])
    # Without backward, forward gathers every bucket once.
    gathers = [
        step.bucket
        for step in made.steps[: made.turn]
        if step.kind == "gather" and step.phase == "forward"
    ]
    assert sorted(gathers) == list(range(len(trace.buckets)))
    assert all(step.phase != "forward" for step in made.steps[made.turn :])


@settings(max_examples=examples(60))
@given(trace=traces(), distance=st.integers(0, 900))
def test_a_bucket_is_regathered_only_beyond_the_reuse_distance(trace: Trace, distance: int) -> None:
    """A bucket is regathered exactly where at least ``reuse_distance`` elements lie between two
    uses, or where the gradients were complete at the last use.
    """
    uses = [*trace.forward, *(event.bucket for event in trace.backward if event.kind == "use")]
    expected, last = [], {}
    for place, b in enumerate(uses):
        between = sum(trace.buckets[x].numel for x in uses[last.get(b, -1) + 1 : place])
        adjacent = place > 0 and uses[place - 1] == b and place != len(trace.forward)
        if b not in last or (between >= distance and not adjacent):
            expected.append(b)
        last[b] = place
    made = zf.planner.schedule(trace, zf.ScheduleOptions(prefetch=0, reuse_distance=distance))
    used = {"forward": set(trace.forward), "backward": set(uses[len(trace.forward) :])}
    gathers = [
        step.bucket
        for step in made.steps
        if step.kind == "gather" and step.bucket in used.get(step.phase, ())
    ]
    assert gathers == expected


@settings(max_examples=examples(30))
@given(trace=traces(), prefetch=st.integers(0, 3))
def test_with_a_large_reuse_distance_nothing_is_gathered_twice(trace: Trace, prefetch: int) -> None:
    """Buckets of forward stay to the end of backward, also without a use in backward: 2Ψ are
    sent, not 3Ψ.
    """
    steps = zf.planner.schedule(
        trace, zf.ScheduleOptions(prefetch=prefetch, reuse_distance=10**9)
    ).steps
    assert all(
        sum(step.kind == "gather" and step.bucket == b for step in steps) == 1
        for b in trace.forward
    )


def schedule_options() -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries(
        {
            "prefetch": st.integers(0, 4),
            # times the largest bucket; see below
            "max_live": st.one_of(st.none(), st.sampled_from([1, 2, 3])),
            "reuse_distance": st.one_of(st.none(), st.sampled_from([0, 1, 100, 500, 10**9])),
            "persistence": st.sampled_from([0, 0, 5, 25, 1000]),
            "max_persistent": st.sampled_from([None, None, 64]),
        }
    )


def in_bound(options: dict[str, Any], params: Any, size: int, bucket_bytes: int) -> dict[str, Any]:
    """Turn a multiple of the smallest bound that is possible into elements."""
    if options["max_live"] is None:
        return options
    layout = zf.layout.layout_of(params, size, bucket_bytes, options["persistence"])
    total = sum(bucket.padded_numel for bucket in layout.buckets)
    biggest = max(bucket.padded_numel for bucket in layout.buckets)
    return {
        **options,
        "max_live": options["max_live"] * biggest + (total if options["persistence"] else 0),
    }


def uses_repeatedly(params: Any, x: Tensor) -> Tensor:
    """Use each block several times: early and late, twice in one operation, behind a detach, and in
    a recomputed block.
    """
    h = params["h"]
    for layer in [h[0], h[1], h[0], h[2], h[0]]:
        x = torch.tanh(x @ layer["w"] @ layer["w"].t() + layer["b"])
    block = lambda x: torch.tanh(x @ h[1]["w"] + h[3]["b"] * h[3]["w"].sum())
    x = checkpoint(block, x, use_reentrant=False)
    x = x @ h[2]["w"].detach() + x @ h[1]["w"]
    return (x @ params["out"]).pow(2).mean() + h[0]["w"].pow(3).sum()


LOSSES = {"chain": models.mlp_loss, "again and again": uses_repeatedly}


def trained(
    group: zf.Group, loss_fn: Any, stage: int, bucket_bytes: int, num_steps: int = 3, **options: Any
) -> tuple[Any, list[int]]:
    recorder = zf.record(group)
    z = zf.zero(
        stage,
        loss_fn,
        optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(0.05)),
        recorder,
        bucket_bytes=bucket_bytes,
        **options,
    )
    state, sent = z.init(models.mlp()), []
    for batches in models.mlp_batches(num_steps, group.size):
        recorder.clear()
        state, _ = z.step(state, batches[group.rank])
        sent.append(recorder.bytes_sent("params") + recorder.bytes_sent("grads"))
    return z.params(state), sent


@settings(max_examples=examples(10))
@given(
    options=schedule_options(),
    size=st.sampled_from([1, 2, 3]),
    bucket_bytes=st.sampled_from([1, 300, 700, 2**20]),
    name=st.sampled_from(sorted(LOSSES)),
    frozen=st.booleans(),
    donate=st.booleans(),
    num_micro_batches=st.sampled_from([1, 1, 2]),
)
def test_schedule_options_change_no_bit_and_steps_send_the_explained_bytes(
    options: dict[str, Any],
    size: int,
    bucket_bytes: int,
    name: str,
    frozen: bool,
    donate: bool,
    num_micro_batches: int,
) -> None:
    loss_fn = LOSSES[name]
    options = in_bound(options, models.mlp(), size, bucket_bytes)
    trainable = (lambda path, leaf: not path.startswith("h.1")) if frozen else None
    common: dict[str, Any] = {
        "trainable": trainable,
        "num_micro_batches": num_micro_batches,
        "donate": donate,
    }
    expected = zf.simulate(size, trained, loss_fn, 2, 300, **common)
    found = zf.simulate(
        size, trained, loss_fn, 3, bucket_bytes, schedule=zf.ScheduleOptions(**options), **common
    )
    if num_micro_batches == 1:
        assert_same_bits(
            [run[0] for run in found], [run[0] for run in expected], f"{options} and stage 2"
        )
    else:
        plain = zf.simulate(size, trained, loss_fn, 3, 300, **common)
        assert_same_bits(
            [run[0] for run in found],
            [run[0] for run in plain],
            f"{options} and the usual schedule",
        )
    if num_micro_batches > 1:
        return
    x = models.mlp_batches(1, 1)[0][0]
    trace = zf.planner.trace(
        loss_fn,
        models.mlp(),
        x,
        size,
        trainable=trainable,
        bucket_bytes=bucket_bytes,
        persistence=options["persistence"],
    )
    explained = zf.planner.explain(
        zf.planner.schedule(trace, zf.ScheduleOptions(**options))
    ).bytes_sent()
    assert all(run[1][1:] == [explained] * 2 for run in found), (found[0][1], explained)


def by_kind(params: Any) -> Any:
    """The leaves of a network in another order than the order of use, like a tree of stacked
    parameters.
    """
    return {
        "out": params["out"],
        "unused": torch.ones(3),
        "b": [h["b"] for h in params["h"]],
        "w": [h["w"] for h in params["h"]],
    }


def by_kind_loss(params: Any, x: Tensor) -> Tensor:
    return models.mlp_loss(
        {
            "h": [{"w": w, "b": b} for w, b in zip(params["w"], params["b"], strict=True)],
            "out": params["out"],
        },
        x,
    )


IN_ORDER = ("w.0", "b.0", "w.1", "b.1", "w.2", "b.2", "w.3", "b.3", "out")


def order_training(
    group: zf.Group, stage: int, bucket_bytes: int, order: Any
) -> tuple[Any, Any, Any]:
    z = zf.zero(
        stage,
        by_kind_loss,
        optim.adamw(0.05),
        group,
        bucket_bytes=bucket_bytes,
        order=order,
        trainable=lambda p, x: p != "b.1",
    )
    state = z.init(by_kind(models.mlp()))
    for batches in models.mlp_batches(2, group.size):
        state, _ = z.step(state, batches[group.rank])
    return (
        z.params(state),
        state.params.layout,
        None if state.frozen is None else state.frozen.layout,
    )


@settings(max_examples=examples(6))
@given(
    order=st.permutations([*IN_ORDER, "unused"]),
    stage=st.sampled_from([0, 1, 2, 3, 3]),
    size=st.sampled_from([1, 2, 3]),
    bucket_bytes=st.sampled_from([1, 300, 2**20]),
)
def test_no_order_changes_a_bit(order: list[str], stage: int, size: int, bucket_bytes: int) -> None:
    expected = zf.simulate(size, order_training, 2, 300, None)
    found = zf.simulate(size, order_training, stage, bucket_bytes, order)
    assert_same_bits(
        [run[0] for run in found],
        [run[0] for run in expected],
        f"{order} and the order of the tree",
    )
    lying = [
        [layout.leaves[leaf].path for bucket in layout.buckets for leaf in bucket.leaves]
        for layout in found[0][1:]
    ]
    # Two buffers of float64, and one of float32 for the unused leaf.
    assert [path for path in lying[0] if path != "unused"] == [
        path for path in order if path not in ("b.1", "unused")
    ]
    assert lying[1] == ["b.1"]


def test_the_order_of_use_needs_fewer_buckets_at_once() -> None:
    x, params = torch.ones(2, 5, dtype=torch.float64), by_kind(models.mlp())
    order = zf.planner.order_of_use(by_kind_loss, params, x)
    assert order == IN_ORDER
    traced = (
        zf.planner.trace(by_kind_loss, params, x, 2, bucket_bytes=600, order=chosen)
        for chosen in (order, None)
    )
    with_order, without = map(zf.planner.schedule, traced)
    assert with_order.trace.leaves == without.trace.leaves == order
    numel = with_order.trace.buckets[0].numel
    assert {bucket.numel for bucket in [*with_order.trace.buckets, *without.trace.buckets]} == {
        numel
    }
    assert (max(with_order.live()), max(without.live())) == (2 * numel, 5 * numel)
    # The reduction of a complete bucket overlaps the uses of earlier buckets in backward. Unused
    # buckets come last.
    beside = lambda made: sum(
        message.name == "grads" and len(message.overlaps) > 0
        for message in zf.planner.explain(made).messages
    )
    assert (beside(with_order), beside(without)) == (3, 1)

    def main(group: zf.Group) -> Any:
        loss = zf.shard_params(by_kind_loss, group)
        vg = zf.data_parallel(zf.value_and_grad(loss), group)
        vg(zf.shard(params, group, bucket_bytes=300), x * (group.rank + 1))
        return loss.schedules[0].trace.leaves  # pyrefly: ignore[missing-attribute]

    assert zf.simulate(2, main) == [order, order]


def test_ranks_must_agree_on_the_order() -> None:
    def main(group: zf.Group) -> None:
        zf.shard(models.mlp(), group, order=["out", "h.0.w"] if group.rank else None)

    with pytest.raises(
        zf.errors.SpecMismatch,
        match=r"leaf \(order\) is that of the tree on rank 0 and out, h.0.w, ... \(\w+\) on rank 1",
    ):
        zf.simulate(2, main)


CODECS = st.one_of(
    st.none(),
    st.builds(zf.compression.int8, block=st.just(16)),
    st.builds(zf.compression.int4, block=st.just(64)),
)


def with_table(params: Any, x: Tensor) -> Tensor:
    """A network with leaves of several dtypes, one of which no codec can round."""
    x = x[:, params["table"]]
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"].to(x.dtype) + layer["b"])
    return (x @ params["out"]).pow(2).mean()


@settings(max_examples=examples(5))
@given(
    shape=st.sampled_from([(2, 2), (1, 2), (2, 1), (3, 2), (2, 3), (1, 1)]),
    over=st.sampled_from(["group", "inner", "mesh", "secondary"]),
    codecs=st.tuples(CODECS, CODECS),
    compute=st.sampled_from([None, torch.float32]),
    half=st.booleans(),
    bucket_bytes=st.sampled_from([1, 300, 2**20]),
    options=schedule_options(),
)
def test_steps_send_the_explained_bytes_on_every_axis(
    shape: tuple[int, int],
    over: str,
    codecs: Any,
    compute: Any,
    half: bool,
    bucket_bytes: int,
    options: dict[str, Any],
) -> None:
    """Each collective: kind, axis, bytes and bucket, in the order of the stream."""
    inner, outer = shape
    params: dict[str, Any] = {"table": torch.tensor([4, 3, 2, 1, 0]), **models.mlp()}
    if half:
        params["h"] = [
            {"w": layer["w"].to(torch.bfloat16), "b": layer["b"]} for layer in params["h"]
        ]
    trainable = lambda path, leaf: leaf.is_floating_point() and path != "h.2.w"
    x = models.mlp_batches(1, 1)[0][0]

    def where(group: zf.Group) -> tuple[Any, Any]:
        if over == "group":
            return group, group
        mesh: Any = group
        return mesh, mesh.inner if over == "inner" else mesh

    abstract: Any = zf.collectives.abstract_group(inner * outer)
    _, group = where(abstract if over == "group" else zf.split(abstract, inner))
    options = in_bound({**options, "max_live": None}, params, sum_group(group).size, bucket_bytes)
    schedule = zf.ScheduleOptions(**options, secondary=over == "secondary")
    compression = zf.compression.Compression(*codecs)
    precision = zf.Precision(compute=compute)
    loss = with_table if compute is None else zf.cast(with_table, compute)
    layout: dict[str, Any] = {"bucket_bytes": bucket_bytes, "persistence": options["persistence"]}
    made = zf.planner.schedule(
        zf.planner.trace(loss, params, x, group, trainable=trainable, **layout), schedule
    )
    explained = zf.planner.explain(made, group=group, compression=compression)

    def main(group: zf.Group) -> Any:
        recorder, over_it = where(
            zf.record(group) if over == "group" else zf.record(zf.split(group, inner))
        )
        z = zf.zero(
            3,
            with_table,
            optim.sgd(0.01),
            over_it,
            bucket_bytes=bucket_bytes,
            trainable=trainable,
            schedule=schedule,
            compression=compression,
            precision=precision,
        )
        state, _ = z.step(z.init(params), x)
        recorder.clear()
        z.step(state, x)
        return [
            (e.kind, e.name, e.axis, e.part, e.sent_bytes)
            for e in recorder.log
            if e.name in ("params", "grads") and e.sent_bytes
        ]

    expected = [
        (m.kind, m.name, m.axis, m.label, m.sent_bytes) for m in explained.messages if m.sent_bytes
    ]
    for sent in zf.simulate(inner * outer, main):
        assert sorted(sent) == sorted(expected)
        for name in ("params", "grads"):
            assert sum(entry[4] for entry in sent if entry[1] == name) == explained.bytes_sent(name)
            for axis in ("inner", "outer") if over != "group" else ("",):
                each = [
                    entry[3]
                    for entry in sent
                    if entry[1:3] == (name, axis) and entry[0] != "all_reduce"
                ]
                assert name == "grads" or each == [
                    m.label
                    for m in explained.messages
                    if (m.name, m.axis) == (name, axis) and m.sent_bytes
                ]


def test_a_schedule_is_priced_for_the_traced_group() -> None:
    x, mesh = (
        torch.ones(2, 5, dtype=torch.float64),
        zf.split(zf.collectives.abstract_group(6), inner=3),
    )
    made = zf.planner.schedule(zf.planner.trace(models.mlp_loss, models.mlp(), x, mesh))
    with pytest.raises(
        zf.errors.OptionError,
        match=r"priced for the group that it was traced for; got one of 6 ranks for <inner "
        r"axis: rank 0 of 3>",
    ):
        zf.planner.explain(made, group=mesh.inner)
    over_parts = zf.planner.schedule(
        zf.planner.trace(models.mlp_loss, models.mlp(), x, mesh.inner),
        zf.ScheduleOptions(secondary=True),
    )
    with pytest.raises(
        zf.errors.OptionError,
        match=r"secondary=True gathers over the inner axis of a mesh; got <inner axis: rank 0 "
        r"of 3>",
    ):
        zf.planner.explain(over_parts, group=mesh.inner)
    with pytest.raises(
        zf.errors.PlacementError,
        match=r"trace\(\) shards over a mesh or its inner axis; got its outer axis",
    ):
        zf.planner.trace(models.mlp_loss, models.mlp(), x, mesh.outer)


def check_events(found: Profile) -> None:
    """Every use lies between the end of the gather and the release; every gather ends in a wait."""
    there: set[int] = set()
    gathering: dict[int, int] = {}
    summing: list[int] = []
    for before, event in itertools.pairwise(found.events):
        assert event.start <= event.end
        assert before.end <= event.end
    for event in found.events:
        match event.kind:
            case "gather":
                gathering[event.bucket] = gathering.get(event.bucket, 0) + 1
            case "gathered":
                gathering[event.bucket] -= 1
                there.add(event.bucket)
            case "use":
                assert event.bucket in there
            case "release":
                there.discard(event.bucket)
            case "sum":
                summing.append(event.bucket)
            case "summed":
                assert summing.pop(0) == event.bucket
    assert not any(gathering.values())
    assert not summing


@settings(max_examples=examples(5))
@given(
    options=schedule_options(),
    bucket_bytes=st.sampled_from([1, 300]),
    name=st.sampled_from(sorted(LOSSES)),
    frozen=st.booleans(),
)
def test_a_profiled_step_follows_the_schedule(
    options: dict[str, Any], bucket_bytes: int, name: str, frozen: bool
) -> None:
    options = in_bound(options, models.mlp(), 2, bucket_bytes)
    trainable = (lambda path, leaf: not path.startswith("h.1")) if frozen else None
    layout: dict[str, Any] = {"trainable": trainable, "bucket_bytes": bucket_bytes}
    x = models.mlp_batches(1, 1)[0][0]

    def main(group: zf.Group, *, watched: bool) -> Any:
        z = zf.zero(
            3,
            LOSSES[name],
            optim.sgd(0.05),
            group,
            donate=False,
            schedule=zf.ScheduleOptions(**options),
            **layout,
        )
        state, _ = z.step(z.init(models.mlp()), x * (group.rank + 1))
        state, _ = z.step(state, x)
        with zf.planner.profile() if watched else contextlib.nullcontext() as found:
            state, _ = z.step(state, x)
        count = len(found.events) if found else 0
        z.step(state, x)
        assert count == (len(found.events) if found else 0)
        return z.params(state), found

    plain = [run[0] for run in zf.simulate(2, main, watched=False)]
    runs = zf.simulate(2, main, watched=True)
    assert_same_bits([run[0] for run in runs], plain, "watched and not")
    made = zf.planner.schedule(
        zf.planner.trace(
            LOSSES[name], models.mlp(), x, 2, persistence=options["persistence"], **layout
        ),
        zf.ScheduleOptions(**options),
    )
    complete = {event.bucket for event in made.trace.backward if event.kind == "reduce"}
    planned = [
        (step, live)
        for step, live in zip(made.steps, made.live_bytes(), strict=True)
        # Frozen leaves that persist are gathered in the first step only; frozen buckets
        # have no gradients to complete.
        if not (step.phase == "start" and not made.trace.buckets[step.bucket].grad_itemsize)
        and not (step.kind == "reduce" and step.bucket not in complete)
    ]
    for _, found in runs:
        assert found.labels == [bucket.label for bucket in made.trace.buckets]
        held = [
            (step, e.live_bytes)
            for step, e in zip(
                found.steps(), [e for e in found.events if e.kind in Kinds], strict=True
            )
        ]
        if name == "chain":
            check_events(found) if not options["persistence"] else None
            assert [step for step, _ in held] == [step for step, _ in planned]
            assert [entry for entry in held if entry[0].phase != "start"] == [
                entry for entry in planned if entry[0].phase != "start"
            ]
        else:
            # An operation that uses two buckets keeps the first bucket until the operation ends.
            assert sorted(step for step, _ in held) == sorted(step for step, _ in planned)
        picture = found.timeline()
        assert max(n for _, n in picture.live) == max(n for _, n in held)
        by_row: dict[int, float] = {}
        for bar in sorted(
            (e for e in picture.chrome_trace()["traceEvents"] if e["ph"] == "X"),
            key=lambda e: e["ts"],
        ):
            assert bar["ts"] >= by_row.get(bar["tid"], 0.0) - 1e-6
            assert bar["dur"] >= 0
            by_row[bar["tid"]] = bar["ts"] + bar["dur"]
        lanes = [span.lane for span in picture.spans]
        assert lanes.count("gather") == sum(step.kind == "gather" for step, _ in planned)
        assert lanes.count("reduce") == sum(
            bool(bucket.grad_itemsize) for bucket in made.trace.buckets
        )


Kinds = ("gather", "use", "release", "reduce")


def test_a_timeline_subtracts_collectives_from_the_computation_of_each_bucket() -> None:
    found = Profile(labels=["a", "b"])
    found.events = [
        Noted("gather", 0, "forward", 0.0, 1.0, 8),
        Noted("gather", 1, "forward", 1.0, 2.0, 16),
        Noted("gathered", 0, "forward", 2.0, 3.0, 16),
        Noted("use", 0, "forward", 0.0, 3.0, 16),
        Noted("gathered", 1, "forward", 5.0, 7.0, 16),
        Noted("use", 1, "forward", 5.0, 7.0, 16),
        Noted("sum", 1, "backward", 8.0, 9.0, 16),
        Noted("release", 1, "forward", 9.5, 9.5, 8),
        Noted("end", -1, "forward", 10.0, 11.0, 8),
        Noted("summed", 1, "backward", 12.0, 13.0, 8),
    ]
    picture = found.timeline()
    assert [tuple(span) for span in picture.spans if span.lane == "compute"] == [
        ("compute", "forward 0", 0, 3.0, 5.0),
        ("compute", "forward 1", 1, 7.0, 8.0),
        ("compute", "forward 1", 1, 9.0, 10.0),
    ]
    assert {tuple(span) for span in picture.spans if span.lane != "compute"} == {
        ("gather", "forward 0", 0, 0.0, 3.0),
        ("gather", "forward 1", 1, 1.0, 7.0),
        ("reduce", "backward 1", 1, 8.0, 13.0),
    }
    assert picture.live == ((0.0, 0), (1.0, 8), (2.0, 16), (9.5, 8))
    assert (picture.duration, picture.unit) == (13.0, "s")
    # Overlapping gathers are drawn in two rows, and computation in one.
    rows = {
        event["tid"]: event["args"]["name"]
        for event in picture.chrome_trace()["traceEvents"]
        if event["ph"] == "M"
    }
    assert sorted(rows.values()) == ["compute", "gather", "gather", "reduce"]
    pytest.importorskip("matplotlib")
    picture.draw()


SUMS = [
    "sum 4",
    "sum 3",
    "summed 4",
    "sum 2",
    "summed 3",
    "sum 1",
    "summed 2",
    "sum 0",
    "summed 1",
    "summed 0",
]
ONE_BY_ONE = [
    *(f"sum {i}" for i in range(3)),
    "summed 0",
    "sum 3",
    "summed 1",
    "sum 4",
    "summed 2",
    "summed 3",
    "summed 4",
]
GATHERS = [text.replace("summed", "gathered").replace("sum", "gather") for text in ONE_BY_ONE]
# The notes of a step from forward to update, without the notes inside the loss.
WATCHED = {
    0: ["pass forward", *SUMS[:-2], "pass backward", *SUMS[-2:], "update"],
    1: ["pass forward", "pass backward", *ONE_BY_ONE, "update", *GATHERS],
    2: ["pass forward", *SUMS[:-2], "pass backward", *SUMS[-2:], "update", *GATHERS],
    3: [*SUMS, "update"],
}


@pytest.mark.parametrize("stage", WATCHED)
def test_a_profile_covers_the_whole_step(stage: int) -> None:
    def main(group: zf.Group) -> tuple[list[str], Any]:
        z = zf.zero(stage, models.mlp_loss, optim.sgd(0.1), group, bucket_bytes=300)
        state, batch = z.init(models.mlp()), models.mlp_batches(1, 1)[0][0]
        with zf.planner.profile() as found:
            z.step(state, batch)
        check_events(found)
        names = {"pass": lambda e: f"pass {e.phase}", "update": lambda e: "update"}
        shown = [
            e
            for e in found.events
            if e.kind in ("pass", "update", "sum", "summed") or e.phase == "update"
        ]
        picture = found.timeline()
        lanes = {(span.lane, span.name.split()[0]) for span in picture.spans}
        assert ("compute", "update") in lanes
        assert {("compute", "forward"), ("compute", "backward")} <= lanes
        assert (("gather", "update") in lanes) == (stage in (1, 2))
        assert picture.duration <= found.now()
        # Waits inside the update do not count as time of the optimizer.
        updates = [
            span for span in picture.spans if (span.lane, span.name) == ("compute", "update")
        ]
        waits = [(e.start, e.end) for e in found.events if e.kind in ("gathered", "summed")]
        assert all(
            end <= span.start or span.end <= start for span in updates for start, end in waits
        )
        assert found.steps() == () or stage == 3
        return [names.get(e.kind, lambda e: f"{e.kind} {e.bucket}")(e) for e in shown], None

    assert zf.simulate(2, main)[1][0] == WATCHED[stage]


KNOBS: list[dict[str, Any]] = [
    {"prefetch": 3},
    {"prefetch": 0, "max_live": 1},
    {"reuse_distance": 10**9, "prefetch": 2},
    {"persistence": 5},
    {"reuse_distance": 60, "persistence": 5, "max_persistent": 64, "max_live": 2},
]


def branching_training(
    group: zf.Group, options: dict[str, Any], kind: str, frozen: bool, stage: int = 3
) -> Any:
    """Take three steps; from the second step on the last rank takes another branch."""

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        layers = [*params["h"], params["h"][0]]
        if step and group.rank == group.size - 1:
            layers = {
                "skips": layers[1:3],
                "another order": layers[::-1],
                "detached": [{"w": layer["w"].detach(), "b": layer["b"]} for layer in layers],
                "touches only": [{"w": 0 * layer["w"], "b": layer["b"]} for layer in layers],
                "nothing": [],
            }[kind]
        for layer in layers:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return (x @ params["out"]).pow(2).mean()

    trainable = (lambda path, leaf: not path.startswith(("h.1", "h.3"))) if frozen else None
    z = zf.zero(
        stage,
        loss_fn,
        optim.sgd(0.1),
        group,
        bucket_bytes=300,
        trainable=trainable,
        schedule=zf.ScheduleOptions(**options),
    )
    state = z.init(models.mlp())
    for step, batches in enumerate(models.mlp_batches(3, group.size)):  # noqa: B007, the loss reads it
        state, _ = z.step(state, batches[group.rank])
    return z.params(state)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("kind", ["skips", "another order", "detached", "touches only", "nothing"])
def test_ranks_may_branch_under_any_schedule_options(kind: str, frozen: bool) -> None:
    expected = zf.simulate(3, branching_training, {}, kind, frozen, 2)
    for options in KNOBS:
        found = zf.simulate(
            3,
            branching_training,
            in_bound({"persistence": 0, "max_live": None, **options}, models.mlp(), 3, 300),
            kind,
            frozen,
        )
        assert_same_bits(found, expected, f"{options} and stage 2")


def test_leaves_that_persist_are_gathered_once_after_each_update() -> None:
    """Persistent buckets are not gathered in the second micro-batch and in backward, but after the
    update, because the values have changed.
    """

    def main(group: zf.Group) -> None:
        recorder = zf.record(group)
        z = zf.zero(
            3,
            models.mlp_loss,
            optim.adamw(0.05),
            recorder,
            bucket_bytes=300,
            schedule=zf.ScheduleOptions(persistence=5),
            num_micro_batches=2,
            donate=False,
        )
        state = z.init(models.mlp())
        layout = state.params.layout
        small = {
            layout.label(i)
            for i, b in enumerate(layout.buckets)
            if all(layout.leaves[leaf].numel <= 5 for leaf in b.leaves)
        }
        assert small
        for batches in models.mlp_batches(3, group.size):
            recorder.clear()
            state, _ = z.step(state, batches[group.rank])
            gathers = [
                entry.part
                for entry in recorder.log
                if entry.name == "params" and entry.part in small
            ]
            assert sorted(gathers) == sorted(small)
            grads = [
                entry.part
                for entry in recorder.log
                if entry.name == "grads" and entry.part in small
            ]
            assert sorted(grads) == sorted(2 * list(small))
        # Evaluation of the same parameters gathers nothing.
        loss = zf.shard_params(
            models.mlp_loss, recorder, schedule=zf.ScheduleOptions(persistence=5)
        )
        with torch.no_grad():
            first = loss(state.params, models.mlp_batches(1, 1)[0][0])
            recorder.clear()
            assert same_bits(loss(state.params, models.mlp_batches(1, 1)[0][0]), first)
        assert not [entry for entry in recorder.log if entry.part in small]
        # The optimizer state of persistent buckets is sharded too.
        assert state.opt_state.mu.placement is zf.S
        # A write to the shards shows in the next gather.
        for buffer in state.params.buffers:
            buffer.add_(0.5)
        with torch.no_grad():
            assert not same_bits(loss(state.params, models.mlp_batches(1, 1)[0][0]), first)

    zf.simulate(2, main)


def test_a_leaf_that_the_loss_holds_stays_valid() -> None:
    """gather() and to() return the gathered leaf itself, which stays valid while other buckets are
    gathered and freed.
    """

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        h = params["h"]
        first, same = zf.gather(h[0]["w"]), h[1]["w"].to(torch.float64)
        for layer in [*h, *h]:
            x = torch.tanh(x @ layer["w"] + layer["b"])
        x = torch.tanh(x @ first @ same @ h[0]["w"])
        return (x @ params["out"]).pow(2).mean() + h[1]["w"].pow(2).sum() + first.sum()

    def main(group: zf.Group, stage: int, **options: Any) -> Any:
        z = zf.zero(
            stage,
            loss_fn,
            optim.sgd(0.1),
            group,
            bucket_bytes=200,
            schedule=zf.ScheduleOptions(**options),
        )
        state = z.init(models.mlp())
        for batches in models.mlp_batches(3, group.size):
            state, _ = z.step(state, batches[group.rank])
        return z.params(state)

    expected = zf.simulate(2, main, 2)
    for options in ({"max_live": 64, "prefetch": 0}, {"reuse_distance": 0}, {"max_live": 128}):
        assert_same_bits(zf.simulate(2, main, 3, **options), expected, f"{options} and stage 2")


def test_gathered_elements_stay_below_max_live() -> None:
    """From the second step on, count the elements in storages that are alive."""
    width, num_layers, bucket_bytes = 32, 6, 1

    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for layer in [*params["h"], params["h"][0]]:
            x = torch.tanh(x @ layer["w"])
        return x.pow(2).mean()

    def main(group: zf.Group, max_live: int | None) -> int:
        tracked = Tracked(group)
        params = {"h": [{"w": layer["w"]} for layer in models.mlp(width, num_layers)["h"]]}
        z = zf.zero(
            3,
            loss_fn,
            optim.sgd(0.1),
            tracked,
            bucket_bytes=bucket_bytes,
            schedule=zf.ScheduleOptions(prefetch=2, max_live=max_live),
        )
        state = z.init(params)
        for step in range(3):
            tracked.peak = 0
            state, _ = z.step(
                state, torch.ones(2, width, dtype=torch.float64) * (group.rank + step)
            )
        return tracked.peak

    bucket = width * width
    # the tied bucket, the bucket in use and two ahead
    assert set(zf.simulate(2, main, None)) == {4 * bucket}
    for count in (1, 2, 3):
        # An operation holds an operand until the operation ends, although the schedule has released
        # the bucket: at most one bucket.
        assert all(
            count * bucket <= peak <= (count + 1) * bucket
            for peak in zf.simulate(2, main, count * bucket)
        )


class Tracked(zf.Group):
    """Counts the elements of gathered parameters that are alive."""

    def __init__(self, group: zf.Group) -> None:
        self._inner, self.rank, self.size = group, group.rank, group.size
        self._alive: list[tuple[StorageWeakRef, int]] = []
        self.peak = 0

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> zf.collectives.Work:
        pending = self._inner.start(call, x, out)
        if call.name == "params" and call.op.kind == "all_gather":
            gathered = pending.wait()
            self._alive = [entry for entry in self._alive if not entry[0].expired()]
            self._alive.append((StorageWeakRef(gathered.untyped_storage()), gathered.numel()))
            self.peak = max(self.peak, sum(numel for _, numel in self._alive))
        return pending


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": -1}, "an integer of at least 0, below .*; got -1; write prefetch=0"),
        ({"prefetch": 0.5}, "an integer of at least 0, below .*; got 0.5"),
        ({"max_live": -5}, "an integer of at least 0, below .* or None; got -5"),
        ({"max_live": 1e9}, "an integer of at least 0, below .* or None; got 1000000000.0"),
        ({"reuse_distance": -1}, "an integer of at least 0, below .* or None; got -1"),
        ({"persistence": -1}, "an integer of at least 0, below .*; got -1"),
        ({"persistence": None}, "an integer of at least 0, below .*; got None"),
        ({"max_persistent": -1}, "an integer of at least 0, below .* or None; got -1"),
        ({"secondary": "inner"}, "True or False; got 'inner'; write secondary=True"),
    ],
)
def test_schedule_options_are_checked_at_once(options: dict[str, Any], message: str) -> None:
    with pytest.raises(zf.errors.OptionError, match=message):
        zf.simulate(
            1,
            lambda group: zf.shard_params(
                models.mlp_loss, group, schedule=zf.ScheduleOptions(**options)
            ),
        )


def test_a_bound_that_cannot_be_kept_is_refused() -> None:
    trace = zf.planner.trace(
        models.mlp_loss,
        models.mlp(),
        torch.ones(2, 5, dtype=torch.float64),
        2,
        bucket_bytes=1,
        persistence=5,
    )
    with pytest.raises(
        zf.errors.OptionError,
        match=r"max_live must hold the largest bucket .*; got 63, where bucket 0: h.0.w has 64 "
        r"elements",
    ):
        zf.planner.schedule(trace, zf.ScheduleOptions(max_live=63))
    with pytest.raises(
        zf.errors.OptionError,
        match=r"h.0.w has 64 elements with padding and 320 persist; use a larger max_live",
    ):
        zf.planner.schedule(trace, zf.ScheduleOptions(max_live=383, persistence=5))
    assert (
        max(zf.planner.schedule(trace, zf.ScheduleOptions(max_live=384, persistence=5)).live())
        == 384
    )

    def main(group: zf.Group) -> None:
        loss = zf.shard_params(models.mlp_loss, group, schedule=zf.ScheduleOptions(max_live=63))
        with pytest.raises(zf.errors.OptionError, match="max_live must hold the largest bucket"):
            loss(
                zf.shard(models.mlp(), group, bucket_bytes=1), torch.ones(2, 5, dtype=torch.float64)
            )

    zf.simulate(2, main)
    for stage in (0, 1, 2):
        with pytest.raises(
            zf.errors.OptionError,
            match=f"only stage 3 has; got .*max_live=1000000.* at stage {stage}; use stage=3, "
            "or leave",
        ):
            zf.simulate(
                1,
                lambda group, stage=stage: zf.zero(
                    stage,
                    models.mlp_loss,
                    optim.sgd(0.1),
                    group,
                    schedule=zf.ScheduleOptions(max_live=10**6),
                ),
            )


def test_a_persistent_bucket_without_uses_is_priced() -> None:
    used, unused = (TracedBucket(name, ((name, 64),), 64, 4, 4, 4) for name in ("a", "b"))
    made = zf.planner.schedule(Trace((used, unused), 2, (0,)), zf.ScheduleOptions(persistence=64))
    messages = zf.planner.explain(made).messages
    assert [(m.phase, m.name, m.bucket) for m in messages] == [
        ("start", "params", 0),
        ("start", "params", 1),
        ("backward", "grads", 1),
        ("backward", "grads", 0),
    ]


def test_the_order_of_use_leaves_deferred_integers_out() -> None:
    spec = torch.empty(3, dtype=torch.int64, device="meta")
    params = {
        "count": zf.sources.Deferred("count", spec, lambda: torch.zeros_like(spec, device="cpu")),
        "w": torch.ones(3),
    }
    loss = lambda p, x: (p["w"] * x).sum()
    assert zf.planner.order_of_use(loss, params, torch.ones(3)) == ("w",)
