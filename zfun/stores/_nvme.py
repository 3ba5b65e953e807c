"""A disk as a store."""

from __future__ import annotations

import collections
import errno
import functools
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zfun import ops
from zfun.collectives import Work
from zfun.errors import OptionError
from zfun.files import ALIGNMENT, Files, aligned
from zfun.options import PATH, SECONDS, Kind, instance, integer, takes
from zfun.stores._base import Counts, Stored, heard
from zfun.stores._buffers import Buffers
from zfun.stores._disk import Disk, Place, failure
from zfun.stores._regions import Lease
from zfun.stores._streams import QueuedCopies

# The system transfers at most 2 GiB in one call.
_MAX_CHUNK_BYTES = 1 << 30
_PAGES = Kind(
    lambda x: integer(1, _MAX_CHUNK_BYTES).accepts(x) and x % ALIGNMENT == 0,
    (f"a multiple of {ALIGNMENT} from {ALIGNMENT} to 2**30",),
    "2**20",
)


class _DiskTensor(Stored):
    """A tensor on the disk, or on the way to the disk; an abstract one has no disk."""

    can_fail = True
    store: NvmeStore  # type: ignore[bad-override]

    def __init__(
        self,
        store: NvmeStore,
        tensor: Tensor,
        name: str,
        disk: Disk | None = None,
        place: Place | None = None,
        writes: Sequence[Future[None]] = (),
    ) -> None:
        super().__init__(store, tensor, name)
        self.disk, self.place, self.writes = disk, place, writes
        self._ahead: Callable[[], Tensor] | None = None
        heard("put", self)

    def get(self, device: torch.device) -> Work:
        """Start to read into host memory; ``wait()`` starts the copy to another device."""
        read, self._ahead = self._ahead or self._start(), None
        return Work(lambda: read().to(device, non_blocking=True))

    def prefetch(self) -> None:
        """Start to read into host memory."""
        self._ahead = self._ahead or self._start()

    def _start(self) -> Callable[[], Tensor]:
        num_bytes = self.shape.numel() * self.dtype.itemsize
        self.store.crossed("get", self.name, num_bytes)
        heard("get", self)
        disk, name, dtype, shape = self.disk, self.name, self.dtype, self.shape
        reads: Sequence[Future[None]] = ()
        if disk is None:
            buffer = torch.empty(aligned(num_bytes), dtype=torch.uint8)
        else:
            buffer = self._buffer(disk, num_bytes)
            if self.place is not None:
                reads = disk.read(self.place, buffer, num_bytes, self.writes)
        heard("read", buffer)

        def finish() -> Tensor:
            if disk is not None:
                disk.wait(reads, name)
            return buffer[:num_bytes].view(dtype).view(shape)

        return finish

    def _buffer(self, disk: Disk, num_bytes: int) -> Tensor:
        keep = self.shape.numel() <= self.store.buffer_size
        try:
            return self.store.buffers.take(num_bytes, keep=keep)
        except (OSError, RuntimeError) as error:  # of the system, or of CUDA
            problem = f"there is no memory to read {num_bytes} bytes into: {error}"
            raise failure(self.name, problem, disk.path, errno.ENOMEM) from error

    def flush(self) -> None:
        """Wait until the tensor is on the disk."""
        if self.disk is None:
            return
        self.disk.wait(self.writes, self.name)
        self.disk.sync(self.name)
        self.writes = ()


class _KeptTensor(Stored):
    """A tensor that a store on a disk keeps in host memory."""

    # Another rank may have put the same part of the state on the disk, and then a put may raise
    # there. All ranks must agree after a step, so the answer belongs to the store.
    can_fail = True

    def __init__(self, store: NvmeStore, tensor: Tensor, name: str, quota: Lease) -> None:
        super().__init__(store, tensor, name)
        self.tensor, self.quota = tensor, quota

    def get(self, device: torch.device) -> Work:
        """Start a copy, because the caller may write to the result."""
        self.store.crossed("get", self.name, self.shape.numel() * self.dtype.itemsize)
        return Work.done(self.tensor.to(device, non_blocking=True, copy=True))


class NvmeStore(Counts):
    """Keeps tensors in a file on a disk; :func:`nvme` makes one.

    The file lies in a directory of its own, which the store makes at the first ``put`` and removes
    at the end of the process. A tensor that was put is never overwritten: the new tensor goes to
    another region, and the region of the old one is free when the handle is dropped.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self._options = options
        super().__init__(log=options["log"])
        self.path = path
        self.buffer_count = options["buffer_count"]
        self.buffer_size = options["buffer_size"]
        # An update reads as many tensors ahead as are on the way back to the disk. Fresh memory for
        # some of these in every step would cost more than the transfers.
        self.buffers = Buffers(max_free=2 * self.buffer_count, pin=options["pin_memory"])
        self._copies = QueuedCopies()
        self._max_in_cpu = options["max_in_cpu"]
        self._in_cpu = 0
        self._left_cpu: collections.deque[tuple[int, int]] = collections.deque()
        self._open = functools.partial(
            Disk,
            path,
            options["files"],
            chunk_bytes=options["block_size"] * options["queue_depth"],
            **{key: options[key] for key in ("num_threads", "checksum", "timeout_s")},
        )
        self._disk: Disk | None = None
        self._lock = threading.Lock()
        self._under_way: collections.deque[Sequence[Future[None]]] = collections.deque()
        self._unflushed: weakref.WeakSet[_DiskTensor] = weakref.WeakSet()

    @property
    def device(self) -> torch.device:
        """The CPU, which computes on the stored tensors."""
        return torch.device("cpu")

    @property
    def file(self) -> str | None:
        """The file of this store; ``None`` before the first ``put``."""
        return None if self._disk is None else self._disk.path

    @property
    def file_bytes(self) -> int:
        """The length of the file, which has room for all tensors that lived at one time."""
        return 0 if self._disk is None else self._disk.regions.num_bytes

    @property
    def is_direct(self) -> bool | None:
        """Whether transfers go past the memory of the system; ``None`` before the first ``put``."""
        return None if self._disk is None else self._disk.is_direct

    def put(self, tensor: Tensor, name: str) -> Stored:
        """Start to write a tensor.

        With ``buffer_count`` tensors on the way to the disk, wait for the first of them.

        Raises:
            OffloadError: the disk has too little room.
        """
        tensor = tensor.detach()
        self.crossed("put", name, tensor.nbytes)
        if ops.is_abstract(tensor):
            return _DiskTensor(self, tensor, name)
        quota = self._quota(tensor.numel())
        if quota is not None:
            return _KeptTensor(self, tensor.cpu(), name, quota)
        disk = self._opened()
        if not tensor.numel():
            return _DiskTensor(self, tensor, name, disk)
        self._wait_for_a_buffer(disk, name)
        place = Place(disk.regions.take(aligned(tensor.nbytes)), [], name)
        data, ready = self._bytes_of(tensor)
        writes = disk.write(place, data, ready)
        self._under_way.append(writes)
        handle = _DiskTensor(self, tensor, name, disk, place, writes)
        with self._lock:
            self._unflushed.add(handle)
        return handle

    def reserve(self, num_bytes: int) -> None:
        """Reserve room for tensors of ``num_bytes`` in all, beside those that are kept.

        Raises:
            OffloadError: the disk has too little room.
        """
        if num_bytes:
            self._opened().regions.take(aligned(num_bytes))

    def flush(self) -> None:
        """Wait until all tensors that have a handle are on the disk.

        Raises:
            OffloadError: the disk does not keep one of them.
        """
        with self._lock:
            handles = list(self._unflushed)
            self._unflushed.clear()
        for handle in handles:
            handle.flush()

    def close(self) -> None:
        """Remove the file. The handles are of no use any more; the next ``put`` makes a file."""
        with self._lock:
            disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _opened(self) -> Disk:
        with self._lock:
            if self._disk is None:
                self._disk = self._open()
            return self._disk

    def _quota(self, numel: int) -> Lease | None:
        if not self._max_in_cpu:
            return None
        with self._lock:
            while self._left_cpu:
                self._in_cpu -= self._left_cpu.popleft()[1]
            if self._in_cpu + numel > self._max_in_cpu:
                return None
            self._in_cpu += numel
        return Lease(0, numel, self._left_cpu)

    def _wait_for_a_buffer(self, disk: Disk, name: str) -> None:
        while len(self._under_way) >= self.buffer_count:
            try:
                writes = self._under_way.popleft()
            except IndexError:  # another thread has waited
                return
            # A write that failed is an error of the handle.
            disk.settle(writes, name)

    def _bytes_of(self, tensor: Tensor) -> tuple[Tensor, Any]:
        """Return the bytes of a tensor in host memory, and a function that waits for them."""
        tensor = tensor.resolve_conj().resolve_neg().reshape(-1)
        # A tensor of one element counts as contiguous with any stride.
        if tensor.stride(0) != 1:
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        ready: Any = lambda: None
        data = tensor.view(torch.uint8)
        queue = self._copies.queue(data.device, "put")
        if queue is None:
            return data.cpu(), ready
        host = torch.empty(data.shape, dtype=torch.uint8, pin_memory=self.buffers.pin)
        return host, self._copies.put(queue, host, data).wait_on_host

    def __reduce__(self) -> Any:
        # Another process has a file of its own.
        return functools.partial(NvmeStore, self.path, **self._options), ()

    def __repr__(self) -> str:
        return f"nvme({self.path!r})"


@takes(
    path=PATH,
    block_size=_PAGES,
    queue_depth=integer(1, 1024),
    num_threads=integer(1, 256),
    buffer_count=integer(1),
    buffer_size=integer(0),
    max_in_cpu=integer(0),
    timeout_s=SECONDS,
    files=instance(Files, "an object of zf.files.Files", "zf.files.Files()") | None,
)
def nvme(
    path: str | Path,
    *,
    block_size: int = 2**20,
    queue_depth: int = 8,
    num_threads: int = 4,
    buffer_count: int = 5,
    buffer_size: int = 10**8,
    max_in_cpu: int = 0,
    pin_memory: bool | None = None,
    checksum: bool = False,
    timeout_s: float = 300.0,
    log: bool = False,
    files: Files | None = None,
) -> NvmeStore:
    """Make a store on a disk: ZeRO-Infinity.

    Transfers run in threads, past the memory of the system (O_DIRECT). Where the file system
    refuses that, a warning says so once, and transfers go through the memory of the system.

    ``zfun io-bench PATH`` measures which ``block_size``, ``queue_depth`` and ``num_threads`` are
    fastest on a disk. The file is removed at the end of the process; after a crash,
    ``zfun clean PATH`` removes the files that no process uses.

    Args:
        path: an existing directory on the disk. Every process makes a directory of its own there.
        block_size: bytes of one request to the disk, a multiple of 4096.
        queue_depth: requests that a thread hands over at a time, in one call of the system.
        num_threads: threads that transfer, each with ``queue_depth`` requests in flight.
        buffer_count: tensors that may be on the way to the disk at one time. Twice as many buffers
            are kept for the next reads.
        buffer_size: elements of the largest buffer that is kept. A tensor with more elements has
            memory of its own, which the system gets back.
        max_in_cpu: elements that stay in host memory, in all, instead of going to the disk.
        pin_memory: page-lock the buffers, for faster copies; by default if CUDA is available.
        checksum: keep a checksum of each call's bytes, and compare after each read.
        timeout_s: seconds in which the disk must answer.
        log: keep a list of all transfers, ``store.log``, which grows with every step.
        files: the operations on files, for tests that let some of them fail.

    Returns:
        The store. A step over the store either returns a new state or raises and leaves the old
        state as it was.

    Raises:
        OptionError: ``path`` is no directory that this user may write to, or ``pin_memory=True``
            without a device.
        OffloadError: from the store: too little room, an error of the disk, fewer bytes
            transferred than asked, or other bytes read than written. The error has ``path``,
            ``errno``, ``leaf`` and ``rank``.

    Example:
        >>> import tempfile
        >>> path = tempfile.TemporaryDirectory()
        >>> store = nvme(path.name, num_threads=2)
        >>> handle = store.put(torch.arange(3), "state")
        >>> handle.get(torch.device("cpu")).wait()
        tensor([0, 1, 2])
        >>> store.close(), path.cleanup()
        (None, None)
    """
    path = os.path.abspath(path)  # noqa: PTH100, a later chdir() must not move the store
    if not (Path(path).is_dir() and os.access(path, os.W_OK | os.X_OK)):
        raise OptionError(
            f"the path of nvme() must be a directory that you may write to; got {path!r}; make "
            f"the directory, or choose another one"
        )
    if block_size * queue_depth > _MAX_CHUNK_BYTES:
        raise OptionError(
            "block_size * queue_depth of nvme() must be at most 2**30, because a thread hands over "
            f"that number of bytes at a time; got {block_size} * {queue_depth}; make one smaller"
        )
    if pin_memory and not torch.accelerator.is_available():
        raise OptionError(
            "pin_memory=True of nvme() page-locks memory for copies to a device; got a machine "
            "without one; leave pin_memory out"
        )
    return NvmeStore(
        path,
        block_size=block_size,
        queue_depth=queue_depth,
        num_threads=num_threads,
        buffer_count=buffer_count,
        buffer_size=buffer_size,
        max_in_cpu=max_in_cpu,
        pin_memory=torch.cuda.is_available() if pin_memory is None else pin_memory,
        checksum=checksum,
        timeout_s=timeout_s,
        log=log,
        files=Files() if files is None else files,
    )
