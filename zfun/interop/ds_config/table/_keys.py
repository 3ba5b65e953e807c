"""The form of the table: one record for each key of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch

from zfun.options import BOOL, Kind, instance, number, one_of

__all__ = [
    "ANYTHING",
    "BETAS",
    "COUNTS",
    "DTYPE_NAME",
    "FLAG",
    "SECTION",
    "VERSION",
    "Fill",
    "Form",
    "Key",
    "Verdict",
    "count",
    "ignored",
    "is_off",
    "mapped",
    "optional",
    "real",
    "refused",
    "text",
]

Verdict: TypeAlias = Literal["mapped", "ignored", "refused"]

_DTYPES = {
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp16": torch.float16,
    "float16": torch.float16,
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
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


def _is_whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def count(least: int = 0, most: int = 2**63 - 1) -> Form:
    """Integers in a range; DeepSpeed's files also write them as 5e8."""
    words = f"an integer of at least {least}"
    words += f" and at most {most}" if most < 2**63 - 1 else ""
    return Form(
        Kind(lambda x: _is_whole(x) and least <= x <= most, (words,), str(max(least, 1))), int
    )


def real(least: float = float("-inf"), *, above: float = float("-inf"), **limits: Any) -> Form:
    """Finite numbers in a range."""
    return Form(number(least, above=above, **limits), float)


def text(*choices: str) -> Form:
    """A few words, in any case."""
    known = {choice.lower(): choice for choice in choices}
    kind = one_of(*choices)
    return Form(
        kind._replace(accepts=lambda x: isinstance(x, str) and x.lower() in known),
        lambda x: known[x.lower()],
    )


def optional(form: Form) -> Form:
    """``null`` as well."""
    return Form(form.kind | None, lambda x: None if x is None else form.read(x))


FLAG = Form(BOOL._replace(words=("true", "false"), example="true"))
_BETA = number(0, below=1)
BETAS = Form(
    Kind(
        lambda x: (
            isinstance(x, Sequence)
            and not isinstance(x, str)
            and len(x) == 2
            and all(map(_BETA.accepts, x))
        ),
        ("two numbers of at least 0, below 1",),
        "[0.9, 0.999]",
    ),
    lambda x: (float(x[0]), float(x[1])),
)
COUNTS = Form(
    Kind(
        lambda x: isinstance(x, Sequence) and bool(x) and all(type(n) is int and n > 0 for n in x),
        ("a list of integers of at least 1",),
        "[2, 4, 6]",
    ),
    tuple,
)
VERSION = Form(
    Kind(lambda x: type(x) in (float, str) and str(x) in ("0.1", "0.2"), ("0.1", "0.2"), "0.2"),
    float,
)
ANYTHING = Form(Kind(lambda x: True, ("any value",), "null"))
SECTION = Form(instance((Mapping, bool, type(None)), "an object", "{}"))
DTYPE_NAME = Form(
    one_of("fp32", "fp16", "bf16")._replace(
        accepts=lambda x: isinstance(x, str) and x.lower() in _DTYPES
    ),
    lambda x: _DTYPES[x.lower()],
)


def is_off(value: Any) -> bool:
    """Whether a section switches its feature off: empty, or with no ``enabled`` that is true."""
    if not isinstance(value, Mapping):
        return not value
    found = list(_switches(value))
    return not value or (bool(found) and not any(found))


def _switches(value: Mapping[Any, Any]) -> list[bool]:
    found = [value["enabled"] not in (False, None, "auto")] if "enabled" in value else []
    for inner in value.values():
        found += _switches(inner) if isinstance(inner, Mapping) else []
    return found


def mapped(
    path: str, form: Form, default: Any, becomes: str, why: str = "", fill: Fill | None = None
) -> Key:
    return Key(path, form, default, "mapped", becomes, why, fill)


def ignored(path: str, form: Form, default: Any, why: str, fill: Fill | None = None) -> Key:
    return Key(path, form, default, "ignored", "", why, fill)


def refused(path: str, form: Form, default: Any, why: str) -> Key:
    return Key(path, form, default, "refused", "", why)
