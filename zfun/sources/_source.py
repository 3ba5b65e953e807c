"""Deferred leaves by the names that a file gives them."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zfun import tree
from zfun.errors import LeafError, SpecMismatch
from zfun.options import FLOATING, instance, takes
from zfun.sources._files import StoredTensor
from zfun.sources.deferred import Deferred, memory_of, once

# Differences that a message lists.
_MOST = 20


class Source(Mapping[str, Deferred]):
    """Deferred leaves by name. Names of one tied leaf have one :class:`Deferred`.

    Args:
        leaves: the leaves by name.
        origin: where the leaves come from, for messages.

    Example:
        >>> source = tensors({"body.w": torch.ones(2), "head": torch.zeros(1)})
        >>> source
        Source(2 leaves, 12 bytes, from memory)
        >>> source.under("body.")["w"].load()
        tensor([1., 1.])
    """

    def __init__(self, leaves: Mapping[str, Deferred], origin: str) -> None:
        self._leaves = dict(leaves)
        self.origin = origin

    def __getitem__(self, name: str) -> Deferred:
        return self._leaves[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._leaves)

    def __len__(self) -> int:
        return len(self._leaves)

    @property
    def ties(self) -> dict[str, str]:
        """The names whose leaf has an earlier name too, with the earlier name."""
        first: dict[int, str] = {}
        kept = [(name, first.setdefault(id(leaf), name)) for name, leaf in self.items()]
        return {name: other for name, other in kept if name != other}

    @property
    def num_bytes(self) -> int:
        """The bytes of all leaves in memory, tied leaves counted once."""
        once = {id(leaf): leaf.spec for leaf in self.values()}
        return sum(spec.numel() * spec.dtype.itemsize for spec in once.values())

    def renamed(self, rename: Callable[[str], str | None]) -> Source:
        """Return the leaves under other names.

        Args:
            rename: a function from a name to the new name, or to ``None`` to leave the leaf out.

        Returns:
            The leaves with the new names, in the same order.

        Raises:
            SpecMismatch: two leaves get the same name.

        Example:
            >>> source = tensors({"module.w": torch.ones(2)})
            >>> list(source.renamed(lambda name: name.removeprefix("module.")))
            ['w']
        """
        found: dict[str, Deferred] = {}
        before: dict[str, str] = {}
        for name, leaf in self.items():
            new = rename(name)
            if new is None:
                continue
            if new in found:
                raise SpecMismatch(
                    f"renamed leaves have different names; got {new!r} for {before[new]!r} and "
                    f"{name!r}; return None for the leaf to leave out",
                    leaf=new,
                )
            found[new], before[new] = leaf, name
        return Source(found, self.origin)

    def under(self, prefix: str) -> Source:
        """Return the leaves whose names begin with a prefix, without the prefix."""
        return self.renamed(
            lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None
        )

    def __repr__(self) -> str:
        return f"Source({len(self)} leaves, {self.num_bytes} bytes, from {self.origin})"


class TrainingState(NamedTuple):
    """The training state in a checkpoint of another library.

    Attributes:
        params: the parameters by the module's own names: fp32 masters where the checkpoint has
            them, and frozen parameters as they are.
        buffers: the module's buffers.
        moments: for each name of the optimizer's state, such as ``exp_avg``, the tensors by the
            names of the parameters.
        step: the number of optimizer steps; ``None`` if the checkpoint does not say.
        values: the plain values of the checkpoint, such as the state of a learning rate schedule.
    """

    params: Source
    buffers: Source
    moments: Mapping[str, Source]
    step: int | None
    values: Mapping[str, object]


def named(tensors: Mapping[str, StoredTensor], origin: str) -> Source:
    """Return tensors of files as a source; names of one tensor are tied."""
    made: dict[int, Deferred] = {}
    found: dict[str, Deferred] = {}
    for name, tensor in tensors.items():
        if id(tensor) not in made:
            spec = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            made[id(tensor)] = Deferred(name, spec, tensor.read)
        found[name] = made[id(tensor)]
    return Source(found, origin)


@takes(
    leaves=instance(Mapping, "a mapping from names to tensors", "zf.functional(module).params"),
)
def tensors(leaves: Mapping[str, Tensor]) -> Source:
    """Return tensors in memory as a source; names of one tensor are tied.

    Args:
        leaves: tensors by name.

    Returns:
        The source, which shares the memory of the tensors.

    Raises:
        LeafError: a value is no tensor.

    Example:
        >>> w = torch.ones(2)
        >>> tensors({"embed": w, "head": w}).ties
        {'head': 'embed'}
    """
    made: dict[Hashable, Deferred] = {}
    for name, tensor in leaves.items():
        if not isinstance(tensor, (Tensor, Deferred)):
            raise LeafError(
                f"tensors() takes tensors; leaf {name!r} is {type(tensor).__name__}; pass tensors, "
                "such as zf.functional(module).params",
                leaf=str(name),
            )
        spec = torch.empty_like(tensor, device="meta")
        made.setdefault(memory_of(tensor), Deferred(name, spec, tensor.detach))
    found = {name: made[memory_of(tensor)] for name, tensor in leaves.items()}
    return Source(found, "memory")


SOURCE = instance(Source, "a source of leaves", "zf.sources.state_dict('model.pt')")


@takes(sources=SOURCE)
def joined(*sources: Source) -> Source:
    """Return the leaves of several sources as one.

    Args:
        sources: sources without a name in common.

    Returns:
        All leaves, in order.

    Raises:
        SpecMismatch: two sources have the same name.

    Example:
        >>> list(joined(tensors({"w": torch.ones(2)}), tensors({"b": torch.ones(2)})))
        ['w', 'b']
    """
    found: dict[str, Deferred] = {}
    for source in sources:
        for name, leaf in source.items():
            if name in found:
                raise SpecMismatch(
                    f"joined sources have different names; got {name!r} twice, the second time "
                    f"from {source.origin}; rename the leaves of one source with renamed()",
                    leaf=name,
                )
            found[name] = leaf
    return Source(found, ", ".join(dict.fromkeys(source.origin for source in sources)))


class Placed(NamedTuple):
    """The result of :func:`place`.

    Attributes:
        tree: the tree, with a :class:`Deferred` where the source has the leaf.
        missing: paths of the tree that the source does not have.
        unexpected: names of the source that the tree does not have.
    """

    tree: tree.Tree
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@takes(source=SOURCE, dtype=FLOATING | None)
def place(
    source: Source,
    params: tree.Tree,
    *,
    name_of: Callable[[str], str] | None = None,
    dtype: torch.dtype | None = None,
    strict: bool = True,
) -> Placed:
    """Place the leaves of a source in a tree, so that ``zero.init`` can read them one at a time.

    Args:
        source: the leaves by name.
        params: a tree of tensors, of which structure and shapes count, such as
            ``zf.functional(model).params`` of a module on ``meta``. A source has tied leaves once,
            under any of their paths.
        name_of: ``name_of(path)`` returns the name of a leaf in the source; by default the path.
        dtype: the dtype of floating leaves; by default each has the dtype of the source.
        strict: whether a missing or unexpected leaf is an error. Otherwise a missing leaf stays as
            ``params`` has it.

    Returns:
        The tree, with the paths and the names that have no partner.

    Raises:
        LeafError: a leaf of ``params`` is no tensor.
        SpecMismatch: a leaf of another shape, or with ``strict`` a leaf that has no partner. The
            message lists every difference.

    Example:
        >>> import zfun as zf
        >>> source = tensors({"w": torch.arange(3.0), "b": torch.ones(1)})
        >>> params = place(source, {"w": torch.zeros(3), "b": torch.zeros(1)}).tree
        >>> zf.simulate(2, lambda group: zf.unshard(zf.shard(params, group)))[0]["w"]
        tensor([0., 1., 2.])
        >>> place(source, {"w": torch.zeros(3)}, strict=False).unexpected
        ('b',)
    """
    found = matched("place()", source, params, name_of, dtype)
    if strict and (found.missing or found.unexpected):
        raise SpecMismatch(
            f"{differences(source, found.missing, found.unexpected)}, strict=False takes what "
            "there is"
        )
    return found


def matched(
    label: str,
    source: Source,
    params: tree.Tree,
    name_of: Callable[[str], str] | None,
    dtype: torch.dtype | None = None,
) -> Placed:
    """Place the leaves of a source, and refuse one of another shape or kind of numbers."""
    leaves, tree_of = once(params, label, (Tensor, Deferred))
    found: dict[Hashable, Any] = {}
    missing, wrong, used = list[str](), list[str](), set[int]()
    for key, (leaf, paths) in leaves.items():
        names = [(name_of or str)(path) for path in paths]
        name = next((name for name in names if name in source), None)
        found[key] = leaf
        if name is None:
            missing.append(names[0])
        elif source[name].shape != leaf.shape:
            wrong.append(f"{name!r} is {tuple(source[name].shape)}, not {tuple(leaf.shape)}")
        elif source[name].dtype.is_floating_point != leaf.dtype.is_floating_point:
            wrong.append(f"{name!r} is {source[name].dtype}, not {leaf.dtype}")
        else:
            found[key] = _cast(source[name], dtype)
        used.update(id(source[name]) for name in names if name in source)
    ties = source.ties
    unexpected = [
        name for name, leaf in source.items() if id(leaf) not in used and name not in ties
    ]
    if wrong:
        raise SpecMismatch(differences(source, missing, unexpected, wrong))
    return Placed(tree_of(found), tuple(missing), tuple(unexpected))


def _cast(leaf: Deferred, dtype: torch.dtype | None) -> Deferred:
    if dtype is None or leaf.dtype == dtype or not leaf.dtype.is_floating_point:
        return leaf
    return Deferred(leaf.path, leaf.spec.to(dtype), lambda: leaf.load().to(dtype), leaf.device)


def differences(
    source: Source,
    missing: Sequence[str] = (),
    unexpected: Sequence[str] = (),
    wrong: Sequence[str] = (),
) -> str:
    """Say how the leaves of a source differ from those of a tree."""

    def near(name: str) -> str:
        close = difflib.get_close_matches(name, unexpected or list(source), n=1)
        return f"{name!r}" + (f" (near: {close[0]!r})" if close else "")

    kinds: dict[str, tuple[Sequence[str], Callable[[str], str]]] = {
        "missing": (missing, near),
        "unexpected": (unexpected, repr),
        "of another shape or kind": (wrong, str),
    }
    lines = [
        f"{words} {', '.join(map(show, entries[:_MOST]))}"
        + (f" and {len(entries) - _MOST} more" if len(entries) > _MOST else "")
        for words, (entries, show) in kinds.items()
        if entries
    ]
    return (
        f"the leaves of a source must be those of the tree; {source.origin}: {'; '.join(lines)}; "
        "name_of=lambda path: ... names a leaf in the source"
    )
