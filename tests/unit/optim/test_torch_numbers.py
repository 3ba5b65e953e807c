"""Numbers that a step of one of torch's classes writes elsewhere than into the state of elements:
those of the group are carried from step to step, and others are refused by name.
"""

from __future__ import annotations

import collections
import itertools
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim
from zfun.errors import NotElementwiseError, OptionError, SpecMismatch
from zfun.testing import assert_same_bits

Body = Callable[[Any, dict[str, Any]], float]


def class_of(
    body: Body, own: dict[str, Callable[[], Any]] | None = None, **entries: Callable[[], Any]
) -> Any:
    """Return a class of optimizers.

    Args:
        body: ``body(optimizer, group)`` returns a factor of the rate, and writes somewhere.
        own: attributes of a new optimizer.
        entries: of the group of a new optimizer.
    """

    class Own(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1, weight_decay: float = 0.0) -> None:
            defaults = {"lr": lr, "weight_decay": weight_decay}
            super().__init__(params, defaults | {name: make() for name, make in entries.items()})
            for name, make in (own or {}).items():
                setattr(self, name, make())

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                rate = body(self, group) * group["lr"]
                for p in group["params"]:
                    if p.grad is not None:
                        p.sub_(p.grad + group["weight_decay"] * p, alpha=float(rate))

    return Own


def counted(optimizer: Any, group: dict[str, Any]) -> float:
    group["k"] += 1
    return 1 / float(group["k"])


def counted_from_nothing(optimizer: Any, group: dict[str, Any]) -> float:
    group["k"] = group.get("k", 0) + 1
    return 1 / group["k"]


def weighed(optimizer: Any, group: dict[str, Any]) -> float:
    """Schedule-free optimizers keep such numbers."""
    k = group["k"]
    lr_max = group["lr_max"] = max(group["lr"] * min(1.0, (k + 1) / 3), group["lr_max"])
    group["weight_sum"] += lr_max**2
    group["k"] = k + 1
    return lr_max**2 / group["weight_sum"]


def alternating(optimizer: Any, group: dict[str, Any]) -> float:
    group["is_odd"] = not group["is_odd"]
    return 1.0 if group["is_odd"] else 0.25


def from_ints_to_floats(optimizer: Any, group: dict[str, Any]) -> float:
    group["k"] += 1 if group["k"] < 2 else 0.5
    return 1 / group["k"]


def falling(optimizer: Any, group: dict[str, Any]) -> float:
    group["lr"] *= 0.5
    return 1.0


CARRIED: dict[str, tuple[Any, dict[str, Any]]] = {
    "int": (class_of(counted, k=lambda: 0), {"k": 5}),
    "first step": (class_of(counted_from_nothing), {"k": 5}),
    "tensor": (class_of(counted, k=lambda: torch.zeros(())), {"k": 5.0}),
    "numpy": (class_of(counted, k=lambda: np.float32(0)), {"k": 5.0}),
    "floats": (
        class_of(weighed, k=lambda: 0, lr_max=lambda: -1.0, weight_sum=lambda: 0.0),
        {"lr_max": 0.3, "weight_sum": 0.1**2 + 0.2**2 + 3 * 0.3**2, "k": 5},
    ),
    "bool": (class_of(alternating, is_odd=lambda: False), {"is_odd": True}),
    "int and float": (class_of(from_ints_to_floats, k=lambda: 0), {"k": 3.5}),
    "rate": (class_of(falling), {"lr": 0.3 / 2**5}),
}


def plainly(make: Any, num_steps: int = 5, **options: Any) -> dict[str, Tensor]:
    """Train with one optimizer of the class."""
    leaves = {name: torch.nn.Parameter(p) for name, p in models.flat_dict(models.mlp()).items()}
    optimizer = make(leaves.values(), lr=0.3, **options)
    for (batch,) in models.mlp_batches(num_steps, 1):
        optimizer.zero_grad()
        models.mlp_loss(models.unflat_dict(dict(leaves), models.mlp()), batch).backward()
        optimizer.step()
    return {name: p.detach() for name, p in leaves.items()}


def near(found: Any, expected: dict[str, Tensor]) -> None:
    for name, p in models.flat_dict(found).items():
        torch.testing.assert_close(p, expected[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("name", CARRIED)
def test_numbers_of_the_group_are_carried_at_every_stage(name: str, tmp_path: Path) -> None:
    make, numbers = CARRIED[name]
    expected = plainly(make)

    def main(group: zf.Group, stage: int) -> Any:
        def zero(stage: int) -> Any:
            rule = optim.from_torch(make, lr=0.3)
            return zf.zero(stage, models.mlp_loss, rule, group, bucket_bytes=300)

        z = zero(stage)
        state = z.init(models.mlp())
        for index, (batch,) in enumerate(models.mlp_batches(5, 1)):
            if index == 3:
                zf.save(tmp_path / str(stage), state, step=index)
                z = zero(3 - stage)
                state = zf.load(tmp_path / str(stage), z.init(models.mlp())).state
            state, _ = z.step(state, batch)
        return z.params(state), {key: x.item() for key, x in state.opt_state.group.items()}

    found = [zf.simulate(2, main, stage)[0] for stage in range(4)]
    for whole, group in found:
        near(whole, expected)
        assert group == pytest.approx(numbers, rel=1e-12)
        assert_same_bits(whole, found[0][0])


@pytest.mark.parametrize("name", ["int", "floats", "rate"])
def test_a_store_carries_the_numbers_too(name: str, tmp_path: Path) -> None:
    make, numbers = CARRIED[name]

    def main(group: zf.Group) -> Any:
        z = zf.zero(
            2,
            models.mlp_loss,
            optim.from_torch(make, lr=0.3),
            group,
            bucket_bytes=300,
            offload=zf.stores.Offload(optimizer=zf.stores.nvme(str(tmp_path))),
        )
        state = z.init(models.mlp())
        for (batch,) in models.mlp_batches(5, 1):
            state, _ = z.step(state, batch)
        assert {key: x.item() for key, x in state.opt_state.group.items()} == pytest.approx(numbers)
        return z.params(state)

    near(zf.simulate(2, main)[0], plainly(make))


def test_a_scheduler_sets_the_rate_while_the_count_is_the_states() -> None:
    make = class_of(counted, k=lambda: 0)
    rates = [0.5, 0.5, 0.25, 0.125]
    leaf = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    oracle = make([leaf], lr=0.5)
    optimizer = optim.inject_hyperparams(optim.from_torch)(make, lr=0.5)
    params = {"w": torch.ones(3, dtype=torch.float64)}
    state = optimizer.init(params)
    for rate in rates:
        oracle.param_groups[0]["lr"] = rate
        leaf.grad = torch.ones_like(leaf)
        oracle.step()
        state = optim.set_hyperparams(state, lr=rate)
        params, state = optimizer.apply({"w": torch.ones_like(leaf)}, state, params)
    torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-15, atol=0)
    assert state.inner.group["k"].item() == 4


def test_an_option_that_steps_rewrite_is_the_states_until_the_caller_sets_another() -> None:
    make = class_of(falling)
    leaf = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    oracle = make([leaf], lr=0.5)
    optimizer = optim.inject_hyperparams(optim.from_torch)(make, lr=0.5)
    params = {"w": torch.ones(3, dtype=torch.float64)}
    state = optimizer.init(params)
    for step in range(6):
        if step in (2, 3):
            oracle.param_groups[0]["lr"] = 0.3 / step
            state = optim.set_hyperparams(state, lr=0.3 / step)
        leaf.grad = torch.ones_like(leaf)
        oracle.step()
        params, state = optimizer.apply({"w": torch.ones_like(leaf)}, state, params)
    torch.testing.assert_close(params["w"], leaf.detach(), rtol=1e-15, atol=0)
    scheduled = optim.from_torch(make, lr=optim.linear(0.5, 0.1, 4))
    assert scheduled.init(params).group == {}


def test_a_float_in_the_state_of_a_tensor_keeps_all_digits() -> None:
    class Precise(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 0.1) -> None:
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                product = self.state[p]["product"] = self.state[p].get("product", 1.0) * 0.9
                p.sub_(p.grad, alpha=0.1 * product)

    optimizer, params = optim.from_torch(Precise), {"w": torch.zeros(1, dtype=torch.float64)}
    state = optimizer.init(params)
    for _ in range(3):
        params, state = optimizer.apply({"w": torch.ones_like(params["w"])}, state, params)
    assert state.scalars["product"].item() == 1.0 * 0.9 * 0.9 * 0.9


# Refused.


def on_self(optimizer: Any, group: dict[str, Any]) -> float:
    optimizer.k += 1
    return 1 / optimizer.k


def in_a_list(optimizer: Any, group: dict[str, Any]) -> float:
    optimizer.rates.append(0.9 ** len(optimizer.rates))
    return optimizer.rates[-1]


def in_an_object(optimizer: Any, group: dict[str, Any]) -> float:
    optimizer.schedule.steps += 1
    return 1 / optimizer.schedule.steps


def from_an_iterator(optimizer: Any, group: dict[str, Any]) -> float:
    return 1 / (1 + next(optimizer.steps))


def at_random(optimizer: Any, group: dict[str, Any]) -> float:
    return optimizer.generator.random()


def in_defaults(optimizer: Any, group: dict[str, Any]) -> float:
    optimizer.defaults["k"] = optimizer.defaults.get("k", 0) + 1
    return 1 / optimizer.defaults["k"]


def in_the_class(optimizer: Any, group: dict[str, Any]) -> float:
    type(optimizer).calls = getattr(type(optimizer), "calls", 0) + 1
    return 1 / type(optimizer).calls


def in_the_state_of_all(optimizer: Any, group: dict[str, Any]) -> float:
    optimizer.state["all"]["k"] = optimizer.state["all"].get("k", 0) + 1
    return 1.0


def in_a_dict_by_parameter(optimizer: Any, group: dict[str, Any]) -> float:
    for p in group["params"]:
        optimizer.buffers[p] = optimizer.buffers.get(p, 0.0) * 0.9 + p.grad
    return 1.0


def in_a_list_of_the_group(optimizer: Any, group: dict[str, Any]) -> float:
    group["rates"].append(1.0)
    return 1 / len(group["rates"])


def in_a_tensor_of_the_group(optimizer: Any, group: dict[str, Any]) -> float:
    group["counts"] = group["counts"] + 1
    return 1 / float(group["counts"][0])


def in_a_tuple(optimizer: Any, group: dict[str, Any]) -> float:
    group["betas"] = (group["betas"][0] * 0.5, 0.9)
    return group["betas"][0]


def in_words(optimizer: Any, group: dict[str, Any]) -> float:
    group["phase"] = "late"
    return 1.0


CALLS = [0]


def in_the_module(optimizer: Any, group: dict[str, Any]) -> float:
    CALLS[0] += 1
    return 1 / CALLS[0]


HIDDEN: dict[str, tuple[Any, str]] = {
    "self": (class_of(on_self, {"k": lambda: 0}), r"whose step changes self\.k; keep"),
    "list": (class_of(in_a_list, {"rates": list}), r"changes self\.rates\[0\]"),
    "deque": (class_of(in_a_list, {"rates": collections.deque}), r"changes self\.rates\[0\]"),
    "object": (
        class_of(in_an_object, {"schedule": lambda: types.SimpleNamespace(steps=0)}),
        r"changes self\.schedule\.steps",
    ),
    "iterator": (class_of(from_an_iterator, {"steps": itertools.count}), r"changes self\.steps"),
    "random": (
        class_of(at_random, {"generator": lambda: random.Random(0)}),
        r"changes self\.generator",
    ),
    "defaults": (class_of(in_defaults), r"changes self\.defaults\['k'\]"),
    "class": (class_of(in_the_class), r"changes Own\.calls"),
    "state": (class_of(in_the_state_of_all), r"changes self\.state\['all'\]\['k'\]"),
    "dict": (
        class_of(in_a_dict_by_parameter, {"buffers": dict}),
        r"changes self\.buffers\[Parameter\]",
    ),
    "list in the group": (
        class_of(in_a_list_of_the_group, rates=list),
        r"step writes 'rates' into the group, which is no number",
    ),
    "tensor in the group": (
        class_of(in_a_tensor_of_the_group, counts=lambda: torch.zeros(2)),
        r"step writes 'counts' into the group, which is no number",
    ),
    "tuple in the group": (
        class_of(in_a_tuple, betas=lambda: (0.8, 0.9)),
        r"step writes 'betas' into the group, which is no number",
    ),
    "words in the group": (
        class_of(in_words, phase=lambda: "early"),
        r"step writes 'phase' into the group, which is no number",
    ),
    "module": (
        class_of(in_the_module),
        r"changes an element by .* in 3 steps, and by .* if made anew, so a step writes to a place",
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_what_a_step_changes_elsewhere_is_refused_by_name(name: str) -> None:
    make, message = HIDDEN[name]
    with pytest.raises(OptionError, match=message):
        optim.from_torch(make, lr=0.1)


def distance(optimizer: Any, group: dict[str, Any]) -> float:
    """Estimate the step size from all elements, as Prodigy and D-Adaptation do."""
    seen = sum(float((p * p.grad).sum()) for p in group["params"])
    group["d"] = max(group["d"], 1e-3 * abs(seen))
    return group["d"]


def number_of_elements(optimizer: Any, group: dict[str, Any]) -> float:
    group["numel"] = sum(p.numel() for p in group["params"])
    return 1.0


def largest(optimizer: Any, group: dict[str, Any]) -> float:
    group["largest"] = max(float(p.grad.abs().max()) for p in group["params"])
    return 1 / (1 + group["largest"])


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (class_of(distance, d=lambda: 1e-6), "d"),
        (class_of(number_of_elements), "numel"),
        (class_of(largest), "largest"),
    ],
)
def test_numbers_that_depend_on_gradients_or_cuts_are_refused(make: Any, name: str) -> None:
    with pytest.raises(
        NotElementwiseError, match=f"a step of Own writes '{name}' into the group, which was .* for"
    ):
        optim.from_torch(make, lr=0.1)


def test_a_class_with_a_mode_for_evaluation_is_refused() -> None:
    class Modes(class_of(counted, k=lambda: 0)):  # type: ignore[misc]
        def train(self) -> None: ...
        def eval(self) -> None: ...

    with pytest.raises(OptionError, match=r"got Modes, whose train\(\) and eval\(\) exchange"):
        optim.from_torch(Modes, lr=0.1)


def test_steps_with_a_closure_only_are_refused() -> None:
    class Asks(class_of(counted, k=lambda: 0)):  # type: ignore[misc]
        def step(self, closure: Any) -> None:  # type: ignore[override]
            closure()

    class Waits(class_of(counted, k=lambda: 0)):  # type: ignore[misc]
        def step(self, closure: Any = None) -> None:
            if closure is not None:
                closure()

    with pytest.raises(NotElementwiseError, match=r"Asks raised TypeError .*closure"):
        optim.from_torch(Asks, lr=0.1)
    with pytest.raises(OptionError, match=r"got Waits, whose steps then change nothing"):
        optim.from_torch(Waits, lr=0.1)


def test_state_that_a_later_step_makes_is_refused() -> None:
    class Later(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] > 1:
                    state["before"] = p.grad + state.get("before", 0.0)
                p.sub_(0.1 * state.get("before", p.grad))

    with pytest.raises(OptionError, match=r"got Later, where a later step makes 'before'"):
        optim.from_torch(Later)


def test_a_number_that_changes_its_kind_later_is_refused() -> None:
    def body(optimizer: Any, group: dict[str, Any]) -> float:
        group["k"] += 1 if group["k"] < 5 else 0.5
        return 1.0

    optimizer, params = optim.from_torch(class_of(body, k=lambda: 0)), {"w": torch.ones(2)}
    state = optimizer.init(params)
    for _ in range(5):
        params, state = optimizer.apply(params, state, params)
    with pytest.raises(OptionError, match=r"has made 'k' torch\.float64 that was torch\.int64"):
        optimizer.apply(params, state, params)


def test_the_group_of_another_class_is_refused() -> None:
    params = {"w": torch.ones(2)}
    first = optim.from_torch(class_of(counted, k=lambda: 0))
    second = optim.from_torch(class_of(counted_from_nothing, own=None, other=lambda: 1))
    third = optim.from_torch(class_of(alternating, is_odd=lambda: True))
    second.apply(params, first.init(params), params)
    with pytest.raises(
        SpecMismatch, match=r"got \['k'\] where torch\.optim\.Own keeps \['is_odd'\]"
    ):
        third.apply(params, first.init(params), params)


def test_a_new_rate_needs_no_new_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler sets a new rate in each step."""
    runs = []
    body = lambda optimizer, group: runs.append(1) or counted(optimizer, group)
    make = class_of(body, k=lambda: 0)
    optim.from_torch(make, lr=0.1)
    probed = len(runs)
    optim.from_torch(make, lr=0.2)
    optim.from_torch(make, lr=optim.linear(0.1, 0.0, 3))
    assert len(runs) == probed > 6
    optim.from_torch(make, lr=0.2, weight_decay=0.5)
    assert len(runs) == 2 * probed
