"""``deepspeed.checkpointing``: recompute a block in backward, by :func:`zfun.remat`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfun import stores
from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed._ranks import group_of
from zfun.interop.deepspeed.accelerator import get_accelerator
from zfun.interop.ds_config._read import read
from zfun.transforms import remat

_MODEL_PARALLEL = "model-parallel-rng"


# The options of remat() that configure() chose, for the whole process, as in DeepSpeed.
_CHOSEN: dict[str, Any] = {}


def configure(
    mpu_: Any = None,
    deepspeed_config: Mapping[str, Any] | str | Path | None = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Choose where :func:`checkpoint` keeps the inputs of a block: in host memory, or in parts.

    The arguments are DeepSpeed's; the section ``activation_checkpointing`` of a configuration
    counts where an argument is ``None``. Only ``partition_activations``, with ``mpu_``, and
    ``checkpoint_in_cpu`` are used: the allocator keeps blocks.

    Example:
        >>> configure(None, checkpoint_in_cpu=True)
        >>> is_configured()
        True
        >>> reset()
    """
    section: Mapping[str, Any] = {}
    if deepspeed_config is not None:
        section = read(deepspeed_config)[0].get("activation_checkpointing", {})
    in_host, parts = checkpoint_in_cpu, partition_activations
    in_host = section.get("cpu_checkpointing") if in_host is None else in_host
    parts = section.get("partition_activations") if parts is None else parts
    ranks = mpu_.get_model_parallel_group() if parts and mpu_ is not None else None
    _CHOSEN["store"] = stores.host() if in_host else None
    _CHOSEN["shard_over"] = None if ranks is None else group_of(ranks)


def is_configured() -> bool:
    """Return whether :func:`configure` was called.

    Example:
        >>> is_configured()
        False
    """
    return "store" in _CHOSEN


def reset() -> None:
    """Forget what :func:`configure` chose.

    Example:
        >>> reset()
    """
    _CHOSEN.clear()


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, keep the inputs only, and call the function again in backward.

    States of :func:`get_rng_tracker` are restored too, as the generators are.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> checkpoint(lambda x: (x * x).sum(), x).backward()
        >>> x.grad
        tensor([2., 2.])
    """
    tracker = get_rng_tracker()
    if not tracker.states_:
        return remat(function, **_CHOSEN)(*args)
    begun, is_second = tracker.get_states(), False

    def again(*args: Any) -> Any:
        # The first call leaves the states that it reached; the second goes back to them.
        now = tracker.get_states()
        tracker.set_states(dict(begun))
        try:
            return function(*args)
        finally:
            if is_second:
                tracker.set_states(now)

    out = remat(again, **_CHOSEN)(*args)
    is_second = True
    return out


non_reentrant_checkpoint = checkpoint


class CheckpointFunction:
    """DeepSpeed's class under :func:`checkpoint`."""

    @staticmethod
    def apply(run_function: Callable[..., Any], all_outputs: list[Any], *args: Any) -> Any:
        """Call :func:`checkpoint`, and add the results to a list.

        Example:
            >>> results = []
            >>> CheckpointFunction.apply(lambda x: (x, x + 1), results, torch.ones(()))
            (tensor(1.), tensor(2.))
            >>> len(results)
            2
        """
        found = checkpoint(run_function, *args)
        all_outputs += found if isinstance(found, (tuple, list)) else (found,)
        return found


def partition_activations_in_checkpoint(partition_activation: bool) -> None:
    """Refuse to partition without model parallel ranks, which :func:`configure` takes.

    Raises:
        OptionError: ``True``, and :func:`configure` was not called with ranks.

    Example:
        >>> partition_activations_in_checkpoint(False)
    """
    if not partition_activation:
        _CHOSEN.pop("shard_over", None)
    elif _CHOSEN.get("shard_over") is None:
        raise OptionError(
            "inputs of blocks are partitioned over model parallel ranks; got True without ranks; "
            "call configure(mpu, partition_activations=True)"
        )


def set_num_layers(nlayers: int) -> None:
    """Do nothing: inputs are not kept in one contiguous buffer."""


# Random numbers of model parallel ranks, by Megatron's names: each rank of a group has a generator
# of its own, and the default generators are the ranks' common ones. checkpoint() restores both.


class CudaRNGStatesTracker:
    """States of the device's generator by name.

    Example:
        >>> tracker = CudaRNGStatesTracker()
        >>> tracker.add("dropout", 7)
        >>> with tracker.fork("dropout"):
        ...     first = torch.rand(1)
        >>> tracker.add("again", 8)
        >>> with tracker.fork("dropout"):
        ...     second = torch.rand(1)
        >>> bool(first == second)
        False
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def get_states(self) -> dict[str, Tensor]:
        """Return the states by name."""
        return dict(self.states_)

    def set_states(self, states: dict[str, Tensor]) -> None:
        """Take states by name."""
        self.states_ = states

    def add(self, name: str, seed: int) -> None:
        """Add the state that a seed begins.

        Raises:
            OptionError: the name or the seed is taken.
        """
        if seed in self.seeds_ or name in self.states_:
            raise OptionError(
                f"each state has a name and a seed of its own; got {name!r} with {seed}, which is "
                "taken; call reset() first"
            )
        self.seeds_.add(seed)
        with self._drawing(name):
            get_accelerator().manual_seed(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL) -> Iterator[None]:
        """Return a context in which the device draws from a state, which goes on."""
        if name not in self.states_:
            raise OptionError(
                f"fork() takes the name of a state; got {name!r}, and the names are "
                f"{list(self.states_)}; call add() first"
            )
        with self._drawing(name):
            get_accelerator().set_rng_state(self.states_[name])
            yield

    @contextlib.contextmanager
    def _drawing(self, name: str) -> Iterator[None]:
        """Keep the generator's state at the end under a name, and put back that of the start."""
        here = get_accelerator()
        before = here.get_rng_state()
        try:
            yield
        finally:
            self.states_[name] = here.get_rng_state()
            here.set_rng_state(before)


@functools.cache
def get_rng_tracker() -> CudaRNGStatesTracker:
    """Return the states of this process."""
    return CudaRNGStatesTracker()


get_cuda_rng_tracker = get_rng_tracker


def model_parallel_cuda_manual_seed(seed: int, tp_rank: int = 0) -> None:
    """Seed the default generators, and the state of a model parallel rank.

    Example:
        >>> model_parallel_cuda_manual_seed(0)
    """
    tracker = get_rng_tracker()
    tracker.reset()
    torch.manual_seed(seed)
    tracker.add(_MODEL_PARALLEL, seed + 2718 + tp_rank)


model_parallel_reconfigure_tp_seed = model_parallel_cuda_manual_seed

__getattr__ = absent("runtime.checkpointing", globals(), "checkpointing")
