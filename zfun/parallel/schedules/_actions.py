"""Actions, and lists of these."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from zfun.options import each, instance

FORWARD, BACKWARD, INPUTS, WEIGHTS = "F", "B", "I", "W"
MESSAGES = ("SEND_F", "RECV_F", "SEND_B", "RECV_B")


class Action(NamedTuple):
    """One action of a rank; see [Note: actions].

    Attributes:
        stage: the stage.
        kind: ``F``, ``B``, ``I`` or ``W``; in lists with messages also ``SEND_F``, ``RECV_F``,
            ``SEND_B`` and ``RECV_B``, of the outputs of the stage (or its inputs, received) and of
            their cotangents.
        micro_batch: the micro-batch.
    """

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


ACTIONS = each(
    each(instance(Action, "an action", "Action(0, 'F', 0)"), "a list of actions", "[]"),
    "the actions of each rank",
    "zf.parallel.schedules.gpipe(2, 4)",
    least=1,
)

Schedule: TypeAlias = tuple[tuple[Action, ...], ...]
"""For each rank its actions, in order."""
