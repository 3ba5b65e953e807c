"""Placeholders of names that are not there: they import, and raise when they are used."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

from zfun.errors import OptionError


class _Absent(type):
    """The class of placeholders: classes that no object is an instance of, whose uses raise."""

    _message: str

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> Any:
        for base in bases:
            if isinstance(base, _Absent):
                base._raise()
        return super().__new__(cls, name, bases, body)

    def _raise(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise OptionError(cls._message)

    __call__ = __enter__ = __exit__ = __iter__ = __len__ = __getitem__ = __bool__ = _raise

    def __getattr__(cls, name: str) -> Any:
        if is_dunder(name):
            raise AttributeError(name)
        cls._raise()


class _AbsentConstant(_Absent):
    """The class of placeholders of strings and numbers, which raise where a value would do."""

    # Python looks for a __hash__ beside __eq__.
    __eq__ = __hash__ = __str__ = __format__ = __index__ = __float__ = _Absent._raise
    __lt__ = __le__ = __gt__ = __ge__ = __add__ = __radd__ = __mod__ = __or__ = __ror__ = __eq__
    __contains__ = __instancecheck__ = __subclasscheck__ = __fspath__ = __eq__


@functools.cache
def placeholder(path: str, remedy: str) -> Any:
    """Return the one placeholder for a name, by its path without ``deepspeed``.

    DeepSpeed writes the names of its constants in capitals. Names of classes stand in annotations
    and sets too, so those can be compared: no class is equal to one.
    """
    module, _, name = f"deepspeed.{path}".rpartition(".")
    body = {"__module__": module, "_message": message(f"{module}.{name}", remedy)}
    return (_AbsentConstant if name.isupper() else _Absent)(name, (), body)


def is_dunder(name: str) -> bool:
    """Return whether a name belongs to Python."""
    return name.startswith("__") and name.endswith("__")


def message(full: str, remedy: str) -> str:
    """Return the error of a name that is not there."""
    return (
        f"zfun.interop.deepspeed has the names of DeepSpeed that train; got {full}, which is not "
        f"there; {remedy}"
    )
