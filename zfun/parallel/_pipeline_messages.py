"""Trees of tensors from one rank to others; their form is sent once.

[Note: forms]
A message is one broadcast for each leaf, from its memory and without a copy. The receiver must know
the shapes, so the first message for a micro-batch of some shapes is preceded by a *form*: the
containers, and for each leaf path, shape and dtype. All ranks of a pipeline see the shapes of the
micro-batches, so both sides know whether a form comes first. Later messages wait for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from zfun import tree
from zfun.collectives import Broadcast, Collective, Group, Work, global_ranks
from zfun.errors import LeafError, SpecMismatch

Arrival: TypeAlias = Callable[[], Any]
"""Waits for a message, and returns the tree."""


class LeafForm(NamedTuple):
    """A leaf of a message.

    Attributes:
        path: the tree path.
        shape: the shape.
        dtype: the dtype, without ``torch.``.
        has_grad: whether the sender wants a cotangent of the leaf.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    has_grad: bool

    def __str__(self) -> str:
        return f"{self.path} {self.shape} {self.dtype}"


class MessageForm(NamedTuple):
    """The containers of a message, as JSON, and its leaves."""

    containers: str
    leaves: tuple[LeafForm, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.leaves))})"


def form_of(
    value: Any, has_grad: Callable[[str], bool], what: str
) -> tuple[MessageForm, list[Tensor]]:
    """Return the form of a tree and its leaves.

    Args:
        value: a tensor, ``None``, or a tuple, list or dict of such.
        has_grad: whether a leaf wants a cotangent, by path.
        what: a name of the tree, for messages.

    Raises:
        LeafError: another container or leaf.
    """
    leaves: list[Tensor] = []
    forms: list[LeafForm] = []

    def opened(x: Any, path: str) -> Any:
        if x is None:
            return None
        if isinstance(x, Tensor):
            dtype = str(x.dtype).removeprefix("torch.")
            name = path or "."
            forms.append(LeafForm(name, tuple(x.shape), dtype, has_grad(name)))
            leaves.append(x)
            return 0
        inside = f"{path}." if path else ""
        if type(x) in (list, tuple):
            parts = [opened(part, f"{inside}{i}") for i, part in enumerate(x)]
            return {type(x).__name__: parts}
        if type(x) is dict and all(type(key) is str for key in x):
            return {"dict": {key: opened(part, f"{inside}{key}") for key, part in x.items()}}
        raise LeafError(
            f"{what} are tensors, or tuples, lists and dicts of tensors; leaf {path or '.'!r} is "
            f"{type(x).__name__}; return its tensors",
            leaf=path or ".",
        )

    containers = json.dumps(opened(value, ""))
    return MessageForm(containers, tuple(forms)), leaves


def rebuilt(form: MessageForm, leaves: list[Any]) -> Any:
    """Return the tree of a form.

    Example:
        >>> form, leaves = form_of({"x": torch.ones(2), "y": (None,)}, lambda path: True, "outputs")
        >>> rebuilt(form, leaves)
        {'x': tensor([1., 1.]), 'y': (None,)}
    """
    rest = iter(leaves)

    def closed(x: Any) -> Any:
        match x:
            case None:
                return None
            case {"list": parts}:
                return [closed(part) for part in parts]
            case {"tuple": parts}:
                return tuple(closed(part) for part in parts)
            case {"dict": parts}:
                return {key: closed(part) for key, part in parts.items()}
            case _:
                return next(rest)

    return closed(json.loads(form.containers))


class Channel:
    """Messages from one rank of a group; see [Note: forms].

    Args:
        group: two ranks that are neighbours in a pipeline, or its whole axis.
        root: the rank that sends.
        name: of what is sent, for messages and logs.
        device: where received tensors live.
    """

    def __init__(self, group: Group, root: int, name: str, device: torch.device) -> None:
        self._group = group
        self._root = root
        self._name = name
        self._device = device
        self._forms: dict[Hashable, MessageForm] = {}

    def send(
        self, value: Any, part: str, key: Hashable, has_grad: Callable[[str], bool]
    ) -> list[Work]:
        """Start to send a tree.

        Args:
            value: the tree.
            part: which one, for messages and logs.
            key: of the form.
            has_grad: whether a leaf wants a cotangent, by path.

        Raises:
            SpecMismatch: a tree of another form was sent for this key.
        """
        form, leaves = form_of(value, has_grad, self._name)
        known = self._forms.setdefault(key, form)
        works: list[Work] = []
        if known is form:
            text = torch.frombuffer(bytearray(json.dumps(form).encode()), dtype=torch.uint8)
            works = [
                self._start(torch.tensor([len(text)]), f"{part}, length of the form"),
                self._start(text, f"{part}, form"),
            ]
        elif known != form:
            number = global_ranks(self._group)[self._group.rank]
            raise SpecMismatch(
                "a stage gives one form of results for micro-batches of one form, because the rank "
                f"that receives them knows no other; {self._name} of {part} are {form} on rank "
                f"{number}, and were {known} before; pad the results, or "
                "write a number of the batch that sets their shapes as a string",
                rank=number,
            )
        # The memory without its graph, so that a group may name it as the output as well: nothing
        # is copied then.
        return works + [
            self._start(x.data.contiguous().view(-1), f"{part}, leaf {leaf.path}")
            for x, leaf in zip(leaves, form.leaves, strict=True)
        ]

    def receive(self, part: str, key: Hashable) -> Arrival:
        """Start to receive a tree; wait for its form, if it comes first."""
        form = self._forms.get(key)
        if form is None:
            length = self._start(torch.zeros(1, dtype=torch.int64), f"{part}, length of the form")
            text = self._start(
                torch.empty(int(length.wait()), dtype=torch.uint8), f"{part}, form"
            ).wait()
            containers, leaves = json.loads(bytes(text.tolist()))
            found = (LeafForm(x, tuple(shape), *rest) for x, shape, *rest in leaves)
            form = self._forms[key] = MessageForm(containers, tuple(found))
        works = [
            self._start(
                torch.empty(
                    torch.Size(leaf.shape).numel(),
                    dtype=getattr(torch, leaf.dtype),
                    device=self._device,
                ),
                f"{part}, leaf {leaf.path}",
            )
            for leaf in form.leaves
        ]

        def arrive() -> Any:
            leaves = [
                work.wait().view(leaf.shape).requires_grad_(leaf.has_grad)
                for work, leaf in zip(works, form.leaves, strict=True)
            ]
            return rebuilt(form, leaves)

        return arrive

    def _start(self, x: Tensor, part: str) -> Work:
        return self._group.start(Collective(Broadcast(self._root), self._name, part), x, x)


def grad_leaves(value: Any) -> list[Tensor]:
    """Return the leaves of a tree that want a cotangent."""
    return [leaf for leaf in tree.leaves(value) if leaf.requires_grad]
