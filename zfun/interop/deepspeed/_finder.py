"""Where ``import deepspeed`` looks: modules by DeepSpeed's names, and the version.

DeepSpeed has several modules where one does here. ``HOMES`` says which module a name of DeepSpeed
gives, so that both names are one object. Two finders on ``sys.meta_path`` read the table: the one
of this package, which importing the package adds, and the one of :func:`install` for the names
that begin with ``deepspeed``.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from logging import getLogger
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import ABSENT_MODULES, remedy_of
from zfun.interop.deepspeed._placeholders import is_dunder, placeholder
from zfun.interop.deepspeed.runtime._constants import constants_of

# The version of DeepSpeed whose names these are, because scripts compare the number.
VERSION = "0.19.8"
# A folder for PYTHONPATH, in which Python finds a package and a distribution of this name.
SITE = Path(__file__).parent / "launcher" / "site"

_HERE = __name__.rpartition(".")[0]
_NAME = "deepspeed"

# By module here, of which "" is the package: modules of DeepSpeed that are this one.
_NAMES: Mapping[str, str] = {
    "": "constants git_version_info runtime.engine runtime.pipe.engine",
    "accelerator": (
        "accelerator.abstract_accelerator accelerator.cpu_accelerator accelerator.cuda_accelerator "
        "accelerator.real_accelerator"
    ),
    "utils": (
        "checkpoint.utils compression.helper moe.utils runtime.utils utils.bwc "
        "utils.init_on_device utils.logging utils.module_utils utils.nvtx utils.tensor_fragment "
        "utils.timer utils.torch"
    ),
    "runtime.checkpointing": "checkpointing runtime.activation_checkpointing.checkpointing",
    "comm": "comm.comm comm.torch comm.utils",
    "runtime": "dataloader runtime.dataloader",
    "runtime.config": (
        "elasticity elasticity.config elasticity.elasticity runtime.config_utils "
        "runtime.zero.config runtime.zero.offload_config"
    ),
    "runtime.lr_schedules": "lr_schedules",
    "ops": (
        "ops.adagrad ops.adagrad.cpu_adagrad ops.adam ops.adam.cpu_adam ops.adam.fused_adam "
        "ops.adam.multi_tensor_apply ops.adam.zenflow_torch_adam ops.lamb ops.lamb.fused_lamb "
        "ops.lion ops.lion.cpu_lion ops.lion.fused_lion runtime.fp16.onebit "
        "runtime.fp16.onebit.adam runtime.fp16.onebit.lamb runtime.fp16.onebit.zoadam "
        "runtime.zero.muon runtime.zero.muon.muon_optimizer runtime.zero.muon.original_muon"
    ),
    "pipe": "runtime.pipe runtime.pipe.module runtime.pipe.topology",
    "runtime.zero": (
        "runtime.zero.offload_states runtime.zero.stage1 runtime.zero.stage2 runtime.zero.stage3 "
        "runtime.zero.stage_1_and_2 zero"
    ),
}
HOMES: Mapping[str, str] = {name: home for home, names in _NAMES.items() for name in names.split()}

_FOLDERS = {
    name.rsplit(".", count)[0]
    for name in (*HOMES, *ABSENT_MODULES)
    for count in range(1, name.count(".") + 1)
}


class _Same(Loader):
    """Loads a module by a second name."""

    def __init__(self, home: str) -> None:
        self._home = home
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self._home)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The machinery of imports has put the spec of the second name into the module.
        module.__spec__ = self._spec


class _Empty(Loader):
    """Makes a module of constants and placeholders, or a folder of modules."""

    def __init__(self, path: str) -> None:
        self._path = path

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        path, remedy = self._path, remedy_of(self._path)

        def find(name: str) -> Any:
            if not is_dunder(name):
                if f"{path}.{name}" in {*HOMES, *ABSENT_MODULES, *_FOLDERS}:
                    return importlib.import_module(f"{_HERE}.{path}.{name}")
                if remedy is not None:
                    return placeholder(f"{path}.{name}", remedy)
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

        vars(module).update(constants_of(path), __getattr__=find)


class _Finder(MetaPathFinder):
    """Finds modules by a function from the path below a package to a loader."""

    def __init__(self, package: str, loader_of: Callable[[str], Loader | None]) -> None:
        self._package, self._loader_of = package, loader_of

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{self._package}."):
            return None
        loader = self._loader_of(fullname[len(self._package) + 1 :])
        return None if loader is None else ModuleSpec(fullname, loader, is_package=True)


class _Named(_Finder):
    """Finds ``deepspeed`` and its modules, and the distribution of this name."""

    def find_distributions(
        self, context: importlib.metadata.DistributionFinder.Context | None = None
    ) -> Iterable[importlib.metadata.Distribution]:
        """Return the distribution ``deepspeed``, if this one or all are wanted."""
        if context is not None and context.name not in (None, _NAME):
            return []
        return importlib.metadata.MetadataPathFinder.find_distributions(
            importlib.metadata.DistributionFinder.Context(name=_NAME, path=[str(SITE)])
        )


def _here(path: str) -> Loader | None:
    """Return the loader of a module of this package that is no file."""
    if path in HOMES:
        return _Same(f"{_HERE}.{HOMES[path]}".rstrip("."))
    return _Empty(path) if path in _FOLDERS or (path and remedy_of(path) is not None) else None


def _named(path: str) -> Loader | None:
    home = f"{_HERE}.{path}".rstrip(".")
    return None if importlib.util.find_spec(home) is None else _Same(home)


def add_finder() -> None:
    """Let Python find the modules of this package that are no files."""
    if not any(type(finder) is _Finder for finder in sys.meta_path):
        sys.meta_path.append(_Finder(_HERE, _here))


def install() -> None:
    """Let ``import deepspeed`` in this process give ``zfun.interop.deepspeed``.

    Call it before libraries that look for DeepSpeed are imported: transformers, accelerate,
    lightning, trl, peft. A DeepSpeed that is installed too is not used, and a line of the log says
    so. ``python -m zfun.interop.deepspeed train.py`` does the same without a line in the script.

    Raises:
        OptionError: DeepSpeed, or a library that looked for it in vain, is already imported.

    Example:
        >>> from zfun.interop.deepspeed import install
        >>> install()  # doctest: +SKIP
        >>> import deepspeed  # doctest: +SKIP
    """
    if any(isinstance(finder, _Named) for finder in sys.meta_path):
        return
    loaded = sys.modules.get(_NAME)
    is_stub = loaded is not None and SITE in Path(getattr(loaded, "__file__", None) or "").parents
    accelerate = sys.modules.get("accelerate.utils")
    if loaded is not None and not is_stub:
        late = "deepspeed"
    elif accelerate is not None and not hasattr(accelerate, "DeepSpeedEngineWrapper"):
        late = "accelerate"
    else:
        late = None
    if late is not None:
        raise OptionError(
            f"install() comes before the libraries that look for DeepSpeed; got {late}, which is "
            "already imported; make `from zfun.interop.deepspeed import install; install()` the "
            "first line of the script"
        )
    others = [
        found
        for found in importlib.metadata.distributions(name=_NAME)
        if Path(str(found.locate_file(""))).resolve() != SITE.resolve()
    ]
    if others and os.environ.get("LOCAL_RANK", "0") == "0":
        getLogger(_HERE).warning(
            "import deepspeed gives zfun.interop.deepspeed; DeepSpeed %s, which is installed, is "
            "not used",
            others[0].version,
        )
    sys.meta_path.insert(0, _Named(_NAME, _named))
    # Libraries ask weights inside of backward, which are parameters in DeepSpeed. Here they are
    # tensors with whole values, and those that autograd saves have no attributes of their own.
    status = importlib.import_module(f"{_HERE}.runtime.zero").ZeroParamStatus
    torch.Tensor.ds_status = status.AVAILABLE
    if is_stub:
        sys.modules[_NAME] = sys.modules[_HERE]
