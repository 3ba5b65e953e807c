"""The engine of zfun beneath the names, and the optimizer and the parameters that stand for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from zfun import optim
from zfun.collectives import Group, broadcast
from zfun.errors import CheckpointError, OptionError
from zfun.interop._configured import zero_options
from zfun.interop._named import settle_masters
from zfun.interop.deepspeed._absent import refusal
from zfun.interop.deepspeed._scales import go_on, set_scale
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed.runtime.zero import _owners, _stand_ins
from zfun.interop.engine import Engine
from zfun.interop.engine._reads import alive, live_of
from zfun.interop.engine._values import leaves_of
from zfun.parallel import Pipeline
from zfun.sources import Deferred


@contextlib.contextmanager
def freed(module: nn.Module) -> Iterator[Mapping[str, Deferred]]:
    """Let a new engine take a module that another one may have, as a context; all ranks enter.

    As in DeepSpeed, a second ``initialize`` of a module begins with the values of the first. The
    context gives the values that the module itself has not, by name. Where it ends with an error,
    the module is a plain one with these values.
    """
    live = live_of(module)
    values: dict[str, Deferred] = {}
    if live is not None:
        params = list(module.parameters())
        engine = live.owner
        if isinstance(engine, Engine):
            values = engine.hand_over()
        else:
            live.release()
        for param in params:
            _owners.forget(param)
    try:
        yield values
    except BaseException:
        for name, param in module.named_parameters():
            if name in values and type(param) is nn.Parameter:
                param.data = values[name].load()
        raise


def made(
    module: nn.Module,
    settings: Settings,
    group: Group,
    values: Mapping[str, Any],
    loss: Pipeline | None = None,
) -> Engine:
    """Return the engine of zfun for the options, with the module's values of rank 0.

    The module is live afterwards. Some parameters may be in pieces, and ``values`` has those that
    the module has not; beside a loss of a pipeline, the whole logical tree.
    """
    recipe = settings.recipe
    options = zero_options(recipe, group)
    # As in DeepSpeed, parameters have the dtype of the loss, and no argument of the module is cast.
    scale = recipe.precision.loss_scale if settings.scaling is None else settings.scaling.rule
    options["precision"] = replace(recipe.precision, compute=None, loss_scale=scale)
    options |= {} if loss is None else {"loss_fn": loss}
    group = options["group"]
    named = dict(module.named_parameters())
    away = {
        name: _owners.deferred_of(name, p)
        for name, p in named.items()
        if _stand_ins.is_partitioned(p)
    }
    away |= values
    if away:
        plain = {name: p for name, p in named.items() if name not in away}
        plain |= dict(module.named_buffers())
        own = {name: x.detach() for name, x in plain.items()}
        with torch.no_grad():
            for name, value in broadcast(own, group, 0, name="parameters").items():
                plain[name].copy_(value)
    nothing = {} if settings.groups is not None else {"trainable": lambda name, leaf: False}
    engine = Engine(
        module,
        settings.groups or optim.sgd(0.0),
        zero={**nothing, **options},
        accumulate=recipe.num_micro_batches,
        clip_norm=(recipe.max_grad_norm or None) if settings.groups is not None else None,
        init="check" if away else "broadcast",
        values=away,
    )
    engine.plain_scale = 1.0 / recipe.num_micro_batches
    owner = CoreValues(engine, group, keeps=recipe.stage == 3)
    engine._live.wrap("_apply", owner.apply)
    for name, param in engine.leaves.items():
        _owners.adopt(param, owner, name, is_hidden=recipe.stage == 3)
        _stand_ins.told(param)._zfun_engine = weakref.ref(engine), name
        if recipe.stage == 3:
            engine._live.marks[name] = _owners.marks_of(param)
    return engine


class CoreValues(_stand_ins.TensorOwner):
    """The owner of parameters whose values are in a state.

    With ``keeps``, the values live as long as the parameters, as those in pieces do.
    """

    def __init__(self, engine: Engine, group: Group, *, keeps: bool) -> None:
        self.group = group
        self._engine = weakref.ref(engine)
        self._kept = engine if keeps else None
        self._names = {id(param): name for name, param in engine.leaves.items()}

    def _named(self, params: Sequence[nn.Parameter]) -> tuple[Engine, list[str]]:
        engine = alive(self._engine, "the value of a parameter")
        return engine, [self._names[id(param)] for param in params]

    def apply(
        self, own: Callable[..., nn.Module], fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        """Run ``_apply`` of the module, unless it gives parameters another device and nothing else.

        Values stay where the state is, as the pieces of DeepSpeed's stage 3 do. Lightning moves a
        module to the CPU after each loop, and saves the engine after that.
        """
        engine = self._engine()
        if engine is not None and any(_is_moved(x, fn) for x in engine.leaves.values()):
            return engine.module
        return own(fn, recurse)

    def gathered(self, params: Sequence[nn.Parameter]) -> list[Tensor]:
        engine, names = self._named(params)
        return [value.clone() for value in engine.gathered_all(names)]

    def put(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        engine, names = self._named(params)
        engine.replace(dict(zip(names, values, strict=True)))

    def show(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        engine, names = self._named(params)
        engine._live.expose(dict(zip(names, values, strict=True)))

    def hide(self, params: Sequence[nn.Parameter]) -> None:
        engine, names = self._named(params)
        engine.cover(names)


def _is_moved(param: nn.Parameter, fn: Callable[[Tensor], Tensor]) -> bool:
    """Return whether a function gives another device to a parameter, and the same dtype."""
    probe = torch.empty(0, dtype=param.dtype, device=param.device)
    found = fn(probe)
    return found.dtype == probe.dtype and found.device != probe.device


def offload_of(module: nn.Module) -> SimpleNamespace:
    """Return the place of DeepSpeed's hooks at stage 3, which a live module does not need.

    It is the optimizer of an engine without one, as in DeepSpeed.
    """
    return SimpleNamespace(
        module=module,
        forward_hooks=[],
        backward_hooks=[],
        param_groups=[],
        empty_partition_cache=lambda: None,
        _register_deepspeed_module=lambda module: None,
    )


class EngineOptimizer(torch.optim.Optimizer):
    """The optimizer of an engine.

    Attributes:
        optimizer: has the parameter groups, and never steps.
        parameter_offload: at stage 3, an object with the module, and with no hooks.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, engine: Any) -> None:
        # Other attributes are those of the given optimizer.
        self.optimizer = optimizer
        self._engine = weakref.ref(engine)
        # A script may save and load the optimizer that it has passed.
        optimizer.__dict__ |= {
            "state_dict": self.state_dict,
            "load_state_dict": self.load_state_dict,
        }
        if engine.zero_optimization_stage() == 3:
            self.parameter_offload = offload_of(engine.module)

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        try:
            return getattr(self.optimizer, name)
        except AttributeError:
            raise refusal("engine.optimizer", name, dict.fromkeys(dir(type(self)))) from None

    def __getstate__(self) -> dict[str, Any]:
        raise OptionError(
            "an engine's optimizer belongs to one engine; got a copy or a pickle of it; save "
            "optimizer.state_dict(), or call engine.save_checkpoint()"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self.__getstate__()

    def __repr__(self) -> str:
        return f"EngineOptimizer({self.optimizer!r})"

    def _owner(self) -> Any:
        return alive(self._engine, "the optimizer of initialize()")

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # pyrefly: ignore[bad-override]
        """The groups, whose numbers count at the next step."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # pyrefly: ignore[bad-override]
        """Moments, which only :meth:`state_dict` reads."""
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the last step were not finite."""
        return self._owner()._has_overflow

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether steps change the loss scale."""
        scaling = self._owner()._settings.scaling
        return scaling is not None and not scaling.numbers["fp16.loss_scale"]

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward; 1 without one. Assign between steps."""
        return self._owner().cur_scale

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        set_scale(self._owner(), value)

    cur_scale = loss_scale

    @property
    def _global_grad_norm(self) -> float | None:
        # Loops that log the norm read it here.
        return self._owner()._grad_norm

    def get_lr(self) -> float:
        """Return the rate of the first group."""
        return self.param_groups[0]["lr"]

    def set_lr(self, lr: float) -> None:
        """Set the rate of each group, which counts at the next step."""
        self._owner().set_lr(lr)

    def override_loss_scale(self, loss_scale: float) -> None:
        """Keep one loss scale from now on, whatever steps, assignments and loads say."""
        set_scale(self._owner(), loss_scale, stays=True)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyrefly: ignore
        """Step the engine."""
        if closure is not None:
            raise OptionError(
                "an engine's optimizer takes the gradients of backward(); got step(closure); "
                "call engine.backward(loss) and engine.step()"
            )
        self._owner().step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients that were added up."""
        self._owner().zero_grad()

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        """Compute the gradients of a loss, as ``engine.backward`` does."""
        self._owner().backward(loss, retain_graph=retain_graph)

    def offload_states(self, *args: Any, **kwargs: Any) -> None:
        """Move parts of the state to host memory, as ``engine.offload_states`` does."""
        self._owner().offload_states(*args, **kwargs)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Move the state back that :meth:`offload_states` has moved."""
        self._owner().reload_states(non_blocking)

    def empty_partition_cache(self) -> None:
        """Do nothing: no gathered parameter outlives a call."""

    def refresh_fp32_params(self) -> None:
        """Round the master weights to the values of their parameters.

        Writes to parameters and loads need no call: master weights follow, and keep their digits.
        """
        core = self._owner()._core
        state = core.state
        core.state = settle_masters(state, leaves_of(state), keeps_digits=False)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, which is trained from the next call of the module on."""
        self.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the groups, and whole moments and master weights in torch's form.

        Every rank must call, also where rank 0 alone saves. A rank of a pipeline has the moments of
        the layers of its stage.
        """
        core = self._owner()._core
        found, scale = core.optimizer_state(whole=True), core.state.loss_scale
        scaling = self._owner()._settings.scaling
        rule = {} if scaling is None else scaling.numbers
        return found if scale is None else {**found, "loss_scaler": {**scale._asdict(), **rule}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` has returned, at any stage; every rank must call.

        Raises:
            CheckpointError: moments are missing, or the loss scale of an engine that has one.
        """
        core = self._owner()._core
        scale = core.state.loss_scale
        if scale is not None and "loss_scaler" not in state_dict:
            raise CheckpointError(
                "load_state_dict() of an engine's optimizer takes the loss scale of fp16; got a "
                "dict without 'loss_scaler'; pass what state_dict() of an engine with fp16 returned"
            )
        core.load_optimizer_state(state_dict, whole=True)
        if scale is not None:
            saved = state_dict["loss_scaler"]
            values = {name: saved[name].clone() for name in scale._fields}
            core.state = core.state._replace(loss_scale=scale._replace(**values))
            go_on(self._owner(), saved)
