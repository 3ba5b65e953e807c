"""A manifest that a stranger wrote: refused by a clear error, before anything uses it."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zfun as zf
from tests import fuzz_manifest
from tests.faulty_files import FaultyFiles
from zfun.checkpoint import parse_manifest, step_path
from zfun.errors import CheckpointError, CorruptCheckpoint

pytestmark = pytest.mark.timeout(60)


def forged(text: bytes) -> bytes:
    """Give any text the hash that a manifest ends with."""
    return text + f'"sha256":"{hashlib.sha256(text).hexdigest()}"}}\n'.encode()


def state_of(value: float) -> dict[str, Any]:
    return {"w": torch.full((30, 2), value), "b": torch.full((5,), value), "rate": value}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("hostile")
    zf.save(path, state_of(1.0), step=1, data={"note": [1, 2.5, "x", None]})
    return Path(step_path(path))


def body_of(directory: Path) -> dict[str, Any]:
    found = json.loads((directory / "manifest.json").read_bytes())
    del found["sha256"]
    return dict(found)


def written(body: dict[str, Any]) -> bytes:
    return forged(json.dumps(body).encode()[:-1] + b",")


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Put the last value at a place in the manifest."""

    def change(body: dict[str, Any]) -> None:
        at: Any = body
        for key in path[:-2]:
            at = at[key]
        at[path[-2]] = path[-1]

    return change


def nested(depth: int) -> Any:
    value: Any = 0
    for _ in range(depth):
        value = [value]
    return value


LEAF, FILE, PIECE = ("leaves", 0), ("files", 0), ("leaves", 0, "pieces", 0)
HOSTILE: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path upwards": (put(*FILE, "name", "../victim/00000.safetensors"), "plain name"),
    "an absolute path": (put(*FILE, "name", "/etc/passwd"), "plain name"),
    "a path in the name": (put(*FILE, "name", "a/00000.safetensors"), "plain name"),
    "a NUL in the name": (put(*FILE, "name", "00000.safetensors\0"), "plain name"),
    "a line end in the name": (put(*FILE, "name", "00000.safetensors\n"), "plain name"),
    "other digits in the name": (put(*FILE, "name", "٠٠٠٠٠.safetensors"), "plain name"),
    "a device": (put(*FILE, "name", "/dev/zero"), "plain name"),
    "the manifest as a file": (put(*FILE, "name", "manifest.json"), "plain name"),
    "a file twice": (lambda m: m["files"].append(m["files"][0]), "occurs once|follow each other"),
    "a huge file": (put(*FILE, "bytes", 1 << 61), "chunks; got"),
    "a file beyond all numbers": (put(*FILE, "bytes", 1 << 80), "is an integer from"),
    "a huge header": (put(*FILE, "data_start", 1 << 40), "data_start"),
    "a short header": (put(*FILE, "data_start", 0), "data_start"),
    "a hash that is none": (put(*FILE, "chunks", ["x" * 64]), "16 hexadecimal"),
    "a hash of another kind": (put("hash", "md5"), "one of xxh64, sha256"),
    "a hash that is code": (put("hash", ["sha256"]), "one of xxh64, sha256"),
    "hashes of another length": (put("hash", "sha256"), "64 hexadecimal"),
    "too few hashes": (put(*FILE, "chunks", []), "chunks; got 0"),
    "a leaf with a path upwards": (put(*LEAF, "key", "../../w"), "no path upwards"),
    "a leaf with an absolute path": (put(*LEAF, "key", "/w"), "no path upwards"),
    "a leaf with a NUL": (put(*LEAF, "key", "w\0"), "control characters"),
    "a leaf with a long name": (put(*LEAF, "key", "w" * 5000), "4096 characters"),
    "a leaf without a name": (put(*LEAF, "key", ""), "4096 characters"),
    "a leaf of no text": (put(*LEAF, "key", ["w"]), "4096 characters"),
    "half a character": (put(*LEAF, "key", "w\ud800"), "control characters"),
    "a leaf twice": (lambda m: m["leaves"].append(m["leaves"][0]), "occurs once"),
    "a huge shape": (put(*LEAF, "shape", [1 << 61, 1 << 61]), "elements; got"),
    "a negative shape": (put(*LEAF, "shape", [-30, -2]), "is an integer from"),
    "a shape of fractions": (put(*LEAF, "shape", [30.0, 2]), "is an integer from"),
    "a shape of truth values": (put(*LEAF, "shape", [True, 60]), "is an integer from"),
    "many dims": (put(*LEAF, "shape", [1] * 5000), "at most 64 dims"),
    "a dtype of Python": (put(*LEAF, "dtype", "object"), "a dtype of torch"),
    "a dtype that is code": (put(*LEAF, "dtype", "__import__('os')"), "a dtype of torch"),
    "another dtype": (put(*LEAF, "dtype", "float64"), "follow each other|ends with"),
    "a rank too many": (put(*LEAF, "rank", 1), "rank of"),
    "a rank for one": (put(*LEAF, "rank", 0), ""),
    "a piece in no file": (put(*PIECE, 0, 9), "is an integer from 0 to 0"),
    "a piece before the file": (put(*PIECE, 1, -4), "is an integer from"),
    "a piece in the header": (put(*PIECE, 1, 8), "follow each other"),
    "a piece beyond the file": (put(*PIECE, 1, 1 << 40), "follow each other"),
    "a piece that begins late": (put(*PIECE, 2, 1), "without gap or overlap"),
    "a long piece": (put(*PIECE, 3, 1 << 50), "elements; got"),
    "an empty piece": (put(*PIECE, 3, 0), "is an integer from 1"),
    "a piece twice": (
        lambda m: m["leaves"][0]["pieces"].append(m["leaves"][0]["pieces"][0]),
        "without gap or overlap",
    ),
    "no pieces": (put(*LEAF, "pieces", []), "elements; got 0"),
    "a piece of text": (put(*LEAF, "pieces", ["abcd"]), "four integers"),
    "a leaf less": (lambda m: m["leaves"].pop(), "ends with the last piece|follow each other"),
    "more fields": (put("command", "rm"), "has the fields"),
    "fewer fields": (lambda m: m.pop("ranks"), "has the fields"),
    "more fields in a leaf": (put(*LEAF, "reduce", "os.system"), "has the fields"),
    "another format": (put("format", "pickle"), "format of a manifest"),
    "a newer version": (put("version", 2), "reads version 1"),
    "a version of text": (put("version", "1"), "reads version 1"),
    "no ranks": (put("ranks", 0), "ranks is an integer"),
    "a million million ranks": (put("ranks", 10**12), "ranks is an integer"),
    "a tie to nothing": (put("ties", {"x": "nothing"}), "a tie joins"),
    "a tie of itself": (put("ties", {"w": "w"}), "a tie joins"),
    "a master of nothing": (put("masters", {"w": "nothing"}), "master weight"),
    "optional nothing": (put("optional", ["nothing"]), "an optional key"),
    "a value that is a list": (put("values", {"rate": [1]}), "plain values"),
    "few ranks in rng": (put("rng", [{}, {}]), "one entry for each"),
    "chunks of one byte": (put("chunk_bytes", 1), "chunk_bytes is an integer"),
    "chunks of odd length": (put("chunk_bytes", 5000), "multiple of 4096"),
    "leaves as a dict": (put("leaves", {}), "leaves is a list"),
    "a list as manifest": (put("composition", []), "composition is a dict"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(directory: Path, tmp_path: Path, name: str) -> None:
    change, message = HOSTILE[name]
    body = body_of(directory)
    change(body)
    target = tmp_path / "step-00000001"
    target.mkdir()
    (target / "manifest.json").write_bytes(written(body))
    (target / "00000.safetensors").write_bytes((directory / "00000.safetensors").read_bytes())
    files = FaultyFiles()
    if not message:
        # One rank that owns a value may share the value.
        parse_manifest(written(body))
        return
    like = state_of(2.0)
    with pytest.raises(CorruptCheckpoint, match=message):
        zf.load(target, like, files=files)
    assert files.opened == [str(target / "manifest.json")]
    assert torch.equal(like["w"], state_of(2.0)["w"])


TEXTS = {
    "no JSON": b"{nonsense,",
    "NaN": b'{"step":NaN,',
    "infinity": b'{"step":-Infinity,',
    "a key twice": b'{"step":1,"step":2,',
    "a deep nest": b'{"data":' + b"[" * 200_000 + b"]" * 200_000 + b",",
    "a huge number": b'{"step":' + b"9" * 100_000 + b",",
    "no UTF-8": b'{"step":"\xff\xfe",',
    "nothing": b"{",
}


@pytest.mark.parametrize("name", TEXTS)
def test_text_that_is_no_plain_json_is_refused(name: str) -> None:
    with pytest.raises(CorruptCheckpoint):
        parse_manifest(forged(TEXTS[name]))


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": ["float32", [1 << 40], "AAAA"]},
        {"$tensor": ["float32", [2], "AAAA"]},
        {"$tensor": ["object", [1], "AAAA"]},
        {"$array": ["|O", [1], "AAAA"]},
        {"$array": ["<f4", [-1, 0], "AAAA"]},
        {"$array": ["S9999999999", [1], "AAAA"]},
        {"$bytes": "not base64!"},
        {"$float": "1e5"},
        {"$dict": [[[], 1]]},
        {"$tuple": "text"},
        {"$code": "import os"},
        nested(400),
    ],
    ids=lambda value: str(value)[:30],
)
def test_hostile_data_of_the_caller_is_refused(directory: Path, tmp_path: Path, value: Any) -> None:
    body = copy.deepcopy(body_of(directory))
    body["data"] = value
    target = tmp_path / "step-00000001"
    target.mkdir()
    (target / "manifest.json").write_bytes(written(body))
    (target / "00000.safetensors").write_bytes((directory / "00000.safetensors").read_bytes())
    with pytest.raises(CorruptCheckpoint):
        zf.load(target, state_of(2.0))


def forged_with(directory: Path, to: Path, **changes: Any) -> Path:
    target = to / "step-00000001"
    target.mkdir()
    (target / "manifest.json").write_bytes(written({**body_of(directory), **changes}))
    for file in directory.glob("*.safetensors"):
        (target / file.name).write_bytes(file.read_bytes())
    return target


@pytest.mark.parametrize(
    "value",
    [5, "text", {}, {"named": {}}, {"default": [1], "named": {}}, {"default": {"torch": 1}}],
    ids=str,
)
def test_hostile_states_of_generators_are_refused(
    directory: Path, tmp_path: Path, value: Any
) -> None:
    target = forged_with(directory, tmp_path, rng=[value])
    with pytest.raises(CorruptCheckpoint, match=r"random generators of a checkpoint are kept by"):
        zf.load(target, state_of(2.0))


def test_a_generator_takes_no_number_that_is_too_large(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    saved = Path(zf.save(tmp_path / "good", {}, step=1, rng={"mine": generator}).path)
    rng = body_of(saved)["rng"]
    rng[0]["named"]["mine"]["state"]["state"] = 10**60
    with pytest.raises(CheckpointError, match=r"a generator takes the state of one of its kind"):
        zf.load(forged_with(saved, tmp_path, rng=rng), {}, rng={"mine": generator})


@pytest.mark.parametrize("part", ["rng", "loader"])
def test_what_belongs_to_one_rank_is_refused_on_all(tmp_path: Path, part: str) -> None:
    def first(group: Any) -> str:
        state = {"w": zf.replicate({"x": torch.ones(50)}, group)}
        return zf.save(tmp_path / "good", state, step=1).path

    saved = Path(zf.simulate(2, first)[0])
    held = body_of(saved)[part]
    held[1] = {"$code": "import os"}
    target = forged_with(saved, tmp_path, **{part: held})

    def second(group: Any) -> None:
        like = {"w": zf.replicate({"x": torch.zeros(50)}, group)}
        with pytest.raises(CheckpointError, match=r"a plain value has a known form"):
            zf.load(target, like)
        assert torch.equal(zf.unshard(like["w"])["x"], torch.zeros(50))

    zf.simulate(2, second)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "5", '{"w": -1}', '{"w": 1.5}', '{"w": "1"}', '{"w": true}', "[" * 9000]
)
def test_missed_steps_that_are_no_numbers_by_path_are_refused(text: str, tmp_path: Path) -> None:
    zero = zf.zero(1, lambda params, x: params["w"].sum(), zf.optim.adamw(0.1), zf.process_group())
    saved = Path(zf.save(tmp_path / "good", zero.init({"w": torch.ones(2)}), step=1).path)
    values = {**body_of(saved)["values"], "missed": text}
    like = zero.init({"w": torch.zeros(2)})
    with pytest.raises(
        CorruptCheckpoint, match="steps that leaves have missed are numbers by path"
    ):
        zf.load(forged_with(saved, tmp_path, values=values), like)
    assert torch.equal(zero.params(like)["w"], torch.zeros(2))


def test_random_manifests_are_read_or_refused() -> None:
    assert fuzz_manifest.run(400, seed=3).refused > 200
