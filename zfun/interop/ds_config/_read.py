"""Reading a configuration: a dict, a file with comments, or base64; no key stands twice."""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zfun.errors import OptionError
from zfun.interop.ds_config._mistakes import Mistake, error_of
from zfun.interop.ds_config.table import KEYS
from zfun.interop.ds_config.table._zero import ALIASES
from zfun.options import shown

# Strings first, so that a "//" in a path is no comment.
_STRING = r'"(?:\\.|[^"\\\n])*"'
_COMMENT = re.compile(rf"{_STRING}|/\*.*?\*/|//[^\n]*|#[^\n]*", re.DOTALL)
_LAST_COMMA = re.compile(rf"{_STRING}|,(?=\s*[}}\]])")


def is_config(value: Any) -> bool:
    """Whether a value is a configuration, and no dict of options of ``zf.zero``.

    A configuration is a path, base64, or a dict with a key of the top level and without ``stage``.

    Example:
        >>> is_config({"train_batch_size": 8}), is_config({"stage": 3})
        (True, False)
    """
    if not isinstance(value, Mapping):
        return isinstance(value, (str, Path))
    known = (path.partition(".")[0] for path in (*(key.path for key in KEYS), *ALIASES))
    return "stage" not in value and any(name in value for name in known)


def read(config: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    """Return the keys of a configuration, and its name in messages.

    A file may have comments, as DeepSpeed's files have, and commas before a closing bracket; with
    the package ``hjson`` also keys and strings without quotes.

    Raises:
        OptionError: the file cannot be read.
        ConfigError: the file is not JSON, or a key stands twice.
    """
    if isinstance(config, Mapping):
        return config, "the configuration"
    text, name = _text(config)
    twice: list[Mistake] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for key, value in items:
            if key in section:
                got, rule = f"{section[key]!r} and {value!r}", "a key stands once in its section"
                twice.append(Mistake(key, rule, got, "remove one"))
            section[key] = value
        return section

    try:
        keys = json.loads(_without_comments(text), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        twice.clear()
        keys = _hjson(text, pairs, error, name)
    if twice:
        raise error_of(twice, name)
    if not isinstance(keys, Mapping):
        found = Mistake("the file", "the file holds an object", type(keys).__name__, "write {...}")
        raise error_of([found], name)
    return keys, name


def _text(config: str | Path) -> tuple[str, str]:
    """Return the text of a file or of base64, and its name."""
    try:
        return Path(config).read_text(encoding="utf-8"), str(config)
    except (OSError, ValueError) as error:
        try:
            text = base64.urlsafe_b64decode(config).decode() if isinstance(config, str) else ""
        except ValueError:
            text = ""
        # Base64 of an object; the name of a missing file may be base64 by chance.
        if text.lstrip().startswith("{"):
            return text, "the configuration in base64"
        raise OptionError(
            "a configuration is a dict, the path of a JSON file, or its text in base64; got "
            f"{shown(str(config))}, which cannot be read ({error}); pass the path of a file"
        ) from error


def _hjson(text: str, pairs: Callable[[Any], Any], error: Exception, name: str) -> Any:
    """Read a file that is not JSON with the package hjson, if it is installed."""
    remedy = "write keys and strings in double quotes"
    try:
        return importlib.import_module("hjson").loads(text, object_pairs_hook=pairs)
    except ImportError:
        remedy += ", or install the package hjson"
    except (ValueError, RecursionError):
        pass
    place = f"line {error.lineno}" if isinstance(error, json.JSONDecodeError) else "the file"
    raise error_of([Mistake(place, "the file is JSON", str(error), remedy)], name) from error


def _without_comments(text: str) -> str:
    """Replace comments by blanks, so that the lines of messages stay right."""

    def blank(found: re.Match[str]) -> str:
        return found[0] if found[0].startswith('"') else re.sub(r"[^\n]", " ", found[0])

    return _LAST_COMMA.sub(blank, _COMMENT.sub(blank, text))
