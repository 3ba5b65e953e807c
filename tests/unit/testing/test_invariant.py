"""assert_invariant passes on right programs, and names leaf and cause of planted bugs."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models, planted
from zfun import optim, tree
from zfun.testing import Composition, assert_adjoint, assert_invariant

PARAMS = models.mlp(width=3, num_layers=1)
BATCH = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
SGD = optim.sgd(planted.RATE)
STAGES = (
    Composition(),
    Composition(grads=("shard_grads",), optimizer=("shard_optimizer",), flat=True, donate=True),
    Composition(("shard_params",), ("shard_grads",), ("shard_optimizer",)),
)


def small_enough() -> float:
    """A bound between the largest gradients of the leaves on the first and on the last rank."""
    _, grads = zf.value_and_grad(models.mlp_loss)(PARAMS, BATCH.double())
    first = max(float(g.abs().max()) for g in grads["h"][0].values())
    return (first + float(grads["out"].abs().max())) / 2


BOUND = small_enough()

check = functools.partial(
    assert_invariant, models.mlp_loss, PARAMS, BATCH, sizes=(2, 3), compositions=STAGES
)


def tied() -> dict[str, Tensor]:
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(3))
    return {"embed": table, "bias": torch.ones(3), "head": table}


def tied_loss(params: Any, x: Tensor) -> Tensor:
    return ((x @ params["embed"] + params["bias"]).tanh() @ params["head"]).square().mean()


def own(**parts: Any) -> Any:
    return lambda group: planted.own_loop(models.mlp_loss, group, **parts)


def message(*args: Any, **kwargs: Any) -> str:
    """The message of the failure."""
    with pytest.raises(AssertionError) as caught:
        check(*args, **kwargs)
    return str(caught.value)


# Right programs.


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [(optim.adamw(0.05), (2,)), pytest.param(optim.lamb(0.05), None, marks=pytest.mark.slow)],
    ids=["adamw", "lamb"],
)
def test_the_standard_compositions_pass(rule: Any, sizes: Any) -> None:
    after = assert_invariant(models.mlp_loss, PARAMS, BATCH, rule, sizes=sizes)
    assert tree.paths(after) == tree.paths(PARAMS)
    assert not torch.equal(after["out"], PARAMS["out"])


def test_right_parts_of_a_user_pass() -> None:
    check(SGD, own())
    check(SGD, own(parts_of=lambda batch: zf.transforms.split_batch(batch, 2)), sizes=(2,))
    check(SGD, transform=planted.clipped(0.1, own=False))
    check(SGD, transform=planted.skipping(BOUND, together=True))
    check(SGD, transform=planted.shifted(in_padding=False))
    check(SGD, wrap_group=lambda group: planted.RoundingGroup(group, torch.float64))
    assert_invariant(
        tied_loss, tied(), BATCH, SGD, lambda group: planted.own_loop(tied_loss, group), sizes=(2,)
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_stages_with_options_pass(stage: int) -> None:
    offload = zf.stores.Offload(optimizer=zf.stores.host()) if stage else None
    make = lambda group: zf.zero(
        stage, models.mlp_loss, optim.adamw(0.05), group, num_micro_batches=2, offload=offload
    )
    check(optim.adamw(0.05), make)


def test_leaves_of_other_dtypes_are_frozen_and_float32_passes_as_it_is() -> None:
    params = {"w": torch.ones(3), "index": torch.tensor([2, 0, 1]), "scale": torch.tensor(2.0)}
    loss_fn = lambda p, x: (x[:, p["index"]] * p["w"] * p["scale"]).square().mean()
    after = assert_invariant(
        loss_fn,
        params,
        BATCH,
        SGD,
        sizes=(2,),
        dtype=None,
        trainable=lambda path, leaf: path == "w",
    )
    assert after["w"].dtype is torch.float64
    assert after["scale"] is None


def test_uneven_batches_pass_with_a_weighted_mean() -> None:
    loss_fn = lambda p, x: zf.weighted_mean((x @ p["w"]).square().sum(), len(x))
    params = {"w": torch.ones(3)}
    assert_invariant(loss_fn, params, BATCH[:5], SGD, sizes=(2, 3), num_micro_batches=(1,))
    own_split = lambda batch, n: [batch[:1], batch[1:]] if n == 2 else [batch]
    assert_invariant(loss_fn, params, lambda step: BATCH[step:], SGD, sizes=(1, 2), split=own_split)


# Planted bugs. Each is named with the leaf and the cause.

FIRST = "leaf 'h.0.w'"


BUGS: dict[str, tuple[dict[str, Any], str, str]] = {
    "wrong mean": ({"transform": planted.scaled_by_size}, FIRST, "wrong mean: .*summed over"),
    "wrong mean of an own loop": (
        {"make": own(divisor=lambda group: 1.0)},
        FIRST,
        "wrong mean: .*summed over the ranks and not divided",
    ),
    "norm of the own shard": (
        {"transform": planted.clipped(0.1, own=True)},
        FIRST,
        "norm of the own shard: .*global_norm",
    ),
    "lost padding": ({"make": own(padded=False)}, "leaf 'out'", "lost padding: the last 1 element"),
    "padding that is not zero": (
        {"transform": planted.shifted(in_padding=True)},
        FIRST,
        "padding must be zero and stay zero",
    ),
    "stale gather": (
        {
            "make": lambda group: planted.own_loop(
                models.mlp_loss, group, gather=planted.StaleGather()
            )
        },
        FIRST,
        "stale gather: step 1 computes with the parameters of step 0",
    ),
    "stale gather after the update": (
        {"wrap_group": planted.StaleGroup},
        FIRST,
        "stale gather: the parameters after step 1 are those after step 0.*\n.*without wrap_group",
    ),
    "lost micro-batch": (
        {"make": own(parts_of=planted.all_but_the_last)},
        FIRST,
        "lost micro-batch: micro-batch 2 of 3 does not count",
    ),
    "reduction in bfloat16": (
        {"wrap_group": lambda group: planted.RoundingGroup(group, torch.bfloat16)},
        FIRST,
        "wrong dtype: .*rounding to torch.bfloat16",
    ),
    "reduction in float32": (
        {"wrap_group": lambda group: planted.RoundingGroup(group, torch.float32)},
        FIRST,
        "wrong dtype: .*rounding to torch.float32",
    ),
    "rounding of an own loop": (
        {"make": own(reduce_dtype=torch.float32)},
        FIRST,
        "wrong dtype: .*rounding to torch.float32",
    ),
    "one rank skips alone": (
        {"transform": planted.skipping(BOUND, together=False)},
        "leaf '",
        "one rank skips alone: rank.*any_rank",
    ),
    "one rank of an own loop skips alone": (
        {"make": own(skips=lambda grad: float(grad.abs().max()) < BOUND)},
        "leaf '",
        "one rank skips alone: rank",
    ),
    "a dual that is not one": (
        {"make": own(gather=planted.gather_with_wrong_dual)},
        FIRST,
        "the dual of a gather is a reduce-scatter: .*assert_adjoint",
    ),
}


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_named(name: str) -> None:
    parts, leaf, cause = BUGS[name]
    text = message(SGD, **parts)
    assert leaf in text.split("\n")[0]
    assert re.search(f"likely cause: .*{cause}", text, re.DOTALL), text
    assert "smallest case that fails: " in text


def test_a_tied_gradient_that_is_counted_once_is_named() -> None:
    wrong = planted.unravel_with_lost_ties
    make = lambda group: planted.own_loop(tied_loss, group, unravel=wrong)
    with pytest.raises(
        AssertionError,
        match=r"leaf 'embed' (.|\n)*tied gradient counted once: 'embed', 'head' are one tensor",
    ):
        assert_invariant(tied_loss, tied(), BATCH, SGD, make, sizes=(2,))


def test_an_optimizer_that_mixes_elements_is_named_with_and_without_the_probe() -> None:
    text = message(planted.centred(by_leaf=False))
    assert "NotElementwiseError: an optimizer that runs on shards" in text
    assert re.search("first leaf that comes out wrong: 'h.0.w'\n.*an optimizer that mixes", text)
    text = message(planted.centred(by_leaf=True))
    assert "leaf 'h.0.w' differs after the update" in text
    assert "likely cause: an optimizer that mixes elements: the gradients agree" in text


def test_a_mean_of_means_is_named() -> None:
    loss_fn = lambda p, x: (x @ p["w"]).square().mean()
    with pytest.raises(AssertionError, match=r"leaf 'w'(.|\n)*wrong mean: .*zf.weighted_mean"):
        assert_invariant(loss_fn, {"w": torch.ones(3)}, BATCH[:5], SGD, sizes=(2,))


MASK = (torch.arange(12) % 5 != 1).double()
OUT = {"w": torch.ones(3)}


def masked_mean(p: Any, batch: Any) -> Tensor:
    """Normalised by the number of marked rows of the own batch."""
    return ((batch["x"] @ p["w"]).square() * batch["mask"]).sum() / batch["mask"].sum()


@pytest.mark.parametrize(
    ("sizes", "counts", "whose"),
    [((1,), (2,), "micro-batches'"), ((2,), (1,), "ranks'"), ((2,), (3,), "ranks'")],
)
def test_a_mean_over_a_local_count_is_named(sizes: Any, counts: Any, whose: str) -> None:
    words = (
        rf"leaf 'w'(.|\n)*wrong mean: the mean of the {whose} losses is taken, and their batches "
        r"do not count alike: .* weights 0\.\d+, .*return zf.weighted_mean\(total, count\)"
    )
    batch = {"x": BATCH, "mask": MASK}
    with pytest.raises(AssertionError, match=words):
        assert_invariant(masked_mean, OUT, batch, SGD, sizes=sizes, num_micro_batches=counts)
    weighted = lambda p, batch: zf.weighted_mean(
        masked_mean(p, batch) * batch["mask"].sum(), batch["mask"].sum()
    )
    assert_invariant(weighted, OUT, batch, SGD, sizes=sizes, num_micro_batches=counts)


def normalised(p: Any, x: Tensor) -> Tensor:
    """With the statistics of the own batch, as BatchNorm."""
    return (((x - x.mean(0)) / x.std(0)) @ p["w"]).tanh().sub(1).square().mean()


def dropped(p: Any, x: Tensor) -> Tensor:
    """Dropout with one seed for every batch."""
    kept = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    return ((x * kept) @ p["w"]).square().mean()


@pytest.mark.parametrize("loss_fn", [normalised, dropped])
@pytest.mark.parametrize(("sizes", "counts"), [((1,), (2,)), ((2,), (1,))])
def test_a_loss_of_the_whole_batch_is_named(loss_fn: Any, sizes: Any, counts: Any) -> None:
    words = r"a loss of the whole batch: .*BatchNorm.*dropout\), which need a seed for each row"
    with pytest.raises(AssertionError, match=words):
        assert_invariant(loss_fn, OUT, BATCH, SGD, sizes=sizes, num_micro_batches=counts)


def squares(params: Any) -> Any:
    return sum(leaf.square().sum() for leaf in tree.leaves(params))


def with_squares(factor: float) -> Any:
    return lambda p, x: models.mlp_loss(p, x) + factor * squares(p)


def noisy(x: Tensor, group: zf.Group) -> Tensor:
    generator = torch.Generator().manual_seed(group.rank)
    return x + (group.rank > 0) * torch.randn(x.shape, generator=generator)


RATE = planted.RATE
OWN_RULES: dict[str, tuple[Any, str]] = {
    "decay on one rank": (
        planted.own_rule(lambda g, p, rank: -RATE * g - (1e-3 * p if rank == 1 else 0.0 * p)),
        r"a rule of one rank: the changes of rank 1 differ by -0.001 times the parameters",
    ),
    "learning rate by rank": (
        planted.own_rule(lambda g, p, rank: -RATE * g * (1.001 if rank == 1 else 1.0)),
        r"a rule of one rank: the changes of rank 1 differ by the factor 1.001, as by another le",
    ),
    "noise on one rank": (
        planted.own_rule(
            lambda g, p, rank: -RATE * g * (1 + 0.01 * torch.sin(9 * p) if rank == 1 else 1.0)
        ),
        r"a rule of one rank: the changes of rank 1 differ, and the other ranks are right",
    ),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", OWN_RULES)
def test_a_rule_of_one_rank_is_named(name: str, stage: int) -> None:
    make, cause = OWN_RULES[name]
    text = message(SGD, functools.partial(make, models.mlp_loss, stage), sizes=(2,))
    assert re.search(f"likely cause: {cause}", text), text


WRONG: dict[str, tuple[Any, Any, str]] = {
    "a learning rate": (
        models.mlp_loss,
        lambda group: zf.zero(2, models.mlp_loss, optim.sgd(1.01 * RATE), group),
        "wrong step size: all changes are 1.01 times the right ones; .*learning rate",
    ),
    "a divisor under accumulation": (
        models.mlp_loss,
        lambda group: zf.zero(
            2, lambda p, x: models.mlp_loss(p, x) / 3, SGD, group, num_micro_batches=2
        ),
        "wrong step size: all changes are 0.333333 times the right ones",
    ),
    "L2 on one rank": (
        with_squares(1e-3),
        lambda group: zf.zero(2, with_squares(1e-3 * (group.rank == 0)), SGD, group),
        "wrong decay: the changes differ by .* times the parameters; .*L2 term",
    ),
    "no L2": (
        with_squares(1e-3),
        lambda group: zf.zero(2, models.mlp_loss, SGD, group),
        "wrong decay: the changes differ by 0.0002 times the parameters",
    ),
    "a loss that counts more on one rank": (
        models.mlp_loss,
        lambda group: zf.zero(
            2, lambda p, x: models.mlp_loss(p, x) * (1 + 0.01 * group.rank), SGD, group
        ),
        "wrong weights: the gradients of the ranks count 0.5, 0.505, and should count 0.5 each",
    ),
    "a seed by rank": (
        models.mlp_loss,
        lambda group: zf.zero(2, lambda p, x: models.mlp_loss(p, noisy(x, group)), SGD, group),
        "fewer ranks pass, so look for seeds, options and branches that depend on the rank",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_named(name: str) -> None:
    loss_fn, make, cause = WRONG[name]
    with pytest.raises(AssertionError) as caught:
        assert_invariant(loss_fn, PARAMS, BATCH, SGD, make, sizes=(2,))
    assert re.search(f"likely cause: .*{cause}", str(caught.value)), caught.value


@pytest.mark.parametrize("forgets", [False, True])
def test_an_optimizer_with_state_in_a_closure_is_named(forgets: bool) -> None:
    words = r"the gradients agree, and the optimizer updates otherwise .* not in a closure, a glob"
    with pytest.raises(AssertionError, match=words):
        check(planted.remembering(forgets=forgets))


def test_a_transform_with_state_in_a_closure_is_named() -> None:
    with pytest.raises(AssertionError, match=r"loss and gradients agree, and transform= makes oth"):
        check(SGD, transform=planted.counting())


def test_numbers_that_do_not_divide_the_batch_are_refused_or_said() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"5 do not divide the parts of 12 rows for 1"):
        assert_invariant(models.mlp_loss, PARAMS, BATCH, SGD, sizes=(1,), num_micro_batches=(5,))
    with pytest.raises(zf.errors.OptionError, match=r"2 do not divide the parts of 12 rows for 4"):
        assert_invariant(models.mlp_loss, PARAMS, BATCH, SGD, sizes=(2, 4), num_micro_batches=(2,))
    with pytest.raises(zf.errors.OptionError, match=r"2, 3 and 4 with 5 micro-batches each do not"):
        assert_invariant(models.mlp_loss, PARAMS, BATCH, SGD, num_micro_batches=(5,))
    with pytest.raises(zf.errors.OptionError, match=r"a loop of make= has its own micro-batches"):
        check(SGD, own(), num_micro_batches=(2,))


def test_every_number_of_micro_batches_runs() -> None:
    """Also with fewer compositions than numbers."""
    rows: set[int] = set()

    def loss_fn(p: Any, x: Tensor) -> Tensor:
        rows.add(len(x))
        return models.mlp_loss(p, x)

    assert_invariant(
        loss_fn,
        PARAMS,
        BATCH,
        SGD,
        compositions=STAGES[:1],
        sizes=(2,),
        num_micro_batches=(1, 2, 3),
        num_steps=1,
    )
    assert rows == {12, 6, 3, 2}


def test_gradients_that_are_not_reduced_are_named() -> None:
    def make(group: zf.Group) -> Any:
        return planted.own_loop(models.mlp_loss, zf.process_group(), divisor=lambda group: 1.0)

    with pytest.raises(AssertionError, match="gradients are not reduced: rank 0 has the gradient"):
        check(SGD, make)


def test_the_wrong_dual_is_found_by_itself() -> None:
    with pytest.raises(AssertionError, match="transpose of its derivative"):
        assert_adjoint(planted.gather_with_wrong_dual, [torch.ones(3), torch.zeros(3)])


# The smallest case.


def test_the_smallest_case_is_shown() -> None:
    rounded = {"wrap_group": lambda group: planted.RoundingGroup(group, torch.bfloat16)}
    everything = Composition(
        ("shard_params", "offload"),
        ("shard_grads", "offload"),
        ("shard_optimizer", "offload"),
        donate=True,
        remat=True,
    )
    text = message(
        SGD, **rounded, compositions=[everything], sizes=(4,), num_micro_batches=(3,), num_steps=3
    )
    assert "smallest case that fails: Composition() on 2 ranks, 1 step\n" in text
    assert "\n  without wrap_group the case passes" in text
    text = message(SGD, transform=planted.clipped(0.1, own=True), sizes=(4, 3))
    assert "Composition(grads=('shard_grads',)) on 2 ranks, 1 step\n" in text


# Problems that no composition can have.


def test_a_loss_that_is_no_function_of_its_arguments_is_named() -> None:
    calls = itertools.count()
    loss_fn = lambda p, x: (x * p["w"]).square().mean() * (1 + next(calls))
    with pytest.raises(AssertionError, match=r"two runs of the plain loop .*not a function of"):
        assert_invariant(loss_fn, {"w": torch.ones(3)}, BATCH, SGD)


def test_a_leaf_that_the_loss_does_not_use_is_named() -> None:
    params = {"w": torch.ones(3), "unused": torch.ones(2)}
    case = (lambda p, x: (x * p["w"]).square().mean(), params, BATCH, SGD)
    with pytest.raises(AssertionError, match=r"leaf 'unused' kept its values; .*unmoved="):
        assert_invariant(*case)
    assert_invariant(*case, unmoved=["unused"], sizes=(2,))
    assert_invariant(*case, trainable=lambda path, leaf: path == "w", sizes=(2,))


def test_values_that_are_not_finite_are_named() -> None:
    words = r"in step 0 the loss is nan, and 1 gradients .*first that of leaf 'w'; lower the"
    with pytest.raises(AssertionError, match=words):
        assert_invariant(lambda p, x: (x * p["w"]).sqrt().mean(), {"w": torch.ones(3)}, BATCH, SGD)


@pytest.mark.parametrize(
    ("rows", "sizes", "words"),
    [(2, (3,), "got 2 rows for 3 parts"), (7, None, "got 7 rows, which 2, 3 and 4 do not divide")],
)
def test_a_batch_that_cannot_be_divided_is_refused(rows: int, sizes: Any, words: str) -> None:
    with pytest.raises(zf.errors.OptionError, match=words):
        assert_invariant(models.mlp_loss, PARAMS, BATCH[:rows], SGD, sizes=sizes)
