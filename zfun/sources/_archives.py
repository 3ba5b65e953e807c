"""The entries of a zip archive of ``torch.save``, and the checksums of their bytes."""

from __future__ import annotations

import re
import struct
import zipfile
import zlib
from pathlib import Path

from zfun.errors import CorruptCheckpoint
from zfun.sources._files import View

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL_HEADER_BYTES = 30
_CHUNK_BYTES = 1 << 22
_STORAGE = re.compile(r"/data/[^/]+$")


class ArchiveRecord:
    """The bytes of one entry of an archive, from ``start`` on, with the checksum of the archive.

    A writer may leave checksums out, which are 0 then.
    """

    def __init__(self, start: int, info: zipfile.ZipInfo) -> None:
        self.name, self.num_bytes = info.filename, info.file_size
        self._start, self._checksum = start, info.CRC
        self._is_good = not info.CRC

    def check(self, path: Path, base: int = 0) -> None:
        """Compare the bytes with the checksum, the first time."""
        if self._is_good:
            return
        found, at = 0, 0
        with View(path, base + self._start, self.num_bytes) as view:
            while at < self.num_bytes:
                piece = view.read(_CHUNK_BYTES)
                found, at = zlib.crc32(piece, found), at + len(piece)
                if not piece:
                    break
        if found != self._checksum:
            raise CorruptCheckpoint(
                f"{path} has the bytes that torch.save() wrote; got another checksum for the entry "
                f"{self.name!r}; copy the file again",
                path=str(path),
            )
        self._is_good = True


def damaged(path: Path, error: BaseException) -> CorruptCheckpoint:
    text = " ".join(str(error).split())[:200]
    return CorruptCheckpoint(
        f"{path} is a file of torch.save(); got {type(error).__name__}: {text}; copy the file "
        "again",
        path=str(path),
    )


def records_of(view: View) -> dict[int, ArchiveRecord]:
    """Return every record of a zip archive by the offset of its first byte, metadata compared."""
    view.seek(0)
    found: dict[int, ArchiveRecord] = {}
    try:
        with zipfile.ZipFile(view) as archive:  # type: ignore[arg-type]
            infos = archive.infolist()
            if len(archive.namelist()) != len(set(archive.namelist())):
                raise zipfile.BadZipFile("a record twice")
        for info in infos:
            if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
                raise zipfile.BadZipFile(f"a compressed record {info.filename!r}")
            view.seek(info.header_offset)
            header = view.read(_LOCAL_HEADER_BYTES)
            name_bytes, extra_bytes = struct.unpack("<HH", header[26:30])
            start = info.header_offset + _LOCAL_HEADER_BYTES + name_bytes + extra_bytes
            if start + info.file_size > view.num_bytes:
                raise zipfile.BadZipFile(f"a record {info.filename!r} that ends behind the file")
            found[start] = ArchiveRecord(start, info)
    except (zipfile.BadZipFile, NotImplementedError, struct.error, ValueError, OSError) as error:
        raise damaged(view.path, error) from None
    for record in found.values():
        # Those of tensors are compared when read.
        if not _STORAGE.search(record.name):
            record.check(view.path, view.offset)
    return found
