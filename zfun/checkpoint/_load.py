"""Load a checkpoint into a state of any composition.

[Note: loading]
``like`` says what is wanted: keys, shapes, dtypes, and the ranges that this rank holds. All of that
is compared with the manifest before anything is read. Then each bucket is filled from the
ranges of the files that overlap the bucket. A replicated bucket is read in parts, one by each rank,
and gathered, so a checkpoint is read once and not once for each rank. A leaf in another stored
order is read whole by each rank that holds a part of it; see [Note: stored order].

The buffers of ``like`` are filled in place, so that no second state is in memory. A failure after
that leaves ``like`` dead, and not half loaded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from zfun import ops, tree
from zfun.checkpoint._background import settle
from zfun.checkpoint._directory import FILES, is_whole, manifest_at
from zfun.checkpoint._fill import fill
from zfun.checkpoint._match import Match, match
from zfun.checkpoint._parts import Part, group_of, is_over_model_axes, parts_of, slots_of, ties_of
from zfun.checkpoint._random import set_random, use_loader
from zfun.checkpoint._together import agree, attempt
from zfun.checkpoint.format._manifest import Manifest
from zfun.checkpoint.format._payload import Payload
from zfun.checkpoint.format._plain import decode
from zfun.collectives import Group, gather_json
from zfun.errors import AliasChanged, CheckpointError
from zfun.files import Files
from zfun.flat import Flat, call_site, consume, flats
from zfun.objects import files_of
from zfun.options import ANY, BOOL, FUNCTION, PATH, instance, integer, takes

_State = TypeVar("_State")

# How often a load looks again while a writer publishes and removes checkpoints.
_ATTEMPTS = 20


class Loaded(NamedTuple, Generic[_State]):
    """The result of :func:`load`.

    Attributes:
        state: a state like ``like``, with the values of the checkpoint.
        step: the step of the checkpoint.
        data: the ``data=`` of the save.
        loader: the position of this rank's data loader; of a rank that the save did not have,
            ``None``.
        path: the directory of the checkpoint.
    """

    state: _State
    step: int
    data: Any
    loader: Any
    path: str


@ops.uncompiled
@takes(
    like=ANY,
    path=PATH,
    step=integer(0) | None,
    reset=FUNCTION | None,
    rng=instance(dict, "a dict of random generators", "{'augment': generator}") | BOOL | None,
    files=FILES,
)
def load(
    path: str | Path,
    like: _State,
    *,
    step: int | None = None,
    group: Group | None = None,
    cast: bool = False,
    reset: Any = None,
    loader: Any = None,
    rng: Mapping[str, Any] | bool | None = None,
    files: Files | None = None,
) -> Loaded[_State]:
    """Load a checkpoint into a state of any composition. All ranks call.

    Group size, stage, bucket size, mesh and store may differ from those of the save. So may the
    precision, where no digit is lost: parameters become the rounded master weights, master weights
    become the parameters, and narrow values become wide.

    Args:
        path: a directory of checkpoints, or the directory of one checkpoint.
        like: a state of the new composition, such as ``zero.init(params)``. The buffers are
            filled in place, so ``like`` must not be used again.
        step: the step to load; by default the newest.
        group: the ranks; by default those of the flats in ``like``.
        cast: also convert where digits are lost.
        reset: ``reset(key)``: whether a leaf keeps the value of ``like``, whatever the checkpoint
            has there.
        loader: a data loader with ``load_state_dict()``, which is set to the position of this rank.
        rng: random generators by name, to be set beside torch's default generators; ``False`` sets
            no generator. A rank that the save did not have keeps its generators.
        files: the operations on files, for tests that let some of them fail.

    Returns:
        The state, the step, and the caller's data.

    Raises:
        SpecMismatch: leaves are missing, are unexpected, or have another shape or dtype. The error
            lists the leaves, and ``like`` is unchanged.
        AliasChanged: leaves that were tied are not, or the other way round; ``like`` is unchanged.
        CorruptCheckpoint: on all ranks: the files are not those that were written.
        CheckpointError: on all ranks: there is no checkpoint, or the disk refused.

    Example:
        >>> import tempfile, torch, zfun as zf
        >>> loss = lambda params, batch: ((params["w"] - batch) ** 2).sum()
        >>> directory = tempfile.TemporaryDirectory()
        >>> def first(group):
        ...     z = zf.zero(3, loss, zf.optim.adamw(0.1), group)
        ...     state, _ = z.step(z.init({"w": torch.zeros(2)}), torch.ones(2))
        ...     zf.save(directory.name, state, data={"seen": 8})
        >>> _ = zf.simulate(4, first)
        >>> def second(group):
        ...     z = zf.zero(1, loss, zf.optim.adamw(0.1), group)
        ...     state, step, data, *_ = zf.load(directory.name, z.init({"w": torch.zeros(2)}))
        ...     return step, data, z.params(state)["w"]
        >>> zf.simulate(2, second)[0]
        (1, {'seen': 8}, tensor([0.1000, 0.1000]))
        >>> directory.cleanup()
    """
    everyone = group_of(like, group)
    settle(everyone)
    files = files_of(path, files)
    elsewhere = keys_elsewhere(like, everyone)
    for left in reversed(range(_ATTEMPTS)):

        def choose(like: tree.Tree = like) -> _Found:
            parts = parts_of(like)
            _check_apart(parts)
            chosen, manifest = manifest_at(path, step, files)
            leaves = match(parts, manifest, everyone, cast=cast, reset=reset, elsewhere=elsewhere)
            rank = everyone.rank
            mine = [
                decode(held[rank]) if rank < len(held) else None
                for held in (manifest.rng, manifest.loader)
            ]
            return _Found(chosen, manifest, leaves, decode(manifest.data), *mine)

        found, error = attempt(choose)
        digests = agree(everyone, error, None if found is None else found.manifest.digest)
        assert found is not None
        if len(set(digests)) > 1:
            if step is None and left:
                # A writer publishes meanwhile.
                continue
            raise CheckpointError(
                f"all ranks load one checkpoint; got several, on this rank {found.path}; pass "
                "step=, or wait until no job saves to the path",
                path=str(path),
            )
        with Payload(found.path, found.manifest, files) as payload:
            state, error = fill(like, found.match, payload)
        if not left or not _is_gone(found.path, step, error, everyone, files):
            if error is None:
                _, error = attempt(lambda: _set(found, rng, loader))
            consume(flats(like), f"load() at {call_site()}")
            agree(everyone, error)
            return Loaded(state, found.manifest.step, found.data, found.loader, found.path)
        # The buffers are those of the state now, of no use before they are filled again.
        like = state
    raise AssertionError("the last attempt returns or raises")


class _Found(NamedTuple):
    """A checkpoint, decoded as far as that needs no payload; generators and loader of this rank."""

    path: str
    manifest: Manifest
    match: Match
    data: Any
    rng: Any
    loader: Any


def keys_elsewhere(like: tree.Tree, group: Group) -> frozenset[str]:
    """Return the keys of leaves that other ranks of a model axis hold; all ranks call."""
    if not is_over_model_axes(like):
        return frozenset()
    parts = parts_of(like)
    keys = [part.path for part in parts if not isinstance(part.value, Flat)]
    found = (slots_of(part) for part in parts if isinstance(part.value, Flat))
    keys += [*ties_of(parts), *(slot.key for slots in found for slot in slots)]
    return frozenset(key for side in gather_json(keys, group, "checkpoint keys") for key in side)


def _set(found: _Found, rng: Mapping[str, Any] | bool | None, loader: Any) -> None:
    """Set generators and loader to what this rank has in the checkpoint."""
    if rng is not False and found.rng is not None:
        set_random(found.rng, rng if isinstance(rng, Mapping) else None)
    if loader is not None and found.loader is not None:
        use_loader(loader, found.loader)


def _is_gone(
    path: str, step: int | None, error: Exception | None, group: Group, files: Files
) -> bool:
    """Whether a writer removed the newest checkpoint while a rank was about to read it."""
    gone = False
    if step is None and error is not None:
        with contextlib.suppress(CheckpointError):
            gone = not is_whole(path, files)
    return any(gather_json(gone, group, "checkpoint"))


def _check_apart(parts: Sequence[Part]) -> None:
    """Refuse a flat that is in a state twice, because its buffers are filled once."""
    seen: dict[int, str] = {}
    for part in parts:
        if isinstance(part.value, Flat):
            first = seen.setdefault(id(part.value.life), part.path)
            if first != part.path:
                raise AliasChanged(
                    "load() fills each flat of a state once; got one flat at "
                    f"{first!r} and at {part.path!r}; pass copy.deepcopy() of one of the two",
                    leaf=part.path,
                )
