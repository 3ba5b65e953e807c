"""The form of the table: one record for each key of a configuration."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from zfun.options import BOOL, Kind, instance, number, one_of

Verdict: TypeAlias = Literal["mapped", "ignored", "refused"]

_DTYPES: Mapping[Any, torch.dtype] = {
    word: dtype
    for dtype, words in (
        (torch.float32, ("fp32", "float32", "float")),
        (torch.float16, ("fp16", "float16", "half")),
        (torch.bfloat16, ("bf16", "bfloat16")),
    )
    for word in (*words, str(dtype))
}


class Form(NamedTuple):
    """The values that a key takes.

    Attributes:
        kind: the predicate, and the rule in words.
        read: turns an accepted value into the value that is used.
    """

    kind: Kind
    read: Callable[[Any], Any] = lambda value: value


class Fill(NamedTuple):
    """The rule by which ``"auto"`` is filled.

    Attributes:
        fields: the fields of :class:`AutoValues` that the rule needs.
        rule: computes the value from these fields.
        words: the rule in words.
        when_absent: whether the rule also fills a key that the configuration leaves out.
        must_match: whether another value in the configuration is a mistake.
        may_miss: whether ``"auto"`` without the fields means the default.
    """

    fields: tuple[str, ...]
    rule: Callable[..., Any]
    words: str
    when_absent: bool = False
    must_match: bool = True
    may_miss: bool = False


class Key(NamedTuple):
    """One key of a configuration.

    Attributes:
        path: the place in the configuration, such as ``"zero_optimization.stage"``.
        form: the values that DeepSpeed takes and zfun can use.
        default: DeepSpeed's default.
        verdict: ``"mapped"`` to an option; ``"ignored"``, with a reason; or ``"refused"``, unless
            the value switches the feature off.
        becomes: the option of zfun.
        why: the reason, or the remedy.
        fill: the rule for ``"auto"``, if there is one.
        only: the types of the optimizer or scheduler that have this parameter; by default all.
    """

    path: str
    form: Form
    default: Any
    verdict: Verdict
    becomes: str = ""
    why: str = ""
    fill: Fill | None = None
    only: tuple[str, ...] = ()


def count(least: int = 0, most: int = 2**63 - 1) -> Form:
    """Integers in a range; DeepSpeed's files also write them as 5e8."""
    words = f"an integer of at least {least}"
    words += f" and at most {most}" if most < 2**63 - 1 else ""

    def accepts(x: Any) -> bool:
        is_whole = type(x) is int or (type(x) is float and x.is_integer())
        return is_whole and least <= x <= most

    return Form(Kind(accepts, (words,), str(max(least, 1))), int)


def real(least: float = -math.inf, **limits: Any) -> Form:
    """Finite numbers in a range."""
    return Form(number(least, **limits), float)


def text(*choices: str) -> Form:
    """A few words, in any case."""
    known = {choice.lower(): choice for choice in choices}
    accepts = lambda x: isinstance(x, str) and x.lower() in known
    return Form(one_of(*choices)._replace(accepts=accepts), lambda x: known[x.lower()])


def optional(form: Form) -> Form:
    """``null`` as well."""
    return Form(form.kind | None, lambda x: None if x is None else form.read(x))


# DeepSpeed takes 0 and 1 for false and true.
FLAG = Form(
    Kind(lambda x: BOOL.accepts(x) or (type(x) is int and x in (0, 1)), ("true", "false"), "true"),
    bool,
)
RATE = real(0, example="3e-4")
_BETA = number(0, below=1)


def by_group(form: Form) -> Form:
    """A value for all parameter groups, or a list with one for each."""
    accepts = form.kind.accepts

    def is_list(x: Any) -> bool:
        return _is_list(x) and bool(x) and all(map(accepts, x))

    kind = form.kind | Kind(is_list, ("a list with one for each parameter group",), "[1e-3, 3e-4]")
    return Form(kind, lambda x: tuple(map(form.read, x)) if is_list(x) else form.read(x))


BETAS = Form(
    Kind(
        lambda x: _is_list(x) and len(x) == 2 and all(map(_BETA.accepts, x)),
        ("two numbers of at least 0, below 1",),
        "[0.9, 0.999]",
    ),
    lambda x: (float(x[0]), float(x[1])),
)
COUNTS = Form(
    Kind(
        lambda x: _is_list(x) and bool(x) and all(type(n) is int and n > 0 for n in x),
        ("a list of integers of at least 1",),
        "[2, 4, 6]",
    ),
    tuple,
)
ANYTHING = Form(Kind(lambda x: True, ("any value",), "null"))
TYPE = Form(Kind(lambda x: isinstance(x, str), ("a string",), '"AdamW"'))
SECTION = Form(instance((Mapping, bool, type(None)), "an object", "{}"))
DTYPE_NAME = Form(
    one_of("fp32", "fp16", "bf16")._replace(
        accepts=lambda x: isinstance(x, (str, torch.dtype)) and str(x).lower() in _DTYPES
    ),
    lambda x: _DTYPES[str(x).lower()],
)


def _is_list(x: Any) -> bool:
    return isinstance(x, Sequence) and not isinstance(x, str)


def is_off(value: Any) -> bool:
    """Whether a section switches its feature off: empty, or with no switch that is on."""
    if not isinstance(value, Mapping):
        return not value
    switches = list(_switches(value))
    return not value or (bool(switches) and not any(switches))


def _switches(section: Mapping[Any, Any]) -> Iterator[bool]:
    if "enabled" in section:
        yield section["enabled"] not in (False, None, "auto")
    for name in ("autotp_size", "tp_size", "autoep_size"):
        if name in section:
            yield section[name] not in (0, 1, None)
    for inner in section.values():
        if isinstance(inner, Mapping):
            yield from _switches(inner)


def mapped(
    path: str,
    default: Any,
    becomes: str,
    form: Form = FLAG,
    why: str = "",
    fill: Fill | None = None,
) -> Key:
    """A key that becomes an option."""
    return Key(path, form, default, "mapped", becomes, why, fill)


def ignored(path: str, default: Any, why: str, form: Form | None = None) -> Key:
    """A key that changes nothing; without a form, a flag or a section."""
    return Key(path, form or (SECTION if default is None else FLAG), default, "ignored", "", why)


def refused(path: str, default: Any, why: str, form: Form | None = None) -> Key:
    """A key whose other values than the default are mistakes, with the remedy."""
    return ignored(path, default, why, form)._replace(verdict="refused")


def section(prefix: str, *keys: Key) -> tuple[Key, ...]:
    """Put keys into a section."""
    return tuple(key._replace(path=f"{prefix}.{key.path}") for key in keys)


def of(types: tuple[str, ...] | str, *keys: Key) -> tuple[Key, ...]:
    """Limit keys to types of the optimizer or scheduler."""
    return tuple(key._replace(only=(types,) if isinstance(types, str) else types) for key in keys)


def filled(name: str, rule: Callable[..., Any] = lambda value: value, words: str = "") -> Fill:
    """Fill from one field of :class:`AutoValues`, and fill a key that is left out."""
    return Fill((name,), rule, words or name, when_absent=True)
