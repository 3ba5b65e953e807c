"""Plans of several compositions side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from zfun import tree
from zfun.collectives import Group
from zfun.errors import OptionError
from zfun.options import ANY, DEVICE, Kind, takes
from zfun.planner.plans._hardware import HARDWARE, Hardware
from zfun.planner.plans._plan import GROUP_OR_SIZE, plan
from zfun.planner.plans._record import Plan
from zfun.tables import html_table, in_columns


def _is_recipes(x: Any) -> bool:
    return isinstance(x, Mapping) and all(
        isinstance(name, str) and callable(recipe) for name, recipe in x.items()
    )


_RECIPES = Kind(
    _is_recipes,
    ("a dict of functions of a group, by name",),
    "{'ZeRO-3': lambda group: zf.zero(3, loss_fn, optimizer, group)}",
)


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """Plans by name, made by :func:`compare`; ``print`` shows a table of them.

    Attributes:
        plans: the plans, in the order in which the compositions were given.
        hardware: the machine of the forecasts, if there is one.
    """

    plans: Mapping[str, Plan]
    hardware: Hardware | None = None

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table, the header first, without columns of zeros; bytes are of one rank.

        Example:
            >>> PlanComparison({}).rows()
            [('', 'kept', 'peak', 'in host memory', 'on disk', 'sent', 'operations')]
        """
        header = ["", "kept", "peak", "in host memory", "on disk", "sent", "operations"]
        is_told = any(plan.attention for plan in self.plans.values())
        header += ["attention"] * is_told
        if self.hardware is not None:
            header += ["at least, s", "at most, s", "bottleneck"]
        found = ((name, plan, *([_attention(plan)] * is_told)) for name, plan in self.plans.items())
        rows = [tuple(header), *(self._row(*one) for one in found)]
        columns = [column for column in zip(*rows, strict=True) if {*column[1:]} != {"0"}]
        return [*zip(*columns, strict=True)]

    def draw(self, *, device_bytes: float = math.inf) -> Any:
        """Draw the peak of each plan by category, and with hardware the times of a step.

        Args:
            device_bytes: the memory of the device, drawn as a line.

        Returns:
            A matplotlib figure, which a notebook shows.

        Raises:
            ImportError: matplotlib is missing; ``pip install zfun[demo]``.
        """
        from zfun.planner.plans._picture import draw_bars

        machine = self.hardware
        times = {} if machine is None else {name: p.on(machine) for name, p in self.plans.items()}
        return draw_bars(self.plans, times, device_bytes)

    def _row(self, name: str, plan: Plan, *told: str) -> tuple[str, ...]:
        counts = (
            plan.steady.device.total,
            plan.peak.device.total,
            plan.peak_of("host").host.total,
            plan.peak_of("disk").disk.total,
            plan.bytes_sent(),
        )
        row = [name, *(f"{n:,}" for n in counts), f"{plan.flops.total:.4g}", *told]
        if self.hardware is not None:
            found = plan.on(self.hardware)
            row += [f"{found.at_least_s:.3g}", f"{found.at_most_s:.3g}", found.bottleneck]
        return tuple(row)

    def __str__(self) -> str:
        return in_columns(self.rows())

    def _repr_html_(self) -> str:
        header, *rows = self.rows()
        return html_table(f"{len(rows)} compositions, bytes of a rank", header, rows)


def _attention(plan: Plan) -> str:
    return " and ".join(name for name, _ in plan.attention) or "none"


@takes(
    recipes=_RECIPES,
    params=ANY,
    batch=ANY,
    group=GROUP_OR_SIZE,
    device=DEVICE,
    hardware=HARDWARE | None,
)
def compare(
    recipes: Mapping[str, Callable[[Group], Any]],
    params: tree.Tree,
    batch: Any,
    group: Group | int,
    *,
    device: torch.device | str = "cpu",
    hardware: Hardware | None = None,
) -> PlanComparison:
    """Plan a step of several compositions.

    Args:
        recipes: functions of a group, as :func:`plan` takes, by name.
        params: a tree of tensors, of which shapes and dtypes count; ``meta`` tensors will do.
        batch: the batch of a rank, of which only shapes and dtypes count.
        group: as in :func:`plan`.
        device: where the loss is computed.
        hardware: a machine to forecast the time of a step on.

    Returns:
        The plans; ``print`` shows a table.

    Raises:
        OptionError: there is no composition.

    Example:
        >>> import zfun as zf
        >>> params = {name: torch.empty(64, 64, device="meta") for name in ("a", "b")}
        >>> loss = lambda params, x: torch.tanh(x @ params["a"] @ params["b"]).sum()
        >>> def stage(number):
        ...     return lambda group: zf.zero(number, loss, zf.optim.adamw(0.1), group)
        >>> recipes = {"ZeRO-2": stage(2), "ZeRO-3": stage(3)}
        >>> print(compare(recipes, params, torch.empty(8, 64), 8))
                  kept     peak    sent  operations
        ZeRO-2  40,960  110,592  61,432   3.277e+05
        ZeRO-3  12,288  110,592  61,488   3.277e+05
    """
    if not recipes:
        raise OptionError(
            "compare() takes at least one composition; got none; pass {'ZeRO-3': lambda group: "
            "zf.zero(3, loss_fn, optimizer, group)}"
        )
    return PlanComparison(
        {
            name: plan(recipe, params, batch, group, device=device)
            for name, recipe in recipes.items()
        },
        hardware,
    )
