"""Lazy leaves, which a loss receives in place of parameters that are not gathered yet."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd.function import BackwardCFunction

from zfun import ops, tree
from zfun.errors import PlacementError, ZfunError
from zfun.layout import Layout
from zfun.transforms._batches import open_batch

_loading: contextvars.ContextVar[bool] = contextvars.ContextVar(
    "zfun_transforms_loading", default=False
)


_use_count: Callable[[Tensor], int] = Tensor._use_count  # pyrefly: ignore[missing-attribute]


class BucketSource:
    """The source of the tensors of the lazy leaves of one bucket.

    Attributes:
        load: makes the tensors ready, and returns the tensor of a leaf.
        ready: the tensors, by the places of the leaves, while ``load`` is not necessary.
        thread: the thread that may read ``ready``.
    """

    __slots__ = ("load", "ready", "thread")

    def __init__(self, load: Callable[[LazyLeaf], Tensor]) -> None:
        self.load = load
        self.ready: Sequence[Tensor] | None = None
        self.thread = 0


class LazyLeaf(torch.Tensor):
    """A parameter that is gathered at the first use.

    A lazy leaf has the true shape, dtype and device, and no data. Any operation runs on the
    gathered tensor instead; queries of metadata gather nothing.
    """

    # Slots, because a step makes a leaf for every parameter, and a dict of each would cost more.
    __slots__ = ("path", "place", "source")

    source: BucketSource
    place: int
    path: str

    @staticmethod
    def __new__(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        requires_grad: bool,
        path: str,
        source: BucketSource,
        place: int = 0,
    ) -> Self:
        leaf = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=device, requires_grad=requires_grad
        )
        leaf.source = source
        leaf.place = place
        leaf.path = path
        return leaf

    def recast(self, dtype: torch.dtype) -> LazyLeaf:
        """Return a lazy leaf of another dtype, which gathers this leaf and casts at first use."""
        made: list[Tensor] = []

        def load(leaf: LazyLeaf) -> Tensor:
            del leaf
            if not made:
                made.append(tensor_of(self).to(dtype))
            return made[0]

        return LazyLeaf(
            tuple(self.shape), dtype, self.device, self.requires_grad, self.path, BucketSource(load)
        )

    def __repr__(self) -> str:  # pyrefly: ignore[bad-override]
        with torch._C.DisableTorchFunctionSubclass():
            return f"LazyLeaf({self.path}, {tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        del types
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():
            # Dynamo traces this function too. An error of Dynamo about a collective would name no
            # remedy, and Dynamo cannot trace the errors of zfun.
            raise TypeError(
                "compiled code needs whole tensors: call zf.gather() on the subtree first, "
                "outside the compiled function"
            )
        if not kwargs:
            return func(*_loaded(args))
        return func(*_loaded(args), **dict(zip(kwargs, _loaded(kwargs.values()), strict=True)))

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types, kwargs
        paths = [leaf.path for leaf in tree.leaves(args) if isinstance(leaf, LazyLeaf)]
        raise PlacementError(
            f"compiled code and torch.func transforms need whole tensors; {func} got the lazy "
            f"leaves {paths}; call zf.gather() on the subtree first, outside the compiled or "
            "transformed function",
            leaf=paths[0] if paths else None,
        )


def _getter(name: str) -> Any:
    return getattr(torch.Tensor, name).__get__


class LazyLeaves:
    """The lazy leaves of the parameters of one call.

    Args:
        layout: of the parameters.
        compute_dtype: of floating leaves; ``None`` for the dtypes of the layout.
        trained: whether the leaves get gradients.
    """

    def __init__(self, layout: Layout, compute_dtype: torch.dtype | None, *, trained: bool) -> None:
        self.sources = [BucketSource(_closed) for _ in layout.buckets]
        self._layout = layout
        self._leaves = [
            LazyLeaf(shape, dtype, layout.device, differentiable, path, self.sources[bucket], place)
            for shape, dtype, differentiable, path, bucket, place in _forms(
                layout, compute_dtype, trained
            )
        ]

    def tree(self) -> Any:
        """Return the tree for the loss."""
        return tree.unflatten(
            self._layout.spec, [self._leaves[position] for position in self._layout.positions]
        )

    def close(self) -> None:
        """Forbid any further use."""
        for source in self.sources:
            source.load, source.ready = _closed, None

    def are_in_use(self) -> bool:
        """Whether something of torch has one, such as a graph."""
        return max(map(_use_count, self._leaves), default=0) > 1


@functools.lru_cache(maxsize=256)
def _forms(
    layout: Layout, compute_dtype: torch.dtype | None, trained: bool
) -> list[tuple[tuple[int, ...], torch.dtype, bool, str, int, int]]:
    """Return shape, dtype, differentiability, path, bucket and place in it of each leaf."""
    places = {leaf: place for slot in layout.buckets for place, leaf in enumerate(slot.leaves)}
    found = []
    for leaf, slot in enumerate(layout.leaves):
        dtype = compute_dtype if compute_dtype and slot.dtype.is_floating_point else slot.dtype
        differentiable = trained and (dtype.is_floating_point or dtype.is_complex)
        found.append((slot.shape, dtype, differentiable, slot.path, slot.bucket, places[leaf]))
    return found


def _closed(leaf: LazyLeaf) -> Tensor:
    raise ZfunError(
        "a lazy leaf may be used only while its loss and the gradient of it run; leaf "
        f"{leaf.path!r} was used later; return a clone() of it as aux instead",
        leaf=leaf.path,
    )


def is_closed(value: Any) -> bool:
    """Whether a value is a lazy leaf whose call has ended."""
    return type(value) is LazyLeaf and value.source.load is _closed


def is_held(tensors: Sequence[Tensor]) -> bool:
    """Whether an object other than the list refers to one of these tensors, in Python or C++."""
    usual = max(map(sys.getrefcount, [object()]))
    # One loop in C for each count, because there may be very many tensors.
    return (
        max(map(sys.getrefcount, tensors), default=0) > usual
        or max(map(_use_count, tensors), default=0) > 1
    )


# Metadata, known without a gather.
METADATA = frozenset(
    [
        _getter(name)
        for name in (
            "shape",
            "dtype",
            "device",
            "layout",
            "ndim",
            "requires_grad",
            "is_leaf",
            "is_cuda",
            "is_meta",
            "is_sparse",
            "is_quantized",
            "grad",
        )
    ]
    + [
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.ndimension,
        torch.Tensor.numel,
        torch.Tensor.nelement,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_complex,
        torch.Tensor.get_device,
        torch.Tensor.__len__,
        torch.Tensor.__hash__,
        torch.is_floating_point,
        torch.is_complex,
        torch.numel,
    ]
)


def _loaded(values: Iterable[Any]) -> list[Any]:
    """Replace lazy leaves in the arguments of an operation: nested lists, tuples and dicts."""
    found: list[Any] = []
    for value in values:
        kind = type(value)
        if kind is LazyLeaf:
            # Most leaves are ready, and so the call of tensor_of() is left out for those.
            ready = value.source.ready
            is_here = ready is not None and value.source.thread == threading.get_ident()
            value = ready[value.place] if is_here else tensor_of(value)
        elif kind is tuple:
            value = tuple(_loaded(value))
        elif kind is list:
            value = _loaded(value)
        elif kind is dict:
            value = dict(zip(value, _loaded(value.values()), strict=True))
        found.append(value)
    return found


def materialise(subtree: tree.Tree) -> tree.Tree:
    """Replace the lazy leaves of a tree by the gathered tensors."""
    return tree.map(lambda leaf: tensor_of(leaf) if isinstance(leaf, LazyLeaf) else leaf, subtree)


def is_loading() -> bool:
    """Whether the code that runs makes a parameter ready, and is no operation of the loss."""
    return _loading.get()


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """The context of code that makes parameters ready for the loss."""
    token = _loading.set(True)
    try:
        yield
    finally:
        _loading.reset(token)


@ops.uncompiled
def tensor_of(leaf: LazyLeaf) -> Tensor:
    """Return the gathered tensor of a lazy leaf."""
    source = leaf.source
    ready = source.ready
    if ready is not None and source.thread == threading.get_ident():
        return ready[leaf.place]
    if torch._C._functorch.peek_interpreter_stack() is not None:
        # [Note: torch.func in the loss]
        with temporarily_clear_interpreter_stack():
            return tensor_of(leaf)
    if torch.is_inference_mode_enabled():
        with outside_inference_mode():
            return tensor_of(leaf)
    # Without loading(), because the context of a generator takes longer.
    token = _loading.set(True)
    try:
        return source.load(leaf)
    finally:
        _loading.reset(token)


@contextlib.contextmanager
def outside_inference_mode() -> Iterator[None]:
    """The context of buffers and views in inference mode, whose tensors count no writes."""
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def nodes_of(out: Any) -> list[Any]:
    """Return the node of autograd that made each leaf of a result, ``None`` for other leaves."""
    # To ask a lazy leaf for its node would gather the bucket.
    return [
        leaf.grad_fn if isinstance(leaf, Tensor) and not isinstance(leaf, LazyLeaf) else None
        for leaf in open_batch(out).leaves
    ]


def graph_of(out: Any, *, past_functions: bool = True) -> Iterator[Any]:
    """Yield the nodes of a result's graph once each, by choice none behind a custom function."""
    todo = [node for node in nodes_of(out) if node is not None]
    seen = set(todo)
    while todo:
        node = todo.pop()
        yield node
        if past_functions or not isinstance(node, BackwardCFunction):
            following = {node for node, _ in node.next_functions if node is not None} - seen
            seen |= following
            todo += following


def check_graph(out: Any) -> None:
    """Refuse a result whose graph holds a lazy leaf: an ``autograd.Function`` kept the leaf."""
    for node in graph_of(out):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, LazyLeaf):
            raise PlacementError(
                f"an autograd.Function takes whole tensors; got the lazy leaf {leaf.path!r}; call "
                "zf.gather() on it first, or name the modules that pass parameters to one in "
                "zf.functional(model, gather=[...])",
                leaf=leaf.path,
            )
