"""Configurations as a caller gives them: a dict, a file or base64, and the values of a run."""

from __future__ import annotations

import base64
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from zfun.errors import OptionError
from zfun.interop.ds_config._mistakes import Mistake, error_of, nearest
from zfun.interop.ds_config.table import KEYS
from zfun.interop.ds_config.table._keys import BETAS, DTYPE_NAME
from zfun.interop.ds_config.table._zero import ALIASES
from zfun.options import ITERABLE, integer, number, one_of, shown, takes

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


_COUNTS = ("world_size", "train_batch_size", "micro_batch_size", "num_micro_batches", "hidden_size")
_NUMBERS = ("max_grad_norm", "learning_rate", "eps", "weight_decay")


@takes(
    **dict.fromkeys((*_COUNTS, "num_steps"), integer(1) | None),
    **dict.fromkeys(_NUMBERS, number(0) | None),
    num_warmup=integer(0) | None,
    betas=BETAS.kind | None,
    dtype=one_of(torch.float32, torch.bfloat16, torch.float16, example="torch.bfloat16") | None,
)
@dataclass(frozen=True, slots=True)
class AutoValues:
    """The values of a run that fill ``"auto"`` in a configuration; ``None`` is not known.

    A value that is known must also equal the number that the configuration has in its place.

    Attributes:
        world_size: ranks that each take a batch of their own; those of an expert axis do.
        train_batch_size: samples of one step, over all ranks.
        micro_batch_size: samples that a rank computes at a time.
        num_micro_batches: micro-batches of one step of a rank (gradient accumulation).
        max_grad_norm: the bound of the gradient's norm; 0 for none.
        dtype: ``torch.float32``, ``torch.bfloat16`` or ``torch.float16``.
        hidden_size: of the model; the largest one, if there are several.
        learning_rate: of the optimizer, and the peak of a warm-up.
        betas: decays of Adam's moments.
        eps: of Adam.
        weight_decay: of the optimizer.
        num_warmup: steps of the warm-up.
        num_steps: all steps of the run.

    Example:
        >>> AutoValues(hidden_size=768, learning_rate=3e-4).world_size is None
        True
    """

    world_size: int | None = None
    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    num_micro_batches: int | None = None
    max_grad_norm: float | None = None
    dtype: torch.dtype | None = None
    hidden_size: int | None = None
    learning_rate: float | None = None
    betas: Sequence[float] | None = None
    eps: float | None = None
    weight_decay: float | None = None
    num_warmup: int | None = None
    num_steps: int | None = None


@takes(settings=ITERABLE)
def parse_auto_values(settings: Iterable[str]) -> AutoValues:
    """Read values of a run from text, as a command line has them.

    Args:
        settings: such as ``"hidden_size=768"``, ``"dtype=bf16"`` and ``"betas=[0.9, 0.95]"``.

    Returns:
        The values.

    Raises:
        OptionError: a name does not exist, or a value is of another kind.

    Example:
        >>> parse_auto_values(["world_size=8", "dtype=bf16"]).dtype
        torch.bfloat16
    """
    names = [field.name for field in fields(AutoValues)]
    found: dict[str, Any] = {}
    for setting in settings:
        name, _, text = setting.partition("=") if isinstance(setting, str) else ("", "", "")
        if name not in names:
            near = nearest(name, names)
            remedy = f"did you mean {near!r}?" if near else f"it is one of {', '.join(names)}"
            raise OptionError(f"a value of a run is NAME=VALUE; got {setting!r}; {remedy}")
        if name == "dtype" and DTYPE_NAME.kind.accepts(text):
            found[name] = DTYPE_NAME.read(text)
            continue
        try:
            found[name] = json.loads(text)
        except ValueError:
            found[name] = text
    return AutoValues(**found)
