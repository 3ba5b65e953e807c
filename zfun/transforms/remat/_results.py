"""Keep the results that a policy chooses, and replay each when the block runs again.

In forward a dispatch mode below autograd numbers the results and asks the policy about each. During
recomputation a second mode counts along and returns the kept result instead of running the
operation. Both modes must count the same operations, so

* views and in-place operations are not counted and never kept;
* operations that gather parameters are not counted, because a gather may run in one pass only;
* a kept result is dropped when the block writes to the tensor later;
* the random state after a kept random operation is kept too, because the operation does not run
  again.
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
from zfun.transforms.call._lazy import is_loading
from zfun.transforms.remat._elsewhere import Elsewhere, MovedVector, Stays
from zfun.transforms.remat._vectors import is_plain


def keeping_results(
    policy: policies.Policy, elsewhere: Elsewhere | None
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Make the dispatch mode for forward and the dispatch mode for recomputation."""
    kept: dict[int, _KeptResult] = {}
    return _Recording(policy, elsewhere, kept), _Replaying(elsewhere, kept)


@dataclass(frozen=True, slots=True)
class _KeptResult:
    """The result of an operation, and the random state after the operation."""

    op: Any
    leaves: tuple[Any, ...]
    spec: tree.Spec
    versions: tuple[int | None, ...]
    random: tuple[tuple[torch.device, Tensor], ...]


class _Mode(TorchDispatchMode):
    """A dispatch mode in which compiled functions may run."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


class _Recording(_Mode):
    """Runs forward and keeps the results that the policy chooses."""

    def __init__(
        self, policy: policies.Policy, elsewhere: Elsewhere | None, kept: dict[int, _KeptResult]
    ) -> None:
        super().__init__()
        self.policy = policy
        self.elsewhere = elsewhere
        self.kept = kept
        self.numbers: dict[int, int] = {}  # of kept results, by storage
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
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
        # Do not keep a result drawn from a user's generator: a replay would not advance the
        # generator.
        if (
            tensors
            and kwargs.get("generator") is None
            and self.policy(func, policies.described(tensors))
        ):
            kept = tuple(self._keep(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
            versions = tuple(leaf._version if isinstance(leaf, Tensor) else None for leaf in kept)
            self.kept[number] = _KeptResult(
                func, kept, spec, versions, _random_states(func, tensors)
            )
            self.numbers |= {
                leaf.untyped_storage()._cdata: number for leaf in tensors if is_plain(leaf)
            }
        return out

    def _keep(self, tensor: Tensor) -> Any:
        return (
            self.elsewhere.keep(tensor)
            if self.elsewhere is not None and is_plain(tensor)
            else _alias(tensor)
        )


class _Replaying(_Mode):
    """Recomputes a block and returns kept results instead of running their operations."""

    def __init__(self, elsewhere: Elsewhere | None, kept: dict[int, _KeptResult]) -> None:
        super().__init__()
        self.elsewhere = elsewhere
        self.kept = kept
        self.count = 0

    def __enter__(self) -> Any:
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if is_loading() or not _may_be_kept(func):
            return func(*args, **(kwargs or {}))
        found = self.kept.get(self.count)
        self.count += 1
        if found is None:
            return func(*args, **(kwargs or {}))
        if found.op is not func:
            raise ZfunError(
                f"a function under remat() must do the same when it runs again; got {func} where "
                f"{found.op} was; look for code that depends on a global, a counter or a cache"
            )
        for device, state in found.random:
            _set_random_state(device, state)
        return tree.unflatten(
            found.spec, [self._restore(found, i) for i in range(len(found.leaves))]
        )

    def _restore(self, found: _KeptResult, index: int) -> Any:
        leaf = found.leaves[index]
        if isinstance(leaf, (MovedVector, Stays)):
            assert self.elsewhere is not None
            return self.elsewhere.restore(leaf)
        if not isinstance(leaf, Tensor):
            return leaf
        if leaf._version != found.versions[index]:
            raise ZfunError(
                "a result that a policy keeps must not be written to after the function has "
                f"returned; the result of {found.op} was; replace the in-place operation, or "
                "change the policy so that it does not keep this result"
            )
        return _alias(leaf)


def _alias(tensor: Tensor) -> Tensor:
    """Return the same memory without a graph, but with the same version counter."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


@functools.cache
def _may_be_kept(op: Any) -> bool:
    """Whether an operation returns new tensors and writes to no argument."""
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
    values = {
        argument.name: value for argument, value in zip(schema.arguments, args, strict=False)
    } | kwargs
    names = [
        argument.name
        for argument in schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return [
        leaf
        for name in names
        for leaf in tree.leaves(values.get(name))
        if isinstance(leaf, Tensor) and is_plain(leaf)
    ]


def _random_states(op: Any, tensors: Sequence[Tensor]) -> tuple[tuple[torch.device, Tensor], ...]:
    if torch.Tag.nondeterministic_seeded not in op.tags:
        return ()
    devices = dict.fromkeys(tensor.device for tensor in tensors)
    return tuple((device, _random_state(device)) for device in devices)


def _random_state(device: torch.device) -> Tensor:
    return (
        torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
    )


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
