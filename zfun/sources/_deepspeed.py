"""Checkpoints of DeepSpeed.

[Note: DeepSpeed's files]
``latest`` names a directory such as ``global_step14``. Each data-parallel rank has a file
``zero_pp_rank_<rank>_mp_rank_00_optim_states.pt`` with its part of the fp32 parameters and of the
moments, flat; a file ``..._model_states.pt`` has the shapes, the frozen parameters, the buffers and
the names of tied parameters.

* Stages 1 and 2: each group of parameters is one flat vector, cut into equal parts. The parts of
  the fp32 parameters have no padding at the end, the parts of the moments do. Padding may stand
  between parameters too (``param_alignment_paddings``).
* Stage 3: each rank has ``ceil(n / ranks)`` elements of every parameter, one parameter after the
  other, in groups. Padding at the end of a parameter has arbitrary values.
* Universal: a directory ``zero/<name>`` for each parameter, with ``fp32.pt``, ``exp_avg.pt`` and so
  on, whole. Stage 3 writes them flat.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zfun.errors import CorruptCheckpoint, OptionError, ZfunError
from zfun.objects import located
from zfun.options import PATH, takes
from zfun.sources import _files
from zfun.sources._pickles import Inert, as_shape, load
from zfun.sources._source import TrainingState, named

# Classes of DeepSpeed are not imported; none of them holds tensors.
_INERT = "deepspeed."
_RANK = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
# Entries of the files of the model that describe the layout, and not the run.
_LAYOUT = {
    *("module", "buffer_names", "optimizer", "param_shapes"),
    *("frozen_param_shapes", "frozen_param_fragments", "shared_params"),
}


@takes(path=PATH)
def deepspeed(path: str | Path, *, tag: str | None = None) -> TrainingState:
    """Open a checkpoint directory of DeepSpeed's ZeRO stages 1, 2 and 3, or a universal one.

    DeepSpeed need not be installed. Its files are pickles, which are read without running code of
    the files; see ``torch.load(weights_only=True)``.

    Args:
        path: the directory given to ``save_checkpoint``, one of its steps, or the directory that
            ``ds_to_universal`` wrote.
        tag: the name of the step; by default the one that ``latest`` names.

    Returns:
        The fp32 parameters, frozen parameters as they are, tied ones under all of their names, the
        buffers and the moments. Nothing is read until a leaf is loaded. ``values["optimizer"]`` has
        the numbers of the parameter groups and of the loss scale.

    Raises:
        UntrustedCheckpoint: a pickle that names anything but tensors, plain values and classes of
            DeepSpeed.
        CorruptCheckpoint: a damaged or incomplete directory.
        OptionError: no checkpoint, or one of tensor or pipeline parallel ranks.

    Example:
        >>> import tempfile
        >>> import torch
        >>> with tempfile.TemporaryDirectory() as run:  # a checkpoint without ZeRO
        ...     model = {"module": torch.nn.Linear(2, 1).state_dict(), "global_steps": 7}
        ...     torch.save(model | {"skipped_steps": 0}, f"{run}/mp_rank_00_model_states.pt")
        ...     found = deepspeed(run)
        ...     found.step, found.params["weight"].load().shape
        (7, torch.Size([1, 2]))
    """
    folder = _step_of(located(path), tag)
    try:
        return _opened(folder)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        # OptionError is a ValueError too.
        if isinstance(error, ZfunError):
            raise
        raise CorruptCheckpoint(
            f"{folder} has the layout of DeepSpeed; got {type(error).__name__}: {error}; copy the "
            "directory again"
        ) from None


def _opened(folder: Path) -> TrainingState:
    models = _numbered(folder, _MODEL)
    if not models:
        raise OptionError(
            f"path of deepspeed() must be a directory with files *_model_states.pt; got "
            f"{str(folder)!r}; pass the directory given to save_checkpoint()"
        )
    states = [_checked(load(file, inert=_INERT), dict, file) for file in models]
    if (folder / "zero").is_dir():
        _files.check_no_link(folder / "zero")
        slots, step, numbers = _universal(folder / "zero", states)
    else:
        slots, step, numbers = _of_ranks(folder, states)
    return _assembled(str(folder), states, slots, step, numbers)


def _step_of(path: Path, tag: str | None) -> Path:
    latest = path / "latest"
    if tag is None and latest.is_file():
        _files.check_no_link(latest)
        tag = _files.read_text(latest).strip()
    return path if tag is None else _files.entry(path, tag, str(latest))


def _numbered(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Return the files whose names match, by rank, and check that no rank is missing."""
    found = {}
    for file in folder.iterdir() if folder.is_dir() else ():
        match = pattern.fullmatch(file.name)
        if match:
            _files.check_no_link(file)
            if int(match[2]):
                raise OptionError(
                    "deepspeed() reads checkpoints of data-parallel ranks; got "
                    f"{file.name} of a model-parallel rank; convert the checkpoint with "
                    "ds_to_universal first"
                )
            found[int(match[1] or 0)] = file
    if sorted(found) != list(range(len(found))):
        raise CorruptCheckpoint(
            f"a checkpoint has the file of every rank; got those of ranks {sorted(found)} in "
            f"{folder}; copy the directory again"
        )
    return [found[rank] for rank in sorted(found)]


def _checked(value: Any, kind: type, where: object) -> Any:
    if not isinstance(value, kind):
        raise CorruptCheckpoint(
            f"{where} has the layout of DeepSpeed; got {type(value).__name__} in place of "
            f"{kind.__name__}; save the checkpoint with a DeepSpeed of 2021 or later"
        )
    return value


_Shapes = Sequence[Mapping[str, tuple[int, ...]]]
_Slots = dict[str, dict[str, _files.StoredTensor]]


def _shapes(state: Mapping[str, Any]) -> _Shapes:
    groups = _checked(state.get("param_shapes") or [], list, "param_shapes")
    return [
        {name: as_shape(shape) for name, shape in _checked(group, dict, "param_shapes").items()}
        for group in groups
    ]


def _of_ranks(folder: Path, states: Sequence[Any]) -> tuple[_Slots, int | None, Any]:
    """Return fp32 parameters and moments by name from the files of the ranks, and the numbers."""
    files = _numbered(folder, _RANK)
    loaded = [(_checked(load(file, inert=_INERT), dict, file), file) for file in files]
    ranks = [_checked(state.get("optimizer_state_dict"), dict, file) for state, file in loaded]
    if not ranks:
        return {}, None, {}
    count = ranks[0].get("partition_count")
    counts = set(count) if isinstance(count, list) else {count}
    if counts != {len(ranks)}:
        raise CorruptCheckpoint(
            f"a checkpoint of {max(map(str, counts))} ranks has as many files *_optim_states.pt; "
            f"got {len(ranks)} in {folder}; copy the directory again, or convert a checkpoint of "
            "experts with ds_to_universal"
        )
    shapes = _shapes(states[0])
    is_stage_3 = "fp32_flat_groups" in ranks[0]
    slots = (_stage_3 if is_stage_3 else _stages_1_and_2)(ranks, shapes)
    base = ranks[0].get("optimizer_state_dict" if is_stage_3 else "base_optimizer_state")
    return slots, _step(base), _numbers(ranks[0], base)


def _stages_1_and_2(ranks: Sequence[Any], shapes: _Shapes) -> _Slots:
    slots: _Slots = {}
    paddings = ranks[0].get("param_alignment_paddings") or [()] * len(shapes)
    for index, (group, padding) in enumerate(zip(shapes, paddings, strict=True)):
        lean = [_flat(rank["single_partition_of_fp32_groups"][index]) for rank in ranks]
        parts = {"fp32": [_files.FilePart(flat, 0, flat.numel) for flat in lean]}
        for key, flats in _moments([rank.get("base_optimizer_state") for rank in ranks], index):
            # The padding at the end of a part is in the moments only.
            parts[key] = [
                _files.FilePart(flat, 0, min(flat.numel, mine.numel))
                for flat, mine in zip(flats, lean, strict=True)
            ]
        available = sum(flat.numel for flat in lean)
        at = 0
        for number, (name, shape) in enumerate(group.items()):
            size = math.prod(shape)
            for key, whole in parts.items():
                slots.setdefault(key, {})[name] = _files.joined_parts(
                    shape, _files.cut(whole, at, at + size)
                )
            at += size + (padding[number] if number < len(padding) else 0)
        _check_consumed(at, available, 2 * len(ranks), f"group {index}")
    return slots


def _stage_3(ranks: Sequence[Any], shapes: _Shapes) -> _Slots:
    count = len(ranks)
    flats = [[_flat(flat) for flat in rank["fp32_flat_groups"]] for rank in ranks]
    per_rank: dict[str, list[list[_files.StoredTensor]]] = {"fp32": flats}
    for index in range(len(flats[0])):
        for key, moment in _moments([rank["optimizer_state_dict"] for rank in ranks], index):
            found = per_rank.setdefault(key, [[] for _ in ranks])
            for rank, flat in enumerate(moment):
                found[rank].append(flat)
    slots: _Slots = {}
    for key, groups in per_rank.items():
        wholes = [[_files.FilePart(flat, 0, flat.numel) for flat in mine] for mine in groups]
        at = 0
        for name, shape in itertools.chain.from_iterable(group.items() for group in shapes):
            size = -(-math.prod(shape) // count)
            parts = [part for whole in wholes for part in _files.cut(whole, at, at + size)]
            slots.setdefault(key, {})[name] = _files.joined_parts(shape, parts)
            at += size
        for whole in wholes:
            _check_consumed(at, sum(part.stop - part.start for part in whole), 1, key)
    return slots


def _check_consumed(wanted: int, available: int, multiple: int, where: str) -> None:
    if -(-wanted // multiple) != -(-available // multiple):
        raise CorruptCheckpoint(
            f"the flat tensors of a checkpoint have the elements of its parameters; {where} has "
            f"{available} in place of {wanted}; copy the directory again"
        )


def _flat(value: Any) -> _files.StoredTensor:
    return _checked(value, _files.StoredTensor, "a flat group of an optimizer")


def _group_state(optimizer: Any, index: int) -> Mapping[Any, Any]:
    """Return the state of one group: of torch's state dict, or of DeepSpeed's elastic list."""
    if isinstance(optimizer, dict):
        optimizer = optimizer.get("state", {})
        return optimizer.get(index, {}) if isinstance(optimizer, dict) else {}
    if isinstance(optimizer, list) and index < len(optimizer):
        return _checked(optimizer[index], dict, "the state of an optimizer")
    return {}


def _moments(
    optimizers: Sequence[Any], index: int
) -> Iterator[tuple[str, list[_files.StoredTensor]]]:
    """Yield the flat tensors of every rank for each name of the optimizer's state."""
    states = [_group_state(optimizer, index) for optimizer in optimizers]
    for key, value in states[0].items():
        if isinstance(value, _files.StoredTensor) and len(value.shape) == 1:
            yield str(key), [_flat(state.get(key)) for state in states]


def _step(optimizer: Any) -> int | None:
    state = _group_state(optimizer, 0)
    groups = optimizer.get("param_groups") if isinstance(optimizer, dict) else None
    return _integer(state.get("step", groups[0].get("step") if groups else None))


def _numbers(state: Mapping[str, Any], base: Any) -> dict[str, Any]:
    """Return the numbers of the parameter groups and of the loss scale, where they are known."""
    groups = base.get("param_groups") if isinstance(base, dict) else None
    scale = getattr(state.get("loss_scaler"), "state", None) or {}
    found = {"loss_scaler": {k: x for k, x in scale.items() if isinstance(x, (int, float))}}
    return {**found, "param_groups": groups} if groups and _is_plain(groups) else found


def _integer(value: Any) -> int | None:
    if isinstance(value, _files.StoredTensor) and value.numel == 1:
        value = value.read().item()
    return int(value) if isinstance(value, (int, float)) else None


def _universal(folder: Path, states: Sequence[Any]) -> tuple[_Slots, int | None, Any]:
    shapes = {name: shape for group in _shapes(states[0]) for name, shape in group.items()}
    slots: _Slots = {}
    step: int | None = None
    numbers: dict[str, Any] = {}
    for directory in sorted(folder.iterdir()):
        name = directory.name
        if not directory.is_dir() or name not in shapes:
            continue
        _files.check_no_link(directory)
        for file in sorted(directory.glob("*.pt")):
            _files.check_no_link(file)
            value = load(file, inert=_INERT)
            value = value.get("param") if isinstance(value, dict) else value
            if file.stem == "step":
                step = _integer(value)
                continue
            tensor = _checked(value, _files.StoredTensor, file)
            if tensor.numel != math.prod(shapes[name]):
                raise CorruptCheckpoint(
                    f"{file} has the elements of its parameter; got {tensor.numel} in place of "
                    f"{shapes[name]}; copy the directory again",
                    leaf=name,
                )
            slots.setdefault(file.stem, {})[name] = _files.StoredTensor(
                shapes[name], tensor.dtype, tensor.fetch
            )
    _check_complete(folder, slots)
    if (folder / "optimizer_state.pt").is_file():
        _files.check_no_link(folder / "optimizer_state.pt")
        state = load(folder / "optimizer_state.pt", inert=_INERT)
        step, numbers = _step(state) if step is None else step, _numbers(state, state)
    return slots, step, numbers


def _check_complete(folder: Path, slots: _Slots) -> None:
    """Refuse a parameter with fewer tensors than another one; optimizers have different ones."""
    names = sorted({name for mine in slots.values() for name in mine})
    keys_of = {name: {key for key, mine in slots.items() if name in mine} for name in names}
    kinds = {frozenset(keys) for keys in keys_of.values()}
    for name, keys in keys_of.items():
        if more := next((other for other in kinds if keys < other), None):
            raise CorruptCheckpoint(
                f"a parameter has the tensors of the others; {name!r} has no "
                f"{', '.join(sorted(more - keys))} in {folder}; copy the directory again",
                leaf=name,
            )


def _assembled(
    origin: str, states: Sequence[Any], slots: _Slots, step: int | None, numbers: Any
) -> TrainingState:
    first = states[0]
    module = first.get("module")
    module = module if isinstance(module, dict) else {}
    taken = [first.get(key) for key in ("global_steps", "skipped_steps")]
    if step is None and all(type(count) is int for count in taken):
        step = taken[0] - taken[1]
    buffer_names = set(first.get("buffer_names") or ())
    shared = dict(first.get("shared_params") or {})
    trained = slots.pop("fp32", {})
    params = trained | _frozen(states)
    wanted = [name for group in _shapes(first) for name in group]
    lost = [name for name in wanted if name not in params]
    if lost and slots:
        raise CorruptCheckpoint(
            f"{origin} has the fp32 parameter of every shape; {lost[0]!r} is missing; copy the "
            "directory again",
            leaf=lost[0],
        )
    for name, value in module.items():
        # Stage 3 writes empty tensors for what the ranks hold.
        if (
            name not in params | shared
            and name not in buffer_names
            and isinstance(value, _files.StoredTensor)
        ):
            params[name] = value
    tied = {alias: params[name] for alias, name in shared.items() if name in params}
    in_order = [name for name in module if name in params or name in tied] or [*params, *tied]
    everything = params | tied
    buffers = {
        name: value
        for name, value in module.items()
        if name in buffer_names and isinstance(value, _files.StoredTensor)
    }
    plain = {key: x for key, x in first.items() if key not in _LAYOUT and _is_plain(x)}
    return TrainingState(
        named({name: everything[name] for name in [*in_order, *params, *tied]}, origin),
        named(buffers, origin),
        {key: named(moment, origin) for key, moment in slots.items()},
        step,
        plain | {"optimizer": numbers},
    )


def _frozen(states: Sequence[Any]) -> dict[str, _files.StoredTensor]:
    """Return the frozen parameters, of which each rank of stage 3 has a part."""
    found = {}
    for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
        pieces = [_flat(state["frozen_param_fragments"][name]) for state in states]
        size = as_shape(shape)
        whole = pieces[:1] if pieces[0].numel == math.prod(size) else pieces
        if sum(piece.numel for piece in whole) < math.prod(size):
            raise CorruptCheckpoint(
                f"the ranks have all elements of a frozen parameter; {name!r} of {size} has "
                f"{sum(piece.numel for piece in whole)}; copy the directory again",
                leaf=name,
            )
        found[name] = _files.joined_parts(
            size, [_files.FilePart(piece, 0, piece.numel) for piece in whole]
        )
    return found


def _is_plain(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(isinstance(key, (str, int)) and _is_plain(x) for key, x in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return not isinstance(value, (_files.StoredTensor, Inert))
