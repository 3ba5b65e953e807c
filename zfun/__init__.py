"""zfun: functional sharding of training state for PyTorch.

A name is imported at its first use, so that ``zfun --help`` does not wait for torch, and
``zf.testing`` needs no import of its own.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zfun._names import *  # noqa: F403

    # isort: split
    from zfun import checkpoint as checkpoint
    from zfun import collectives as collectives
    from zfun import compression as compression
    from zfun import errors as errors
    from zfun import evaluation as evaluation
    from zfun import flat as flat
    from zfun import interop as interop
    from zfun import layout as layout
    from zfun import modules as modules
    from zfun import ops as ops
    from zfun import optim as optim
    from zfun import parallel as parallel
    from zfun import placement as placement
    from zfun import planner as planner
    from zfun import policies as policies
    from zfun import recipes as recipes
    from zfun import reductions as reductions
    from zfun import sources as sources
    from zfun import stores as stores
    from zfun import testing as testing
    from zfun import transforms as transforms
    from zfun import tree as tree
    from zfun import typing as typing

__version__ = "0.2.0"

_MODULES = frozenset(module.name for module in pkgutil.iter_modules(__path__))  # noqa: F405


def __getattr__(name: str) -> Any:
    if name.startswith("_") and name != "__all__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in _MODULES:
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if (error.name or "").startswith("zfun"):
                raise
            # hasattr() and help() take an absent extra for an absent name.
            raise AttributeError(f"module {__name__!r} has no {name!r} here: {error}") from error
    names = importlib.import_module(f"{__name__}._names")
    if name not in (*names.__all__, "__all__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(names, name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES, *__getattr__("__all__")})
