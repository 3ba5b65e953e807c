"""Mistakes of a configuration, which one error lists."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from zfun.errors import ConfigError, NotElementwiseError, OptionError
from zfun.options import shown


class Mistake(NamedTuple):
    """One mistake.

    Attributes:
        path: the place in the configuration, such as ``"zero_optimization.stage"``.
        rule: the rule that the value breaks.
        got: the value, as text.
        remedy: a way to put the mistake right.
    """

    path: str
    rule: str
    got: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.path}: {self.rule}; got {self.got}; {self.remedy}"


def mistake(path: str, rule: str, got: Any, remedy: str) -> Mistake:
    # A key may have any characters, and a message has one line for each mistake.
    shown_path = path if path.isprintable() else ascii(path)[1:-1]
    return Mistake(shown_path, rule, shown(got), remedy)


def nearest(word: str, known: Iterable[str], likeness: float = 0.6) -> str | None:
    """Return the known word that is most like another."""
    return next(iter(difflib.get_close_matches(word, list(known), 1, likeness)), None)


def error_of(mistakes: Sequence[Mistake], name: str) -> ConfigError:
    """Return the one error for all mistakes of a configuration."""
    found = tuple(dict.fromkeys(mistakes))
    count = "1 mistake" if len(found) == 1 else f"{len(found)} mistakes"
    lines = "".join(f"\n- {one}" for one in found)
    return ConfigError(f"{name} has {count}:{lines}", mistakes=found)


@contextmanager
def collecting(path: str, found: list[Mistake]) -> Iterator[None]:
    """Turn the refusal of a value by a function of zfun into a mistake at a path."""
    try:
        yield
    except (OptionError, NotElementwiseError) as error:
        rule, _, rest = str(error).partition("; got ")
        got, _, remedy = rest.partition("; ")
        found.append(
            Mistake(path, rule, got or "the values of this section", remedy or "change the values")
        )
