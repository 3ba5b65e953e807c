"""Scripts with a ``PipelineModule``, beside one plain module with the same layers."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import zfun as zf
import zfun.interop.deepspeed as deepspeed
from tests.conftest import FORM
from zfun.errors import OptionError
from zfun.interop.deepspeed.pipe import (
    LayerSpec,
    PipeDataParallelTopology,
    PipelineError,
    PipelineModule,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
    ProcessTopology,
    TiedLayerSpec,
)
from zfun.interop.deepspeed.pipe._module import balanced
from zfun.interop.deepspeed.utils import set_random_seed

VOCABULARY, WIDTH, ROWS, MICRO, STEPS = 7, 4, 3, 4, 2
STAGES = (0, 1, 2, 3)
loss_of = nn.functional.cross_entropy


def head(module: Any, x: Tensor) -> Tensor:
    return x @ module.weight.T


class Pair(nn.Module):
    """Takes and returns a tuple, of which one tensor has no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        x, mask = x if isinstance(x, tuple) else (x, x[:, :1] > 0)
        return self.inner(x) * mask, mask


def embedding(**more: Any) -> TiedLayerSpec:
    return TiedLayerSpec("embed", nn.Embedding, VOCABULARY, WIDTH, dtype=torch.float64, **more)


def layers() -> list[Any]:
    """Specs, modules and functions; the first and the last one share a matrix."""
    return [
        embedding(),
        LayerSpec(nn.Linear, WIDTH, WIDTH, dtype=torch.float64),
        torch.tanh,
        nn.LayerNorm(WIDTH, dtype=torch.float64),
        embedding(forward_fn=head),
    ]


def wide() -> list[Any]:
    """Tuples go between the stages."""
    pairs = [LayerSpec(Pair, WIDTH) for _ in range(4)]
    return [LayerSpec(nn.Embedding, VOCABULARY, WIDTH), *pairs, lambda x: x[0].sum(1)]


def batch(number: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x, y = torch.randint(0, VOCABULARY, (2, ROWS), generator=generator)
    return x, y


def batches(rank: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    return (batch(number, rank) for number in range(first, 1000))


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": MICRO,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.05, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage},
        **more,
    }


def made(group: zf.Group, stage: int = 1, pp: int = 2, **options: Any) -> Any:
    more = options.pop("config", {})
    module = PipelineModule(
        options.pop("layers", layers)(),
        num_stages=pp,
        loss_fn=options.pop("loss_fn", loss_of),
        seed_layers=True,
        partition_method="uniform",
        group=group,
        **options,
    )
    return deepspeed.initialize(model=module, config=config(stage, **more))[0]


class Numbers(NamedTuple):
    losses: list[float]
    norm: float
    values: dict[str, Tensor]
    evaluated: float


def run(group: zf.Group, stage: int, pp: int, **options: Any) -> Numbers:
    engine = made(group, stage, pp, **options)
    rank = engine.grid.get_data_parallel_rank()
    data = batches(rank)
    losses = [float(engine.train_batch(data_iter=data)) for _ in range(STEPS)]
    evaluated = float(engine.eval_batch(batches(rank, 500)))
    assert (engine.global_steps, engine.is_first_stage()) == (STEPS, engine.stage_id == 0)
    norm = float(engine.get_global_grad_norm())
    return Numbers(losses, norm, engine.module_state_dict(), evaluated)


class Plain(nn.Module):
    """The layers in one module, with the same names and first values."""

    def __init__(self, specs: list[Any]) -> None:
        super().__init__()
        self.tied_modules = nn.ModuleDict()
        self.calls: list[Callable[[Any], Any]] = []
        for index, layer in enumerate(specs):
            set_random_seed(1234 + index)
            call = layer
            if isinstance(layer, TiedLayerSpec):
                if layer.key not in self.tied_modules:
                    self.tied_modules[layer.key] = layer.build()
                call = own = self.tied_modules[layer.key]
                if layer.forward_fn is not None:
                    call = functools.partial(layer.forward_fn, own)
            elif isinstance(layer, LayerSpec | nn.Module):
                call = layer.build() if isinstance(layer, LayerSpec) else layer
                self.add_module(str(index), call)
            self.calls.append(call)

    def forward(self, x: Any) -> Any:
        for call in self.calls:
            x = call(x)
        return x


@functools.cache
def plain(dp: int, make: Callable[[], list[Any]] = layers) -> Numbers:
    """The loop of one process, over the batches of all data ranks."""
    module = Plain(make())
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)
    losses, norm = [], 0.0
    for step in range(STEPS):
        loss = torch.zeros((), dtype=torch.float64)
        for number in range(step * MICRO, (step + 1) * MICRO):
            for rank in range(dp):
                x, y = batch(number, rank)
                loss = loss + loss_of(module(x), y) / (MICRO * dp)
        loss.backward()
        norm = float(nn.utils.clip_grad_norm_(module.parameters(), 0.5))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    with torch.no_grad():
        tests = [batch(500 + k, rank) for k in range(MICRO) for rank in range(dp)]
        evaluated = sum(float(loss_of(module(x), y)) for x, y in tests) / len(tests)
    return Numbers(losses, norm, module.state_dict(), evaluated)


def assert_is(found: Numbers, expected: Numbers, tolerance: float = 1e-12) -> None:
    close = functools.partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(found.losses, expected.losses)
    close(found.norm, expected.norm)
    assert found.values.keys() == expected.values.keys()
    for name, value in expected.values.items():
        close(found.values[name], value)
    # As in DeepSpeed, this loss is float32.
    assert found.evaluated == pytest.approx(expected.evaluated, rel=1e-6)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.shows(
    "`PipelineModule`, `LayerSpec`, `TiedLayerSpec`, `train_batch`, `eval_batch`",
    "right",
    "the numbers of one process, at every stage of ZeRO; DeepSpeed has 0 and 1",
)
def test_a_pipeline_has_the_numbers_of_one_process(stage: int) -> None:
    assert plain(2).losses[0] != plain(2).losses[1]
    for found in zf.simulate(4, functools.partial(run, stage=stage, pp=2)):
        assert_is(found, plain(2))


@pytest.mark.parametrize("pp", [1, 3])
def test_any_number_of_stages_gives_the_same_numbers(pp: int) -> None:
    for found in zf.simulate(pp, functools.partial(run, stage=1, pp=pp)):
        assert_is(found, plain(1))


@pytest.mark.parametrize("interval", [1, 2])
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputed_layers_with_tuples_change_no_number(stage: int, interval: int) -> None:
    more = {"config": {"pipeline": {"activation_checkpoint_interval": interval}}}
    options: dict[str, Any] = {"stage": stage, "pp": 2, "layers": wide, "loss_fn": float_loss}
    once = zf.simulate(2, functools.partial(run, **options))
    again = zf.simulate(2, functools.partial(run, **options, **more))
    for found, expected in zip(again, once, strict=True):
        assert_is(found, expected, 0.0)
    assert once[0].losses[0] != once[0].losses[1]


class Lone(nn.Module):
    """A layer whose input and output are tuples of one tensor."""

    def __init__(self, kind: type[nn.Module], *sizes: int) -> None:
        super().__init__()
        self.inner = kind(*sizes)

    def forward(self, x: tuple[Tensor]) -> tuple[Tensor]:
        assert isinstance(x, tuple)
        return (self.inner(*x),)


@pytest.mark.parametrize("pp", [1, 2])
def test_a_tuple_of_one_tensor_stays_a_tuple(pp: int) -> None:
    """A loader makes lists of tuples, of the labels too."""
    sizes = [(nn.Embedding, VOCABULARY, WIDTH), (nn.Linear, WIDTH, VOCABULARY)]

    def main(group: zf.Group) -> float:
        engine = made(
            group,
            pp=pp,
            layers=lambda: [LayerSpec(Lone, *x) for x in sizes],
            loss_fn=lambda out, label: loss_of(*out, *label) if type(label) is tuple else None,
        )
        return float(engine.train_batch(([x], [y]) for x, y in batches(0)))

    module = Plain([LayerSpec(*x) for x in sizes])
    pairs = [batch(number, 0) for number in range(MICRO)]
    with torch.no_grad():
        expected = float(sum(loss_of(module(x), y) for x, y in pairs)) / MICRO
    assert zf.simulate(pp, main) == pytest.approx([expected] * pp, rel=1e-5)


class Seen(nn.Module):
    """Marks what it has seen, on the rank that writes."""

    writes = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Embedding(VOCABULARY, VOCABULARY)
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(VOCABULARY, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.writes:
            self.seen[x] = True
        return self.inner(x)


def test_a_mask_that_one_rank_writes_in_a_step_is_that_of_all_ranks() -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, pp=1, layers=lambda: [LayerSpec(Seen)])
        layer, data, seen = engine.module.get_submodule("0"), batches(group.rank), set()
        layer.writes = group.rank == 0
        for step in range(STEPS):
            engine.train_batch(data)
            for k in range(MICRO):
                seen |= {*batch(step * MICRO + k, 0)[0].tolist()}
            assert {*layer.seen.nonzero().flatten().tolist()} == seen

    zf.simulate(2, main)


def float_loss(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).square().mean()


def test_a_checkpoint_goes_on_with_other_stages(tmp_path: Path) -> None:
    """Two steps before and one after; the state crosses to another number of stages."""

    def first(group: zf.Group) -> Any:
        engine = made(group, 1, 2)
        data = batches(engine.grid.get_data_parallel_rank())
        for _ in range(2):
            engine.train_batch(data)
        engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
        return float(engine.train_batch(data)), engine.module_state_dict()

    def second(group: zf.Group, pp: int, stage: int) -> Any:
        engine = made(group, stage, pp)
        path, client = engine.load_checkpoint(tmp_path)
        assert path is not None
        assert (client, engine.global_steps) == ({"epoch": 1}, 2)
        data = batches(engine.grid.get_data_parallel_rank(), 2 * MICRO)
        return float(engine.train_batch(data)), engine.module_state_dict()

    (loss, values), *_ = zf.simulate(4, first)
    others = [(1, 3, 2)] if FORM == "everyday" else [(1, 3, 2), (2, 0, 4), (2, 3, 4)]
    for pp, stage, ranks in others:
        for found, own in zf.simulate(ranks, functools.partial(second, pp=pp, stage=stage)):
            torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(own, values, rtol=1e-12, atol=1e-12)
    weights = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    assert weights.keys() == values.keys()


def test_weights_of_all_stages_load_into_their_layers() -> None:
    def main(group: zf.Group) -> Any:
        engine = made(group)
        weights = {name: x + 1 for name, x in engine.module_state_dict().items()}
        engine.load_module_state_dict(weights)
        torch.testing.assert_close(engine.module_state_dict(), weights, rtol=0, atol=0)
        with pytest.raises(zf.errors.SpecMismatch, match="unknown are"):
            engine.load_module_state_dict({**weights, "9.weight": torch.ones(1)})

    zf.simulate(2, main)


def test_evaluation_returns_losses_outputs_and_logits() -> None:
    def main(group: zf.Group) -> None:
        engine = made(group, 3)
        data = batches(0)
        engine.train_batch(data)
        mean, logits = engine.eval_batch(batches(0, 50), return_logits=True)
        each = engine.eval_batch(batches(0, 50), reduce_output=None)
        out = engine.eval_batch(batches(0, 50), compute_loss=False, num_micro_batches=1)
        lone = engine.eval_batch(batches(0, 50), bcast_loss=False)
        assert not engine.module.training
        assert engine.mpu is engine.grid
        own = [tuple(p.shape) for p in engine.module.parameters()]
        moments = engine.optimizer.state_dict()["state"].values()
        assert [tuple(entry["exp_avg"].shape) for entry in moments] == own
        if engine.is_last_stage():
            assert len(each) == MICRO
            assert float(mean) == pytest.approx(float(sum(each) / MICRO), rel=1e-6)
            assert float(mean) == float(lone.float())
            assert logits.shape == out.shape == (ROWS, VOCABULARY)
        else:
            assert (logits, each, out, lone) == (None, None, None, None)
        # Training goes on with its own iterator.
        engine.train_batch()
        assert next(data)[0].equal(batch(2 * MICRO, 0)[0]) == (engine.num_stages == 2)

    zf.simulate(2, main)


def test_a_script_of_the_tutorial_runs() -> None:
    """An image model as a list of layers, with training data, as in public tutorials."""

    def net() -> list[Any]:
        return [
            LayerSpec(nn.Conv2d, 3, 4, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            LayerSpec(nn.MaxPool2d, kernel_size=2),
            LayerSpec(nn.Conv2d, 4, 4, kernel_size=3, padding=1),
            nn.ReLU(inplace=True),
            lambda x: torch.flatten(x, 1),
            LayerSpec(nn.Dropout, 0.0),
            LayerSpec(nn.Linear, 64, 10),
        ]

    images = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(images, torch.arange(48) % 10)

    def main(group: zf.Group) -> list[float]:
        module = PipelineModule(
            layers=net(),
            loss_fn=nn.CrossEntropyLoss(),
            num_stages=2,
            partition_method="parameters",
            activation_checkpoint_interval=0,
            seed_layers=True,
            group=group,
        )
        engine, _, loader, _ = deepspeed.initialize(
            model=module,
            model_parameters=[p for p in module.parameters() if p.requires_grad],
            training_data=data,
            config={
                "train_batch_size": 16,
                "train_micro_batch_size_per_gpu": 2,
                "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
                "gradient_clipping": 0.0,
            },
        )
        assert loader is not None
        return [float(engine.train_batch()) for _ in range(4)]

    plain = Plain(net())
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    expected = []
    for step in range(4):
        # The fourth step begins again.
        rows = slice(step % 3 * 16, (step % 3 + 1) * 16)
        loss = loss_of(plain(images[rows]), data.tensors[1][rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(float(loss.detach()))
    for losses in zf.simulate(4, main):
        assert losses == pytest.approx(expected, rel=1e-5)
    assert expected[3] < expected[0]


def test_other_labels_on_the_last_stage_are_refused() -> None:
    def main(group: zf.Group) -> None:
        engine = made(group)
        engine.train_batch(batches(0))
        with pytest.raises(OptionError, match="other labels on stage 0 than on stage 1"):
            engine.eval_batch(batches(engine.stage_id))
        with pytest.raises(OptionError, match="other labels on stage 0 than on stage 1"):
            made(group).train_batch(batches(engine.stage_id))

    zf.simulate(2, main)


def test_a_stage_between_reads_no_data() -> None:
    def main(group: zf.Group) -> float:
        engine = made(group, pp=3)
        return float(engine.train_batch(None if engine.stage_id == 1 else batches(0)))

    assert len({*zf.simulate(3, main)}) == 1


CALLS: dict[str, Callable[[Any], Any]] = {
    "forward": lambda engine: engine(torch.zeros(1, dtype=torch.long)),
    "backward": lambda engine: engine.backward(torch.zeros(())),
    "step": lambda engine: engine.step(),
    "no_sync": lambda engine: engine.no_sync(),
}


@pytest.mark.shows(
    "`engine(x)`, `backward` and `step` of a pipeline", "refused", "call `train_batch`"
)
def test_calls_of_other_engines_are_refused() -> None:
    def main(group: zf.Group) -> None:
        engine = made(group)
        for name, call in CALLS.items():
            with pytest.raises(PipelineError, match=rf"got {name}\(\); call train_batch"):
                call(engine)
        with torch.no_grad(), pytest.raises(OptionError, match="use eval_batch"):
            engine.train_batch(batches(0))
        with pytest.raises(PipelineError, match=r"size\(48\) for 12; .* another gradient_acc"):
            engine.set_train_batch_size(12 * MICRO)
        engine.set_train_batch_size(engine.train_batch_size())
        with pytest.raises(OptionError, match="got no iterator on stage"):
            engine.train_batch()

    zf.simulate(2, main)


CHANGES: dict[str, tuple[Callable[[PipelineModule, int], Any], str]] = {
    "cast": (
        lambda module, stage: module.float() if stage else None,
        "got torch.float32 for leaf '[a-z0-9_.]+', which was torch.float64",
    ),
    "frozen": (
        lambda module, stage: module.requires_grad_(not stage),
        "got none that requires a gradient on stage 1",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_module_that_has_changed_on_a_stage_is_refused_on_all(name: str) -> None:
    change, message = CHANGES[name]

    def main(group: zf.Group) -> None:
        own = [LayerSpec(nn.Linear, 2, 2), LayerSpec(nn.Linear, 2, 2)] if name == "frozen" else None
        module = PipelineModule(own or layers(), 2, partition_method="uniform", group=group)
        change(module, module.stage_id)
        with pytest.raises(OptionError, match=message):
            deepspeed.initialize(model=module, config=config(1))

    zf.simulate(2, main)


SHARED = nn.Linear(WIDTH, WIDTH)
# Options that are refused before ranks wait for each other, and a part of the message.
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "three stages": ({"num_stages": 3}, "got num_stages=3 for 2 ranks"),
    "no stages": ({"num_stages": None}, "got num_stages=None"),
    "shapes": ({"dynamic_shape": True}, "reset_activation_shape"),
    "method": ({"partition_method": "profile"}, "got 'profile'"),
    "type": ({"partition_method": "type:none"}, "got 'type:none'"),
    "no parameter": ({"layers": [nn.Linear(1, 1), torch.tanh]}, "for stage 1, which have none"),
    "one module": ({"layers": [SHARED, SHARED]}, "leaf '1.weight' of a module in two stages"),
    "keys": (
        {"layers": [embedding(), TiedLayerSpec("embed", nn.Embedding, 2, 2)]},
        r"got \(7, 4\) and \(2, 2\) for leaf 'tied_modules.embed.weight'",
    ),
    "buffers": (
        {"layers": [TiedLayerSpec("norm", nn.BatchNorm1d, 2) for _ in range(2)]},
        "got buffer 'running_mean' in the module of key 'norm'",
    ),
    "model": ({"topology": PipeModelDataParallelTopology(1, 2, 1)}, "'model': 2"),
    "no pipe": ({"topology": ProcessTopology(["data", "x"], [2, 1])}, "'data': 2, 'x': 1"),
    "places": ({"topology": PipeDataParallelTopology(2, 2)}, "for 2 ranks"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.shows(
    "a pipeline that zfun cannot follow, such as one with model parallel ranks",
    "refused",
    "when the `PipelineModule` is made",
)
def test_a_wrong_pipeline_is_refused(name: str) -> None:
    options, message = WRONG[name]

    def main(group: zf.Group) -> None:
        given: dict[str, Any] = {"layers": layers(), "num_stages": 2, **options}
        with pytest.raises(OptionError, match=message):
            PipelineModule(**given, group=group)

    zf.simulate(2, main)


def test_parts_are_those_of_deepspeed() -> None:
    """The numbers of DeepSpeed 0.19.8."""
    assert balanced([10, 20, 30, 40, 50], 2) == [0, 3, 5]
    assert balanced([0, 5, 5, 1, 0, 9, 2], 3) == [0, 2, 5, 7]
    assert balanced([1, 0, 1, 0, 1, 0, 1, 0], 4) == [0, 2, 4, 6, 8]
    linear = lambda *sizes: LayerSpec(nn.Linear, *sizes)
    parts = lambda layers, method: PipelineModule(layers, 1, partition_method=method).parts
    assert parts([linear(1, 1)] * 5, "uniform") == [0, 5]

    def main(group: zf.Group) -> list[list[int]]:
        own = [linear(9, 9), torch.tanh, linear(2, 2), nn.LayerNorm(2), linear(2, 2), nn.ReLU()]
        methods = ["uniform", "parameters", "type:linear", "type:Linear|Norm"]
        made = [PipelineModule(own, 2, partition_method=x, group=group) for x in methods]
        return [module.parts for module in made]

    expected = [[0, 3, 6], [0, 2, 6], [0, 4, 6], [0, 3, 6]]
    assert zf.simulate(2, main) == [expected] * 2


def test_a_grid_has_the_groups_of_a_topology() -> None:
    topology = ProcessTopology(axes=["data", "pipe"], dims=[2, 3])

    def main(group: zf.Group) -> None:
        grid: Any = PipelineParallelGrid(topology, group)
        place = topology.get_coord(group.rank)
        assert (grid.get_stage_id(), grid.get_data_parallel_id()) == (place.pipe, place.data)
        assert grid.stage_to_global(2) == topology.get_rank(data=place.data, pipe=2)
        assert grid.get_pipe_parallel_world_size() == grid.get_pipe_parallel_group().size == 3
        assert grid.get_data_parallel_world_size() == grid.get_data_parallel_group().size == 2
        assert (grid.get_model_parallel_rank(), grid.get_model_parallel_world_size()) == (0, 1)

    zf.simulate(6, main)
    three = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2)
    assert three.get_axis_comm_lists("pipe") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert three.get_axis_list("data", 1) == [2, 3, 6, 7]
    assert (three.get_rank_repr(3), three.get_dim("model"), three.get_dim("x")) == (
        "model_01",
        2,
        0,
    )
    with pytest.raises(ValueError, match="use filter_match"):
        three.get_rank(pipe=0)


@pytest.mark.parametrize("kind", ["model", "pipe", "sequence", "context", "tensor_model"])
@pytest.mark.shows(
    "`mpu` with ranks that share layers or sequences, `autotp_size`, `sequence_parallel_size`",
    "refused",
    "norm, clipping and skipped steps would count each rank's part alone",
)
def test_ranks_that_share_layers_are_refused(kind: str) -> None:
    def main(group: zf.Group, size: int) -> Any:
        mpu = types.SimpleNamespace(
            get_data_parallel_group=lambda: group,
            **{f"get_{kind}_parallel_world_size": lambda: size},
        )
        return deepspeed.initialize(model=nn.Linear(2, 2), config=config(2), mpu=mpu)

    zf.simulate(2, functools.partial(main, size=1))
    with pytest.raises(OptionError, match=rf"get_{kind}_parallel_world_size\(\) 2; "):
        zf.simulate(2, functools.partial(main, size=2))


def test_a_pipeline_counts_as_deepspeed_and_ends_its_own_steps() -> None:
    def main(group: zf.Group) -> None:
        engine = made(group)
        engine.train_batch(batches(0))
        assert (engine.global_steps, engine.micro_steps) == (1, 0)
        assert engine.global_samples == ROWS * MICRO
        assert engine.data_parallel_group is engine.grid.get_data_parallel_group()
        with pytest.raises(OptionError, match="got managed_gradient_accumulation false"):
            made(group, config={"managed_gradient_accumulation": False})

    zf.simulate(2, main)


@pytest.mark.parametrize(
    "section", [{"tensor_parallel": {"autotp_size": 2}}, {"sequence_parallel_size": 2}], ids=str
)
def test_an_engine_refuses_axes_of_a_configuration(section: dict[str, Any]) -> None:
    with pytest.raises(OptionError, match=r"got \S+_size 2; leave it out, as stage 3"):
        deepspeed.initialize(model=nn.Linear(2, 2), config=config(3, **section))
