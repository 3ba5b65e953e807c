"""``deepspeed.runtime.lr_schedules``: schedules that write ``lr`` into parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from zfun.errors import OptionError
from zfun.interop.deepspeed._absent import absent
from zfun.interop.deepspeed.runtime._constants import constants_of
from zfun.interop.ds_config._optimizers import (
    Rule,
    completed,
    momentum_for,
    of_group,
    rates_of,
    schedule_for,
)


class Scheduled:
    """A schedule over steps, by the keys that the configuration has for the type.

    A list of rates or momenta has one for each parameter group.

    Attributes:
        last_batch_iteration: the number of the last step; -1 before the first.
    """

    order: ClassVar[str] = ""

    def __init__(self, optimizer: torch.optim.Optimizer, *params: Any, **options: Any) -> None:
        kind, names = type(self).__name__, self.order.split()
        if len(params) > len(names):
            raise OptionError(
                f"{kind} takes {len(names)} arguments by position; got {len(params)}; pass the "
                "others by name"
            )
        given = {**dict(zip(names, params, strict=False)), **options}
        rule = completed(Rule(kind, given))
        self.last_batch_iteration = -1
        self.optimizer = optimizer
        groups = optimizer.param_groups
        own = [of_group(rule, index, len(groups)) for index in range(len(groups))]
        # A schedule counts steps from the last_batch_iteration of the configuration.
        self._rates = [
            {name: schedule_for(one, lr=_own_rate(group, name)) for name in rates_of(group)}
            for one, group in zip(own, groups, strict=True)
        ]
        self._momenta = [momentum_for(one) for one in own]
        for one, group, momentum in zip(own, groups, self._momenta, strict=True):
            if momentum is not None:
                group["max_momentum"] = one.options["cycle_max_mom"]
        self._write()

    def _write(self) -> None:
        """Write the values of the next step into the groups."""
        taken = self.last_batch_iteration + 1
        # A group that was added later keeps its own rate.
        own = zip(self.optimizer.param_groups, self._rates, self._momenta, strict=False)
        for group, rates, momentum in own:
            group |= {name: rate(taken) for name, rate in rates.items()}
            # DeepSpeed's Muon has no betas that a cycle changes.
            if momentum is not None and "betas" in group and "muon_lr" not in group:
                group["betas"] = (momentum(taken), 0.99)
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to the given one."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._write()

    def get_lr(self) -> list[float]:
        """Return the learning rate of each group for the next step."""
        return list(self._last_lr)

    get_last_lr = get_lr

    def state_dict(self) -> dict[str, int]:
        """Return the number of the last step."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Go on from the step of :meth:`state_dict`: the next step writes the rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]
        groups = self.optimizer.param_groups
        if any("muon_lr" in group and "base_lr" not in group for group in groups):
            # Those of an earlier Muon have the rates of the configuration.
            self._write()


class WarmupLR(Scheduled):
    """A rise to ``warmup_max_lr``, then constant.

    Example:
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
        >>> rise = WarmupLR(optimizer, 0.0, 0.5, warmup_num_steps=2, warmup_type="linear")
        >>> rates = []
        >>> for _ in range(4):
        ...     rates.append(optimizer.param_groups[0]["lr"])
        ...     rise.step()
        >>> rates
        [0.0, 0.0, 0.25, 0.5]
    """

    order = "warmup_min_lr warmup_max_lr warmup_num_steps warmup_type"


class WarmupDecayLR(Scheduled):
    """A rise to ``warmup_max_lr``, then a straight fall to ``warmup_min_lr`` at the end."""

    order = f"total_num_steps {WarmupLR.order}"


class WarmupCosineLR(Scheduled):
    """A rise to the learning rate of each group, then half a cosine down."""

    order = "total_num_steps warmup_min_ratio warmup_num_steps cos_min_ratio warmup_type"


class OneCycle(Scheduled):
    """A rise and a fall of the learning rate, and of the momentum the other way."""

    order = "cycle_min_lr cycle_max_lr"


class LRRangeTest(Scheduled):
    """A rise in steps, to find the largest learning rate that trains."""

    order = (
        "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate "
        "lr_range_test_staircase"
    )


VALID_LR_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
globals().update(constants_of("runtime.lr_schedules"))


def _own_rate(group: Mapping[str, Any], name: str) -> float:
    # A group without Muon has one rate, and an earlier Muon has None for a rate that is lr.
    return float(group["lr"] if group.get(name) is None else group[name])


def scheduler_of(rule: Rule, optimizer: torch.optim.Optimizer) -> Scheduled:
    """Return the scheduler of a configuration for an optimizer."""
    return globals()[rule.kind](optimizer, **rule.options)


__getattr__ = absent("runtime.lr_schedules", globals())
