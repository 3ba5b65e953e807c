"""Configurations of DeepSpeed: rules, expected values, training, the table and the command."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import zfun as zf
from tests.interop.ds_configs import AUTO, FILES, FOLDER, auto_of
from tools import ds_config_table
from zfun import cli
from zfun.errors import ConfigError, OptionError
from zfun.interop import AutoValues, batch_of, from_ds_config, parse_auto_values, solve_batch
from zfun.interop.ds_config import KEYS
from zfun.interop.ds_config._read import read
from zfun.stores import HostStore, NvmeStore

ZERO = "zero_optimization"


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "embed": torch.randn(11, 16, generator=generator),
        "hidden": torch.randn(16, 16, generator=generator) / 4,
        "bias": torch.zeros(16),
        "out": torch.randn(16, 11, generator=generator) / 4,
    }


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    hidden = torch.tanh(params["embed"][batch[:, 0]] @ params["hidden"] + params["bias"])
    return F.cross_entropy((hidden @ params["out"]).float(), batch[:, 1])


def batches(count: int, size: int = 2) -> list[list[Tensor]]:
    """One batch of six samples for each rank of each step."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(0, 11, (count, size, 6, 1), generator=generator)
    return [list(step) for step in torch.cat([rows, (3 * rows + 1) % 11], -1)]


def trained(recipe: Any, count: int, optimizer: Any = None) -> list[Any]:
    """The losses, learning rates, norms and last parameters of each rank."""

    def main(group: zf.Group) -> Any:
        zero = recipe.zero(loss_fn, group, optimizer=optimizer)
        state, found = zero.init(params()), []
        for step in batches(count):
            state, info = zero.step(state, step[group.rank])
            found.append((info.loss.item(), info.learning_rate, info.grad_norm.item()))
        return found, zero.params(state)

    return zf.simulate(2, main)


WHOLE = ("stage_2_bf16_adamw", "stage_3_bf16_adamw", "stage_3_nvme_fp16")
CASES = [
    pytest.param(
        path,
        dtype,
        id=f"{path.stem}-{dtype}",
        marks=[] if dtype is torch.float32 or path.stem in WHOLE else pytest.mark.slow,
    )
    for path in FILES
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
]


@pytest.mark.parametrize(("path", "dtype"), CASES)
def test_every_configuration_trains(path: Path, dtype: torch.dtype, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8").replace("/local_nvme", str(tmp_path))
    (tmp_path / "config.json").write_text(text, encoding="utf-8")
    auto = auto_of(path)
    auto = auto if auto is not AUTO else parse_auto_values(settings_of(dtype))
    if '"enabled": false' in text and dtype is torch.float16:
        auto = AUTO  # the file says that the run is not in float16
    recipe = from_ds_config(tmp_path / "config.json", auto=auto)
    count = 3 if dtype is not torch.float32 else 8
    runs = trained(recipe, count, None if recipe.optimizer else zf.optim.adamw(0.05))
    (found, first), (_, second) = runs
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(math.isfinite(loss) for loss, _, _ in found)
    if count == 8 and "onebit" not in path.name:
        assert found[-1][0] < 0.9 * found[0][0]


def settings_of(dtype: torch.dtype) -> list[str]:
    names = {name: getattr(AUTO, name) for name in AUTO.__dataclass_fields__}
    names["train_batch_size"] = 12
    names["dtype"] = str(dtype).removeprefix("torch.")
    return [f"{name}={json.dumps(x) if name != 'dtype' else x}" for name, x in names.items()]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_plain_torch(stage: int) -> None:
    config = {
        "train_batch_size": 12,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.5,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.5, "betas": [0.8, 0.9], "eps": 1e-6, "weight_decay": 0.1},
        },
        "scheduler": {
            "type": "WarmupDecayLR",
            "params": {
                "warmup_min_lr": 0.001,
                "warmup_max_lr": 0.03,
                "warmup_num_steps": 3,
                "total_num_steps": 7,
                "warmup_type": "linear",
            },
        },
        ZERO: {"stage": stage, "reduce_bucket_size": 100, "stage3_max_live_parameters": 2000},
    }
    runs = trained(from_ds_config(config, auto=AutoValues(world_size=2)), 9)

    def rate(k: int) -> float:
        rise = max(k, 0) / 3 if k < 3 else max(0.0, (7 - k) / 4)
        return 0.001 + (0.03 - 0.001) * rise

    plain = {name: leaf.requires_grad_() for name, leaf in params().items()}
    optimizer = torch.optim.AdamW(
        plain.values(), lr=0.5, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    for step, batch in enumerate(batches(9)):
        optimizer.param_groups[0]["lr"] = rate(step - 1)
        optimizer.zero_grad()
        loss = loss_fn(plain, torch.cat(batch))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), 0.5)
        optimizer.step()
        for found, _ in runs:
            assert found[step] == pytest.approx(
                (loss.item(), rate(step - 1), norm.item()), rel=1e-5
            )
    for _, last in runs:
        for name, leaf in plain.items():
            torch.testing.assert_close(last[name], leaf.detach(), rtol=1e-4, atol=1e-6)


def scheduled(kind: str, lr: float = 1.0, **values: Any) -> Any:
    config = {
        "optimizer": {"type": "Adam", "params": {"lr": lr}},
        "scheduler": {"type": kind, "params": values},
    }
    schedule = from_ds_config(config).learning_rate
    # DeepSpeed's counter k is -1 at the first step.
    return lambda k: round(schedule(k + 1), 4)  # type: ignore[operator, misc]


def test_schedules_have_the_expected_values() -> None:
    log = scheduled("WarmupLR", warmup_num_steps=10)
    expected = [0, 0.3010, 0.4771, 0.6021, 0.6990, 0.7782, 0.8451, 0.9031, 0.9542, 1, 1]
    assert [log(k) for k in range(11)] == expected
    both = scheduled("warmupdecaylr", warmup_max_lr=1, warmup_num_steps=10, total_num_steps=20)
    assert [both(k) for k in range(10)] == expected[:10]
    assert [both(k) for k in (10, 11, 19, 20, 99)] == [1, 0.9, 0.1, 0, 0]
    cycle = scheduled(
        "OneCycle", cycle_min_lr=0, cycle_max_lr=1, cycle_first_step_size=4, cycle_momentum=False
    )
    assert [cycle(k) for k in range(-1, 8)] == [0, 0.25, 0.5, 0.75, 1, 0.75, 0.5, 0.25, 0]
    cosine = scheduled("WarmupCosineLR", warmup_num_steps=10, total_num_steps=20)
    falling = [0.9755, 0.9045, 0.7939, 0.6545, 0.5, 0.3456, 0.2062, 0.0956, 0.0246, 0.0001]
    assert [cosine(k) for k in range(10, 21)] == [*falling, 0.0001]
    assert [cosine(k) for k in range(-1, 10)] == [0, *expected[:10]]
    test = scheduled("LRRangeTest", lr_range_test_min_lr=1.0, lr_range_test_step_size=2)
    assert [test(k) for k in range(-1, 4)] == [1, 1.5, 2, 2.5, 3]


def test_a_schedule_may_end_in_its_warmup_and_start_late() -> None:
    short = scheduled("WarmupDecayLR", warmup_max_lr=1, warmup_num_steps=4, total_num_steps=3)
    assert [short(k) for k in (3, 4, 5)] == [1, 0, 0]
    short = scheduled("WarmupCosineLR", warmup_num_steps=1, total_num_steps=2, cos_min_ratio=0.25)
    assert [short(k) for k in (-1, 0, 1, 2, 9)] == [0, 0, 1, 0.25, 0.25]
    late = scheduled("WarmupLR", warmup_num_steps=10, last_batch_iteration=3)
    assert [late(k) for k in (-1, 0)] == [0.6021, 0.699]


def test_the_momentum_of_a_cycle_goes_to_b1_with_b2_of_deepspeed() -> None:
    scheduler = {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2, "cycle_first_step_size": 2}
    config = {
        "optimizer": {"type": "AdamW", "params": {"betas": [0.5, 0.6]}},
        "scheduler": {"type": "OneCycle", "params": scheduler},
        "gradient_clipping": 0,
    }
    rule = from_ds_config(config).optimizer
    assert rule is not None
    options = dict(rule.options)
    assert [round(options["b1"](step), 3) for step in range(5)] == [0.8, 0.85, 0.8, 0.85, 0.9]
    assert options["b2"] == 0.99


@pytest.mark.parametrize(
    ("kind", "values", "name", "options"),
    [
        ("Adam", {"weight_decay": 0.1}, "adamw", {"weight_decay": 0.1, "eps": 1e-8}),
        ("Adam", {"adam_w_mode": False}, "adam", {"weight_decay": 0.0, "b2": 0.999}),
        ("AdamW", {"adam_w_mode": False}, "adamw", {"learning_rate": 1e-3, "weight_decay": 0.0}),
        ("adamw", {"torch_adam": True}, "adamw", {"weight_decay": 0.01}),
        ("Lamb", {"max_coeff": 5}, "lamb", {"max_ratio": 5.0, "min_ratio": 0.01}),
        ("Lion", {}, "lion", {"b1": 0.9, "b2": 0.99}),
        ("Adagrad", {}, "adagrad", {"learning_rate": 1e-2, "eps": 1e-10}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, "sgd", {"learning_rate": 0.1, "momentum": 0.9}),
        ("OneBitAdam", {"freeze_step": 7}, "onebit_adam", {"bias_correction": False}),
        ("RMSprop", {"lr": 0.1, "alpha": 0.5}, "from_torch", {"alpha": 0.5, "lr": 0.1}),
    ],
)
def test_optimizers_have_the_names_and_defaults_of_deepspeed(
    kind: str, values: dict[str, Any], name: str, options: dict[str, Any]
) -> None:
    config = {"optimizer": {"type": kind, "params": values}, "gradient_clipping": 0}
    rule = from_ds_config(config).optimizer
    assert rule is not None
    found = dict(rule.options)
    assert rule.name == name
    assert {key: found[key] for key in options} == options


def test_muon_orthogonalises_hidden_matrices_only() -> None:
    optimizer = {"type": "Muon", "params": {"lr": 0.05, "adam_lr": 0.04}}
    recipe = from_ds_config({"optimizer": optimizer, "gradient_clipping": 0})
    rule = recipe.optimizer
    assert rule is not None
    assert rule.labels is not None
    chosen = {name: rule.labels(name, leaf) for name, leaf in params().items()}
    assert chosen["hidden"] == chosen["out"] != chosen["embed"] == chosen["bias"]
    found, _ = trained(recipe, 8)[0]
    assert found[-1][0] < 0.9 * found[0][0]


def test_auto_follows_the_written_rules() -> None:
    config, _ = read(FOLDER / "stage_3.json")
    found = from_ds_config(config, auto=AutoValues(hidden_size=4096))
    shown = {entry.path: entry.becomes + entry.why for entry in found.entries}
    # h², int(0.9 h²), 10 h.
    assert found.bucket_bytes == 4096**2 * 4
    assert "15099494 elements" in shown[f"{ZERO}.stage3_prefetch_bucket_size"]
    assert found.schedule is not None
    assert found.schedule.persistence == 40960
    small = from_ds_config(config, auto=AutoValues(hidden_size=1001))
    assert small.bucket_bytes == 1001 * 1001 * 4
    text = {entry.path: entry.why for entry in small.entries}[f"{ZERO}.stage3_prefetch_bucket_size"]
    assert "901800 elements" in text  # 0.9 · 1001² is 901800.9
    with pytest.raises(ConfigError, match=r"has 3 mistakes(?s:.*)pass hidden_size=") as caught:
        from_ds_config(config)
    assert len(caught.value.mistakes) == 3


def test_the_values_of_the_run_and_of_the_file_agree() -> None:
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "Adam", "params": {"lr": 0.1}},
        "fp16": {"enabled": True},
    }
    auto = AutoValues(
        micro_batch_size=8, max_grad_norm=2.0, learning_rate=0.1, dtype=torch.bfloat16
    )
    with pytest.raises(ConfigError, match="3 mistakes") as caught:
        from_ds_config(config, auto=auto)
    assert {one.path for one in caught.value.mistakes} == {
        "train_micro_batch_size_per_gpu",
        "gradient_clipping",
        "fp16.enabled",
    }
    assert "equals the value of the run, 2.0" in str(caught.value)


def test_a_loss_scale_of_bf16_is_ignored_and_aio_may_stand_in_two_places() -> None:
    recipe = from_ds_config(
        FOLDER / "bf16_with_loss_scale.json", auto=parse_auto_values(["dtype=bf16"])
    )
    assert recipe.precision.loss_scale is None
    ignored = [entry.path for entry in recipe.entries if entry.verdict == "ignored"]
    assert len([path for path in ignored if path.startswith("bf16.")]) == 5
    nested = {"thread_count": 3, "queue_depth": 16}
    config: dict[str, Any] = {
        ZERO: {
            "stage": 3,
            "aio": nested,
            "offload_optimizer": {"device": "nvme", "nvme_path": "/no/such/place"},
        },
        "aio": {"queue_depth": 32},
    }
    choice = from_ds_config(config).optimizer_store
    assert choice is not None
    assert (choice.options["num_threads"], choice.options["queue_depth"]) == (3, 32)
    config["aio"]["intra_op_parallelism"] = 2
    choice = from_ds_config(config).optimizer_store
    assert choice is not None
    assert choice.options["num_threads"] == 2
    with pytest.raises(OptionError, match="/no/such/place"):
        from_ds_config(config).offload()


def test_stores_are_made_where_the_run_is(tmp_path: Path) -> None:
    zero = {
        "stage": 3,
        "offload_param": {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": False},
        "offload_optimizer": {"device": "cpu"},
    }
    made = from_ds_config({ZERO: zero}).offload()
    assert isinstance(made.params, NvmeStore)
    assert isinstance(made.optimizer, HostStore)
    assert made.grads is made.optimizer
    made.params.close()
    old = {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}
    choice = from_ds_config({ZERO: old}).optimizer_store
    assert choice is not None
    assert (choice.kind, choice.options) == ("host", {"pin": False})
    assert from_ds_config({ZERO: True}).stage == 1


def test_dtypes_follow_deepspeed() -> None:
    def precision(**config: Any) -> zf.Precision:
        return from_ds_config(config).precision

    on = {"enabled": True}
    assert precision() == zf.Precision()
    assert precision(communication_data_type="fp32").reduce is torch.float32
    half = precision(bfloat16=on)
    assert half == zf.Precision(*[torch.bfloat16] * 3, master=torch.float32)
    wide = precision(
        bf16=on, communication_data_type="bf16", data_types={"grad_accum_dtype": "fp32"}
    )
    assert wide.reduce is torch.float32
    narrow = {**on, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    assert precision(bf16=narrow).master is None
    assert precision(fp16={**on, "loss_scale": 128}).loss_scale == 128.0
    values = {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 2}
    rule: Any = precision(fp16={**on, **values}).loss_scale
    state, scales = rule.init(), []
    for step in "xx.x...x..xx":
        state = rule.update(state, step == ".")
        scales.append(int(state.scale))
    assert scales == [256, 128, 128, 64, 64, 64, 128, 128, 128, 128, 64, 32]


def test_meshes_and_codecs_of_zero_plus_plus() -> None:
    on = {"stage": 3, "zero_quantized_weights": True, "zero_quantized_gradients": True}
    loco = {"err_beta": 0.5, "reset_T": 7}
    recipe = from_ds_config(
        {
            "optimizer": {"type": "Adam", "params": {"lr": 0.01}},
            ZERO: {**on, "zero_hpz_partition_size": 2, "zeropp_loco_param": loco},
        }
    )
    codec: Any = recipe.compression.grads
    assert codec.feedback is not None
    assert recipe.compression.params == zf.compression.int8()

    def main(group: zf.Group) -> float:
        zero = recipe.zero(loss_fn, group)
        _, first = zero.step(zero.init(params()), batches(1, 4)[0][group.rank])
        return float(first.loss)

    losses = zf.simulate(4, main)
    assert losses == [losses[0]] * 4
    mics = from_ds_config({ZERO: {"stage": 3, "mics_shard_size": 2}})
    assert (mics.rows, mics.secondary) == (2, False)
    without = from_ds_config({ZERO: {"stage": 3, "zeropp_loco_param": loco}})
    assert without.compression.grads is None
    assert "gradients are not quantised" in str(without)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"train": 32, "micro": 16, "accumulation": 1}, (32, 16, 1, 2)),
        ({"train": 32, "micro": 8, "accumulation": 2}, (32, 8, 2, 2)),
        ({"train": 32, "micro": 8}, (32, 8, 2, 2)),
        ({"train": 32, "accumulation": 4}, (32, 4, 4, 2)),
        ({"micro": 8, "accumulation": 3}, (48, 8, 3, 2)),
        ({"train": 32}, (32, 16, 1, 2)),
        ({"micro": 8}, (16, 8, 1, 2)),
    ],
)
def test_two_batch_sizes_give_the_third(given: dict[str, int], expected: tuple[int, ...]) -> None:
    assert batch_of(2, **given) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"train": 33, "micro": 17, "accumulation": 2}, r"got 33 with 17 · 2 · 2; write 68"),
        ({"train": 32, "micro": 18, "accumulation": 1}, r"got 32 with 18 · 1 · 2; write 36"),
        ({"train": 3}, r"got 3 with \.\.\. · \.\.\. · 2; write 2"),
        ({"accumulation": 2}, "accumulation 2 alone; write one of the two"),
        ({}, "got neither"),
    ],
)
def test_batch_sizes_that_do_not_go_together_are_refused(given: dict[str, int], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        batch_of(2, **given)


def test_elastic_batches_have_the_expected_sizes() -> None:
    micros = [8, 12, 16, 17]
    found = solve_batch(10_000, micros, 64, min_ranks=32, max_ranks=1500)
    assert (found.train, len(found.world_sizes), found.micro) == (9792, 23, 17)
    for size in found.world_sizes:
        assert any(9792 // size % micro == 0 for micro in micros)
        assert 9792 % size == 0
        assert 32 <= size <= 1500
    with pytest.raises(OptionError, match="got 128; use one of 32, 34"):
        solve_batch(10_000, micros, 128, min_ranks=32, max_ranks=1500)
    assert solve_batch(32, [1, 2, 3, 7], 4).micro == 3
    assert solve_batch(100, [8, 10, 12]).train <= 100


@pytest.mark.parametrize(
    ("model_parallel", "micros", "micro"),
    [(1, [4, 8], 4), (2, [4, 8], 8), (4, [4, 8], 8), (2, [8], 8), (4, [8], 8)],
)
def test_elastic_batches_of_nodes_count_replicas(
    model_parallel: int, micros: list[int], micro: int
) -> None:
    found = solve_batch(
        64,
        micros,
        16,
        min_ranks=16,
        max_ranks=16,
        ranks_per_node=8,
        model_parallel=model_parallel,
    )
    assert found.micro == micro
    assert found.world_sizes == (16 // model_parallel,)
    assert found.train // (16 // model_parallel) % micro == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model_parallel": 4}, "use version 0.2, which is ranks_per_node="),
        ({"ranks_per_node": 1}, "pass world_size"),
        (
            {"world_size": 16, "ranks_per_node": 8, "model_parallel": 16},
            "whole replicas",
        ),
        ({"max_batch": 4}, "remove the larger micro-batches"),
        ({"min_ranks": 60, "max_ranks": 61}, "allow more numbers of ranks"),
    ],
)
def test_elastic_batches_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    elastic: dict[str, Any] = {"max_batch": 64, "micro_batches": [4, 8]}
    with pytest.raises(OptionError, match=words):
        solve_batch(**{**elastic, **options})


def test_an_elastic_configuration_sets_the_batch() -> None:
    elastic = {
        "enabled": True,
        "max_train_batch_size": 32,
        "micro_batch_sizes": [1, 2, 3, 7],
        "version": 0.1,
    }
    found = from_ds_config({"elasticity": elastic}, auto=AutoValues(world_size=4))
    assert found.batch == (24, 3, 2, 4)
    assert found.num_micro_batches == 2


def test_the_ranks_of_the_group_are_the_ranks_of_the_sizes() -> None:
    sizes = {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}
    with pytest.raises(ConfigError, match="pass world_size="):
        from_ds_config(sizes)
    recipe = from_ds_config(sizes, auto=AutoValues(world_size=4))
    with pytest.raises(OptionError, match="pass optimizer="):
        zf.simulate(2, lambda group: recipe.zero(loss_fn, group))
    with pytest.raises(OptionError, match="are for 4 ranks; got a group of 2"):
        zf.simulate(2, lambda group: recipe.zero(loss_fn, group, optimizer=zf.optim.sgd(0.1)))


def test_the_callers_optimizer_wins_and_gets_the_schedule() -> None:
    config = {
        "optimizer": {"type": "AdamW", "params": {"lr": 0.5}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 4}},
    }
    recipe = from_ds_config(config, optimizer=lambda rate: zf.optim.sgd(rate, momentum=0.9))
    found, _ = trained(recipe, 6)[0]
    assert [rate for _, rate, _ in found] == pytest.approx([0, 0, 0.25, 0.3962406, 0.5, 0.5])
    assert "caller's optimizer" in str(recipe)
    with pytest.raises(ConfigError, match="pass learning_rate="):
        from_ds_config({}, optimizer=zf.optim.adamw)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"optimizer": {"type": "ZeroOneAdam"}}, "OneBitAdam is the nearest"),
        ({"optimizer": {"type": "Lmab"}}, "did you mean 'Lamb'"),
        ({"optimizer": {}}, "use AdamW, Adam"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "gradient_clipping"),
        ({"optimizer": {"type": "Adam", "params": {"bias_correction": False}}}, "must be true"),
        ({"optimizer": {"type": "Lion", "params": {"eps": 1e-8}}}, "no key of Lion"),
        ({"optimizer": {"type": "SGD", "params": {"nesterov": True}}}, "momentum"),
        ({"optimizer": {"type": "RMSprop", "params": {"alhpa": 1}}}, "did you mean 'alpha'"),
        ({"optimizer": {"type": "RMSprop", "params": {"alpha": "x"}}}, "raised TypeError"),
        ({"scheduler": {"type": "WarmupDecayLR"}, "optimizer": {"type": "Adam"}}, "num_steps="),
        ({"scheduler": {"type": "WarmupLR"}}, "needs the learning rate"),
        ({"optimizer": {"type": "OneBitAdam"}, ZERO: {"stage": 3}}, "stages 0 to 2"),
        ({"optimizer": {"type": "OneBitAdam"}, "gradient_clipping": 1}, "norm nobody knows"),
        ({"stage": 3}, "belongs into zero_optimization"),
        ({ZERO: {"stage": True}}, "must be an integer"),
        ({ZERO: {"reduce_bucket_size": 901800.9}}, "must be an integer"),
        ({ZERO: {"stage": 2, "zero_quantized_weights": True}}, "is for stage 3"),
        ({ZERO: {"zenflow": {"topk_ratio": 0.1}}}, "leave the section out"),
        ({"aio": {"block_size": 1000}}, "a multiple of 4096"),
        ({"gradient_clipping": float("nan")}, "got nan"),
        ({"gradient_allreduce_op": "sum"}, "multiply the loss"),
        ({"tensor_parallel": {"autotp_size": -1}}, "must be an integer of at least 0"),
        ({"amp": {"enabled": True}}, "bf16"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "set both or neither"),
        ({"elasticity": {"enabled": True}}, "needs the key"),
    ],
    ids=str,
)
@pytest.mark.shows(
    "mistakes in a configuration", "refused", "all in one message, before anything is made"
)
def test_a_mistake_has_a_rule_and_a_remedy(config: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        from_ds_config(config)
    for one in caught.value.mistakes:
        assert one.rule
        assert one.got
        assert one.remedy


def _regression(params: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = torch.nn.functional.linear(x, params["up"]).tanh()
    return torch.nn.functional.linear(hidden, params["down"]).square().mean()


def test_axes_of_a_configuration_are_those_of_the_loss() -> None:
    """Two data ranks, each of two that share matrices: the numbers of one process."""
    config = {"gradient_clipping": 0, "tensor_parallel": {"autotp_size": 2}}
    config |= {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.5}}}
    generator = torch.Generator().manual_seed(0)
    up, x = torch.randn(2, 8, 4, generator=generator, dtype=torch.float64)
    whole = {"up": up, "down": up.T.contiguous()}

    def main(group: zf.Group) -> Any:
        mesh = zf.mesh(group, dp=2, tp=2)
        recipe = from_ds_config(config, auto=AutoValues(world_size=2))
        plan = {"up": "colwise", "down": "rowwise"}
        cut = zf.tensor_parallel(_regression, mesh["tp"], plan)
        with pytest.raises(OptionError, match="autotp_size 2; got a loss over model axes of no"):
            recipe.zero(_regression, mesh["dp"])
        zero = recipe.zero(cut, mesh["dp"])
        state, _ = zero.step(zero.init(whole), x.chunk(2)[mesh.coordinates["dp"]])
        shared = from_ds_config(
            {"sequence_parallel_size": 2, **config}, auto=AutoValues(world_size=2)
        )
        with pytest.raises(OptionError, match="each a group of 2 along the sequence"):
            shared.zero(cut, mesh["dp"])
        return zero.params(state)

    leaves = {name: value.clone().requires_grad_() for name, value in whole.items()}
    _regression(leaves, x).backward()
    for found in zf.simulate(4, main):
        for name, leaf in leaves.items():
            assert leaf.grad is not None
            torch.testing.assert_close(found[name], whole[name] - 0.5 * leaf.grad)


def test_ranks_of_an_expert_axis_have_batches() -> None:
    """Two data ranks times two along the experts share the batch of a step: four, not two."""

    def main(group: zf.Group) -> int:
        mesh = zf.mesh(group, dp=2, ep=2)
        loss = lambda params, x: (params["experts"].sum() * x).mean()
        mean = zf.parallel.expert_parallel(loss, mesh["ep"], [], ["experts"])
        config = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1}
        read = lambda size: from_ds_config(config, auto=AutoValues(world_size=size))
        rule = zf.optim.sgd(0.1)
        with pytest.raises(OptionError, match=r"for 2 ranks; got .* 2, times 2 along an expert"):
            read(2).zero(mean, mesh["dp"], optimizer=rule)
        zero = read(4).zero(mean, mesh["dp"], optimizer=rule)
        zero.step(zero.init({"experts": torch.ones(2)}), torch.ones(2))
        return read(4).num_micro_batches

    assert zf.simulate(4, main) == [2] * 4


def test_features_that_are_off_are_no_mistake() -> None:
    config = {
        "amp": {"enabled": False, "opt_level": "O1"},
        "sparse_gradients": False,
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "sequence_parallel_size": 1,
        "flops_profiler": {"enabled": True},
        ZERO: {"overlap_comm": "auto", "offload_param": None},
    }
    assert [entry.verdict for entry in from_ds_config(config).entries].count("off") == 3


def test_a_file_may_have_comments(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(
        '{ // a comment\n "zero_optimization": {"stage": 2, /* two\nlines */ },\n'
        ' # another\n "wandb": {"group": "a // b # c, }"}, }\n'
    )
    keys, name = read(path)
    assert keys == {ZERO: {"stage": 2}, "wandb": {"group": "a // b # c, }"}}
    assert name == str(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"a": 1,\n"b" 2}', "line 2: the file is JSON"),
        ('{"stage": 1, "stage": 2}', "stage: a key stands once in its section; got 1 and 2"),
        ("[1]", "the file holds an object; got list"),
    ],
)
def test_a_file_that_is_not_json_is_refused(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        from_ds_config(path)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot be read"):
        from_ds_config(tmp_path / "none.json")
    with pytest.raises(OptionError, match="config of from_ds_config"):
        from_ds_config(7)  # type: ignore[arg-type]


def test_the_command_explains_or_lists_the_mistakes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = str(FOLDER / "stage_3.json")
    assert cli.main(["explain-config", path, "--set", "hidden_size=64"]) == 0
    text = capsys.readouterr().out
    assert "zf.ScheduleOptions(persistence=640)" in text
    assert "hidden_size=64 by hidden_size²" in text
    assert cli.main(["explain-config", path]) == 1
    assert "has 3 mistakes" in capsys.readouterr().err
    assert cli.main(["explain-config", path, "--set", "hidden=64"]) == 2
    assert "did you mean 'hidden_size'?" in capsys.readouterr().err
    assert cli.main(["explain-config", str(tmp_path / "none.json")]) == 2


def test_a_notebook_shows_the_account() -> None:
    recipe = from_ds_config({ZERO: {"stage": 2, "overlap_comm": False}})
    assert "<td>zf.zero(stage=2)</td>" in recipe._repr_html_()
    assert any(one.startswith(f"{ZERO}.overlap_comm: ") for one in recipe.notices)


def test_the_table_is_whole() -> None:
    for key in KEYS:
        assert key.becomes or key.why, key.path
        assert key.verdict == "mapped" or key.why, key.path
        if key.default is not None:
            assert isinstance(key.default, torch.dtype) or key.form.kind.accepts(key.default)
    places = [(key.path, only) for key in KEYS for only in key.only or ("",)]
    assert len(places) == len(set(places))
    for key in KEYS:
        for field in key.fill.fields if key.fill else ():
            assert field in AutoValues.__dataclass_fields__


def test_the_page_has_the_table() -> None:
    page = ds_config_table.PAGE.read_text(encoding="utf-8")
    assert ds_config_table.with_table(page) == page, "run python tools/ds_config_table.py"
