"""Damaged and hostile files of every reader: right values or an error of zfun, and no code runs."""

from __future__ import annotations

import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.faults.programs import hostile
from zfun import sources
from zfun.errors import CorruptCheckpoint, UntrustedCheckpoint

FIXTURES = hostile.FIXTURES
UNIVERSAL = FIXTURES / "deepspeed" / "universal3-bf16"


@pytest.mark.timeout(60)
def test_damaged_input_is_refused_or_read_right() -> None:
    found = list(hostile.run_all(range(100)))
    assert [result for result in found if result.is_broken] == []
    assert sum(result.kind == "refused" for result in found) > 60


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_thousand_damaged_inputs_are_refused_or_read_right() -> None:
    """`python -m tests.faults.programs.hostile 0 2000` prints the counts."""
    found = list(hostile.run_all(range(100, 2100)))
    assert [result for result in found if result.is_broken] == []


def rewritten(file: Path, change: Callable[[str, bytes], bytes], **options: Any) -> None:
    """Write an archive again; ``change`` returns the bytes of a record."""
    with zipfile.ZipFile(file) as archive:
        records = [(name, archive.read(name)) for name in archive.namelist()]
    with zipfile.ZipFile(file, "w", **options) as archive:
        for name, data in records:
            archive.writestr(name, change(name, data))


@pytest.mark.parametrize("ending", ["data.pkl", "byteorder", "data/0", "data/1"])
def test_every_byte_that_torch_wrote_is_compared_with_its_checksum(
    ending: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.pt"
    leaves = {"w": torch.arange(300.0), "odd": torch.full((3, 4), 0.5).T}
    torch.save(leaves, file)
    with zipfile.ZipFile(file) as archive:
        data = archive.read(f"model/{ending}")
    whole = file.read_bytes()
    # The middle of a tensor, or the digits of a number in the pickle.
    at = whole.index(data) + len(data) // 2
    file.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    with pytest.raises(
        CorruptCheckpoint, match=rf"another checksum for the entry 'model/{ending}'"
    ):
        {name: leaf.load() for name, leaf in sources.state_dict(file).items()}


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        torch.save({"w": torch.arange(300.0)}, tmp_path / "model.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert sources.state_dict(tmp_path / "model.pt")["w"].load().tolist() == list(range(300))


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_an_archive_with_an_entry_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.pt"
    torch.save({"w": torch.ones(2)}, file)
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("model/data/0", bytes(8))
    with pytest.raises(CorruptCheckpoint, match=r"a record twice"):
        sources.state_dict(file)


def deep_tuple(depth: int) -> bytes:
    """Operations of a list whose tuples each hold the one before twice; the last is a key."""
    return b"]K\x01q\x01a" + b"h\x01h\x01\x86q\x01a" * depth + b"}h\x01K\x01s\x86."


@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["archive", "old", "metadata"])
def test_a_tuple_that_repeats_itself_is_refused_before_its_hash_is_taken(
    kind: str, tmp_path: Path
) -> None:
    file, text = tmp_path / "model.pt", b"\x80\x02" + deep_tuple(60)
    if kind == "archive":
        torch.save({"w": torch.ones(2)}, file)
        rewritten(file, lambda name, data: text if name.endswith("data.pkl") else data)
    elif kind == "old":
        torch.save({"w": torch.ones(2)}, file, _use_new_zipfile_serialization=False)
        with file.open("rb") as stream:
            start = [pickle.load(stream) for _ in range(3)]
        file.write_bytes(b"".join(pickle.dumps(value, 2) for value in start) + text)
    else:
        (tmp_path / ".metadata").write_bytes(text)
    with pytest.raises(CorruptCheckpoint, match=r"values in tuples that repeat"):
        sources.dcp(tmp_path) if kind == "metadata" else sources.state_dict(file)


@pytest.mark.timeout(20)
def test_the_message_about_a_shape_of_lists_that_repeat_is_short(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    sources.write_dcp(tmp_path, sources.tensors({"model.w": torch.ones(2)}))
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    sizes: Any = [0]
    for _ in range(60):
        sizes = [sizes, sizes]
    chunk: Any = ChunkStorageMetadata(torch.Size([0]), torch.Size([2]))
    chunk.sizes = sizes
    metadata.state_dict_metadata["model.w"].chunks = [chunk]
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match=r"a shape is a sequence of sizes; got \[\["):
        sources.dcp(tmp_path)


@pytest.mark.parametrize("kind", ["loop", "chain"])
def test_links_in_a_circle_are_an_error_of_the_reader(kind: str, tmp_path: Path) -> None:
    folder = shutil.copytree(FIXTURES / "dcp" / "sharded", tmp_path / "dcp")
    file = folder / "__0_0.distcp"
    file.unlink()
    file.symlink_to(file if kind == "loop" else folder / "b")
    if kind == "chain":
        (folder / "b").symlink_to(file)
    with pytest.raises(CorruptCheckpoint, match=r"has the files that its metadata names"):
        sources.dcp(folder).params["0.weight"].load()


@pytest.mark.parametrize("slot", ["exp_avg", "exp_avg_sq", "fp32"])
def test_a_parameter_without_a_tensor_that_the_others_have_is_refused(
    slot: str, tmp_path: Path
) -> None:
    folder = shutil.copytree(UNIVERSAL, tmp_path / "run")
    (folder / "zero" / "inner.weight" / f"{slot}.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match=rf"'inner\.weight' has no {slot}"):
        sources.deepspeed(folder)


def test_parameters_of_two_optimizers_have_tensors_of_their_own(tmp_path: Path) -> None:
    folder = shutil.copytree(UNIVERSAL, tmp_path / "run")
    inner = folder / "zero" / "inner.weight"
    (inner / "exp_avg.pt").rename(inner / "momentum_buffer.pt")
    (inner / "exp_avg_sq.pt").unlink()
    assert list(sources.deepspeed(folder).moments["momentum_buffer"]) == ["inner.weight"]


FOLDERS: dict[str, tuple[Callable[[Path], Any], str, Callable[[Path], Any]]] = {
    "safetensors": (
        lambda path: save_file({"w": torch.ones(2)}, path / "model.safetensors"),
        "model.safetensors",
        sources.huggingface,
    ),
    "pickle": (
        lambda path: torch.save({"w": torch.ones(2)}, path / "pytorch_model.bin"),
        "pytorch_model.bin",
        sources.huggingface,
    ),
    "index": (
        lambda path: hostile._write_split(path, "safetensors", save_file),
        "model.safetensors.index.json",
        sources.safetensors,
    ),
    "index of pickles": (
        lambda path: hostile._write_split(path, "bin", torch.save),
        "pytorch_model.bin.index.json",
        sources.huggingface,
    ),
    "metadata": (
        lambda path: shutil.copytree(FIXTURES / "dcp" / "sharded", path, dirs_exist_ok=True),
        ".metadata",
        sources.dcp,
    ),
    "latest": (
        lambda path: shutil.copytree(
            FIXTURES / "deepspeed" / "stage1-fp32", path, dirs_exist_ok=True
        ),
        "latest",
        sources.deepspeed,
    ),
    "zero": (
        lambda path: shutil.copytree(UNIVERSAL, path, dirs_exist_ok=True),
        "zero",
        sources.deepspeed,
    ),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_the_first_file_of_a_folder_is_no_link_out(case: str, tmp_path: Path) -> None:
    make, name, read = FOLDERS[case]
    folder = tmp_path / "folder"
    folder.mkdir()
    make(folder)
    assert read(folder)
    (folder / name).rename(tmp_path / "elsewhere")
    (folder / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UntrustedCheckpoint, match=r"lie in its folder; got .*a link to"):
        read(folder)


def test_a_tensor_that_the_index_does_not_name_is_read_too(tmp_path: Path) -> None:
    hostile._write_split(tmp_path, "safetensors", save_file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace('"w": "part-0.safetensors", ', ""))
    assert sorted(sources.huggingface(tmp_path)) == sorted(hostile.params_of())
