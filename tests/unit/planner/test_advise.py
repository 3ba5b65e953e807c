"""Advice: the fastest composition that fits, the search, and the commands plan and hw-bench."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import zfun as zf
from tests.conftest import FORM
from zfun import cli
from zfun.planner import Advice, Candidate, Hardware, Model, advise
from zfun.planner.plans._bounds import Bounds
from zfun.transforms import Event, TracedBucket, UntoldUse, told_order


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


PARAMS = {"h": [{"up": empty(64, 256), "down": empty(256, 64)} for _ in range(4)]}


def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ layer["up"]) @ layer["down"]


def loss(params: Any, x: torch.Tensor, block: Any = block) -> torch.Tensor:
    for layer in params["h"]:
        x = block(layer, x)
    return x.sum()


def recomputed(params: Any, x: torch.Tensor) -> torch.Tensor:
    return loss(params, x, zf.remat(block))


def loss_of_wide(params: Any, x: torch.Tensor, block: Any = block) -> torch.Tensor:
    return loss(params, x, block).float()


def recomputed_wide(params: Any, x: torch.Tensor) -> torch.Tensor:
    return loss_of_wide(params, x, zf.remat(block))


def machine(device_bytes: float, **sizes: Any) -> Hardware:
    return Hardware(
        flops_per_s=1e9, network=1e9, host_link=1e6, disk=1e5, device_bytes=device_bytes, **sizes
    )


MODEL = Model(loss, PARAMS, empty(32, 64), recomputed=recomputed)


def advised(hardware: Hardware, *, lossy: bool = True) -> Advice:
    return advise(MODEL, hardware, 4, lossy=lossy)


# Leaves of more than a bucket, so that buckets differ; the meta device holds no bytes.
WIDE = {"h": [{"up": empty(2048, 8192), "down": empty(8192, 2048)} for _ in range(2)]}


def exhaustive(
    model: Model, num_ranks: int, ranks_per_host: int | None, lossy: bool
) -> dict[Candidate, zf.planner.Plan]:
    space = model.candidates(num_ranks, ranks_per_host=ranks_per_host, lossy=lossy)
    return {
        one: zf.plan(
            lambda group, one=one: one.of(model, group),
            model.params,
            model.batch,
            num_ranks,
            device="meta",
        )
        for one in space
    }


def check_is_best(
    model: Model,
    plans: dict[Candidate, zf.planner.Plan],
    hardware: Hardware,
    size: int,
    lossy: bool,
) -> None:
    found = advise(model, hardware, size, lossy=lossy)
    times = {
        one: plan.on(hardware).at_most_s for one, plan in plans.items() if not plan.excess(hardware)
    }
    if not times:
        assert found.best is None or found.best.composition.precision is not None
        return
    assert found.best is not None
    assert times[found.best.composition] == found.best.forecast.at_most_s
    assert found.best.forecast.at_most_s <= min(times.values()) * (1 + 1e-9)
    bounds = {one.composition: one for one in found.bounds}
    assert set(bounds) == set(plans)
    for one, plan in plans.items():
        bound = bounds[one]
        assert plan.on(hardware).at_most_s >= bound.forecast.at_most_s * (1 - 1e-9), one
        peaks = [getattr(plan.peak_of(p), p).total for p in ("device", "host", "disk")]
        assert peaks >= [bound.device, bound.host, bound.disk], one


def drawn_machines(plans: dict[Candidate, zf.planner.Plan], count: int) -> list[Hardware]:
    chance = random.Random(0)
    peaks = sorted(plan.peak.device.total for plan in plans.values())
    rate = lambda low, high: 10 ** chance.uniform(low, high)
    return [
        Hardware(
            flops_per_s=rate(12, 15),
            network=rate(8, 11),
            local_network=rate(9, 12),
            ranks_per_host=4,
            host_link=rate(8, 11),
            disk=rate(7, 10),
            latency_s=rate(-6, -4),
            memory=rate(10, 12),
            host_memory=rate(9, 11),
            touch=rate(9, 12),
            op_s=rate(-6, -5),
            device_bytes=chance.choice(peaks) * chance.choice((0.9, 1.0, 1.1)),
            host_bytes=chance.choice((math.inf, 1e8)),
        )
        for _ in range(count)
    ]


def test_the_best_is_that_of_an_exhaustive_search() -> None:
    model = Model(loss_of_wide, WIDE, empty(1, 64, 2048))
    plans = exhaustive(model, 4, 4, lossy=False)
    assert len(plans) == 39
    for hardware in drawn_machines(plans, 4):
        check_is_best(model, plans, hardware, 4, lossy=False)


def test_the_first_step_of_stages_1_and_2_is_planned_like_the_second() -> None:
    space = [one for one in MODEL.candidates(4, ranks_per_host=2) if one.stage < 3]
    for one in random.Random(0).sample(space, 4):
        first, second = (
            zf.plan(
                lambda group, one=one: one.of(MODEL, group),
                MODEL.params,
                MODEL.batch,
                4,
                steps=steps,
                device="meta",
            )
            for steps in (1, 2)
        )
        assert first == second, one


def loss_and_means(params: Any, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    return zf.transforms.weighted_mean(loss(params, x), 32.0), x.mean()


# Activations are small beside the buckets, of which each layer has some.
LAYERS = Model(
    loss,
    {"h": [{"up": empty(256, 2048), "down": empty(2048, 256)} for _ in range(4)]},
    empty(4, 256),
    recomputed=recomputed,
)


def plan_of(choice: Candidate, model: Model, **options: Any) -> zf.planner.Plan:
    make = lambda group: choice.of(model, group)
    return zf.plan(make, model.params, model.batch, 4, device="meta", **options)


TIED = {"a": empty(64, 64), "b": empty(64, 64)}


def branched(params: Any, x: torch.Tensor) -> torch.Tensor:
    x = torch.tanh(x @ params["b"]) @ params["a"]
    return (x @ params["b"] + params["b"].detach().sum()).sum()


@pytest.mark.parametrize(
    "model",
    [
        MODEL,
        LAYERS,
        Model(loss_and_means, PARAMS, MODEL.batch),
        Model(branched, {"c": [empty(2000)], **TIED, "tied": TIED["a"]}, empty(8, 64)),
    ],
)
def test_the_order_of_use_of_a_bare_loss_is_all_that_a_first_step_learns(model: Model) -> None:
    bounds = Bounds(model, zf.collectives.abstract_group(4))
    space = [one for one in model.candidates(4, ranks_per_host=2) if one.stage == 3]
    for one in random.Random(0).sample(space, 12 if FORM == "all" else 3):
        token = told_order.set(bounds.order(one))
        try:
            told = plan_of(one, model, steps=1)
        finally:
            told_order.reset(token)
        assert told == plan_of(one, model), one


@pytest.mark.parametrize(
    "change",
    [
        {"forward": (0, 1, 2, 3, 4, 5, 6, 7, 6)},
        {"forward": (0, 1, 3, 2, 4, 5, 6, 7)},
        {"forward": (0, 1, 2, 3, 4, 5, 6)},
        {"backward": tuple(Event("reduce", bucket) for bucket in range(8))},
        {"backward": (Event("use", 7), Event("use", 0))},
        {"buckets": (TracedBucket("", (), 1, 1, 1, 1),) * 9},
    ],
    ids=str,
)
def test_an_order_of_use_that_a_loss_does_not_have_is_refused(change: dict[str, Any]) -> None:
    choice = Candidate(3, lean=True)
    order = Bounds(LAYERS, zf.collectives.abstract_group(4)).order(choice)
    assert order is not None
    token = told_order.set(dataclasses.replace(order, **change))
    try:
        with pytest.raises(UntoldUse, match="an order of use was told that the loss does not have"):
            plan_of(choice, LAYERS, steps=1)
    finally:
        told_order.reset(token)


def test_the_bounds_of_stage_3_know_gathered_and_packed_buckets() -> None:
    bounds = advised(machine(1.0)).bounds
    plain = next(one for one in bounds if one.composition == Candidate(3))
    params = sum(leaf.nbytes for leaf in zf.tree.leaves(PARAMS))
    # A bucket of all leaves is packed beside the gradients, and the state has a quarter of Adam's.
    assert plain.device >= 2 * params + 3 * params // 4


STORED = {"offloaded": ("params", "optimizer")}


@pytest.mark.parametrize(
    ("share", "choice"),
    [
        (0.95, Candidate(3, recomputed=True, lean=True)),
        (0.95, Candidate(3, **STORED, bucket_bytes=2**21)),
        (0.92, Candidate(3, recomputed=True, bucket_bytes=2**21, compressed=("params", "grads"))),
        (0.9, Candidate(3, inner=2, secondary=True, bucket_bytes=2**21, num_micro_batches=2)),
        (1.0, Candidate(3, **STORED, on_disk=True, lean=True)),
        (1.0, Candidate(3, offloaded=("optimizer",), on_disk=True, bucket_bytes=2**21)),
        (1.0, Candidate(3, offloaded=("params",), compressed=("params", "grads"), lean=True)),
    ],
    ids=str,
)
def test_bounds_know_the_gathers_and_the_sums_in_flight(share: float, choice: Candidate) -> None:
    bound = Bounds(LAYERS, zf.collectives.abstract_group(4))(choice, machine(1.0))
    plan = plan_of(choice, LAYERS)
    assert share * plan.peak.device.total <= bound.device <= plan.peak.device.total


@pytest.mark.parametrize("stored", [(), ("params",), ("optimizer",)], ids=str)
@pytest.mark.parametrize("compressed", [(), ("params", "grads")], ids=str)
def test_bounds_know_which_buckets_stay_from_forward_to_backward(
    stored: tuple[str, ...], compressed: tuple[str, ...]
) -> None:
    # The largest bucket is used first, and gathered again.
    params = {**LAYERS.params, "embedding": empty(32_000, 256)}
    embedded = lambda params, rows: loss(params, params["embedding"][rows])
    model = Model(embedded, params, torch.empty(4, 16, dtype=torch.long, device="meta"))
    choice = Candidate(3, offloaded=stored, compressed=compressed, bucket_bytes=2**21)
    bound = Bounds(model, zf.collectives.abstract_group(4))(choice, machine(1.0))
    planned = plan_of(choice, model).on(machine(1.0)).at_most_s
    assert planned * 0.999 <= bound.forecast.at_most_s <= planned


def test_bounds_hold_where_a_bucket_of_all_leaves_has_more_padding() -> None:
    # A shard is rounded up to whole pages where that adds little: not that of the vector alone.
    params = {"a": empty(1024, 2048), "b": empty(1024, 2048), "scale": empty(4096)}
    scaled = lambda p, x: ((x @ p["a"]) * (x @ p["b"])).sum() + p["scale"].sum()
    model = Model(scaled, params, empty(8, 1024))
    hardware = machine(1.0)
    bounds = {one.composition: one for one in advise(model, hardware, 8).bounds}
    space = [one for one in model.candidates(8) if one.stage == 3 and one.offloaded]
    for one in random.Random(0).sample(space, 4):
        plan = zf.plan(
            lambda group, one=one: one.of(model, group), params, model.batch, 8, device="meta"
        )
        assert bounds[one].forecast.at_most_s <= plan.on(hardware).at_most_s * (1 + 1e-9), one


@st.composite
def models_of_small_leaves(draw: st.DrawFn) -> Model:
    """Draw blocks of matrices, vectors and single numbers, of any sizes, in any order."""
    width, inner = draw(st.sampled_from((3, 64, 520, 1024))), draw(st.sampled_from((5, 256, 4096)))
    shapes = {"up": (width, inner), "down": (inner, width), "scale": (width,), "bias": (inner,)}
    names = draw(st.permutations([*shapes, "gate"]))
    layer = lambda: {name: empty(*shapes.get(name, ())) for name in names}
    params = {
        "embedding": empty(draw(st.sampled_from((8, 2000))), width),
        "h": [layer() for _ in range(draw(st.integers(1, 4)))],
        "last": empty(width),
    }

    def block(p: Any, x: torch.Tensor) -> torch.Tensor:
        return x + p["gate"] * (torch.tanh(x * p["scale"] @ p["up"] + p["bias"]) @ p["down"])

    def small_loss(params: Any, rows: torch.Tensor, block: Any = block) -> torch.Tensor:
        x = params["embedding"][rows]
        for layer in params["h"]:
            x = block(layer, x)
        return (x * params["last"]).float().sum()

    rows = torch.empty(
        draw(st.sampled_from((1, 2, 4))),
        draw(st.sampled_from((1, 16, 128))),
        dtype=torch.long,
        device="meta",
    )
    return Model(
        small_loss,
        params,
        rows,
        recomputed=lambda params, rows: small_loss(params, rows, zf.remat(block)),
        precision=draw(st.sampled_from((None, torch.bfloat16))),
    )


@pytest.mark.timeout(3600)
@settings(max_examples={"everyday": 40, "all": 200, "search": 2000}[FORM], deadline=None)
@given(models_of_small_leaves(), st.sampled_from((2, 4, 8, 24, 64, 512)), st.data())
def test_bounds_hold_for_leaves_that_a_meter_leaves_out(
    model: Model, num_ranks: int, data: st.DataObject
) -> None:
    hardware = machine(1e12, local_network=1e10, ranks_per_host=4)
    bounds = Bounds(model, zf.collectives.abstract_group(num_ranks))
    choices = st.sampled_from(model.candidates(num_ranks, ranks_per_host=4))
    for choice in data.draw(st.lists(choices, min_size=2, max_size=4)):
        bound = bounds(choice, hardware)
        plan = zf.plan(
            lambda group, choice=choice: choice.of(model, group),
            model.params,
            model.batch,
            num_ranks,
            device="meta",
        )
        peaks = [getattr(plan.peak_of(place), place).total for place in ("device", "host", "disk")]
        for peak, least in zip(peaks, (bound.device, bound.host, bound.disk), strict=True):
            assert peak >= least, choice
        assert plan.on(hardware).at_most_s >= bound.forecast.at_most_s * (1 - 1e-9), choice


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("half", [False, True] if FORM == "search" else [])
def test_the_best_of_40_machines_is_that_of_an_exhaustive_search(half: bool) -> None:
    """Takes nine minutes; the test above plans a tenth of the compositions."""
    model = Model(loss_of_wide, WIDE, empty(1, 64, 2048), recomputed=recomputed_wide)
    if half:
        model = Model(loss_of_wide, WIDE, empty(2, 64, 2048), precision=torch.bfloat16)
    plans = exhaustive(model, 8, 4, lossy=True)
    for hardware in drawn_machines(plans, 20):
        check_is_best(model, plans, hardware, 8, lossy=True)


def test_where_everything_fits_the_shortest_step_is_taken() -> None:
    found = advised(machine(1e9), lossy=False)
    assert found.best is not None
    assert str(found.best.composition) == "ZeRO-1"
    assert found.batch_factor == 16
    assert "raise the batch" in str(found)
    assert "planned: take ZeRO-1" in str(found)
    assert len(found.rungs) < 20 < len(found.bounds)


def test_messages_are_rounded_only_where_that_is_allowed() -> None:
    rounding, exact = (advised(machine(1e9), lossy=lossy) for lossy in (True, False))
    assert rounding.best is not None
    assert exact.best is not None
    assert rounding.best.composition.compressed
    assert "lossy=False" in str(rounding)
    assert not any(one.composition.compressed for one in exact.bounds)
    assert exact.best.forecast.at_most_s > rounding.best.forecast.at_most_s


def test_the_frontier_and_the_reasons_are_shown() -> None:
    found = advised(machine(2e6))
    assert found.best is not None
    front = found.frontier()
    memory = [one.device for one in front]
    times = [one.forecast.at_most_s for one in front]
    assert memory == sorted(set(memory), reverse=True)
    assert times == sorted(times)
    for one in found.bounds:
        assert not any(
            one.device < m and one.forecast.at_most_s < t
            for m, t in zip(memory, times, strict=True)
        )
    reasons = found.reasons()[1:]
    assert reasons
    chosen = found.best.composition
    assert str(chosen) not in [name for name, _, _ in reasons]
    assert all("too much" in why or "the time" in why for _, _, why in reasons)
    assert "frontier" in str(found)


def test_the_frontier_is_drawn() -> None:
    pytest.importorskip("matplotlib")
    figure = advised(machine(2e6)).draw()
    (panel,) = figure.axes
    assert "on the device" in panel.get_xlabel()
    assert panel.get_title(loc="left").startswith("ZeRO")


def test_a_model_remembers_its_plans() -> None:
    first, again = advised(machine(2e6)), advised(machine(2e6))
    assert first.best is not None
    assert again.best is not None
    assert again.best.plan is first.best.plan


def test_a_machine_that_is_too_small_gets_the_bytes_that_are_missing() -> None:
    found = advised(machine(1.0, host_bytes=10.0, disk_bytes=0.0))
    assert found.best is None
    assert not found.rungs
    assert all(one.excess(found.hardware)["device"] > 0 for one in found.bounds)
    stored = [one for one in found.bounds if one.composition.offloaded]
    for one in stored:
        place = "disk" if one.composition.on_disk else "host"
        assert place in one.excess(found.hardware)
    assert {one.composition.precision for one in found.bounds} == {None, torch.bfloat16}
    assert "no composition fits" in str(found)
    assert "too much" in str(found)


def test_hardware_without_limits_is_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"hardware without limits; pass"):
        advised(Hardware(flops_per_s=1e9))


def test_a_description_of_hardware_is_written_and_read(tmp_path: Any) -> None:
    machine(5.0).save(tmp_path / "one.json")
    assert Hardware.load(tmp_path / "one.json") == machine(5.0)
    (tmp_path / "two.json").write_text('{"flops": 3}')
    for name in ("two.json", "none.json"):
        with pytest.raises(zf.errors.OptionError, match=r"JSON object of the fields"):
            Hardware.load(tmp_path / name)


@pytest.fixture
def config(tmp_path: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 61}
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path)
    return tmp_path / "config.json"


@pytest.mark.slow
def test_the_command_plans_a_model_of_hugging_face(config: Any, capsys: Any) -> None:
    hardware = config.parent / "hardware.json"
    machine(1e9).save(hardware)
    out = config.parent / "out"
    sizes = ["--ranks", "4", "--length", "16", "--device-memory", "1GB"]
    files = ["--hardware", str(hardware), "--out", str(out)]
    assert cli.main(["plan", "--hf", str(config), *sizes, *files]) == 0
    shown = capsys.readouterr().out
    assert "ZeRO-3, mixed precision" in shown
    assert "bottleneck" in shown
    # The one bucket stays from forward to backward, so stage 3 gathers no more than stage 1.
    assert "take ZeRO-3, params and grads in int8, mixed precision" in shown
    if (out / "plan.png").exists():
        assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plan", "--hf", str(config), *sizes[:-1], "1KB", "--out", str(out)]) == 1
    assert cli.main(["plan", "--hf", str(out / "none.json"), "--ranks", "2"]) == 2
    assert "config.json" in capsys.readouterr().err


# Sizes of Llama 3, and steps of FSDP that torchtitan has published, for sequences of 8,192 tokens:
# benchmarks/llama3_h100_202412_torchtitan.md (selective checkpointing) and docs/performance.md
# (70B, full checkpointing) of https://github.com/pytorch/torchtitan, in tokens per second.
LLAMA = {"8B": (4096, 14336, 32, 32), "70B": (8192, 28672, 80, 64)}
# Peaks of the data sheets; the memory and network of the H100 hosts are those of the publication.
# The slowest products are those of attention: FlashAttention-2 reaches 35 % of the peak of an H100
# (Shah et al., "FlashAttention-3", 2024), and half that of an A100 (Dao, "FlashAttention-2", 2023).
H100 = Hardware(
    flops_per_s=989e12,
    least_flops_per_s=0.35 * 989e12,
    memory=2.4e12,
    touch=2.4e12,
    network=50e9,
    local_network=450e9,
    ranks_per_host=8,
)
A100 = Hardware(
    flops_per_s=312e12,
    least_flops_per_s=0.5 * 312e12,
    memory=2e12,
    touch=2e12,
    network=25e9,
    local_network=300e9,
    ranks_per_host=8,
)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "ranks", "rows", "hardware", "tokens_per_s"),
    [("8B", 8, 2, H100, 5762), ("8B", 128, 2, H100, 5605), ("70B", 64, 1, A100, 331)][
        : 3 if FORM == "search" else 1
    ],
)
def test_published_steps_lie_within_the_bounds(
    name: str, ranks: int, rows: int, hardware: Hardware, tokens_per_s: float, tmp_path: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    width, hidden, layers, heads = LLAMA[name]
    sizes = {"hidden_size": width, "intermediate_size": hidden, "num_hidden_layers": layers}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256}
    transformers.LlamaConfig(**sizes, max_position_embeddings=8192).save_pretrained(tmp_path)
    model = zf.planner.from_huggingface(tmp_path, rows, 8192)
    # The run recomputes something between nothing and all. On the CPU attention is fused, as there.
    plain, full = (
        zf.plan(lambda group, one=one: one.of(model, group), model.params, model.batch, ranks).on(
            hardware
        )
        for one in (
            Candidate(3, recomputed, precision=torch.bfloat16) for recomputed in (False, True)
        )
    )
    assert plain.at_least_s <= rows * 8192 / tokens_per_s <= full.at_most_s
    assert full.at_most_s < 6 * plain.at_least_s


@pytest.mark.slow
def test_the_command_measures_this_machine(tmp_path: Any, capsys: Any) -> None:
    pytest.importorskip("tqdm")
    out = tmp_path / "hardware.json"
    assert cli.main(["hw-bench", str(tmp_path), "--mib", "4", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {"flops_per_s", "memory", "host_memory", "network", "disk", "latency_s"} <= set(found)
    assert {"touch", "op_s", "leaf_s", "least_flops_per_s"} <= set(found)
    assert all(value > 0 for value in found.values())
    assert "written" in capsys.readouterr().out


def test_an_impossible_folder_is_refused_before_measuring(
    tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(
        "zfun.demo._hw_bench.measure_hardware", lambda *args, **options: pytest.fail("measured")
    )
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "hardware.json"
    assert cli.main(["hw-bench", str(tmp_path), "--out", str(out)]) == 2
    assert "where no file can be written" in capsys.readouterr().err
