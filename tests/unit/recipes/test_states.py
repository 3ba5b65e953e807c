"""A step refuses a state that was made with other options, and names the difference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from zfun import optim
from zfun.collectives import Group
from zfun.errors import SpecMismatch
from zfun.evaluation import evaluate
from zfun.testing import assert_same_bits

PARAMS = {"a": torch.linspace(-1, 1, 40).reshape(8, 5), "b": torch.ones(5), "c": torch.ones(70)}
BATCH = torch.linspace(0, 2, 24).reshape(3, 8)
EACH_STAGE = pytest.mark.parametrize("stage", [0, 1, 2, 3])
BF16, F16, F64 = torch.bfloat16, torch.float16, torch.float64


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    x = torch.tanh(batch.to(params["a"].dtype) @ params["a"] + params["b"])
    return x.float().square().mean() + params["c"].float().square().mean()


def make(group: Group, stage: int = 1, optimizer: Any = None, **options: Any) -> zf.recipes.Zero:
    return zf.zero(stage, loss_fn, optimizer or optim.adamw(0.1), group, **options)


def refused(message: str, made: dict[str, Any], stepped: dict[str, Any]) -> SpecMismatch:
    """The error of a step with a state of other options, at first and after a good state."""

    def main(group: Group) -> SpecMismatch:
        state = make(group, **made).init(PARAMS)
        z = make(group, **stepped)
        with pytest.raises(SpecMismatch, match=message) as error:
            z.step(state, BATCH)
        own = z.init(PARAMS)
        own, _ = z.step(own, BATCH)
        with pytest.raises(SpecMismatch, match=message):
            z.step(state, BATCH)
        z.step(own, BATCH)
        return error.value

    return zf.simulate(2, main)[0]


def test_a_state_of_other_buffers_is_refused() -> None:
    rule = {"buffers": lambda path, leaf: "mean" if path == "b" else None}
    error = refused("leaf 'b' is a buffer for a step in which the leaf is no buffer", rule, {})
    assert error.leaf == "b"
    refused("leaf 'b' is trained for a step in which the leaf is a buffer", {}, rule)


@pytest.mark.parametrize("made", [0, 1, 2, 3])
@EACH_STAGE
def test_a_state_of_another_stage_is_refused(made: int, stage: int) -> None:
    kinds = ["R R", "R S", "R S", "S S"]
    if kinds[made] == kinds[stage]:
        return
    found, wanted = ("S", "R") if made == 3 or (made and stage == 0) else ("R", "S")
    refused(
        rf"^state and step are of one stage.* placement {found} .*\b{wanted};.* init\(\)",
        {"stage": made},
        {"stage": stage},
    )


def test_stages_1_and_2_have_one_state() -> None:
    def main(group: Group) -> Any:
        z = [make(group, stage) for stage in (1, 2)]
        first = z[1].step(z[0].init(PARAMS), BATCH)[0]
        second = z[1].step(z[1].init(PARAMS), BATCH)[0]
        return z[0].params(first), z[1].params(second)

    assert_same_bits(*zf.simulate(2, main)[0])


def not_b(path: str, leaf: Any) -> bool:
    del leaf
    return path != "b"


@EACH_STAGE
def test_a_state_with_another_trainable_set_is_refused(stage: int) -> None:
    some, every = {"stage": stage, "trainable": not_b}, {"stage": stage}
    rule = "^state and step have one set of trained leaves"
    assert refused(f"{rule}.*leaf 'b' is frozen for a step that trains", some, every).leaf == "b"
    assert refused(r"leaf 'b' is trained for a step that freezes", every, some).leaf == "b"


@pytest.mark.parametrize(
    "trainable",
    [
        lambda path, leaf: leaf.requires_grad,
        lambda path, leaf: isinstance(leaf, torch.nn.Parameter),
        lambda path, leaf: bool(leaf.sum() > 0),
        lambda path, leaf: leaf.ndim == 1,
    ],
    ids=["requires_grad", "Parameter", "value", "shape"],
)
def test_a_state_from_elsewhere_may_be_trained_by_what_only_init_sees(trainable: Any) -> None:
    params = {name: value.clone() for name, value in PARAMS.items()}
    params["c"] = torch.nn.Parameter(params["c"])

    def main(group: Group) -> Any:
        first, second = (make(group, 3, trainable=trainable) for _ in range(2))
        state, _ = second.step(first.init(params), BATCH)
        return second.params(state)

    zf.simulate(2, main)


@EACH_STAGE
@pytest.mark.parametrize(
    ("made", "stepped", "message"),
    [
        (None, BF16, r"leaf 'a' in torch.float32 where .* keeps parameters in torch.bfloat16"),
        (F16, BF16, r"leaf 'a' in torch.float16 where .* keeps parameters in torch.bfloat16"),
        (BF16, None, r"with master weights or without; got MasterState\(.* makes AdamState\("),
        (
            zf.Precision(param=BF16, master=torch.float32),
            zf.Precision(param=BF16, master=F64),
            r"got opt_state.master in torch.float32 where .* has torch.float64",
        ),
        (zf.Precision(loss_scale=2.0), None, "got a state with a loss scale for a step without"),
        (None, zf.Precision(loss_scale=2.0), "got a state without a loss scale for a step with"),
    ],
    ids=["to bf16", "f16 to bf16", "from bf16", "master", "from scale", "to scale"],
)
def test_a_state_of_another_precision_is_refused(
    stage: int, made: Any, stepped: Any, message: str
) -> None:
    refused(
        f"^state and step have one precision.*{message}",
        {"stage": stage, "precision": made},
        {"stage": stage, "precision": stepped},
    )


@EACH_STAGE
@pytest.mark.parametrize(
    ("made", "stepped", "message"),
    [
        (optim.adamw(0.1), optim.sgd(0.1), r"AdamState\(.* makes SgdState\("),
        (optim.sgd(0.1, momentum=0.9), optim.sgd(0.1), r"velocity=\*.* makes SgdState\(.*=None"),
        (
            optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1)),
            optim.sgd(0.1),
            r"\(.* makes SgdState",
        ),
        (
            optim.by_label({"x": optim.sgd(0.1)}, lambda path, leaf: "x"),
            optim.by_label({"x": optim.lion(0.1)}, lambda path, leaf: "x"),
            "SgdState.* makes .*LionState",
        ),
    ],
    ids=["rule", "momentum", "chain", "label"],
)
def test_a_state_of_another_optimizer_is_refused(
    stage: int, made: Any, stepped: Any, message: str
) -> None:
    refused(
        f"^a state belongs to one kind of optimizer; got .*{message}",
        {"stage": stage, "optimizer": made},
        {"stage": stage, "optimizer": stepped},
    )


OPTIMIZERS = {
    "sgd": lambda: optim.sgd(0.1),
    "adamw": lambda: optim.adamw(0.1),
    "muon": lambda: optim.muon(0.1, optim.adamw(0.1)),
    "lamb": lambda: optim.lamb(0.1),
    "torch": lambda: optim.from_torch(torch.optim.RMSprop, lr=0.1),
    "labels": lambda: optim.by_label(
        {"x": optim.adam(0.1), "y": optim.sgd(0.1), "unused": optim.sgd(0.2)},
        lambda path, leaf: "x" if path == "a" else "y",
    ),
    "own": lambda: optim.optimizer(
        lambda params: {"n": 0}, lambda g, s, p: (zf.tree.map(lambda x: -0.1 * x, g), s)
    ),
    "onebit": lambda: optim.onebit_adam(0.1, freeze_step=2),
}


@EACH_STAGE
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_with_the_options_of_the_step_passes_from_another_zero(
    name: str, stage: int
) -> None:
    if name == "onebit" and stage == 3:
        return

    def main(group: Group) -> Any:
        options: dict[str, Any] = {
            "precision": BF16 if stage % 2 else None,
            "offload": zf.stores.Offload(optimizer=zf.stores.host()) if stage == 1 else None,
        }
        once, other = (make(group, stage, OPTIMIZERS[name](), **options) for _ in range(2))
        found = []
        for steps in ((once, once, once, once), (once, other, once, other)):
            state = once.init(PARAMS)
            for z in steps:
                state, _ = z.step(state, BATCH)
            found.append(once.params(state))
        return found

    assert_same_bits(*zf.simulate(2, main)[0])


def test_a_value_that_is_no_state_is_refused_with_the_remedy(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        zero = zf.zero(1, lambda params, x: (params * x).sum(), zf.optim.sgd(0.1), group)
        state = zero.init(torch.ones(4))
        zf.save(tmp_path, state)
        loaded = zf.load(tmp_path, state)
        with pytest.raises(SpecMismatch, match=r"type Loaded; pass its \.state"):
            zero.step(loaded, torch.ones(4))  # type: ignore[arg-type]
        with pytest.raises(SpecMismatch, match=r"type tuple; pass the state that init\(\)"):
            zero.params(zero.step(loaded.state, torch.ones(4)))  # type: ignore[arg-type]

    zf.simulate(2, main)


@EACH_STAGE
def test_values_that_are_no_state_and_no_flat_are_refused(stage: int) -> None:
    group = zf.process_group()
    zero, evaluation = make(group, stage), evaluate(loss_fn, group)
    state, batch = zero.init(PARAMS), BATCH
    out, pullback, _ = zero.vjp(loss_fn, state, batch)
    grads = pullback(torch.ones_like(out))
    calls: list[Any] = [
        lambda x: zero.vjp(loss_fn, x, batch),
        lambda x: zero.update(x, grads, out),
        lambda x: evaluation(x, batch),
        lambda x: evaluation.uneven(x).__enter__(),
    ]
    for call in calls:
        for bad in (PARAMS, (state, None), None):
            with pytest.raises(SpecMismatch, match=r"must be a ZeroState; got a value of type "):
                call(bad)
    with pytest.raises(SpecMismatch, match=r"grads must be a Flat; got a value of type dict; pass"):
        zero.update(state, PARAMS, out)
    with pytest.raises(SpecMismatch, match=r"grads must be a Flat; got a value of type NoneType"):
        zero.update(state, None, out)
    with pytest.raises(SpecMismatch, match=r"buffers must be a Flat; got a value of type dict"):
        zero.vjp(loss_fn, state, batch, PARAMS)
    with pytest.raises(SpecMismatch, match=r"buffers must be a Flat; got a value of type dict"):
        zero.update(state, grads, out, PARAMS)
    state, info = zero.update(state, grads, out)
    assert info.num_applied == 1
