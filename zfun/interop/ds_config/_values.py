"""One pass over a configuration: the value of every key, and all mistakes of single keys."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from zfun.interop.ds_config._mistakes import Mistake, mistake, nearest
from zfun.interop.ds_config._read import AutoValues
from zfun.interop.ds_config.table import KEYS, SECTIONS, _optim, keys_of, kind_of
from zfun.interop.ds_config.table._keys import SECTION, Key, is_off
from zfun.interop.ds_config.table._zero import ALIASES, OLDER

_Z = "zero_optimization"
# Sections that may be null, because DeepSpeed's default of these sections is null.
_MAY_BE_NULL = {
    "torch_autocast",
    *(f"{_Z}.{name}" for name in ("offload_param", "offload_optimizer", "zeropp_loco_param")),
}
# The sections of which DeepSpeed reads single keys, and ignores the others.
_IGNORING = ("", "optimizer.", "scheduler.")
# A key there that is less like a known one is not a typing error.
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


class Checked:
    """A configuration, checked key by key.

    Args:
        config: the configuration.
        auto: the values of the run, which fill ``"auto"``.
        late: the fields of :class:`AutoValues` that are not known yet, and so no mistake.
        has_optimizer: whether an optimizer of the caller takes the place of the configuration's, so
            that numbers of the run may differ from numbers of the optimizer and the scheduler.

    Attributes:
        keys: the keys that a configuration with these types may have, by path.
        given: the values as written, by path; ``"auto"`` included.
        values: the value of every key.
        written: the paths as the configuration spells them, by path.
        extra: parameters for a class of ``torch.optim``.
        unknown: values by paths that DeepSpeed does not know, and ignores.
        late: by path, the fields of :class:`AutoValues` that ``"auto"`` waits for.
        mistakes: of single keys.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        auto: AutoValues | None = None,
        *,
        late: Collection[str] = (),
        has_optimizer: bool = False,
    ) -> None:
        self.values = Values()
        self.given: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        self.extra: dict[str, Any] = {}
        self.unknown: dict[str, Any] = {}
        self.late: dict[str, tuple[str, ...]] = {}
        self.mistakes: list[Mistake] = []
        parts = {name: config.get(name) for name in _optim.TYPES}
        self._kinds = {
            name: kind_of(name, part.get("type")) if isinstance(part, Mapping) else None
            for name, part in parts.items()
        }
        self.keys = keys_of(self._kinds["optimizer"], self._kinds["scheduler"])
        self._auto = AutoValues() if auto is None else auto
        self._pending, self._has_optimizer = late, has_optimizer
        self._section(config, "", "")
        for key in self.keys.values():
            if not self.values.has_mistake(key.path):
                self._value(key)

    def kind(self, section: str) -> str | None:
        """Return the type of the optimizer or scheduler in the table's spelling."""
        return kind_of(section, self.given.get(f"{section}.type"))

    def options(self, section: str) -> dict[str, Any]:
        """Return the values of the mapped parameters of a section by name."""
        start = f"{section}.params."
        return {
            path[len(start) :]: self.values[path]
            for path, key in self.keys.items()
            if path.startswith(start) and key.verdict == "mapped"
        }

    def _section(self, section: Mapping[Any, Any], prefix: str, shown: str) -> None:
        """Sort the keys of a section; ``shown`` is the path of the section as written."""
        # Other spellings last, so that a key beside its other spelling wins; aio is one in
        # zero_optimization.
        for name in sorted(section, key=lambda name: f"{prefix}{name}" in {*ALIASES, *OLDER}):
            value, written = section[name], f"{shown}{name}"
            path = ALIASES.get(f"{prefix}{name}", f"{prefix}{name}")
            if not isinstance(name, str):
                remedy = "write the name of the key"
                self.mistakes.append(mistake(written, "a key is a string", name, remedy))
            elif "." in name:
                # TRL writes paths as names of the top level, which DeepSpeed ignores.
                self._no_key(name, value, prefix, written)
            elif path in OLDER and (path not in SECTIONS or isinstance(value, bool)):
                self._older(path, value, written)
            elif path in SECTIONS and isinstance(value, Mapping):
                if path in self._kinds and self._kinds[path] is None:
                    self._unknown_type(value.get("type"), path)
                self._section(value, f"{path}.", f"{written}.")
            elif path in SECTIONS:
                if value is not None or path not in _MAY_BE_NULL:
                    remedy = f'write "{path.rpartition(".")[2]}": {{...}}'
                    self._refuse(path, "must be an object", value, remedy, written)
            elif path in self.keys:
                if path not in self.given:
                    self.written.setdefault(path, written)
                    self.given[path] = value
            elif (
                prefix == "optimizer.params."
                and self._kinds["optimizer"] in _optim.TORCH_OPTIMIZERS
            ):
                self.extra[str(name)] = value
            else:
                self._no_key(name, value, prefix, written)

    def _no_key(self, name: str, value: Any, prefix: str, written: str) -> None:
        """Keep a name that DeepSpeed ignores, or report one that it refuses."""
        path, remedy = f"{prefix}{name}", self._remedy(name, prefix)
        if remedy is None:
            self.unknown[path] = value
            return
        kind = self._kinds.get(prefix.partition(".")[0])
        where = f" of {kind}" if kind and ".params." in path else ""
        self.written.setdefault(path, written)
        self.mistakes.append(mistake(path, f"is no key{where}", value, remedy))

    def _remedy(self, name: str, prefix: str) -> str | None:
        """Return the remedy for a key that is not known; ``None`` if DeepSpeed ignores the key."""
        if "." in name:
            return "write an object in an object, not a path" if prefix else None
        paths = [path for path in (*self.keys, *ALIASES) if path.startswith(prefix)]
        names = {path[len(prefix) :].split(".")[0] for path in paths}
        is_ignored = prefix in _IGNORING
        near = nearest(name, names - {name}, _LIKE if is_ignored else 0.6)
        if near is not None:
            return f"did you mean {near!r}?"
        elsewhere = [key for key in KEYS if key.path.rpartition(".")[2] == name]
        types = next((key.only for key in elsewhere if key.path == f"{prefix}{name}"), None)
        if types is not None:
            return f"{' and '.join(types)} take it"
        if elsewhere and not (prefix and is_ignored):
            return f"it belongs into {elsewhere[0].path.rpartition('.')[0] or 'the top level'}"
        return None if is_ignored else "remove it, or look it up in the table of keys"

    def _older(self, path: str, value: Any, written: str) -> None:
        """Give the keys of today the value of a key of an older version."""
        paths, meanings = OLDER[path]
        if not isinstance(value, bool | None):
            remedy = "write today's keys"
            self.mistakes.append(mistake(path, "must be true or false", value, remedy))
        elif value is not None:
            for today in paths:
                if today not in self.given:
                    self.given[today], self.written[today] = meanings[value], written

    def _refuse(
        self, path: str, rule: str, got: Any, remedy: str, written: str | None = None
    ) -> None:
        self.values.bad.update([path])
        self.written.setdefault(path, path if written is None else written)
        self.mistakes.append(mistake(path, rule, got, remedy))

    def _unknown_type(self, given: Any, path: str) -> None:
        """Report a type that is not known."""
        self.values.bad.update([f"{path}.params"])
        known = _optim.OPTIMIZERS if path == "optimizer" else _optim.SCHEDULERS
        remedy = f"use {', '.join(known[:-1])} or {known[-1]}"
        if isinstance(given, str):
            near = nearest(given.lower(), _optim.TYPES[path])
            refused = {old.lower(): new for old, new in _optim.REFUSED_OPTIMIZERS.items()}
            if (instead := refused.get(given.lower())) is not None:
                remedy = f"zfun has no {given}; {instead} is the nearest"
            elif near is not None:
                remedy = f"did you mean {_optim.TYPES[path][near]!r}?"
        rule = f"names a{'n optimizer' if path == 'optimizer' else ' schedule'} of zfun"
        self._refuse(f"{path}.type", rule, given, remedy)

    def _value(self, key: Key) -> None:
        """Find the value of a key: given, filled, or DeepSpeed's default."""
        path, values, fill = key.path, self.values, key.fill
        filled = None if fill is None else _filled(key, self._auto)
        given = self.given.get(path)
        is_auto = isinstance(given, str) and given == "auto"
        values.found[path] = key.default
        if path in self.given and not is_auto:
            if (wrong := _wrong(key, given)) is not None:
                self._refuse(path, *wrong)
                return
            values.found[path] = value = key.form.read(given)
            is_own = self._has_optimizer and path.startswith(("optimizer.", "scheduler."))
            if filled and fill and fill.must_match and not is_own and value != filled[0]:
                rule = f"equals the value of the run, {filled[0]} ({filled[1]})"
                self._refuse(path, rule, given, 'write "auto", or pass the same value')
        elif is_auto and fill is None:
            values.sources[path] = "auto has no rule here; DeepSpeed's default"
        elif fill is None or not (is_auto or fill.when_absent):
            return
        elif filled is not None:
            values.found[path], values.sources[path] = filled
        elif key.verdict == "mapped" and self._is_read(path):
            missing = [name for name in fill.fields if getattr(self._auto, name) is None]
            if set(missing) & set(self._pending):
                self.late[path] = tuple(missing)
                values.bad.update([path])
            elif is_auto and not fill.may_miss:
                names = " and ".join(f"{name}=" for name in missing)
                remedy = f"pass {names}, or write a value"
                self._refuse(path, f'"auto" is {fill.words}', "auto", remedy)

    def _is_read(self, path: str) -> bool:
        """Whether the stage reads a key of stage 3; DeepSpeed ignores "auto" elsewhere."""
        return not path.startswith(f"{_Z}.stage3_") or self.given.get(f"{_Z}.stage", 0) == 3


def _wrong(key: Key, given: Any) -> tuple[str, Any, str] | None:
    """Return the rule, the value and the remedy of a mistake."""
    if not key.form.kind.accepts(given):
        example = key.form.kind.example.replace("'", '"')
        remedy = f'write "{key.path.rpartition(".")[2]}": {example}'
        return f"must be {key.form.kind}", given, remedy
    is_section = key.form is SECTION
    is_default = is_off(given) if is_section else key.form.read(given) == key.default
    if key.verdict != "refused" or is_default:
        return None
    default = str(key.default).lower() if isinstance(key.default, bool) else key.default
    return "is not in zfun" if is_section else f"must be {default}", given, key.why


def _filled(key: Key, auto: AutoValues) -> tuple[Any, str] | None:
    """Return the value and the rule, if the caller knows the fields of the rule."""
    assert key.fill is not None
    known = {name: getattr(auto, name) for name in key.fill.fields}
    if any(value is None for value in known.values()):
        return None
    words = key.fill.words
    source = ", ".join(f"{name}={value}" for name, value in known.items())
    rule = f" by {words}" if [words] != list(known) else ""
    return key.fill.rule(*known.values()), f"from {source}{rule}" if source else f"always {words}"
