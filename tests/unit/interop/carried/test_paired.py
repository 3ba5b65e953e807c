"""Models and optimizers that come to accelerate in any order, and from an earlier run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from tests.interop import fabrics, trainers
from tests.unit.interop.gradients.test_followed import accelerator_of, fresh
from tests.unit.interop.runs.test_missed import EACH_STAGE
from zfun.errors import OptionError
from zfun.interop.transformers import Trainer

pytestmark = pytest.mark.usefixtures("fresh_accelerate")
WIDTH = 3


def batch(seed: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))


def adamw(*modules: nn.Module) -> Any:
    return torch.optim.AdamW([x for module in modules for x in module.parameters()], 0.05)


def steps(host: Any, run: Callable[[Tensor], Tensor], *optimizers: Any, first: int = 0) -> None:
    for seed in range(first, first + 2):
        host.backward(run(batch(seed)).square().mean())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def parts() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(WIDTH, 4), nn.Linear(4, 4), nn.Linear(4, 1)]


def chain(a: Any, b: Any, c: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: c(b(a(x)).tanh())


def values(*modules: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for module in modules for x in module.parameters()]


ORDERS = ["abco", "oabc", "aobc", "abo,c", "a,o,b,c", "o,c,b,a"]


def in_order(host: Any, order: str) -> list[Tensor]:
    a, b, c = parts()
    found: dict[str, Any] = {"a": a, "b": b, "c": c, "o": adamw(a, b, c)}
    for names in order.split(","):
        made = host.prepare(*(found[x] for x in names))
        found.update(zip(names, made if len(names) > 1 else [made], strict=True))
    steps(host, chain(*(found[x] for x in "abc")), found["o"])
    return values(a, b, c)


@EACH_STAGE
@pytest.mark.parametrize("order", ORDERS)
def test_an_optimizer_has_models_in_any_order(stage: int, order: str) -> None:
    """Of two models, one after the optimizer was refused, with the words of another case."""
    found = in_order(accelerator_of(stage), order)
    torch.testing.assert_close(found, in_order(accelerator_of(None), order))
    assert not torch.equal(found[0], values(*parts())[0])


def with_two_optimizers(host: Any) -> list[Tensor]:
    a, b, c = parts()
    first, second = adamw(a, c), torch.optim.SGD(b.parameters(), 0.1, momentum=0.9)
    run = host.prepare(a), host.prepare(b)
    first, second = host.prepare(first, second)
    run = chain(*run, host.prepare(c))
    steps(host, run, first, second)
    return values(a, b, c)


def after_steps(host: Any) -> list[Tensor]:
    """A loss has the parameters of a part, which is prepared between the micro-batches."""
    a, b, c = parts()
    optimizer = adamw(a, b, c)
    one, two, optimizer = host.prepare(a, b, optimizer)
    by_hand = lambda x: two(one(x)).tanh() @ c.weight.T + c.bias
    steps(host, by_hand, optimizer)
    host.backward(by_hand(batch(7)).square().mean())
    steps(host, chain(one, two, host.prepare(c)), optimizer, first=2)
    return values(a, b, c)


def a_second_run(
    host: Any, *, optimizer_first: bool = False, wrapped: bool = False
) -> list[Tensor]:
    model = nn.Sequential(*parts())
    optimizer = adamw(model)
    live, prepared = host.prepare(model, optimizer)
    steps(host, live, prepared)
    second = type(host)(cpu=True)
    given = prepared if wrapped else optimizer
    if optimizer_first:
        prepared = second.prepare(given)
        live = second.prepare(host.unwrap_model(live))
    else:
        live, prepared = second.prepare(host.unwrap_model(live), given)
    steps(second, live, prepared, first=2)
    return values(model)


def a_second_run_with_the_optimizer_first(host: Any) -> list[Tensor]:
    return a_second_run(host, optimizer_first=True)


def a_second_run_with_the_wrapper(host: Any) -> list[Tensor]:
    return a_second_run(host, wrapped=True)


def a_second_run_of_two_optimizers(host: Any) -> list[Tensor]:
    model = nn.Sequential(*parts())
    first, second = adamw(model[0]), adamw(model[1], model[2])
    steps(host, *host.prepare(model, first, second))
    other = type(host)(cpu=True)
    steps(other, *other.prepare(model, first, second), first=2)
    third = type(host)(cpu=True)
    steps(third, *third.prepare(model, adamw(model)), first=4)
    return values(model)


def back_to_the_first(host: Any) -> list[Tensor]:
    """The first of two optimizers keeps its moments, and goes on after the second."""
    model = nn.Sequential(*parts())
    live, first = host.prepare(model, adamw(model))
    steps(host, live, first)
    steps(host, live, host.prepare(torch.optim.SGD(model.parameters(), 0.1)))
    moments = [x["exp_avg"].clone() for x in first.state_dict()["state"].values()]
    steps(host, live, host.prepare(first))
    return [*values(model), *moments]


@EACH_STAGE
@pytest.mark.parametrize(
    "loop",
    [
        with_two_optimizers,
        after_steps,
        a_second_run,
        a_second_run_with_the_optimizer_first,
        a_second_run_with_the_wrapper,
        a_second_run_of_two_optimizers,
        back_to_the_first,
    ],
    ids=lambda loop: loop.__name__,
)
def test_an_optimizer_goes_on_with_its_moments(stage: int, loop: Callable[[Any], Any]) -> None:
    torch.testing.assert_close(loop(accelerator_of(stage)), loop(accelerator_of(None)))


def test_the_first_accelerator_does_not_step_a_second_ones_model() -> None:
    host = accelerator_of(2)
    model = nn.Sequential(*parts())
    _, first = host.prepare(model, adamw(model))
    type(host)(cpu=True).prepare(model, adamw(model))
    with pytest.raises(OptionError, match="a parameter has one optimizer, the last one"):
        first.step()


@pytest.mark.processes
@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("stage", [1, 3])
def test_a_second_fabric_goes_on_with_moments(stage: int) -> None:
    def loop(strategy: str) -> list[Tensor]:
        model = nn.Sequential(*parts())
        optimizer = adamw(model)
        for first in (0, 2):
            fabric = fabrics.fabric_of(strategy)
            live, prepared = fabric.setup(model, optimizer)
            steps(fabric, live, prepared, first=first)
        return values(model)

    torch.testing.assert_close(loop(f"zfun_stage_{stage}"), loop("auto"))


OPTIONS = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True, "max_steps": 4}
# The best step is not the last one.
BEST = {
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "greater_is_better": False,
    "eval_strategy": "steps",
    "eval_steps": 2,
}
LOADS: dict[str, dict[str, Any]] = {
    "resumed": OPTIONS,
    "best": OPTIONS | BEST,
    "best of whole states": OPTIONS | BEST | {"save_only_model": False},
}


@pytest.mark.filterwarnings("ignore:.*save_steps")
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("loads", LOADS)
def test_a_trainer_that_loads_weights_alone_keeps_moments(
    zero: int, loads: str, tmp_path: Path
) -> None:
    """It began with new ones, or with those of the best checkpoint, in silence."""
    resumes = loads == "resumed"

    def trained(cls: Any, **more: Any) -> Any:
        fresh()
        folder = tmp_path / cls.__module__
        trainer = trainers.make(cls, str(folder), options=LOADS[loads], **more)
        trainer.train()
        if not resumes:
            assert Path(trainer.state.best_model_checkpoint).name == "checkpoint-2"
        found = len(trainer.optimizer.state_dict()["state"])
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2") if resumes else None)
        return found, trainers.whole(trainer.model)

    torch.testing.assert_close(trained(Trainer, zero=zero), trained(transformers.Trainer))
