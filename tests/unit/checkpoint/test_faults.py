"""Checkpoints and a disk that fails, a process that dies, and bytes that change."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zfun as zf
from tests.conftest import FORM
from tests.faulty_files import EVERY, KILL, SHORT, FaultyFiles, Killed, PowerLoss
from zfun import checkpoint
from zfun.checkpoint import latest, read_manifest, step_path, steps
from zfun.checkpoint._remove import stale
from zfun.checkpoint.format import digest_of
from zfun.errors import CheckpointError, CorruptCheckpoint, OptionError, ZfunError
from zfun.files import Files
from zfun.testing import assert_same_bits

pytestmark = pytest.mark.timeout(120)

SMALL = {"chunk_bytes": 4096}


def state_of(value: float, group: zf.Group | None = None) -> dict[str, Any]:
    """A state of a few chunks, sharded over a group if there is one."""
    params = {"w": torch.arange(3000.0) + value, "b": torch.full((5,), value)}
    held: Any = params if group is None else zf.shard(params, group, bucket_bytes=6000)
    return {"params": held, "count": torch.tensor(int(value)), "rate": value}


def save_step(path: Path, step: int, files: Files | None, size: int, **options: Any) -> None:
    def main(group: zf.Group) -> None:
        state = state_of(float(step), group if size > 1 else None)
        zf.save(path, state, step=step, files=files, **SMALL, **options).wait()

    zf.simulate(size, main)


def loaded(path: Path, files: Files | None = None) -> int:
    """Load the newest checkpoint, compare all bits, and return the step."""
    found = zf.load(path, state_of(-1.0), files=files)
    assert_same_bits(found.state, state_of(float(found.step)))
    return found.step


def num_operations(path: Path, size: int, **options: Any) -> int:
    files = FaultyFiles(kinds=EVERY)
    save_step(path, 2, files, size, keep=2, **options)
    return files.count


FORMS = [
    pytest.param(1, False, id="one rank"),
    pytest.param(1, True, id="one rank in the background"),
    pytest.param(2, False, id="two ranks", marks=pytest.mark.slow),
    pytest.param(2, True, id="two ranks in the background", marks=pytest.mark.slow),
]
FAULTS = [
    pytest.param(errno.EIO, id="EIO"),
    pytest.param(errno.ENOSPC, id="ENOSPC", marks=pytest.mark.slow),
    pytest.param(SHORT, id="short"),
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base"
    save_step(path, 0, None, 1)
    save_step(path, 1, None, 1)
    return path


def copies(base: Path, count: int, tmp_path: Path) -> Iterator[tuple[int, Path]]:
    for at in range(count):
        path = tmp_path / f"copy-{at}"
        shutil.copytree(base, path)
        yield at, path
        shutil.rmtree(path)


@pytest.mark.parametrize(("size", "background"), FORMS)
def test_a_process_killed_at_any_operation_loses_no_checkpoint(
    base: Path, tmp_path: Path, size: int, background: bool
) -> None:
    shutil.copytree(base, tmp_path / "count")
    # The other rank waits for the dead one; a save that nothing disturbs takes as long as it takes.
    options = {"background": background, "timeout_s": 0.5}
    count = num_operations(tmp_path / "count", size, background=background)
    assert count > 20
    found = []
    for at, path in copies(base, count, tmp_path):
        files = FaultyFiles(at, KILL, EVERY)
        with pytest.raises((Killed, ZfunError)):
            save_step(path, 2, files, size, keep=2, **options)
        assert files.failed is not None
        found.append(loaded(path))
        # The next job goes on, and removes what the dead one left.
        save_step(path, 3, None, size)
        assert loaded(path) == 3
        assert not stale(path)
    # The new checkpoint comes to be at one operation.
    assert found == sorted(found)
    assert set(found) == {1, 2}


@pytest.mark.parametrize(("size", "background"), FORMS)
def test_a_power_loss_at_any_operation_loses_no_checkpoint(
    base: Path, tmp_path: Path, size: int, background: bool
) -> None:
    """Of all ranks at once: what was not synced is gone, names of directories too."""
    shutil.copytree(base, tmp_path / "count")
    # The other rank waits for the dead one; a save that nothing disturbs takes as long as it takes.
    options = {"background": background, "timeout_s": 0.5}
    count = num_operations(tmp_path / "count", size, background=background)
    found = []
    for at, path in copies(base, count, tmp_path):
        with pytest.raises((Killed, ZfunError)):
            save_step(path, 2, PowerLoss(at), size, keep=2, **options)
        found.append(loaded(path))
        save_step(path, 3, None, size)
        assert loaded(path) == 3
        assert not stale(path)
    assert set(found) == {1, 2}
    # A save that has returned is kept, in a directory that was there and in a new one.
    for path in (base, tmp_path / "new" / "runs" / "gpt"):
        files = PowerLoss()
        save_step(path, 2, files, size, background=background)
        files.lose()
        assert loaded(path) == 2


@pytest.mark.parametrize(("size", "background"), FORMS)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_operation_that_fails_is_an_error_on_all_ranks(
    base: Path, tmp_path: Path, size: int, background: bool, fault: Any
) -> None:
    kinds = ("write", "read") if fault == SHORT else EVERY
    files = FaultyFiles(kinds=kinds)
    shutil.copytree(base, tmp_path / "count")
    options = {"background": background, "timeout_s": 5.0, "keep": 2}
    save_step(tmp_path / "count", 2, files, size, **options)
    for at, path in copies(base, files.count, tmp_path):
        files = FaultyFiles(at, fault, kinds)
        raised: list[bool] = []

        def main(group: zf.Group, path: Path = path, files: Files = files) -> None:
            state = state_of(2.0, group if size > 1 else None)
            try:
                zf.save(path, state, step=2, files=files, **SMALL, **options).wait()
            except CheckpointError as error:
                raised.append(error.path is not None)
            else:
                raised.append(False)

        zf.simulate(size, main)
        assert len(raised) == size
        assert len(set(raised)) == 1, "all ranks raise, or none"
        step = loaded(path)
        # Retention is no part of a save that must succeed.
        assert step == (1 if raised[0] and step == 1 else 2)
        save_step(path, 3, None, size)
        assert loaded(path) == 3
        assert not stale(path)


@pytest.mark.parametrize("fault", [errno.EIO, SHORT])
def test_a_read_that_fails_is_an_error_and_hands_nothing_out(base: Path, fault: Any) -> None:
    kinds = ("read",) if fault == SHORT else EVERY
    directory = base / "step-00000001"
    files = FaultyFiles(kinds=kinds)
    assert loaded(directory, files) == 1
    failed = []
    for at in range(files.count):
        files = FaultyFiles(at, fault, kinds)
        try:
            assert loaded(directory, files) == 1
        except CheckpointError:
            failed.append(at)
    # The manifest is read on after a short read, and the end of a file needs no whole page.
    assert len(failed) == files.count if fault != SHORT else failed
    assert loaded(base) == 1


class Meanwhile(Files):
    """Another process saves and prunes while a file is opened."""

    def __init__(self, path: Path, ending: str, times: int) -> None:
        self._path, self._ending, self._left = path, ending, times
        self._lock = threading.Lock()

    def open(self, path: str, flags: int) -> int:
        with self._lock:
            if path.endswith(self._ending) and self._left:
                self._left -= 1
                step = steps(self._path)[-1].step + 1
                save_step(self._path, step, None, 1, keep=1)
        return super().open(path, flags)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("ending", ["manifest.json", ".safetensors"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_reader_looks_again_while_a_writer_prunes(
    base: Path, size: int, ending: str, times: int
) -> None:
    files = Meanwhile(base, ending, times)

    def main(group: zf.Group) -> int:
        found = zf.load(base, state_of(-1.0, group), files=files)
        assert_same_bits(zf.unshard(found.state["params"]), state_of(float(found.step))["params"])
        return found.step

    save_step(base, 2, None, size)
    assert zf.simulate(size, main) == [2 + times] * size
    with pytest.raises(CheckpointError, match="must have a checkpoint of step 2"):
        zf.load(base, state_of(-1.0), step=2)


TOOLS: dict[str, Callable[[Path], Any]] = {
    "list": lambda path: "damaged" not in checkpoint.inspect(path),
    "verify": lambda path: not checkpoint.verify(path).problems,
    "leaves": lambda path: checkpoint.leaves(path)["count"].load().item() == 2,
    "state": lambda path: checkpoint.training_state(path).params["b"].load()[0] == 2.0,
}


@pytest.mark.parametrize(
    ("ending", "name"),
    [*(("manifest.json", name) for name in TOOLS), *((".safetensors", name) for name in TOOLS)],
)
def test_tools_do_not_take_a_checkpoint_that_a_writer_prunes_for_damaged(
    base: Path, ending: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, left = Files.open, [1]

    def opened(files: Files, path: str, flags: int) -> int:
        if path.endswith(ending) and left:
            left.clear()
            save_step(base, 2, None, 1, keep=1)
        return plain(files, path, flags)

    monkeypatch.setattr(Files, "open", opened)
    if ending == "manifest.json" or name in ("list", "verify"):
        assert TOOLS[name](base)
        return
    # A leaf that is loaded later belongs to the checkpoint that was opened.
    with pytest.raises(CheckpointError, match=r"another process has removed") as caught:
        TOOLS[name](base)
    assert not isinstance(caught.value, CorruptCheckpoint)


def test_a_damaged_manifest_of_the_only_checkpoint_is_damage(tmp_path: Path) -> None:
    save_step(tmp_path, 1, None, 1)
    manifest = Path(step_path(tmp_path)) / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-9])
    with (
        pytest.warns(UserWarning, match="skipped a damaged checkpoint"),
        pytest.raises(CorruptCheckpoint),
    ):
        zf.load(tmp_path, state_of(-1.0))


def test_paths_that_cannot_be_read_are_errors_of_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with pytest.raises(CorruptCheckpoint, match=r"a checkpoint is a directory"):
        read_manifest(tmp_path / "file" / "step-00000001")
    with pytest.raises(CheckpointError, match=r"looking for a directory failed") as caught:
        read_manifest(tmp_path / ("x" * 5000))
    assert caught.value.errno == errno.ENAMETOOLONG
    for use in (zf.save, zf.load):
        with pytest.raises(OptionError, match=r"must be a path; got 'a.x00b'"):
            use("a\0b", state_of(0.0))


@pytest.mark.parametrize("failing", ["open", "sizes"])
def test_retention_removes_nothing_where_the_disk_fails(base: Path, failing: str) -> None:
    """A checkpoint that cannot be read now is not a damaged one."""

    def fail(*args: Any) -> Any:
        if "step-00000001" in str(args):
            raise OSError(errno.EIO, "injected")
        return getattr(Files, failing)(files, *args)

    files = Files()
    setattr(files, failing, fail)
    with pytest.raises(CheckpointError, match="injected"):
        checkpoint.prune(base, keep=1, dry_run=False, files=files)
    assert [step for step, _ in steps(base)] == [0, 1]


def test_a_checkpoint_loads_under_any_name(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base / "step-00000001", tmp_path / "the best")
    assert loaded(tmp_path / "the best") == 1
    # A directory of checkpoints may be named like a step.
    save_step(tmp_path / "step-00000009", 3, None, 1)
    assert loaded(tmp_path / "step-00000009") == 3


@pytest.mark.parametrize("background", [False, True])
def test_a_process_without_memory_for_a_chunk_is_told(
    base: Path, background: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **options: Any) -> Any:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    with monkeypatch.context() as patch:
        patch.setattr("mmap.mmap", refuse)
        for use in (
            lambda: save_step(base, 2, None, 1, background=background),
            lambda: loaded(base),
        ):
            with pytest.raises(CheckpointError, match=r"bytes of memory for each thread") as caught:
                use()
            assert caught.value.errno == errno.ENOMEM
    assert not stale(base)
    assert loaded(base) == 1


def test_a_full_disk_leaves_no_rubbish(base: Path) -> None:
    files = FaultyFiles(1, errno.ENOSPC, ("write",))
    with pytest.raises(CheckpointError, match=r"free room on the disk") as caught:
        save_step(base, 2, files, 1)
    assert caught.value.errno == errno.ENOSPC
    assert not stale(base)
    assert loaded(base) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_FSIZE and SIGKILL of Linux")
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("background", [False, True])
def test_a_process_that_kills_itself_loses_no_checkpoint(
    base: Path, tmp_path: Path, background: bool
) -> None:
    shutil.copytree(base, tmp_path / "count")
    count = num_operations(tmp_path / "count", 1, background=background)
    program = (
        "import os, signal, sys; from pathlib import Path; from tests import faulty_files;"
        "from tests.unit.checkpoint.test_faults import save_step;"
        "faulty_files.FaultyFiles._die = lambda self: os.kill(os.getpid(), signal.SIGKILL);"
        "files = faulty_files.FaultyFiles(int(sys.argv[2]), 'kill', faulty_files.EVERY);"
        f"save_step(Path(sys.argv[1]), 2, files, 1, keep=2, background={background})"
    )
    found = []
    for at, path in copies(base, count, tmp_path):
        if FORM != "search" and at % 4 != 2 * background:
            continue
        done = subprocess.run(
            [sys.executable, "-c", program, str(path), str(at)],
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == -9, done.stderr.decode()
        found.append(loaded(path))
    assert found == sorted(found)
    assert set(found) == {1, 2}


# Bytes that change.


def flipped(path: Path, bit: int) -> Callable[[], None]:
    """Flip one bit of a file; return the function that flips it back."""

    def flip() -> None:
        with path.open("r+b") as file:
            file.seek(bit // 8)
            (byte,) = file.read(1)
            file.seek(bit // 8)
            file.write(bytes([byte ^ (1 << bit % 8)]))

    flip()
    return flip


def flip_bits(path: Path, count: int) -> None:
    directory = Path(step_path(path))
    files = sorted(directory.iterdir())
    sizes = np.array([file.stat().st_size for file in files])
    random = np.random.default_rng(7)
    for index in range(count):
        # Every second flip hits the manifest, which is the smaller file.
        which = int(np.argmin(sizes)) if index % 2 else int(random.integers(len(files)))
        undo = flipped(files[which], int(random.integers(8 * sizes[which])))
        with pytest.raises(CorruptCheckpoint, match=r"manifest|must have the bytes"):
            zf.load(directory, state_of(-1.0))
        undo()
    assert loaded(path) == 1


@pytest.mark.parametrize("checksum", ["xxh64", "sha256"])
def test_a_thousand_flipped_bits_are_found(tmp_path: Path, checksum: str) -> None:
    save_step(tmp_path, 1, None, 1, checksum=checksum)
    assert read_manifest(step_path(tmp_path)).hash == checksum
    flip_bits(tmp_path, 1000)


def test_the_hash_of_a_chunk_is_xxh64() -> None:
    """The numbers are those of xxHash."""
    known = {
        b"": "ef46db3751d8e999",
        b"a": "d24ec4f1a98c6e5b",
        b"abc": "44bc2cf5ad770999",
        b"Nobody inspects the spammish repetition": "fbcea83c8a378bf1",
    }
    for text, digits in known.items():
        assert digest_of("xxh64", np.frombuffer(text, np.uint8)) == digits


def test_a_file_cut_at_any_place_is_found(base: Path) -> None:
    directory = Path(step_path(base))
    for file in sorted(directory.iterdir()):
        whole = file.read_bytes()
        size = len(whole)
        cuts = {0, 1, 7, 8, 9, size // 2, size - 1, *range(4095, size, 4096)}
        cuts |= {at + 1 for at in range(4095, size - 1, 4096)} | {size + 1, size + 4096}
        for cut in sorted(cuts):
            file.write_bytes((whole + bytes(4096))[:cut])
            with pytest.raises(CorruptCheckpoint):
                zf.load(directory, state_of(-1.0))
        file.write_bytes(whole)
    assert loaded(base) == 1


def test_a_missing_file_is_an_error_and_a_damaged_newest_step_is_skipped(base: Path) -> None:
    (base / "step-00000001" / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=r"skipped a damaged checkpoint: .*must have a manifest"):
        found = latest(base)
    assert found is not None
    assert found.step == 0
    (base / "step-00000000" / "00000.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"must be there, because the manifest names it"):
        zf.load(base / "step-00000000", state_of(-1.0))


# A stranger's checkpoint.


class Canary:
    """A pickle that runs code."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self.path,))


def test_files_that_are_no_files_are_refused(base: Path, tmp_path: Path) -> None:
    directory = base / "step-00000001"
    outside = tmp_path / "outside"
    for name in ("manifest.json", "00000.safetensors"):
        file = directory / name
        shutil.copy(file, outside)
        whole = file.read_bytes()
        for kind in ("link", "pipe", "socket", "directory", "pickle"):
            file.unlink()
            server = None
            if kind == "link":
                file.symlink_to(outside)
            elif kind == "pipe":
                os.mkfifo(file)
            elif kind == "socket":
                server = socket.socket(socket.AF_UNIX)
                # The path of a socket is short.
                os.chdir(directory)
                server.bind(name)
            elif kind == "directory":
                file.mkdir()
            else:
                file.write_bytes(pickle.dumps(Canary(tmp_path / "canary")))
            with pytest.raises(CheckpointError):
                zf.load(directory, state_of(-1.0))
            if server is not None:
                server.close()
            file.rmdir() if kind == "directory" else file.unlink()
            file.write_bytes(whole)
    assert not (tmp_path / "canary").exists()
    moved = tmp_path / "moved"
    directory.rename(moved)
    directory.symlink_to(moved)
    with pytest.raises(CheckpointError):
        zf.load(directory, state_of(-1.0))
    assert loaded(base) == 0


def test_a_link_is_never_written_through(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path = tmp_path / "saves"
    path.mkdir()
    (path / ".lock").symlink_to(victim)
    with pytest.raises(CheckpointError, match=r"links are not followed"):
        save_step(path, 1, None, 1)
    assert victim.read_text() == "precious"


def test_reading_opens_only_files_of_the_checkpoint(base: Path) -> None:
    files = FaultyFiles()
    loaded(base, files)
    inside = [str(base / "step-00000001" / name) for name in ("manifest.json", "00000.safetensors")]
    assert sorted(set(files.opened)) == sorted(inside)
    assert read_manifest(step_path(base)).files[0].name == "00000.safetensors"
