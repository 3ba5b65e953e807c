"""The account of a configuration: what became of each key, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from zfun.interop.ds_config._values import Checked, Values
from zfun.interop.ds_config.table._keys import Key
from zfun.tables import html_table

_Z = "zero_optimization"
_HEADER = ("key", "value", "verdict", "becomes", "why")
# Keys whose defaults matter although the configuration leaves them out.
_NOTABLE = ("gradient_clipping", "communication_data_type", "gradient_accumulation_steps")
_NOTABLE_AT_3 = (
    f"{_Z}.stage3_prefetch_bucket_size",
    f"{_Z}.stage3_param_persistence_threshold",
    f"{_Z}.stage3_max_live_parameters",
    f"{_Z}.stage3_max_reuse_distance",
)


class Note(NamedTuple):
    """A better description of a key than the one in the table."""

    becomes: str
    why: str = ""


Notes: TypeAlias = dict[str, Note]


class Entry(NamedTuple):
    """The fate of one key.

    Attributes:
        path: the key.
        given: the value as written; ``None`` for a default.
        verdict: ``"mapped"``, ``"ignored"``, ``"off"`` for a feature that zfun does not have and
            that is switched off, ``"default"`` for a key that is left out, or ``"late"`` for a key
            that waits for a value of the run.
        becomes: the option with its value.
        why: the reason.
    """

    path: str
    given: Any
    verdict: str
    becomes: str
    why: str


def entries_of(checked: Checked, notes: Notes) -> tuple[Entry, ...]:
    """Return the account of a configuration without mistakes, in the order of the table."""
    values = checked.values
    notable = _NOTABLE + (_NOTABLE_AT_3 if values[f"{_Z}.stage"] == 3 else ())
    found = []
    for path, key in checked.keys.items():
        if path in checked.late:
            fields = " and ".join(f"{field}=" for field in checked.late[path])
            why = f"waits for {fields}"
            found.append(Entry(path, checked.given.get(path), "late", key.becomes, why))
        elif path in checked.given:
            entry = _given(key, checked.given[path], values, notes)
            written = checked.written.get(path, path)
            if written != path:
                entry = entry._replace(path=written, why=_joined(f"stands for {path}", entry.why))
            found.append(entry)
        elif path in notable and (path in notes or path in _NOTABLE_AT_3):
            note = notes.get(path) or Note(_with_value(key.becomes, values[path]))
            source = values.sources.get(path, "DeepSpeed's default")
            found.append(Entry(path, None, "default", note.becomes, note.why or source))
    for name, value in checked.extra.items():
        path = f"optimizer.params.{name}"
        found.append(Entry(path, value, "mapped", f"zf.optim.from_torch({name}={value})", ""))
    for path, value in checked.unknown.items():
        section, _, name = path.rpartition(".")
        is_param = f"{section}.params.{name}" in checked.keys
        why = "is no key, and DeepSpeed ignores it too"
        why = "DeepSpeed reads this key inside of params only" if is_param else why
        found.append(Entry(path, value, "ignored", "", why))
    return tuple(found)


def _given(key: Key, given: Any, values: Values, notes: Notes) -> Entry:
    if key.verdict == "refused":
        return Entry(key.path, given, "off", "", "is off")
    reason = key.why if key.verdict == "ignored" else _unused(key.path, values)
    if reason:
        return Entry(key.path, given, "ignored", "", reason)
    note = notes.get(key.path) or Note(_with_value(key.becomes, values[key.path]))
    source = values.sources.get(key.path, "")
    return Entry(key.path, given, "mapped", note.becomes, _joined(source, note.why or key.why))


def _joined(*parts: str) -> str:
    return "; ".join(dict.fromkeys(part for part in parts if part))


def _with_value(becomes: str, value: Any) -> str:
    """Write a value into an option: "zf.zero(stage)" and 3 become "zf.zero(stage=3)"."""
    if ": " in becomes and "(" not in becomes:
        return f"{becomes}={value}"
    if becomes.endswith("=)"):
        return f"{becomes[:-1]}{value})"
    if becomes.endswith(")") and becomes.count("(") == 1 and becomes[-2].isalpha():
        return f"{becomes[:-1]}={value})"
    return becomes


def _unused(path: str, values: Values) -> str:
    """Return why nothing reads a mapped key in this configuration."""
    section, _, name = path.rpartition(".")
    stage = values[f"{_Z}.stage"]
    offloads = [f"{_Z}.offload_param", f"{_Z}.offload_optimizer"]
    devices = {part: values[f"{part}.device"] for part in offloads}
    if section in ("fp16", "bf16", "torch_autocast", "elasticity") and name != "enabled":
        return "" if values[f"{section}.enabled"] else f"{section} is off"
    if name.startswith("stage3_") and stage != 3:
        return f"is for stage 3, and the stage is {stage}"
    if name == "allgather_bucket_size" and stage not in (1, 2):
        return f"is for stages 1 and 2, and the stage is {stage}"
    if section == "aio" and "nvme" not in devices.values():
        return "nothing is on a disk"
    if section in devices and name not in ("device", "pin_memory") and devices[section] != "nvme":
        return "nothing of this section is on a disk"
    if section == f"{_Z}.zeropp_loco_param" and not values[f"{_Z}.zero_quantized_gradients"]:
        return "gradients are not quantised"
    return ""


def _rows(entries: Sequence[Entry]) -> list[list[str]]:
    given = lambda entry: "" if entry.verdict == "default" else _short(entry.given)
    return [[one.path, given(one), one.verdict, one.becomes, one.why] for one in entries]


def _short(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else " ".join(str(value).split())
    return text if len(text) <= 30 else f"{text[:27]}..."


def text_of(entries: Sequence[Entry]) -> str:
    """Return the account as lines of a terminal."""
    rows = _rows(entries)
    widths = [max([len(row[column]) for row in rows], default=0) for column in range(3)]
    lines = []
    for row in rows:
        start = "  ".join(cell.ljust(width) for cell, width in zip(row[:3], widths, strict=True))
        why = f"# {row[4]}" if row[4] else ""
        lines.append("  ".join(part for part in (start, row[3], why) if part).rstrip())
    return "\n".join(lines)


def html_of(entries: Sequence[Entry]) -> str:
    """Return the account as a table of a notebook."""
    return html_table("configuration", _HEADER, _rows(entries))
