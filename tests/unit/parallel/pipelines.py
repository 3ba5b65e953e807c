"""Models cut into stages, and random schedules, for tests of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import zfun as zf
from zfun.parallel.schedules import Action, Schedule

WIDTH = 4
ROWS = 12


def params(num_stages: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """One tree for each stage."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64) / 2

    return [{"w": drawn(WIDTH, WIDTH), "b": drawn(WIDTH)} for _ in range(num_stages)]


def batch(rank: int, step: int, rows: int = ROWS) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(2, rows, WIDTH, generator=generator, dtype=torch.float64)
    # Every micro-batch has tokens, and each another number.
    mask = torch.randint(0, 3, (rows, WIDTH), generator=generator)
    return {"x": x, "y": y, "mask": mask + torch.eye(rows, WIDTH, dtype=mask.dtype)}


def layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"])


def first(params: Any, batch: Any) -> Any:
    """Return a tree: an activation, and a mask, which has no gradient."""
    return {"x": layer(params, batch["x"]), "rest": (batch["mask"], None)}


def middle(params: Any, x: Any) -> Any:
    return {"x": layer(params, x["x"]) + x["x"], "rest": x["rest"]}


def last(params: Any, x: Any, batch: Any) -> Any:
    mask, _ = x["rest"]
    return ((layer(params, x["x"]) - batch["y"]) ** 2 * mask).mean()


def last_weighted(params: Any, x: Any, batch: Any) -> Any:
    mask, _ = x["rest"]
    total = ((layer(params, x["x"]) - batch["y"]) ** 2 * mask).sum()
    return zf.weighted_mean(total, mask.sum()), {"tokens": mask.sum()}


def stages(num_stages: int, end: Callable[..., Any] = last) -> list[Callable[..., Any]]:
    if num_stages == 1:
        return [lambda params, batch: end(params, first_input(batch), batch)]
    return [first, *[middle] * (num_stages - 2), end]


def first_input(batch: Any) -> Any:
    return {"x": batch["x"], "rest": (batch["mask"], None)}


def whole(fns: Sequence[Callable[..., Any]]) -> Callable[[Any, Any], Any]:
    """The loss of all stages in one process."""

    def loss(params: Any, batch: Any) -> Any:
        if len(fns) == 1:
            return fns[0](params[0], batch)
        x = fns[0](params[0], batch)
        for fn, own in zip(fns[1:-1], params[1:-1], strict=True):
            x = fn(own, x)
        return fns[-1](params[-1], x, batch)

    return loss


@st.composite
def random_schedules(draw: st.DrawFn, most: int = 3) -> tuple[Schedule, int]:
    """Any order in which the actions can run, on any ranks; and the number of micro-batches."""
    num_stages, num_micro = draw(st.integers(1, 4)), draw(st.integers(1, most))
    num_ranks = draw(st.integers(1, num_stages))
    rank_of = [*range(num_ranks)]
    rank_of += [draw(st.integers(0, num_ranks - 1)) for _ in range(num_stages - num_ranks)]
    rank_of = draw(st.permutations(rank_of))
    is_split = {
        (stage, k): draw(st.booleans()) for stage in range(num_stages) for k in range(num_micro)
    }
    ready = [Action(0, "F", k) for k in range(num_micro)]
    lists: list[list[Action]] = [[] for _ in range(num_ranks)]
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        lists[rank_of[action.stage]].append(action)
        stage, kind, k = action
        if kind == "F":
            after = stage + 1 if stage < num_stages - 1 else stage
            kind = "F" if after > stage else "B"
            ready.append(Action(after, kind, k))
        elif kind in ("B", "I") and stage:
            ready.append(Action(stage - 1, "B", k))
        if kind == "I":
            ready.append(Action(stage, "W", k))
        # Some backward passes come in two parts.
        ready = [
            x._replace(kind="I") if x.kind == "B" and is_split[x.stage, x.micro_batch] else x
            for x in ready
        ]
    return tuple(map(tuple, lists)), num_micro
