"""The keys of the optimizer and of the scheduler, by type."""

from __future__ import annotations

from collections.abc import Mapping

from zfun.interop.ds_config.table._keys import (
    ANYTHING,
    BETAS,
    FLAG,
    RATE,
    TYPE,
    Fill,
    Key,
    by_group,
    count,
    filled,
    ignored,
    mapped,
    of,
    optional,
    real,
    refused,
    section,
    text,
)

_ADAMS = ("Adam", "AdamW")
_WITH_BETAS = (*_ADAMS, "Lamb", "OneBitAdam")
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")

OPTIMIZERS = ("AdamW", "Adam", "Lamb", "Lion", "Adagrad", "SGD", "OneBitAdam", "Muon")
# Their other parameters are passed to the class.
TORCH_OPTIMIZERS = ("RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop")
REFUSED_OPTIMIZERS = {
    "ZeroOneAdam": "OneBitAdam",
    "OneBitLamb": "Lamb",
    "MuAdam": "Adam",
    "MuAdamW": "AdamW",
    "MuSGD": "SGD",
}
SCHEDULERS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR", "OneCycle", "LRRangeTest")
# By section, the types by their names in lower case: DeepSpeed takes names in any case.
TYPES: Mapping[str, Mapping[str, str]] = {
    "optimizer": {name.lower(): name for name in (*OPTIMIZERS, *TORCH_OPTIMIZERS)},
    "scheduler": {name.lower(): name for name in SCHEDULERS},
}


def _rate(default: float, becomes: str = "zf.optim: learning_rate") -> Key:
    return mapped("lr", default, becomes, RATE, fill=filled("learning_rate"))


def _betas(first: float, second: float, fill: Fill, why: str = "") -> Key:
    return mapped("betas", (first, second), "zf.optim: b1, b2", BETAS, why, fill=fill)


def _eps(default: float, fill: Fill) -> Key:
    return mapped("eps", default, "zf.optim: eps", real(0), fill=fill)


_PAIR = filled("betas", lambda x: (float(x[0]), float(x[1])))
_EPS = filled("eps")
_ONE_RULE = "there is one implementation of each rule"
_OWN_RATE = "by default lr; a schedule that multiplies keeps the ratio to lr"
_ADAM_RATE = f"{_OWN_RATE}; 0.0003 where lr is not written"


def _if_auto(fill: Fill) -> Fill:
    """Leave numbers and defaults that are not Adam's alone, because a run has Adam's."""
    return fill._replace(when_absent=False, must_match=False)


# fmt: off
_OPTIMIZERS = (
    *of((*_ADAMS, "Lamb", "OneBitAdam", "Lion"), _rate(1e-3)),
    *of("SGD", _rate(1e-3)),
    *of("Adagrad", _rate(1e-2)),
    *of(_WITH_BETAS, _betas(0.9, 0.999, _PAIR), _eps(1e-8, _EPS)),
    *of("Lion", _betas(0.9, 0.99, _if_auto(_PAIR), "[0.9, 0.999] with offload_optimizer")),
    *of("Muon", _rate(0.02), _betas(0.9, 0.95, _if_auto(_PAIR))),
    *of(("Adagrad", "Muon"), _eps(1e-10, _if_auto(_EPS))),
    *of((*_WITH_BETAS, "Lion", "Adagrad", "SGD", "Muon"),
        mapped("weight_decay", 0.0, "zf.optim: weight_decay", real(0), fill=filled("weight_decay")),
    ),
    *of("Adam",
        mapped("adam_w_mode", True, "zf.optim.adamw, or zf.optim.adam if false",
            why="Adam has decoupled weight decay by default, as in DeepSpeed"),
    ),
    *of("AdamW", ignored("adam_w_mode", True, "AdamW is always decoupled")),
    *of(_ADAMS,
        mapped("torch_adam", False, "zf.optim: weight_decay",
            why="true makes torch's default 0.01 the weight decay of AdamW, as in DeepSpeed"),
        refused("amsgrad", False,
            "leave the key out, or pass optimizer=torch.optim.AdamW(params, amsgrad=True)"),
        ignored("fused", None, _ONE_RULE, optional(FLAG)),
        ignored("foreach", None, _ONE_RULE, optional(FLAG)),
        ignored("set_grad_none", True, "gradients are values, not attributes"),
        ignored("fp32_optimizer_states", True, "moments have the dtype of master weights"),
    ),
    *of((*_ADAMS, "SGD", "Adagrad"),
        refused("maximize", False, "leave the key out, and change the sign of the loss"),
    ),
    *of((*_ADAMS, "Lamb"),
        refused("bias_correction", True, "leave the key out: moments are always corrected"),
    ),
    *of("OneBitAdam",
        mapped("freeze_step", 100_000, "zf.optim.onebit_adam(freeze_step=)", count(1)),
        ignored("bias_correction", True, "DeepSpeed's OneBitAdam has none, whatever it says"),
        ignored("cuda_aware", False, "is for MPI"),
        ignored("comm_backend_name", "nccl", "the group sends", ANYTHING),
    ),
    *of("Lamb",
        mapped("max_coeff", 10.0, "zf.optim.lamb(max_ratio=)", real(0)),
        mapped("min_coeff", 0.01, "zf.optim.lamb(min_ratio=)", real(0)),
        refused("eps_inside_sqrt", False, "leave the key out: eps is added to the root"),
    ),
    *of("SGD",
        mapped("momentum", 0.0, "zf.optim.sgd(momentum=)", real(0, below=1)),
        mapped("nesterov", False, "zf.optim.sgd(nesterov=)"),
        refused("dampening", 0.0, "leave the key out: momentum has no dampening in zfun", real(0)),
    ),
    *of("Adagrad", mapped("lr_decay", 0.0, "zf.optim.adagrad(rate_decay=)", real(0))),
    *of("Muon",
        mapped("momentum", 0.95, "zf.optim.muon(momentum=)", real(0, below=1)),
        mapped("muon_lr", None, "zf.optim.muon(learning_rate)", optional(RATE), _OWN_RATE),
        mapped("adam_lr", None, "zf.optim.muon(rest=zf.optim.adamw(learning_rate))", optional(RATE),
            _ADAM_RATE),
        mapped("nesterov", True, "zf.optim.muon(nesterov=)"),
    ),
    *of(TORCH_OPTIMIZERS, _rate(1e-3, "zf.optim.from_torch(lr=)")),
    refused("max_grad_norm", 0.0, "write gradient_clipping at the top of the configuration",
        real(0)),
)

_ZERO = Fill((), lambda: 0.0, "0", must_match=False)
_NUM_WARMUP = Fill(("num_warmup",), lambda steps: max(1, steps), "num_warmup, at least 1")
_PEAK = Fill(("learning_rate",), lambda rate: rate, "learning_rate")
_RATIO = "times the learning rate"
_RATES, _MOMENTA = by_group(RATE), by_group(real(0, below=1))

_SCHEDULERS = (
    mapped("last_batch_iteration", -1, "Recipe.learning_rate", count(-1),
        "the first step takes the value after this step"),
    *of(("WarmupLR", "WarmupDecayLR"),
        mapped("warmup_min_lr", 0.0, "zf.optim: start", _RATES, fill=_ZERO),
    ),
    *of("WarmupLR",
        mapped("warmup_max_lr", None, "zf.optim: peak", optional(_RATES),
            "by default the learning rate of the optimizer", _PEAK),
    ),
    *of("WarmupDecayLR",
        mapped("warmup_max_lr", 1e-3, "zf.optim: peak", optional(_RATES), fill=_PEAK),
    ),
    *of(_WARMUPS,
        mapped("warmup_num_steps", 1000, "zf.optim: num_warmup", count(1), "at least 2",
            _NUM_WARMUP),
        mapped("warmup_type", "log", "zf.optim: shape", text("log", "linear"),
            "DeepSpeed's default is log, unlike the schedules of transformers"),
    ),
    *of(("WarmupDecayLR", "WarmupCosineLR"),
        mapped("total_num_steps", None, "zf.optim: num_steps", count(1), fill=filled("num_steps")),
    ),
    *of("WarmupCosineLR",
        mapped("warmup_min_ratio", 0.0, "zf.optim: start", real(0), _RATIO),
        mapped("cos_min_ratio", 1e-4, "zf.optim: end", real(0), _RATIO),
    ),
    *of("OneCycle",
        mapped("cycle_min_lr", None, "zf.optim.one_cycle(low)", _RATES),
        mapped("cycle_max_lr", None, "zf.optim.one_cycle(high)", _RATES),
        mapped("decay_lr_rate", 0.0, "zf.optim.one_cycle(decay_rate=)", real(0)),
        mapped("cycle_first_step_size", 2000, "zf.optim.one_cycle(num_up=)", count(1)),
        mapped("cycle_second_step_size", None, "zf.optim.one_cycle(num_down=)", optional(count(1))),
        mapped("cycle_first_stair_count", 0, "zf.optim.one_cycle(stairs_up=)", count()),
        mapped("cycle_second_stair_count", None, "zf.optim.one_cycle(stairs_down=)",
            optional(count())),
        mapped("decay_step_size", 0, "zf.optim.one_cycle(decay_steps=)", count()),
        mapped("cycle_momentum", True, "zf.optim.one_cycle_momentum as b1",
            why="for optimizers with betas; b2 is then 0.99, as in DeepSpeed"),
        mapped("cycle_min_mom", 0.8, "zf.optim.one_cycle_momentum(low)", _MOMENTA),
        mapped("cycle_max_mom", 0.9, "zf.optim.one_cycle_momentum(high)", _MOMENTA),
        mapped("decay_mom_rate", 0.0, "zf.optim.one_cycle_momentum(decay_rate=)", real(0)),
    ),
    *of("LRRangeTest",
        mapped("lr_range_test_min_lr", 1e-3, "zf.optim.lr_range_test(start)", _RATES),
        mapped("lr_range_test_step_size", 2000, "zf.optim.lr_range_test(num_steps)", count(1)),
        mapped("lr_range_test_step_rate", 1.0, "zf.optim.lr_range_test(rate)", real()),
        mapped("lr_range_test_staircase", False, "zf.optim.lr_range_test(staircase=)"),
    ),
)

OPTIM: tuple[Key, ...] = (
    mapped("optimizer.type", None, "zf.optim", TYPE),
    ignored("optimizer.legacy_fusion", False, _ONE_RULE),
    mapped("scheduler.type", None, "zf.optim", text(*SCHEDULERS)),
    *section("optimizer.params", *_OPTIMIZERS),
    *section("scheduler.params", *_SCHEDULERS),
)
