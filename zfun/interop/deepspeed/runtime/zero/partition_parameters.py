"""``zero.Init`` and ``zero.GatheredParameters``."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from zfun import tree
from zfun.collectives import broadcast, global_ranks
from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._ranks import group_of, init_from_launcher
from zfun.interop.deepspeed.accelerator import get_accelerator  # noqa: F401
from zfun.interop.deepspeed.runtime.config import checked_in
from zfun.interop.deepspeed.runtime.zero._owners import (  # noqa: F401
    Pieces,
    ZeroParamStatus,
    cut,
    is_shown,
    mark,
    root_of,
)
from zfun.interop.deepspeed.runtime.zero._stand_ins import (
    TensorOwner,
    is_partitioned,
    owner_of,
    told,
)
from zfun.interop.ds_config._read import read
from zfun.interop.engine._parameter import NO_VALUES
from zfun.interop.engine._watched import is_shared
from zfun.ops import fingerprint

# transformers replaces the second name, in which DeepSpeed's Init wraps torch's constructors. Init
# leaves constructors alone here.
_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(fn: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the function."""
    return fn


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Do nothing: a parameter is gathered where it is used, in any module.

    Example:
        >>> layer = torch.nn.Linear(2, 2)
        >>> register_external_parameter(torch.nn.Identity(), layer.weight)
    """


unregister_external_parameter = register_external_parameter


_OFFLOAD = "zero_optimization.offload_param"
# So many parameters that were touched last stay whole under Init.
_WINDOW = 16


class Init:
    """A context in which the parameters of new modules are cut into one piece for each rank.

    A layer stays whole until the module around it is complete. Code that touches a parameter after
    that, as the last lines of constructors of transformers do, finds the whole values: they are
    gathered, and cut again when 16 other parameters have been touched. So a rank holds the pieces
    of the model, one block, and the layers of the root; a parameter on ``meta`` is cut when it has
    values. All ranks have the values of rank 0, and must touch the same parameters. ``initialize``
    takes the module, at any stage; :class:`GatheredParameters` shows values.

    The arguments are DeepSpeed's. ``remote_device="nvme"`` keeps pieces in files of the folder
    ``offload_param.nvme_path`` of the configuration. ``mem_efficient_linear``, ``pin_memory`` and
    arguments that are not named here are not used.

    Raises:
        ConfigError: a dtype or ``offload_param`` of the configuration has mistakes.
        OptionError: ``remote_device`` is another place, or has no folder; or, at the end, a
            parameter was changed through a view that was older than 16 parameters.

    Example:
        >>> with Init(dtype=torch.bfloat16):
        ...     model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> model[0].weight
        Partitioned((2, 4), torch.bfloat16)
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
        **more: Any,
    ) -> None:
        self._dtype = dtype
        self._owner: Pieces | None = None  # None where the context is not enabled
        self._new: dict[int, nn.Parameter] = {}
        self._modules: dict[int, nn.Module] = {}
        chosen = config if config_dict_or_path is None else config_dict_or_path
        if not enabled:
            return
        keys, name = read({} if chosen is None else chosen)
        values = checked_in(keys, name, "bf16", "fp16", _OFFLOAD).values.found
        halves = {torch.bfloat16: values["bf16.enabled"], torch.float16: values["fp16.enabled"]}
        half = next((half for half, is_on in halves.items() if is_on), None)
        if dtype is None:
            self._dtype = half
        folder = _folder_of(values, remote_device)
        ranks = data_parallel_group or sequence_data_parallel_group
        if ranks is None and mpu is not None:
            ranks = mpu.get_data_parallel_group()
        if ranks is None:
            init_from_launcher()
        self._owner = Pieces(group_of(ranks), folder)
        if module is not None:
            self._cut(module.parameters())

    def __enter__(self) -> Init:
        if self._owner is not None:
            self._touched = _TouchedParams(global_ranks(self._owner.group)[0])
            _ENTERED.contexts.append(self)
            self._touched.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._owner is None:
            return
        self._touched.__exit__(None, None, None)
        _ENTERED.contexts.remove(self)
        if kind is None:
            self._touched.close()
            # Modules are made in one order on all ranks; a loader may set parameters in another.
            for module in self._modules.values():
                own = sorted(module.named_parameters(recurse=False))
                self._cut(p for _, p in own if id(p) in self._new)
        self._new.clear()
        self._modules.clear()

    def on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        """Notice a parameter that a module gets."""
        if param is not None:
            self._new[id(param)] = param
            # For Pieces.settle().
            told(param)._zfun_module = weakref.ref(module)
            self._modules.setdefault(id(module), module)

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Cut the layers of a module that is complete."""
        for grandchild in () if child is None else child.children():
            self._cut(p for p in grandchild.parameters() if id(p) in self._new)

    def _cut(self, params: Iterable[nn.Parameter]) -> None:
        assert self._owner is not None
        with torch._C.DisableTorchFunction():
            for param in list(params):
                if param.device.type == "meta":
                    continue
                # Subclasses, such as quantised ones, stay whole.
                is_known = type(param) is nn.Parameter and param.is_floating_point()
                if is_known and not is_partitioned(param):
                    cut(param, self._owner, self._dtype)
                self._new.pop(id(param), None)


class _Entered(threading.local):
    """The contexts that a thread is in; a simulated rank is a thread."""

    def __init__(self) -> None:
        self.contexts: list[Init] = []


_ENTERED = _Entered()


def _each(notice: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that tells every context of the thread."""

    def hook(*args: Any) -> None:
        for context in _ENTERED.contexts:
            notice(context, *args)

    return hook


# The hooks stay, because another thread may run through torch's list of them.
register_module_parameter_registration_hook(_each(Init.on_parameter))
register_module_module_registration_hook(_each(Init.on_module))


class _TouchedParams(TorchFunctionMode):
    """Gathers a partitioned parameter before a function of torch reads or writes it."""

    def __init__(self, root: int) -> None:
        super().__init__()
        # The rank whose values all ranks take.
        self._root = root
        self._open: dict[int, GatheredParameters] = {}
        # Values of parameters that are cut again, while a view of them lives.
        self._seen: list[tuple[Tensor, Any]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in NO_VALUES:
            for x in tree.leaves((args, kwargs)):
                if isinstance(x, nn.Parameter) and is_partitioned(x):
                    self._touch(x)
        return func(*args, **kwargs)

    def _touch(self, param: nn.Parameter) -> None:
        if not is_shown(param):
            context = GatheredParameters(param, modifier_rank=self._root)
            context.__enter__()
            self._open[id(param)] = context
            told(param)._zfun_shut = lambda: self._shut(param)
            # In the order of the gathers, because one rank may touch a parameter again alone.
            if len(self._open) > _WINDOW:
                next(iter(self._open.values())).params[0]._zfun_shut()

    def _shut(self, param: nn.Parameter) -> None:
        context = self._open.pop(id(param))
        del told(param)._zfun_shut
        whole = param.detach()
        context.__exit__(None, None, None)
        self._seen = [(x, old) for x, old in self._seen if is_shared(x)]
        if is_shared(whole):
            self._seen.append((whole, fingerprint(whole)))

    def close(self) -> None:
        """Cut all parameters again."""
        for context in list(self._open.values()):
            self._shut(context.params[0])
        late = [x for x, old in self._seen if fingerprint(x) != old]
        self._seen = []
        if late:
            raise OptionError(
                f"under zero.Init a view of a parameter holds for the next {_WINDOW} parameters; "
                f"got {len(late)} written later, the first of shape {tuple(late[0].shape)}; write "
                "under zero.GatheredParameters(param, modifier_rank=0), after the model is made"
            )


def _folder_of(values: Mapping[str, Any], remote_device: str | None) -> Path | None:
    """Return the folder of pieces on a disk; ``None`` for pieces in memory."""
    place = values[f"{_OFFLOAD}.device"] if remote_device is None else remote_device
    if place in ("none", "cpu"):
        return None
    if place != "nvme":
        raise OptionError(
            f"zero.Init keeps pieces in memory or on a disk; got remote_device={place!r}; pass "
            "'cpu' or 'nvme'"
        )
    if (folder := values[f"{_OFFLOAD}.nvme_path"]) is None:
        raise OptionError(
            "zero.Init keeps pieces on a disk in a folder of the configuration; got no "
            "zero_optimization.offload_param.nvme_path; write it, or pass remote_device='cpu'"
        )
    return Path(folder)


class GatheredParameters:
    """A context in which partitioned parameters are whole.

    At its end all ranks take the changes of ``modifier_rank``. Parameters that are not partitioned
    are left alone, as in DeepSpeed, and so is ``None``, the bias of a layer without one: at stages
    0 to 2, after ``initialize``, the parameters of the module are always whole. ``fwd_module`` is
    not used.

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
        params: Tensor | Iterable[Any] | None,
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        is_one = params is None or isinstance(params, Tensor)
        given: list[Any] = [params] if is_one else list(params)
        # Below stage 3 only a rank that writes alone needs the context.
        found = {
            id(p): p
            for p in (given if enabled else ())
            if is_partitioned(p) and (modifier_rank is not None or hasattr(p, "ds_id"))
        }
        # Ranks may list parameters in different orders, such as that of a set.
        self.params: list[Any] = sorted(found.values(), key=lambda p: p._zfun_order)
        self._rank = modifier_rank
        self._shown: list[tuple[TensorOwner, list[nn.Parameter], list[int]]] = []

    def __enter__(self) -> None:
        # A parameter that an outer context shows is left to the outer context; one that Init shows
        # for a while is this context's from now on.
        for param in self.params:
            getattr(param, "_zfun_shut", lambda: None)()
        hidden = [p for p in self.params if not is_shown(p)]
        with torch._C.DisableTorchFunction():
            self._show(hidden)

    def _show(self, hidden: list[Any]) -> None:
        found = _by_owner(hidden)
        if self._rank is not None:
            for owner, _ in found:
                root_of(self._rank, owner.group)
        for owner, params in found:
            values = owner.gathered(params)
            owner.show(params, values)
            for param in params:
                mark(param, shown=True)
            prints = [] if self._rank is not None else [fingerprint(x) for x in values]
            self._shown.append((owner, params, prints))

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        with torch._C.DisableTorchFunction():
            changed = self._hide(kind is None)
        if changed and kind is None:
            raise OptionError(
                "values change under GatheredParameters only with a modifier_rank; got "
                f"{len(changed)} changed parameters, the first of shape "
                f"{tuple(changed[0].shape)}, without one; pass modifier_rank=0, for the changes "
                "of rank 0"
            )

    def _hide(self, is_whole: bool) -> list[nn.Parameter]:
        """Cut the parameters, and return those that changed without a ``modifier_rank``."""
        changed: list[nn.Parameter] = []
        for owner, params, prints in self._shown:
            values = [p.detach() for p in params]
            owner.hide(params)
            for param in params:
                mark(param, shown=False)
            if is_whole and self._rank is not None:
                root = root_of(self._rank, owner.group)
                names = [f"parameter {told(p)._zfun_order}" for p in params]
                with torch.no_grad():
                    sent = [
                        broadcast(x.contiguous(), owner.group, root, name=name)
                        for name, x in zip(names, values, strict=True)
                    ]
                owner.put(params, sent)
                if isinstance(owner, Pieces) and owner.group.rank != root:
                    owner.settle(params)
            old = zip(params, values, prints, strict=False)
            changed += [param for param, x, seen in old if fingerprint(x) != seen]
        self._shown = []
        return changed


def _by_owner(params: Iterable[nn.Parameter]) -> list[tuple[TensorOwner, list[nn.Parameter]]]:
    found: dict[int, tuple[TensorOwner, list[nn.Parameter]]] = {}
    for param in params:
        owner = owner_of(param)
        found.setdefault(id(owner), (owner, []))[1].append(param)
    return list(found.values())


__getattr__ = absent("runtime.zero.partition_parameters", globals(), "zero")
