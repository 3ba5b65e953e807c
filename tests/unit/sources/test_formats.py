"""Checkpoints of other libraries, compared with what these libraries themselves read."""

from __future__ import annotations

import json
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zfun as zf
from tests.conftest import FORM, examples
from zfun import sources
from zfun.errors import (
    CheckpointError,
    CorruptCheckpoint,
    LeafError,
    OptionError,
    SpecMismatch,
    UntrustedCheckpoint,
)
from zfun.sources.deferred import memory_of
from zfun.testing import assert_same_bits

FIXTURES = Path(__file__).parents[2] / "fixtures"
# Beside them lies the compiled code of the script that has written them.
DEEPSPEED = sorted(path for path in (FIXTURES / "deepspeed").glob("[!_]*") if path.is_dir())
DCP = FIXTURES / "dcp" / "sharded"


def in_order(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return dict(sorted(leaves.items()))


def loaded(found: sources.TrainingState) -> dict[str, Tensor]:
    everything = {"fp32": {**found.params, **found.buffers}, **found.moments}
    return {
        f"{slot}.{name}": leaf.load().float()
        for slot, leaves in everything.items()
        for name, leaf in leaves.items()
    }


def test_the_versions_that_wrote_the_fixtures_are_noted() -> None:
    noted = json.loads((FIXTURES / "deepspeed" / "versions.json").read_text())
    assert noted["deepspeed"] == "0.19.8"
    assert [path.name for path in DEEPSPEED] == [
        *(f"stage{stage}-{dtype}" for stage in (1, 2, 3) for dtype in ("bf16", "fp32")),
        *("universal1-fp32", "universal2-bf16", "universal3-bf16"),
    ]


@pytest.mark.parametrize("path", DEEPSPEED, ids=lambda path: path.name)
def test_deepspeed_is_read_as_its_own_converters_read_it(path: Path) -> None:
    found = sources.deepspeed(path)
    wanted = load_file(
        path.with_name(path.name.replace("universal", "stage")) / "expected.safetensors"
    )
    # zero_to_fp32 leaves the frozen parameter of stage 1 out; the model's file has it.
    wanted.setdefault("fp32.scale", torch.tensor([0.5, 1.5, 2.5]))
    assert_same_bits(in_order(loaded(found)), in_order(wanted))
    assert found.params.ties == {"head.weight": "embed.weight"}
    assert next(iter(found.params)) == "scale"  # in the order of the module's state dict
    assert found.step == 3
    assert found.values["epoch"] == 4


def test_deepspeed_trains_on_in_zfun() -> None:
    found = sources.deepspeed(FIXTURES / "deepspeed" / "stage2-bf16")
    like = {name: torch.zeros(leaf.shape) for name, leaf in found.params.items()}
    like["head.weight"] = like["embed.weight"]
    params = sources.place(found.params, like).tree
    loss = lambda params, batch: sum((leaf.float() ** 2).sum() for leaf in params.values())
    group = zf.process_group()
    zero = zf.zero(3, loss, zf.optim.sgd(0.0), group)
    state, _ = zero.step(zero.init(params), torch.ones(1))
    assert_same_bits(
        {name: leaf.float() for name, leaf in zero.params(state).items()},
        {name: leaf.load().float() for name, leaf in found.params.items()},
    )


def test_deepspeed_says_which_rank_is_missing(tmp_path: Path) -> None:
    path = shutil.copytree(FIXTURES / "deepspeed" / "stage3-fp32", tmp_path / "run")
    step = path / "global_step3"
    (step / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"checkpoint of 2 ranks .* got 1 in"):
        sources.deepspeed(path)
    (step / "zero_pp_rank_0_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CorruptCheckpoint, match=r"got those of ranks \[1\]"):
        sources.deepspeed(path)
    (step / "mp_rank_01_model_states.pt").write_bytes(b"")
    with pytest.raises(OptionError, match="ds_to_universal"):
        sources.deepspeed(path)
    (path / "latest").write_text("../elsewhere")
    with pytest.raises(UntrustedCheckpoint, match=r"latest names files .* '../elsewhere'"):
        sources.deepspeed(path)
    with pytest.raises(OptionError, match=r"model_states\.pt; got .*missing"):
        sources.deepspeed(tmp_path / "missing")


def test_dcp_of_two_ranks_is_read_without_a_group() -> None:
    found = sources.dcp(DCP)
    wanted = load_file(FIXTURES / "dcp" / "expected.safetensors")
    whole = {key.replace("fp32.", "model.", 1): leaf for key, leaf in loaded(found).items()}
    assert_same_bits(in_order(whole), in_order(wanted))
    assert found.step == 1
    assert found.values["epoch"] == 4
    assert found.values["optim.param_groups.0.lr"] == 0.01


@pytest.mark.parametrize("name", ["0.weight", "2.weight", "2.bias"])
def test_every_range_of_a_sharded_leaf_is_right(name: str) -> None:
    from zfun.sources._dcp import _contents

    whole = load_file(FIXTURES / "dcp" / "expected.safetensors")[f"model.{name}"].reshape(-1)
    tensor = _contents(DCP)[0][f"model.{name}"]
    for start in range(tensor.numel + 1):
        for stop in range(start, tensor.numel + 1):
            assert torch.equal(tensor.fetch(start, stop), whole[start:stop]), (start, stop)


def test_dcp_reads_what_is_written(tmp_path: Path) -> None:
    leaves = {"model.w": torch.arange(6.0).view(2, 3), "model.b": torch.ones(2).bfloat16()}
    leaves["model.none"], leaves["model.n"] = torch.zeros(0, 3), torch.tensor(7)
    sources.write_dcp(tmp_path / "out", sources.tensors(leaves), values={"epoch": 3})
    state = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()} | {"epoch": 0}
    reader = torch.distributed.checkpoint.FileSystemReader(tmp_path / "out")
    with pytest.warns(UserWarning, match="single process"):
        torch.distributed.checkpoint.load(state, storage_reader=reader, no_dist=True)
    assert state.pop("epoch") == 3
    assert_same_bits(state, leaves)
    again = sources.dcp(tmp_path / "out")
    assert_same_bits({f"model.{name}": leaf.load() for name, leaf in again.params.items()}, leaves)
    with pytest.raises(OptionError, match="must be a new directory"):
        sources.write_dcp(tmp_path / "out", sources.tensors(leaves))
    with pytest.raises(SpecMismatch, match=r"different names; got 'model\.w' twice"):
        sources.write_dcp(tmp_path / "new", sources.tensors(leaves), values={"model.w": 1})
    with pytest.raises(OptionError, match=r"write params='model\.'"):
        sources.dcp(tmp_path / "out", params="module.")


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, Any]:
    """Nested state dicts with ties, views, empty leaves and all kinds of dtypes."""
    made: list[Tensor] = []

    def tensor() -> Tensor:
        if made and draw(st.booleans()):
            return draw(st.sampled_from(made))
        shape = draw(st.lists(st.integers(0, 4), max_size=3))
        dtype = draw(
            st.sampled_from(
                [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
            )
        )
        values = (torch.arange(500) % 7).to(dtype)[: 4 * 4 * 4 * 4]
        start = draw(st.integers(0, 9))
        size = 1
        for length in shape:
            size *= length
        base = values[start : start + size].view(shape)
        view = draw(
            st.sampled_from([lambda x: x, lambda x: x.mT if x.ndim > 1 else x, Tensor.clone])
        )
        made.append(view(base))
        return made[-1]

    names = draw(st.lists(st.text("abc", min_size=1, max_size=3), max_size=4, unique=True))
    return {
        name: draw(st.sampled_from([tensor, lambda: {"in": tensor()}, lambda: [tensor(), 3]]))()
        for name in names
    }


def flat(value: Any, prefix: str = "") -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {prefix[:-1]: value}
    inside = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found: dict[str, Tensor] = {}
    for key, inner in inside:
        found |= flat(inner, f"{prefix}{key}.")
    return found


@settings(max_examples=examples(40))
@given(state=state_dicts(), zipped=st.booleans())
def test_a_file_of_torch_save_is_read_as_torch_reads_it(
    tmp_path_factory: pytest.TempPathFactory, state: dict[str, Any], zipped: bool
) -> None:
    path = tmp_path_factory.mktemp("state") / "state.pt"
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    wanted = flat(torch.load(path, weights_only=True))
    found = sources.state_dict(path)
    assert_same_bits({name: leaf.load() for name, leaf in found.items()}, wanted)
    first: dict[Any, str] = {}
    kept = [(name, first.setdefault(memory_of(leaf), name)) for name, leaf in wanted.items()]
    ties = {name: other for name, other in kept if name != other}
    assert found.ties == ties


class Canary:
    """An object whose pickle writes a file when loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.write_text, (self.path, "code has run")


class Command(Canary):
    def __reduce__(self) -> Any:
        import os

        return os.system, (f"touch {self.path}",)


class Evaluated(Canary):
    def __reduce__(self) -> Any:
        return eval, (f"open({str(self.path)!r}, 'w')",)


HOSTILE = [Canary, Command, Evaluated]


@pytest.mark.parametrize("kind", HOSTILE)
def test_no_pickle_runs_code(kind: type[Canary], tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    bad = {"w": torch.ones(2), "x": kind(canary)}
    deepspeed = shutil.copytree(FIXTURES / "deepspeed" / "stage3-bf16", tmp_path / "run")
    universal = shutil.copytree(FIXTURES / "deepspeed" / "universal1-fp32", tmp_path / "universal")
    dcp = shutil.copytree(DCP, tmp_path / "dcp")
    folder = tmp_path / "model"
    folder.mkdir()
    for path in (
        *deepspeed.glob("*/*_optim_states.pt"),
        *universal.glob("zero/inner.weight/fp32.pt"),
        folder / "pytorch_model.bin",
    ):
        torch.save(bad, path)
    torch.save(bad, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    (dcp / ".metadata").write_bytes(pickle.dumps(bad["x"]))
    calls: list[Callable[[], Any]] = [
        lambda: sources.deepspeed(deepspeed),
        lambda: sources.deepspeed(universal),
        lambda: sources.huggingface(folder),
        lambda: sources.state_dict(tmp_path / "old.pt"),
        lambda: sources.dcp(dcp),
    ]
    for call in calls:
        with pytest.raises(UntrustedCheckpoint, match=r"which is not loaded because a pickle runs"):
            call()
    (dcp / ".metadata").write_bytes(pickle.dumps(Canary(canary), protocol=0))
    with pytest.raises(UntrustedCheckpoint, match=r"got the name \S+, which"):
        sources.dcp(dcp)
    (dcp / ".metadata").write_bytes(b"ctorch\nonnx\n.")
    with pytest.raises(UntrustedCheckpoint, match=r"got the name torch\.onnx"):
        sources.dcp(dcp)
    assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))  # the canary would have sung
    assert canary.exists()


def test_an_archive_of_a_dcp_chunk_runs_no_code(tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    sources.write_dcp(
        tmp_path / "dcp", sources.tensors({"model.w": torch.ones(2)}), values={"x": "y" * 900}
    )
    found = sources.dcp(tmp_path / "dcp")
    torch.save({"x": Command(canary)}, tmp_path / "bad.pt")
    bad = (tmp_path / "bad.pt").read_bytes()
    for file in (tmp_path / "dcp").glob("*.distcp"):
        size = file.stat().st_size
        assert size >= len(bad)
        # Zeros stand before the archive, because a reader of zip looks for the end.
        file.write_bytes(bad.rjust(size, b"\0"))
    with pytest.raises(CorruptCheckpoint):
        found.values["x"]
    with pytest.raises(CorruptCheckpoint):
        found.params["w"].load()
    assert not canary.exists()


def damages(text: bytes, count: int) -> list[bytes]:
    cuts = [text[: len(text) * i // count] for i in range(count)]
    flips = []
    for i in range(4 * count):
        at = (len(text) * i) // (4 * count)
        flips.append(text[:at] + bytes([text[at] ^ (1 << i % 8)]) + text[at + 1 :])
    return cuts + flips


DAMAGED: dict[str, tuple[Path, str, Callable[[Path], Any]]] = {
    "deepspeed-2": (
        FIXTURES / "deepspeed" / "stage2-bf16",
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        sources.deepspeed,
    ),
    "deepspeed-3": (
        FIXTURES / "deepspeed" / "stage3-fp32",
        "global_step3/zero_pp_rank_1_mp_rank_00_model_states.pt",
        sources.deepspeed,
    ),
    "universal": (
        FIXTURES / "deepspeed" / "universal3-bf16",
        "zero/inner.weight/exp_avg.pt",
        sources.deepspeed,
    ),
    "dcp-metadata": (DCP, ".metadata", sources.dcp),
    "dcp-data": (DCP, "__0_0.distcp", sources.dcp),
}


def check_damages(case: str, folder: Path, count: int) -> int:
    """Every damaged file loads or is refused with an error of zfun; return how many are refused."""
    source, name, open_ = DAMAGED[case]
    path = shutil.copytree(source, folder / case)
    refused = 0
    for text in damages((path / name).read_bytes(), count):
        (path / name).write_bytes(text)
        try:
            loaded(open_(path))
        except (CorruptCheckpoint, OptionError):
            refused += 1
    return refused


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    # Every cut is refused; a flip may hit the values of a tensor, of which pickles have no hash.
    assert check_damages(case, tmp_path, 4) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("case", DAMAGED)
def test_many_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    count = 250 if FORM == "search" else 40
    assert check_damages(case, tmp_path, count) >= count


def test_archives_are_bounded_by_their_file(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "good.pt")
    with (
        zipfile.ZipFile(tmp_path / "good.pt") as good,
        zipfile.ZipFile(tmp_path / "bad.pt", "w", zipfile.ZIP_DEFLATED) as bad,
    ):
        for info in good.infolist():
            text = b"\0" * 2**20 if info.filename.endswith("data/0") else good.read(info)
            bad.writestr(info.filename, text)
    with pytest.raises(CorruptCheckpoint, match="a compressed record"):
        sources.state_dict(tmp_path / "bad.pt")


def test_a_tensor_reads_no_bytes_of_its_neighbour(tmp_path: Path) -> None:
    small, large = torch.ones(3), torch.arange(100.0)
    torch.save({"small": small, "large": large}, tmp_path / "state.pt")
    with zipfile.ZipFile(tmp_path / "state.pt") as archive:
        records = {name: archive.read(name) for name in archive.namelist()}
    text = records["state/data.pkl"]
    # The size of "small" grows from 3 to 90 elements, and so does its storage.
    grown = text.replace(b"K\x03tq", b"K\x5atq").replace(b"K\x03\x85", b"K\x5a\x85")
    assert grown != text
    with zipfile.ZipFile(tmp_path / "state.pt", "w") as archive:
        for name, data in (records | {"state/data.pkl": grown}).items():
            archive.writestr(name, data)
    with pytest.raises(CorruptCheckpoint, match=r"inside its records|state\.pt is a file of"):
        sources.state_dict(tmp_path / "state.pt")


def test_pipes_and_devices_are_not_opened(tmp_path: Path) -> None:
    import os

    path = shutil.copytree(DCP, tmp_path / "dcp")
    (path / "__0_0.distcp").unlink()
    os.mkfifo(path / "__0_0.distcp")
    with pytest.raises(UntrustedCheckpoint, match="regular files"):
        loaded(sources.dcp(path))


def test_a_state_dict_inside_of_itself_is_refused(tmp_path: Path) -> None:
    state: dict[str, Any] = {"w": torch.ones(2)}
    state["again"] = state
    torch.save(state, tmp_path / "model.pt")
    with pytest.raises(CorruptCheckpoint, match=r"a dict inside of itself"):
        sources.state_dict(tmp_path / "model.pt")


def test_lists_that_repeat_are_refused_before_they_are_walked(tmp_path: Path) -> None:
    repeated: list[Any] = []
    for _ in range(60):
        repeated = [repeated, repeated]
    torch.save({"w": torch.ones(2), "repeated": repeated}, tmp_path / "model.pt")
    with pytest.raises(CorruptCheckpoint, match=r"values in lists that repeat"):
        sources.state_dict(tmp_path / "model.pt")
    path = shutil.copytree(FIXTURES / "deepspeed" / "stage2-bf16", tmp_path / "run")
    (model,) = path.glob("*/mp_rank_00_model_states.pt")
    content = torch.load(model, weights_only=False)
    torch.save(content | {"repeated": repeated}, model)
    with pytest.raises(CorruptCheckpoint, match=r"values in lists that repeat"):
        sources.deepspeed(path)


def test_a_step_that_is_no_whole_number_is_refused(tmp_path: Path) -> None:
    leaves = {"model.w": torch.ones(2), "optim.state.w.step": torch.tensor(float("nan"))}
    sources.write_dcp(tmp_path / "dcp", sources.tensors(leaves))
    with pytest.raises(CorruptCheckpoint, match=r"step of an optimizer is a whole number; got nan"):
        sources.dcp(tmp_path / "dcp", params="model.", moments="optim.state.")


def test_a_file_without_permission_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "model.pt")

    def refuse(path: Any, *args: Any) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("os.open", refuse)  # root may read every file
    with pytest.raises(CheckpointError, match=r"change the permissions of model\.pt"):
        sources.state_dict(tmp_path / "model.pt")


def test_an_index_of_pickles_names_files_of_its_folder(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "a.bin")
    torch.save({"b": torch.zeros(2)}, tmp_path / "b.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "b": "b.bin"}}))
    assert sorted(sources.huggingface(tmp_path)) == ["b", "w"]
    index.write_text(json.dumps({"weight_map": {"w": "a.bin", "c": "b.bin"}}))
    with pytest.raises(CorruptCheckpoint, match=r"'c' is missing from b\.bin"):
        sources.huggingface(tmp_path)
    for name in ("../a.bin", "/etc/passwd", "", "..", "a\0", "x" * 5000, 3, None, ["a.bin"]):
        index.write_text(json.dumps({"weight_map": {"w": name}}))
        with pytest.raises(UntrustedCheckpoint, match="names files of its own directory"):
            sources.huggingface(tmp_path)
    index.write_text('{"weight_map": {"w": "a.bin", "w": "b.bin"}}')
    with pytest.raises(CorruptCheckpoint, match="a key twice"):
        sources.huggingface(tmp_path)
    index.unlink()
    with pytest.raises(OptionError, match=r"a folder with one of model\.safetensors"):
        sources.huggingface(tmp_path)
    with pytest.raises(OptionError, match="must be a file"):
        sources.state_dict(tmp_path)


def test_a_folder_of_transformers_has_the_values_of_the_model(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=16)
    model = transformers.GPT2LMHeadModel(config)
    wanted = zf.functional(model).params
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "split", max_shard_size="8KB")
    assert len(list((tmp_path / "split").glob("*.safetensors"))) > 2
    (tmp_path / "pickle").mkdir()
    torch.save(model.state_dict(), tmp_path / "pickle" / "pytorch_model.bin")
    for folder in ("whole", "split", "pickle"):
        source = sources.huggingface(tmp_path / folder)
        placed = sources.place(source, wanted)
        assert_same_bits({name: leaf.load() for name, leaf in placed.tree.items()}, wanted)
        assert placed.missing == placed.unexpected == ()
    assert source.ties == {"lm_head.weight": "transformer.wte.weight"}


def test_conjugate_views_are_written_with_their_values(tmp_path: Path) -> None:
    leaf = torch.tensor([1 + 2j, 3 - 4j])
    views = {"w": leaf.conj(), "i": leaf.conj().imag}
    values = {"w": leaf.conj().resolve_conj(), "i": torch.tensor([-2.0, 4.0])}
    found = sources.tensors(views)
    assert sources.compare(found, sources.tensors(values)).is_same
    sources.write_safetensors(tmp_path / "safe", found)
    assert sources.compare(sources.huggingface(tmp_path / "safe"), found).is_same
    held = sources.TrainingState(found, sources.tensors({}), {}, 1, {})
    path = zf.checkpoint.convert(held, tmp_path / "run")
    assert sources.compare(zf.checkpoint.leaves(path).under("params."), found).is_same


def test_the_name_of_notes_is_no_name_of_a_leaf(tmp_path: Path) -> None:
    with pytest.raises(LeafError, match=r"rename the leaf with renamed\(\)"):
        sources.write_safetensors(tmp_path, sources.tensors({"__metadata__": torch.ones(2)}))


def test_place_lists_every_difference() -> None:
    source = sources.tensors(
        {"a.weight": torch.ones(2), "b.weight": torch.ones(3), "old": torch.ones(1)}
    )
    like = {"a.weight": torch.zeros(2), "b.weights": torch.zeros(3), "new": torch.zeros(1)}
    with pytest.raises(
        SpecMismatch,
        match=r"missing 'b.weights' \(near: 'b.weight'\), 'new'; unexpected 'b.weight', 'old'",
    ):
        sources.place(source, like)
    placed = sources.place(source, like, strict=False)
    assert placed.missing == ("b.weights", "new")
    assert placed.unexpected == ("b.weight", "old")
    assert placed.tree["new"] is like["new"]
    rename = lambda path: {"b.weights": "b.weight", "new": "old"}.get(path, path)
    assert sources.place(source, like, name_of=rename).missing == ()
    with pytest.raises(
        SpecMismatch, match=r"of another shape or kind 'a.weight' is \(2,\), not \(4,\)"
    ):
        sources.place(source, {"a.weight": torch.zeros(4)}, strict=False)
    half = sources.place(source, like, name_of=rename, dtype=torch.bfloat16).tree["new"]
    assert half.load().dtype == half.dtype == torch.bfloat16
    with pytest.raises(SpecMismatch, match=r"'x' for 'a\.weight' and 'b\.weight'"):
        source.renamed(lambda name: "x")
    with pytest.raises(SpecMismatch, match="got 'old' twice"):
        sources.joined(source, source.under("a."), sources.tensors({"old": torch.ones(1)}))


MEASURE = """
import sys, torch
from zfun import sources

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

kind, path, leaf_bytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_num_threads(1)
open_ = {"pt": sources.state_dict, "dcp": lambda path: sources.dcp(path, params="").params}[kind]
for path, out in ((sys.argv[4], sys.argv[5] + "-small"), (path, sys.argv[5])):
    before = peak()
    leaves = open_(path)
    for leaf in leaves.values():
        assert leaf.load()[-1, -1] == 1
    if kind == "pt":
        sources.write_dcp(out, leaves)
print((peak() - before) / leaf_bytes)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs VmHWM of Linux")
def test_the_memory_is_that_of_one_leaf(tmp_path: Path) -> None:
    """Sixteen leaves of 16 MiB are read and written with little more memory than that of one."""
    leaf_bytes = 2**24
    small = {"w": torch.ones(2, 2)}
    torch.save({f"w{i}": torch.ones(2048, 2048) for i in range(16)}, tmp_path / "big.pt")
    torch.save(small, tmp_path / "small.pt")
    sources.write_dcp(tmp_path / "small", sources.tensors(small))
    for kind, big, little in (("pt", "big.pt", "small.pt"), ("dcp", "dcp", "small")):
        command = [sys.executable, "-c", MEASURE, kind, tmp_path / big, str(leaf_bytes)]
        command += [tmp_path / little, tmp_path / "dcp"]
        done = subprocess.run(
            [str(word) for word in command], capture_output=True, text=True, timeout=120, check=True
        )
        assert 0.9 < float(done.stdout) < 1.5, (kind, done.stdout)


def test_sources_of_linear_layers_keep_buffers_apart(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    apply = zf.functional(model)
    placed = sources.place(
        sources.state_dict(tmp_path / "model.safetensors"), apply.params, strict=False
    )
    assert placed.missing == ()
    assert set(placed.unexpected) == set(apply.buffers)


def with_chunks(folder: Path, size: list[int], chunks: list[tuple[list[int], list[int]]]) -> Path:
    """Write a tensor, and metadata that say it is made of other chunks of the same archive."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    path = folder / "dcp"
    values = torch.arange(4.0).view(chunks[0][1])
    sources.write_dcp(path, sources.tensors({"model.w": values}))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    index = next(index for index in metadata.storage_data if index.fqn == "model.w")
    place = metadata.storage_data.pop(index)
    tensor = metadata.state_dict_metadata["model.w"]
    tensor.size = torch.Size(size)
    tensor.chunks = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in chunks]
    for offsets, _ in chunks:
        metadata.storage_data[MetadataIndex("model.w", torch.Size(offsets))] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


@pytest.mark.parametrize(
    ("size", "chunks"),
    [
        ([8], [([0], [4]), ([0], [4])]),
        ([8], [([0], [4]), ([3], [4])]),
        ([12], [([0], [4]), ([8], [4]), ([6], [4])]),
        ([4, 4], [([0, 0], [2, 2]), ([2, 2], [2, 2]), ([1, 1], [2, 2]), ([0, 2], [2, 2])]),
        ([2, 4], [([0, 0], [2, 2]), ([0, 1], [2, 2])]),
    ],
)
def test_chunks_that_overlap_are_refused(size: list[int], chunks: Any, tmp_path: Path) -> None:
    """As many elements as the tensor has, of which some are written twice and some never."""
    with pytest.raises(CorruptCheckpoint, match=r"each element once; 'model\.w' has .* and "):
        sources.dcp(with_chunks(tmp_path, size, chunks))


def test_chunks_in_any_grid_are_one_tensor(tmp_path: Path) -> None:
    grid = [([i, j], [2, 2]) for i in (2, 0) for j in (0, 4, 2)]
    found = sources.dcp(with_chunks(tmp_path, [4, 6], grid)).params["w"].load()
    assert torch.equal(found, torch.arange(4.0).view(2, 2).repeat(2, 3))


def test_no_memory_is_taken_for_elements_that_the_file_does_not_have(tmp_path: Path) -> None:
    huge = [([i * 2**38], [2**38]) for i in range(4)]
    path = with_chunks(tmp_path, [2**40], [([0], [4])])
    metadata = pickle.loads((path / ".metadata").read_bytes())
    tensor = metadata.state_dict_metadata["model.w"]
    place = next(x for index, x in metadata.storage_data.items() if index.fqn == "model.w")
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    tensor.chunks = [ChunkStorageMetadata(*map(torch.Size, chunk)) for chunk in huge]
    for offsets, _ in huge:
        metadata.storage_data[MetadataIndex("model.w", torch.Size(offsets))] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptCheckpoint, match="an archive of a checkpoint holds the chunk"):
        sources.dcp(path).params["w"].load()
    torch.save({"w": torch.ones(1).expand(2**40)}, tmp_path / "model.pt")
    with pytest.raises(CorruptCheckpoint, match="holds dense tensors inside its records"):
        sources.state_dict(tmp_path / "model.pt")
    torch.save({"w": torch.ones(1).expand(1000)}, tmp_path / "model.pt")
    assert sources.state_dict(tmp_path / "model.pt")["w"].load().sum() == 1000


LINKED: dict[str, tuple[Path, str, Callable[[Path], Any]]] = {
    "dcp": (DCP, "__0_0.distcp", sources.dcp),
    "deepspeed": (
        FIXTURES / "deepspeed" / "stage2-bf16",
        "global_step3/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt",
        sources.deepspeed,
    ),
    "deepspeed's directory": (
        FIXTURES / "deepspeed" / "stage2-bf16",
        "global_step3",
        sources.deepspeed,
    ),
    "universal": (
        FIXTURES / "deepspeed" / "universal3-bf16",
        "zero/inner.weight/exp_avg.pt",
        sources.deepspeed,
    ),
}


@pytest.mark.parametrize("case", LINKED)
def test_a_link_out_of_the_directory_is_refused(case: str, tmp_path: Path) -> None:
    source, name, open_ = LINKED[case]
    folder = shutil.copytree(source, tmp_path / "checkpoint")
    file = folder / name
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(UntrustedCheckpoint, match=r"lie in its folder; got .*a link to"):
        loaded(open_(folder))
    # A name for another file of the same folder, as after a deduplication, is no way out.
    file.unlink()
    elsewhere.rename(file.with_name("kept"))
    file.symlink_to(file.with_name("kept"))
    assert loaded(open_(folder))


def test_the_links_of_a_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    save_file({"w": torch.ones(2)}, blobs / "123")
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    link = snapshot / "model-00001-of-00001.safetensors"
    link.symlink_to("../../blobs/123")
    assert sources.safetensors(snapshot)["w"].load().tolist() == [1, 1]
    link.unlink()
    (blobs / "123").rename(tmp_path / "secret")
    link.symlink_to(tmp_path / "secret")
    with pytest.raises(UntrustedCheckpoint, match=r"lie in its folder; got .*a link to"):
        sources.safetensors(snapshot)
