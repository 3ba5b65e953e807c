"""Values that all ranks of a tensor axis have: used alike they train as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.collectives import enter
from zfun.errors import PlacementError

WIDTH, HIDDEN = 4, 6
IDS = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1], [3, 3, 1, 2, 0, 5, 1, 2]])
SHAPES = {"embed": (6, WIDTH), "norm": (WIDTH,), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
SHAPES |= {"last": (WIDTH,), "more": (WIDTH,), "router": (WIDTH, WIDTH)}
CUT, ALL = {"up": "colwise", "down": "rowwise"}, {"router": "colwise_gather_output"}
SUMMED, SAME = "replicated_with_grad_allreduce", "replicated"


def params(names: Any) -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, dtype=torch.float64, generator=chance)
    return {name: leaf for name, shape in SHAPES.items() if (leaf := draw(shape), name in names)[1]}


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), gain)


def looked_up(p: Any, ids: Tensor) -> Tensor:
    return F.embedding(ids, p["embed"])


def mlp(p: Any, h: Tensor) -> Tensor:
    return F.linear(torch.tanh(F.linear(h, p["up"])), p["down"])


def end(p: Any, x: Tensor) -> Tensor:
    return norm(x, p["last"]).pow(3).sum()


def model(mixed: Callable[[Any, Tensor, zf.Group], Tensor]) -> Callable[..., Tensor]:
    """A loss with something added to the activations, of the result of a norm."""

    def loss(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
        x = looked_up(p, ids)
        h = norm(x, p["norm"])
        return end(p, x + mlp(p, h) + mixed(p, h, axis))

    return loss


def gated(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    x = looked_up(p, ids)
    h = norm(x, p["norm"])
    return end(p, x + F.linear(F.linear(h, p["up"]) * h.mean(-1, keepdim=True), p["down"]))


def entered(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    x = looked_up(p, ids)
    h = norm(x, p["norm"])
    gate = enter(h.mean(-1, keepdim=True), axis)
    return end(p, x + F.linear(F.linear(h, p["up"]) * gate, p["down"]))


def norms(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    return end(p, norm(norm(looked_up(p, ids), p["norm"]), p["more"]))


def doubled(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    return end(p, 2 * norm(looked_up(p, ids), p["norm"]))


def head(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    return F.linear(norm(looked_up(p, ids), p["norm"]), p["router"]).pow(3).sum()


def uncut(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    x = torch.cos(ids[..., None] + torch.arange(WIDTH).double())
    return end(p, x + mlp(p, norm(x, p["norm"])))


def rows(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    """Tokens without the dim of the sequence, as those on their way to experts."""
    x = looked_up(p, ids)
    h = mlp(p, norm(x, p["norm"]).flatten(0, 1)).unflatten(0, ids.shape)
    return end(p, x + (enter(h, axis, 1) if axis.size > 1 else h))


def flattened(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    return mlp(p, looked_up(p, ids).flatten(0, 1)).pow(3).sum()


def added(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    return end(p, looked_up(p, ids) + norm(looked_up(p, ids), p["norm"]))


def differs(p: Any, ids: Tensor, axis: zf.Group) -> Tensor:
    return end(p, looked_up(p, ids) * (1 + axis.rank))


mean = model(lambda p, h, axis: h.mean(1, keepdim=True))
entered_mean = model(lambda p, h, axis: enter(h.mean(1, keepdim=True), axis))
routed = model(lambda p, h, axis: F.linear(h, p["router"]).mean(1, keepdim=True))
pooled = model(lambda p, h, axis: F.linear(h.mean(1, keepdim=True), p["router"]))
Case = tuple[Callable[..., Tensor], dict[str, Any], int | None, str]
DIFFERS = "gradient of {} differs between ranks.*enter"
CASES: dict[str, Case] = {
    "a mean of all tokens beside some": (mean, {}, 1, DIFFERS.format("the result of a norm")),
    "that mean, entered": (entered_mean, {}, 1, ""),
    "that mean, nothing cut": (mean, {}, None, ""),
    "a joined router beside cut tokens": (routed, ALL, 1, DIFFERS.format("the .*'router'")),
    "a whole router of whole tokens": (pooled, {"router": SUMMED}, 1, "the result of a norm"),
    "a summed router, nothing cut": (pooled, {"router": SUMMED}, None, "'router'.*'replicated'"),
    "a whole router, nothing cut": (pooled, {"router": SAME}, None, ""),
    "a whole gate of cut features": (gated, {}, None, "gradient of leaf '(norm|embed)' differs"),
    "the same, between norms": (gated, {}, 1, DIFFERS.format("the result of a norm")),
    "the gate, entered": (entered, {}, None, ""),
    "a whole gate of a sum": (gated, {"embed": "embedding_rowwise"}, None, "sum of parts|'norm'"),
    "a summed head": (head, {"router": SUMMED}, 1, "leaf 'router'.*2 times.*'replicated'"),
    "a whole head": (head, {"router": SAME}, 1, ""),
    "a norm of a norm": (norms, {}, 1, "the same 8 tokens .*'replicated'"),
    "a whole norm of a norm": (norms, {"more": SAME, "last": SAME}, 1, ""),
    "a norm of all tokens": (doubled, {}, 1, "the same 8 tokens on all 2 ranks"),
    "a whole norm of all tokens": (doubled, {"last": SAME}, 1, ""),
    "an input that is not cut": (uncut, {}, 1, "the same 8 tokens on all 2 ranks"),
    "rows of whole tokens": (rows, {}, 1, ""),
    "rows of the tokens of a rank": (flattened, {}, 1, "activation that all ranks .* got others"),
    "ranks that compute other losses": (differs, {}, None, "one loss of one batch; got"),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_whole_value_trains_as_on_one_process_or_is_refused(name: str, stage: int) -> None:
    fn, plan, sequence_dim, match = CASES[name]
    used: set[str] = set()

    class Noted(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            used.add(name)
            return super().__getitem__(name)

    fn(Noted(params(SHAPES)), IDS, zf.collectives.single_group())
    styles = {path: style for path, style in (CUT | plan).items() if path in used}

    def main(group: zf.Group, cuts: bool) -> Any:
        mesh = zf.mesh(group, dp=1, tp=-1)
        loss = lambda p, ids: fn(p, ids, mesh["tp"])
        if cuts:
            loss = zf.tensor_parallel(loss, mesh["tp"], styles, sequence_dim=sequence_dim)
        zero = zf.zero(stage, loss, optim.sgd(0.01), mesh["dp"])
        state = zero.init(params(used))
        for _ in range(2):
            state, info = zero.step(state, IDS)
        return info.loss, zero.params(state)

    if match:
        with pytest.raises(PlacementError, match=match):
            zf.simulate(2, main, True)
        return
    (expected,) = zf.simulate(1, main, False)
    for found in zf.simulate(2, main, True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_first_training_step_compares_after_an_evaluation() -> None:
    def main(group: zf.Group) -> None:
        loss = lambda p, ids: mean(p, ids, group)
        cut = zf.tensor_parallel(loss, group, CUT, sequence_dim=1)
        own = params({*SHAPES} - {"more", "router"})
        for path, dim in {"up": 0, "down": 1}.items():
            own[path] = own[path].chunk(2, dim)[group.rank]
        with torch.no_grad():
            cut(own, IDS)
        zf.value_and_grad(cut)(own, IDS)

    with pytest.raises(PlacementError, match="gradient of the result of a norm differs"):
        zf.simulate(2, main)


def test_a_batch_of_equal_tokens_is_no_mistake() -> None:
    def main(group: zf.Group) -> Tensor:
        loss = lambda p, ids: end(p, looked_up(p, ids) + mlp(p, norm(looked_up(p, ids), p["norm"])))
        cut = zf.tensor_parallel(loss, group, CUT, sequence_dim=1)
        zero = zf.zero(0, cut, optim.sgd(0.1), zf.collectives.single_group())
        state = zero.init(params({*SHAPES} - {"more", "router"}))
        return zero.step(state, torch.zeros_like(IDS))[1].loss

    zf.simulate(2, main)


def test_an_error_of_torch_tells_what_is_cut() -> None:
    def main(group: zf.Group) -> None:
        cut = zf.tensor_parallel(lambda p, ids: added(p, ids, group), group, {}, sequence_dim=1)
        cut(params(["embed", "norm", "last"]), IDS)

    with pytest.raises(RuntimeError, match="must match the size") as caught:
        zf.simulate(2, main)
    assert "results of a norm have all tokens" in str(caught.value.__notes__)


def test_a_first_step_that_overflows_is_skipped_and_not_refused() -> None:
    def main(group: zf.Group) -> Any:
        loss = lambda p, x: (mlp(p, norm(x, p["norm"])) * 1e300 * 1e300).sum()
        cut = zf.tensor_parallel(loss, group, CUT)
        scale = zf.optim.dynamic_loss_scale()
        zero = zf.zero(
            0,
            cut,
            optim.sgd(0.1),
            zf.collectives.single_group(),
            precision=zf.Precision(loss_scale=scale),
        )
        state = zero.init(params(["norm", "up", "down"]))
        return zero.step(state, torch.ones(2, WIDTH, dtype=torch.float64).cos())[1].skipped

    assert zf.simulate(2, main) == [True, True]
