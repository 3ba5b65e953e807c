"""Law 11: a pipeline has the bits of accumulate on the data axis alone; refusals, costs."""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.pipelining.schedules as of_torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from tests.unit.parallel import pipelines
from zfun import optim
from zfun.collectives import Collective, Work
from zfun.collectives._group import Wrapper
from zfun.errors import CollectiveMismatch, LeafError, OptionError, SpecMismatch
from zfun.parallel import LocalTree, Pipeline, pipeline, schedules
from zfun.testing import assert_same_bits

NUM_STEPS = 3


def plain(group: zf.Group, fns: Any, num_micro: int, stage: int, **options: Any) -> Any:
    """Train on the data axis alone; return losses and parameters."""
    make = options.pop("optimizer", lambda: optim.adamw(1e-2))
    z = zf.zero(stage, pipelines.whole(fns), make(), group, num_micro_batches=num_micro, **options)
    state = z.init(pipelines.params(len(fns)))
    infos = []
    for step in range(NUM_STEPS):
        state, info = z.step(state, pipelines.batch(group.rank, step))
        infos.append(info)
    return z.params(state), [info.loss for info in infos], [info.grad_norm for info in infos]


def piped(
    group: zf.Group, fns: Any, num_micro: int, stage: int, schedule: Any, pp: int, **options: Any
) -> Any:
    """Train the same model in a pipeline."""
    make = options.pop("optimizer", lambda: optim.adamw(1e-2))
    mesh = zf.mesh(group, pp=pp, dp=-1)
    loss = pipeline(fns, mesh["pp"], schedule, num_micro_batches=num_micro)
    z = zf.zero(stage, loss, make(), mesh["dp"], **options)
    state = z.init(pipelines.params(len(fns)))
    infos = []
    for step in range(NUM_STEPS):
        state, info = z.step(state, pipelines.batch(mesh.coordinates["dp"], step))
        infos.append(info)
    return z.params(state), [info.loss for info in infos], [info.grad_norm for info in infos]


def assert_equal_bits(
    fns: Any, num_micro: int, stage: int, schedule: Any, pp: int, dp: int, **options: Any
) -> None:
    want, losses, norms = zf.simulate(
        dp, lambda group: plain(group, fns, num_micro, stage, **options)
    )[0]
    assert any(
        not torch.equal(x["w"], y["w"])
        for x, y in zip(want, pipelines.params(len(fns)), strict=True)
    )
    for found in zf.simulate(
        pp * dp, lambda group: piped(group, fns, num_micro, stage, schedule, pp, **options)
    ):
        assert_same_bits(found[1], losses, "losses")
        assert_same_bits(found[0], want, "parameters")
        # A norm adds the stages in another order.
        torch.testing.assert_close(found[2], norms, rtol=1e-12, atol=0, equal_nan=True)


@settings(max_examples=examples(48))
@given(
    name=st.sampled_from(["1f1b", "gpipe", "zero_bubble"]),
    pp=st.integers(1, 4),
    dp=st.integers(1, 2),
    per_rank=st.sampled_from([1, 1, 2]),
    num_micro=st.sampled_from([1, 2, 3, 4, 6]),
    stage=st.integers(0, 3),
    end=st.sampled_from([pipelines.last, pipelines.last_weighted]),
)
def test_a_pipeline_has_the_bits_of_accumulate(
    name: str, pp: int, dp: int, per_rank: int, num_micro: int, stage: int, end: Any
) -> None:
    if num_micro % max(1, num_micro // pp):
        num_micro = pp
    fns = pipelines.stages(pp * per_rank, end)
    assert_equal_bits(fns, num_micro, stage, name, pp, dp)


@settings(max_examples=examples(24))
@given(made=pipelines.random_schedules(most=2), stage=st.integers(0, 3))
def test_any_schedule_that_can_run_has_these_bits(
    made: tuple[schedules.Schedule, int], stage: int
) -> None:
    """With at most two micro-batches, whose sum has one order only."""
    schedule, num_micro = made
    num_stages = len(schedules.ranks_of_stages(schedule))
    fns = pipelines.stages(num_stages)
    assert_equal_bits(fns, num_micro, stage, schedule, len(schedule), 1 + stage % 2)


@pytest.mark.parametrize("kind", [of_torch.ScheduleZBVZeroBubble, of_torch.ScheduleDualPipeV])
def test_tables_of_torch_run(kind: Any) -> None:
    """Their stages go down the ranks and up again."""
    numbers = types.SimpleNamespace(
        n_local_stages=2,
        pp_group_size=2,
        _n_microbatches=4,
        _num_stages=4,
        num_stages=4,
        stage_index_to_group_rank={0: 0, 1: 1, 2: 1, 3: 0},
    )
    rows = [kind._calculate_single_rank_operations(numbers, rank) for rank in range(2)]
    text = "\n".join(",".join("" if x is None else str(x) for x in row) for row in rows)
    schedule = schedules.read_csv(text)
    assert schedules.ranks_of_stages(schedule) == (0, 1, 1, 0)
    assert_equal_bits(pipelines.stages(4), 4, 1, schedule, 2, 1)


def test_a_cast_leaves_what_a_stage_got_from_another() -> None:
    """The batch is cast, but activations are no part of it."""

    def first(params: Any, batch: Any) -> Any:
        # Thirds in float32 have bits that bfloat16 has not.
        x = pipelines.layer(params, batch["x"]).float() / 3
        return {"x": x, "rest": (batch["mask"], None)}

    def last(params: Any, x: Any, batch: Any) -> Any:
        mask, _ = x["rest"]
        out = x["x"] @ params["w"].float()
        return ((out - batch["y"].float()) ** 2 * mask).mean()

    assert_equal_bits([first, last], 2, 1, "1f1b", 2, 1, precision=torch.bfloat16)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": torch.bfloat16},
        {"precision": torch.float16},
        {"offload": True},
        {"trainable": lambda path, leaf: path != "1.b"},
        {"bucket_bytes": 64},
    ],
    ids=["bfloat16", "float16", "offload", "trainable", "buckets"],
)
@pytest.mark.parametrize("stage", [1, 3])
def test_bits_stay_with_options(options: dict[str, Any], stage: int) -> None:
    if options.get("offload"):
        store = zf.stores.host()
        parts: dict[str, Any] = {"params": store} if stage == 3 else {}
        options = {"offload": zf.stores.Offload(optimizer=store, grads=store, **parts)}
    assert_equal_bits(pipelines.stages(2), 2, stage, "1f1b", 2, 2, **options)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_clipping_counts_each_element_once(stage: int) -> None:
    make: Callable[[], Any] = lambda: optim.chain(
        optim.clip_by_global_norm(0.05), optim.adamw(1e-2)
    )
    fns = pipelines.stages(3)
    want, losses, norms = zf.simulate(2, lambda group: plain(group, fns, 3, stage, optimizer=make))[
        0
    ]
    assert all(norm > 0.1 for norm in norms)
    for found in zf.simulate(
        6, lambda group: piped(group, fns, 3, stage, "1f1b", 3, optimizer=make)
    ):
        torch.testing.assert_close(found[0], want, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[1], losses, rtol=0, atol=1e-12)
        torch.testing.assert_close(found[2], norms, rtol=1e-12, atol=0, equal_nan=True)


def tied_first(params: Any, batch: Any) -> Any:
    return torch.tanh(batch["x"] @ params["shared"])


def tied_middle(params: Any, x: Any) -> Any:
    return torch.tanh(x @ params["own"])


def tied_last(params: Any, x: Any, batch: Any) -> Any:
    return ((x @ params["shared"].T * params["scale"] - batch["y"]) ** 2).mean()


TIED = [["shared"], ["own"], ["sh*", "scale"]]


def tied_params() -> dict[str, torch.Tensor]:
    (one, two) = pipelines.params(2)
    return {"shared": one["w"], "own": two["w"], "scale": two["b"]}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("pp", [1, 3])
def test_a_leaf_of_two_stages_has_the_sum_of_their_gradients(stage: int, pp: int) -> None:
    fns = [tied_first, tied_middle, tied_last]

    def whole(params: Any, batch: Any) -> Any:
        return tied_last(params, tied_middle(params, tied_first(params, batch)), batch)

    def main(group: zf.Group, *, is_piped: bool) -> Any:
        mesh = zf.mesh(group, pp=pp if is_piped else 1, dp=-1)
        loss: Any = whole
        if is_piped:
            loss = pipeline(fns, mesh["pp"], num_micro_batches=3, leaves=TIED)
        options: dict[str, Any] = {} if is_piped else {"num_micro_batches": 3}
        make = optim.chain(optim.clip_by_global_norm(0.1), optim.adamw(1e-2))
        z = zf.zero(stage, loss, make, mesh["dp"], bucket_bytes=256, **options)
        state = z.init(tied_params())
        infos = []
        for step in range(NUM_STEPS):
            state, info = z.step(state, pipelines.batch(mesh.coordinates["dp"], step))
            infos.append(info)
        return z.params(state), infos[-1].loss, infos[-1].grad_norm

    want = zf.simulate(2, lambda group: main(group, is_piped=False))[0]
    found = zf.simulate(2 * pp, lambda group: main(group, is_piped=True))
    for rank in found:
        assert_same_bits(rank, found[0])
        torch.testing.assert_close(rank, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("leaves", [None, [["0.*"], ["1.*"], ["2.*"]]])
def test_one_tensor_under_the_paths_of_two_stages_has_the_sum(stage: int, leaves: Any) -> None:
    fns: list[Any] = [
        lambda params, batch: torch.tanh(batch["x"] @ params["embed"]),
        lambda params, x: torch.tanh(x @ params["w"]),
        lambda params, x, batch: ((x @ params["head"].T - batch["y"]) ** 2).mean(),
    ]
    if leaves is not None:
        fns = [
            lambda params, batch: torch.tanh(batch["x"] @ params[0]["embed"]),
            lambda params, x: torch.tanh(x @ params[1]["w"]),
            lambda params, x, batch: ((x @ params[2]["head"].T - batch["y"]) ** 2).mean(),
        ]

    def tree() -> Any:
        one, two = (x["w"] for x in pipelines.params(2))
        return [{"embed": one}, {"w": two}, {"head": one}]

    def whole(params: Any, batch: Any) -> Any:
        own = params if leaves is None else [params] * 3
        return fns[2](own[2], fns[1](own[1], fns[0](own[0], batch)), batch)

    def main(group: zf.Group, *, is_piped: bool) -> Any:
        mesh = zf.mesh(group, pp=3 if is_piped else 1, dp=-1)
        loss: Any = whole
        if is_piped:
            loss = pipeline(fns, mesh["pp"], num_micro_batches=3, leaves=leaves)
        options: dict[str, Any] = {} if is_piped else {"num_micro_batches": 3}
        z = zf.zero(stage, loss, optim.sgd(0.5), mesh["dp"], **options)
        state = z.init(tree())
        for step in range(NUM_STEPS):
            state, _ = z.step(state, pipelines.batch(mesh.coordinates["dp"], step))
        return z.params(state)

    want = zf.simulate(2, lambda group: main(group, is_piped=False))[0]
    for rank in zf.simulate(6, lambda group: main(group, is_piped=True)):
        torch.testing.assert_close(rank, want, rtol=0, atol=1e-12)


def test_states_with_other_leaves_need_no_collective_of_their_own() -> None:
    """Only rank 0 gets other leaves in the second state, where the middle leaf is frozen."""
    fns = [tied_first, tied_middle, tied_last]

    def main(group: zf.Group) -> None:
        loss = pipeline(fns, group, num_micro_batches=3, leaves=TIED)
        alone = zf.collectives.single_group()
        for frozen in ("", "own"):
            z = zf.zero(
                1, loss, optim.sgd(0.1), alone, trainable=lambda path, leaf, no=frozen: path != no
            )
            z.step(z.init(tied_params()), pipelines.batch(0, 0))

    zf.simulate(3, main)


@pytest.mark.parametrize("stage", [0, 1])
def test_copies_of_a_tied_leaf_stay_equal_where_sums_round_by_place(stage: int) -> None:
    def mixed(params: Any) -> Any:
        """Let the gradients of the shared leaf be many, and smaller than those of the other."""
        return params | {"shared": params["shared"].mean(0)}

    fns: list[Any] = [
        lambda params, batch: tied_first(mixed(params), batch),
        tied_middle,
        lambda params, x, batch: tied_last(mixed(params), x, batch),
    ]

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, pp=3, dp=2)
        loss = pipeline(fns, mesh["pp"], num_micro_batches=3, leaves=TIED)
        codec = zf.compression.Compression(grads=zf.compression.int8())
        z = zf.zero(stage, loss, optim.sgd(0.5), mesh["dp"], compression=codec)
        # On the last stage the shared leaf is in a block of the codec with another one.
        params = dict(reversed(tied_params().items()))
        params["shared"] = params["shared"].repeat(16, 1, 1)
        state = z.init(params)
        for step in range(NUM_STEPS):
            state, _ = z.step(state, pipelines.batch(mesh.coordinates["dp"], step))
        return zf.transforms.unshard(state.params)["shared"]

    found = zf.simulate(6, main)
    assert_same_bits(found[0], found[4])
    assert_same_bits(found[1], found[5])


def test_a_tied_leaf_that_no_stage_uses_is_not_used() -> None:
    fns = [
        lambda params, batch: batch["x"] * params["own"],
        lambda params, x: (x * params["scale"]).mean(),
    ]

    def main(group: zf.Group, use: bool) -> Any:
        first = fns[0]
        if use:
            first = lambda params, batch: batch["x"] * params["own"] @ params["shared"]
        leaves = [["own", "shared"], ["scale", "shared"]]
        loss = pipeline([first, fns[1]], group, num_micro_batches=2, leaves=leaves)
        alone = zf.collectives.single_group()
        z = zf.zero(1, loss, optim.adamw(0.1, weight_decay=0.5), alone, unused="skip")
        params = {"own": torch.ones(4), "scale": torch.ones(4), "shared": torch.ones(4, 4)}
        batch = {"x": torch.ones(4, 4)}
        state, _ = z.step(z.init(params), batch)
        return z.params(state)["shared"], dict(state.missed.counts)

    for use in (True, False):
        for found, missed in zf.simulate(2, lambda group, use=use: main(group, use)):
            assert torch.equal(found, torch.ones(4, 4)) is not use
            assert missed == ({} if use else {"shared": 1})


def test_loss_is_equal_everywhere_and_the_last_stage_has_the_second_result() -> None:
    fns = pipelines.stages(2, pipelines.last_weighted)

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, pp=2, dp=2)
        loss = pipeline(fns, mesh["pp"], num_micro_batches=3)
        z = zf.zero(2, loss, optim.sgd(0.1), mesh["dp"])
        state = z.init(pipelines.params(2))
        _, info = z.step(state, pipelines.batch(mesh.coordinates["dp"], 0))
        return mesh.coordinates["pp"], mesh.coordinates["dp"], info.loss, info.aux

    found = zf.simulate(4, main)
    for stage, rank, loss, aux in found:
        assert_same_bits(loss, found[0][2])
        if stage == 0:
            assert aux is None
        else:
            masks = pipelines.batch(rank, 0)["mask"].chunk(3)
            assert [x["tokens"].item() for x in aux] == [mask.sum().item() for mask in masks]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_actions_run_in_the_order_of_the_schedule(name: str) -> None:
    """So the activations in flight are those of the schedule."""
    num_micro, pp = 6, 3

    def main(group: zf.Group) -> Any:
        actions: list[str] = []

        def watched(stage: int, fn: Any) -> Any:
            def run(params: Any, x: Any, batch: Any) -> Any:
                k = int(batch["k"][0])
                actions.append(f"{stage}F{k}")
                out = fn(params, x, batch) if stage in (pp - 1,) else fn(params, x)
                root = out if isinstance(out, torch.Tensor) else out["x"]
                root.register_hook(lambda grad: actions.append(f"{stage}B{k}"))
                return out

            return run

        fns = [watched(stage, fn) for stage, fn in enumerate(pipelines.stages(pp))]
        loss = pipeline(fns, group, name, num_micro_batches=num_micro)
        z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
        batch = pipelines.batch(0, 0) | {"k": torch.arange(12) // 2}
        z.step(z.init(pipelines.params(pp)), batch)
        planned = [str(x).replace("I", "B") for x in loss.schedule[group.rank] if x.kind != "W"]
        assert actions == planned
        return None

    zf.simulate(pp, main)


@pytest.mark.parametrize("stage", [0, 2])
def test_parameters_come_after_the_inputs_of_other_micro_batches(stage: int) -> None:
    """ZB-H1 on rank 1 of 2 differentiates the inputs of two micro-batches first."""

    def main(group: zf.Group) -> Any:
        order: list[str] = []

        def end(params: Any, x: Any, batch: Any) -> Any:
            k = int(batch["k"][0])
            x["x"].register_hook(lambda grad: order.append(f"I{k}"))
            # The hook of a parameter doubles its gradient, once.
            params["w"].register_hook(lambda grad: order.append(f"W{k}") or 2 * grad)
            return pipelines.last(params, x, batch)

        loss = pipeline(pipelines.stages(2, end), group, "zero_bubble", num_micro_batches=4)
        z = zf.zero(stage, loss, optim.sgd(1.0), zf.collectives.single_group())
        state = z.init(pipelines.params(2))
        state, _ = z.step(state, pipelines.batch(0, 0) | {"k": torch.arange(12) // 3})
        return order, z.params(state)[1]["w"]

    def once(group: zf.Group) -> Any:
        z = zf.zero(stage, pipelines.whole(pipelines.stages(2)), optim.sgd(2.0), group)
        state, _ = z.step(z.init(pipelines.params(2)), pipelines.batch(0, 0))
        return z.params(state)[1]["w"]

    _, (order, found) = zf.simulate(2, main)
    assert order == ["I0", "I1", "W0", "I2", "W1", "I3", "W2", "W3"]
    torch.testing.assert_close(found, zf.simulate(1, once)[0], rtol=0, atol=1e-12)


def test_messages_and_bytes_have_closed_forms() -> None:
    num_micro, pp = 4, 3

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, pp=pp, dp=2)
        axis = zf.record(mesh["pp"])
        loss = pipeline(pipelines.stages(pp), axis, num_micro_batches=num_micro)
        z = zf.zero(1, loss, optim.sgd(0.1), mesh["dp"])
        state = z.init(pipelines.params(pp))
        kept = []
        for step in range(2):
            axis.clear()
            state, _ = z.step(state, pipelines.batch(mesh.coordinates["dp"], step))
            kept.append([x for x in axis.log if x.name in ("activations", "cotangents")])
        return kept

    for rank, (first, second) in enumerate(zf.simulate(2 * pp, main)):
        stage = rank // 2
        sides = (stage > 0) + (stage < pp - 1)
        rows = pipelines.ROWS // num_micro
        numel = rows * pipelines.WIDTH
        # An activation and a mask there, and a cotangent of the activation back, of 8 bytes each.
        there, back = 2 * (stage < pp - 1), 1 * (stage > 0)
        assert sum(x.sent_bytes for x in second) == num_micro * 8 * numel * (there + back)
        assert Counter(x.name for x in second) == {
            "activations": 2 * num_micro * sides,
            "cotangents": num_micro * sides,
        }
        # A form has two messages, and comes once.
        assert len(first) == len(second) + 2 * 2 * sides


class _Allocating(Wrapper):
    """A group that counts the buffers that it makes."""

    count = 0

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        return self.wrapped.start(call, x, out)

    @property
    def allocate(self) -> Any:
        def make(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
            self.count += 1
            return torch.empty(numel, dtype=dtype, device=device)

        return make


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
@pytest.mark.parametrize("stage", [0, 1])
def test_gradients_of_micro_batches_share_one_buffer(stage: int, schedule: str) -> None:
    def count(num_micro: int) -> Any:
        def main(group: zf.Group) -> int:
            mesh = zf.mesh(group, pp=2, dp=2)
            data = _Allocating(mesh["dp"])
            fns = pipelines.stages(2)
            loss = pipeline(fns, mesh["pp"], schedule, num_micro_batches=num_micro)
            z = zf.zero(stage, loss, optim.sgd(0.1), data)
            z.step(z.init(pipelines.params(2)), pipelines.batch(mesh.coordinates["dp"], 0))
            return data.count

        return zf.simulate(4, main)

    few, many = count(1), count(6)
    assert min(few) > 0
    # Stage 0 has no inputs, so the first half of its zero-bubble backward makes all gradients.
    first = 2 if schedule == "zero_bubble" else 0
    assert many[first:] == few[first:]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_data_ranks_compare_calls_at_stage_3_alone(stage: int) -> None:
    """They make the same calls by their schedule; stage 3 also compares where backward begins."""
    num_micro = 4

    def main(group: zf.Group) -> int:
        mesh = zf.mesh(group, pp=2, dp=2)
        data = zf.record(mesh["dp"])
        loss = pipeline(pipelines.stages(2), mesh["pp"], num_micro_batches=num_micro)
        z = zf.zero(stage, loss, optim.sgd(0.1), data)
        state = z.init(pipelines.params(2))
        z.step(state, pipelines.batch(mesh.coordinates["dp"], 0))
        return sum(x.name == "number of a call" for x in data.log)

    # Each backward pass, and a forward pass while another call is open.
    last, first = num_micro, 2 * num_micro - 1
    assert zf.simulate(4, main) == ([first, first, last, last] if stage == 3 else [0] * 4)


def test_data_ranks_with_other_schedules_are_refused() -> None:
    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, pp=2, dp=2)
        name = ["1f1b", "gpipe"][mesh.coordinates["dp"]]
        loss = pipeline(pipelines.stages(2), mesh["pp"], name, num_micro_batches=4)
        z = zf.zero(1, loss, optim.sgd(0.1), mesh["dp"])
        return z.step(z.init(pipelines.params(2)), pipelines.batch(0, 0))

    with pytest.raises(
        SpecMismatch, match=r"same plan of a pipeline; option schedule is .* on rank [02] and "
    ):
        zf.simulate(4, main)


def test_other_micro_batches_bring_other_forms() -> None:
    """Micro-batches may have different shapes, and steps too."""
    batches = [
        zf.transforms.MicroBatches([pipelines.batch(9, 0, 4), pipelines.batch(9, 1, 6)]),
        pipelines.batch(9, 2, 8),
    ]
    fns = pipelines.stages(2)

    def main(group: zf.Group, *, is_piped: bool) -> Any:
        loss: Any = pipelines.whole(fns)
        if is_piped:
            loss = pipeline(fns, group, num_micro_batches=2)
        options: dict[str, Any] = {} if is_piped else {"num_micro_batches": 2}
        z = zf.zero(2, loss, optim.adamw(1e-2), zf.collectives.single_group(), **options)
        state = z.init(pipelines.params(2))
        for batch in batches:
            state, _ = z.step(state, batch)
        return z.params(state)

    (want,) = zf.simulate(1, lambda group: main(group, is_piped=False))
    for found in zf.simulate(2, lambda group: main(group, is_piped=True)):
        assert_same_bits(found, want)


def one_step(group: zf.Group, fns: Any, schedule: Any = "1f1b", **options: Any) -> Any:
    options = {"num_micro_batches": 2, **options}
    loss = pipeline(fns, group, schedule, **options)
    z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
    state = z.init(pipelines.params(len(fns)))
    return z.step(state, pipelines.batch(0, 0))


def test_ranks_with_other_schedules_are_refused() -> None:
    fns = pipelines.stages(2)
    with pytest.raises(SpecMismatch, match=r"same plan of a pipeline; option schedule is .*rank 0"):
        zf.simulate(2, lambda group: one_step(group, fns, ["1f1b", "gpipe"][group.rank]))


def test_ranks_with_other_batches_are_refused() -> None:
    def main(group: zf.Group) -> Any:
        loss = pipeline(pipelines.stages(2), group, num_micro_batches=2)
        z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
        state = z.init(pipelines.params(2))
        state, _ = z.step(state, pipelines.batch(0, 0))
        return z.step(state, pipelines.batch(0, 1, rows=8 + 4 * group.rank))

    with pytest.raises(CollectiveMismatch, match=r"'activations' \(stage 0 to 1, micro-batch 0, "):
        zf.simulate(2, main)


def test_a_stage_whose_results_change_their_shape_is_refused_with_both_sides() -> None:
    count = 0

    def changing(params: Any, batch: Any) -> Any:
        nonlocal count
        count += 1
        return pipelines.layer(params, batch["x"])[: 2 + count]

    fns = [changing, lambda params, x: (x * params["b"]).mean()]
    with pytest.raises(
        SpecMismatch,
        match=r"activations of stage 0 to 1, micro-batch 1 are \(\. \(4, 4\) float64\) on rank 0, "
        r"and were \(\. \(3, 4\) float64\)",
    ):
        zf.simulate(2, lambda group: one_step(group, fns))


def test_a_stage_that_does_not_take_what_it_gets_names_the_action_and_the_input() -> None:
    fns = [pipelines.first, lambda params, x: (x["x"] @ torch.ones(3, 3)).mean()]
    with pytest.raises(RuntimeError) as caught:
        zf.simulate(2, lambda group: one_step(group, fns))
    notes = " ".join(caught.value.__notes__)
    assert "in action 1F0 of a pipeline" in notes
    assert "x (6, 4) float64" in notes


def test_a_stage_that_raises_ends_all_ranks() -> None:
    def broken(params: Any, x: Any) -> Any:
        raise ValueError("no such token")

    fns = [pipelines.first, broken, pipelines.last]
    with pytest.raises(ValueError, match="no such token"):
        zf.simulate(3, lambda group: one_step(group, fns))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schedule": "zb"}, r"one of 'gpipe', '1f1b', 'zero_bubble', or the actions .*got 'zb'"),
        ({"stages": pipelines.stages(3)}, r"equally many stages; got 3 stages for 2 ranks"),
        ({"leaves": [["w"]]}, r"got 1 lists for 2 stages"),
        (
            {"schedule": schedules.gpipe(2, 3)},
            r"one of the micro-batches of its pipeline; got one of 3 micro-batches for a",
        ),
        ({"schedule": schedules.gpipe(3, 2)}, r"got one of 3 ranks for a pipeline of 2"),
        ({"schedule": [["0F0"]]}, r"a string or the actions of each rank; got \[\['0F0'\]\]"),
        (
            {"stages": [lambda params: params, pipelines.last]},
            r"a function \(params, x\), or .*got one of 1 arguments for stage 0",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    group = zf.collectives.abstract_group(2)
    given: dict[str, Any] = {"stages": pipelines.stages(2), "num_micro_batches": 2, **change}
    with pytest.raises(OptionError, match=message):
        pipeline(given.pop("stages"), group, **given)


def test_a_leaf_of_no_stage_is_refused() -> None:
    def main(group: zf.Group, params: Any, **options: Any) -> None:
        loss = pipeline(pipelines.stages(2), group, num_micro_batches=2, **options)
        zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group()).init(params)

    with pytest.raises(LeafError, match=r"got leaf 'extra' of none of 2 stages; pass a list"):
        zf.simulate(2, lambda group: main(group, {"extra": torch.ones(2)}))
    with pytest.raises(LeafError, match=r"got leaf '1\.w' of none of 2 stages; add its path"):
        zf.simulate(2, lambda group: main(group, pipelines.params(2), leaves=[["0.*"], ["1.b"]]))


def test_micro_batches_are_given_once() -> None:
    def main(group: zf.Group) -> None:
        loss = pipeline(pipelines.stages(2), group, num_micro_batches=2)
        alone = zf.collectives.single_group()
        zf.zero(1, loss, optim.sgd(0.1), alone, num_micro_batches=4)

    with pytest.raises(OptionError, match=r"got num_micro_batches=4 of zero\(\) beside 2"):
        zf.simulate(2, main)


def test_a_call_of_the_loss_alone_is_refused() -> None:
    group = zf.collectives.abstract_group(2)
    loss = pipeline(pipelines.stages(2), group, num_micro_batches=2)
    with pytest.raises(OptionError, match=r"computes its loss in step\(\) of zf\.zero\(\)"):
        loss(pipelines.params(2), pipelines.batch(0, 0))


def test_activations_are_trees_of_tensors() -> None:
    fns = [lambda params, batch: {"x": batch["x"] * params["b"], "n": 3}, pipelines.last]
    with pytest.raises(LeafError, match=r"activations are tensors, or .*leaf 'n' is int"):
        zf.simulate(2, lambda group: one_step(group, fns))


def test_activations_on_one_rank_are_trees_of_tensors_too() -> None:
    fns = [lambda params, batch: {"x": batch["x"] * params["b"], "n": 3}, pipelines.last]
    with pytest.raises(LeafError, match=r"activations are tensors, or .*leaf 'n' is int"):
        zf.simulate(1, lambda group: one_step(group, fns))


def test_a_stage_that_returns_nothing_hands_nothing_on() -> None:
    seen: list[Any] = []

    def end(params: Any, x: Any, batch: Any = None) -> Any:
        seen.append(x)
        return (batch["x"] * params["b"]).mean()

    for pp in (1, 2):
        zf.simulate(pp, lambda group: one_step(group, [lambda params, batch: None, end]))
    assert seen == [None] * 4


def test_batches_that_differ_along_the_axis_are_refused_by_name() -> None:
    def main(group: zf.Group) -> Any:
        loss = pipeline(pipelines.stages(2), group, num_micro_batches=2)
        z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
        batch = pipelines.batch(0, 0)
        if group.rank:
            batch["y"] = batch["y"] + torch.arange(12)[:, None].ge(6)
        return z.step(z.init(pipelines.params(2)), batch)

    with pytest.raises(SpecMismatch, match=r"batch along the axis .*y of micro-batch 1"):
        zf.simulate(2, main)


def test_a_number_that_changes_brings_no_form() -> None:
    def main(group: zf.Group) -> Any:
        axis = zf.record(group)
        loss = pipeline(pipelines.stages(2), axis, num_micro_batches=2)
        z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group())
        state = z.init(pipelines.params(2))
        forms = []
        for step in range(3):
            axis.clear()
            batch = pipelines.batch(0, step) | {"step": step, "progress": step / 3}
            state, _ = z.step(state, batch)
            forms.append(sum("form" in str(x.part) for x in axis.log))
        return forms

    for first, *later in zf.simulate(2, main):
        assert first > 0
        assert later == [0, 0]


def test_a_string_may_set_a_shape_and_a_number_may_not() -> None:
    fns: list[Any] = [
        lambda params, batch: batch["x"][:, : int(batch["length"])] * params["a"],
        lambda params, x: (x * params["b"]).mean(),
    ]

    def main(group: zf.Group, kind: Any) -> Any:
        loss: Any = lambda params, batch: fns[1](params[1], fns[0](params[0], batch))
        options: dict[str, Any] = {"num_micro_batches": 2}
        if group.size > 1:
            loss, options = pipeline(fns, group, **options), {}
        z = zf.zero(1, loss, optim.sgd(0.1), zf.collectives.single_group(), **options)
        state = z.init([{"a": torch.ones(())}, {"b": torch.ones(())}])
        losses = []
        for length in (4, 3, 4):
            x = torch.arange(16.0).view(4, 4)
            state, info = z.step(state, {"x": x, "length": kind(length)})
            losses.append(float(info.loss))
        return losses

    assert zf.simulate(2, main, str) == zf.simulate(1, main, str) * 2
    with pytest.raises(SpecMismatch, match=r"write a number .* sets their shapes as a string"):
        zf.simulate(2, main, int)


def test_a_rank_without_trained_leaves_knows_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    class Connected(Exception):
        pass

    def connect(self: Any, device: torch.device) -> None:
        raise Connected(device.type)

    def main(group: zf.Group) -> Any:
        loss = pipeline(pipelines.stages(2), group, num_micro_batches=2)
        alone = zf.collectives.single_group()
        trained = lambda path, leaf: path.startswith("0")
        z = zf.zero(1, loss, optim.sgd(0.1), alone, trainable=trained)
        with pytest.raises(Connected) as found:
            z.step(z.init(pipelines.params(2)), pipelines.batch(0, 0))
        return str(found.value).splitlines()[0]

    monkeypatch.setattr(Pipeline, "_connect", connect)
    # The logical tree of the test says that it is on another device than the leaves.
    device = property(lambda self: torch.device("meta"), lambda self, device: None)
    monkeypatch.setattr(LocalTree, "device", device, raising=False)
    assert zf.simulate(2, main) == ["cpu", "meta"]
