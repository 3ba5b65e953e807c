"""Long runs: kills under torchrun, thousands of steps, a clock that jumps, a disk that refuses.

    python -m tests.faults.programs.endurance torchrun KILLS SEED
    python -m tests.faults.programs.endurance steps STEPS
    python -m tests.faults.programs.endurance clock STEPS
    python -m tests.faults.programs.endurance disk

Each prints its counts and the promises that were broken.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import zfun as zf
from tests.distributed import processes
from tests.faults.programs import soak
from tests.faults.programs.runs import EXAMPLES, Plan, result_of, steps_in, unbroken
from tests.faulty_files import EVERY, FaultyFiles
from zfun.files import Files
from zfun.testing import same_bits

Result = tuple[str, list[str]]


@contextlib.contextmanager
def torchrun(folder: Path, plan: Plan, size: int, restarts: int) -> Iterator[subprocess.Popen[str]]:
    """Start a run of examples/train.py; the end of the context kills what is left."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--standalone", "--max-restarts", str(restarts), str(EXAMPLES / "train.py")]
    command += plan.arguments(folder / "checkpoints")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    launcher = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        yield launcher
    finally:
        for process in [*children_of(launcher.pid), launcher.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        launcher.communicate()


def children_of(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(word) for word in path.read_text().split()] if path.exists() else []


def kills(count: int, seed: int, folder: Path) -> Result:
    """Kill random ranks of torchrun at random times, until a number of kills; compare the end."""
    chance, plan = random.Random(seed), Plan(steps=20 * count, save_every=4)
    done, wrong = 0, list[str]()
    text = folder / "output"
    with text.open("w") as output, torchrun(folder, plan, 2, count) as launcher:
        assert launcher.stdout is not None
        os.set_blocking(launcher.stdout.fileno(), False)
        known: set[int] = set()
        while launcher.poll() is None:
            with contextlib.suppress(OSError, TypeError):
                output.write(launcher.stdout.read() or "")
            ranks = children_of(launcher.pid)
            fresh = [pid for pid in ranks if pid not in known]
            if done < count and len(fresh) == 2:
                # While the ranks import, meet, load, train or save.
                time.sleep(chance.uniform(0.5, 7.0))
                known.update(fresh)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(chance.choice(fresh), signal.SIGKILL)
                    done += 1
            time.sleep(0.05)
        with contextlib.suppress(OSError, TypeError):
            output.write(launcher.stdout.read() or "")
    wrong += [f"torchrun ends with {launcher.returncode}"] if launcher.returncode else []
    last = max(steps_in(folder), default=0)
    wrong += [f"the run is at step {last}"] if last != plan.steps else []
    if not wrong and not same_bits(
        result_of(folder), unbroken([(2, plan.steps)], folder / "whole", full_text=True)
    ):
        wrong.append("other bits")
    if wrong:
        print(text.read_text()[-3000:])
    return f"{done} kills of {plan.steps} steps", wrong


def counts_of_process() -> dict[str, int]:
    """Return what a process holds: descriptors, threads, segments of shared memory, memory."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    segments = {line.split()[4] for line in lines if "/dev/shm" in line or "memfd" in line}
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "segments": len(segments),
        "megabytes": int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        >> 20,
    }


def _counted(group: zf.Group, steps: int, path: Path) -> tuple[list[dict[str, int]], str]:
    z = soak._loop(group)
    state, found = z.init(soak._params(0)), []
    for step in range(1, steps + 1):
        state, _ = z.step(state, soak._batch(group, step))
        if step % (steps // 10) == 0:
            zf.save(path, state, background=step % (steps // 5) == 0, keep=2).wait()
            found.append(counts_of_process())
    return found, soak._digest(z.params(state))


def steps(count: int, folder: Path) -> Result:
    """Count what the ranks hold ten times in a long run, over both transports."""
    lines, wrong = list[str](), list[str]()
    for shared in (True, False):
        with processes(2, timeout_s=600.0, shared_memory=shared) as workers:
            answers = workers.run(_counted, count, folder / str(shared))
        for rank, (found, digest) in enumerate(answers):
            first, last = found[1], found[-1]
            lines.append(f"{'shared memory' if shared else 'gloo'}, rank {rank}: {last}")
            for name in ("descriptors", "threads", "segments"):
                if last[name] > first[name]:
                    wrong.append(f"{name} of rank {rank} grow: {[x[name] for x in found]}")
            if last["megabytes"] > first["megabytes"] + 8:
                wrong.append(f"memory of rank {rank}: {[x['megabytes'] for x in found]}")
            if digest != soak.expected(count, 0)[count]:
                wrong.append(f"rank {rank} has other bits")
    return f"{count} steps; " + "; ".join(lines), wrong


# The real-time clock jumps by years at every call; the monotonic one goes on.
_CLOCK = r"""
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
static unsigned calls;
static long jump(void) { return ((long)(__sync_fetch_and_add(&calls, 1) % 7) - 3) * 31557600; }
int clock_gettime(clockid_t id, struct timespec *t) {
  int r = syscall(SYS_clock_gettime, id, t);
  if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) t->tv_sec += jump();
  return r;
}
int gettimeofday(struct timeval *t, void *z) {
  struct timespec s; clock_gettime(CLOCK_REALTIME, &s);
  t->tv_sec = s.tv_sec; t->tv_usec = s.tv_nsec / 1000; return 0;
}
time_t time(time_t *t) {
  struct timespec s; clock_gettime(CLOCK_REALTIME, &s);
  if (t) *t = s.tv_sec; return s.tv_sec;
}
"""


def clock(count: int, folder: Path) -> Result:
    """Train two ranks on a machine whose clock jumps by up to three years, back and forth."""
    folder.mkdir()
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_CLOCK)
    command = ["gcc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True)
    out = folder / "hashes"
    out.mkdir()
    program = (
        "import sys, time, torch, zfun as zf; from pathlib import Path;"
        "from tests.faults.programs import soak;"
        "assert len({round(time.time() / 1e6) for _ in range(7)}) > 3;"
        "torch.set_num_threads(1); g = zf.process_group(timeout_s=20.0);"
        f"job = soak.Job(Path({str(folder / 'run')!r}), {count});"
        f"found = soak.train(g, job); Path({str(out)!r}, str(g.rank)).write_text(found); g.close()"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--no-python", sys.executable, "-c", program]
    environment = {**os.environ, "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    found = [path.read_text() for path in sorted(out.iterdir())]
    wrong = [] if done.returncode == 0 else [done.stderr[-2000:]]
    wrong += [] if found == [soak.expected(count, 0)[count]] * 2 else [f"other bits {found}"]
    wrong += soak.wrong_checkpoints(folder / "run", count)
    return f"{count} steps, 2 ranks", wrong


class ReadOnly(Files):
    """A file system that is mounted for reading only."""

    def open(self, path: str, flags: int) -> int:
        if flags & (os.O_CREAT | os.O_RDWR | os.O_WRONLY):
            self.make(path)
        return super().open(path, flags)

    def make(self, path: str) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    def add(self, path: str) -> None:
        self.make(path)


def _saves(group: zf.Group, path: Path, step: int, files: Files | None, background: bool) -> str:
    """Save, and return the kind of the error; training goes on in any case."""
    state = {"params": zf.shard(soak._params(step), group), "rate": 0.5}
    try:
        zf.save(path, state, step=step, files=files, background=background, keep=2).wait()
    except zf.errors.CheckpointError as error:
        return f"refused {error.errno}"
    finally:
        zf.collectives.barrier(group)
    return "saved"


def _sweep(group: zf.Group, path: Path, lost: int, background: bool) -> list[tuple[str, int]]:
    """Let each operation of one rank's save fail in turn, and load after each."""
    found = []
    at, step = 0, 1
    while True:
        files = FaultyFiles(at, errno.EIO, EVERY) if group.rank == lost else None
        step += 1
        answer = _saves(group, path, step, files, background)
        like = {"params": zf.shard(soak._params(-1 % 99), group), "rate": 0.0}
        loaded = zf.load(path, like)
        right = same_bits(zf.unshard(loaded.state["params"]), soak._params(loaded.step))
        found.append((answer, loaded.step - step if right else 99))
        is_over = torch.tensor(int(files is not None and files.failed is None))
        if zf.collectives.gather_values(is_over, group, "over").any():
            return found
        at += 1


def disk(folder: Path) -> Result:
    """EIO at every operation of a save, and places where nothing may be written."""
    wrong, lines = list[str](), list[str]()
    with processes(2, timeout_s=500.0, collective_timeout_s=30.0) as workers:
        for background in (False, True):
            for lost in (0, 1):
                path = folder / f"{background}-{lost}"
                zf.simulate(2, _saves, path, 1, None, False)
                both = workers.run(_sweep, path, lost, background)
                if both[0] != both[1]:
                    wrong.append(f"ranks differ: {both}")
                refused = sum(answer == f"refused {errno.EIO}" for answer, _ in both[0])
                saved = sum(answer == "saved" for answer, _ in both[0])
                if refused + saved != len(both[0]):
                    wrong.append(f"other errors: {both[0]}")
                if any(behind > 0 for _, behind in both[0]):
                    wrong.append(f"other bits: {both[0]}")
                kind = "background" if background else "blocking"
                lines.append(f"{kind}, rank {lost}: {refused} refused, {saved} saved")
        for background in (False, True):
            path = folder / f"False-{int(background)}"
            before = zf.checkpoint.steps(path)
            answers = workers.run(_saves, path, 9999, ReadOnly(), background)
            answers += workers.run(_refused_user, path, background)
            after = zf.checkpoint.steps(path)
            if before != after or any(not x.startswith("refused") for x in answers):
                wrong.append(f"read-only: {answers}, {before}, {after}")
            lines.append(f"read-only: {answers}")
    return "; ".join(lines), wrong


def _refused_user(group: zf.Group, path: Path, background: bool) -> str:
    """Save as a user who may read a directory, and not write to it."""
    zf.collectives.barrier(group)
    mode = path.stat().st_mode
    is_root = os.geteuid() == 0
    zf.collectives.barrier(group)
    try:
        path.chmod(stat.S_IRUSR | stat.S_IXUSR | stat.S_IROTH | stat.S_IXOTH)
        zf.collectives.barrier(group)
        if is_root:
            os.seteuid(65534)
        return _saves(group, path, 9999, None, background)
    finally:
        if is_root:
            os.seteuid(0)
        zf.collectives.barrier(group)
        path.chmod(mode)


def main(words: list[str]) -> int:
    torch.set_num_threads(1)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "place"
        Path(name).chmod(0o755)
        match words:
            case ["torchrun", count, seed]:
                folder.mkdir()
                line, wrong = kills(int(count), int(seed), folder)
            case ["steps", count]:
                line, wrong = steps(int(count), folder)
            case ["clock", count]:
                line, wrong = clock(int(count), folder)
            case _:
                line, wrong = disk(folder)
    print(f"{words[0]}: {line}; {time.monotonic() - begin:.0f} s", *wrong, sep="\n    ")
    return len(wrong)


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
