"""The values of a live module: buffers, whole leaves, and states of other trained leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import UninitializedTensorMixin  # pyrefly: ignore[missing-module-attribute]

from zfun import checkpoint, ops, stores, tree
from zfun.collectives import Group, all_reduce, broadcast, sum_group
from zfun.errors import LeafError, OptionError
from zfun.flat import Flat, ravel, unravel
from zfun.interop._named import masters_of, named, write_leaves
from zfun.interop.engine._methods import NormForward
from zfun.interop.engine._parameter import ON_NODES, LiveParameter, refuse_hook
from zfun.interop.engine._watched import checksum
from zfun.layout import layout_of
from zfun.optim import EmaState, MasterState, MissedSteps, averages_of
from zfun.placement import Cut, Held
from zfun.recipes import ZeroState, policy_of
from zfun.reductions import merge_buffers
from zfun.sources import Deferred
from zfun.transforms import check_agreement, unshard


def named_leaves(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a state takes, by name; tied ones under the first name.

    A frozen parameter of another class, such as a quantised weight, stays whole in the module.
    """
    _check_reads(module)
    leaves: dict[str, nn.Parameter] = {}
    for name, param in module.named_parameters():
        if param._post_accumulate_grad_hooks:
            refuse_hook(name)
        hooks = [getattr(x, "__qualname__", "") for x in (param._backward_hooks or {}).values()]
        if any("register_multi_grad_hook.<locals>.get" in hook for hook in hooks):
            refuse_hook(name, ON_NODES)
        if type(param) is nn.Parameter:
            leaves[name] = param
        elif isinstance(param, LiveParameter):
            raise OptionError(
                f"a parameter has one engine; leaf {name!r} has another one; prepare models that "
                "share it together, or call close() of the other engine first"
            )
        elif isinstance(param, UninitializedTensorMixin):
            raise LeafError(
                f"a parameter has a shape; leaf {name!r} is a {type(param).__name__}; call the "
                "module once before you shard it",
                leaf=name,
            )
        elif param.requires_grad:
            raise LeafError(
                "a trained parameter is a plain nn.Parameter; leaf "
                f"{name!r} is a {type(param).__name__}; freeze it with requires_grad_(False), and "
                "train an adapter beside it",
                leaf=name,
            )
    return leaves


def _check_reads(module: nn.Module) -> None:
    """Refuse layers that write into their parameters in forward."""
    for name, part in module.named_modules():
        if isinstance(part, (nn.Embedding, nn.EmbeddingBag)) and part.max_norm is not None:
            raise OptionError(
                f"forward reads parameters, and does not write them; got the {type(part).__name__} "
                f"{name!r} with max_norm={part.max_norm:g}, which scales rows in each forward "
                "pass, on each rank others; leave max_norm out, and bound the rows of the weight "
                "after each step, under torch.no_grad()"
            )


def leaves_of(state: ZeroState) -> dict[str, torch.dtype]:
    """Return the dtypes of the parameters of a state, by name."""
    flats = [flat for flat in (state.params, state.frozen) if flat is not None]
    return {slot.path: slot.dtype for flat in flats for slot in flat.layout.leaves}


def whole_values(
    state: ZeroState,
    names: set[str] | frozenset[str],
    *,
    masters: bool = False,
    what: str = "unshard",
) -> dict[str, Tensor]:
    """Return whole values by name, of master weights if asked; every rank must call.

    ``what`` is the name of the collectives, so that no rank takes part in the read of another.
    """
    flats = [state.params, state.frozen, state.buffers]
    values: dict[str, Tensor] = {}
    for flat in (*flats, *(masters_of(state.opt_state) if masters else ())):
        if isinstance(flat, Flat) and names.intersection(flat.layout.paths):
            values |= named(unshard(flat, lambda path, leaf: path in names, name=what))
    return values


def deferred_values(
    state: ZeroState, params: Mapping[str, Tensor], *, masters: bool = False
) -> dict[str, Deferred]:
    """Return whole values of parameters, each gathered when it is needed."""
    dtypes, device = leaves_of(state), state.params.layout.device
    for flat in masters_of(state.opt_state) if masters else ():
        if isinstance(flat, Flat):
            leaves = flat.layout.leaves
            dtypes |= {slot.path: flat.buffers[slot.bucket].dtype for slot in leaves}
    return {
        name: Deferred(
            name,
            torch.empty(param.shape, dtype=dtypes[name], device="meta"),
            lambda name=name: whole_values(state, {name}, masters=masters)[name],
            device,
        )
        for name, param in params.items()
    }


class EngineBuffers:
    """The buffers of a live module, which are views of one flat value, ``flat``.

    As under DDP, a module writes its own buffers, in place or by assignment, and before the next
    step all ranks have those of rank 0, or what another rule says. ``spread`` says which ranks of
    model axes have them, and ``options`` are those of the recipe.
    """

    def __init__(
        self,
        module: nn.Module,
        rule: str,
        group: Group,
        init: str,
        values: Mapping[str, Any],
        spread: tuple[Cut | Held | None, ...] = (),
        options: Any = None,
    ) -> None:
        if rule not in ("rank 0", "mean", "by rank"):
            raise OptionError(
                f"buffers= is 'rank 0', 'mean' or 'by rank'; got {rule!r}; pass 'rank 0' for the "
                "values of rank 0, as under DDP"
            )
        self._module, self._rule, self._group, self._spread = module, rule, group, spread
        self._seen: dict[str, tuple[int, int]] = {}
        # Whether each step asks what code has written between the last step and the first call of
        # this one, because under DDP that call has the buffers of rank 0; and whether to look now.
        self._asks = rule == "rank 0" and sum_group(group).size > 1
        self._looks = False
        # The checksums of these buffers, and the marks of all after the last call.
        self.written: dict[str, int] = {}
        self._marks: dict[str, tuple[int, int]] = {}
        self._norms: list[nn.Module] = []
        policy = policy_of(None if options is None else options.precision)
        if policy.param is not None or policy.compute is not None:
            norms = [part for part in module.modules() if isinstance(part, _NormBase)]
            self._norms = [x for x in norms if x.weight is not None]
        for norm in self._norms:
            norm.forward = NormForward(norm, norm.forward)
        self.flat: Flat | None = None
        for prefix, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                value = values.get(f"{prefix}.{key}" if prefix else key)
                if buffer is not None and buffer.is_meta and value is not None:
                    owner._buffers[key] = value.load() if isinstance(value, Deferred) else value
        if (named := self.named()) and rule != "by rank":
            ranks = sum_group(group)
            if init == "broadcast":
                for name, value in broadcast(named, ranks, 0, name="buffers").items():
                    named[name].copy_(value)
            else:
                check_agreement(named, ranks)
        self._begin()

    def release(self) -> None:
        """Let the module be a plain one."""
        for norm in self._norms:
            own = norm.__dict__.pop("forward").own
            if not isinstance(own, MethodType):
                norm.forward = own
        self._norms = []

    def named(self) -> dict[str, Tensor]:
        """Return the buffers by name, detached."""
        return {name: buffer.detach() for name, buffer in self._module.named_buffers()}

    def changed(self) -> list[bool]:
        """Return for each buffer whether this rank may have written or assigned it.

        The version of a tensor does not tell: BatchNorm and writes to ``.data`` leave it as it is.
        Only masks are taken at their word, because they are large and never written so.
        """
        return [
            x.dtype is not torch.bool or self._seen.get(name) != _mark(x)
            for name, x in self._module.named_buffers()
        ]

    def look(self, *, trains: bool) -> None:
        """Before a call, look whether code has written buffers outside of calls."""
        if self._looks:
            for name, x in self._held():
                if self._marks.get(name) != _mark(x):
                    self.written[name] = checksum(x)
            self._looks = not trains

    def leave(self) -> None:
        """After a call, know what the call has written."""
        if self._looks:
            self._marks = {name: _mark(x) for name, x in self._held()}

    def _begin(self) -> None:
        """Begin the calls of a step."""
        self.refresh()
        self.written, self._looks = dict[str, int](), self._asks
        self._parts = [
            (f"{prefix}." if prefix else "", part._buffers)
            for prefix, part in (self._module.named_modules() if self._asks else ())
            if part._buffers
        ]
        self.leave()

    def _held(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the parts with buffers have; to walk through all parts takes longer."""
        for prefix, held in self._parts:
            yield from ((prefix + key, x) for key, x in held.items() if x is not None)

    def changes(self) -> list[bool]:
        """Return for each buffer whether any rank may have changed it; every rank must call."""
        own, ranks = self.changed(), sum_group(self._group)
        if not own or ranks.size == 1 or self._rule == "by rank":
            return own
        device = next(self._module.buffers()).device
        return all_reduce(torch.tensor([*map(float, own)], device=device), ranks).bool().tolist()

    def merge(self, changed: Sequence[bool]) -> None:
        """Merge the buffers that any rank has changed; every rank must call."""
        ranks = sum_group(self._group)
        if ranks.size == 1 or self._rule == "by rank" or not any(changed):
            self._begin()
            return
        named = self.named()
        pairs = zip(named.items(), changed, strict=True)
        new = {name: x for (name, x), is_new in pairs if is_new}
        merged = (
            broadcast({name: x.contiguous() for name, x in new.items()}, ranks, 0, name="buffers")
            if self._rule == "rank 0"
            else merge_buffers(new, ranks, lambda path, leaf: self._rule)
        )
        for name, value in merged.items():
            named[name].copy_(value)
        self._begin()

    def refresh(self) -> None:
        """Let the buffers be views of one flat value."""
        named = dict(self._module.named_buffers())
        if not named:
            self.flat = None
            return
        old: Any = {} if self.flat is None else unravel(self.flat)
        if any(
            name not in old or old[name].data_ptr() != x.data_ptr() or old[name].shape != x.shape
            for name, x in named.items()
        ):
            values = self.named()
            layout = layout_of(values)
            own = (replace(slot, spread=self._spread) for slot in layout.leaves)
            self.flat = ravel(values, replace(layout, leaves=tuple(own)), self._group)
            for name, view in unravel(self.flat).items():
                named[name].data = ops.apart(view)
        self._seen = {name: _mark(x) for name, x in named.items()}

    def take(self, flat: Flat | None) -> None:
        """Take the values of a state."""
        if flat is not None and flat is not self.flat:
            self.write(unravel(stores.resident(flat)))

    @torch.no_grad()
    def write(self, values: Mapping[str, Tensor]) -> None:
        """Take values by name, also after ``flat`` was consumed."""
        own = self.named()
        for name, value in values.items():
            if name in own:
                own[name].copy_(value)
        self.flat = None
        self._begin()


def _mark(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version


def carried(old: ZeroState, new: ZeroState) -> ZeroState:
    """Return a new state of other trained leaves that goes on where an old one was.

    Moments and master weights of leaves that both train are those of the old state, and counts of
    optimizers that both have. Every rank must call.
    """
    old_opt_state, old_ema = without_average(old.opt_state)
    opt_state, ema = without_average(new.opt_state)
    old_parts = dict(zip(*parts_of(old_opt_state), strict=True))
    trained = set(old.params.layout.paths)
    missed = dict(old.missed.counts)
    moved: list[Any] = []
    for path, part in zip(*parts_of(opt_state), strict=True):
        if isinstance(part, Flat):
            count = old_parts.get(f"{path.rpartition('.')[0].removesuffix('.trees')}.count")
            for leaf in part.layout.paths:
                part = _with_leaf(part, leaf, path.rpartition(".")[2], old_parts)
                if leaf not in trained and isinstance(count, Tensor) and int(count):
                    # The leaf joins an optimizer that has taken steps already.
                    missed[leaf] = int(count)
        elif isinstance(part, Tensor) and isinstance(old_parts.get(path), Tensor):
            part = old_parts[path].clone()
        moved.append(part)
    state = tree.unflatten(tree.structure(opt_state, is_leaf=is_flat), moved)
    if ema is not None and old_ema is not None:
        average = ema.average
        for leaf in old_ema.average.layout.paths:
            average = _with_leaf(average, leaf, "average", {"average": old_ema.average})
        ema = EmaState(average, old_ema.count.clone(), None)
    return new._replace(
        opt_state=with_average(state, ema),
        step=old.step,
        num_skipped=old.num_skipped,
        loss_scale=old.loss_scale,
        num_applied=old.num_applied,
        missed=MissedSteps(dict(sorted(missed.items()))),
    )


def _with_leaf(part: Flat, leaf: str, field: str, old_parts: Mapping[str, Any]) -> Flat:
    """Return a part of a state with the values that a leaf had in the same field of another."""
    for path, old in old_parts.items():
        if isinstance(old, Flat) and path.rpartition(".")[2] == field and leaf in old.layout.paths:
            return write_leaves(part, named(unshard(old, lambda name, _: name == leaf)))
    return part


def without_average(opt_state: Any) -> tuple[Any, EmaState | None]:
    """Divide an optimizer's state into that of the parameters' steps, and their average if any."""
    if isinstance(opt_state, EmaState):
        return opt_state.inner, opt_state._replace(inner=None)
    if isinstance(opt_state, MasterState) and isinstance(opt_state.inner, EmaState):
        inner, ema = without_average(opt_state.inner)
        return opt_state._replace(inner=inner), ema
    if averages_of(opt_state):
        raise OptionError(
            "an average of parameters stands around the other optimizers of an engine; got one "
            "inside of another, such as chain(); write zf.optim.ema(decay, zf.optim.chain(...))"
        )
    return opt_state, None


def with_average(opt_state: Any, ema: EmaState | None) -> Any:
    """Return the state that :func:`without_average` has divided."""
    if ema is None:
        return opt_state
    if isinstance(opt_state, MasterState):
        return opt_state._replace(inner=ema._replace(inner=opt_state.inner))
    return ema._replace(inner=opt_state)


def is_flat(value: Any) -> TypeGuard[Flat]:
    """Whether a part of a state is sharded."""
    return isinstance(value, Flat)


def parts_of(state: Any) -> tuple[list[str], list[Any]]:
    """Return the paths and the parts of an optimizer's state, with each ``Flat`` as one part."""
    return tree.paths(state, is_leaf=is_flat), tree.flatten(state, is_leaf=is_flat)[0]


def trained_in(path: str | Path, step: int | None) -> tuple[str, list[str]]:
    """Return the path of a checkpoint, and the leaves that its run has trained."""
    chosen, manifest = checkpoint.manifest_at(path, step)
    keys = [entry.key.partition(".") for entry in manifest.leaves]
    return chosen, [name for part, _, name in keys if part == "params"]


def no_loss(params: Any, batch: Any) -> Any:
    """Stand for the loss, which the loop computes."""
    raise AssertionError
