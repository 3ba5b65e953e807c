"""n ranks as threads of one process, which take turns.

One rank runs at a time: until a collective whose result is missing, or to the end. Then the next
rank runs that can continue, in rank order, round and round. A simulation is therefore
deterministic, and each rank has its own state of torch's default random generator, as a process
has.

The last rank to arrive at a collective computes it for all, by the definition of the op
(``_world.evaluate``): a collective of 64 ranks costs one evaluation and 64 wake-ups, not 4032
messages. Process groups move the same values by messages, and tests compare their results with
these, bit by bit.
"""

from __future__ import annotations

import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Concatenate, ParamSpec, TypeVar, final

import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor
from torch._functorch import eager_transforms

from zfun.collectives._group import Group, own_part
from zfun.collectives._ops import Collective, check_collective
from zfun.collectives._ranges import with_ranges
from zfun.collectives._work import Work
from zfun.collectives.backends._world import Outcome, World
from zfun.errors import OptionError, check_process
from zfun.options import ANY, integer, takes

_Params = ParamSpec("_Params")
_Result = TypeVar("_Result")


@takes(n=integer(1), args=ANY)
def simulate(
    n: int,
    fn: Callable[Concatenate[Group, _Params], _Result],
    *args: _Params.args,
    **kwargs: _Params.kwargs,
) -> list[_Result]:
    """Call ``fn(group, *args)`` on n ranks, which are threads of this process; return results.

    Ranks take turns: one runs until it waits for the others, then the next, in rank order, so a
    program without threads and clocks of its own gives the same result every time. Each rank has
    its own state of torch's default random generator, at first a copy of the caller's, whose state
    does not change: ``torch.manual_seed``, ``torch.rand`` and dropout act as in processes. Python's
    and numpy's generators are shared. Ranks wait for each other in collectives only: a rank that
    waits for another rank in a lock or a queue of its own waits for ever.

    All ranks receive the same ``args`` objects, so every rank sees in-place changes of another.
    Ranks may share an ``nn.Module`` under :func:`zfun.functional`; ``functional_call`` changes the
    module temporarily, so each rank would need a module of its own, made inside ``fn``. Tensors
    must live on the CPU, since autograd runs the backward pass of other devices on a thread that
    the ranks would share.

    Args:
        n: the number of ranks, one to some hundreds.
        fn: the program of a rank.
        args: passed to ``fn`` after the group.
        kwargs: passed to ``fn``.

    Returns:
        The results in rank order.

    Raises:
        CollectiveMismatch: the ranks started different collectives, or wait for each other in a
            circle.
        PeerLost: a rank returned while others waited for it.
        Exception: the error of ``fn`` on the lowest rank that failed first; the other ranks end at
            once.

    Example:
        >>> import torch
        >>> from zfun.collectives import all_reduce
        >>> simulate(2, lambda group: all_reduce(torch.tensor(group.rank + 1), group).item())
        [3, 3]
    """
    world = World(n)
    outcomes: list[Outcome[_Result]] = [Outcome() for _ in range(n)]
    grad_mode = torch.is_grad_enabled()

    def run(rank: int) -> None:
        world.take_turn(rank)
        try:
            with torch.set_grad_enabled(grad_mode):
                outcomes[rank].result.append(
                    fn(_SimulatedGroup(rank, world, tuple(range(n))), *args, **kwargs)
                )
        except BaseException as error:  # noqa: BLE001, the caller of simulate receives every error
            outcomes[rank].error = error
            world.fail(rank, error)
        finally:
            world.leave(rank)

    threads = [
        threading.Thread(
            target=contextvars.copy_context().run,
            args=(run, rank),
            name=f"rank {rank} of {n}",
            daemon=True,
        )
        for rank in range(n)
    ]
    before = torch.get_rng_state()
    with _one_forward_ad_level():
        try:
            for thread in threads:
                thread.start()
            world.begin()
            for thread in threads:
                thread.join()
        except BaseException as error:
            # Only the main thread receives an interrupt. The ranks end at their next collective,
            # and the main thread does not wait for them.
            world.fail(None, error)
            raise
        finally:
            torch.set_rng_state(before)
    if (error := world.original_error(outcomes)) is not None:
        raise error
    world.check_nothing_left()
    return [outcome.result[0] for outcome in outcomes]


@final
class _SimulatedGroup(Group):
    """One rank of a simulated group.

    All groups of a simulation share a world, so that the world notices ranks which wait for each
    other in different groups.
    """

    def __init__(
        self,
        world_rank: int,
        world: World,
        members: tuple[int, ...],
        channel: tuple[int, ...] = (),
    ) -> None:
        self.rank = members.index(world_rank)
        self.size = len(members)
        self._world_rank = world_rank
        self._world = world
        self._members = members
        # Distinguishes the collectives of this group from those of groups with the same members.
        self._channel = channel
        self._num_subgroups = 0
        self._thread = threading.get_ident()
        self._process = os.getpid()

    def subgroup(self, parts: Sequence[Sequence[int]], name: str = "") -> Group:
        part = own_part(self, parts)
        self._num_subgroups += 1
        members = tuple(self._members[rank] for rank in part)
        return _SimulatedGroup(
            self._world_rank, self._world, members, (*self._channel, self._num_subgroups)
        )

    @with_ranges
    def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
        check_collective(call, x, out, self.size)
        if x.device.type != "cpu":
            raise OptionError(
                f"a simulated group moves CPU tensors only; {call.op.kind} got one on {x.device}; "
                "move it to the CPU"
            )
        check_process(self._process, "a simulated group")
        if threading.get_ident() != self._thread:
            raise OptionError(
                f"a simulated group belongs to the thread of its rank; rank {self._world_rank}'s "
                f"was used in another thread ({call.op.kind} {call.name!r}); ranks must not share "
                "what changes while it runs: give each its own module, made inside the rank's "
                "function"
            )
        # A copy, so that the sender may change the input after the start, as with a real message.
        sent = x.detach().clone()
        pending = self._world.arrive(
            self._world_rank,
            self._members,
            self._channel,
            call,
            sent,
            None if out is None else out.detach(),
        )

        def wait() -> Tensor:
            result = self._world.wait(self._world_rank, pending)
            return result if out is None else out

        return Work(wait)

    def __repr__(self) -> str:
        return f"<simulated group: rank {self.rank} of {self.size}>"


@contextlib.contextmanager
def _one_forward_ad_level() -> Iterator[None]:
    """Hold torch's forward-mode level open while the ranks run.

    The level is per process and not per thread: the first rank to leave a ``torch.func.jvp`` would
    clear the tangents of the others. An additional nesting level makes the ``jvp`` calls of the
    ranks neither open nor close the level.
    """
    if forward_ad._current_level >= 0:
        yield
        return
    with forward_ad.dual_level():
        eager_transforms.JVP_NESTING += 1  # type: ignore[assignment]
        try:
            yield
        finally:
            eager_transforms.JVP_NESTING -= 1  # type: ignore[assignment]
