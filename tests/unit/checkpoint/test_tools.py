"""Tools that look at checkpoints without a group: open, inspect, verify, export, diff, prune."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

import zfun as zf
from tests.conftest import examples
from zfun import checkpoint, cli, sources
from zfun.checkpoint import Problem
from zfun.errors import CheckpointError, CorruptCheckpoint, OptionError
from zfun.files import Files
from zfun.testing import assert_same_bits

DEEPSPEED = Path(__file__).parents[2] / "fixtures" / "deepspeed"


def tree() -> dict[str, Any]:
    """A tied leaf, a frozen leaf, and sizes that no number of ranks divides."""
    draw = torch.Generator().manual_seed(0)
    embed = torch.randn(7, 3, generator=draw)
    return {
        "embed": embed,
        "block": [{"w": torch.randn(5, 3, generator=draw), "b": torch.randn(5, generator=draw)}],
        "scale": torch.tensor(1.5),
        "head": embed,
    }


def loss(params: Any, batch: Tensor) -> Tensor:
    block = params["block"][0]
    hidden = torch.tanh((batch @ params["embed"].mT[:, :5].mT) @ block["w"].mT + block["b"])
    return (hidden.float() ** 2).sum() * params["scale"].float() + (params["head"] ** 2).sum()


BATCH = torch.linspace(-1, 1, 10).view(2, 5)


def saved(
    path: Path, size: int = 1, stage: int = 0, precision: Any = None, steps: int = 1
) -> dict[str, Tensor]:
    """Train and save, and return the parameters by name, with the values of master weights."""

    def run(group: zf.Group) -> Any:
        trainable = lambda name, leaf: name != "scale"
        zero = zf.zero(
            stage,
            loss,
            zf.optim.adamw(0.1),
            group,
            trainable=trainable,
            precision=precision,
            bucket_bytes=64,
        )
        state = zero.init(tree())
        for _ in range(steps):
            state, _ = zero.step(state, BATCH)
        zf.save(path, state, group=group)
        return zero.params(state)

    params = zf.simulate(size, run)[0]
    return {
        "embed": params["embed"],
        "block.0.w": params["block"][0]["w"],
        "block.0.b": params["block"][0]["b"],
        "scale": params["scale"],
        "head": params["head"],
    }


def in_order(leaves: Any) -> dict[str, Tensor]:
    return dict(sorted((name, leaf.clone()) for name, leaf in leaves.items()))


@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 1), (3, 3)])
def test_export_writes_the_whole_state_bitwise(size: int, stage: int, tmp_path: Path) -> None:
    wanted = saved(tmp_path / "run", size, stage)
    found = checkpoint.training_state(tmp_path / "run")
    assert_same_bits(in_order({n: x.load() for n, x in found.params.items()}), in_order(wanted))
    assert found.params.ties == {"head": "embed"}
    assert found.step == 1
    assert set(found.moments) == {"mu", "nu"}
    assert set(found.moments["mu"]) == set(wanted) - {"scale"}
    written = checkpoint.export(tmp_path / "run", tmp_path / "model")
    del wanted["head"]
    assert_same_bits(in_order(load_file(written.files[0])), in_order(wanted))
    assert written.num_leaves == 4


def test_export_prefers_master_weights(tmp_path: Path) -> None:
    saved(tmp_path, 2, 1, torch.bfloat16)
    masters = checkpoint.training_state(tmp_path).params
    rounded = checkpoint.training_state(tmp_path, masters=False).params
    assert masters["embed"].dtype == torch.float32
    assert rounded["embed"].dtype == torch.bfloat16
    assert masters["head"] is masters["embed"]
    exact = masters["block.0.w"].load()
    assert not torch.equal(exact, exact.bfloat16().float())
    assert torch.equal(exact.bfloat16(), rounded["block.0.w"].load())
    checkpoint.export(tmp_path, tmp_path / "half", dtype=torch.float16)
    half = sources.huggingface(tmp_path / "half")
    assert torch.equal(half["block.0.w"].load(), exact.half())


def test_params_may_lie_anywhere(tmp_path: Path) -> None:
    state = {"gen": {"params": {"w": torch.ones(2)}, "frozen": {"s": torch.ones(1)}}, "step": 3}
    zf.save(tmp_path, state, step=3)
    found = checkpoint.training_state(tmp_path, params="gen.params")
    assert list(found.params) == ["w", "s"]
    assert list(checkpoint.training_state(tmp_path, params=".").params) == [
        "gen.params.w",
        "gen.frozen.s",
    ]
    with pytest.raises(CheckpointError, match=r"got 'params' for .*, which has gen; name one"):
        checkpoint.training_state(tmp_path)


def test_a_state_may_have_frozen_parameters_alone(tmp_path: Path) -> None:
    zf.save(tmp_path, {"params": {}, "frozen": {"w": torch.ones(2)}, "step": 3}, step=3)
    found = checkpoint.training_state(tmp_path)
    assert torch.equal(found.params["w"].load(), torch.ones(2))
    assert (list(found.params), found.moments, found.step) == (["w"], {}, 3)
    assert checkpoint.export(tmp_path, tmp_path / "model").num_leaves == 1


def test_the_leaves_of_ranks_have_names_of_their_own(tmp_path: Path) -> None:
    zf.simulate(
        2,
        lambda group: zf.save(
            tmp_path,
            {"n": torch.tensor(group.rank)},
            step=1,
            group=group,
            by_rank=lambda path: path == "n",
        ),
    )
    found = checkpoint.leaves(tmp_path)
    assert {name: leaf.load().item() for name, leaf in found.items()} == {"n[0]": 0, "n[1]": 1}
    assert checkpoint.training_state(tmp_path, params=".").params["n"].load() == 0
    assert checkpoint.export(tmp_path, tmp_path / "model", params=".").num_leaves == 1


def test_a_hostile_text_does_not_steer_the_terminal(tmp_path: Path) -> None:
    zf.save(tmp_path, {"w": torch.ones(2), "name": "\x1b[2J\nstep 99"}, step=1)
    text = checkpoint.inspect(tmp_path, 1)
    assert "?[2J?step 99" in text
    assert "\x1b" not in text


def test_a_split_folder_has_the_index_of_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=61,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    apply = zf.functional(model)
    tokens = torch.arange(12).view(1, 12)

    def run(group: zf.Group) -> Any:
        score = lambda params, batch: apply(params, batch, labels=batch).loss
        zero = zf.zero(3, score, zf.optim.sgd(0.5), group)
        state, _ = zero.step(zero.init(apply.params), tokens)
        zf.save(tmp_path / "run", state, group=group)
        return zero.params(state)

    params = zf.simulate(2, run)[0]
    wanted = apply(params, tokens).logits
    assert not torch.equal(wanted, apply(apply.params, tokens).logits)
    checkpoint.export(tmp_path / "run", tmp_path / "whole")
    written = checkpoint.export(tmp_path / "run", tmp_path / "split", max_shard_bytes=8000)
    model.save_pretrained(tmp_path / "own", max_shard_size=8000)
    # Hugging Face has the same names and sizes, in an order of its own.
    ours, theirs = (
        json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        for name in ("split", "own")
    )
    assert set(ours["weight_map"]) == set(theirs["weight_map"])
    assert ours["metadata"]["total_size"] == theirs["metadata"]["total_size"]
    assert len(written.files) > 2
    sizes: dict[str, int] = {}
    for name, file in ours["weight_map"].items():
        sizes[file] = sizes.get(file, 0) + params[name].nbytes
    assert max(sizes.values()) <= 8000
    for folder in ("whole", "split"):
        config.save_pretrained(tmp_path / folder)
        again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / folder).eval()
        assert_same_bits(again(tokens).logits, wanted)
    checkpoint.export(tmp_path / "run", tmp_path / "bf16", dtype=torch.bfloat16)
    config.save_pretrained(tmp_path / "bf16")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "bf16", dtype="bfloat16")
    assert again.lm_head.weight.dtype == torch.bfloat16
    assert torch.equal(again.lm_head.weight, params["transformer.wte.weight"].bfloat16())


def test_a_failed_export_leaves_no_model(tmp_path: Path) -> None:
    saved(tmp_path / "run")
    file = next((tmp_path / "run").glob("*/00000.safetensors"))
    text = file.read_bytes()
    file.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
    with pytest.raises(CorruptCheckpoint):
        checkpoint.export(tmp_path / "run", tmp_path / "model")
    assert list((tmp_path / "model").iterdir()) == []
    file.write_bytes(text)
    checkpoint.export(tmp_path / "run", tmp_path / "model")
    with pytest.raises(OptionError, match=r"a folder without a model; got .*model\.safetensors"):
        checkpoint.export(tmp_path / "run", tmp_path / "model")


def test_verify_names_file_offset_and_leaf(tmp_path: Path) -> None:
    """A flip of any byte is found where it is, and the leaves with bytes there are named."""
    leaves = {f"w{i}": torch.full((1024,), float(i)) for i in range(8)}
    path = zf.save(tmp_path, leaves, step=1, chunk_bytes=4096).path
    file = Path(path, "00000.safetensors")
    text = file.read_bytes()
    assert checkpoint.verify(tmp_path) == (path, len(text), ())
    for at in range(0, len(text), 1500):
        file.write_bytes(text[:at] + bytes([text[at] ^ 16]) + text[at + 1 :])
        (problem,) = checkpoint.verify(tmp_path).problems
        start = at // 4096 * 4096
        held = () if at < 4096 else (f"w{at // 4096 - 1}",)
        assert (problem.path, problem.offset, problem.leaves) == (str(file), start, held), at
    both = bytearray(text)
    both[5000] ^= 1
    both[-1] ^= 1
    file.write_bytes(both)
    assert [one.offset for one in checkpoint.verify(path).problems] == [4096, 32768]
    for size in (0, 100, 20000):
        file.write_bytes(text[:size])
        (problem,) = checkpoint.verify(path).problems
        assert problem.offset is None
        assert problem.leaves == tuple(f"w{i}" for i in range(max(0, size // 4096 - 1), 8))
    file.unlink()
    assert "00000.safetensors" in str(checkpoint.verify(path).problems[0])
    file.symlink_to(tmp_path / "elsewhere")
    assert checkpoint.verify(path).problems
    Path(path, "manifest.json").write_text("{}")
    (problem,) = checkpoint.verify(path).problems
    assert problem.path.endswith("manifest.json")
    assert str(Problem("f", 5, tuple("abcdefghij"), "bad")) == (
        "f at byte 5: bad [a, b, c, d, e, f, g, h and 2 more]"
    )


def test_inspect_lists_steps_and_describes_one(tmp_path: Path) -> None:
    saved(tmp_path, 2, 3, torch.bfloat16)
    zf.save(tmp_path, {"w": torch.ones(2)}, step=9)
    shutil.copytree(tmp_path / "step-00000009", tmp_path / "step-00000012")
    (tmp_path / "step-00000012" / "manifest.json").write_bytes(b"{")
    (tmp_path / ".saving-step-00000013-abc").mkdir()
    lines = checkpoint.inspect(tmp_path).splitlines()
    assert [line.split()[0] for line in lines] == ["step", "1", "9", "12", "unfinished:"]
    assert "damaged" in lines[3]
    text = checkpoint.inspect(tmp_path, 1)
    assert text.startswith("step 1, saved by 2 ranks: ")
    assert "params: S over 2, bfloat16, buckets of" in text
    assert "MiB, hashed by xxh64" in text
    for line in (
        r"params.block.0.w bfloat16 (5, 3) 30 bytes",
        r"opt_state.master.block.0.w float32 (5, 3) 60 bytes master of params.block.0.w",
        r"params.head tied to params.embed",
        r"step 1",
        r"00001.safetensors",
    ):
        assert any(" ".join(got.split()).startswith(line) for got in text.splitlines()), line
    assert checkpoint.inspect(tmp_path / "step-00000009").startswith("step 9, saved by 1 rank: 1 ")
    with pytest.raises(CheckpointError, match="must have a checkpoint"):
        checkpoint.inspect(tmp_path / "none")


def test_diff_sees_every_difference(tmp_path: Path) -> None:
    one = {
        "same": torch.ones(3),
        "value": torch.tensor([1.0, 2.0]),
        "zero": torch.tensor([0.0]),
        "nan": torch.tensor([1.0, float("nan")]),
        "inf": torch.tensor([float("inf"), 1.0]),
        "count": torch.tensor([3, 2**60]),
        "shape": torch.ones(2),
        "dtype": torch.ones(2),
        "complex": torch.tensor([1 + 1j]),
        "gone": torch.ones(1),
    }
    two = {
        **one,
        "value": torch.tensor([1.0, 2.5]),
        "zero": torch.tensor([-0.0]),
        "nan": torch.tensor([float("nan"), float("nan")]),
        "inf": torch.tensor([float("inf"), 1.25]),
        "count": torch.tensor([5, 2**60]),
        "shape": torch.ones(3),
        "dtype": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 3j]),
        "new": torch.ones(1),
    }
    del two["gone"]
    found = sources.compare(sources.tensors(one), sources.tensors(two))
    assert found.only_first == ("gone",)
    assert found.only_second == ("new",)
    assert found.reshaped == {"shape": ((2,), (3,))}
    assert found.retyped == {"dtype": (torch.float32, torch.bfloat16)}
    changed = dict(found.changed)
    assert math.isnan(changed.pop("nan"))
    assert changed == {"value": 0.5, "zero": 0.0, "inf": 0.25, "count": 2.0, "complex": 2.0}
    assert found.equal == 1
    assert not found.is_same
    assert sources.compare(sources.tensors(one), sources.tensors(one)).is_same
    assert sources.compare(sources.tensors({}), sources.tensors({})).is_same
    saved(tmp_path / "one", 1, 0)
    saved(tmp_path / "two", 3, 3)
    found = sources.compare(
        checkpoint.leaves(tmp_path / "one"), checkpoint.leaves(tmp_path / "two")
    )
    # The gradient is a mean over the ranks, which get the same batch here.
    assert found[:4] == ((), (), {}, {})
    assert max(found.changed.values(), default=0) < 1e-6


@settings(max_examples=examples(20))
@given(
    marks=st.lists(st.sampled_from(["good", "good", "manifest", "short", "gone"]), max_size=6),
    keep=st.none() | st.integers(1, 4),
    every=st.none() | st.integers(1, 4),
    again=st.booleans(),
)
def test_prune_never_removes_the_last_good_one(
    tmp_path_factory: pytest.TempPathFactory,
    marks: list[str],
    keep: int | None,
    every: int | None,
    again: bool,
) -> None:
    path = tmp_path_factory.mktemp("run")
    steps = range(1, len(marks) + 1)
    for step, mark in zip(steps, marks, strict=True):
        made = Path(zf.save(path, {"w": torch.full((3,), float(step))}, step=step).path)
        if mark == "manifest":
            (made / "manifest.json").write_bytes(b"{}")
        elif mark == "short":
            (made / "00000.safetensors").write_bytes(b"")
        elif mark == "gone":
            (made / "00000.safetensors").unlink()
    if again and marks:
        zf.save(path, {"w": torch.full((3,), 1.0)}, step=1)
        marks = ["good", *marks[1:]]
    if keep is None and every is None:
        with pytest.raises(OptionError, match="got neither keep= nor every="):
            checkpoint.prune(path)
        return
    before = sorted(file.name for file in path.iterdir())
    planned = checkpoint.prune(path, keep=keep, every=every)
    assert sorted(file.name for file in path.iterdir()) == before
    done = checkpoint.prune(path, keep=keep, every=every, dry_run=False)
    assert done == planned
    good = [step for step, mark in zip(steps, marks, strict=True) if mark == "good"]
    wanted = set(good[-(keep or 1) :]) | {step for step in good if every and step % every == 0}
    if good:
        assert {one.step for one in checkpoint.steps(path)} == wanted
        assert [one.step for one in done.kept] == sorted(wanted)
        last = checkpoint.leaves(path)["w"].load()
        assert last.tolist() == [float(good[-1])] * 3
    else:
        assert sorted(file.name for file in path.iterdir()) == before


def test_prune_waits_for_no_job_and_cleans_what_it_could_not_remove(tmp_path: Path) -> None:
    from zfun.checkpoint._directory import locked

    for step in (1, 2, 3):
        zf.save(tmp_path, {"w": torch.ones(2)}, step=step)
    with (
        locked(str(tmp_path), Files()),
        pytest.raises(CheckpointError, match="one job saves to"),
    ):
        checkpoint.prune(tmp_path, keep=1, dry_run=False)

    class Refusing(Files):
        def rename(self, old: str, new: str) -> None:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    with pytest.raises(CheckpointError, match=r"removing the checkpoint failed"):
        checkpoint.prune(tmp_path, keep=1, dry_run=False, files=Refusing())

    class Failing(Files):
        def remove(self, path: str) -> None:
            raise OSError(5, "input/output error")

    checkpoint.prune(tmp_path, keep=1, dry_run=False, files=Failing())
    assert [one.step for one in checkpoint.steps(tmp_path)] == [3]
    zf.save(tmp_path, {"w": torch.ones(2)}, step=4)
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000003", "step-00000004"]  # noqa: PTH208


@pytest.mark.parametrize(("name", "size"), [("stage2-bf16", 1), ("universal3-bf16", 3)])
def test_a_run_of_deepspeed_goes_on_with_its_moments(name: str, size: int, tmp_path: Path) -> None:
    """The next step is that of torch's AdamW from the same moments."""
    found = sources.deepspeed(DEEPSPEED / name)
    found = found._replace(buffers=sources.tensors({}))  # zf.zero has them beside the state
    checkpoint.convert(found, tmp_path, data={"epoch": 4})
    assert not checkpoint.verify(tmp_path).problems
    values = {key: leaf.load() for key, leaf in found.params.items()}
    like = {key: torch.zeros_like(leaf) for key, leaf in values.items()}
    like["head.weight"] = like["embed.weight"]
    pull = lambda params, batch: sum((leaf.float() ** 2).sum() for leaf in params.values()) / 2

    def run(group: zf.Group) -> Any:
        zero = zf.zero(
            3, pull, zf.optim.adamw(0.01), group, trainable=lambda path, leaf: path != "scale"
        )
        loaded = zf.load(tmp_path, zero.init(like))
        before = zero.params(loaded.state)
        state, _ = zero.step(loaded.state, torch.ones(1))
        return before, zero.params(state), loaded.data, state.step

    before, after, data, step = zf.simulate(size, run)[0]
    assert_same_bits(in_order(before), in_order(values))
    assert (data, step) == ({"epoch": 4}, 4)
    for key in found.moments["exp_avg"]:
        leaf = torch.nn.Parameter(values[key].clone())
        leaf.grad = values[key] * (2 if key == "embed.weight" else 1)  # used twice
        optimizer = torch.optim.AdamW([leaf], lr=0.01)
        moments = {slot: held[key].load() for slot, held in found.moments.items()}
        optimizer.state[leaf] = {"step": torch.tensor(3.0), **moments}
        optimizer.step()
        torch.testing.assert_close(after[key], leaf.detach(), rtol=1e-6, atol=1e-6)
        assert not torch.allclose(after[key], values[key], rtol=1e-6, atol=1e-6)


def test_a_conversion_keeps_a_count_of_no_steps(tmp_path: Path) -> None:
    leaves = sources.tensors({"w": torch.ones(2)})
    moments = {"exp_avg": leaves, "exp_avg_sq": leaves}
    found = sources.TrainingState(leaves, sources.tensors({}), moments, 0, {})
    path = checkpoint.convert(found, tmp_path, step=5)
    assert checkpoint.leaves(path)["opt_state.count"].load() == 0
    assert checkpoint.training_state(path).step == 0


def test_a_conversion_that_fails_keeps_no_lock(tmp_path: Path) -> None:
    class Full(Files):
        def make(self, path: str) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    leaves = sources.tensors({"w": torch.ones(2)})
    found = sources.TrainingState(leaves, sources.tensors({}), {}, 7, {})
    with pytest.raises(CheckpointError, match=r"free room on the disk") as held:
        checkpoint.convert(found, tmp_path, files=Full())
    assert held.value.errno == errno.ENOSPC
    checkpoint.convert(found, tmp_path)


def test_convert_says_what_is_missing(tmp_path: Path) -> None:
    held = sources.tensors({"w": torch.ones(2), "c": torch.tensor([1 + 2j]), "e": torch.zeros(0)})
    nothing = sources.tensors({})
    found = sources.TrainingState(held, nothing, {"momentum": held}, None, {})
    with pytest.raises(OptionError, match=r"a training state without one; pass step="):
        checkpoint.convert(found, tmp_path)
    with pytest.raises(OptionError, match=r"got none for 'momentum'; write moments="):
        checkpoint.convert(found, tmp_path, step=3)
    path = checkpoint.convert(
        found, tmp_path, step=3, moments={"momentum": "opt_state.trace"}, count=None
    )
    again = checkpoint.training_state(path)
    assert_same_bits(
        {name: leaf.load() for name, leaf in again.moments["trace"].items()},
        {name: leaf.load() for name, leaf in held.items()},
    )

    def broken() -> Tensor:
        raise CorruptCheckpoint("a leaf that cannot be read")

    bad = sources.Deferred("w", torch.empty(2, device="meta"), broken)
    found = found._replace(params=sources.Source({"w": bad}, "a test"), moments={})
    with pytest.raises(CorruptCheckpoint, match="cannot be read"):
        checkpoint.convert(found, tmp_path, step=9)
    assert [one.step for one in checkpoint.steps(tmp_path)] == [3]
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000003"]  # noqa: PTH208


def run(*words: object) -> int:
    return cli.main(["ckpt", *map(str, words)])


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "run", tmp_path / "out"
    for step in (10, 20):
        zf.save(path, {"params": {"w": torch.full((3,), float(step))}, "lr": 0.5}, step=step)
    assert run() == 2
    assert run("inspect", path) == run("inspect", path, "--step", 10) == run("verify", path) == 0
    printed = capsys.readouterr().out
    assert "step-00000020: good, 0.0 MB verified" in printed
    assert "params.w" in printed
    assert run("export", path, out, "--dtype", "bf16", "--max-shard-size", "1KiB") == 0
    assert sources.huggingface(out)["w"].load().tolist() == [20.0] * 3
    assert "model.safetensors\nwrote 1 leaves" in capsys.readouterr().out
    one, two = path / "step-00000010", path / "step-00000020"
    assert run("diff", one, one) == 0
    assert run("diff", one, two) == run("diff", one, two, "--params", "params") == 1
    assert "w: differs by at most 10" in capsys.readouterr().out
    zf.save(path, {"params": {"w": torch.full((3,), 20.0)}, "lr": 0.25}, step=30)
    assert run("diff", two, path / "step-00000030") == 1
    assert "lr: 0.5 and 0.25" in capsys.readouterr().out
    file = one / "00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert run("verify", path) == 0
    assert run("verify", path, "--all") == run("verify", path, "--step", 10) == 1
    assert "00000.safetensors at byte 0: " in capsys.readouterr().out
    assert run("prune", path, "--keep", 1) == 0
    assert "would be removed" in capsys.readouterr().out
    assert run("prune", path, "--keep", 1, "--yes") == 0
    assert [one.step for one in checkpoint.steps(path)] == [30]
    assert run("prune", path, "--keep", 1) == run("prune", tmp_path / "none", "--keep", 1) == 0
    assert "none: no checkpoints" in capsys.readouterr().out
    assert run("prune", path) == run("verify", tmp_path / "none") == 2
    assert "got neither keep= nor every=" in capsys.readouterr().err
    for bad in ("5XB", "0", "-1", "GB"):
        with pytest.raises(SystemExit):
            run("export", path, out, "--max-shard-size", bad)


def test_the_command_line_exports_other_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = DEEPSPEED / "stage2-bf16"
    assert run("export", path, tmp_path / "deepspeed", "--from", "deepspeed", "--step", 3) == 0
    wanted = {
        name.removeprefix("fp32."): leaf
        for name, leaf in load_file(path / "expected.safetensors").items()
        if name.startswith("fp32.")
    }
    del wanted["head.weight"]
    found = load_file(tmp_path / "deepspeed" / "model.safetensors")
    assert_same_bits(in_order({n: x.float() for n, x in found.items()}), in_order(wanted))
    dcp = DEEPSPEED.parent / "dcp" / "sharded"
    assert run("export", dcp, tmp_path / "dcp", "--from", "dcp", "--dtype", "fp16") == 0
    assert run("export", tmp_path / "dcp", tmp_path / "hf", "--from", "huggingface") == 0
    assert sources.huggingface(tmp_path / "hf")["0.bias"].dtype == torch.float16
    assert run("export", tmp_path, tmp_path / "new", "--from", "state_dict") == 2
    assert "must be a file" in capsys.readouterr().err


MEASURE = """
import sys, torch
from zfun import checkpoint

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

torch.set_num_threads(1)
checkpoint.export(sys.argv[1] + "/small", sys.argv[1] + "/small-model", dtype=torch.bfloat16)
before = peak()
checkpoint.export(sys.argv[1] + "/big", sys.argv[1] + "/big-model", dtype=torch.bfloat16)
print((peak() - before) / 2**25)
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs VmHWM of Linux")
def test_export_takes_the_memory_of_one_leaf(tmp_path: Path) -> None:
    """Twelve leaves of 32 MiB are exported with the memory of one, and a little for chunks."""
    big = {f"w{i}": torch.ones(2**23) for i in range(12)}
    zf.save(tmp_path / "big", {"params": big}, step=1)
    zf.save(tmp_path / "small", {"params": {"w": torch.ones(2**22)}}, step=1)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert 0.3 < float(done.stdout) < 1.6, done.stdout
