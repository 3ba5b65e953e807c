"""Damaged and hostile input for every reader: right values, or an error of zfun.

    python -m tests.faults.programs.hostile FIRST COUNT

Each input is a good checkpoint with one change, which the seed chooses: of bytes, of JSON, of the
operations of a pickle, of the entries of an archive, or of the files of the folder. A reader must
refuse the input by an error of zfun, or return the values of the good checkpoint. Where a format
has no hash, a change may give another good file; then the library's own reader must agree.
"""

from __future__ import annotations

import collections
import contextlib
import io
import json
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed import checkpoint as torch_checkpoint

import zfun as zf
from tests.faults.programs.damage import Damage, damage
from zfun import cli, sources
from zfun.sources import TrainingState

FIXTURES = Path(__file__).parents[2] / "fixtures"
# A read of some kilobytes takes milliseconds.
LIMIT_S = 20.0

Values = dict[str, Any]


@dataclass(frozen=True)
class Reader:
    """A reader of one kind of checkpoint.

    Attributes:
        name: the kind.
        make: writes a good checkpoint into a folder that exists.
        read: returns all values by name.
        peer: reads the same with the library that owns the format, where it is at hand.
        is_hashed: whether every byte has a hash, so that a damaged file has no other good values.
    """

    name: str
    make: Callable[[Path], None]
    read: Callable[[Path], Values]
    peer: Callable[[Path], Values] | None = None
    is_hashed: bool = True


# The good checkpoints.


def params_of() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    return {"w": draw(7, 5), "h.0.b": draw(40), "h.1.b": draw(40).half(), "n": torch.arange(6)}


def _our_state(group: zf.Group, fill: float | None = None) -> dict[str, Any]:
    params = params_of()
    if fill is not None:
        params = {name: torch.full_like(x, fill) for name, x in params.items()}
    return {"params": zf.shard(params, group, bucket_bytes=200), "rate": fill or 0.5}


def _save_ours(path: Path) -> None:
    def main(group: zf.Group) -> None:
        zf.save(path, _our_state(group), step=3, chunk_bytes=4096, data={"x": [1, (2.5,)]})

    zf.simulate(2, main)


def _load_ours(path: Path) -> Values:
    group = zf.collectives.single_group()
    found = zf.load(path, _our_state(group, 7.0))
    values: Values = dict(zf.unshard(found.state["params"]))
    return values | {"rate": found.state["rate"], "step": found.step, "data": found.data}


def _write_split(path: Path, ending: str, write: Callable[[Any, Path], Any]) -> None:
    leaves = params_of()
    places = {}
    for number, part in enumerate((list(leaves)[:2], list(leaves)[2:])):
        file = f"part-{number}.{ending}"
        write({name: leaves[name] for name in part}, path / file)
        places |= dict.fromkeys(part, file)
    stem = "model.safetensors" if ending == "safetensors" else "pytorch_model.bin"
    (path / f"{stem}.index.json").write_text(json.dumps({"weight_map": places}))


def _nested() -> dict[str, Any]:
    leaves = params_of()
    strided = torch.arange(24.0).view(4, 6).T
    state = {"w": leaves["w"], "tied": leaves["w"], "odd": strided, "part": leaves["h.0.b"][7:19]}
    return {"model": state, "extra": [leaves["n"], 5, "text"], "step": 4}


def _peer_folder(path: Path) -> Values:
    """Read a folder as ``from_pretrained`` does: all files that the index names, whole."""
    if (path / "model.safetensors").exists():
        return dict(load_file(path / "model.safetensors"))
    (index,) = path.glob("*.index.json")
    found: Values = {}
    places = json.loads(index.read_text())["weight_map"]
    for file in dict.fromkeys(places.values()):
        found |= load_file(path / file) if file.endswith("s") else torch.load(path / file)
    return found


def _peer_pickle(path: Path) -> Values:
    found: Values = {}

    def walk(value: Any, prefix: str) -> None:
        if isinstance(value, Tensor):
            found[prefix[:-1] or "."] = value
        elif isinstance(value, (dict, list, tuple)):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in pairs:
                walk(inner, f"{prefix}{key}.")

    walk(torch.load(path / "model.pt", weights_only=True), "")
    return found


def _peer_dcp(path: Path) -> Values:
    reader = torch_checkpoint.FileSystemReader(path)
    metadata: dict[str, Any] = dict(reader.read_metadata().state_dict_metadata)
    state = {
        name: torch.empty(tuple(item.size), dtype=item.properties.dtype)
        for name, item in metadata.items()
        if hasattr(item, "size")
    }
    torch_checkpoint.load(state, storage_reader=reader, no_dist=True)
    kinds = {"model.": "", "optim.state.": "moments."}
    found: Values = {}
    for name, tensor in state.items():
        for prefix, new in kinds.items():
            if name.startswith(prefix):
                found[new + name.removeprefix(prefix)] = tensor
    return found


def _of_source(source: Mapping[str, Any], prefix: str = "") -> Values:
    return {prefix + name: leaf.load() for name, leaf in source.items()}


def _of_state(found: TrainingState) -> Values:
    values = _of_source(found.params) | _of_source(found.buffers, "buffers.")
    for slot, leaves in found.moments.items():
        values |= {f"moments.{name}.{slot}": leaf.load() for name, leaf in leaves.items()}
    return values | {"step": found.step, "epoch": found.values.get("epoch")}


def _by_command(kind: str, name: str = "") -> Callable[[Path], Values]:
    """Read by ``zfun ckpt``, which must print an error and end with status 1 or 2."""

    def read(path: Path) -> Values:
        with tempfile.TemporaryDirectory() as out, contextlib.ExitStack() as stack:
            printed = io.StringIO()
            stack.enter_context(contextlib.redirect_stdout(printed))
            stack.enter_context(contextlib.redirect_stderr(printed))
            words = [["inspect", f"{path}"], ["verify", f"{path}"]] if kind == "zfun" else []
            words += [["diff", f"{path}", f"{path}"]] if kind == "zfun" else []
            words += [["export", f"{path / name}", out, "--from", kind]]
            for command in words:
                if status := cli.main(["ckpt", *command]):
                    raise zf.ZfunError(f"status {status}: {printed.getvalue()[-300:]}")
            return dict(load_file(f"{out}/model.safetensors"))

    return read


def _copy(source: Path) -> Callable[[Path], None]:
    def copy(path: Path) -> None:
        shutil.copytree(source, path, dirs_exist_ok=True)

    return copy


def _saved(**options: Any) -> Callable[[Path], None]:
    return lambda path: torch.save(_nested(), path / "model.pt", **options)


def _whole_safetensors(path: Path) -> None:
    save_file(params_of(), path / "model.safetensors", metadata={"format": "pt"})


_LEGACY = {"_use_new_zipfile_serialization": False}
_huggingface = lambda path: _of_source(sources.huggingface(path))
_state_dict = lambda path: _of_source(sources.state_dict(path / "model.pt"))
_deepspeed = lambda path: _of_state(sources.deepspeed(path))
READERS = [
    Reader("zf.load", _save_ours, _load_ours),
    Reader("leaves", _save_ours, lambda path: _of_source(zf.checkpoint.leaves(path))),
    Reader("ckpt of zfun", _save_ours, _by_command("zfun")),
    Reader("safetensors", _whole_safetensors, _huggingface, _peer_folder, False),
    Reader(
        "split safetensors",
        lambda path: _write_split(path, "safetensors", save_file),
        _huggingface,
        _peer_folder,
        False,
    ),
    Reader(
        "split bin", lambda path: _write_split(path, "bin", torch.save), _huggingface, _peer_folder
    ),
    Reader("state_dict", _saved(), _state_dict, _peer_pickle),
    Reader("old state_dict", _saved(**_LEGACY), _state_dict, _peer_pickle, False),
    Reader(
        "dcp",
        _copy(FIXTURES / "dcp" / "sharded"),
        lambda p: _of_state(sources.dcp(p)),
        _peer_dcp,
        False,
    ),
    *(
        Reader(f"deepspeed {name}", _copy(FIXTURES / "deepspeed" / name), _deepspeed)
        for name in ("stage1-fp32", "stage2-bf16", "stage3-bf16", "universal3-bf16")
    ),
    Reader("ckpt of state_dict", _saved(), _by_command("state_dict", "model.pt"), _peer_pickle),
    Reader(
        "ckpt of dcp", _copy(FIXTURES / "dcp" / "sharded"), _by_command("dcp"), _peer_dcp, False
    ),
    Reader(
        "ckpt of deepspeed",
        _copy(FIXTURES / "deepspeed" / "stage2-bf16"),
        _by_command("deepspeed"),
    ),
    Reader(
        "ckpt of huggingface", _whole_safetensors, _by_command("huggingface"), _peer_folder, False
    ),
]


@dataclass(frozen=True)
class Result:
    """The end of one input: ``same``, ``refused``, ``other`` good file, or a broken promise."""

    kind: str
    text: str = ""

    @property
    def is_broken(self) -> bool:
        return self.kind not in ("same", "refused", "other")


def _plain(values: Values) -> Values:
    """Return values that compare by bits."""
    bits = lambda x: (x.dtype, tuple(x.shape), x.contiguous().view(-1).view(torch.uint8).tolist())
    return {name: bits(x.detach()) if isinstance(x, Tensor) else x for name, x in values.items()}


def good(number: int, place: Path) -> tuple[Path, Values]:
    """Write the good checkpoint of a reader into a folder, and return it with its values."""
    folder = place / f"good-{number}"
    if not folder.exists():
        folder.mkdir()
        READERS[number].make(folder)
    return folder, _plain(READERS[number].read(folder))


def run(seed: int, folder: Path, expected: Values) -> Result:
    """Damage a copy of a good checkpoint, and read it."""
    r = random.Random(seed)
    reader = READERS[seed % len(READERS)]
    with tempfile.TemporaryDirectory() as name, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        place = Path(name) / "checkpoint"
        canary = Path(name) / "canary"
        shutil.copytree(folder, place)
        done = damage(place, canary, r)
        label = f"seed {seed}, {reader.name}, {done.kind}"
        begin = time.monotonic()
        try:
            found = _plain(reader.read(place))
        except zf.ZfunError as error:
            result = Result("refused", f"{label}: {type(error).__name__}: {error}")
        except Exception as error:  # noqa: BLE001, an error that is not zfun's is what is looked for
            result = Result("raw", f"{label}: {type(error).__name__}: {error}")
        else:
            result = Result(_verdict(reader, done, place, found, expected), f"{label}")
        if canary.exists():
            result = Result("code run", label)
        if time.monotonic() - begin > LIMIT_S:
            result = Result("slow", label)
    return result


def _verdict(reader: Reader, done: Damage, place: Path, found: Values, expected: Values) -> str:
    if found == expected:
        # The user names a single file, which may be a link.
        is_named = "state_dict" in reader.name and "link" in done.kind
        return "same" if done.is_allowed or is_named else "allowed"
    if reader.is_hashed and not done.is_sealed:
        return "silent"
    if reader.peer is None:
        return "other"
    try:
        theirs = _plain(reader.peer(place))
    except Exception:  # noqa: BLE001, the library refuses in its own ways
        return "silent"
    # A reader of a training state returns more than tensors.
    tensors = {name: value for name, value in found.items() if isinstance(value, tuple)}
    return (
        "other" if all(theirs.get(name) == value for name, value in tensors.items()) else "silent"
    )


def run_all(seeds: range) -> Iterator[Result]:
    with tempfile.TemporaryDirectory() as name:
        held: dict[int, tuple[Path, Values]] = {}
        for seed in seeds:
            number = seed % len(READERS)
            if number not in held:
                held[number] = good(number, Path(name))
            yield run(seed, *held[number])


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main(first: int, count: int) -> int:
    torch.set_num_threads(1)
    # Memory that a file asks for, and does not have, is refused here.
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (2 << 30),) * 2)
    counts: collections.Counter[str] = collections.Counter()
    for result in run_all(range(first, first + count)):
        counts[result.kind] += 1
        if result.is_broken or (len(sys.argv) > 3 and result.kind == sys.argv[3]):
            print(f"{result.kind}: {result.text[:400]}", flush=True)
    print(f"{count} inputs: {dict(counts)}")
    return sum(counts.values()) - counts["same"] - counts["refused"] - counts["other"]


if __name__ == "__main__":
    sys.exit(min(1, main(int(sys.argv[1]), int(sys.argv[2]))))
