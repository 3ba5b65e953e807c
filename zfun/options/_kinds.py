"""Kinds of arguments."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

    Numbers of numpy are accepted; a bool, a tensor and NaN are not.

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
    lambda x: isinstance(x, (str, Path)) and str(x) != "" and "\0" not in str(x),
    ("a path",),
    "'data'",
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
