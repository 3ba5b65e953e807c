"""remat(): which tensors are kept, where, how many bytes, and the limits on a block."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zfun as zf
from tests import models
from tests.distributed.programs import branches
from tests.unit.planner import test_memory
from tests.unit.planner.test_memory import Live
from zfun import policies, tree
from zfun.collectives import Collective, Work
from zfun.collectives._group import Wrapper
from zfun.stores import Stored
from zfun.testing import assert_same_bits

SIZES = pytest.mark.parametrize("size", [1, 3])
WIDTH, LAYERS, ROWS = 6, 4, 3
X = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
# Bytes of one activation.
ACTIVATION = ROWS * WIDTH * 8


def params() -> dict[str, Any]:
    return models.mlp(WIDTH, LAYERS)


def block(layer: Any, x: Tensor) -> Tensor:
    hidden = torch.tanh(x @ layer["w"] + layer["b"])
    return x + torch.sin(hidden) * hidden.exp()


def loss_of(run: Callable[..., Any]) -> Callable[..., Any]:
    def loss_fn(params: Any, x: Tensor) -> Tensor:
        for layer in params["h"]:
            x = run(layer, x)
        return (x @ params["out"]).pow(2).mean()

    return loss_fn


def gradients(
    size: int, loss_fn: Any, value: Any = None, *, sharded: bool = True, calls: int = 2
) -> list[Any]:
    """Return loss and gradients of each rank, under stage 3 or data parallelism."""

    def main(group: zf.Group) -> Any:
        whole = params() if value is None else value
        if sharded:
            start, loss = zf.shard(whole, group, bucket_bytes=300), zf.shard_params(loss_fn, group)
        else:
            start, loss = whole, loss_fn
        vg = zf.data_parallel(zf.value_and_grad(loss), group, bucket_bytes=300)
        for _ in range(calls - 1):
            vg(start, X + group.rank)
        out, grads = vg(start, X + group.rank)
        return out, zf.unshard(grads)

    return zf.simulate(size, main)


POLICIES = {
    "nothing": policies.nothing,
    "everything": policies.everything,
    "matmuls": policies.matmuls,
    "small": lambda op, result: result.num_bytes <= 64,
    "all": lambda op, result: True,
    "dtype": lambda op, result: (
        result.dtype is torch.float64
        and result.device.type == "cpu"
        and result.shape[-1:] == (WIDTH,)
    ),
}
BY_POLICY = pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)


@SIZES
@BY_POLICY
@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
def test_remat_changes_no_bit_of_the_gradients(size: int, policy: Any, stored: bool) -> None:
    expected = gradients(size, loss_of(block), sharded=False)
    run = zf.remat(block, policy=policy, store=zf.stores.host() if stored else None)
    for sharded in (False, True):
        assert_same_bits(gradients(size, loss_of(run), sharded=sharded, calls=3), expected)


# Bytes that are saved for backward.


def kept_after_forward(run: Callable[..., Any]) -> int:
    """Return the bytes allocated in forward that stay alive for backward, without the loss."""
    value = tree.map(lambda leaf: leaf.requires_grad_(), params())
    with Live() as live:
        loss = loss_of(run)(value, X)
    # No garbage collection here, because dropped tensors must be freed at once.
    found = live.now() - loss.nbytes
    loss.backward()
    return found


# The head keeps the last activation and one number per row.
HEAD = ACTIVATION + ROWS * 8


def test_each_policy_keeps_exactly_the_expected_bytes() -> None:
    # Each block keeps the input, tanh, sin and exp; the first input is data.
    assert kept_after_forward(block) == (4 * LAYERS - 1) * ACTIVATION + HEAD
    assert kept_after_forward(zf.remat(block)) == (LAYERS - 1) * ACTIVATION + HEAD
    assert (
        kept_after_forward(zf.remat(block, policy=policies.matmuls))
        == (2 * LAYERS - 1) * ACTIVATION + HEAD
    )
    assert kept_after_forward(zf.remat(block, policy=policies.everything)) == kept_after_forward(
        block
    )

    def by_name(layer: Any, x: Tensor) -> Tensor:
        with policies.named("wave"):
            hidden = torch.sin(x @ layer["w"])
        return torch.tanh(hidden)

    # Each block computes two results under the name.
    assert kept_after_forward(zf.remat(by_name)) == (LAYERS - 1) * ACTIVATION + HEAD
    assert (
        kept_after_forward(zf.remat(by_name, policy=policies.names("wave")))
        == (3 * LAYERS - 1) * ACTIVATION + HEAD
    )
    either = policies.either(policies.matmuls, policies.names("none"))
    assert (
        kept_after_forward(zf.remat(by_name, policy=either)) == (2 * LAYERS - 1) * ACTIVATION + HEAD
    )


def test_the_peak_of_a_step_of_stage_3() -> None:
    """The peak grows by one input per block, and by the results inside one block."""
    rows = 64

    def wide(layer: Any, x: Tensor) -> Tensor:
        for _ in range(4):
            x = torch.tanh(x @ layer["w"] + layer["b"])
        return x

    def loss_fn(run: Any) -> Any:
        return lambda p, x: (
            functools.reduce(lambda x, layer: run(layer, x), p["h"], x).pow(2).mean()
        )

    x = torch.ones(rows, test_memory.WIDTH, dtype=torch.float64)

    def peak(run: Any) -> int:
        z = zf.zero(
            3, loss_fn(run), zf.optim.sgd(0.1), test_memory.Echo(), bucket_bytes=test_memory.BUCKET
        )
        state = z.init(test_memory.params())
        state, _ = z.step(state, x)
        return test_memory.peak_of(lambda: z.step(state, x))

    layers, each = test_memory.LAYERS, x.nbytes
    plain, less = peak(wide), peak(zf.remat(wide))
    assert plain >= 4 * layers * each
    # Within a block: four results, one more in progress, and two gradients.
    assert (
        less
        <= (layers + 7) * each
        + (test_memory.PARAMS + test_memory.GRADS) * test_memory.BUCKET
        + test_memory.SLACK
    )
    assert 2 * less < plain


class ByteStore:
    """A store that keeps bytes instead of tensors, and checks that the tensors are freed."""

    def __init__(self) -> None:
        self.given: list[StorageWeakRef] = []
        self.num_bytes = 0
        self.num_gets = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def put(self, tensor: Tensor, name: str) -> Stored:
        assert name == "activations"
        self.given.append(StorageWeakRef(tensor.untyped_storage()))
        self.num_bytes += tensor.nbytes
        return _StoredBytes(self, tensor)

    def crossed(self, kind: str, name: str, num_bytes: int) -> None:
        raise AssertionError("nothing crosses on behalf of this store")


class _StoredBytes(Stored):
    def __init__(self, store: ByteStore, tensor: Tensor) -> None:
        self.store, self.name, self.dtype, self.shape = (
            store,
            "activations",
            tensor.dtype,
            tensor.shape,
        )
        self.vault = store
        self._bytes = bytes(tensor.contiguous().view(torch.uint8).tolist())

    def get(self, device: torch.device) -> Work:
        self.vault.num_gets += 1
        return Work.done(
            torch.frombuffer(bytearray(self._bytes), dtype=self.dtype).view(self.shape).to(device)
        )


@pytest.mark.parametrize("policy", [policies.nothing, policies.matmuls])
def test_saved_activations_live_in_the_store(policy: Any) -> None:
    vault = ByteStore()
    kept = kept_after_forward(zf.remat(block, policy=policy, store=vault))
    count = LAYERS - 1 + (LAYERS if policy is policies.matmuls else 0)
    assert kept == HEAD
    assert vault.num_bytes == count * ACTIVATION
    assert all(storage.expired() for storage in vault.given)
    assert vault.num_gets == count


def test_policy_everything_with_a_store_recomputes_nothing() -> None:
    calls, vault = [], ByteStore()

    def counted(layer: Any, x: Tensor) -> Tensor:
        calls.append(1)
        return block(layer, x)

    # The store holds the input and three results of each block, so no activation is left here.
    assert kept_after_forward(zf.remat(counted, policy=policies.everything, store=vault)) == HEAD
    assert len(calls) == LAYERS
    assert vault.num_bytes >= (4 * LAYERS - 1) * ACTIVATION
    del calls[:]
    kept_after_forward(zf.remat(counted))
    assert len(calls) == 2 * LAYERS


def test_parameters_are_not_moved_to_a_store() -> None:
    """Parameters as arguments: whole, cast, gathered and lazy."""
    for wrap in (lambda run: run, lambda run: lambda layer, x: run(zf.gather(layer), x)):
        for cast in (False, True):
            for sharded in (False, True):
                vault = ByteStore()
                loss = loss_of(wrap(zf.remat(block, store=vault)))
                loss = zf.cast(loss, torch.float32) if cast else loss
                gradients(1, loss, sharded=sharded, calls=1)
                assert vault.num_bytes == (LAYERS - 1) * ACTIVATION // (2 if cast else 1)


# Random numbers.


def drop(layer: Any, x: Tensor) -> Tensor:
    x = F.dropout(torch.tanh(x @ layer["w"]), 0.4)
    return F.dropout(x + layer["b"], 0.3)


@BY_POLICY
@pytest.mark.parametrize("sharded", [False, True])
def test_recomputation_draws_the_same_dropout_masks(policy: Any, sharded: bool) -> None:
    found = []
    for run in (drop, zf.remat(drop, policy=policy)):
        torch.manual_seed(5)
        found.append((gradients(1, loss_of(run), sharded=sharded), torch.get_rng_state()))
    assert_same_bits(found[1], found[0])
    torch.manual_seed(6)
    assert float(gradients(1, loss_of(drop))[0][0]) != float(found[0][0][0][0])


def noisy(layer: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    scale = torch.rand(x.shape, generator=generator, dtype=x.dtype)
    return torch.tanh(x @ layer["w"] * scale) * torch.randn(
        x.shape, generator=generator, dtype=x.dtype
    )


@SIZES
@BY_POLICY
@pytest.mark.parametrize("closed", [False, True], ids=["argument", "closed over"])
def test_recomputation_restores_a_generator_of_the_user(
    size: int, policy: Any, closed: bool
) -> None:
    def main(group: zf.Group, remat: bool) -> Any:
        generator = torch.Generator().manual_seed(group.rank)
        options: Any = {"policy": policy, "generators": [generator] if closed else []}
        fn = (lambda layer, x: noisy(layer, x, generator)) if closed else noisy
        inner: Any = zf.remat(fn, **options) if remat else fn
        run = inner if closed else lambda layer, x: inner(layer, x, generator)
        vg = zf.value_and_grad(zf.shard_params(loss_of(run), group))
        flat = zf.shard(params(), group, bucket_bytes=300)
        found = [vg(flat, X + group.rank) for _ in range(2)]
        return [(loss, zf.unshard(grads)) for loss, grads in found], generator.get_state()

    assert_same_bits(zf.simulate(size, main, True), zf.simulate(size, main, False))


# Arguments and results of a block.


def test_remat_takes_trees_options_and_aux() -> None:
    def odd(state: Any, scale: float, *rest: Any, mode: str, mask: Any = None) -> Any:
        assert (mode, rest[0], mask) == ("up", None, {"x": None})
        x = torch.tanh(state["x"][0] @ state["layer"]["w"]) * scale
        return {"x": [x + state["x"][1]], "aux": ("seen", x.detach().sum(), None)}, rest[1]

    def loss_of_odd(run: Any) -> Any:
        def loss_fn(params: Any, x: Tensor) -> Any:
            seen = []
            for i, layer in enumerate(params["h"]):
                out, number = run(
                    {"x": (x, 0.5 * x), "layer": layer},
                    1.0 + i,
                    None,
                    i,
                    mode="up",
                    mask={"x": None},
                )
                assert number == i
                x = out["x"][0]
                seen.append(out["aux"])
            return (x @ params["out"]).pow(2).mean(), seen

        return loss_fn

    expected = gradients(2, loss_of_odd(odd), sharded=False)
    for store in (None, zf.stores.host()):
        for policy in (policies.nothing, policies.matmuls):
            assert_same_bits(
                gradients(2, loss_of_odd(zf.remat(odd, store=store, policy=policy))), expected
            )


@SIZES
def test_leaves_may_be_arguments_or_closed_over(size: int) -> None:
    expected = gradients(size, loss_of(block), sharded=False)
    forms: dict[str, Any] = {
        "closed over": lambda layer, x: zf.remat(lambda x: block(layer, x))(x),
        "by keyword": lambda layer, x: zf.remat(lambda *, layer, x: block(layer, x))(
            layer=layer, x=x
        ),
        "gathered inside": zf.remat(lambda layer, x: block(zf.gather(layer), x)),
        "gathered outside": lambda layer, x: zf.remat(block)(zf.gather(layer), x),
        "one leaf": lambda layer, x: zf.remat(lambda w, b, x: block({"w": w, "b": b}, x))(
            layer["w"], layer["b"], x
        ),
        "nested": zf.remat(zf.remat(block, store=zf.stores.host()), store=zf.stores.host()),
        "nested policies": zf.remat(
            zf.remat(block, policy=policies.matmuls), policy=POLICIES["small"]
        ),
    }
    for name, run in forms.items():
        for calls in (1, 2):
            assert_same_bits(gradients(size, loss_of(run), calls=calls), expected, name)


@pytest.mark.parametrize("around", [zf.remat, functools.partial(zf.remat, policy=policies.matmuls)])
def test_remat_around_a_whole_loss_is_right_and_warns_that_no_memory_is_saved(around: Any) -> None:
    expected = gradients(2, loss_of(block), sharded=False)
    for sharded in (False, True):
        with pytest.warns(
            UserWarning, match=r"remat\(\) around a whole loss saves no memory.*around the blocks"
        ):
            found = gradients(2, around(loss_of(block)), sharded=sharded)
        assert_same_bits(found, expected)
    with pytest.warns(UserWarning, match="around a whole loss"):
        zf.value_and_grad(zf.cast(around(loss_of(block)), torch.float32))
    zf.value_and_grad(zf.remat(loss_of(block), policy=policies.everything))


def test_remat_outside_of_shard_params_is_refused() -> None:
    def main(group: zf.Group) -> None:
        loss = zf.remat(zf.shard_params(loss_of(block), group), policy=policies.matmuls)
        with pytest.warns(UserWarning, match="whole loss"):
            vg = zf.value_and_grad(loss)
        with pytest.raises(
            zf.errors.PlacementError,
            match=r"remat\(\) must be inside shard_params\(\).*shard_params\(remat\(\.\.\.\)\)",
        ):
            vg(zf.shard(params(), group), X)

    zf.simulate(1, main)


@pytest.mark.parametrize("size", [2, 3])
def test_remat_allows_ranks_that_take_other_branches(size: int) -> None:
    def loss_of_rank(run: Any) -> Any:
        def loss_fn(params: Any, batch: Any) -> Tensor:
            x, rank = batch
            for i, layer in enumerate(params["h"]):
                if i != rank:
                    x = run(layer, x)
                if i == 2 and rank == 0:
                    x = run(params["h"][1], x)
            return (x @ params["out"]).pow(2).mean()

        return loss_fn

    def main(group: zf.Group, run: Any, stage: int) -> Any:
        z = zf.zero(stage, loss_of_rank(run), zf.optim.sgd(0.05), group, bucket_bytes=300)
        state = z.init(params())
        for _ in range(3):
            state, _ = z.step(state, (X + group.rank, group.rank))
        return z.params(state)

    expected = zf.simulate(size, main, block, 0)
    for stage in (0, 3):
        for policy in (policies.nothing, policies.matmuls):
            assert_same_bits(
                zf.simulate(size, main, zf.remat(block, policy=policy), stage), expected
            )


def nested(layer: Any, x: Tensor) -> Tensor:
    """A recomputed block in a recomputed block."""
    inner = zf.remat(lambda x: torch.tanh(x @ layer["v"]))
    return inner(x @ layer["w"]) + layer["v"].sum(0)


OTHER_WAYS = (*branches.WAYS, nested)
# Without gradients on any rank a step raises, so the way without parameters is never the first.
SKIPS = branches.WAYS[-1]


@pytest.mark.parametrize("first", [way for way in OTHER_WAYS if way is not SKIPS])
def test_ranks_take_other_ways_through_a_recomputed_block(first: Callable[..., Tensor]) -> None:
    for other in OTHER_WAYS:
        zf.simulate(2, branches.recomputed, first, other)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "options", [{"policy": policies.matmuls}, {"store": zf.stores.host()}], ids=["policy", "store"]
)
def test_ranks_take_other_ways_and_keep_results(size: int, options: dict[str, Any]) -> None:
    zf.simulate(size, branches.recomputed, options=options)


def test_a_rank_that_skips_the_rest_of_the_schedule_has_diverged() -> None:
    """The rank uses nothing, and autograd keeps no views of buckets on any rank."""
    layers = [{"w": torch.eye(WIDTH).double(), "v": torch.eye(WIDTH).double()} for _ in range(2)]

    def loss_fn(layers: Any, batch: tuple[Tensor, bool]) -> Tensor:
        x, uses = batch
        for layer in layers if uses else ():
            x = torch.tanh(x) * layer["w"].sum() + layer["v"].sum()
        return x.square().mean()

    def main(group: zf.Group, stage: int) -> Any:
        z = zf.zero(stage, loss_fn, zf.optim.sgd(1e-4), group, bucket_bytes=1)
        state = z.init(layers)
        for step in range(4):
            state, _ = z.step(state, (X, group.rank == 0 or step < 2))
        return z.params(state)

    assert_same_bits(zf.simulate(2, main, 3), zf.simulate(2, main, 0))


def test_remat_does_not_change_the_bytes_of_a_step() -> None:
    """Each bucket is gathered twice: in forward and for the recomputation."""

    def main(group: zf.Group, run: Any) -> list[int]:
        recorded = zf.record(group)
        z = zf.zero(3, loss_of(run), zf.optim.sgd(0.05), recorded, bucket_bytes=300)
        state, sent = z.init(params()), []
        for _ in range(3):
            recorded.clear()
            state, _ = z.step(state, X)
            sent.append(recorded.bytes_sent("params") + recorded.bytes_sent("grads"))
        return sent

    assert zf.simulate(2, main, zf.remat(block)) == zf.simulate(2, main, block)


@pytest.mark.parametrize("bucket_bytes", [700, 1100])
def test_torchs_checkpoint_takes_the_same_schedule(bucket_bytes: int) -> None:
    """Blocks share buckets with other blocks and with leaves that are used outside of blocks."""

    def main(group: zf.Group, run: Any) -> list[tuple[str, str, int]]:
        recorded = zf.record(group)
        z = zf.zero(3, loss_of(run), zf.optim.sgd(0.05), recorded, bucket_bytes=bucket_bytes)
        state = z.init(params())
        for _ in range(3):
            recorded.clear()
            state, _ = z.step(state, X)
        return [(entry.kind, entry.name, entry.sent_bytes) for entry in recorded.log]

    of_torch = functools.partial(checkpoint, block, use_reentrant=False)
    assert zf.simulate(2, main, of_torch) == zf.simulate(2, main, zf.remat(block))


@pytest.mark.parametrize("stage", [0, 3])
def test_torchs_checkpoint_takes_parameters_as_arguments(stage: int) -> None:
    """Then it saves them, and at stage 3 they are lazy leaves without numbers."""
    of_leaves = lambda w, b, x: torch.tanh(x @ w + b)

    def run(layer: Any, x: Tensor) -> Tensor:
        return checkpoint(of_leaves, layer["w"], layer["b"], x, use_reentrant=False)

    def main(group: zf.Group, block: Any) -> Any:
        z = zf.zero(stage, loss_of(block), zf.optim.sgd(0.05), group, bucket_bytes=700)
        state = z.init(params())
        for _ in range(3):
            state, _ = z.step(state, X)
        return z.params(state)

    plain = lambda layer, x: of_leaves(layer["w"], layer["b"], x)
    assert_same_bits(zf.simulate(2, main, run), zf.simulate(2, main, plain))


# Modules.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(WIDTH, dtype=torch.float64)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.drop(torch.tanh(self.norm(self.linear(x)))) * scale

    def other(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.forward(x, scale)


WAYS: dict[str, Any] = {
    "plain": lambda inner, x, options: inner(x, scale=2.0),
    "module": lambda inner, x, options: zf.remat(inner, **options)(x, scale=2.0),
    "method": lambda inner, x, options: zf.remat(inner.other, **options)(x, 2.0),
    "argument": lambda inner, x, options: zf.remat(lambda module, x: module(x, 2.0), **options)(
        inner, x
    ),
    "partial of a class": lambda inner, x, options: zf.remat(
        functools.partial(Block.forward, inner, scale=2.0), **options
    )(x),
    "partial": lambda inner, x, options: zf.remat(
        functools.partial(inner.other, scale=2.0), **options
    )(x),
}


class Net(nn.Module):
    def __init__(self, way: str, options: dict[str, Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.way, self.options = way, options

    def forward(self, x: Tensor) -> Tensor:
        for inner in self.blocks:
            x = WAYS[self.way](inner, x, self.options)
        return x.pow(2).mean()


def steps_of_net(way: str, sharded: bool | None, options: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    net = Net(way, options)
    whole = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    # Fill the parameters of the module with wrong numbers, so that any use shows.
    for parameter in net.parameters():
        parameter.data.fill_(float("nan"))

    def main(group: zf.Group) -> Any:
        loss_fn = lambda p, x: functional_call(net, p, (x,))
        vg = zf.value_and_grad(zf.shard_params(loss_fn, group) if sharded else loss_fn)
        value = zf.shard(whole, group, bucket_bytes=300) if sharded else whole
        found = [vg(value, X * (i + 1)) for i in range(2)]
        return [(loss, zf.unshard(grads) if sharded else grads) for loss, grads in found], dict(
            net.named_buffers()
        )

    torch.manual_seed(4)
    return zf.simulate(1, main)


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("way", list(WAYS)[1:])
def test_remat_takes_modules_in_functional_call(way: str, sharded: bool) -> None:
    """Recompute with the parameters of the call; statistics advance once; dropout repeats."""
    expected = steps_of_net("plain", False, {})
    for options in ({}, {"policy": policies.matmuls}, {"store": zf.stores.host()}):
        assert_same_bits(steps_of_net(way, sharded, options), expected)


# Ranks that hold the same activations.


def same_everywhere(
    size: int,
    run_of: Callable[[zf.Group], Any],
    watch: Callable[[zf.Group], zf.Group] = lambda g: g,
) -> list[Any]:
    def main(group: zf.Group) -> Any:
        group = watch(group)
        value = tree.map(lambda leaf: leaf.requires_grad_(), params())
        loss = loss_of(run_of(group))(value, X)
        loss.backward()
        return loss.detach(), [leaf.grad for leaf in tree.leaves(value)]

    return zf.simulate(size, main)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("policy", [policies.nothing, policies.matmuls, policies.everything])
@pytest.mark.parametrize("stored", [False, True], ids=["here", "stored"])
def test_each_rank_saves_a_part_of_the_activations(size: int, policy: Any, stored: bool) -> None:
    stores = [ByteStore() if stored else None for _ in range(size)]
    groups: list[Any] = [None] * size

    def watch(group: zf.Group) -> zf.Group:
        groups[group.rank] = zf.record(group)
        return groups[group.rank]

    run_of = lambda group: zf.remat(
        block, policy=policy, store=stores[group.rank], shard_over=group
    )
    assert_same_bits(
        same_everywhere(size, run_of, watch), same_everywhere(size, lambda group: block)
    )
    if policy is not policies.everything:
        count, part = (
            LAYERS - 1 + (LAYERS if policy is policies.matmuls else 0),
            -(-ROWS * WIDTH // size) * 8,
        )
        for group, store in zip(groups, stores, strict=True):
            assert group.bytes_sent("activations") == count * part * (size - 1)
            assert store is None or store.num_bytes == count * part


def test_a_rank_saves_no_more_than_a_part_of_the_activations() -> None:
    def main(group: zf.Group) -> int:
        run = zf.remat(block, shard_over=group)
        # warm up: the comparison of activations may still hold tensors on another rank
        kept_after_forward(run)
        return kept_after_forward(run)

    assert zf.simulate(3, main) == [(LAYERS - 1) * ACTIVATION // 3 + HEAD] * 3


def test_shard_over_with_a_batch_for_each_rank_is_an_error() -> None:
    def main(group: zf.Group) -> Any:
        vg = zf.data_parallel(zf.value_and_grad(loss_of(zf.remat(block, shard_over=group))), group)
        return vg(params(), X + group.rank)

    with pytest.raises(
        zf.errors.SpecMismatch,
        match=r"shard_over takes ranks that hold the same activations.*on rank 1.*leave "
        r"shard_over out",
    ):
        zf.simulate(2, main)


def test_shard_over_compares_the_first_activation_of_each_shape_and_with_debug_all() -> None:
    class Debug(Wrapper):
        is_checked = True

        def start(self, call: Collective, x: Tensor, out: Tensor | None = None) -> Work:
            return self.wrapped.start(call, x, out)

    def main(group: zf.Group, debug: bool) -> int:
        recorded = zf.record(Debug(group) if debug else group)
        block_of = zf.remat(block, shard_over=recorded)
        for _ in range(2):
            loss_of(block_of)(tree.map(lambda leaf: leaf.requires_grad_(), params()), X)
        return sum(call.name == "digest" for call in recorded.log)

    assert zf.simulate(2, main, False) == [1, 1]
    assert zf.simulate(2, main, True) == [2 * (LAYERS - 1)] * 2


# Derivatives.


def test_remat_allows_double_backward_and_two_backwards() -> None:
    def penalty(run: Any) -> Any:
        value, x = (
            tree.map(lambda leaf: leaf.requires_grad_(), params()),
            X.clone().requires_grad_(),
        )
        loss = loss_of(run)(value, x)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        first = torch.autograd.grad(
            slope.pow(2).sum(), tree.leaves(value), retain_graph=True, allow_unused=True
        )
        return first, torch.autograd.grad(loss, tree.leaves(value))

    expected = penalty(block)
    for policy in POLICIES.values():
        for store in (None, zf.stores.host()):
            assert_same_bits(penalty(zf.remat(block, policy=policy, store=store)), expected)


def test_remat_under_torch_func_is_right_and_warns_that_no_memory_is_saved() -> None:
    plain = loss_of(block)
    for run in (zf.remat(block), zf.remat(block, policy=policies.matmuls, store=zf.stores.host())):
        loss = loss_of(run)
        with pytest.warns(UserWarning, match=r"remat\(\) saves no memory under torch.func"):
            assert_same_bits(grad(loss)(params(), X), grad(plain)(params(), X))
        with pytest.warns(UserWarning, match="under torch.func"):
            per_sample = vmap(grad(loss), in_dims=(None, 0))(params(), X[:, None])
        assert_same_bits(per_sample, vmap(grad(plain), in_dims=(None, 0))(params(), X[:, None]))

        def sharded(group: zf.Group, loss: Any = loss) -> Any:
            inner = zf.shard_params(loss, group)
            return zf.unshard(grad(lambda p: inner(p, X) / group.size)(zf.shard(params(), group)))

        with pytest.warns(UserWarning, match="under torch.func"):
            assert_same_bits(zf.simulate(1, sharded)[0], grad(plain)(params(), X))
    quiet = loss_of(zf.remat(block, policy=policies.everything))
    assert_same_bits(grad(quiet)(params(), X), grad(plain)(params(), X))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_remat_allows_forward_derivatives() -> None:
    with pytest.warns(UserWarning, match="under torch.func"):
        found = jvp(
            lambda p: loss_of(zf.remat(block))(p, X),
            (params(),),
            (models.mlp(WIDTH, LAYERS, seed=2),),
        )
    assert_same_bits(
        found,
        jvp(lambda p: loss_of(block)(p, X), (params(),), (models.mlp(WIDTH, LAYERS, seed=2),)),
    )


def test_without_gradients_remat_saves_nothing() -> None:
    vault = ByteStore()
    with torch.no_grad():
        found = loss_of(zf.remat(block, policy=policies.matmuls, store=vault))(params(), X)
    assert_same_bits(found, loss_of(block)(params(), X))
    assert vault.num_bytes == 0


# Mistakes.


def backward(run: Any) -> None:
    loss_of(run)(tree.map(lambda leaf: leaf.requires_grad_(), params()), X).backward()


def test_writing_to_a_saved_activation_is_an_error() -> None:
    def two(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        product = x @ layer["w"]
        return product, product.exp()

    def outside(layer: Any, x: Tensor) -> Tensor:
        product, wave = zf.remat(two, policy=policies.matmuls)(layer, x)
        return product.mul_(0.1) + wave

    with pytest.raises(
        zf.ZfunError,
        match=r"must not be written to after .* has returned; the result of aten.mm.default "
        r"was; replace the in-place",
    ):
        backward(outside)

    def inside(layer: Any, x: Tensor) -> Tensor:
        product = x @ layer["w"]
        return torch.tanh(product.view(-1).mul_(0.1).view(product.shape)) * product

    # A result that the function overwrites is not kept.
    expected = gradients(1, loss_of(inside))
    for store in (None, zf.stores.host()):
        assert_same_bits(
            gradients(1, loss_of(zf.remat(inside, policy=policies.matmuls, store=store))), expected
        )
    assert kept_after_forward(zf.remat(inside, policy=policies.matmuls)) == kept_after_forward(
        zf.remat(inside)
    )


def test_a_block_that_differs_when_recomputed_is_an_error() -> None:
    turns: list[int] = []

    def fickle(layer: Any, x: Tensor) -> Tensor:
        turns.append(1)
        return (
            torch.tanh(x @ layer["w"])
            if len(turns) <= LAYERS
            else torch.tanh(torch.sin(x) @ layer["w"])
        )

    with pytest.raises(
        zf.ZfunError,
        match=r"must do the same when it runs again; got aten.sin.default where aten.mm.default "
        r"was",
    ):
        backward(zf.remat(fickle, policy=policies.matmuls))


def test_wrong_options_of_remat_are_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"fn of remat\(\) must be a function; got 3"):
        zf.remat(3)  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(
        zf.errors.OptionError,
        match=r"policy of remat\(\) must be a function of \(op, result\); got 'dots'; "
        r"write policy=zf.policies",
    ):
        zf.remat(block, policy="dots")  # pyrefly: ignore[bad-argument-type]
    with pytest.raises(zf.errors.OptionError, match="did you mean 'shard_over'"):
        zf.remat(block, shard_ove=None)  # pyrefly: ignore[unexpected-keyword]


def test_policies_see_operations_and_results() -> None:
    seen: list[Any] = []

    def look(op: Any, result: policies.Result) -> bool:
        seen.append((str(op), result))
        return False

    def named(layer: Any, x: Tensor) -> Tensor:
        with policies.named("outer"):
            x = x @ layer["w"]
            with policies.named("inner"):
                x = F.relu_(x + layer["b"])
        return x.view(-1)[:WIDTH].expand(ROWS, WIDTH)

    backward(zf.remat(named, policy=look))
    shape = torch.Size([ROWS, WIDTH])
    result = policies.Result(shape, torch.float64, torch.device("cpu"), ACTIVATION, "outer")
    # The policy sees neither views nor in-place operations.
    assert (
        seen
        == [("aten.mm.default", result), ("aten.add.Tensor", result._replace(name="inner"))]
        * LAYERS
    )
