"""Where the values of a partitioned parameter are."""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zfun.collectives import Group, all_gather, broadcast, global_ranks
from zfun.errors import OptionError
from zfun.interop.deepspeed.runtime.zero._stand_ins import (
    OWNER,
    Partitioned,
    TensorOwner,
    owner_of,
    told,
)
from zfun.sources import Deferred


class _Ids(threading.local):
    """The numbers of parameters; a simulated rank is a thread."""

    def __init__(self) -> None:
        self.numbers = itertools.count()


# Ranks cut parameters in one order, so a number means one parameter on all ranks.
_IDS = _Ids()


class ZeroParamStatus(enum.Enum):
    """Whether the values of a partitioned parameter are there."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class Pieces(TensorOwner):
    """The owner before ``initialize``: every rank has an equal piece of each parameter.

    The pieces are the parameters' attributes ``ds_tensor``, one after the other by rank; the last
    one has padding. They are memory of the device, or of files in a folder.
    """

    def __init__(self, group: Group, folder: Path | None = None) -> None:
        self.group = group
        self._folder = folder

    def gathered(self, params: Sequence[nn.Parameter], what: str = "") -> list[Tensor]:
        def whole(p: Any) -> Tensor:
            piece, name = p.ds_tensor.to(p.device), what or f"parameter {p.ds_id}"
            return all_gather(piece, self.group, name=name)[: p.numel()].view(p.shape)

        with torch.no_grad():
            return [whole(p) for p in params]

    def put(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        for param, value in zip(params, values, strict=True):
            told(param).ds_tensor = self._piece(value)

    def show(self, params: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
        for param, value in zip(params, values, strict=True):
            param.__class__ = nn.Parameter
            param.data = value

    def hide(self, params: Sequence[nn.Parameter]) -> None:
        for param in params:
            stand_in(param)

    def settle(self, params: Sequence[nn.Parameter]) -> None:
        """Mark the modules of values that came from another rank.

        The models of transformers are initialised by rank 0 alone, which marks its modules; another
        rank, whose modules have no marks, would write into stand-ins.
        """
        for param in params:
            if (module := getattr(param, "_zfun_module", lambda: None)()) is not None:
                module._is_hf_initialized = True

    def _piece(self, whole: Tensor) -> Tensor:
        size, rank = self.group.size, self.group.rank
        share = -(-whole.numel() // size)
        if self._folder is None:
            piece = torch.zeros(share, dtype=whole.dtype, device=whole.device)
        else:
            piece = _zeros_in(self._folder, share, whole.dtype)
        own = whole.detach().reshape(-1)[rank * share : (rank + 1) * share]
        piece[: own.numel()] = own
        return piece


def _zeros_in(folder: Path, count: int, dtype: torch.dtype) -> Tensor:
    """Return zeros in the memory of a new file, which has no name and goes with the tensor."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.truncate(count * dtype.itemsize)
        return torch.from_file(file.name, shared=True, size=count, dtype=dtype)


def cut(param: nn.Parameter, owner: Pieces, dtype: torch.dtype | None) -> None:
    """Keep a piece of a parameter, with the values of rank 0."""
    with torch.no_grad():
        whole = param.detach()
        if dtype is not None and whole.is_floating_point():
            whole = whole.to(dtype)
        whole = broadcast(whole.contiguous(), owner.group, 0, name="zero.Init")
    record = told(param)
    setattr(param, OWNER, owner)
    _size(record, whole, owner.group)
    if not hasattr(param, "ds_id"):
        record.ds_id = next(_IDS.numbers)
    record._zfun_order, record._zfun_shown = record.ds_id, False
    record.ds_status = ZeroParamStatus.NOT_AVAILABLE
    stand_in(param, whole)
    owner.put([param], [whole])


def stand_in(param: nn.Parameter, like: Tensor | None = None) -> None:
    """Put the stand-in into a parameter; see [Note: stand-ins]."""
    like = param.detach() if like is None else like
    is_number = like.is_floating_point() or like.is_complex()
    value = float("nan") if is_number else torch.iinfo(like.dtype).min
    param.data = torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)
    param.__class__ = Partitioned


@contextlib.contextmanager
def taken(module: nn.Module) -> Iterator[None]:
    """Let the partitioned parameters of a module be taken by an engine, as a context."""
    cut: list[Any] = [param for param in module.parameters() if type(param) is Partitioned]
    for param in cut:
        param.__class__ = nn.Parameter
    try:
        yield
    except BaseException:
        for param in cut:
            if type(param) is nn.Parameter:
                param.__class__ = Partitioned
        raise


def adopt(param: nn.Parameter, owner: TensorOwner, name: str, *, is_hidden: bool) -> None:
    """Mark a parameter whose values are in a state from now on, outside of calls too if hidden."""
    record = told(param)
    setattr(param, OWNER, owner)
    number = getattr(param, "ds_id", None)
    record._zfun_order = next(_IDS.numbers) if number is None else number
    record._zfun_shown = False
    param.__dict__.pop("_zfun_module", None)
    if not is_hidden:
        sizes = ("ds_shape", "ds_numel", "partition_numel")
        for name in ("ds_id", "ds_tensor", "ds_status", *sizes):
            param.__dict__.pop(name, None)
        return
    record.ds_tensor, record.ds_name = None, name
    record.ds_active_sub_modules = set()
    _size(record, param, owner.group)
    record.ds_id = record._zfun_order
    record.ds_status = ZeroParamStatus.NOT_AVAILABLE


def forget(param: nn.Parameter) -> None:
    """Let a parameter be one that no engine has."""
    for name in list(param.__dict__):
        is_mark = name.startswith(("_zfun_", "ds_", "partition_numel"))
        if is_mark and name not in ("_zfun_order", "ds_id"):
            del param.__dict__[name]


def _size(record: Any, like: Tensor, group: Group) -> None:
    """Tell the sizes of a parameter, and of the piece of a rank, under DeepSpeed's names."""
    record.ds_shape, record.ds_numel = like.shape, like.numel()
    record.partition_numel = functools.partial(int, -(-like.numel() // group.size))


def marks_of(param: nn.Parameter) -> dict[str, Any]:
    """Return what DeepSpeed tells of a partitioned parameter, for a tensor with the values."""
    kept = ("ds_id", "ds_name", "ds_shape", "ds_numel", "ds_tensor", "ds_active_sub_modules")
    marks = {name: getattr(param, name) for name in (*kept, "_zfun_engine")}
    return {**marks, "ds_status": ZeroParamStatus.AVAILABLE}


def is_shown(param: nn.Parameter) -> bool:
    """Return whether a context shows the whole values of a parameter."""
    return getattr(param, "_zfun_shown", False)


def mark(param: nn.Parameter, *, shown: bool) -> None:
    """Say whether a context shows the whole values of a parameter."""
    told(param)._zfun_shown = shown
    if hasattr(param, "ds_id"):
        status = ZeroParamStatus.AVAILABLE if shown else ZeroParamStatus.NOT_AVAILABLE
        told(param).ds_status = status


def deferred_of(name: str, param: nn.Parameter) -> Deferred:
    """Return a partitioned parameter as a leaf that all ranks make together, one at a time."""
    spec = torch.empty(param.shape, dtype=param.dtype, device="meta")
    return Deferred(name, spec, lambda: owner_of(param).gathered([param])[0], param.device)


def root_of(rank: int, group: Group) -> int:
    """Return the place of a global rank in a group."""
    ranks = list(global_ranks(group))
    if rank not in ranks:
        raise OptionError(
            f"modifier_rank is one of the ranks that hold the parameters; got {rank}, and the "
            f"ranks are {ranks}; pass one of these"
        )
    return ranks.index(rank)
