"""One new object, sent in parts."""

from __future__ import annotations

import contextlib
import io
import threading
from collections.abc import Callable
from typing import Any

# S3 takes at most 10,000 parts of at least 5 MiB.
PART_BYTES = 32 * 2**20
# Fewer bytes than these parts go in one request, as no more memory is needed.
MIN_PARTS = 3
_MAX_PARTS = 9000


class _UploadPart:
    """The bytes of a part, of which some are missing."""

    def __init__(self, num_bytes: int) -> None:
        # The client of S3 wants a stream, which it sends without blocking other requests.
        self.stream = io.BytesIO(bytes(num_bytes))
        self.missing = num_bytes

    def write(self, data: memoryview, first: int) -> None:
        self.stream.seek(first)
        self.stream.write(data)
        self.stream.seek(0)
        self.missing -= len(data)


class Upload:
    """One new object, of which the parts are sent as soon as they are full.

    ``call`` calls a function of the client, in time; ``file_system`` is of fsspec.
    """

    def __init__(self, call: Callable[..., Any], file_system: Any, path: str) -> None:
        self._call, self._fs, self._path = call, file_system, path
        self._num_bytes, self._part_bytes = 0, PART_BYTES
        self._lock = threading.Lock()
        self._parts: dict[int, _UploadPart] = {}
        self._tags: dict[int, str] = {}
        self._is_s3 = hasattr(file_system, "call_s3")
        self._id: str | None = None
        self._file: Any = None
        self._is_whole = False

    def reserve(self, num_bytes: int) -> None:
        """Choose the parts."""
        self._num_bytes = num_bytes
        self._part_bytes = max(PART_BYTES, -(-num_bytes // _MAX_PARTS))
        if num_bytes <= MIN_PARTS * self._part_bytes:
            self._part_bytes = max(1, num_bytes)
            return
        if self._is_s3:
            self._id = self._s3("create_multipart_upload")["UploadId"]
        else:
            self._file = self._call(self._fs.open, self._path, "wb", block_size=self._part_bytes)

    def _s3(self, name: str, **kwargs: Any) -> Any:
        bucket, key, _ = self._fs.split_path(self._path)
        if self._id is not None:
            kwargs["UploadId"] = self._id
        return self._call(self._fs.call_s3, name, Bucket=bucket, Key=key, **kwargs)

    def write(self, data: memoryview, offset: int) -> None:
        while data:
            number, first = divmod(offset, self._part_bytes)
            length = min(self._part_bytes, self._num_bytes - number * self._part_bytes)
            count = min(len(data), length - first)
            with self._lock:
                if number not in self._parts:
                    self._parts[number] = _UploadPart(length)
                part = self._parts[number]
                part.write(data[:count], first)
                is_full = not part.missing
            if is_full:
                self._send(number, part)
            data, offset = data[count:], offset + count

    def _send(self, number: int, part: _UploadPart) -> None:
        if self._id is not None:
            found = self._s3("upload_part", PartNumber=number + 1, Body=part.stream)
            with self._lock:
                self._tags[number] = found["ETag"]
                del self._parts[number]
        elif self._file is None:
            if self._is_s3:
                self._s3("put_object", Body=part.stream)
            else:
                self._call(self._fs.pipe_file, self._path, part.stream.getvalue())
            self._is_whole = True
        else:
            with self._lock:
                # One after the other, and parts may be full out of order.
                while len(self._tags) in self._parts:
                    part = self._parts[len(self._tags)]
                    if part.missing:
                        break
                    self._call(self._file.write, part.stream.getvalue())
                    del self._parts[len(self._tags)]
                    self._tags[len(self._tags)] = ""

    def complete(self) -> None:
        """Let the object appear."""
        if self._id is not None:
            parts = [{"PartNumber": n + 1, "ETag": tag} for n, tag in sorted(self._tags.items())]
            try:
                self._s3("complete_multipart_upload", MultipartUpload={"Parts": parts})
            except OSError:
                # The answer to an earlier attempt of the client may have been lost.
                if self._call(self._fs.info, self._path)["size"] != self._num_bytes:
                    raise
        elif self._file is not None:
            self._call(self._file.close)
        self._is_whole = True

    def abort(self) -> None:
        """Let go of the parts of an object that did not get whole."""
        if self._is_whole:
            return
        with contextlib.suppress(Exception):
            if self._id is not None:
                self._s3("abort_multipart_upload")
            elif self._file is not None:
                self._call(self._file.discard)
        if self._file is not None:
            # Else the end of the object's life would close it, and let it appear.
            with contextlib.suppress(AttributeError):
                self._file.closed = True
