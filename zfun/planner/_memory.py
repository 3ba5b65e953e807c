"""Live bytes: the memory of a rank at every moment of a step.

[Note: the memory model]
There is no second description of a step. :func:`live_bytes` runs the very ``init`` and ``step``
that train, on tensors without numbers and on one rank of a group whose other ranks do not exist. A
:class:`Meter` follows every storage that torch makes, until nothing refers to it. So every option
and every optimizer is covered, the first step and activations too. A test takes the same steps on
real tensors and simulated ranks, and finds the same bytes at the same moments.

The first rule that applies names a storage:

1. A leaf of the state before or after the step is ``params`` or ``optimizer``.
2. A collective of parameters reads and writes ``gathered``, one of gradients ``gradients``.
3. A copy of these has their name.
4. The phase in which a storage was made names the rest: ``activations`` in the loss,
   ``gradients`` in backward, ``work`` outside of both.

Not counted: storages of fewer than 512 bytes, which no allocator of a device hands out; the
integers that ranks compare; the fixed-size scratch memory of a kernel; the batch, which the caller
owns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self, final

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from zfun import tree
from zfun.collectives import Collective, Group, Work, abstract_group
from zfun.errors import OptionError, checked_options
from zfun.planner._abstract import abstract
from zfun.stores import Stored

__all__ = ["Held", "Live", "Meter", "Moment", "live_bytes"]

_SMALL = 512

# The names of the operands of collectives, by those of the collectives.
_SENT = {"params": "gathered", "grads": "gradients"}


class Held(NamedTuple):
    """Bytes of one rank, by category.

    Attributes:
        params: the parameters, frozen ones too, whole or this rank's shard.
        gathered: gathered buckets, their messages, and their casts.
        gradients: of activations, of leaves and of buckets; messages, and the feedback of codecs.
        optimizer: the optimizer's state, master weights included.
        activations: everything else that the loss makes, and makes again in backward.
        work: everything else.
    """

    params: int = 0
    gathered: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    work: int = 0

    @property
    def total(self) -> int:
        """The sum over the categories."""
        return sum(self)


class Moment(NamedTuple):
    """The bytes at one moment.

    Attributes:
        what: the operation that has just made a buffer.
        device: bytes where the loss is computed.
        host: bytes in host memory, where that is another place.
    """

    what: str
    device: Held
    host: Held


@dataclass(frozen=True, slots=True)
class Live:
    """The bytes of a rank in the course of a step, made by :func:`live_bytes`.

    Attributes:
        kept: between steps.
        moments: each time a buffer is made, in order, and at the end, beside the old state.
    """

    kept: Moment
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment at which most is on the device."""
        return max(self.moments, key=lambda moment: moment.device.total)

    @property
    def largest(self) -> Held:
        """The most of each category on the device, each at its own worst moment."""
        return Held(*map(max, zip(*(moment.device for moment in self.moments), strict=True)))

    def __str__(self) -> str:
        header = ("", *Held._fields, "on the device", "in host memory")
        named = (("between steps", self.kept), (f"peak: {self.peak.what}", self.peak))
        cells = []
        for name, (_, device, host) in named:
            cells.append((name, *(f"{n:,}" for n in (*device, device.total, host.total))))
        columns = [*zip(header, *cells, strict=True)]
        if set(columns[-1][1:]) == {"0"}:
            columns.pop()
        widths = [max(map(len, column)) for column in columns]
        lines = []
        for first, *rest in zip(*columns, strict=True):
            lines.append("  ".join([first.ljust(widths[0]), *map(str.rjust, rest, widths[1:])]))
        return "\n".join(lines)


@dataclass(eq=False, slots=True)
class _Buffer:
    storage: StorageWeakRef
    nbytes: int
    on_host: bool
    # A field of Held, or empty where the storage is not counted.
    name: str


class _Event(NamedTuple):
    what: str
    made: _Buffer | None
    freed: tuple[_Buffer, ...]


@final
class Meter(TorchDispatchMode):
    """A context that follows the storages of all tensors that this thread makes, real or fake ones.

    Outside of :func:`zfun.value_and_grad` the context has the effect of ``torch.no_grad()``, so the
    meter can tell the loss from the rest of a step.

    Args:
        device: where the loss is computed; bytes elsewhere count as host memory.

    Example:
        >>> import zfun as zf
        >>> with Meter() as meter:
        ...     x = torch.ones(1000)
        ...     y = x + x
        >>> [(moment.what, moment.device.total) for moment in meter.live().moments]
        [('ones', 4000), ('add', 8000), ('the end', 8000)]
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self._device_type = torch.device(device).type
        self._now: dict[int, _Buffer] = {}
        self._kept: tuple[_Buffer, ...] = ()
        self._events: list[_Event] = []
        self._num_pauses = 0
        self._no_grad = torch.no_grad()

    def __enter__(self) -> Self:
        self._no_grad.__enter__()
        super().__enter__()
        return self

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self._no_grad.__exit__(exc_type, exc_val, exc_tb)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        # Views, and results of operations in place, have the storage of an input.
        if not self._num_pauses and not all(result.alias_info for result in func._schema.returns):
            self.made(func.overloadpacket.__name__, out, (args, kwargs))
        return out

    def watch(self, group: Group) -> Group:
        """Return a group that reports its collectives here; for abstract or simulated ranks."""
        return _Watched(group, self)

    def name(self, name: str, value: tree.Tree) -> None:
        """Name the tensors in a tree: a field of :class:`Held`.

        Raises:
            OptionError: no such field.
        """
        if name not in Held._fields:
            raise OptionError(f"a buffer is one of {', '.join(Held._fields)}; got {name!r}")
        with self.paused():
            for leaf in tree.leaves(value):
                x = leaf.get(leaf.store.device).wait() if isinstance(leaf, Stored) else leaf
                if isinstance(x, Tensor) and x.untyped_storage().nbytes() >= _SMALL:
                    self._follow(x, name)

    def name_state(self, state: Any) -> None:
        """Name the tensors of a state: of :func:`zfun.zero`, or of any type with ``opt_state``."""
        self.name("params", state)
        self.name("optimizer", getattr(state, "opt_state", None))

    def begin(self) -> None:
        """Begin the description here: the buffers that are alive, and the moments from now on."""
        self._bury()
        self._events.clear()
        self._kept = tuple(self._now.values())

    def live(self) -> Live:
        """Return the moments since the beginning."""
        # Names are final only now: the new state is known.
        held: dict[tuple[bool, str], int] = {}

        def add(buffer: _Buffer, sign: int) -> None:
            place = buffer.on_host, buffer.name
            held[place] = held.get(place, 0) + sign * buffer.nbytes

        def moment(what: str) -> Moment:
            at = lambda on_host: Held(*(held.get((on_host, name), 0) for name in Held._fields))
            return Moment(what, at(False), at(True))

        for buffer in self._kept:
            add(buffer, 1)
        kept, moments = moment("between steps"), list[Moment]()
        for event in (*self._events, _Event("the end", None, self._bury())):
            for buffer in event.freed:
                add(buffer, -1)
            if event.made is not None:
                add(event.made, 1)
            if event.made is None or event.made.name:
                moments.append(moment(event.what))
        return Live(kept, tuple(moments))

    def made(self, what: str, out: tree.Tree, inputs: tree.Tree) -> None:
        """Follow the storages that an operation has made; the meter calls this itself."""
        given: list[Tensor] | None = None
        for x in _tensors(out):
            if x.untyped_storage().nbytes() < _SMALL or _key(x) in self._now:
                continue
            given = [*_tensors(inputs)] if given is None else given
            if any(_key(x) == _key(y) for y in given):
                continue
            freed = self._bury()
            when, name = _born()
            if x.is_floating_point() or x.dtype is torch.uint8:
                name = self._copied_from(given) or name
            self._events.append(_Event(what + when, self._follow(x, name), freed))

    def sent(self, call: Collective, x: Tensor, out: Tensor) -> None:
        """Name the operands of a collective; a watched group calls this."""
        # The integers by which ranks agree are not counted.
        if call.name not in _SENT and x.is_floating_point():
            return
        name = _SENT.get(call.name, "")
        for operand in (x, out):
            buffer = self._now.get(_key(operand))
            if buffer is not None and buffer.name not in ("params", "optimizer"):
                buffer.name = name

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Follow no operation."""
        self._num_pauses += 1
        try:
            yield
        finally:
            self._num_pauses -= 1

    def _copied_from(self, given: Sequence[Tensor]) -> str:
        """Return the name of the buffers that a result is a copy of, if these are sent."""
        large = [x for x in given if x.untyped_storage().nbytes() >= _SMALL]
        names = {found.name if (found := self._now.get(_key(x))) else "" for x in large}
        # An operation that autograd records is the loss's own.
        is_recorded = torch.is_grad_enabled() and any(x.requires_grad for x in large)
        return "" if len(names) != 1 or is_recorded else (names & {*_SENT.values()} or {""}).pop()

    def _follow(self, x: Tensor, name: str) -> _Buffer:
        buffer = self._now.get(_key(x))
        if buffer is None:
            storage, on_host = x.untyped_storage(), x.device.type != self._device_type
            buffer = _Buffer(StorageWeakRef(storage), storage.nbytes(), on_host, name)
            self._now[_key(x)] = buffer
        buffer.name = name
        return buffer

    def _bury(self) -> tuple[_Buffer, ...]:
        """Let go of the storages that nothing refers to any more."""
        # The weak reference keeps an address from being given to another storage.
        is_expired = torch.UntypedStorage._expired
        dead = [key for key, buffer in self._now.items() if is_expired(buffer.storage.cdata)]
        return tuple(self._now.pop(key) for key in dead)


def _key(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[Tensor]:
    return (x for x in tree_leaves(value) if isinstance(x, Tensor))


def _born() -> tuple[str, str]:
    """Return the phase of a step, and the name of a buffer that is made in this phase."""
    is_backward = torch._C._current_graph_task_id() != -1
    if torch.is_grad_enabled():
        return " in backward, again" if is_backward else " in forward", "activations"
    return (" in backward", "gradients") if is_backward else ("", "work")


@final
class _Watched(Group):
    """A group whose collectives hold their input and their result until ``wait()``."""

    def __init__(self, group: Group, meter: Meter) -> None:
        self.rank, self.size = group.rank, group.size
        self._group, self._meter = group, meter

    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        x = x.detach()
        with self._meter.paused():
            # A simulated group copies messages. The other ranks never see these two buffers, which
            # are freed as soon as this rank drops the references.
            numel = call.op.output_numel(x.numel(), self.size)
            result = x.new_empty(numel) if out is None else out
            pending = self._group.start(call, x)
        self._meter.made(f"{call.op.kind} of {call.name} {call.part}".rstrip(), result, x)
        self._meter.sent(call, x, result)
        operands = x, result

        def finish() -> Tensor:
            with self._meter.paused(), torch.no_grad():
                return operands[1].copy_(pending.wait())

        return Work(finish)

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        return _Watched(self._group.subgroup(parts, name), self._meter)

    def close(self) -> None:
        self._group.close()


@checked_options
def live_bytes(
    make: Callable[[Group], Any],
    params: tree.Tree,
    batch: Any,
    *,
    size: int,
    rank: int = 0,
    steps: int = 2,
    device: torch.device | str = "cpu",
) -> Live:
    """Find the bytes that a rank holds at every moment of a step, with no data, ranks or device.

    The step itself runs, on tensors without numbers, so that all options, optimizers and losses are
    covered, and an option is written once. A number that the step reads is taken for 1, a condition
    for true.

    Args:
        make: ``make(group) -> zero``: returns :func:`zfun.zero`'s three functions, or any object
            with ``init(params) -> state`` and ``step(state, batch) -> (state, info)``.
            ``state.opt_state`` counts as the optimizer's, the rest of the state as parameters.
        params: a tree of tensors, of which shapes and dtypes count; ``meta`` tensors will do.
        batch: the batch of a rank, of which only shapes and dtypes count.
        size: the number of ranks.
        rank: the rank to describe.
        steps: the number of steps to take, of which the last is described. The first step learns
            the order of use; from the second on they are alike.
        device: where the loss is computed. ``"meta"`` stands for any accelerator, whose bytes are
            told from those of host memory, where stores keep theirs.

    Returns:
        The bytes, by category and place.

    Raises:
        OptionError: no such rank, or no step.

    Example:
        >>> import zfun as zf
        >>> params = {name: torch.empty(64, 64, device="meta") for name in ("a", "b")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> make = lambda group: zf.zero(3, loss, zf.optim.sgd(0.1), group, bucket_bytes=1)
        >>> found = zf.planner.live_bytes(make, params, torch.empty(8, 64), size=8)
        >>> found.kept.device.params, found.peak.what, found.largest.gathered
        (4096, 'empty in backward', 32768)

    After Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models"
    (2020).
    """
    if steps < 1:
        raise OptionError(f"steps must be at least 1; got {steps}")
    meter = Meter(device)
    # Outside of the context, because optimizers are probed with numbers.
    run = make(meter.watch(abstract_group(size, rank)))
    with abstract(device) as fake:
        start, data = fake(params), fake(batch)
        with meter:
            state = run.init(start)
            for _ in range(steps - 1):
                state = run.step(state, data)[0]
            meter.name_state(state)
            meter.begin()
            after = run.step(state, data)
            meter.name_state(after[0])
            return meter.live()
