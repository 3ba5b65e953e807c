"""Reading a file, with comments and without keys that stand twice."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zfun.errors import OptionError
from zfun.interop.ds_config._mistakes import Mistake, error_of

__all__ = ["read"]

# Strings first, so that a "//" in a path is no comment.
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|/\*.*?\*/|//[^\n]*|#[^\n]*", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def read(config: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    """Return the keys of a configuration, and its name in messages.

    Args:
        config: the keys, or the path of a JSON file. The file may have comments, as DeepSpeed's
            files have, and commas before a closing bracket.

    Returns:
        The keys and the name.

    Raises:
        OptionError: the file cannot be read.
        ConfigError: the file is not JSON, or a key stands twice.
    """
    if isinstance(config, Mapping):
        return config, "the configuration"
    path = Path(config)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(
            f"a configuration is a dict, or the path of a JSON file; got {str(path)!r}, which "
            f"cannot be read ({error}); pass the path of a file"
        ) from error
    twice: list[Mistake] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                twice.append(
                    Mistake(
                        key,
                        "a key stands once in its section",
                        f"{found[key]!r} and {value!r}",
                        "remove one",
                    )
                )
            found[key] = value
        return found

    try:
        keys = json.loads(_without_comments(text), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "the file"
        found = Mistake(
            place, "the file is JSON", str(error), "write keys and strings in double quotes"
        )
        raise error_of([found], str(path)) from error
    if twice:
        raise error_of(twice, str(path))
    if not isinstance(keys, Mapping):
        found = Mistake("the file", "the file holds an object", type(keys).__name__, "write {...}")
        raise error_of([found], str(path))
    return keys, str(path)


def _without_comments(text: str) -> str:
    """Replace comments by blanks, so that the lines of messages stay right."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))
