"""Write the table of keys into the documentation: ``python tools/ds_config_table.py``."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from zfun.interop.ds_config import KEYS, Key

PAGE = Path(__file__).parents[1] / "docs" / "migrate" / "deepspeed-config.md"
START, END = "<!-- table of keys -->\n", "<!-- end of the table -->\n"


def with_table(page: str) -> str:
    """Return the page with the table of today."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def table() -> str:
    """Return one table for each section of a configuration."""
    parts = []
    for section, keys in groupby(sorted(KEYS, key=_section), _section):
        rows = "".join(f"{_row(key, section)}\n" for key in keys)
        title = f"`{section}`" if section else "The top level"
        parts.append(f"### {title}\n\n| key | default | becomes |\n|---|---|---|\n{rows}")
    return "\n".join(parts)


def _section(key: Key) -> str:
    return key.path.rpartition(".")[0]


def _row(key: Key, section: str) -> str:
    name = key.path[len(section) :].lstrip(".")
    only = f" ({', '.join(key.only)})" if key.only else ""
    notes = [f"`{key.becomes}`" if key.becomes else key.verdict, key.why]
    if key.fill is not None:
        notes.append(f"`auto` is {key.fill.words}")
    text = "; ".join(note for note in notes if note).replace("|", "\\|")
    return f"| `{name}`{only} | {_default(key.default)} | {text} |"


def _default(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, torch.dtype):
        return f"`{value}`".replace("torch.", "")
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
