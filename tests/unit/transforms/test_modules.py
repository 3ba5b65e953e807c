"""``zf.functional``: modules as functions of their parameters, right through backward."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfun as zf
from zfun.testing import assert_same_bits

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Checkpointed(nn.Module):
    """Blocks that torch recomputes in backward."""

    def __init__(self, reentrant: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class TiedModules(nn.Module):
    """One block under two names, and in a list that registers nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.again = self.first
        self.order = [self.first, self.second, self.again]

    def forward(self, x: Tensor) -> Tensor:
        for block in self.order:
            x = block(x)
        return x


class TiedParameters(nn.Module):
    """An embedding and a head with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.block = Block()
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block(self.embed(x)))


class Methods(nn.Module):
    """References to the module in attributes of many forms."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.method = self.with_b
        self.steps = {"c": [functools.partial(self.apply_linear, self.c)]}
        self.closure = lambda x: torch.sin(self.a(x))
        self.default = lambda x, layer=self.b: torch.cos(layer(x))
        self.remat = zf.remat(self.with_b)
        self.a.register_forward_hook(lambda module, args, out: out + self.c.bias)
        self.alias = [self.a.weight]

        def depth(x: Tensor, n: int) -> Tensor:
            return x if n == 0 else depth(self.c(x), n - 1)

        self.recursive = depth

    @staticmethod
    def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def with_b(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.remat(self.default(self.closure(self.method(self.a(x)))))
        return self.recursive(self.steps["c"][0](x) @ self.alias[0], 2)


class Pair(NamedTuple):
    first: Any
    second: Any


class Containers(nn.Module):
    """References to layers and parameters in containers of many classes."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))
        self.named = Pair(self.a, "a")
        self.default = defaultdict(list, b=[self.b])
        self.ordered = OrderedDict(c=self.c.weight)
        self.recent = deque([self.d], maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.named.first(x) + len(self.default["missing"])
        x = self.default["b"][0](x) @ self.ordered["c"] + self.c.bias
        return self.recent[0](x)


class Recurrent(nn.Module):
    """An LSTM, which keeps a second list of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def parametrized() -> nn.Module:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    nn.utils.parametrizations.weight_norm(net[0])
    return net


MODULES: dict[str, Callable[[], nn.Module]] = {
    "checkpoints": Checkpointed,
    "tied modules": TiedModules,
    "tied parameters": TiedParameters,
    "references in attributes": Methods,
    "containers": Containers,
    "an LSTM": Recurrent,
    "a parametrization": parametrized,
}


def made(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make()


def loss_of(call: Callable[..., Tensor]) -> Callable[[Any, Tensor], Tensor]:
    return lambda params, x: call(params, x).square().mean()


def plain(module: nn.Module) -> tuple[Tensor, dict[str, Tensor]]:
    """Return loss and gradients of the module itself."""
    loss = module(X).square().mean()
    names, leaves = zip(*module.named_parameters(), strict=True)
    if getattr(module, "reentrant", False):
        loss.backward()
        return loss.detach(), {n: p.grad for n, p in zip(names, leaves, strict=True)}
    return loss.detach(), dict(zip(names, torch.autograd.grad(loss, leaves), strict=True))


def spoilt(module: nn.Module) -> None:
    """Overwrite the module's own parameters, so that any use shows."""
    for leaf in module.parameters():
        leaf.data.fill_(float("nan"))


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("stage", [0, 3])
def test_gradients_are_those_of_the_module(name: str, stage: int) -> None:
    module = made(MODULES[name])
    expected, grads = plain(module)
    apply = zf.functional(module)
    params = {key: leaf.clone() for key, leaf in apply.params.items()}
    spoilt(module)
    loss_fn = loss_of(apply)

    def main(group: zf.Group) -> None:
        sharded = stage == 3
        vg = zf.value_and_grad(zf.shard_params(loss_fn, group) if sharded else loss_fn)
        value = zf.shard(params, group, bucket_bytes=300) if sharded else params
        for _ in range(3):  # later calls follow the schedule, or get views
            loss, found = vg(value, X)
            assert_same_bits(loss, expected)
            assert_same_bits(zf.unshard(found) if sharded else found, grads)

    zf.simulate(1, main)


@pytest.mark.parametrize("name", MODULES)
def test_ranks_share_a_module(name: str) -> None:
    """Simulated ranks are threads, and each trains with values of its own."""
    module = made(MODULES[name])
    apply = zf.functional(module)
    params = {key: leaf.clone() for key, leaf in apply.params.items()}
    spoilt(module)

    def main(group: zf.Group, stage: int) -> Any:
        zero = zf.zero(stage, loss_of(apply), zf.optim.adamw(1e-2), group, bucket_bytes=300)
        state = zero.init(params)
        for step in range(2):
            state, info = zero.step(state, X + group.rank + step)
        return info.loss, zero.params(state)

    expected, *others = zf.simulate(2, main, 0)
    assert bool(expected[0].isfinite())
    for found in [*others, *zf.simulate(2, main, 3)]:
        assert_same_bits(found, expected)


def test_reentrant_checkpoints_under_plain_autograd() -> None:
    module = made(lambda: Checkpointed(reentrant=True))
    apply = zf.functional(module)
    params = {key: leaf.clone().requires_grad_() for key, leaf in apply.params.items()}
    x = X.clone().requires_grad_()
    apply(params, x).square().mean().backward()
    reference = copy.deepcopy(module)
    reference(X.clone().requires_grad_()).square().mean().backward()
    assert_same_bits(
        {key: leaf.grad for key, leaf in params.items()},
        {key: leaf.grad for key, leaf in reference.named_parameters()},
    )
    assert all(leaf.grad is None for leaf in module.parameters())


def test_reentrant_checkpoints_under_value_and_grad_are_refused_by_torch() -> None:
    apply = zf.functional(made(lambda: nn.Sequential(Block(), Checkpointed(reentrant=True))))
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        zf.value_and_grad(loss_of(apply))(apply.params, X)


def test_reentrant_checkpoints_that_backward_skips_are_refused() -> None:
    """The input of the first checkpoint requires a gradient, but depends on no parameter."""
    apply = zf.functional(made(lambda: Checkpointed(reentrant=True)))
    loss_fn = lambda params, x: apply(params, x.clone().requires_grad_()).square().mean()

    def main(group: zf.Group, stage: int) -> None:
        zero = zf.zero(stage, loss_fn, zf.optim.sgd(0.1), group)
        with pytest.raises(zf.ZfunError, match="pass use_reentrant=False") as caught:
            zero.step(zero.init(apply.params), X)
        assert caught.value.leaf in apply.params

    for stage in (0, 2, 3):
        zf.simulate(2, main, stage)


def test_dropout_is_the_same_when_recomputed() -> None:
    apply = zf.functional(made(lambda: Checkpointed(dropout=0.5)))
    without = zf.functional(made(lambda: nn.Sequential(*[Block(0.5) for _ in range(3)])))
    params = apply.params

    def run(loss_fn: Any, values: Any) -> Any:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            loss, grads = zf.value_and_grad(loss_fn)(values, X)
        return loss, [*grads.values()]

    assert_same_bits(
        run(loss_of(apply), params),
        run(loss_of(without), {key.removeprefix("blocks."): p for key, p in params.items()}),
    )


def test_two_calls_keep_their_own_parameters() -> None:
    """Backward of the first call comes after the second call, with other parameters."""
    module = made(Checkpointed)
    apply = zf.functional(module)
    one = {key: leaf.clone().requires_grad_() for key, leaf in apply.params.items()}
    two = {key: (leaf * 0.5).detach().requires_grad_() for key, leaf in one.items()}
    losses = [apply(params, X).square().mean() for params in (one, two)]
    for params, loss in zip((one, two), losses, strict=True):
        reference = copy.deepcopy(module)
        reference.load_state_dict(params)
        found = torch.autograd.grad(loss, [*params.values()])
        assert_same_bits(dict(zip(params, found, strict=True)), plain(reference)[1])


def test_a_tied_parameter_under_one_name_or_both() -> None:
    module = made(TiedParameters)
    apply = zf.functional(module)
    params = {key: leaf.clone() for key, leaf in apply.params.items()}
    assert "head.weight" not in params
    expected = module(X)
    spoilt(module)
    assert_same_bits(apply(params, X), expected)
    assert_same_bits(apply({**params, "head.weight": params["embed.weight"]}, X), expected)
    with pytest.raises(zf.errors.SpecMismatch, match="tied parameters are one tensor") as caught:
        apply({**params, "head.weight": params["embed.weight"].clone()}, X)
    assert caught.value.leaf == "head.weight"


class Counter(nn.Module):
    """A module that assigns to a buffer, and counts calls in an attribute."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("steps", torch.zeros(()))
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.steps = self.steps + 1
        self.num_calls += 1
        return self.norm(x)


def test_given_buffers_are_written_and_the_module_stays() -> None:
    module = Counter()
    apply = zf.functional(module)
    buffers = {key: leaf.clone() for key, leaf in apply.buffers.items()}
    assert set(buffers) == {
        "steps",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    }
    values = {**apply.params, **buffers}
    out = apply(values, X)
    reference = copy.deepcopy(module)
    assert_same_bits(out, reference(X))
    assert_same_bits({key: values[key] for key in buffers}, dict(reference.named_buffers()))
    assert_same_bits(dict(module.named_buffers()), dict(Counter().named_buffers()))
    assert module.num_calls == 0


def test_names_that_are_left_out_keep_the_values_of_the_module() -> None:
    module = made(TiedModules)
    params = {key: p.detach() for key, p in module.named_parameters() if key.startswith("first")}
    _, grads = zf.value_and_grad(loss_of(zf.functional(module)))(params, X)
    assert_same_bits(grads, {key: plain(module)[1][key] for key in params})


def test_hooks_and_attributes_of_a_call_stay_in_the_call() -> None:
    class Hooking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.inner.register_forward_hook(lambda module, args, out: out * 2)
            return self.inner(x)

    module = Hooking()
    apply = zf.functional(module)
    expected = 2 * F.linear(X, module.inner.weight, module.inner.bias)
    for _ in range(3):
        assert_same_bits(apply(apply.params, X), expected)
    assert not module.inner._forward_hooks


def test_bind_gives_the_methods_of_the_module() -> None:
    module = made(Methods)
    apply = zf.functional(module)
    params = {key: 2 * leaf for key, leaf in apply.params.items()}
    bound = apply.bind(params).eval()
    assert isinstance(bound, Methods)
    assert not bound.training
    assert module.training
    expected = F.linear(torch.tanh(X), params["b.weight"], params["b.bias"])
    assert_same_bits(bound.with_b(X), expected)


def test_torch_func_transforms() -> None:
    module = made(TiedModules)
    apply = zf.functional(module)
    grads = torch.func.grad(loss_of(apply))(apply.params, X)
    torch.testing.assert_close(grads, plain(module)[1])
    rows = torch.func.vmap(apply, in_dims=(None, 0))(apply.params, X)
    torch.testing.assert_close(rows, module(X))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("form", ["submodule", "in place", "whole", "loss"])
def test_compiled_modules(form: str) -> None:
    """Use the ``eager`` backend, whose bits are those of plain code."""
    torch.compiler.reset()
    module: Any = made(lambda: nn.Sequential(*(Block() for _ in range(3))))
    expected, grads = plain(module)
    options = {"backend": "eager", "fullgraph": True}
    if form == "submodule":
        module[1] = torch.compile(module[1], **options)
    elif form == "in place":
        module[1].compile(**options)
    elif form == "whole":
        module = torch.compile(module, **options)
    apply = zf.functional(module)
    call = torch.compile(apply, **options) if form == "loss" else apply
    params = {key: leaf.clone() for key, leaf in apply.params.items()}
    spoilt(module)

    def main(group: zf.Group, sharded: bool) -> None:
        loss_fn = loss_of(
            (lambda p, x: call(zf.gather(p), x)) if sharded and form == "loss" else call
        )
        vg = zf.value_and_grad(zf.shard_params(loss_fn, group) if sharded else loss_fn)
        value = zf.shard(params, group, bucket_bytes=300) if sharded else params
        for _ in range(3):
            loss, found = vg(value, X)
            assert_same_bits(loss, expected)
            found = zf.unshard(found) if sharded else found
            assert_same_bits([*found.values()], [*grads.values()])

    zf.simulate(1, main, False)
    zf.simulate(1, main, True)


def test_errors() -> None:
    module = made(TiedParameters)
    apply = zf.functional(module)
    with pytest.raises(zf.errors.SpecMismatch, match=r"did you mean 'embed\.weight'") as caught:
        apply({**apply.params, "embed.wieght": torch.ones(8, 8)}, X)
    assert caught.value.leaf == "embed.wieght"
    with pytest.raises(zf.errors.OptionError, match=r"takes an nn.Module; got function"):
        zf.functional(lambda x: x)  # pyrefly: ignore[bad-argument-type]

    def main(group: zf.Group) -> None:
        flat = zf.shard(apply.params, group)
        with pytest.raises(zf.errors.PlacementError, match=r"put zf.shard_params\(\) around"):
            apply(flat, X)  # pyrefly: ignore[bad-argument-type]

    zf.simulate(1, main)


@pytest.mark.filterwarnings("ignore")
def test_a_scripted_module_is_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"got a torch\.jit\.ScriptModule"):
        zf.functional(torch.jit.script(nn.Linear(2, 2)))
