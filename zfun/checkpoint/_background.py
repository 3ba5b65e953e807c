"""A save that goes on in a thread, and the handle of a save."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from zfun.checkpoint._together import attempt, error_from, report_of
from zfun.checkpoint.format._write import be_gentle, explaining
from zfun.collectives import Group, barrier, gather_json, global_ranks, whole_group
from zfun.errors import CheckpointError, ZfunError
from zfun.options import takes

_POLL_S, _LONGEST_NAP_S = 0.01, 0.2
# How often a store is asked at most, because each question costs.
_ASK_S = 1.0
# After the end of the main thread, other ranks have this long to end their part.
_AT_EXIT_S = 60.0
# After a step has met the loss of a rank, which may have done its part.
_AT_LOSS_S = 2.0


class Saved:
    """A checkpoint that was saved, or that is being saved in the background.

    Attributes:
        path: the directory of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    @property
    def done(self) -> bool:
        """Whether the save has ended on this rank, by success or failure."""
        return True

    def wait(self) -> str:
        """Wait until the checkpoint is there on all ranks, and return its path. All ranks call.

        Raises:
            CheckpointError: on all ranks, if the save failed on one.
        """
        return self.path

    def __repr__(self) -> str:
        return f"Saved({self.path!r}{'' if self.done else ', under way'})"


# One save is under way at a time on each group.
_UNDER_WAY: weakref.WeakKeyDictionary[Group, _Saving] = weakref.WeakKeyDictionary()


def settle(group: Group) -> None:
    """Wait for the save that is under way on a group, and raise its error. All ranks call."""
    saving = _UNDER_WAY.get(group)
    if saving is not None:
        saving.wait()


@takes()
def check_saves(group: Group) -> None:
    """Raise the error of a save in the background that failed; do not wait.

    Args:
        group: the ranks, or an axis of their mesh.

    Raises:
        CheckpointError: the save failed, as far as this rank has heard. The error is raised once.

    Example:
        >>> from zfun.collectives import single_group
        >>> check_saves(single_group())
    """
    whole = whole_group(group)
    saving = None if whole is None else _UNDER_WAY.get(whole)
    if whole is not None and saving is not None and saving.done and saving.error is not None:
        del _UNDER_WAY[whole]
        raise saving.error


class _Saving(Saved):
    """A save in the background."""

    def __init__(self, job: Any, write: Callable[[], Any], timeout_s: float) -> None:
        super().__init__(job.final)
        self.error: Exception | None = None
        # Why the thread ends its waits, as other ranks have told through the group.
        self.told: Exception | None = None
        self._group = weakref.ref(job.group)
        self._thread = threading.Thread(
            target=self._run, args=(job, write, timeout_s), name="zfun-save"
        )
        self._thread.start()

    @property
    def done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> str:
        group = self._group()
        if group is None:
            # The caller has dropped the group, so no rank can be asked.
            self._thread.join()
        if group is None or _UNDER_WAY.get(group) is not self:
            # Waited for already, or the error was raised by a step.
            if self.error is not None:
                raise self.error
            return self.path
        try:
            # All ranks have started their threads when all have come here.
            barrier(group)
            _UNDER_WAY.pop(group, None)
            self._end_together(group)
        except BaseException as error:
            # The thread ends its waits too, because the process waits for the thread.
            if self.told is None:
                self.told = _given_up(self.path, error)
            raise
        self._thread.join()
        if self.told is None:
            return self.path
        # The thread of another rank has an error too, which only passes the first one on.
        raise self.told

    def _end_together(self, group: Group) -> None:
        """Wait until the threads of all ranks have ended.

        The ranks ask each other through the group, which notices a rank that is lost, and tells of
        a failure that a full disk does not take.
        """
        nap, me = _POLL_S, global_ranks(group)[group.rank]
        while True:
            done, error = self.done, self.error
            # A rank that has read on the disk that another one failed has an error too.
            first = getattr(error, "rank", None)
            origin = None if error is None or not done else me if first is None else first
            problem = None if origin is None else report_of(error)
            found = gather_json([done, origin, problem], group, "save in the background")
            ranks = global_ranks(group)
            is_over = all(done for done, *_ in found)
            failed = [i for i, (_, by, _) in enumerate(found) if by == ranks[i]]
            if is_over and not failed:
                # An error that names a rank without one is raised all the same.
                failed = [i for i, (_, by, _) in enumerate(found) if by is not None]
            if failed and self.told is None:
                self.told = error_from(found[failed[0]][2], ranks[failed[0]])
                if error is not None and (origin == me or group.rank == failed[0]):
                    self.told = error
                    if isinstance(error, ZfunError):
                        error.rank = me
            if is_over:
                return
            time.sleep(nap)
            nap = min(2 * nap, _LONGEST_NAP_S)

    def _run(self, job: Any, write: Callable[[], Any], timeout_s: float) -> None:
        be_gentle()
        try:
            report, error = attempt(write)
            until = _Limit(timeout_s, self, job)
            if job.group.rank == 0:
                self._publish(job, error, report, until)
            else:
                self._report(job, error, report)
                _await_outcome(job, until)
        except BaseException as caught:  # noqa: BLE001, raised by wait(), by a step or by a save
            self.error = caught if isinstance(caught, Exception) else _ended(job, caught)
        finally:
            job.release()

    def _report(self, job: Any, error: Exception | None, report: Any) -> None:
        """Tell rank 0 how this rank's part went."""
        path = _report_path(job, job.group.rank)
        if error is not None:
            # The rank's own error says more than that of the disk.
            with suppress(OSError):
                _leave(job, path, [report_of(error), None])
            raise error
        with explaining(path, "the report of this rank"):
            _leave(job, path, [None, report])

    def _publish(self, job: Any, error: Exception | None, report: Any, until: _Limit) -> None:
        failed: list[Any] = []
        try:
            if error is not None:
                raise error
            reports = [report]
            for rank in range(1, job.group.size):
                problem, theirs = _read_report(job, rank, until)
                if problem is not None:
                    failed = [global_ranks(job.group)[rank], problem]
                    raise error_from(problem, failed[0])
                reports.append(theirs)
            with explaining(job.temporary, "removing the reports of the ranks"):
                for rank in range(1, job.group.size):
                    # Not files.remove(), which removes a directory that is empty then.
                    job.files.unlink(_report_path(job, rank))
            job.publish(reports)
        except Exception as caught:
            # The other ranks read why; the next save removes the directory.
            failed = failed or [global_ranks(job.group)[0], report_of(caught)]
            # On a full disk, wait() tells the other ranks.
            with suppress(OSError):
                _leave(job, f"{job.temporary}/failed.json", failed)
            if job.group.size == 1:
                job.abandon()
            raise


def in_background(job: Any, write: Callable[[], Any], timeout_s: float) -> Saved:
    """Write and publish in a thread."""
    saving = _Saving(job, write, timeout_s)
    _UNDER_WAY[job.group] = saving
    return saving


def _report_path(job: Any, rank: int) -> str:
    return f"{job.temporary}/report-{rank:05d}.json"


def _leave(job: Any, path: str, value: Any) -> None:
    """Write JSON to a file that appears whole."""
    job.files.put(path, json.dumps(value).encode())


def _ended(job: Any, cause: BaseException) -> CheckpointError:
    return CheckpointError(
        f"a save in the background runs to its end; the thread for {job.final} was ended by "
        f"{type(cause).__name__}; save again",
        path=job.final,
    )


def _given_up(path: str, cause: BaseException) -> CheckpointError:
    return CheckpointError(
        f"all ranks save together; {path} was given up, because a rank ended its wait with "
        f"{type(cause).__name__}: {cause}; save again when all ranks are there",
        path=path,
    )


def _read_report(job: Any, rank: int, until: _Limit) -> Any:
    path = _report_path(job, rank)
    with explaining(path, "reading the report of a rank"):
        while (found := job.files.get(path)) is None:
            until.pause(f"rank {rank} wrote its part of {job.final}")
        return json.loads(found)


def _await_outcome(job: Any, until: _Limit) -> None:
    """Wait until rank 0 has published, or has given up."""
    path = f"{job.temporary}/failed.json"
    while not (is_published := job.look()):
        with explaining(path, "looking for a failure"):
            failed = job.files.get(path)
        if failed is not None:
            rank, problem = json.loads(failed)
            raise error_from(problem, rank)
        if is_published is None:
            raise CheckpointError(
                f"all ranks save together; rank 0 gave up {job.final}; see the error of rank 0",
                path=job.final,
            )
        until.pause(f"rank 0 published {job.final}")


class _Limit:
    """A limit of time, which is shorter once the main thread has ended or the group has failed."""

    def __init__(self, timeout_s: float, saving: _Saving, job: Any) -> None:
        self._saving, self._job = saving, job
        # The first pause is short, and each is twice as long.
        self._nap, self._longest_s = _POLL_S, _POLL_S if job.files.is_disk else _ASK_S
        self._deadline = time.monotonic() + timeout_s
        self._is_ending = self._is_lost = False

    def pause(self, sign: str) -> None:
        """Sleep for a moment, or raise at the limit, or where other ranks have told to end."""
        if self._saving.told is not None:
            raise self._saving.told
        now, failure = time.monotonic(), getattr(self._job.group, "failure", None)
        if not self._is_ending and not threading.main_thread().is_alive():
            self._is_ending, self._deadline = True, min(self._deadline, now + _AT_EXIT_S)
        if not self._is_lost and failure is not None:
            self._is_lost, self._deadline = True, min(self._deadline, now + _AT_LOSS_S)
        if now > self._deadline and failure is not None:
            raise _given_up(self._job.final, failure)
        if now > self._deadline:
            raise CheckpointError(
                f"a save in the background ends in time; got no sign that {sign}; look at the "
                "other ranks, or pass a larger timeout_s"
            )
        time.sleep(self._nap)
        self._nap = min(2 * self._nap, self._longest_s)
