"""Checkpoints on object stores: a store in memory, and an S3 server behind a faulty proxy."""

from __future__ import annotations

import contextlib
import errno
import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import zfun as zf
from tests import object_store
from tests.object_store import BUCKET, Proxy
from zfun.checkpoint import latest, steps
from zfun.checkpoint._directory import GIVEN_UP
from zfun.checkpoint._remove import stale
from zfun.cli import main as cli
from zfun.errors import CheckpointError, CorruptCheckpoint, OptionError, ZfunError
from zfun.objects import Objects
from zfun.testing import assert_same_bits

SMALL: dict[str, Any] = {"chunk_bytes": 4096}
FORMS = [
    pytest.param(1, False, id="one rank"),
    pytest.param(1, True, id="one rank in the background"),
    pytest.param(2, False, id="two ranks", marks=pytest.mark.slow),
    pytest.param(2, True, id="two ranks in the background", marks=pytest.mark.slow),
]


class Killed(BaseException):
    """The process is dead."""


class FaultyObjects(Objects):
    """Lets one request fail, counted over all threads.

    Args:
        url: the store.
        at: the number of the request; ``None`` lets none fail.
        fault: the number of an error, or ``None`` for the end of the process.
        after: whether the store does what the request asks for before the failure.
    """

    def __init__(
        self, url: str, at: int | None = None, fault: int | None = None, *, after: bool = False
    ) -> None:
        super().__init__(url, 20.0)
        self.at, self.fault, self.after = at, fault, after
        self.count, self.is_dead = 0, False
        self._guard = threading.Lock()

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._guard:
            if self.is_dead:
                raise Killed
            number, self.count = self.count, self.count + 1
            fails = number == self.at
            self.is_dead = fails and self.fault is None
        if fails and self.after:
            super().call(function, *args, **kwargs)
        if fails and self.fault is not None:
            raise OSError(self.fault, "injected")
        if fails:
            raise Killed
        return super().call(function, *args, **kwargs)


def state_of(value: float, group: zf.Group | None = None) -> dict[str, Any]:
    params = {"w": torch.arange(3000.0) + value, "b": torch.full((5,), value)}
    held: Any = params if group is None else zf.shard(params, group, bucket_bytes=6000)
    return {"params": held, "count": torch.tensor(int(value)), "rate": value}


def save_step(path: str, step: int, size: int = 1, **options: Any) -> None:
    def main(group: zf.Group) -> None:
        state = state_of(float(step), group if size > 1 else None)
        zf.save(path, state, step=step, **{**SMALL, **options}).wait()

    zf.simulate(size, main)


def loaded(path: str) -> int:
    """Load the newest checkpoint, compare all bits, and return the step."""
    found = zf.load(path, state_of(-1.0))
    assert_same_bits(found.state, state_of(float(found.step)))
    return found.step


def names(path: str) -> list[str]:
    """All objects below a path."""
    root = Objects(path)
    file_system = fsspec.filesystem(path.partition("://")[0], use_listings_cache=False)
    return sorted(name.partition("run/")[2] for name in root.call(file_system.find, path))


@pytest.fixture
def root() -> Iterator[str]:
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with object_store.served() as proxy:
        yield proxy


@pytest.fixture
def s3(server: Proxy) -> Iterator[str]:
    server.fail(None)
    path = f"s3://{BUCKET}/run"
    yield path
    server.fail(None)
    Objects(path).remove_all(path)


def counted(root: str, size: int, **options: Any) -> int:
    for step in (0, 1):
        save_step(root, step)
    files = FaultyObjects(root)
    save_step(root, 2, size, keep=2, files=files, **options)
    fsspec.filesystem("memory").store.clear()
    return files.count


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("size", "background"), FORMS)
def test_a_process_killed_at_any_request_loses_no_checkpoint(
    root: str, size: int, background: bool, after: bool
) -> None:
    options = {"background": background, "timeout_s": 0.5}
    count = counted(root, size, **options)
    assert count > 10
    found = []
    for at in range(count):
        for step in (0, 1):
            save_step(root, step)
        files = FaultyObjects(root, at, after=after)
        with contextlib.suppress(Killed, ZfunError):
            save_step(root, 2, size, keep=2, files=files, **options)
            # In the background the number of questions to the store varies.
            assert not files.is_dead
        found.append(loaded(root))
        # The next job goes on, and removes what the dead one left.
        save_step(root, 3, size, keep=1)
        assert loaded(root) == 3
        assert not stale(root)
        assert {name.partition("/")[0] for name in names(root)} == {"step-00000003"}
        fsspec.filesystem("memory").store.clear()
    assert set(found) == {1, 2}


@pytest.mark.parametrize(("size", "background"), FORMS)
def test_a_request_that_fails_is_an_error_on_all_ranks_or_none(
    root: str, size: int, background: bool
) -> None:
    options = {"background": background, "timeout_s": 5.0}
    for at in range(counted(root, size, **options)):
        for step in (0, 1):
            save_step(root, step)
        files = FaultyObjects(root, at, errno.EIO, after=at % 2 == 0)
        raised: list[bool] = []

        def main(group: zf.Group, files: Objects = files) -> None:
            state = state_of(2.0, group if size > 1 else None)
            try:
                zf.save(root, state, step=2, files=files, keep=2, **SMALL, **options).wait()
            except CheckpointError as error:
                raised.append(str(error.path).startswith(root))
            else:
                raised.append(False)

        zf.simulate(size, main)
        assert len(set(raised)) == 1, "all ranks raise, or none"
        step = loaded(root)
        # Retention comes after the commit, and its error is raised too.
        assert step == (1 if raised[0] and step == 1 else 2)
        save_step(root, 3, size)
        assert loaded(root) == 3
        assert not stale(root)
        fsspec.filesystem("memory").store.clear()


def test_of_two_jobs_on_one_path_one_is_refused(root: str) -> None:
    class Meanwhile(Objects):
        """Another job saves before this one publishes."""

        def create(self, path: str, data: bytes) -> None:
            if path.endswith("manifest.json"):
                save_step(root, 7)
            super().create(path, data)

    save_step(root, 1)
    with pytest.raises(CheckpointError, match=r"one job saves to memory.* took over step-00000002"):
        save_step(root, 2, files=Meanwhile(root))
    assert [step for step, _ in steps(root)] == [1, 7]
    assert loaded(root) == 7

    class Before(Objects):
        """Another job saves before this one looks for the files of its ranks."""

        def names(self, path: str) -> list[str]:
            if path.endswith("step-00000008"):
                save_step(root, 9, keep=1)
            return super().names(path)

    with pytest.raises(CheckpointError, match=r"one job saves to memory.* took over step-00000008"):
        save_step(root, 8, files=Before(root))
    assert [step for step, _ in steps(root)] == [9]

    class Racing(Objects):
        """Another job claims the same directory at the same time."""

        def create(self, path: str, data: bytes) -> None:
            Objects(root).create(path, b"another")
            super().create(path, data)

    with pytest.raises(CheckpointError, match=r"one job saves to memory.* took over step-00000010"):
        save_step(root, 10, files=Racing(root))
    assert loaded(root) == 9


def test_a_reader_lists_again_while_a_writer_prunes(root: str) -> None:
    class Meanwhile(Objects):
        """A writer publishes and prunes after each of three lists."""

        left = 3

        def names(self, path: str) -> list[str]:
            found = super().names(path)
            if self.left:
                self.left -= 1
                save_step(root, 5 - self.left, keep=1)
            return found

    save_step(root, 1)
    assert [one.step for one in steps(root, files=Meanwhile(root))] == [5]
    assert zf.load(root, state_of(-1.0), files=Meanwhile(root)).step == 5
    # The last one that was saved stays, whatever its step is.
    save_step(root, 6, keep=1)
    assert zf.load(root, state_of(-1.0), files=Meanwhile(root)).step == 5


@pytest.mark.parametrize("tool", [False, True])
def test_retention_does_not_remove_what_another_job_publishes_meanwhile(
    root: str, tool: bool
) -> None:
    class Meanwhile(Objects):
        """Another job publishes after a list in which step 2 is."""

        # prune() looks first whether there are any.
        left = 2 if tool else 1

        def names(self, path: str) -> list[str]:
            found = super().names(path)
            if path == root and self.get(f"{root}/step-00000002/manifest.json"):
                self.left -= 1
                if not self.left:
                    save_step(root, 9)
            return found

    save_step(root, 1)
    if tool:
        save_step(root, 2)
        zf.checkpoint.prune(root, keep=1, dry_run=False, files=Meanwhile(root))
    else:
        save_step(root, 2, keep=1, files=Meanwhile(root))
    assert [step for step, _ in steps(root)] == [2, 9]


def test_a_leaf_of_a_checkpoint_that_was_removed_says_so(
    root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_step(root, 1)
    leaf = zf.checkpoint.leaves(root)["params.w"]
    plain = Objects.fetch

    def fetch(files: Objects, *args: Any) -> Any:
        files.remove_all(f"{root}/step-00000001")
        return plain(files, *args)

    monkeypatch.setattr(Objects, "fetch", fetch)
    with pytest.raises(CheckpointError, match=r"step-00000001, which another process has removed"):
        leaf.load()


@pytest.mark.parametrize(("mib", "requests"), [(2, 1), (4, 1), (7, 2), (8, 2), (11, 3)])
def test_a_load_reads_an_object_in_even_requests(root: str, mib: int, requests: int) -> None:
    """A short rest belongs to the request before: each request of a store costs a round trip."""
    lengths = []

    class Counting(Objects):
        read_bytes = 4 * 2**20

        def fetch(self, fd: int, memory: Any, num_bytes: int, offset: int) -> Any:
            lengths.append(num_bytes)
            return super().fetch(fd, memory, num_bytes, offset)

    state = {"w": torch.arange(mib * 2**18, dtype=torch.float32)}
    zf.save(root, state, step=1)
    loaded = zf.load(root, state, files=Counting(root)).state
    assert torch.equal(loaded["w"], state["w"])
    assert len(lengths) == requests
    assert max(lengths) - min(lengths) <= 2 * 2**20  # the last chunk is short


def test_a_save_that_was_given_up_stays_given_up(root: str) -> None:
    """A writer that comes back after a later save has removed its files cannot publish."""
    save_step(root, 1)
    late = Objects(root)
    late.create(f"{root}/step-00000002/.saving", b"token")
    late.put(f"{root}/step-00000002/00000.safetensors", b"half")
    assert stale(root) == [f"{root}/step-00000002"]
    assert "unfinished: step-00000002" in zf.checkpoint.inspect(root)
    save_step(root, 3)
    assert names(root)[2:3] == ["step-00000002/manifest.json"]
    with pytest.raises(FileExistsError):
        late.create(f"{root}/step-00000002/manifest.json", b"{}")
    with pytest.raises(CorruptCheckpoint, match=r"got that of a save that did not end"):
        zf.checkpoint.read_manifest(f"{root}/step-00000002")
    assert [step for step, _ in steps(root)] == [1, 3]
    # The step can be saved again, and retention removes what is left.
    save_step(root, 2)
    assert [step for step, _ in steps(root)] == [1, 2, 3]
    assert loaded(f"{root}/step-00000002.1") == 2
    save_step(root, 4, keep=1)
    assert {name.partition("/")[0] for name in names(root)} == {"step-00000004"}


def _flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("name", ["00000.safetensors", "manifest.json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(_flipped, id="flipped"),
        pytest.param(lambda data: data[: len(data) // 2], id="half"),
        pytest.param(lambda data: b"", id="empty"),
        pytest.param(lambda data: data + b"x", id="longer"),
    ],
)
def test_a_damaged_object_hands_nothing_out(
    root: str, name: str, damage: Callable[[bytes], bytes]
) -> None:
    save_step(root, 1)
    files = Objects(root)
    path = f"{root}/step-00000001/{name}"
    data = files.get(path)
    assert data is not None
    files.put(path, damage(data))
    with pytest.raises(CorruptCheckpoint, match=r"memory://bucket/run/step-00000001") as caught:
        zf.load(f"{root}/step-00000001", state_of(-1.0))
    assert caught.value.path == path


def test_a_payload_that_is_missing_is_damage(root: str) -> None:
    save_step(root, 1)
    Objects(root).remove(f"{root}/step-00000001/00000.safetensors")
    with pytest.raises(CorruptCheckpoint, match=r"must be there, because the manifest names it"):
        zf.load(root, state_of(-1.0))
    found = zf.checkpoint.verify(root)
    assert "must be there" in found.problems[0].message


def test_addresses_are_checked_where_they_enter(tmp_path: Path) -> None:
    state = state_of(1.0)
    with pytest.raises(OptionError, match=r"two slashes and is a str.* write 's3://bucket/run'"):
        zf.save(Path("s3://bucket/run"), state, step=1)
    with pytest.raises(OptionError, match=r"two slashes"):
        zf.load("s3:/bucket/run", state)
    with pytest.raises(OptionError, match=r"begins with a protocol of fsspec.* got nothing://x"):
        zf.load("nothing://x", state)
    with pytest.raises(OptionError, match=r"begins with a protocol of fsspec.* got zip://x"):
        zf.load("zip://x", state)
    with pytest.raises(OptionError, match=r"files= has the operations of the store"):
        zf.save("memory://bucket/run", state, step=1, files=zf.files.Files())
    with pytest.raises(CheckpointError, match=r"memory://bucket/none must have a checkpoint"):
        zf.load("memory://bucket/none", state)
    # Checkpoints of a disk load by address, and the other way round.
    save_step(str(tmp_path / "disk"), 1)
    assert loaded(f"file://{tmp_path}/disk") == 1
    save_step(f"file://{tmp_path}/store", 2)
    assert loaded(str(tmp_path / "store")) == 2


def test_a_store_without_conditions_is_looked_at_before(root: str) -> None:
    class Plain(Objects):
        """A store that has no conditional writes."""

        def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("mode") == "create":
                raise OSError(errno.ENOSYS, "not implemented")
            return super().call(function, *args, **kwargs)

    save_step(root, 1, files=Plain(root))
    assert loaded(root) == 1
    with pytest.raises(FileExistsError):
        Plain(root).create(f"{root}/step-00000001/manifest.json", b"{}")


def test_an_upload_in_parts_is_whole_or_absent(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers of a file fill the parts out of order."""
    monkeypatch.setattr("zfun.objects._upload.PART_BYTES", 5000)
    monkeypatch.setattr("zfun.objects._upload.MIN_PARTS", 1)
    save_step(root, 1)
    assert loaded(root) == 1
    for at in range(4, 8):
        files = FaultyObjects(root, at, errno.EIO)
        with pytest.raises(CheckpointError, match="injected"):
            save_step(root, 2, files=files)
        assert loaded(root) == 1
    # Python 3.13 warns of a stream that garbage cannot close because its bytes are in use.
    gc.collect()


# An S3 server, with requests over sockets.


def test_a_checkpoint_goes_to_s3_and_back_into_another_composition(
    s3: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr("zfun.objects._upload.PART_BYTES", 5 * 2**20)  # the least that S3 takes
    monkeypatch.setattr("zfun.objects._upload.MIN_PARTS", 1)
    numel = 2_100_000
    params = {"w": torch.arange(float(numel)), "b": torch.ones(3)}

    def loss(params: Any, batch: torch.Tensor) -> torch.Tensor:
        return (params["w"] * batch).square().mean() + params["b"].sum()

    def first(group: zf.Group) -> Any:
        zero = zf.zero(3, loss, zf.optim.sgd(0.1, momentum=0.9), group)
        state = zero.init(params)
        for _ in range(3):
            state, _ = zero.step(state, torch.ones(1))
            saving = zf.save(s3, state, keep=2, background=True)
        saving.wait()
        return zero.params(state)

    def second(group: zf.Group) -> Any:
        zero = zf.zero(1, loss, zf.optim.sgd(0.1, momentum=0.9), group)
        like = zero.init({"w": torch.zeros(numel), "b": torch.zeros(3)})
        found = zf.load(s3, like)
        assert found.step == 3
        return zero.params(found.state)

    expected = zf.simulate(2, first)[0]
    for found in zf.simulate(3, second):
        assert_same_bits(found, expected)
    assert [step for step, _ in steps(s3)] == [2, 3]
    assert latest(s3) == (3, f"{s3}/step-00000003")
    source = zf.checkpoint.training_state(s3).params
    assert_same_bits(source["w"].load(), expected["w"])

    assert cli(["ckpt", "inspect", s3]) == 0
    assert cli(["ckpt", "verify", "--all", s3]) == 0
    assert "step-00000002: good" in capsys.readouterr().out
    assert cli(["ckpt", "prune", "--keep", "1", "--yes", s3]) == 0
    assert [step for step, _ in steps(s3)] == [3]
    assert cli(["ckpt", "export", s3, str(tmp_path / "model")]) == 0
    assert_same_bits(zf.sources.huggingface(tmp_path / "model")["w"].load(), expected["w"])


def test_the_client_repeats_what_fails_once(s3: str, server: Proxy) -> None:
    """Also the commit whose answer was lost, which the store then refuses to repeat."""
    claim, payload, commit = 0, 1, 2
    cases = [(commit, "lost answer"), (commit, "drop"), (payload, "500"), (claim, "lost answer")]
    for step, (at, fault) in enumerate(cases):
        server.fail(at, fault, num_failing=1, only=("PUT",))
        save_step(s3, step)
        assert server.count == 4
        server.fail(None)
        assert loaded(s3) == step
    for fault in ("truncated", "drop", "500"):
        server.fail(1, fault, num_failing=1, only=(f"GET /{BUCKET}/run/step",))
        assert loaded(s3) == 3
        assert server.count > 2


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param("drop", marks=pytest.mark.slow),
        pytest.param("500", marks=pytest.mark.slow),
        "stalled",
    ],
)
def test_a_store_that_fails_for_good_is_an_error_in_time(
    s3: str, server: Proxy, fault: str, background: bool
) -> None:
    save_step(s3, 1)
    for at in range(1 if fault == "stalled" else 0, 3):
        server.fail(at, fault, only=("PUT",))
        start = time.monotonic()
        # Another step each time: a request that was given up may still arrive, and claim its name.
        with pytest.raises(CheckpointError, match=r"s3://bucket/run.*look at the"):
            save_step(s3, 2 + at, background=background, timeout_s=0.5)
        server.fail(None)
        assert time.monotonic() - start < 10
        assert loaded(s3) == 1


def test_a_bucket_that_is_not_there_is_an_error(server: Proxy) -> None:
    server.fail(None)
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run.*name of the bucket"):
        save_step("s3://nowhere/run", 1)
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run must have a checkpoint"):
        loaded("s3://nowhere/run")
    assert len(GIVEN_UP) < 100
