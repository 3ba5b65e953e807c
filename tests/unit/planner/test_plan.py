"""Plans: a planned step does exactly as much as a real step on simulated ranks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from tests.unit.planner.test_live import compiled_kernels
from zfun.planner import Bytes, Hardware, Observer, Plan, formulae

F = torch.nn.functional
SIZE = 4
ADAMW = zf.optim.adamw(0.1)


def draw_params(shapes: Any, dtype: torch.dtype = torch.float32) -> Any:
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: (torch.randn(*shape, generator=generator) * 0.1).to(dtype)
    return zf.tree.map(draw, shapes, is_leaf=lambda x: isinstance(x, tuple))


def gpt2(num_layers: int = 2, width: int = 32, vocabulary: int = 97, length: int = 12) -> Any:
    """The parameters of a tiny GPT-2; the head is the embedding."""
    block = {
        "ln_1": {"w": (width,), "b": (width,)},
        "attn": {
            "qkv": {"w": (width, 3 * width), "b": (3 * width,)},
            "out": {"w": (width, width), "b": (width,)},
        },
        "ln_2": {"w": (width,), "b": (width,)},
        "mlp": {
            "up": {"w": (width, 4 * width), "b": (4 * width,)},
            "down": {"w": (4 * width, width), "b": (width,)},
        },
    }
    return draw_params(
        {
            "wte": (vocabulary, width),
            "wpe": (length, width),
            "h": [block] * num_layers,
            "ln_f": {"w": (width,), "b": (width,)},
        }
    )


def block_of(params: Any, x: Tensor) -> Tensor:
    dense = lambda layer, x: x @ layer["w"] + layer["b"]
    norm = lambda layer, x: F.layer_norm(x, x.shape[-1:], layer["w"], layer["b"])
    q, k, v = dense(params["attn"]["qkv"], norm(params["ln_1"], x)).chunk(3, -1)
    heads = lambda x: x.unflatten(-1, (4, -1)).transpose(1, 2)
    mixed = F.scaled_dot_product_attention(heads(q), heads(k), heads(v), is_causal=True)
    x = x + dense(params["attn"]["out"], mixed.transpose(1, 2).flatten(2))
    hidden = F.gelu(dense(params["mlp"]["up"], norm(params["ln_2"], x)), approximate="tanh")
    return x + dense(params["mlp"]["down"], hidden)


def gpt2_loss(params: Any, tokens: Tensor, block: Callable[..., Tensor] = block_of) -> Tensor:
    x = params["wte"][tokens] + params["wpe"][: tokens.shape[1]]
    for layer in params["h"]:
        x = block(layer, x)
    x = F.layer_norm(x, x.shape[-1:], params["ln_f"]["w"], params["ln_f"]["b"])
    logits = (x @ params["wte"].T)[:, :-1].flatten(0, 1).float()
    return F.cross_entropy(logits, tokens[:, 1:].flatten())


recomputed = functools.partial(gpt2_loss, block=zf.remat(block_of))


def tokens(rows: int) -> Tensor:
    return torch.randint(0, 97, (rows, 12), generator=torch.Generator().manual_seed(1))


Make = Callable[[zf.Group], Any]


def measured(make: Make, params: Any, batch: Any, size: int = SIZE, steps: int = 2) -> Plan:
    """Take the steps on simulated ranks, and observe rank 0."""

    def main(group: zf.Group) -> Plan | None:
        start = copy.deepcopy(params)  # tied leaves stay tied
        if group.rank:
            z = make(group)
            state = z.init(start)
            for _ in range(steps):
                state, _ = z.step(state, batch)
            return None
        observer = Observer(group)
        z = make(observer.group)
        with compiled_kernels(observer.meter), observer:
            state = z.init(start)
            del start
            for _ in range(steps - 1):
                state = z.step(state, batch)[0]
            observer.begin(state)
            after = z.step(state, batch)
            return observer.plan(after[0])

    gc.disable()
    try:
        found = zf.simulate(size, main)[0]
    finally:
        gc.enable()
    assert found is not None
    return found


def check(make: Make, params: Any, batch: Any, size: int = SIZE) -> Plan:
    plan = zf.plan(make, params, batch, size)
    real = measured(make, params, batch, size)
    for number, (planned, found) in enumerate(zip(plan.instants, real.instants, strict=False)):
        assert found.device == planned.device, (number, planned.what, found.what)
    assert len(real.instants) == len(plan.instants)
    same = dataclasses.replace(real, instants=plan.instants)
    assert same == plan
    return plan


def offloaded(parts: tuple[str, ...]) -> zf.stores.Offload:
    stores: dict[str, Any] = dict.fromkeys(parts, zf.stores.host(pin=False))
    return zf.stores.Offload(**stores)


def composed(
    stage: int, loss: Any = gpt2_loss, parts: tuple[str, ...] = (), **options: Any
) -> Make:
    def make(group: zf.Group) -> Any:
        offload = offloaded(parts)
        return zf.zero(stage, loss, ADAMW, group, bucket_bytes=8000, offload=offload, **options)

    return make


EVERYTHING = ("optimizer", "grads", "params")
VARIANTS: dict[str, Callable[[int], Make]] = {
    "plain": composed,
    "offload": lambda stage: composed(stage, parts=EVERYTHING[: 3 if stage == 3 else 2]),
    "mixed precision": lambda stage: composed(stage, precision=torch.bfloat16),
    "remat": lambda stage: composed(stage, recomputed),
    "accumulation": lambda stage: composed(stage, num_micro_batches=2),
    "all": lambda stage: composed(
        stage,
        recomputed,
        ("optimizer",),
        precision=torch.bfloat16,
        num_micro_batches=2,
    ),
}
DAILY = {("plain", 3), ("all", 3)}


@pytest.mark.parametrize(
    ("variant", "stage"),
    [
        pytest.param(name, stage, marks=() if (name, stage) in DAILY else pytest.mark.slow)
        for name in VARIANTS
        for stage in (0, 1, 2, 3)
    ],
)
def test_the_plan_of_gpt2_equals_a_real_step(variant: str, stage: int) -> None:
    plan = check(VARIANTS[variant](stage), gpt2(), tokens(4))
    assert plan.flops.forward > 0
    assert bool(plan.flops.recomputed) == (variant in ("remat", "all"))
    assert bool(plan.steady.device.masters) == (variant in ("mixed precision", "all"))


def test_the_plan_of_a_first_step_has_the_agreement_on_an_order() -> None:
    for steps in (1, 2):
        plan = zf.plan(composed(3), gpt2(), tokens(2), SIZE, steps=steps)
        real = measured(composed(3), gpt2(), tokens(2), steps=steps)
        assert plan.sent == real.sent
        assert any(sent.name == "schedule" for sent in plan.sent) == (steps == 1)


def test_a_rank_that_uses_a_bucket_again_regathers_in_a_plan_too() -> None:
    """Each call takes another branch, so that no call follows the schedule of the one before."""

    def make(group: zf.Group) -> Any:
        calls = itertools.count()

        def loss(params: Any, x: Tensor) -> Tensor:
            names = ("a", "b", "c") if next(calls) == 0 else ("a", "b", "c", "a", "b")
            for name in names:
                x = torch.tanh(x @ params[name])
            return x.sum()

        return zf.zero(3, loss, ADAMW, group, bucket_bytes=1)

    params = draw_params(dict.fromkeys("abc", (40, 40)))
    plan = check(make, params, torch.ones(2, 40))
    (again,) = (sent for sent in plan.sent if sent.name == "gather again")
    assert again.num_messages > 1


@st.composite
def models(draw: st.DrawFn) -> tuple[Any, Any, Make, int]:
    """A network with any widths, ties and frozen leaves, and any composition of it."""
    one_of = lambda *values: draw(st.sampled_from(values))
    widths = draw(st.lists(st.integers(1, 90), min_size=2, max_size=6))
    shapes = {
        f"layer {number}": {"w": pair, **({"b": (pair[1],)} if draw(st.booleans()) else {})}
        for number, pair in enumerate(itertools.pairwise(widths))
    }
    params = draw_params(shapes)
    if draw(st.booleans()):
        params["again"] = params["layer 0"]

    def loss(params: Any, x: Tensor) -> Tensor:
        for name, layer in params.items():
            y = x if name != "again" else x.mean() * torch.ones(len(x), len(layer["w"])).to(x)
            x = torch.tanh(y @ layer["w"] + layer.get("b", 0.0))
        return x.float().pow(2).mean()

    stage = one_of(0, 1, 2, 3)
    parts = tuple(part for part in EVERYTHING[: 2 + (stage == 3)] if draw(st.booleans()))
    bucket_bytes, precision, pieces = (
        one_of(1, 900, 2**20),
        one_of(None, torch.bfloat16),
        one_of(1, 3),
    )
    optimizer = one_of(ADAMW, zf.optim.sgd(0.1, momentum=0.9), zf.optim.lamb(0.1))

    def make(group: zf.Group) -> Any:
        return zf.zero(
            stage,
            loss,
            optimizer,
            group,
            precision=precision,
            num_micro_batches=pieces,
            bucket_bytes=bucket_bytes,
            offload=offloaded(parts),
        )

    return params, torch.ones(2 * pieces, widths[0]), make, one_of(1, 2, 3)


@settings(max_examples=examples(8))
@given(models())
def test_the_plan_of_a_drawn_model_equals_a_real_step(drawn: Any) -> None:
    params, batch, make, size = drawn
    check(make, params, batch, size)


def test_the_traffic_of_a_plan_is_that_of_the_closed_form() -> None:
    numel = 1 << 14
    params = {name: torch.empty(numel, device="meta") for name in "ab"}
    loss = lambda params, x: sum((w * x).sum() for w in params.values())
    for stage in (0, 1, 2, 3):
        make = lambda group, stage=stage: zf.zero(stage, loss, ADAMW, group, bucket_bytes=1)
        plan = zf.plan(make, params, torch.empty(numel), 64)
        volume = formulae.zero_volume(2 * numel, 64, stage)
        sent = plan.bytes_sent("grads"), plan.bytes_sent("params")
        assert sent == (4 * volume.grads, 4 * volume.params)
        steady = plan.steady.device
        assert (steady.params, steady.moments) == (
            8 * numel // (64 if stage == 3 else 1),
            16 * numel // (64 if stage else 1),
        )


def test_the_states_of_a_plan_are_those_of_the_papers_formula() -> None:
    """Between steps no gradients are kept, so the formula for the rest is that of (2 + K)."""
    params = {"w": torch.empty(1 << 15, 4, device="meta")}
    loss = lambda params, x: (params["w"] * x).sum()
    for stage in (1, 2, 3):
        make = lambda group, stage=stage: zf.zero(
            stage, loss, ADAMW, group, precision=torch.bfloat16
        )
        plan = zf.plan(make, params, torch.empty(4), 16)
        grads = 2 * (1 << 17) / (16 if stage >= 2 else 1)
        assert plan.steady.device.total == formulae.zero_memory(1 << 17, 16, stage) - grads


def test_the_copies_of_an_offloaded_optimizer_are_gradients_down_and_parameters_up() -> None:
    params = {"w": torch.empty(1 << 12, 4, device="meta")}
    loss = lambda params, x: (params["w"] * x).sum()
    numel = 1 << 14

    def make(group: zf.Group) -> Any:
        store = zf.stores.Offload(optimizer=zf.stores.host(pin=False))
        half = zf.Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32)
        return zf.zero(2, loss, ADAMW, group, precision=half, offload=store)

    plan = zf.plan(make, params, torch.empty(4), 4, device="meta")
    assert plan.steady.host == Bytes(masters=4 * numel // 4, moments=8 * numel // 4)
    assert plan.steady.device == Bytes(params=2 * numel)
    assert plan.peak_of("host").host.total >= plan.steady.host.total
    # ZeRO-Offload's 2M down and 2M up, and the old parameters beside the gradients.
    assert plan.moved.to_device == 2 * numel // 4
    assert plan.moved.to_host in (2 * numel // 4, 4 * numel // 4)
    assert "host, peak" in str(plan)


def test_a_store_on_a_disk_tells_its_part(tmp_path: Any) -> None:
    params = {"w": torch.empty(1 << 12, 4, device="meta")}
    loss = lambda params, x: (params["w"] * x).sum()

    def make(group: zf.Group) -> Any:
        return zf.zero(
            3, loss, ADAMW, group, offload=zf.stores.Offload(optimizer=zf.stores.nvme(tmp_path))
        )

    plan = zf.plan(make, params, torch.empty(4), 4)
    assert plan.steady.disk == Bytes(moments=8 * (1 << 12))
    assert plan.moved.to_disk == plan.moved.from_disk == 8 * (1 << 12)
    assert plan.steady.device == Bytes(params=4 * (1 << 12))
    # The new moments are written beside the old ones.
    assert plan.peak_of("disk").disk.moments >= plan.steady.disk.moments
    assert "disk, peak" in str(plan)
    assert not [*tmp_path.iterdir()]


def test_a_disk_of_everything_counts_each_part_once(tmp_path: Any) -> None:
    params = {"w": torch.empty(1 << 12, 4, device="meta")}
    loss = lambda params, x: (params["w"] * x).sum()
    store = zf.stores.nvme(tmp_path)
    offload = zf.stores.Offload(params=store, grads=store, optimizer=store)
    make = lambda group: zf.zero(3, loss, ADAMW, group, offload=offload)
    plan = zf.plan(make, params, torch.empty(4), 4)
    shard = 4 * (1 << 12)
    assert plan.steady.disk == Bytes(params=shard, moments=2 * shard)
    assert plan.steady.device.total == 0
    assert plan.peak_of("disk").disk.grads == shard
    assert plan.moved.to_disk == 4 * shard


def test_a_real_step_on_a_disk_moves_and_keeps_as_many_bytes(tmp_path: Any) -> None:
    def make(group: zf.Group) -> Any:
        store = zf.stores.nvme(tmp_path)
        offload = zf.stores.Offload(grads=store, optimizer=store)
        return zf.zero(2, gpt2_loss, ADAMW, group, offload=offload)

    plan = zf.plan(make, gpt2(), tokens(2), 2)
    real = measured(make, gpt2(), tokens(2), 2)
    assert plan.moved == real.moved
    assert plan.steady.disk == real.steady.disk
    assert plan.peak_of("disk").disk == real.peak_of("disk").disk


def test_bytes_by_path_add_up_to_the_bytes_between_steps() -> None:
    # One bucket, because shards of fewer than 512 bytes are not counted.
    make = lambda group: zf.zero(3, gpt2_loss, ADAMW, group, precision=torch.bfloat16)
    plan = zf.plan(make, gpt2(), tokens(2), SIZE)
    for part in ("params", "masters", "moments"):
        kept = sum(getattr(row, part) for row in plan.by_path)
        assert kept == getattr(plan.steady.device, part)
    whole = zf.plan(composed(0), gpt2(), tokens(2), SIZE)
    assert [row.path for row in whole.by_path] == ["wte", "wpe", "h", "ln_f", "padding"]
    assert whole.by_path[0] == ("wte", 4 * 97 * 32, 0, 8 * 97 * 32)


def test_flops_are_those_of_the_matrix_products() -> None:
    params = {"a": torch.empty(64, 128, device="meta"), "b": torch.empty(128, 32, device="meta")}
    loss = lambda p, x: torch.tanh(x @ p["a"]).matmul(p["b"]).sum()
    make = lambda group: zf.zero(2, loss, ADAMW, group)
    forward = 2 * 10 * (64 * 128 + 128 * 32)
    flops = zf.plan(make, params, torch.empty(10, 64), 2).flops
    # The input of the first product needs no gradient.
    assert flops == (forward, 2 * forward - 2 * 10 * 64 * 128, 0, 0)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_plan_refuses_a_loss_that_uses_no_leaf_as_a_run_does(stage: int) -> None:
    loss = lambda params, x: x.square().sum().requires_grad_()
    make = lambda group: zf.zero(stage, loss, ADAMW, group)
    with pytest.raises(zf.errors.LeafError, match="no trained leaf got a gradient on any rank"):
        zf.plan(make, {"w": torch.ones(3)}, torch.ones(2), 2)


def test_a_complex_loss_is_refused_by_name() -> None:
    batch = torch.ones(2, 3, dtype=torch.complex64)
    loss = lambda params, x: (x @ params["w"].to(x.dtype)).sum()
    make = lambda group: zf.zero(2, loss, ADAMW, group)
    with pytest.raises(zf.ZfunError, match=r"a real scalar; got torch\.complex64; take its abs"):
        zf.plan(make, {"w": torch.ones(3, 4)}, batch, 2)


def test_a_forecast_divides_the_work_by_the_rates() -> None:
    plan = zf.plan(composed(3), gpt2(), tokens(2), SIZE)
    free = plan.on(Hardware(flops_per_s=1e9))
    assert free.bottleneck == "compute"
    assert free.at_least_s == free.at_most_s == plan.flops.total / 1e9
    slow = plan.on(Hardware(flops_per_s=1e12, network=1e6))
    assert slow.bottleneck == "network"
    assert slow.network_s == plan.bytes_sent() / 1e6
    assert slow.at_most_s == pytest.approx(slow.network_s + slow.compute_s)
    late = plan.on(Hardware(flops_per_s=math.inf, latency_s=0.5))
    assert late.at_least_s == 0.5 * sum(sent.num_messages for sent in plan.sent)
    with pytest.raises(zf.errors.OptionError, match=r"hardware of on\(\) must be"):
        plan.on(None)  # type: ignore[arg-type]


def test_a_forecast_prices_each_axis_of_a_mesh() -> None:
    hosts: Any = {"network": 1e6, "local_network": 1e9, "ranks_per_host": 2}
    machine = Hardware(flops_per_s=math.inf, **hosts)
    rows = lambda group: composed(3)(zf.split(group, 2))
    meshed = zf.plan(rows, gpt2(), tokens(2), 4)
    across, within = (meshed.bytes_sent(axis=axis) for axis in ("outer", "inner"))
    assert across > 0 < within
    assert meshed.on(machine).at_most_s == pytest.approx(across / 1e6 + within / 1e9)
    flat = zf.plan(composed(3), gpt2(), tokens(2), 4)
    found = flat.on(machine)
    assert found.at_most_s == pytest.approx(flat.bytes_sent() / 1e6)
    assert found.at_least_s == pytest.approx(flat.bytes_sent() / 2e6)
    inside = zf.plan(composed(3), gpt2(), tokens(2), 2)
    assert inside.on(machine).at_most_s == pytest.approx(inside.bytes_sent() / 1e9)


def test_the_operations_of_the_loss_cost_time_in_the_upper_bound_alone() -> None:
    plans = [zf.plan(composed(stage), gpt2(), tokens(2), 2) for stage in (0, 1, 2, 3)]
    assert len({plan.touched for plan in plans}) == 1
    plan = plans[0]
    assert plan.touched.forward_bytes > 0 == plan.touched.recomputed_bytes
    slow = plan.on(Hardware(flops_per_s=2e9, least_flops_per_s=1e9, touch=1e6, op_s=1e-3))
    assert slow.at_least_s == plan.flops.total / 2e9
    added = plan.touched.num_bytes / 1e6 + plan.touched.num_ops * 1e-3
    assert slow.at_most_s == pytest.approx(plan.flops.total / 1e9 + added)
    assert {plan.num_leaves for plan in plans} == {len(zf.tree.leaves(gpt2()))}
    leaves = plan.on(Hardware(flops_per_s=math.inf, leaf_s=1e-3))
    assert (leaves.at_least_s, leaves.at_most_s) == (0, pytest.approx(plan.num_leaves * 1e-3))


def test_compositions_are_compared_in_one_table() -> None:
    makes = {f"stage {stage}": composed(stage) for stage in (0, 1, 2, 3)}
    machine = Hardware(flops_per_s=1e12, network=1e9)
    found = zf.planner.compare(makes, gpt2(), tokens(2), SIZE, hardware=machine)
    assert list(found.plans) == list(makes)
    held = [plan.steady.device.total for plan in found.plans.values()]
    assert held == sorted(held, reverse=True)
    lines = str(found).splitlines()
    assert lines[0].split()[-1] == "bottleneck"
    assert [line.split("  ")[0] for line in lines[1:]] == list(makes)
    for line, plan in zip(lines[1:], found.plans.values(), strict=True):
        assert f"{plan.peak.device.total:,}" in line
        assert f"{plan.bytes_sent():,}" in line
    assert "stage 3" in found._repr_html_()
    with pytest.raises(zf.errors.OptionError, match="at least one"):
        zf.planner.compare({}, gpt2(), tokens(2), SIZE)


def test_a_plan_is_shown_as_tables_and_a_picture() -> None:
    plan = zf.plan(composed(3, recomputed), gpt2(), tokens(2), SIZE)
    shown = str(plan)
    for part in ("between steps", "peak", "reduce_scatter", "recomputed", "wte"):
        assert part in shown
    assert "masters" not in shown
    assert plan._repr_html_().count("<table>") == shown.count("\n\n") + 1
    pytest.importorskip("matplotlib")
    figure = plan.draw()
    assert figure._repr_png_().startswith(b"\x89PNG")
    labels = {text.get_text() for text in figure.legends[0].get_texts()}
    assert {"params", "moments", "grads", "gathered", "activations"} <= labels
    assert "masters" not in labels
    assert plan.draw("Mine").get_suptitle() == "Mine"


def test_a_number_of_ranks_may_be_of_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    recipe = lambda group: zf.zero(3, lambda p, x: (p["w"] * x).sum(), zf.optim.sgd(0.1), group)
    found = zf.plan(recipe, {"w": torch.ones(64)}, torch.ones(64), numpy.int64(2))
    assert found.size == 2


@dataclasses.dataclass(frozen=True)
class _State:
    params: Any
    opt_state: Any


zf.tree.register(_State, lambda x: ((x.params, x.opt_state), None), lambda _, parts: _State(*parts))


class _Loop:
    """A loop whose state is a dataclass."""

    def __init__(self, group: zf.Group) -> None:
        loss = lambda p, x: torch.tanh(x @ p["w"]).sum()
        self._zero = zf.zero(1, loss, zf.optim.adamw(0.1), group)
        self._inner: Any = None

    def init(self, params: Any) -> _State:
        return self._shown(self._zero.init(params))

    def step(self, state: _State, batch: Any) -> tuple[_State, Any]:
        inner = self._inner._replace(params=state.params, opt_state=state.opt_state)
        inner, info = self._zero.step(inner, batch)
        return self._shown(inner), info

    def _shown(self, inner: Any) -> _State:
        self._inner = inner
        return _State(inner.params, inner.opt_state)


def test_the_moments_of_any_state_are_counted_once() -> None:
    found = zf.plan(_Loop, {"w": torch.ones(32, 32)}, torch.ones(2, 32), 2)
    (row,) = found.by_path
    assert (row.params, row.moments) == (found.steady.device.params, found.steady.device.moments)
