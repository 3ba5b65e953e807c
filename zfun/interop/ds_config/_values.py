"""One pass over a configuration: the value of every key, and all mistakes of single keys."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from zfun.interop.ds_config._auto import AutoValues
from zfun.interop.ds_config._mistakes import Mistake, mistake, nearest
from zfun.interop.ds_config.table import KEYS, SECTIONS, keys_of, kind_of
from zfun.interop.ds_config.table._keys import SECTION, Key, is_off
from zfun.interop.ds_config.table._optim import (
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
    TYPES,
)
from zfun.interop.ds_config.table._zero import ALIASES, OLDER

_Z = "zero_optimization"
# Sections that may be null, because DeepSpeed's default of these sections is null.
_MAY_BE_NULL = {
    "torch_autocast",
    *(f"{_Z}.{name}" for name in ("offload_param", "offload_optimizer", "zeropp_loco_param")),
}
# A key of the top level that is less like a known one is not a typing error.
_LIKE = 0.8


class Unusable(Exception):
    """A rule read a key whose value is a mistake or not known yet, so the rule has no result."""


class Values:
    """The value of each key by path.

    Attributes:
        found: the values.
        bad: paths, and beginnings of paths, without a usable value.
        sources: where values come from that the configuration does not give.
    """

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        self.bad: set[str] = set()
        self.sources: dict[str, str] = {}

    def __getitem__(self, path: str) -> Any:
        if self.has_mistake(path):
            raise Unusable(path)
        return self.found[path]

    def has_mistake(self, path: str) -> bool:
        """Whether a key, or a section around the key, has no usable value."""
        parts = path.split(".")
        return any(".".join(parts[:length]) in self.bad for length in range(1, len(parts) + 1))

    def spoil(self, paths: Iterable[str]) -> None:
        """Make values unusable that a rule about several keys refuses."""
        self.bad.update(paths)


class Checked(NamedTuple):
    """A configuration, checked key by key.

    Attributes:
        config: the configuration.
        keys: the keys that a configuration with these types may have, by path.
        given: the values as written, by path; ``"auto"`` included.
        values: the value of every key.
        written: the paths as the configuration spells them, by path.
        extra: parameters for a class of ``torch.optim``.
        unknown: values at the top level by names that DeepSpeed does not know, and ignores.
        late: by path, the fields of :class:`AutoValues` that ``"auto"`` waits for.
        mistakes: of single keys.
    """

    config: Mapping[str, Any]
    keys: Mapping[str, Key]
    given: dict[str, Any]
    values: Values
    written: dict[str, str]
    extra: dict[str, Any]
    unknown: dict[str, Any]
    late: dict[str, tuple[str, ...]]
    mistakes: list[Mistake]

    def kind(self, section: str) -> str | None:
        """Return the type of the optimizer or scheduler in the table's spelling."""
        return kind_of(section, self.given.get(f"{section}.type"))

    def options(self, section: str) -> dict[str, Any]:
        """Return the values of the mapped parameters of a section by name."""
        start = f"{section}.params."
        names = [path for path, key in self.keys.items() if path.startswith(start)]
        return {
            path[len(start) :]: self.values[path]
            for path in names
            if self.keys[path].verdict == "mapped"
        }


def checked(
    config: Mapping[str, Any],
    auto: AutoValues | None = None,
    *,
    late: Collection[str] = (),
    has_optimizer: bool = False,
) -> Checked:
    """Read every key of a configuration.

    Args:
        config: the keys.
        auto: the values of the run, which fill ``"auto"``.
        late: the fields of :class:`AutoValues` that are not known yet, and so no mistake.
        has_optimizer: whether an optimizer of the caller takes the place of the configuration's, so
            that numbers of the run may differ from numbers of the optimizer and the scheduler.
    """
    inner = {name: config.get(name) for name in TYPES}
    kinds = {
        name: kind_of(name, part.get("type")) if isinstance(part, Mapping) else None
        for name, part in inner.items()
    }
    keys = keys_of(kinds["optimizer"], kinds["scheduler"])
    out = Checked(config, keys, {}, Values(), {}, {}, {}, {}, [])
    _section(config, "", "", kinds, out)
    auto = AutoValues() if auto is None else auto
    for key in keys.values():
        _value(key, auto, late, has_optimizer, out)
    return out


def _section(
    section: Mapping[Any, Any],
    prefix: str,
    shown: str,
    kinds: Mapping[str, str | None],
    out: Checked,
) -> None:
    """Sort the keys of a section; ``shown`` is the path of the section as written."""
    # Other spellings last, so that a key beside its other spelling wins; aio is one in
    # zero_optimization.
    for name in sorted(section, key=lambda name: f"{prefix}{name}" in {*ALIASES, *OLDER}):
        value, written = section[name], f"{shown}{name}"
        path = ALIASES.get(f"{prefix}{name}", f"{prefix}{name}")
        if "." in str(name):
            # TRL writes paths as names of the top level, which DeepSpeed ignores.
            _no_key(name, value, prefix, written, kinds, out)
        elif path in OLDER and (path not in SECTIONS or isinstance(value, bool)):
            _older(path, value, written, out)
        elif path in SECTIONS and isinstance(value, Mapping):
            if path in kinds and kinds[path] is None:
                _unknown_type(value, path, out)
            _section(value, f"{path}.", f"{written}.", kinds, out)
        elif path in SECTIONS:
            if value is not None or path not in _MAY_BE_NULL:
                remedy = f'write "{path.rpartition(".")[2]}": {{...}}'
                _refuse(path, "must be an object", value, remedy, out, written)
        elif path in out.keys:
            if path not in out.given:
                out.written.setdefault(path, written)
                out.given[path] = value
        elif prefix == "optimizer.params." and kinds["optimizer"] in TORCH_OPTIMIZERS:
            out.extra[str(name)] = value
        else:
            _no_key(name, value, prefix, written, kinds, out)


def _no_key(
    name: Any,
    value: Any,
    prefix: str,
    written: str,
    kinds: Mapping[str, str | None],
    out: Checked,
) -> None:
    """Keep a name that DeepSpeed ignores, or report one that it refuses."""
    remedy = _remedy(name, prefix, out)
    if remedy is None:
        out.unknown[str(name)] = value
        return
    path = f"{prefix}{name}"
    kind = kinds.get(prefix.partition(".")[0])
    where = f" of {kind}" if kind and ".params." in path else ""
    out.written.setdefault(path, written)
    out.mistakes.append(mistake(path, f"is no key{where}", value, remedy))


def _older(path: str, value: Any, written: str, out: Checked) -> None:
    """Give the keys of today the value of a key of an older version."""
    paths, meanings = OLDER[path]
    if not isinstance(value, bool | None):
        out.mistakes.append(mistake(path, "must be true or false", value, "write today's keys"))
    elif value is not None:
        for today in paths:
            if today not in out.given:
                out.given[today], out.written[today] = meanings[value], written


def _refuse(
    path: str, rule: str, got: Any, remedy: str, out: Checked, written: str | None = None
) -> None:
    out.values.spoil([path])
    out.written.setdefault(path, path if written is None else written)
    out.mistakes.append(mistake(path, rule, got, remedy))


def _unknown_type(section: Mapping[str, Any], path: str, out: Checked) -> None:
    """Report a type that is not known."""
    out.values.spoil([f"{path}.params"])
    given = section.get("type")
    known = OPTIMIZERS if path == "optimizer" else SCHEDULERS
    remedy = f"use {', '.join(known[:-1])} or {known[-1]}"
    if isinstance(given, str):
        near = nearest(given.lower(), TYPES[path])
        instead = {old.lower(): new for old, new in REFUSED_OPTIMIZERS.items()}.get(given.lower())
        if instead is not None:
            remedy = f"zfun has no {given}; {instead} is the nearest"
        elif near is not None:
            remedy = f"did you mean {TYPES[path][near]!r}?"
    rule = f"names a{'n optimizer' if path == 'optimizer' else ' schedule'} of zfun"
    _refuse(f"{path}.type", rule, given, remedy, out)


def _remedy(name: Any, prefix: str, out: Checked) -> str | None:
    """Return the remedy for a key that is not known; ``None`` if DeepSpeed ignores the key."""
    path, name = f"{prefix}{name}", str(name)
    if "." in name:
        return "write an object in an object, not a path" if prefix else None
    known = {
        one[len(prefix) :].split(".")[0] for one in (*out.keys, *ALIASES) if one.startswith(prefix)
    }
    near = nearest(name, known - {name}, 0.6 if prefix else _LIKE)
    if near is not None:
        return f"did you mean {near!r}?"
    elsewhere = [key for key in KEYS if key.path.rpartition(".")[2] == name]
    types = next((key.only for key in elsewhere if key.path == path), None)
    if types is not None:
        return f"{' and '.join(types)} take it"
    if elsewhere:
        return f"it belongs into {elsewhere[0].path.rpartition('.')[0] or 'the top level'}"
    return "remove it, or look it up in the table of keys" if prefix else None


def _value(
    key: Key, auto: AutoValues, late: Collection[str], has_optimizer: bool, out: Checked
) -> None:
    """Find the value of a key: given, filled, or DeepSpeed's default."""
    path, values = key.path, out.values
    if values.has_mistake(path):
        return
    filled = None if key.fill is None else _filled(key, auto)
    given = out.given.get(path)
    is_auto = isinstance(given, str) and given == "auto"
    values.found[path] = key.default
    if path in out.given and not is_auto:
        wrong = _wrong(key, given)
        if wrong is not None:
            _refuse(path, *wrong, out)
            return
        values.found[path] = found = key.form.read(given)
        is_own = has_optimizer and path.startswith(("optimizer.", "scheduler."))
        if filled and key.fill and key.fill.must_match and not is_own and found != filled[0]:
            rule = f"equals the value of the run, {filled[0]} ({filled[1]})"
            _refuse(path, rule, given, 'write "auto", or pass the same value', out)
    elif filled is not None and key.fill is not None and (is_auto or key.fill.when_absent):
        values.found[path], values.sources[path] = filled
    elif is_auto and key.fill is None:
        values.sources[path] = "auto has no rule here; DeepSpeed's default"
    elif key.fill is not None and (is_auto or key.fill.when_absent):
        missing = [field for field in key.fill.fields if getattr(auto, field) is None]
        is_needed = key.verdict == "mapped" and _is_read(path, out)
        if is_needed and set(missing) & set(late):
            out.late[path] = tuple(missing)
            values.spoil([path])
        elif is_auto and is_needed and not key.fill.may_miss:
            fields = " and ".join(f"{field}=" for field in missing)
            rule = f'"auto" is {key.fill.words}'
            _refuse(path, rule, "auto", f"pass {fields}, or write a value", out)


def _wrong(key: Key, given: Any) -> tuple[str, Any, str] | None:
    """Return the rule, the value and the remedy of a mistake."""
    if not key.form.kind.accepts(given):
        example = key.form.kind.example.replace("'", '"')
        return (
            f"must be {key.form.kind}",
            given,
            f'write "{key.path.rpartition(".")[2]}": {example}',
        )
    is_section = key.form is SECTION
    is_default = is_off(given) if is_section else key.form.read(given) == key.default
    if key.verdict != "refused" or is_default:
        return None
    default = str(key.default).lower() if isinstance(key.default, bool) else key.default
    return "is not in zfun" if is_section else f"must be {default}", given, key.why


def _filled(key: Key, auto: AutoValues) -> tuple[Any, str] | None:
    """Return the value and the rule, if the caller knows the fields of the rule."""
    assert key.fill is not None
    known = {field: getattr(auto, field) for field in key.fill.fields}
    if any(value is None for value in known.values()):
        return None
    words = key.fill.words
    source = ", ".join(f"{field}={value}" for field, value in known.items())
    rule = f" by {words}" if [words] != list(known) else ""
    return key.fill.rule(*known.values()), f"from {source}{rule}" if source else f"always {words}"


def _is_read(path: str, out: Checked) -> bool:
    """Whether the stage reads a key of stage 3 at all; DeepSpeed ignores "auto" elsewhere."""
    return not path.startswith(f"{_Z}.stage3_") or out.given.get(f"{_Z}.stage", 0) == 3


# The older names of the pass, for adapters that read the values of single keys.


def walk(config: Mapping[str, Any]) -> Checked:
    """Read every key of a configuration; ``"auto"`` waits for :func:`values_of`."""
    return checked(config, late=[field.name for field in fields(AutoValues)])
