"""The results of a block that a policy keeps: found below autograd, and put in the place of operations when the block runs again.

The first time, a dispatch mode numbers the results as they come and asks the policy about each. The second time, another one counts along,
and where a number was kept, the operation does not run. Both must count the same, so

* views and operations that write in place are never asked for, and not counted;
* nor is what gathers parameters: it may run in one pass and not in the other;
* a result that the block writes to later is let go of: it is not what the operation returned any more;
* a random operation whose result is kept does not run again, so the random state after it is kept too.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from zfun import policies, tree
from zfun.errors import ZfunError
from zfun.policies import Policy
from zfun.transforms._remat._elsewhere import Elsewhere, Moved, Stays
from zfun.transforms._remat._vectors import is_plain
from zfun.transforms.params._lazy import is_loading

__all__ = ["keeping_results"]


def keeping_results(policy: Policy, elsewhere: Elsewhere | None) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Make the mode in which a block runs first, and that in which it runs again.

    Args:
        policy: which results are kept.
        elsewhere: where they go; ``None`` for where they are.

    Returns:
        The two.
    """
    kept: dict[int, _Result] = {}
    return _Recording(policy, elsewhere, kept), _Replaying(elsewhere, kept)


@dataclass(frozen=True, slots=True)
class _Result:
    """What an operation returned, and the random state that it left."""

    op: Any
    leaves: tuple[Any, ...]
    spec: tree.Spec
    versions: tuple[int | None, ...]
    random: tuple[tuple[torch.device, Tensor], ...]


class _Mode(TorchDispatchMode):
    """A mode that lets compiled functions run inside of it."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Recording(_Mode):
    """Runs forward, asks the policy about each result and keeps what it wants."""

    def __init__(self, policy: Policy, elsewhere: Elsewhere | None, kept: dict[int, _Result]) -> None:
        super().__init__()
        self.policy = policy
        self.elsewhere = elsewhere
        self.kept = kept
        self.numbers: dict[int, int] = {}  # of what is kept, by its storage
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if is_loading():
            return out
        if not _may_be_kept(func):
            for written in _written(func, args, kwargs):
                self.kept.pop(self.numbers.pop(written.untyped_storage()._cdata, -1), None)
            return out
        number = self.count
        self.count += 1
        leaves, spec = tree.flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # A generator of the user's own has a state of its own.
        if tensors and kwargs.get("generator") is None and self.policy(func, policies.described(tensors)):
            kept = tuple(self._keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            versions = tuple(leaf._version if isinstance(leaf, Tensor) else None for leaf in kept)
            self.kept[number] = _Result(func, kept, spec, versions, _random_states(func, tensors))
            self.numbers |= {leaf.untyped_storage()._cdata: number for leaf in tensors if is_plain(leaf)}
        return out

    def _keep(self, tensor: Tensor) -> Any:
        return self.elsewhere.keep(tensor) if self.elsewhere is not None and is_plain(tensor) else _alias(tensor)


class _Replaying(_Mode):
    """Computes a block again, but for what is kept."""

    def __init__(self, elsewhere: Elsewhere | None, kept: dict[int, _Result]) -> None:
        super().__init__()
        self.elsewhere = elsewhere
        self.kept = kept
        self.count = 0

    def __enter__(self) -> Any:
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if is_loading() or not _may_be_kept(func):
            return func(*args, **(kwargs or {}))
        found = self.kept.get(self.count)
        self.count += 1
        if found is None:
            return func(*args, **(kwargs or {}))
        if found.op is not func:
            raise ZfunError(
                f"a function under remat() must do the same when it is computed again; got {func} where {found.op} was; look for what "
                "depends on a global, a counter or a cache"
            )
        for device, state in found.random:
            _set_random_state(device, state)
        return tree.unflatten(found.spec, [self._restore(found, i) for i in range(len(found.leaves))])

    def _restore(self, found: _Result, index: int) -> Any:
        leaf = found.leaves[index]
        if isinstance(leaf, (Moved, Stays)):
            assert self.elsewhere is not None
            return self.elsewhere.restore(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf._version != found.versions[index]:
            raise ZfunError(
                f"what a policy keeps must not be written to after the function has returned; the result of {found.op} was; write what "
                "follows out of place, or let the policy leave this result out"
            )
        return _alias(leaf)


def _alias(tensor: Tensor) -> Tensor:
    """The same memory without a place in a graph, but with the same count of writes."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@functools.cache
def _may_be_kept(op: Any) -> bool:
    """Whether an operation makes new tensors and writes to none."""
    schema = getattr(op, "_schema", None)
    return (
        schema is not None
        and not schema.is_mutable
        and all(result.alias_info is None for result in schema.returns)
        and bool(schema.returns)
    )


def _written(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    schema = getattr(op, "_schema", None)
    if schema is None or not schema.is_mutable:
        return []
    values = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    names = [argument.name for argument in schema.arguments if argument.alias_info is not None and argument.alias_info.is_write]
    return [leaf for name in names for leaf in tree.leaves(values.get(name)) if isinstance(leaf, Tensor) and is_plain(leaf)]


def _random_states(op: Any, tensors: Sequence[Tensor]) -> tuple[tuple[torch.device, Tensor], ...]:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return ()
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return tuple((device, _random_state(device)) for device in devices)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
