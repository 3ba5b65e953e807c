"""The walk through a configuration: which keys it gives, and which mistakes single keys have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from zfun.interop.ds_config._mistakes import Mistake, mistake, nearest
from zfun.interop.ds_config.table import KEYS, SECTIONS, keys_of
from zfun.interop.ds_config.table._keys import SECTION, Key, is_off
from zfun.interop.ds_config.table._optim import (
    OPTIMIZERS,
    REFUSED_OPTIMIZERS,
    SCHEDULERS,
    TORCH_OPTIMIZERS,
)
from zfun.interop.ds_config.table._zero import ALIASES

__all__ = ["Walked", "walk"]

_Z = "zero_optimization"
# Sections that may be null, because DeepSpeed's default of these sections is null.
_MAY_BE_NULL = {f"{_Z}.offload_param", f"{_Z}.offload_optimizer", f"{_Z}.zeropp_loco_param"}
# DeepSpeed's older names of the offload, by key: the paths and the values that they stand for.
_OLD_OFFLOAD: dict[str, tuple[str, ...]] = {
    "cpu_offload": (f"{_Z}.offload_optimizer.device",),
    "cpu_offload_param": (f"{_Z}.offload_param.device",),
    "cpu_offload_use_pin_memory": (
        f"{_Z}.offload_optimizer.pin_memory",
        f"{_Z}.offload_param.pin_memory",
    ),
}


class Walked(NamedTuple):
    """The keys of a configuration.

    Attributes:
        keys: the keys that a configuration with these types may have, by path.
        given: the values as written, by path; ``"auto"`` included.
        read: the values as used, by path; without ``"auto"`` and mistakes.
        bad: the paths, and beginnings of paths, whose value is a mistake.
        written: the paths as the configuration spells them, by path.
        extra: parameters for a class of ``torch.optim``.
        mistakes: of single keys.
    """

    keys: Mapping[str, Key]
    given: dict[str, Any]
    read: dict[str, Any]
    bad: set[str]
    written: dict[str, str]
    extra: dict[str, Any]
    mistakes: list[Mistake]


def walk(config: Mapping[str, Any]) -> Walked:
    """Sort the keys of a configuration into values and mistakes."""
    types = {name: _type_of(config, name) for name in ("optimizer", "scheduler")}
    keys = keys_of(types["optimizer"], types["scheduler"])
    out = Walked(keys, {}, {}, set(), {}, {}, [])
    _section(_plain(config, out), "", "", types, out)
    return out


def _type_of(config: Mapping[str, Any], section: str) -> str | None:
    """Return the type of the optimizer or scheduler in the table's spelling."""
    inner = config.get(section)
    name = inner.get("type") if isinstance(inner, Mapping) else None
    if not isinstance(name, str):
        return None
    known = (*OPTIMIZERS, *TORCH_OPTIMIZERS) if section == "optimizer" else SCHEDULERS
    return next((one for one in known if one.lower() == name.lower()), None)


def _plain(config: Mapping[str, Any], out: Walked) -> dict[str, Any]:
    """Rewrite DeepSpeed's older forms of ``zero_optimization``."""
    plain = dict(config)
    zero = plain.get(_Z)
    if isinstance(zero, bool):
        plain[_Z] = {"stage": int(zero)}
        out.written[f"{_Z}.stage"] = _Z
    elif isinstance(zero, Mapping):
        plain[_Z] = kept = dict(zero)
        for old, paths in _OLD_OFFLOAD.items():
            if old not in zero:
                continue
            value = kept.pop(old)
            if not isinstance(value, bool | None):
                out.mistakes.append(
                    mistake(
                        f"{_Z}.{old}", "must be true or false", value, "write offload_optimizer"
                    )
                )
                continue
            for path in paths:
                section, name = path.removeprefix(f"{_Z}.").split(".")
                inner = kept.get(section)
                if value is None or not (inner is None or isinstance(inner, Mapping)):
                    continue
                if name == "device" and value:
                    kept[section] = {"device": "cpu", **(inner or {})}
                elif name == "pin_memory" and inner is not None:
                    kept[section] = {"pin_memory": value, **inner}
                if name not in (inner or {}):
                    out.written[path] = f"{_Z}.{old}"
    return plain


def _section(
    section: Mapping[Any, Any],
    prefix: str,
    shown: str,
    types: Mapping[str, str | None],
    out: Walked,
) -> None:
    """Sort the keys of a section; ``shown`` is the path of the section as written."""
    # Other spellings last, so that a key beside its other spelling wins; aio is one in
    # zero_optimization.
    for name in sorted(section, key=lambda name: f"{prefix}{name}" in {*ALIASES, _Z}):
        value, written = section[name], f"{shown}{name}"
        path = ALIASES.get(f"{prefix}{name}", f"{prefix}{name}")
        if path in SECTIONS and path not in out.keys:
            _inner(value, path, written, types, out)
        elif path in out.keys:
            if path not in out.given:
                out.written.setdefault(path, written)
                _leaf(out.keys[path], value, out)
        elif prefix == "optimizer.params." and types["optimizer"] in TORCH_OPTIMIZERS:
            out.extra[str(name)] = value
        else:
            out.written.setdefault(path, written)
            out.mistakes.append(_unknown(path, prefix, value, types, out))


def _inner(
    value: Any, path: str, written: str, types: Mapping[str, str | None], out: Walked
) -> None:
    if value is None and path in _MAY_BE_NULL:
        return
    if not isinstance(value, Mapping):
        out.bad.add(path)
        out.written.setdefault(path, written)
        name = path.rpartition(".")[2]
        out.mistakes.append(mistake(path, "must be an object", value, f'write "{name}": {{...}}'))
        return
    if path in types and types[path] is None:
        _check_type(value, path, out)
    _section(value, f"{path}.", f"{written}.", types, out)


def _check_type(section: Mapping[str, Any], path: str, out: Walked) -> None:
    """Report a type that is not known."""
    out.bad.update({f"{path}.type", f"{path}.params"})
    given = section.get("type")
    known = OPTIMIZERS if path == "optimizer" else SCHEDULERS
    remedy = f"use {', '.join(known[:-1])} or {known[-1]}"
    if isinstance(given, str):
        by_name = {name.lower(): name for name in (*known, *TORCH_OPTIMIZERS)}
        near = nearest(given.lower(), by_name)
        instead = {old.lower(): new for old, new in REFUSED_OPTIMIZERS.items()}.get(given.lower())
        if instead is not None:
            remedy = f"zfun has no {given}; {instead} is the nearest"
        elif near is not None:
            remedy = f"did you mean {by_name[near]!r}?"
    rule = f"names a{'n optimizer' if path == 'optimizer' else ' schedule'} of zfun"
    out.mistakes.append(mistake(f"{path}.type", rule, given, remedy))


def _leaf(key: Key, value: Any, out: Walked) -> None:
    out.given[key.path] = value
    if key.path in out.bad:
        return
    if isinstance(value, str) and value == "auto":
        return
    if not key.form.kind.accepts(value):
        out.bad.add(key.path)
        example = key.form.kind.example.replace("'", '"')
        out.mistakes.append(
            mistake(
                key.path,
                f"must be {key.form.kind}",
                value,
                f'write "{key.path.rpartition(".")[2]}": {example}',
            )
        )
        return
    read = key.form.read(value)
    is_default = is_off(read) if key.form is SECTION else read == key.default
    if key.verdict == "refused" and not is_default:
        out.bad.add(key.path)
        rule = "is not in zfun" if key.form is SECTION else f"must be {_json(key.default)}"
        out.mistakes.append(mistake(key.path, rule, value, key.why))
        return
    out.read[key.path] = read


def _json(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _unknown(
    path: str, prefix: str, value: Any, types: Mapping[str, str | None], out: Walked
) -> Mistake:
    name = path.rpartition(".")[2]
    level = {
        known[len(prefix) :].split(".")[0]
        for known in (*out.keys, *ALIASES)
        if known.startswith(prefix)
    }
    near = nearest(name, level)
    elsewhere = [key.path for key in KEYS if key.path.rpartition(".")[2] == name]
    if near is not None and near != name:
        remedy = f"did you mean {near!r}?"
    elif elsewhere:
        others = [key for key in KEYS if key.path == path]
        remedy = (
            f"{' and '.join(others[0].only)} take it"
            if others
            else f"it belongs into {elsewhere[0].rpartition('.')[0] or 'the top level'}"
        )
    else:
        remedy = "remove it, or look it up in the table of keys"
    kind = types.get(prefix.partition(".")[0])
    where = f" of {kind}" if kind and ".params." in path else ""
    return mistake(path, f"is no key{where}", value, remedy)
