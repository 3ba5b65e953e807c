"""torch.func over sharded parameters, and torch.compile of gathered blocks."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, hessian, jacrev, jvp, vjp, vmap

import zfun as zf
from tests import models
from zfun import ops, tree
from zfun.testing import assert_same_bits

# torch triggers this warning at the first import for forward-mode derivatives.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.torch.jit.script. is deprecated:DeprecationWarning"
)

SIZES = pytest.mark.parametrize("size", [1, 2, 3])
Loss = Callable[[Any, Tensor], Tensor]

# Every rank computes on the same batch, so the derivative of the mean loss over the ranks is the
# unsharded derivative.
X = torch.randn(4, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def mlp() -> dict[str, Any]:
    return models.mlp(num_layers=2)


def through_gather(group: zf.Group) -> Loss:
    return lambda flat, x: models.mlp_loss(zf.gather(flat), x) / group.size


def through_shard_params(group: zf.Group) -> Loss:
    inner = zf.shard_params(models.mlp_loss, group)
    return lambda flat, x: inner(flat, x) / group.size


FORMS = pytest.mark.parametrize("form", [through_gather, through_shard_params])


def close(found: Any, expected: Any) -> None:
    for path, x, y in zip(
        tree.paths(expected), tree.leaves(found), tree.leaves(expected), strict=True
    ):
        torch.testing.assert_close(
            x, y, rtol=1e-12, atol=1e-13, msg=lambda text, path=path: f"{path}: {text}"
        )


def run(size: int, form: Any, program: Callable[[zf.Group, Loss, zf.Flat], Any]) -> list[Any]:
    def main(group: zf.Group) -> Any:
        flat = zf.shard(mlp(), group, bucket_bytes=300)
        assert len(flat.buffers) > 1
        return program(group, form(group), flat)

    return zf.simulate(size, main)


@SIZES
@FORMS
def test_func_grad_of_a_gathered_loss(size: int, form: Any) -> None:
    def program(group: zf.Group, loss: Loss, flat: zf.Flat) -> Any:
        found, value = grad_and_value(loss)(flat, X)
        assert found.placement is zf.S
        return zf.unshard(found), value * group.size

    expected = grad_and_value(models.mlp_loss)(mlp(), X)
    for found in run(size, form, program):
        close(found, expected)


@SIZES
@FORMS
def test_plain_autograd_of_a_gathered_loss(size: int, form: Any) -> None:
    """``torch.autograd`` alone, without a transform of zfun, gives buffers their gradients."""

    def program(group: zf.Group, loss: Loss, flat: zf.Flat) -> Any:
        buffers = [buffer.requires_grad_() for buffer in flat.buffers]
        grads = torch.autograd.grad(loss(flat, X), buffers)
        return zf.unshard(flat.with_buffers(grads))

    for found in run(size, form, program):
        close(found, grad(models.mlp_loss)(mlp(), X))


@SIZES
@FORMS
def test_per_sample_gradients_equal_those_of_one_process(size: int, form: Any) -> None:
    def program(group: zf.Group, loss: Loss, flat: zf.Flat) -> Any:
        per_sample = vmap(grad(loss), in_dims=(None, 0))(flat, X[:, None])
        assert all(buffer.shape[0] == len(X) for buffer in per_sample.buffers)
        return [
            zf.unshard(
                per_sample.with_buffers(buffer[i].contiguous() for buffer in per_sample.buffers)
            )
            for i in range(len(X))
        ]

    expected = vmap(grad(models.mlp_loss), in_dims=(None, 0))(mlp(), X[:, None])
    for found in run(size, form, program):
        for i in range(len(X)):
            close(found[i], tree.map(lambda leaf, i=i: leaf[i], expected))


def direction() -> dict[str, Any]:
    return models.mlp(num_layers=2, seed=9)


def unsharded_hvp() -> Any:
    return jvp(lambda p: grad(models.mlp_loss)(p, X), (mlp(),), (direction(),))[1]


@SIZES
@FORMS
def test_hessian_vector_products_forward_over_reverse_equal_those_of_one_process(
    size: int, form: Any
) -> None:
    def program(group: zf.Group, loss: Loss, flat: zf.Flat) -> Any:
        tangent = zf.shard(direction(), group, bucket_bytes=300)
        _, product = jvp(lambda p: grad(loss)(p, X), (flat,), (tangent,))  # pyrefly: ignore[bad-unpacking]
        return zf.unshard(product)

    for found in run(size, form, program):
        close(found, unsharded_hvp())


@SIZES
@FORMS
def test_hessian_vector_products_reverse_over_reverse_equal_those_of_one_process(
    size: int, form: Any
) -> None:
    def program(group: zf.Group, loss: Loss, flat: zf.Flat) -> Any:
        tangent = zf.shard(direction(), group, bucket_bytes=300)

        def along(p: zf.Flat) -> Tensor:
            # The dot product of shards is one term of the sum over ranks.
            slopes = grad(loss)(p, X)
            return torch.stack(
                [(a * b).sum() for a, b in zip(slopes.buffers, tangent.buffers, strict=True)]
            ).sum()

        return zf.unshard(grad(along)(flat))

    for found in run(size, form, program):
        close(found, unsharded_hvp())


@SIZES
@FORMS
def test_jvp_equals_that_of_one_process(size: int, form: Any) -> None:
    def program(group: zf.Group, loss: Loss, flat: zf.Flat) -> Any:
        return tuple(
            out * group.size
            for out in jvp(
                lambda p: loss(p, X), (flat,), (zf.shard(direction(), group, bucket_bytes=300),)
            )
        )

    expected = jvp(lambda p: models.mlp_loss(p, X), (mlp(),), (direction(),))
    for found in run(size, form, program):
        close(found, expected)


def outputs(params: Any, x: Tensor) -> Tensor:
    """Return several results, for jacobians."""
    for layer in params["h"]:
        x = torch.tanh(x @ layer["w"] + layer["b"])
    return x @ params["out"]


@SIZES
@pytest.mark.parametrize("sharded", [False, True])
def test_jacrev_and_vjp_equal_those_of_one_process(size: int, sharded: bool) -> None:
    expected = jacrev(outputs)(mlp(), X)
    cotangent = torch.arange(1.0, 5.0, dtype=torch.float64)

    def main(group: zf.Group) -> Any:
        flat = zf.shard(mlp(), group, bucket_bytes=300)
        inner = (
            zf.shard_params(outputs, group) if sharded else lambda p, x: outputs(zf.gather(p), x)
        )
        fn = lambda p: inner(p, X) / group.size
        jacobian = jacrev(fn)(flat)
        rows = [
            zf.unshard(jacobian.with_buffers(buffer[i].contiguous() for buffer in jacobian.buffers))
            for i in range(len(X))
        ]
        _, pull = vjp(fn, flat)  # pyrefly: ignore[bad-unpacking]
        return rows, zf.unshard(pull(cotangent)[0])

    for rows, pulled in zf.simulate(size, main):
        for i, row in enumerate(rows):
            close(row, tree.map(lambda leaf, i=i: leaf[i], expected))
        close(pulled, tree.map(lambda leaf: torch.tensordot(cotangent, leaf, 1), expected))


@SIZES
def test_the_hessian_of_a_small_model_equals_that_of_one_process(size: int) -> None:
    w = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def cubes(w: Tensor) -> Tensor:
        return (w**3).sum() + (w[0] * w[1:]).sum()

    def main(group: zf.Group) -> Any:
        flat = zf.shard({"w": w}, group)

        def slope(p: zf.Flat) -> Tensor:
            return zf.gather(grad(lambda q: cubes(zf.gather(q)["w"]) / group.size)(p))["w"]

        rows = jacrev(lambda p: slope(p) / group.size)(flat)
        return torch.stack(
            [
                zf.unshard(rows.with_buffers(buffer[i].contiguous() for buffer in rows.buffers))[
                    "w"
                ]
                for i in range(6)
            ]
        )

    for found in zf.simulate(size, main):
        close(found, hessian(cubes)(w))


def test_a_gradient_function_of_the_user_goes_through_the_transforms() -> None:
    """``torch.func.grad_and_value`` replaces ``zf.value_and_grad`` at every stage below 3."""

    def user(params: Any, batch: Tensor) -> Any:
        grads, loss = grad_and_value(models.mlp_loss)(params, batch)
        return loss, grads

    batches = models.mlp_batches(3, 3)

    def main(group: zf.Group, vg: Any, sharded: bool, parts: int) -> Any:
        gradient = zf.data_parallel(vg, group, bucket_bytes=300)
        gradient = zf.shard_grads(gradient, group) if sharded else gradient
        gradient = zf.accumulate(gradient, parts)
        optimizer = zf.shard_optimizer(zf.optim.adamw(0.1), group, bucket_bytes=300)
        params = mlp()
        state = optimizer.init(params)
        losses = []
        for step in batches:
            loss, grads = gradient(params, step[group.rank])
            params, state = zf.apply(optimizer, grads, state, params)
            losses.append(loss)
        return losses, params

    for sharded in (False, True):
        for parts in (1, 2):
            mine = zf.simulate(3, main, user, sharded, parts)
            assert_same_bits(
                mine, zf.simulate(3, main, zf.value_and_grad(models.mlp_loss), sharded, parts)
            )


def test_a_gradient_function_of_the_user_may_return_aux() -> None:
    def main(group: zf.Group) -> Any:
        vg = zf.shard_grads(
            zf.data_parallel(lambda p, x: ((p["w"] * x, "aux"), {"w": x.clone()}), group), group
        )
        (loss, aux), grads = vg({"w": torch.tensor(2.0)}, torch.tensor(float(group.rank)))
        return loss.item(), aux, zf.unshard(grads)["w"].item()

    assert zf.simulate(2, main) == [(1.0, "aux", 0.5)] * 2


# Transforms inside of the loss.


def scalar(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(outputs(p, x)) * p["out"].sum()).sum()


def squares(value: Any) -> Tensor:
    return torch.stack([leaf.square().sum() for leaf in tree.leaves(value)]).sum()


def adapted(p: Any, x: Tensor) -> Tensor:
    """One step of gradient descent inside of the loss, as in meta-learning."""
    slopes = grad(scalar)(p, x[:2])
    return scalar(tree.map(lambda leaf, slope: leaf - 0.1 * slope, p, slopes), x[2:])


def experts(p: Any, x: Tensor) -> Tensor:
    """A leaf whose first dimension is mapped over."""
    return vmap(lambda row: torch.sin(row) * x.sum())(p["h"][0]["w"]).sum()


INSIDE: dict[str, Loss] = {
    "a penalty on the gradient": lambda p, x: (
        scalar(p, x) + squares(grad(lambda x: scalar(p, x))(x))
    ),
    "gradients of parameters": lambda p, x: squares(grad(scalar)(p, x)),
    "gradients by example": lambda p, x: squares(
        vmap(grad(scalar), in_dims=(None, 0))(p, x[:, None])
    ),
    "one step inside": adapted,
    "a vjp": lambda p, x: squares(vjp(lambda x: outputs(p, x), x)[1](torch.ones(4).double())),
    "a vjp of parameters": lambda p, x: squares(
        vjp(lambda p: outputs(p, x), p)[1](torch.ones(4).double())
    ),
    "a jacobian": lambda p, x: squares(jacrev(lambda x: outputs(p, x))(x)),
    "a jvp": lambda p, x: squares(jvp(lambda x: outputs(p, x), (x,), (x + 1,))),
    "a jvp of parameters": lambda p, x: squares(jvp(lambda p: outputs(p, x), (p,), (p,))),
    "a hessian": lambda p, x: squares(hessian(lambda x: scalar(p, x))(x[:2])),
    "a map over examples": lambda p, x: squares(vmap(lambda x: outputs(p, x))(x)),
    "a map over a leaf": experts,
}


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("gathered", [False, True])
def test_a_transform_inside_of_the_loss(name: str, gathered: bool) -> None:
    inner = INSIDE[name]
    loss_fn = (lambda p, x: inner(zf.gather(p), x)) if gathered else inner
    refused = torch._functorch.eager_transforms.grad_and_value_impl

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(stage, loss_fn, zf.optim.adamw(0.05), group, bucket_bytes=300)
        state, losses = z.init(mlp()), []
        for _ in range(3):
            state, info = z.step(state, X + group.rank)
            losses.append(info.loss)
        return z.params(state), losses

    for size in (1, 2):
        expected, *others = [run for stage in (0, 3) for run in zf.simulate(size, main, stage)]
        for found in others:
            assert_same_bits(found, expected)
    assert torch._functorch.eager_transforms.grad_and_value_impl is refused


# torch.compile.

needs_compiler = pytest.mark.skipif(
    not any(shutil.which(name) for name in ("g++", "clang++", "c++")),
    reason="torch.compile needs a C++ compiler",
)


def block(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ layer["w"] + layer["b"])


@needs_compiler
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.slow
def test_a_compiled_block_has_equal_bits_at_every_stage() -> None:
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True)

    def loss_of(run: Any) -> Loss:
        def loss_fn(params: Any, x: Tensor) -> Tensor:
            for layer in params["h"]:
                x = run(zf.gather(layer), x)
            return (x @ params["out"]).pow(2).mean()

        return loss_fn

    def main(group: zf.Group, run: Any) -> Any:
        vg = zf.value_and_grad(zf.shard_params(loss_of(run), group))
        flat = zf.shard(mlp(), group, bucket_bytes=300)
        vg(flat, X)
        loss, grads = vg(flat, X)
        return loss, zf.unshard(grads)

    close(zf.simulate(1, main, compiled), zf.simulate(1, main, block))
    # Stage 0 is the reference, because compiled code may round differently from plain code.
    first = zf.simulate(2, trained, 0, lambda layer, x: compiled(zf.gather(layer), x))
    for stage in (1, 2, 3):
        assert_same_bits(
            zf.simulate(2, trained, stage, lambda layer, x: compiled(zf.gather(layer), x)), first
        )


def trained(group: zf.Group, stage: int, run: Any) -> Any:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for layer in params["h"]:
            x = run(layer, x)
        return (x @ params["out"]).pow(2).mean()

    z = zf.zero(stage, loss_fn, zf.optim.adamw(0.05), group, bucket_bytes=300)
    state, losses = z.init(mlp()), []
    for batches in models.mlp_batches(3, group.size):
        state, info = z.step(state, batches[group.rank])
        losses.append(info.loss)
    return z.params(state), losses


@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("size", "stages"),
    [
        pytest.param(2, (0, 3), marks=pytest.mark.slow),
        pytest.param(1, (0, 1, 2, 3), marks=pytest.mark.slow),
        pytest.param(2, (1, 2), marks=pytest.mark.slow),
    ],
)
def test_a_block_traced_as_one_graph_at_every_stage_and_with_remat(
    size: int, stages: tuple[int, ...]
) -> None:
    """Use the ``aot_eager`` backend, whose bits are those of plain code."""
    torch.compiler.reset()
    whole = torch.compile(block, fullgraph=True, backend="aot_eager")
    inside = torch.compile(zf.remat(block), fullgraph=True, backend="aot_eager")
    run = lambda layer, x: whole(zf.gather(layer), x)
    store = zf.stores.host()
    forms = {
        "compiled": run,
        "remat around": zf.remat(run),
        "with a policy": zf.remat(run, policy=zf.policies.matmuls),
        "with a store": zf.remat(run, store=store),
        "kept in a store": zf.remat(run, store=store, policy=zf.policies.everything),
        "remat inside": lambda layer, x: inside(zf.gather(layer), x),
    }
    # Every call has new threads, so guards unrelated to the block may fail and recompile.
    with torch._dynamo.config.patch(recompile_limit=256):
        for stage in stages:
            expected = zf.simulate(size, trained, stage, block)
            for name, form in forms.items():
                assert_same_bits(
                    zf.simulate(size, trained, stage, form), expected, f"stage {stage}, {name}"
                )


@pytest.mark.filterwarnings("ignore")
def test_inside_compiled_code_the_readable_form_runs() -> None:
    """Under tracing zfun uses torch's operations, because tracing cannot look into Numba code."""
    torch.compiler.reset()
    place = lambda x: ops.ravel([2 * x], [1], 6, dtype=x.dtype, device=x.device)
    x = torch.arange(4.0)
    assert torch.equal(torch.compile(place, fullgraph=True, backend="eager")(x), place(x))


@pytest.mark.filterwarnings("ignore")
def test_remat_inside_of_compiled_code_takes_no_options() -> None:
    torch.compiler.reset()
    inside = torch.compile(
        zf.remat(block, policy=zf.policies.matmuls), fullgraph=True, backend="eager"
    )
    with pytest.raises(Exception, match=r"put remat\(\) around the compiled function"):
        inside(mlp()["h"][0], X)


@needs_compiler
@pytest.mark.timeout(180)
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_block_without_gather_is_an_error_with_a_remedy() -> None:
    torch.compiler.reset()
    compiled = torch.compile(block, fullgraph=True, backend="eager")

    def main(group: zf.Group) -> None:
        loss = zf.shard_params(lambda params, x: compiled(params["h"][0], x).sum(), group)
        vg = zf.value_and_grad(loss)
        flat = zf.shard(mlp(), group)
        # Dynamo wraps errors raised during tracing in Dynamo errors.
        with pytest.raises(Exception, match=r"call zf\.gather\(\) on the subtree first"):
            vg(flat, X)

    zf.simulate(1, main)
