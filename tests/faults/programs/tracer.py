"""Count the system calls of a part of a process, and kill the process at one of them.

The traced process calls ``mark()`` where the part begins and where it ends. Only the thread that
attached itself is traced, and the threads that it starts later.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import signal
import struct
import sys

__all__ = ["attach", "is_allowed", "kill_at", "mark"]

_LIBC = ctypes.CDLL(None, use_errno=True)
_SEIZE, _INTERRUPT, _SYSCALL, _GET_SYSCALL_INFO = 0x4206, 0x4207, 24, 0x420E
# Stops of system calls are marked, threads are traced too, and no tracee outlives the tracer.
_OPTIONS = 0x1 | 0x8 | 0x100000
_WALL = 0x40000000
_ENTRY = 1
# Of x86-64. A call that only waits is made any number of times.
_GETPPID = 110
_WAITS = {7, 23, 24, 35, 202, 230, 232, 281, 271}


def mark() -> None:
    """Begin or end the part in which system calls are counted."""
    os.getppid()


def is_allowed() -> bool:
    """Whether this system lets a process trace its children."""
    if sys.platform != "linux" or os.uname().machine != "x86_64":
        return False
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        attach(child)
    except OSError:
        return False
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return True


def _ptrace(request: int, tid: int, address: int = 0, data: int = 0) -> int:
    words = [ctypes.c_long(word) for word in (request, tid, address, data)]
    result = int(_LIBC.ptrace(*words))
    if result == -1 and (number := ctypes.get_errno()):
        raise OSError(number, os.strerror(number))
    return result


def attach(tid: int) -> None:
    """Trace a thread that is waiting, from the thread that calls."""
    ctypes.set_errno(0)
    _ptrace(_SEIZE, tid, 0, _OPTIONS)
    _ptrace(_INTERRUPT, tid)


def kill_at(pid: int, at: int | None) -> tuple[int, bool]:
    """Let a process run to its end, or kill it before the system call number ``at``.

    Args:
        pid: the process, which this thread has attached.
        at: a number from 0; ``None`` only counts.

    Returns:
        The number of system calls, and whether the process was killed.
    """
    count, marks, killed = 0, 0, False
    info = ctypes.create_string_buffer(128)
    while True:
        try:
            tid, status = os.waitpid(-1, _WALL)
        except ChildProcessError:
            return count, killed
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            if tid == pid:
                return count, killed
            continue
        stop, deliver = os.WSTOPSIG(status), 0
        if stop == signal.SIGTRAP | 0x80:
            with contextlib.suppress(OSError):
                _ptrace(_GET_SYSCALL_INFO, tid, len(info), ctypes.addressof(info))
            if info.raw[0] == _ENTRY:
                (number,) = struct.unpack_from("<Q", info.raw, 24)
                marks += number == _GETPPID
                if marks == 1 and number not in _WAITS and number != _GETPPID:
                    if count == at:
                        killed = True
                        os.kill(pid, signal.SIGKILL)
                    count += 1
        elif status >> 16 == 0 and stop not in (signal.SIGTRAP, signal.SIGSTOP):
            deliver = stop
        try:
            _ptrace(_SYSCALL, tid, 0, deliver)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
