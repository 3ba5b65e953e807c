"""The store on a disk: files, faults, the end of the process, and the options."""

from __future__ import annotations

import errno
import functools
import gc
import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zfun as zf
from tests import models
from tests.faulty_files import SHORT, FaultyFiles
from zfun.errors import OffloadError, OptionError
from zfun.files import Files
from zfun.stores import NvmeStore, clean, nvme
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(60)

CPU = torch.device("cpu")
# Small transfers, so that a tensor takes several.
SMALL = {"block_size": 4096, "queue_depth": 2, "num_threads": 2}


def get(handle: zf.stores.Stored) -> Tensor:
    return handle.get(CPU).wait()


def failure_of(fn: Callable[..., Any], *args: Any) -> OffloadError | None:
    """The error of a store in a call, if any."""
    try:
        fn(*args)
    except OffloadError as error:
        return error
    return None


def runs(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


# Files.


def test_the_file_of_a_run_lies_in_a_directory_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "zfun-nvme-other").mkdir()
    (tmp_path / "zfun-nvme-other" / "data").write_bytes(b"of another run")
    first, second = nvme(tmp_path, **SMALL), nvme(tmp_path, **SMALL)
    assert runs(tmp_path) == ["zfun-nvme-other"]
    handles = [store.put(torch.ones(3), "state") for store in (first, second)]
    assert len(runs(tmp_path)) == 3
    assert first.file != second.file
    for store in (first, second):
        assert store.file is not None
        assert Path(store.file).stat().st_mode & 0o077 == 0
        assert Path(store.file).parent.stat().st_mode & 0o077 == 0
    first.close()
    assert len(runs(tmp_path)) == 2
    assert_same_bits(get(handles[1]), torch.ones(3))
    with pytest.raises(OffloadError, match=r"got a use of a closed store"):
        get(handles[0])
    second.close()
    assert (tmp_path / "zfun-nvme-other" / "data").read_bytes() == b"of another run"


def test_a_store_that_is_dropped_removes_the_file(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL)
    handle = store.put(torch.ones(3000), "state")
    handle.flush()
    del store, handle
    gc.collect()
    assert runs(tmp_path) == []


def test_the_region_of_a_dropped_handle_is_used_again(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL)
    values = [torch.full((5000,), float(i)) for i in range(4)]
    old = [store.put(value, "state") for value in values]
    for _ in range(5):
        # Old and new values are on the disk at the same time, as in a step.
        new = [store.put(get(handle) + 1, "state") for handle in old]
        for handle, value in zip(old, values, strict=True):
            assert_same_bits(get(handle), value)
        values = [value + 1 for value in values]
        old = new
    # A thread may hold the region of a transfer for a moment after the transfer.
    most = (2 * len(values) + 1 + SMALL["num_threads"]) * 5 * 4096
    assert store.file_bytes <= most
    del new, handle
    old.clear()
    for _ in range(9):
        # Neighbours that are free become one.
        whole = store.put(torch.zeros(2 * len(values) * 5 * 1024), "state")
        assert_same_bits(get(whole), torch.zeros(2 * len(values) * 5 * 1024))
        del whole
    assert store.file_bytes <= 3 * most


def test_memory_to_read_into_is_used_again(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, buffer_size=5000)
    handle = store.put(torch.ones(5000), "state")
    addresses = {get(handle).data_ptr() for _ in range(4)}
    assert len(addresses) == 1
    assert addresses.pop() % 4096 == 0
    first, second = get(handle), get(handle)
    first.zero_()
    assert_same_bits(second, torch.ones(5000))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
def test_twice_buffer_count_buffers_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counted(mmap.mmap):
        count = 0

        def __new__(cls, *args: Any, **kwargs: Any) -> Counted:
            cls.count += 1
            return super().__new__(cls, *args, **kwargs)

    store = nvme(tmp_path, buffer_count=2, pin_memory=False)
    handles = [store.put(torch.ones(1 << 12), "state") for _ in range(20)]
    store.flush()
    monkeypatch.setattr(mmap, "mmap", Counted)
    counts = [0]
    for num_reads in (20, 20, 3):
        found = [get(handle) for handle in handles[:num_reads]]
        counts.append(Counted.count)
        del found
    assert counts == [0, 20, 20 + 16, 20 + 16]


def test_tensors_of_max_in_cpu_elements_stay_in_memory(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, max_in_cpu=100)
    first = store.put(torch.ones(60), "state")
    assert store.file is None
    second = store.put(torch.ones(60), "state")
    assert store.file_bytes == 4096
    for handle in (first, second):
        get(handle).zero_()
        assert_same_bits(get(handle), torch.ones(60))
    del first, handle
    third = store.put(torch.ones(100), "state")
    assert store.file_bytes == 4096
    assert_same_bits(get(third), torch.ones(100))


@pytest.mark.parametrize("max_in_cpu", range(0, 321, 64))
def test_ranks_may_keep_different_parts_in_memory(tmp_path: Path, max_in_cpu: int) -> None:
    def train(group: zf.Group, store: Any) -> Any:
        loss_fn = lambda params, batch: (params["w"] * batch).square().sum()
        offload = zf.stores.Offload(optimizer=store)
        z = zf.zero(1, loss_fn, zf.optim.adamw(0.1), group, offload=offload)
        state = z.init({"w": torch.ones(60)})
        for _ in range(3):
            state, _ = z.step(state, torch.linspace(0, 1, 60))
        return z.params(state)

    store = nvme(tmp_path, **SMALL, max_in_cpu=max_in_cpu)
    assert_same_bits(zf.simulate(2, train, store), zf.simulate(2, train, zf.stores.host()))


def test_a_state_on_the_disk_may_be_in_memory_after_the_next_step(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, max_in_cpu=400)
    optimizer = zf.offload(zf.optim.adamw(0.1), store)
    others = [store.put(torch.ones(100), "state") for _ in range(4)]

    def update(grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
        others.clear()
        return optimizer.update(grads, state, params)

    zf.transforms.probe(zf.optim.optimizer(optimizer.init, update))


def test_few_tensors_are_on_the_way_to_the_disk(tmp_path: Path) -> None:
    gate = threading.Event()

    class Slow(Files):
        def write(self, fd: int, buffer: Any, offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                gate.wait(20)
            return super().write(fd, buffer, offset)

    store = nvme(tmp_path, **SMALL, buffer_count=2, files=Slow())
    handles = [store.put(torch.full((3000,), float(i)), "state") for i in range(2)]
    done = threading.Event()

    def put() -> None:
        handles.append(store.put(torch.full((3000,), 2.0), "state"))
        done.set()

    thread = threading.Thread(target=put)
    thread.start()
    assert not done.wait(0.2)
    gate.set()
    assert done.wait(20)
    thread.join()
    for i, handle in enumerate(handles):
        assert_same_bits(get(handle), torch.full((3000,), float(i)))


def test_transfers_of_several_threads_are_counted() -> None:
    store = zf.stores.host()

    def count() -> None:
        for _ in range(100_000):
            store.crossed("put", "state", 1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert store.bytes_moved() == 400_000


def test_transfers_are_counted(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, log=True)
    handle = store.put(torch.ones(3), "state")
    get(handle)
    assert store.bytes_moved("put", "state") == store.bytes_moved("get", "state") == 12
    assert [entry.kind for entry in store.log or ()] == ["put", "get"]
    assert repr(handle) == f"Stored(state, 3 x torch.float32, nvme({str(tmp_path)!r}))"


def test_another_process_has_a_file_of_its_own(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, checksum=True)
    handle = store.put(torch.ones(3), "state")
    other: NvmeStore = pickle.loads(pickle.dumps(store))
    assert_same_bits(get(other.put(torch.zeros(3), "state")), torch.zeros(3))
    assert other.file != store.file
    assert_same_bits(get(handle), torch.ones(3))


def test_abstract_tensors_take_no_room(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL)

    def make(group: Any) -> Any:
        offload = zf.stores.Offload(params=store, grads=store, optimizer=store)
        return zf.zero(3, models.mlp_loss, zf.optim.adamw(0.1), group, offload=offload)

    batch = models.mlp_batches(1, 1)[0][0]
    assert zf.planner.live_bytes(make, models.mlp(), batch, 2)
    assert store.file is None


# Faults.


def loss_fn(params: Any, batch: Tensor) -> Tensor:
    return (batch @ params["w"] + params["b"]).square().mean()


PARAMS = {"w": torch.linspace(-1, 1, 1500).reshape(30, 50), "b": torch.ones(50)}
BATCH = torch.linspace(0, 2, 60).reshape(2, 30)


def zero_of(store: Any, group: Any, parts: tuple[str, ...], stage: int = 3, **options: Any) -> Any:
    return zf.zero(
        stage,
        loss_fn,
        zf.optim.adamw(0.1),
        group,
        bucket_bytes=4000,
        offload=zf.stores.Offload(**dict.fromkeys(parts, store)),
        **options,
    )


def bits(state: Any) -> Any:
    """All tensors of a state, fetched from the stores."""
    leaves = zf.tree.leaves((state.params, state.opt_state))
    return [
        get(leaf).clone()
        if isinstance(leaf, zf.stores.Stored)
        else leaf.clone()
        if isinstance(leaf, Tensor)
        else leaf
        for leaf in leaves
    ]


ALL = ("params", "grads", "optimizer")
FAULTS = {"ENOSPC": errno.ENOSPC, "EIO": errno.EIO, "short": SHORT}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("parts", [ALL, ("optimizer",)], ids="+".join)
def test_a_step_that_fails_leaves_the_state_wherever_the_fault_is(
    parts: tuple[str, ...], fault: str, tmp_path: Path
) -> None:
    def main(group: Any) -> int:
        files = FaultyFiles(fault=FAULTS[fault])
        if fault == "short":
            files.kinds = ("read", "write")
        store = nvme(tmp_path, **SMALL, files=files)
        z = zero_of(store, group, parts)
        state, _ = z.step(z.init(PARAMS), BATCH)
        plain = zero_of(None, group, parts)
        expected = plain.init(PARAMS)
        for _ in range(2):
            expected, _ = plain.step(expected, BATCH)
        for n in range(1000):
            before = bits(state)
            files.at, files.failed = files.count + n, None
            after: list[Any] = []
            error = failure_of(lambda: after.append(z.step(state, BATCH)[0]))
            files.at = None
            if error is None:
                assert not files.failed
                break
            assert files.failed
            assert_same_bits(bits(state), before)
            assert error.path == store.file
            assert error.errno == (errno.EIO if fault == "short" else FAULTS[fault])
            assert (error.rank, error.step) == (0, 1)
            assert error.leaf
            assert f"[leaf {error.leaf}, rank 0]" in str(error)
        # The step that no fault disturbs starts from the same state and has the same bits.
        assert_same_bits(z.params(after[0]), plain.params(expected))
        return n

    (count,) = zf.simulate(1, main)
    assert count >= 4 * len(parts)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["read", "write"])
def test_no_rank_commits_a_step_that_fails_on_another(
    kind: str, stage: int, tmp_path: Path
) -> None:
    parts = ALL if stage == 3 else ("grads", "optimizer")
    all_files = [FaultyFiles(kinds=(kind,)) for _ in range(2)]

    def train(group: Any, n: int | None) -> Any:
        files = all_files[group.rank]
        store = nvme(tmp_path, **SMALL, files=files)
        z = zero_of(store, group, parts, stage)
        state, _ = z.step(z.init(PARAMS), BATCH)
        before = bits(state)
        files.at = files.count + n if group.rank == 1 and n is not None else None
        try:
            z.step(state, BATCH)
        finally:
            files.at = None
            assert_same_bits(bits(state), before)

    for n in (0, 1, 3):
        for files in all_files:
            files.at = None
        with pytest.raises(OffloadError, match=rf"a {kind} of \d+ bytes.*rank 1\]"):
            zf.simulate(2, train, n)


@pytest.mark.parametrize("fault", FAULTS)
def test_an_init_that_fails_says_where_and_leaves_no_file(fault: str, tmp_path: Path) -> None:
    def main(group: Any) -> int:
        for n in range(1000):
            files = FaultyFiles(n, FAULTS[fault])
            if fault == "short":
                files.kinds = ("read", "write")
            store = nvme(tmp_path, **SMALL, files=files)
            error = failure_of(zero_of(store, group, ALL).init, PARAMS)
            store.close()
            assert runs(tmp_path) == []
            if error is None and not files.failed:
                return n
            if error is None:
                # A file system without locks is no fault; nor is a short write of the first probe.
                assert files.failed == "lock" or (fault == "short" and n == 0)
                continue
            assert error.rank == 0
            assert str(tmp_path) in (error.path or "")
            assert error.errno
        raise AssertionError("every operation fails")

    (count,) = zf.simulate(1, main)
    assert count >= 4


def test_too_little_room_is_refused_at_init(tmp_path: Path) -> None:
    class Full(Files):
        def free_bytes(self, path: str) -> int:
            return 5000

    store = nvme(tmp_path, **SMALL, files=Full())
    with pytest.raises(OffloadError, match=r"8192 more bytes are needed, and 5000 are free") as hit:
        zf.simulate(1, lambda group: zero_of(store, group, ALL).init(PARAMS))
    assert hit.value.errno == errno.ENOSPC
    with pytest.raises(OffloadError, match=r"free room on the disk"):
        store.reserve(10**6)
    nvme(tmp_path, **SMALL).reserve(10**6)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    program = f"""
import resource, torch, zfun as zf
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
store = zf.stores.nvme({str(tmp_path)!r})
kept = store.put(torch.ones(2000), "state")
try:
    store.put(torch.ones(2000), "state")
except zf.errors.OffloadError as error:
    print(error)
assert kept.get(torch.device("cpu")).wait().sum() == 2000
"""
    printed = python(program)
    assert "8192 more bytes cannot be reserved" in printed
    assert "ulimit -f" in printed


def test_too_little_memory_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    """The system refuses the memory to read into; the tensor stays on the disk."""
    program = f"""
import resource, torch, zfun as zf
store = zf.stores.nvme({str(tmp_path)!r})
kept = store.put(torch.ones(2**26), "state")
kept.flush()
no_limit = resource.getrlimit(resource.RLIMIT_DATA)
resource.setrlimit(resource.RLIMIT_DATA, (2**20, no_limit[1]))
try:
    with zf.stores.locating(leaf="blocks.0.w", rank=0):
        kept.get(torch.device("cpu"))
except zf.errors.OffloadError as error:
    found = str(error)
resource.setrlimit(resource.RLIMIT_DATA, no_limit)
print(found)
assert kept.get(torch.device("cpu")).wait().sum() == 2**26
"""
    printed = python(program)
    assert "keep state on the disk; there is no memory to read 268435456 bytes into" in printed
    assert "lower bucket_bytes or buffer_count" in printed
    assert "[leaf blocks.0.w, rank 0]" in printed


def test_other_bytes_than_those_written_are_found(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, checksum=True)
    handle = store.put(torch.ones(5000), "params")
    handle.flush()
    assert store.file is not None
    with open(store.file, "r+b", buffering=0) as file:  # noqa: PTH123
        file.seek(9000)
        file.write(b"\x55")
    with pytest.raises(OffloadError, match=r"keep params .* at 8192 of the file are not those"):
        get(handle)


def test_an_error_of_a_write_belongs_to_the_handle(tmp_path: Path) -> None:
    files = FaultyFiles(kinds=("write",))
    store = nvme(tmp_path, **SMALL, files=files)
    good = store.put(torch.ones(5), "state")
    store.flush()
    files.at = files.count
    bad = store.put(torch.ones(5), "state")
    for use in (bad.flush, functools.partial(get, bad), store.flush):
        with pytest.raises(OffloadError, match=r"a write of 4096 bytes at 4096 failed"):
            use()
    store.flush()
    assert_same_bits(get(good), torch.ones(5))
    del bad, use
    assert_same_bits(get(store.put(torch.zeros(5), "state")), torch.zeros(5))


def test_free_room_that_is_not_known_is_an_error_of_the_store(tmp_path: Path) -> None:
    class Lost(Files):
        def free_bytes(self, path: str) -> int:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    store = nvme(tmp_path, **SMALL, files=Lost())
    with pytest.raises(OffloadError, match=r"the free room is not known") as hit:
        store.put(torch.ones(5), "state")
    assert (hit.value.errno, hit.value.path) == (errno.EIO, store.file)


def test_a_put_waits_for_a_write_no_longer_than_the_time_limit(tmp_path: Path) -> None:
    gate = threading.Event()

    class Stuck(Files):
        def write(self, fd: int, buffer: Any, offset: int) -> int:
            if threading.current_thread() is not threading.main_thread():
                gate.wait(20)
            return super().write(fd, buffer, offset)

    store = nvme(tmp_path, **SMALL, buffer_count=1, timeout_s=1.0, files=Stuck())
    handle = store.put(torch.ones(5), "state")
    start = time.monotonic()
    with pytest.raises(OffloadError, match=r"the disk did not answer in 1 s"):
        store.put(torch.ones(5), "state")
    assert time.monotonic() - start < 1.8
    gate.set()
    assert_same_bits(get(handle), torch.ones(5))


def test_a_disk_that_does_not_answer_is_an_error(tmp_path: Path) -> None:
    gate = threading.Event()

    class Stuck(Files):
        def read(self, fd: int, buffer: Any, offset: int) -> int:
            gate.wait(20)
            return super().read(fd, buffer, offset)

    store = nvme(tmp_path, **SMALL, timeout_s=0.2, files=Stuck())
    handle = store.put(torch.ones(5), "state")
    with pytest.raises(OffloadError, match=r"the disk did not answer in 0\.2 s") as hit:
        get(handle)
    assert hit.value.errno == errno.ETIMEDOUT
    gate.set()
    assert_same_bits(get(handle), torch.ones(5))


# File systems.


class RefusedFlag(FaultyFiles):
    def open(self, path: str, flags: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().open(path, flags)


class RefusedWrite(FaultyFiles):
    def open(self, path: str, flags: int) -> int:
        self.is_direct = bool(flags & os.O_DIRECT)
        return super().open(path, flags)

    def write(self, fd: int, buffer: Any, offset: int) -> int:
        if self.is_direct:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return super().write(fd, buffer, offset)


class NoLocks(Files):
    def lock(self, fd: int) -> bool:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="the system has no direct transfers")
@pytest.mark.parametrize("refusal", [RefusedFlag, RefusedWrite])
def test_without_direct_transfers_one_notice_is_given(
    refusal: Callable[[], FaultyFiles], tmp_path: Path
) -> None:
    files = refusal()
    store = nvme(tmp_path, **SMALL, files=files)
    with pytest.warns(UserWarning, match=r"refuses direct transfers \(O_DIRECT\)"):
        first = store.put(torch.arange(5000), "state")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        second = store.put(torch.arange(3), "state")
    assert store.is_direct is False
    assert_same_bits([get(first), get(second)], [torch.arange(5000), torch.arange(3)])
    # The system reports some errors of its own buffers in a sync only.
    files.kinds, files.at, files.count = ("sync",), 0, 0
    with pytest.raises(OffloadError, match=r"a sync failed with"):
        second.flush()


# The end of a process.


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


PUT = """
import os, sys, torch, zfun as zf
store = zf.stores.nvme({path!r})
handle = store.put(torch.ones(5000), "state")
"""


def test_the_end_of_a_process_removes_the_file(tmp_path: Path) -> None:
    assert python(PUT.format(path=str(tmp_path)) + "print(os.listdir(store.path))").count("zfun-")
    assert runs(tmp_path) == []


@pytest.mark.slow
def test_a_fork_neither_uses_nor_removes_the_file_of_the_process(tmp_path: Path) -> None:
    printed = python(
        PUT.format(path=str(tmp_path))
        + """
pid = os.fork()
if not pid:
    try:
        handle.get(torch.device("cpu")).wait()
    except zf.errors.ForkError as error:
        print(error, flush=True)
    sys.exit(0)
assert os.waitpid(pid, 0)[1] == 0
assert handle.get(torch.device("cpu")).wait().sum() == 5000
"""
    )
    assert "a store on a disk belongs to the process that made it" in printed
    assert runs(tmp_path) == []


def test_clean_removes_the_files_of_dead_processes_only(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL)
    handle = store.put(torch.ones(5000), "state")
    live = runs(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", PUT.format(path=str(tmp_path)) + "handle.flush(); os.abort()"],
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.wait(60) == -signal.SIGABRT
    (dead,) = set(runs(tmp_path)) - set(live)
    # Directories that zfun did not make.
    for name in ("checkpoint", "zfun-nvme-of-a-user"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").write_text("keep")
    (tmp_path / "zfun-nvme-link").symlink_to(tmp_path / "checkpoint")
    empty = f"zfun-nvme-{socket.gethostname()}-1-empty"
    for name in (empty, "zfun-nvme-another-host-1-empty"):
        (tmp_path / name).mkdir()

    cleaned = clean(tmp_path)
    removed = [str(tmp_path / name) for name in (dead, empty)]
    assert sorted(cleaned.removed) == sorted(removed)
    assert cleaned.num_bytes >= 20000
    assert cleaned.in_use == (str(tmp_path / live[0]),)
    stay = ["zfun-nvme-another-host-1-empty", "zfun-nvme-link", "zfun-nvme-of-a-user"]
    assert [Path(path).name for path in cleaned.unknown] == stay
    assert runs(tmp_path) == sorted([*live, "checkpoint", *stay])
    assert_same_bits(get(handle), torch.ones(5000))


def test_clean_may_come_between_a_new_file_and_the_lock(tmp_path: Path) -> None:
    class Slow(Files):
        num_locks = 0

        def lock(self, fd: int) -> bool:
            self.num_locks += 1
            # clean() has the lock of the first file, and removes the file in a moment.
            return self.num_locks > 1 and super().lock(fd)

    store = nvme(tmp_path, **SMALL, files=Slow())
    handle = store.put(torch.ones(5), "state")
    assert store.file is not None
    cleaned = clean(tmp_path)
    assert len(cleaned.removed) == 1
    assert cleaned.in_use == (str(Path(store.file).parent),)
    assert_same_bits(get(handle), torch.ones(5))


@pytest.mark.filterwarnings("ignore:the file system of")
def test_a_closed_store_syncs_no_file(tmp_path: Path) -> None:
    # The next file that the process opens may have the number of the closed one.
    synced: list[int] = []

    class Buffered(RefusedFlag):
        def sync(self, fd: int) -> None:
            synced.append(fd)

    store = nvme(tmp_path, **SMALL, files=Buffered())
    handle = store.put(torch.ones(5), "state")
    store.close()
    for flush in (store.flush, handle.flush):
        with pytest.raises(OffloadError, match=r"got a use of a closed store"):
            flush()
    assert not synced


def test_a_file_system_without_locks_works(tmp_path: Path) -> None:
    store = nvme(tmp_path, **SMALL, files=NoLocks())
    assert_same_bits(get(store.put(torch.ones(5), "state")), torch.ones(5))


# Options.


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"block_size": 1000}, r"block_size of nvme\(\) must be a multiple of 4096"),
        ({"block_size": 2**30, "queue_depth": 2}, r"must be at most 2\*\*30"),
        ({"num_threads": 0}, r"num_threads of nvme\(\) must be an integer"),
        ({"thread_count": 2}, r"no option 'thread_count'"),
        ({"timeout_s": 0}, r"timeout_s"),
        ({"files": 3}, r"files of nvme\(\)"),
        pytest.param(
            {"pin_memory": True},
            r"got a machine without one; leave pin_memory out",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device"),
        ),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused(options: Any, match: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=match):
        nvme(tmp_path, **options)


def test_a_path_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "missing", tmp_path / "file"):
        with pytest.raises(OptionError, match=r"must be a directory that you may write to; got '/"):
            nvme(path)
        with pytest.raises(OptionError, match=r"zfun clean takes the directory"):
            clean(path)
