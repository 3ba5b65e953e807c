"""Files of other libraries in an object store, read and written by address."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

import zfun as zf
from zfun import sources
from zfun.errors import CheckpointError, OptionError
from zfun.testing import assert_same_bits

FIXTURES = Path(__file__).parents[2] / "fixtures"


@pytest.fixture
def store() -> Iterator[str]:
    fsspec.filesystem("memory").store.clear()
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()


def copied(folder: Path, url: str) -> str:
    fsspec.filesystem("memory").put(f"{folder}/", f"{url}/", recursive=True)
    return url


def assert_same_leaves(found: sources.Source, expected: sources.Source) -> None:
    assert sorted(found) == sorted(expected)
    for name, leaf in expected.items():
        assert_same_bits(found[name].load(), leaf.load())


@pytest.mark.parametrize(
    "name", ["stage1-bf16", "stage3-fp32", "universal1-fp32", "universal3-bf16"]
)
def test_deepspeed_is_read_by_address(store: str, name: str) -> None:
    folder = FIXTURES / "deepspeed" / name
    found, expected = sources.deepspeed(copied(folder, f"{store}/x")), sources.deepspeed(folder)
    assert_same_leaves(found.params, expected.params)
    assert found.step == expected.step
    for slot, moments in expected.moments.items():
        assert_same_leaves(found.moments[slot], moments)


def test_dcp_is_read_by_address(store: str) -> None:
    folder = FIXTURES / "dcp" / "sharded"
    options: dict[str, Any] = {"params": ""}
    found = sources.dcp(copied(folder, f"{store}/x"), **options)
    assert_same_leaves(found.params, sources.dcp(folder, **options).params)


@pytest.mark.parametrize("most", [10**9, 30])
def test_a_model_folder_is_written_and_read_by_address(store: str, most: int) -> None:
    leaves = sources.tensors({"w": torch.randn(2, 3), "b": torch.randn(7), "n": torch.arange(3)})
    written = sources.write_safetensors(f"{store}/model", leaves, max_shard_bytes=most)
    assert len(written.files) == (1 if most > 100 else 3)
    assert str(written.files[0]).startswith(f"{store}/model/model")
    assert_same_leaves(sources.huggingface(f"{store}/model"), leaves)
    params = zf.sources.safetensors(f"{store}/model")
    assert zf.simulate(2, lambda group: zf.unshard(zf.shard(params, group)))[0]["w"].shape == (2, 3)
    with pytest.raises(OptionError, match=r"must be a folder without a model; got 'memory://"):
        sources.write_safetensors(f"{store}/model", leaves)


def test_an_export_goes_to_an_address(store: str) -> None:
    zf.save(f"{store}/run", {"params": {"w": torch.arange(9.0)}}, step=1)
    zf.checkpoint.export(f"{store}/run", f"{store}/model", dtype=torch.float16)
    assert_same_bits(
        sources.huggingface(f"{store}/model")["w"].load(), torch.arange(9.0).to(torch.float16)
    )
    zf.checkpoint.convert(sources.dcp(FIXTURES / "dcp" / "sharded", params=""), f"{store}/new")
    assert [step for step, _ in zf.checkpoint.steps(f"{store}/new")]


def test_an_export_that_fails_leaves_no_model(store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> torch.Tensor:
        raise OSError(28, "no room")

    spec = torch.empty(3, device="meta")
    leaves = sources.Source(
        {
            "a": sources.Deferred("a", spec, lambda: torch.ones(3)),
            "b": sources.Deferred("b", spec, broken),
        },
        "here",
    )
    with pytest.raises(CheckpointError, match=r"memory://bucket/model: .*no room"):
        sources.write_safetensors(f"{store}/model", leaves, max_shard_bytes=12)
    assert not fsspec.filesystem("memory").find("/bucket/model")


def test_state_dicts_are_read_by_address(store: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    found = sources.state_dict(copied(tmp_path, f"{store}/x") + "/model.pt")
    assert_same_bits(found["weight"].load(), model.weight.detach())
    shutil.rmtree(tmp_path)
    with pytest.raises(OptionError, match=r"state_dict\(\) must be a file; got 'memory://"):
        sources.state_dict(f"{store}/x/none.pt")
    with pytest.raises(OptionError, match=r"write_dcp\(\) writes to a disk; got memory://"):
        sources.write_dcp(f"{store}/dcp", found)
    with pytest.raises(OptionError, match=r"two slashes"):
        sources.huggingface(Path("memory://bucket/x"))
