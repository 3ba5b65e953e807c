"""The protocol of stores, which keep parts of the state between uses."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Work
from zfun.errors import OffloadError, OptionError
from zfun.flat import FLAT, Flat
from zfun.options import ANY, FRACTION, FUNCTION, STORE, TEXT, instance, integer, takes

# Hears of each tensor that is put on a disk, or read from there.
_LISTENER: ContextVar[Callable[[str, Any], None] | None] = ContextVar("listener", default=None)
# Threads share a store: simulated ranks, and a save in the background. One lock for all stores,
# because a store is pickled.
_COUNTING = threading.Lock()


@dataclass(frozen=True, slots=True)
class Crossing:
    """One transfer between the device and a store.

    Attributes:
        kind: ``"put"`` (into the store) or ``"get"`` (out of it).
        name: the part of the state: ``"params"``, ``"grads"`` or ``"state"``.
        num_bytes: bytes transferred.
    """

    kind: str
    name: str
    num_bytes: int


class Counts:
    """The count of transfers of a store.

    Attributes:
        log: the transfers between the device and the store, in order; ``None`` if not kept.
    """

    def __init__(self, *, log: bool) -> None:
        self.log: list[Crossing] | None = [] if log else None
        self._bytes: dict[tuple[str, str], int] = {}

    def crossed(self, kind: str, name: str, num_bytes: int) -> None:
        """Count a transfer, and append the transfer to the log if there is one."""
        with _COUNTING:
            self._bytes[kind, name] = self._bytes.get((kind, name), 0) + num_bytes
        if self.log is not None:
            self.log.append(Crossing(kind, name, num_bytes))

    def bytes_moved(self, kind: str | None = None, name: str | None = None) -> int:
        """Return how many bytes were transferred since the store was made.

        Args:
            kind: count only ``"put"`` or only ``"get"``.
            name: count only ``"params"``, ``"grads"`` or ``"state"``.

        Returns:
            Bytes.
        """
        return sum(
            num_bytes
            for (its_kind, its_name), num_bytes in list(self._bytes.items())
            if kind in (None, its_kind) and name in (None, its_name)
        )


class Stored:
    """A handle that stands for a tensor in a store.

    ``get`` starts the transfer and returns a work handle, whose ``wait()`` returns the tensor. Call
    ``get`` early to prefetch.

    Attributes:
        store: the store that keeps the tensor.
        name: the part of the state, for messages.
        dtype: dtype of the tensor.
        shape: shape of the tensor.
        can_fail: whether ``put`` may raise, or ``flush``. Before a step writes a new state to such
            a store, the step leaves the old state as it is.
        device: where the tensor is, if ``get`` to this device copies nothing; else ``None``.
    """

    store: Store
    name: str
    dtype: torch.dtype
    shape: torch.Size
    can_fail: bool = False
    device: torch.device | None = None

    def __init__(self, store: Any, like: Tensor | Stored, name: str) -> None:
        self.store, self.name = store, name
        self.dtype, self.shape = like.dtype, like.shape

    def get(self, device: torch.device) -> Work:
        """Start the transfer to a device."""
        raise NotImplementedError

    def prefetch(self) -> None:
        """Start the transfer of the next ``get`` now, where a store takes time to read."""
        return

    def flush(self) -> None:
        """Wait until the store keeps the tensor, which ``put`` may only have started.

        Raises:
            OffloadError: the store cannot keep the tensor.
        """
        return

    def __deepcopy__(self, memo: dict[int, Any]) -> Stored:
        """Copy the tensor into the same store."""
        return self.store.put(self.get(self.store.device).wait().clone(), self.name)

    def __repr__(self) -> str:
        return f"Stored({self.name}, {self.shape.numel()} x {self.dtype}, {self.store!r})"


@takes(listener=FUNCTION)
@contextlib.contextmanager
def on_disk(listener: Callable[[str, Any], None]) -> Iterator[None]:
    """Call ``listener("put" or "get", handle)`` for each transfer of this thread to or from a disk.

    Then ``listener("read", tensor)`` gets the memory that the disk is read into.

    Example:
        >>> from zfun.stores import host
        >>> heard = []
        >>> with on_disk(lambda kind, handle: heard.append(kind)):
        ...     handle = host().put(torch.ones(2), "params")
        >>> heard
        []
    """
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def heard(kind: str, value: Stored | Tensor) -> None:
    """Tell the listener of this thread of a transfer."""
    listener = _LISTENER.get()
    if listener is not None:
        listener(kind, value)


class Store(Protocol):
    """A place that keeps tensors between uses.

    ``put`` takes ownership: the caller must not write to the tensor afterwards. ``device`` is the
    device that computes on the stored tensors.
    """

    @property
    def device(self) -> torch.device:
        """The device that computes on the stored tensors."""
        ...

    def put(self, tensor: Tensor, name: str) -> Stored:
        """Keep a tensor."""
        ...

    def crossed(self, kind: str, name: str, num_bytes: int) -> None:
        """Record a transfer that a transform made on behalf of the store."""
        ...


@takes(leaf=TEXT | None, rank=integer(0) | None, step=integer(0) | None)
class locating:  # noqa: N801, a context, which is called like a function
    """Say in an :class:`OffloadError` where the error arose: ``leaf``, ``rank`` or ``step``.

    Example:
        >>> with locating(rank=1):
        ...     raise OffloadError("a store must keep tensors")
        Traceback (most recent call last):
        ...
        zfun.errors.OffloadError: a store must keep tensors [rank 1]
    """

    # A class, because a generator takes three times as long, and each bucket passes several.
    __slots__ = ("leaf", "rank", "step")

    def __init__(
        self, *, leaf: str | None = None, rank: int | None = None, step: int | None = None
    ) -> None:
        self.leaf = leaf
        self.rank = rank
        self.step = step

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OffloadError):
            error.leaf = self.leaf if error.leaf is None else error.leaf
            error.rank = self.rank if error.rank is None else error.rank
            error.step = self.step if error.step is None else error.step


@takes(fn=FUNCTION, value=ANY)
def located(fn: Callable[[Any], Any], value: tree.Tree) -> tree.Tree:
    """Map the leaves of a tree; an :class:`OffloadError` of ``fn`` gets the path of the leaf.

    Example:
        >>> from zfun.stores import host
        >>> located(lambda x: host().put(x, "params"), {"w": torch.ones(2)})
        {'w': Stored(params, 2 x torch.float32, host())}
    """
    leaves, spec = tree.flatten(value)
    out = []
    for position, leaf in enumerate(leaves):
        try:
            out.append(fn(leaf))
        except OffloadError as error:
            error.leaf = error.leaf or _label(value, position)
            raise
    return tree.unflatten(spec, out)


def _label(value: tree.Tree, position: int) -> str:
    """Name a leaf; a buffer of a flat by the leaves in the bucket."""
    first = 0
    for part in tree.leaves(value, is_leaf=lambda x: isinstance(x, Flat)):
        count = len(part.buffers) if isinstance(part, Flat) else 1
        if isinstance(part, Flat) and first <= position < first + count:
            return part.layout.label(position - first)
        first += count
    return tree.paths(value)[position]


def stored(value: tree.Tree) -> list[Stored]:
    """Return the handles among the leaves of a tree."""
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Stored)]


@takes(value=ANY)
def flush(value: tree.Tree) -> None:
    """Wait until stores keep all tensors of a tree.

    Args:
        value: a tree of tensors, handles and flats.

    Raises:
        OffloadError: a store cannot keep a tensor; the error has the path of the leaf.

    Example:
        >>> from zfun.stores import host
        >>> flush({"w": host().put(torch.ones(2), "params")})
    """
    if stored(value):
        located(lambda leaf: leaf.flush() if isinstance(leaf, Stored) else None, value)


@takes(value=ANY, device=instance(torch.device, "a torch.device", "torch.device('cpu')"))
def fetch(value: Any, device: torch.device) -> Tensor:
    """Return a tensor unchanged, or fetch the tensor of a handle to ``device``."""
    return finished(start_read(value, device))


@takes(buffer=ANY, device=instance(torch.device, "a torch.device", "torch.device('cpu')"))
def start_read(buffer: Any, device: torch.device) -> Work | Tensor:
    """Return a tensor unchanged, or start to fetch the tensor of a handle to ``device``.

    Example:
        >>> start_read(torch.ones(2), torch.device("cpu"))
        tensor([1., 1.])
    """
    if isinstance(buffer, Tensor):
        return buffer
    if not isinstance(buffer, Stored):
        raise OffloadError(
            f"a buffer must be a tensor or a handle of a store; got {type(buffer).__name__}"
        )
    return buffer.get(device)


def finished(started: Work | Tensor) -> Tensor:
    """Return the result of ``start_read``; wait for a read."""
    return started if isinstance(started, Tensor) else started.wait()


@takes(flat=FLAT, device=instance(torch.device, "a torch.device", "torch.device('cpu')") | None)
def resident(flat: Flat, device: torch.device | None = None) -> Flat:
    """Fetch the buffers of a flat that are in a store.

    Args:
        flat: any flat.
        device: the target device; by default the device of the leaves.

    Returns:
        A flat of tensors; the same flat if no buffer is in a store.
    """
    if all(isinstance(buffer, Tensor) for buffer in flat.buffers):
        return flat
    to = device or flat.layout.device
    return located(finished, located(lambda buffer: start_read(buffer, to), flat))


@takes(params=STORE | None, grads=STORE | None, optimizer=STORE | None, fraction=FRACTION)
@dataclass(frozen=True, slots=True)
class Offload:
    """Stores for the parts of the training state; ``None`` keeps a part on the device.

    Attributes:
        params: for the parameters; stage 3 only.
        grads: for the gradients.
        optimizer: for the optimizer's state.
        fraction: the share of the elements whose state is in the store of the optimizer; the rest
            steps on the device (Twin-Flow). See :func:`zfun.transforms.offload_optimizer`.

    Example:
        >>> from zfun.stores import host
        >>> Offload(optimizer=host()).params is None
        True
    """

    params: Store | None = None
    grads: Store | None = None
    optimizer: Store | None = None
    fraction: float = 1.0

    def __post_init__(self) -> None:
        if self.fraction != 1 and self.optimizer is None:
            raise OptionError(
                "fraction of Offload() is the share of the optimizer's state in a store; got "
                f"fraction={self.fraction} without a store; pass optimizer=zf.stores.host()"
            )
