"""The check of arguments: one table for each function, which says what every argument may be.

A :class:`Kind` is data: a predicate, the rule in words, and an example. :func:`takes` compares the
arguments of a call with the kinds before the call, so that a wrong option is refused where the
option is given, by name, and not where a kernel or a collective meets the value.

Rules about two arguments together (a root below the size of the group) stay in the functions.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from zfun.errors import OptionError

__all__ = [
    "ANY",
    "BOOL",
    "DEVICE",
    "DTYPE",
    "FLOATING",
    "FRACTION",
    "FUNCTION",
    "GROUP",
    "ITERABLE",
    "NAMES",
    "OF_LEAVES",
    "PATH",
    "SCALAR",
    "SECONDS",
    "STORE",
    "TENSOR",
    "TEXT",
    "Kind",
    "each",
    "function",
    "instance",
    "integer",
    "number",
    "one_of",
    "shown",
    "takes",
]

_Target = TypeVar("_Target", bound=Callable[..., Any])
_MAX = 2**63 - 1


class Kind(NamedTuple):
    """A kind of argument.

    Attributes:
        accepts: whether a value is of this kind.
        words: the kind in words, one for each alternative.
        example: a value of this kind, as source text.
    """

    accepts: Callable[[Any], bool]
    words: tuple[str, ...]
    example: str

    def __or__(self, other: Kind | None) -> Kind:  # type: ignore[override]
        """Return the kind of the values of either kind; ``| None`` also accepts ``None``."""
        mine = self.accepts
        if other is None:
            return Kind(lambda x: x is None or mine(x), (*self.words, "None"), self.example)
        theirs = other.accepts
        return Kind(lambda x: mine(x) or theirs(x), (*self.words, *other.words), self.example)

    def __str__(self) -> str:
        return (
            f"{', '.join(self.words[:-1])} or {self.words[-1]}"
            if len(self.words) > 1
            else self.words[0]
        )


def _is_number(x: Any) -> bool:
    return isinstance(x, Real) and not isinstance(x, bool)


def integer(least: int = -_MAX - 1, most: int = _MAX, *, example: str | None = None) -> Kind:
    """Return the kind of integers in ``[least, most]``; those of numpy too, but no bool.

    Example:
        >>> str(integer(1, 8)), integer(1).accepts(True)
        ('an integer from 1 to 8', False)
    """

    def accepts(x: Any) -> bool:
        return (type(x) is int and least <= x <= most) or (
            isinstance(x, Integral) and not isinstance(x, bool) and least <= int(x) <= most
        )

    words = "an integer"
    if least > -_MAX:
        words += (
            f" of at least {least}, below 2**63" if most == _MAX else f" from {least} to {most}"
        )
    return Kind(accepts, (words,), example or str(max(least, 0)))


def number(
    least: float = -math.inf,
    *,
    above: float = -math.inf,
    below: float = math.inf,
    infinite: bool = False,
    example: str = "0.1",
) -> Kind:
    """Return the kind of finite numbers of at least ``least``, above ``above``, below ``below``.

    Args:
        least: the least number.
        above: a bound that is not accepted.
        below: a bound that is not accepted.
        infinite: whether infinity is accepted.
        example: for messages.

    Returns:
        The kind. Numbers of numpy are accepted; a bool, a tensor and NaN are not.

    Example:
        >>> str(number(0, below=1)), number(0).accepts(float("nan"))
        ('a number of at least 0, below 1', False)
    """

    def accepts(x: Any) -> bool:
        if not _is_number(x):
            return False
        try:
            x = float(x)
        except OverflowError:
            return False
        return least <= x and above < x and (x < below or (infinite and x == math.inf))

    limits = (("of at least", least), ("above", above), ("below", below))
    bounds = [f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit)]
    noun = "a finite number" if below == math.inf and not infinite else "a number"
    return Kind(accepts, (f"{noun} {', '.join(bounds)}".rstrip(),), example)


def one_of(*choices: Any, example: str | None = None) -> Kind:
    """Return the kind of a few values, of which messages show the first.

    Example:
        >>> str(one_of("mean", "sum"))
        "'mean' or 'sum'"
    """
    kinds = {type(choice) for choice in choices}
    return Kind(
        lambda x: type(x) in kinds and x in choices,
        tuple(map(repr, choices)),
        example or repr(choices[0]),
    )


def instance(types: type | tuple[type, ...], words: str, example: str) -> Kind:
    """Return the kind of the instances of a class.

    Example:
        >>> instance(list, "a list", "[]").accepts(())
        False
    """
    return Kind(lambda x: isinstance(x, types), (words,), example)


def each(kind: Kind, words: str, example: str, *, least: int = 0) -> Kind:
    """Return the kind of sequences of at least ``least`` values of a kind.

    Example:
        >>> each(integer(0), "a sequence of ranks", "(1, 0)").accepts([0, True])
        False
    """

    def accepts(x: Any) -> bool:
        return (
            isinstance(x, Sequence)
            and not isinstance(x, (str, bytes))
            and len(x) >= least
            and all(map(kind.accepts, x))
        )

    return Kind(accepts, (words,), example)


def function(words: str, example: str) -> Kind:
    """Return the kind of functions; the words say of which arguments.

    Example:
        >>> function("a function of the step", "lambda step: 0.1").accepts(3)
        False
    """
    return Kind(callable, (words,), example)


def _has(*names: str) -> Callable[[Any], bool]:
    """Return whether a class has some attributes, because instances may answer to any name."""
    return lambda x: all(hasattr(type(x), name) for name in names)


def _is_group(x: Any) -> bool:
    return hasattr(type(x), "start") and hasattr(x, "rank") and hasattr(x, "size")


def _is_device(x: Any) -> bool:
    if isinstance(x, torch.device):
        return True
    try:
        return isinstance(x, str) and bool(torch.device(x))
    except RuntimeError:
        return False


ANY = Kind(lambda x: True, ("any value",), "None")
BOOL = Kind(lambda x: type(x) is bool, ("True", "False"), "True")
TEXT = Kind(lambda x: isinstance(x, str), ("a string",), "'w'")
FUNCTION = function("a function", "lambda *args: ...")
OF_LEAVES = function("a function of path and leaf", "lambda path, leaf: leaf.ndim > 1")
PATH = Kind(
    lambda x: isinstance(x, Path) or (isinstance(x, str) and x != ""), ("a path",), "'data'"
)
TENSOR = Kind(lambda x: isinstance(x, Tensor), ("a tensor",), "torch.zeros(2)")
SCALAR = Kind(
    lambda x: isinstance(x, Tensor) and x.numel() == 1,
    ("a tensor of one element",),
    "torch.tensor(1.0)",
)
ITERABLE = Kind(_has("__iter__"), ("an iterable",), "[]")
NAMES = each(TEXT, "a sequence of the paths of leaves", "['h.0.w', 'h.1.w']")
DTYPE = Kind(lambda x: isinstance(x, torch.dtype), ("a torch.dtype",), "torch.float32")
FLOATING = Kind(
    lambda x: isinstance(x, torch.dtype) and x.is_floating_point,
    ("a floating torch.dtype",),
    "torch.float32",
)
DEVICE = Kind(_is_device, ("a device",), "'cpu'")
GROUP = Kind(_is_group, ("a group of ranks",), "zf.process_group()")
STORE = Kind(_has("put", "crossed", "device"), ("a store of zf.stores",), "zf.stores.host()")
SECONDS = number(above=0, below=1e9, example="120.0")
FRACTION = Kind(lambda x: number(0).accepts(x) and x <= 1, ("a number from 0 to 1",), "0.3")

SCHEDULE = function("a function of the step", "zf.optim.constant(3e-4)")
RATE = number(0, example="3e-4") | SCHEDULE
DECAY = number(0, below=1, example="0.9") | SCHEDULE
SECOND_DECAY = number(0, below=1, example="0.999")

# The kinds of arguments that mean the same everywhere, by name.
_BY_NAME: Mapping[str, Kind] = {
    "b1": DECAY,
    "b2": SECOND_DECAY,
    "bucket_bytes": integer(1),
    "eps": number(0, example="1e-8"),
    "learning_rate": RATE,
    "num_micro_batches": integer(1),
    "num_steps": integer(1),
    "num_warmup": integer(0),
    "optimizer": ANY,  # as_optimizer() has the better message
    "order": NAMES | None,
    "trainable": OF_LEAVES | None,
    "weight_decay": number(0),
}
# And by annotation. A tree may be any value.
_BY_ANNOTATION: Mapping[str, Kind] = {
    "Any": ANY,
    "Callable": FUNCTION,
    "Group": GROUP,
    "Store": STORE,
    "Tensor": TENSOR,
    "Tree": ANY,
    "bool": BOOL,
    "float": number(),
    "int": integer(),
    "str": TEXT,
    "torch.dtype": DTYPE,
    "tree.Tree": ANY,
}


def _usual(name: str, annotation: Any) -> Kind | None:
    """Return the kind of an argument by its name, or else by its annotation."""
    if name in _BY_NAME:
        return _BY_NAME[name]
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    while text != (text := re.sub(r"\[[^][]*\]", "", text)):
        pass
    words = text.split(" | ")
    kinds = [_BY_ANNOTATION.get(word) for word in words if word != "None"]
    if ANY in kinds:
        return ANY
    known = [kind for kind in kinds if kind is not None]
    if not known or len(known) < len(kinds):
        return None
    kind: Kind = functools.reduce(operator.or_, known)
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


def takes(**kinds: Kind) -> Callable[[_Target], _Target]:
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
        table = {
            name: kinds[name] if name in kinds else _usual(name, one.annotation)
            for name, one in parameters.items()
            if one.kind is not one.VAR_KEYWORD
        }
        known = {name: kind for name, kind in table.items() if kind is not None}
        assert known.keys() == table.keys() | kinds.keys(), (target, table.keys() ^ known.keys())
        in_order = [
            name for name, one in parameters.items() if one.kind is one.POSITIONAL_OR_KEYWORD
        ]
        rest = [name for name, one in parameters.items() if one.kind is one.VAR_POSITIONAL]
        label = f"{target.__name__}()"
        if inspect.isclass(target):
            # A constructor gets the new object first.
            of_init = _ArgumentTable(
                label, {"self": ANY, **known}, ["self", *in_order], rest, is_open
            )
            target.__init__ = _checking(target.__init__, of_init)  # type: ignore[misc]
            return target
        return _checking(target, _ArgumentTable(label, known, in_order, rest, is_open))

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
    kinds: Mapping[str, Kind]
    in_order: Sequence[str]
    rest: Sequence[str]
    is_open: bool


def _checking(fn: _Target, table: _ArgumentTable) -> _Target:
    accepts = {name: kind.accepts for name, kind in table.kinds.items() if kind is not ANY}
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
    return OptionError(f"{name} of {table.label} must be {kind}; got {shown(value)}; {remedy}")


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


def shown(value: Any) -> str:
    """Show a value in a message, in at most 80 characters.

    Example:
        >>> shown(torch.zeros(2, 3)), shown("x" * 100)[-5:]
        ('a tensor of shape (2, 3), torch.float32', 'xx...')
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}, {value.dtype}"
    try:
        text = " ".join(repr(value).split())
    except Exception:  # noqa: BLE001, the repr of a caller's class must not hide the mistake
        text = f"an object of class {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
