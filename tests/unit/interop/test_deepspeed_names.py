"""The names of DeepSpeed that need no engine, and the names that are not there."""

from __future__ import annotations

import ast
import contextlib
import copy
import functools
import importlib
import random
import runpy
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import zfun as zf
from tests.interop.deepspeed_runs import (
    ADAMW,
    WARMUP,
    WIDTH,
    batch,
    config,
    net,
    ranks,
    run,
    trained,
)
from zfun.errors import ConfigError, OptionError, PlacementError
from zfun.interop import deepspeed
from zfun.interop.deepspeed._absent import ABSENT, ABSENT_MODULES
from zfun.interop.deepspeed._finder import HOMES, SITE
from zfun.interop.deepspeed.launcher.runner import Start, parse_args, start_of
from zfun.interop.deepspeed.runtime.zero._stand_ins import Partitioned
from zfun.planner.formulae import estimate_zero2, estimate_zero3, sizes_of


@pytest.mark.shows(
    "a write to a parameter in pieces, outside of `GatheredParameters`",
    "refused",
    "DeepSpeed shows an empty tensor, and loses writes",
)
def test_gathered_parameters_show_values_and_take_those_of_one_rank() -> None:
    gathered = deepspeed.zero.GatheredParameters

    def main(group: zf.Group) -> None:
        with deepspeed.zero.Init(data_parallel_group=group, dtype=torch.bfloat16):
            model = net()
        weight = model.first.weight
        assert weight.dtype is torch.bfloat16
        scale = model.scale
        for alone in (
            weight.data.normal_,
            lambda: nn.init.ones_(scale),
            lambda: scale.data.fill_(1.0),
            lambda: setattr(scale, "data", torch.ones(3)),
            scale.detach()[0].zero_,
            scale.data_ptr,
            model.half,
        ):
            with pytest.raises(PlacementError, match=r"one of shape \(.*\)(.|\n)*Gathered"):
                alone()
        assert model.to(torch.bfloat16) is model
        assert model.state_dict()["scale"].shape == scale.data.shape == (3,)
        copied = copy.deepcopy(model)
        with gathered(weight):
            assert copied.first.weight.equal(weight)
        with gathered([weight, model.scale], modifier_rank=1):
            assert not weight.isnan().any()
            with gathered(weight):  # inside of another context
                assert not weight.isnan().any()
            weight.data.fill_(float(group.rank))
        with gathered(weight):
            assert weight.unique().tolist() == [1.0]
        with (
            pytest.raises(OptionError, match=r"without one; pass modifier_rank=0"),
            gathered(weight),
        ):
            weight.data.zero_()
        with (
            pytest.raises(OptionError, match=r"one of the ranks .* got 7"),
            gathered(weight, modifier_rank=7),
        ):
            pytest.fail("nothing was gathered")

    zf.simulate(2, main)


FIXTURES = Path(__file__).parents[2] / "fixtures" / "deepspeed"


@pytest.mark.parametrize("name", ["stage1-fp32", "stage2-bf16", "stage3-bf16"])
def test_zero_to_fp32_reads_what_deepspeed_wrote(name: str) -> None:
    found = deepspeed.utils.zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(FIXTURES / name)
    expected = zf.sources.deepspeed(FIXTURES / name)
    assert set(expected.params) <= set(found)
    for key, leaf in expected.params.items():
        assert torch.equal(found[key], leaf.load().float())


# Those of the engine and its optimizer are attributes of objects, which other tests make.
@pytest.mark.parametrize("module", sorted(set(ABSENT) - {"engine", "engine.optimizer"}))
def test_a_name_that_is_not_there_says_what_to_use(module: str) -> None:
    parts = {
        "zero": "runtime.zero",
        "groups": "utils.groups",
        "config": "runtime.config",
        "checkpointing": "runtime.checkpointing",
    }.get(module, module)
    found = importlib.import_module(f"zfun.interop.deepspeed.{parts}".rstrip("."))
    for name, remedy in ABSENT[module].items():
        names: dict[str, Any] = {}
        exec(f"from {found.__name__} import {name}", names)
        with pytest.raises(OptionError, match=name) as error:
            names[name]()
        assert str(error.value).endswith(remedy)
    with pytest.raises(AttributeError, match=r"which is not there"):
        found.no_such_name  # noqa: B018
    with pytest.raises(ImportError, match=r"no_such_name"):
        exec(f"from {found.__name__} import no_such_name")


@pytest.mark.parametrize("module", sorted(ABSENT_MODULES))
def test_a_module_that_is_not_there_has_placeholders(module: str) -> None:
    found = importlib.import_module(f"zfun.interop.deepspeed.{module}")
    with pytest.raises(OptionError, match=r"got deepspeed\..*Some.* is not there; ") as error:
        found.Some()
    assert str(error.value).endswith(ABSENT_MODULES[module])
    assert not hasattr(found, "__wrapped__")


@pytest.mark.slow
def test_every_public_function_and_class_of_deepspeed_imports(deepspeed_source: Path) -> None:
    """A script imports more than it uses, also what only DeepSpeed itself needs."""
    missing, count = [], 0
    for path in sorted(deepspeed_source.rglob("*.py")):
        module = ".".join(path.relative_to(deepspeed_source).with_suffix("").parts).removesuffix(
            "__init__"
        )
        found = f"zfun.interop.deepspeed.{module}".rstrip(".")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                count += 1
                try:
                    exec(f"from {found} import {node.name}", {})
                except ImportError:
                    missing.append(f"{found}.{node.name}")
    assert count > 1000
    assert missing == []


@pytest.mark.shows(
    "names that are not there",
    "refused",
    "when they are used; they import, and `isinstance` is false",
)
def test_a_placeholder_is_no_ones_class_and_raises_when_used() -> None:
    absent = deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3
    assert absent is deepspeed.zero.DeepSpeedZeroOptimizer_Stage3
    optimizer = torch.optim.SGD([torch.zeros(1)])
    assert not isinstance(optimizer, absent)
    assert not isinstance(optimizer, (absent, str))
    assert not issubclass(torch.optim.SGD, absent)
    assert str(absent | None)  # an annotation
    uses: list[Any] = [
        absent,
        lambda: absent.attribute,
        lambda: absent[0],
        lambda: list(absent),
        lambda: type("Own", (absent,), {}),
        lambda: type("Own", (torch.nn.Module, absent), {}),
        lambda: contextlib.ExitStack().enter_context(absent),
    ]
    for use in uses:
        with pytest.raises(OptionError, match=r"DeepSpeedZeroOptimizer_Stage3.*engine.optimizer"):
            use()


def test_modules_that_deepspeed_does_not_have_are_not_found() -> None:
    for name in ("nonsense", "runtime.nonsense", "ops.adam.nonsense"):
        with pytest.raises(ImportError, match="nonsense"):
            importlib.import_module(f"zfun.interop.deepspeed.{name}")


@pytest.mark.parametrize("name", sorted(HOMES))
def test_a_second_name_of_a_module_is_the_same_module(name: str) -> None:
    home = importlib.import_module(f"zfun.interop.deepspeed.{HOMES[name]}".rstrip("."))
    assert importlib.import_module(f"zfun.interop.deepspeed.{name}") is home
    assert home.__spec__ is not None
    assert home.__spec__.name == home.__name__
    assert functools.reduce(getattr, name.split("."), deepspeed) is home


def test_a_second_name_of_a_module_hides_no_global_of_another() -> None:
    """Python writes a module that is imported into the module above it."""
    for name in {*HOMES, *ABSENT_MODULES}:
        above, _, last = name.rpartition(".")
        parent = importlib.import_module(f"zfun.interop.deepspeed.{above}".rstrip("."))
        if parent.__spec__ is None or parent.__spec__.origin is None:
            continue
        tree = ast.parse(Path(parent.__spec__.origin).read_text(encoding="utf-8"))
        loaded = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        }
        imported = importlib.import_module(f"zfun.interop.deepspeed.{name}")
        assert last not in loaded or vars(parent)[last] is imported, name


def test_the_utilities_are_those_of_deepspeed_alone() -> None:
    utils: Any = deepspeed.utils
    assert callable(utils.safe_get_full_grad)
    assert utils.z3_leaf_module(nn.Linear(1, 1)) is False
    assert not {"Engine", "Flat", "S", "stores", "unshard"} & vars(utils).keys()


@pytest.mark.parametrize("place", ["full", "local"])
@pytest.mark.parametrize("kind", ["fp32_param", "grad", "optimizer_state"])
def test_the_name_of_a_moment_is_for_functions_of_moments(place: str, kind: str) -> None:
    param, has_key = nn.Parameter(torch.ones(2)), kind == "optimizer_state"
    get, set_ = (getattr(deepspeed.utils, f"safe_{x}_{place}_{kind}") for x in ("get", "set"))
    for key in ("", "exp_avg"):
        refused = pytest.raises(TypeError, match=rf"{key!r} in safe_get_{place}_{kind}\(\)")
        with contextlib.nullcontext() if bool(key) == has_key else refused:
            assert get(param, key) is None
        wanted = OptionError if bool(key) == has_key else TypeError
        with pytest.raises(wanted, match=rf"safe_set_{place}_{kind}\(\)"):
            set_(param, torch.ones(2), key)


def test_the_nearest_name_is_named() -> None:
    untyped: Any = deepspeed
    with pytest.raises(AttributeError, match=r"did you mean 'initialize'\?"):
        untyped.initialise  # noqa: B018
    assert not hasattr(deepspeed, "__wrapped__")


def test_the_estimators_print_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    stage3, stage_1_and_2 = (deepspeed.runtime.zero,) * 2
    model = net()
    numel, largest = sizes_of(model)
    stage3.estimate_zero3_model_states_mem_needs_all_live(model, 8, 2)
    assert capsys.readouterr().out.rstrip("\n") == str(
        estimate_zero3(numel, largest, gpus_per_node=8, num_nodes=2)
    )
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(model, 8, 2)
    assert capsys.readouterr().out.rstrip("\n") == str(
        estimate_zero2(numel, gpus_per_node=8, num_nodes=2)
    )


def test_schedules_write_the_rates_of_the_configuration() -> None:
    def rates(scheduler: Any, optimizer: torch.optim.Optimizer) -> list[float]:
        found = []
        for _ in range(8):
            found.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
        return found

    schedules = deepspeed.lr_schedules
    optimizer = torch.optim.AdamW(net().parameters(), lr=0.5)
    cosine = schedules.WarmupCosineLR(optimizer, 8, warmup_num_steps=2)
    found = rates(cosine, optimizer)
    assert found[0] == 0.0
    assert max(found) == pytest.approx(0.5, rel=0.2)
    state = cosine.state_dict()
    assert state == {"last_batch_iteration": 7}
    cosine.load_state_dict({"last_batch_iteration": 2})
    cosine.step()
    assert cosine.get_last_lr() == [found[4]]
    optimizer = torch.optim.AdamW(net().parameters(), lr=0.5)
    schedules.OneCycle(optimizer, 0.0, 1.0, cycle_first_step_size=4)
    assert optimizer.param_groups[0]["betas"][1] == 0.99
    with pytest.raises(ConfigError, match="warmup_num_stpes"):
        schedules.WarmupLR(optimizer, warmup_num_stpes=3)


def test_a_group_that_is_added_later_keeps_its_own_rate() -> None:
    optimizer = torch.optim.AdamW(net().parameters(), lr=0.5)
    rise = deepspeed.lr_schedules.WarmupLR(optimizer, 0.0, 0.5, 4, "linear")
    added = {"params": [nn.Parameter(torch.ones(2))], "lr": 0.25}
    optimizer.add_param_group(added)
    for _ in range(3):
        rise.step()
    assert rise.get_lr() == [0.25, 0.25]
    added["lr"] = 0.125
    rise.step()
    assert rise.get_lr() == [0.375, 0.125]


@pytest.mark.shows(
    "`zero.Init`", "right", "values, ties and buffers of a whole model, and values of rank 0"
)
def test_a_model_made_in_pieces_has_the_values_ties_and_buffers_of_a_whole_one() -> None:
    class Model(nn.Module):
        """Writes its layers at the end, as models of transformers do, through views too."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = net(), nn.Linear(8, 8, bias=False)
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(20))
            self.register_buffer("scale", torch.full((2,), 3.0))
            self.apply(self.write)
            row = self.first.first.weight[2]
            row.data.zero_()
            self.last.weight = self.first.first.weight

        def write(self, module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                module.weight.data[0] += 1.0

    def main(group: zf.Group) -> None:
        generator = torch.Generator().manual_seed(group.rank)
        shift = torch.rand((), generator=generator)
        with deepspeed.zero.Init(data_parallel_group=group):
            model = Model()
            cast(nn.Linear, model.layers[3]).weight.data += shift
        assert all(isinstance(p, Partitioned) for p in model.parameters())
        assert model.last.weight is model.first.first.weight
        assert model.scale.tolist() == [3.0, 3.0]
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            found = {name: p.detach().clone() for name, p in model.named_parameters()}
        assert found["first.first.weight"][2].count_nonzero() == 0
        assert all(found[f"layers.{i}.weight"][0].mean() > 0.9 for i in range(20))
        values = torch.cat([x.reshape(-1) for x in found.values()])
        everywhere = zf.collectives.all_gather(values, group)
        assert torch.equal(everywhere, values.repeat(group.size))

    zf.simulate(2, main)
    torch.manual_seed(1)
    plain = Model()
    torch.manual_seed(1)
    with deepspeed.zero.Init(data_parallel_group=zf.collectives.single_group()):
        model = Model()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        for one, other in zip(plain.parameters(), model.parameters(), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"bf16": None}, "bf16"),
        ({"bf16": {"enabled": "maybe"}}, "bf16.enabled"),
        ({"fp16": {"enable": True}}, "fp16.enable"),
        ({"zero_optimization": None}, "zero_optimization"),
        (
            {"zero_optimization": {"offload_param": {"device": "nvmee"}}},
            "zero_optimization.offload_param.device",
        ),
    ],
)
def test_a_mistake_that_decides_how_a_model_is_made_is_refused(section: Any, path: str) -> None:
    with pytest.raises(ConfigError) as error:
        deepspeed.zero.Init(config_dict_or_path=section)
    assert [one.path for one in error.value.mistakes] == [path]
    # initialize() tells the other mistakes.
    deepspeed.zero.Init(config_dict_or_path={"optimizer": {"type": "nonsense"}})


def test_simulated_ranks_make_modules_side_by_side() -> None:
    def main(group: zf.Group) -> Any:
        for _ in range(20):
            with deepspeed.zero.Init(data_parallel_group=group):
                model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(10)])
        return sum(isinstance(param, Partitioned) for param in model.parameters())

    assert zf.simulate(4, main) == [20] * 4


def test_a_view_that_is_written_too_late_is_refused() -> None:
    context = deepspeed.zero.Init(data_parallel_group=zf.collectives.single_group())
    context.__enter__()
    layers = [nn.Linear(2, 2) for _ in range(20)]
    nn.Sequential(nn.Sequential(*layers))
    view = layers[0].weight[0]
    for layer in layers:
        layer.weight.data.mul_(2.0)
    view.data.fill_(1.0)
    with pytest.raises(OptionError, match=r"holds for the next 16 .* shape \(2, 2\)"):
        context.__exit__(None, None, None)


def test_optimizers_of_ops_step_alone_as_those_of_torch() -> None:
    from zfun.interop.deepspeed.ops.adagrad import DeepSpeedCPUAdagrad  # pyrefly: ignore[missing-import]
    from zfun.interop.deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # pyrefly: ignore[missing-import]
    from zfun.interop.deepspeed.ops.lamb import FusedLamb  # pyrefly: ignore[missing-import]
    from zfun.interop.deepspeed.ops.lion import FusedLion  # pyrefly: ignore[missing-import]

    kinds: list[tuple[Any, Any]] = [
        (FusedAdam, lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.2)),
        (DeepSpeedCPUAdam, lambda params: torch.optim.AdamW(params, 0.1, weight_decay=0.2)),
        (
            functools.partial(FusedAdam, adam_w_mode=False),
            lambda params: torch.optim.Adam(params, 0.1, weight_decay=0.2),
        ),
        (DeepSpeedCPUAdagrad, lambda params: torch.optim.Adagrad(params, 0.1, weight_decay=0.2)),
    ]

    def steps(make: Any, model: nn.Module, resume: bool = False) -> list[Tensor]:
        optimizer = make(model.parameters())
        before = [p.detach().clone() for p in model.parameters()]
        for step in range(4):
            if resume and step == 2:
                saved = optimizer.state_dict()
                optimizer = make(model.parameters())
                optimizer.load_state_dict(saved)
            optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
            optimizer.zero_grad()
            model(torch.ones(2, 8) * step).square().sum().backward()
            optimizer.step()
        return [p.detach() - x for p, x in zip(model.parameters(), before, strict=True)]

    for make, torchs in kinds:
        ours = functools.partial(make, lr=0.1, weight_decay=0.2)
        for resume in (False, True):
            found, wanted = steps(ours, net(), resume), steps(torchs, net())
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    for make in (FusedLamb, FusedLion):
        assert all(x.any() for x in steps(make, net()))
    moved = net()
    used = FusedAdam(moved.parameters(), weight_decay=0.5)
    moved.first(torch.ones(1, 8)).sum().backward()
    before = moved.scale.detach().clone()
    used.step()
    assert torch.equal(moved.scale, before)  # without a gradient there is no decay
    with pytest.raises(OptionError, match=r"DeepSpeedCPUAdam has amsgrad=False only; got True"):
        DeepSpeedCPUAdam(torch.optim.AdamW(net().parameters(), amsgrad=True).param_groups)
    one_bit = deepspeed.ops.OnebitAdam(moved.parameters())
    with pytest.raises(OptionError, match=r"compresses the gradients .* engine.step\(\)"):
        one_bit.step()


def test_the_accelerator_answers_every_question() -> None:
    here = deepspeed.get_accelerator()
    numbers = (
        "memory_allocated max_memory_allocated memory_cached max_memory_cached memory_reserved "
        "max_memory_reserved total_memory available_memory device_count"
    )
    for name in numbers.split():
        assert getattr(here, name)() > 0, name
    nothing = (
        "synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated "
        "reset_max_memory_cached range_pop current_stream default_stream"
    )
    for name in nothing.split():
        getattr(here, name)()
    for name in ("is_synchronized_device", "use_host_timers", "resolves_data_dependency"):
        assert getattr(here, name)() is not torch.cuda.is_available()
    here.range_push("block")
    for make, dtype in (("FloatTensor", torch.float32), ("LongTensor", torch.int64)):
        made = getattr(here, make)([1, 2])
        assert made.dtype is dtype
        assert made.tolist() == [1, 2]
        assert here.on_accelerator(made)
    assert here.BFloat16Tensor(2, 3).shape == (2, 3)
    state = here.get_rng_state()
    first = torch.rand(2, device=here.current_device_name())
    here.set_rng_state(state)
    assert torch.equal(torch.rand(2, device=here.current_device_name()), first)
    with here.stream(here.current_stream()), here.device(0), here.capture_to_graph(None):
        assert here.lazy_call(lambda: 7) == 7
    variables: dict[str, str] = {}
    here.set_visible_devices_envs(variables, [0, 2])
    assert variables == {here.visible_devices_envs()[0]: "0,2"}
    assert here.pin_memory(first).shape == first.shape
    assert torch.float32 in here.supported_dtypes()


def test_collectives_take_the_arguments_of_both_libraries() -> None:
    comm = deepspeed.comm
    assert comm.ReduceOp is torch.distributed.ReduceOp
    assert comm.get_all_ranks_from_group() == [0]
    deepspeed.init_distributed()
    try:
        x = torch.arange(3.0)
        comm.all_reduce(tensor=x, prof=True, log_name="mine", debug="here")
        out, again = torch.empty(3), torch.empty(3)
        comm.all_gather_into_tensor(output_tensor=out, tensor=x)
        comm.reduce_scatter_fn(again, out)
        assert out.tolist() == again.tolist() == [0.0, 1.0, 2.0]
        pairs = [torch.empty(2), torch.empty(3)], [torch.ones(2), x]
        comm.all_gather_coalesced(*pairs)
        assert [y.tolist() for y in pairs[0]] == [y.tolist() for y in pairs[1]]
        comm.all_gather_coalesced(*pairs, group=comm.get_world_group(), async_op=True).wait()
        comm.barrier(log_name="end")
        assert comm.get_global_rank(comm.get_world_group(), 0) == 0
        assert comm.log_summary(return_dict=True) == {}
        groups = deepspeed.utils.groups
        assert groups._get_data_parallel_world_size() == 1
        assert groups._get_sequence_parallel_rank() == 0
        with pytest.raises(OptionError, match=r"_get_sequence_parallel_group"):
            groups._get_sequence_parallel_group()
    finally:
        comm.destroy_process_group()


def test_a_configuration_has_its_values_as_attributes() -> None:
    keys = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 3,
        "fp16": {"enabled": True, "loss_scale_window": 7},
        "optimizer": {"type": "Adam", "params": {"lr": 0.5}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": "auto",
    }
    mpu = SimpleNamespace(get_data_parallel_world_size=lambda: 2)
    found = deepspeed.DeepSpeedConfig(keys, mpu)
    assert (found.train_micro_batch_size_per_gpu, found.world_size) == (2, 2)
    assert (found.fp16_enabled, found.fp16.loss_scale_window) == (True, 7)
    assert (found.optimizer_name, found.optimizer_params) == ("Adam", {"lr": 0.5})
    assert found.zero_config.offload_optimizer.device == "cpu"
    assert found.zero_config.offload_param is None
    assert found.zero_optimization_stage == deepspeed.config.ZeroStageEnum.gradients
    assert found.gradient_clipping == "auto"
    assert found.zero_config.model_dump()["offload_optimizer"]["pin_memory"] is not None
    with pytest.raises(deepspeed.DeepSpeedConfigError, match="stagee"):
        deepspeed.config.DeepSpeedZeroConfig(stagee=3)


def test_elastic_sizes_are_those_of_the_solver() -> None:
    section = {"enabled": True, "max_train_batch_size": 100, "micro_batch_sizes": [2, 3]}
    compute = deepspeed.config.compute_elastic_config
    wanted = zf.interop.solve_batch(100, [2, 3], 4)
    config = {"elasticity": {**section, "version": 0.1}}
    assert compute(config, "0.19.8") == (wanted.train, list(wanted.world_sizes))
    assert compute(config, "0.19.8", world_size=4)[2] == wanted.micro
    assert compute({"elasticity": {**section, "version": "0.1"}}, "0.19.8") == compute(
        config, "0.19.8"
    )
    with pytest.raises(OptionError, match=r"with elasticity; got one without"):
        compute({}, "0.19.8")
    for micro in (4, None):
        with pytest.raises(OptionError, match=r"micro_batches .*list of micro-batch sizes; got"):
            compute({"elasticity": {**section, "micro_batch_sizes": micro}}, "0.19.8")
    with pytest.raises(OptionError, match=r"version .*; got None"):
        compute({"elasticity": {**section, "version": None}}, "0.19.8")


def test_leaf_modules_are_marked_by_class_name_and_suffix() -> None:
    from zfun.interop.deepspeed.utils.z3_leaf_module import z3_leaf_module

    utils = deepspeed.utils
    parts = {"a": net(), "b": net()}
    model = nn.ModuleDict(parts)
    assert len(utils.set_z3_leaf_modules(model, [nn.Module])) == len(list(model.modules()))
    utils.unset_z3_leaf_modules(model, ["Module", nn.Module])
    assert utils.get_z3_leaf_modules(model) == []
    found, missing = utils.set_z3_leaf_modules_by_name(model, ["a.body", "c"])
    assert (found, missing) == ([parts["a"].body], ["c"])
    found, missing = utils.set_z3_leaf_modules_by_suffix(model, ["last", "none"])
    assert (found, missing) == ([parts["a"].last, parts["b"].last], ["none"])
    assert utils.z3_leaf_module(parts["b"].last)
    assert z3_leaf_module(parts["b"].last)
    assert len(utils.get_z3_leaf_modules(model)) == 3
    with pytest.raises(OptionError, match=r"got \['Conv2d'\], of which the model has none"):
        utils.set_z3_leaf_modules(model, ["Conv2d"])


def test_a_recomputed_block_draws_the_same_numbers_from_a_tracker() -> None:
    checkpointing = deepspeed.checkpointing
    weight = torch.ones(64, requires_grad=True)

    def block(x: Tensor) -> Tensor:
        with checkpointing.get_cuda_rng_tracker().fork():
            mask = torch.rand(64) > 0.5
        return torch.tanh(x * weight) * mask

    def run(wrap: Any) -> tuple[Tensor, Tensor]:
        checkpointing.model_parallel_cuda_manual_seed(3)
        weight.grad = None
        out = torch.zeros(())
        for _ in range(2):
            out = out + wrap(block, torch.arange(64.0, requires_grad=True)).sum()
        out.backward()
        assert weight.grad is not None
        return weight.grad, torch.rand(2)

    try:
        plain = run(lambda function, x: function(x))
        again = run(checkpointing.checkpoint)
    finally:
        checkpointing.get_rng_tracker().reset()
    torch.testing.assert_close(plain, again, rtol=0, atol=0)
    assert plain[0].any()


def test_public_code_finds_the_names_that_it_calls() -> None:
    utils = importlib.import_module("zfun.interop.deepspeed.runtime.utils")
    utils.empty_cache()
    draws = []
    for _ in range(2):
        utils.set_random_seed(3)
        draws.append((random.random(), np.random.rand(), torch.rand(()).item()))  # noqa: NPY002
    assert draws[0] == draws[1]
    assert utils.required_torch_version(min_version=2.0)
    assert not utils.required_torch_version(max_version=1.9)


@pytest.mark.parametrize(
    ("now", "bounds", "is_inside"),
    [
        ("2.6.0+cu124", {"min_version": "2.6.1"}, False),
        ("2.6.1", {"min_version": "2.6.1"}, True),
        ("2.6.1", {"max_version": "2.6"}, False),
        ("2.6.0", {"max_version": 2.6}, True),
        ("2.10.0a0+git1", {"min_version": "2.9"}, True),
        ("2.10.0", {"min_version": "2.4.0rc1", "max_version": "2.11.dev1"}, True),
    ],
)
def test_versions_of_torch_are_compared_whole(
    now: str, bounds: Any, is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", TorchVersion(now))
    assert deepspeed.utils.required_torch_version(**bounds) is is_inside


@pytest.mark.parametrize("kind", [tuple, list])
def test_results_of_a_checkpointed_function_go_into_the_list(kind: Any) -> None:
    outputs: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    deepspeed.checkpointing.CheckpointFunction.apply(lambda x: kind([x * x, x + 1]), outputs, x)
    torch.stack(outputs).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0]


def start(line: str, **environment: str) -> Start:
    return start_of(parse_args(shlex.split(line)), environment)


def test_a_command_line_of_deepspeed_becomes_one_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    hosts = tmp_path / "hosts"
    own = socket.gethostname()
    hosts.write_text(f"first slots=4\n# a comment\n{own} slots=2\n")

    def flags(line: str) -> list[str]:
        return start(line.replace("SCRIPT", str(script))).command[3:]

    rank = "--local_rank=${local_rank}"
    one = ["--nproc-per-node=2", "--standalone", str(script), rank, "--lr", "1"]
    assert flags("-n 2 SCRIPT --lr 1") == one
    assert flags("--num_gpus=2 --launcher pdsh SCRIPT --lr 1") == one
    assert flags("--include localhost:0,1 SCRIPT --lr 1") == one
    assert flags("-n 2 --exclude localhost:1 SCRIPT")[0] == "--nproc-per-node=1"
    assert flags("-n 2 --no_local_rank --module my.train -n 3")[1:] == [
        "--standalone",
        "--module",
        "my.train",
        "-n",
        "3",
    ]
    two = ["--nnodes=2", "--node-rank=1", "--master-addr=first", "--master-port=29500"]
    assert flags(f"--hostfile {hosts} SCRIPT") == ["--nproc-per-node=2", *two, str(script), rank]
    line = f"-H {hosts} -n 1 --node_rank 0 --master_addr ten --master_port 7 SCRIPT"
    assert flags(line)[:5] == [
        "--nproc-per-node=1",
        "--nnodes=2",
        "--node-rank=0",
        "--master-addr=ten",
        "--master-port=7",
    ]
    assert flags(f"-H {hosts} --num_nodes 1 --node_rank 0 SCRIPT")[:2] == [
        "--nproc-per-node=4",
        "--standalone",
    ]
    assert flags(f"-H {hosts} --include {own}:1 SCRIPT")[:2] == [
        "--nproc-per-node=1",
        "--standalone",
    ]
    found = start("-- python -c 1", PYTHONPATH="/mine")
    assert found.command[1:] == ["-c", "1"]
    assert found.environment["PYTHONPATH"] == f"{SITE}:/mine"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("missing.py", r"a script or a command; got 'missing.py'"),
        ("-n 2 python x.py", r"starts its ranks itself; .* 'python'"),
        ("--autotuning run train.py", r"got --autotuning; compare stages"),
        ("--elastic_training train.py", r"got --elastic_training; start torchrun"),
        ("--num_nodes 2 SCRIPT", r"without one; pass --hostfile"),
        ("--hostfile missing SCRIPT", r"hostfile is a file; got 'missing'"),
        ("--hostfile BAD SCRIPT", r"got 'host 4'; correct"),
        ("--include a:x SCRIPT", r"slots are numbers.* got 'a:x'"),
        ("--include other SCRIPT", r"name hosts and slots .* got 'other'"),
        ("--include localhost --exclude localhost SCRIPT", r"got both"),
        ("-n 1 --exclude localhost SCRIPT", r"at least one rank"),
        ("--hostfile FOREIGN SCRIPT", r"pass --node_rank"),
    ],
)
def test_a_command_line_that_cannot_run_says_why(line: str, message: str, tmp_path: Path) -> None:
    for name, text in (
        ("SCRIPT", ""),
        ("BAD", "host 4"),
        ("FOREIGN", "one slots=1\ntwo slots=1"),
    ):
        (tmp_path / name).write_text(text)
        line = line.replace(name, str(tmp_path / name))
    with pytest.raises(OptionError, match=message):
        start(line)


def test_fp32_weights_are_written_by_a_command_with_tied_names(tmp_path: Path) -> None:
    loss = lambda params, batch: (params["w"] * batch).sum()
    zero = zf.zero(3, loss, zf.optim.adamw(0.1), zf.process_group())
    state = zero.init({"w": torch.arange(3.0), "frozen": torch.ones(2)})
    zf.save(tmp_path / "tag", state, data={"ties": {"head.w": "w"}})
    (tmp_path / "latest").write_text("tag")
    (tmp_path / "zero_to_fp32.py").write_text(deepspeed.utils.zero_to_fp32.SCRIPT)
    out = tmp_path / "out"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("sys.argv", ["zero_to_fp32.py", str(tmp_path), str(out)])
        runpy.run_path(str(tmp_path / "zero_to_fp32.py"))
    found = torch.load(out / "pytorch_model.bin")
    assert set(found) == {"frozen", "w", "head.w"}
    assert found["head.w"].tolist() == [0.0, 1.0, 2.0]
    deepspeed.utils.zero_to_fp32.main(
        [str(tmp_path), str(out), "--safe_serialization", "--tag", "tag"]
    )
    assert set(zf.sources.safetensors(out)) >= {"frozen", "w"}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_lines_of_deepspeed_chat_run(stage: int) -> None:
    helper = importlib.import_module("zfun.interop.deepspeed.compression.helper")

    def main(group: zf.Group) -> None:
        model = net()
        assert helper.recursive_getattr(model, "body.0") is model.body[0]
        other = torch.nn.Linear(WIDTH, 12)
        helper.recursive_setattr(model, "body.0", other)
        assert model.body[0] is other
        helper.recursive_setattr(model, "first", model.first)
        engine = deepspeed.initialize(
            model=model,
            config=config(stage, optimizer={"type": "Adam", "params": {"lr": 0.1}}),
            mpu=ranks(group),
        )[0]
        trained(engine, group, 0, 1)
        engine.tput_timer.start()
        engine.tput_timer.update_epoch_count()
        engine.tput_timer.stop(global_step=True, report_speed=False)
        norm = engine.get_global_grad_norm()
        assert norm.item() == float(norm) > 0
        assert f"{norm:.3f}" == f"{norm.item():.3f}"
        assert isinstance(norm, float)

    zf.simulate(2, main)


SGD: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}}


def engine_of(group: zf.Group, stage: int, **given: Any) -> Any:
    given = {"config": config(stage, **SGD), "model": net(), **given}
    return deepspeed.initialize(mpu=ranks(group), **given)[0]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_methods_of_the_optimizer_are_those_of_the_engine(stage: int) -> None:
    offload = importlib.import_module("zfun.interop.deepspeed.runtime.zero.offload_config")
    kinds = offload.OffloadStateTypeEnum

    def main(group: zf.Group) -> Any:
        made = config(stage, optimizer=ADAMW, scheduler=WARMUP)
        engine = engine_of(group, stage, config=made)
        optimizer = engine.optimizer
        assert getattr(optimizer, "_global_grad_norm", 1) is None
        rows = trained(engine, group, 0, 2)
        assert optimizer._global_grad_norm == engine.get_global_grad_norm() > 0
        assert optimizer._global_grad_norm.item() == rows[-1].norm
        parts = [kinds.optim_states, kinds.hp_params, kinds.lp_params, kinds.lp_grads]
        optimizer.offload_states(parts, device=offload.OffloadDeviceEnum.cpu, non_blocking=True)
        with pytest.raises(OptionError, match=r"a call needs parameters"):
            engine(batch(0, 0, 1)[0])
        optimizer.empty_partition_cache()
        optimizer.reload_states(non_blocking=True)
        return rows + trained(engine, group, 2, 1)

    expected = zf.simulate(2, functools.partial(run, stage=stage, steps=3))
    for rows, (wanted, _) in zip(zf.simulate(2, main), expected, strict=True):
        assert rows == wanted


@pytest.mark.parametrize("device", ["none", "cpu", "nvme"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_are_those_of_written_and_loaded_parameters(
    stage: int, device: str, tmp_path: Path
) -> None:
    """After refresh_fp32_params, DeepSpeed's master weights are the parameters of 16 bits."""

    def main(group: zf.Group) -> None:
        made = config(stage, optimizer=ADAMW, bf16={"enabled": True})
        place = {"device": device, "nvme_path": str(tmp_path)}
        made["zero_optimization"]["offload_optimizer"] = place
        engine = engine_of(group, stage, config=made)
        params = dict(engine.module.named_parameters())
        x = torch.ones(2, WIDTH, dtype=torch.bfloat16)

        def masters() -> dict[str, Tensor]:
            engine.optimizer.refresh_fp32_params()
            return {name: utils.safe_get_full_fp32_param(p) for name, p in params.items()}

        def step() -> None:
            for _ in range(2):
                engine.backward(engine(x).square().sum())
                engine.step()

        utils: Any = deepspeed.utils
        written = {
            name: torch.linspace(-1.0, 1.0, x.numel(), dtype=x.dtype).view_as(x)
            for name, x in engine.module_state_dict().items()
        }
        step()
        engine.save_checkpoint(tmp_path / str(stage))
        trained = masters()
        engine.module.load_state_dict(written)
        for name, value in masters().items():
            assert value.equal(written[name].float()), name
        step()
        for name, value in masters().items():
            assert not value.equal(trained[name]), name
        with deepspeed.zero.GatheredParameters(list(params.values()), modifier_rank=0):
            for param in params.values():
                param.data.fill_(0.7)
        expected = torch.tensor(0.7, dtype=x.dtype).item()
        assert {value.unique().item() for value in masters().values()} == {expected}
        engine.load_checkpoint(tmp_path / str(stage), load_optimizer_states=False)
        shown = engine.module_state_dict()
        for name, value in masters().items():
            assert value.equal(shown[name].float()), name
            assert value.equal(trained[name]), name

    zf.simulate(2, main)


@pytest.mark.shows(
    "parts of DeepSpeed's optimizer, such as `engine.optimizer.bit16_groups`",
    "refused",
    "with the function to use; `hasattr` is false",
)
@pytest.mark.parametrize("stage", [1, 3])
def test_a_name_that_the_optimizer_has_not_says_what_to_use(stage: int) -> None:
    class Own(torch.optim.SGD):
        partition_count = 3

        def bit16_groups(self) -> str:
            return "own"

    def main(group: zf.Group) -> None:
        optimizer = engine_of(group, stage).optimizer
        for name, remedy in ABSENT["engine.optimizer"].items():
            assert not hasattr(optimizer, name), name
            assert getattr(optimizer, name, 1) == 1
            with pytest.raises(
                AttributeError, match=rf"got deepspeed.engine.optimizer.{name}, "
            ) as e:
                getattr(optimizer, name)
            assert isinstance(e.value, OptionError)
            assert str(e.value).endswith(remedy)
        with pytest.raises(AttributeError, match=r"did you mean 'zero_grad'\?"):
            optimizer.zero_grads()
        assert not hasattr(optimizer, "__wrapped__")
        model = net()
        own = Own(model.parameters(), lr=0.1)
        made = engine_of(group, stage, model=model, optimizer=own, config=config(stage)).optimizer
        assert (made.partition_count, made.bit16_groups()) == (3, "own")
        assert made.defaults is own.defaults
        assert not hasattr(made, "fp16_groups")

    zf.simulate(2, main)


def test_the_data_parallel_group_is_that_of_torch_or_of_the_script() -> None:
    def main(group: zf.Group) -> None:
        assert engine_of(group, 1).data_parallel_group is group

    zf.simulate(2, main)
    engine = deepspeed.initialize(model=net(), config=config(1, **SGD))[0]
    assert engine.data_parallel_group is deepspeed.utils.groups._get_data_parallel_group()
