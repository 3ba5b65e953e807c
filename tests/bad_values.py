"""Call every public function with bad values, one argument at a time, and count the answers.

``python -m tests.bad_values`` prints the counts, and each argument that is not refused clearly.

=========  ====================================================================
answer     meaning
=========  ====================================================================
refused    an error of zfun, with rule and value
caller     the function that the caller passed raised by itself
accepted   the value is of the documented type, or changed nothing
raw        another error, from inside of zfun or torch
wrong      a value that means nothing was accepted, and changed the result
hang       no answer within :data:`TIMEOUT_S`
=========  ====================================================================
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import inspect
import math
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

import zfun as zf
from tests import bad_values_calls as calls
from zfun import flat, tree
from zfun.collectives import Group

MODULES = (
    "zfun",
    "zfun.tree",
    "zfun.optim",
    "zfun.policies",
    "zfun.stores",
    "zfun.sources",
    "zfun.collectives",
    "zfun.compression",
    "zfun.transforms",
    "zfun.parallel",
    "zfun.parallel.schedules",
    "zfun.checkpoint",
    "zfun.planner",
    "zfun.planner.formulae",
    "zfun.testing",
    "zfun.flat",
    "zfun.layout",
    "zfun.reductions",
    "zfun.evaluation",
    "zfun.interop",
    "zfun.interop.dtensor",
    "zfun.interop.loggers",
)
# Processes that a call starts import torch; on a busy machine that takes a while.
TIMEOUT_S = 60.0


def _closed_group() -> Group:
    """A group whose ranks have ended."""
    group = zf.simulate(2, lambda group: group)[0]
    group.close()
    return group


BAD: dict[str, Any] = {
    "None": None,
    "text": "nope",
    "empty text": "",
    "dict": {"a": 1},
    "empty list": [],
    "list of None": [None],
    "zero": 0,
    "negative": -1,
    "negative half": -0.5,
    "half": 0.5,
    "NaN": math.nan,
    "infinity": math.inf,
    "10**30": 10**30,
    "True": True,
    "object": object(),
    "function": lambda: None,
    "class": int,
    "wrong tensor": torch.tensor([1, 2, 3]),
    "complex tensor": torch.ones(2, 2, dtype=torch.complex64),
    "closed group": _closed_group(),
}
# The bad functions, ``lambda: None`` and ``int``, raise when they are called.
_CALLED = re.compile(
    r"(<lambda>|int)\(\) (takes|missing|argument|can't|got)"
    r"|only (one element|integer) tensors|object cannot be interpreted as an integer"
)
NUMBERS = ("zero", "negative", "negative half", "half", "NaN", "infinity", "10**30")


class Answer(NamedTuple):
    """The answer to one bad value."""

    kind: str
    function: str
    argument: str
    value: str
    text: str


class Hang(BaseException):
    """The call took too long."""


def public_names(name: str) -> dict[str, Any]:
    """The public values of a module: those in ``__all__``, or else those defined in it."""
    module = importlib.import_module(name)
    own = [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and f"{getattr(value, '__module__', '')}.".startswith(f"{name}.")
    ]
    found = {key: getattr(module, key) for key in getattr(module, "__all__", own)}
    return {key: value for key, value in found.items() if not inspect.ismodule(value)}


def public_functions() -> dict[str, Callable[..., Any]]:
    """Every public function, and the classes of options, by the shortest name."""
    found: dict[str, Callable[..., Any]] = {}
    seen: set[int] = set()
    for name in MODULES:
        for key, value in public_names(name).items():
            if id(value) in seen:
                continue
            seen.add(id(value))
            if inspect.isfunction(value) or value in calls.CLASSES:
                found[f"{name}.{key}".removeprefix("zfun.")] = value
    return found


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, TIMEOUT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _digest(value: Any) -> str:
    """A text that is equal for equal results."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        return f"{value.dtype}{tuple(value.shape)}{value.device}" + (
            "" if value.is_meta else str(value.tolist())
        )
    if isinstance(value, flat.Flat):
        return f"{value.placement}{[_digest(b) for b in value.buffers]}"
    leaves = tree.leaves(value, is_leaf=lambda x: isinstance(x, flat.Flat))
    if len(leaves) != 1 or leaves[0] is not value:
        return f"[{', '.join(map(_digest, leaves))}]"
    return re.sub(r"0x[0-9a-f]+", "", repr(value))


def _call(case: calls.Case, fn: Callable[..., Any], replaced: dict[str, Any]) -> str:
    """Make one call, and use its result."""
    signature = inspect.signature(fn)

    def body(group: Group) -> str:
        kwargs = {**case.arguments(group), **replaced}
        args: list[Any] = []
        for name, parameter in signature.parameters.items():
            if parameter.kind is parameter.POSITIONAL_ONLY and name in kwargs:
                args.append(kwargs.pop(name))
            if parameter.kind is parameter.VAR_POSITIONAL:
                # Arguments in front of a variable number can be given by position only.
                before = list(signature.parameters)[: list(signature.parameters).index(name)]
                args = [kwargs.pop(other) for other in before]
                rest = kwargs.pop(name, ())
                args += [rest] if name in replaced else rest
        return _digest(case.use(group, fn(*args, **kwargs)))

    if not case.ranks:
        return body(zf.collectives.single_group())
    return str(zf.simulate(case.ranks, body))


def _is_callers(error: BaseException) -> bool:
    """Whether the innermost frame outside of torch is a function of the calls themselves."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "site-packages" not in frame.filename and "/lib/python" not in frame.filename
    ]
    losses = [frame for frame in frames if frame.name in ("loss", "mean_loss")]
    return bool(losses) or frames[-1].filename.endswith("bad_values_calls.py")


def _is_meant(annotation: str, label: str, key: str) -> bool:
    """Whether the signature says that a value of this type may be passed."""
    if label in calls.MEANT.get(key, ()):
        return True
    words = set(re.findall(r"[A-Za-z_.]+", annotation))
    if words & {"Any", "object", "Tree", "tree.Tree", "Params", "State", "_State", "_T"}:
        return True
    if label in NUMBERS:
        return False
    return {
        "None": "None" in words,
        "text": "str" in words,
        "empty text": "str" in words,
        "dict": bool(words & {"Mapping", "dict"}),
        "empty list": bool(words & {"Sequence", "Iterable", "list", "tuple"}),
        "list of None": False,
        "True": "bool" in words,
        "object": False,
        "function": bool(words & {"Callable", "Loss", "Gradient", "Policy", "Schedule", "LabelFn"})
        or any(word.endswith("Fn") or word == "_IsLeaf" for word in words),
        "class": bool(words & {"Callable", "Loss", "Gradient", "Policy", "Schedule", "LabelFn"})
        or any(word.endswith("Fn") or word in ("_IsLeaf", "type") for word in words),
        "wrong tensor": "Tensor" in words,
        "complex tensor": "Tensor" in words,
        "closed group": "Group" in words,
    }[label]


def answers(names: Any = None) -> Iterator[Answer]:
    """Try every argument of every public function with every bad value."""
    for name, fn in public_functions().items():
        if name not in calls.CASES or (
            name not in names if names is not None else name in calls.SLOW
        ):
            continue
        case = calls.CASES[name]
        right = _call(case, fn, {})
        for argument, parameter in inspect.signature(fn).parameters.items():
            if parameter.kind is parameter.VAR_KEYWORD or (name, argument) in calls.PASSED_ON:
                continue
            for label, value in BAD.items():
                yield _answer(
                    case, name, fn, argument, str(parameter.annotation), label, value, right
                )


def _answer(
    case: calls.Case,
    name: str,
    fn: Callable[..., Any],
    argument: str,
    annotation: str,
    label: str,
    value: Any,
    right: str,
) -> Answer:
    key = f"{name}.{argument}"
    try:
        with warnings.catch_warnings(), _limited():
            warnings.simplefilter("ignore")
            got = _call(case, fn, {argument: value})
    except Hang:
        return Answer("hang", name, argument, label, "")
    except zf.ZfunError as error:
        return Answer("refused", name, argument, label, str(error))
    except AssertionError as error:
        # A check of zfun.testing says so that a law does not hold.
        kind = "refused" if name.startswith("testing.") and len(str(error)) > 20 else "raw"
        return Answer(kind, name, argument, label, f"AssertionError: {str(error)[:90]}")
    except Exception as error:  # noqa: BLE001, raw errors are the ones to count
        kind = "caller" if _is_callers(error) or _CALLED.match(str(error)) else "raw"
        return Answer(kind, name, argument, label, f"{type(error).__name__}: {str(error)[:90]}")
    if got == right or _is_meant(annotation, label, key):
        return Answer("accepted", name, argument, label, "")
    return Answer("wrong", name, argument, label, got[:90].replace("\n", " "))


def main(names: list[str]) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for answer in answers(names or None):
        counts[answer.kind] += 1
        if answer.kind in ("raw", "wrong", "hang"):
            print(
                f"{answer.kind:6} {answer.function}({answer.argument}={answer.value}) {answer.text}"
            )
    print(", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())), counts.total())


if __name__ == "__main__":
    main(sys.argv[1:])
