"""The keys of the optimizer and of the scheduler, by type."""

from __future__ import annotations

from typing import Any

from zfun.interop.ds_config.table._keys import (
    ANYTHING,
    BETAS,
    FLAG,
    Fill,
    Form,
    Key,
    count,
    ignored,
    mapped,
    optional,
    real,
    refused,
    text,
)

__all__ = ["OPTIM", "OPTIMIZERS", "REFUSED_OPTIMIZERS", "SCHEDULERS", "TORCH_OPTIMIZERS"]

_O = "optimizer.params"
_S = "scheduler.params"
_ADAMS = ("Adam", "AdamW")
_WITH_BETAS = (*_ADAMS, "Lamb", "OneBitAdam", "Muon")
_WARMUPS = ("WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
_RATE = real(0, example="3e-4")

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

_TYPE = Form(text(*OPTIMIZERS).kind._replace(accepts=lambda x: isinstance(x, str)))


def _from(name: str, **rule: Any) -> Fill:
    return Fill((name,), rule.pop("read", lambda value: value), rule.pop("words", name), **rule)


def _of(types: tuple[str, ...] | str, *keys: Key) -> tuple[Key, ...]:
    only = (types,) if isinstance(types, str) else types
    return tuple(key._replace(only=only) for key in keys)


def _rate(default: float) -> Key:
    becomes = "zf.optim: learning_rate"
    return mapped(
        f"{_O}.lr", _RATE, default, becomes, fill=_from("learning_rate", when_absent=True)
    )


def _betas(first: float, second: float) -> Key:
    read = {"read": lambda x: (float(x[0]), float(x[1])), "when_absent": True}
    return mapped(
        f"{_O}.betas", BETAS, (first, second), "zf.optim: b1, b2", fill=_from("betas", **read)
    )


def _eps(default: float) -> Key:
    return mapped(
        f"{_O}.eps", real(0), default, "zf.optim: eps", fill=_from("eps", when_absent=True)
    )


_DECAY = mapped(
    f"{_O}.weight_decay",
    real(0),
    0.0,
    "zf.optim: weight_decay",
    fill=_from("weight_decay", when_absent=True),
)
_MORE = "there is one implementation of each rule"

_OPTIMIZERS = (
    mapped("optimizer.type", _TYPE, None, "zf.optim"),
    ignored("optimizer.legacy_fusion", FLAG, False, _MORE),
    refused(
        f"{_O}.max_grad_norm",
        real(0),
        0.0,
        "write gradient_clipping at the top of the configuration",
    ),
    *_of((*_ADAMS, "Lamb", "OneBitAdam", "Lion", "Muon"), _rate(1e-3)),
    *_of(("SGD",), _rate(1e-3)),
    *_of("Adagrad", _rate(1e-2)),
    *_of(_WITH_BETAS, _betas(0.9, 0.999), _eps(1e-8)),
    *_of("Lion", _betas(0.9, 0.99)),
    *_of("Adagrad", _eps(1e-10)),
    *_of((*_WITH_BETAS, "Lion", "Adagrad", "SGD"), _DECAY),
    *_of(
        "Adam",
        mapped(
            f"{_O}.adam_w_mode",
            FLAG,
            True,
            "zf.optim.adamw, or zf.optim.adam if false",
            "Adam has decoupled weight decay by default, as in DeepSpeed",
        ),
    ),
    *_of("AdamW", ignored(f"{_O}.adam_w_mode", FLAG, True, "AdamW is always decoupled")),
    *_of(
        _ADAMS,
        mapped(
            f"{_O}.torch_adam",
            FLAG,
            False,
            "zf.optim: weight_decay",
            "true makes torch's default 0.01 the weight decay of AdamW, as in DeepSpeed",
        ),
        refused(
            f"{_O}.amsgrad", FLAG, False, "leave the key out: zfun's Adam has no maximum of moments"
        ),
        ignored(f"{_O}.fused", optional(FLAG), None, _MORE),
        ignored(f"{_O}.foreach", optional(FLAG), None, _MORE),
        ignored(f"{_O}.set_grad_none", FLAG, True, "gradients are values, not attributes"),
        ignored(
            f"{_O}.fp32_optimizer_states", FLAG, True, "moments have the dtype of master weights"
        ),
    ),
    *_of(
        (*_ADAMS, "Lamb"),
        refused(
            f"{_O}.bias_correction", FLAG, True, "leave the key out: moments are always corrected"
        ),
    ),
    *_of(
        "OneBitAdam",
        mapped(f"{_O}.freeze_step", count(1), 100_000, "zf.optim.onebit_adam(freeze_step=)"),
        ignored(
            f"{_O}.bias_correction", FLAG, True, "DeepSpeed's OneBitAdam has none, whatever it says"
        ),
        ignored(f"{_O}.cuda_aware", FLAG, False, "is for MPI"),
        ignored(f"{_O}.comm_backend_name", ANYTHING, "nccl", "the group sends"),
    ),
    *_of(
        "Lamb",
        mapped(f"{_O}.max_coeff", real(0), 10.0, "zf.optim.lamb(max_ratio=)"),
        mapped(f"{_O}.min_coeff", real(0), 0.01, "zf.optim.lamb(min_ratio=)"),
        refused(
            f"{_O}.eps_inside_sqrt", FLAG, False, "leave the key out: eps is added to the root"
        ),
    ),
    *_of(
        "SGD",
        mapped(f"{_O}.momentum", real(0, below=1), 0.0, "zf.optim.sgd(momentum=)"),
        mapped(f"{_O}.nesterov", FLAG, False, "zf.optim.sgd(nesterov=)"),
        refused(
            f"{_O}.dampening", real(0), 0.0, "leave the key out: momentum has no dampening in zfun"
        ),
    ),
    *_of("Adagrad", mapped(f"{_O}.lr_decay", real(0), 0.0, "zf.optim.adagrad(rate_decay=)")),
    *_of(
        "Muon",
        mapped(f"{_O}.momentum", real(0, below=1), 0.95, "zf.optim.muon(momentum=)"),
        mapped(
            f"{_O}.muon_lr",
            optional(_RATE),
            None,
            "zf.optim.muon(learning_rate)",
            "by default lr",
        ),
        mapped(
            f"{_O}.adam_lr",
            optional(_RATE),
            None,
            "zf.optim.muon(rest=zf.optim.adamw(learning_rate))",
            "by default lr",
        ),
        mapped(f"{_O}.nesterov", FLAG, True, "zf.optim.muon(nesterov=)"),
    ),
    *_of(TORCH_OPTIMIZERS, _rate(1e-3)._replace(becomes="zf.optim.from_torch(lr=)")),
)

_NUM_WARMUP = mapped(
    f"{_S}.warmup_num_steps",
    count(1),
    1000,
    "zf.optim: num_warmup",
    "at least 2",
    _from("num_warmup", read=lambda steps: max(1, steps), words="num_warmup, at least 1"),
)
_NUM_STEPS = mapped(
    f"{_S}.total_num_steps",
    count(1),
    None,
    "zf.optim: num_steps",
    fill=_from("num_steps", when_absent=True),
)
_MIN_RATE = mapped(
    f"{_S}.warmup_min_lr",
    real(0),
    0.0,
    "zf.optim: start",
    fill=Fill((), lambda: 0.0, "0", must_match=False),
)


def _max_rate(default: float | None) -> Key:
    return mapped(
        f"{_S}.warmup_max_lr",
        optional(_RATE),
        default,
        "zf.optim: peak",
        "" if default else "by default the learning rate of the optimizer",
        _from("learning_rate"),
    )


_SCHEDULERS = (
    mapped("scheduler.type", text(*SCHEDULERS), None, "zf.optim"),
    mapped(
        f"{_S}.last_batch_iteration",
        count(-1),
        -1,
        "Recipe.learning_rate",
        "the first step takes the value after this step",
    ),
    *_of(("WarmupLR", "WarmupDecayLR"), _MIN_RATE),
    *_of("WarmupLR", _max_rate(None)),
    *_of("WarmupDecayLR", _max_rate(1e-3)),
    *_of(
        _WARMUPS,
        _NUM_WARMUP,
        mapped(
            f"{_S}.warmup_type",
            text("log", "linear"),
            "log",
            "zf.optim: shape",
            "DeepSpeed's default is log, unlike the schedules of transformers",
        ),
    ),
    *_of(("WarmupDecayLR", "WarmupCosineLR"), _NUM_STEPS),
    *_of(
        "WarmupCosineLR",
        mapped(
            f"{_S}.warmup_min_ratio", real(0), 0.0, "zf.optim: start", "times the learning rate"
        ),
        mapped(f"{_S}.cos_min_ratio", real(0), 1e-4, "zf.optim: end", "times the learning rate"),
    ),
    *_of(
        "OneCycle",
        mapped(f"{_S}.cycle_min_lr", _RATE, None, "zf.optim.one_cycle(low)"),
        mapped(f"{_S}.cycle_max_lr", _RATE, None, "zf.optim.one_cycle(high)"),
        mapped(f"{_S}.decay_lr_rate", real(0), 0.0, "zf.optim.one_cycle(decay_rate=)"),
        mapped(f"{_S}.cycle_first_step_size", count(1), 2000, "zf.optim.one_cycle(num_up=)"),
        mapped(
            f"{_S}.cycle_second_step_size",
            optional(count(1)),
            None,
            "zf.optim.one_cycle(num_down=)",
        ),
        mapped(f"{_S}.cycle_first_stair_count", count(), 0, "zf.optim.one_cycle(stairs_up=)"),
        mapped(
            f"{_S}.cycle_second_stair_count",
            optional(count()),
            None,
            "zf.optim.one_cycle(stairs_down=)",
        ),
        mapped(f"{_S}.decay_step_size", count(), 0, "zf.optim.one_cycle(decay_steps=)"),
        mapped(
            f"{_S}.cycle_momentum",
            FLAG,
            True,
            "zf.optim.one_cycle_momentum as b1",
            "for optimizers with betas; b2 is then 0.99, as in DeepSpeed",
        ),
        mapped(f"{_S}.cycle_min_mom", real(0, below=1), 0.8, "zf.optim.one_cycle_momentum(low)"),
        mapped(f"{_S}.cycle_max_mom", real(0, below=1), 0.9, "zf.optim.one_cycle_momentum(high)"),
        mapped(f"{_S}.decay_mom_rate", real(0), 0.0, "zf.optim.one_cycle_momentum(decay_rate=)"),
    ),
    *_of(
        "LRRangeTest",
        mapped(f"{_S}.lr_range_test_min_lr", _RATE, 1e-3, "zf.optim.lr_range_test(start)"),
        mapped(
            f"{_S}.lr_range_test_step_size", count(1), 2000, "zf.optim.lr_range_test(num_steps)"
        ),
        mapped(f"{_S}.lr_range_test_step_rate", real(), 1.0, "zf.optim.lr_range_test(rate)"),
        mapped(f"{_S}.lr_range_test_staircase", FLAG, False, "zf.optim.lr_range_test(staircase=)"),
    ),
)

OPTIM: tuple[Key, ...] = (*_OPTIMIZERS, *_SCHEDULERS)
