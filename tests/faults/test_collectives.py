"""One collective of one rank fails, comes late or is another one: at every place of a run."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.distributed import needs_shared_memory, processes
from tests.faults.programs.faulty_groups import DIFFERS, FAILS, LATE, FaultyGroup, Injected
from zfun import optim
from zfun.collectives import Group
from zfun.errors import CollectiveMismatch, DonatedStateError, PeerLost, SpecMismatch, ZfunError
from zfun.testing import assert_same_bits, same_bits

pytestmark = pytest.mark.timeout(300)

STAGES = [0, 1, 2, 3]
FAULTS = (*FAILS, *LATE, *DIFFERS)
RUNS = {
    "plain": {},
    "clipped": {"optimizer": lambda: optim.chain(optim.clip_by_global_norm(0.1), optim.adam(0.1))},
    "bfloat16": {"precision": torch.bfloat16},
    "compressed": {"compression": zf.compression.Compression(grads=zf.compression.int8())},
    "offloaded": {"offload": zf.stores.Offload(optimizer=zf.stores.host())},
}


@dataclass
class Ending:
    """How a rank ended: with an error, or with all parameters and no error.

    Attributes:
        state: the last state after an error in a step: "as it was", "given up" (every use
            raises), or "changed".
    """

    error: BaseException | None = None
    params: Any = None
    state: str = "none yet"
    group: FaultyGroup = field(kw_only=True)


def buffers(state: Any) -> list[Tensor]:
    flats = zf.flat.flats((state.params, state.opt_state))
    return [
        zf.stores.fetch(buffer, torch.device("cpu")).clone()
        for flat in flats
        for buffer in flat.buffers
    ]


def train(group: Group, stage: int, steps: int, options: dict[str, Any], ending: Ending) -> None:
    options = {"optimizer": lambda: optim.adamw(0.1), **options}
    optimizer = options.pop("optimizer")()
    z = zf.zero(stage, models.mlp_loss, optimizer, group, bucket_bytes=300, **options)
    state = z.init(models.mlp(num_layers=2))
    for step in range(steps):
        before = buffers(state)
        try:
            state, _ = z.step(state, models.mlp_batches(step + 1, group.size)[step][group.rank])
        except BaseException:
            try:
                ending.state = "as it was" if same_bits(buffers(state), before) else "changed"
            except DonatedStateError as error:
                ending.state = "given up" if "failed half-way" in str(error) else "taken"
            raise
    ending.params = z.params(state)


def run(
    stage: int,
    at: int | None,
    fault: str,
    *,
    size: int = 2,
    lost: int = 1,
    steps: int = 2,
    kind: str = "plain",
) -> tuple[list[Ending], BaseException | None]:
    """Train on simulated ranks; return how each rank ended, and the error of the simulation."""
    endings: dict[int, Ending] = {}

    def main(group: Group) -> None:
        mine = FaultyGroup(group, at if group.rank == lost else None, fault)
        ending = endings[group.rank] = Ending(group=mine)
        try:
            train(mine, stage, steps, RUNS[kind], ending)
        except BaseException as error:
            ending.error = error
            raise

    raised: BaseException | None = None
    try:
        zf.simulate(size, main)
    except Exception as error:  # noqa: BLE001, check() judges the error
        raised = error
    return [endings[rank] for rank in range(size)], raised


def check(
    right: list[Ending],
    found: list[Ending],
    raised: BaseException | None,
    *,
    fault: str,
    lost: int = 1,
    kind: str = "plain",
) -> None:
    assert found[lost].group.hit
    # A sum with a codec has two phases. The rank that failed ends the sums under way, and so
    # starts second phases before the others do.
    quoted = kind != "compressed"
    if fault in LATE:
        assert raised is None
    if fault in FAILS and quoted:
        assert isinstance(raised, Injected)
    if fault in DIFFERS and fault not in ("swapped", "left out"):
        assert isinstance(raised, (CollectiveMismatch, PeerLost, SpecMismatch))
    for rank, ending in enumerate(found):
        # The disturbance has given this rank wrong values.
        misled = fault == "left out" and rank == lost
        assert raised is not None or not misled
        assert misled or ending.state in ("none yet", "as it was", "given up")
        if ending.error is None:
            assert misled or same_bits(ending.params, right[rank].params)
        elif isinstance(ending.error, ZfunError):
            assert ending.error.rank == rank
            if fault in FAILS and quoted:
                assert f"rank {lost} failed: Injected: the link is down" in str(ending.error)
        else:
            assert rank == lost
            assert misled or isinstance(ending.error, Injected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_disturbed_collective_ends_in_an_error_or_in_the_right_state(stage: int) -> None:
    right, _ = run(stage, None, FAILS[0], steps=1)
    count = len(right[1].group.calls)
    assert count >= 6
    for at in range(count):
        fault = FAULTS[(3 * at + stage) % len(FAULTS)]
        check(right, *run(stage, at, fault, steps=1), fault=fault)


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", RUNS)
def test_any_fault_of_any_collective_ends_in_an_error_or_in_the_right_state(
    stage: int, kind: str
) -> None:
    for size, lost in ((2, 1), (3, 0)) if kind == "plain" else ((2, 1),):
        right, _ = run(stage, None, FAILS[0], size=size, lost=lost, kind=kind)
        for at, fault in itertools.product(range(len(right[lost].group.calls)), FAULTS):
            found = run(stage, at, fault, size=size, lost=lost, kind=kind)
            check(right, *found, fault=fault, lost=lost, kind=kind)


@pytest.mark.parametrize("fault", ["other name", "other length", "other dtype"])
def test_a_different_collective_is_named_with_both_ranks(fault: str) -> None:
    right, _ = run(1, None, fault)
    at = next(i for i, call in enumerate(right[1].group.calls) if call.name == "grads")
    found, _ = run(1, at, fault)
    for ending in found:
        with pytest.raises(
            CollectiveMismatch,
            match=r"rank 0 started reduce_scatter 'grads' \(bucket .*rank 1 started reduce_scatter",
        ):
            raise ending.error or AssertionError


def disturbed(group: Group, stage: int, at: int, fault: str) -> str:
    mine = FaultyGroup(group, at if group.rank == 1 else None, fault)
    ending = Ending(group=mine)
    train(mine, stage, 2, {}, ending)
    return ending.state


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize(
    "shared_memory",
    [False, pytest.param(True, marks=needs_shared_memory)],
    ids=["gloo", "shared"],
)
def test_processes_with_a_disturbed_collective_end_in_time(shared_memory: bool) -> None:
    right, _ = run(3, None, FAILS[0])
    # Reading the parameters at the end has no further collective, which others could miss.
    count = len([call for call in right[1].group.calls if call.name != "unshard"])
    cases = zip(range(0, count, 2), itertools.cycle((*FAILS, *DIFFERS[:4])), strict=False)
    options = {"timeout_s": 60.0, "collective_timeout_s": 5.0, "shared_memory": shared_memory}
    with processes(2, **options) as workers:
        for at, fault in cases:
            zero, one = workers.outcomes(disturbed, 3, at, fault)
            assert isinstance(zero, ZfunError), (at, fault, zero)
            if fault in FAILS:
                assert isinstance(one, Injected), (at, fault, one)
                assert isinstance(zero, PeerLost)
                assert "rank 1 raised Injected: the link is down" in str(zero)


@pytest.mark.parametrize("donate", [False, True])
def test_a_state_is_whole_or_given_up_after_an_update_that_failed(donate: bool) -> None:
    """The gather of new parameters fails, after the optimizer has written to its shards."""
    right, _ = run(1, None, FAILS[0])
    at = next(i for i, call in enumerate(right[1].group.calls) if call.name == "params")
    caught: list[BaseException] = []

    def main(group: Group) -> None:
        mine = FaultyGroup(group, at if group.rank == 1 else None)
        z = zf.zero(1, models.mlp_loss, optim.adamw(0.1), mine, bucket_bytes=300, donate=donate)
        state = z.init(models.mlp(num_layers=2))
        before = buffers(state)
        try:
            z.step(state, models.mlp_batches(1, 2)[0][group.rank])
        except (PeerLost, Injected) as error:
            caught.append(error)
        if not donate:
            assert_same_bits(buffers(state), before)
            return
        for use in (lambda: z.params(state), lambda: buffers(state), lambda: zf.describe(state)):
            with pytest.raises(
                DonatedStateError,
                match=r"taken over by zf\.apply\(\.\.\., donate=True\) at .*test_collectives\.py:"
                r"\d+, which failed half-way with (PeerLost|Injected); use .* pass donate=False",
            ):
                use()

    with pytest.raises((PeerLost, Injected)):
        zf.simulate(2, main)
    assert any(isinstance(error, Injected) for error in caught)
