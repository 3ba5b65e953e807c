from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from zfun import optim, tree
from zfun.errors import NotElementwiseError, OptionError, SpecMismatch
from zfun.testing import same_bits

CLASSES: list[tuple[Any, dict[str, Any], set[str]]] = [
    (torch.optim.SGD, {"lr": 0.1}, set()),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3}, {"momentum_buffer"}),
    (torch.optim.Adam, {"lr": 0.1, "amsgrad": True}, {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}),
    (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.2}, {"exp_avg", "exp_avg_sq"}),
    (
        torch.optim.RMSprop,
        {"lr": 0.1, "centered": True, "momentum": 0.9},
        {"square_avg", "momentum_buffer", "grad_avg"},
    ),
    (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}, {"sum"}),
    (torch.optim.Adadelta, {"lr": 0.5, "eps": 1e-2}, {"square_avg", "acc_delta"}),
    (torch.optim.Adamax, {"lr": 0.1}, {"exp_avg", "exp_inf"}),
    (torch.optim.NAdam, {"lr": 0.1}, {"exp_avg", "exp_avg_sq"}),
    (torch.optim.RAdam, {"lr": 0.1}, {"exp_avg", "exp_avg_sq"}),
    (torch.optim.ASGD, {"lr": 0.1, "t0": 2}, {"ax"}),
    (torch.optim.Rprop, {"lr": 0.1}, {"prev", "step_size"}),
]


class PerTensor(torch.optim.Optimizer):
    """A step of equal length for each tensor; with ``record``, the state also keeps the largest
    gradient.
    """

    def __init__(self, params: Any, lr: float = 0.1, *, record: bool = False) -> None:
        super().__init__(params, {"lr": lr, "record": record})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if group["record"]:
                    self.state[p]["largest"] = max(
                        self.state[p].get("largest", 0.0), float(p.grad.abs().max())
                    )
                    p.sub_(group["lr"] * p.grad.sign())
                else:
                    p.sub_(group["lr"] * p.grad / (p.grad.norm() + 1e-9))


class Counting(torch.optim.Optimizer):
    """Keeps a Python integer."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                count = self.state[p].get("step", 0)
                assert type(count) is int
                self.state[p]["step"] = count + 1
                p.sub_(group["lr"] / (1 + count) * p.grad)


def leaves(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"long": (70_000,), "w": (7, 5), "scalar": (), "empty": (0, 3)}
    found = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    return {**found, "complex": torch.randn(3, generator=generator, dtype=torch.complex128)}


@pytest.mark.parametrize(("make", "options", "names"), CLASSES)
def test_changes_equal_those_of_torch(make: Any, options: Any, names: set[str]) -> None:
    start, optimizer = leaves(0), optim.from_torch(make, **options)
    params, state = start, optimizer.init(start)
    parameters = [torch.nn.Parameter(x.clone()) for x in start.values()]
    oracle = make(parameters, **options)
    kind = tree.structure(state)
    for step in range(1, 5):
        grads = leaves(step)
        params, state = optimizer.apply(grads, state, params)
        assert tree.structure(state) == kind
        for parameter, grad in zip(parameters, grads.values(), strict=True):
            parameter.grad = grad.clone()
        oracle.step()
    assert set(state.trees) == names
    for p, parameter, before in zip(params.values(), parameters, start.values(), strict=True):
        assert p.numel() == 0 or (parameter.detach() - before).abs().mean() > 1e-3
        torch.testing.assert_close(p - before, parameter.detach() - before, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_parameters_have_the_bits_of_torch(dtype: torch.dtype) -> None:
    for make, options, _ in CLASSES:
        parameter = torch.nn.Parameter(
            torch.randn(64, generator=torch.Generator().manual_seed(1)).to(dtype)
        )
        params = {"w": parameter.detach().clone()}
        optimizer, oracle = optim.from_torch(make, **options), make([parameter], **options)
        state = optimizer.init(params)
        for step in range(3):
            parameter.grad = torch.randn(64, generator=torch.Generator().manual_seed(2 + step)).to(
                dtype
            )
            params, state = optimizer.apply({"w": parameter.grad}, state, params)
            oracle.step()
        assert torch.equal(params["w"], parameter.detach()), make


def test_the_learning_rate_may_be_a_function_of_the_steps_taken() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    optimizer, oracle = (
        optim.from_torch(torch.optim.NAdam, lr=optim.linear(0.1, 0.01, 3)),
        torch.optim.NAdam([parameter]),
    )
    params = {"w": torch.ones(3, dtype=torch.float64)}
    state = optimizer.init(params)
    for step in range(5):
        parameter.grad = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
        oracle.param_groups[0]["lr"] = optim.linear(0.1, 0.01, 3)(step)
        params, state = optimizer.apply({"w": parameter.grad}, state, params)
        oracle.step()
    torch.testing.assert_close(params["w"] - 1, parameter.detach() - 1, rtol=1e-12, atol=0)


def test_scalar_state_of_a_rule_of_torch_is_kept_between_steps() -> None:
    optimizer, params = optim.from_torch(Counting, lr=0.5), {"w": torch.zeros(2)}
    state = optimizer.init(params)
    for _ in range(3):
        params, state = optimizer.apply({"w": torch.ones(2)}, state, params)
    assert params["w"].tolist() == pytest.approx([-0.5 * (1 + 1 / 2 + 1 / 3)] * 2)
    assert (int(state.scalars["step"]), state.scalars["step"].dtype) == (3, torch.int64)


def test_update_does_not_change_the_arguments() -> None:
    optimizer, params, grads = optim.from_torch(torch.optim.Adam), leaves(0), leaves(1)
    state = optimizer.init(params)
    for _ in range(2):
        kept = tree.map(torch.clone, (grads, state, params))
        optimizer.update(grads, state, params)
        assert same_bits(kept, (grads, state, params))
        params, state = optimizer.apply(grads, state, params)


def test_a_rule_of_torch_runs_at_every_stage() -> None:
    def main(group: zf.Group) -> Any:
        found = []
        for stage in (0, 3):
            z = zf.zero(
                stage, models.mlp_loss, optim.from_torch(torch.optim.RMSprop, lr=0.01), group
            )
            state = z.init(models.mlp())
            for step in models.mlp_batches(3, group.size):
                state, _ = z.step(state, step[group.rank])
            found.append(z.params(state))
        assert state.opt_state.trees["square_avg"].placement is zf.S
        return found

    first, last = zf.simulate(3, main)[0]
    assert same_bits(first, last)
    assert not same_bits(first, models.mlp())


class _ByShape(torch.optim.Optimizer):
    """Steps by the gradient, which a subclass changes by the shape of the tensor."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(group["lr"] * self.changed(p, p.grad))

    def changed(self, p: Any, grad: Any) -> Any:
        return grad


def test_a_class_that_steps_all_shapes_alike_is_taken() -> None:
    rule, params = optim.from_torch(_ByShape, lr=0.5), {"w": torch.zeros(2, 2)}
    new, _ = rule.apply({"w": torch.ones(2, 2)}, rule.init(params), params)
    assert new["w"].tolist() == [[-0.5, -0.5], [-0.5, -0.5]]


class ScaledMatrices(_ByShape):
    """As LARS does."""

    def changed(self, p: Any, grad: Any) -> Any:
        return grad * p.norm() / grad.norm() if p.dim() > 1 else grad


class CentredMatrices(_ByShape):
    """As Ranger does."""

    def changed(self, p: Any, grad: Any) -> Any:
        return grad - grad.mean(dim=-1, keepdim=True) if p.dim() > 1 else grad


class Kernels(_ByShape):
    """Looks at the kernels of convolutions alone."""

    def changed(self, p: Any, grad: Any) -> Any:
        return grad.flatten(2).softmax(-1).view_as(grad) if p.dim() == 4 else grad


class WideMatrices(_ByShape):
    """As factored optimizers do, which leave small matrices as they are."""

    def changed(self, p: Any, grad: Any) -> Any:
        return grad.sign() if p.dim() == 2 and min(p.shape) >= 128 else grad


class LateMatrices(_ByShape):
    """As optimizers that look for a basis first do."""

    def changed(self, p: Any, grad: Any) -> Any:
        self.state[p]["step"] = self.state[p].get("step", 0) + 1
        return grad.sign() if p.dim() == 2 and self.state[p]["step"] > 20 else grad


class Projected(_ByShape):
    """As AdamP does, which looks for gradients orthogonal to the values."""

    def changed(self, p: Any, grad: Any) -> Any:
        is_orthogonal = (p * grad).sum().abs() < 1e-6 * p.norm() * grad.norm()
        return grad.sign() if p.dim() == 2 and is_orthogonal else grad


SHAPED = [ScaledMatrices, CentredMatrices, Kernels, WideMatrices, LateMatrices, Projected]


@pytest.mark.parametrize("make", SHAPED)
def test_a_class_that_steps_matrices_in_another_way_is_refused(make: Any) -> None:
    """A shard is a vector, so such a class stepped matrices as vectors, in silence."""
    name = make.__name__
    refused = rf"{name} changed an element of a vector by .*, and the same one of a tensor of shape"
    with pytest.raises(NotElementwiseError, match=refused):
        optim.from_torch(make, lr=0.1)


def test_a_class_that_raises_on_a_matrix_is_refused() -> None:
    class Vectors(_ByShape):
        def changed(self, p: Any, grad: Any) -> Any:
            assert p.dim() == 1, "a vector"
            return grad

    with pytest.raises(NotElementwiseError, match=r"raised AssertionError on a tensor of shape"):
        optim.from_torch(Vectors, lr=0.1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.LBFGS, r"torch\.optim\.LBFGS searches along a line"),
        (torch.optim.Adafactor, r"torch\.optim\.Adafactor keeps sums over rows and columns"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (PerTensor, "works element by element; .* changed by"),
    ],
)
def test_rules_of_torch_that_mix_elements_are_refused(make: Any, message: str) -> None:
    with pytest.raises(NotElementwiseError, match=message):
        optim.from_torch(make, lr=0.1)


def test_a_number_for_each_tensor_is_refused() -> None:
    with pytest.raises(
        NotElementwiseError, match="keeps 'largest', which is one number for each tensor"
    ):
        optim.from_torch(PerTensor, record=True)


def test_options_are_checked() -> None:
    with pytest.raises(
        OptionError, match=r"torch\.optim\.RMSprop has no option 'alhpa'; did you mean 'alpha'"
    ):
        optim.from_torch(torch.optim.RMSprop, alhpa=0.9)
    with pytest.raises(
        OptionError, match=r"RMSprop, which raised ValueError: Invalid learning rate"
    ):
        optim.from_torch(torch.optim.RMSprop, lr=-1.0)
    with pytest.raises(OptionError, match=r"Optimizer, which raised TypeError: .*'defaults'"):
        optim.from_torch(torch.optim.Optimizer)
    with pytest.raises(OptionError, match=r"must be a class of torch\.optim; got"):
        optim.from_torch(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))  # type: ignore[arg-type]
    with pytest.raises(
        OptionError, match=r"use zf\.optim\.sgd, adam or adamw, or zf\.optim\.from_torch"
    ):
        optim.as_optimizer(torch.optim.Adam([torch.nn.Parameter(torch.ones(1))]))


def test_the_state_of_another_class_is_refused() -> None:
    params = {"w": torch.ones(2)}
    first, second = optim.from_torch(torch.optim.RMSprop), optim.from_torch(torch.optim.NAdam)
    with pytest.raises(SpecMismatch, match=r"of one class; got \['exp_avg', .*RMSprop keeps"):
        first.apply(params, second.init(params), params)
    with pytest.raises(SpecMismatch, match=r"of one class; got \['square_avg', .*NAdam keeps"):
        second.apply(params, first.init(params), params)
