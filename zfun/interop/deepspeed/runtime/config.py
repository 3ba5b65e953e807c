"""``deepspeed.runtime.config``: a configuration as attributes; elasticity.

Each value is the one that ``initialize`` uses: given, or DeepSpeed's default. ``"auto"`` stays.
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeAlias

from zfun.errors import ConfigError, OptionError
from zfun.interop.deepspeed import comm
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime._constants import constants_of
from zfun.interop.ds_config import AutoValues, batch_of
from zfun.interop.ds_config._batch import elastic_batch
from zfun.interop.ds_config._mistakes import error_of
from zfun.interop.ds_config._read import read
from zfun.interop.ds_config._values import Checked

_Z = "zero_optimization"
_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
DeepSpeedConfigError = ElasticityError = ElasticityConfigError = ConfigError
ElasticityIncompatibleWorldSize = OptionError
globals().update(constants_of("runtime.constants", "runtime.config"))


class ZeroStageEnum(enum.IntEnum):
    """The stages."""

    disabled, optimizer_states, gradients, weights, max_stage = 0, 1, 2, 3, 3


class OffloadDeviceEnum(enum.StrEnum):
    """The places of an offloaded part."""

    none, cpu, nvme = "none", "cpu", "nvme"


class OffloadStateTypeEnum(enum.StrEnum):
    """The parts of a state that ``offload_states`` moves."""

    optim_states, hp_params = "optim_states", "hp_params"
    lp_params, lp_grads = "lp_params", "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


_Values: TypeAlias = dict[str, Any]  # because a section has a method dict()


class _Section(SimpleNamespace):
    """A section of a configuration with its values as attributes."""

    _path: ClassVar[str]

    def __init__(self, **given: Any) -> None:
        keys = given
        for name in reversed(self._path.split(".")):
            keys = {name: keys}
        super().__init__(**_values_of(keys, self._path))

    def model_dump(self, **how: Any) -> _Values:
        """Return the values as a dict."""
        return {
            name: x.model_dump() if isinstance(x, _Section) else x for name, x in vars(self).items()
        }

    dict = model_dump


class DeepSpeedZeroConfig(_Section):
    """The section ``zero_optimization``.

    Example:
        >>> config = DeepSpeedZeroConfig(stage=3)
        >>> config.stage == ZeroStageEnum.weights, config.reduce_scatter
        (True, True)
    """

    _path = _Z

    def __init__(self, strict: bool = False, **given: Any) -> None:
        super().__init__(**given)
        self.stage = ZeroStageEnum(self.stage)


class DeepSpeedZeroOffloadParamConfig(_Section):
    """The section ``offload_param``."""

    _path = f"{_Z}.offload_param"


class DeepSpeedZeroOffloadOptimizerConfig(_Section):
    """The section ``offload_optimizer``."""

    _path = f"{_Z}.offload_optimizer"


def get_zero_config(param_dict: Mapping[str, Any]) -> DeepSpeedZeroConfig:
    """Return the section ``zero_optimization`` of a configuration."""
    return DeepSpeedZeroConfig(**param_dict.get(_Z, {}))


class DeepSpeedConfig(SimpleNamespace):
    """A configuration with the attributes of DeepSpeed's; ``mesh_device`` is not used.

    Raises:
        ConfigError: the configuration has mistakes; the message lists all of them.

    Example:
        >>> config = DeepSpeedConfig({"train_batch_size": 8, "bf16": {"enabled": True}})
        >>> config.train_micro_batch_size_per_gpu, config.bfloat16_config.enabled
        (8, True)
    """

    def __init__(
        self, config: Mapping[str, Any] | str | Path, mpu: Any = None, mesh_device: Any = None
    ) -> None:
        keys, _ = read(config)
        size = comm.get_world_size() if mpu is None else mpu.get_data_parallel_world_size()
        values = _values_of(keys, "")
        for name in ("optimizer", "scheduler"):
            section = keys.get(name) or {}
            values |= {f"{name}_name": section.get("type"), f"{name}_params": section.get("params")}
        train, micro, steps = (
            None if (given := keys.get(name)) == "auto" else given for name in _SIZES
        )
        if train is not None or micro is not None:
            batch = batch_of(size, train=train, micro=micro, accumulation=steps)
            values |= dict(zip(_SIZES, batch[:3], strict=True))
        zero = get_zero_config(keys) if isinstance(keys.get(_Z, {}), Mapping) else None
        half, brain = values["fp16"], values["bf16"]
        super().__init__(
            **values,
            _param_dict=dict(keys),
            world_size=size,
            zero_config=zero,
            zero_enabled=zero is not None and zero.stage > 0,
            zero_optimization_stage=0 if zero is None else zero.stage,
            float16_config=half,
            fp16_enabled=half.enabled,
            bfloat16_config=brain,
            bfloat16_enabled=brain.enabled,
            global_rank=comm.get_rank(),
        )


def checked_in(keys: Mapping[str, Any], name: str, *sections: str) -> Checked:
    """Check a configuration, of which these sections, and those around them, have no mistake."""
    found = Checked(keys, late=tuple(field.name for field in fields(AutoValues)))
    starts = [f"{section}." if section else "" for section in sections]
    mistakes = [
        one
        for one in found.mistakes
        if any(f"{one.path}.".startswith(x) or x.startswith(f"{one.path}.") for x in starts)
    ]
    if mistakes:
        raise error_of(mistakes, name)
    return found


def _values_of(keys: Mapping[str, Any], section: str) -> dict[str, Any]:
    """Return the values of a section, and of its sections, as attributes.

    Raises:
        ConfigError: keys of the section have mistakes.
    """
    found = checked_in(keys, section or "the configuration", section)
    start = f"{section}." if section else ""
    values: dict[str, Any] = {}
    paths = [path.removeprefix(start) for path in found.keys if path.startswith(start)]
    for name in sorted({path.partition(".")[0] for path in paths}):
        path = f"{start}{name}"
        if path in found.keys:
            given = found.given.get(path)
            values[name] = given if given == "auto" else found.values.found[path]
        elif section == _Z and not any(p.startswith(f"{path}.") for p in found.given):
            values[name] = None
        elif path != _Z:
            values[name] = inner = _Section.__new__(_Section)
            vars(inner).update(_values_of(keys, path))
    return values


def elasticity_enabled(ds_config: Mapping[str, Any]) -> bool:
    """Return whether a configuration has elasticity."""
    return bool((ds_config.get("elasticity") or {}).get("enabled"))


def compute_elastic_config(
    ds_config: Mapping[str, Any],
    target_deepspeed_version: str = "",
    world_size: int = 0,
    return_microbatch: bool = False,
) -> tuple[Any, ...]:
    """Return the batch size of a configuration with elasticity, and the numbers of ranks.

    With a ``world_size`` or ``return_microbatch`` the micro-batch size too. The launcher tells the
    number of ranks where it is needed; ``target_deepspeed_version`` is not used.

    Raises:
        OptionError: there is no elasticity, or the number of ranks does not fit.

    Example:
        >>> section = {"enabled": True, "max_train_batch_size": 32, "micro_batch_sizes": [2, 3]}
        >>> compute_elastic_config({"elasticity": {**section, "version": 0.1}}, world_size=4)
        (24, [1, 2, 3, 4, 6, 8, 12], 3)
    """
    if not elasticity_enabled(ds_config):
        raise OptionError(
            "compute_elastic_config() takes a configuration with elasticity; got one without; "
            'write "elasticity": {"enabled": true, ...}'
        )
    given = ds_config["elasticity"]
    ranks = world_size
    if not ranks and (return_microbatch or str(given.get("version", 0.2)) == "0.2"):
        ranks = int(os.environ.get("WORLD_SIZE", "0"))
    found = elastic_batch(given, ranks or None)
    sizes = (found.train, list(found.world_sizes))
    return (*sizes, found.micro) if world_size or return_microbatch else sizes


__getattr__ = absent("runtime.config", globals(), "config")
