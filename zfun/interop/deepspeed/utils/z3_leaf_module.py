"""``deepspeed.utils.z3_leaf_module``: marks for scripts that ask, which change nothing.

The order of collectives does not depend on the parameters that a rank uses, so no module needs one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from torch import nn

from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent

_LEAF = "_z3_leaf"


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Mark the modules of some classes, given as classes or by their names, and return them.

    Raises:
        OptionError: there is none.

    Example:
        >>> len(set_z3_leaf_modules(nn.Sequential(nn.Linear(1, 1)), [nn.Linear]))
        1
    """
    return _marked(model, leaf_module_classes, _is_of_class, raise_if_not_found)[0]


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules of some names in the model; return these, and names without a module."""
    is_named = lambda name, _, wanted: name == wanted
    return _marked(model, module_names, is_named, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Mark the modules whose names end so; return these, and ends without a module."""
    ends = lambda name, _, x: name == x or name.endswith(f".{x.lstrip('.')}")
    return _marked(model, module_name_suffixes, ends, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[Any], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Remove the marks of :func:`set_z3_leaf_modules`."""
    return _marked(model, leaf_module_classes, _is_of_class, raise_if_not_found, flag=False)[0]


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a mark."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_module(model: nn.Module, flag: bool) -> None:
    """Mark one module, or remove the mark."""
    vars(model)[_LEAF] = flag


def z3_leaf_module(model: nn.Module) -> bool:
    """Return whether a module has a mark."""
    return vars(model).get(_LEAF, False)


def z3_leaf_parameter(model: Any) -> bool:
    """Return ``False``: parameters have no mark."""
    return False


def _is_of_class(name: str, module: nn.Module, wanted: Any) -> bool:
    if isinstance(wanted, str):
        own = type(module)
        return wanted in (own.__name__, f"{own.__module__}.{own.__qualname__}")
    return isinstance(module, wanted)


def _marked(
    model: nn.Module, wanted: Sequence[Any], fits: Any, must: bool, *, flag: bool = True
) -> tuple[list[nn.Module], list[Any]]:
    """Mark the modules that fit; return these, and the wanted ones without any."""
    wanted, named = list(wanted), list(model.named_modules())
    found = [module for name, module in named if any(fits(name, module, x) for x in wanted)]
    if not found and must:
        shown = [x if isinstance(x, str) else x.__name__ for x in wanted]
        raise OptionError(
            f"leaf modules are classes or names of the model; got {shown}, of which the model has "
            "none; leave the call out: no module needs a mark"
        )
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, [x for x in wanted if not any(fits(*one, x) for one in named)]


class _Callable(ModuleType):
    """This module, whose name in ``utils`` is also that of a function."""

    def __call__(self, model: nn.Module) -> bool:
        return z3_leaf_module(model)


sys.modules[__name__].__class__ = _Callable

__getattr__ = absent("utils.z3_leaf_module", globals(), "utils")
