"""Plans of meshes: a rank does exactly as much as planned, whatever the axes."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from tests.unit.planner.test_live import compiled_kernels
from zfun import cli
from zfun.parallel import ring_attention, token_mean, ulysses
from zfun.planner import Observer, Plan

F = torch.nn.functional
WIDTH, HIDDEN, HEADS, WORDS, TOKENS = 32, 48, 4, 40, 8
STYLES = {"h.*.[qkv]": "colwise", "h.*.o": "rowwise", "h.*.up": "colwise", "h.*.down": "rowwise"}
AXES = ("pp", "dp", "sp", "tp")


@dataclass(frozen=True)
class Case:
    """A mesh, a small decoder with one layer on each stage, and a composition."""

    sizes: dict[str, int]
    stage: int = 3
    schedule: str = "1f1b"
    stages_per_rank: int = 1
    num_micro_batches: int = 2
    is_tied: bool = False
    is_recomputed: bool = False
    precision: torch.dtype | None = None
    bucket_bytes: int = 4000
    offloaded: tuple[str, ...] = ()
    attention: Any = ulysses

    @property
    def num_layers(self) -> int:
        return self.sizes["pp"] * self.stages_per_rank

    def params(self) -> dict[str, Any]:
        chance = torch.Generator().manual_seed(0)
        draw = lambda *shape: torch.randn(*shape, generator=chance) / 8
        embed = draw(WORDS, WIDTH)
        squares = lambda names: {name: draw(WIDTH, WIDTH) for name in names}
        layer = lambda: {
            "norm": draw(WIDTH),
            **squares("qkvo"),
            "up": draw(HIDDEN, WIDTH),
            "down": draw(WIDTH, HIDDEN),
        }
        layers = {str(n): layer() for n in range(self.num_layers)}
        head = embed if self.is_tied else draw(WORDS, WIDTH)
        return {"embed": embed, "h": layers, "head": head}

    def batch(self) -> dict[str, Tensor]:
        """Return the batch of a rank: a piece of each sequence."""
        shape = 2 * self.num_micro_batches, TOKENS // self.sizes["sp"]
        ids = torch.randint(0, WORDS, shape, generator=torch.Generator().manual_seed(1))
        return {"ids": ids, "labels": ids.flip(1).contiguous()}

    def recipe(self, mesh: Any) -> Any:
        attend: Any = F.scaled_dot_product_attention
        if self.sizes["sp"] > 1 and self.attention is ulysses:
            attend = ulysses(attend, mesh["sp"])
        elif self.sizes["sp"] > 1:
            attend = lambda q, k, v, is_causal: ring_attention(
                q, k, v, mesh["sp"], causal=is_causal
            )

        def layer(p: Any, x: Tensor) -> Tensor:
            y = F.layer_norm(x, (WIDTH,), p["norm"])
            heads = [F.linear(y, p[n]).unflatten(-1, (-1, 8)).transpose(1, 2) for n in "qkv"]
            x = x + F.linear(attend(*heads, is_causal=True).transpose(1, 2).flatten(2), p["o"])
            return x + F.linear(F.gelu(F.linear(x, p["up"])), p["down"])

        layer = zf.remat(layer) if self.is_recomputed else layer

        def stage(number: int) -> Any:
            def run(p: Any, x: Any, batch: Any) -> Any:
                x = F.embedding(batch["ids"], p["embed"]) if number == 0 else x
                x = layer(p["h"][str(number)], x)
                if number < self.num_layers - 1:
                    return x
                return token_mean(F.linear(x, p["head"]), batch["labels"])

            return run

        def whole(p: Any, batch: Any) -> Any:
            x: Any = None
            for number in range(self.num_layers):
                x = stage(number)(p, x, batch)
            return x

        def cut(fn: Any) -> Any:
            return zf.tensor_parallel(fn, mesh["tp"], STYLES) if self.sizes["tp"] > 1 else fn

        count = self.num_micro_batches
        if self.sizes["pp"] == 1:
            loss: Any = cut(whole)
        else:
            leaves = [[f"h.{number}.*"] for number in range(self.num_layers)]
            leaves[0].append("embed")
            leaves[-1].append("head")
            loss = zf.pipeline(
                [cut(stage(number)) for number in range(self.num_layers)],
                mesh["pp"],
                self.schedule,
                num_micro_batches=count,
                leaves=leaves,
            )
            count = 1
        stores: dict[str, Any] = dict.fromkeys(self.offloaded, zf.stores.host(pin=False))
        return zf.zero(
            self.stage,
            loss,
            zf.optim.adamw(0.1),
            mesh["dp", "sp"],
            num_micro_batches=count,
            precision=self.precision,
            bucket_bytes=self.bucket_bytes,
            offload=zf.stores.Offload(**stores),
        )

    def plan(self, rank: int, steps: int = 2, *, fold: bool = False) -> Plan:
        group = zf.collectives.abstract_group(math.prod(self.sizes.values()), rank)
        return zf.plan(
            self.recipe,
            self.params(),
            self.batch(),
            group,
            mesh=self.sizes,
            steps=steps,
            fold=fold,
        )

    def measured(self, rank: int, steps: int) -> Plan:
        """Take the steps on simulated ranks, and observe one of them."""

        def main(group: zf.Group) -> Plan | None:
            start, batch = copy.deepcopy(self.params()), self.batch()  # tied leaves stay tied
            if group.rank != rank:
                z = self.recipe(zf.mesh(group, **self.sizes))
                state = z.init(start)
                for _ in range(steps):
                    state, _ = z.step(state, batch)
                return None
            observer = Observer(group)
            z = self.recipe(zf.mesh(observer.group, **self.sizes))
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
            found = zf.simulate(math.prod(self.sizes.values()), main)[rank]
        finally:
            gc.enable()
        assert found is not None
        return found

    def check(self, rank: int, steps: int = 2) -> Plan:
        plan, real = self.plan(rank, steps), self.measured(rank, steps)
        for number, (planned, found) in enumerate(zip(plan.instants, real.instants, strict=False)):
            assert found[1:] == planned[1:], (number, planned.what, found.what)
        assert len(real.instants) == len(plan.instants)
        same = dataclasses.replace(
            real,
            instants=plan.instants,
            mesh=tuple(self.sizes.items()),
            pipeline=plan.pipeline,
            stages=plan.stages,
        )
        assert same == plan
        return plan


def sizes(pp: int = 1, dp: int = 1, sp: int = 1, tp: int = 1) -> dict[str, int]:
    return dict(zip(AXES, (pp, dp, sp, tp), strict=True))


@st.composite
def cases(draw: st.DrawFn) -> tuple[Case, int]:
    one_of = lambda *values: draw(st.sampled_from(values))
    tp = one_of(1, 2, 4)
    sp = one_of(*(n for n in (1, 2) if n * tp <= HEADS))
    pp = one_of(*(n for n in (1, 2, 3, 4) if n * sp * tp <= 16))
    dp = one_of(*(n for n in (1, 2, 3) if n * pp * sp * tp <= 16))
    drawn = sizes(pp, dp, sp, tp)
    order = draw(st.permutations(AXES))
    stage = one_of(0, 1, 2, 3)
    schedule, per_rank = one_of(("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1), ("1f1b", 2))
    parts = ("optimizer", "grads", "params")[: 2 + (stage == 3)]
    case = Case(
        {axis: drawn[axis] for axis in order},
        stage,
        schedule,
        per_rank,
        one_of(1, 2, 3) * (pp if per_rank > 1 else 1),
        draw(st.booleans()),
        draw(st.booleans()),
        one_of(None, torch.bfloat16),
        one_of(1, 4000, 2**20),
        tuple(part for part in parts if draw(st.integers(0, 3)) == 0),
        one_of(ulysses, ring_attention),
    )
    return case, draw(st.integers(0, math.prod(drawn.values()) - 1))


@pytest.mark.slow
@settings(max_examples=examples(1))
@given(drawn=cases(), steps=st.sampled_from([1, 2]))
def test_the_plan_of_any_mesh_equals_the_run(drawn: tuple[Case, int], steps: int) -> None:
    case, rank = drawn
    case.check(rank, steps)


def test_a_donated_sum_of_a_pipeline_is_gone_before_tied_leaves_are_summed() -> None:
    Case(sizes(pp=2, dp=2), stage=1, is_tied=True, bucket_bytes=2**20).check(rank=0)


def test_a_plan_of_three_axes_tells_bytes_by_axis_and_the_pipeline() -> None:
    case = Case(sizes(pp=2, dp=2, tp=2), stage=1, num_micro_batches=3)
    plan = case.check(rank=1)
    # A micro-batch of 2 rows in float32, to the next stage.
    activations = 3 * 2 * TOKENS * WIDTH * 4
    assert plan.bytes_sent("activations", axis="pp") == activations
    # Ring all-reduce over 2 ranks, twice forward and twice backward in a layer.
    assert plan.bytes_sent("activations", axis="tp") == 4 * activations
    assert sum(plan.bytes_sent(axis=axis) for axis in AXES) == plan.bytes_sent()
    # Nothing of a message lives on.
    assert plan.steady.device.activations == plan.steady.device.work == 0
    assert plan.pipeline == (3, 2, pytest.approx(1 / 4))
    assert [stage.rank for stage in plan.stages] == [1, 5]
    assert [stage.pipeline.in_flight for stage in plan.stages if stage.pipeline] == [2, 1]


def check_folded(case: Case, rank: int = 0) -> None:
    plan, folded = case.plan(rank), case.plan(rank, fold=True)
    assert len(plan.stages) == case.sizes["pp"]
    for one, other in zip(folded.stages, plan.stages, strict=True):
        assert one == other
    assert folded == plan


def test_a_folded_plan_is_the_plan() -> None:
    check_folded(Case(sizes(pp=3), 1, num_micro_batches=5, bucket_bytes=2**20))


@pytest.mark.slow
@settings(max_examples=examples(1))
@given(drawn=cases(), pp=st.integers(2, 6), count=st.integers(1, 9))
def test_any_folded_plan_is_the_plan(drawn: tuple[Case, int], pp: int, count: int) -> None:
    case, _ = drawn
    grown = {**case.sizes, "pp": pp}
    case = dataclasses.replace(case, sizes=grown, num_micro_batches=count * case.stages_per_rank)
    if case.stages_per_rank == 1:
        check_folded(case)


@pytest.mark.parametrize("name", ["gpipe", "one_forward_one_backward", "zero_bubble"])
def test_a_timeline_of_a_pipeline_has_a_lane_for_each_rank_and_its_bubble(name: str) -> None:
    schedule = getattr(zf.parallel.schedules, name)(4, 6)
    found = zf.planner.timeline(schedule)
    lanes: dict[str, list[Any]] = {}
    for span in found.spans:
        lanes.setdefault(span.lane, []).append(span)
    assert sorted(lanes) == [f"rank {rank}" for rank in range(4)]
    for spans in lanes.values():
        assert all(one.end <= other.start for one, other in itertools.pairwise(spans))
    busy = sum(span.end - span.start for span in found.spans)
    share = zf.parallel.schedules.bubble(schedule)
    assert 1 - busy / (4 * found.duration) == pytest.approx(share)


def test_a_description_says_how_model_axes_spread_a_leaf() -> None:
    case = Case(sizes(pp=2, tp=2), num_micro_batches=1)

    def main(group: zf.Group) -> dict[str, str]:
        state = case.recipe(zf.mesh(group, **case.sizes)).init(case.params())
        return {row.path: row.placement for row in zf.describe(state.params).rows}

    found = zf.simulate(4, main)[2]
    assert found["h.1.up"] == "S, held by 1 (pp), dim 0 (tp)"
    assert found["h.1.down"].endswith("held by 1 (pp), dim 1 (tp)")
    assert found["head"] == "S, held by 1 (pp)"


@pytest.mark.slow
def test_the_command_plans_a_mesh_of_a_model_of_hugging_face(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 8}
    transformers.LlamaConfig(**widths, **counts).save_pretrained(tmp_path)
    given = ["plan", "--hf", str(tmp_path / "config.json"), "--ranks", "64", "--rows", "2"]
    given += ["--length", "64"]
    mesh = ["--mesh", "pp=2,dp=-1,tp=8", "--recomputed"]
    assert cli.main([*given, *mesh, "--device-memory", "1KB"]) == 1
    printed = capsys.readouterr().out
    assert "64 ranks (pp=2, dp=4, tp=8), 2 x 64 tokens on each data rank" in printed
    axes = [line.split()[:2] for line in printed.splitlines() if line[:2] in AXES]
    assert axes == [["pp", "2"], ["dp", "4"], ["tp", "8"]]
    assert cli.main([*given, "--mesh", "tp=8,dp=8", "--device-memory", "1GB"]) == 0
    assert cli.main([*given, "--mesh", "dp=3,tp=8"]) == 2
    assert "sizes of the axes multiply to the number of ranks" in capsys.readouterr().err
    assert cli.main([*given, "--mesh", "dp=-1,ep=2"]) == 2
    assert "knows the axes pp, dp, sp and tp" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*given, "--mesh", "dp=8,dp=8"])


@pytest.mark.slow
def test_the_command_takes_the_fastest_mesh_that_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    widths = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 128}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    transformers.LlamaConfig(**widths, **counts).save_pretrained(tmp_path)
    rates, config = tmp_path / "rates.json", tmp_path / "config.json"
    # One link, and nothing but matrix products and bytes sent takes time.
    zf.planner.Hardware(flops_per_s=1e9, network=1e6).save(rates)
    given = ["plan", "--hf", str(config), "--ranks", "2", "--length", "16", "--mesh", "auto"]
    assert cli.main([*given, "--hardware", str(rates)]) == 0
    printed = capsys.readouterr().out
    table, best = printed.split("\n\n")[1:3]
    rows = [line.rsplit(maxsplit=6) for line in table.splitlines()[1:]]
    names = ["pp=2, dp=1, ZeRO-1", "dp=1, tp=2, ZeRO-1", "dp=1, tp=2, ZeRO-3"]
    names += ["dp=2, ZeRO-1", "dp=2, ZeRO-3"]
    assert sorted(line.split("  ")[0] for line in table.splitlines()[1:]) == sorted(names)
    times = [float(row[-2]) for row in rows]
    assert times == sorted(times)
    first = table.splitlines()[1].split("  ")[0]
    assert best.startswith(f"{first}\nis the fastest of 5 that fit")
    # A batch of one row from each rank: each choice takes the time of its own plan.
    sizes, stage = first.rsplit(", ZeRO-", 1)
    alone = [*given[:-1], sizes.replace(" ", ""), "--stage", stage, "--hardware", str(rates)]
    rows_of_batch = 1 if "dp=2" in sizes else 2
    assert cli.main([*alone, "--rows", str(rows_of_batch)]) == 0
    last = capsys.readouterr().out.strip().splitlines()
    slowest = max(float(line.split()[-1]) for line in last[-2:] if line[0].isdigit())
    assert slowest == times[0]
    assert cli.main([*given, "--hardware", str(rates), "--device-memory", "1KB"]) == 1
    assert "no mesh fits" in capsys.readouterr().out
    assert cli.main(given) == 2
    assert "pass --hardware" in capsys.readouterr().err


STAGES = [{"w": torch.empty(8, 8, device="meta")} for _ in range(5)]


def five_stages(
    mesh: Any, functions: Any = None, trainable: Any = None, batches: int = 6
) -> zf.recipes.Zero[Any, Any]:
    inner = functions or [lambda p, x: torch.tanh(x @ p["w"])] * 4
    last = lambda p, x, batch: (x @ p["w"]).square().mean()
    loss = zf.pipeline([*inner, last], mesh["pp"], num_micro_batches=batches)
    return zf.zero(1, loss, zf.optim.adamw(0.1), mesh["dp"], trainable=trainable)


def same_folded(make: Any, batch: Any) -> None:
    for rank in (0, 2):
        group = zf.collectives.abstract_group(5, rank=rank)
        found = [
            zf.plan(make, STAGES, batch, group, mesh={"pp": 5, "dp": 1}, fold=fold)
            for fold in (True, False)
        ]
        assert [one.by_path for one in found[0].stages] == [one.by_path for one in found[1].stages]
        assert [one.instants for one in found[0].stages] == [
            one.instants for one in found[1].stages
        ]


@pytest.mark.slow
def test_stages_that_differ_in_what_is_trained_or_captured_are_not_folded_into_one() -> None:
    """Two of the inner stages are frozen; or apply their matrix again."""

    def times(count: int) -> Any:
        def stage(p: Any, x: Tensor) -> Tensor:
            for _ in range(count):
                x = torch.tanh(x @ p["w"])
            return x

        return stage

    batch = torch.empty(12, 8)
    frozen = lambda path, leaf: path not in ("1.w", "2.w")
    same_folded(lambda mesh: five_stages(mesh, trainable=frozen), batch)
    again = [times(1), times(1), times(3), times(1)]
    same_folded(lambda mesh: five_stages(mesh, again), batch)


@dataclass(frozen=True)
class Alike:
    """Stages of one function, except the last."""

    stage: int = 3
    num_stages: int = 7
    num_micro_batches: int = 8
    schedule: str = "1f1b"
    is_recomputed: bool = False
    bucket_bytes: int = 2**20

    def plan(self, *, fold: bool, **options: Any) -> Plan:
        inner = lambda p, x: torch.tanh(torch.tanh(x @ p["w"]) @ p["v"])
        inner = zf.remat(inner) if self.is_recomputed else inner
        last = lambda p, x: (x @ p["w"] @ p["v"]).square().mean()

        def make(mesh: Any) -> Any:
            stages = [*[inner] * (self.num_stages - 1), last]
            count = self.num_micro_batches
            loss = zf.pipeline(stages, mesh["pp"], self.schedule, num_micro_batches=count)
            rule = zf.optim.adamw(0.1)
            return zf.zero(self.stage, loss, rule, mesh["dp"], bucket_bytes=self.bucket_bytes)

        square = lambda: torch.empty(32, 32, device="meta")
        params = [{"w": square(), "v": square()} for _ in range(self.num_stages)]
        batch = torch.empty(2 * self.num_micro_batches, 32)
        sizes = {"pp": self.num_stages, "dp": 2}
        return zf.plan(make, params, batch, mesh=sizes, fold=fold, **options)


@pytest.mark.slow
def test_of_stages_that_are_alike_one_is_run_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stages = Alike().plan(fold=False).stages
    ended: list[int] = []
    plan_of = Observer.plan

    def observed(self: Observer, state: Any) -> Plan:
        ended.append(self.group.rank // 2)
        return plan_of(self, state)

    monkeypatch.setattr(Observer, "plan", observed)
    folded = Alike().plan(fold=True).stages
    # The last one of the inner stages runs as well, because cotangents of others come from it.
    assert sorted(ended) == [0, 4, 5, 6]
    for one, other in zip(folded, stages, strict=True):
        assert one == other


def test_a_plan_of_an_accelerator_counts_no_memory_of_leaves_on_other_ranks() -> None:
    plan = Alike().plan(fold=True, device="meta")
    assert plan.steady.device.work == 0
    assert plan.steady.device == Alike().plan(fold=True).steady.device


@pytest.mark.slow
@settings(max_examples=examples(3))
@given(
    alike=st.builds(
        Alike,
        stage=st.sampled_from([0, 1, 2, 3]),
        num_stages=st.integers(3, 8),
        num_micro_batches=st.integers(1, 10),
        schedule=st.sampled_from(["1f1b", "gpipe", "zero_bubble"]),
        is_recomputed=st.booleans(),
        bucket_bytes=st.sampled_from([1, 2**20]),
    )
)
def test_any_plan_of_stages_that_are_alike_is_that_of_each_stage(alike: Alike) -> None:
    folded, whole = alike.plan(fold=True), alike.plan(fold=False)
    for one, other in zip(folded.stages, whole.stages, strict=True):
        assert one == other
    assert folded == whole


def test_a_plan_along_an_axis_of_one_rank_needs_no_numbers() -> None:
    case = Case(sizes(pp=2, tp=2), stage=1, num_micro_batches=2)
    group = zf.collectives.abstract_group(4, 0)
    plan = zf.plan(
        case.recipe, case.params(), case.batch(), group, mesh=case.sizes, steps=1, device="meta"
    )
    assert plan.bytes_sent() == case.plan(0, 1).bytes_sent()


@pytest.mark.slow
def test_micro_batches_of_several_forms_are_not_folded() -> None:
    rows = [torch.empty(2, 8)] * 5 + [torch.empty(40, 8)]
    same_folded(five_stages, zf.transforms.MicroBatches(rows))


def test_a_forecast_of_a_pipeline_waits_for_all_parts_of_a_stage() -> None:
    machine = zf.planner.Hardware(flops_per_s=1e6, network=1e6, touch=1e6, op_s=1e-3)
    found = zf.plan(five_stages, STAGES, torch.empty(12, 8), mesh={"pp": 5, "dp": 1}).on(machine)
    assert found.bubble == pytest.approx(4 / 10)
    assert found.at_least_s >= found.compute_s / 0.6
    assert found.at_most_s == pytest.approx(sum(found[:6]) / 0.6)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--mesh", "dp=2,sp=3", "--length", "32"], "sp divides"),
        (["--stage", "3"], "--stage belong to a mesh"),
        (["--recomputed", "--micro-batches", "2"], "--micro-batches and --recomputed belong"),
    ],
)
def test_the_command_refuses_options_that_do_not_fit(
    words: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=16).save_pretrained(tmp_path)
    config = str(tmp_path / "config.json")
    assert cli.main(["plan", "--hf", config, "--ranks", "6", *words]) == 2
    assert error in capsys.readouterr().err
