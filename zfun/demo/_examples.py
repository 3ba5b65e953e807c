"""Load the model and the text of the demo from ``examples/``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from zfun.errors import OptionError


def load_example(name: str) -> ModuleType:
    """Import a file of ``examples/``: beside this module in a wheel, at the root of a checkout."""
    qualified = f"zfun.demo.examples.{name}"
    if qualified in sys.modules:
        return sys.modules[qualified]
    here = Path(__file__).resolve().parent
    path = next(
        (
            folder / f"{name}.py"
            for folder in (here / "examples", here.parents[1] / "examples")
            if folder.is_dir()
        ),
        None,
    )
    spec = None if path is None else importlib.util.spec_from_file_location(qualified, path)
    if spec is None or spec.loader is None:
        raise OptionError(
            "the demo needs the folder examples/ of zfun's repository; there is none beside "
            f"{here}; install zfun again"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[qualified] = module  # dataclasses look up a class's module by name
    spec.loader.exec_module(module)
    return module
