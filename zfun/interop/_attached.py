"""Engines of loops that drop the gradients themselves, and the optimizers of ``accelerate``."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from zfun import tree
from zfun.errors import OptionError, PlacementError
from zfun.interop._questions import NO_VALUES, accessors, changes_nothing
from zfun.interop.engine import Engine, EngineBuffers, ParamGroups, named_leaves
from zfun.interop.engine._reads import live_of
from zfun.interop.engine._torch_states import give_moments
from zfun.optim import MissedSteps


class ZeroedEngine(Engine):
    """An engine that steps leaves whose gradients the loop has set to zero, as torch does.

    After ``zero_grad(set_to_none=False)`` a leaf that is not used has a gradient of zeros, so that
    momentum and weight decay move it; after ``zero_grad()`` it has none.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The leaves whose gradients are zeros, to which backward adds.
        self._zeroed: set[str] = set()
        super().__init__(*args, **kwargs)

    def zero_grad(self, set_to_none: bool = True) -> None:
        zeroed = set() if set_to_none else self._zeroed | self._with_grads()
        super().zero_grad(set_to_none)
        self._zeroed = zeroed

    @property
    def extra(self) -> dict[str, nn.Parameter]:
        """The parameters of the optimizer that the module does not have, by name."""
        return self._extra

    @property
    def is_last(self) -> bool:
        """Whether the module is live by this engine."""
        live = live_of(self.module)
        return live is not None and live.owner is self

    def take_buffers(self, buffers: EngineBuffers) -> None:
        """Merge buffers of a module that has several engines."""
        self._buffers = buffers

    def _with_grads(self) -> set[str]:
        """Return the leaves that have gradients of this rank."""
        grads = self._sum.grads
        used = set(self._left())
        if grads is not None:
            used |= {x.path for x in grads.layout.leaves if x.path not in grads.missed}
        return used.difference(self._extra)

    def _leave_grads(self) -> None:
        super()._leave_grads()
        with torch._C.DisableTorchFunctionSubclass():
            for param in (self._params[name] for name in self._zeroed):
                param.grad = torch.zeros_like(param) if param.grad is None else param.grad

    def _strays(self) -> dict[str, Tensor]:
        found = super()._strays()
        if found or self._sum.grads is not None:
            return found
        with torch._C.DisableTorchFunctionSubclass():
            return {name: torch.zeros_like(self._params[name]) for name in self._zeroed}

    def _collected(self, *, steps: bool = False) -> Any:
        grads, *others = super()._collected(steps=steps)
        if self._zeroed and grads is not None:
            missed = {path: x for path, x in grads.missed.items() if path not in self._zeroed}
            self._sum.grads = grads = grads.with_missed(missed)
        return grads, *others

    def show_grads(self, name: str, *, is_read: bool) -> Tensor | None:
        found = super().show_grads(name, is_read=is_read)
        if name in self._zeroed:
            with torch._C.DisableTorchFunctionSubclass():
                param = self._params[name]
                if is_read and param.grad is None:
                    param.grad = torch.zeros_like(param)
        if not is_read:
            self._zeroed.discard(name)
        return found


EngineT = TypeVar("EngineT", bound=ZeroedEngine)


class StepEngine(ZeroedEngine):
    """An engine whose loop drops the gradients after a step, as a loop of torch does.

    In torch they stay in ``.grad`` until then; here the step has taken them.
    """

    # As in torch, where a loss may have other parameters alone.
    passes_empty_steps = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # The leaves whose gradients the last step has taken, and the loop has not dropped.
        self._spent: set[str] = set()
        # In a step, the steps that leaves had missed before.
        self._missed: MissedSteps | None = None
        super().__init__(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            for name, x in self.leaves.items():
                # Those of an engine that had the module before.
                if type(x.grad) is _SpentGrad:
                    x.grad = None
                    self._spent.add(name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self._spent.clear()

    def _with_grads(self) -> set[str]:
        return self._spent | super()._with_grads()

    def show_grads(self, name: str, *, is_read: bool) -> Tensor | None:
        if not is_read:
            self._spent.discard(name)
        elif name in self._spent:
            drop = self._drop_added if (is_added := self._sum.num_passes > 0) else self._drop
            return _SpentGrad.of(self._params[name], name, drop, is_added=is_added)
        return super().show_grads(name, is_read=is_read)

    def _drop(self, name: str) -> None:
        if name in self._spent:
            self._spent.remove(name)
            self._zeroed.add(name)

    def _drop_added(self, name: str) -> None:
        """Drop what the last step has taken of a leaf, and what later passes have added."""
        super().show_grads(name, is_read=False)
        self._drop(name)
        with torch._C.DisableTorchFunctionSubclass():
            if (grad := self._params[name].grad) is not None:
                grad.zero_()

    def step(self, *, boundary: bool | None = None) -> Any:
        if self._spent:
            raise _kept_grads("another step")
        self._missed = self._state.missed
        try:
            return super().step(boundary=boundary)
        finally:
            self._missed = None

    def _gathered(self) -> None:
        if self._spent:
            raise _kept_grads("a use of them")
        super()._gathered()

    def hand_on(self) -> None:
        """Let another engine take the module with its gradients, if none has; every rank must call.

        The optimizer keeps its moments until :meth:`give_back`.

        Raises:
            OptionError: gradients with a loss scale, or of weighted means.
        """
        if not self.is_last:
            return
        if self.has_grads:
            self._check_whole_grads()
        spent = self._spent
        self.free()
        with torch._C.DisableTorchFunctionSubclass():
            for name, param in self._params.items():
                if name in spent:
                    drop = functools.partial(_zero, param)
                    param.grad = _SpentGrad.of(param, name, drop, is_added=False)

    def _check_whole_grads(self) -> None:
        """Refuse gradients that would not be whole for another engine."""
        got = "another optimizer, or another run, in prepare() or setup() before the step"
        if self.loss_scale != 1.0 or self._sum.is_weighted:
            raise OptionError(
                "gradients with a loss scale, or of weighted means, stay with their engine; got "
                f"{got}; step before, or call zero_grad()"
            )
        groups = self._groups
        if left := [x for x in self.leaves if groups is not None and groups.leaves_out(x)]:
            raise OptionError(
                "an engine computes the gradients of the parameters in its optimizer; got "
                f"{got}, and leaf {left[0]!r}, which was in no optimizer; step before, or freeze "
                "it with requires_grad_(False)",
                leaf=left[0],
            )

    def give_back(self) -> None:
        """Give an optimizer its moments, after :meth:`hand_on`; every rank must call."""
        if self._groups is not None:
            give_moments(self._state, self._groups)

    def unscale(self) -> None:
        """Take the loss scale out of the gradients, as ``GradScaler.unscale_``; all ranks call."""
        self._settle()
        self._gathered()
        scale = self._sum.scale
        self._sum.unscale()
        for name, (grad, _, _) in [*self._taken.items()] if scale != 1.0 else ():
            grad.mul_(1.0 / scale)
            self._taken[name] = grad, grad._version, grad.clone()

    def clip_by(self, norm: Tensor, max_norm: float) -> None:
        """Clip the gradients since the last step as a part of a vector that has a norm."""
        self._sum.clip(norm, max_norm)
        self._sum.cut()

    def _begin(self) -> None:
        """Begin the calls of a step; hooks of torch that come after the last one follow."""
        super()._begin()
        if self._missed is not None:
            leaves = self._state.params.layout.leaves
            old, new = self._missed.of(leaves), self._state.missed.of(leaves)
            used = {x.path for x in leaves if old.get(x.path) == new.get(x.path)}
            self._zeroed, self._spent = set(), used.intersection(self.leaves)


def _zero(param: Tensor, name: str) -> None:
    param.grad = torch.zeros_like(param)


def _kept_grads(what: str) -> OptionError:
    return OptionError(
        f"a step takes the gradients, where torch keeps them; got {what} after it without "
        "zero_grad() between; call optimizer.zero_grad() after each step, and clip before it"
    )


class _SpentGrad(Tensor):
    """The ``.grad`` of a leaf after a step: code may drop it, and look at its shape."""

    _name: str
    _drop: Callable[[str], None]
    # Whether later passes have added gradients, to which torch would have added the old ones.
    _is_added: bool

    @staticmethod
    def of(param: Tensor, name: str, drop: Callable[[str], None], *, is_added: bool) -> Tensor:
        """Make the one of a leaf; code that sets it to zero calls ``drop``."""
        with torch._C.DisableTorchFunctionSubclass():
            found: Any = Tensor._make_wrapper_subclass(
                _SpentGrad, param.shape, dtype=param.dtype, device=param.device
            )
        found._name, found._drop, found._is_added = name, drop, is_added
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in NO_VALUES or func is torch._has_compatible_shallow_copy_type:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        first = args[0] if args else None
        spent = [x for x in tree.leaves((args, kwargs)) if isinstance(x, _SpentGrad)]
        is_filled = func in (Tensor.fill_, Tensor.mul_) and type(args[1]) in (int, float)
        if func in _DROPS or (is_filled and args[1] == 0):
            for x in spent:
                x._drop(x._name)
            return first
        if func in _STAYS or (first is spent[0] and changes_nothing(func, args, kwargs or {})):
            return first
        if spent[0]._is_added:
            raise _kept_grads("backward()")
        raise PlacementError(
            f"a step takes the gradients; got {getattr(func, '__name__', func)}() of the .grad of "
            f"leaf {spent[0]._name!r} after it; read .grad between backward and the step, as in "
            "on_pre_optimizer_step of transformers and on_before_optimizer_step of Lightning",
            leaf=spent[0]._name,
        )

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return cls.__torch_function__(func, types, args, kwargs)

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        return f"<the gradient of leaf {self._name!r}, which the step has taken>"


_DROPS = frozenset([Tensor.zero_, torch.zero_, torch._foreach_zero_])
# Functions that come before, and those of nn.Module.to() where it changes nothing.
_STAYS = accessors("data") | {Tensor.detach_, Tensor.detach}


def layers_of(models: Iterable[nn.Module]) -> set[int]:
    """Return the identities of the parts of models that have parameters."""
    return {id(part) for model in models for part in model.modules() if part._parameters}


def ids_in(optimizer: Any) -> set[int]:
    """Return the identities of the parameters of an optimizer."""
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def leaves_of_each(module: nn.Module, optimizers: Sequence[Any]) -> list[dict[str, nn.Parameter]]:
    """Return the parameters of a module by name, for each optimizer; the first has the rest too."""
    leaves = named_leaves(module)
    ids = [*map(ids_in, optimizers)]
    ids[0] |= set(map(id, leaves.values())).difference(*ids)
    return [{name: x for name, x in leaves.items() if id(x) in own} for own in ids]


def engines_of(
    module: nn.Module, groups: Sequence[ParamGroups], make: type[EngineT], **options: Any
) -> list[EngineT]:
    """Return the engine of a module, or one for each of several optimizers.

    Several engines merge the buffers of the module in the step of each.
    """
    if len(groups) == 1:
        return [make(module, groups[0], extra=groups[0].extra_params, **options)]
    engines = engines_apart(module, groups, make, **options)
    mesh, recipe = engines[0].state.params.group, engines[0].recipe
    shared = EngineBuffers(module, "rank 0", mesh, "broadcast", {}, (), recipe.options)
    for engine in engines:
        engine.take_buffers(shared)
    return engines


def engines_apart(
    module: nn.Module, groups: Sequence[ParamGroups], make: type[EngineT], **options: Any
) -> list[EngineT]:
    """Return an engine for each optimizer: of its parameters, under their names in the module.

    As in torch, a step without gradients passes.
    """
    engines: list[EngineT] = []
    leaves = leaves_of_each(module, [one.optimizer for one in groups])
    try:
        for one, own in zip(groups, leaves, strict=True):
            holder = nn.Module()
            holder._parameters.update(own)
            engines.append(make(holder, one, extra=one.extra_params, **options))
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines


def check_whole(engines: Sequence[StepEngine], chosen: Sequence[Tensor], name: str) -> None:
    """Check that parameters to clip are all of some engines, and no others."""
    ids = set(map(id, chosen))
    own = {id(param) for engine in engines for param in engine.module.parameters()}
    rule = f"{name} takes all trained parameters of a model, whose gradients are one value"
    for leaf, param in (pair for engine in engines for pair in engine.leaves.items()):
        if param.requires_grad and id(param) not in ids:
            raise OptionError(
                f"{rule}; got parameters without leaf {leaf!r}; pass model.parameters(), or those "
                "of all models of the optimizer"
            )
    if others := [tuple(x.shape) for x in chosen if x.requires_grad and id(x) not in own]:
        raise OptionError(
            f"{rule}; got one of shape {others[0]} that the model lacks too; clip each model by a "
            "call of its own, and parameters of a loss with the function of torch.nn.utils"
        )


def clip_together(engines: Sequence[StepEngine], max_norm: float) -> Tensor:
    """Clip the gradients of engines by the norm of all of them, and return it."""
    if len(engines) == 1:
        return engines[0].clip(max_norm)
    norm = torch.stack([engine.norm() for engine in engines]).norm()
    for engine in engines if max_norm < math.inf else ():
        engine.clip_by(norm, max_norm)
    return norm


def check_last(engine: StepEngine) -> None:
    """Refuse a step of an engine whose parameters another one has."""
    if not engine.is_last:
        raise OptionError(
            "a parameter has one optimizer, the last one that prepare() or setup() got; got a step "
            "of another one; step the last one, or give each parameters of its own"
        )
