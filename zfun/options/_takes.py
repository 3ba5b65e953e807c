"""The check of the arguments of a call."""

from __future__ import annotations

import difflib
import functools
import inspect
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

from zfun.errors import OptionError
from zfun.options import _kinds

_Target = TypeVar("_Target", bound=Callable[..., Any])

# The kinds of arguments that mean the same everywhere, by name.
_BY_NAME: Mapping[str, _kinds.Kind] = {
    "b1": _kinds.DECAY,
    "b2": _kinds.SECOND_DECAY,
    "bucket_bytes": _kinds.integer(1),
    "eps": _kinds.number(0, example="1e-8"),
    "learning_rate": _kinds.RATE,
    "num_micro_batches": _kinds.integer(1),
    "num_steps": _kinds.integer(1),
    "num_warmup": _kinds.integer(0),
    "optimizer": _kinds.ANY,  # as_optimizer() has the better message
    "order": _kinds.NAMES | None,
    "trainable": _kinds.OF_LEAVES | None,
    "weight_decay": _kinds.number(0),
}
# And by annotation. A tree may be any value.
_BY_ANNOTATION: Mapping[str, _kinds.Kind] = {
    "Any": _kinds.ANY,
    "Callable": _kinds.FUNCTION,
    "Group": _kinds.GROUP,
    "Store": _kinds.STORE,
    "Tensor": _kinds.TENSOR,
    "Tree": _kinds.ANY,
    "bool": _kinds.BOOL,
    "collectives.Group": _kinds.GROUP,
    "float": _kinds.number(),
    "int": _kinds.integer(),
    "str": _kinds.TEXT,
    "torch.dtype": _kinds.DTYPE,
    "tree.Tree": _kinds.ANY,
}


def _usual(name: str, annotation: Any) -> _kinds.Kind | None:
    """Return the kind of an argument by its name, or else by its annotation."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    while text != (text := re.sub(r"\[[^][]*\]", "", text)):
        pass
    words = text.split(" | ")
    kinds = [_BY_ANNOTATION.get(word) for word in words if word != "None"]
    if _kinds.ANY in kinds:
        return _kinds.ANY
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        return None
    kind: _kinds.Kind = functools.reduce(operator.or_, known)
    return kind | None if "None" in words else kind


# The words of other libraries for options of zfun. The entry of a function without such options
# does not count.
_ELSEWHERE: Mapping[str, tuple[str, ...]] = {
    "accumulation_steps": ("num_micro_batches=",),
    "betas": ("b1=", "b2="),
    "beta1": ("b1=",),
    "beta2": ("b2=",),
    "bucket_cap_mb": ("bucket_bytes=",),
    "bucket_size": ("bucket_bytes=",),
    "epsilon": ("eps=",),
    "frozen": ("trainable=",),
    "gradient_accumulation_steps": ("num_micro_batches=",),
    "l2": ("weight_decay=",),
    "lr": ("learning_rate=",),
    "lr_decay": ("rate_decay=",),
    "max_live": ("schedule=zf.ScheduleOptions(max_live=...)",),
    "mixed_precision": ("precision=",),
    "offload_grads": ("offload=zf.stores.Offload(grads=zf.stores.host())",),
    "offload_optimizer": ("offload=zf.stores.Offload(optimizer=zf.stores.host())",),
    "offload_param": ("offload=zf.stores.Offload(params=zf.stores.host())",),
    "offload_params": ("offload=zf.stores.Offload(params=zf.stores.host())",),
    "persistence": ("schedule=zf.ScheduleOptions(persistence=...)",),
    "pg": ("group=",),
    "prefetch": ("schedule=zf.ScheduleOptions(prefetch=...)",),
    "process_group": ("group=",),
    "reuse_distance": ("schedule=zf.ScheduleOptions(reuse_distance=...)",),
    "secondary": ("schedule=zf.ScheduleOptions(secondary=True)",),
    "timeout": ("timeout_s=",),
    "wd": ("weight_decay=",),
    "wire_grads": ("compression=zf.compression.Compression(grads=zf.compression.int8())",),
    "wire_params": ("compression=zf.compression.Compression(params=zf.compression.int8())",),
    "world_size": ("size=",),
    "zero_stage": ("stage=",),
}


def takes(**kinds: _kinds.Kind) -> Callable[[_Target], _Target]:
    """Check the arguments of a function, or of the constructor of a class, before each call.

    Args:
        kinds: the kind of an argument, by name, where neither the name (``bucket_bytes``) nor the
            annotation (``bool``, ``Group``, ``Callable[...] | None``) says it.

    Returns:
        A decorator, which keeps the signature, the docstring and the type.

    Raises:
        OptionError: from the decorated function: a value that is not of its kind, or an option that
            does not exist.
        AssertionError: from the decorator: an argument without a kind.

    Example:
        >>> from zfun.options import one_of
        >>> @takes(stage=one_of(0, 1, 2, 3, example="3"))
        ... def train(stage: int, *, bucket_bytes: int = 1): ...
        >>> train("x")
        Traceback (most recent call last):
        ...
        zfun.errors.OptionError: stage of train() must be 0, 1, 2 or 3; got 'x'; write stage=3
        >>> train(3, bucket_byte=2)
        Traceback (most recent call last):
        ...
        zfun.errors.OptionError: train() has no option 'bucket_byte'; did you mean 'bucket_bytes'?
    """

    def decorate(target: _Target) -> _Target:
        parameters = inspect.signature(target).parameters
        is_open = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
        found = {
            name: kinds[name] if name in kinds else _usual(name, one.annotation)
            for name, one in parameters.items()
            if one.kind is not one.VAR_KEYWORD
        }
        known = {name: kind for name, kind in found.items() if kind is not None}
        assert known.keys() == found.keys() | kinds.keys(), (target, found.keys() ^ known.keys())
        in_order = [
            name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        rest = [name for name, one in parameters.items() if one.kind is one.VAR_POSITIONAL]
        # A constructor gets the new object first.
        first = {"self": _kinds.ANY} if inspect.isclass(target) else {}
        table = _ArgumentTable(
            f"{target.__name__}()", {**first, **known}, [*first, *in_order], rest, is_open
        )
        if not inspect.isclass(target):
            return _checking(target, table)
        target.__init__ = _checking(target.__init__, table)  # type: ignore[misc]
        return target

    return decorate


class _ArgumentTable(NamedTuple):
    """The kinds of the arguments of one function.

    Attributes:
        label: the name of the function, for messages.
        kinds: by argument.
        in_order: the arguments that may be given by position.
        rest: the name of a variable number of arguments, if there is one.
        is_open: whether the function takes any keyword.
    """

    label: str
    kinds: Mapping[str, _kinds.Kind]
    in_order: Sequence[str]
    rest: Sequence[str]
    is_open: bool


def _checking(fn: _Target, table: _ArgumentTable) -> _Target:
    accepts = {name: kind.accepts for name, kind in table.kinds.items() if kind is not _kinds.ANY}
    by_name = {name: accepts.get(name) for name in table.kinds if name not in table.rest}
    in_order = [(name, accepts.get(name)) for name in table.in_order]

    @functools.wraps(fn)
    def checked(*args: Any, **kwargs: Any) -> Any:
        for (name, is_good), value in zip(in_order, args, strict=False):
            if is_good is not None and not is_good(value):
                raise _refusal(table, name, value)
        for name in table.rest:
            for value in args[len(in_order) :]:
                if name in accepts and not accepts[name](value):
                    raise _refusal(table, name, value)
        for name, value in kwargs.items():
            if name in by_name:
                is_good = by_name[name]
                if is_good is not None and not is_good(value):
                    raise _refusal(table, name, value)
            elif not table.is_open:
                raise _unknown(table, name)
        return fn(*args, **kwargs)

    return cast(_Target, checked)


def _refusal(table: _ArgumentTable, name: str, value: Any) -> OptionError:
    kind = table.kinds[name]
    # A class may say which value a function takes in the place of its own.
    remedy = getattr(type(value), "instead", f"write {name}={kind.example}")
    return OptionError(
        f"{name} of {table.label} must be {kind}; got {_kinds.shown(value)}; {remedy}"
    )


def _unknown(table: _ArgumentTable, name: str) -> OptionError:
    known = [known for known in table.kinds if known != "self"]
    meant = _ELSEWHERE.get(name, ())
    near = difflib.get_close_matches(name, known, n=1)
    if meant and all(text.split("=")[0] in known for text in meant):
        remedy = f"write {' and '.join(text.removesuffix('=') for text in meant)}"
    elif near:
        remedy = f"did you mean {near[0]!r}?"
    else:
        remedy = f"it takes {', '.join(known)}"
    return OptionError(f"{table.label} has no option {name!r}; {remedy}")
