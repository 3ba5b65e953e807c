"""``zero.Init`` and ``zero.GatheredParameters``."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zfun.collectives import broadcast
from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._ranks import group_of, init_from_launcher
from zfun.interop.deepspeed.runtime.zero._owners import (
    Owner,
    Pieces,
    ZeroParamStatus,
    check_unwritten,
    cut,
    is_partitioned,
    owner_of,
    release,
    root_of,
    show,
)
from zfun.interop.ds_config._read import read
from zfun.ops import fingerprint

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]


class Init:
    """A context in which the parameters of new modules are cut into one piece for each rank.

    A layer stays whole until the module around it is complete, because the constructor of this
    module may still write into the layer. So a rank holds the pieces of the model, one block, and
    the layers of the root. All ranks have the values of rank 0. ``initialize`` takes the module, at
    any stage; :class:`GatheredParameters` shows values.

    Args:
        module: a complete module, whose parameters are cut at once.
        data_parallel_group: the ranks that hold pieces; by default all.
        mem_efficient_linear: accepted and not used.
        remote_device: only ``None`` and ``"cpu"``; ``offload_param`` of the configuration names
            the place of the state.
        pin_memory: accepted and not used.
        config_dict_or_path: the configuration, which may choose bf16 or fp16.
        config: the same by an older name.
        enabled: ``False`` makes the context do nothing.
        dtype: the dtype of floating parameters; by default the configuration's, or their own.
        mpu: an object with ``get_data_parallel_group()``.
        sequence_data_parallel_group: the same as ``data_parallel_group``.

    Raises:
        OptionError: ``remote_device`` is another place.

    Example:
        >>> with Init(dtype=torch.bfloat16):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> model[0].weight.dtype, model[0].weight.shape, model[0].weight.isnan().all().item()
        (torch.bfloat16, torch.Size([2, 4]), True)
        >>> with GatheredParameters(model[0].weight):
        ...     model[0].weight.isnan().any().item()
        False
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Mapping[str, Any] | str | Path | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        sequence_data_parallel_group: Any = None,
    ) -> None:
        if remote_device not in (None, "none", "cpu"):
            raise OptionError(
                f"zero.Init keeps pieces in memory; got remote_device={remote_device!r}; write "
                "offload_param with device 'nvme' into the configuration of initialize()"
            )
        self._enabled = enabled
        self._thread = threading.get_ident()
        self._new: dict[int, nn.Parameter] = {}
        self._hooks: list[Any] = []
        chosen = config if config_dict_or_path is None else config_dict_or_path
        self._dtype = dtype if dtype is not None else _half_of(chosen)
        if not enabled:
            return
        ranks = data_parallel_group or sequence_data_parallel_group
        if ranks is None and mpu is not None:
            ranks = mpu.get_data_parallel_group()
        if ranks is None:
            init_from_launcher()
        self._owner = Pieces(group_of(ranks))
        if module is not None:
            self._cut(module.parameters())

    def __enter__(self) -> Init:
        if self._enabled:
            self._hooks = [
                register_module_parameter_registration_hook(self._on_parameter),
                register_module_module_registration_hook(self._on_module),
            ]
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for hook in self._hooks:
            hook.remove()
        if kind is None:
            self._cut(self._new.values())
        self._new = {}

    def _on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        # Other threads may be other simulated ranks.
        if param is not None and threading.get_ident() == self._thread:
            self._new[id(param)] = param

    def _on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        if child is None or threading.get_ident() != self._thread:
            return
        for grandchild in child.children():
            self._cut(p for p in grandchild.parameters() if id(p) in self._new)

    def _cut(self, params: Iterable[nn.Parameter]) -> None:
        for param in list(params):
            if not is_partitioned(param) and param.is_floating_point():
                cut(param, self._owner, self._dtype)
            self._new.pop(id(param), None)


def _half_of(config: Mapping[str, Any] | str | Path | None) -> torch.dtype | None:
    if config is None:
        return None
    keys, _ = read(config)
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        section = keys.get(name, {})
        if isinstance(section, Mapping) and section.get("enabled") is True:
            return dtype
    return None


class GatheredParameters:
    """A context in which partitioned parameters are whole.

    Parameters that are not partitioned are left alone, as in DeepSpeed: at stages 0 to 2, after
    ``initialize``, the parameters of the module are always whole.

    Args:
        params: a parameter or parameters.
        modifier_rank: the rank whose changes all ranks take at the end; ``None`` for none.
        fwd_module: accepted and not used.
        enabled: ``False`` makes the context do nothing.

    Raises:
        OptionError: values changed and there is no ``modifier_rank``, so that the changes would be
            lost; or ``modifier_rank`` is no rank of the group.

    Example:
        >>> with Init():
        ...     layer = torch.nn.Linear(2, 1)
        >>> with GatheredParameters(layer.parameters(), modifier_rank=0):
        ...     _ = layer.weight.data.fill_(0.5)
        >>> with GatheredParameters(layer.weight):
        ...     layer.weight.tolist()
        [[0.5, 0.5]]
    """

    def __init__(
        self,
        params: Tensor | Iterable[Any],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given: list[Any] = [params] if isinstance(params, Tensor) else list(params)
        self._params: list[Any] = [p for p in given if is_partitioned(p)] if enabled else []
        self._rank = modifier_rank
        self._shown: list[tuple[Owner, list[nn.Parameter], list[int]]] = []

    def __enter__(self) -> None:
        # A parameter that an outer context shows is left to the outer context.
        hidden = {id(p): p for p in self._params if p.ds_status is not ZeroParamStatus.AVAILABLE}
        check_unwritten(hidden.values())
        found = _by_owner(hidden.values())
        if self._rank is not None:
            for owner, _ in found:
                root_of(self._rank, owner.group)
        for owner, params in found:
            values = owner.gathered(params)
            for param, value in zip(params, values, strict=True):
                show(param, value)
            prints = [] if self._rank is not None else [fingerprint(x) for x in values]
            self._shown.append((owner, params, prints))

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        changed: list[nn.Parameter] = []
        for owner, params, prints in self._shown:
            values = [p.detach() for p in params]
            for param in params:
                release(param, None)
            if kind is None and self._rank is not None:
                root = root_of(self._rank, owner.group)
                with torch.no_grad():
                    sent = [
                        broadcast(x.contiguous(), owner.group, root, name="GatheredParameters")
                        for x in values
                    ]
                owner.put(params, sent)
            changed += [
                p
                for p, x, old in zip(params, values, prints, strict=False)
                if fingerprint(x) != old
            ]
        self._shown = []
        if changed and kind is None:
            raise OptionError(
                "values change under GatheredParameters only with a modifier_rank; got "
                f"{len(changed)} changed parameters, the first of shape "
                f"{tuple(changed[0].shape)}, without one; pass modifier_rank=0, for the changes "
                "of rank 0"
            )


def _by_owner(params: Iterable[nn.Parameter]) -> list[tuple[Owner, list[nn.Parameter]]]:
    found: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    for param in params:
        owner = owner_of(param)
        found.setdefault(id(owner), (owner, []))[1].append(param)
    return list(found.values())


__getattr__ = absent("zero", globals())
