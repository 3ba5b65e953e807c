"""Advice: the fastest composition that fits, the ladder, and the commands plan and hw-bench."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

import zfun as zf
from zfun import cli
from zfun.planner import Advice, Hardware, Model, advise


def empty(*shape: int) -> torch.Tensor:
    return torch.empty(shape, device="meta")


PARAMS = {"h": [{"up": empty(64, 256), "down": empty(256, 64)} for _ in range(4)]}


def block(layer: Any, x: torch.Tensor) -> torch.Tensor:
    return x + torch.tanh(x @ layer["up"]) @ layer["down"]


def loss(params: Any, x: torch.Tensor, block: Any = block) -> torch.Tensor:
    for layer in params["h"]:
        x = block(layer, x)
    return x.sum()


def recomputed(params: Any, x: torch.Tensor) -> torch.Tensor:
    return loss(params, x, zf.remat(block))


def machine(device_bytes: float, **sizes: Any) -> Hardware:
    return Hardware(
        flops_per_s=1e9, network=1e9, host_link=1e6, disk=1e5, device_bytes=device_bytes, **sizes
    )


def advised(hardware: Hardware, rows: int = 32) -> Advice:
    model = Model(loss, PARAMS, empty(rows, 64), recomputed=recomputed)
    return advise(model, hardware, 4)


def test_the_first_rung_is_taken_where_everything_fits() -> None:
    found = advised(machine(1e9))
    assert found.best is not None
    assert str(found.best.composition) == "ZeRO-1"
    assert found.batch_factor == 16
    assert "* ZeRO-1" in str(found)
    assert "raise the batch" in str(found)


def test_the_climb_ends_at_the_first_rung_that_fits() -> None:
    rungs = advised(machine(1.0)).rungs
    assert len(rungs) == 10
    peaks = {str(rung.composition): rung.plan.peak.device.total for rung in rungs}
    reached = "ZeRO-2, recomputed, optimizer in host memory"
    limit = peaks[reached]
    assert limit < peaks["ZeRO-1"]
    found = advised(machine(limit))
    fits = [not rung.excess for rung in found.rungs]
    first = fits.index(True)
    assert str(found.rungs[first].composition) in peaks
    assert first <= list(peaks).index(reached)
    assert found.best is not None
    assert found.best.plan.peak.device.total <= limit
    fitting = [rung.forecast.at_most_s for rung in found.rungs if not rung.excess]
    assert found.best.forecast.at_most_s == min(fitting)


def test_a_machine_that_is_too_small_gets_the_bytes_that_are_missing() -> None:
    found = advised(machine(1.0, host_bytes=10.0, disk_bytes=0.0))
    assert found.best is None
    last = found.rungs[-1]
    assert last.composition.on_disk
    assert {"device", "disk"} <= set(last.excess)
    assert "host" not in found.rungs[0].excess
    assert last.excess["device"] == last.plan.peak.device.total - 1
    assert "no composition fits" in str(found)
    assert "too much" in last.verdict


def test_offload_needs_host_memory() -> None:
    found = advised(machine(1.0, host_bytes=10.0))
    stored = [rung for rung in found.rungs if rung.composition.offloaded]
    assert stored
    assert all("host" in rung.excess for rung in stored if not rung.composition.on_disk)


def test_hardware_without_limits_is_refused() -> None:
    with pytest.raises(zf.errors.OptionError, match=r"hardware without limits; pass"):
        advised(Hardware(flops_per_s=1e9))


def test_a_description_of_hardware_is_written_and_read(tmp_path: Any) -> None:
    machine(5.0).save(tmp_path / "one.json")
    assert Hardware.load(tmp_path / "one.json") == machine(5.0)
    (tmp_path / "two.json").write_text('{"flops": 3}')
    for name in ("two.json", "none.json"):
        with pytest.raises(zf.errors.OptionError, match=r"JSON object of the fields"):
            Hardware.load(tmp_path / name)


@pytest.fixture
def config(tmp_path: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "vocab_size": 61}
    transformers.GPT2Config(**sizes).save_pretrained(tmp_path)
    return tmp_path / "config.json"


def test_the_command_plans_a_model_of_hugging_face(config: Any, capsys: Any) -> None:
    hardware = config.parent / "hardware.json"
    machine(1e9).save(hardware)
    out = config.parent / "out"
    sizes = ["--ranks", "4", "--length", "16", "--device-memory", "1GB"]
    files = ["--hardware", str(hardware), "--out", str(out)]
    assert cli.main(["plan", "--hf", str(config), *sizes, *files]) == 0
    shown = capsys.readouterr().out
    assert "ZeRO-3, mixed precision" in shown
    assert "bottleneck" in shown
    assert "take ZeRO-1, mixed precision" in shown
    if (out / "plan.png").exists():
        assert (out / "plan.png").read_bytes().startswith(b"\x89PNG")
    assert cli.main(["plan", "--hf", str(config), *sizes[:-1], "1KB", "--out", str(out)]) == 1
    assert cli.main(["plan", "--hf", str(out / "none.json"), "--ranks", "2"]) == 2
    assert "config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_measures_this_machine(tmp_path: Any, capsys: Any) -> None:
    pytest.importorskip("tqdm")
    out = tmp_path / "hardware.json"
    assert cli.main(["hw-bench", str(tmp_path), "--mib", "4", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert {"flops_per_s", "memory", "host_memory", "network", "disk", "latency_s"} <= set(found)
    assert all(value > 0 for value in found.values())
    assert "written" in capsys.readouterr().out


def test_an_impossible_folder_is_refused_before_measuring(
    tmp_path: Any, monkeypatch: Any, capsys: Any
) -> None:
    pytest.importorskip("tqdm")
    monkeypatch.setattr(
        "zfun.demo._hw_bench.measure_hardware", lambda *args, **options: pytest.fail("measured")
    )
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "hardware.json"
    assert cli.main(["hw-bench", str(tmp_path), "--out", str(out)]) == 2
    assert "where no file can be written" in capsys.readouterr().err
