"""Schedules as the tables that torch reads."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from zfun.errors import OptionError
from zfun.options import TEXT, takes
from zfun.parallel.schedules._actions import ACTIONS, MESSAGES, Action, Schedule
from zfun.parallel.schedules._checks import check_schedule

# Of torch's tables: what follows from the schedule, or is no matter of a schedule here.
_IGNORED = ("UNSHARD", "RESHARD", "REDUCE_GRAD", *MESSAGES)
_CELL = re.compile(rf"(\d+)(F|B|I|W|{'|'.join(_IGNORED)})(\d*)")
_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")


@takes(text=TEXT)
def read_csv(text: str) -> Schedule:
    r"""Read a schedule as ``torch.distributed.pipelining`` writes it: a row of actions for a rank.

    Args:
        text: the table. Empty cells, and the sends, receives, gathers and reductions of tables with
            communication, are left out.

    Returns:
        The schedule.

    Raises:
        OptionError: a cell is no action, or the schedule cannot run; see :func:`check_schedule`.

    Example:
        >>> read_csv("0F0,,0B0\n1F0,1B0,1REDUCE_GRAD")[1]
        (Action(stage=1, kind='F', micro_batch=0), Action(stage=1, kind='B', micro_batch=0))
    """
    rows = csv.reader(io.StringIO(text))
    schedule = tuple(tuple(action for cell in row for action in _actions_in(cell)) for row in rows)
    check_schedule(schedule)
    return schedule


def _actions_in(cell: str) -> Iterator[Action]:
    cell = cell.strip()
    together = _TOGETHER.fullmatch(cell)
    for part in together[1].split(";") if together else [cell] if cell else []:
        found = _CELL.fullmatch(part.strip())
        if found is None or (found[2] not in _IGNORED and not found[3]):
            raise OptionError(
                "a cell of a schedule has a stage, an action and a micro-batch, such as 2F0; got "
                f"{cell!r}; the actions are F, B, I and W"
            )
        if found[2] not in _IGNORED:
            yield Action(int(found[1]), found[2], int(found[3]))


@takes(schedule=ACTIONS)
def write_csv(schedule: Sequence[Sequence[Action]]) -> str:
    r"""Write a schedule as a table that ``torch.distributed.pipelining`` reads.

    Args:
        schedule: the schedule, also with messages.

    Returns:
        The table.

    Example:
        >>> from zfun.parallel.schedules import one_forward_one_backward
        >>> write_csv(one_forward_one_backward(1, 2))
        '0F0,0B0,0F1,0B1\n'
    """
    return "".join(",".join(map(str, actions)) + "\n" for actions in schedule)
