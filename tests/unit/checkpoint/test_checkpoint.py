"""The contents of checkpoints, their publication, and states that do not fit."""

from __future__ import annotations

import copy
import errno
import gc
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.checkpoints import Case, compose, params_of, trained, values
from tests.faulty_files import FaultyFiles
from zfun import optim
from zfun.checkpoint import latest, read_leaf, read_manifest, step_path, steps
from zfun.checkpoint._directory import locked
from zfun.checkpoint._remove import stale
from zfun.errors import (
    AliasChanged,
    CheckpointError,
    DonatedStateError,
    OffloadError,
    OptionError,
    SpecMismatch,
)
from zfun.files import Files
from zfun.planner import Meter
from zfun.testing import assert_same_bits, same_bits

pytestmark = pytest.mark.timeout(60)


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {"w": torch.full((3, 2), value), "b": torch.arange(4.0) * value}


# Contents.


class Loader:
    """A data loader with the protocol of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        self.yielded = 0
        self.generator = torch.Generator().manual_seed(3)

    def __next__(self) -> int:
        self.yielded += 1
        return int(torch.randint(1000, (), generator=self.generator))

    def state_dict(self) -> dict[Any, Any]:
        return {
            "_num_yielded": self.yielded,
            "_sampler": {"generator": self.generator.get_state(), "seen": (1, None)},
            0: b"worker",
        }

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        assert state[0] == b"worker"
        assert state["_sampler"]["seen"] == (1, None)
        self.yielded = state["_num_yielded"]
        self.generator.set_state(state["_sampler"]["generator"])


def test_generators_and_the_data_loader_of_every_rank_go_on(tmp_path: Path) -> None:
    def generators(rank: int) -> dict[str, Any]:
        return {
            "torch": torch.Generator().manual_seed(rank),
            "python": random.Random(rank),
            "numpy": np.random.default_rng(rank),
            "old": np.random.RandomState(rank),
        }

    def drawn(rng: dict[str, Any], loader: Loader) -> list[Any]:
        return [
            torch.rand(3),
            torch.rand(3, generator=rng["torch"]),
            rng["python"].random(),
            rng["python"].gauss(0, 1),
            rng["numpy"].normal(size=3).tolist(),
            rng["old"].normal(size=3).tolist(),
            next(loader),
        ]

    def first(group: zf.Group) -> list[Any]:
        torch.manual_seed(group.rank)
        rng, loader = generators(group.rank), Loader()
        for _ in range(group.rank + 1):
            drawn(rng, loader)
        state = {"w": zf.shard(torch.ones(8), group)}
        zf.save(tmp_path, state, step=1, rng=rng, loader=loader)
        return drawn(rng, loader)

    def second(group: zf.Group) -> list[Any]:
        torch.manual_seed(99)
        rng, loader = generators(group.rank + 50), Loader()
        before = torch.get_rng_state()
        like = {"w": zf.shard(torch.zeros(8), group)}
        found = zf.load(tmp_path, like, rng=rng, loader=loader)
        if group.rank > 2:
            # A rank that the save did not have keeps its generators.
            assert found.loader is None
            assert torch.equal(torch.get_rng_state(), before)
            return []
        return drawn(rng, loader)

    expected = zf.simulate(3, first)
    assert_same_bits(zf.simulate(3, second), expected)
    assert_same_bits(zf.simulate(4, second)[:3], expected)
    state = torch.get_rng_state()
    zf.load(tmp_path, {"w": torch.zeros(8)}, rng=False)
    assert torch.equal(torch.get_rng_state(), state)
    with pytest.raises(CheckpointError, match=r"got rng= with 'other'"):
        zf.load(tmp_path, {"w": torch.zeros(8)}, rng={"other": random.Random(1)})


def test_the_data_of_the_caller_comes_back(tmp_path: Path) -> None:
    data: dict[Any, Any] = {
        "epoch": 3,
        "loss": float("nan"),
        "best": -float("inf"),
        "names": ["a", ("b", None, True)],
        "curve": torch.tensor([1.0, 2.0], dtype=torch.bfloat16),
        "array": np.arange(4, dtype=np.int16).reshape(2, 2),
        7: b"\x00\xff",
        "empty": torch.zeros(0, 3),
    }
    zf.save(tmp_path, weights(), step=1, data=data, loader=12)
    found = zf.load(tmp_path, weights(0.0))
    assert found.loader == 12
    assert found.data.pop("loss") != data.pop("loss")
    array, expected = found.data.pop("array"), data.pop("array")
    assert (array == expected).all()
    assert array.dtype == expected.dtype
    assert found.data.pop(7) == data.pop(7)
    assert_same_bits(found.data, data)
    for wrong in (object(), {"f": print}, torch.zeros(1 << 23), np.array([object()])):
        with pytest.raises(CheckpointError, match=r"data= is made of numbers"):
            zf.save(tmp_path, weights(), step=2, data=wrong)
    assert [step for step, _ in steps(tmp_path)] == [1]


def test_buffers_that_are_kept_by_rank_come_back_to_their_ranks(tmp_path: Path) -> None:
    rules = {"mean": "mean", "own": "by rank"}

    def loss(params: Any, batch: Tensor) -> Tensor:
        with torch.no_grad():
            params["mean"].add_(batch.mean())
            params["own"].add_(batch.mean())
        return (params["w"] * batch).sum()

    def zero(group: zf.Group) -> Any:
        rule = lambda path, leaf: rules.get(path)
        return zf.zero(1, loss, optim.sgd(0.1), group, buffers=rule)

    start = {"w": torch.ones(3), "mean": torch.zeros(2), "own": torch.zeros(2)}

    def first(group: zf.Group) -> Any:
        z = zero(group)
        state, _ = z.step(z.init(start), torch.ones(3) * group.rank)
        zf.save(tmp_path, state)
        return z.params(state)

    def second(group: zf.Group) -> Any:
        z = zero(group)
        return z.params(zf.load(tmp_path, z.init(start)).state)

    expected = zf.simulate(2, first)
    assert not same_bits(expected[0]["own"], expected[1]["own"])
    assert_same_bits(zf.simulate(2, second), expected)
    # On more ranks the values of the ranks are repeated.
    found = zf.simulate(3, second)
    assert_same_bits([found[2], found[1]], expected)


def test_other_trees_come_back(tmp_path: Path) -> None:
    tied = torch.randn(3, 4)
    state = {
        "pair": models.Pair(torch.tensor(3), [torch.randn(2, 3).T, None]),
        "tied": [tied, tied],
        "strided": torch.randn(6)[::2],
        "one": torch.randn(4)[1:2].as_strided((1,), (7,)),
        "complex": torch.randn(2, dtype=torch.complex128).conj(),
        "bool": torch.tensor([True, False]),
        "byte": torch.randint(0, 255, (3,), dtype=torch.uint8),
        "float8": torch.randn(4).to(torch.float8_e4m3fn),
        "empty": torch.zeros(0, 5),
        "text": "name",
        "rate": float("inf"),
        "flag": True,
        "stored": zf.stores.host().put(torch.arange(5.0), "state"),
    }
    zf.save(tmp_path, state, step=0)
    like = zf.tree.map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, state)
    like["tied"] = [torch.zeros(3, 4)] * 2
    like["stored"] = zf.stores.host().put(torch.zeros(5), "state")
    like |= {"text": "", "rate": 0.0, "flag": False}
    found = zf.load(tmp_path, like).state
    assert found["tied"][0] is found["tied"][1]
    assert_same_bits(found.pop("stored").get(torch.device("cpu")).wait(), torch.arange(5.0))
    state.pop("stored")
    eight, expected = found.pop("float8"), state.pop("float8")
    assert torch.equal(eight.view(torch.uint8), expected.view(torch.uint8))
    state["complex"] = state["complex"].resolve_conj()
    assert_same_bits(found, state)
    # Tensors of the caller's tree are not written to.
    assert not like["byte"].any()


def test_payload_files_are_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    path = zf.save(tmp_path, weights(), step=4).path
    assert_same_bits(load_file(f"{path}/00000.safetensors"), weights())
    manifest = read_manifest(path)
    with zf.checkpoint.Payload(path, manifest) as payload:
        payload.verify()
        assert_same_bits({x.key: read_leaf(payload, x) for x in manifest.leaves}, weights())


def test_each_value_is_written_once_and_padding_never(tmp_path: Path) -> None:
    def main(group: zf.Group) -> int:
        z = compose(group, Case(8, 1, inner=4, bucket_bytes=1000), str(tmp_path))
        state = z.init(params_of(1))
        zf.save(tmp_path, state)
        return sum(
            x.numel() * x.element_size() for x in values(state).values() if isinstance(x, Tensor)
        )

    logical = zf.simulate(8, main)[0]
    manifest = read_manifest(step_path(tmp_path))
    stored = sum(file.num_bytes - file.data_start for file in manifest.files)
    ties = 3 * 7 * 3 * 4
    assert stored == logical - ties
    assert len(manifest.files) > 4


# Publication.


def test_the_newest_steps_are_kept_and_a_step_may_be_saved_again(tmp_path: Path) -> None:
    for step in (1, 2, 3, 10):
        zf.save(tmp_path, weights(step), step=step, keep=2)
    assert [step for step, _ in steps(tmp_path)] == [3, 10]
    zf.save(tmp_path, weights(-10.0), step=10, keep=1)
    assert [step for step, _ in steps(tmp_path)] == [10]
    assert len(list(tmp_path.glob("step-*"))) == 1
    assert_same_bits(zf.load(tmp_path, weights(0.0)).state, weights(-10.0))
    # A save of an older step never removes itself, and counts as one of those to keep.
    zf.save(tmp_path, weights(2.0), step=2, keep=2)
    assert [step for step, _ in steps(tmp_path)] == [2, 10]
    zf.save(tmp_path, weights(4.0), step=4, keep=2)
    assert [step for step, _ in steps(tmp_path)] == [4, 10]
    with pytest.raises(CheckpointError, match=r"a checkpoint of step 9; it has the steps 4, 10"):
        zf.load(tmp_path, weights(), step=9)
    assert zf.load(tmp_path, weights(), step=4).step == 4
    zf.save(tmp_path, weights(3.0), step=3, keep=1)
    assert [step for step, _ in steps(tmp_path)] == [3]


def test_one_job_saves_to_a_path(tmp_path: Path) -> None:
    # Two open files of one process exclude each other as those of two processes do.
    with (
        locked(str(tmp_path), Files()),
        pytest.raises(CheckpointError, match=rf"one job .*; got another .*{os.getpid()} on"),
    ):
        zf.save(tmp_path, weights(), step=1)
    zf.save(tmp_path, weights(), step=1)


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    with locked(str(tmp_path), Files()):
        # The fork has the open file of the lock, as a worker of a DataLoader has.
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    try:
        zf.save(tmp_path, weights(), step=1)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_chunks_are_whole_pages(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"chunk_bytes .*a multiple of 4096"):
        zf.save(tmp_path, weights(), step=1, chunk_bytes=5000)
    assert not steps(tmp_path)


def test_a_rank_that_fails_lets_all_ranks_raise(tmp_path: Path) -> None:
    def main(group: zf.Group) -> str:
        state = {"w": zf.shard(torch.ones(50), group)}
        files = FaultyFiles(0, kinds=("write",)) if group.rank == 1 else None
        with pytest.raises(CheckpointError) as caught:
            zf.save(tmp_path, state, step=1, files=files)
        assert caught.value.rank == 1
        with pytest.raises(OptionError, match=r"got the steps \[0, 1, 2\]"):
            zf.save(tmp_path, state, step=group.rank)
        with pytest.raises(SpecMismatch, match=r"one tree; rank 2 and rank 0 differ at 'x'"):
            zf.save(tmp_path, {**state, **({"x": 1} if group.rank == 2 else {})}, step=1)
        with pytest.raises(CheckpointError, match=r"data= is made of"):
            zf.save(tmp_path, state, step=1, data=print if group.rank == 1 else None)
        zf.save(tmp_path, state, step=1)
        files = FaultyFiles(1, kinds=("read",)) if group.rank == 1 else None
        with pytest.raises(CheckpointError) as caught:
            zf.load(tmp_path, {"w": zf.shard(torch.zeros(50), group)}, files=files)
        return str(caught.value)

    texts = zf.simulate(3, main)
    assert "Input/output error" in texts[1]
    assert "all ranks save and load together, and rank 1 failed" in texts[0]
    assert not stale(tmp_path)


def test_a_disk_that_is_not_shared_is_named(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        path = tmp_path / str(group.rank)
        with pytest.raises(CheckpointError, match=r"on a disk that they share"):
            zf.save(path, {"w": zf.shard(torch.ones(50), group)}, step=1)

    zf.simulate(2, main)


# In the background.


class Gate(Files):
    """Files that do not write before the gate opens."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.fails = False

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        if threading.current_thread().name == "zfun-save":
            assert self.gate.wait(20)
            if self.fails:
                raise OSError(5, "the disk is gone")
        return super().write(fd, buffer, offset)


@pytest.mark.parametrize("store", ["", "host", "nvme"])
@pytest.mark.parametrize("stage", [0, 3])
def test_steps_go_on_during_a_save(tmp_path: Path, stage: int, store: str) -> None:
    """The save has the values of its moment, though the steps overwrite the buffers."""
    (tmp_path / "store").mkdir()
    files = Gate()

    def main(group: zf.Group) -> Any:
        case = Case(2, stage, store=store)
        z = compose(group, case, str(tmp_path / "store"))
        state = trained(z, z.init(params_of(1)), group, range(2))
        expected = values(state)
        saving = zf.save(tmp_path / "saves", state, background=True, files=files)
        assert not saving.done
        state = trained(z, state, group, range(2, 4))
        after = values(state)
        files.gate.set()
        saving.wait()
        assert saving.done
        like = z.init(params_of(2))
        assert_same_bits(values(zf.load(tmp_path / "saves", like).state), expected)
        return after

    assert not same_bits(zf.simulate(2, main)[0]["step"], 2)


def test_an_error_in_the_background_surfaces_at_the_next_save_without_a_group(
    tmp_path: Path,
) -> None:
    files = FaultyFiles(1, errno.ENOSPC, ("write",))
    zf.save(tmp_path, {"w": torch.ones(3)}, step=1, background=True, files=files)
    gc.collect()
    with pytest.raises(CheckpointError, match="No space left"):
        zf.save(tmp_path, {"w": torch.ones(3)}, step=2)
    assert zf.save(tmp_path, {"w": torch.ones(3)}, step=3).wait()


def test_a_save_may_be_waited_for_when_its_group_is_gone(tmp_path: Path) -> None:
    files = Gate()
    state = {"w": zf.shard(torch.ones(3), zf.collectives.single_group())}
    saving = zf.save(tmp_path, state, step=1, background=True, files=files)
    del state
    gc.collect()
    files.gate.set()
    time.sleep(0.2)
    assert saving.wait() == str(tmp_path / "step-00000001")


def test_an_error_in_the_background_names_the_rank_that_failed(tmp_path: Path) -> None:
    def main(group: Any) -> None:
        files = FaultyFiles(0 if group.rank == 1 else None, errno.ENOSPC, ("sync",))
        state = {"w": zf.shard(weights(), group)}
        with pytest.raises(CheckpointError, match=r"the end of the file failed") as caught:
            zf.save(tmp_path, state, step=1, background=True, files=files).wait()
        assert (caught.value.rank, caught.value.errno) == (1, errno.ENOSPC)
        assert str(caught.value).count("all ranks save and load") == (group.rank != 1)

    zf.simulate(3, main)


class NoRoomFor(Files):
    """A disk that takes the payload, and not these names afterwards."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def sync(self, fd: int) -> None:
        super().sync(fd)
        for name in self._names:
            (Path(f"/proc/self/fd/{fd}").readlink().parent / name).mkdir(exist_ok=True)

    def rename(self, old: str, new: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("rank", [0, 1])
def test_an_outcome_that_the_disk_does_not_take_goes_over_the_group(
    rank: int, tmp_path: Path
) -> None:
    """A rank's report of its part, or that rank 0 has given up."""
    name = "failed.json.part" if rank == 0 else "report-00001.json.part"

    def main(group: Any) -> None:
        files = NoRoomFor(name) if group.rank == rank else None
        state = {"w": zf.shard(weights(), group)}
        saving = zf.save(tmp_path, state, step=1, background=True, files=files)
        words = "publishing the checkpoint" if rank == 0 else "the report of this rank"
        with pytest.raises(CheckpointError, match=f"{words} failed") as caught:
            saving.wait()
        assert caught.value.rank == rank
        assert saving.done

    zf.simulate(3, main)
    zf.simulate(2, lambda group: zf.save(tmp_path, {"w": zf.shard(weights(), group)}, step=2))
    assert [step for step, _ in steps(tmp_path)] == [2]


def test_an_error_that_names_another_rank_is_raised_too(tmp_path: Path) -> None:
    class Elsewhere(Files):
        def sync(self, fd: int) -> None:
            raise CheckpointError("a disk of another rank is gone", rank=1)

    def main(group: Any) -> None:
        files = Elsewhere() if group.rank == 0 else None
        state = {"w": zf.shard(weights(), group)}
        with pytest.raises(CheckpointError, match="a disk of another rank is gone"):
            zf.save(tmp_path, state, step=1, background=True, files=files).wait()

    zf.simulate(2, main)
    assert steps(tmp_path) == []


def test_a_wait_that_is_broken_off_ends_the_save_of_this_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process waits for the thread, which must not wait for the other rank's report."""
    is_over = threading.Event()

    class Slow(Files):
        def sync(self, fd: int) -> None:
            is_over.wait(60.0)
            super().sync(fd)

    def broken_off(group: zf.Group) -> None:
        raise InterruptedError

    monkeypatch.setattr("zfun.checkpoint._background.barrier", broken_off)

    def main(group: zf.Group) -> bool:
        state = {"params": zf.shard({"w": torch.ones(3000)}, group)}
        files = Slow() if group.rank else Files()
        saving: Any = zf.save(
            tmp_path, state, step=1, background=True, files=files, timeout_s=100.0
        )
        with pytest.raises(InterruptedError):
            saving.wait()
        if group.rank:
            return True
        saving._thread.join(30.0)
        ended = saving.done
        is_over.set()
        return ended

    assert zf.simulate(2, main) == [True, True]


def test_a_state_without_tensors_is_saved_in_the_background(tmp_path: Path) -> None:
    def main(group: Any) -> Any:
        zf.save(tmp_path, {"tokens": 7}, step=1, group=group, background=True).wait()
        return zf.load(tmp_path, {"tokens": 0}, group=group).state["tokens"]

    assert zf.simulate(2, main) == [7, 7]


def test_an_error_in_the_background_surfaces_at_the_next_step(tmp_path: Path) -> None:
    z = compose(zf.process_group(), Case(1, 0), str(tmp_path))
    state = z.init(params_of(1))
    zf.save(tmp_path, state, step=1)
    for surface in ("step", "save", "wait"):
        files = Gate()
        files.fails = True
        saving = zf.save(tmp_path, state, step=2, keep=1, background=True, files=files)
        files.gate.set()
        while not saving.done:
            time.sleep(0.001)
        batch = torch.ones(3)
        meets: dict[str, Callable[[], Any]] = {
            "step": lambda state=state: z.step(state, batch),
            "save": lambda state=state: zf.save(tmp_path, state, step=3),
            "wait": saving.wait,
        }
        with pytest.raises(CheckpointError, match=r"the disk is gone"):
            meets[surface]()
        # The error is raised once, nothing older was removed, and the run goes on.
        assert [step for step, _ in steps(tmp_path)] == [1]
        state, _ = z.step(state, batch)
    zf.save(tmp_path, state, step=4, background=True)
    assert [step for step, _ in steps(tmp_path)] != [4]
    zf.save(tmp_path, state, step=5)
    assert [step for step, _ in steps(tmp_path)] == [1, 4, 5]


@pytest.mark.slow
def test_the_end_of_the_process_waits_for_the_save(tmp_path: Path) -> None:
    program = (
        "import sys, torch, zfun as zf;"
        "zf.save(sys.argv[1], {'w': torch.arange(9e6)}, step=1, background=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, check=False, timeout=50
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    found = zf.load(tmp_path, {"w": torch.zeros(9_000_000)})
    assert torch.equal(found.state["w"], torch.arange(9e6))


# Mismatches.


def test_trees_that_differ_are_listed_with_the_nearest_names(tmp_path: Path) -> None:
    zf.save(tmp_path, {"weight": torch.ones(3), "b": torch.ones(2), "n": 1}, step=1)
    like = {"weights": torch.zeros(3), "b": torch.zeros(2, 1), "n": "x"}
    with pytest.raises(SpecMismatch) as caught:
        zf.load(tmp_path, like)
    for text in (
        r"weights is missing (did you mean weight?)",
        "weight is only in the checkpoint",
        "b has shape (2,) of torch.float32, and is wanted as (2, 1)",
        "n is int and is wanted as str",
    ):
        assert text in str(caught.value)
    found = zf.load(tmp_path, like, reset=lambda key: True).state
    assert_same_bits(found, like)


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        first = compose(group, Case(2, 3, optimizer="adamw"), str(tmp_path))
        zf.save(tmp_path, first.init(params_of(1)))
        second = compose(group, Case(2, 3, optimizer="lion"), str(tmp_path))
        like = second.init(params_of(2))
        before = values(like)
        with pytest.raises(SpecMismatch, match=r"opt_state.nu.embedding is only in the checkp"):
            zf.load(tmp_path, like)
        assert_same_bits(values(like), before)
        found = zf.load(tmp_path, like, reset=lambda key: key.startswith("opt_state"))
        assert_same_bits(second.params(found.state), params_of(1))
        with pytest.raises(DonatedStateError, match=r"load\(\)"):
            second.params(like)
        with pytest.raises(DonatedStateError):
            zf.save(tmp_path, like, step=9)

    zf.simulate(2, main)


def test_digits_are_lost_only_where_asked(tmp_path: Path) -> None:
    exact = {"w": torch.tensor([1.0, 1.0 + 2**-20])}
    zf.save(tmp_path, exact, step=1)
    with pytest.raises(SpecMismatch, match=r"w has torch.float32, and is wanted as torch.bfloat"):
        zf.load(tmp_path, {"w": torch.zeros(2, dtype=torch.bfloat16)})
    narrow = zf.load(tmp_path, {"w": torch.zeros(2, dtype=torch.bfloat16)}, cast=True).state
    assert_same_bits(narrow["w"], exact["w"].to(torch.bfloat16))
    with pytest.raises(SpecMismatch, match=r"is wanted as torch.int8"):
        zf.load(tmp_path, {"w": torch.zeros(2, dtype=torch.int8)}, cast=True)
    wide = zf.load(tmp_path, {"w": torch.zeros(2, dtype=torch.float64)}).state
    assert_same_bits(wide["w"], exact["w"].double())


def test_master_weights_are_not_dropped_in_silence(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        def loop(precision: Any) -> Any:
            return zf.zero(2, loss, optim.sgd(0.1), group, precision=precision)

        loss = lambda params, batch: models.tree_loss(params, batch).float()
        with_masters, narrow = loop(torch.bfloat16), loop(zf.Precision(param=torch.bfloat16))
        state = trained(with_masters, with_masters.init(params_of(1)), group, range(2))
        zf.save(tmp_path, state)
        with pytest.raises(SpecMismatch, match=r"opt_state.master.embedding is only in"):
            zf.load(tmp_path, narrow.init(params_of(2)))
        found = zf.load(tmp_path, narrow.init(params_of(2)), cast=True).state
        assert_same_bits(narrow.params(found), with_masters.params(state))

    zf.simulate(2, main)


def test_ties_must_agree(tmp_path: Path) -> None:
    one = torch.ones(3)
    zf.save(tmp_path / "tied", {"a": one, "b": one}, step=1)
    zf.save(tmp_path / "apart", {"a": one, "b": one.clone()}, step=1)
    with pytest.raises(AliasChanged, match=r"must stay tied; 'b' and 'a'"):
        zf.load(tmp_path / "tied", {"a": torch.zeros(3), "b": torch.zeros(3)})
    zero = torch.zeros(3)
    with pytest.raises(AliasChanged, match=r"one tensor here and two there"):
        zf.load(tmp_path / "apart", {"a": zero, "b": zero})


def test_a_store_that_cannot_read_on_one_rank_lets_all_ranks_raise(tmp_path: Path) -> None:
    state = {"a": torch.ones(40), "b": torch.ones(40)}
    loss = lambda params, batch: (params["a"] * params["b"] * batch).sum()

    def first(group: Any) -> None:
        zf.save(tmp_path, zf.zero(0, loss, optim.adamw(0.1), group).init(state), step=1)

    def second(group: Any) -> None:
        files = FaultyFiles(0 if group.rank == 1 else None, kinds=("read",))
        store = zf.stores.nvme(tmp_path, files=files)
        offload = zf.stores.Offload(optimizer=store)
        like = zf.zero(0, loss, optim.adamw(0.1), group, offload=offload).init(state)
        # The bucket keeps the leaf of the store, which this load must read.
        kind = OffloadError if group.rank == 1 else CheckpointError
        with pytest.raises(kind, match=r"a read of .* failed") as caught:
            zf.load(tmp_path, like, reset=lambda key: key == "opt_state.mu.b")
        assert caught.value.rank == 1
        store.close()

    zf.simulate(2, first)
    zf.simulate(2, second)


def test_a_flat_is_filled_once(tmp_path: Path) -> None:
    def main(group: zf.Group) -> None:
        flat = zf.shard(weights(), group)
        # Two values with one memory are two values in the checkpoint.
        zf.save(tmp_path, {"params": flat, "average": flat}, step=1)
        like = zf.shard(weights(0.0), group)
        with pytest.raises(AliasChanged, match=r"one flat at 'params' and at 'average'"):
            zf.load(tmp_path, {"params": like, "average": like})
        found = zf.load(tmp_path, {"params": like, "average": copy.deepcopy(like)}).state
        for name in ("params", "average"):
            assert_same_bits(zf.unshard(found[name]), weights())

    zf.simulate(2, main)


def test_onebit_errors_are_not_dropped_in_silence(tmp_path: Path) -> None:
    def run(group: zf.Group, size: int) -> Any:
        z = compose(group, Case(size, 1, optimizer="onebit"), str(tmp_path))
        state = z.init(params_of(1))
        if size == 2:
            zf.save(tmp_path, trained(z, state, group, range(1)))
            return None
        with pytest.raises(SpecMismatch, match=r"belongs to each of 2 ranks, and here are 3"):
            zf.load(tmp_path, state)
        names = ("worker_error", "server_error", "answers")
        found = zf.load(tmp_path, state, reset=lambda key: any(name in key for name in names))
        return trained(z, found.state, group, range(1, 4)).step

    zf.simulate(2, run, 2)
    assert zf.simulate(3, run, 3) == [4, 4, 4]


def test_a_dtype_that_the_format_lacks_is_refused_by_name(tmp_path: Path) -> None:
    narrow = torch.zeros(3, dtype=torch.float8_e8m0fnu)
    state = {"p": zf.shard({"a": narrow, "z": torch.ones(3)}, zf.process_group())}
    with pytest.raises(CheckpointError, match=r"leaf 'p.a' has a dtype of the format") as caught:
        zf.save(tmp_path, state, step=1)
    assert caught.value.leaf == "p.a"


def test_a_state_has_plain_names_and_plain_parts(tmp_path: Path) -> None:
    for key in ("a\0b", "../a", "/a", "x" * 5000):
        with pytest.raises(CheckpointError, match=r"rename the leaf"):
            zf.save(tmp_path, {key: torch.ones(1)}, step=1)
    with pytest.raises(CheckpointError, match=r"path of its own; got 'a.b' twice"):
        zf.save(tmp_path, {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}, step=1)
    with pytest.raises(CheckpointError, match=r"got Generator at 'g'; pass generators as rng="):
        zf.save(tmp_path, {"g": torch.Generator()}, step=1)
    with pytest.raises(OptionError, match=r"pass step="):
        zf.save(tmp_path, weights())
    assert latest(tmp_path) is None


# Memory.


BUCKET = 1 << 16


@pytest.mark.parametrize("store", ["", pytest.param("host", marks=pytest.mark.slow), "nvme"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_save_and_a_load_take_one_bucket_of_memory(
    tmp_path: Path, stage: int, store: str
) -> None:
    (tmp_path / "store").mkdir()
    case = Case(2, stage, store=store, bucket_bytes=BUCKET)
    params = {f"w{i}": torch.full((64, 64), float(i)) for i in range(24)}

    def beyond(z: Any, state: Any, use: Callable[[], Any]) -> int:
        """The most bytes of tensors beside a state while a function runs."""
        meter = Meter()
        with meter:
            meter.name_state(state)
            meter.begin()
            use()
            live = meter.live()
        return live.peak.device.total - live.steady.device.total

    def main(group: zf.Group) -> tuple[int, int, int]:
        z = compose(group, case, str(tmp_path / "store"))
        state, like = z.init(params), z.init(params)
        return (
            beyond(z, state, lambda: zf.save(tmp_path, state)),
            beyond(z, like, lambda: zf.load(tmp_path, like)),
            sum(x.numel() * 4 for x in params.values()),
        )

    for saving, loading, whole in zf.simulate(2, main):
        assert whole >= 5 * BUCKET
        assert saving <= BUCKET + 20_000
        # A simulated gather holds the parts and the whole once more.
        assert loading <= (3 if stage < 3 else 1) * BUCKET + 20_000


def test_a_checkpoint_without_missed_steps_has_none(tmp_path: Path) -> None:
    """Checkpoints of earlier versions, and converted ones, do not know of missed steps."""

    def loss_fn(params: Any, batch: str) -> Tensor:
        return sum((params[name].sum() for name in batch), torch.zeros(()))

    zero = zf.zero(1, loss_fn, optim.adamw(0.1), zf.process_group())
    state = zero.init({"a": torch.ones(3), "b": torch.ones(2)})
    state, _ = zero.step(state, "ab")
    older = {name: part for name, part in state._asdict().items() if name != "missed"}
    zf.save(tmp_path, older, step=1)
    state, _ = zero.step(state, "a")
    assert state.missed.counts == {"b": 1}
    loaded = zf.load(tmp_path, state).state
    assert loaded.missed.counts == {}
    assert loaded.step == 1
