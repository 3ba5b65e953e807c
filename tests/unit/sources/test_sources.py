"""Deferred leaves: files that are wrong, initialisers that are wrong, and ranks that differ."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

import zfun as zf
from zfun.errors import CorruptCheckpoint, LeafError, OptionError, SpecMismatch, UntrustedCheckpoint
from zfun.testing import assert_same_bits

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def loaded(params: Any) -> Any:
    return zf.tree.map(lambda leaf: leaf.load(), params)


def written(folder: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """Write a file with a header of our own."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file = folder / "model.safetensors"
    file.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return folder


def entry(**changes: Any) -> dict[str, Any]:
    return {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes}


def test_every_dtype_is_read(tmp_path: Path) -> None:
    tensors = {str(dtype): torch.arange(6).view(2, 3).to(dtype) for dtype in DTYPES}
    tensors |= {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5)}
    save_file(tensors, tmp_path / "model.safetensors")
    for path in (tmp_path, tmp_path / "model.safetensors", str(tmp_path)):
        found = loaded(zf.sources.safetensors(path))
        assert_same_bits({name: found[name] for name in tensors}, tensors)
        assert len(found) == len(tensors)


def test_blocks_come_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    names = ["h.0.b", "h.0.w", "h.2.w", "h.10.w", "out"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    assert list(zf.sources.safetensors(tmp_path)) == names


def test_floating_leaves_are_converted_where_asked(tmp_path: Path) -> None:
    # More than one piece of the file, so that the pieces must join.
    w = torch.randn(2**23 + 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    save_file({"w": w, "count": torch.tensor([3])}, tmp_path / "model.safetensors")
    found = loaded(zf.sources.safetensors(tmp_path, dtype=torch.float32))
    assert_same_bits(found, {"count": torch.tensor([3]), "w": w.float()})


def test_tied_leaves_are_in_a_file_once(tmp_path: Path) -> None:
    save_file({"head": torch.ones(2, 3)}, tmp_path / "model.safetensors")
    tied = torch.empty(2, 3, device="meta")
    params = zf.sources.safetensors(tmp_path, {"wte": tied, "head": tied.detach()})
    assert params["wte"] is params["head"]
    whole = zf.simulate(1, lambda group: zf.unshard(zf.shard(params, group)))[0]
    assert whole["wte"] is whole["head"]


W = {"w": torch.empty(2, device="meta")}
HEADERS: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{}x", r"model.safetensors is JSON with different keys; got Extra data"),
    "no object": ([], r"has list where the format has a JSON object"),
    "no text": (b"\xff\xff", r"is JSON with different keys; got .*codec"),
    "deep": (b"[" * 100_000, r"is JSON with different keys; got .*recursion"),
    "a name twice": (b'{"w": 1, "w": 2}', r"is JSON with different keys; got .*'w'"),
    "no fields": ({"w": 3}, r"shape and data_offsets"),
    "a negative size": (entry(shape=[-2]), r"shape and data_offsets"),
    "a size that is no number": (entry(shape=["2"]), r"shape and data_offsets"),
    "a huge size": (entry(shape=[2**63]), r"shape and data_offsets"),
    "a size of many digits": (b'{"w": {"shape": [' + b"1" * 5000 + b"]}}", r"is JSON with"),
    "a size of a bool": (entry(shape=[True, 2]), r"shape and data_offsets"),
    "sizes and bytes that differ": (entry(shape=[2**40]), r"8 bytes for 'w' where the format has"),
    "offsets backwards": (entry(data_offsets=[8, 0]), r"-8 bytes for 'w'"),
    "three offsets": (entry(data_offsets=[0, 8, 9]), r"shape and data_offsets"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_a_header_that_breaks_the_format_is_refused(case: str, tmp_path: Path) -> None:
    header, message = HEADERS[case]
    with pytest.raises(CorruptCheckpoint, match=message):
        zf.sources.safetensors(written(tmp_path, header, bytes(8)))


def two(first: list[int], second: list[int]) -> dict[str, Any]:
    """A header of two tensors of one float32 each, at these bytes."""
    place = {"dtype": "F32", "shape": [1]}
    return {"a": {**place, "data_offsets": first}, "b": {**place, "data_offsets": second}}


@pytest.mark.parametrize(
    ("header", "num_bytes"),
    [
        (two([0, 4], [0, 4]), 4),
        (two([0, 4], [2, 6]), 6),
        (two([4, 8], [8, 12]), 12),
        (two([0, 4], [8, 12]), 12),
        (two([0, 4], [4, 8]), 9),
    ],
    ids=["shared", "overlapping", "late", "a hole", "trailing"],
)
def test_bytes_that_are_no_ones_or_two_tensors_are_refused(
    header: dict[str, Any], num_bytes: int, tmp_path: Path
) -> None:
    """The library refuses them too."""
    folder = written(tmp_path, header, bytes(num_bytes))
    with pytest.raises(
        CorruptCheckpoint, match=r"must follow the format; .* download the file again"
    ):
        zf.sources.safetensors(folder)
    with pytest.raises(SafetensorError):
        load_file(folder / "model.safetensors")


@pytest.mark.parametrize("length", [0, 1, 10**6, 2**40, 2**64 - 1])
def test_a_header_is_no_longer_than_the_file(length: int, tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=rf"a header of {length} bytes in \d+ where"):
        zf.sources.safetensors(written(tmp_path, entry(), bytes(8), length=length))


def test_a_dtype_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LeafError, match=r"'w' in .* is 'F4'; convert the file") as caught:
        zf.sources.safetensors(written(tmp_path, entry(dtype="F4"), bytes(8)))
    assert caught.value.leaf == "w"


def test_a_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpoint, match=r"has \d+ bytes where .* 'w' up to byte \d+; down"):
        zf.sources.safetensors(written(tmp_path, entry(), bytes(7)))


def test_a_file_that_is_cut_after_the_header_was_read_is_refused(tmp_path: Path) -> None:
    params = zf.sources.safetensors(written(tmp_path, entry(), bytes(8)))
    written(tmp_path, entry(), bytes(5))
    with pytest.raises(CorruptCheckpoint, match=r"end of file at byte \d+, 3 bytes early; copy"):
        params["w"].load()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"No such file.*model.safetensors"):
        params["w"].load()


def test_a_folder_without_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"a folder with model.safetensors or .*; got '"):
        zf.sources.safetensors(tmp_path)
    with pytest.raises(OptionError, match=r"a folder with model.safetensors"):
        zf.sources.safetensors(tmp_path / "nowhere")


MISSING: dict[str, tuple[dict[str, Tensor], str]] = {
    "a leaf": (
        {"h.counts": torch.empty(2)},
        r"missing 'h.counts' \(near: 'count'\); name_of=",
    ),
    "another shape": (
        {"w": torch.empty(3)},
        r"; of another shape or kind 'w' is \(2,\), not \(3,\)",
    ),
    "a dtype that is no float": (
        {"count": torch.empty(2)},
        r"of another shape or kind 'count' is torch.int64, not torch.float32",
    ),
}


@pytest.mark.parametrize("case", MISSING)
def test_files_that_do_not_fit_the_model_are_refused(case: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2), "count": torch.ones(2).long()}, tmp_path / "model.safetensors")
    params, message = MISSING[case]
    with pytest.raises(SpecMismatch, match=message):
        zf.sources.safetensors(tmp_path, params)
    with pytest.raises(LeafError, match=r"leaf 'w' is int; pass a meta tensor"):
        zf.sources.safetensors(tmp_path, {"w": 3})


def folder_of_splits(folder: Path, index: Any, **files: dict[str, Tensor]) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / f"{name}.safetensors")
    text = index if isinstance(index, str) else json.dumps(index)
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return folder


SPLITS: dict[str, tuple[Any, type[Exception], str]] = {
    "two files with one name": (
        {"weight_map": {"w": "a.safetensors", "v": "b.safetensors"}},
        CorruptCheckpoint,
        r"'w' is in .*a.safetensors and in .*b.safetensors; remove one",
    ),
    "a name that no file has": (
        {"weight_map": {"u": "a.safetensors"}},
        CorruptCheckpoint,
        r"'u' is missing from a.safetensors; copy the folder again",
    ),
    "a file that is not there": (
        {"weight_map": {"w": "c.safetensors"}},
        CorruptCheckpoint,
        r"No such file.*c.safetensors'; copy the directory again",
    ),
    "a file outside of the folder": (
        {"weight_map": {"w": "../a.safetensors"}},
        UntrustedCheckpoint,
        r"names files of its own directory; got '../a.safetensors'",
    ),
    "a name with a zero": (
        {"weight_map": {"w": "a\0.safetensors"}},
        UntrustedCheckpoint,
        r"names files of its own directory",
    ),
    "a long name": (
        {"weight_map": {"w": "x" * 5000}},
        UntrustedCheckpoint,
        r"of its own directory",
    ),
    "no map": ({}, CorruptCheckpoint, r"has a weight_map; got .* without"),
    "a map of numbers": ({"weight_map": {"w": 3}}, UntrustedCheckpoint, r"directory; got 3"),
}


@pytest.mark.parametrize("case", SPLITS)
def test_an_index_that_is_wrong_is_refused(case: str, tmp_path: Path) -> None:
    index, kind, message = SPLITS[case]
    w = torch.ones(2)
    folder = folder_of_splits(tmp_path, index, a={"w": w}, b={"v": w, "w": w.clone()})
    with pytest.raises(kind, match=message):
        zf.sources.safetensors(folder)


@pytest.mark.timeout(10)
def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    folder = folder_of_splits(tmp_path, {"weight_map": {"w": "pipe"}})
    os.mkfifo(folder / "pipe")
    with pytest.raises(UntrustedCheckpoint, match=r"consists of regular files; got .*pipe"):
        zf.sources.safetensors(folder)


# Initialisers, and ranks that differ.

SPECS = {"a": torch.empty(3, device="meta"), "w": torch.empty(2, 2, device="meta")}
WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (
        lambda spec: torch.ones(4),
        r"is torch.float32 \(2, 2\) and was made as torch.float32 \(4,\); return a tensor of",
    ),
    "another dtype": (lambda spec: torch.ones(2, 2).double(), r"made as torch.float64 \(2, 2\)"),
    "no values": (lambda spec: spec, r"made as torch.float32 \(2, 2\) on meta; return a tensor"),
    "no tensor": (lambda spec: [[1.0] * 2] * 2, r"leaf 'w' was made as list"),
}


def start(group: zf.Group, params: Any, how: str, init: str) -> Any:
    if how == "shard":
        return zf.shard(params, group, init=init, bucket_bytes=1)
    loss = lambda params, batch: params["w"].sum()
    z = zf.zero(int(how), loss, zf.optim.adamw(0.1), group, bucket_bytes=1)
    return z.init(params, init=init)


@pytest.mark.parametrize("init", ["check", "broadcast"])
@pytest.mark.parametrize("how", ["shard", "0", "2", "3"])
@pytest.mark.parametrize("case", WRONG)
def test_an_initialiser_that_is_wrong_on_one_rank_is_named_on_all(
    case: str, how: str, init: str
) -> None:
    make, message = WRONG[case]

    def main(group: zf.Group) -> None:
        def initialise(path: str, spec: Tensor) -> Any:
            bad = path == "w" and group.rank == 0
            return make(spec) if bad else torch.ones(spec.shape)

        params = zf.sources.initialised(SPECS, initialise)
        if group.rank == 0:
            with pytest.raises(LeafError, match=message) as caught:
                start(group, params, how, init)
            assert (caught.value.leaf, caught.value.rank) == ("w", 0)
        else:
            with pytest.raises(
                SpecMismatch,
                match=r"leaf w is not made \(LeafError.* on rank 0 and made on ranks 1, 2",
            ):
                start(group, params, how, init)

    zf.simulate(3, main)


def test_an_initialiser_that_raises_raises_its_own_error() -> None:
    def main(group: zf.Group) -> None:
        def initialise(path: str, spec: Tensor) -> Tensor:
            if group.rank == 1:
                raise ZeroDivisionError("mine")
            return torch.ones(spec.shape)

        params = zf.sources.initialised(SPECS, initialise)
        kind = ZeroDivisionError if group.rank == 1 else SpecMismatch
        with pytest.raises(kind, match=r"mine") as caught:
            zf.shard(params, group)
        if group.rank == 1:
            assert "in leaf 'a' on rank 1" in caught.value.__notes__

    zf.simulate(2, main)


@pytest.mark.parametrize("how", ["shard", "0", "1", "3"])
def test_ranks_with_other_values_raise_and_name_the_leaf(how: str) -> None:
    def main(group: zf.Group) -> None:
        initialise = lambda path, spec: torch.full(spec.shape, float(path == "w" and group.rank))
        params = zf.sources.initialised(SPECS, initialise)
        with pytest.raises(SpecMismatch, match=r"leaf w has other values: fingerprint \d+ on"):
            start(group, params, how, "check")

    zf.simulate(2, main)


def test_values_that_rounding_makes_equal_are_equal() -> None:
    """Without master weights the digits that rounding removes play no role."""

    def main(group: zf.Group, precision: Any) -> None:
        initialise = lambda path, spec: torch.full(spec.shape, 1.0 + group.rank * 2**-20)
        z = zf.zero(3, lambda p, b: p["w"].sum(), zf.optim.sgd(0.1), group, precision=precision)
        z.init(zf.sources.initialised(SPECS, initialise))

    zf.simulate(2, main, zf.Precision(param=torch.bfloat16))
    with pytest.raises(SpecMismatch, match=r"leaf a has other values"):
        zf.simulate(2, main, torch.bfloat16)


def test_ranks_of_which_one_has_tensors_raise() -> None:
    def main(group: zf.Group) -> None:
        lazy = zf.sources.initialised({"w": torch.ones(2)}, lambda path, spec: torch.ones(2))
        params = lazy if group.rank else {"w": torch.ones(2)}
        with pytest.raises(SpecMismatch, match=r"torch.float32 \(2,\) \(deferred\) on rank 1"):
            zf.shard(params, group)

    zf.simulate(2, main)


def test_live_bytes_takes_deferred_leaves() -> None:
    params = {"a": torch.ones(40), "w": torch.ones(8, 8)}
    lazy = zf.sources.initialised(params, lambda path, spec: torch.ones(spec.shape))
    loss = lambda params, x: (x @ params["w"]).sum() + params["a"].sum()
    make = lambda group: zf.zero(3, loss, zf.optim.adamw(0.1), group)
    plain, deferred = (
        zf.planner.live_bytes(make, tree, torch.ones(4, 8), 2) for tree in (params, lazy)
    )
    assert plain == deferred


@pytest.mark.parametrize("init", ["check", "broadcast"])
@pytest.mark.parametrize("how", ["shard", "0", "3"])
def test_leaves_on_meta_have_no_values(how: str, init: str) -> None:
    def main(group: zf.Group) -> None:
        with pytest.raises(LeafError, match=r"leaf 'a' is on meta and has none; pass zf.sources"):
            start(group, SPECS, how, init)
        some = SPECS if group.rank else {path: torch.ones(x.shape) for path, x in SPECS.items()}
        with pytest.raises(SpecMismatch, match=r"leaf a is .* and torch.float32 .* on meta on ran"):
            start(group, some, how, init)

    zf.simulate(2, main)


def test_specs_are_tensors() -> None:
    with pytest.raises(LeafError, match=r"leaf 'w' is float; pass a meta tensor"):
        zf.sources.initialised({"w": 3.0}, lambda path, spec: spec)
    (leaf,) = zf.sources.initialised([torch.ones(2, 3)], lambda path, spec: spec)
    assert (leaf.shape, leaf.dtype, leaf.ndim, leaf.numel()) == ((2, 3), torch.float32, 2, 6)
    assert repr(leaf) == "Deferred(0, torch.float32 (2, 3))"


def test_a_store_that_is_full_on_one_rank_is_named_on_all(tmp_path: Path) -> None:
    class Full(zf.files.Files):
        def write(self, fd: int, buffer: Any, offset: int) -> int:
            if len(buffer) > 4096:
                raise OSError(28, "No space left on device")
            return super().write(fd, buffer, offset)

    def main(group: zf.Group) -> None:
        files = Full() if group.rank == 1 else zf.files.Files()
        store = zf.stores.nvme(tmp_path, files=files, block_size=2**20)
        params = zf.sources.initialised(
            {"a": torch.empty(9, device="meta"), "w": torch.empty(9000, device="meta")},
            lambda path, spec: torch.ones(spec.shape),
        )
        z = zf.zero(
            3,
            lambda params, batch: params["w"].sum(),
            zf.optim.sgd(0.1),
            group,
            offload=zf.stores.Offload(params=store),
            bucket_bytes=1,
        )
        kind = zf.errors.OffloadError if group.rank == 1 else SpecMismatch
        with pytest.raises(kind, match=r"No space left on device"):
            z.init(params)
        store.close()

    zf.simulate(2, main)
