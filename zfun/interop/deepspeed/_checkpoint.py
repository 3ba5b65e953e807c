"""Weights and checkpoints of an engine: a directory for each tag, and ``latest`` beside these."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zfun import checkpoint
from zfun.collectives import Group
from zfun.errors import CheckpointError, SpecMismatch
from zfun.flat import Flat
from zfun.interop._named import answering
from zfun.interop.deepspeed import _converted
from zfun.interop.deepspeed._converted import COUNTERS
from zfun.interop.deepspeed._scales import go_on
from zfun.interop.deepspeed._settings import Settings
from zfun.interop.deepspeed.runtime.lr_schedules import Scheduled
from zfun.interop.deepspeed.utils import zero_to_fp32
from zfun.interop.engine import Engine
from zfun.interop.engine._torch_states import CONFIGURED
from zfun.interop.engine._values import deferred_values
from zfun.sources import Source
from zfun.transforms import shard


class SavedEngine(nn.Module):
    """An engine whose weights and state are read and written as a whole; every rank must call."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    micro_steps: int
    lr_scheduler: Any
    global_steps: int
    loaded_checkpoint_tag: str | None
    _settings: Settings
    _core: Engine
    # All ranks.
    _ranks: Group
    # The step at whose end rank 0 got the weights.
    _consolidated_at: int | None

    def state_dict(  # pyrefly: ignore[bad-override]
        self, *args: Any, **kwargs: Any
    ) -> dict[str, Any]:
        """Return the whole weights, with ``module.`` before each name; every rank must call."""
        return {f"module.{name}": value for name, value in self.module_state_dict().items()}

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return the whole weights by the module's own names; every rank must call."""
        weights = self._core.state_dict()
        frozen = {n for n, x in self.module.named_parameters() if not x.requires_grad}
        left_out = frozen if exclude_frozen_parameters else frozenset[str]()
        return {name: value for name, value in weights.items() if name not in left_out}

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, Any] | None:
        """Return the whole weights on rank 0, and ``None`` elsewhere; every rank must call."""
        weights = self.module_state_dict(exclude_frozen_parameters)
        self._consolidated_at = self.global_steps
        return weights if self._ranks.rank == 0 else None

    _consolidated_16bit_state_dict = _zero3_consolidated_16bit_state_dict

    def _save_pretrained(self, own: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``save_pretrained``, unless rank 0 has the weights, and this rank writes nothing.

        A script passes ``state_dict=accelerator.get_state_dict(engine)``, which is ``None`` on
        this rank, so the method would gather the weights on this rank alone.
        """
        given = inspect.signature(own).bind_partial(*args, **kwargs).arguments
        weights = {**kwargs, **given}.get("state_dict")
        is_idle = given.get("is_main_process") is False and weights is None
        if is_idle and self._ranks.rank != 0 and self._consolidated_at == self.global_steps:
            return None
        with answering(self._core, weights):
            return own(*args, **kwargs)

    def load_module_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> None:
        """Take whole weights by the module's own names; every rank must call.

        ``custom_load_fn(src=weights, dst=module)`` writes to the module by itself.
        """
        weights = state_dict.get("module", state_dict)
        if custom_load_fn is None:
            self._core.replace(weights, strict=strict)
            return
        with torch.no_grad():
            custom_load_fn(src=weights, dst=self.module)

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | float | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the state, the counters and the scheduler; every rank must call.

        The client state is that of rank 0: numbers, text, lists, dicts and small tensors are kept
        as they are, and others as a pickle. With ``exclude_frozen_parameters``, parameters that
        require no gradient, and that no step has trained, are not in the checkpoint;
        ``load_checkpoint(load_module_strict=False)`` leaves these alone.
        """
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        folder, scheduler, state = Path(save_dir), self.lr_scheduler, self._core.state
        scaling = self._settings.scaling
        _check_tag(self._ranks, name)
        data = {
            **zero_to_fp32.packed(client_state or {}),
            "counters": {counter: getattr(self, counter) for counter in COUNTERS},
            "lr_scheduler": None if scheduler is None else dict(scheduler.state_dict()),
            "loss_scale": None if scaling is None else scaling.numbers,
            "groups": zero_to_fp32.packed(_groups(self.optimizer)),
            "ties": _ties(self.module),
            "not_persistent": _not_persistent(self.module),
        }
        if exclude_frozen_parameters:
            state = state._replace(frozen=_needed(self._core, self._ranks))
        checkpoint.save(folder / name, state, keep=1, data=data)
        write_script = lambda path: _write(path, zero_to_fp32.SCRIPT.encode())
        write_on_rank_0(self._ranks, folder / "zero_to_fp32.py", write_script)
        if save_latest:
            write_name = lambda path: _write(path, name.encode())
            write_on_rank_0(self._ranks, folder / "latest", write_name)
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | float | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what :meth:`save_checkpoint` saved, at any stage and number of ranks.

        Or what DeepSpeed saved, as it is or, of stages 1 to 3, after ``zf.checkpoint.convert``; its
        files run no code, so the client state lacks objects of other classes. Without
        ``load_optimizer_states`` counters and the scheduler are loaded too, and the next step has
        the rates of before, as in DeepSpeed; with ``load_module_only``, the weights alone are.
        ``custom_load_fn`` writes the weights in place of the load.

        Returns:
            The path and the client state, or ``(None, None)`` where there is no checkpoint.

        Raises:
            CheckpointError: there is no such checkpoint, or its groups have other constants.
        """
        folder = Path(load_dir)
        if (name := zero_to_fp32.tag_of(folder, tag)) is None:
            return None, None
        path = folder / name
        is_whole = load_optimizer_states and not load_module_only
        has_groups = self._settings.groups is not None
        saved = _converted.opened(path, with_optimizer=is_whole and has_groups)
        data, scheduler = saved.data, self.lr_scheduler
        numbers = self._load_state(saved, path, load_module_strict, is_whole, custom_load_fn)
        self._core.zero_grad()
        if is_whole:
            go_on(self, data.get("loss_scale") or {})
        # Gradients of a step that is under way are in no checkpoint, so a step begins here.
        step_size = self._settings.recipe.num_micro_batches
        self.micro_steps = self.micro_steps // step_size * step_size
        if not load_module_only:
            for counter in data.get("counters", {}).keys() & set(COUNTERS):
                setattr(self, counter, data["counters"][counter])
            if load_lr_scheduler_states and scheduler is not None and data.get("lr_scheduler"):
                scheduler.load_state_dict(data["lr_scheduler"])
        groups = self._settings.groups
        for group, own in zip(groups.groups if groups else (), numbers, strict=False):
            # Rates of an earlier Muon are those of the configuration, and have no base.
            is_earlier = "base_lr" in group and "base_lr" not in own
            if is_earlier and isinstance(scheduler, Scheduled):
                scheduler.step(scheduler.last_batch_iteration)
            kept = ("muon_lr", "adam_lr") if is_earlier else ()
            group.update({name: value for name, value in own.items() if name not in kept})
        self.loaded_checkpoint_tag = name
        return str(path), zero_to_fp32.unpacked(data)

    def _load_state(
        self,
        saved: _converted.Opened,
        path: Path,
        strict: bool,
        is_whole: bool,
        custom_load_fn: Callable[..., Any] | None,
    ) -> list[dict[str, Any]]:
        """Load the weights, and the optimizer if whole; return the numbers of its groups."""
        found, state, groups = saved.state, self._core.state, self._settings.groups
        left_out = self._left_out(found.params, strict and custom_load_fn is None)
        numbers: list[dict[str, Any]] = []
        has_weights = False
        weights: dict[str, Any] | None = None
        load = lambda: {
            n: x.load() for n, x in zero_to_fp32.weights_of(found, found.params).items()
        }
        if is_whole and groups is not None:
            numbers = [
                _numbers_of(saved.data, str(i), group) for i, group in enumerate(groups.groups)
            ]
            groups.check_saved(state.opt_state, numbers)
            if saved.is_own:
                _converted.check_trained(saved)
                # DeepSpeed leaves the random generators as they are.
                is_own = lambda key: key.removeprefix("frozen.") in left_out
                kept = is_own if custom_load_fn is None else _converted.is_weight
                self._core.load(path, rng=False, reset=kept)
                has_weights = custom_load_fn is None
            else:
                # DeepSpeed's have other names too, which these groups do not know.
                numbers = [
                    {name: x for name, x in own.items() if name in group}
                    for own, group in zip(numbers, groups.groups, strict=True)
                ]
                weights = load()
                _converted.take_optimizer(self._core, saved, weights, numbers)
        if not has_weights:
            if custom_load_fn is not None:
                # Master weights that the function does not write follow the parameters.
                self._core.replace({})
            self.load_module_state_dict(weights or load(), strict, custom_load_fn)
        return numbers

    def _left_out(self, saved: Source, strict: bool) -> set[str]:
        """Return the frozen parameters that a checkpoint lacks, and refuse any if strict."""
        leaves, frozen = self._core.leaves, self._core.state.frozen
        missing = set() if frozen is None else {*frozen.layout.paths} - saved.keys()
        if any(x in leaves and leaves[x].requires_grad for x in missing):
            return set()
        if missing and strict:
            raise SpecMismatch(
                f"a strict load takes the whole model; got {saved.origin} without "
                f"{min(missing)!r}, which save_checkpoint(exclude_frozen_parameters=True) leaves "
                "out; pass load_module_strict=False to keep the engine's own values",
                leaf=min(missing),
            )
        return missing

    def load_universal_checkpoint(self) -> bool:
        """Return ``False``: :meth:`load_checkpoint` takes any number of ranks as it is."""
        return False

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "pytorch_model.bin",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole weights in the dtype of the state as one file; every rank must call.

        Returns ``True``, also where ``stage3_gather_16bit_weights_on_model_save`` is false.

        Raises:
            CheckpointError: on all ranks, where rank 0 cannot write.
        """
        weights = self.module_state_dict(exclude_frozen_parameters)
        whole = lambda: {name: value.cpu().clone() for name, value in weights.items()}
        path = Path(save_dir) / save_filename
        write_on_rank_0(self._ranks, path, lambda partial: torch.save(whole(), partial))
        return True

    save_fp16_model = save_16bit_model


def _needed(core: Engine, ranks: Group) -> Flat | None:
    """Return the frozen parameters that require a gradient; all ranks call.

    A pipeline returns all frozen parameters, if one of them requires a gradient.
    """
    if (frozen := core.state.frozen) is None:
        return None
    own = {name: x for name, x in core.leaves.items() if name in frozen.layout.paths}
    params = {name: x for name, x in own.items() if x.requires_grad}
    if not any(checkpoint.agree(ranks, None, bool(params))):
        return None
    if "loss_fn" in core._options:
        return frozen
    return shard(deferred_values(core.state, params), frozen.group)


def _groups(optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the parameter groups by position, without the parameters."""
    groups = () if optimizer is None else optimizer.param_groups
    return {
        str(index): {name: value for name, value in group.items() if name != "params"}
        for index, group in enumerate(groups)
    }


def _numbers_of(data: Mapping[str, Any], index: str, group: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint has for a parameter group."""
    # Earlier checkpoints have the rates only.
    rates = {str(i): {"lr": rate} for i, rate in enumerate(data.get("lr", ()))}
    saved = {**rates, **zero_to_fp32.unpacked(data.get("groups", {}))}.get(index, {})
    # An earlier Muon has None for a rate that is lr.
    return {
        name: value
        for name, value in saved.items()
        if name not in CONFIGURED and not (value is None and group.get(name) is not None)
    }


def _ties(module: nn.Module) -> dict[str, str]:
    """Return the other names of tied parameters, each with the name in the state."""
    names = {id(param): name for name, param in module.named_parameters()}
    every = module.named_parameters(remove_duplicate=False)
    return {name: names[id(param)] for name, param in every if names[id(param)] != name}


def _not_persistent(module: nn.Module) -> list[str]:
    """Return the buffers that are in a state, and not in ``state_dict()`` of the module."""
    return [
        f"{path}.{name}" if path else name
        for path, part in module.named_modules()
        for name in sorted(part._non_persistent_buffers_set)
    ]


def _check_tag(group: Group, tag: str) -> None:
    """Refuse a tag that is another one on some rank."""
    if any(other != tag for other in checkpoint.agree(group, None, tag)):
        raise CheckpointError(
            f"all ranks save under one tag; got {tag!r} here, and another one on some rank; leave "
            "the number of the rank out of the tag"
        )


def write_on_rank_0(group: Group, path: Path, write: Callable[[Path], None]) -> None:
    """Write a file that readers see whole or not at all; the other ranks wait.

    Raises:
        CheckpointError: on all ranks, where rank 0 cannot write.
    """

    def publish() -> None:
        partial = path.with_name(f"{path.name}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(partial)
            partial.replace(path)
        except OSError as error:
            raise CheckpointError(
                f"rank 0 writes {str(path)!r}; got {error}; pass a directory that rank 0 can write",
                path=str(path),
            ) from error

    checkpoint.agree(group, checkpoint.attempt(publish)[1] if group.rank == 0 else None)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
