"""A meter of memory: the buffers that a step makes and frees, by category and place.

[Note: the memory model]
There is no second description of a step. :func:`zfun.plan` runs the very ``init`` and
``step`` that train, on tensors without numbers and on one rank of a group whose other ranks do not
exist. A :class:`Meter` follows every storage that torch makes, until nothing refers to it. So every
option and every optimizer is covered, the first step and activations too. A test takes the same
steps on real tensors and simulated ranks, and finds the same bytes at the same moments.

The first rule that applies names a storage:

1. A leaf of the state before or after the step is ``params``, ``masters`` or ``moments``.
2. A collective of parameters reads and writes ``gathered``, one of gradients ``grads``; all but the
   result is ``communication``.
3. A copy of these has their name.
4. The phase in which a storage was made names the rest: ``activations`` in the loss, ``grads`` in
   backward, ``work`` outside of both, or ``staging`` if the storage is a copy from another place.

A tensor that a store keeps on a disk counts there until the handle is dropped.

Not counted: storages of fewer than 512 bytes, which no allocator of a device hands out; the
integers that ranks compare; the scratch memory of a kernel; the batch, which the caller owns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from zfun import tree
from zfun.collectives import (
    Collective,
    Group,
    Work,
    board_of,
    global_ranks,
    is_abstract_group,
)
from zfun.errors import OptionError
from zfun.optim import MasterState
from zfun.planner._buffers import MARK, STATE, WatchedBuffers, storage_of
from zfun.planner._parts import Bytes, Instant, Live
from zfun.planner._shapes import Shapes
from zfun.stores import Stored, on_disk

SMALL = 512

# The names of the operands of collectives, by those of the collectives.
_SENT = {"params": "gathered", "grads": "grads"}
_WAYS = ("to_host", "to_device", "to_disk", "from_disk")

_DEVICE = torch.ops.prim.device.default
_COPY_TO = torch.ops.aten.copy_.default
_COPIES = (_COPY_TO, torch.ops.aten._to_copy.default)


@final
class Meter(TorchDispatchMode):
    """A context that follows the storages of all tensors that this thread makes, real or fake ones.

    Outside of :func:`zfun.value_and_grad` the context has the effect of ``torch.no_grad()``, so the
    meter can tell the loss from the rest of a step.

    Args:
        device: where the loss is computed; bytes elsewhere count as host memory.

    Attributes:
        listeners: functions that are called with each operation, its arguments and its result.

    Example:
        >>> import zfun as zf
        >>> with Meter() as meter:
        ...     x = torch.ones(1000)
        ...     y = x + x
        >>> [(instant.what, instant.device.total) for instant in meter.live().instants]
        [('between steps', 0), ('ones', 4000), ('add', 8000), ('the end', 8000)]
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._device_type = torch.device(device).type
        self._buffers = WatchedBuffers(self._device_type)
        self._shapes = Shapes()
        self._crossed = dict.fromkeys(_WAYS, 0)
        self._num_pauses = 0
        self.listeners: list[Callable[[Any, Any, Any, Any], object]] = []
        self._context = contextlib.ExitStack()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch wraps the dispatch of a mode for its compiler, which costs as much as the dispatch.
        return False

    def __enter__(self) -> Self:
        self._context.enter_context(torch.no_grad())
        self._context.enter_context(on_disk(self._on_disk))
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._context.close()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and isinstance(args[0], FakeTensor):
            # Half of all calls ask for the device of a fake tensor, which each mode would pass on.
            return _device_of(args[0])
        # No function that is called below is one of the step.
        with torch._C.DisableTorchFunction():
            return self._followed(func, args, kwargs or {})

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = self._shapes(func, args, kwargs)
        for listener in self.listeners:
            listener(func, args, kwargs, out)
        if not self._num_pauses and func in _COPIES:
            self._cross(*((out, args[0]) if func is not _COPY_TO else args[:2]))
        if not self._num_pauses and _allocates(func):
            self.made(func.overloadpacket.__name__, out, (args, kwargs))
        return out

    def watch(self, group: Group) -> Group:
        """Return a group that reports its collectives here; for abstract or simulated ranks."""
        return _Watched(group, self)

    def name(self, name: str, value: tree.Tree) -> None:
        """Name the tensors in a tree: a field of :class:`Bytes`.

        Args:
            name: the field.
            value: a tree of tensors and handles of stores.

        Raises:
            OptionError: no such field.
        """
        if name not in Bytes._fields:
            raise OptionError(f"a buffer is one of {', '.join(Bytes._fields)}; got {name!r}")
        with self.paused():
            for leaf in tree.leaves(value):
                is_stored = isinstance(leaf, Stored)
                if is_stored and (found := self._buffers.find(leaf)) is not None:
                    found.name = name
                    continue
                x = leaf.get(leaf.store.device).wait() if is_stored else leaf
                if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= SMALL:
                    self._buffers.follow(x, name, _device_of(x)).detail = ""

    def name_state(self, state: Any) -> None:
        """Name the tensors of a state: of :func:`zfun.zero`, or of any type with ``opt_state``."""
        opt_state = getattr(state, "opt_state", None)
        self.name("params", state)
        self.name("moments", opt_state)
        self.name("masters", [*masters_of(opt_state)])

    def begin(self) -> None:
        """Begin the description here: the buffers that are alive, and the moments from now on."""
        self._buffers.begin()
        self._crossed = dict.fromkeys(_WAYS, 0)

    def live(self) -> Live:
        """Return the bytes between steps and at the moments since the beginning."""
        return Live(tuple(instant for instant in self.course() if instant.what != MARK))

    def mark(self) -> None:
        """Cut the course of the step here."""
        self._buffers.mark()

    def course(self) -> list[Instant]:
        """Return what :meth:`live` does, with the marks."""
        return [*self._buffers.replay()]

    @property
    def crossed(self) -> Mapping[str, int]:
        """The bytes moved since the beginning, by the fields of :class:`zfun.planner.Moved`."""
        return dict(self._crossed)

    @property
    def num_moments(self) -> int:
        """The moments since the beginning, between steps included."""
        return 1 + self._buffers.num_events

    def made(self, what: str, out: tree.Tree, inputs: tree.Tree) -> None:
        """Follow the storages that an operation has made; the meter calls this itself."""
        given: list[Tensor] | None = None
        for x in tensors_in(out):
            if x.untyped_storage().nbytes() < SMALL or self._buffers.find(x) is not None:
                continue
            given = tensors_in(inputs) if given is None else given
            if storage_of(x) in map(storage_of, given):
                continue
            freed = self._buffers.bury()
            when, name = _born()
            if x.is_floating_point() or x.dtype is torch.uint8:
                name = self._copied_from(given) or name
            buffer = self._buffers.follow(x, name, _device_of(x))
            place = _device_of(x).type
            if any(_device_of(y).type != place for y in given):
                buffer.detail = "staging"
            self._buffers.made(what + when, buffer, freed)

    def sent(self, call: Collective, x: Tensor, out: Tensor) -> None:
        """Name the operands of a collective; a watched group calls this."""
        # The integers by which ranks agree are not counted.
        if call.name not in _SENT and x.is_floating_point():
            return
        name = _SENT.get(call.name, "")
        for operand in (x, out):
            buffer = self._buffers.find(operand)
            if buffer is not None and buffer.name not in STATE:
                buffer.name = name
                # The result of a gather or a sum is a value, unless a codec decodes the result.
                is_value = operand is out and operand.is_floating_point()
                buffer.detail = "" if is_value else "communication"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no operation."""
        self._num_pauses += 1
        try:
            # The functions are none of the loss, whose mode would only see them pass.
            with torch._C.DisableTorchFunction():
                yield
        finally:
            self._num_pauses -= 1

    def _cross(self, to: Tensor, source: Tensor) -> None:
        """Count a copy between the device and host memory."""
        if isinstance(source, Tensor) and _device_of(to).type != _device_of(source).type:
            way = "to_device" if _device_of(to).type == self._device_type else "to_host"
            self._crossed[way] += source.numel() * source.dtype.itemsize

    def _copied_from(self, given: Sequence[Tensor]) -> str:
        """Return the name of the buffers that a result is a copy of, if these are sent."""
        large = [x for x in given if x.untyped_storage().nbytes() >= SMALL]
        names = {found.name if (found := self._buffers.find(x)) else "" for x in large}
        # An operation that autograd records is the loss's own.
        is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in large)
        return "" if len(names) != 1 or is_recorded else (names & {*_SENT.values()} or {""}).pop()

    def _on_disk(self, kind: str, handle: Any) -> None:
        """Count a tensor that a store puts on a disk, or gets from there."""
        if self._num_pauses:
            return
        if kind == "read":
            self.made("read from the disk", handle, ())
            return
        nbytes = handle.shape.numel() * handle.dtype.itemsize
        self._crossed["to_disk" if kind == "put" else "from_disk"] += nbytes
        if kind == "put":
            freed = self._buffers.bury()
            self._buffers.made("put on the disk", self._buffers.follow_stored(handle), freed)


def masters_of(state: Any) -> Iterator[Any]:
    """Yield the trees of master weights in an optimizer's state.

    Example:
        >>> [*masters_of(None)]
        []
    """
    for part in tree.leaves(state, is_leaf=lambda x: isinstance(x, MasterState)):
        if isinstance(part, MasterState):
            yield part.master
            yield from masters_of(part.inner)


@functools.cache
def _allocates(func: Any) -> bool:
    """Whether an operation may make storages; views and operations in place do not."""
    return not all(result.alias_info for result in func._schema.returns)


def _device_of(x: Tensor) -> torch.device:
    """Return the device of a tensor, without an operation for a fake one."""
    if not isinstance(x, FakeTensor):
        return x.device
    return torch.device("meta") if x.fake_mode.in_kernel_invocation else x.fake_device


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in arguments of operations, which are lists, tuples and dicts at most.

    A sparse gradient has no storage itself: its indices and values do.
    """
    if isinstance(value, Tensor):
        return [value._indices(), value._values()] if value.is_sparse else [value]
    found: list[Tensor] = []
    parts = value.values() if isinstance(value, dict) else value
    for part in parts if isinstance(value, (list, tuple, dict)) else ():
        if isinstance(part, (Tensor, list, tuple, dict)):
            found += tensors_in(part)
    return found


def _born() -> tuple[str, str]:
    """Return the phase of a step, and the name of a buffer that is made in this phase."""
    is_backward = torch._C._current_graph_task_id() != -1
    if torch.is_grad_enabled():
        return " in backward, again" if is_backward else " in forward", "activations"
    return (" in backward", "grads") if is_backward else ("", "work")


@final
class _Watched(Group):
    """A group whose collectives hold their input and their result until ``wait()``."""

    def __init__(self, group: Group, meter: Meter) -> None:
        self.rank, self.size = group.rank, group.size
        self.global_ranks, self.board = global_ranks(group), board_of(group)
        self._group, self._meter = group, meter

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        x = x.detach()
        with self._meter.paused():
            if is_abstract_group(self._group):
                result = self._group.start(call, x, out).wait()
                pending = None
            else:
                # A simulated group copies messages. The other ranks never see these two buffers,
                # which are freed as soon as this rank drops the references.
                numel = call.op.output_numel(x.numel(), self.size)
                result = x.new_empty(numel) if out is None else out
                pending = self._group.start(call, x)
        with torch._C.DisableTorchFunction():
            self._meter.made(f"{call.op.kind} of {call.name} {call.part}".rstrip(), result, x)
            self._meter.sent(call, x, result)
        operands = x, result

        def finish() -> Tensor:
            if pending is None:
                return operands[1]
            with self._meter.paused(), torch.no_grad():
                return operands[1].copy_(pending.wait())

        return Work(finish)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        return _Watched(self._group.subgroup(parts, name), self._meter)

    def close(self) -> None:
        self._group.close()
