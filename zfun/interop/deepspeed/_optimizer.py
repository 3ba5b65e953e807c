"""The optimizer that ``initialize`` returns: parameter groups, and the moments of the state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from zfun.errors import CheckpointError, OptionError
from zfun.interop.engine._live import alive


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
        if engine.zero_optimization_stage() == 3:
            # The place of DeepSpeed's hooks, which a live module does not need.
            self.parameter_offload = SimpleNamespace(
                module=engine.module,
                forward_hooks=[],
                backward_hooks=[],
                _register_deepspeed_module=lambda module: None,
            )

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            raise AttributeError(name)
        return getattr(self.optimizer, name)

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
        """No moments: these are in :meth:`state_dict`."""
        return self.optimizer.state

    @property
    def overflow(self) -> bool:
        """Whether the gradients of the last step were not finite."""
        return self._owner()._has_overflow

    @property
    def loss_scale(self) -> float:
        """The factor of the loss in backward; 1 without one."""
        return self._owner().cur_scale

    cur_scale = loss_scale

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
        return found if scale is None else {**found, "loss_scaler": scale._asdict()}

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
            values = {name: x.clone() for name, x in state_dict["loss_scaler"].items()}
            core.state = core.state._replace(loss_scale=scale._replace(**values))
