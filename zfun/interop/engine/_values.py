"""The values of a live module: buffers, whole leaves, and states of other trained leaves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import (
    UninitializedTensorMixin,  # pyrefly: ignore[missing-module-attribute]
)

from zfun import stores, tree
from zfun.collectives import Group, broadcast, sum_group
from zfun.errors import LeafError, OptionError
from zfun.flat import Flat, ravel, unravel
from zfun.interop._named import masters_of, write_leaves
from zfun.layout import layout_of
from zfun.optim import MissedSteps
from zfun.recipes import ZeroState
from zfun.reductions import merge_buffers
from zfun.sources import Deferred
from zfun.transforms import check_agreement, unshard


def named_leaves(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that a state takes, by name; tied ones under the first name.

    A parameter of another class, such as a quantised weight, stays whole in the module.

    Raises:
        LeafError: a parameter of another class that is trained, or has no shape yet.
    """
    found: dict[str, nn.Parameter] = {}
    for name, param in module.named_parameters():
        if type(param) is nn.Parameter:
            found[name] = param
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
    return found


def leaves_of(state: ZeroState) -> dict[str, torch.dtype]:
    """Return the dtypes of the parameters of a state, by name."""
    flats = [flat for flat in (state.params, state.frozen) if flat is not None]
    return {slot.path: slot.dtype for flat in flats for slot in flat.layout.leaves}


def whole_values(
    state: ZeroState, names: set[str] | frozenset[str], *, masters: bool = False
) -> dict[str, Tensor]:
    """Return whole values by name, on every rank; every rank must call with the same names.

    Args:
        state: of a run.
        names: the leaves.
        masters: whether a leaf with a master weight has the value of the master weight.
    """
    flats = [state.params, state.frozen, state.buffers]
    found: dict[str, Tensor] = {}
    for flat in (*flats, *(masters_of(state.opt_state) if masters else ())):
        if isinstance(flat, Flat) and names.intersection(flat.layout.paths):
            part = unshard(flat, lambda path, leaf: path in names)
            found |= {
                path: leaf
                for path, leaf in zip(tree.paths(part), tree.leaves(part), strict=True)
                if isinstance(leaf, Tensor)
            }
    return found


def whole_by_bucket(state: ZeroState, *, keep: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield whole parameters by name; one bucket at a time is gathered, and dropped if not kept."""
    for flat in (state.params, state.frozen):
        if flat is None:
            continue
        for bucket in flat.layout.buckets:
            names = {flat.layout.leaves[leaf].path for leaf in bucket.leaves}
            found = whole_values(state._replace(buffers=None), names)
            yield from found.items() if keep else ()


class EngineBuffers:
    """The buffers of a live module, which are views of the state's.

    As under DDP, a module writes its own buffers, in place or by assignment, and before the next
    step all ranks have those of rank 0, or what another rule says.

    Args:
        module: the module.
        rule: ``"rank 0"``, ``"mean"`` or ``"by rank"``.
        group: the ranks.
        init: ``"check"`` or ``"broadcast"``.
        values: first values by name.

    Attributes:
        flat: of all buffers; ``None`` if there are none.
    """

    def __init__(
        self, module: nn.Module, rule: str, group: Group, init: str, values: Mapping[str, Any]
    ) -> None:
        if rule not in ("rank 0", "mean", "by rank"):
            raise OptionError(
                f"buffers= is 'rank 0', 'mean' or 'by rank'; got {rule!r}; pass 'rank 0' for the "
                "values of rank 0, as under DDP"
            )
        self._module, self._rule, self._group = module, rule, group
        self._seen: dict[str, tuple[int, int]] = {}
        self.flat: Flat | None = None
        for owner, key, name in self._places():
            made = values.get(name)
            if owner._buffers[key].is_meta and made is not None:  # pyrefly: ignore
                owner._buffers[key] = made.load() if isinstance(made, Deferred) else made
        if (found := self.named()) and rule != "by rank":
            ranks = sum_group(group)
            if init == "broadcast":
                for name, value in broadcast(found, ranks, 0, name="buffers").items():
                    found[name].copy_(value)
            else:
                check_agreement(found, ranks)
        self.refresh()

    def _places(self) -> Iterator[tuple[nn.Module, str, str]]:
        for prefix, owner in self._module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is not None:
                    yield owner, key, f"{prefix}.{key}" if prefix else key

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

    def merge(self, changed: Sequence[bool]) -> None:
        """Merge the buffers that any rank has changed; every rank must call."""
        ranks = sum_group(self._group)
        if ranks.size == 1 or self._rule == "by rank" or not any(changed):
            self.refresh()
            return
        found = {
            name: x
            for (name, x), is_new in zip(self.named().items(), changed, strict=True)
            if is_new
        }
        merged = (
            broadcast({name: x.contiguous() for name, x in found.items()}, ranks, 0, name="buffers")
            if self._rule == "rank 0"
            else merge_buffers(found, ranks, lambda path, leaf: self._rule)
        )
        for name, value in merged.items():
            found[name].copy_(value)
        self.refresh()

    def refresh(self) -> None:
        """Let the buffers be views of one flat value."""
        named = dict(self._module.named_buffers())
        if not named:
            self.flat = None
            return
        layout = layout_of({name: x.detach() for name, x in named.items()})
        old = None if self.flat is None else dict(unravel(self.flat))
        if old is None or any(
            name not in old or old[name].data_ptr() != x.data_ptr() or old[name].shape != x.shape
            for name, x in named.items()
        ):
            self.flat = ravel({n: x.detach() for n, x in named.items()}, layout, self._group)
            for name, view in unravel(self.flat).items():
                named[name].data = view
        self._seen = {name: _mark(x) for name, x in named.items()}

    @torch.no_grad()
    def take(self, flat: Flat | None) -> None:
        """Take the values of a state."""
        if flat is None or flat is self.flat:
            return
        own = self.named()
        for name, value in unravel(stores.resident(flat)).items():
            if name in own:
                own[name].copy_(value)
        self.flat = None
        self.refresh()


def _mark(buffer: Tensor) -> tuple[int, int]:
    return id(buffer), buffer._version


def carried(old: ZeroState, new: ZeroState) -> ZeroState:
    """Return a state of other trained leaves that goes on where an old one was.

    Moments and master weights of leaves that both train are those of the old state, and counts of
    optimizers that both have. Every rank must call.

    Args:
        old: the state so far.
        new: made of the same values.
    """
    old_parts = dict(zip(*parts_of(old.opt_state), strict=True))
    trained = set(old.params.layout.paths)
    missed = dict(old.missed.counts)
    moved: list[Any] = []
    for path, part in zip(*parts_of(new.opt_state), strict=True):
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
    state = tree.unflatten(tree.structure(new.opt_state, is_leaf=is_flat), moved)
    return new._replace(
        opt_state=state,
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
            found = unshard(old, lambda name, _: name == leaf)
            values = dict(zip(tree.paths(found), tree.leaves(found), strict=True))
            return write_leaves(part, {leaf: values[leaf]})
    return part


def is_flat(value: Any) -> TypeGuard[Flat]:
    """Whether a part of a state is sharded."""
    return isinstance(value, Flat)


def parts_of(state: Any) -> tuple[list[str], list[Any]]:
    """Return the paths and the parts of an optimizer's state, with each ``Flat`` as one part."""
    return tree.paths(state, is_leaf=is_flat), tree.flatten(state, is_leaf=is_flat)[0]
