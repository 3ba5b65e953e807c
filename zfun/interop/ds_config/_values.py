"""The values of all keys: given, filled by a rule, or DeepSpeed's defaults."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from zfun.interop.ds_config._auto import AutoValues
from zfun.interop.ds_config._mistakes import Mistake, mistake
from zfun.interop.ds_config._walk import Walked
from zfun.interop.ds_config.table._keys import Fill, Key

__all__ = ["Unusable", "Values", "values_of"]


class Unusable(Exception):
    """A rule read a key whose value is a mistake, so the rule has no result."""


class Values:
    """The value of each key by path.

    Args:
        found: the values.
        bad: paths, and beginnings of paths, without a usable value.
        sources: where values come from that the configuration does not give.
    """

    def __init__(self, found: dict[str, Any], bad: set[str], sources: dict[str, str]) -> None:
        self._found = found
        self._bad = bad
        self.sources = sources

    def __getitem__(self, path: str) -> Any:
        parts = path.split(".")
        if any(".".join(parts[:length]) in self._bad for length in range(1, len(parts) + 1)):
            raise Unusable(path)
        return self._found[path]

    def spoil(self, paths: Iterable[str]) -> None:
        """Make values unusable that a rule about several keys refuses."""
        self._bad.update(paths)


def values_of(walked: Walked, auto: AutoValues) -> tuple[Values, list[Mistake]]:
    """Return the value of every key, and mistakes of ``"auto"``."""
    found: dict[str, Any] = {}
    sources: dict[str, str] = {}
    bad = set(walked.bad)
    mistakes: list[Mistake] = []
    for path, key in walked.keys.items():
        given = walked.given.get(path)
        filled = None if key.fill is None else _filled(key.fill, auto)
        if path in walked.read:
            found[path] = walked.read[path]
            wrong = _mismatch(key, found[path], filled, given)
            if wrong is not None:
                mistakes.append(wrong)
                bad.add(path)
        elif path in bad or path.rpartition(".")[0] in bad:
            continue
        elif path in walked.given:  # "auto"
            if filled is not None:
                found[path], sources[path] = filled
            elif key.fill is None:
                found[path] = key.default
                sources[path] = "auto has no rule here; DeepSpeed's default"
            elif key.fill.may_miss:
                found[path] = key.default
            elif _is_used(path, walked):
                mistakes.append(_unresolved(key, key.fill, auto))
                bad.add(path)
            else:
                found[path] = key.default
        elif filled is not None and key.fill is not None and key.fill.when_absent:
            found[path], sources[path] = filled
        else:
            found[path] = key.default
    return Values(found, bad, sources), mistakes


def _filled(fill: Fill, auto: AutoValues) -> tuple[Any, str] | None:
    """Return the value and the rule, if the caller knows the fields of the rule."""
    known = [getattr(auto, field) for field in fill.fields]
    if any(value is None for value in known):
        return None
    from_fields = ", ".join(
        f"{field}={value}" for field, value in zip(fill.fields, known, strict=True)
    )
    rule = f" by {fill.words}" if fill.words != "".join(fill.fields) else ""
    return fill.rule(*known), f"from {from_fields}{rule}" if from_fields else f"always {fill.words}"


def _is_used(path: str, walked: Walked) -> bool:
    """Whether the stage reads a key of stage 3 at all; DeepSpeed ignores "auto" elsewhere."""
    is_of_stage_3 = path.startswith("zero_optimization.stage3_")
    return not is_of_stage_3 or walked.read.get("zero_optimization.stage", 0) == 3


def _mismatch(key: Key, value: Any, filled: tuple[Any, str] | None, given: Any) -> Mistake | None:
    if key.fill is None or filled is None or not key.fill.must_match or value == filled[0]:
        return None
    return mistake(
        key.path,
        f"equals the value of the run, {filled[0]} ({filled[1]})",
        given,
        'write "auto", or pass the same value',
    )


def _unresolved(key: Key, fill: Fill, auto: AutoValues) -> Mistake:
    missing = [field for field in fill.fields if getattr(auto, field) is None]
    return mistake(
        key.path,
        f'"auto" is {fill.words}',
        "auto",
        f"pass {' and '.join(f'{field}=' for field in missing)}, or write a value",
    )
