"""Steps run as they are under ``torch.compile``; other tracers, transforms, graphs are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zfun as zf
from zfun import optim
from zfun.testing import assert_same_bits

# Warnings of the tracers about themselves, and about the tensors that they look at.
pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore:.torch.jit."),
]

BATCH = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


def params() -> dict[str, Tensor]:
    return {"w": torch.eye(3), "v": torch.ones(3)}


def loss_fn(p: Any, x: Tensor) -> Tensor:
    return (torch.tanh(x @ p["w"]) @ p["v"]).square().mean()


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def zero_of(stage: int, loss: Any = loss_fn, **options: Any) -> zf.recipes.Zero:
    return zf.zero(stage, loss, optim.adamw(0.1), zf.process_group(), **options)


def trained(zero: zf.recipes.Zero, step: Any, num_steps: int = 3) -> Any:
    state = zero.init(params())
    losses = []
    for _ in range(num_steps):
        state, out = step(state, BATCH)
        losses.append(out if isinstance(out, Tensor) else out.loss)
    return losses, zero.params(state)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_compiled_step_has_the_same_bits(stage: int) -> None:
    zero = zero_of(stage)

    def with_loss(state: Any, batch: Tensor) -> Any:
        state, info = zero.step(state, batch)
        return state, 2 * info.loss

    expected = trained(zero, with_loss)
    compiled = torch.compile(zero.step, backend="aot_eager")

    def around(state: Any, batch: Tensor) -> Any:
        state, info = compiled(state, batch)
        return state, 2 * info.loss

    assert_same_bits(trained(zero, around), expected)
    # A function of the user that has a step inside, and code of its own to compile.
    assert_same_bits(trained(zero, torch.compile(with_loss, backend="aot_eager")), expected)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_loss_inside_a_compiled_step_is_compiled(stage: int) -> None:
    """The step switches the compiler off for itself alone."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    inner = torch.compile(loss_fn, backend=backend)
    zero = zero_of(stage, lambda p, x: inner(zf.gather(p), x))
    step = torch.compile(zero.step, backend="aot_eager")
    found = trained(zero, step)[1]
    assert len(graphs) > 0
    plain = zero_of(stage)
    expected = trained(plain, plain.step)[1]
    torch.testing.assert_close(found, expected)


def test_a_whole_loss_compiled_at_stage_3_runs_as_it_is() -> None:
    zero, plain = zero_of(3, torch.compile(loss_fn, backend="aot_eager")), zero_of(3)
    assert_same_bits(trained(zero, zero.step), trained(plain, plain.step))


class Attention(torch.nn.Module):
    """A block with heads of 4, whose attention is torch's flash attention (for CPUs, here)."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(8, 24), torch.nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).view(*x.shape[:2], 3, 2, 4).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).reshape(x.shape))


def attention_loss(form: str) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(Attention(), Attention())
    compiled: Any = functools.partial(torch.compile, backend="aot_eager", fullgraph=True)
    if form == "compiled blocks":
        net = torch.nn.Sequential(*map(compiled, net))
    apply = zf.functional(net)
    call = compiled(apply) if form == "a compiled loss" else apply

    def loss(params: Any, x: Tensor) -> Tensor:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION]):  # no other kernel may stand in
            return call(zf.gather(params) if call is not apply else params, x).square().mean()

    return loss, apply.params


@pytest.mark.parametrize(
    "form",
    ["plain", "a compiled loss", pytest.param("compiled blocks", marks=pytest.mark.slow)],
)
def test_compiled_attention_has_the_same_bits_at_every_stage(form: str) -> None:
    batch = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))

    def main(group: zf.Group, stage: int, loss: Any, values: Any) -> Any:
        zero = zf.zero(stage, loss, optim.adamw(0.1), group, bucket_bytes=300)
        state, losses = zero.init(zf.tree.map(torch.clone, values)), []
        for _ in range(2):  # the second follows the schedule
            state, info = zero.step(state, batch)
            losses.append(info.loss)
        return losses, [*zero.params(state).values()]

    # Threads must not compile at one time, so the compiled forms have one rank.
    size = 2 if form == "plain" else 1
    compiled = attention_loss(form)
    expected = zf.simulate(size, main, 0, *compiled)
    # torch promises no bits between its compiler's kernels and others, and Adam shows the noise in
    # the gradient of the keys' bias, which is zero.
    plain = zf.simulate(size, main, 0, *attention_loss("plain"))
    assert_same_bits([x[0] for x in expected], [x[0] for x in plain], "losses beside plain torch: ")
    for stage in (1, 2, 3):
        assert_same_bits(zf.simulate(size, main, stage, *compiled), expected, f"stage {stage}: ")


def test_the_whole_graph_of_a_step_is_refused_with_the_reason() -> None:
    zero = zero_of(1)
    state = zero.init(params())

    @torch.compile(backend="aot_eager", fullgraph=True)
    def loss_of(x: Tensor) -> Tensor:
        return zero.step(state, x)[1].loss

    with pytest.raises(torch._dynamo.exc.Unsupported, match="of zfun runs uncompiled; compile the"):
        loss_of(BATCH)


def test_other_public_functions_under_the_compiler(tmp_path: Path) -> None:
    group = zf.process_group()
    zero = zero_of(1, donate=False)
    state = zero.init(params())
    flat = zf.shard(params(), group)
    sharded = zf.shard_params(loss_fn, group)
    vg = zf.value_and_grad(loss_fn)
    rule = optim.sgd(0.1)
    opt_state = rule.init(params())
    calls: dict[str, Callable[[], Any]] = {
        "init": lambda: zero.params(zero.init(params())),
        "params": lambda: zero.params(state),
        "value_and_grad": lambda: zf.value_and_grad(loss_fn)(params(), BATCH),
        "cast": lambda: zf.cast(loss_fn, torch.bfloat16)(params(), BATCH),
        "data_parallel": lambda: zf.data_parallel(vg, group)(params(), BATCH)[0],
        "accumulate": lambda: zf.accumulate(vg, 2)(params(), BATCH),
        "vjp": lambda: zf.vjp(vg, params(), BATCH)[1](torch.ones(())),
        "shard": lambda: zf.unshard(zf.shard(params(), group)),
        "redistribute": lambda: zf.unshard(zf.redistribute(flat, zf.R, group)),
        "a sharded loss": lambda: sharded(flat, BATCH),
        "apply": lambda: zf.apply(rule, params(), opt_state, params())[0],
        "all_reduce": lambda: zf.collectives.all_reduce(BATCH, group),
        "remat": lambda: zf.remat(loss_fn)(params(), BATCH),
        "save and load": lambda: zero.params(
            zf.load(zf.save(tmp_path, state).path, zero.init(params())).state
        ),
    }
    for name, call in calls.items():
        expected = call()
        torch.compiler.reset()
        found = torch.compile(call, backend="aot_eager")()
        assert_same_bits(found, expected, f"{name}:")


AROUND: dict[str, tuple[Callable[[Callable[[Tensor], Tensor]], Any], str]] = {
    "vmap": (lambda fn: torch.func.vmap(fn)(BATCH[None]), "torch.func.vmap"),
    "grad": (lambda fn: torch.func.grad(fn)(BATCH), "torch.func.grad"),
    "jvp": (lambda fn: torch.func.jvp(fn, (BATCH,), (BATCH,)), "torch.func.jvp"),
    "functionalize": (lambda fn: torch.func.functionalize(fn)(BATCH), "torch.func.functionalize"),
    "jit": (lambda fn: torch.jit.trace(fn, (BATCH,)), "torch.jit.trace"),
    "make_fx": (lambda fn: make_fx(fn)(BATCH), "torch.export, make_fx or another tracer"),
    "export": (
        lambda fn: torch.export.export(_Module(fn), (BATCH,)),
        "torch.export, make_fx or another tracer",
    ),
}


class _Module(torch.nn.Module):
    def __init__(self, fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", AROUND)
def test_a_step_inside_of_a_transform_or_a_trace_is_refused(name: str, stage: int) -> None:
    around, words = AROUND[name]
    zero = zero_of(stage)
    state = zero.init(params())
    with pytest.raises(zf.errors.ZfunError, match=f"got a call inside of {words}; .*loss alone"):
        around(lambda x: zero.step(state, x)[1].loss)
    # The state is as it was.
    zero.step(state, BATCH)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", ["jit", "make_fx", "export"])
def test_the_parameters_inside_of_a_trace_are_refused(name: str, stage: int) -> None:
    """The trace would have their values as constants."""
    around, words = AROUND[name]
    zero = zero_of(stage)
    state = zero.init(params())
    with pytest.raises(zf.errors.ZfunError, match=f"params.*got a call inside of {words}; .*befor"):
        around(lambda x: loss_fn(zero.params(state), x))
    assert_same_bits(zero.params(state), params())


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> None:
    """Say that the thread captures a CUDA graph; no GPU takes part."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["init", "step", "vjp", "update", "params"])
def test_the_capture_of_a_step_is_refused(
    stage: int, name: str, request: pytest.FixtureRequest
) -> None:
    zero = zero_of(stage)
    state = zero.init(params())
    loss, pullback, buffers = zero.vjp(loss_fn, state, BATCH)
    calls = {
        "init": lambda: zero.init(params()),
        "step": lambda: zero.step(state, BATCH),
        "vjp": lambda: zero.vjp(loss_fn, state, BATCH),
        "update": lambda: zero.update(state, pullback(torch.ones(())), loss, buffers),
        "params": lambda: zero.params(state),
    }
    request.getfixturevalue("capture")
    with pytest.raises(zf.ZfunError, match="got a call inside of the capture of a CUDA graph"):
        calls[name]()


def test_the_capture_of_a_sharded_loss_is_refused(request: pytest.FixtureRequest) -> None:
    group = zf.process_group()
    vg, flat = zf.value_and_grad(zf.shard_params(loss_fn, group)), zf.shard(params(), group)
    vg(flat, BATCH)
    request.getfixturevalue("capture")
    # The gradients of whole parameters read nothing, and run.
    zf.data_parallel(zf.value_and_grad(loss_fn), group)(params(), BATCH)
    with pytest.raises(zf.ZfunError, match=r"the loss of shard_params\(\) chooses gathers"):
        vg(flat, BATCH)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("stage", [0, 1, 2])
def test_donated_parameters_keep_their_memory(stage: int, size: int) -> None:
    """A graph replays addresses."""

    def main(group: zf.Group) -> list[int]:
        zero = zf.zero(stage, loss_fn, optim.adamw(0.1), group)
        state = zero.init(params())
        found = []
        for _ in range(3):
            state, _ = zero.step(state, BATCH)
            found += [buffer.data_ptr() for buffer in state.params.buffers]
        return found

    for found in zf.simulate(size, main):
        assert len(set(found)) == len(found) // 3


def _memory(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


class Sent(TorchDispatchMode):
    """Operations, the buffers of a state that they take, and the numbers of the host."""

    def __init__(self, state: zf.recipes.ZeroState) -> None:
        super().__init__()
        buffers = [x for x in zf.tree.leaves((state.params, state.opt_state)) if x.ndim]
        self.places = {_memory(x): place for place, x in enumerate(buffers)}
        self.rows: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        values = tree_leaves((args, kwargs))
        buffers = [self.places.get(_memory(x)) for x in values if isinstance(x, Tensor)]
        # Integers are shapes, of which the exact sums of the CPU have any.
        self.rows.append((func, buffers, [x for x in values if isinstance(x, float)]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(
    ("optimizer", "is_repeated"),
    [
        (optim.sgd(0.1, momentum=0.9), True),
        (optim.lion(0.1), True),
        (optim.adagrad(0.1), True),
        (optim.adamw(0.1), False),
        (optim.sgd(lambda count: 0.1 / (1 + count)), False),
    ],
    ids=["sgd", "lion", "adagrad", "adamw", "schedule"],
)
def test_a_replay_would_repeat_the_numbers_of_a_step(
    optimizer: zf.Optimizer, is_repeated: bool, stage: int
) -> None:
    """Bias corrections and schedules alone are numbers of the host that change between steps."""
    zero = zf.zero(stage, loss_fn, optimizer, zf.process_group(), max_skipped=None)
    state, found = zero.init(params()), []
    for _ in range(3):
        with Sent(state) as sent:
            state, _ = zero.step(state, BATCH)
        found.append(sent)
    first, second = found[1:]
    assert first.places == second.places
    assert [row[:2] for row in first.rows] == [row[:2] for row in second.rows]
    assert (first.rows == second.rows) is is_repeated
