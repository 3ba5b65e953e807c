"""Checkpoints of the strategy: a directory written by ``zf.save``, and one file made of it.

Lightning's part of a checkpoint (loops, callbacks, schedulers, hyperparameters) is any picklable
value. It lies as bytes in the caller's data of the checkpoint, so the whole appears by one rename.
"""

from __future__ import annotations

import contextlib
import functools
import io
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core import saving
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from zfun import checkpoint as zcheckpoint
from zfun import tree
from zfun.checkpoint.format import decode
from zfun.errors import CheckpointError
from zfun.interop._named import first_names
from zfun.interop.engine import Engine, ParamGroups, group_number
from zfun.interop.engine._moments import empty_state
from zfun.interop.engine._torch_states import with_own_constants
from zfun.interop.engine._values import is_flat, parts_of
from zfun.interop.lightning._left import Unread, shown, torch_groups, torch_state
from zfun.interop.lightning._plugins import GRAD_SCALER
from zfun.interop.lightning._runs import master_values
from zfun.options import BOOL, PATH, takes
from zfun.sources import TrainingState

MARK = "zfun"
"""The key that has the path of a directory, whose values are in the state already."""

_FORMAT = 1
# Where a file of Lightning has the state of a GradScaler.
_SCALER = "MixedPrecision"


def read_directories() -> None:
    """Let ``LightningModule.load_from_checkpoint`` read directories of the strategy too."""
    load_file = saving.pl_load

    @functools.wraps(load_file)
    def load_any(path_or_url: Any, *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(path_or_url, (str, Path)) and Path(path_or_url).is_dir()
        return whole_of(path_or_url) if is_path else load_file(path_or_url, *args, **kwargs)

    saving.pl_load = load_any


def given_of(module: LightningModule, *, exclude_frozen: bool) -> dict[str, Any]:
    """Return the module's ``state_dict()`` for a checkpoint, whose parameters are live."""
    is_own = is_overridden("state_dict", module, nn.Module)
    values = module.state_dict() if is_own else module.state_dict(keep_vars=True)
    return {
        key: value
        for key, value in values.items()
        if not (exclude_frozen and isinstance(value, nn.Parameter) and not value.requires_grad)
    }


def packed(
    checkpoint: Mapping[str, Any], module: nn.Module, engines: Sequence[Engine]
) -> dict[str, Any]:
    """Return Lightning's part of a checkpoint as a plain value for ``zf.save``; all ranks call."""
    states = [engine.state for engine in engines]
    flats = [flat for x in states for flat in (x.params, x.frozen, x.buffers) if flat is not None]
    known, first = {path for flat in flats for path in flat.layout.paths}, first_names(module)
    names: dict[str, str] = {}
    others: dict[str, Any] = {}
    for key, value in checkpoint["state_dict"].items():
        if first.get(id(value)) in known:
            names[key] = first[id(value)]
        else:
            others[key] = value.detach() if isinstance(value, Tensor) else value
    rest = {name: value for name, value in checkpoint.items() if name != "state_dict"}
    buffer = io.BytesIO()
    torch.save({"checkpoint": rest, "others": others}, buffer)
    numbers = {"lightning": _FORMAT, "engines": len(engines)}
    return {**numbers, "names": names, "pickle": buffer.getvalue()}


def plain(checkpoint: Mapping[str, Any], engines: Sequence[Engine]) -> dict[str, Any]:
    """Return a checkpoint with whole values, as plain Lightning has it; all ranks call."""
    # Callbacks keep parameters too, as WeightAveraging does, which rank 0 cannot gather alone.
    live = {id(x) for engine in engines for x in engine.leaves.values()}
    gathered = lambda x: master_values({"": x}, engines)[""] if id(x) in live else x
    rest = {key: x for key, x in checkpoint.items() if key != "state_dict"}
    whole = tree.map(gathered, rest)
    whole["state_dict"] = master_values(checkpoint["state_dict"], engines)
    if "optimizer_states" in checkpoint:
        whole["optimizer_states"] = [engine.optimizer_state() for engine in engines]
    return whole


@contextlib.contextmanager
def set_aside(path: str, *, is_old: bool) -> Iterator[None]:
    """Move what is at a path aside, so that one of another kind replaces it, or it comes back."""
    aside = Path(f"{path}.replaced")
    if not is_old:
        yield
        return
    _remove(aside)  # of a run that was killed here
    Path(path).rename(aside)
    try:
        yield
    except BaseException:
        if not (Path(path).is_file() or zcheckpoint.steps(path)):
            _remove(Path(path))
            aside.rename(path)
        raise
    _remove(aside)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_checkpoint(path: str) -> bool:
    """Whether a path leads to a directory that has checkpoints, and nothing else."""
    if not Path(path).is_dir():
        return False
    names = [x.name for x in Path(path).iterdir()]
    return bool(zcheckpoint.steps(path)) and all(x.startswith(("step-", ".")) for x in names)


class Directory(NamedTuple):
    """A directory: Lightning's part, values of ``state_dict()`` that are no leaves, and states."""

    checkpoint: dict[str, Any]
    others: dict[str, Any]
    # The names of leaves, by key of the state_dict().
    names: dict[str, str]
    states: list[TrainingState]

    @property
    def leaves(self) -> dict[str, Any]:
        """The values of the states, by name."""
        return {name: x for s in self.states for name, x in {**s.params, **s.buffers}.items()}

    def shown(self) -> dict[str, Any]:
        """Return the checkpoint for hooks: values and moments are read when hooks ask."""
        leaves, found = self.leaves, dict(self.checkpoint)
        if "optimizer_states" in found:
            pairs = zip(found["optimizer_states"], self.states, strict=True)
            found["optimizer_states"] = [shown(*pair) for pair in pairs]
        values = {key: leaves[name] for key, name in self.names.items()}
        return {**found, "state_dict": Unread({**values, **self.others})}


def opened(path: str | Path, *, weights_only: bool | None = None) -> Directory:
    """Open a directory, without a group."""
    data = decode(zcheckpoint.manifest_at(path)[1].data)
    if not isinstance(data, dict) or data.get("lightning") != _FORMAT:
        raise CheckpointError(
            f"a directory for ckpt_path= is one that ZfunStrategy has saved; got {str(path)!r}, "
            "which another program has saved; load the directory with zf.load()",
            path=str(path),
        )
    pickled = io.BytesIO(data["pickle"])
    whole = torch.load(pickled, map_location="cpu", weights_only=bool(weights_only))
    count = data["engines"]
    parts = [{"params": f"{i}.params"} for i in range(count)] if count > 1 else [{}]
    states = [zcheckpoint.training_state(path, **part) for part in parts]
    return Directory(whole["checkpoint"], whole["others"], data["names"], states)


def joined(states: Sequence[Any]) -> Any:
    """Return the states of engines as one value for ``zf.save`` and ``zf.load``."""
    return states[0] if len(states) == 1 else {str(i): x for i, x in enumerate(states)}


def load_states_of(
    checkpoint: Mapping[str, Any], engines: Sequence[Engine], groups: Sequence[ParamGroups]
) -> None:
    """Load the states of the optimizers of a directory into the engines of a fit.

    The module has its values already, which hooks may have changed. Callbacks may have unfrozen
    parameters and added groups since.
    """
    for engine, one, numbers in zip(engines, groups, checkpoint["optimizer_states"], strict=True):
        saved = with_own_constants(engine.state.opt_state, one, torch_groups(numbers))
        given = {"state": dict[int, Any](), "param_groups": saved}
        with empty_state(one.torch_optimizer, hooks=True) as optimizer:
            torch.optim.Optimizer.load_state_dict(optimizer, given)
        one.retain(numbers.get("trained", ()))
    for engine in engines:
        engine.prepare()
    path, states = checkpoint[MARK], [engine.state for engine in engines]
    is_number, is_value = group_number(*states), _values_among(path, states)
    # Lightning leaves the random generators as they are.
    loaded = zcheckpoint.load(
        path, joined(states), rng=False, reset=lambda key: is_number(key) or is_value(key)
    ).state
    for index, engine in enumerate(engines):
        engine.zero_grad()
        engine.state = loaded if len(engines) == 1 else loaded[str(index)]


def note_scale(checkpoint: dict[str, Any], engine: Engine) -> None:
    """Write a loss scale that changes as Lightning does, so that a file of it has the scale too."""
    state = engine.state.loss_scale
    assert state is not None
    scale, hysteresis, count, last_overflow = (x.item() for x in state)
    clean = int(count - last_overflow - 1)
    as_torch = {**GRAD_SCALER, "scale": scale, "_growth_tracker": clean % 2000}
    # torch does not read the last one.
    checkpoint[_SCALER] = {**as_torch, "zfun": [hysteresis, clean]}


def load_scale(checkpoint: Mapping[str, Any], engine: Engine) -> None:
    """Go on with the loss scale of a checkpoint, also one of plain Lightning."""
    held, found = engine.state.loss_scale, checkpoint.get(_SCALER)
    assert held is not None
    if found is None:
        return
    hysteresis, clean = found.get("zfun") or (held.hysteresis.item(), found["_growth_tracker"])
    numbers = (found["scale"], hysteresis, clean, -1)
    own = [torch.full_like(x, number) for x, number in zip(held, numbers, strict=True)]
    engine.state = engine.state._replace(loss_scale=type(held)(*own))


def _values_among(path: str, states: Sequence[Any]) -> Callable[[str], bool]:
    """Return whether a leaf of a checkpoint is a parameter, a buffer or a master weight."""
    masters = {*zcheckpoint.manifest_at(path)[1].masters.values()}
    above = [f"{index}." for index in range(len(states))] if len(states) > 1 else [""]
    for prefix, state in zip(above, states, strict=True):
        for field, part in zip(*parts_of(state.opt_state), strict=True):
            if is_flat(part) and field.rpartition(".")[2] == "master":
                masters |= {f"{prefix}opt_state.{field}.{leaf}" for leaf in part.layout.paths}
    kinds = tuple(x + kind for x in above for kind in ("params.", "frozen.", "buffers."))
    return lambda key: key in masters or key.startswith(kinds)


@takes(path=PATH, out=PATH, optimizer=BOOL)
def collate(path: str | Path, out: str | Path, *, optimizer: bool = False) -> Path:
    """Write a checkpoint directory of the strategy as one file that plain Lightning loads.

    The file has the master weights, every buffer, and Lightning's own part: hyperparameters,
    callbacks, loops and schedulers. ``LightningModule.load_from_checkpoint(out)`` and
    ``Trainer.test(ckpt_path=out)`` read the file, without zfun. No group and no GPU is necessary,
    and the directory may come from any number of ranks.

    Args:
        path: the directory, as ``ModelCheckpoint`` or ``Trainer.save_checkpoint`` names it.
        out: the file to write.
        optimizer: also write the state of the optimizers as torch has it, so that
            ``Trainer.fit(ckpt_path=out)`` goes on under another strategy.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: there is no checkpoint, or none that the strategy has saved; or the
            checkpoint has parameters alone, and ``optimizer=True``.
        CorruptCheckpoint: the files are not those that were written.

    Example:
        ``collate("checkpoints/last.ckpt", "model.ckpt")``
    """
    out = Path(out)
    temporary = out.with_name(out.name + ".tmp")
    torch.save(whole_of(path, optimizer=optimizer), temporary)
    temporary.replace(out)
    return out


def whole_of(path: str | Path, *, optimizer: bool = False) -> dict[str, Any]:
    """Return what a directory of the strategy would be as a file of plain Lightning."""
    checkpoint, others, names, states = directory = opened(path)
    leaves = directory.leaves
    tensors = {name: leaves[name].load() for name in dict.fromkeys(names.values())}
    state_dict = {key: tensors[name] for key, name in names.items()}
    whole = {**checkpoint, "state_dict": {**state_dict, **others}}
    if optimizer and "optimizer_states" not in checkpoint:
        raise CheckpointError(
            "collate(optimizer=True) writes the state of optimizers; got a checkpoint of "
            "parameters alone; leave optimizer= out",
            path=str(path),
        )
    if optimizer:
        whole["optimizer_states"] = [
            torch_state(saved, state)
            for state, saved in zip(states, checkpoint["optimizer_states"], strict=True)
        ]
    else:
        # Lightning then says that the file has parameters only.
        for key in ("optimizer_states", "lr_schedulers"):
            whole.pop(key, None)
    return whole
