"""The values of a live module: a state, and the parameters and buffers that show it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from zfun import checkpoint, optim, stores, tree
from zfun.collectives import Group, broadcast, sum_group
from zfun.errors import OptionError
from zfun.evaluation import averaged
from zfun.flat import leaf_spans, unravel
from zfun.interop._named import (
    Gathered,
    at_hand,
    named,
    settle_masters,
    state_dict_of,
    whole_by_bucket,
    with_values,
    write_state,
)
from zfun.interop.engine._calls import Calls
from zfun.interop.engine._groups import ParamGroups
from zfun.interop.engine._live import LiveModule
from zfun.interop.engine._torch_states import torch_state
from zfun.interop.engine._values import EngineBuffers, leaves_of, whole_values
from zfun.placement import S
from zfun.recipes import ZeroState

# The parts of a state that offload() moves.
_PARTS = ("parameters", "the optimizer's state")


class HeldModule:
    """A module with a state, whose values are read, written, saved and loaded."""

    module: nn.Module
    has_module = True
    _params: dict[str, nn.Parameter]
    _extra: dict[str, nn.Parameter]
    # The dtypes that the module had.
    _dtypes: dict[str, torch.dtype]
    _state: ZeroState
    _buffers: EngineBuffers
    # Whether a step for which no rank has gradients changes nothing, and is no error.
    passes_empty_steps = False
    _live: LiveModule
    _calls: Calls
    _group: Group
    _groups: ParamGroups | None
    _is_sharded: bool
    _is_bound = False
    _is_averaged = False
    # The parts of the state that are in host memory for a while.
    _away: frozenset[str] = frozenset()
    # The leaves that code has written, and master weights do not know of yet.
    _written: frozenset[str] = frozenset()
    _whole: Gathered | None = None

    @property
    def state(self) -> ZeroState:
        """The state; assign to go on from another one."""
        self._settle_masters()
        return self._shown_state()

    def _shown_state(self) -> ZeroState:
        # The module may have assigned new buffers.
        self._buffers.refresh()
        return self._state._replace(buffers=self._buffers.flat)

    @state.setter
    def state(self, state: ZeroState) -> None:
        self._check_writable("another state")
        self._buffers.take(state.buffers)
        self._state, self._written = state._replace(buffers=None), frozenset()
        self._show()

    def _settle_masters(self) -> None:
        """Let master weights know what code has written into parameters since the last step."""
        self._live.settle_views()
        if self._written:
            self._state = settle_masters(self._state, self._written)
            self._written = frozenset()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[nn.Module]:
        """Give the module the average of its parameters in a context, if the state has one.

        All ranks call. A step, a load, a write and ``close()`` wait until the context has ended.

        Returns:
            A context whose value is the module.

        Raises:
            OptionError: inside of :meth:`uneven`, or after :meth:`offload`.
        """
        before = self._state
        if self._is_averaged or not optim.averages_of(before.opt_state):
            yield self.module
            return
        if self._calls.is_uneven:
            raise OptionError(
                "averaged() begins before the calls of uneven(), which use the values of its "
                "start; got averaged() inside of uneven(); write with engine.averaged(), "
                "engine.uneven()"
            )
        self._is_averaged = True
        try:
            self._take_average()
            yield self.module
        finally:
            self._state, self._is_averaged = before, False
            self._show()

    def _take_average(self) -> None:
        """Let the average be the parameters, if the state has one."""
        averages = optim.averages_of(self._state.opt_state)
        if not averages:
            return
        self._check_here("averaged()", *_PARTS)
        state = averaged(self._state)
        # The module's own memory, because a module may write its parameters.
        memory = {x.data_ptr() for x in tree.leaves(averages) if isinstance(x, Tensor)}
        buffers = [x.clone() if x.data_ptr() in memory else x for x in state.params.buffers]
        self._state = state._replace(params=state.params.with_buffers(buffers))
        self._show()

    def _check_same(self) -> None:
        """Refuse parameters that the module did not have when the engine was made."""
        known, named = self._live.known, self.module.named_parameters()
        if others := [name for name, param in named if id(param) not in known]:
            raise OptionError(
                "an engine has the parameters of its module when it was made; got another one at "
                f"{others[0]!r}; write values under torch.no_grad(), or make a new engine"
            )

    def _check_writable(self, what: str) -> None:
        """Refuse what would change the average, or be lost at the end of the context."""
        if self._is_averaged:
            raise OptionError(
                f"{what} changes the parameters or their optimizer; got one inside of "
                "engine.averaged(), where the module has their average; wait until the context "
                "has ended"
            )

    def _show(self) -> None:
        """Let the module's parameters be the values of the state, below stage 3 and in bound()."""
        self._live.renew()
        if self._is_sharded:
            if names := frozenset(self._params if self._is_bound else self._extra):
                self._live.show(whole_values(self._state, names))
            return
        for flat in (self._state.params, self._state.frozen):
            if flat is not None:
                self._live.show(named(unravel(stores.resident(flat))))

    def _hide(self) -> None:
        """Let the module's parameters have no values, at stage 3."""
        dtypes = leaves_of(self._state)
        self._live.hide({name: x for name, x in dtypes.items() if name not in self._extra})

    def offload(self, *, params: bool = True, optimizer: bool = True, pin: bool = True) -> None:
        """Move parts of the state to host memory, until :meth:`reload`.

        A call needs the parameters, and a step needs both parts.

        Args:
            params: whether the parameters move; at stage 3 this rank's.
            optimizer: whether the optimizer's state moves, with the master weights.
            pin: whether to copy into pinned memory, where there is an accelerator.
        """
        self._check_writable("offload()")
        chosen = zip(_PARTS, (params, optimizer), strict=True)
        self._away |= {name for name, is_chosen in chosen if is_chosen}
        for x in self._away_tensors():
            if x.device.type != "cpu":
                host = torch.empty_like(x, device="cpu", pin_memory=pin)
                x.data = host.copy_(x)
        self._show()

    def reload(self) -> None:
        """Move the parts of the state back that :meth:`offload` has moved."""
        for x in self._away_tensors():
            x.data = x.to(self._state.params.layout.device)
        self._away = frozenset()
        self._show()

    def _away_tensors(self) -> list[Tensor]:
        parts = ((self._state.params, self._state.frozen), self._state.opt_state)
        away = [x for name, x in zip(_PARTS, parts, strict=True) if name in self._away]
        return [x for x in tree.leaves(away) if isinstance(x, Tensor)]

    def _check_here(self, what: str, *parts: str) -> None:
        """Refuse what needs parts of the state that are in host memory."""
        if away := sorted(self._away.intersection(parts)):
            raise OptionError(
                f"{what} needs {' and '.join(parts)} where the model computes; got "
                f"{' and '.join(away)} in host memory; call reload() first, which is "
                "reload_states() of DeepSpeed's engine"
            )

    @property
    def training(self) -> bool:
        """Whether the module is in train mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Self:
        """Set the module to train mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Self:
        """Set the module to eval mode."""
        return self.train(False)

    @property
    def leaves(self) -> dict[str, nn.Parameter]:
        """The parameters of the module that are in the state, by name."""
        return {name: x for name, x in self._params.items() if name not in self._extra}

    def gathered(self, name: str, *, master: bool = False, what: str = "gathered()") -> Tensor:
        """Return the whole value of a leaf; every rank must call.

        Args:
            name: of the leaf.
            master: whether to return the master weight, if there is one.
            what: the reader, in records and errors.
        """
        self._check_here(f"a read of leaf {name!r}", "parameters")
        if master:
            self._settle_masters()
        elif values := at_hand(self):
            return values[name]
        return whole_values(self._state, {name}, masters=master, what=what)[name]

    def gathered_all(self, names: Sequence[str]) -> list[Tensor]:
        """Return the whole values of leaves; every rank must call."""
        self._check_here("a read of parameters", "parameters")
        found = whole_values(self._state, frozenset(names), what="GatheredParameters")
        return [found[name] for name in names]

    def cover(self, names: Sequence[str]) -> None:
        """Let exposed parameters be those of the state again."""
        self._live.cover(names)
        if self._is_sharded:
            self._live.hide({k: x for k, x in leaves_of(self._state).items() if k in names})
        else:
            self._show()

    def takes_in_call(self, name: str) -> bool:
        """Whether a call may write a leaf: all ranks call, and no optimizer has it."""
        return not self._calls.is_uneven and name not in self._state.params.layout.paths

    def write(self, values: Mapping[str, Tensor]) -> None:
        """Take whole values of leaves from rank 0; every rank must call."""
        self._check_writable("a write")
        self._live.check_read()
        sent = {name: x.detach().contiguous() for name, x in values.items()}
        values = broadcast(sent, sum_group(self._group), 0, name=f"a write of {min(sent)}")
        write_state(self, values)
        self._written |= values.keys()
        self._show()

    @contextlib.contextmanager
    def bound(self) -> Iterator[nn.Module]:
        """Let the module have whole plain parameters, as a context; every rank must enter.

        Inside, a loss without a call leaves its gradients in ``.grad``, and :meth:`step` sums them.

        Returns:
            A context whose value is the module. At stage 3 other changes of the values are lost.
        """
        before, self._is_bound = self._is_bound, True
        self._show()
        try:
            yield self.module
        finally:
            self._is_bound = before
            if self._is_sharded and not before:
                self._hide()

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and detached values of the trained parameters: views of the state.

        Below stage 3 whole parameters; at stage 3 this rank's elements, as vectors, which may be
        empty. A view is valid until the next step.
        """
        held = stores.resident(self._state.params)
        if held.placement is not S:
            yield from zip(held.layout.paths, tree.leaves(unravel(held)), strict=True)
            return
        for span in leaf_spans(held):
            yield span.path, held.buffers[span.bucket][span.start : span.stop]

    def parameters(self) -> Iterator[Tensor]:
        """Yield the tensors of :meth:`named_parameters`."""
        return (value for _, value in self.named_parameters())

    def state_dict(self, *, keep: bool = True) -> dict[str, Any]:
        """Return whole values by the module's own names; every rank must call.

        As in ``module.state_dict()``, a value may be extra state that is no tensor.

        Args:
            keep: whether this rank wants the values; another rank helps to gather, one bucket at a
                time, and gets none.
        """
        self._check_same()
        self._live.check_unwritten()
        values: dict[str, Tensor] = {}
        for flat in (self._state.params, self._state.frozen):
            for part in whole_by_bucket(flat) if flat is not None else ():
                values |= part if keep else {}
        return state_dict_of(self.module, values | self._buffers.named()) if keep else {}

    def replace(self, values: Mapping[str, Any], *, strict: bool = False) -> None:
        """Take whole values by any names of the module; every rank must call.

        Args:
            values: the same on every rank.
            strict: whether each name must be there, and no other.

        Raises:
            SpecMismatch: names or shapes differ.
        """
        self._check_writable("a load")
        before = self._written
        self.state = with_values(self.module, self._shown_state(), values, strict=strict)
        self._written = before.union(leaves_of(self._state))

    def save(self, path: str | Path, extra: Any = None, **options: Any) -> checkpoint.Saved:
        """Save the state, the numbers of the optimizer's groups, and plain values of the caller.

        Warns where a later step, as of another run, is there too, which :meth:`load` would take.

        Args:
            path: as for :func:`zfun.save`.
            extra: plain values.
            options: of :func:`zfun.save`.
        """
        self._check_same()
        self._live.check_unwritten()
        if self._groups is not None:
            extra = self._groups.beside(extra)
        saved = checkpoint.save(path, self.state, data=extra, **options)
        step = options.get("step", self._state.step)
        is_first = self._group.rank == 0
        steps = checkpoint.steps(path, files=options.get("files")) if is_first else ()
        if later := [x.step for x in steps if x.step > step]:
            warnings.warn(
                f"load() takes the latest step, and {str(path)!r} has step {later[-1]} of another "
                f"run; got step {step}; pass keep=1, or another path",
                stacklevel=2,
            )
        return saved

    def optimizer_state(self, *, whole: bool = False) -> dict[str, Any]:
        """Return ``state_dict()`` of the torch optimizer with its moments; every rank must call.

        Args:
            whole: of every leaf, also those without a step, and with master weights.
        """
        self._settle_masters()
        return torch_state(self._state, self._torch_groups(), whole=whole)

    def _torch_groups(self) -> ParamGroups:
        if self._groups is None:
            raise OptionError(
                "the state of a torch optimizer belongs to one; got an engine with a rule of "
                "zf.optim; read engine.state.opt_state"
            )
        return self._groups

    @property
    def hyperparams(self) -> dict[str, float]:
        """The numbers of :func:`zfun.optim.inject_hyperparams` in the state, by name."""
        return optim.hyperparams(self._state)

    def set_hyperparams(self, **values: float) -> None:
        """Set numbers of the optimizer, as :func:`zfun.optim.set_hyperparams` does."""
        self._check_writable("set_hyperparams()")
        self._state = optim.set_hyperparams(self._state, **values)


class Taken:
    """The state of an engine whose module another engine has."""

    def __getattr__(self, name: str) -> Any:
        raise OptionError(
            "an engine goes on while it has its module; got one whose module a later engine has "
            "taken; use the later engine"
        )
