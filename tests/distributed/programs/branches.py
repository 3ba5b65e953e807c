"""Programs whose ranks take different branches; run on simulated ranks and on processes.

The batch of a rank determines the branch, directly or through the routing of tokens. The oracle,
plain torch in one process, can therefore take the branches of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import zfun as zf
from tests import models, reference
from zfun import optim, tree
from zfun.testing import assert_same_bits, same_bits

ROWS = 4
LAYERS = 4


def open_layers(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """An MLP that uses only the layers whose column in the batch is not zero."""
    x, ways = batch
    for index, layer in enumerate(params["h"]):
        if ways[0, index]:
            x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).pow(2).mean()


def batches_of(
    num_steps: int, size: int, way: Callable[[int, int, int], Sequence[int]], num_micro: int = 1
) -> list[list[Any]]:
    """Return ``batches[step][rank]``; ``way(step, rank, micro)`` lists the open layers."""
    found = []
    for step, xs in enumerate(models.mlp_batches(num_steps, size, rows=ROWS)):
        ways = [
            torch.tensor([way(step, rank, row * num_micro // ROWS) for row in range(ROWS)])
            for rank in range(size)
        ]
        found.append(list(zip(xs, ways, strict=True)))
    return found


def oracle(loss_fn: Any, params: Any, batches: Any, num_micro: int) -> tuple[Any, list[float]]:
    """Train with plain torch in one process; return the final parameters and the losses."""
    losses, momentum = [], {}
    flat = models.flat_dict(params)
    for step in batches:
        micro = [
            part
            for batch in step
            for part in zip(*(x.chunk(num_micro) for x in batch), strict=True)
        ]
        loss, grads = reference.gradients(
            lambda leaves, batch: loss_fn(models.unflat_dict(leaves, params), batch), flat, micro
        )
        flat = reference.sgd(flat, grads, momentum, 0.2, 0.9)
        losses.append(loss)
    return models.unflat_dict(flat, params), losses


def every_stage(
    group: zf.Group, loss_fn: Any, params: Any, batches: Any, num_micro: int = 1
) -> Any:
    """Train at every stage, and compare with the oracle and with stages of equal bits."""
    expected, expected_losses = oracle(loss_fn, params, batches, num_micro)
    assert not any(
        same_bits(a, b)
        for a, b in zip(tree.leaves(expected), tree.leaves(params), strict=True)
        if a.numel() > 1
    )
    found: list[Any] = []
    for stage in (0, 1, 2, 3):
        z = zf.zero(
            stage,
            loss_fn,
            optim.sgd(0.2, momentum=0.9),
            group,
            bucket_bytes=300,
            num_micro_batches=num_micro,
        )
        state, losses = z.init(params), []
        for step in batches:
            state, info = z.step(state, step[group.rank])
            losses.append(float(info.loss))
        found.append((z.params(state), losses))
        near(found[-1][0], expected)
        torch.testing.assert_close(
            torch.tensor(losses), torch.tensor(expected_losses), rtol=1e-12, atol=0.0
        )
        # With micro-batches stages 2 and 3 reduce each micro-batch, and round differently.
        assert_same_bits(
            found[-1],
            found[0 if num_micro == 1 or stage < 2 else 2],
            f"stage {stage} and an earlier one",
        )
    return found


def near(found: Any, expected: Any) -> None:
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def unused_leaves(group: zf.Group) -> Any:
    """Open a layer on the last rank only, and another on no rank in some steps."""
    batches = batches_of(
        3, group.size, lambda step, rank, _: (1, step != 1, rank == group.size - 1, 1)
    )
    return every_stage(group, open_layers, models.mlp(), batches)


def early_exit(group: zf.Group) -> Any:
    """Ranks leave the model after different layers; each rank in turn runs all layers."""
    batches = batches_of(
        4,
        group.size,
        lambda step, rank, _: [index <= (rank + step) % LAYERS for index in range(LAYERS)],
    )
    return every_stage(group, open_layers, models.mlp(), batches)


def skipped_layers(group: zf.Group) -> Any:
    """Rank 1 skips a layer in some steps, rank 0 another; micro-batches differ too."""
    batches = batches_of(
        3,
        group.size,
        lambda step, rank, micro: (1, rank != 1 or step == 1, rank > 0 or micro == 1, step < 2),
        num_micro=2,
    )
    return every_stage(group, open_layers, models.mlp(), batches, num_micro=2)


def _chained(layer: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ layer["w"]) @ layer["v"]


def _joined(layer: Any, x: Tensor) -> Tensor:
    return x @ layer["w"] + x @ layer["v"]


def _last_saves_nothing(layer: Any, x: Tensor) -> Tensor:
    """Recomputation stops before the last weight."""
    return x @ layer["w"] + layer["v"].sum(0)


def _sums(layer: Any, x: Tensor) -> Tensor:
    return x * layer["w"].sum() + layer["v"].sum()


def _reads(layer: Any, x: Tensor) -> Tensor:
    """The last weight gets no gradient."""
    y = x @ layer["w"]
    with torch.no_grad():
        z = x @ layer["v"]
    return y + z


def _skips(layer: Any, x: Tensor) -> Tensor:
    del layer
    return x


# All but the last use the same buckets in the same order.
WAYS = (_chained, _joined, _last_saves_nothing, _sums, _reads, _skips)


def recomputed(
    group: zf.Group,
    first: Callable[..., Tensor] = _last_saves_nothing,
    other: Callable[..., Tensor] = _chained,
    options: dict[str, Any] | None = None,
) -> Any:
    """Rank 0 takes one way through recomputed blocks, the other ranks another in the third step.

    Stage 3 gives the bits of stage 0.
    """
    params = models.mlp(num_layers=3)
    params["h"] = [{"w": layer["w"], "v": layer["w"].T.contiguous()} for layer in params["h"]]

    def loss_fn(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, ways = batch
        block = zf.remat(other if ways[0, 0] else first, **(options or {}))
        for layer in params["h"]:
            x = block(layer, torch.tanh(x))
        return (x @ params["out"]).pow(2).mean()

    batches = batches_of(4, group.size, lambda step, rank, _: (rank > 0 and step >= 2,))
    found = []
    for stage in (0, 3):
        z = zf.zero(stage, loss_fn, optim.sgd(0.01), group, bucket_bytes=1)
        state, losses = z.init(params), []
        for step in batches:
            state, info = z.step(state, step[group.rank])
            losses.append(float(info.loss))
        found.append((z.params(state), losses))
    assert_same_bits(found[0], found[1])
    return found[0]


def returning_layers(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Use all layers, and open layers twice, so that gradients of several uses are added."""
    x, ways = batch
    for layer in params["h"]:
        x = torch.tanh(x @ (layer["w"] * layer["w"]) + layer["b"])
    for index, layer in enumerate(params["h"]):
        if ways[0, index]:
            x = torch.tanh(x @ layer["w"] + layer["b"])
    return (x @ params["out"]).pow(2).mean()


def returning(group: zf.Group) -> Any:
    """Ranks use layers twice that the traced first step used once."""
    batches = batches_of(
        3,
        group.size,
        lambda step, rank, _: [
            step > 0 and (rank + step + index) % 3 == 0 for index in range(LAYERS)
        ],
    )
    return every_stage(group, returning_layers, models.mlp(), batches)


def shifted_layers(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Gather all leaves, and add a shift, which backward does not need, in open layers."""
    x, ways = batch
    for index, layer in enumerate(params["h"]):
        whole = zf.gather(layer)
        x = torch.tanh(x @ whole["w"])
        if ways[0, index]:
            x = x + whole["shift"].sum(0)
    return (x @ params["out"]).pow(2).mean()


def gathered_for_nothing(group: zf.Group) -> Any:
    """All ranks gather a block, and some ranks have no gradient for the block, which shows in
    backward only.
    """
    params = models.mlp(num_layers=6)
    params["h"] = [{"w": layer["w"], "shift": layer["w"].repeat(9, 1)} for layer in params["h"]]
    batches = batches_of(
        3,
        group.size,
        lambda step, rank, _: [
            step == 0 or (rank + step) % group.size == 0 or i < 1 for i in range(6)
        ],
    )
    return every_stage(group, shifted_layers, params, batches)


def experts(group: zf.Group, rows: int, top_k: int, capacity: int, num_micro: int = 1) -> Any:
    """A mixture of experts; the tokens of a rank choose the experts."""
    params = models.mixture(seed=3)
    batches = [[(x,) for x in step] for step in models.mlp_batches(3, group.size, rows=rows)]
    loads = torch.stack(
        [
            models.mixture_loss(params, part, top_k, capacity)[1]
            for (x,) in batches[0]
            for part in x.chunk(num_micro)
        ]
    )
    idle = loads == 0
    assert (idle.any(0) & ~idle.all(0)).any(), (
        "every expert is used by all or by none: nothing differs between the ranks"
    )
    assert loads.sum() < 2 * top_k * rows * group.size, "no expert is full: no token is dropped"
    return every_stage(
        group,
        lambda params, batch: models.mixture_loss(params, batch[0], top_k, capacity)[0],
        params,
        batches,
        num_micro,
    )


def one_expert_a_token(group: zf.Group) -> Any:
    return experts(group, rows=6, top_k=1, capacity=2)


def two_experts_a_token(group: zf.Group) -> Any:
    return experts(group, rows=3, top_k=2, capacity=2)


def experts_and_micro_batches(group: zf.Group) -> Any:
    return experts(group, rows=6, top_k=1, capacity=1, num_micro=3)


def two_hundred_steps(group: zf.Group) -> Any:
    """Open layers at random by rank and step, and compare every gradient with the oracle."""
    generator = torch.Generator().manual_seed(11)
    ways = torch.randint(2, (200, group.size, LAYERS), generator=generator)
    batches = batches_of(200, group.size, lambda step, rank, _: ways[step, rank].tolist())
    loss = zf.shard_params(open_layers, group)
    vg = zf.shard_grads(zf.data_parallel(zf.value_and_grad(loss), group), group)
    optimizer = zf.shard_optimizer(optim.sgd(0.05), group)
    params: Any = zf.shard(models.mlp(), group, bucket_bytes=300)
    state, losses = optimizer.init(params), []
    whole = models.mlp()
    for index, step in enumerate(batches):
        value, grads = vg(params, step[group.rank])
        found = zf.unshard(grads)
        if index % group.size == group.rank:  # the ranks share the comparisons
            _, expected = reference.gradients(
                lambda leaves, batch: open_layers(models.unflat_dict(leaves, whole), batch),
                models.flat_dict(whole),
                step,
            )
            flat = {name: torch.zeros_like(p) for name, p in models.flat_dict(whole).items()}
            near(found, models.unflat_dict({**flat, **expected}, whole))
        params, state = zf.apply(optimizer, grads, state, params)
        whole = zf.unshard(params)
        losses.append(float(value))
    return whole, losses


BODIES = [
    unused_leaves,
    early_exit,
    skipped_layers,
    returning,
    recomputed,
    gathered_for_nothing,
    one_expert_a_token,
    two_experts_a_token,
    experts_and_micro_batches,
]
