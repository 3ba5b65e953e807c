"""A directory checkpoint as hooks of ``on_load_checkpoint`` see it, and after their changes."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zfun.collectives import Group, LeafRecord, check_same
from zfun.errors import CheckpointError
from zfun.interop._named import first_names
from zfun.interop.engine import TORCH_NAMES, ParamGroups
from zfun.ops import fingerprint
from zfun.sources import Deferred, TrainingState


class _Moments(NamedTuple):
    """The state that an optimizer has for one parameter, in files."""

    load: Callable[[], Any]


class Unread(collections.UserDict[Any, Any]):
    """Values of a directory, each of which is read when code asks for it."""

    def __init__(self, values: Mapping[Any, Any]) -> None:
        super().__init__(values)
        self._first = dict(values)

    def __getitem__(self, key: Any) -> Any:
        value = self.data[key]
        if isinstance(value, (Deferred, _Moments)):
            loaded = value.load()
            # Tied values are one tensor, as in a file.
            self.data |= {other: loaded for other, x in self.data.items() if x is value}
        return self.data[key]

    def __or__(self, other: Any) -> Any:
        return dict(self) | dict(other)

    def __ror__(self, other: Any) -> Any:
        return dict(other) | dict(self)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def is_as_saved(self) -> bool:
        """Whether hooks have left each value as it was."""
        return self.data.keys() == self._first.keys() and all(map(self._is_first, self.data))

    def left(self) -> dict[Any, Any]:
        """Return what hooks have left, with what they have only read as before."""
        return {key: self._first[key] if self._is_first(key) else x for key, x in self.data.items()}

    def _is_first(self, key: Any) -> bool:
        x, first = self.data[key], self._first.get(key)
        is_read = isinstance(first, (Deferred, _Moments)) and x is not first
        return x is first or (is_read and _is_same(x, first.load()))


def _is_same(x: Any, y: Any) -> bool:
    if isinstance(y, dict):
        return isinstance(x, dict) and x.keys() == y.keys() and all(_is_same(x[k], y[k]) for k in y)
    is_alike = isinstance(x, Tensor) and (x.dtype, x.device) == (y.dtype, y.device)
    return is_alike and torch.equal(x, y)


# Values.


@torch.no_grad()
def take(
    module: nn.Module,
    given: Mapping[str, Any],
    more: Mapping[str, Any],
    device: torch.device,
    *,
    strict: bool,
) -> dict[str, Any]:
    """Copy values into a module that is not live; return those that its state is made of.

    Those are values for ``meta`` and for parameters in a narrower dtype. Values are given by key of
    the ``state_dict()``; ``more`` are others, by name.
    """
    names, own = first_names(module), module.state_dict(keep_vars=True)
    raw = given.left() if isinstance(given, Unread) else given
    known = {names[id(x)]: raw[key] for key, x in own.items() if key in raw and id(x) in names}
    known = {**more, **known}
    missing = [key for key, x in own.items() if key not in raw and names.get(id(x)) not in known]
    unknown = [key for key in raw if key not in own]
    if strict and (missing or unknown):
        raise CheckpointError(
            f"a checkpoint has the keys of the module's state_dict(); missing are {missing[:3]}, "
            f"unknown are {unknown[:3]}; load the checkpoint into the module that was saved, "
            "rename the keys in on_load_checkpoint(), or set strict_loading = False",
            leaf=(missing or unknown)[0],
        )
    if others := {key: raw[key] for key, x in own.items() if key in raw and id(x) not in names}:
        module.load_state_dict(others, strict=False)
    later: dict[str, Any] = {}
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        if (value := known.get(name)) is None:
            continue
        if value.shape != x.shape:
            raise CheckpointError(
                f"a value has the shape of its parameter; leaf {name!r} has {tuple(x.shape)}; got "
                f"{tuple(value.shape)}; change the value in on_load_checkpoint()",
                leaf=name,
            )
        is_deferred = isinstance(value, Deferred)
        if x.is_meta or torch.promote_types(x.dtype, value.dtype) != x.dtype:
            at = dataclasses.replace(value, device=device) if is_deferred else value.to(device)
            later[name] = at
        if not x.is_meta:
            x.copy_(value.load() if is_deferred else value)
    return later


def has_load_hooks(module: nn.Module) -> bool:
    """Whether code other than torch's decides what ``load_state_dict()`` does with parameters."""
    if any(is_overridden(name, module, nn.Module) for name in ("state_dict", "load_state_dict")):
        return True
    return any(
        part._load_state_dict_pre_hooks
        or part._load_state_dict_post_hooks
        or not part._load_from_state_dict.__module__.startswith("torch.")
        for part in module.modules()
        if next(part.parameters(), None) is not None
    )


# States of optimizers.


def shown(numbers: Mapping[str, Any], state: TrainingState) -> dict[str, Any]:
    """Return the state of an optimizer for hooks, as torch has it, with names beside places."""
    groups = zip(torch_groups(numbers), numbers["param_groups"], strict=True)
    return {
        **numbers,
        "state": Unread(_entries(numbers, state)),
        "param_groups": [{**one, "names": own["names"]} for one, own in groups],
    }


def torch_state(numbers: Mapping[str, Any], state: TrainingState) -> dict[str, Any]:
    """Return the state of an optimizer in torch's form."""
    entries = {place: entry.load() for place, entry in _entries(numbers, state).items()}
    return {"state": entries, "param_groups": torch_groups(numbers)}


def _entries(numbers: Mapping[str, Any], state: TrainingState) -> dict[int, _Moments]:
    names = [name for group in numbers["param_groups"] for name in group["names"]]
    # Checkpoints of earlier versions have one count.
    count, by_name = {"step": torch.tensor(float(state.step or 0))}, numbers.get("numbers")
    entries: dict[int, _Moments] = {}
    for place, name in enumerate(names):
        slots = {slot.rpartition(".")[2]: x for slot, x in state.moments.items() if name in x}
        # torch has neither master weights nor an average.
        kept = {word: x[name] for word, x in slots.items() if word not in ("master", "average")}
        beside = count if by_name is None else by_name.get(name)
        if kept and beside is not None:
            entries[place] = _Moments(lambda kept=kept, beside=beside: _loaded(kept, beside))
    return entries


def _loaded(kept: Mapping[str, Deferred], beside: Mapping[str, Tensor]) -> dict[str, Any]:
    moments = {TORCH_NAMES.get(word, word): x.load() for word, x in kept.items()}
    return {**copy.deepcopy(dict(beside)), **moments}


def torch_groups(numbers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return param groups with places as in torch, where a directory has names."""
    places = itertools.count()
    return [
        {
            **{name: value for name, value in group.items() if name != "names"},
            "params": [next(places) for _ in group["names"]],
        }
        for group in numbers["param_groups"]
    ]


def plan(
    states: Sequence[Mapping[str, Any]], groups: Sequence[ParamGroups], ranks: Group
) -> tuple[bool, bool]:
    """Return whether states are those of a directory for these optimizers, and whether changed.

    All ranks call, and are refused where hooks have left other states on some rank.
    """
    is_own = len(states) == len(groups) and all(map(_is_of, states, groups))
    kept = [one["state"] for one in states]
    is_changed = not is_own or not all(isinstance(x, Unread) and x.is_as_saved() for x in kept)
    if ranks.size > 1:
        what = "states of optimizers after on_load_checkpoint()"
        check_same([*_records(states, is_changed=is_changed)], ranks, what, kind="part")
    return is_own, is_changed


def _records(states: Sequence[Mapping[str, Any]], *, is_changed: bool) -> Iterator[LeafRecord]:
    left = "changed" if is_changed else "as saved"
    yield LeafRecord("optimizer_states", f"of length {len(states)}, {left}")
    for index, one in enumerate(states):
        parts = {f"param_groups[{i}]": group for i, group in enumerate(one["param_groups"])}
        if is_changed:
            parts |= {f"state[{place}]": entry for place, entry in one["state"].items()}
        for part, values in parts.items():
            for name, x in values.items():
                is_large = isinstance(x, Tensor) and x.ndim > 0
                digest = fingerprint(x.cpu()) if is_large else ""
                words = f"of shape {tuple(x.shape)}" if is_large else _in_words(x)
                yield LeafRecord(f"optimizer_states[{index}].{part}.{name}", words, digest)


def _in_words(x: Any) -> str:
    """Return a text that is the same on all ranks, where other objects may have addresses."""
    x = x.item() if isinstance(x, Tensor) else x
    return repr(x) if isinstance(x, (bool, int, float, str, tuple, list)) else type(x).__name__


def _is_of(numbers: Mapping[str, Any], own: ParamGroups) -> bool:
    """Whether a state has the parameters of an optimizer, in the places of a directory."""
    groups = numbers["param_groups"]
    if not all("names" in group for group in groups):
        return False
    saved, here = ({name for one in x for name in one["names"]} for x in (groups, own.named()))
    places = [group["params"] for group in torch_groups(numbers)]
    return saved == here and places == [group["params"] for group in groups]


def in_torch(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return states that hooks have left in torch's form."""
    return [
        {
            "state": one["state"],
            "param_groups": [
                {name: x for name, x in group.items() if name != "names"}
                for group in one["param_groups"]
            ],
        }
        for one in states
    ]
