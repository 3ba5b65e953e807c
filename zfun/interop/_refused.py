"""Options of ``accelerate`` that zfun refuses, because it does the work itself."""

from __future__ import annotations

from typing import Any

from accelerate.utils import DDPCommunicationHookType
from torch import Tensor

from zfun.errors import OptionError

# Of accelerate's parallelism_config.
_OTHER_AXES = ("dp_shard_size", "tp_size", "cp_size", "sp_size")


def check_options(accelerator: Any) -> None:
    """Refuse plugins, axes and hooks of an ``accelerate.Accelerator`` that shard or send too."""
    for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
        if getattr(accelerator.state, plugin, None) is not None:
            raise OptionError(
                f"zfun shards, reduces and steps by itself; got {plugin} of accelerate; leave "
                "it out of the script and of the configuration of accelerate, and pass zero= "
                "or a configuration of DeepSpeed to zfun"
            )
    sizes = {name: getattr(accelerator.parallelism_config, name, 1) for name in _OTHER_AXES}
    if others := [f"{name}={size}" for name, size in sizes.items() if size != 1]:
        raise OptionError(
            f"the processes of an Accelerator are data ranks under zfun; got {others[0]} in "
            "parallelism_config; leave it out, and pass zero=3 to shard parameters"
        )
    hook = getattr(accelerator.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
    if hook != DDPCommunicationHookType.NO:
        raise OptionError(
            f"zfun sends gradients without hooks of DDP; got comm_hook={hook.value!r} in "
            "DistributedDataParallelKwargs; leave it out, and pass zero={'compression': ...}"
        )


def refuse_alone(param: Tensor) -> None:
    """Refuse a gradient of a model without an engine, as a hook of the parameter."""
    raise OptionError(
        "a model is sharded together with its optimizer; got gradients of a model whose optimizer "
        "prepare() has not got, so no ranks would share them; pass both to prepare(), the "
        "optimizer as one of torch.optim"
    )
