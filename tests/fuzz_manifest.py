"""Fuzz the reader of manifests: every input is read or refused, and nothing else happens.

    python -m tests.fuzz_manifest 100000

Each input is a good manifest with random changes of its JSON or of its bytes, and the right hash at
the end, because without that the reader stops at the hash. One in eight inputs keeps a wrong hash.
A manifest that is read must satisfy the rules of the format, as written down here a second time.
"""

from __future__ import annotations

import collections
import hashlib
import json
import random
import sys
import tempfile
import time
import tracemalloc
from typing import Any, NamedTuple

import torch

import zfun as zf
from zfun.checkpoint import Manifest, format_manifest, parse_manifest, step_path
from zfun.checkpoint.format import decode
from zfun.errors import CorruptCheckpoint

# Memory that the reader may take for one input, beside a multiple of its length.
_MAX_BYTES = 8 << 20


class Counts(NamedTuple):
    """Results: inputs that were read, and that were refused."""

    read: int
    refused: int


def samples() -> list[bytes]:
    """Manifests of several forms."""

    def main(group: zf.Group, path: str) -> None:
        loss = lambda params, batch: (params["w"].float() ** 2).sum() + params["b"].float().sum()
        z = zf.zero(3, loss, zf.optim.adamw(0.1), group, precision=torch.float16)
        params = {"w": torch.randn(9, 7), "b": torch.randn(70)}
        state, _ = z.step(z.init(params), None)
        checksum = "sha256" if group.size == 1 else "xxh64"
        zf.save(
            path,
            state,
            checksum=checksum,
            data={"x": [1, 2.5, (3,), b"y"], 4: torch.ones(2)},
            loader=group.rank,
        )

    found = []
    for size in (1, 3):
        with tempfile.TemporaryDirectory() as path:
            zf.simulate(size, main, path)
            with open(f"{step_path(path)}/manifest.json", "rb") as file:  # noqa: PTH123
                found.append(file.read())
    return found


ODD: list[Any] = [
    *(None, True, False, 0, 1, -1, 3, 4096, 1 << 31, 1 << 62, 1 << 63, 1 << 200, 0.5, 1e308),
    *("", "w", "../x", "/etc/passwd", "a\0b", "x" * 5000, "float32", "object", "\ud800"),
    *("00000.safetensors", "00009.safetensors", "f" * 64, "$tensor"),
    *([], [0], [[0, 0, 0, 1]], {}, {"a": 1}, {"$tensor": ["float32", [9], ""]}),
]


def places(value: Any, found: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Every place in a JSON value: the container and the key."""
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    for key in keys:
        found.append((value, key))
        if isinstance(value[key], (dict, list)):
            places(value[key], found)
    return found


def changed(body: Any, r: random.Random) -> Any:
    """Change a few places of a JSON value."""
    for _ in range(r.choice((1, 1, 1, 2, 5))):
        where = places(body, [])
        if not where:
            return body
        box, key = r.choice(where)
        other_box, other_key = r.choice(where)
        kind = r.randrange(7)
        if kind == 0:
            box[key] = r.choice(ODD)
        elif kind == 1:
            del box[key]
        elif kind == 2 and type(box[key]) is int:
            box[key] += r.choice((-1, 1, 4, -4, 4096, 1 << 32))
        elif kind == 3 and isinstance(box, list):
            box.insert(r.randrange(len(box) + 1), json.loads(json.dumps(box[key])))
        elif kind == 4:
            box[key] = json.loads(json.dumps(other_box[other_key]))
        elif kind == 5 and isinstance(box, dict):
            box[str(r.choice(ODD))] = box.pop(key)
        elif isinstance(box, list):
            r.shuffle(box)
    return body


def bent(text: bytes, r: random.Random) -> bytes:
    """Change a few bytes of a text."""
    data = bytearray(text)
    for _ in range(r.choice((1, 1, 2, 8))):
        at = r.randrange(len(data)) if data else 0
        match r.randrange(5):
            case 0 if data:
                data[at] ^= 1 << r.randrange(8)
            case 1:
                del data[at : at + r.choice((1, 2, 100))]
            case 2:
                data[at:at] = r.choice((b"[", b"]", b"{", b"}", b'"', b",", b"0", b"\xff", b"NaN"))
            case 3:
                data[at:at] = bytes(data[at : at + r.choice((1, 10, 200))])
            case _ if data:
                data[at] = r.randrange(256)
    return bytes(data)


def sealed(head: bytes) -> bytes:
    return head + f'"sha256":"{hashlib.sha256(head).hexdigest()}"}}\n'.encode()


def an_input(good: list[bytes], r: random.Random) -> bytes:
    text = r.choice(good)
    head = text[: text.rindex(b'"sha256"')]
    match r.randrange(8):
        case 0:
            return bent(text, r)
        case 1 | 2:
            return sealed(bent(head, r))
    body = changed(json.loads(head.rstrip(b",") + b"}"), r)
    return sealed(json.dumps(body).encode()[:-1] + b",")


def check(manifest: Manifest) -> None:
    """The rules of the format, written a second time: byte by byte where that is possible."""
    names = [file.name for file in manifest.files]
    assert len(set(names)) == len(names)
    for name in names:
        stem, _, suffix = name.partition(".")
        assert suffix == "safetensors"
        assert stem.isascii()
        assert stem.isdigit()
    taken: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
    seen: set[tuple[str, int | None]] = set()
    for leaf in manifest.leaves:
        assert (leaf.key, leaf.rank) not in seen
        seen.add((leaf.key, leaf.rank))
        assert leaf.rank is None or 0 <= leaf.rank < manifest.ranks
        covered = 0
        for piece in leaf.pieces:
            assert piece.first == covered
            assert piece.numel > 0
            covered += piece.numel
            stop = piece.offset + piece.numel * leaf.element.itemsize
            assert 8 <= manifest.files[piece.file].data_start <= piece.offset
            assert stop <= manifest.files[piece.file].num_bytes
            taken[piece.file].append((piece.offset, stop))
        assert covered == leaf.numel
    for index, file in enumerate(manifest.files):
        assert sum(stop - start for start, stop in taken[index]) == file.num_bytes - file.data_start
        assert len(file.chunks) == -(-file.num_bytes // manifest.chunk_bytes)
    text = format_manifest(manifest)
    assert parse_manifest(text) == manifest


def run(count: int, seed: int = 0) -> Counts:
    """Try inputs.

    Raises:
        AssertionError: an input was read that breaks a rule, or took much memory.
        Exception: any error of the reader other than a refusal.
    """
    r = random.Random(seed)
    good = samples()
    read = refused = longest = 0
    try:
        for number in range(count):
            text = an_input(good, r)
            # Following the memory takes several times as long as reading.
            is_traced = number % 16 == 0
            if is_traced:
                tracemalloc.start()
            try:
                manifest = parse_manifest(text)
                for value in (manifest.data, *manifest.rng, *manifest.loader):
                    decode(value)
            except CorruptCheckpoint as error:
                refused += 1
                longest = max(longest, len(str(error)))
            else:
                check(manifest)
                read += 1
            if is_traced:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
                assert peak < _MAX_BYTES + 60 * len(text), (peak, text[:200])
    finally:
        tracemalloc.stop()
    assert longest < 1000, "a message shows little of its input"
    return Counts(read, refused)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    begin = time.monotonic()
    found = run(count, seed=int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(
        f"{count} manifests in {time.monotonic() - begin:.0f} s: {found.refused} refused, "
        f"{found.read} read and within the rules"
    )


if __name__ == "__main__":
    main()
