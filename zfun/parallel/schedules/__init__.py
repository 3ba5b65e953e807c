"""Schedules of a pipeline, as data: for each rank the list of its actions, in order.

[Note: actions]
A stage has three actions for each micro-batch. ``F`` is forward, and ``B`` backward; a schedule may
divide ``B`` in two, of which ``I`` differentiates the inputs and ``W`` the parameters. An action
waits for what it needs: ``F`` for ``F`` of the stage before, ``B`` and ``I`` for ``F`` of the same
stage and for ``B`` or ``I`` of the stage after, and ``W`` for ``I``. The order of a list says the
rest. ``2F0`` is forward of stage 2 for micro-batch 0, as in the tables of
``torch.distributed.pipelining``, which :func:`read_csv` and :func:`write_csv` exchange.

A schedule has no sends and receives, because they follow: :func:`with_messages` adds them. It runs
all lists in one order, and adds a message to both of its ranks at once. So any two ranks have their
messages in one order, and no rank waits for a message that comes later in this order: there is no
deadlock, whatever the time that an action takes.
"""

from zfun.parallel.schedules._actions import ACTIONS as ACTIONS
from zfun.parallel.schedules._actions import BACKWARD as BACKWARD
from zfun.parallel.schedules._actions import FORWARD as FORWARD
from zfun.parallel.schedules._actions import INPUTS as INPUTS
from zfun.parallel.schedules._actions import MESSAGES as MESSAGES
from zfun.parallel.schedules._actions import WEIGHTS as WEIGHTS
from zfun.parallel.schedules._actions import Action, Schedule
from zfun.parallel.schedules._checks import (
    activations_in_flight,
    bubble,
    check_schedule,
    draw,
    ranks_of_stages,
    with_messages,
)
from zfun.parallel.schedules._orders import BY_NAME as BY_NAME
from zfun.parallel.schedules._orders import (
    gpipe,
    interleaved,
    one_forward_one_backward,
    zero_bubble,
)
from zfun.parallel.schedules._tables import read_csv, write_csv

__all__ = [
    "Action",
    "Schedule",
    "activations_in_flight",
    "bubble",
    "check_schedule",
    "draw",
    "gpipe",
    "interleaved",
    "one_forward_one_backward",
    "ranks_of_stages",
    "read_csv",
    "with_messages",
    "write_csv",
    "zero_bubble",
]
