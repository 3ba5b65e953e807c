"""Random changes of a folder of files: of bytes, JSON, pickles, archives and the folder itself."""

from __future__ import annotations

import json
import os
import pickle
import pickletools
import random
import shutil
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tests import fuzz_manifest


class Damage(NamedTuple):
    """A change of a folder.

    Attributes:
        kind: the change in words.
        is_sealed: whether hashes were made right again, so that the files may be other good ones.
        is_allowed: whether the good values may be read, because the change is no harm.
    """

    kind: str
    is_sealed: bool = False
    is_allowed: bool = True


_ZIP = b"PK\x03\x04"
_SIZES = (0, 1, -1, 3, 255, 4096, 1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1)


def damage(folder: Path, canary: Path, r: random.Random) -> Damage:
    """Change the files of a folder once; a ``canary`` is a file that foreign code would make."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    files = [path for path in files if path.name != "expected.safetensors"]
    for _ in range(100):
        # Small files hold what a reader interprets.
        file = min(r.sample(files, min(2, len(files))), key=lambda path: path.stat().st_size)
        found = r.choice(_KINDS)(file, canary, r)
        if found is not None:
            where = file.relative_to(folder)
            return found._replace(kind=f"{found.kind} in {where}")
    raise AssertionError(f"no change fits the files of {folder}")


def _bytes(file: Path, canary: Path, r: random.Random) -> Damage | None:
    data = bytearray(file.read_bytes())
    if not data:
        return None
    # The head and the tail of a file say where the rest is.
    near = min(len(data), 300)
    at = r.choice([r.randrange(len(data)), r.randrange(near), len(data) - 1 - r.randrange(near)])
    stop = min(len(data), at + r.choice([1, 2, 8, 64]))
    size = r.choice(_SIZES) % (1 << 64)
    changes: dict[str, tuple[slice, bytes]] = {
        "a bit": (slice(at, at + 1), bytes([data[at] ^ 1 << r.randrange(8)])),
        "a byte": (slice(at, at + 1), r.randbytes(1)),
        "cut": (slice(at, None), b""),
        "longer": (slice(len(data), None), bytes(stop - at)),
        "zeros": (slice(at, stop), bytes(stop - at)),
        "noise": (slice(at, stop), r.randbytes(stop - at)),
        "less": (slice(at, stop), b""),
        "twice": (slice(at, at), bytes(data[at:stop])),
        "a size": (slice(at, at + 8), struct.pack("<Q", size)[: len(data) - at]),
    }
    kind = r.choice(list(changes))
    where, new = changes[kind]
    data[where] = new
    file.write_bytes(data)
    return Damage(f"bytes: {kind} at {at}")


def _json_text(body: Any, r: random.Random) -> str:
    """Return JSON with changes, or with a key twice."""
    if r.randrange(6) == 0 and isinstance(body, dict) and body:
        key = r.choice(list(body))
        again = f"{json.dumps(key)}:{json.dumps(r.choice([body[key], *fuzz_manifest.ODD]))}"
        return json.dumps(body)[:-1] + f",{again}}}"
    return json.dumps(fuzz_manifest.changed(body, r))


def _json(file: Path, canary: Path, r: random.Random) -> Damage | None:
    data = file.read_bytes()
    if file.name == "manifest.json":
        body = json.loads(data)
        del body["sha256"]
        file.write_bytes(fuzz_manifest.sealed(_json_text(body, r).encode()[:-1] + b","))
    elif file.suffix == ".json":
        file.write_text(_json_text(json.loads(data), r))
    elif file.suffix == ".safetensors":
        length = int.from_bytes(data[:8], "little")
        text = _json_text(json.loads(data[8 : 8 + length]), r).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    else:
        return None
    return Damage("json", is_sealed=True)


def _rewritten(file: Path, change: Callable[[str, bytes], Any]) -> bool:
    """Write an archive again with right checksums; ``change`` returns bytes, or None for none."""
    if not zipfile.is_zipfile(file) or file.read_bytes()[:4] != _ZIP:
        return False
    with zipfile.ZipFile(file) as archive:
        records = [(info.filename, archive.read(info)) for info in archive.infolist()]
    with zipfile.ZipFile(file, "w") as archive:
        for name, data in records:
            for new in change(name, data):
                archive.writestr(*new)
    return True


def _pickle(file: Path, canary: Path, r: random.Random) -> Damage | None:
    """Change the operations of a pickle."""
    kind = r.choice(["bent", "edited", "edited", "forbidden", "nested"])

    def change(text: bytes) -> bytes:
        if kind == "forbidden":
            return _forbidden(canary, r)
        if kind == "nested":
            return b"\x80\x02" + b"(" * r.choice([10, 100_000]) + b"l" * 5 + text[2:]
        if kind == "bent":
            return fuzz_manifest.bent(text, r)
        return _edited(text, r)

    if file.name == ".metadata":
        file.write_bytes(change(file.read_bytes()))
    elif file.suffix == ".pt" and not zipfile.is_zipfile(file) and kind in ("forbidden", "bent"):
        # A file that torch wrote before version 1.6 is a row of pickles.
        file.write_bytes(change(file.read_bytes()))
    elif not _rewritten(
        file, lambda name, data: [(name, change(data) if name.endswith("data.pkl") else data)]
    ):
        return None
    return Damage(f"pickle: {kind}", is_sealed=True, is_allowed=kind != "forbidden")


def _edited(text: bytes, r: random.Random) -> bytes:
    """Change one operation: a number, a text, or a global; or remove or repeat the operation."""
    places: list[tuple[Any, Any, int]] = [
        (op, arg, at) for op, arg, at in pickletools.genops(text) if at is not None
    ]
    index = r.randrange(1, len(places) - 1)
    if r.randrange(4):
        wanted = {"BININT1", "BININT2", "BININT", "BINUNICODE", "SHORT_BINUNICODE", "GLOBAL"}
        named = [i for i, (op, _, _) in enumerate(places[1:-1], 1) if op.name in wanted]
        index = r.choice(named) if named else index
    op, arg, at = places[index]
    end = places[index + 1][2]
    new = text[at:end] * r.choice([0, 2])
    if op.name.startswith("BININT"):
        number = r.choice([0, 1, 2, -1, arg + 1, arg - 1, 2 * arg, 1 << 30, 1 << 40, 1 << 70, 0.5])
        new = pickle.dumps(number, 2)[2:-1]
    elif op.name.endswith("BINUNICODE"):
        texts = [arg for op, arg, _ in places if op.name.endswith("BINUNICODE")]
        word = r.choice(
            [*texts, "", "../x", "/etc/passwd", "x" * 5000, "\0", "cpu", "meta"]
        ).encode()
        new = b"X" + struct.pack("<I", len(word)) + word
    elif op.name == "GLOBAL":
        names = ["torch FloatStorage", "torch LongStorage", "torch bfloat16", "torch Size"]
        names += ["torch._utils _rebuild_parameter", "os system", "collections OrderedDict"]
        new = b"c" + r.choice(names).replace(" ", "\n").encode() + b"\n"
    return text[:at] + new + text[end:]


def _forbidden(canary: Path, r: random.Random) -> bytes:
    """A pickle that would make the canary."""
    call, word = r.choice(
        [
            (b"os\nsystem", f"touch {canary}"),
            (b"posix\nsystem", f"touch {canary}"),
            (b"builtins\nexec", f"open({str(canary)!r}, 'w')"),
            (b"builtins\neval", f"open({str(canary)!r}, 'w')"),
            (b"torch.serialization\nos.system", f"touch {canary}"),
            (b"torch.distributed.checkpoint.filesystem\nos.system", f"touch {canary}"),
            (b"deepspeed.x\nos.system", f"touch {canary}"),
            (b"pathlib\nPath.touch", str(canary)),
        ]
    )
    text = word.encode()
    argument = b"X" + struct.pack("<I", len(text)) + text
    if b"touch" in call:
        argument = b"cpathlib\nPosixPath\n" + argument + b"\x85R"
    return b"\x80\x02}X\x01\x00\x00\x00wc" + call + b"\n" + argument + b"\x85Rs."


def _archive(file: Path, canary: Path, r: random.Random) -> Damage | None:
    kind = r.choice(["compressed", "a record less", "a record twice", "swapped", "bomb", "many"])
    if not zipfile.is_zipfile(file) or file.read_bytes()[:4] != _ZIP:
        return None
    with zipfile.ZipFile(file) as archive:
        names = archive.namelist()
    chosen, other = r.sample(names, 2)
    held: dict[str, bytes] = {}
    with zipfile.ZipFile(file) as archive:
        held = {name: archive.read(name) for name in (chosen, other)}

    def change(name: str, data: bytes) -> Any:
        if kind == "bomb" and name.endswith("data.pkl"):
            return [(name, b"\x80\x02(" + b"N" * 30_000_000 + b"l.", zipfile.ZIP_DEFLATED)]
        if kind == "many" and name == chosen:
            return [(name, data), *((f"{name}.{i}", b"") for i in range(2000))]
        if name not in held:
            return [(name, data)]
        match kind:
            case "compressed":
                return [(name, data, zipfile.ZIP_DEFLATED)]
            case "a record less":
                return [] if name == chosen else [(name, data)]
            case "a record twice":
                return [(name, data), (name, data[::-1])] if name == chosen else [(name, data)]
            case "swapped":
                return [(name, held[other if name == chosen else chosen])]
        return [(name, data)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _rewritten(file, change)
    return Damage(f"archive: {kind}", is_sealed=True)


def _folder(file: Path, canary: Path, r: random.Random) -> Damage | None:
    outside = canary.with_name("outside")
    kind = r.choice(
        ["missing", "empty", "link out", "device", "directory", "pipe", "loop", "swap", "extra"]
    )
    if kind == "link out":
        shutil.copy(file, outside)
    siblings = [path for path in file.parent.iterdir() if path.is_file() and path != file]
    match kind:
        case "missing":
            file.unlink()
        case "empty":
            file.write_bytes(b"")
        case "link out" | "device" | "loop":
            file.unlink()
            target = {"link out": outside, "device": Path("/dev/zero"), "loop": file}[kind]
            file.symlink_to(target)
        case "directory":
            file.unlink()
            file.mkdir()
        case "pipe":
            file.unlink()
            os.mkfifo(file)
        case "swap":
            if not siblings:
                return None
            other, spare = r.choice(siblings), file.with_name("spare")
            file.rename(spare)
            other.rename(file)
            spare.rename(other)
        case "extra":
            names = [file.name.replace(old, "7") for old in "0123" if old in file.name]
            shutil.copy(file, file.with_name(r.choice(names or [f"x{file.name}"])))
    return Damage(
        f"folder: {kind}", is_sealed=kind in ("swap", "extra"), is_allowed=kind != "link out"
    )


_KINDS = [_bytes, _bytes, _json, _json, _pickle, _pickle, _archive, _folder]
