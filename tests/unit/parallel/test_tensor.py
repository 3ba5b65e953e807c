"""Tensor parallelism of small losses: laws of the borders, random plans, and refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.func import grad, hessian, jvp, vmap

import zfun as zf
from tests.conftest import examples
from zfun.collectives import Group, enter, leave
from zfun.errors import LeafError, OptionError, PlacementError, SpecMismatch
from zfun.parallel import TensorStyle, vocab_cross_entropy
from zfun.testing import same_bits

WIDTH = 4


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def piece(x: Tensor, group: Group, dim: int) -> Tensor:
    return x.chunk(group.size, dim)[group.rank]


# The loss of two matrices: on one process, by sums of parts, and by joined parts.
UP, DOWN = draw(6, WIDTH), draw(WIDTH, 6, seed=1)


def whole_loss(x: Tensor) -> Tensor:
    return ((torch.tanh(x @ UP.T) @ DOWN.T) ** 3).sum()


def summed_loss(group: Group) -> Callable[[Tensor], Tensor]:
    up, down = piece(UP, group, 0), piece(DOWN, group, 1)
    return lambda x: (leave(torch.tanh(enter(x, group) @ up.T) @ down.T, group) ** 3).sum()


def joined_loss(group: Group) -> Callable[[Tensor], Tensor]:
    up = piece(UP, group, 0)

    def loss(x: Tensor) -> Tensor:
        hidden = leave(torch.tanh(enter(x, group) @ up.T), group, -1)
        rows = enter(hidden, group, -1)  # and cut again
        return (leave(rows @ piece(DOWN, group, 1).T, group) ** 3).sum()

    return loss


# torch's own rules for forward mode use torch.jit.script, which torch deprecates.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("make", [summed_loss, joined_loss])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_derivatives_of_every_kind_are_those_of_one_process(make: Any, size: int) -> None:
    x, v, batch = draw(WIDTH, seed=2), draw(WIDTH, seed=3), draw(2, WIDTH, seed=4)

    def of(loss: Callable[[Tensor], Tensor]) -> dict[str, Any]:
        leaf = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        return {
            "value": loss(x),
            "grad": grad(loss)(x),
            "jvp": jvp(loss, (x,), (v,)),
            "grads of a batch": vmap(grad(loss))(batch),
            "hessian": hessian(loss)(x),
            "product with the hessian": jvp(grad(loss), (x,), (v,))[1],
            "double backward": torch.autograd.grad((first * v).sum(), leaf)[0],
        }

    for found in zf.simulate(size, lambda group: of(make(group))):
        close(found, of(whole_loss))


def test_borders_send_what_they_say() -> None:
    def main(group: Group) -> Any:
        log = zf.record(group)
        x = torch.ones(4, requires_grad=True)
        counts = []
        for fn in (
            lambda: enter(x, log),
            lambda: enter(x, log, 0),
            lambda: leave(x, log),
            lambda: leave(x, log, 0),
        ):
            log.clear()
            out = fn()
            forward = [entry.kind for entry in log.log]
            out.sum().backward()
            counts.append((forward, [entry.kind for entry in log.log[len(forward) :]]))
        return counts

    for counts in zf.simulate(2, main):
        assert counts == [
            ([], ["all_reduce"]),
            ([], ["all_gather"]),
            (["all_reduce"], []),
            (["all_gather"], []),
        ]


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda g: enter(torch.ones(3), g, 0), "the 2 ranks divide; got length 3"),
        (lambda g: enter(torch.ones(3), g, 1), "got dim 1 of shape"),
        (lambda g: leave(torch.ones(3), g, -2), "got dim -2 of shape"),
    ],
)
def test_dims_that_do_not_exist_or_divide_are_refused(call: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        zf.simulate(2, call)


# A stack of blocks: a wide matrix and one back, with biases or not, packed or not, and a norm.
Block = tuple[str, bool, bool]
KINDS = ("pair", "gathered", "split", "packed", "whole", "normed")
BLOCKS = st.tuples(st.sampled_from(KINDS), st.booleans(), st.booleans())


def block_params(kind: str, index: int, has_bias: bool, size: int) -> dict[str, Tensor]:
    hidden = 2 * size
    wide = 2 * hidden if kind == "packed" else hidden
    found = {"up": draw(wide, WIDTH, seed=index), "down": draw(WIDTH, hidden, seed=index + 50)}
    if has_bias:
        found |= {"up_bias": draw(wide, seed=index + 1), "down_bias": draw(WIDTH, seed=index + 2)}
    if kind == "normed":
        found["scale"] = draw(2, seed=index + 3)
    return found


def block_styles(kind: str, index: int) -> dict[str, Any]:
    up, down = {
        "gathered": ("colwise_gather_output", None),
        "split": (None, "rowwise_split_input"),
        "packed": ("packed_colwise", "rowwise"),
        "whole": (None, None),
    }.get(kind, ("colwise", TensorStyle("rowwise")))
    found: dict[str, Any] = {}
    if up:
        found[f"{index}.up*"] = up
    if down:
        found[f"{index}.down*"] = down
    if kind == "normed":
        found[f"{index}.scale"] = "replicated_with_grad_allreduce"
    return found


def run_block(kind: str, p: Mapping[str, Tensor], x: Tensor) -> Tensor:
    y = F.linear(x, p["up"], p.get("up_bias"))
    if kind == "packed":
        gate, y = y.chunk(2, -1)
        y = torch.sigmoid(gate) * y
    if kind == "normed":  # each head of two features, as Qwen3 does
        y = (p["scale"] * torch.tanh(y).unflatten(-1, (-1, 2))).flatten(-2)
    return x + F.linear(torch.tanh(y), p["down"], p.get("down_bias"))


def stack_loss(kinds: list[Block]) -> Callable[[Any, Tensor], Tensor]:
    def loss(params: Any, x: Tensor) -> Tensor:
        for (kind, _, recomputed), p in zip(kinds, params, strict=True):
            fn = lambda p, x, kind=kind: run_block(kind, p, x)
            x = (zf.remat(fn) if recomputed else fn)(p, x)
        return (x**2).sum()

    return loss


@given(
    st.lists(
        st.tuples(st.sampled_from(KINDS), st.booleans(), st.booleans()), min_size=1, max_size=3
    ),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([0, 1, 2, 3]),
)
@settings(max_examples=examples(40))
def test_any_plan_trains_as_one_process(kinds: list[Block], size: int, stage: int) -> None:
    params = [block_params(kind, 10 * i, bias, size) for i, (kind, bias, _) in enumerate(kinds)]
    plan = {}
    for index, (kind, _, _) in enumerate(kinds):
        plan |= block_styles(kind, index)
    loss, batches = stack_loss(kinds), [draw(2, WIDTH, seed=90 + i) for i in range(2)]

    leaves = [leaf.clone().requires_grad_() for leaf in zf.tree.leaves(params)]
    mine = zf.tree.unflatten(zf.tree.structure(params), leaves)
    expected = (loss(mine, batches[0]) + loss(mine, batches[1])) / 2
    grads = torch.autograd.grad(expected, leaves)
    norm = torch.cat([x.flatten() for x in grads]).norm()
    after = [leaf.detach() - 0.01 * x for leaf, x in zip(leaves, grads, strict=True)]

    def main(group: Group) -> Any:
        mesh = zf.mesh(group, dp=2, tp=size)
        cut = zf.tensor_parallel(loss, mesh["tp"], plan)
        zero = zf.zero(stage, cut, zf.optim.sgd(0.01), mesh["dp"], bucket_bytes=200)
        state, info = zero.step(zero.init(params), batches[mesh.coordinates["dp"]])
        return info.loss, info.grad_norm, zero.params(state)

    for found, total, whole in zf.simulate(2 * size, main):
        torch.testing.assert_close(found, expected.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(float(total), float(norm), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(zf.tree.leaves(whole), after, rtol=1e-12, atol=1e-12)


def local(loss: Any, params: Mapping[str, Tensor]) -> dict[str, Tensor]:
    (axis,) = loss.model_axes
    rules = {path: axis.rule(path, leaf) for path, leaf in params.items()}
    return {
        path: leaf
        if rules[path] is None
        else rules[path].piece(leaf, axis.group.rank, axis.group.size)
        for path, leaf in params.items()
    }


IDS = torch.tensor([[0, 5, 3], [1, 2, 5]])
TABLE = draw(6, WIDTH)


@pytest.mark.parametrize("padding", [None, 0, 5, -1])
def test_a_table_and_a_tied_head_over_the_vocabulary(padding: int | None) -> None:
    def loss(params: Any, ids: Tensor) -> Tensor:
        x = F.embedding(input=ids, weight=params["table"], padding_idx=padding)
        return (F.linear(torch.tanh(x), params["table"]) ** 2).sum()

    expected = zf.value_and_grad(loss)({"table": TABLE}, IDS)

    def main(group: Group) -> Any:
        cut = zf.tensor_parallel(loss, group, {"table": "embedding_rowwise"})
        value, grads = zf.value_and_grad(cut)(local(cut, {"table": TABLE}), IDS)
        return value, {"table": zf.collectives.all_gather(grads["table"], group)}

    for found in zf.simulate(3, main):
        close(found, expected)


@pytest.mark.parametrize("wrong", [-1, 6])
def test_an_id_outside_of_the_vocabulary_is_refused(wrong: int) -> None:
    loss = lambda params, ids: F.embedding(ids, params["table"]).sum()

    def main(group: Group) -> None:
        cut = zf.tensor_parallel(loss, group, {"table": "embedding_rowwise"})
        cut(local(cut, {"table": TABLE}), torch.tensor([wrong]))

    with pytest.raises(IndexError, match="out of range"):
        zf.simulate(2, main)


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["mean", "sum", "none"]),
    st.integers(0, 10**6),
)
@settings(max_examples=examples(40))
def test_the_cross_entropy_is_torch_s(
    size: int, num_tokens: int, reduction: str, seed: int
) -> None:
    vocabulary = 3 * size
    logits = 50 * draw(2, num_tokens, vocabulary, seed=seed)
    chance = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, vocabulary, (2, num_tokens), generator=chance)
    labels[0, 0] = -7

    def plain(x: Tensor) -> Tensor:
        out = F.cross_entropy(
            x.flatten(0, 1), labels.flatten(), ignore_index=-7, reduction=reduction
        )
        return (out**2).sum()

    def main(group: Group) -> Any:
        def loss(x: Tensor) -> Tensor:
            mine = enter(x, group, -1)
            out = vocab_cross_entropy(
                mine, labels, group, vocab_size=vocabulary, ignore_index=-7, reduction=reduction
            )
            return (out**2).sum()

        return torch.func.grad_and_value(loss)(logits)

    for found in zf.simulate(size, main):
        torch.testing.assert_close(
            found, torch.func.grad_and_value(plain)(logits), rtol=1e-11, atol=1e-11
        )


def test_no_message_of_the_cross_entropy_holds_logits() -> None:
    logits, labels = torch.randn(5, 8), torch.arange(5)

    def main(group: Group) -> list[tuple[str, int]]:
        log = zf.record(group)
        leaf = piece(logits, group, -1).clone().requires_grad_()
        vocab_cross_entropy(leaf, labels, log, vocab_size=8).backward()
        return [(entry.kind, entry.numel) for entry in log.log]

    assert zf.simulate(2, main)[0] == [("all_gather", 5), ("all_reduce", 10)]


def test_a_label_outside_of_the_vocabulary_is_refused() -> None:
    for wrong in (-1, 8):
        label = torch.tensor([wrong])
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            zf.simulate(
                2,
                lambda g, label=label: vocab_cross_entropy(
                    torch.ones(1, 4), label, g, vocab_size=8
                ),
            )


def test_the_cross_entropy_refuses_logits_that_a_head_has_joined() -> None:
    tied = {"table": draw(8, WIDTH)}

    def loss(params: Any, ids: Tensor, axis: Group) -> Tensor:
        logits = F.linear(F.embedding(ids, params["table"]), params["table"])
        return vocab_cross_entropy(logits, ids, axis, vocab_size=8)

    def main(group: Group) -> Any:
        cut = zf.tensor_parallel(loss, group, {"table": "embedding_rowwise"})
        return cut({"table": piece(tied["table"], group, 0)}, torch.arange(8), group)

    with pytest.raises(OptionError, match="1/2 of the vocabulary; got 8 columns of 8"):
        zf.simulate(2, main)


def test_tied_leaves_may_have_a_style_each() -> None:
    """One table is looked up, and is a head whose logits stay cut."""
    table, ids = draw(8, WIDTH), torch.arange(8)

    def logits(params: Any) -> Tensor:
        return F.linear(F.embedding(ids, params["table"]), params["head"])

    def main(group: Group) -> Any:
        def loss(params: Any) -> Tensor:
            return vocab_cross_entropy(logits(params), ids, group, vocab_size=8)

        cut = zf.tensor_parallel(loss, group, {"table": "embedding_rowwise", "head": "colwise"})
        mine = piece(table, group, 0).clone().requires_grad_()
        value = cut({"table": mine, "head": mine})
        return value.detach(), torch.autograd.grad(value, mine)[0]

    whole = table.clone().requires_grad_()
    expected = F.cross_entropy(logits({"table": whole, "head": whole}), ids)
    (slope,) = torch.autograd.grad(expected, whole)
    found = zf.simulate(2, main)
    close(torch.cat([part for _, part in found]), slope)
    close(found[0][0], expected.detach())


def test_a_write_without_gradients_is_seen() -> None:
    def loss(params: Any, x: Tensor) -> Tensor:
        before = F.linear(x, params["w"])
        x.mul_(2)
        return F.linear(x, params["w"]) - 2 * before

    def main(group: Group) -> Tensor:
        cut = zf.tensor_parallel(loss, group, {"w": "colwise"}, sequence_dim=0)
        with torch.no_grad():
            return cut({"w": torch.ones(1, WIDTH)}, torch.ones(1, WIDTH))

    assert torch.equal(torch.stack(zf.simulate(2, main)), torch.zeros(2, 2, 1))


@pytest.mark.parametrize("has_mid", [False, True])
def test_the_result_of_a_norm_is_cut_into_features(has_mid: bool) -> None:
    """Each rank sends the gradient of the whole result, which counts once."""

    def loss(params: Any, x: Tensor) -> Tensor:
        x = F.rms_norm(enter(x, params["axis"], 0), (WIDTH,), params["norm"])
        if "mid" in params:
            x = F.linear(x, params["mid"])
        return F.linear(x, params["w"]).sum()

    def main(group: Group) -> Any:
        norm = torch.ones(WIDTH, requires_grad=True)
        params: dict[str, Any] = {"norm": norm, "w": torch.ones(2, WIDTH // 2)}
        plan = {"w": "rowwise_split_input"}
        if has_mid:
            params["mid"] = torch.ones(WIDTH // 2, WIDTH)
            plan["mid"] = "colwise_gather_output"
        whole = lambda p, x: loss(p | {"axis": group}, x)
        cut = zf.tensor_parallel(whole, group, plan, sequence_dim=0)
        out = cut(params, torch.ones(2, WIDTH))
        out.backward()
        return float(out.detach()), norm.grad

    # Each rank has one of two tokens, whose 4 features are 1, and 4 behind the matrix. It sums 2
    # results, and their gradients over both tokens.
    factor = 4.0 if has_mid else 1.0
    for total, gradient in zf.simulate(2, main):
        assert total == pytest.approx(2 * 4 * factor)
        torch.testing.assert_close(gradient, torch.full((WIDTH,), 2 * 2 * factor))


# Wrong programs. Each is refused before anything is sent.
PARAMS = {"a.weight": draw(4, WIDTH), "a.bias": draw(4), "b.weight": draw(WIDTH, 4)}
PLAN = {"a": "colwise", "b": "rowwise"}


def right(p: Any, x: Tensor) -> Tensor:
    return F.linear(F.linear(x, p["a.weight"], p["a.bias"]), weight=p["b.weight"]).sum()


WRONG_USES: dict[str, tuple[Callable[[Any, Tensor], Tensor], dict[str, Any], str]] = {
    "another function": (
        lambda p, x: (x @ p["a.weight"].T).sum(),
        PLAN,
        r"'colwise' is used in F.linear\(x, leaf, bias\); leaf 'a.weight' met",
    ),
    "arithmetic": (lambda p, x: (p["a.weight"] * 2).sum(), PLAN, "leaf 'a.weight' met mul"),
    "an embedding": (
        lambda p, x: F.embedding(torch.tensor([0]), p["a.weight"]).sum(),
        PLAN,
        "leaf 'a.weight' met embedding",
    ),
    "an index": (lambda p, x: p["a.weight"][0].sum(), PLAN, "leaf 'a.weight' met an index"),
    "as the input": (
        lambda p, x: F.linear(p["a.weight"], x).sum(),
        PLAN,
        "leaf 'a.weight' met linear",
    ),
    "a lone bias": (
        lambda p, x: (F.linear(x, p["a.weight"]) + p["a.bias"]).sum(),
        PLAN,
        "leaf 'a.bias' met add",
    ),
    "a bias of other parts": (
        right,
        {
            "a.weight": "packed_colwise",
            "a.bias": TensorStyle("packed_colwise", parts=(4,)),
            "b": "rowwise",
        },
        "a bias has the style of its",
    ),
    "a bias whose gradient would be added": (
        lambda p, x: F.linear(F.linear(x, p["a.weight"]), p["b.weight"], p["a.bias"]).sum(),
        {"a.weight": "colwise", "a.bias": "replicated_with_grad_allreduce", "b": "rowwise"},
        "a bias has the style of its",
    ),
    "another bias": (right, {"a.weight": "colwise", "b": "rowwise"}, "a bias has the style of its"),
    "a whole input": (
        lambda p, x: F.linear(x, p["b.weight"]).sum(),
        {"b": "rowwise"},
        "2 features on each rank; leaf 'b.weight' met 4 features",
    ),
    "a gather": (lambda p, x: zf.gather(p)["a.weight"].sum(), PLAN, "met a function that reads it"),
    "torch.func": (
        lambda p, x: grad(lambda w: F.linear(x, w).sum())(p["a.weight"]).sum(),
        PLAN,
        "leaf 'a.weight' met",
    ),
}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", list(WRONG_USES))
def test_a_use_that_a_style_does_not_know_is_refused(name: str, stage: int) -> None:
    loss, plan, match = WRONG_USES[name]

    def main(group: Group) -> None:
        mesh = zf.mesh(group, dp=1, tp=2)
        cut = zf.tensor_parallel(loss, mesh["tp"], plan)
        zero = zf.zero(stage, cut, zf.optim.sgd(0.1), mesh["dp"])
        zero.step(zero.init(PARAMS), draw(3, WIDTH))

    with pytest.raises(PlacementError, match=match):
        zf.simulate(2, main)


@pytest.mark.parametrize(
    ("plan", "options", "match"),
    [
        ({"a": "column"}, {}, "styles of tensor_parallel.* got 'column'"),
        (PLAN | {"c.*": "colwise"}, {}, r"each style of a plan has a leaf; got 'c.\*': 'colwise'"),
        ({"a": "sequence_parallel"}, {}, "got no sequence_dim"),
    ],
)
def test_a_wrong_plan_is_refused(plan: Any, options: Any, match: str) -> None:
    def main(group: Group) -> None:
        cut = zf.tensor_parallel(right, group, plan, **options)
        cut(local(cut, PARAMS), draw(3, WIDTH))

    with pytest.raises(OptionError, match=match):
        zf.simulate(2, main)


def test_styles_say_their_parts_and_heads() -> None:
    with pytest.raises(OptionError, match="packed styles have parts"):
        TensorStyle("colwise", parts=(2, 2))
    with pytest.raises(LeafError, match="got 3 heads in leaf 'q' over 2 ranks"):
        TensorStyle("colwise", heads=3).cut("q", (6, 4), 2)
    with pytest.raises(LeafError, match=r"leaf 'q' of shape .*in parts of 6, over 4 ranks"):
        TensorStyle("colwise").cut("q", (6, 4), 4)
    assert TensorStyle("rowwise").cut("bias", (6,), 4) is None


def test_ranks_with_different_plans_are_refused() -> None:
    def main(group: Group) -> None:
        plan = PLAN if group.rank == 0 else {"a": "colwise_gather_output"}
        cut = zf.tensor_parallel(right, group, plan)
        cut(local(cut, PARAMS), draw(3, WIDTH))

    with pytest.raises(SpecMismatch, match=r"plan of tensor_parallel"):
        zf.simulate(2, main)


def test_an_axis_twice_and_sharded_leaves_are_refused() -> None:
    def twice(group: Group) -> None:
        zf.tensor_parallel(zf.tensor_parallel(right, group, PLAN), group, PLAN)

    with pytest.raises(OptionError, match="cut once along an axis"):
        zf.simulate(2, twice)

    def inside(group: Group) -> None:
        cut = zf.tensor_parallel(zf.shard_params(right, group), group, PLAN)
        cut(zf.shard(PARAMS, group), draw(3, WIDTH))

    with pytest.raises(PlacementError, match=r"put\s+shard_params\(\) around it"):
        zf.simulate(1, inside)


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def test_an_autograd_function_of_a_cut_leaf_is_refused() -> None:
    def main(group: Group) -> None:
        cut = zf.tensor_parallel(lambda p, x: Twice.apply(p["a.weight"]), group, {"a": "colwise"})
        zf.value_and_grad(cut)(local(cut, PARAMS), draw(3, WIDTH))

    with pytest.raises(PlacementError, match=r"leaf 'a.weight'"):
        zf.simulate(2, main)


@pytest.mark.parametrize("stage", [0, 3])
def test_metadata_casts_and_aux_are_those_of_a_tensor(stage: int) -> None:
    def loss(p: Any, x: Tensor) -> Any:
        weight = p["a.weight"]
        assert weight.shape == (2, WIDTH)
        assert weight.dtype == torch.bfloat16
        assert weight.requires_grad
        return right(p, x.to(weight.dtype)), {"rows": torch.tensor(len(weight))}

    def main(group: Group) -> Any:
        mesh = zf.mesh(group, dp=2, tp=2)
        cut = zf.tensor_parallel(zf.cast(loss, torch.bfloat16), mesh["tp"], PLAN)
        zero = zf.zero(stage, cut, zf.optim.sgd(0.1), mesh["dp"])
        state, info = zero.step(zero.init(PARAMS), draw(3, WIDTH))
        return info.aux["rows"], zero.params(state)

    found = zf.simulate(4, main)
    assert all(same_bits(one, found[0]) for one in found)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_transforms_of_torch_compose_around_the_loss() -> None:
    def loss(p: Any, x: Tensor) -> Tensor:
        x = torch.tanh(F.linear(x, p["a.weight"], p["a.bias"]))
        return (F.linear(x, p["b.weight"]) ** 2).sum()

    x, tangents = draw(3, WIDTH, seed=5), {path: leaf.cos() for path, leaf in PARAMS.items()}

    def of(fn: Any, p: Any, v: Any) -> dict[str, Any]:
        return {
            "grad": grad(fn)(p, x),
            "product": jvp(lambda p: grad(fn)(p, x), (p,), (v,))[1],
            "each row": vmap(grad(fn), (None, 0))(p, x),
        }

    def main(group: Group) -> Any:
        cut = zf.tensor_parallel(loss, group, PLAN)
        return of(cut, local(cut, PARAMS), local(cut, tangents))

    expected, found = of(loss, PARAMS, tangents), zf.simulate(2, main)
    for kind, grads in expected.items():
        first = 1 if kind == "each row" else 0
        for path, dim in {"a.weight": 0, "a.bias": 0, "b.weight": 1}.items():
            whole = torch.cat([one[kind][path] for one in found], first + dim)
            close(whole, grads[path])


@pytest.mark.parametrize("writes", [False, True])
def test_leaves_share_the_sum_of_an_input_until_it_is_written(writes: bool) -> None:
    params = {"q": draw(4, WIDTH), "k": draw(4, WIDTH, seed=1)}

    def loss(p: Any, x: Tensor) -> Tensor:
        x = torch.ones_like(x) * x
        q = F.linear(x, p["q"])
        if writes:
            x.mul_(2)
        return (q + F.linear(x, p["k"])).sum()

    def main(group: Group) -> Any:
        log, x = zf.record(group), draw(3, WIDTH, seed=2).requires_grad_()
        cut = zf.tensor_parallel(loss, log, {"*": "colwise_gather_output"})
        # No leaf needs a gradient, so that autograd keeps no input that the write spoils.
        (found,) = torch.autograd.grad(cut(local(cut, params), x), x)
        return found, [entry.kind for entry in log.log].count("all_reduce")

    x = draw(3, WIDTH, seed=2).requires_grad_()
    (expected,) = torch.autograd.grad(loss(params, x), x)
    for found, sums in zf.simulate(2, main):
        close(found, expected)
        assert sums == 1 + writes
