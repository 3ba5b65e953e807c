"""The second half of a call: from cotangents of the outputs to gradients.

[Note: open calls]
Between :func:`zfun.vjp` and the pullback a call is *open*: autograd's graph, the gathered buckets
that stay for backward and the gathers under way belong to the pullback. A pullback runs once, or is
dropped: then this rank waits for the gathers under way, which all ranks have started in forward,
and frees the buckets.

Ranks must pull and drop the same calls, because backward has collectives of its own. Forward passes
and pullbacks of a group are therefore numbered. Every pullback begins with one word from each rank,
the number of the call. A forward pass sends such a word too while an earlier call of the group was
not pulled, because only then another rank may be about to pull. If numbers differ, all ranks raise.
A pipeline compares its schedule once instead, and sends no words for whole parameters.

The forward pass of a tape with whole parameters has no collective. Ranks may run it any number of
times, and backward of other calls than the others: the words of backward then have the number of
the recipe, so that no gradients of two models meet.

The word of a pullback also has a checksum of the outputs from which backward begins. These may
differ: then the ranks leave the schedule, see [Note: divergence].
"""

from __future__ import annotations

import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import Group, gather_values, global_ranks
from zfun.errors import CollectiveMismatch, SpecMismatch, ZfunError
from zfun.flat import Flat
from zfun.transforms._batches import open_batch

Pulled: TypeAlias = tuple[Any, list["Tensor | None"]]
"""The gradients, and the cotangents of inputs."""

# Checks cotangents, a weight and inputs, and returns backward.
Pull: TypeAlias = Callable[[Any, "float | Tensor | None", Sequence[Tensor]], Callable[[], Pulled]]

View: TypeAlias = tuple[Tensor, Tensor]
"""A parameter, and a view of it that a function has used in its place."""

# Says whether the gradients will be added to a sum.
AddOnto: TypeAlias = Callable[[Flat], bool]

# Takes views of the parameters too, runs the first half, and returns the second.
Halve: TypeAlias = Callable[
    [Any, "float | Tensor | None", Sequence[Tensor], Sequence[View]],
    tuple[list["Tensor | None"], Callable[[], Any]],
]


class Pullback:
    """From cotangents of the outputs of a function to gradients of its parameters.

    :func:`zfun.vjp` returns a pullback beside the outputs. It runs once. A pullback that is not
    needed may be dropped, on all ranks or on none; :meth:`close` does so at once.

    Args:
        pull: checks the arguments, and returns a function that is called once.
        close: called instead, if the pullback is dropped.
        paths: see below.
        halve: the same in two halves, if it can be divided; see [Note: two halves].
        onto: asks for gradients that are added to a sum; see ``adds_onto``.

    Attributes:
        paths: for each leaf of the outputs, in the order of :func:`zfun.transforms.map_batch`, the
            path, or ``None`` for a leaf that takes no cotangent. A dict from paths is a tree of
            cotangents too. Empty for micro-batches.
    """

    def __init__(
        self,
        pull: Pull,
        close: Callable[[], None],
        paths: tuple[str | None, ...] = (),
        halve: Halve | None = None,
        onto: AddOnto | None = None,
    ) -> None:
        self.paths = paths
        self._pull: Pull | None = pull
        self._halve = halve
        self._onto = onto
        dropped: Any = weakref.finalize(self, close)
        # At the end of the process other ranks may be gone.
        dropped.atexit = False
        self._dropped = dropped

    @ops.uncompiled
    def __call__(self, cotangents: Any, *, weight: float | Tensor | None = None) -> Any:
        """Return the gradients; every rank must call.

        Args:
            cotangents: the derivative of a scalar of this rank with respect to each output: a tree
                like the outputs. An output without a cotangent may be left out of a mapping, or be
                ``None``.
            weight: for cotangents of a sum of losses, the weight of this rank's batch, such as the
                number of tokens: the gradients are then divided by the weight over all ranks, as
                those of :func:`zfun.transforms.weighted_mean`, and not by the number of ranks.

        Returns:
            Gradients like those of the gradient function.

        Raises:
            SpecMismatch: a cotangent of no output, or of another shape.
            CollectiveMismatch: on all ranks, if they do not pull the same call.
            DonatedStateError: a later step has taken over the parameters.
            ZfunError: the pullback has run already, or was closed.
        """
        return self.with_inputs(cotangents, (), weight=weight)[0]

    @ops.uncompiled
    def with_inputs(
        self,
        cotangents: Any,
        inputs: Sequence[Tensor],
        *,
        weight: float | Tensor | None = None,
    ) -> Pulled:
        """Return the gradients, and the cotangents of tensors of the batch.

        Args:
            cotangents: as for a call.
            inputs: tensors of the batch that required a gradient in the call of the function.
            weight: as for a call.

        Returns:
            The gradients as in a call; and for each input this rank's own cotangent, not summed
            over the ranks, or ``None`` if the outputs do not depend on the input.

        Raises:
            SpecMismatch: as for a call.
            ZfunError: as for a call.
        """
        return self.checked(cotangents, weight, inputs)()

    @ops.uncompiled
    def inputs_first(
        self,
        cotangents: Any,
        inputs: Sequence[Tensor],
        views: Sequence[View] = (),
        *,
        weight: float | Tensor | None = None,
    ) -> tuple[list[Tensor | None], Callable[[], Any]]:
        """Return the cotangents of tensors of the batch, and a function that returns the gradients.

        Args:
            cotangents: as for a call.
            inputs: as for :meth:`with_inputs`.
            views: pairs of a parameter and a view of it, which the function has used in its place.
                Then the returned function computes the gradients; without views, this one does.
            weight: as for a call.

        Returns:
            The cotangents of the inputs as from :meth:`with_inputs`, and a function without
            arguments, which every rank must call once.
        """
        if self._halve is None or not inputs or not views:
            grads, found = self.with_inputs(cotangents, inputs, weight=weight)
            return found, lambda: grads
        self._check_unused()
        found, rest = self._halve(cotangents, weight, inputs, views)

        def run() -> Any:
            self._check_unused()
            self._pull = self._halve = None
            self._dropped.detach()
            return rest()

        return found, run

    def adds_onto(self, total: Any) -> bool:
        """Ask for gradients that are added to a sum as they are made, in the sum's own buffers.

        Args:
            total: gradients of an earlier call, or ``None``.

        Returns:
            Whether the gradients will be the new sum, with the bits of
            :func:`zfun.transforms.add_grads`. ``False``: they are those of this call alone.
        """
        if self._pull is None or self._onto is None or not isinstance(total, Flat):
            return False
        return self._onto(total)

    def checked(
        self, cotangents: Any, weight: float | Tensor | None, inputs: Sequence[Tensor]
    ) -> Callable[[], Pulled]:
        """Check the arguments of :meth:`with_inputs`, and return the rest of the call.

        An error leaves the pullback as it was.
        """
        pull = self._check_unused()(cotangents, weight, inputs)

        def run() -> Pulled:
            self._pull = self._halve = None
            self._dropped.detach()
            return pull()

        return run

    def _check_unused(self) -> Pull:
        if self._pull is None:
            raise ZfunError(
                "a pullback runs once, because backward frees the graph; got a second call, or a "
                "call after close(); call vjp() again"
            )
        return self._pull

    def close(self) -> None:
        """Drop the call: wait for gathers under way, and free everything that forward has kept."""
        self._pull = self._halve = None
        self._dropped()

    def then(self, change: Callable[[Any], Any]) -> Pullback:
        """Return a pullback whose gradients go through a function; this one must not be used."""

        def pull(*given: Any) -> Callable[[], Pulled]:
            run = self.checked(*given)

            def changed() -> Pulled:
                grads, found = run()
                return change(grads), found

            return changed

        return Pullback(pull, self.close, self.paths)


def seed_of(total: Tensor, scale: float | Tensor) -> Tensor:
    """Return the cotangent of a loss: the loss scale, which may lie on the device of the loss."""
    if isinstance(scale, Tensor):
        return scale.to(total.dtype).expand_as(total)
    return torch.full_like(total, scale)


class Outputs:
    """The outputs of a function: the leaves with a graph, and detached ones for the caller.

    Args:
        out: a tree, in which mappings and dataclasses are nodes too.

    Attributes:
        roots: the leaves as the function made them.
    """

    def __init__(self, out: Any) -> None:
        parts = open_batch(out)
        self.roots: list[Any] = list(parts.leaves)
        self._paths = parts.paths
        self._rebuild: Any = parts.rebuild

    def values(self) -> Any:
        """Return the tree without a graph, once.

        The caller may give the values a graph that leads to the pullback, which must not hold them.
        """
        rebuild, self._rebuild = self._rebuild, None
        return rebuild([root.detach() if isinstance(root, Tensor) else root for root in self.roots])

    @property
    def paths(self) -> tuple[str | None, ...]:
        """The path of each output with a graph; ``None`` for the others."""
        return tuple(
            path if isinstance(root, Tensor) and root.requires_grad else None
            for path, root in zip(self._paths, self.roots, strict=True)
        )

    def seeds(self, cotangents: Any, scale: float | Tensor) -> list[Tensor | None]:
        """Return a cotangent for each root, times a factor.

        Raises:
            SpecMismatch: a cotangent of no output, or of another shape.
        """
        given = open_batch(cotangents)
        by_path = dict(zip(given.paths, given.leaves, strict=True))
        found: list[Tensor | None] = []
        for path, root in zip(self._paths, self.roots, strict=True):
            seed = by_path.pop(path, None)
            if seed is None or not isinstance(root, Tensor) or not root.requires_grad:
                found.append(None)
                continue
            if not isinstance(seed, Tensor) or seed.shape != root.shape:
                got = (
                    f"shape {tuple(seed.shape)}"
                    if isinstance(seed, Tensor)
                    else type(seed).__name__
                )
                raise SpecMismatch(
                    f"a cotangent has the shape of its output; output {path!r} has "
                    f"{tuple(root.shape)}, and the cotangent {got}; pass a derivative of a scalar "
                    "with respect to the output, or None",
                    leaf=path,
                )
            seed = seed.detach().to(root.dtype)
            if isinstance(scale, Tensor):
                found.append(seed * scale.to(seed.dtype))
            else:
                found.append(seed if scale == 1.0 else seed * scale)
        for path, leaf in by_path.items():
            if leaf is not None:
                raise SpecMismatch(
                    f"cotangents are a tree like the outputs; got a cotangent at {path!r}, and the "
                    f"outputs are {self._paths}; leave it out",
                    leaf=path,
                )
        return found


@dataclass(slots=True)
class _OpenCalls:
    """The calls of a group: how many began, and which were not pulled; and how many recipes."""

    count: int = 0
    recipes: int = 0
    unpulled: set[int] = field(default_factory=set)


_CALLS: weakref.WeakKeyDictionary[Group, _OpenCalls] = weakref.WeakKeyDictionary()

# Numbers above are those of recipes.
_RECIPES = 1 << 30


def number_recipe(group: Group) -> int:
    """Return the number of a recipe, for tapes with whole parameters; every rank must call."""
    calls = _CALLS.setdefault(group, _OpenCalls())
    calls.recipes += 1
    return _RECIPES + calls.recipes


def start_forward(group: Group | None) -> int:
    """Return the number of a new call; compare it across ranks if another rank may be pulling."""
    if group is None or group.size == 1:
        return 0
    calls = _CALLS.setdefault(group, _OpenCalls())
    number = calls.count + 1
    if calls.unpulled:
        _compare(number, group)
    calls.count = number
    calls.unpulled.add(number)
    return number


def start_backward(group: Group | None, number: int, begins: bytes) -> bool:
    """Check that all ranks pull this call; return whether backward begins alike on all.

    Args:
        group: the ranks.
        number: of the call.
        begins: says where backward begins on this rank.
    """
    if group is None or group.size == 1:
        return True
    words = _compare(-(number << 32 | zlib.crc32(begins)), group)
    if (calls := _CALLS.get(group)) is not None:
        calls.unpulled.discard(number)
    return len(set(words)) == 1


def _number(word: int) -> int:
    """Return the number in a word: above 0 for a forward pass, below 0 for a pullback."""
    return word if word > 0 else -(-word >> 32)


def _pulled(number: int) -> str:
    if number > _RECIPES:
        return f"pulls one of recipe {number - _RECIPES}, in the order of init()"
    return f"pulls call {number}"


def _compare(word: int, group: Group) -> list[int]:
    """Return the words of all ranks, if their numbers are equal."""
    found = gather_values(torch.tensor([word]), group, "number of a call").flatten()
    # In a plan of thousands of ranks, each unknown number would cost a look-up.
    words = [word] * group.size if ops.is_abstract(found) else found.tolist()
    numbers = [_number(word) for word in words]
    if len(set(numbers)) == 1:
        return words
    known = global_ranks(group)
    ranks_of: dict[int, list[int]] = {}
    for rank, other in zip(known, numbers, strict=True):
        ranks_of.setdefault(other, []).append(rank)
    sides = "; ".join(
        f"rank {', '.join(map(str, ranks[:8]))} "
        + (f"began call {other}" if other > 0 else _pulled(-other))
        for other, ranks in ranks_of.items()
    )
    raise CollectiveMismatch(
        f"all ranks must begin, pull and drop the same calls in the same order; {sides}; call "
        "the function, and run backward, on all ranks or on none",
        rank=known[group.rank],
    )
