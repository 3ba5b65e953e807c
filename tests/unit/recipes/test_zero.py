"""zero(): the state, the info of a step, and torch's Adam on the same batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zfun as zf
from tests import models, reference
from zfun import optim, tree
from zfun.collectives import record
from zfun.testing import assert_same_bits, same_bits

STAGES = [0, 1, 2, 3]
EACH_STAGE = pytest.mark.parametrize("stage", STAGES)
PLACEMENTS = {0: (zf.R, zf.R), 1: (zf.R, zf.S), 2: (zf.R, zf.S), 3: (zf.S, zf.S)}


@EACH_STAGE
def test_each_stage_has_the_documented_placements(stage: int) -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, bucket_bytes=300)
        state = z.init(models.mlp())
        for batches in models.mlp_batches(2, group.size):
            assert (state.params.placement, state.opt_state.mu.placement) == PLACEMENTS[stage]
            assert state.opt_state.nu.layout == state.params.layout
            assert state.frozen is None
            state, _ = z.step(state, batches[group.rank])

    zf.simulate(3, main)


@EACH_STAGE
def test_the_state_has_the_documented_bytes(stage: int) -> None:
    size = 4

    def main(group: zf.Group) -> None:
        state = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group).init(models.mlp())
        psi = sum(bucket.padded_numel for bucket in state.params.layout.buckets) * 8
        held = sum(zf.describe(state.params).bytes_by_place.values())
        moments = sum(zf.describe((state.opt_state.mu, state.opt_state.nu)).bytes_by_place.values())
        assert held == (psi // size if stage == 3 else psi)
        assert moments == 2 * (psi if stage == 0 else psi // size)

    zf.simulate(size, main)


@EACH_STAGE
def test_step_info_has_the_loss_norm_and_skipped_steps(stage: int) -> None:
    size = 3
    batches = models.mlp_batches(1, size)[0]
    loss, grads = reference.gradients(
        lambda p, b: models.mlp_loss(models.unflat_dict(p, models.mlp()), b),
        models.flat_dict(models.mlp()),
        batches,
    )

    def main(group: zf.Group) -> Any:
        optimizer = optim.chain(optim.clip_by_global_norm(1e-3), optim.sgd(0.1))
        z = zf.zero(stage, models.mlp_loss, optimizer, group, bucket_bytes=300)
        state = z.init(models.mlp())
        assert (state.step, state.num_skipped) == (0, 0)
        state, info = z.step(state, batches[group.rank])
        assert (state.step, state.num_skipped) == (1, 0)
        assert (info.skipped, info.bad_leaf, info.aux) == (False, None, None)
        assert (info.loss.shape, info.grad_norm.shape, info.grad_norm.dtype) == (
            (),
            (),
            torch.float64,
        )
        return info.loss, info.grad_norm

    runs = zf.simulate(size, main)
    assert all(same_bits(run, runs[0]) for run in runs)
    assert runs[0][0].item() == pytest.approx(loss, rel=1e-12)
    # Before clipping, and over all ranks.
    assert runs[0][1].item() == pytest.approx(reference.norm(grads), rel=1e-12)


@EACH_STAGE
@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_stage_trains_as_torch_does(stage: int, size: int) -> None:
    leaves, spec = tree.flatten(models.mlp())
    plain = [leaf.clone().requires_grad_() for leaf in leaves]
    optimizer = torch.optim.AdamW(plain, lr=0.05, weight_decay=0.1, eps=1e-4)
    losses = []
    for step in models.mlp_batches(5, size):
        optimizer.zero_grad()
        loss = torch.stack(
            [models.mlp_loss(tree.unflatten(spec, plain), batch) for batch in step]
        ).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain, 0.5)
        optimizer.step()
        losses.append(loss.item())

    def main(group: zf.Group) -> Any:
        rule = optim.chain(
            optim.clip_by_global_norm(0.5), optim.adamw(0.05, weight_decay=0.1, eps=1e-4)
        )
        z = zf.zero(stage, models.mlp_loss, rule, group, bucket_bytes=300)
        state, found = z.init(models.mlp()), []
        for step in models.mlp_batches(5, size):
            state, info = z.step(state, step[group.rank])
            found.append(info.loss.item())
        return z.params(state), found

    for params, found in zf.simulate(size, main):
        assert found == pytest.approx(losses, rel=1e-10)
        for before, mine, theirs in zip(leaves, tree.leaves(params), plain, strict=True):
            torch.testing.assert_close(
                mine - before, theirs.detach() - before, rtol=1e-8, atol=1e-10
            )


@EACH_STAGE
def test_params_returns_whole_new_leaves(stage: int) -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(stage, models.mlp_loss, optim.sgd(0.1), group)
        state = z.init(models.mlp())
        assert_same_bits(z.params(state), models.mlp())
        for leaf in tree.leaves(z.params(state)):
            leaf.fill_(7.0)
        assert_same_bits(z.params(state), models.mlp())

    zf.simulate(2, main)


@EACH_STAGE
def test_donation_reuses_memory(stage: int) -> None:
    def main(group: zf.Group, donate: bool) -> tuple[int, ...]:
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, donate=donate)
        state = z.init(models.mlp())
        batch = models.mlp_batches(1, group.size)[0][group.rank]
        state, _ = z.step(state, batch)
        before = [addresses(state.opt_state), addresses(state.params)]
        kept = state  # so that no other tensor gets the same memory by chance
        state, _ = z.step(state, batch)
        del kept
        return tuple(
            len(was & is_now)
            for was, is_now in zip(
                before, [addresses(state.opt_state), addresses(state.params)], strict=True
            )
        )

    def addresses(value: Any) -> set[int]:
        return {buffer.data_ptr() for flat in zf.flat.flats(value) for buffer in flat.buffers}

    for moments, params in zf.simulate(2, main, True):
        assert (moments, params) == (2, 1)
    assert zf.simulate(2, main, False) == [(0, 0)] * 2


@EACH_STAGE
@pytest.mark.parametrize(
    "params",
    [
        torch.ones(3, dtype=torch.float64),
        [torch.ones(3, dtype=torch.float64), (torch.ones((), dtype=torch.float64), None)],
        models.Pair(
            {"x": torch.ones(2, 2, dtype=torch.float64)},
            models.Layer(torch.ones(5, dtype=torch.float64), [torch.zeros(0, dtype=torch.float64)]),
        ),
    ],
    ids=["a tensor", "a list", "nodes of the user"],
)
def test_any_tree_trains(stage: int, params: Any) -> None:
    def main(group: zf.Group) -> Any:
        z = zf.zero(stage, models.tree_loss, optim.sgd(0.1), group)
        state, _ = z.step(z.init(params), torch.ones(2))
        return z.params(state)

    found = zf.simulate(2, main)
    grads = zf.value_and_grad(models.tree_loss)(params, torch.ones(2))[1]
    expected = tree.map(lambda p, g: p - 0.1 * g, params, grads)
    assert tree.structure(found[0]) == tree.structure(params)
    for mine, theirs in zip(tree.leaves(found[1]), tree.leaves(expected), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


@EACH_STAGE
def test_a_pair_of_functions_is_an_optimizer(stage: int) -> None:
    def update(grads: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda g: -0.1 * g, grads), state

    def main(group: zf.Group, optimizer: Any) -> Any:
        z = zf.zero(stage, models.mlp_loss, optimizer, group)
        state, _ = z.step(z.init(models.mlp()), models.mlp_batches(1, 2)[0][group.rank])
        return z.params(state)

    mine = zf.simulate(2, main, (lambda params: (), update))
    theirs = zf.simulate(2, main, optim.sgd(0.1))
    for a, b in zip(tree.leaves(mine), tree.leaves(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-13, atol=1e-15)


@EACH_STAGE
def test_a_scheduled_rate_does_not_count_skipped_steps(stage: int) -> None:
    rate = optim.warmup_linear(0.1, 2, 6)

    def main(group: zf.Group, poisoned: bool) -> Any:
        z = zf.zero(
            stage,
            lambda p, b: models.mlp_loss(p, b[0]) + (p["out"] * b[1]).sum(),
            optim.sgd(rate),
            group,
        )
        state = z.init(models.mlp())
        for number, batches in enumerate(models.mlp_batches(3, 2)):
            if poisoned and number == 1:
                state, info = z.step(
                    state,
                    (batches[group.rank], torch.full((5,), float("inf"), dtype=torch.float64)),
                )
                assert info.skipped
            state, info = z.step(state, (batches[group.rank], torch.zeros(5, dtype=torch.float64)))
        return z.params(state), state.step

    with_skip, without = zf.simulate(2, main, True), zf.simulate(2, main, False)
    assert_same_bits([params for params, _ in with_skip], [params for params, _ in without])
    assert [steps for _, steps in with_skip + without] == [4, 4, 3, 3]


def test_two_runs_in_one_loop_are_independent() -> None:
    def main(group: zf.Group, together: bool) -> Any:
        zs = [
            zf.zero(stage, models.mlp_loss, optim.adamw(0.1), group, bucket_bytes=300)
            for stage in (3, 1)
        ]
        states = [z.init(models.mlp(seed=seed)) for z, seed in zip(zs, (1, 2), strict=True)]
        order = [0, 1, 0, 1] if together else [0, 0, 1, 1]
        counts = [0, 0]
        for which in order:
            states[which], _ = zs[which].step(
                states[which], models.mlp_batches(2, 2)[counts[which]][group.rank]
            )
            counts[which] += 1
        return [z.params(state) for z, state in zip(zs, states, strict=True)]

    assert_same_bits(zf.simulate(2, main, True), zf.simulate(2, main, False))


def test_the_same_functions_serve_several_states() -> None:
    def main(group: zf.Group) -> None:
        z = zf.zero(
            3,
            models.mlp_loss,
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=lambda path, _: path != "out",
        )
        first, second = z.init(models.mlp()), z.init(models.mlp(seed=2))
        batch = models.mlp_batches(1, 2)[0][group.rank]
        for _ in range(2):
            first, _ = z.step(first, batch)
            second, _ = z.step(second, batch)
        assert_same_bits(
            (z.params(first)["out"], z.params(second)["out"]),
            (models.mlp()["out"], models.mlp(seed=2)["out"]),
        )
        alone = zf.zero(
            3,
            models.mlp_loss,
            optim.adamw(0.1),
            group,
            bucket_bytes=300,
            trainable=lambda path, _: path != "out",
        )
        state = alone.init(models.mlp(seed=2))
        for _ in range(2):
            state, _ = alone.step(state, batch)
        assert_same_bits(z.params(second), alone.params(state))

    zf.simulate(2, main)


@EACH_STAGE
def test_ranks_beyond_the_elements_take_part(stage: int) -> None:
    """Sixteen ranks, three elements: most hold nothing but padding."""

    def main(group: zf.Group) -> Any:
        z = zf.zero(
            stage,
            lambda p, b: (p["w"] * b).pow(2).sum(),
            optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(0.1)),
            group,
        )
        state = z.init({"w": torch.ones(3, dtype=torch.float64), "none": torch.zeros(0)})
        for _ in range(2):
            state, info = z.step(state, torch.tensor(float(group.rank), dtype=torch.float64))
        return z.params(state), info.grad_norm, int(state.opt_state[-1].count)

    runs = zf.simulate(16, main)
    assert all(same_bits(run, runs[0]) for run in runs)
    assert runs[0][2] == 2
    assert bool((runs[0][0]["w"] < 1).all())


def counting(plain: zf.Group, waits: list[int]) -> zf.Group:
    """Return a group that records the number of tensors of each wait for readers."""
    group = record(plain)
    vars(group)["await_readers"] = lambda tensors: waits.append(len(tensors))
    return group


@pytest.mark.parametrize(
    "apply", [zf.apply, lambda optimizer, *args, **kw: optimizer.apply(*args, **kw)]
)
@pytest.mark.parametrize(
    "wrap", [lambda x: x, lambda x: optim.chain(optim.clip_by_global_norm(1.0), x)]
)
def test_a_donated_update_waits_once_for_the_readers_of_each_shard(apply: Any, wrap: Any) -> None:
    def main(plain: zf.Group) -> None:
        waits: list[int] = []
        group = counting(plain, waits)
        params = zf.shard(models.mlp(), group, bucket_bytes=300)
        optimizer = wrap(zf.shard_optimizer(optim.adamw(0.1), group))
        grads = params.with_buffers(torch.ones_like(shard) for shard in params.buffers)
        params, state = apply(optimizer, grads, optimizer.init(params), params)
        assert not waits
        params, _ = apply(optimizer, grads, state, params, donate=True)
        assert waits == [len(params.buffers)]

    zf.simulate(2, main)


def test_a_donated_update_of_a_plain_optimizer_waits_once() -> None:
    def main(plain: zf.Group) -> None:
        waits: list[int] = []
        group = counting(plain, waits)
        params = zf.shard(models.mlp(), group, bucket_bytes=300)
        rule = optim.sgd(0.1)
        new, _ = zf.apply(rule, params, rule.init(params), params, donate=True)
        assert waits == [len(new.buffers)]

    zf.simulate(2, main)


def test_a_loop_shows_its_composition_in_one_line() -> None:
    def main(group: zf.Group) -> tuple[str, str]:
        offload = zf.stores.Offload(optimizer=zf.stores.host())
        z = zf.zero(3, models.mlp_loss, optim.adamw(0.1), group, precision=torch.bfloat16)
        other = zf.zero(1, models.mlp_loss, optim.sgd(0.1), group, offload=offload, donate=False)
        assert z.options is not None
        assert z.options.num_micro_batches == 1
        return repr(z), repr(other)

    expected = (
        "Zero(3, adamw, precision=bfloat16, 2 ranks)",
        "Zero(1, sgd, offload=optimizer, 2 ranks)",
    )
    assert zf.simulate(2, main)[0] == expected


@pytest.mark.parametrize("stage", range(4))
def test_init_sends_two_messages_whatever_the_number_of_buckets(stage: int) -> None:
    """Both are gathers of 32 bytes from each rank: a rank of 1,024 receives 32 KiB each."""

    def main(group: zf.Group) -> list[tuple[str, int]]:
        recorded = record(group)
        params = {f"h.{i}": torch.ones(8, 8) for i in range(5)}
        z = zf.zero(stage, models.mlp_loss, optim.adamw(0.1), recorded, bucket_bytes=1)
        assert len(z.init(params).params.buffers) == 5
        return [(entry.kind, entry.numel) for entry in recorded.log]

    assert zf.simulate(3, main) == [[("all_gather", 32)] * 2] * 3
